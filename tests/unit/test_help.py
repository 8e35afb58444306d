"""What `--help` says of every command is what `help.txt` holds; `python -m tests.unit.test_help` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from specdemo.cli.main import app
from tools import page
from tools.bench.__main__ import app as bench_app
from tools.train.__main__ import app as train_app

KEPT = Path(__file__).with_name("help.txt")
PROJECT = Path(__file__).parents[2]
WIDTH = 100  # columns


def helps(command: Any, name: str, above: Any = None) -> Iterator[str]:
    """The help of a command and of those below it."""
    names = [name for option in command.params for name in (*option.opts, *option.secondary_opts)]
    assert len(names) == len(set(names)), f"{name} has two options of the same name"
    for option in command.params:
        if (
            isinstance(option.default, Path) and option.default.is_absolute()
        ):  # begins with the folder of this copy of the project
            option.show_default = option.default.relative_to(PROJECT).as_posix()
    widths = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    context = command.context_class(command, parent=above, info_name=name, **widths)
    yield f"$ {context.command_path} --help\n{command.get_help(context)}\n"
    for word, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from helps(below, word, context)


def every_help() -> str:
    apps = {"specdemo": app, "tools.bench": bench_app, "tools.train": train_app, "tools.page": page.app}
    return "\n".join(help for name, one in apps.items() for help in helps(typer.main.get_command(one), name))


def test_every_command_helps_as_it_did() -> None:
    assert every_help().splitlines() == KEPT.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    KEPT.write_text(every_help(), encoding="utf-8")
