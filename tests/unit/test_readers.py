"""The study of several readers at once: what it says, and a run of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdemo.decoding.adaptive_k import best_length
from specdemo.drafters.ngram import Ngram
from specdemo.studies.readers import Readers, in_words
from specdemo.studies.summaries import Row
from specdemo.tokens import DraftOutcome
from tests.harness.classes import CostModel, DraftLengthController

from ..sentences import gist, tells

pytestmark = pytest.mark.usefixtures("loads_once")
Run = Callable[..., tuple[int, str, str]]


def groups(speed: Callable[[int], float], with_drafter: Callable[[int, int], float]) -> list[Row]:
    """Of 100 tokens in 3 repeats, from the tokens per second of all without a drafter and the ratio with it."""
    made = []
    for size in (1, 4, 16):
        for repeat in range(3):
            rate = speed(size) * (1 + 0.01 * repeat)
            names = {"batch": size, "repeat": repeat, "tokens": 100}
            made.append({**names, "drafter": "none", "rounds": 100, "tokens_per_second": rate})
            drafted = rate * with_drafter(size, repeat)
            made.append({**names, "drafter": "eagle", "rounds": 40, "tokens_per_second": drafted})
    return made


def test_rows_are_in_order_and_pair_the_groups() -> None:
    rows = Readers.rows_of(groups(lambda size: 50.0 * size, lambda size, repeat: 2.0))
    assert [(row["batch"], row["drafter"]) for row in rows] == [
        (size, name) for size in (1, 4, 16) for name in ("none", "eagle")
    ]
    assert [row["speedup"].mean for row in rows if row["drafter"] == "eagle"] == pytest.approx([2, 2, 2])
    assert rows[4]["tokens_per_second"].mean == pytest.approx(16 * rows[4]["tokens_per_second_per_reader"].mean)
    assert [row["tokens_per_round"] for row in rows[:2]] == [1, 2.5]


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (lambda size, repeat: 2 - size / 8 + repeat / 500, "pays 4 1.50"),
        (lambda size, repeat: 2 - size / 8 + repeat / 500, "16 not 0.00"),
        (lambda size, repeat: 1.2, "pays 16 1.20"),
        (lambda size, repeat: 0.9 + repeat / 500, "1 not eagle 0.90"),
        (lambda size, repeat: (1.5, 1.2, 0.7)[repeat], "eagle chance, 16"),
        (lambda size, repeat: (0.5, 0.8, 1.3)[repeat], "1 eagle not chance 0.80"),
    ],
)
def test_the_crossing_is_named_with_its_interval(ratio: Callable[[int, int], float], words: str) -> None:
    made = groups(lambda size: 100.0 * size**0.5, lambda size, repeat: max(ratio(size, repeat), 1e-3))
    first, last = in_words(Readers.rows_of(made), "eagle")
    assert tells(first, words)
    assert gist(last) == "Without 16 4.0 1"


def costs_of(rows: Callable[[int], float]) -> CostModel:
    """Passes whose cost is known, and drafts of a token that cost a twentieth of one and pass four times in five."""
    costs = CostModel({tokens: rows(tokens) for tokens in (1, 2, 3, 4, 6, 9, 13, 17, 24, 32, 48, 64, 144)})
    stats = costs.drafts["ngram", False]
    for length in (1, 4) * 20:
        stats.learn_cost(length, 0.05 * length)
        stats.learn([DraftOutcome.ACCEPTED] * min(length, 3) + [DraftOutcome.REJECTED] * (length == 4), length)
    return costs


def test_auto_drafts_less_for_more_readers_and_in_the_end_nothing() -> None:
    """Where a pass over nine rows costs what one over one row does, and each further row as much as a tenth of it."""
    costs, source = costs_of(lambda rows: 1 + 0.1 * max(rows - 9, 0)), Ngram.__new__(Ngram)
    plans = {
        readers: best_length(costs, costs.drafts["ngram", False], source, False, readers) for readers in (1, 2, 4, 16)
    }
    assert plans[1].k > plans[4].k >= 1
    gains = {readers: plan.rate * costs.shares(readers)[1] for readers, plan in plans.items()}
    assert gains[1] > gains[4] > 1 > gains[16]
    chosen = {}
    for readers in (1, 16):
        costs = costs_of(lambda rows: 1 + 0.1 * max(rows - 9, 0))
        costs.drafts["ngram", False].rest = 99.0
        control = DraftLengthController(costs)
        chosen[readers] = [control.choose(40, None, source, (), readers)[0] for _ in range(3)][-1]
    assert chosen[1] > 0 == chosen[16]


def test_it_is_run_by_a_command(command: Run, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = (
        "lab batch --preset nanogpt-shakespeare --sizes 1,3 --repeats 2 --max-new-tokens 12 --drafter lookup-ngram -k 2"
    )
    status, out, _ = command(*words.split(), "--json", str(file))
    assert status == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    assert [(row["batch"], row["drafter"]) for row in rows] == [
        (size, name) for size in (1, 3) for name in ("none", "lookup-ngram")
    ]
    assert {"batch", "drafter", "tokens_per_second", "tokens_per_second_per_reader", "tokens_per_round"} <= {*rows[0]}
    assert rows[0]["tokens_per_round"] == 1 < rows[1]["tokens_per_round"]
    assert tells(out, "3 readers")


@pytest.mark.parametrize("sizes", ["0", "65", "two"])
def test_sizes_are_checked(command: Run, sizes: str) -> None:
    status, _, err = command("lab", "batch", "--preset", "nanogpt-shakespeare", "--sizes", sizes)
    assert status == 2
    assert err.startswith("specdemo: ")
    assert len(err.splitlines()) == 1
