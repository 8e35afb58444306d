"""Is an engine right and exact on this machine? A test of its first and last layer and its head when it is loaded.

Tests on other machines stand behind what an engine claims. Another compiler, CPU, GPU or driver can break it, so it is
tested where it runs: its logits against those of torch's plain operations, and the bits of a row alone, in chains, in
trees, beside another sequence, and after a path was kept. The cache is full of random numbers, and the rows stand at
its end and at its beginning.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..system.progress import check_stopped
from .choose import MakeRunner
from .exactness import TESTED_ROWS, TESTED_TREE_ROWS, SelfTest
from .fused import FusedRunner
from .gpu.graph import GraphRunner
from .layout import FusedModel
from .runner import Pass

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .named_weights import Weights

LENGTH = 1024  # the most tokens of the cache
CHAINS, TREES = (2, 6, 9, TESTED_ROWS), (8, TESTED_TREE_ROWS)  # rows
BESIDE = 6  # rows of a chain that is read together with another one
DRAFTED = 6  # tokens
SEED = 20
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}  # the largest relative error of logits
OF_BYTES = 0.2  # the same where the inputs of products are rounded to one byte


class WrongLogits(Exception):
    """An engine computes other logits than torch. The message says how, and follows the name of the engine."""


def self_test(make: MakeRunner, config: PreTrainedConfig, weights: Weights) -> SelfTest | None:
    """Test the engine whose runners `make` makes, of a known model with these weights. What they claim is set to what
    was found. None if the context is too short.

    Raises:
        WrongLogits: they are not those of torch's operations.
    """
    began, length = time.perf_counter(), length_of(config)
    if not length:
        return None
    whole = cast(FusedRunner, make(1))
    with torch.inference_mode():
        plain = FusedModel.ends_of(config, weights, plain=True)
        rows, tree_rows = tested(whole.of_ends(), FusedRunner(plain, length), length)
    whole.together.self_test = found = SelfTest(rows, tree_rows, time.perf_counter() - began)
    whole.release()
    return found


def length_of(config: PreTrainedConfig) -> int:
    """The tokens of the cache of a test, 0 if the model reads too few."""
    length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    return length if length > TESTED_ROWS + 1 else 0


def tested(make: MakeRunner, reference: FusedRunner, length: int) -> tuple[int, int]:
    """Up to how many rows of a chain and of a tree an engine is exact, of those that it claims and that are tested. At
    the beginning of a text only the longest are that were exact at its end.

    Args:
        make: makes its runners.
        reference: gives the logits by torch's operations, at least the first of each row.
        length: of the caches.
    """
    runner, other = (cast(FusedRunner, make(length)) for _ in range(2))
    model, numbers = reference.model, torch.Generator().manual_seed(SEED)
    shape = len(model.layers), model.kv_heads, length, model.width
    keys, values = torch.randn(2, *shape, generator=numbers).to(runner.device, runner.model.dtype)
    ids = torch.randint(reference.vocab_size, (CHAINS[-1],), generator=numbers).tolist()
    for one in (runner, other, reference):
        one.fill(keys, values)
    claimed, claimed_of_trees = runner.claimed_rows
    chains, trees, tree_rows = [rows for rows in CHAINS if rows <= claimed], [*TREES], TESTED_TREE_ROWS
    for start in (length - len(ids), 1):
        place = Place(start, ids, runner, other, reference)
        logits = place.chain()
        rows = place.exact_rows(chains, logits)
        tree_rows = min(tree_rows, place.exact_tree_rows(trees, logits))
        if rows < min(claimed, TESTED_ROWS):  # trees were compared with a chain that is not exact
            tree_rows = 0
        chains, trees = [rows] if rows else [], [tree_rows or TREES[-1]]
    for one in (runner, other):
        one.release()
    return rows, min(tree_rows, claimed_of_trees)


@dataclass(frozen=True, slots=True)
class Place:
    """Runners that read the tokens `ids` after the first `start` of a full cache."""

    start: int
    ids: list[int]
    runner: FusedRunner
    other: FusedRunner  # of the same model
    reference: FusedRunner

    def read(
        self, token_ids: Sequence[int], parents: Sequence[int] | None = None, runner: FusedRunner | None = None
    ) -> Tensor:
        """The logits after tokens that follow the first `start`, by default those of the tested runner."""
        check_stopped()
        runner = runner or self.runner
        runner.rollback(self.start)
        return runner.forward(token_ids, parents)

    def checked(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
        """`read`, compared with the reference.

        Raises:
            WrongLogits: they are not alike.
        """
        logits, truth = self.read(token_ids, parents), self.read(token_ids, parents, self.reference).double()
        wrong = logits[:, : truth.shape[1]] - truth
        error = float(wrong.norm() / truth.norm())
        if any(layer.router for layer in self.reference.model.layers):  # rounding gives some rows other experts
            error = float((wrong.norm(dim=1) / truth.norm(dim=1)).median())
        tolerance = OF_BYTES if self.runner.model.rounds_inputs else TOLERANCE[self.runner.model.dtype]
        if not error <= tolerance:  # NaN is no error that is small enough
            raise WrongLogits(f"gives other logits than torch (the error is {error:.1e} of their size)")
        return logits

    def chain(self) -> Tensor:
        """The logits of all tokens in a chain.

        Raises:
            WrongLogits: these, or those of a draft in captured work, are not right.
        """
        if isinstance(self.runner, GraphRunner) and not drafts_alike(self.runner, self.start, self.ids[0]):
            raise WrongLogits("drafts other tokens in captured work")
        return self.checked(self.ids)

    def exact_rows(self, chains: Sequence[int], longest: Tensor) -> int:
        """Up to how many rows a row is the same bits as alone, of chains of so many.

        Args:
            longest: the logits of all tokens in a chain.
        """
        exact, before = 0, self.read(self.ids[:1])
        alone = {0: before}
        for rows in chains:
            logits = longest if rows == len(longest) else self.read(self.ids[:rows])
            same = all(torch.equal(logits[row : row + 1], one) for row, one in alone.items())
            if not same or not torch.equal(logits[: len(before)], before):
                return exact
            if rows == BESIDE:
                self.runner.rollback(self.start)
                self.other.rollback(self.start)
                both = [Pass(self.other, self.ids[-3:]), Pass(self.runner, self.ids[:rows])]
                if not torch.equal(self.runner.together.read(both)[1], logits):
                    return exact
            exact, before = rows, logits
            if rows < len(self.ids):
                alone[rows] = self.runner.forward(self.ids[rows : rows + 1])
        return exact

    def exact_tree_rows(self, trees: Sequence[int], longest: Tensor) -> int:
        """Up to how many rows a row is the same bits as in the chain of its path, of trees of so many.

        Raises:
            WrongLogits: those of a tree are not like those of the reference.
        """

        def is_exact(rows: int) -> bool:
            token_ids, parents, path = tree_around(self.ids[:rows])
            logits, kept = self.checked(token_ids, parents)[path], len(path) - 1
            self.runner.keep(path[:-1])
            after = self.runner.forward(self.ids[kept : kept + 1])
            return torch.equal(logits, longest[: len(path)]) and torch.equal(after, longest[kept : kept + 1])

        return max(() if self.runner.cannot_branch else takewhile(is_exact, trees), default=0)


def tree_around(ids: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """A tree of as many tokens around a chain of the first ones: its tokens, their parents, and the path of the chain.

    Every token of the path has a second child.
    """
    rows = range(len(ids))
    path, token_ids = [0, *rows[1::2]], [*reversed(ids)]
    for row, token in zip(path, ids, strict=False):
        token_ids[row] = token
    return token_ids, [-1 if row == 0 else max(0, (row - 1) // 2 * 2 - 1) for row in rows], path


def drafts_alike(runner: GraphRunner, start: int, token: int) -> bool:
    """Whether a chain that is drafted in captured work is the one that passes draft."""

    def chain(logits: Tensor) -> Tensor:
        next_logits, drawn = passes.following(logits), list[Tensor]()
        for _ in range(DRAFTED):
            drawn.append(next_logits(drawn).argmax(-1))
        return torch.cat(drawn)

    runner.rollback(start)
    logits, drawn = runner.forward([token]), list[int]()
    passes = runner.begin_chain(DRAFTED - 1)
    captured = passes.functions("self-test", chain)(logits).tolist()
    runner.rollback(start + 1)
    for _ in range(DRAFTED):
        drawn.append(int(logits.argmax(-1)))
        logits = runner.forward(drawn[-1:])
    return captured == drawn
