"""llama.cpp's server: an event for each token, with the times and counts of its round.

All events of a round have the same `predicted_ms`; `draft_n` and `draft_n_accepted` grow by what the round drafted and
accepted. An event is held back while its bytes end inside a character, so tokens can be missing: `predicted_n` tells
how many.

Source: llama.cpp b11434, `tools/server/server-context.cpp` and `server-common.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..types import BadInput, FinishReason, Settings
from .client import Chunk, Client
from .steps import Counters, Prompt, Step, Told, check, checked, read_counters
from .values import LIKELIEST, UNFINISHED, check_limit, count, number, text_in

REASONS = {"eos": FinishReason.EOS, "limit": FinishReason.LENGTH, "word": FinishReason.STOP}


class LlamaCpp:
    """A `Dialect`."""

    def __init__(self, client: Client) -> None:
        self.client = client
        props = client.get("/props")
        model = re.split(r"[/\\]", str(props.get("model_path", "unknown")))[-1]
        self.facts = {"engine": "llama.cpp", "version": str(props.get("build_info", "unknown")), "model": model}

    def prompt_of(self, text: str, raw: bool) -> Prompt:
        if raw:
            return text
        answer = self.client.post("/apply-template", messages=[{"role": "user", "content": text}])
        return str(answer.get("prompt", ""))

    def text_of(self, ids: Sequence[int]) -> str:
        return str(self.client.post("/detokenize", tokens=[*ids]).get("content", ""))

    def logprobs(self, prompt: Prompt, ids: Sequence[int]) -> dict[int, float]:
        asked = asked_of(prompt, Settings(max_new_tokens=1)) | {"n_probs": LIKELIEST}
        asked["prompt"] = [prompt, *ids] if isinstance(prompt, str) else [*prompt, *ids]
        answer = self.client.post("/completion", **asked)
        try:
            rows = answer["completion_probabilities"][0]["top_logprobs"]
            return {count(row["id"]): float(row["logprob"]) for row in rows}
        except (KeyError, IndexError, TypeError, ValueError):
            return {}  # another version has other names for them

    def written(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The ids of a greedy text that is sent as a whole: a stream omits tokens that end inside a character.

        Raises:
            BadInput: as `steps`.
        """
        asked = asked_of(prompt, Settings(0, max_new_tokens=max_new_tokens))
        answer = self.client.post("/completion", **asked, return_tokens=True)
        try:
            return [count(id) for id in answer["tokens"]]
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"The server at {self.client.address} does not tell the ids of its tokens.") from error

    def counters(self) -> Counters | None:
        return read_counters(self.client, "llamacpp", "tokens_predicted_total")

    @checked
    def steps(self, prompt: Prompt, settings: Settings, told: Told) -> Iterator[Step]:
        before = self.counters() if told.alone else None
        wanted = {"stream": True, "return_tokens": True, "timings_per_token": True}
        chunks = self.client.stream("/completion", **asked_of(prompt, settings), **wanted)
        tokens, rounds, merged = 0, 0, False
        for step in llamacpp_steps(chunks, settings.max_new_tokens, told):
            tokens, rounds = tokens + len(step.ids), rounds + bool(step.drafted)
            merged |= step.rounds > 1 and bool(step.drafted)
            yield step
        told.rounds = None if merged else rounds
        if merged:
            told.notes.append(
                "Some rounds ended inside a character, and the server told of them together with the next: what was "
                "drafted in each of them is unknown."
            )
        check(told, before, self.counters, tokens)


def asked_of(prompt: Prompt | Sequence[int], settings: Settings) -> dict[str, Any]:
    """The body of a request to `/completion`."""
    return {
        "prompt": prompt if isinstance(prompt, str) else [*prompt],
        "n_predict": settings.max_new_tokens,
        "stop": [*settings.stop],
        "temperature": float(settings.temperature),
        "samplers": ["top_k", "top_p", "temperature"],
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "seed": settings.seed,
        "cache_prompt": False,
    }


def llamacpp_steps(chunks: Iterator[Chunk], most: int, told: Told) -> Iterator[Step]:
    """The steps of a stream of `/completion` with at most `most` tokens.

    Tokens that were held back come with the next event. A round emits one token more than it accepted, which tells the
    steps that they belong to. Rounds that cannot be told apart become one step.
    """
    steps = _steps(_groups(chunks, most, told), told)
    yield from (step for step in (next(steps, None),) if step is not None)  # the first token has no draft
    waiting: Step | None = None  # whose last tokens have not come yet
    for seen in steps:
        step = seen
        if waiting is not None:
            missing = _emitted(waiting) - len(waiting.ids)
            if missing <= len(step.ids) <= missing + _emitted(step):
                ids, texts = waiting.ids + step.ids[:missing], waiting.texts + step.texts[:missing]
                yield replace(waiting, ids=ids, texts=texts)
                step = replace(step, ids=step.ids[missing:], texts=step.texts[missing:])
            else:
                step = _together(waiting, step)
        waiting = step if len(step.ids) < _emitted(step) else None
        if waiting is None:
            yield replace(step, rounds=len(step.ids) - (step.accepted or 0))
    if waiting is not None and waiting.ids:  # the text ended inside the round
        yield waiting


def _emitted(step: Step) -> int:
    """How many tokens a round emits if the text does not end in it."""
    return (step.accepted or 0) + 1


def _together(one: Step, other: Step) -> Step:
    counts = ((one.drafted or 0) + (other.drafted or 0), (one.accepted or 0) + (other.accepted or 0))
    return Step(one.ids + other.ids, one.texts + other.texts, one.seconds + other.seconds, *counts)


def _groups(chunks: Iterator[Chunk], most: int, told: Told) -> Iterator[list[dict[str, Any]]]:
    """The events by their time; the last group has the event that ends the text."""
    group: list[dict[str, Any]] = []
    for chunk in chunks:
        event, told.seconds = chunk.data, chunk.seconds
        if told.first_seconds is None:
            told.first_seconds = chunk.seconds
        times, ended = event["timings"], event["stop"] is True
        check_limit(count(times["predicted_n"]), most)
        if ended:
            told.reason = REASONS.get(event.get("stop_type", ""), FinishReason.LENGTH)
            told.rest = text_in(event["content"])
            told.drafted, told.accepted = (count(times.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))
            told.server_seconds = (number(times["prompt_ms"]) + number(times["predicted_ms"])) / 1000
            event = {**event, "content": "", "tokens": []}
        if group and times["predicted_ms"] != group[-1]["timings"]["predicted_ms"]:
            yield group
            group = []
        group.append(event)
        if ended:
            yield group
            return
    raise BadInput(UNFINISHED)


def _steps(groups: Iterator[list[dict[str, Any]]], told: Told) -> Iterator[Step]:
    """A step for each group with tokens. Those that were held back have no id and no text of their own."""
    tokens = drafted = accepted = 0
    spent = 0.0
    for group in groups:
        ids: list[int | None] = []
        texts: list[str] = []
        for event in group:
            own = [count(id) for id in event["tokens"]]
            missing = max(count(event["timings"]["predicted_n"]) - tokens - len(ids) - len(own), 0)
            ids += [*[None] * missing, *own]
            texts += ([""] * (missing + len(own) - 1) + [text_in(event["content"])])[: missing + len(own)]
        times = group[-1]["timings"]
        seconds = number(times["predicted_ms"]) / 1000
        counts = [count(times.get(name, 0)) for name in ("draft_n", "draft_n_accepted")]
        new_drafted, new_accepted = counts[0] - drafted, counts[1] - accepted
        if not 0 <= new_accepted <= new_drafted or seconds < spent:
            raise ValueError("counts and times only grow")
        step = Step(tuple(ids), tuple(texts), seconds - spent, new_drafted, new_accepted)
        if not tokens and ids:
            told.prompt_tokens = count(group[0]["tokens_evaluated"])
            prompt = number(times["prompt_ms"]) / 1000
            yield Step(step.ids[:1], step.texts[:1], prompt)
            step = replace(step, ids=step.ids[1:], texts=step.texts[1:])
        tokens, drafted, accepted, spent = tokens + len(ids), *counts, seconds
        if step.ids:
            yield step
