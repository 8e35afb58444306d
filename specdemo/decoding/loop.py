"""The one loop: draft, pass, verify, keep. Plain decoding is the same loop with an empty draft.

The words are those of `Rule`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engines.passes import PendingPass
from ..engines.runner import Pass, Runner
from ..errors import BadInput
from ..settings import MATCH, Settings
from ..system.device import elapsed_seconds, timestamp
from ..tokens import Draft, FinishReason
from .acceptance import Answer, path_of
from .costs import CostModel
from .drafter import Drafter, DraftOptions, drafted
from .events import Distributions, Event, Finished, Prefilled, Round
from .rule import Rule

PIECE = 32  # tokens of a prompt that are read at once where others go on beside it

Stop = Callable[[Sequence[int]], bool]
"""Whether a stop string is complete, given all token ids emitted so far. The list is the loop's own, and grows."""


def check_room(prompt_tokens: int, settings: Settings, context: int, whose: str = "") -> None:
    """Refuse a run that does not fit in the context. `whose` is for the message, such as " of the draft model"."""
    if prompt_tokens + settings.max_new_tokens > context:
        raise BadInput(
            f"The prompt has {prompt_tokens} tokens and {settings.max_new_tokens} new ones were asked for, "
            f"but the context{whose} holds {context}. Shorten the prompt or ask for fewer."
        )


class Form(NamedTuple):
    """The form of a draft: K, whether it is a tree, and when it stops, see `DraftOptions`."""

    k: int
    tree: bool = False
    stop_below: float = 0.0


class Chooser(Protocol):
    """Chooses for one run. K = auto is `adaptive_k.DraftLengthController`."""

    def choose(self, most: int, last: Round | None, drafter: Drafter, ids: Sequence[int], readers: int) -> Form:
        """The form of the draft that follows the text `ids`, after the `last` round of this run.

        Args:
            most: tokens for which a path of the draft has room.
            readers: the prompts that are decoded at once, and share their passes.
        """


class Given:
    """A chooser with a fixed list of forms: one for all rounds, or those of a trace."""

    def __init__(self, forms: Iterable[Form]) -> None:
        self.forms = iter(forms)

    def choose(self, most: int, last: Round | None, drafter: Drafter, ids: Sequence[int], readers: int) -> Form:
        k, tree, stop_below = next(self.forms)
        return Form(k if tree and most else min(k, most), tree, stop_below)


def fixed(settings: Settings) -> Given:
    """The K and the form that were asked for, in every round."""
    assert isinstance(settings.k, int), "K = auto needs a chooser"
    return Given(repeat(Form(settings.k, settings.tree)))


@dataclass
class Decoding:
    """One prompt that is decoded: what the loop needs, and the loop. See `batch.decode` for what it promises.

    Attributes:
        rule: of this run, see `racing.race.rule_for`; `drafter` draws with the same object.
        costs: what `batch` learns from every pass.
        chooser: of the draft of each round; without one all have the K of `settings`.
        readers: how many prompts are decoded at once, see `batch.decode_batch`.
        distributions: whether its rounds come with what they were drawn from.
        drafts_on: see `Needs.device`.
        waited: seconds of its time in which others went on, which `batch` counts.
    """

    runner: Runner
    drafter: Drafter
    prompt_ids: Sequence[int]
    rule: Rule
    eos_ids: frozenset[int] = frozenset()
    stop: Stop = lambda ids: False
    costs: CostModel | None = None
    chooser: Chooser | None = None
    readers: int = 1
    distributions: bool = False
    drafts_on: torch.device | None = None
    waited: float = 0.0

    @torch.inference_mode()
    def steps(self) -> Generator[Event | PendingPass, Tensor, None]:
        """The loop. It yields what happens as it happens, and the passes that it needs, whose logits are sent to it.

        Invariant: at the start of a round the newest token is pending: it is in `ids` but no cache has
        seen it, `runner.length == len(ids) - 1`. The verification pass reads it first.
        """
        runner, drafter, prompt_ids, rule = self.runner, self.drafter, self.prompt_ids, self.rule
        settings = rule.settings
        try:
            if not prompt_ids:
                raise BadInput("The prompt is empty.")
            check_room(len(prompt_ids), settings, runner.context)
            chooser = self.chooser or fixed(settings)

            began = self._clock()
            logits = yield from self._read_prompt()  # [1, V]
            answer = rule.verify(rule.masked(logits, Draft()), Draft(), len(prompt_ids), runner.captured)
            written: list[int] = []  # what follows the prompt in `ids`
            answer, reason = self._write(answer, written)
            drafter.observe(answer)
            ids = [*prompt_ids, *written]
            rule.advance(ids[-1:])
            yield Prefilled(len(prompt_ids), answer.emitted[0], self._clock() - began, settings.seed)

            index, last = 0, None
            while reason is None:
                # Draft: the drafter guesses what follows. The device that drafts times it, with the time away.
                device, position = self.drafts_on or runner.device, len(ids)
                began, away, draft_began = self._clock(), self._away(), timestamp(device)
                most = settings.max_new_tokens - len(written) - 1  # a round emits up to k + 1
                k, tree, stop_below = chooser.choose(most, last, drafter, ids, self.readers)
                draft = Draft()
                if k:
                    options = DraftOptions(most if tree else None, stop_below, self.readers == 1)
                    draft = yield from drafted(drafter.propose(ids, k, options))
                draft_ended, draft_away = timestamp(device), self._away() - away

                # Pass: the target reads the pending token and the draft.
                logits = yield Pass(runner, _rows(ids[-1], draft), draft.row_parents)  # [k + 1, V]

                # Verify: the rule follows the accepted guesses from the text on, and adds a token of the target.
                answer = rule.verify(rule.masked(logits, draft), draft, position, runner.captured)
                verified = self._clock()

                # Keep: the path and that token are added to the text; the pending token (row 0, before the path) and
                # the path to the cache, without the newest token of the text, which is on the path where the text ends.
                answer, reason = self._write(answer, written)
                guesses, emitted = answer.guesses, answer.emitted
                ids += written[-len(emitted) :]
                rule.advance(ids[-len(emitted) :])
                runner.keep([node + 1 for node in path_of(guesses)][: len(emitted)])
                drafter.observe(answer)
                ended = self._clock()
                drafting = elapsed_seconds(draft_began, draft_ended) - draft_away
                last = Round(
                    index,
                    guesses,
                    emitted,
                    draft_seconds=drafting,
                    verify_seconds=verified - began - drafting,
                    seconds=ended - began,
                    k=k,
                    ahead=draft.ahead,
                    distributions=self._distributions(answer, draft, position),
                )
                yield last
                index += 1
            yield Finished(reason)
        finally:
            drafter.release()
            runner.release()

    def _read_prompt(self) -> Generator[PendingPass, Tensor, Tensor]:
        """Read the prompt; where others read too, in pieces beside their rounds, so that they need not wait for all.

        Where passes are exact up to fewer rows than a piece has, pieces would change the last bits of its states.
        """
        runner = self.runner
        pieces = self.readers > 1 and runner.together and not 0 < runner.exact_rows < PIECE
        size = PIECE if pieces else len(self.prompt_ids)
        states: list[Tensor] = []
        for begin in range(0, len(self.prompt_ids), size):
            logits = yield Pass(runner, self.prompt_ids[begin : begin + size], prompt=not begin)
            if runner.hidden_states is not None:
                states.append(runner.hidden_states)
        if len(states) > 1:
            runner.hidden_states = torch.cat(states)
        return logits[-1:]

    def _write(self, answer: Answer, written: list[int]) -> tuple[Answer, FinishReason | None]:
        """Add the emitted tokens to what is `written`, up to the first end of the text."""
        for count, token in enumerate(answer.emitted, start=1):
            written.append(token.id)
            if reason := self._end(token.id, written):
                return answer.until(count), reason
        return answer, None

    def _distributions(self, answer: Answer, draft: Draft, position: int) -> Distributions | None:
        if not self.distributions or answer.target_probs is None:
            return None
        seed = self.rule.settings.seed if self.rule.name == MATCH else None
        return Distributions(position, answer.target_probs[: len(answer.guesses) + 1], draft.drawn_from, seed)

    def _end(self, newest: int, written: Sequence[int]) -> FinishReason | None:
        if newest in self.eos_ids:
            return FinishReason.EOS
        if self.stop(written):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(written) == self.rule.settings.max_new_tokens else None

    def _away(self) -> float:
        """Seconds in which others went on, a person was waited for, or operations were captured, which is done once."""
        return self.waited + self.drafter.waited + self.runner.capture_seconds

    def _clock(self) -> float:
        return time.perf_counter() - self._away()


def _rows(pending: int, draft: Draft) -> Sequence[int] | Tensor:
    """The tokens of a verification pass. A draft that was drawn on a device stays there."""
    if isinstance(draft.token_ids, Tensor):
        return F.pad(draft.token_ids, (1, 0), value=pending)
    return [pending, *draft.token_ids]
