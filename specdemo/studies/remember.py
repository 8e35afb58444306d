"""The same context thousands of times over, without paying for the network thousands of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..engines.runner import Runner
from ..models.loaded import Loaded

ROOM = 2**28  # bytes of logits that are remembered; what is read beyond them is read again when it is needed


class RunnerWithMemory(Runner):
    """A runner that stores the logits of each text, so that the wrapped runner reads no text twice.

    Every text must go on from `root`, which the real runner keeps in its cache and goes back to. `release` ends a
    run, not the memory.
    """

    def __init__(self, real: Runner, root: Sequence[int], next_token: int | None = None) -> None:
        """With `next_token`, reading the root says that this token follows, with certainty."""
        super().__init__(real.context)
        self.real, self.root, self.next_token = real, tuple(root), next_token
        self.device, self.vocab_size = real.device, real.vocab_size
        self.passes = 0  # made by the real runner
        self.parts: dict[int, RunnerWithMemory] = {}  # see `first_layers`
        self._text: tuple[int, ...] = ()
        self._rows: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        self._held = 0
        self._before: tuple[int, ...] = ()  # the text before the last pass, and up to each of its rows
        self._texts: list[tuple[int, ...]] = []

    @property
    def length(self) -> int:
        return len(self._text)

    @property
    def cannot_branch(self) -> str | None:
        return self.real.cannot_branch

    @property
    def exact_tree_rows(self) -> int:
        return self.real.exact_tree_rows

    @property
    def exact_rows(self) -> int:
        return self.real.exact_rows

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        self.real.capture_hidden_states(layers)

    def prefill(self, ids: Sequence[int]) -> Tensor:
        if not self.real.length:
            self._after_root = self.real.prefill(self.root)  # [1, V]
            self._root_hidden_states = self.real.hidden_states
        self._text, self.hidden_states = self.root, self._root_hidden_states
        if after := tuple(ids[len(self.root) :]):
            return self.forward(after)[-1:]
        if self.next_token is None:
            return self._after_root
        certain = torch.full_like(self._after_root, -torch.inf)
        certain[0, self.next_token] = 0
        return certain

    def forward(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
        before, ids = self._text, [*map(int, ids)]
        texts: list[tuple[int, ...]] = []
        for token, parent in zip(ids, range(-1, len(ids) - 1) if parents is None else parents, strict=True):
            texts.append((*(before if parent < 0 else texts[parent]), token))

        def read() -> Tensor:
            self.real.rollback(len(self.root))
            after = before[len(self.root) :]
            if parents is None:
                return self.real.forward([*after, *ids])
            if after:
                self.real.forward(after)
            return self.real.forward(ids, parents)

        self._before, self._texts, self._text = before, texts, (*before, *ids)
        logits, self.hidden_states = self._recall(texts, read)
        return logits

    def keep(self, path: Sequence[int]) -> None:
        self._text = self._texts[path[-1]] if path else self._before
        if self.hidden_states is not None:
            self.hidden_states = self.hidden_states[list(path)]

    def first_layers(self, count: int, capacity: int) -> Runner:
        if count not in self.parts:
            self.parts[count] = RunnerWithMemory(self.real.first_layers(count, capacity), self.root)
        return self.parts[count]

    def rollback(self, length: int) -> None:
        self._text = self._text[:length]

    def release(self) -> None:
        self._text, self.hidden_states = (), None

    def _recall(self, texts: Sequence[tuple[int, ...]], read: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
        """Logits after each of some texts, and the states kept of their last tokens; `read` has those of all."""
        count = len(texts)
        rows = [self._rows[text] for text in texts if text in self._rows]
        if len(rows) < count:
            logits = read()[-count:]
            self.passes += 1
            captured = self.real.hidden_states
            kept = [None] * count if captured is None else captured[-count:]
            # A pass of another length may round otherwise, and no text may have two rows of logits.
            rows = [self._rows.get(text, row) for text, row in zip(texts, zip(logits, kept, strict=True), strict=True)]
            if self._held < ROOM:
                self._rows.update(zip(texts, rows, strict=True))
                self._held += logits.nbytes
        states = [state for _, state in rows if state is not None]
        return torch.stack([row for row, _ in rows]), torch.stack(states) if states else None


@contextmanager
def from_one_context(
    loaded: Loaded, context: Sequence[int], new_tokens: int
) -> Iterator[tuple[Loaded, RunnerWithMemory]]:
    """The loaded models with runners that remember, for any number of runs on `context[:-1]`; and the target's.

    Reading that prompt says `context[-1]` with certainty, so that the first round of every run begins in this very
    context, as it does in the middle of a text. No token ends a run early.
    """
    *root, last = context
    capacity = len(context) + new_tokens
    target = RunnerWithMemory(loaded.target_runner(capacity), root, last)
    runners, parts = [target], loaded.parts
    if parts.make_draft_runner and parts.translator is None:  # else it reads other tokens than the root's
        draft = RunnerWithMemory(loaded.draft_runner(capacity), root)
        runners, parts = [target, draft], replace(parts, make_draft_runner=lambda _: draft)
    try:
        # What is remembered takes no time, which says nothing of what real passes cost.
        again = replace(loaded, eos_ids=frozenset(), make_target_runner=lambda _: target, parts=parts, costs={})
        yield again, target
    finally:
        for runner in (*runners, *target.parts.values()):
            runner.real.release()
