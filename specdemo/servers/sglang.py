"""SGLang: an event holds the tokens of one or several rounds: either the text so far, or its newest part.

Source: SGLang 0.5, `python/sglang/srt/managers/tokenizer_manager.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..types import BadInput, Settings
from .client import Chunk, Client
from .steps import Counters, Prompt, Step, Told, checked, recovered, texts_split
from .values import UNFINISHED, check_limit, count, reason_in, text_in


class SGLang:
    """A `Dialect`."""

    def __init__(self, client: Client, model: str) -> None:
        self.client, self.model = client, model
        self.facts = {"engine": "SGLang", "version": "unknown", "model": model}

    def prompt_of(self, text: str, raw: bool) -> Prompt:
        """As `Dialect.prompt_of`.

        Raises:
            BadInput: the server cannot put a text into its chat template.
        """
        asked = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
        try:
            tokens = self.client.post("/v1/tokenize", model=self.model, **asked).get("tokens")
        except BadInput as error:
            if raw:
                raise
            raise BadInput(f"{error} It may be too old to put a prompt into its chat template: use --raw.") from error
        if not isinstance(tokens, list):
            raise BadInput(f"The server at {self.client.address} does not say how it reads a prompt.")
        return [count(token) for token in tokens]

    def text_of(self, ids: Sequence[int]) -> str:
        asked = {"model": self.model, "tokens": [*ids], "skip_special_tokens": True}
        return text_in(self.client.post("/v1/detokenize", **asked).get("text", ""))

    def logprobs(self, prompt: Prompt, ids: Sequence[int]) -> dict[int, float]:
        return {}

    def counters(self) -> Counters | None:
        return None

    @checked
    def steps(self, prompt: Prompt, settings: Settings, told: Told) -> Iterator[Step]:
        sampling = {
            "temperature": settings.temperature,
            "top_k": settings.top_k or -1,
            "top_p": settings.top_p,
            "max_new_tokens": settings.max_new_tokens,
            "stop": [*settings.stop],
            "sampling_seed": settings.seed,
        }
        read = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        chunks = self.client.stream("/generate", **read, sampling_params=sampling, stream=True)
        steps = sglang_steps(chunks, settings.max_new_tokens, told)
        k = told.drafted // told.rounds if told.rounds and told.drafted else None
        yield from texts_split(self.text_of, recovered(steps, None, told, k))


def sglang_steps(chunks: Iterator[Chunk], most: int, told: Told) -> list[Step]:
    """The pieces of a stream of `/generate`."""
    steps: list[Step] = []
    all_ids: list[int] = []
    text, before, finished = "", 0.0, False
    for chunk in chunks:
        told.seconds = chunk.seconds
        meta = chunk.data["meta_info"]
        told.prompt_tokens = count(meta["prompt_tokens"])
        ids, written = [count(id) for id in chunk.data["output_ids"]], text_in(chunk.data["text"] or "")
        if len(ids) == count(meta["completion_tokens"]) and ids[: len(all_ids)] == all_ids:  # all tokens so far
            ids, new = ids[len(all_ids) :], written.removeprefix(text)
            text = written
        else:
            new, text = written, text + written
        all_ids += ids
        check_limit(len(all_ids), most)
        if ids:
            if told.first_seconds is None:
                told.first_seconds = chunk.seconds
            steps.append(Step(tuple(ids), ("",) * (len(ids) - 1) + (new,), chunk.seconds - before))
            before = chunk.seconds
        else:
            told.rest += new
        if meta.get("spec_verify_ct") is not None:
            told.rounds = count(meta["spec_verify_ct"])
            told.drafted = _first(meta, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
            told.accepted = _first(meta, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
            if told.rounds == 0:
                told.drafted = told.accepted = 0
        if reason := meta.get("finish_reason"):
            finished = True
            told.reason = reason_in(reason["type"], reason.get("matched"))
    if not finished:
        raise BadInput(UNFINISHED)
    if told.rounds is None:  # it reports no speculation
        told.rounds = told.drafted = told.accepted = 0
    return steps


def _first(meta: dict[str, Any], *names: str) -> int | None:
    return next((count(meta[name]) for name in names if meta.get(name) is not None), None)
