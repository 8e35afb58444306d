"""llama.cpp's server: an event for each token, with the times and counts of its round.

All events of a round have the same `predicted_ms`; `draft_n` and `draft_n_accepted` grow by what the round drafted and
accepted. An event is held back while its bytes end inside a character, so tokens can be missing: `predicted_n` says
how many.

Source: llama.cpp b11434, `tools/server/server-context.cpp` and `server-common.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Annotated, Any

from pydantic import Field, Strict, ValidationError

from ..errors import BadInput
from ..models.tables import table_as
from ..settings import Settings
from ..tokens import FinishReason
from .client import Client, Count, Ids, Number, TokenIds, at
from .steps import LIKELIEST, UNFINISHED, Counters, Prompt, ServerReport, Step, check_limit, read_counters

FORCING = 1e6  # the bias of the logit of a token that has to be emitted
REASONS = {"eos": FinishReason.EOS, "limit": FinishReason.LENGTH, "word": FinishReason.STOP}


@dataclass(frozen=True, slots=True)
class LlamaCppEvent:
    """An event of a stream of `/completion`."""

    content: str
    tokens: Ids
    tokens_evaluated: Count
    stop: Annotated[bool, Strict()]
    prompt_ms: Annotated[Number, at("timings", "prompt_ms")]
    predicted_ms: Annotated[Number, at("timings", "predicted_ms")]
    predicted_n: Annotated[Count, at("timings", "predicted_n")]
    draft_n: Annotated[Count, at("timings", "draft_n")] = 0
    draft_n_accepted: Annotated[Count, at("timings", "draft_n_accepted")] = 0
    stop_type: str = ""


@dataclass(frozen=True, slots=True)
class _Likely:
    id: Count
    logprob: float


@dataclass(frozen=True, slots=True)
class _Forced:
    """The token that was emitted, and the logarithm of its probability before the bias of logits."""

    id: Annotated[Count, at("completion_probabilities", 0, "id")]
    logprob: Annotated[float, Field(gt=-1000), at("completion_probabilities", 0, "logprob")]  # less stands for 0


@dataclass(frozen=True, slots=True)
class _Likeliest:
    tokens: Annotated[tuple[_Likely, ...], at("completion_probabilities", 0, "top_logprobs")]


class LlamaCpp:
    """The `Dialect` of llama.cpp's server."""

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
        body = body_of(prompt, Settings(max_new_tokens=1)) | {"n_probs": LIKELIEST}
        body["prompt"] = [prompt, *ids] if isinstance(prompt, str) else [*prompt, *ids]
        try:
            found = table_as(_Likeliest, self.client.post("/completion", **body))
            return {token.id: token.logprob for token in found.tokens}
        except ValidationError:
            return {}  # another version has other names for them

    def loss(self, ids: Sequence[int]) -> float:
        """Minus the sum of the logarithms of the probabilities of the tokens of a text but the first.

        The server gives the probability only of a token that it emits. So each token is asked for by itself, and its
        logit gets a bias, which the probabilities do not contain. The cache holds what comes before.
        """
        total = 0.0
        for place, token in enumerate(ids[1:], start=1):
            body = body_of(ids[:place], Settings(0, max_new_tokens=1))
            body |= {"n_probs": 1, "logit_bias": [[token, FORCING]], "cache_prompt": True, "ignore_eos": False}
            answer = self.client.post("/completion", **body)
            found = self.client.read(_Forced, answer, "does not tell the probability of a token that is asked for")
            if found.id != token:
                raise self.client.wrong("emits another token than the one that is asked for")
            total -= found.logprob
        return total

    def written(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The ids of a greedy text that is sent as a whole: a stream omits tokens that end inside a character."""
        body = body_of(prompt, Settings(0, max_new_tokens=max_new_tokens))
        answer = self.client.post("/completion", **body, return_tokens=True)
        return [*self.client.read(TokenIds, answer, "does not tell the ids of its tokens").tokens]

    def counters(self) -> Counters | None:
        return read_counters(self.client, "llamacpp", "tokens_predicted_total")

    def steps(self, prompt: Prompt, settings: Settings, report: ServerReport) -> Iterator[Step]:
        before = self.counters() if report.alone else None
        wanted = {"stream": True, "return_tokens": True, "timings_per_token": True}
        sent = self.client.stream(LlamaCppEvent, "/completion", **body_of(prompt, settings), **wanted)
        tokens, rounds, merged = 0, 0, False
        with closing(sent):
            for step in llamacpp_steps(sent, settings.max_new_tokens, report):
                tokens, rounds = tokens + len(step.ids), rounds + bool(step.drafted)
                merged |= step.drafted is None or (step.rounds > 1 and step.drafted > 0)
                yield step
        report.rounds = None if merged else rounds
        if merged:
            report.notes.append(
                "Some rounds ended inside a character, and the server reported them with the next: what was drafted "
                "in each of them is unknown."
            )
        report.check(before, self.counters, tokens)


def body_of(prompt: Prompt | Sequence[int], settings: Settings) -> dict[str, Any]:
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


def llamacpp_steps(sent: Iterator[tuple[float, LlamaCppEvent]], most: int, report: ServerReport) -> Iterator[Step]:
    """The steps of a stream of `/completion` with at most `most` tokens.

    A round emits one token more than it accepts, so counts tell how many rounds a step holds. Tokens that were held
    back before a round's first event are its own, those of rounds without an event, or the last ones of the round
    before, which lacks them then: both become one step. The text may end inside the last step.
    """
    steps = _steps(_events(sent, most, report), report)
    yield from (step for step, _ in islice(steps, 1))  # the first token has no draft
    held: Step | None = None
    sure = True  # that all its tokens are of the round of its events
    for step, late in steps:
        if held is not None and late and not (sure and _rounds_in(held) == 1):
            held, sure = _together(held, step), False
            continue
        if held is not None:
            yield replace(held, rounds=_rounds_in(held))
        held, sure = step, not late
    if held is not None:
        yield held if sure else replace(held, rounds=max(_rounds_in(held), 1), drafted=None if held.drafted else 0)


def _rounds_in(step: Step) -> int:
    return len(step.ids) - (step.accepted or 0)


def _together(one: Step, other: Step) -> Step:
    return Step(
        one.ids + other.ids,
        one.texts + other.texts,
        one.seconds + other.seconds,
        (one.drafted or 0) + (other.drafted or 0),
        (one.accepted or 0) + (other.accepted or 0),
    )


def _events(sent: Iterator[tuple[float, LlamaCppEvent]], most: int, report: ServerReport) -> Iterator[LlamaCppEvent]:
    """The events up to the one that ends the text."""
    for seconds, event in sent:
        report.seconds = seconds
        if report.first_seconds is None:
            report.first_seconds = seconds
        check_limit(event.predicted_n, most)
        if event.stop:
            report.reason, report.rest = REASONS.get(event.stop_type, FinishReason.LENGTH), event.content
            report.drafted, report.accepted = event.draft_n, event.draft_n_accepted
            report.server_seconds = (event.prompt_ms + event.predicted_ms) / 1000
            yield replace(event, content="", tokens=())
            return
        yield event
    raise BadInput(UNFINISHED)


def _steps(events: Iterator[LlamaCppEvent], report: ServerReport) -> Iterator[tuple[Step, bool]]:
    """A step for the events of a round, if they have tokens, and whether some were held back before its first event.

    Those that were held back have no id and no text of their own.
    """
    tokens = drafted = accepted = 0
    spent = 0.0
    for _, group in groupby(events, key=lambda event: event.predicted_ms):
        ids: list[int | None] = []
        texts: list[str] = []
        before = 0
        for event in group:
            own = event.tokens
            missing = max(event.predicted_n - tokens - len(ids) - len(own), 0)
            before = before if ids else missing
            ids += [*[None] * missing, *own]
            texts += ([""] * (missing + len(own) - 1) + [event.content])[: missing + len(own)]
        seconds = event.predicted_ms / 1000
        new_drafted, new_accepted = event.draft_n - drafted, event.draft_n_accepted - accepted
        if not 0 <= new_accepted <= new_drafted or seconds < spent:
            raise ValueError("counts and times only grow")
        step = Step(tuple(ids), tuple(texts), seconds - spent, new_drafted, new_accepted)
        if not tokens and ids:
            report.prompt_tokens = event.tokens_evaluated
            yield Step(step.ids[:1], step.texts[:1], event.prompt_ms / 1000, 0, 0), False
            step, before = replace(step, ids=step.ids[1:], texts=step.texts[1:]), before - 1
        tokens, drafted, accepted, spent = tokens + len(ids), event.draft_n, event.draft_n_accepted, seconds
        if step.ids:
            yield step, before > 0
