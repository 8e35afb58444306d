"""Memory of earlier answers: bounded, separate for each holder, and kept in a file that is whole or not there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.decoding.events import Prefilled
from specdemo.decoding.parts import DrafterParts
from specdemo.errors import BadInput
from specdemo.racing import remembered as memories
from specdemo.racing.again import request_again
from specdemo.racing.remembered import MOST_REMEMBERED, Memory, MemoryFile, memory_note, remembered_by, remembering
from specdemo.racing.request import DraftedLane, Request
from specdemo.racing.summary import trace_header
from specdemo.racing.trace import Entry
from specdemo.settings import REJECTION, Settings
from specdemo.tokens import Token, TokenKind
from specdemo.ui.replay.playable import playable
from tests.harness.texts import with_text

from ..sentences import refuses, tells


@dataclass
class Target:
    """A loaded preset, as far as memories read it."""

    vocabulary: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 1, "c": 2})
    parts: DrafterParts = field(default_factory=DrafterParts)
    engine: str = "eager"
    weights: dict[str, Any] = field(default_factory=dict)
    preset: Any = field(default_factory=lambda: SimpleNamespace(name="p"))

    @property
    def rows(self) -> int:
        return len(self.vocabulary)

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(get_vocab=lambda: self.vocabulary)

    def environment(self) -> dict[str, Any]:
        return {"engine": self.engine, "exact_rows": 0, "exact_tree_rows": 0}


def target(*vocabulary: str, **more: Any) -> Any:
    return Target({text: token for token, text in enumerate(vocabulary or "abc")}, **more)


# In memory ---------------------------------------------------------------------------------------------------


@given(texts=st.lists(st.lists(st.integers(0, 99), max_size=8), max_size=8), most=st.integers(1, 12))
def test_the_newest_tokens_stay(texts: list[list[int]], most: int) -> None:
    memory = Memory(texts, most)
    everything = [token for token_ids in texts for token in token_ids]
    kept = [token for token_ids in memory.texts for token in token_ids]
    assert kept == everything[-most:]
    assert memory.tokens == len(kept)
    assert all(memory.texts)
    for text, whole in zip(reversed(memory.texts), (tuple(text) for text in reversed(texts) if text), strict=False):
        assert whole[len(whole) - len(text) :] == text


def test_each_holder_has_its_own() -> None:
    one, other, loaded = Memory(), Memory(), target()
    one.add([0, 1, 2])
    assert (one.texts, other.texts) == (((0, 1, 2),), ())
    assert remembering(loaded, one).parts.remembered == ((0, 1, 2),)
    assert remembering(loaded, other).parts.remembered == loaded.parts.remembered == ()
    assert remembered_by(remembering(loaded, one), DraftedLane("suffix", 4)) == 3
    assert remembered_by(remembering(loaded, one), DraftedLane("prompt-lookup", 4)) == 0


# In a file ---------------------------------------------------------------------------------------------------


def test_a_file_keeps_the_answers(tmp_path: Path) -> None:
    path, loaded = tmp_path / "answers.json", target()
    file = MemoryFile(path)
    assert file.memory(loaded).texts == ()
    assert not path.exists()
    file.add(loaded, [0, 1])
    file.add(loaded, [])
    MemoryFile(path).add(loaded, [2])
    assert MemoryFile(path).memory(loaded).texts == ((0, 1), (2,))
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_stays_small(tmp_path: Path) -> None:
    file, loaded = MemoryFile(tmp_path / "answers.json"), target(*map(str, range(200_000)))
    file.add(loaded, [199_999] * 2 * MOST_REMEMBERED)
    file.add(loaded, [1])
    memory = file.memory(loaded)
    assert (memory.tokens, memory.texts[-1]) == (MOST_REMEMBERED, (1,))
    assert file.path.stat().st_size < memories.MOST_BYTES / 4


def test_of_two_commands_at_once_both_answers_are_kept(tmp_path: Path) -> None:
    loaded = target()
    one, other = MemoryFile(tmp_path / "answers.json"), MemoryFile(tmp_path / "answers.json")
    assert one.memory(loaded).texts == other.memory(loaded).texts == ()
    one.add(loaded, [0])
    other.add(loaded, [1])
    assert one.memory(loaded).texts == ((0,), (1,))


def test_a_file_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    file = MemoryFile(tmp_path / "answers.json")
    file.add(target("a", "b"), [1])
    before = file.path.read_bytes()
    for other in (target("b", "a"), target("a", "b", "c")):
        with refuses(BadInput, "tokenizer"):
            file.memory(other)
        with refuses(BadInput, "tokenizer"):
            file.add(other, [0])
    assert file.path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: json.dumps(content).encode()[:-5],
        lambda content: b"\xff\xfe",
        lambda content: b"[" * 100_000,
        lambda content: json.dumps([content]).encode(),
        lambda content: json.dumps({**content, "specdemo_memory": 2}).encode(),
        lambda content: json.dumps({**content, "tokenizer": None}).encode(),
        lambda content: json.dumps({**content, "texts": None}).encode(),
        lambda content: json.dumps({**content, "texts": [1]}).encode(),
        lambda content: json.dumps({**content, "texts": [["1"]]}).encode(),
        lambda content: json.dumps({**content, "texts": [[True]]}).encode(),
        lambda content: json.dumps({**content, "texts": [[-1]]}).encode(),
        lambda content: json.dumps({**content, "texts": [[0] * memories.MOST_BYTES]}).encode(),
    ],
)
def test_a_damaged_file_is_refused_before_anything_is_loaded(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "answers.json"
    MemoryFile(path).add(target(), [1])
    path.write_bytes(damage(json.loads(path.read_bytes())))
    with refuses(BadInput, "answers.json damaged"):
        MemoryFile(path)


def test_a_token_that_the_target_lacks_is_refused(tmp_path: Path) -> None:
    file, loaded = MemoryFile(tmp_path / "answers.json"), target()
    file.add(loaded, [2])
    content = json.loads(file.path.read_bytes())
    file.path.write_text(json.dumps({**content, "texts": [[3]]}))
    with refuses(BadInput, "tokenizer"):
        file.memory(loaded)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with refuses(BadInput, "read"):
        MemoryFile(tmp_path)


# In a trace --------------------------------------------------------------------------------------------------


def header(**settings: Any) -> dict[str, Any]:
    asked = Request("a", "p", "suffix", Settings(k=4, **settings))
    return trace_header(remembering(target(), Memory([[0, 1], [2]])), asked)


def test_a_trace_says_how_much_its_drafter_remembered() -> None:
    plain, drafted = header()["lanes"]
    assert "remembered" not in plain
    assert drafted["remembered"] == 3
    sentence = memory_note([plain, drafted])
    assert tells(sentence, "3 remembered")
    first = Entry("plain", with_text(Prefilled(1, Token(0, TokenKind.TARGET, 1.0), 0.1), ("a",)))
    assert playable(header(), [first])["note"] == sentence
    assert memory_note([plain]) == ""
    for wrong in (None, "3", True, -1, 10**5000, [3]):
        assert memory_note([{**drafted, "remembered": wrong}]) == ""


def test_a_race_with_memory_is_run_again_only_where_drafts_do_not_change_the_text() -> None:
    loaded = target()
    assert request_again(loaded, header()).drafter == "suffix"
    with refuses(BadInput, "earlier trace"):
        request_again(loaded, header(rule=REJECTION, temperature=0.8))


# The command line --------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.usefixtures("loads_once")
def test_a_second_answer_of_the_same_kind_is_drafted_from_the_first(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    how = "--preset nanogpt-shakespeare --drafter suffix -k 4 --max-new-tokens 40 --temperature 0 --json"
    asked = ["race", "--prompt", "ROMEO:", *how.split(), "--memory", str(path)]
    (first, first_message), (second, second_message) = (
        (json.loads(out), err) for _, out, err in (command(*asked), command(*asked))
    )
    assert first["plain"]["token_ids"] == second["plain"]["token_ids"] == second["speculative"]["token_ids"]
    rounds = [outcome["speculative"]["stats"]["rounds"] for outcome in (first, second)]
    assert rounds[1] < rounds[0]
    assert "0" in first_message.split()
    assert "40" in second_message.split()
    status, _, err = command("generate", "--prompt", "Hi", "--preset", "smollm2-135m", "--memory", str(path))
    assert (status, err.count("\n")) == (2, 1)
    assert tells(err, "another tokenizer")
    path.write_text("{}")
    status, _, err = command(*asked)
    assert (status, err.count("\n")) == (2, 1)
    assert tells(err, "answers.json damaged")
