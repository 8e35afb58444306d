"""The kinds of trained heads."""

from __future__ import annotations

from .medusa import MedusaHead
from .networks import BlockHead, EagleHead, Head

KINDS: dict[str, type[Head]] = {kind.kind: kind for kind in (EagleHead, BlockHead, MedusaHead)}
OF_PRESETS: dict[str, type[Head]] = {**KINDS, "dspark": BlockHead, "dflash2": BlockHead}
"""The kinds of the heads of a preset, by the names of their drafters: it may have several block heads."""
