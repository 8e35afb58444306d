"""Reads a visitor's trace in a process of its own.

In this process the engine would wait while Python reads the file. The other process has a low priority: it gets a 28th
of a core that the engine uses too.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from ..values import to_json
from .playable import uploaded

MAX_TRACE = 32_000_000  # bytes of a file, unpacked; more than any race of the page takes, see `run.MOST_BYTES`
OPENING_SECONDS = 60.0  # a file may take, from its first byte
OPENING_MEMORY = 500_000_000 + 40 * MAX_TRACE  # bytes: what Python needs to begin, and the objects of the largest trace
NICE = 15  # how much less urgent that process is than others
OPEN = (
    "import os, sys; getattr(os, 'nice', int)(int(sys.argv[1])); "
    "from specdemo.ui.replay.opening import open_file; open_file()"
)
TOO_LARGE = f"This file is too large: a trace has at most {MAX_TRACE / 1e6:g} MB."
NOT_OPENED = "This file could not be opened: reading it takes too long or too much memory."


async def opened(file: bytes | bytearray) -> bytes | str:
    """What the script plays for a visitor's file, made by another process."""
    pipe, root = asyncio.subprocess.PIPE, Path(__file__).resolve().parents[3]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        OPEN,
        str(NICE),
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=root,
    )
    try:
        answer, _ = await process.communicate(file)
    finally:
        with suppress(ProcessLookupError):  # it has ended
            process.kill()
    return answer if process.returncode == 0 else to_json({"error": NOT_OPENED})


def open_file() -> None:
    """The other process: reads a trace from stdin and writes what the script plays to stdout."""
    with suppress(ImportError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (OPENING_MEMORY, OPENING_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(OPENING_SECONDS), int(OPENING_SECONDS)))
    answer = uploaded(sys.stdin.buffer.read().decode("utf-8", "replace"))
    sys.stdout.buffer.write(answer.encode())
