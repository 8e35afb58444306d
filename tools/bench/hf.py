"""The usual alternative: transformers' own `generate`, on the same weights, with and without assistance."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from specdemo.models.loaded import Loaded
from specdemo.settings import Settings

from .cases import ASSISTED, COMPILED, HF, LOOKUP, TUNED, Case
from .rows import Row, run_of


def models(loaded: Loaded, cases: Sequence[Case]) -> list[PreTrainedModel]:
    """The models that these cases run by transformers. Whoever holds them spares `generate` opening them every time."""
    theirs = {case.method for case in cases} & {HF, ASSISTED, TUNED, LOOKUP}
    return ([loaded.model] if theirs else []) + ([loaded.draft_model] if theirs & {ASSISTED, TUNED} else [])


def generate(loaded: Loaded, case: Case, prompt_ids: Sequence[int], settings: Settings) -> Row:
    """One text by `generate`, timed from call to answer; it ends at the same tokens as ours.

    The time of a text of a single token is that of the prompt. transformers does not report what was drafted.
    """
    with torch.no_grad() if case.method == COMPILED else torch.inference_mode():  # which torch.compile does not take
        return _generate(loaded, case, prompt_ids, settings)


def _generate(loaded: Loaded, case: Case, prompt_ids: Sequence[int], settings: Settings) -> Row:
    model = loaded.model
    ids = torch.tensor([prompt_ids], device=model.device)
    kwargs: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "eos_token_id": sorted(loaded.eos_ids) or None,
        "pad_token_id": min(loaded.eos_ids, default=0),
        "repetition_penalty": 1.0,  # ours has none; unset, transformers takes the checkpoint's
        "do_sample": settings.temperature > 0,
    }
    if settings.temperature > 0:
        kwargs |= {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    if case.method == LOOKUP:
        kwargs["prompt_lookup_num_tokens"] = case.k
    if case.method == COMPILED:
        kwargs["cache_implementation"] = "static"

    def written(count: int) -> tuple[list[int], float]:
        torch.manual_seed(settings.seed)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # for work that was asked for before and is not to be timed
        began = time.perf_counter()
        output = model.generate(ids, max_new_tokens=count, **kwargs)
        token_ids = output[0, len(prompt_ids) :].tolist()
        return token_ids, time.perf_counter() - began

    with _assisting(loaded, case) as assistant:
        if assistant is not None:
            kwargs["assistant_model"] = assistant
        first = written(1)[1]
        return run_of(*written(settings.max_new_tokens), first)


@contextmanager
def _assisting(loaded: Loaded, case: Case) -> Iterator[PreTrainedModel | None]:
    """The draft model, set up for the method; `generate` reads that from the assistant's own configuration.

    `ASSISTED` takes it as it comes; tuned, the assistant makes K guesses in every round, at any confidence.
    """
    if case.method not in (ASSISTED, TUNED):
        yield None
        return
    assistant = loaded.draft_model
    config: Any = assistant.generation_config
    tuned = {
        "num_assistant_tokens": case.k,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    before = {name: getattr(config, name) for name in tuned}
    if case.method == TUNED:
        config.update(**tuned)
    try:
        yield assistant
    finally:
        config.update(**before)
