"""Runners: a model and its key-value cache. No other object touches a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import BadInput
from ..system.device import to_device
from .passes import PendingPass, Together

T = TypeVar("T")
ANY_ROWS = 2**31 - 1  # `exact_rows` of a runner whose logits never depend on the number of rows


class Runner:
    """A causal language model that reads one sequence, with a cache that rolls back and lives for one run.

    The defaults are those of a runner that can only read.

    Attributes:
        length: tokens in the cache.
        context: the most tokens it can hold.
        device: where the logits are.
        vocab_size: their width V.
        hidden_states: those that `capture_hidden_states` asked for, of the last pass, [T, layers * hidden]; None
            before the first pass, or if no layers were asked for.
        together: what reads its passes and those of others in one; None where its cache is all that it knows.
    """

    device: torch.device
    vocab_size: int
    hidden_states: Tensor | None = None
    together: Together | None = None

    def __init__(self, capacity: int) -> None:
        self.context = capacity
        self.captured_layers: tuple[int, ...] = ()
        self._cache: Any = None
        self._start = 0  # of the last pass

    @property
    def length(self) -> int:
        raise NotImplementedError

    @property
    def cannot_branch(self) -> str | None:
        """Why it cannot read rows that are no chain, in words; None if it can."""
        return None

    @property
    def exact_tree_rows(self) -> int:
        """The most rows of a pass in which a row of a tree has the same bits as in a chain of its path; 0 if none."""
        return 0

    @property
    def exact_rows(self) -> int:
        """The most rows of a pass in which a row's logits have the same bits as in a pass of that row alone; 0 if none.

        Badges, tolerances and limits of K all come from here.
        """
        return 0

    @property
    def experts_read(self) -> Mapping[int, float]:
        """Mean experts read in a layer, by the rows of the pass; empty where they are not counted."""
        return {}

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        """From the next pass on, keep the outputs of these decoder layers in `hidden_states`, in this order.

        Layers count from 0. An output is the residual stream after the layer, before any final norm. transformers calls
        it `hidden_states[layer + 1]`, but norms that of the last layer.
        """
        self.captured_layers = tuple(layers)

    @property
    def capture_seconds(self) -> float:
        """What captures have taken in this process."""
        return 0.0

    def captured(self, key: object, function: Callable[..., T]) -> Callable[..., T]:
        """A function of tensors whose calls are captured, as passes are; without captures the function itself.

        Functions with the same `key` compute the same.
        """
        return function

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Read a prompt into the empty cache. Returns the logits after its last token, [1, V]."""
        raise NotImplementedError

    def forward(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
        """Read T more tokens, a list or a tensor [T] int64 on any device. Returns the logits after each, [T, V].

        Args:
            parents: the row of this pass that each token follows, -1 for the cache, see `rows`. None stands for a
                chain. A pass that branches must be followed by `keep`, which says which rows are text.
        Raises:
            ValueError: the cache has no room for them, or the parents are not those of a tree.
            BadInput: there are parents, and the runner reads chains only.
        """
        raise NotImplementedError

    def keep(self, path: Sequence[int]) -> None:
        """Keep these rows of the last pass, each the parent of the next, and forget the others.

        The kept rows, and their hidden states, move to the front of the pass; none is computed again.
        """
        states, beginning = self.hidden_states, is_beginning(path)
        if not beginning:
            assert self._cache is not None, "a pass comes first"
            with torch.inference_mode():
                self._cache.move(self._start, path)
        if states is not None:
            self.hidden_states = states[: len(path)] if beginning else states[to_device(path, states.device)]
        self.rollback(self._start + len(path))

    def rollback(self, length: int) -> None:
        """Forget all tokens from position `length` on. Nothing is copied. Not into a pass that branches."""
        raise NotImplementedError

    def first_layers(self, count: int, capacity: int) -> Runner:
        """A runner of the first `count` layers with the model's own norm and head.

        It shares the model's weights, and has its own cache of `capacity` tokens.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Free the cache and the hidden states. May be called twice."""
        raise NotImplementedError

    def check_branches(self) -> None:
        """Refuse rows that are no chain where it cannot read them."""
        if reason := self.cannot_branch:
            raise BadInput(f"A tree cannot be checked here: {reason}. Draft a chain.")

    def check_fits(self, count: int) -> None:
        """Refuse a pass that the cache has no room for. Without this, slices would be cut off silently."""
        if self.length + count > self.context:
            raise ValueError(
                f"The cache has room for {self.context} tokens and holds {self.length}; {count} more do not fit."
            )


def is_beginning(path: Sequence[int]) -> bool:
    """Whether a path is the first rows of a pass, as in a chain, so that no row has to move."""
    if any(row >= following for row, following in pairwise(path)):
        raise ValueError(f"The rows of a path rise: {list(path)} do not.")
    return not path or path[-1] == len(path) - 1


@dataclass(frozen=True, slots=True)
class Pass(PendingPass):
    """What a runner is to read: a prompt, or more tokens, see `Runner.prefill` and `Runner.forward`."""

    runner: Runner
    ids: Sequence[int] | Tensor
    parents: Sequence[int] | None = None
    prompt: bool = False

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def together(self) -> Together | None:
        return None if self.prompt else self.runner.together

    @property
    def place(self) -> int:
        return self.runner.length

    def go_back(self, place: int) -> None:
        self.runner.rollback(place)

    def read(self) -> Tensor:
        return self.runner.prefill(list(self.ids)) if self.prompt else self.runner.forward(self.ids, self.parents)
