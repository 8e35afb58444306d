"""Serves the page: what a Space runs. `python -m specdemo serve` does the same with options."""

from __future__ import annotations

import sys

from specdemo.errors import BadInput
from specdemo.system.imports import import_quickly

if __name__ == "__main__":
    try:
        import_quickly("specdemo.ui.serve").serve()
    except BadInput as error:
        sys.exit(str(error))
