"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Several processes share the cores: threads that wait for each other sleep, as spinning takes others' time (a third of
# it all, measured). On toy tensors waking a second thread takes a hundred times as long as the work, so there is one.
# OpenMP asks once, when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")


gc.disable()  # while tests are collected, which makes and keeps much: see below

try:
    from hypothesis import settings
except ModuleNotFoundError:  # tests/gpu runs without it
    pass
else:
    # A busy machine makes any single example slow now and then, and a failure must be found again the same way.
    settings.register_profile("specdemo", deadline=None, derandomize=True, max_examples=30, print_blob=True)
    settings.load_profile("specdemo")
    # Chosen by `--hypothesis-profile slow`.
    settings.register_profile("slow", settings.get_profile("specdemo"), max_examples=1000)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite runs in three processes where pytest-xdist is installed, unless `-n` says otherwise."""
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    a_worker = hasattr(config, "workerinput")
    if whole and not a_worker:  # or each process that is started compiles every module again
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if whole and not a_worker and config.getoption("numprocesses", 0) is None and not config.getoption("usepdb"):
        config.option.numprocesses, config.option.dist = 3, "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a table that is `sampled(n)` mark all cases but every n-th slow.

    Where the number of values of an axis and n have no common factor, each value is tested every day.
    """
    cases: Counter[str] = Counter()
    for item in items:
        sampled, name = item.get_closest_marker("sampled"), item.nodeid.partition("[")[0]
        if sampled and not item.get_closest_marker("slow"):
            if cases[name] % sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[name] += 1


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line, or that of another app, in this process: exit status, stdout, stderr."""

    def run(*words: str, app: Any = None) -> tuple[int, str, str]:
        from specdemo.cli import main as cli

        monkeypatch.setattr("sys.argv", ["specdemo", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main(app or cli.app)
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture(autouse=True)
def never_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a race in a test says does not depend on the load of the machine, nor on other races; see `test_pace`."""
    monkeypatch.setattr("specdemo.racing.busy.FEW_PASSES", 10**9)


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """What is imported or kept by now stays. Loads free memory by a collection, which need not look at that again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test had to be tried again, which pytest-rerunfailures leaves out."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"tried again: {report.nodeid}")
        terminalreporter.line(report.longreprtext)


@pytest.fixture
def drafting() -> Iterator[Any]:
    """A fake server of llama.cpp that drafts, and its address."""
    from .fakes.server import llamacpp_answers, replayed, serving

    with serving(llamacpp_answers(replayed("llamacpp-ended"))) as found:
        yield found


@pytest.fixture
def plain() -> Iterator[Any]:
    """One that writes the same text without drafts."""
    from .fakes.server import llamacpp_answers, replayed_alone, serving

    with serving(llamacpp_answers(replayed_alone("llamacpp-ended"))) as found:
        yield found
