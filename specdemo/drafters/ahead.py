"""Drafting ahead: the next draft is prepared while the target verifies this one (arXiv 2603.03251).

What a round leads to is its *outcome*: how many drafted tokens are accepted, and which token follows them. Before it is
known, the drafter drafts what would follow the likeliest outcomes. If one of them comes true, a *hit*, its draft is
there at once; else the drafter drafts as usual.

A prepared draft is drawn as it would be drawn after the outcome, with the same numbers. So drafting ahead changes when
tokens are drafted, and neither a text nor its distribution.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..decoding.acceptance import Answer
from ..decoding.drafter import CHAIN, Drafter, DraftOptions
from ..decoding.rule import Drawn, Rule
from ..engines.passes import PendingPass
from ..engines.rows import MOST_ROWS
from ..engines.runner import Runner
from ..errors import BadInput
from ..settings import AUTO
from ..system.device import to_device
from ..tokens import Ahead, Draft
from .chain import fitted
from .draft_model import DraftModel

PATIENCE = 0.5  # seconds that a round waits for a drafter that stalls; then the target goes on without a draft
MOST_LATE = 3  # preparations that may end after the pass; then K = auto prepares no more
DECAY = 0.5  # the target's token is not among n prepared ones in a share n ** -DECAY of the cases (about, measured)
PRIOR = 2.0  # the weight of the prior of the acceptance rate, in tests

Outcome = tuple[int, int]
"""How many drafted tokens are accepted, and the token that follows them."""


def fan_out(total: int, k: int, acceptance: float) -> list[int]:
    """For how many tokens to prepare after 0, 1, ..., k accepted tokens, `total` in all: most hits have

        F_a ~ P_a ** (1 / (1 + DECAY))

    where P_a is the chance that a tokens are accepted (theorem on fan-out of arXiv 2603.03251).
    """
    chances = [acceptance**accepted * (1 - acceptance if accepted < k else 1) for accepted in range(k + 1)]
    shares = [chance ** (1 / (1 + DECAY)) for chance in chances]
    exact = [total * share / sum(shares) for share in shares]
    counts = [int(number) for number in exact]
    for place in sorted(range(k + 1), key=lambda place: counts[place] - exact[place])[: total - sum(counts)]:
        counts[place] += 1
    return counts


@dataclass
class Branch:
    """What is drafted for an outcome, as far as it was prepared."""

    outcome: Outcome
    drawn: list[Drawn] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)


class DraftingAhead(Drafter):
    """A draft model that prepares the next draft in a thread of its own. See `Settings.ahead`."""

    in_turn = False  # prepare before the target verifies, so that each can be timed by itself

    def __init__(self, drafter: Drafter, target: Runner, rule: Rule) -> None:
        if not isinstance(drafter, DraftModel):
            raise BadInput("A draft model with another tokenizer cannot draft ahead.")
        if reason := drafter.runner.cannot_branch:
            raise BadInput(f"The draft model cannot draft ahead: {reason}.")
        self.drafter, self.rule, self.name = drafter, rule, drafter.name  # type: ignore[misc]
        self._stop_below = 0.0  # of the last draft
        device = drafter.runner.device
        self._shares = device == target.device  # drafter and target take time from each other
        self._threads = torch.get_num_threads() if self._shares and device.type == "cpu" else 1
        self._thread: threading.Thread | None = None
        self._enough = threading.Event()
        self._known = 0  # tokens that are text, whatever the outcome of the round that was prepared for,
        self._written = 0  # and those that were before the present round
        self._branches: list[Branch] = []
        self._seconds = 0.0
        self._hit: Branch | None = None
        self._tests, self._passed, self._late = 2 * PRIOR, PRIOR, 0

    def propose(
        self, context: Sequence[int], k: int, options: DraftOptions = CHAIN
    ) -> Generator[PendingPass, Tensor, Draft]:
        self._written, self._stop_below = len(context), options.stop_below
        if not self._collect():
            return Draft(ahead=Ahead(False, 0, 0.0))
        prepared = sum(bool(branch.drawn) for branch in self._branches)
        hit, preparation = self._hit, Ahead(self._hit is not None, prepared, self._seconds)
        draft = yield from self._go_on(hit, context, k) if hit else self.drafter.propose(context, k, options)
        self._hit, self._branches, self._seconds = None, [], 0.0
        if len(draft.token_ids):
            self._prepare_next(list(context), [int(token) for token in draft.token_ids], k)
        return replace(draft, ahead=preparation)

    def _go_on(self, branch: Branch, context: Sequence[int], k: int) -> Generator[PendingPass, Tensor, Draft]:
        """The draft that begins with what was prepared. What was not is drafted now."""
        count, all_pass = 0, 1.0
        for confidence in branch.confidences[:k]:
            count, all_pass = count + 1, all_pass * confidence
            if all_pass < self._stop_below:
                k = count
                break
        drawn = branch.drawn[:count]
        return (yield from self.drafter.chain(context, k, self._stop_below, drawn=drawn, all_pass=all_pass))

    def observe(self, answer: Answer) -> None:
        self._tests += min(answer.accepted + 1, len(answer.guesses))
        self._passed += answer.accepted
        if self._collect():
            self.drafter.observe(answer)
            outcome = answer.accepted, answer.last.id
            in_time = answer.guesses and self._known == self._written  # else prepared too late, or for an earlier draft
            branches = self._branches if in_time else []
            self._hit = next((branch for branch in branches if branch.drawn and branch.outcome == outcome), None)

    def release(self) -> None:
        if self._collect():
            self.drafter.release()
        elif self._threads > 1:  # a drafter that stalls is freed with its thread
            torch.set_num_threads(self._threads)

    # Preparing --------------------------------------------------------------------------------------------------

    def _prepare_next(self, context: list[int], drafted: list[int], k: int) -> None:
        """Begin to prepare for the outcomes of a draft of at most k tokens."""
        auto = self.rule.settings.k == AUTO
        if auto and (self._shares or self._late >= MOST_LATE) and not self.in_turn:
            return
        self._known, rule = len(context), self.rule.of_next_round()
        self._enough.clear()
        if self.in_turn:
            return self._prepare(context, drafted, k, rule)
        if self._threads > 1:
            torch.set_num_threads(self._threads - 1)  # of this thread, in which the target verifies
        self._thread = threading.Thread(
            target=self._prepare, args=(context, drafted, k, rule), name="ahead", daemon=True
        )
        self._thread.start()

    @torch.inference_mode()
    def _prepare(self, context: list[int], drafted: list[int], k: int, rule: Rule) -> None:
        """Draft after the likeliest outcomes, for all of them in one pass for each token, until it is enough.

        Nothing of it stays in the cache. A drafter that fails has prepared nothing.
        """
        if self._threads > 1 and not self.in_turn:
            torch.set_num_threads(1)  # of this thread
        began, runner = time.perf_counter(), self.drafter.runner
        branches: list[Branch] = []
        with suppress(Exception):
            runner.rollback(min(runner.length, len(context) - 1))
            unread = [*context, *drafted][runner.length :]
            logits = fitted(runner.forward(unread)[-len(drafted) - 1 :], self.drafter.vocab_size)  # [k + 1, V]
            runner.rollback(len(context))
            branches += self._outcomes(logits, drafted, k, rule, len(context))
            token_ids = [*drafted, *(branch.outcome[1] for branch in branches)]
            parents = [*range(-1, len(drafted) - 1), *(branch.outcome[0] - 1 for branch in branches)]
            while branches and not self._enough.is_set() and len(branches[0].drawn) < k:
                logits = fitted(runner.forward(token_ids, parents)[-len(branches) :], self.drafter.vocab_size)
                runner.keep([])
                first = len(token_ids) - len(branches)
                position = len(context) + 1 + len(branches[0].drawn)
                numbers = rule.draft_numbers(position + branch.outcome[0] for branch in branches)
                each = [None] * len(branches) if numbers is None else to_device(numbers, logits.device).split(1)
                drawn = [rule.draw(row, number) for row, number in zip(logits.split(1), each, strict=True)]
                parents += range(first, len(token_ids))
                token_ids += torch.cat([each.column for each in drawn]).tolist()
                for row, branch, each in zip(logits, branches, drawn, strict=True):
                    branch.drawn.append(each)
                    branch.confidences.append(rule.confidence(row[None], each) if self._stop_below else 1.0)
            self._branches = branches
        self._seconds = time.perf_counter() - began

    def _outcomes(self, logits: Tensor, drafted: list[int], k: int, rule: Rule, position: int) -> list[Branch]:
        """The likeliest outcomes by the drafter's logits after each token of a draft [k + 1, V]."""
        most = (MOST_ROWS - len(drafted)) // k  # rows of the last pass
        total = min(rule.settings.ahead * (len(drafted) + 1), most)
        counts = fan_out(total, len(drafted), self._passed / self._tests)
        branches = []
        for accepted, count in enumerate(counts):
            if count:
                tokens, _ = rule.likeliest(logits[accepted : accepted + 1], position + accepted, count + 1)
                others = [token for token in tokens[0].tolist() if [token] != drafted[accepted : accepted + 1]]
                branches += [Branch((accepted, token)) for token in others[:count]]
        return branches

    def _collect(self) -> bool:
        """End the preparation, after the pass that it is at; False if that takes too long."""
        if self._thread is None:
            return True
        self._enough.set()
        self._late += self._thread.is_alive()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            return False
        self._thread = None
        if self._threads > 1:
            torch.set_num_threads(self._threads)
        self.drafter.runner.rollback(min(self.drafter.runner.length, self._known))
        return True
