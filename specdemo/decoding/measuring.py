"""What K = auto measures before its first run: the cost of passes, and that of short and longer drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from math import inf

import torch

from ..engines.runner import ANY_ROWS, Runner
from ..settings import MAX_K
from ..system.progress import check_stopped, tell
from ..tokens import Draft
from .adaptive_k import DraftLengthController
from .batch import decode
from .costs import CostModel
from .drafter import Drafter
from .either import source_of
from .loop import Decoding, Form
from .rule import Rule

CALIBRATION_SECONDS = 0.6
MEASURED_TOKENS = 64  # the most of a pass that several readers share, unless these are two for each
LENGTHS = (1, 2, 3, 4, 6, 9, 13, 17)  # the passes that a calibration measures, up to the largest that auto uses
TRIED = Form(1), Form(4), Form(2, True), Form(8, True)  # the drafts of the runs of `try_out`
TRYING_SECONDS, SLOW_PASS = 0.15, 0.1  # of each run; and of a pass above which there are no runs


@torch.inference_mode()
def measure_passes(runner: Runner, rule: Rule, readers: int = 1) -> dict[int, float]:
    """The seconds of the passes that auto uses, verification included, by the number of tokens read.

    They go up to `MAX_K`, but no further than the engine is exact. With several readers they are those of as many
    tokens for each, up to `MEASURED_TOKENS` in all or two for each, and those of a round in which a quarter or half of
    them draft a token.

    Raises:
        Stopped: the person who waits for it has stopped it.
    """
    most = min(MAX_K + 1, runner.exact_rows or ANY_ROWS)
    each = [min(tokens, most) for tokens in LENGTHS if tokens * readers <= MEASURED_TOKENS or tokens <= 2]
    some = {readers + readers // part for part in (4, 2)} if readers > 1 else set[int]()
    seconds = dict.fromkeys(sorted({1, *some, *(readers * tokens for tokens in each)}), inf)
    try:
        runner.prefill([0])
        end = time.perf_counter() + CALIBRATION_SECONDS
        # The first pass of a length also sets up its kernels.
        while inf in seconds.values() or time.perf_counter() < end:
            for tokens, least in seconds.items():
                check_stopped()
                began = time.perf_counter()
                rule.verify(runner.forward([0] * tokens), Draft([0] * (tokens - 1)), position=1)
                seconds[tokens] = min(least, time.perf_counter() - began)
                runner.rollback(1)
    finally:
        runner.release()
    return seconds


class Trial(DraftLengthController):
    """Always the same form, from which K = auto learns."""

    def __init__(self, costs: CostModel, form: Form) -> None:
        super().__init__(costs, form.tree)
        self.form = form

    def _pick(self, most: int, drafter: Drafter, ids: Sequence[int]) -> tuple[Drafter, Form]:
        return source_of(drafter, ids), self.form._replace(k=min(self.form.k, most))


def try_out(
    costs: CostModel, drafter: str, tree: bool, short: Callable[[int, bool], Decoding], least_drafts: int
) -> None:
    """Let `costs` learn what short and longer drafts cost before K = auto needs it, by a short run with each.

    If passes are slow this is left out: reading the prompts alone would keep people waiting.

    Args:
        short: makes a run whose drafts have this form.
        least_drafts: of each run, where its text has room for them.
    Raises:
        Stopped: the person who waits for it has stopped it.
    """
    if costs.baseline_seconds <= SLOW_PASS:
        tell(f"measuring the cost of drafts by {drafter}")
        for form in TRIED if tree else TRIED[:2]:
            run = short(form.k, form.tree)
            run.chooser = Trial(costs, form)
            with closing(decode(run)) as events:  # type: ignore[type-var]
                next(events)  # the prefill; the first draft reads the prompt as well
                end = time.perf_counter() + TRYING_SECONDS
                for _ in events:
                    firsts = costs.first_guesses
                    if time.perf_counter() > end and firsts[drafter, True] + firsts[drafter, False] >= least_drafts:
                        break
    costs.tried.add((drafter, tree))
