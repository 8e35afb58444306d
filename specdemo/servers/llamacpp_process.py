"""llama.cpp's server on a GGUF file, started in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from ..errors import BadInput

PYTHON = "SPECDEMO_LLAMACPP_PYTHON"  # names another Python that has llama.cpp's server
START_SECONDS = 300


def can_start() -> bool:
    """Whether there is a Python that has llama.cpp's server."""
    return PYTHON in os.environ or find_spec("xllamacpp") is not None


def last_line(log: IO[str]) -> str:
    """The last line that a process wrote into its log: why it ended."""
    log.seek(0)
    return (log.read().strip().splitlines() or ["nothing"])[-1]


@contextmanager
def started(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Address and version of a server in a process of its own, see `llamacpp_server`; it ends with the block."""
    command = [os.environ.get(PYTHON, sys.executable), str(Path(__file__).with_name("llamacpp_server.py"))]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(START_SECONDS, process.kill)
        try:
            late.start()
            process.stdin.write(json.dumps(options) + "\n")
            process.stdin.flush()
            line = next((text for text in process.stdout if text.startswith("{")), None)
            if line is None:
                raise BadInput(f"llama.cpp's server did not start: {last_line(log)}")
            late.cancel()
            answer = json.loads(line)
            yield answer["address"], answer["version"]
        except BrokenPipeError as error:
            raise BadInput("llama.cpp's server did not start: its Python ended at once.") from error
        finally:
            late.cancel()
            process.kill()
            process.communicate()
