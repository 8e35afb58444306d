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
API, RECORDED = "api", "recorded"
NAMES = (*COMMANDS, API, RECORDED)
COMPUTED = "theory", "explain", RECORDED  # nothing is measured here, and every figure is compared
ADAPTS = ("check",)  # the time decides what is run: only the names of its fields are compared
MEASURED = re.compile(
    r"second|(^|_)ms(_|$)|speed|cost|break_even|memory|environment|^version$|^alone$|^hits$|^prepared$"
    "|sentence|^busy$|^verdict$|^advice$|^notes$|^numbers$|^slower$|^best"
)
HISTORY = "best_passes"  # its names say what this machine has run
LEFT_OUT = "…"


def outcome(name: str) -> Any:
    """What is said now, as the file of this name has it."""
    found = {API: of_api, RECORDED: of_recorded}[name]() if name in (API, RECORDED) else _of_command(COMMANDS[name])
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
        left = {key: LEFT_OUT if key == HISTORY and measured else one for key, one in value.items()}
        return {key: settled(one, names[key], computed) for key, one in left.items()}
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


def of_api() -> dict[str, Any]:
    """The schema of the endpoints, and the answer to a call."""
    from gradio_client import Client

    from specdemo.ui.engine import Backend
    from specdemo.ui.look import launch_options
    from specdemo.ui.page import build_page
    from tests.harness.ui_classes import Engine, Runs

    engine, runs = Engine({TINY: find_preset(TINY)}, Backend()), Runs()
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


RECORDINGS = "story-2-eagle-match", "code-5-eagle-tree", "code-1-lookup-eagle-h100", "poem-4-ngram"
SCRIPTED: dict[str, dict[str, Any]] = {
    "one": {},
    "differs": {"differ_at": 9},
    "sampled": {"temperature": 0.7, "rule": "rejection"},
    "stopped": {"events": 8},
    "lanes": {"more": ("ngram:2", "ngram:tree-8")},
    "readers": {"others": ("seven eight nine",)},
}


def of_recorded() -> dict[str, Any]:
    """The same races as the page, a replay, the command line, the tools for language models and the log tell them."""
    from specdemo.racing.trace import read_trace, trace_lines
    from specdemo.ui.replay.playable import playable
    from specdemo.ui.replay.routes import RECORDINGS as SHIPPED
    from specdemo.ui.replay.routes import SUFFIX

    lines = {name: trace_lines(SHIPPED / f"{name}{SUFFIX}") for name in RECORDINGS}
    ends = json.loads(json.dumps({name: playable(*read_trace(lines[name]))["end"] for name in RECORDINGS}))
    with patch("specdemo.racing.summary.memory_rate", lambda *_: 4e9):
        return {"recordings": ends, **{name: _of_script(**fields) for name, fields in SCRIPTED.items()}}


def _of_script(
    events: int = 99, differ_at: int | None = None, more: Any = (), others: Any = (), **fields: Any
) -> dict[str, Any]:
    from specdemo.notebook import Race
    from specdemo.racing.explained import explained
    from specdemo.racing.request import Request, read_lanes
    from specdemo.racing.trace import read_trace
    from specdemo.settings import Settings
    from specdemo.ui.health import facts
    from specdemo.ui.mcp import result_of
    from specdemo.ui.race.run import RaceRun
    from specdemo.ui.replay.playable import playable
    from tests.fakes.engine import PRESETS, Script, ScriptedLoaded

    script, settings = Script(), Settings(**{"k": 4, "max_new_tokens": 24, **fields})
    script.differ_at = differ_at
    lanes = tuple(read_lanes(list(more))) if more else ()
    request = Request("one two three four five six", "scripted", "prompt-lookup", settings, more=lanes, others=others)
    run = RaceRun(request)
    run.id = "recorded"
    for entry in run._race(script.engine(), ScriptedLoaded(PRESETS["scripted"])):
        run._lanes.add(entry)
        if len(run.entries) >= events:
            run.stop.set()
    assert run.outcome is not None
    race = Race(run.request, run.header, run.entries, run.outcome)
    replay = playable(*read_trace(run.trace().split("\n")))
    found = {
        "race": run.summary,
        "page": run.outcome.ending(),
        "live": {lane: news[-1] for lane, news in run._lanes.news().items()},
        "replay": {**replay["end"], "last": {name: lane["events"][-1] for name, lane in replay["lanes"].items()}},
        "log": facts(run, "ended"),
        "notebook": [race.text, race.speed_up, race.same_text, race.sentence, repr(race)] if not others else [],
        "round": explained(run.request, run.entries, 1),
    }
    return json.loads(json.dumps(found if more or others else {**found, "tool": result_of(run)}))
