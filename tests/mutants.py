"""Do the tests notice mistakes? Runs `mutants.txt`: seeded faults, each with the test files that should fail for it.

    python -m tests.mutants [--only NAME ...] [--jobs N]

Each is put into a copy of the tracked files, one at a time, and the named test files are run there up to the first
failure. Prints a line for each: killed and by which test, survived, or stale, where the text that it replaces is not in
its file exactly once or a test file is gone. In the end the tests that killed are run without any fault.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".txt")
SECONDS = 180  # for the test files of a mutant; one that takes longer hangs them, and is killed
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
KILLED, SURVIVED, STALE = "killed", "survived", "stale"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def read_mutants(text: str) -> Iterator[Mutant]:
    """Blocks of lines, apart by empty lines. The first says `name | file | tests`, by the middle of their names; lines
    that begin with - are the old text, and those with + the new one. A block of lines with # is a comment."""
    for block in re.split(r"\n\n+", text.strip()):
        if block.startswith("#"):
            continue
        head, *lines = block.split("\n")
        name, file, tests = map(str.strip, head.split("|"))
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
        yield Mutant(name, f"specdemo/{file}", old, new, [f"tests/unit/test_{test}.py" for test in tests.split()])


def run_tests(tree: Path, tests: list[str], limit: float | None = None) -> tuple[str, str]:
    """The outcome of tests in a tree, and which one failed first."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    how: dict[str, Any] = {"cwd": tree, "capture_output": True, "text": True, "errors": "replace", "timeout": limit}
    try:
        done = subprocess.run(command, check=False, **how)
    except subprocess.TimeoutExpired:
        return KILLED, f"the limit of {limit:.0f} seconds"
    if done.returncode == 0:
        return SURVIVED, ""
    if found := FAILED.search(done.stdout):
        return KILLED, found[1]
    return (KILLED, "the end of the process") if done.returncode < 0 else (STALE, done.stdout.strip()[-200:])


def tried(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """What becomes of a mutant in a tree, which is then as before."""
    file = tree / mutant.file
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if (count := text.count(mutant.old)) != 1:
        return STALE, f"its text is there {count} times"
    if gone := [test for test in mutant.tests if not (tree / test).exists()]:
        return STALE, f"there is no {gone[0]}"
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return run_tests(tree, mutant.tests, SECONDS)
    finally:
        file.write_text(text, encoding="utf-8")


def copied(folder: Path) -> Path:
    """A copy of the tracked files, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these mutants")
    asked.add_argument("--jobs", type=int, default=1, metavar="N", help="how many at a time, each in its own copy")
    given = asked.parse_args()
    mutants = list(read_mutants(LIST.read_text(encoding="utf-8")))
    assert len({mutant.name for mutant in mutants}) == len(mutants), "each has a name of its own"
    chosen = [one for one in mutants if not given.only or one.name in given.only]
    counts, killers = dict.fromkeys((KILLED, SURVIVED, STALE), 0), set[str]()
    with TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(given.jobs) as threads:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            trees.put(copied(Path(folder) / str(number)))

        def judged(mutant: Mutant) -> tuple[str, str, float]:
            tree, began = trees.get(), time.monotonic()
            try:
                return *tried(mutant, tree), time.monotonic() - began
            finally:
                trees.put(tree)

        for mutant, (outcome, by, seconds) in zip(chosen, threads.map(judged, chosen), strict=True):
            counts[outcome] += 1
            killers |= {by} if outcome == KILLED and ".py" in by else set()
            print(f"{outcome:8} {mutant.name:32} {mutant.file:42} {by} ({seconds:.0f} s)", flush=True)
        print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
        outcome, by = run_tests(trees.get(), sorted(killers)) if killers else (SURVIVED, "")
        if outcome != SURVIVED:
            print(f"Without a fault too there fails: {by}")
    sys.exit(outcome != SURVIVED or counts[KILLED] < len(chosen))


if __name__ == "__main__":
    main()
