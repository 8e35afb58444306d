"""vLLM: an event holds the tokens of one round, or of several where the server could not send in time.

Source: vLLM 0.32, `vllm/entrypoints/openai/completion/protocol.py`, `vllm/entrypoints/generate/base/protocol.py` and
`vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from ..types import BadInput, Settings
from .client import Chunk, Client
from .steps import Counters, Lists, Prompt, Step, Told, check, checked, read_counters, recovered, texts_split
from .values import LIKELIEST, UNFINISHED, check_limit, count, number, reason_in, text_in


class VLLM:
    """A `Dialect`."""

    def __init__(self, client: Client, model: str) -> None:
        self.client, self.model = client, model
        version = str(client.get("/version").get("version", "unknown"))
        self.facts = {"engine": "vLLM", "version": version, "model": model}

    def prompt_of(self, text: str, raw: bool) -> Prompt:
        asked = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
        tokens = self.client.post("/tokenize", model=self.model, **asked).get("tokens")
        if not isinstance(tokens, list):
            raise BadInput(f"The server at {self.client.address} does not say how it reads a prompt.")
        return [count(token) for token in tokens]

    def text_of(self, ids: Sequence[int]) -> str:
        return text_in(self.client.post("/detokenize", model=self.model, tokens=[*ids]).get("prompt", ""))

    def logprobs(self, prompt: Prompt, ids: Sequence[int]) -> dict[int, float]:
        asked = {"model": self.model, "prompt": [*prompt, *ids], "max_tokens": 1, "temperature": 0.0}
        wanted = {"logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
        try:
            found = self.client.post("/v1/completions", **asked, **wanted)["choices"][0]["logprobs"]["top_logprobs"][0]
            return {int(name.removeprefix("token_id:")): float(value) for name, value in found.items()}
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, BadInput):
                raise
            return {}

    def counters(self) -> Counters | None:
        return read_counters(self.client, "vllm", "generation_tokens_total")

    @checked
    def steps(self, prompt: Prompt, settings: Settings, told: Told) -> Iterator[Step]:
        before = self.counters() if told.alone else None
        sampling = {
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,  # models have their own defaults
            "seed": settings.seed,
        }
        asked = {"model": self.model, "prompt": prompt, "max_tokens": settings.max_new_tokens, "stop": [*settings.stop]}
        wanted = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        salt = {"cache_salt": secrets.token_hex(8)}  # so that the prompt is read, as in the other lane
        chunks = self.client.stream("/v1/completions", **asked, **sampling, **wanted, **salt)
        told.prompt_tokens = len(prompt) if isinstance(prompt, list) else None
        steps, lists, k = vllm_steps(chunks, settings.max_new_tokens, told)
        counted = check(told, before, self.counters, sum(len(step.ids) for step in steps))
        if told.rounds is None and counted is not None:
            told.rounds, told.drafted, told.accepted = counted.rounds, counted.drafted, counted.accepted
            k = len(counted.by_position) or None
        yield from texts_split(self.text_of, recovered(steps, lists, told, k))


def vllm_steps(chunks: Iterator[Chunk], most: int, told: Told) -> tuple[list[Step], Lists, int | None]:
    """The pieces of a stream of `/v1/completions`, the lists of accepted and drafted tokens, and the server's K."""
    steps: list[Step] = []
    lists: Lists = None
    k, before, finished = None, 0.0, False
    for chunk in chunks:
        told.seconds = chunk.seconds
        usage, metrics = chunk.data.get("usage"), chunk.data.get("metrics") or {}
        if usage:
            told.prompt_tokens = count(usage["prompt_tokens"])
        if metrics.get("time_to_first_token_ms") is not None and metrics.get("generation_time_ms") is not None:
            parts = (number(metrics[name]) for name in ("time_to_first_token_ms", "generation_time_ms"))
            told.server_seconds = sum(parts) / 1000
        if spec := metrics.get("speculative_decoding"):
            names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
            told.rounds, told.drafted, told.accepted = (count(spec[name]) for name in names)
            k = count(spec["num_spec_tokens"])
            if spec.get("per_step_accepted") is not None and spec.get("per_step_drafted") is not None:
                per_step = ([count(n) for n in spec[f"per_step_{name}"]] for name in ("accepted", "drafted"))
                lists = next(per_step), next(per_step)
        for choice in chunk.data.get("choices", ()):
            ids = tuple(count(id) for id in choice["token_ids"] or ())
            text = text_in(choice.get("text") or "")
            if ids:
                if told.first_seconds is None:
                    told.first_seconds = chunk.seconds
                steps.append(Step(ids, ("",) * (len(ids) - 1) + (text,), chunk.seconds - before))
                before = chunk.seconds
                check_limit(sum(len(step.ids) for step in steps), most)
            else:
                told.rest += text
            if choice.get("finish_reason") is not None:
                finished = True
                told.reason = reason_in(choice["finish_reason"], choice.get("stop_reason"))
    if not finished:
        raise BadInput(UNFINISHED)
    return steps, lists, k
