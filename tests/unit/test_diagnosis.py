"""What an examination means: figures against texts that were made to have them, the verdict, and flags."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from specdemo.cli import main as cli
from specdemo.decoding.events import Round, emitted_tokens
from specdemo.racing.compare import Comparison
from specdemo.servers.flags import FLAGS, Flags, k_flag
from specdemo.servers.steps import ServerReport
from specdemo.studies import theory
from specdemo.studies.diagnosis import WORTH, Diagnosis, _alpha, _best_k
from specdemo.studies.examination import LEAST_TEXTS, Examination, Sample
from specdemo.studies.prompts import Prompt
from specdemo.studies.study import LONG_PROMPTS, TOKEN_LETTERS, with_notes
from specdemo.studies.tables import json_text
from specdemo.studies.writers import _of_server
from specdemo.tokens import TokenKind

from ..fakes.writers import ALONE, DRAFTED, SMALL, Rounds, Scripted, events_of, examined, written
from ..sentences import gist, tells

# Figures ----------------------------------------------------------------------------------------------------


def test_every_part_is_measured_by_both_sides_in_turns() -> None:
    order: list[str] = []
    mine = Scripted(DRAFTED, 0.2, lambda _: order.append("mine"))
    alone = Scripted(ALONE, 0.1, lambda _: order.append("alone"))
    study, found = examined(mine, alone)
    texts = 1 + 8 + 2 * LEAST_TEXTS + LONG_PROMPTS
    assert len(mine.asked) == len(alone.asked) == texts
    assert sorted(order[:2]) == sorted(order[2:4]) == ["alone", "mine"]
    assert order[2:4] != order[4:6]  # the other side begins
    assert not found.left_out
    assert [row["kind"] for row in found.kinds] == [prompt.category for prompt in study.prompts]
    assert len({row["kind"] for row in found.kinds}) == 8
    assert [(row["at_once"], row["texts"]) for row in found.at_once] == [(1, LEAST_TEXTS), (2, LEAST_TEXTS)]
    assert [(row["context"], row["texts"]) for row in found.contexts] == [(300, LONG_PROMPTS)]
    assert [by_itself for _, by_itself in mine.asked].count(False) == LEAST_TEXTS  # two at once are not alone


def test_the_figures_of_known_texts() -> None:
    _, found = examined(Scripted(DRAFTED, 0.2), Scripted(ALONE, 0.1))
    rows = found.positions
    assert [(row["position"], row["drafts"], row["tested"], row["accepted"]) for row in rows] == [
        (1, 8 * 4, 8 * 4, 8 * 3),
        (2, 8 * 4, 8 * 3, 8 * 2),
        (3, 8 * 4, 8 * 2, 8 * 1),
        (4, 8 * 4, 8 * 1, 8 * 1),
    ]
    assert [row["conditional"].mean for row in rows] == pytest.approx([3 / 4, 2 / 3, 1 / 2, 1])
    assert [row["unconditional"].mean for row in rows] == pytest.approx([3 / 4, 2 / 4, 1 / 4, 1 / 4])
    assert found.often == pytest.approx(4 / 5)
    assert found.tokens_per_round is not None
    assert found.tokens_per_round.mean == pytest.approx(12 / 5)
    assert found.round["cost"].mean == pytest.approx(2)
    assert (found.round["ms"], found.round["baseline_ms"]) == pytest.approx((200, 100))
    assert found.break_even["tokens_per_round"] == pytest.approx(2)
    assert found.speed_up is not None
    assert found.speed_up.mean == pytest.approx(2.4 / 2)
    assert tells(found.verdict, "1.20 2.40 2.00")
    assert found.texts == {"compared": 12, "same": 12, "differences": []}
    assert tells(found.advice(), "12 speculation")


ROUND = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda pair: (pair[0], min(pair)))
TEXTS = st.lists(st.tuples(st.lists(ROUND, min_size=1, max_size=12), st.floats(0.01, 3)), min_size=1, max_size=4)


@given(TEXTS, st.floats(0.01, 1))
def test_figures_add_up_whatever_the_texts_are(texts: Sequence[tuple[Rounds, float]], alone_seconds: float) -> None:
    study = Examination(Scripted(DRAFTED, 1), Scripted(ALONE, alone_seconds), SMALL)
    for number, (rounds, seconds) in enumerate(texts):
        prompt = Prompt(f"p{number}", "kind", "Hi")
        study.samples.append(Sample(prompt, written(rounds, seconds), written(ALONE, alone_seconds)))
    found = Diagnosis(study)
    drafts = sum(drafted > 0 for rounds, _ in texts for drafted, _ in rounds)
    for place, row in enumerate(found.positions):
        assert row["drafts"] == drafts
        assert row["accepted"] == sum(accepted > place for rounds, _ in texts for _, accepted in rounds)
        if place:  # those tested at a place have passed all before it
            assert row["tested"] <= found.positions[place - 1]["accepted"]
        assert row["accepted"] <= row["tested"] <= row["drafts"]
        assert row["unconditional"].mean == pytest.approx(row["accepted"] / drafts)
    assert found.often == pytest.approx(drafts / sum(len(rounds) for rounds, _ in texts))
    assert found.tokens_per_round is not None
    if len(texts) == 1 and drafts:  # the break-even is where the speed-up is 1: both say the same
        cost = found.break_even["tokens_per_round"]
        assert cost is not None
        assert found.speed_up is not None
        assert found.speed_up.mean == pytest.approx(found.tokens_per_round.mean / cost)
    assert found.verdict
    assert json.loads(json_text(found.as_dict()))["samples"][0]["prompt"] == "p0"


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12).map(lambda reached: sorted(reached, reverse=True)),
    st.floats(0.2, 8),
    st.floats(0.01, 1),
)
def test_the_k_that_is_named_is_the_fastest_of_its_model(reached: list[float], cost: float, often: float) -> None:
    longest = len(reached)
    best = _best_k(reached, cost, often)
    assert best is not None
    each = (cost - 1) / often / longest

    def speed(k: int) -> float:
        return (1 + sum(reached[:k])) / max(1 + each * k, 1e-9)

    assert all(speed(k) <= speed(best) * (1 + WORTH) + 1e-9 for k in range(longest + 1))
    assert best == longest or speed(best) > speed(longest) * (1 + WORTH)
    assert _best_k([0.0] * longest, 1 + 2 * WORTH * longest, 1.0) == 0  # drafts that never pass cost something
    assert _best_k(reached, 1.0, often) == longest  # and those that cost nothing are all to be had


@given(st.floats(0.5, 8), st.floats(0.05, 1), st.integers(1, 10))
def test_at_the_break_even_rate_a_round_brings_what_it_costs(cost: float, often: float, k: int) -> None:
    alpha = _alpha(cost, often, k)
    if alpha is None:
        assert 1 + often * k < cost + 1e-9  # not even if all passed
        return
    tokens = 1 + often * (theory.expected_tokens(alpha, k) - 1)
    assert tokens == pytest.approx(cost, abs=1e-6) or (alpha == 0 and cost <= 1)


def test_what_a_server_keeps_to_itself_stays_unknown() -> None:
    report = ServerReport(rounds=4, drafted=16, accepted=7, by_position=(3, 2, 1, 1))
    merged = [*events_of([(0, 0)] * 11, 0.1)]
    unknown = [
        replace(event, emitted=tuple(replace(token, kind=TokenKind.UNKNOWN) for token in event.emitted))
        if isinstance(event, Round)
        else event
        for event in merged
    ]
    tokens = [token for event in unknown for token in emitted_tokens(event)]
    text = _of_server(unknown, tokens, report)
    assert (text.rounds, text.drafts, text.drafted) == (12 - 1 - 7, 4, 16)
    assert text.places == [(4, 3), (3, 2), (2, 1), (1, 1)]
    shorter = _of_server(unknown, tokens, replace(report, drafted=13))  # then it is unknown which places were tested
    assert shorter.places == [(None, 3), (None, 2), (None, 1), (None, 1)]
    nothing = _of_server(unknown, tokens, ServerReport())
    assert (nothing.drafts, nothing.places) == (None, None)
    study = Examination(Scripted(DRAFTED, 1), None, SMALL)
    study.samples = [Sample(study.prompts[0], shorter, None)]
    found = Diagnosis(study)
    assert [row["conditional"] for row in found.positions] == [None] * 4
    assert tells(found.verdict, "target alone whether")
    study.samples = [Sample(study.prompts[0], nothing, None)]
    assert tells(Diagnosis(study).advice(), "Start accepted")


# Words --------------------------------------------------------------------------------------------------------


def advice(rounds: Rounds, seconds: float, alone: Rounds = ALONE) -> tuple[str, str]:
    _, found = examined(Scripted(rounds, seconds), Scripted(alone, 0.1), replace(SMALL, at_once=(), contexts=()))
    return found.verdict, "\n".join(found.advice())


@pytest.mark.parametrize(
    ("rounds", "seconds", "verdict", "words"),
    [
        ([(0, 0)] * 11, 0.1, "Nothing drafted:", "--spec-type ngram-simple"),
        ([(4, 0)] * 11, 0.2, "0.50 1.00 2.00", "draft 4 tokens leave"),
        ([(8, 1), (8, 1), (8, 1), (8, 2)], 0.4, "0.56 2.25 4.00", "K 1 8: --spec-draft-n-max"),
        ([(2, 2)] * 4, 0.11, "2.73 3.00 1.10", "longer K 4: --spec-draft-n-max"),
        ([(0, 0)] * 9 + [(2, 1)], 0.1, "1.10 1.10 1.00", "10%"),
        ([(3, 2), (3, 1), (3, 3)], 0.6, "0.50 3.00 6.00", "cause: round long"),
    ],
)
def test_the_verdict_and_the_flag(rounds: Rounds, seconds: float, verdict: str, words: str) -> None:
    said, advised = advice(rounds, seconds)
    assert tells(said, verdict)
    assert tells(advised, words)


def test_texts_that_part_are_told_with_their_margin() -> None:
    study = Examination(Scripted(DRAFTED, 0.1), Scripted(ALONE, 0.1), SMALL)
    text = written(DRAFTED, 0.1)
    for gap, number in ((0.02, 3), (4.0, 0), (None, 1)):
        comparison = Comparison(False, number, gap)
        study.samples.append(Sample(Prompt(f"p{number}", "kind", "Hi"), text, text, comparison))
    lines = Diagnosis(study).advice()
    assert "3 3" in map(gist, lines)
    assert any(tells(line, "p3: 4 0.02") for line in lines)
    assert any(tells(line, "4 more report") for line in lines)
    assert tells(lines, "p1 2")


def test_a_crowd_and_long_prompts_that_slow_it_down_are_told() -> None:
    study = Examination(Scripted(DRAFTED, 0.1), Scripted(ALONE, 0.1), SMALL)
    study.at_once = [{"at_once": count, "speed_up": ratio} for count, ratio in ((1, 1.5), (8, 2 / 3))]
    for context, seconds in ((256, 0.1), (1024, 0.2)):
        pair = written(DRAFTED, seconds), written(ALONE, 0.1)
        study.samples.append(Sample(study.prompts[0], *pair, context=context))
    lines = Diagnosis(study).advice()
    assert any(tells(line, "8 requests slower slots") for line in lines)
    assert any(tells(line, "speed-up 50%") for line in lines)


def test_notes_make_a_prompt_as_long_as_it_is_to_be() -> None:
    for tokens in (100, 2000):
        text = with_notes("Which is the longest?", tokens, 1)
        assert len(text) == pytest.approx(tokens * TOKEN_LETTERS, rel=0.2)
        assert text.endswith("Which is the longest?")
    assert with_notes("Why?", 300, 0) != with_notes("Why?", 300, 1)


# Flags --------------------------------------------------------------------------------------------------------


def test_llamacpp_knows_the_flags_that_are_named() -> None:
    found = find_spec("xllamacpp")
    if found is None or found.origin is None:
        pytest.skip("there is no xllamacpp")
    flags = {flag for words in vars_of(FLAGS["llama.cpp"]) for flag in re.findall(r"--[a-z][a-z-]+", words)}
    assert "--spec-draft-n-max" in flags
    with next(Path(found.origin).parent.glob("*.so")).open("rb") as file:
        library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert not [flag for flag in flags if library.find(f"{flag}\0".encode()) < 0]


def test_the_command_line_knows_its_own_flags() -> None:
    options = {name for option in get_command(cli.app).commands["race"].params for name in option.opts}  # type: ignore[attr-defined]
    for words in vars_of(FLAGS["specdemo"]):
        assert {*re.findall(r"(?<![\w-])--?[a-z]+", words)} <= options
    assert FLAGS["specdemo"].on == "--drafter prompt-lookup -k 4, or --drafter eagle -k 4"
    assert k_flag("SGLang", 3).startswith("--speculative-num-steps 3 --speculative-num-draft-tokens 4")
    assert k_flag("vLLM", 3) == '"num_speculative_tokens": 3 in --speculative-config'


def vars_of(flags: Flags) -> list[str]:
    return [*flags.drafters.values(), flags.k, flags.more_often, flags.off, flags.crowd, flags.more_reported]
