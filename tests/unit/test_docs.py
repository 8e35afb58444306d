"""What README.md and the documentation name exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from specdemo.cli.main import app
from tools import page
from tools.bench.__main__ import app as bench_app
from tools.train.__main__ import app as train_app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"\b(?:specdemo|tools|presets|tests|docs)/[\w./*-]*\w")
COMMAND = re.compile(r"python -m ((?:specdemo|tools\.(?:bench|train|page))\b(?: [^\n`]*)?)")
APPS = {"specdemo": app, "tools.bench": bench_app, "tools.train": train_app, "tools.page": page.app}
COMMANDS: dict[str, Any] = {name: typer.main.get_command(app) for name, app in APPS.items()}


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


def documented_commands() -> list[str]:
    """Every command line that the pages tell, without `python -m`."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES).replace("\\\n", " ")
    return sorted({match.strip() for match in COMMAND.findall(text)})


def parse(line: str) -> None:
    """Have typer read a command line with every option and its type. Nothing is run.

    Raises:
        Exception: typer's own, for what it cannot read. A command may be named without its options.
    """
    module, *words = shlex.split(line, comments=True)
    command = COMMANDS[module]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if command.hidden:
        raise ValueError(f"{line} has moved")
    if not words:
        return
    context = command.make_context(command.name, words)
    if rest := [*getattr(context, "_protected_args", ()), *context.args]:
        command.resolve_command(context, rest)


@pytest.mark.parametrize("line", documented_commands())
def test_every_command_line_parses(line: str) -> None:
    parse(line)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("specdemo race --prmpt a", "No such option"),
        ("specdemo lab nothing", "No such command"),
        ("specdemo bench", "No such command"),
        ("tools.bench --each 1 nothing", "No such command"),
        ("specdemo lab theory --alpha much", "valid number"),
        ("specdemo race --prompt", "requires an argument"),
        ("specdemo record --prompt a", "Missing parameter"),
        ("specdemo train data --tokens 1", "has moved"),
    ],
)
def test_a_command_line_that_is_wrong_is_found(wrong: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        parse(wrong)


def test_the_docs_tell_many_command_lines() -> None:
    assert len(documented_commands()) > 40


@pytest.mark.parametrize(
    ("pages", "most"),
    [
        (["README.md"], 900),
        (["docs/how-it-works.md"], 2_500),
        (["docs/DEVELOPERS.md"], 1_400),
        (["docs/results.md"], 1_000),
        (["README.md", "docs/**/*.md"], 14_300),  # without docs/results
    ],
)
def test_the_pages_have_few_words(pages: list[str], most: int) -> None:
    paths = {path for page in pages for path in ROOT.glob(page) if path.parent.name != "results"}
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in paths) <= most  # with tables and commands


def prose(text: str) -> list[str]:
    """The words of a page without its header, code, tables, pictures, addresses and marks."""
    for left_out in (r"\A---\n.*?\n---\n", r"```.*?```", r"^(?:\||    ).*$", r"!\[.*?\)", r"<!--.*?-->", r"\]\(.*?\)"):
        text = re.sub(left_out, " ", text, flags=re.DOTALL if left_out[0] != "^" else re.MULTILINE)
    return re.findall(r"\w[\w'.,/-]*", text)


def test_the_readme_is_prose() -> None:
    assert len(prose((ROOT / "README.md").read_text(encoding="utf-8"))) > 400


def test_the_results_are_headlines() -> None:
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    measured = results.partition("## How it is measured")[2].partition("\n## ")[0]
    assert len(measured.split()) <= 120


def test_the_readme_tells_the_two_commands_and_is_that_of_a_space() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n    pip install -r requirements.txt && python app.py\n" in readme
    assert "\n    pip install -r requirements.txt -r tests/requirements.txt && python -m pytest\n" in readme
    header = dict(re.findall(r"^(\w+): (.+)$", readme.split("---\n")[1], re.MULTILINE))
    assert (header["sdk"], header["app_file"]) == ("gradio", "app.py")
    required = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert f"gradio=={header['sdk_version']}" in required
    assert len(header["short_description"].strip('"')) <= 60  # the hub's limit
    (torch,) = (line for line in required if line.startswith("torch=="))
    assert f"pip install {torch} --index-url" in readme


@pytest.mark.parametrize(
    ("files", "each", "together"),
    [
        ("presets/results/*", 1_000_000, 1_000_000),
        ("presets/recordings/*", 60_000, 1_000_000),
        ("presets/weights/**/*.safetensors", 10_000_000, 40_000_000),
        ("docs/**/*.*", 3_000_000, 5_000_000),
    ],
)
def test_the_repository_weighs_no_more_than_contributors_are_told(files: str, each: int, together: int) -> None:
    sizes = [path.stat().st_size for path in ROOT.glob(files)]
    assert 0 < max(sizes) <= each
    assert sum(sizes) <= together


DEVELOPERS = (ROOT / "docs" / "DEVELOPERS.md").read_text(encoding="utf-8")


def test_what_developers_look_for_is_where_the_table_says() -> None:
    table = DEVELOPERS.partition("## Where to look")[2]
    rows = re.findall(r"^\| [^|`]+ \| `([^`]+)` \| `([^`]+)` \|$", table, re.MULTILINE)
    assert len(rows) == 12
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
    assert packages | {"errors", "formats", "settings", "tokens"} == {name for layer in checked for name in layer}
