"""Logits that are NaN or infinite, as float16 overflows: the run ends in a sentence, and the next one works."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from specdemo.decoding import sampling
from specdemo.decoding.events import Event
from specdemo.decoding.rejection import verify
from specdemo.decoding.warping import probabilities
from specdemo.engines import linear
from specdemo.engines.cpu.library import library_for
from specdemo.engines.gpu import graph
from specdemo.engines.quantized import widened
from specdemo.errors import NotFinite
from specdemo.models.errors import explain
from specdemo.racing.race import start
from specdemo.settings import Settings
from specdemo.tokens import Draft
from tests.harness.doubles import PROMPT, VOCAB, Scripted, ids_of, random_table
from tests.harness.engines import ENGINES, makes_runners, tiny_model
from tests.harness.texts import decode
from tests.harness.toys import DRAFTER_NAMES, ModelToy, TableToy, untrained_heads

from ..sentences import refuses, tells

BROKEN = 4  # the token whose embedding is no number; no text below holds it
TEXT = [5, 9, 2, 33, 17, 0, 8]
SETTINGS = {
    "greedy": Settings(k=3, max_new_tokens=12),
    "sampled": Settings(k=3, temperature=1.0, max_new_tokens=12),
    "warped": Settings(k=3, temperature=0.7, top_k=3, top_p=0.9, max_new_tokens=12),
}
greedy_or_not = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


@pytest.fixture(params=["by sampling.c", "by torch"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where the library can be had, and as on any other."""
    if request.param == "by torch":
        monkeypatch.setattr(sampling, "library", lambda: None)
    elif sampling.library() is None:
        pytest.skip("no C library here")


def refused(events: Iterator[Event], who: str) -> None:
    """The run ends in one sentence for the person."""
    with pytest.raises(NotFinite) as caught:
        list(events)
    said = explain(caught.value)
    assert said == str(caught.value)
    assert tells(said, f"{who} finite")
    assert said.endswith(".")
    assert ". " not in said


# Every engine ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@greedy_or_not
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_run_ends_in_a_sentence_and_the_next_one_works(
    architecture: str, engine: str, broken: float, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with an embedding that is no number. The engine "graph" runs on a CPU, with a fake in place of the
    capture."""
    model = copy.deepcopy(tiny_model(architecture))
    output = copy.deepcopy(model.get_output_embeddings().weight)
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN, 3] = broken
    model.get_output_embeddings().weight = output  # GPT-2 ties them
    monkeypatch.setattr(graph, "ROOM", 64)
    make = makes_runners(engine, model)  # the slots of graphs are the same in every run

    def run(prompt: list[int]) -> Iterator[Event]:
        drafter = Scripted(lambda context, k: [1, 2, 3][:k])
        return decode(make(len(prompt) + settings.max_new_tokens), drafter, prompt, settings)

    wanted = ids_of(list(run(TEXT)))
    assert BROKEN not in wanted
    refused(run([*TEXT, BROKEN]), "target")
    assert ids_of(list(run(TEXT))) == wanted


@pytest.mark.usefixtures("either_way")
@greedy_or_not
@pytest.mark.parametrize(
    "row",
    [
        [1.0, math.nan, 3.0, 0.5],
        [math.nan] * VOCAB,
        [1.0, 2.0, math.inf, 0.5],
        [math.inf, -math.inf, math.inf, 0.0],
        [-math.inf] * VOCAB,
    ],
    ids=["NaN", "all NaN", "infinity", "infinities", "none possible"],
)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_round_that_comes_to_such_a_row_is_refused(row: list[float], place: int, settings: Settings) -> None:
    """The row is that of a drafted token or of the bonus; every guess before it passes."""
    certain = torch.eye(VOCAB)[[1, 2, 3, 0]].log()
    logits = certain.clone()
    logits[place] = torch.tensor(row)
    draft, draws = Draft([1, 2, 3]), torch.full((4,), 0.5, dtype=torch.float64)
    assert verify(probabilities(certain, settings), draft, draws).accepted == 3
    with refuses(NotFinite, "target finite"):
        verify(probabilities(logits, settings), draft, draws)


@pytest.mark.usefixtures("either_way")
@greedy_or_not
def test_what_no_token_depends_on_is_not_refused(settings: Settings) -> None:
    """At a place after a wrong guess the target may say anything."""
    logits = torch.eye(VOCAB)[[1, 2, 3, 0]].log()
    logits[3] = math.nan
    found = verify(probabilities(logits, settings), Draft([1, 0, 3]), torch.full((4,), 0.5).double())
    assert (found.accepted, found.last.id) == (1, 2)


def test_a_figure_of_a_test_is_never_nan() -> None:
    """It would be recorded: even after a wrong guess, where no token depends on it, such a row ends the run."""
    logits = torch.eye(VOCAB)[[1, 2, 3, 0]].log()
    logits[2] = math.nan
    with refuses(NotFinite, "target finite"):
        verify(probabilities(logits, SETTINGS["sampled"]), Draft([1, 0, 3]), torch.full((4,), 0.5).double())


# Drafters --------------------------------------------------------------------------------------------------

DRAWING = [name for name in DRAFTER_NAMES if name in ("draft-model", "layer-skip", "eagle", "block")]


@greedy_or_not
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("name", DRAWING)
def test_a_draft_of_no_numbers_ends_a_run_in_a_sentence(name: str, broken: float, settings: Settings) -> None:
    def toy(broken: float | None) -> TableToy:
        toy = TableToy()
        if broken is not None:
            table = torch.full((VOCAB,) * 3, broken, dtype=torch.float64)
            toy.draft_model = toy.early = table
            for ready in toy.heads.values():
                ready.embedding = torch.full_like(widened(ready.embedding), broken)
        return toy

    def run(broken: float | None) -> Iterator[Event]:
        return start(cast(Any, toy(broken)), name, PROMPT, settings)

    refused(run(broken), "drafter")
    assert len(ids_of(list(run(None)))) == settings.max_new_tokens


@greedy_or_not
@pytest.mark.parametrize("by_library", [True, False])
@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_a_head_of_a_real_model_that_overflows_is_refused(
    kind: str, by_library: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the library for CPUs and without it; heads know only some of the target's tokens."""
    if not by_library:
        monkeypatch.setattr(linear, "library_for", lambda dtype: None)
    elif library_for(torch.float32) is None:
        pytest.skip("no C library here")
    toy = ModelToy(model=tiny_model("llama"))
    ready, heads = toy.heads[kind], untrained_heads(61, 32, 3, heads=4, draft_vocab=41)
    with torch.no_grad():
        heads[kind].norm.weight.fill_(math.inf)
    output = tiny_model("llama").get_output_embeddings().weight.detach()
    for head, outcome in ((type(ready)(heads[kind], ready.embedding, output), "refused"), (ready, "written")):
        toy.heads[kind] = head
        runner = toy.target_runner(len(TEXT) + settings.max_new_tokens)
        events = decode(runner, toy.drafter(kind, runner, settings), TEXT, settings)
        if outcome == "refused":
            refused(events, "drafter")
        else:
            assert len(ids_of(list(events))) == settings.max_new_tokens


@pytest.mark.usefixtures("either_way")
@greedy_or_not
def test_a_draft_model_that_knows_fewer_tokens_never_reads_one_that_it_does_not_know(settings: Settings) -> None:
    """Its runner fails at such a token, as an embedding does: on a GPU that would end the whole process."""
    smaller = torch.full((VOCAB - 1,) * 3, math.nan, dtype=torch.float32)
    target = random_table(1)
    target[..., VOCAB - 1] = 0  # after such a token nothing would be drafted
    toy: Any = TableToy(target=target, draft_model=smaller)
    prompt = [token % (VOCAB - 1) for token in PROMPT]
    refused(start(toy, "draft-model", prompt, settings), "drafter")


def test_a_probability_of_0_for_a_drawn_token_is_refused() -> None:
    """It cannot have been drawn: where top-p cuts a row that holds NaN, the token that stands in has this one."""
    p = torch.full((2, VOCAB), 1 / VOCAB)
    q = torch.tensor([[0.0, math.nan, 0.0, 0.0]])
    draws = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for probs in (q, q.nan_to_num(1.0)):
        with refuses(NotFinite, "drafter finite"):
            verify(p, Draft([0], probs), draws)
