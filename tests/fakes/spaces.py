"""The package `spaces` of ZeroGPU."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import gradio as gr


class Spaces(ModuleType):
    """A fork for each call, which is asked for with the duration; `refusal` is what is raised instead."""

    def __init__(self) -> None:
        super().__init__("spaces")
        self.durations: list[float] = []
        self.processes: list[Any] = []
        self.refusal: Exception | None = None

    def GPU(self, duration: Callable[..., float]) -> Callable[..., Any]:  # its name
        def decorated(task: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
            def handler(*args: Any) -> Iterator[Any]:
                args = pickle.loads(pickle.dumps(args))  # they reach the fork by a queue
                self.durations.append(duration(*args))
                if self.refusal:
                    raise self.refusal
                context = multiprocessing.get_context("fork")
                here, there = context.Pipe(duplex=False)

                def iterate() -> None:
                    try:
                        for item in task(*args):
                            there.send((item, None))
                        there.send((None, None))
                    except Exception as error:
                        there.send((None, error if isinstance(error, gr.Error) else gr.Error(type(error).__name__)))
                    os._exit(0)

                self.processes.append(context.Process(target=iterate, daemon=True))
                self.processes[-1].start()
                try:
                    while True:
                        item, error = here.recv()
                        if error:
                            raise error
                        if item is None:
                            return
                        yield item
                finally:
                    self.processes[-1].kill()
                    self.processes[-1].join()

            return handler

        return decorated
