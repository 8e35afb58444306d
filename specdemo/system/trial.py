"""Tries in a child process what may crash or hang on this machine, and keeps what became of it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from tempfile import NamedTemporaryFile
from threading import Thread
from time import monotonic

from .folders import cache_folder
from .progress import check_stopped, tell

STARTING, SILENT = 180.0, 60.0  # the most seconds before the first line of a child, and between two lines
OFTEN = 0.5  # seconds between two looks at whether the work should stop
FROM_OUTSIDE = signal.SIGINT, signal.SIGTERM, 9  # SIGKILL, also where memory is short
FOLDER = Path(__file__).parents[2]


def tried(module: str, names: Sequence[str], given: bytes, facts: Iterable[object]) -> dict[str, str | None]:
    """What went wrong in each of several trials, in words that follow a subject; "" where nothing did, None where that
    is not known, as without memory.

    `python -m module NAMES` runs them, with `given` as its input. It prints a line when it begins, a JSON object of the
    name and the words after each trial, and any other lines in between. After a trial that went wrong it may end; then
    it is run again for the others. Where it cannot begin, nothing is known of the trials.

    Args:
        facts: what the outcome depends on. While they stay the same, it is read from the cache.
    """
    key = hashlib.sha256("\n".join(map(str, (module, *names, *facts))).encode()).hexdigest()[:16]
    file, found = cache_folder() / f"{key}.trial", dict[str, str | None]()
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: it is no object
        kept: dict[str, str | None] = json.loads(file.read_text(encoding="utf-8"))
        if kept.keys() == {*names} and all(isinstance(words, str) for words in kept.values()):
            return kept
    tell("trying the engine in a process of its own, once on this machine")
    while left := [name for name in names if name not in found]:
        ended = _run([sys.executable, "-m", module, *left], given, found)
        if ended is None:
            return found
        unknown = [name for name in left if name not in found]
        if unknown == left:
            found[left[0]] = ended or "ends without an answer"
        elif unknown and ended and not found[left[-len(unknown) - 1]]:  # else it ended for what went wrong before
            found[unknown[0]] = ended
    if None in found.values():
        return found
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, suffix=".trial", delete=False, encoding="utf-8") as partial:
            json.dump(found, partial)
        os.replace(partial.name, file)
    return found


def _run(command: Sequence[str], given: bytes, found: dict[str, str | None]) -> str | None:
    """Run a child, and add what it finds to `found`. Returns how it failed, or "", or None if it did not begin or was
    ended from outside."""
    lines: Queue[bytes | None] = Queue()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    # A compiler that it has started ends with it, and Ctrl-C is not for it.
    with subprocess.Popen(command, cwd=FOLDER, start_new_session=True, **pipes) as child:  # type: ignore[call-overload]

        def listen() -> None:
            with suppress(OSError):  # it has ended already
                child.stdin.write(given)
                child.stdin.close()
            for line in child.stdout:
                lines.put(line)
            lines.put(None)

        Thread(target=listen, daemon=True).start()
        try:
            begun, until = False, monotonic() + STARTING
            while True:
                check_stopped()
                try:
                    line = lines.get(timeout=OFTEN)
                except Empty:
                    if monotonic() < until:
                        continue
                    return f"does not end within {SILENT:.0f} seconds" if begun else None
                if line is None:
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(SILENT)
                    break
                begun, until = True, monotonic() + SILENT
                with suppress(ValueError):
                    outcome = json.loads(line)
                    found |= outcome if isinstance(outcome, dict) else {}
        finally:
            _kill(child.pid)
    if not begun or -child.returncode in FROM_OUTSIDE:
        return None
    return "" if child.returncode == 0 else f"ends the process (with {child.returncode})"


def _kill(pid: int) -> None:
    """End a child and all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)
