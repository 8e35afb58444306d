"""The pages of `docs/results`, one for each file of `presets/results`.

`pages.toml` beside the files has what they do not say: a title, what bounds the figures, and which tables to show.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from specdemo.errors import BadInput
from specdemo.formats import formatted
from specdemo.models.presets import PRESETS
from specdemo.models.tables import read_toml
from specdemo.racing.request import PLAIN, SPECULATIVE
from specdemo.settings import AUTO
from specdemo.studies.prompts import ALL
from specdemo.studies.statistics import log_means
from specdemo.studies.tables import group_by

from .results import drafters_markdown, drafting, markdown, read_record, spread, trees_markdown
from .rows import Row, Runs, by_text, ratios
from .tables import Columns, markdown_table

RESULTS = PRESETS / "results"
DOCS = PRESETS.parent / "docs" / "results"
ABOUT = "pages.toml"
NEW_TOKENS = re.compile(r"--max-new-tokens (\d+)")
HEADINGS = {
    **{"achieved": "share of the memory's speed", "floor_ms": "ms that reading takes", "gb_per_second": "GB/s"},
    **{"tokens_per_second": "tokens/s", "tokens_per_round": "tokens a round", "what": ""},
    **{"to_alone": "to the target alone", "ratio_to_alone": "to the engine alone"},
    "ratio_to_unseen": "to nobody watching",
}
SHARES = {"achieved": ".0%", "waiting": ".1%", "acceptance_rate": ".0%"}
LEFT_OUT = {"command", "note", "part", "bytes", "context"}  # from tables
FACTS = (
    *("host", "cores", "threads", "engine", "dtype", "weights_dtype"),
    *("driver", "cuda", "python", "torch", "transformers", "triton", "commit"),
)
VARIABLE = re.compile(r"\((SPECDEMO_\w+=\w+)\)")  # of the environment, as the CPU's name keeps it
TRAINING = ("head", "round", "commit", "training_tokens", "tokens_read_before", "tokens_per_round")


def pages() -> dict[str, str]:
    """The text of each page by the name of its file.

    Raises:
        BadInput: a file has no entry in `pages.toml`, or the other way round.
    """
    about = read_toml(RESULTS / ABOUT)
    files = {path.stem: path for path in sorted(RESULTS.glob("*.json"))}
    if unknown := sorted(files.keys() ^ about.keys()):
        raise BadInput(f"Either {ABOUT} or the folder lacks {', '.join(unknown)}.")
    return {f"{name}.md": page(path, **about[name]) for name, path in files.items()}


def write() -> None:
    """Write every page and remove those whose file is gone."""
    texts = pages()
    DOCS.mkdir(exist_ok=True)
    for gone in {path.name for path in DOCS.glob("*.md")} - texts.keys():
        (DOCS / gone).unlink()
    for name, text in texts.items():
        (DOCS / name).write_text(text, encoding="utf-8")


def page(path: Path, title: str, bounds: str, tables: Iterable[str] = ("methods",)) -> str:
    """One page: what ran, where, its tables, and what bounds the figures."""
    saved = json.loads(path.read_text(encoding="utf-8"), object_hook=spread)
    if "runs" in saved:
        saved = read_record(path)
    ran = f"{_ran(saved)} ([data](../../presets/results/{path.name}))."
    return "\n".join([f"# {title}", "", _wrapped(ran), "", *measured(saved, tables), "", _wrapped(bounds), ""])


def measured(saved: Mapping[str, Any], tables: Iterable[str] = ()) -> list[str]:
    """The lines of a page between its title and its bounds: the command, the machine, and the tables."""
    environment = saved["environment"]
    variable = VARIABLE.search(environment.get("cpu") or "")
    lines = [f"    {variable[1] + ' ' if variable else ''}{saved['command']}", "", _wrapped(_machine(environment))]
    lines += [
        _wrapped(f"- {name}: {', '.join(map(str, facts.values()))}.") for name, facts in saved.get("others", {}).items()
    ]
    for table in _tables(saved, tables):
        lines += ["", *table]
    return lines


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _ran(saved: Mapping[str, Any]) -> str:
    """The models, prompts, temperatures and new tokens, as far as the file has them."""
    weights, runs = saved.get("weights") or {}, saved.get("runs", [])
    rows = runs or saved.get("trees") or saved.get("rows") or []
    target, draft = (_weights(weights.get(part)) for part in ("target", "draft_model"))
    unknown = saved.get("ran", "Weights not kept")
    if "sizes" in saved:
        unknown = f"Random weights of the shape of {saved['sizes']}"
    if "rounds" in saved:
        unknown = "Heads: " + ", ".join(dict.fromkeys(round_["head"] for round_ in saved["rounds"]))
    words = [(target or unknown) + (f" with the draft model {draft}" if draft else "")]
    if prompts := {run["prompt_id"] for run in runs}:
        kinds = len({run["category"] for run in runs})
        words.append(f"{len(prompts)} prompts" + (f" of {kinds} kinds" if kinds > 1 else ""))
    elif saved.get("trees"):
        words.append(f"{rows[0]['tokens_per_second'].count} prompts")
    if heats := sorted({row["temperature"] for row in rows if "temperature" in row}):
        words.append("T = " + ", ".join(f"{heat:g}" for heat in heats))
    lengths = NEW_TOKENS.findall(saved["command"]) or ([max(run["new_tokens"] for run in runs)] if runs else [])
    return ", ".join([*words, *(f"at most {length} new tokens" for length in lengths)])


def _weights(source: Mapping[str, Any] | None) -> str:
    return str(source.get("gguf") or source["name"]).removesuffix(".gguf") if source else ""


def _machine(environment: Mapping[str, Any]) -> str:
    """The machine, the versions and the commit."""
    model = f" ({environment['cpu_model']})" if "cpu_model" in environment else ""
    known = (f"{name.replace('_dtype', '')} {environment[name]}" for name in FACTS if environment.get(name))
    unknown = [] if environment["commit"] else ["commit unknown"]
    return ", ".join([(environment.get("cpu") or environment["device"]) + model, *known, *unknown]) + "."


def _tables(saved: Mapping[str, Any], names: Iterable[str]) -> list[list[str]]:
    """The tables of a file; of one with runs, those of `OF_RUNS` with these names."""
    if "runs" in saved:
        trees = [trees_markdown(saved["trees"])] if saved["trees"] else []
        return [OF_RUNS[name](saved) for name in names] + trees
    if "trees" in saved:
        return [trees_markdown(saved["trees"])]
    if "measurements" in saved:
        parts = group_by([*saved["measurements"], *saved.get("passes_by_version", ())], itemgetter("part"))
        return [[f"## {part[0].upper()}{part[1:]}", "", *_plain(rows)] for part, rows in parts.items()]
    if "curves" in saved:
        last = {(point["head"], point["round"]): point for point in saved["curves"]}
        rounds = [{**round_, **last[round_["head"], round_["round"]]} for round_ in saved["rounds"]]
        return [_plain([{name: round_[name] for name in TRAINING} for round_ in rounds])]
    if rows := saved.get("passes") or saved.get("rows"):
        return [_plain(rows), *([_plain(saved["draft_model"]["rows"])] if "draft_model" in saved else [])]
    return [_plain([dict(saved)])]


def _plain(rows: Iterable[Row]) -> list[str]:
    """Rows as they are: a column for each name with a figure or a word."""
    kept = [cells(row) for row in rows]
    columns: Columns = {
        HEADINGS.get(name, name.replace("_", " ")): (name, "")
        for name in dict.fromkeys(name for row in kept for name in row)
    }
    return markdown_table(kept, columns)


def cells(row: Row) -> dict[str, str]:
    """The figures and the words of a row, as a table has them."""
    return {name: _cell(name, value) for name, value in row.items() if name not in LEFT_OUT and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, list | dict)


def _cell(name: str, value: Any) -> str:
    usual = ".2f" if hasattr(value, "low") else ".4g" if isinstance(value, float) else ",d"
    return formatted(value, SHARES.get(name, usual))


def _by_kind(runs: Runs, figure: Callable[[Runs], float | None], ks: Callable[[Any], bool]) -> list[str]:
    """A figure of each drafter over all prompts and by kind of prompt."""
    ours = [run for run in runs if run["method"] == SPECULATIVE and ks(run["k"])]
    kinds = [ALL, *sorted({run["category"] for run in ours})]
    rows = []
    for mine in group_by(ours, itemgetter("drafter", "rule", "temperature", "k")).values():
        names = {"drafter": drafting(mine[0]), "T": mine[0]["temperature"], "K": str(mine[0]["k"])}
        of_kind = {kind: [run for run in mine if kind in (ALL, run["category"])] for kind in kinds}
        rows.append({**names, **{kind: figure(some) for kind, some in of_kind.items()}})
    return markdown_table(rows, {"drafter": "", "T": "g", "K": "", **dict.fromkeys(kinds, ".2f")})


def _speed_by_kind(saved: Mapping[str, Any]) -> list[str]:
    alone = by_text(saved["runs"], PLAIN)

    def speed_up(runs: Runs) -> float | None:
        logs = log_means(ratios(runs, alone))
        return math.exp(fmean(logs.values())) if logs else None

    return ["Times the target alone, K = auto:", "", *_by_kind(saved["runs"], speed_up, lambda k: bool(k == AUTO))]


def _tokens_by_kind(saved: Mapping[str, Any]) -> list[str]:
    def tokens(runs: Runs) -> float | None:
        rounds = sum(run["rounds"] for run in runs)
        return sum(run["new_tokens"] - 1 for run in runs) / rounds if rounds else None

    return ["Tokens a round:", "", *_by_kind(saved["runs"], tokens, lambda k: True)]


OF_RUNS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "methods": lambda saved: markdown(saved["rows"]),
    "drafters": lambda saved: drafters_markdown(saved["runs"]),
    "speed by kind": _speed_by_kind,
    "tokens by kind": _tokens_by_kind,
}
