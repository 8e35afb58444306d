"""`docs/demo.html` is what the code makes, and needs nothing but itself."""

from __future__ import annotations

import gzip
import re
from base64 import b64decode
from pathlib import Path

from specdemo.ui.share.saved import demo_page

ROOT = Path(__file__).resolve().parents[2]
DEMO = (ROOT / "docs" / "demo.html").read_text(encoding="utf-8")
TEXT = re.compile(r'(?<=<script type="text/plain" )id="([^"]+)">([^<]+)')
SCRIPT = re.compile(r'src="data:text/javascript;base64,([^"]+)"')


def unpacked(page: str) -> str:
    """A page without what packs its texts: other versions of zlib pack them otherwise."""
    return TEXT.sub(lambda found: f"{found[1]} {gzip.decompress(b64decode(found[2])).decode()}", page)


def test_the_demo_is_what_the_code_makes_now() -> None:
    current = unpacked(DEMO) == unpacked(demo_page())
    assert current, "docs/demo.html is out of date: run `python -m tools.pictures demo`"


def test_the_demo_is_small() -> None:
    assert len(DEMO.encode()) <= 900_000


def test_the_demo_loads_nothing() -> None:
    assert "content=\"default-src 'none';" in DEMO
    page = TEXT.sub("", SCRIPT.sub("", DEMO))
    assert re.findall(r'href="(.*?)"', page) == ["#why", "../README.md#quick-start"]
    for loads in ("src=", "srcset=", "<link", "<iframe", "url(", "@import", "http:", "https:"):
        assert loads not in page
    (script,) = SCRIPT.findall(DEMO)
    assert not re.search("https?://", b64decode(script).decode())


def test_the_demo_has_three_recordings_with_the_target_alone() -> None:
    texts = {name: gzip.decompress(b64decode(text)).decode() for name, text in TEXT.findall(DEMO)}
    assert len({*re.findall(r'data-recording="(.+?)" data-as="race"', DEMO)}) == 3
    assert {*re.findall(r'data-recording="(.+?)"', DEMO)} == {*texts}
    assert all('"plain":' in text and '"speculative":' in text for text in texts.values())


def test_the_demo_names_the_command_of_the_readme() -> None:
    (command,) = re.findall(r"<pre><code>(.+)</code></pre>", DEMO)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"\n    {command.replace('&amp;', '&')}\n" in readme
