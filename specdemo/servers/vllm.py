"""vLLM: an event holds the tokens of one round, or of several where the server could not send in time.

Source: vLLM 0.32, `vllm/entrypoints/openai/completion/protocol.py`, `vllm/entrypoints/generate/base/protocol.py` and
`vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

from ..models.tables import table_as
from ..settings import Settings
from .client import Client, Count, Ids, Number, TokenIds, at
from .steps import (
    LIKELIEST,
    Counters,
    Prompt,
    ServerReport,
    Step,
    read_counters,
    reason_in,
    steps_of,
    texts_split,
    with_drafts,
)


@dataclass(frozen=True, slots=True)
class _Choice:
    token_ids: Ids | None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass(frozen=True, slots=True)
class _Speculation:
    num_spec_steps: Count
    num_draft_tokens: Count
    num_accepted_draft_tokens: Count
    per_step_accepted: Ids | None = None
    per_step_drafted: Ids | None = None


@dataclass(frozen=True, slots=True)
class VLLMEvent:
    """An event of a stream of `/v1/completions`."""

    choices: tuple[_Choice, ...]
    prompt_tokens: Annotated[Count | None, at("usage", "prompt_tokens")] = None
    first_ms: Annotated[Number | None, at("metrics", "time_to_first_token_ms")] = None
    rest_ms: Annotated[Number | None, at("metrics", "generation_time_ms")] = None
    speculation: Annotated[_Speculation | None, at("metrics", "speculative_decoding")] = None


@dataclass(frozen=True, slots=True)
class _Likeliest:
    logprobs: Annotated[dict[str, float], at("choices", 0, "logprobs", "top_logprobs", 0)]


class VLLM:
    """The `Dialect` of vLLM."""

    def __init__(self, client: Client, model: str) -> None:
        self.client, self.model = client, model
        version = str(client.get("/version").get("version", "unknown"))
        self.facts = {"engine": "vLLM", "version": version, "model": model}

    def prompt_of(self, text: str, raw: bool) -> Prompt:
        body = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
        answer = self.client.post("/tokenize", model=self.model, **body)
        return [*self.client.read(TokenIds, answer, "does not say how it reads a prompt").tokens]

    def text_of(self, ids: Sequence[int]) -> str:
        return str(self.client.post("/detokenize", model=self.model, tokens=[*ids]).get("prompt", ""))

    def logprobs(self, prompt: Prompt, ids: Sequence[int]) -> dict[int, float]:
        body = {"model": self.model, "prompt": [*prompt, *ids], "max_tokens": 1, "temperature": 0.0}
        wanted = {"logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
        answer = self.client.post("/v1/completions", **body, **wanted)
        try:
            found = table_as(_Likeliest, answer).logprobs
            return {int(name.removeprefix("token_id:")): logprob for name, logprob in found.items()}
        except ValueError:
            return {}

    def counters(self) -> Counters | None:
        return read_counters(self.client, "vllm", "generation_tokens_total")

    def steps(self, prompt: Prompt, settings: Settings, report: ServerReport) -> Iterator[Step]:
        before = self.counters() if report.alone else None
        sampling = {
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,  # models have their own defaults
            "seed": settings.seed,
        }
        body = {"model": self.model, "prompt": prompt, "max_tokens": settings.max_new_tokens, "stop": [*settings.stop]}
        wanted = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        salt = {"cache_salt": secrets.token_hex(8)}  # so that the prompt is read, as in the other lane
        sent = self.client.stream(VLLMEvent, "/v1/completions", **body, **sampling, **wanted, **salt)
        report.prompt_tokens = len(prompt) if isinstance(prompt, list) else None
        with closing(sent):
            steps = steps_of(pieces(sent, report), settings.max_new_tokens, report)
        report.check(before, self.counters, sum(len(step.ids) for step in steps))
        yield from texts_split(self.text_of, with_drafts(steps, report))


def pieces(sent: Iterator[tuple[float, VLLMEvent]], report: ServerReport) -> Iterator[tuple[float, Ids, str]]:
    """The pieces of a stream, see `steps_of`."""
    for seconds, event in sent:
        report.seconds = seconds
        if event.prompt_tokens is not None:
            report.prompt_tokens = event.prompt_tokens
        if event.first_ms is not None and event.rest_ms is not None:
            report.server_seconds = (event.first_ms + event.rest_ms) / 1000
        if spec := event.speculation:
            report.rounds, report.drafted = spec.num_spec_steps, spec.num_draft_tokens
            report.accepted = spec.num_accepted_draft_tokens
            if spec.per_step_accepted is not None and spec.per_step_drafted is not None:
                report.lists = spec.per_step_accepted, spec.per_step_drafted
        for choice in event.choices:
            yield seconds, choice.token_ids or (), choice.text or ""
            if choice.finish_reason is not None:
                report.reason = reason_in(choice.finish_reason, choice.stop_reason)
