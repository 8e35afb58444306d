"""A race of several readers, whose prompts are decoded at once without a drafter and with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Any

import pytest

from specdemo.decoding.batch import Failed
from specdemo.decoding.events import Event, Finished, Prefilled, Round
from specdemo.errors import BadInput, NotFinite
from specdemo.models import sizes
from specdemo.racing.again import again, differences
from specdemo.racing.batch import by_passes, entries_of, race_request
from specdemo.racing.figures import ReaderFigures
from specdemo.racing.race import start
from specdemo.racing.request import AT_ONCE, LONG, MOST_OF_ALL, DraftedLane, Request, with_readers
from specdemo.racing.summary import outcome_of, trace_header
from specdemo.racing.trace import PLAIN, SPECULATIVE, Entry, read_trace, request_of, write_trace
from specdemo.racing.verdict import LaneVerdict, noise
from specdemo.settings import AUTO, MATCH, REJECTION, Settings
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind
from tests.harness.classes import LaneFigures, Loaded
from tests.harness.doubles import ids_of

from ..sentences import gist, refuses, tells

Command = Callable[..., tuple[int, str, str]]
WORDS = "the cat sat on the mat and the dog sat", "the dog", "on the mat the cat sat", "and the cat and the"
NAMES = [f"{who} {reader}" for who in ("alone", "draft-model") for reader in (1, 2, 3, 4)]


def asked(loaded: Loaded, drafter: str = "draft-model", **settings: Any) -> Request:
    chosen = Settings(**{"k": 2, "max_new_tokens": 12, "seed": 5, **settings})
    return Request(WORDS[0], loaded.preset.name, drafter, chosen, raw=True, others=WORDS[1:])


def events_of(entries: list[Entry], lane: str) -> list[Event]:
    return [entry.event for entry in entries if entry.lane == lane]


# What is asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_the_prompt_that_is_typed_comes_first_and_examples_follow(count: int) -> None:
    examples = with_readers(Request("my own", "one", "eagle", Settings()), 16).others
    request = with_readers(Request(examples[0], "one", "eagle", Settings()), count)
    assert len({*request.prompts}) == len(request.prompts) == count
    assert request.prompt == examples[0]
    if count > 1:
        assert list(request.lanes) == [f"{who} {i + 1}" for who in ("alone", "eagle") for i in range(count)]
        assert len(LONG) < count or request.others == examples[1:count]
    else:
        assert list(request.lanes) == [PLAIN, SPECULATIVE]


@pytest.mark.parametrize("readers", [0, 3, 17, -1, True, None, "two", 2.5, inf, [2], 10**5000], ids=range(11))
def test_other_numbers_of_readers_are_refused_in_a_sentence(readers: Any) -> None:
    with refuses(BadInput, "readers 1 2 4 8 16,") as refused:
        with_readers(Request("a", "b", "none", Settings()), readers)
    assert len(str(refused.value)) < 120


def test_several_readers_have_one_drafter_and_write_what_a_trace_can_hold() -> None:
    request = Request("a", "b", "none", Settings(max_new_tokens=MOST_OF_ALL // 8), more=(DraftedLane("ngram", 2),))
    with refuses(BadInput, "readers lanes"):
        with_readers(request, 2)
    with pytest.MonkeyPatch.context() as patch:  # one reader needs no examples
        patch.delattr("specdemo.racing.request.load_prompts")
        assert with_readers(request, 1) == request
    request = replace(request, more=())
    assert with_readers(request, "8").others == with_readers(request, 8.0).others
    with refuses(BadInput, "16 512 1,024."):
        with_readers(request, 16)


# The race ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "isolated"), [(0.0, False), (0.8, False), (0.8, True)])
def test_each_reader_gets_the_text_that_it_gets_alone(loaded: Loaded, temperature: float, isolated: bool) -> None:
    request = replace(asked(loaded, temperature=temperature), isolated=isolated)
    entries = list(race_request(loaded, request))
    assert list(dict.fromkeys(entry.lane for entry in entries))[:1] == NAMES[:1]
    for at, prompt in enumerate(WORDS):
        settings = replace(request.settings, seed=5 + at)
        alone = ids_of(list(start(loaded, "none", loaded.encode(prompt, True), settings)))
        for who in ("alone", "draft-model"):
            events = events_of(entries, f"{who} {at + 1}")
            assert ids_of(events) == alone
            assert isinstance(events[0], Prefilled)
            assert events[0].seed == 5 + at
            assert isinstance(events[-1], Finished)
    found = outcome_of(loaded, request, entries)
    assert found.comparison
    assert found.comparison.identical
    assert tells(found.badge["words"], "All 4 exactly")
    summary = found.as_dict()
    assert {*NAMES, PLAIN, SPECULATIVE, "verdicts"} <= {*summary}
    assert summary["verdicts"][SPECULATIVE]["comparison"]["identical"]
    for at, prompt in enumerate(WORDS):
        text = summary[f"draft-model {at + 1}"]["text"]
        assert loaded.tokenizer.decode(loaded.encode(prompt, True) + summary[f"alone {at + 1}"]["token_ids"]).endswith(
            text
        )
    firsts = [entries.index(next(entry for entry in entries if entry.lane == name)) for name in (NAMES[0], NAMES[4])]
    assert (firsts[1] > len(entries) // 3) is isolated


def test_what_cannot_be_run_is_refused_before_it_begins(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    for request, words in (
        (asked(loaded, "magic"), "'magic'"),
        (asked(loaded, k=AUTO, temperature=1.0, rule=REJECTION), "match"),
        (asked(loaded, max_new_tokens=2000), "context"),
    ):
        with refuses(BadInput, words):
            list(race_request(loaded, request))
    one = 2 * loaded.token_bytes["target"] + loaded.token_bytes["draft-model"]
    longest = max(len(loaded.encode(prompt, True)) for prompt in WORDS) + 12
    monkeypatch.setattr(sizes, "free_memory", lambda: 4 * one * longest - 1)
    with refuses(BadInput, "keys values"):
        list(race_request(loaded, asked(loaded)))


def test_a_race_that_is_closed_lets_go_of_its_caches(loaded: Loaded) -> None:
    entries = race_request(loaded, asked(loaded))
    first_entries = list(islice(entries, 20))
    entries.close()  # type: ignore[attr-defined]
    found = outcome_of(loaded, asked(loaded), first_entries)
    assert found.stopped
    assert tells(found.badge["words"], "So 4")


TOKEN = Token(1, TokenKind.TARGET)


def read(seconds: float, index: int = 0, draft: float = 0.0) -> Round:
    return Round(index, (), (TOKEN,), draft, seconds - draft, seconds, 0)


def test_the_readers_of_a_run_share_a_clock_and_the_run_that_is_behind_goes_next(loaded: Loaded) -> None:
    def run(seconds: float) -> Iterator[tuple[int, Event | Failed]]:
        yield from [(0, Prefilled(1, TOKEN, seconds)), (1, Prefilled(1, TOKEN, seconds))]
        for index in range(2):
            yield from [(0, read(seconds, index)), (1, read(2 * seconds, index, seconds / 2))]
            if index:
                yield from [(0, Finished(FinishReason.LENGTH)), (1, Finished(FinishReason.LENGTH))]

    request = replace(asked(loaded, "ngram"), others=WORDS[1:2])
    ids = [loaded.encode(prompt, True) for prompt in request.prompts]
    entries = list(entries_of(loaded, request, ids, [run(1.0), run(1.5)]))
    turns = [entry.lane for entry in entries if not isinstance(entry.event, Finished)]
    # The clocks stand at 0 and 0, 2 and 0, 2 and 3, 5 and 3, 5 and 7.5, 8 and 7.5 seconds.
    runs = ["alone", "ngram", "alone", "ngram", "alone", "ngram"]
    assert turns == [f"{who} {reader}" for who in runs for reader in (1, 2)]
    for lane, unit in (("alone", 1.0), ("ngram", 1.5)):
        for reader in (1, 2):
            first, *rounds, _ = events_of(entries, f"{lane} {reader}")
            assert isinstance(first, Prefilled)
            assert first.seconds == 2 * unit
            times = [(event.draft_seconds, event.verify_seconds, event.seconds) for event in rounds]  # type: ignore[union-attr]
            assert times == [(unit / 2, 2.5 * unit, 3 * unit)] * 2


def test_a_pass_is_told_from_the_next_while_prompts_are_still_read() -> None:
    first, ended = Prefilled(1, TOKEN, 1.0), Finished(FinishReason.EOS)
    passes: list[list[tuple[int, Event]]] = [
        [(1, first)],
        [(0, first), (1, read(1.0))],
        [(0, read(1.0)), (1, read(1.0, 1)), (1, ended)],
        [(0, read(1.0, 1))],
        [(0, read(1.0, 2)), (0, ended)],
    ]
    assert list(by_passes((event for events in passes for event in events), [])) == passes


def test_a_reader_that_cannot_go_on_is_told_when_the_others_have_ended(loaded: Loaded) -> None:
    def run(*failing: tuple[int, Event | Failed]) -> Iterator[tuple[int, Event | Failed]]:
        yield from [(0, Prefilled(1, TOKEN, 1.0)), (1, Prefilled(1, TOKEN, 1.0)), *failing, (1, read(1.0))]
        yield (1, Finished(FinishReason.LENGTH))

    request = replace(asked(loaded, "ngram"), others=WORDS[1:2])
    ids = [loaded.encode(prompt, True) for prompt in request.prompts]
    entries = list[Entry]()
    with refuses(NotFinite, "finite"):
        entries.extend(
            entries_of(loaded, request, ids, [run((0, Failed(NotFinite("not finite")))), run((0, read(1.0)))])
        )
    kinds = {lane: [type(event) for event in events_of(entries, lane)] for lane in ("alone 1", "alone 2", "ngram 1")}
    assert kinds == {"alone 1": [Prefilled], "alone 2": [Prefilled, Round, Finished], "ngram 1": [Prefilled, Round]}


# Its trace --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "events"), [(2, None), (AUTO, None), (2, 30)])
def test_it_is_read_back_and_run_again(loaded: Loaded, k: int | str, events: int | None) -> None:
    request = asked(loaded, k=k, temperature=0.8)
    entries = list(islice(race_request(loaded, request), events))
    header, recorded = read_trace(write_trace(trace_header(loaded, request), entries))
    assert recorded == entries
    assert (header["readers"], [lane["name"] for lane in header["lanes"]]) == (4, NAMES)
    assert request_of(header) == request
    once_more = list(again(loaded, header, recorded))
    assert {*differences(recorded, once_more).values()} == {None}
    if events is None:
        then, now = ([len(getattr(entry.event, "drafted", ())) for entry in race] for race in (recorded, once_more))
        assert sum(then) == sum(now)


@pytest.mark.parametrize(
    "fields",
    [
        {"readers": 3, "others": ["a", "b"]},
        {"readers": 4, "others": ["a", "b"]},
        {"readers": 2, "others": [7]},
        {"readers": 2, "others": "a"},
        {"readers": [2], "others": ["a"]},
        {"readers": 2},
    ],
)
def test_a_header_that_does_not_say_the_prompts_is_refused(loaded: Loaded, fields: dict[str, Any]) -> None:
    header = {
        name: value for name, value in trace_header(loaded, asked(loaded)).items() if name not in ("others", "readers")
    }
    assert request_of(json.loads(json.dumps(header))).others == ()  # as in older traces
    with refuses(BadInput, "Line 1"):
        request_of({**header, **fields})


# The verdict ------------------------------------------------------------------------------------------------


def group(seconds: float, drafted: int = 0, accepted: int = 0, drafting: float = 0.0, rounds: int = 40) -> LaneFigures:
    """Of four readers, whose rounds take so long and have so many drafted and accepted tokens."""
    stats = ReaderFigures(tokens=1, readers=4)
    outcomes = [DraftOutcome.ACCEPTED] * accepted + [DraftOutcome.REJECTED] * (drafted > accepted)
    outcomes += [DraftOutcome.UNTESTED] * (drafted - len(outcomes))
    draft = tuple(DraftedToken(1, outcome, 1.0, 1.0) for outcome in outcomes)
    for index in range(rounds):
        stats.add(Round(index, draft, (TOKEN,) * (accepted + 1), drafting, seconds - drafting, seconds, drafted))
    return stats


@pytest.mark.parametrize(
    ("lane", "words"),
    [
        (group(0.4, 4, 1, 0.06), "With 4 0.50× 0.50× do A 20 4 4.0 15% 2.0"),
        (group(0.15, 4, 2, 0.01), "With 4 2.00× 2.00× A 20 4 1.5 3.0"),
        (group(0.2, 4, 1), "With 4 1.00× 1.00× 2% A 20 4"),
        (group(0.1), "With 4"),
        (group(0.125), "With 4 The 20%"),
        (group(0.1, 4, 4, rounds=1), "Only"),
        (ReaderFigures(tokens=1, readers=4), "Nothing"),
    ],
)
def test_the_verdict_is_on_all_readers_and_says_why(lane: LaneFigures, words: str) -> None:
    found = LaneVerdict(group(0.1), lane, DraftedLane("eagle", 4))
    assert words in gist(found.finding)
    if found.is_long:
        values = [
            value
            for name, value in found.as_dict()["numbers"]
            if tells(name, "token, alone") or tells(name, "rows readers")
        ]
        assert values == ["100.0 ms", "20.0"]
        assert found.as_dict()["slower"] is (lane.round_times[0] == 0.4)


def test_the_noise_counts_a_pass_of_all_readers_once() -> None:
    def uneven(readers: int) -> LaneFigures:
        stats = ReaderFigures(tokens=1, readers=readers)
        for index in range(40):
            stats.add(read(0.1 if index % 2 else 0.2, index))
        return stats

    assert noise(uneven(4), uneven(4)) == pytest.approx(2 * noise(uneven(1), uneven(1)))


def test_figures_are_of_the_time_in_which_all_readers_write() -> None:
    events: list[tuple[str, Event]] = [
        *(("a", Prefilled(1, TOKEN, 1.0)), ("a", read(5.0)), ("b", Prefilled(1, TOKEN, 7.0))),
        *(("a", read(3.0, 1)), ("b", read(1.0)), ("a", read(1.0, 2)), ("b", read(1.0, 1)), ("a", read(1.0, 3))),
        *(("a", Finished(FinishReason.EOS)), ("b", read(0.1, 2)), ("b", Finished(FinishReason.LENGTH))),
    ]
    stats = ReaderFigures.of_lanes(["a", "b"], events)
    assert (stats.readers, stats.rounds, stats.round_times) == (2, 4, [1.0] * 4)
    assert stats.tokens_per_second == 1
    assert stats.longest.seconds == 11  # of all its time, from before its prompt was read
    assert ReaderFigures.of_lanes(["a", "b"], events[:2]).tokens_per_second is None


# The command line -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("loads_once")
def test_it_is_run_by_a_command(command: Command) -> None:
    drafting = "--drafter", "lookup-ngram", "-k", "2"
    words = "race", "--preset", "nanogpt-shakespeare", "--max-new-tokens", "20", *drafting, "--prompt", "To be"
    status, out, _ = command(*words, "--readers", "2")
    assert status == 0
    assert tells(out, "2 lookup-ngram")
    assert tells(out, "tokens second")
    assert tells(out, "target alone")
    for more, refused in (
        (["--readers", "3"], "1 2 4 8 16, '3'."),
        (["--readers", "2", "--server", "http://127.0.0.1:9"], "--preset, --drafter, -k, --readers."),
    ):
        status, _, err = command(*words, *more)
        assert status == 2
        assert tells(err, refused)
    assert AT_ONCE.value == "1"
    assert Settings().rule == MATCH
