"""The accept walk: from the text to an accepted token that follows it, and on from token to token.

A draft is a tree; a chain is the tree with parents -1, 0, 1, ... The pass over it has one row more than the draft has
tokens: row 0 reads the pending token, row i + 1 token i. So the row of a token's parent tests it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..settings import MAX_NODES
from ..types import DraftedToken, DraftOutcome, TokenKind


def walk(
    parents: Sequence[int], passed: Sequence[bool], most: int = MAX_NODES + 1
) -> tuple[list[int], list[DraftOutcome]]:
    """The path of accepted tokens, each the parent of the next, and the outcome of each drafted token.

    Of siblings that passed the first counts. The tokens after the text and after each accepted one are tested, as long
    as fewer than `most` are accepted: so many tokens are emitted.
    """
    path, outcomes, tested = list[int](), list[DraftOutcome](), {-1}
    for node, (parent, passes) in enumerate(zip(parents, passed, strict=True)):  # parents come first
        if passes and len(path) < most and parent == (path[-1] if path else -1):
            path.append(node)
            outcomes.append(DraftOutcome.ACCEPTED)
            if len(path) < most:
                tested.add(node)
        else:
            outcomes.append(DraftOutcome.REJECTED if parent in tested else DraftOutcome.UNTESTED)
    return path, outcomes


def kind_after(path: Sequence[int], parents: Sequence[int]) -> TokenKind:
    """The kind of the token that follows a path through a draft."""
    if not parents:
        return TokenKind.TARGET
    return TokenKind.RESAMPLED if (path[-1] if path else -1) in parents else TokenKind.BONUS


def branches(drafted: Sequence[DraftedToken]) -> bool:
    """Whether a draft is a tree. Only the tokens of a tree name their parents."""
    return any(token.parent is not None for token in drafted)


def parents_of(drafted: Sequence[DraftedToken]) -> list[int]:
    """The index of each token's parent in the draft, -1 for the text."""
    return [index - 1 if token.parent is None else token.parent for index, token in enumerate(drafted)]


def path_of(drafted: Sequence[DraftedToken]) -> list[int]:
    """The indices of the accepted tokens, after a -1 for the text."""
    return [-1, *(index for index, token in enumerate(drafted) if token.outcome is DraftOutcome.ACCEPTED)]


def places_tested(drafted: Sequence[DraftedToken]) -> list[DraftedToken]:
    """The drafted tokens that were tested, one for each place: the accepted ones, then the rejected one, if any.

    In a tree all children of a token are tested together. If all were rejected, one of them stands for all.
    """
    path, followed = path_of(drafted), zip(drafted, parents_of(drafted), strict=True)
    failed = [token for token, parent in followed if parent == path[-1] and token.outcome is DraftOutcome.REJECTED]
    return [*(drafted[index] for index in path[1:]), *failed[:1]]
