"""The command line, run as a person would, on the real default preset."""

from __future__ import annotations

import json
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest

from specdemo.cli import main as cli
from specdemo.decoding.events import Round, emitted_tokens
from specdemo.formats import printable
from specdemo.racing.trace import read_trace, trace_lines
from tests.harness.classes import LaneFigures

from ..sentences import tells

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("loads_once")]

RECORDINGS = Path(__file__).resolve().parents[2] / "presets" / "recordings"
STATS = {
    *("tokens", "rounds", "drafted", "tested", "accepted"),
    *("seconds", "ttft_seconds", "draft_seconds", "verify_seconds"),
}


def test_presets_names_the_default(command):
    status, out, err = command("presets")
    assert (status, err) == (0, "")
    assert out.startswith("smollm2-135m ")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("drafter", ["none", "layer-skip"])
def test_generate_prints_one_json_object_that_adds_up(command, drafter):
    words = ["--prompt", "Say the word tea three times.", "--max-new-tokens", "12", "--drafter", drafter, "-k", "3"]
    status, out, err = command("generate", *words, "--json")
    outcome = json.loads(out)
    assert (status, err) == (0, "")
    assert set(outcome) == {"text", "token_ids", "kinds", "finish_reason", "stats"}
    stats = outcome["stats"]
    assert stats.keys() >= STATS
    assert len(outcome["token_ids"]) == len(outcome["kinds"]) == stats["tokens"] <= 12
    assert stats["accepted"] == outcome["kinds"].count("accepted") <= stats["tested"] <= stats["drafted"]
    assert stats["seconds"] >= stats["ttft_seconds"] + stats["draft_seconds"] + stats["verify_seconds"]
    assert "tea" in outcome["text"].lower()


def test_generate_streams_the_same_text_that_json_holds(command):
    how = "--max-new-tokens 10 --drafter prompt-lookup -k 3"
    words = ["generate", "--prompt", "List three colours.", *how.split()]
    _, streamed, err = command(*words)
    _, out, _ = command(*words, "--json")
    plain = "".join(part.partition("m")[2] if part.startswith("[") else part for part in streamed.split("\x1b"))
    assert json.loads(out)["text"] in plain
    assert "tokens/s" in err


def test_race_lanes_agree_in_float32(command):
    words = "--preset nanogpt-shakespeare --drafter prompt-lookup -k 3 --max-new-tokens 16 --dtype float32 --json"
    status, out, _ = command("race", "--prompt", "Repeat: one two three four.", *words.split())
    outcome = json.loads(out)
    assert status == 0
    assert outcome["comparison"] == {"identical": True, "first_difference": None, "margin": None}
    assert outcome["plain"]["token_ids"] == outcome["speculative"]["token_ids"]
    assert outcome["speed_up"] > 0


def test_race_prints_a_table_and_a_sentence(command):
    status, out, _ = command("race", "--prompt", "Hi", "--drafter", "prompt-lookup", "--max-new-tokens", "4")
    assert status == 0
    assert tells(out, "target alone tokens second")
    assert out.rstrip().endswith(".")


@pytest.mark.parametrize("temperature", [pytest.param("0", marks=pytest.mark.slow), "0.9"])
def test_race_drafts_a_tree_that_its_trace_holds(command, tmp_path: Path, temperature: str):
    out = tmp_path / "race.jsonl"
    words = [
        "--preset",
        "nanogpt-shakespeare",
        "--prompt",
        "Count to ten.",
        "--tree",
        "-k",
        "6",
        "--temperature",
        temperature,
        "--max-new-tokens",
        "20",
    ]
    assert command("record", *words, "--out", str(out))[0] == 0
    header, entries = read_trace(trace_lines(out))
    assert header["settings"]["tree"] is True
    drafts = [entry.event.drafted for entry in entries if isinstance(entry.event, Round) and entry.event.drafted]
    assert any(sum(token.parent == -1 for token in drafted) > 1 for drafted in drafts)
    status, printed, _ = command("race", "--again", str(out), "--json")
    outcome = json.loads(printed)
    assert status == 0
    assert outcome["comparison"]["identical"]
    status, _, err = command("race", *words[:4], "--tree", "-k", "64")
    assert status == 2
    assert tells(err, "0 63")


@pytest.mark.slow
def test_record_writes_a_trace_that_can_be_read(command, tmp_path: Path):
    path = tmp_path / "race.jsonl"
    words = ["--prompt", "Count to five.", "--drafter", "prompt-lookup", "--max-new-tokens", "8", "--seed", "7"]
    status, _, _ = command("record", *words, "--out", str(path))
    header, entries = read_trace(path.read_text(encoding="utf-8").splitlines())
    assert status == 0
    assert header["settings"]["seed"] == 7
    assert header["prompt"] == "Count to five."
    assert header["weights"]["target"]
    assert header["environment"]["torch"]
    for lane in ("plain", "speculative"):
        events = [entry.event for entry in entries if entry.lane == lane]
        assert LaneFigures.of(events).tokens == sum(len(emitted_tokens(event)) for event in events) > 0


NANOGPT = ["--preset", "nanogpt-shakespeare", "--max-new-tokens", "60", "--seed", "3"]


@pytest.mark.parametrize(
    "settings",
    [
        ("auto", "0.8"),
        ("3", "0"),
        *(pytest.param(mixed, marks=pytest.mark.slow) for mixed in (("3", "0.8"), ("auto", "0"))),
    ],
)
def test_a_recorded_race_is_run_again_token_for_token(command, tmp_path: Path, settings: tuple[str, str]):
    (k, temperature), out = settings, tmp_path / "race.jsonl.gz"
    words = ["--prompt", "ROMEO:", "-k", k, "--temperature", temperature, "--out", str(out)]
    assert command("record", *NANOGPT, *words)[0] == 0
    _, recorded = read_trace(trace_lines(out))
    status, printed, err = command("race", "--again", str(out))
    assert (status, err) == (0, "")
    assert tells(printed, "same trace")
    status, printed, _ = command("race", "--again", str(out), "--json")
    outcome = json.loads(printed)
    assert status == 0
    assert outcome["again"] == {"same": True, "first_difference": {"plain": None, "speculative": None}}
    for lane in ("plain", "speculative"):
        ids = [token.id for entry in recorded if entry.lane == lane for token in emitted_tokens(entry.event)]
        assert outcome[lane]["token_ids"] == ids
        assert len(ids) == 60


def test_a_trace_that_is_not_repeated_is_told_where_it_parts_and_what_was_other(command, tmp_path: Path):
    out = tmp_path / "race.jsonl"
    command("record", *NANOGPT, "--prompt", "ROMEO:", "-k", "3", "--temperature", "0.8", "--out", str(out))
    lines = out.read_text().splitlines()
    header = json.loads(lines[0])
    header["settings"]["temperature"], header["environment"]["cores"] = 1.3, 99
    header["environment"]["device_name"] = "an abacus"
    out.write_text("\n".join([json.dumps(header), *lines[1:]]))
    status, printed, _ = command("race", "--again", str(out))
    assert status == 1
    assert tells(printed, "plain parts")
    assert tells(printed, "device_name elsewhere")


@pytest.mark.slow
def test_a_recording_that_ships_can_still_be_asked_for_again(command):
    """Old traces do not tell the seed, which at temperature 0 decides nothing."""
    status, printed, err = command("race", "--again", str(RECORDINGS / "facts-1.jsonl.gz"))
    assert err == ""
    assert status == (0 if tells(printed, "same trace") else 1)


def test_what_the_trace_says_cannot_be_asked_for_as_well(command, tmp_path: Path):
    trace = str(RECORDINGS / "facts-1.jsonl.gz")
    for words, named in (
        (["--again", trace, "--prompt", "Hi", "-k", "3", "--top-k", "2"], "--prompt, -k, --top-k"),
        (["--again", str(tmp_path / "none.jsonl")], "none.jsonl"),
        ([], "--prompt"),
    ):
        status, out, err = command("race", *words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert tells(err, named)


def test_without_a_command_it_tells_what_there_is(command):
    for words in ([], ["lab"]):
        status, out, err = command(*words)
        assert (status, out) == (2, "")
        assert err.startswith("Usage: specdemo")
        assert err.count("\n") > 5


def test_a_prompt_that_is_no_text_is_refused_in_words(command, monkeypatch):
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"\xff"), encoding="utf-8"))
    status, out, err = command("generate", "--prompt", "-")
    assert (status, out) == (2, "")
    assert tells(err, "utf-8 text")


def test_an_exact_tie_is_told_as_one():
    figures = {**LaneFigures().as_dict(), "tokens": 9, "finish_reason": "length"}
    comparison = {"identical": False, "first_difference": 4, "margin": 0.0}
    lanes = {"plain": {"stats": figures}, "speculative": {"stats": figures}}
    found = {"speed_up": None, "speed_up_in_all": None, "busy": None, "sentence": "So.", "comparison": comparison}
    verdicts = {"speculative": found}
    shown = cli.table({**lanes, "verdicts": verdicts, "comparison": comparison, "sentence": "So."}, "ngram")
    assert tells(shown, "5 0.0000")


def test_a_lane_that_was_stopped_may_be_shorter():
    figures = {**LaneFigures().as_dict(), "tokens": 4}
    lanes = {"plain": {"stats": figures}, "speculative": {"stats": {**figures, "tokens": 5}}}
    for place, differs in ((4, False), (3, True)):
        comparison = {"identical": False, "first_difference": place, "margin": None}
        found = cli.texts_compared({**lanes, "verdicts": {"speculative": {"comparison": comparison}}})
        assert tells(found[0], f"{place + 1}") == differs


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["generate"], "--prompt"),
        (["generate", "--prompt", " \n"], "empty"),
        (["generate", "--prompt", "Hi", "-k", "17"], "16, 17."),
        (["generate", "--prompt", "Hi", "-k", "2.5"], "-k"),
        (["generate", "--prompt", "Hi", "--temperature", "nan"], "temperature"),
        (["generate", "--prompt", "Hi", "--temperature", "2.1"], "2.1"),
        (["generate", "--prompt", "Hi", "--top-p", "0"], "top-p"),
        (["generate", "--prompt", "Hi", "--top-k", "-1"], "top-k"),
        (["generate", "--prompt", "Hi", "--seed", "-1"], "seed"),
        (["generate", "--prompt", "Hi", "--max-new-tokens", "0"], "max tokens 0"),
        (["generate", "--prompt", "Hi", "--max-new-tokens", "9000"], "8192"),
        (["generate", "--prompt", "Hi", "--preset", "gpt-9"], "smollm2-135m"),
        (["generate", "--prompt", "Hi", "--drafter", "psychic"], "prompt-lookup"),
        (["generate", "--prompt", "Hi", "--drafter", "draft-model"], "draft-model preset"),
        (["generate", "--prompt", "Hi", "--dtype", "int3"], "int3"),
        (["generate", "--prompt", "Hi", "--device", "abacus"], "abacus"),
        (["generate", "--prompt", "Hi", "--nonsense"], "--nonsense"),
        (["dance"], "dance"),
        (["record", "--prompt", "Hi", "--out", "/no/such/folder/trace.jsonl"], "/no/such/folder"),
        (["record", "--prompt", "Hi", "--out", "/"], "/ written."),
        (["lab", "profile", "--csv", "/no/such/folder/profile.csv"], "/no/such/folder"),
        (["lab", "theory"], "--draft-ms"),
        (["lab", "theory", "--draft-ms", "1"], "--target-ms"),
        (["lab", "theory", "--draft-ms", "1", "--target-ms", "0"], "above 0,"),
        (["lab", "theory", "--draft-ms", "nan", "--target-ms", "1"], "0 passes"),
        (["lab", "theory", "--draft-ms", "1", "--target-ms", "1", "--alpha", "1.5"], "0 1"),
        (["lab", "theory", "--profile", "/no/such/file", "--drafter", "ngram"], "/no/such/file"),
        (["lab", "theory", "--draft-ms", "1", "--target-ms", "1", "--csv", "/no/such/folder/t.csv"], "/no/such/folder"),
        (["lab", "explain", "--trace", "/no/such/trace"], "/no/such/trace"),
        (["lab", "domains", "--prompts", "/no/such/prompts"], "/no/such/prompts"),
        (["lab", "domains", "-k", "17"], "16, 17."),
        (["lab", "sweep", "-k", "one"], "numbers"),
        (["lab", "sweep", "--seeds", "0"], "'--seeds': 1"),
        (["lab", "profile", "--repeats", "0"], "'--repeats': 1"),
        (["lab", "profile", "--preset", "gpt-9"], "gpt-9"),
        (["lab", "lossless", "--rule", "wishful"], "match rejection"),
        (["lab", "lossless", "--broken", "wishful"], "resample-from-p"),
        (["lab", "lossless", "--temperature", "0"], "above 0,"),
        (["lab", "lossless", "--limit", "-1"], "limit"),
        (["lab", "dance"], "dance"),
        (["train", "export", "--kind", "eagle", "--help"], "tools.train`"),
        (["export", "--kind", "whole", "--out", "a"], "'whole'. eagle, block, medusa"),
        (["export", "--kind", "eagle", "--out", "a", "--format", "b"], "'b'"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(command, words, named):
    status, out, err = command(*words)
    assert (status, out) == (2, "")
    assert err.startswith("specdemo: ")
    assert err.count("\n") == 1
    assert tells(err, named)


def test_control_characters_are_shown_not_obeyed():
    assert printable("a\x1b[2Jb\tc\n\x07") == "a\\x1b[2Jb\tc\n\\x07"


LANES = ["--lane", "prompt-lookup:2", "--lane", "ngram:auto", "--lane", "lookup-ngram:4"]
LANE_NAMES = ["plain", *LANES[1::2]]


@pytest.mark.slow
def test_four_lanes_race_and_their_trace_is_run_again(command, tmp_path: Path):
    out = tmp_path / "race.jsonl"
    words = ["--prompt", "Repeat: one two three four one two three.", "--max-new-tokens", "16"]
    status, printed, err = command("race", *words, *LANES)
    assert (status, err) == (0, "")
    assert printed.split("\n")[0].split() == ["target", "alone", *LANE_NAMES[1:]]
    assert tells(printed, "target alone")
    assert command("record", *words, *LANES, "--out", str(out))[0] == 0
    _, entries = read_trace(trace_lines(out))
    assert {entry.lane for entry in entries} == {*LANE_NAMES}
    status, printed, _ = command("race", "--again", str(out), "--json")
    outcome = json.loads(printed)
    assert status == 0
    assert outcome["again"] == {"same": True, "first_difference": dict.fromkeys(LANE_NAMES)}
    for lane in LANE_NAMES:
        ids = [token.id for entry in entries if entry.lane == lane for token in emitted_tokens(entry.event)]
        assert outcome[lane]["token_ids"] == ids


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--lane", "ngram"], "1 16 auto, eagle:4 ngram:auto,"),
        (["--lane", "ngram:4", "-k", "2"], "--lane --drafter"),
        ([*LANES, "--lane", "ngram:1"], "3 4."),
        (["--lane", "ngram:4", "--server", "http://localhost:1"], "--lane."),
        (["--lane", "ngram:4", "--again", "race.jsonl"], "--prompt, --lane."),
    ],
)
def test_wrong_lanes_are_one_line(command, words: list[str], sentence: str):
    status, out, err = command("race", "--prompt", "Hi", *words)
    assert (status, out) == (2, "")
    assert tells(err, sentence)
    assert err.count("\n") == 1


# People who guess on stdin -----------------------------------------------------------------------------------


class Typed(StringIO):
    """Stdin of somebody at a terminal."""

    reads = 0

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        self.reads += 1
        return super().readline(size)

    def isatty(self) -> bool:
        return True


def generated(command, *words: str):
    status, out, _ = command("generate", *NANOGPT, "--prompt", "ROMEO:", *words, "--json")
    assert status == 0
    return json.loads(out)


@pytest.mark.parametrize(("k", "drafted", "accepted"), [((), 7 + 3, 7), (("-k", "2"), 2 + 2, 2)])
def test_each_line_of_stdin_is_a_guess_and_after_its_end_nothing_is_drafted(command, monkeypatch, k, drafted, accepted):
    alone = generated(command, "--drafter", "none")
    right = alone["text"].strip("\n")[:7]  # the first token, a line break, needs no guess
    monkeypatch.setattr("sys.stdin", StringIO(f"{right}\n\nqqq"))
    found = generated(command, "--drafter", "you", *k)
    assert found["token_ids"] == alone["token_ids"]
    assert (found["stats"]["drafted"], found["stats"]["accepted"]) == (drafted, accepted)
    assert found["kinds"][1 : accepted + 1] == ["accepted"] * accepted


def test_who_types_in_a_terminal_sees_the_text_so_far_and_is_not_asked_after_its_end(command, monkeypatch):
    text = generated(command, "--drafter", "none")["text"]
    monkeypatch.setattr("sys.stdin", stdin := Typed("\n\n"))
    status, _, err = command("race", *NANOGPT, "--prompt", "ROMEO:", "--drafter", "you")
    assert (status, stdin.reads) == (0, 3)
    assert err == "".join(f"ROMEO:{text[:written]}> " for written in (1, 2, 3)) + "\n"


def test_where_the_text_streams_it_is_not_shown_again(command, monkeypatch):
    monkeypatch.setattr("sys.stdin", Typed("\n"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    status, _, err = command("generate", *NANOGPT, "--prompt", "ROMEO:", "--drafter", "you")
    assert (status, err.count("\n> "), "ROMEO" in err) == (0, 2, False)


def test_the_trace_of_a_race_against_people_is_run_again_without_them(command, monkeypatch, tmp_path: Path):
    out = tmp_path / "race.jsonl"
    monkeypatch.setattr("sys.stdin", StringIO("A a\n\nthe\n"))
    words = ["--prompt", "ROMEO:", "--lane", "you", "--lane", "ngram:4", "--out", str(out)]
    assert command("record", *NANOGPT, *words)[0] == 0
    _, entries = read_trace(trace_lines(out))
    rounds = [e.event for e in entries if e.lane == "you:auto" and isinstance(e.event, Round)]
    assert [len(event.drafted) for event in rounds if event.drafted] == [3, 3]
    monkeypatch.setattr("sys.stdin", None)
    status, printed, _ = command("race", "--again", str(out), "--json")
    assert (status, json.loads(printed)["again"]["same"]) == (0, True)
    assert json.loads(printed)["you:auto"]["stats"]["drafted"] == 6


@pytest.mark.parametrize(
    ("prompt", "stdin", "errors", "sentence"),
    [
        ("-", b"Hi", "strict", "--prompt"),
        ("Hi", b"a\n\xff\n", "strict", "utf-8 text"),
        ("Hi", b"a\n\xff\n", "surrogateescape", "half"),
    ],
)
def test_guesses_on_stdin_are_text_and_leave_no_place_for_the_prompt(
    command, monkeypatch, prompt: str, stdin: bytes, errors: str, sentence: str
):
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(stdin), encoding="utf-8", errors=errors))
    status, out, err = command("race", *NANOGPT, "--prompt", prompt, "--lane", "you")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert tells(err, sentence)
