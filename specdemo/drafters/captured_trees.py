"""Trees that a kernel grows in captured work: those of `tree.grow_by_depth`, in tables of fixed shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from math import isnan
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..decoding.acceptance import DRAFTER_OVERFLOWED
from ..decoding.rule import Rule
from ..engines.gpu.capture import CapturedFunctions
from ..engines.rows import MOST_ROWS, WIDTH
from ..errors import NotFinite
from ..settings import MAX_NODES
from ..system.device import packed, to_device, unpacked
from ..system.replaced import REPLACED, TREES
from ..tokens import Draft
from .tree import tree_of

VALUE, SHARE, TOKEN, PARENT = range(4)  # lines of a table


class Growth(NamedTuple):
    """The best tokens of a tree up to a depth, and those of this depth that are to be read."""

    # float64 [4, N]. Column 0 is the text, with the value and the share 1, or NaN if some logits were not finite. The
    # tokens follow, the largest value first, so a parent comes before its children. Those with the value 0 are none.
    # Parents are columns.
    table: Tensor
    places: Tensor  # the columns of the tokens to read, int64 [W]
    rows: Tensor  # the rows of the pass over the last depth that read their parents, int64 [W]
    real: Tensor  # whether there is such a token, bool [W]; the others are copies of the last one
    slots: Tensor  # where each is read: its place among all rows that were read for this tree, int64 [W]
    read: Tensor  # the number of these rows, int64 [1]
    depth: Tensor  # how many ancestors these tokens have, int64 [1]

    @classmethod
    def of_text(cls, nodes: int, device: torch.device) -> Growth:
        """A tree without tokens that has room for `nodes`. It is the text that has been read."""
        table = torch.zeros(4, nodes + 1, dtype=torch.float64, device=device)
        table[:2, 0].fill_(1)
        nothing = torch.zeros(1, dtype=torch.long, device=device)
        return cls(table, nothing, nothing, nothing == 0, nothing, nothing, nothing - 1)

    @property
    def token_ids(self) -> Tensor:
        """The tokens to read, int64 [W]."""
        return self.table[TOKEN][self.places].long()

    def grown(self, token_ids: Tensor, shares: Tensor, limits: Tensor, width: int, most_rows: int) -> Growth:
        """The same tree a depth later, by a kernel.

        Args:
            token_ids, shares: what may follow each token that was read, the largest share first, [W, C] each, or
                [1, C] if it is the same.
            limits: float64 [2], the most tokens of the tree, and `stop_below`, see `tree.grow`.
            width: of the next pass, the most of its tokens.
            most_rows: of all passes for the tree.
        """
        from ..engines.gpu import trees

        fields = self.table, self.places, self.real, self.read, self.depth
        return Growth(*trees.grown(*fields, token_ids, shares, limits, width, most_rows))


def paths_of(growth: Growth, before: Tensor) -> Tensor:
    """The slots that the tokens to read see, in the form of `engines.rows.branches_of`, uint8 [W, MOST_ROWS].

    `before` is the same of the last depth, [W', MOST_ROWS], or of the text.
    """
    along = torch.arange(MOST_ROWS, device=before.device)
    return torch.where(along < growth.depth, before[growth.rows], growth.slots[:, None].byte())


def paths_of_text(device: torch.device) -> Tensor:
    """See `paths_of`: it sees no slot."""
    return torch.zeros(1, MOST_ROWS, dtype=torch.uint8, device=device)


def draft_of(table: Sequence[Sequence[float]], nodes: int, stop_below: float) -> Draft:
    """The draft of a tree that has grown, from its table on the host.

    Raises:
        NotFinite: the drafter's logits were not.
    """
    values, shares, token_ids, parents = table
    if isnan(shares[0]):
        raise NotFinite(DRAFTER_OVERFLOWED)
    end = 2
    while end < min(len(values), nodes + 1) and values[end] > 0 and values[end] >= stop_below:
        end += 1
    branches = zip(parents[1:end], token_ids[1:end], strict=True)
    return tree_of([(int(parent) - 1, int(token)) for parent, token in branches], shares[1:end])


class Reader(Protocol):
    """Reads trees in captured work.

    `state` is what it has learned of the last depth. Another goes on with it.
    """

    state: Sequence[Tensor]

    def begin(self, *given: Tensor) -> Tensor:
        """The logits after the text, [1, V'], from what the drafter has made of the text."""

    def read(self, growth: Growth) -> Tensor:
        """The logits after the tokens to read, [W, V'], or [1, V'] if they are all the same."""


class CapturedTrees:
    """Grows trees on a GPU by captured calls of several depths. The host waits once for each call."""

    @staticmethod
    def possible() -> bool:
        """Whether the kernel runs here. If not, the host grows the trees."""
        return find_spec("triton") is not None and TREES not in REPLACED

    def __init__(
        self,
        reader: Callable[[], Reader],
        functions: CapturedFunctions,  # keeps what is captured; of these readers alone
        token_ids: Tensor | None,
        depths: int,  # of a call
        width: int = WIDTH,
        most_rows: int = MOST_ROWS,
    ) -> None:
        self.reader, self.functions, self.token_ids = reader, functions, token_ids
        self.depths, self.width, self.most_rows = depths, width, most_rows

    def draw(
        self, given: Sequence[Tensor], nodes: int, depth: int, rule: Rule, position: int, stop_below: float = 0.0
    ) -> Draft:
        """The tree of `tree.grow_by_depth`, from what `Reader.begin` is given."""
        device, deepest, done = given[0].device, min(nodes, depth), 0
        call = self.functions(("tree", rule.kind), self._call_by(rule))
        limits = to_device(torch.tensor([nodes, stop_below], dtype=torch.float64), device)
        growth: Sequence[Tensor] = ()
        while True:
            until = min(done + self.depths, deepest)
            numbers = rule.draft_numbers(range(position + done, position + until))
            numbers = numbers if numbers is None else to_device(numbers, device)
            shape = until - done, min(nodes, WIDTH), self.width, len(growth)
            vector, growth, given = call(*shape, limits, numbers, *growth, *given)
            size = MAX_NODES + 1
            *table, real = unpacked(vector, size, size, size, size, self.width)
            done = until
            if done == deepest or not any(real):
                return draft_of(table, nodes, stop_below)

    def _call_by(self, rule: Rule) -> Callable[..., tuple[Tensor, Growth, Sequence[Tensor]]]:
        def call(
            depths: int, children: int, width: int, begun: int, limits: Tensor, numbers: Tensor | None, *given: Tensor
        ) -> tuple[Tensor, Growth, Sequence[Tensor]]:
            growth, reader = Growth.of_text(MAX_NODES, limits.device), self.reader()
            if begun:
                growth, reader.state = Growth(*given[:begun]), given[begun:]
            for place in range(depths):
                logits = reader.read(growth) if begun or place else reader.begin(*given)
                number = None if numbers is None else numbers[place : place + 1]
                columns, shares = rule.likeliest(logits, number, children, self.token_ids)
                tokens = columns if self.token_ids is None else self.token_ids[columns]
                growth = growth.grown(tokens, shares, limits, width, self.most_rows)
            return packed(growth.table.flatten(), growth.real), growth, reader.state

        return call
