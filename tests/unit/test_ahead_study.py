"""The study of drafting ahead: the simulation by hand, what it says, and a run of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdemo.decoding.events import Round
from specdemo.studies.ahead import (
    ALONE,
    PLAIN,
    SIMULATED,
    SIMULATION,
    TOGETHER,
    DraftsAhead,
    Times,
    in_words,
    seconds_side_by_side,
    times_of,
)
from specdemo.studies.summaries import Row
from specdemo.tokens import Ahead

from ..sentences import tells

pytestmark = pytest.mark.usefixtures("loads_once")


def test_the_times_of_a_round_are_told_by_this_and_the_next() -> None:
    """In turn, drafting takes what preparing takes besides."""
    rounds = [
        Round(0, (), (), 0.5, 1.0, 1.75, 4, ahead=Ahead(False, 0, 0.0)),
        Round(1, (), (), 0.3, 1.0, 1.50, 4, ahead=Ahead(True, 9, 0.25)),
        Round(2, (), (), 0.2, 1.0, 1.20, 4, ahead=Ahead(False, 9, 0.125)),
    ]
    expected = [Times(0.25, 1.25, 0.25, False), Times(0.175, 1.2, 0.125, True), Times(0.2, 1.0, 0.0, False)]
    for found, part in zip(times_of(rounds, in_turn=True), expected, strict=True):
        assert found == pytest.approx(part)
    assert [part.drafting for part in times_of(rounds, in_turn=False)] == [0.5, 0.3, 0.2]


@pytest.mark.parametrize(
    ("times", "ends"),
    [
        ([Times(1, 4, 2, False), Times(0, 4, 2, True), Times(0, 4, 0, True)], 13),  # prepared in time
        (
            [Times(1, 4, 6, False), Times(0, 4, 6, True), Times(0, 4, 0, True)],
            1 + 6 + 6 + 4,
        ),  # waits for what is prepared
        ([Times(1, 4, 6, False), Times(1, 4, 6, False), Times(1, 4, 0, False)], 15),  # what is not used is given up
    ],
)
def test_side_by_side_a_round_takes_what_the_slower_one_takes(times: list[Times], ends: float) -> None:
    assert seconds_side_by_side(times) == ends


Way = tuple[str, int | None, int | None]
OF_ALONE, OF_PLAIN = (ALONE, None, None), (PLAIN, 4, None)


def text(way: Way, prompt: str, seconds: float, hits: int = 0) -> Row:
    method, k, fan_out = way
    names = {"method": method, "k": k, "fan_out": fan_out, "prompt_id": prompt, "tokens_per_second": 100 / seconds}
    times = {"pass_ms": 50.0, "draft_ms": 20.0, "prepare_ms": 40.0}
    return {**names, "hits": hits, "drafts": 20 if fan_out else 0, "prepared": 6.0 if fan_out else None, **times}


def test_rows_compare_the_same_prompts_and_words_name_the_best() -> None:
    methods: list[Way] = [OF_ALONE, OF_PLAIN, (TOGETHER, 4, 1), (SIMULATED, 4, 1), (SIMULATED, 4, 3)]
    seconds = dict(zip(methods, (4.0, 2.0, 2.5, 1.8, 1.6), strict=True))
    texts = [
        text(method, name, slow * seconds[method], 15) for method in methods for name, slow in (("a", 1), ("b", 2))
    ]
    rows = DraftsAhead.rows_of(texts)
    assert [round(row["speedup"].mean, 3) if row["speedup"] else None for row in rows] == [0.5, None, 0.8, 1.111, 1.25]
    assert [row["hits"] and row["hits"].mean for row in rows] == [None, None, 0.75, 0.75, 0.75]
    first, second, third = in_words(rows)
    assert tells(first, "0.80 1")
    assert tells(second, "1.25 drafting")
    assert second.endswith(SIMULATION)
    assert "because" not in first + second  # a pass takes as long as in turn, and preparing less
    assert tells(third, "On 1.00 simulation")


def test_of_several_ks_words_name_the_best_against_the_best_without() -> None:
    seconds = {(PLAIN, 2, None): 2.0, (SIMULATED, 2, 1): 1.5, (PLAIN, 4, None): 1.8, (SIMULATED, 4, 1): 1.2}
    rows = DraftsAhead.rows_of([text(way, "a", slow, 15) for way, slow in seconds.items()])
    assert [(row["k"], row["speedup"] and round(row["speedup"].mean, 2)) for row in rows] == [
        *((2, 0.9), (2, 1.2), (4, None), (4, 1.5))
    ]
    (words,) = in_words(rows)
    assert tells(words, "1.50 K 4 1")


def test_words_name_the_cause_where_it_is_slower() -> None:
    methods: list[Way] = [OF_PLAIN, (TOGETHER, 4, 1), (SIMULATED, 4, 1)]
    texts = [
        text(way, "a", seconds, hits) for way, seconds, hits in zip(methods, (1, 2, 1.6), (0, 15, 15), strict=True)
    ]
    texts[1:] = [{**texts[1], "pass_ms": 135.0}, {**texts[2], "prepare_ms": 110.0}]
    here, second, _ = in_words(DraftsAhead.rows_of(texts), "2 cores")
    assert tells(here, "2.70 2 6.0 2.2")
    assert tells(second, "6.0 2.2")
    assert SIMULATION in second
    apart, *_ = in_words(DraftsAhead.rows_of(texts))
    assert tells(apart, "6.0 2.2")
    texts[2] = text(methods[2], "a", 1.6, 15)
    assert in_words(DraftsAhead.rows_of(texts))[0].endswith(" ready.")


def test_it_is_run_by_a_command(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = "lab ahead --preset nanogpt-shakespeare-large --fan-outs 3 --repeats 1 --max-new-tokens 16 -k 3,2"
    status, out, _ = command(*words.split(), "--json", str(file))
    assert status == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    of_k = [(PLAIN, None), (TOGETHER, 3), (SIMULATED, 3)]
    assert [(row["method"], row["fan_out"], row["k"]) for row in rows] == [
        (ALONE, None, None),
        *((*each, k) for k in (3, 2) for each in of_k),
    ]
    assert rows[3]["hits"]["mean"] > 0
    assert rows[3]["prepared"] > 3
    assert tells(out, "measured times")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("-k 0", "K 1 16"),
        ("--fan-outs 0", "1 16"),
        ("--drafter eagle", "eagle head."),
        ("--drafter layer-skip", "layer-skip layer"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(command: Callable[..., Any], words: str, values: str) -> None:
    status, _, err = command("lab", "ahead", "--preset", "nanogpt-shakespeare-large", *words.split())
    assert (status, err.count("\n"), tells(err, f"specdemo: {values}")) == (2, 1, True)
