"""The kinds of trained heads."""

from __future__ import annotations

from .medusa import MedusaHead
from .networks import BlockHead, EagleHead, Head

KINDS: dict[str, type[Head]] = {kind.kind: kind for kind in (EagleHead, BlockHead, MedusaHead)}
