"""The classes that many tests build or annotate with: a renaming in the package changes this file and no test."""

from specdemo.decoding.adaptive_k import DraftLengthController
from specdemo.decoding.costs import CostModel
from specdemo.decoding.rejection import Rejection
from specdemo.decoding.rule import Match
from specdemo.drafters.heads.drafter import HeadDrafter
from specdemo.drafters.heads.eagle import Eagle
from specdemo.engines.eager import EagerRunner
from specdemo.engines.gpu.graph import GraphRunner
from specdemo.engines.layout import FusedModel
from specdemo.models.loaded import Loaded
from specdemo.racing.figures import LaneFigures

__all__ = [
    "CostModel",
    "DraftLengthController",
    "EagerRunner",
    "Eagle",
    "FusedModel",
    "GraphRunner",
    "HeadDrafter",
    "LaneFigures",
    "Loaded",
    "Match",
    "Rejection",
]
