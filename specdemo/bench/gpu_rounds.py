"""The time of rounds on a GPU, by drafter. The rule lets a number of guesses pass: those of random models fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..decoding.drafter import Drafter
from ..decoding.events import Round
from ..decoding.loop import decode
from ..decoding.match import Match
from ..decoding.sampling import one_hot
from ..drafters.heads.drafter import HeadDrafter
from ..drafters.none import NoDrafter
from ..engines.gpu.graph import Capture, GraphRunner, Graphs
from ..engines.runner import Runner
from ..types import Draft, Settings, Verdict
from .gpu_models import WITH_HEADS, Pair, capture_for, random_head

Row = dict[str, Any]
HEAD_K = 4


def random_prompt(model: PreTrainedModel, length: int) -> list[int]:
    return torch.randint(model.config.get_text_config().vocab_size, (length,)).tolist()


def rounds(
    runner: Runner, drafter: Drafter, prompt: Sequence[int], k: int, new_tokens: int, passing: int = 0
) -> list[Round]:
    """The rounds of a greedy run without the first, in which a draft model reads the prompt; see `Forced`."""
    rule = Forced(Settings(k=k, max_new_tokens=new_tokens), passing)
    events = list(decode(runner, drafter, prompt, rule))
    return [event for event in events if isinstance(event, Round)][1:]


def forced_rounds(pair: Pair, k: int, context: int, new_tokens: int) -> Iterator[Row]:
    """The time of a round with the draft model, where none, half or all of its guesses pass."""
    prompt = random_prompt(pair.target, context)
    capacity = context + new_tokens
    for passing in sorted({0, k // 2, k}):
        drafter, runner = pair.drafter(capacity, Match(Settings())), GraphRunner(pair.graphs, capacity)
        run = rounds(runner, drafter, prompt, k, new_tokens, passing)
        yield {"part": "round, forced", "what": f"K = {k}, {passing} pass"} | cost_of(run, k)


def head_drafters(target: PreTrainedModel) -> dict[str, Callable[[Runner], Drafter]]:
    """Functions that make a drafter for one run, by name: no drafter, and heads with captured passes and without."""

    def make(kind: type[HeadDrafter], capture: Capture | None, runner: Runner) -> Drafter:
        return kind(random_head(kind, target, capture), runner, Match(Settings()))

    makes: dict[str, Callable[[Runner], Drafter]] = {"alone": lambda runner: NoDrafter()}
    for name, kind in WITH_HEADS.items():
        makes[f"{name}, captured"] = partial(make, kind, capture_for(target.device))
        makes[f"{name}, as it comes"] = partial(make, kind, None)
    return makes


def head_rounds(
    what: str, make: Callable[[Runner], Drafter], graphs: Graphs, prompt: Sequence[int], new_tokens: int
) -> Iterator[Row]:
    """The time of a round with one of them where half of the guesses pass."""
    runner = GraphRunner(graphs, len(prompt) + new_tokens)
    drafter = make(runner)
    k = 0 if isinstance(drafter, NoDrafter) else HEAD_K
    run = rounds(runner, drafter, prompt, k, new_tokens, k // 2)
    yield {"part": "round with a head", "what": what} | cost_of(run, k)


def cost_of(run: Sequence[Round], k: int) -> Row:
    """The median time of the rounds of a run. Those cut short by the end of the text do not count."""
    full = [event for event in run if len(event.drafted) == k]
    took = median(event.seconds for event in full)
    return {
        "ms": 1000 * took,
        "draft_ms": 1000 * median(event.draft_seconds for event in full),
        "tokens_per_second": median(len(event.emitted) for event in full) / took,
    }


class Forced(Match):
    """Lets the first `passing` guesses of a greedy draft pass; the others must be right."""

    def __init__(self, settings: Settings, passing: int) -> None:
        super().__init__(settings)
        self.passing = passing

    def verify(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
        ids = torch.as_tensor(draft.token_ids, dtype=torch.long)[: self.passing]
        certain = one_hot(ids.to(logits.device), logits.shape[-1], logits.dtype)
        return super().verify(torch.cat([certain, logits[len(certain) :]]), draft, position)
