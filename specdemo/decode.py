"""The one loop: draft, verify, emit, roll back. Plain decoding is the same loop with an empty draft."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F

from .control import Control
from .costs import Costs
from .drafters import Drafter
from .events import Event, Finished, Prefilled, Round
from .hardware import moment, seconds_between
from .runners import Runner
from .sampling import probabilities
from .types import BadInput, Draft, DraftedToken, Fate, FinishReason, Settings, Token, TokenKind, Verdict
from .verify import verify

Stop = Callable[[Sequence[int]], bool]
"""Told every emitted token id so far, answers whether a stop string is now complete."""

Rule = Callable[[torch.Tensor, Draft, torch.Tensor], Verdict]
"""What tests a draft: `verify`, or in the lab one made wrong on purpose, to see that it is caught."""


def check_room(prompt_tokens: int, settings: Settings, context: int) -> None:
    """Refuse a run that does not fit in the context; nothing is ever cut off silently."""
    if prompt_tokens + settings.max_new_tokens > context:
        raise BadInput(
            f"The prompt has {prompt_tokens} tokens and {settings.max_new_tokens} new ones were asked for, "
            f"but the context holds {context}. Shorten the prompt or ask for fewer."
        )


@torch.inference_mode()
def decode(
    runner: Runner,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    settings: Settings,
    eos_ids: frozenset[int] = frozenset(),
    stop: Stop = lambda ids: False,
    rule: Rule | None = None,
    costs: Costs | None = None,
) -> Iterator[Event]:
    """Generate from the target, drafting ahead, and yield what happens as it happens.

    The emitted tokens follow the target's distribution under `settings`, whatever the drafter proposes.
    When the generator ends, is closed or fails, the caches of runner and drafter are released.

    Invariant: at the start of a round the newest token is pending: it is in `ids` but no cache has
    seen it, `runner.length == len(ids) - 1`. The verification pass reads it first.

    Args:
        costs: learns what rounds cost and how guesses fare; K = auto goes by it, and wants a seed that no run had that
            it learnt from (`Costs.fresh_seed`).
    Raises:
        BadInput: the prompt is empty, or prompt and new tokens exceed the context.
    """
    try:
        if not prompt_ids:
            raise BadInput("The prompt is empty.")
        check_room(len(prompt_ids), settings, runner.context)
        noise = torch.Generator(runner.device).manual_seed(settings.seed)
        rule = rule or verify
        control = Control(settings.k, costs, len(prompt_ids))

        began = time.perf_counter()
        logits = runner.prefill(prompt_ids)  # [1, V]
        drafter.reset(prompt_ids)
        verdict = rule(probabilities(logits, settings), Draft(), _draws(1, noise))
        emitted, reason = _emit(verdict, [], settings, eos_ids, stop)
        ids = [*prompt_ids, emitted[0].id]
        yield Prefilled(len(prompt_ids), emitted[0], time.perf_counter() - began)

        index, last = 0, None
        while reason is None:
            began, drafts_from = time.perf_counter(), moment(runner.device)
            written = len(ids) - len(prompt_ids)
            most = settings.max_new_tokens - written - 1  # a round emits up to k + 1
            k = control.choose(most, last, drafter.author(ids))
            draft = drafter.propose(ids, k) if k else Draft()
            drafted = moment(runner.device)

            logits = runner.forward(_following(ids[-1], draft))  # [k + 1, V]
            verdict = rule(probabilities(logits, settings), draft, _draws(len(logits), noise))
            verified_at = time.perf_counter()

            emitted, reason = _emit(verdict, ids[len(prompt_ids) :], settings, eos_ids, stop)
            ids += [token.id for token in emitted]
            runner.rollback(len(ids) - 1)
            drafter.observe(verdict)
            tested = _tests(verdict, len(emitted))
            ended = time.perf_counter()
            drafting = seconds_between(drafts_from, drafted)
            last = Round(index, tested, emitted, drafting, verified_at - began - drafting, ended - began, k)
            yield last
            index += 1
        yield Finished(reason)
    finally:
        drafter.release()
        runner.release()


def _following(pending: int, draft: Draft) -> Sequence[int] | torch.Tensor:
    """What a verification reads; a draft that was drawn on a device stays there."""
    if isinstance(draft.token_ids, torch.Tensor):
        return F.pad(draft.token_ids, (1, 0), value=pending)
    return [pending, *draft.token_ids]


def _emit(
    verdict: Verdict, written: list[int], settings: Settings, eos_ids: frozenset[int], stop: Stop
) -> tuple[tuple[Token, ...], FinishReason | None]:
    """The tokens of a verdict that are emitted: up to the first end, wherever in the round it falls."""
    accepted = zip(verdict.drafted[: verdict.accepted], verdict.p, strict=False)
    tokens = [Token(id, TokenKind.ACCEPTED, p) for id, p in accepted]
    tokens.append(Token(verdict.token_id, verdict.kind, verdict.token_p))
    ids = list(written)
    for count, token in enumerate(tokens, start=1):
        ids.append(token.id)
        if token.id in eos_ids:
            return tuple(tokens[:count]), FinishReason.EOS
        if stop(ids):
            return tuple(tokens[:count]), FinishReason.STOP
        if len(ids) == settings.max_new_tokens:
            return tuple(tokens[:count]), FinishReason.LENGTH
    return tuple(tokens), None


def _tests(verdict: Verdict, emitted: int) -> tuple[DraftedToken, ...]:
    """What became of each drafted token; those past the end of the text count as untested."""
    tested = min(emitted, verdict.accepted + 1)
    return tuple(
        DraftedToken(
            token,
            Fate.UNTESTED if place >= tested else Fate.ACCEPTED if place < verdict.accepted else Fate.REJECTED,
            *(verdict.p[place], verdict.q[place], verdict.draws[place]),
        )
        for place, token in enumerate(verdict.drafted)
    )


def _draws(count: int, noise: torch.Generator) -> torch.Tensor:
    """Uniform draws in [0, 1), [count]; double precision, so that none of them rounds to 1."""
    return torch.rand(count, generator=noise, device=noise.device, dtype=torch.float64)
