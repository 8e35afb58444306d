"""Every sentence that a person can be shown is in `golden/messages.txt`, so that other words are a diff of one file.

`python -m tests.messages --write` writes it anew. What `--help` says is in `help.txt`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1]
KEPT = PROJECT / "tests" / "golden" / "messages.txt"
# Whose arguments are shown, however short. Any other text is taken for a sentence where two words follow each other.
SHOWN = {"BadInput", "EngineTrouble", "Error", "HTTPException", "LoadError", "NotFinite", "progress"}
SENTENCE = re.compile(r"[^\W\d]{2,}[,:;]? [a-z]{2,}|^[A-Z][a-z]+\.$")
CODE = re.compile(r"\{ |</\w|=>|^import|^(sd-|tok |[#.(]\w|\w+-\w+ sd-)")  # of a page, though words follow each other
# Of a script: comments, then texts, which may hold another text where they hold a value.
VALUE = r"\$\{(?:[^{}`]|`[^`]*`|\{[^{}]*\})*\}"
SCRIPT = re.compile(
    rf"""(?P<comment>//[^\n]*|/\*.*?\*/)|`(?:\\.|{VALUE}|[^`\\])*`|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)


def words(node: ast.AST) -> str | None:
    """A text with names in braces for its values, or None where this is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) or placeholder(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = words(node.left), words(node.right)
        if left is not None or right is not None:
            return (left or placeholder(node.left)) + (right or placeholder(node.right))
    return None


def placeholder(node: ast.AST) -> str:
    value = node.value if isinstance(node, ast.FormattedValue) else node
    return f"{{{getattr(value, 'id', getattr(value, 'attr', ''))}}}"


def values(node: ast.AST) -> Iterator[ast.AST]:
    """What is inside a text but is no text."""
    for child in ast.iter_child_nodes(node):
        if words(child) is None:
            yield child
        else:
            yield from values(child)


def sentences(node: ast.AST, shown: bool = False) -> Iterator[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.keyword) and node.arg == "help":
        return
    text = words(node)
    if text is not None and (shown or SENTENCE.search(text)):
        yield text
    called = node.func if isinstance(node, ast.Call) else None
    shown = getattr(called, "id", getattr(called, "attr", "")) in SHOWN
    for child in ast.iter_child_nodes(node) if text is None else values(node):
        yield from sentences(child, shown)


def script_sentences(script: str) -> Iterator[str]:
    for found in SCRIPT.finditer(script):
        text = re.sub(VALUE, "{}", found[0])[1:-1]
        if not found["comment"] and SENTENCE.search(text):
            yield text
        for value in re.findall(VALUE, found[0]):
            yield from script_sentences(value)


def page_sentences(page: str) -> Iterator[str]:
    for part in re.findall(r">[^<>]+|\"[^\"<>]+\"", page):
        text = " ".join(part.strip('>"').split())
        if SENTENCE.search(text):
            yield text


READERS = {".py": lambda text: sentences(ast.parse(text)), ".js": script_sentences, ".html": page_sentences}


def messages() -> str:
    lines = []
    for path in sorted((PROJECT / "specdemo").rglob("*.*")):
        if path.suffix not in READERS:
            continue
        read = READERS[path.suffix](path.read_text(encoding="utf-8"))
        found = {line for line in read if not CODE.search(line)}
        if found:
            lines += ["", f"# {path.relative_to(PROJECT).as_posix()}"]
            lines += sorted(line.replace("\n", "\\n") for line in found)
    return "\n".join(lines[1:]) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        KEPT.write_text(messages(), encoding="utf-8")
    else:
        print(messages(), end="")
