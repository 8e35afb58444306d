"""Which models a command loads: its options, and how it loads them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ..errors import BadInput
from ..models.presets import DEFAULT_PRESET, Preset, find_preset, preset_of, with_head
from ..system.imports import import_quickly
from .options import Device, DType

if TYPE_CHECKING:
    from ..models.loaded import Loaded


@dataclass(frozen=True, kw_only=True)
class Models:
    """Which models to load."""

    preset: Annotated[
        str, Option("--preset", help="The models to use; `presets` lists the choices.", show_default=DEFAULT_PRESET)
    ] = ""
    dtype: DType = "auto"
    device: Device = "auto"
    target: Annotated[
        str | None, Option(help="The target, instead of a preset: a hub id, a folder, a .gguf file, or id:file.gguf.")
    ] = None
    draft: Annotated[str | None, Option(help="The draft model of --target, named in the same way.")] = None
    head: Annotated[
        str | None,
        Option(help="A head of others (EAGLE-3, DFlash, DSpark, Medusa): a hub id or a folder. Experimental."),
    ] = None
    save_preset: Annotated[str | None, Option(help="Keep --target, --draft and --head as a preset of this name.")] = (
        None
    )

    def __post_init__(self) -> None:
        if (self.target, self.draft, self.head, self.save_preset) != (None, None, None, None):
            _ = self.chosen  # what is wrong with a name is said at once

    @cached_property
    def chosen(self) -> Preset:
        """The preset of these models."""
        if self.head is None:
            return self._without_head(self.target)
        found = import_quickly("specdemo.models.published_heads").head_format(self.head)
        target = self.target or (None if self.preset else found.target)
        if not (target or self.preset):
            raise BadInput(f"The head {self.head} does not say which target it is for: name it by --target.")
        return with_head(self._without_head(target), found.kind, self.head)

    def _without_head(self, target: str | None) -> Preset:
        if target is not None:
            return preset_of(target, self.draft)
        if self.draft is not None or (self.save_preset is not None and self.head is None):
            raise BadInput("--draft and --save-preset go with --target.")
        return find_preset(self.preset or DEFAULT_PRESET)

    def look(self, preset: Preset) -> None:
        """Tell on stderr what models given by name will take, and save them if that was asked for.

        Raises:
            LoadError: they cannot be had, or cannot run here.
        """
        reporting = import_quickly("specdemo.models.report")
        for line in reporting.report_on(preset, self.dtype, self.device):
            typer.echo(line, err=True)
        if self.save_preset is not None:
            typer.echo(f"Saved as {reporting.save_preset(preset, self.save_preset)}.", err=True)

    @contextmanager
    def loaded(self, eager: bool = False, raw: bool | None = None) -> Iterator[Loaded]:
        """The models, with the stages of a long load on stderr; freed at the end.

        Args:
            raw: whether prompts are continued without the chat template; None is as the preset has it.
        Raises:
            LoadError: it cannot be loaded.
        """
        preset = self.chosen
        if raw is not None:
            preset = replace(preset, defaults=replace(preset.defaults, raw=raw))
        if self.target is not None or self.head is not None:
            self.look(preset)
        load = import_quickly("specdemo.models.loaded").load
        terminal = sys.stderr.isatty()
        shown = ""

        def show(fraction: float | None, stage: str) -> None:
            nonlocal shown
            words = stage if fraction in (None, 1) else f"{stage}, {fraction:.0%}"
            if terminal and words != shown:
                shown = words
                typer.echo(f"\r\x1b[K{words}", err=True, nl=False)

        loaded = load(preset, self.dtype, self.device, show, eager)
        if terminal:
            typer.echo("\r\x1b[K", err=True, nl=False)
        for why in loaded.missing_heads.values():
            typer.echo(f"The preset {preset.name} goes on without a head: {why}.", err=True)
        try:
            yield loaded
        finally:
            loaded.release()


@dataclass(frozen=True, kw_only=True)
class ModelsOrEager(Models):
    """Which models to load, and by which engine they run."""

    eager: Annotated[bool, Option("--eager", help="Run the models by transformers' own forward.")] = False

    @contextmanager
    def loaded(self, eager: bool = False, raw: bool | None = None) -> Iterator[Loaded]:
        with super().loaded(self.eager, raw) as loaded:
            yield loaded
