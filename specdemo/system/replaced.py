"""What does not run right on this machine. Something slower takes its place, and a sentence says so."""

from __future__ import annotations

import logging

from .progress import tell

log = logging.getLogger(__name__)
# Parts of this program that have no name of their own; others are the parts of a pass (`ops.PARTS`) and C files.
KERNELS, DRAWS, TREES, LIBRARY = "kernels", "draws", "trees", "C"
REPLACED: dict[str, str] = {}  # by the name of an engine or a part of one: the sentence


def replace(name: str, sentence: str) -> None:
    """Do without a part of this program until it ends."""
    REPLACED[name] = sentence
    log.warning(sentence)
    tell(sentence)
