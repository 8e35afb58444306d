"""Work on a GPU that is captured once and replayed: CUDA graphs, and functions of tensors made of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...settings import MAX_K
from ...system.progress import tell
from ..rows import TREES

log = logging.getLogger(__name__)
# Of functions that are captured when they are first called. A test has the most shapes: those of chains of up to K
# tokens and of trees, with the drafter's probabilities and without.
MOST_SHAPES, MOST_KINDS = 2 * (MAX_K + 1 + len(TREES)), 4

Work = Callable[[], Any]  # runs on a GPU and returns tensors
Capture = Callable[[Work], Work]


class CudaCapture:
    """Makes CUDA graphs that share a memory pool, since none needs what another has left in it.

    Attributes:
        seconds: that captures have taken in this process.
    """

    seconds: ClassVar[float] = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        began, graph = time.perf_counter(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # during a capture torch cannot free cached memory
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            work()  # the set-up of a first call must not become part of the graph
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                outcome = work()
            except BaseException:  # such as too little memory; the stream must not stay in capture
                with suppress(RuntimeError):  # the error of a broken capture would hide the cause
                    graph.capture_end()
                self.pool = torch.cuda.graph_pool_handle()  # torch may take the old one for still in capture
                raise
            graph.capture_end()
        torch.cuda.synchronize(self.device)
        CudaCapture.seconds += time.perf_counter() - began

        def replay() -> Any:
            graph.replay()
            return outcome

        return replay


def capture_for(device: torch.device) -> Capture:
    """Captures on a GPU; on a CPU it returns the work as it is."""
    return CudaCapture(device) if device.type == "cuda" else lambda work: work


class CapturedFunction:
    """A function of tensors whose calls are captured. The next call overwrites what the last one returned."""

    def __init__(
        self, function: Callable[..., Any], capture: Capture, buffers: Iterable[tuple[Any, ...]], most: int = 0
    ) -> None:
        """Capture a call for each tuple of arguments in `buffers`. Later calls copy their tensors into these.

        Args:
            most: calls for arguments of other shapes are captured when they come, up to so many.
        """
        self.function, self.capture, self.most = function, capture, most
        self._calls: dict[tuple[Any, ...], tuple[tuple[Any, ...], Work | None]] = {
            _shapes(own): (own, capture(partial(function, *own))) for own in buffers
        }

    @torch.inference_mode()
    def __call__(self, *arguments: Any) -> Any:
        """Replay the call that was captured for arguments of these shapes; without one, call the function."""
        shapes = _shapes(arguments)
        if shapes not in self._calls and len(self._calls) < self.most:
            self._calls[shapes] = self._captured(arguments)
        own, replay = self._calls.get(shapes, ((), None))
        if replay is None:
            return self.function(*arguments)
        for buffer, argument in zip(own, arguments, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(argument)
        return replay()

    def _captured(self, arguments: Iterable[Any]) -> tuple[tuple[Any, ...], Work | None]:
        """Buffers like some arguments, and the captured call; None where it cannot be captured."""
        tell("capturing a part of a round")
        own = tuple(part.clone() if isinstance(part, Tensor) else part for part in arguments)
        try:
            return own, self.capture(partial(self.function, *own))
        except torch.OutOfMemoryError:
            raise
        except Exception:
            log.warning("A part of a round cannot be captured: it runs as it comes.", exc_info=True)
            return own, None


class CapturedFunctions:
    """Functions of tensors by what they compute, captured for each shape when it comes. The oldest make room.

    `state` are tensors that they change.
    """

    def __init__(self, capture: Capture, *state: Tensor) -> None:
        self.capture, self.state = capture, state
        self._known: dict[object, CapturedFunction] = {}

    def _captured(self, work: Work) -> Work:
        """A capture calls the work once, so it changes what the first replay must find."""
        before = [part.clone() for part in self.state]
        try:
            return self.capture(work)
        finally:
            for part, old in zip(self.state, before, strict=True):
                part.copy_(old)

    def __call__(self, key: object, function: Callable[..., Any]) -> CapturedFunction:
        known = self._known.pop(key, None) or CapturedFunction(function, self._captured, (), MOST_SHAPES)
        self._known = {**dict([*self._known.items()][1 - MOST_KINDS :]), key: known}
        return known


def _shapes(arguments: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(part.shape) if isinstance(part, Tensor) else part for part in arguments)
