"""The same for the page's classes, apart because importing them takes Gradio's three seconds."""

from specdemo.ui.engine import Engine
from specdemo.ui.runs import Runs

__all__ = [
    "Engine",
    "Runs",
]
