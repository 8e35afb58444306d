"""The training of a Medusa head: each of its places learns the target's distribution so many tokens further on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..drafters.heads.medusa import MedusaHead
from .states import Text


def medusa_outputs(head: MedusaHead, text: Text, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each of `steps` places: outputs [N, hidden], and row and column of the token before their prediction."""
    state = head.fused(text.states)
    for place in range(steps):
        ahead = place + 1
        same = text.begin[:, ahead:] == text.begin[:, :-ahead]
        row, column = torch.nonzero(same, as_tuple=True)
        yield head.place(place, state[row, column]), row, column + ahead
