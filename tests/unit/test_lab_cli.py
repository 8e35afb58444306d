"""`lab` on the command line: what needs no model, what a person gets wrong, and runs of a small preset that ships."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from specdemo.cli import lab
from specdemo.decoding.events import Event, Prefilled, Round
from specdemo.models.presets import find_preset
from specdemo.racing import trace as traces
from specdemo.racing.trace import Entry, write_trace
from specdemo.tokens import DraftedToken, DraftOutcome, Token, TokenKind
from tests.harness.texts import with_text

from ..fakes.study import Counting
from ..sentences import tells

pytestmark = pytest.mark.usefixtures("loads_once")
Run = Callable[..., tuple[int, str, str]]
PRESET = "nanogpt-shakespeare"


@pytest.fixture
def run(command: Run) -> Run:
    return partial(command, "lab")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A race of three rounds a lane."""
    first = Prefilled(3, Token(0, TokenKind.TARGET, 1), 0.1)
    plain: list[Event] = [first, *(Round(i, (), (Token(1, TokenKind.TARGET, 1),), 0, 0.1, 0.1) for i in range(3))]
    outcomes = (DraftOutcome.ACCEPTED, DraftOutcome.REJECTED)
    drafted = tuple(DraftedToken(1, outcome, 0.5, 0.5, 0.5) for outcome in outcomes)
    emitted = (Token(1, TokenKind.ACCEPTED, 1), Token(2, TokenKind.RESAMPLED, 1))
    drafting: list[Event] = [first, *(Round(i, drafted, emitted, 0.01, 0.12, 0.14) for i in range(3))]
    entries = [Entry("plain", with_text(event, (" x",))) for event in plain]
    for event in drafting:
        texts = ((" the", " sea"), (" the", " sky")) if isinstance(event, Round) else ((" x",),)
        entries.append(Entry("speculative", with_text(event, *texts)))
    path = tmp_path / "race.jsonl"
    path.write_text("".join(write_trace({"lanes": [{"name": "plain"}, {"name": "speculative"}]}, entries)))
    return path


def test_theory_for_people_as_json_and_as_csv(run: Run, tmp_path: Path) -> None:
    words = ["--draft-ms", "1", "--target-ms", "20", "--alpha", "0.5", "--csv", str(tmp_path / "t.csv")]
    status, out, _ = run("theory", *words)
    assert status == 0
    assert tells(out, "50% K 3")
    status, out, err = run("theory", *words, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["best_k"] == 3
    assert [row["k"] for row in json.loads(out)["rows"]][:3] == [1, 2, 3]
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [row["k"] for row in csv.DictReader(file)][:3] == ["1", "2", "3"]


def test_explain_reads_a_trace(run: Run, trace: Path, tmp_path: Path) -> None:
    status, out, _ = run("explain", "--trace", str(trace), "--json", str(tmp_path / "gap.json"))
    found = json.loads((tmp_path / "gap.json").read_text())
    assert status == 0
    assert found["predicted"] + sum(part["change"] for part in found["parts"]) == pytest.approx(found["measured"])
    assert f"{found['measured']:.2f}×" in out


def test_domains_counts_in_a_trace(run: Run, trace: Path) -> None:
    status, out, err = run("domains", "--trace", str(trace))
    rows = [line.split() for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert ["position", "in", "the", "draft", "1", "3", "3", "3"] in [row[:8] for row in rows]
    assert ["position", "in", "the", "draft", "2", "3", "3", "0"] in [row[:8] for row in rows]


def test_a_packed_trace_tells_the_same(run: Run, trace: Path) -> None:
    packed = trace.with_name("race.jsonl.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    for command in ("explain", "domains"):
        assert run(command, "--trace", str(packed)) == run(command, "--trace", str(trace))


def test_a_damaged_packed_trace_is_refused_in_one_sentence(run: Run, trace: Path) -> None:
    whole = gzip.compress(trace.read_bytes())
    cut, changed = whole[:-20], whole[:40] + b"\xff" * 20 + whole[60:]
    path = trace.with_name("damaged.jsonl.gz")
    for data in (b"", b"not packed", cut, changed, gzip.compress(b"\xff"), gzip.compress(b"hello")):
        path.write_bytes(data)
        status, out, err = run("explain", "--trace", str(path))
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "trace" in err


def test_a_packed_trace_that_would_fill_the_memory_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 3_000_000))
    monkeypatch.setattr(traces, "MAX_FILE", 2_000_000)
    status, out, err = run("explain", "--trace", str(path))
    assert (status, out, err.count("\n"), tells(err, "bomb.jsonl.gz 2 MB")) == (2, "", 1, True)


@pytest.mark.parametrize("content", ['{"models": []}', "[" * 100_000], ids=["another", "deep"])
def test_a_file_that_is_no_trace_or_profile_is_refused(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "x").write_text(content)
    assert "trace" in run("explain", "--trace", str(tmp_path / "x"))[2]
    status, _, err = run("theory", "--profile", str(tmp_path / "x"), "--drafter", "ngram")
    assert (status, err.count("\n")) == (2, 1)
    assert tells(err, "profile")


def test_a_profile_of_a_preset_feeds_the_theory(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    words = ["--preset", PRESET, "--drafters", "ngram", "--repeats", "1", "--max-new-tokens", "4", "--json", str(path)]
    status, out, _ = run("profile", *words)
    assert status == 0
    assert tells(out, "ngram guess")
    assert json.loads(path.read_text())["environment"]["torch"]
    status, out, _ = run("theory", "--profile", str(path), "--drafter", "ngram", "--json")
    rows = json.loads(out)["rows"]
    assert status == 0
    assert rows[0]["verify_cost"] != 1


def test_sweep_and_domains_of_a_preset(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "category": "easy", "prompt": "Count to ten."}')
    words = ["--preset", PRESET, "--prompts", str(prompts), "--max-new-tokens", "8"]
    csv_path = tmp_path / "sweep.csv"
    status, out, _ = run("sweep", *words, "--drafters", "ngram", "-k", "0,2", "--csv", str(csv_path))
    assert status == 0
    assert tells(out, "T 0")
    assert len(csv_path.read_text().splitlines()) == 3
    status, out, _ = run("domains", *words, "--drafter", "ngram")
    assert status == 0
    assert tells(out, "position draft")


def test_a_study_is_a_command_by_its_class_alone(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.app, "registered_commands", [*lab.app.registered_commands])
    lab.add(Counting)
    assert "Count from one on." in run("--help")[1]
    status, out, _ = run("counting", "--help")
    assert status == 0
    text = " ".join(out.split())
    assert "--to <int range> The last number. [default: 3; x>=1]" in text
    assert "--drafter <str>" in text
    assert run("counting", "--to", "0")[0] == 2
    found, rows = tmp_path / "found.json", tmp_path / "rows.csv"
    status, out, _ = run("counting", "--preset", PRESET, "--to", "4", "--json", str(found), "--csv", str(rows))
    assert (status, out.split()) == (0, ["n", "1.0", "2.0", "3.0", "4.0", "Up", "to", "4."])
    whole = json.loads(found.read_text())
    assert whole["rows"] == [{"n": n} for n in (1, 2, 3, 4)]
    assert whole["environment"]["torch"]
    assert rows.read_text().split() == ["n", *"1234"]


def test_lossless_ends_with_status_1_for_a_broken_rule(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    words = ["--preset", PRESET, "--limit", "1", "--max-new-tokens", "16", "-k", "1", "--top-k", "8", "--rounds", "150"]
    status, out, _ = run("lossless", *words, "--broken", "accept-if-p-exceeds-q", "--json", str(path))
    assert status == 1
    assert "CHANGES" in out
    found = json.loads(path.read_text())
    drafter = find_preset(PRESET).defaults.drafter
    assert [check["text"] for check in found["texts"]] == [drafter, "transformers", drafter]
    assert [test["tokens"] for test in found["sampling"]["tests"]] == [1, 2]


@pytest.mark.slow
@pytest.mark.real
def test_lossless_with_weights_as_the_file_stores_them(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    words = "--weights stored --limit 2 --max-new-tokens 24 -k 4 --top-k 8 --rounds 200 --no-transformers"
    status, out, _ = run("lossless", *words.split(), "--json", str(path))
    assert status == 0
    assert tells(out, "2 target's")
    found = json.loads(path.read_text())
    assert found["sampling"]["with_draft"] == 200


def test_lossless_with_trees(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    words = "--limit 1 --max-new-tokens 16 -k 6 --tree --no-transformers --top-k 8 --rounds 100 --rule rejection"
    status, out, _ = run("lossless", "--preset", PRESET, *words.split(), "--json", str(path))
    assert status == 0
    assert tells(out, "1 target's")
    found = json.loads(path.read_text())
    assert found["sampling"]["with_draft"] == 100
    assert found["exact"] == []
    status, _, err = run("lossless", "--tree", "-k", "6", "--broken", "accept-if-p-exceeds-q")
    assert (status, err.count("\n"), tells(err, "--broken --tree.")) == (2, 1, True)
