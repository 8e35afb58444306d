"""SGLang: an event holds the tokens of one or several rounds: either the text so far, or its newest part.

Source: SGLang 0.5, `python/sglang/srt/managers/tokenizer_manager.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AliasChoices, AliasPath, Field

from ..errors import BadInput
from ..settings import Settings
from .client import Client, Count, Ids, TokenIds, at
from .steps import Counters, Prompt, ServerReport, Step, reason_in, steps_of, texts_split, with_drafts


def _either(*names: str) -> Any:
    """A field that versions call differently."""
    return Field(validation_alias=AliasChoices(*(AliasPath("meta_info", name) for name in names)))


@dataclass(frozen=True, slots=True)
class SGLangEvent:
    """An event of a stream of `/generate`."""

    output_ids: Ids
    text: str | None
    prompt_tokens: Annotated[Count, at("meta_info", "prompt_tokens")]
    completion_tokens: Annotated[Count, at("meta_info", "completion_tokens")]
    reason: Annotated[str | None, at("meta_info", "finish_reason", "type")] = None
    matched: Annotated[Any, at("meta_info", "finish_reason", "matched")] = None
    rounds: Annotated[Count | None, at("meta_info", "spec_verify_ct")] = None
    drafted: Annotated[
        Count | None, _either("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    ] = None
    accepted: Annotated[
        Count | None, _either("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    ] = None


class SGLang:
    """The `Dialect` of SGLang."""

    def __init__(self, client: Client, model: str) -> None:
        self.client, self.model = client, model
        self.facts = {"engine": "SGLang", "version": "unknown", "model": model}

    def prompt_of(self, text: str, raw: bool) -> Prompt:
        """As `Dialect.prompt_of`."""
        body = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
        try:
            answer = self.client.post("/v1/tokenize", model=self.model, **body)
        except BadInput as error:
            if raw:
                raise
            raise BadInput(f"{error} It may be too old to put a prompt into its chat template: use --raw.") from error
        return [*self.client.read(TokenIds, answer, "does not say how it reads a prompt").tokens]

    def text_of(self, ids: Sequence[int]) -> str:
        body = {"model": self.model, "tokens": [*ids], "skip_special_tokens": True}
        return str(self.client.post("/v1/detokenize", **body).get("text", ""))

    def logprobs(self, prompt: Prompt, ids: Sequence[int]) -> dict[int, float]:
        return {}

    def counters(self) -> Counters | None:
        return None

    def steps(self, prompt: Prompt, settings: Settings, report: ServerReport) -> Iterator[Step]:
        sampling = {
            "temperature": settings.temperature,
            "top_k": settings.top_k or -1,
            "top_p": settings.top_p,
            "max_new_tokens": settings.max_new_tokens,
            "stop": [*settings.stop],
            "sampling_seed": settings.seed,
        }
        read = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        sent = self.client.stream(SGLangEvent, "/generate", **read, sampling_params=sampling, stream=True)
        with closing(sent):
            steps = steps_of(pieces(sent, report), settings.max_new_tokens, report)
        yield from texts_split(self.text_of, with_drafts(steps, report))


def pieces(sent: Iterator[tuple[float, SGLangEvent]], report: ServerReport) -> Iterator[tuple[float, Ids, str]]:
    """The pieces of a stream, see `steps_of`."""
    all_ids: Ids = ()
    text = ""
    for seconds, event in sent:
        report.seconds = seconds
        ids, new, report.prompt_tokens = event.output_ids, event.text or "", event.prompt_tokens
        if len(ids) == event.completion_tokens and ids[: len(all_ids)] == all_ids:  # all tokens so far
            ids, new = ids[len(all_ids) :], new.removeprefix(text)
        all_ids, text = all_ids + ids, text + new
        if event.rounds is not None:
            report.rounds, report.drafted, report.accepted = event.rounds, event.drafted, event.accepted
        yield seconds, ids, new
        if event.reason:
            report.reason = reason_in(event.reason, event.matched)
    if not report.rounds:  # it reports no speculation, or that nothing was drafted
        report.rounds = report.drafted = report.accepted = 0
