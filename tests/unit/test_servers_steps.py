"""Rounds from streams: recorded ones, and made ones of which the truth is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.decoding.events import Finished, Prefilled, Round, emitted_tokens, text_of
from specdemo.errors import BadInput
from specdemo.racing.compare import OWN_DRAFTER, first_difference, tokens_of
from specdemo.racing.explained import explained
from specdemo.racing.figures import counts_by_place
from specdemo.racing.request import Request
from specdemo.racing.trace import Entry, read_trace, write_trace
from specdemo.servers import sglang, vllm
from specdemo.servers.llamacpp import LlamaCppEvent, llamacpp_steps
from specdemo.servers.steps import ServerReport, Step, events_of, steps_of, with_drafts
from specdemo.settings import Settings
from specdemo.tokens import DraftOutcome, FinishReason, TokenKind
from tests.harness.classes import LaneFigures

from ..fakes.server import Chunk, recorded, sent
from ..sentences import refuses, tells

ACCEPTED, RESAMPLED, BONUS = TokenKind.ACCEPTED, TokenKind.RESAMPLED, TokenKind.BONUS
TARGET, UNKNOWN = TokenKind.TARGET, TokenKind.UNKNOWN


def entries_of(steps: list[Step], report: ServerReport) -> list[Entry]:
    entries = [Entry("server", event) for event in events_of(steps, report)]
    assert read_trace(write_trace({"lanes": [{"name": "server"}]}, entries))[1] == entries
    return entries


def of_llamacpp(name: str) -> tuple[dict[str, Any], ServerReport, list[Entry]]:
    head, chunks = recorded(name)
    return head, *of_chunks(chunks, head["max_new_tokens"])


def of_chunks(chunks: list[Chunk], most: int) -> tuple[ServerReport, list[Entry]]:
    report = ServerReport()
    return report, entries_of([*llamacpp_steps(sent(LlamaCppEvent, chunks), most, report)], report)


def kinds(entries: list[Entry]) -> list[TokenKind]:
    return [token.kind for entry in entries for token in emitted_tokens(entry.event)]


def text(entries: list[Entry]) -> str:
    return "".join(text_of(entry.event) for entry in entries)


def test_the_rounds_of_a_recorded_text_are_those_that_the_server_counted() -> None:
    head, report, entries = of_llamacpp("llamacpp-ngram")
    stats, counted = LaneFigures.of(entry.event for entry in entries), head["counters"]
    assert (stats.tokens, stats.drafts, stats.drafted, stats.accepted) == tuple(
        counted[name] for name in ("tokens", "rounds", "drafted", "accepted")
    )
    places = [accepted for _, accepted in counts_by_place(entry.event for entry in entries)]
    assert places == counted["by_position"]
    assert text(entries).startswith("Pancakes: Melt butter in a pan")
    assert report.server_seconds == pytest.approx(stats.seconds, abs=1e-5)
    assert report.first_seconds is not None
    assert report.seconds is not None
    assert 0 < report.first_seconds < report.seconds
    assert report.seconds - (report.server_seconds or 0) < 0.1
    drafted = [token for entry in entries if isinstance(entry.event, Round) for token in entry.event.drafted]
    assert all(token.p is token.q is token.draw is None for token in drafted)
    assert all((token.id is None) == (token.outcome is not DraftOutcome.ACCEPTED) for token in drafted)
    assert stats.draft_seconds is stats.verify_seconds is stats.other_seconds is None


def test_a_text_that_ends_inside_a_round() -> None:
    _, report, entries = of_llamacpp("llamacpp-ended")
    assert kinds(entries) == [TARGET] * 3 + [ACCEPTED] * 5  # no bonus: the fifth ended the text
    assert entries[-1].event == Finished(FinishReason.EOS)
    assert (report.drafted, report.accepted) == (5, 5)


def test_a_stop_string_inside_a_round_leaves_guesses_untested() -> None:
    head, _, entries = of_llamacpp("llamacpp-stopped")
    assert entries[-1].event == Finished(FinishReason.STOP)
    last = entries[-2].event
    assert isinstance(last, Round)
    assert len(last.drafted) == len(last.emitted) == 5
    assert text(entries) == "1 2 3 4 5 "
    assert LaneFigures.of(entry.event for entry in entries).accepted == head["counters"]["accepted"]


def test_rounds_that_end_inside_a_character_are_counted_and_not_guessed() -> None:
    head, report, entries = of_llamacpp("llamacpp-characters")
    stats = LaneFigures.of(entry.event for entry in entries)
    assert text(entries).startswith("🦄🐉 is not 🦄🐉 and")
    assert stats.tokens == head["counters"]["tokens"]
    assert stats.rounds == stats.tokens - 1 - head["counters"]["accepted"]
    assert (report.drafted, report.accepted) == (head["counters"]["drafted"], head["counters"]["accepted"])
    assert stats.drafted is stats.accepted is None  # what each of the merged ones drafted is unknown
    assert UNKNOWN in kinds(entries)
    assert any(token.id is None for entry in entries for token in emitted_tokens(entry.event))


def test_vllms_lists_leave_out_rounds_without_a_draft_so_its_kinds_are_unknown() -> None:
    head, chunks = recorded("vllm-detailed")
    report = ServerReport()
    steps = steps_of(vllm.pieces(sent(vllm.VLLMEvent, chunks), report), head["max_new_tokens"], report)
    assert report.lists == ((4, 0, 2), (4, 4, 4))
    entries = entries_of(with_drafts(steps, report), report)
    assert kinds(entries) == [TARGET, *[UNKNOWN] * 9]
    assert len(report.notes) == 1
    stats, counted = LaneFigures.of(entry.event for entry in entries), head["counters"]
    assert (stats.tokens, stats.prompt_tokens) == (counted["tokens"], head["prompt_tokens"])
    assert stats.drafted is stats.accepted is None
    assert (report.rounds, report.drafted, report.accepted) == tuple(
        counted[name] for name in ("rounds", "drafted", "accepted")
    )
    assert text(entries) == head["text"]


def test_sglang_tells_totals_so_its_kinds_are_unknown() -> None:
    head, chunks = recorded("sglang-chain")
    report = ServerReport()
    steps = steps_of(sglang.pieces(sent(sglang.SGLangEvent, chunks), report), 12, report)
    entries = entries_of(with_drafts(steps, report), report)
    assert kinds(entries) == [TARGET, *[UNKNOWN] * 11]
    assert (report.rounds, report.drafted, report.accepted) == tuple(
        head["counters"][name] for name in ("rounds", "drafted", "accepted")
    )
    assert text(entries) == "".join(f" w{number}" for number in range(10, 22))
    delta = [
        Chunk(chunk.seconds, {**chunk.data, "output_ids": [*step.ids], "text": "".join(step.texts)})
        for chunk, step in zip(chunks, steps, strict=True)
    ]
    newest = sent(sglang.SGLangEvent, delta)  # of a server that sends the newest part only
    report = ServerReport()
    assert steps_of(sglang.pieces(newest, report), 12, report) == steps


Truth = list[tuple[int, int]]  # drafted and accepted tokens of each round
rounds = st.lists(
    st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), min_size=1, max_size=12
)


def true_kinds(truth: Truth) -> list[TokenKind]:
    found = [TARGET]
    for drafted, accepted in truth:
        last = TARGET if not drafted else BONUS if accepted == drafted else RESAMPLED
        found += [ACCEPTED] * accepted + [last]
    return found


def llamacpp_stream(truth: Truth, hidden: frozenset[int], cut: int) -> list[Chunk]:
    """What llama.cpp's server sends: tokens of `hidden` end inside a character; the text ends after `cut` tokens."""
    chunks: list[Chunk] = []
    drafted = accepted = at = reached = 0

    def send(step: int, last: bool) -> None:
        timings = {"prompt_ms": 100.0, "predicted_ms": step * 10.0 + 0.001, "predicted_n": at}
        if drafted:
            timings |= {"draft_n": drafted, "draft_n_accepted": accepted}
        event = {"timings": timings, "stop": last, "stop_type": "limit", "tokens_evaluated": 7}
        written = {"content": "", "tokens": []} if last else {"content": f"t{at}", "tokens": [at]}
        chunks.append(Chunk(len(chunks) / 100, {**event, **written}))

    for step, (guessed, passed) in enumerate([(0, 0), *truth]):
        if at == cut:
            break
        reached = step
        drafted, accepted = drafted + guessed, accepted + passed
        for _ in range(min(passed + 1, cut - at)):
            at += 1
            if at not in hidden:
                send(step, False)
    send(reached, True)
    return chunks


@given(rounds)
def test_llamacpp_rounds_are_recovered(truth: Truth) -> None:
    total = sum(accepted + 1 for _, accepted in truth) + 1
    _, entries = of_chunks(llamacpp_stream(truth, frozenset(), total), total)
    assert kinds(entries) == true_kinds(truth)
    found = [entry.event for entry in entries if isinstance(entry.event, Round)]
    assert [len(event.drafted) for event in found] == [drafted for drafted, _ in truth]
    assert [event.seconds for event in found] == pytest.approx([0.01] * len(truth), abs=1e-5)
    assert isinstance(entries[0].event, Prefilled)
    assert entries[0].event.seconds == pytest.approx(0.1, abs=1e-5)


@given(rounds, st.data())
def test_a_text_that_ends_anywhere_keeps_its_kinds(truth: Truth, data: st.DataObject) -> None:
    whole = true_kinds(truth)
    cut = data.draw(st.integers(1, len(whole)))
    _, entries = of_chunks(llamacpp_stream(truth, frozenset(), cut), cut)
    assert kinds(entries) == whole[:cut]


@given(rounds, st.frozensets(st.integers(1, 40)), st.data())
def test_tokens_held_back_have_true_kinds_or_unknown_ones(
    truth: Truth, hidden: frozenset[int], data: st.DataObject
) -> None:
    whole = true_kinds(truth)
    cut = data.draw(st.integers(1, len(whole)))
    _, entries = of_chunks(llamacpp_stream(truth, hidden - {cut}, cut), cut)
    assert all(mine in (kind, UNKNOWN) for mine, kind in zip(kinds(entries), whole[:cut], strict=True))


@given(rounds, st.frozensets(st.integers(1, 40)))
def test_tokens_held_back_lose_neither_rounds_nor_tokens(truth: Truth, hidden: frozenset[int]) -> None:
    total = sum(accepted + 1 for _, accepted in truth) + 1
    shown = hidden - {total}  # the server waits for whole characters, so the last is one
    report, entries = of_chunks(llamacpp_stream(truth, shown, total), total)
    stats = LaneFigures.of(entry.event for entry in entries)
    assert stats.tokens == total
    assert stats.rounds == len(truth)
    assert (report.drafted or 0, report.accepted or 0) == tuple(map(sum, zip(*truth, strict=True)))
    ids = [token.id for entry in entries for token in emitted_tokens(entry.event)]
    assert ids == [None if place in shown else place for place in range(1, total + 1)]


@given(rounds, st.data())
def test_vllm_kinds_are_true_or_unknown(truth: Truth, data: st.DataObject) -> None:
    """Whatever pieces the server merges. Where each is a round with a draft, all kinds are known."""
    parts = [accepted + 1 for _, accepted in truth]
    bounds = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    pieces = [1]
    for size, joined in zip(parts, bounds, strict=True):
        if joined and len(pieces) > 1:
            pieces[-1] += size
        else:
            pieces.append(size)
    steps = [Step(tuple(range(size)), ("",) * size, 0.5) for size in pieces]
    spec = [(drafted, accepted) for drafted, accepted in truth if drafted]
    lists = [accepted for _, accepted in spec], [drafted for drafted, _ in spec]
    report = ServerReport(rounds=len(spec), drafted=sum(lists[1]), accepted=sum(lists[0]), lists=lists)
    found = kinds(entries_of(with_drafts(steps, report), report))
    assert all(mine in (kind, UNKNOWN) for mine, kind in zip(found, true_kinds(truth), strict=True))
    if len(pieces) - 1 == len(spec) == len(truth) or not spec:
        assert UNKNOWN not in found
        assert not report.notes


def test_a_text_that_ends_inside_its_last_round() -> None:
    steps = [Step((1,), ("a",), 0.1), Step((2, 3), ("b", "c"), 0.1)]
    ended = with_drafts(steps, ServerReport(drafted=4, lists=([2], [4])))
    assert [(step.drafted, step.accepted) for step in ended] == [(None, None), (4, 2)]
    for lists in (([2, 0], [4, 4]), ([0], [4]), ([], []), None):
        assert with_drafts(steps, ServerReport(drafted=4, lists=lists)) == steps


def test_a_lane_whose_drafts_are_unknown_has_no_figures_of_them() -> None:
    report = ServerReport(reason=FinishReason.LENGTH)
    steps = [Step((1,), ("a",), 0.1), Step((2, 3, 4), ("b", "c", "d"), 0.1), Step((5,), ("e",), 0.1)]
    entries = entries_of(steps, report)
    figures = LaneFigures.of([entry.event for entry in entries]).as_dict()
    unknown = ("drafted", "accepted", "tested", "acceptance_rate", "draft_efficiency", "draft_seconds")
    assert all(figures[name] is None for name in unknown)
    why = explained(Request("Hi", "", OWN_DRAFTER, Settings()), entries, 0, "server")["why"]
    assert tells(why, "server")
    assert not tells(why, "3")


def test_nothing_written_is_told() -> None:
    with refuses(BadInput, "token"):
        [*events_of([], ServerReport())]


def test_tokens_without_ids_are_compared_by_their_text() -> None:
    steps = ([Step((1,), ("a",), 0.1), Step((None,), (text,), 0.1, 0, 0)] for text in ("é", "è"))
    events = ([entry.event for entry in entries_of(found, ServerReport())] for found in steps)
    one, other = ([token.id for token in tokens_of(found)] for found in events)
    assert (one, other) == ([1, "é"], [1, "è"])
    assert first_difference(one, other) == 1
