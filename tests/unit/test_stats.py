"""The figures, against events written out by hand, and the sentence."""

from __future__ import annotations

import json

import pytest

from specdemo.decoding.events import Event, Finished, Prefilled, Round
from specdemo.racing.figures import counts_by_place, speed_up, speed_up_in_all
from specdemo.racing.outcome import Outcome
from specdemo.racing.verdict import LaneVerdict
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind
from tests.harness.classes import LaneFigures

from ..sentences import gist, tells

A, R, U = DraftOutcome.ACCEPTED, DraftOutcome.REJECTED, DraftOutcome.UNTESTED


def round_(outcomes: list[DraftOutcome], emitted: int, draft: float, verify: float, seconds: float) -> Round:
    drafted = tuple(DraftedToken(0, outcome, 0.5, 0.5, 0.5) for outcome in outcomes)
    return Round(0, drafted, (Token(0, TokenKind.ACCEPTED, 0.5),) * emitted, draft, verify, seconds)


PREFILLED = Prefilled(5, Token(1, TokenKind.TARGET, 0.5), 0.4)
RUN: list[Event] = [
    PREFILLED,
    round_([A, A, R, U], 3, 0.02, 0.10, 0.13),
    round_([A, A], 3, 0.04, 0.12, 0.17),
    round_([], 1, 0.0, 0.10, 0.10),
    Finished(FinishReason.EOS),
]


def lane(
    rounds: int, emitted: int, seconds: float, outcomes: list[DraftOutcome], draft: float = 0.0, verify: float = 0.1
) -> LaneFigures:
    """A lane of equal rounds whose prefill took no time."""
    prefilled = Prefilled(5, Token(1, TokenKind.TARGET, 0.5), 0.0)
    return LaneFigures.of([prefilled, *[round_(outcomes, emitted, draft, verify, seconds)] * rounds])


def test_the_figures_of_a_run_written_out_by_hand() -> None:
    figures = LaneFigures.of(RUN).as_dict()
    assert figures.pop("accepted_lengths") == {"2": 2}
    assert figures == pytest.approx(
        {
            "tokens": 8,
            "rounds": 3,
            "drafted": 6,
            "tested": 5,
            "accepted": 4,
            "seconds": 0.8,
            "ttft_seconds": 0.4,
            "prompt_seconds": 0.4,
            "draft_seconds": 0.06,
            "verify_seconds": 0.32,
            "other_seconds": 0.02,
            "prompt_tokens": 5,
            "finish_reason": "eos",
            "tokens_per_second": 7 / (0.8 - 0.4),  # its first draft took no longer than usual
            "acceptance_rate": 4 / 5,
            "draft_efficiency": 4 / 6,
            "tokens_per_round": 7 / 3,
            "draft_cost": 0.03 / 0.11,
        }
    )


@pytest.mark.parametrize(("plain", "speculative"), [(14, 63), (127, 9), (127, 63)])
def test_lanes_are_compared_behind_their_prompts_wherever_they_end(plain: int, speculative: int) -> None:
    """Both read the prompt in 2.5 s, the drafter in 1 s; drafting then halves the time of a token."""

    def ended(rounds: int, emitted: int, first: float = 0.0) -> LaneFigures:
        prefilled, outcomes = Prefilled(900, PREFILLED.token, 2.5), [A] * (emitted - 1)
        rows = [round_(outcomes, emitted, later, 0.1, later + 0.1) for later in (first, *[0.0] * (rounds - 1))]
        return LaneFigures.of([prefilled, *rows, Finished(FinishReason.EOS)])

    lanes = ended(plain, 1), ended(speculative, 2, first=1.0)
    assert [lane.tokens_per_second for lane in lanes] == pytest.approx([10, 20])
    assert speed_up(*lanes) == pytest.approx(2)
    words = race_verdict(*lanes)
    longest = max(lane.tokens for lane in lanes)
    whole = (2.5 + 0.1 * (longest - 1)) / (3.5 + 0.05 * (longest - 1))
    low, high = sorted((2.5 / (2.5 + 0.1 * (longest - 1)), 3.5 / (3.5 + 0.05 * (longest - 1))))
    assert speed_up_in_all(*lanes) == pytest.approx(whole)
    assert tells(words, f"2.00× writing, {whole:.2f}× all 2.0 Reading {low:.0%} {high:.0%}")
    assert tells(words, "short") == (plain < 15)


def race_verdict(plain: LaneFigures, speculative: LaneFigures) -> str:
    return LaneVerdict(plain, speculative).finding


def test_a_lane_without_a_speed_up_has_no_headline() -> None:
    nothing = LaneVerdict(LaneFigures(), LaneFigures())
    for verdicts in ({"speculative": nothing}, {}):
        assert Outcome({}, verdicts).ending()["headline"] == ""


def test_a_single_token_says_nothing_of_the_pace() -> None:
    ended = Finished(FinishReason.EOS)
    short = LaneFigures.of([PREFILLED, ended])
    long = LaneFigures.of([PREFILLED, round_([A, A], 3, 0.02, 0.1, 0.13), ended])
    assert speed_up(short, long) is None
    assert race_verdict(short, long) == race_verdict(short, short)
    assert speed_up(short, short) is None
    stopped = LaneFigures.of([PREFILLED])
    assert tells(race_verdict(short, long), "single")
    assert race_verdict(stopped, stopped) == race_verdict(stopped, long)
    assert tells(race_verdict(stopped, long), "Nothing")


@pytest.mark.parametrize(
    ("rounds", "rate", "efficiency", "lengths", "places"),
    [
        ([[R, U, U, U], [A, R, U, U]], 1 / 3, 1 / 8, [("0", 1), ("1", 1)], [(2, 1), (1, 0), (0, 0), (0, 0)]),
        ([[A, R, U], [A, A], [], [R]], 3 / 5, 3 / 6, [("0", 1), ("1", 1), ("2", 1)], [(3, 2), (2, 1), (0, 0)]),
        ([[A, A, A], [R, U], [], [A, R], [R]], 4 / 7, 1 / 2, [("0", 2), ("1", 1), ("3", 1)], [(4, 2), (2, 1), (1, 1)]),
        ([], None, None, [], []),
        ([[]], None, None, [], []),
    ],
)
def test_acceptance_is_of_the_tested_and_efficiency_of_the_drafted(
    rounds: list[list[DraftOutcome]],
    rate: float | None,
    efficiency: float | None,
    lengths: list[tuple[str, int]],
    places: list[tuple[int, int]],
) -> None:
    """Accepted lengths are in order and leave empty drafts out; the token of the prefill is of no round."""
    events: list[Event] = [PREFILLED, *(round_(found, found.count(A) + 1, 0.1, 0.1, 0.2) for found in rounds)]
    stats = LaneFigures.of(events)
    assert (stats.acceptance_rate, stats.draft_efficiency) == (rate, efficiency)
    assert [*stats.as_dict()["accepted_lengths"].items()] == lengths
    assert counts_by_place(events) == places
    emitted = sum(found.count(A) + 1 for found in rounds)
    assert stats.tokens_per_round == (emitted / len(rounds) if rounds else None)


def test_figures_that_do_not_exist_yet_are_none() -> None:
    fresh = LaneFigures().as_dict()
    assert {name for name, figure in fresh.items() if figure is None} == {
        *("tokens_per_second", "acceptance_rate", "draft_efficiency", "tokens_per_round", "draft_cost", "finish_reason")
    }
    assert fresh["tokens"] == fresh["seconds"] == fresh["other_seconds"] == 0


def test_a_lane_whose_clock_never_moved_divides_by_nothing() -> None:
    stopped = LaneFigures.of([Prefilled(1, PREFILLED.token, 0.0), round_([A], 2, 0.0, 0.0, 0.0)])
    assert stopped.tokens_per_second is None
    assert stopped.draft_cost is None
    assert tells(race_verdict(stopped, stopped), "Nothing compare")
    assert tells(
        race_verdict(lane(9, 1, 0.1, [], verify=0.0), lane(9, 2, 0.1, [A], draft=0.01, verify=0.0)), "tokens target"
    )


def test_rounds_that_auto_left_without_a_draft_do_not_make_drafts_look_cheap() -> None:
    rounds = [round_([], 1, 1e-6, 0.1, 0.1)] * 9 + [round_([R, U], 1, 0.3, 0.12, 0.42)]
    stats = LaneFigures.of([PREFILLED, *rounds * 5])
    assert stats.draft_cost == pytest.approx(0.3 / 0.12)
    plain = LaneFigures.of([PREFILLED, *[round_([], 1, 0.0, 0.1, 0.1)] * 50])
    assert tells(race_verdict(plain, stats), "5 50 300% 1.32 1.00")


def test_the_figures_after_every_event_are_those_of_the_events_so_far() -> None:
    running = LaneFigures()
    for end, event in enumerate(RUN, start=1):
        running.add(event)
        assert running.as_dict() == LaneFigures.of(RUN[:end]).as_dict()
        json.dumps(running.as_dict(), allow_nan=False)


def test_speed_up_is_the_ratio_of_tokens_a_second() -> None:
    plain, speculative = lane(9, 1, 0.1, []), lane(3, 3, 0.15, [A, A])
    assert speed_up(plain, speculative) == pytest.approx((9 / 0.45) / (9 / 0.9))
    assert plain.tokens_per_second == pytest.approx(10)
    assert speed_up(LaneFigures(), lane(3, 1, 0.1, [])) is None
    assert speed_up(lane(3, 1, 0.1, []), LaneFigures()) is None
    assert speed_up(ALONE, lane(30, 1, 0.08, [])) is None  # that is chance
    assert speed_up(ALONE, lane(30, 1, 0.08, [R])) == pytest.approx(1.25)


ALONE = lane(30, 1, 0.1, [])  # 31 tokens in 3 s


@pytest.mark.parametrize(
    ("speculative", "sentence"),
    [
        (lane(10, 3, 0.11, [A, A], draft=0.006), "2.73× 2.73× 3.0 6%"),
        (lane(10, 3, 0.135, [A, A], draft=0.0001, verify=0.13), "2.22× 2.22× 3.0 1% 30%"),
        (
            lane(10, 3, 0.2, [A, A], draft=0.006),  # half of it is neither drafting nor checking
            "1.50× 1.50× 3.0 6% 47%",
        ),
        (lane(30, 1, 0.2, [R], draft=0.1), "Slower 0.50× 0.50× 100% a 2.00 1.00 For"),
        (lane(30, 1, 0.101, [R], draft=0.002), "Tied 0.99× 0.99× 2% 1.00 2%"),
        (lane(30, 1, 0.08, [R], draft=0.01), "1.25× 1.25× 1.00 10% 1.00×"),
        (lane(30, 1, 0.1, []), "Nothing"),
        (lane(30, 1, 0.08, []), "Nothing 25%"),
        (LaneFigures(), "Nothing"),
    ],
    ids=range(9),
)
def test_the_sentence(speculative: LaneFigures, sentence: str) -> None:
    assert gist(race_verdict(ALONE, speculative)) == sentence


def raced(prompt: float, rounds: list[Round]) -> LaneFigures:
    return LaneFigures.of([Prefilled(5, PREFILLED.token, prompt), *rounds, Finished(FinishReason.LENGTH)])


def alone(tokens: int, prompt: float = 0.0) -> LaneFigures:
    return raced(prompt, [round_([], 1, 0.0, 0.1, 0.1)] * (tokens - 1))


def test_a_few_passes_say_nothing_of_what_drafting_and_checking_cost() -> None:
    def drafting(checks: int, check: float) -> str:
        rows = [round_([], 1, 0.0, 0.1, 0.1)] * 12 + [round_([A, R], 2, 0.1, check, check + 0.1)] * checks
        return race_verdict(alone(13 + 2 * checks), raced(0.0, rows))

    assert tells(drafting(4, 0.01), "1.25 4 16")
    assert tells(drafting(4, 0.5), "0.56× 2.25")
    assert tells(drafting(8, 0.5), "0.47× 8 20 400% 1.3 3.00 1.40")


def test_a_short_race_is_told_to_be_short() -> None:
    rounds = [round_([A], 2, 0.004, 0.18, 0.19)] * 4
    sentence = race_verdict(alone(9, prompt=0.1), raced(0.21, rounds))
    assert gist(sentence) == "1.05× 0.93× 2.0 Reading 11% 22% A"
    assert "short" in race_verdict(alone(15), raced(0.0, [round_([A], 2, 0.01, 0.1, 0.11)] * 7))
    assert "short" not in race_verdict(alone(17), raced(0.0, [round_([A], 2, 0.01, 0.1, 0.11)] * 8))


def test_a_long_prompt_explains_why_many_tokens_a_pass_gain_little() -> None:
    drafting = raced(6.0, [round_([A] * 7, 8, 0.001, 0.172, 0.175)] * 5)
    plain = alone(41, prompt=6.0)
    assert gist(race_verdict(plain, drafting)) == "4.57× 1.45× 8.0 1% 72% Reading 60% 87%"
    assert speed_up(plain, drafting) == pytest.approx((4.0 / 40) / (0.875 / 40))
    assert speed_up_in_all(plain, drafting) == pytest.approx(plain.seconds / drafting.seconds)  # as the clocks show it
    found = LaneVerdict(plain, drafting)
    outcome = Outcome({"plain": plain, "speculative": drafting}, {"speculative": found})
    both = outcome.speed_up, outcome.speed_up_in_all
    assert both == (found.speed_up, found.in_all) == (found.as_dict()["speed_up"], found.as_dict()["speed_up_in_all"])
    assert both == tuple(outcome.as_dict()[name] for name in ("speed_up", "speed_up_in_all"))
    assert outcome.ending()["speed_ups_in_all"] == {"speculative": found.in_all}
    assert (
        outcome.ending()["headline"] == "A pass gives 8.0 tokens and, with its draft, takes 1.75 times as long."
    )  # the words of the page, its card and its table
    assert speed_up_in_all(alone(41, prompt=6.0), alone(41)) is None  # nothing was drafted
