"""Two lanes on one device: whose turn it is, what is freed, and what comes of comparing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdemo import decode as loop
from specdemo import hardware
from specdemo import race as racing
from specdemo.drafters.draft_model import DraftModel
from specdemo.events import Entry, Finished, Prefilled, Round, emitted_tokens, engine_seconds, read_trace, write_trace
from specdemo.race import PLAIN, SPECULATIVE, check_drafter, compare, drafters_of, race, report, start, summary
from specdemo.types import AUTO, BadInput, FinishReason, Settings, TokenKind
from tests.unit.toys import (
    DRAFTER_NAMES,
    PROMPT,
    VOCAB,
    ModelToy,
    TableRunner,
    TableToy,
    byte_tokenizer,
    counting_table,
    ids_of,
    letters_tokenizer,
    ngram_file,
    random_table,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = Settings(temperature=1, k=3, max_new_tokens=24, seed=3)


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    table = random_table(1, support=3)
    mixed = 0.6 * table + 0.4 * random_table(2, support=2)
    return TableToy(
        target=table,
        draft_model=mixed,
        early=mixed,
        ngram_table=ngram_file(tmp_path, VOCAB),
        tokenizer=letters_tokenizer(),
    )


def test_auto_tries_a_drafter_out_before_its_first_run_and_frees_what_that_took(
    toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing, "TRYING_SECONDS", 60)  # the trials end with their text
    settings = replace(SETTINGS, k=AUTO)
    first = start(toy, "draft-model", PROMPT, settings)
    (costs,) = toy.costs.values()
    assert costs.of_draft(DraftModel, 8) is not None
    assert all(runner.released for runner in toy.runners[:-1] + toy.draft_runners[:-1])
    assert ids_of(list(first))
    seen = len(toy.runners), len(toy.draft_runners)
    start(toy, "draft-model", PROMPT, settings)
    assert (len(toy.runners), len(toy.draft_runners)) == (seen[0] + 1, seen[1] + 1)
    start(toy, "none", PROMPT, settings)
    start(toy, "layer-skip", PROMPT, replace(settings, k=3))
    assert costs.tried == {"draft-model"}


def of(entries: list[Entry], lane: str) -> list:
    return [entry.event for entry in entries if entry.lane == lane]


def clocked(toy: Any, monkeypatch: pytest.MonkeyPatch, target_pass: Callable[[int], float]) -> None:
    """A clock that only the target's passes move: by what `target_pass` says of the tokens read at once."""
    now = 0.0

    class Timed(TableRunner):
        def read(self, ids: Any) -> torch.Tensor:
            nonlocal now
            now += target_pass(len(ids))
            return super().read(ids)

    for module in (loop, hardware):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(TableToy, "target_runner", lambda self, capacity: Timed(self.target, capacity, self.early))


# Whose turn it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_seconds", [lambda n: 1.0, float, lambda n: 0.3 if n == 1 else 7.0])
def test_the_lane_behind_on_its_clock_goes_next(
    toy: Any, monkeypatch: pytest.MonkeyPatch, pass_seconds: Callable[[int], float]
) -> None:
    clocked(toy, monkeypatch, pass_seconds)
    clocks = {PLAIN: 0.0, SPECULATIVE: 0.0}
    over: set[str] = set()
    order = []
    for entry in race(toy, "draft-model", PROMPT, SETTINGS):
        others = [clocks[lane] for lane in clocks if lane != entry.lane and lane not in over]
        assert clocks[entry.lane] <= min(others, default=clocks[entry.lane])
        clocks[entry.lane] += engine_seconds(entry.event)
        order.append(entry.lane)
        if isinstance(entry.event, Finished):
            over.add(entry.lane)
    assert over == {PLAIN, SPECULATIVE}
    changes = sum(one != other for one, other in pairwise(order))
    assert changes > 4  # they did take turns


def test_isolated_lanes_run_one_after_the_other(toy: Any) -> None:
    order = [entry.lane for entry in race(toy, "draft-model", PROMPT, SETTINGS, isolated=True)]
    assert order == [PLAIN] * order.count(PLAIN) + [SPECULATIVE] * order.count(SPECULATIVE)
    assert len(set(order)) == 2


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_a_race_says_the_same_interleaved_isolated_and_alone(toy: Any, name: str) -> None:
    together = list(race(toy, name, PROMPT, SETTINGS))
    apart = list(race(toy, name, PROMPT, SETTINGS, isolated=True))
    for lane in (PLAIN, SPECULATIVE):
        assert ids_of(of(together, lane)) == ids_of(of(apart, lane))
    assert ids_of(of(together, SPECULATIVE)) == ids_of(list(start(toy, name, PROMPT, SETTINGS)))


def test_the_plain_lane_is_the_same_loop_with_an_empty_draft(toy: Any) -> None:
    entries = list(race(toy, "draft-model", PROMPT, SETTINGS))
    plain, drafting = of(entries, PLAIN), of(entries, SPECULATIVE)
    assert all(not event.drafted for event in plain if isinstance(event, Round))
    assert any(event.drafted for event in drafting if isinstance(event, Round))
    assert {token.kind for event in plain for token in emitted_tokens(event)} == {TokenKind.TARGET}
    slow, fast = toy.runners  # the same runner for both, reading the same prompt
    assert type(slow) is type(fast)
    assert slow.passes[0] == fast.passes[0] == (0, PROMPT)
    assert [len(ids) for _, ids in slow.passes[1:]] == [1] * (SETTINGS.max_new_tokens - 1)
    assert len(fast.passes) < len(slow.passes)


def test_greedy_lanes_say_the_same(toy: Any) -> None:
    for name in DRAFTER_NAMES:
        entries = list(race(toy, name, PROMPT, Settings(k=4, max_new_tokens=24)))
        assert ids_of(of(entries, PLAIN)) == ids_of(of(entries, SPECULATIVE))


def test_proposing_and_accepting_get_different_noise(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    manual_seed = torch.Generator.manual_seed

    class Watched(torch.Generator):
        def manual_seed(self, seed: int) -> Any:
            seeds.append(seed)
            return manual_seed(self, seed)

    monkeypatch.setattr(torch, "Generator", Watched)
    list(start(toy, "draft-model", PROMPT, SETTINGS))
    assert len(seeds) == 2
    assert len({seed % 2**32 for seed in seeds}) == 2  # the bits that the CPU's generator reads
    assert SETTINGS.seed in seeds


def test_every_token_has_its_text_and_the_texts_join(toy: Any) -> None:
    entries = list(race(toy, "draft-model", PROMPT, SETTINGS))
    for lane in (PLAIN, SPECULATIVE):
        for entry in (entry for entry in entries if entry.lane == lane):
            assert [ord(text) - ord("a") for text in entry.spans.emitted] == [
                token.id for token in emitted_tokens(entry.event)
            ]
            if isinstance(entry.event, Round):
                assert [ord(text) - ord("a") for text in entry.spans.drafted] == [
                    token.id for token in entry.event.drafted
                ]


def test_a_race_is_read_back_from_its_trace(toy: Any) -> None:
    entries = list(race(toy, "draft-model", PROMPT, SETTINGS))
    assert read_trace(write_trace({"seed": 3}, entries)) == ({"seed": 3}, entries)


def test_stop_strings_and_eos_end_each_lane_by_itself(toy: Any) -> None:
    toy.target, toy.tokenizer = counting_table(20), letters_tokenizer(20)
    toy.draft_model = toy.early = counting_table(20)
    settings = Settings(k=4, max_new_tokens=15, stop=("gh",))
    entries = list(race(toy, "draft-model", [0, 1], settings))
    for lane in (PLAIN, SPECULATIVE):
        assert ids_of(of(entries, lane)) == [2, 3, 4, 5, 6, 7]
        assert of(entries, lane)[-1] == Finished(FinishReason.STOP)
    toy.eos_ids = frozenset({5})
    for lane in (PLAIN, SPECULATIVE):
        events = of(list(race(toy, "draft-model", [0, 1], settings)), lane)
        assert ids_of(events) == [2, 3, 4, 5]
        assert events[-1] == Finished(FinishReason.EOS)
        assert report(toy, [0, 1], events)["text"] == "cde"  # the end-of-sequence token is no text


# What is freed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("events", [1, 2, 9])
def test_closing_a_race_closes_both_lanes(
    toy: Any, monkeypatch: pytest.MonkeyPatch, events: int, isolated: bool
) -> None:
    lanes = []

    def kept(*args: Any) -> Any:  # a reference keeps the lanes from being closed by being forgotten
        lanes.append(start(*args))
        return lanes[-1]

    monkeypatch.setattr(racing, "start", kept)
    stream: Any = race(toy, "draft-model", PROMPT, SETTINGS, isolated)
    for _ in range(events):
        next(stream)
    stream.close()
    assert [runner.length for runner in (*toy.runners, *toy.draft_runners)] == [0, 0, 0]
    started = [runner for runner in toy.runners if runner.passes]
    assert started
    assert all(runner.released for runner in started)


def test_an_error_in_one_lane_closes_the_other(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = race(toy, "draft-model", PROMPT, SETTINGS)
    for _ in range(6):
        next(stream)

    def fail(ids: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(toy.draft_runners[0], "forward", fail)
    with pytest.raises(MemoryError):
        list(stream)
    assert [runner.length for runner in (*toy.runners, *toy.draft_runners)] == [0, 0, 0]


# What is refused -------------------------------------------------------------------------------------------


def test_an_unknown_drafter_is_refused_and_the_known_ones_are_named(toy: Any) -> None:
    with pytest.raises(BadInput, match="no drafter called 'magic'") as refusal:
        list(race(toy, "magic", PROMPT, SETTINGS))
    assert all(name in str(refusal.value) for name in DRAFTER_NAMES)


def test_a_drafter_that_the_preset_has_nothing_for_is_refused_with_the_reason(toy: Any) -> None:
    toy.draft_model = None
    with pytest.raises(BadInput, match="draft-model cannot be used here: this preset has no draft model"):
        check_drafter(toy, "draft-model")


def test_drafters_are_those_named_or_all_that_can_be_used(toy: Any) -> None:
    assert drafters_of(toy, "ngram, none,ngram") == ["ngram", "none", "ngram"]
    assert {"ngram", "draft-model"} <= {*drafters_of(toy, "")} <= {*DRAFTER_NAMES} - {"none"}
    toy.draft_model = None
    assert "draft-model" not in drafters_of(toy, "")
    for names, reason in (("ngram,draft-model", "no draft model"), ("ngram,", "no drafter called ''")):
        with pytest.raises(BadInput, match=reason):
            drafters_of(toy, names)


def test_a_run_that_does_not_fit_is_refused_before_anything_is_allocated(toy: Any) -> None:
    toy.context = 20
    with pytest.raises(BadInput, match=r"5 tokens and 24 new ones .* context holds 20"):
        start(toy, "none", PROMPT, SETTINGS)
    assert toy.runners == []


# Comparing -------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny() -> Any:
    return ModelToy(model=tiny_model("llama"), tokenizer=byte_tokenizer())


@pytest.mark.parametrize("place", [0, 1, 4])
def test_the_first_difference_and_the_logit_gap_there(tiny: Any, place: int) -> None:
    prompt, plain = [5, 6, 7], [1, 2, 3, 4, 5]
    speculative = [*plain[:place], 40, *plain[place + 1 :]]
    with torch.inference_mode():
        logits = tiny.model(torch.tensor([[*prompt, *plain]])).logits[0, len(prompt) - 1 + place]
    answer = compare(tiny, prompt, plain, speculative)
    assert (answer.identical, answer.first_difference) == (False, place)
    assert answer.logit_gap == pytest.approx(abs(float(logits[plain[place]] - logits[40])), abs=1e-4)
    assert compare(tiny, prompt, speculative, plain) == answer
    assert all(runner.length == 0 for runner in tiny.runners)


def test_equal_texts_are_identical_and_need_no_model(tiny: Any) -> None:
    for text in ([], [1, 2, 3]):
        answer = compare(tiny, [5], text, list(text))
        assert (answer.identical, answer.first_difference, answer.logit_gap) == (True, None, None)
    assert tiny.runners == []


def test_a_text_that_was_cut_short_differs_where_it_ends(tiny: Any) -> None:
    answer = compare(tiny, [5], [1, 2, 3], [1, 2])
    assert (answer.identical, answer.first_difference, answer.logit_gap) == (False, 2, None)
    assert compare(tiny, [5], [1], []).first_difference == 0


def test_token_0_differs_from_no_token(tiny: Any) -> None:
    assert compare(tiny, [5], [0], []).identical is False
    assert compare(tiny, [5], [0, 0], [0, 1]).first_difference == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_summary_of_a_race(toy: Any, temperature: float) -> None:
    settings = Settings(temperature=temperature, k=3, max_new_tokens=12)
    entries = list(race(toy, "draft-model", PROMPT, settings))
    answer = summary(toy, PROMPT, settings, entries)
    for lane in (PLAIN, SPECULATIVE):
        ids = ids_of(of(entries, lane))
        assert answer[lane]["token_ids"] == ids
        assert answer[lane]["text"] == "".join("abcd"[token] for token in ids)
        assert len(answer[lane]["kinds"]) == answer[lane]["stats"]["tokens"] == 12
        assert answer[lane]["finish_reason"] == "length"
    assert isinstance(of(entries, PLAIN)[0], Prefilled)
    assert answer["speed_up"] > 0
    assert answer["sentence"].endswith(".")
    if temperature == 0:
        assert answer["comparison"] == {"identical": True, "first_difference": None, "logit_gap": None}
    else:
        assert answer["comparison"] is None
