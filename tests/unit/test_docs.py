"""What README.md and the documentation name exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from specdemo.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"\b(?:specdemo|presets|tests|docs)/[\w./*-]*\w")
COMMAND = re.compile(r"python -m specdemo(?: [^\n`]*)?")


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    path = ROOT / page
    broken = []
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page: str) -> None:
    named = set(NAMED.findall((ROOT / page).read_text(encoding="utf-8")))
    assert [path for path in sorted(named) if not any(ROOT.glob(path))] == []


def test_every_command_and_every_option_exists() -> None:
    told = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES).replace("\\\n", " ")
    commands = {match.removeprefix("python -m specdemo").strip() for match in COMMAND.findall(told)}
    assert len(commands) > 20
    unknown = []
    for words in map(shlex.split, sorted(commands)):
        command: Any = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        unknown += [f"{command.name} {word}" for word in words if word.startswith("-") and word not in options]
        if hasattr(command, "commands") and words and not words[0].startswith("-"):
            unknown.append(words[0])
    assert unknown == []


DEVELOPERS = (ROOT / "docs" / "DEVELOPERS.md").read_text(encoding="utf-8")


def test_what_developers_look_for_is_where_the_table_says() -> None:
    rows = re.findall(r"^\| [^|`]+ \| `([^`]+)` \| `([^`]+)` \|$", DEVELOPERS, re.MULTILINE)
    assert len(rows) == 10
    lost = [
        (file, name)
        for file, name in rows
        if not re.search(rf"^(?:def|class) {name}\b|^{name}\b.* = ", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert lost == []


def test_the_drawing_shows_the_layers_that_are_checked() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = settings.partition("layers = [")[2].partition("]")[0]
    checked = [re.findall(r"specdemo\.(\w+)", line) for line in layers.splitlines() if line.strip()]
    drawing = DEVELOPERS.partition("```\n")[2].partition("```")[0]
    drawn = [re.findall(r"\w+", line.split("  ")[0]) for line in drawing.splitlines() if re.match(r"\w", line)]
    assert drawn == checked
    packages = {path.name for path in (ROOT / "specdemo").iterdir() if (path / "__init__.py").exists()}
    assert packages | {"types"} == {name for layer in checked for name in layer}
