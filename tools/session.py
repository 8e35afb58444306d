"""Records what a language model sees of `python -m specdemo serve --mcp`: `python -m tools.session` rewrites the
session in docs/mcp.md from a run of the page that is serving."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import typer
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client

PAGE = Path(__file__).resolve().parents[1] / "docs" / "mcp.md"
BEGIN, END = "<!-- session -->\n", "<!-- end of session -->"
PROMPT = "Write a Python function that reverses a string."
SHOWN = 450  # characters of an answer


async def recorded(address: str) -> str:
    """Calls each tool and writes down the calls and their answers."""
    lines = []
    async with (
        streamablehttp_client(f"{address}/gradio_api/mcp/") as (reading, writing, _),
        ClientSession(reading, writing) as session,
    ):
        await session.initialize()
        names = ", ".join(tool.name for tool in (await session.list_tools()).tools)
        lines.append(f"list_tools()\n{names}")

        async def call(name: str, **arguments: Any) -> dict[str, Any]:
            answer = await session.call_tool(name, arguments)
            if answer.isError:
                raise RuntimeError(answer.content[0].text)
            found: dict[str, Any] = json.loads(answer.content[0].text)
            text = json.dumps(found, ensure_ascii=False)
            asked = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
            lines.append(f"{name}({asked})\n{text[:SHOWN]}{' …' if len(text) > SHOWN else ''}")
            return found

        await call("list_models")
        race = await call("race", prompt=PROMPT, drafter="lookup-ngram", k=4, max_new_tokens=64)
        await call("check", seconds=60)
        await call("explain_round", round=2, race=race["race"])
    return "\n\n".join(lines)


def main(address: str = "http://127.0.0.1:7860") -> None:
    """Rewrite the session."""
    session = asyncio.run(recorded(address.rstrip("/")))
    page, blocks = PAGE.read_text(encoding="utf-8"), f"{BEGIN}```\n{session}\n```\n{END}"
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: blocks, page, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
