"""What the commands and the HTTP API tell as JSON, set against the files in this folder.

Figures of time, of the machine and of versions are left out by the names of their fields; everything else is compared.
`python -m tests.gate --write` writes the files anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from specdemo.cli.main import app
from specdemo.models.presets import find_preset
from specdemo.studies.tables import json_text

FOLDER = Path(__file__).parent
TINY = "nanogpt-shakespeare"
ROMEO = f"--preset {TINY} --prompt ROMEO: --max-new-tokens 24"
STUDY = f"--preset {TINY} --drafter ngram"
WITH_DRAFT_MODEL = f"--preset {TINY}-large --drafter draft-model"
TRACE = "presets/recordings/story-2-eagle-match.jsonl.gz"
COMMANDS = {
    "presets": "presets --json",
    "generate": f"generate {ROMEO} -k 4 --json",
    "race": f"race {ROMEO} -k 4 --json",
    "race-lanes": f"race {ROMEO} --lane ngram:4 --lane prompt-lookup:2 --lane ngram:tree-8 --json",
    "race-readers": f"race {ROMEO} -k 2 --readers 2 --json",
    "theory": "lab theory --draft-ms 1 --target-ms 20 --alpha 0.6 --json",
    "explain": f"lab explain --trace {TRACE} --json FILE",
    "profile": f"lab profile --preset {TINY} --drafters ngram,suffix --repeats 1 --max-new-tokens 8 --json FILE",
    "sweep": f"lab sweep --preset {TINY} --drafters ngram -k 0,2 --max-new-tokens 8 --json FILE",
    "domains": f"lab domains {STUDY} --max-new-tokens 8 --json FILE",
    "causes": f"lab causes {STUDY} --each 1 --max-new-tokens 16 --json FILE",
    "batch": f"lab batch {STUDY} -k 2 --sizes 1,2 --repeats 2 --max-new-tokens 8 --json FILE",
    "ahead": f"lab ahead {WITH_DRAFT_MODEL} -k 2 --fan-outs 1 --repeats 1 --max-new-tokens 8 --json FILE",
    "lossless": f"lab lossless {STUDY} -k 2 --rounds 64 --limit 2 --max-new-tokens 8 --json FILE",
    "check": f"check --preset {TINY} --drafters ngram --seconds 60 --json",
}
API = "api"
NAMES = (*COMMANDS, API)
COMPUTED = "theory", "explain"  # nothing is measured here, and every figure is compared
ADAPTS = ("check",)  # the time decides what is run: only the names of its fields are compared
MEASURED = re.compile(
    r"second|(^|_)ms(_|$)|speed|cost|break_even|memory|environment|^version$|^alone$|^hits$|^prepared$"
    "|sentence|^verdict$|^advice$|^notes$|^numbers$|^slower$|^best"
)
LEFT_OUT = "…"


def outcome(name: str) -> Any:
    """What is said now, as the file of this name has it."""
    found = _of_api() if name == API else _of_command(COMMANDS[name])
    if name in ADAPTS:
        return dict.fromkeys(found, LEFT_OUT)
    return settled(found, computed=name in COMPUTED)


def write(name: str, now: Any) -> None:
    (FOLDER / f"{name}.json").write_text(json_text(now), encoding="utf-8")


def differences(name: str, now: Any) -> list[str]:
    """Where it differs from the file, a line each."""
    return [*_differences(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")), now, name)]


def _differences(then: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict) and [*then] == [*now]:
        for key in then:
            yield from _differences(then[key], now[key], f"{where}.{key}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for place, pair in enumerate(zip(then, now, strict=True)):
            yield from _differences(*pair, f"{where}[{place}]")
    elif then != now:
        yield f"{where} was {then!r:.100} and is {now!r:.100}"


def settled(value: Any, measured: bool = False, computed: bool = False) -> Any:
    """A value without what was measured, of which only the names of fields are left.

    Floats are rounded to what processors agree on.
    """
    if isinstance(value, dict) and not (measured and "mean" in value):  # a `Spread` is a figure
        names = {key: measured or bool(not computed and MEASURED.search(key)) for key in value}
        return {key: settled(one, names[key], computed) for key, one in value.items()}
    if isinstance(value, list) and not measured:
        return [settled(one, measured, computed) for one in value]
    if measured:
        return (
            [settled(value[0], True)] if value and isinstance(value, list) and isinstance(value[0], dict) else LEFT_OUT
        )
    if isinstance(value, float):
        return float(f"{value:.3g}") if abs(value) > 1e-6 else 0.0
    return value


def _of_command(line: str) -> Any:
    """The JSON that a command prints, or writes to FILE."""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()):
        file = Path(folder, "found.json")
        app(line.replace("FILE", str(file)).split(), standalone_mode=False)
        return json.loads(file.read_text(encoding="utf-8") if file.exists() else printed.getvalue())


def _of_api() -> dict[str, Any]:
    """The schema of the endpoints, and the answer to a call."""
    from gradio_client import Client

    from specdemo.ui.engine import real_backend
    from specdemo.ui.look import launch_options
    from specdemo.ui.page import build_page
    from tests.harness.ui_classes import Engine, Runs

    engine, runs = Engine({TINY: find_preset(TINY)}, real_backend()), Runs()
    page = build_page(engine, runs, {"plays": ["ROMEO:"]})
    engine.begin_loading(TINY)
    with patch.dict(os.environ, HF_HUB_DISABLE_TELEMETRY="1"):
        try:
            _, url, _ = page.launch(
                server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options(runs)
            )
            client = Client(url, verbose=False, analytics_enabled=False)
            schema = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
            answer = client.predict(prompt="ROMEO:", k=4, max_new_tokens=24, api_name="/compare")
            client.close()
        finally:
            page.close(verbose=False)
    return {"schema": schema, "answer": answer}
