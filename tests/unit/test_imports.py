"""What the slow imports leave out, and that they leave the rest as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TELL = """
import gc, sys
from specdemo.imports import import_quickly
import_quickly("specdemo.models")
print("transformers.modeling_utils" in sys.modules)
import_quickly("transformers.modeling_utils")
from transformers.utils import is_scipy_available
print("scipy.optimize" in sys.modules, "gradio" in sys.modules, is_scipy_available(), gc.isenabled())
import scipy.optimize
print(scipy.optimize.brentq(lambda x: x - 1, 0, 3))
"""


def test_what_a_start_has_no_use_for_is_not_imported_and_works_afterwards() -> None:
    command = [sys.executable, "-c", TELL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False", "False", "True", "True", "1.0"]
