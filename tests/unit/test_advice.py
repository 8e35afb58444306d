"""What is said of a drafted lane: the figures add up, and no advice contradicts them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdemo.decoding.events import Event, Finished, Prefilled, Round
from specdemo.engines.memory_rate import memory_rate
from specdemo.racing.bandwidth import memory_share, weight_bytes
from specdemo.racing.compare import Comparison
from specdemo.racing.figures import alpha_for, speed_up
from specdemo.racing.outcome import Outcome
from specdemo.racing.race import race
from specdemo.racing.request import PLAIN, SPECULATIVE, DraftedLane
from specdemo.racing.summary import summary
from specdemo.racing.verdict import LaneVerdict, noise
from specdemo.racing.words import sentence, sentences
from specdemo.settings import AUTO, Settings
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind
from tests.harness.classes import LaneFigures
from tests.harness.doubles import PROMPT
from tests.harness.toys import alike_toy

from ..sentences import gist, tells

A, R, U = DraftOutcome.ACCEPTED, DraftOutcome.REJECTED, DraftOutcome.UNTESTED
PASS = 0.01
EAGLE = DraftedLane("eagle", 4)


def round_(k: int, accepted: int, draft: float = 0.0, verify: float = PASS, other: float = 0.0) -> Round:
    """A round with a draft of k tokens, the first of which pass, on a clock in seconds."""
    outcomes = ([A] * accepted + [R] + [U] * k)[:k]
    drafted = tuple(DraftedToken(0, outcome) for outcome in outcomes)
    emitted = (Token(0, TokenKind.ACCEPTED),) * accepted + (Token(0, TokenKind.RESAMPLED),)
    return Round(0, drafted, emitted, draft, verify, draft + verify + other)


def run(rounds: list[Round], prompt_tokens: int = 5) -> LaneFigures:
    events: list[Event] = [Prefilled(prompt_tokens, Token(1, TokenKind.TARGET), 0.0), *rounds]
    return LaneFigures.of([*events, Finished(FinishReason.LENGTH)])


def alone(passes: int = 99, seconds: float = PASS, other: float = 0.0) -> LaneFigures:
    return run([round_(0, 0, 0.0, seconds, other)] * passes)


def figures(rounds: list[Round], asked: DraftedLane | None = EAGLE, plain: LaneFigures | None = None) -> LaneVerdict:
    return LaneVerdict(plain or alone(), run(rounds), asked)


def action(found: LaneVerdict) -> str:
    return sentence("advice", found)


def numbers(found: LaneVerdict, **environment: Any) -> list[tuple[str, str]]:
    return [*sentences("numbers", replace(found, environment=environment)).items()]


def notes(found: LaneVerdict, same: bool | None = None, exact_rows: int = 0) -> list[str]:
    comparison = None if same is None else Comparison(same, None if same else 3)
    judged = replace(found, comparison=comparison, environment={"exact_rows": exact_rows})
    return judged.as_dict()["notes"]


def race_verdict(plain: LaneFigures, lane: LaneFigures, asked: DraftedLane | None = None) -> str:
    return LaneVerdict(plain, lane, asked).finding


def by_words(rows: list[Any], words: str) -> list[str]:
    """The numbers whose name tells these words."""
    return [value for name, value in rows if tells(name, words)]


# The figures ------------------------------------------------------------------------------------------------


def test_what_another_k_would_give_is_computed_from_the_same_rounds() -> None:
    """Written out: at K = 1 every round emits two tokens, for a quarter of the rows and, one by one, of the draft."""
    rounds = [round_(4, 1, draft=0.008, verify=0.014, other=0.001)] * 50
    one_by_one, at_once = figures(rounds).by_k, figures(rounds, DraftedLane("block", 4)).by_k
    assert one_by_one[0] == pytest.approx(2 * PASS / (0.002 + 0.011 + 0.001))
    assert at_once[0] == pytest.approx(2 * PASS / (0.008 + 0.011 + 0.001))
    assert one_by_one[3] == at_once[3] == pytest.approx(figures(rounds).speed_up)
    assert len(one_by_one) == 4  # the last place was never tested, so nothing is known of longer drafts


def test_longer_drafts_go_on_as_the_last_place_did() -> None:
    found = figures([round_(2, 2, 0.002, 0.012), round_(2, 1, 0.002, 0.012)] * 30, DraftedLane("eagle", 2))
    assert found.by_k[2] == pytest.approx((1 + 1 + 0.5 + 0.25) / (1 + 3 * 0.2))
    assert len(found.by_k) == 4
    assert gist(action(figures([round_(2, 2, 0.001)] * 40, DraftedLane("ngram", 2)))) == "Try K 4 100%"
    assert action(figures([round_(16, 16, 0.001)] * 40, DraftedLane("ngram", 16))) == ""


def test_the_formula_gets_the_costs_of_the_race() -> None:
    """Written out: drafts of 4 at 0.8 of a pass, and checks that take 1.4."""
    rounds = [round_(4, 1, draft=0.008, verify=0.014)] * 50
    found = {"k": 4, "acceptance": 0.5, "draft": 0.2, "row": 0.1, "at_once": False, "gigabytes": 0}
    assert figures(rounds).formula == pytest.approx(found)
    assert figures(rounds, DraftedLane("block", 4)).formula == pytest.approx({**found, "draft": 0.8, "at_once": True})
    one = figures([round_(4, 1, verify=0.009)] * 50).formula
    assert one is not None
    assert (one["draft"], one["row"]) == (0, 0)  # a pass that is quicker is timing noise
    tree = [replace(row, drafted=tuple(replace(token, parent=-1) for token in row.drafted)) for row in rounds]
    assert [figures(of).formula for of in (rounds[:2], tree, [round_(0, 0)] * 50)] == [None] * 3


@pytest.mark.parametrize("asked", [None, DraftedLane("eagle", AUTO), DraftedLane("the server's own", 4)])
def test_no_k_is_compared_where_k_or_the_drafter_is_not_known(asked: DraftedLane | None) -> None:
    assert (figures([round_(4, 1, 0.02)] * 50, asked).by_k, figures([round_(4, 1)] * 50, asked).best) == ([], (0, 0.0))


def test_trees_have_no_places_and_no_k() -> None:
    row = round_(3, 1)
    tree = replace(row, drafted=tuple(replace(token, parent=-1) for token in row.drafted))
    found = figures([tree] * 40)
    assert (found.by_k, found.needed_acceptance) == ([], None)
    assert [len(by_words(numbers(one), "each position,")) for one in (figures([row]), found)] == [2, 0]


@pytest.mark.parametrize(
    ("tokens", "k", "alpha"), [(1, 4, 0), (5, 4, 1), (1.5, 1, 0.5), (1.75, 2, 0.5), (5.1, 4, None)]
)
def test_the_acceptance_rate_that_a_round_needs(tokens: float, k: int, alpha: float | None) -> None:
    found = alpha_for(tokens, k)
    assert found is alpha if alpha is None else found == pytest.approx(alpha, abs=1e-8)


def test_noise_is_that_of_passes_that_do_the_same_work() -> None:
    steady, shaky = alone(), run([round_(0, 0, 0.0, PASS * (1 + i % 2)) for i in range(100)])
    lane = run([round_(4, 1, 0.001)] * 100)
    assert noise(steady, lane) == pytest.approx(0.02)
    assert noise(shaky, lane) == pytest.approx(2 * (1 / 3) * (2 / 100) ** 0.5, rel=0.01)


# What is said -----------------------------------------------------------------------------------------------


def test_it_says_why_and_what_to_do() -> None:
    slow = [round_(4, n, 0.0117, 0.0143) for n in (4, 1, 1, 0, 1, 2)] * 10
    assert (
        gist(race_verdict(alone(), run(slow), EAGLE))
        == "Slower 0.96× 0.96× 117% a 2.60 2.50 Try K 1 1.31× prompt-lookup"
    )


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (round_(4, 0, draft=0.005, verify=0.011), "draft 50%"),
        (round_(4, 0, verify=0.018), "checking 80% 5.0"),
        (round_(4, 0, other=0.0055), "35% neither"),
        (round_(4, 0, draft=0.0005), "only 0% 5%"),
    ],
)
def test_the_largest_cost_is_the_reason(row: Round, cause: str) -> None:
    assert tells(sentence("why", figures([row] * 40)), cause)
    assert tells(race_verdict(alone(), run([row] * 40), EAGLE), "like alone")


def test_a_nearly_free_drafter_is_advised_where_it_could_pay() -> None:
    slow = [round_(2, 1, draft=0.022)] * 40
    assert tells(action(figures(slow, DraftedLane("draft-model", 2))), "Try prompt-lookup nearly")
    assert "nearly" not in action(figures(slow, DraftedLane("ngram", 2)))
    assert "nearly" not in action(figures([round_(2, 0, draft=0.022)] * 40))  # it would be no faster for nothing


def test_what_is_within_the_noise_is_a_tie_without_advice() -> None:
    shaky = run([round_(0, 0, 0.0, PASS * (1 + i % 2)) for i in range(100)])
    lane = run([round_(1, 1, 0.0, 0.028)] * 40)
    assert gist(race_verdict(shaky, lane, DraftedLane("ngram", 1))) == "Tied 1.07× 1.07× 13% 2.0 1% 87%"


def test_lanes_within_the_noise_of_each_other_are_tied() -> None:
    rows = {"eagle:4": round_(4, 3, 0.01), "ngram:4": round_(4, 2, 0.0052), "draft-model:1": round_(1, 1, 0.006)}
    verdicts = {name: LaneVerdict(alone(), run([row] * 40)) for name, row in rows.items()}
    words = sentence("race", Outcome({}, verdicts))
    assert tells(words, "eagle:4 ngram:4 2.00× 4.0")
    assert tells(words, "draft-model:1 100%")
    assert sentence("race", Outcome({}, {"eagle:4": verdicts["eagle:4"]})) == verdicts["eagle:4"].finding
    nothing = LaneVerdict(run([]), run([]))
    verdict = sentence("race", Outcome({}, {"a": nothing, "b": nothing}))
    assert tells(verdict, "lane a.")
    assert verdict.endswith(nothing.finding)


FALLS = [round_(4, 4)] * 20 + [round_(4, 0)] * 20
SLOWING = [round_(0, 0, 0.0, PASS * (1 + i / 100)) for i in range(80)]


def test_notes_tell_what_changes_along_the_text() -> None:
    assert [*map(gist, notes(figures(FALLS)))] == ["Acceptance 100% 0%"]
    assert notes(figures(FALLS[::-1])) == []
    assert notes(figures([round_(2, 2)] * 3 + [round_(2, 1)] * 3)) == []  # chance
    (note,) = notes(figures([round_(4, 3)] * 40, plain=run(SLOWING, prompt_tokens=1000)))
    assert tells(note, "55% quarter")
    assert tells(note, "1,081 grown")
    assert notes(figures([round_(4, 3)] * 40, plain=run(SLOWING))) == []  # so short a context does not explain it


@pytest.mark.parametrize(
    ("same", "exact_rows", "expected"),
    [
        (False, 3, ["The on 5 K 2"]),
        (False, 0, ["The on 5"]),
        (False, 5, []),
        (True, 3, []),
        (None, 3, []),
    ],
)
def test_a_text_that_parts_on_an_engine_that_is_not_exact(
    same: bool | None, exact_rows: int, expected: list[str]
) -> None:
    found = figures([round_(4, 3)] * 40)
    assert [*map(gist, notes(found, same, exact_rows))] == expected
    found.lane.finish_reason = None  # stopped: it is only shorter
    assert notes(found, same, exact_rows) == []


def test_what_a_server_does_not_tell_is_left_out() -> None:
    rounds = [replace(row, draft_seconds=None, verify_seconds=None) for row in [round_(4, 1, 0.02)] * 50]
    plain = run([replace(row, draft_seconds=None, verify_seconds=None) for row in [round_(0, 0)] * 50])
    found = LaneVerdict(plain, run(rounds))
    assert gist(found.finding) == "Slower 0.67× 0.67× a 3.00 2.00 For"
    assert len([name for name, _ in numbers(found) if tells(name, "time round")]) == 1  # not what it is spent on
    merged = [replace(round_(0, 0), emitted=(Token(None, TokenKind.UNKNOWN),) * 3, merged=2)] * 20
    json.dumps(LaneVerdict(alone(), run(merged)).as_dict(), allow_nan=False)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8), *(st.floats(low, 0.05) for low in (0, 0.005, 0))),
        min_size=1,
        max_size=30,
    ),
    repeat=st.integers(1, 4),
    k=st.integers(1, 8),
    name=st.sampled_from(["eagle", "block", "ngram", "draft-model"]),
    passes=st.lists(st.floats(0.005, 0.02), min_size=1, max_size=8),
)
def test_advice_never_contradicts_the_figures(
    rows: list[tuple[int, int, float, float, float]], repeat: int, k: int, name: str, passes: list[float]
) -> None:
    rounds = [round_(min(n, k), min(a, n, k), d if n else 0.0, v, o) for n, a, d, v, o in rows] * repeat
    plain, lane = run([round_(0, 0, 0.0, seconds) for seconds in passes * 5]), run(rounds)
    found, asked = LaneVerdict(plain, lane, DraftedLane(name, k)), DraftedLane(name, k)
    assert found.speed_up == speed_up(plain, lane)
    if found.speed_up is None:
        return
    assert 1 + sum(found.parts.values()) == pytest.approx(found.needed)
    advised = re.match(r"Try K = (\d+)", action(found))
    if found.by_k:
        assert found.by_k[k - 1] == pytest.approx(found.speed_up)
        assert found.best[1] == max(found.by_k)
    if advised:
        speed = found.by_k[int(advised[1]) - 1]
        assert speed == max(found.by_k) > max(found.speed_up, 1.0) * (1 + found.noise)
    elif action(found):
        assert found.speed_up < 1 - found.noise
        assert all(speed < max(1.05, 1 + found.noise) for speed in found.by_k)
    words = race_verdict(plain, lane, asked)
    if needs := re.search(r"needs (\d+\.\d\d)\D+(\d+\.\d\d)", words):
        assert found.side < 0
        assert float(needs[1]) >= float(needs[2])
    if rates := re.search(r"few\D+(\d+)%\D+(\d+)%", words):
        assert int(rates[1]) <= int(rates[2])
    assert words.startswith("Tied") == (abs(found.speed_up - 1) <= found.noise)
    json.dumps(LaneVerdict(plain, lane, asked).as_dict(), allow_nan=False)


# Races that were run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_race_is_judged_by_its_own_rounds(temperature: float, tmp_path: Any) -> None:
    toy: Any = alike_toy(tmp_path)
    settings = Settings(temperature=temperature, k=3, max_new_tokens=60, seed=3)
    entries = list(race(toy, "draft-model", PROMPT, settings))
    found = summary(toy, PROMPT, settings, entries, {SPECULATIVE: DraftedLane("draft-model", 3)})
    verdict = found["verdicts"][SPECULATIVE]
    assert found["sentence"] == verdict["sentence"]
    assert {gist(note).split()[0] for note in verdict["notes"][:1]} <= {"Acceptance", "A"}
    lanes = {lane: LaneFigures.of(e.event for e in entries if e.lane == lane) for lane in (PLAIN, SPECULATIVE)}
    judged = LaneVerdict(lanes[PLAIN], lanes[SPECULATIVE], DraftedLane("draft-model", 3))
    assert [tuple(row) for row in verdict["numbers"]] == numbers(judged)
    assert by_words(verdict["numbers"], "tokens round")[0] == f"{lanes[SPECULATIVE].tokens_per_round:.2f}"
    assert len(judged.by_k) >= 3
    assert judged.by_k[2] == pytest.approx(judged.speed_up)


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({"placement": {"cuda:0": 30, "cpu": 12}, "bytes_per_pass": 40}, 40),
        ({"placement": {"cuda:0": 30, "cpu": 12}}, 42),  # an older trace
        ({"placement": {"cpu": "much"}}, None),
        ({"bytes_per_pass": True}, None),
        ({}, None),
    ],
)
def test_the_bytes_of_a_pass_are_read_from_a_trace(environment: dict[str, Any], size: int | None) -> None:
    assert weight_bytes(environment) == size
    shown = by_words(numbers(figures([round_(4, 3)] * 40), bytes_per_pass=size and size * 10**9), "weights pass,")
    assert shown == ([f"{size}.000 GB, {size * 100:.1f} GB/s"] if size else [])


def test_the_numbers_say_how_close_a_pass_is_to_what_the_memory_allows() -> None:
    found = figures([round_(4, 3)] * 40)
    for rate, share in ((4e11, "75%"), (2e11, "100%")):  # the memory may have been faster during the race
        rows = numbers(found, placement={"cpu": 3 * 10**9}, memory_rate=rate)
        assert by_words(rows, "weights pass,") == ["3.000 GB, 300.0 GB/s"]
        assert by_words(rows, "memory's speed")[0].startswith(f"{share} alone, ")
        alone, drafted = (f"{3 * (lane.rounds + 1):.1f} GB" for lane in (found.plain, found.lane))
        assert by_words(rows, "weights text")[0].startswith(f"{alone} alone, {drafted} ")


@pytest.mark.parametrize(
    ("environment", "shares"),
    [
        ({"placement": {"cpu": 3 * 10**9}, "memory_rate": 4e11}, [0.75, 0.375, None]),
        ({"placement": {"cpu": 3 * 10**9}, "memory_rate": 2e11}, [1.0, 0.75, None]),
        ({"placement": {"cpu": 3 * 10**9}}, [None] * 3),
        ({"placement": {"cuda:0": 10**9, "cpu": 2 * 10**9}, "memory_rate": 4e11}, [None] * 3),  # two memories
        ({"placement": {"cpu": 3 * 10**9}, "memory_rate": "fast"}, [None] * 3),  # a file may say anything
        ({"memory_rate": 4e11}, [None] * 3),
    ],
)
def test_each_lane_has_its_share_of_what_the_memory_allows_where_that_is_known(
    environment: dict[str, Any], shares: list[float | None]
) -> None:
    lanes = {"plain": alone(), "slower": alone(seconds=2 * PASS), "short": alone(4)}
    assert [memory_share(lane, environment) for lane in lanes.values()] == shares


def test_the_memory_is_measured_for_weights_that_do_not_fit_in_caches() -> None:
    cpu = torch.device("cpu")
    assert memory_rate(cpu, 10**7) is None
    assert 1e8 < (memory_rate(cpu, 10**9) or 0) < 1e13


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_race_keeps_its_result_where_there_is_no_room_to_measure_the_memory(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def full(*shape: int, **options: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "ones", full)
    assert memory_rate("cpu", 10**9) is None
