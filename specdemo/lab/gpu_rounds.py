"""What rounds cost on a GPU, by drafter. The rule is told how many guesses pass, since random models guess nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..decode import Rule, decode
from ..drafters import Drafter
from ..drafters.head import HeadDrafter
from ..drafters.none import NoDrafter
from ..events import Round
from ..runners import Runner
from ..runners.graph import Capture, GraphRunner, Graphs
from ..sampling import one_hot
from ..types import Draft, Settings, Verdict
from ..verify import verify
from .gpu_checks import Pair, capture_for
from .gpu_heads import WITH_HEADS, random_head

Row = dict[str, Any]
HEAD_K = 4


def random_prompt(model: PreTrainedModel, length: int) -> list[int]:
    return torch.randint(model.config.get_text_config().vocab_size, (length,)).tolist()


def rounds(
    runner: Runner, drafter: Drafter, prompt: Sequence[int], k: int, new_tokens: int, rule: Rule | None = None
) -> list[Round]:
    """The rounds of a greedy run, but for the first, in which a draft model reads the prompt."""
    settings = Settings(k=k, max_new_tokens=new_tokens)
    events = list(decode(runner, drafter, prompt, settings, rule=rule))
    return [event for event in events if isinstance(event, Round)][1:]


def forced_rounds(pair: Pair, k: int, context: int, new_tokens: int) -> Iterator[Row]:
    """What a round costs with the draft model, and what comes of it where none, half or all of its guesses pass."""
    prompt = random_prompt(pair.target, context)
    capacity = context + new_tokens
    for passing in sorted({0, k // 2, k}):
        drafter, runner = pair.drafter(capacity, Settings()), GraphRunner(pair.graphs, capacity)
        run = rounds(runner, drafter, prompt, k, new_tokens, forced(passing))
        yield {"part": "round, forced", "what": f"K = {k}, {passing} pass"} | cost_of(run, k)


def head_drafters(target: PreTrainedModel) -> dict[str, Callable[[Runner], Drafter]]:
    """By name, what makes a drafter for one run: none, and heads, whose passes are captured or run as they come."""
    noise = torch.Generator(target.device).manual_seed(1)

    def make(kind: type[HeadDrafter], capture: Capture | None, runner: Runner) -> Drafter:
        return kind(random_head(kind, target, capture), runner, Settings(), noise)

    makes: dict[str, Callable[[Runner], Drafter]] = {"alone": lambda runner: NoDrafter()}
    for name, kind in WITH_HEADS.items():
        makes[f"{name}, captured"] = partial(make, kind, capture_for(target.device))
        makes[f"{name}, as it comes"] = partial(make, kind, None)
    return makes


def head_rounds(
    what: str, make: Callable[[Runner], Drafter], graphs: Graphs, prompt: Sequence[int], new_tokens: int
) -> Iterator[Row]:
    """What a round with one of them costs where half of the guesses pass."""
    runner = GraphRunner(graphs, len(prompt) + new_tokens)
    drafter = make(runner)
    k = 0 if isinstance(drafter, NoDrafter) else HEAD_K
    run = rounds(runner, drafter, prompt, k, new_tokens, forced(k // 2))
    yield {"part": "round with a head", "what": what} | cost_of(run, k)


def cost_of(run: Sequence[Round], k: int) -> Row:
    """What the rounds of a run cost, but for the first; those at the end of the text, which are cut, do not count."""
    full = [event for event in run if len(event.drafted) == k]
    took = median(event.seconds for event in full)
    return {
        "ms": 1000 * took,
        "draft_ms": 1000 * median(event.draft_seconds for event in full),
        "tokens_per_second": median(len(event.emitted) for event in full) / took,
    }


def forced(passing: int) -> Rule:
    """A rule that lets the first `passing` guesses of a greedy draft pass; the others have to be right."""

    def rule(target_probs: Tensor, draft: Draft, draws: Tensor) -> Verdict:
        ids = torch.as_tensor(draft.token_ids, dtype=torch.long)[:passing]
        certain = one_hot(ids, target_probs.shape[-1], target_probs.dtype)
        return verify(torch.cat([certain.to(target_probs), target_probs[len(certain) :]]), draft, draws)

    return rule
