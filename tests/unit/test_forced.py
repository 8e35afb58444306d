"""Schemas and grammars: the mask, what is forced, what is refused and what it may cost.

That the text is the masked target's own, and its distribution, is tested in `test_texts` and `test_distribution`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLTokenizer

from specdemo.cli.options import read_grammar
from specdemo.decoding.constraint import Constraint, tokenizer_of
from specdemo.decoding.events import Event, Round
from specdemo.drafters.forced import ForcedFirst
from specdemo.drafters.none import NoDrafter
from specdemo.errors import BadInput
from specdemo.models.loaded import load
from specdemo.models.presets import DEFAULT_PRESET, find_preset
from specdemo.racing.race import start
from specdemo.racing.summary import report
from specdemo.settings import Settings
from specdemo.system.progress import Stopped, attended
from specdemo.tokens import Draft, DraftOutcome
from tests.harness.classes import Loaded
from tests.harness.doubles import PROMPT, VOCAB, byte_tokenizer, ids_of, proposed, random_table, rounds_of
from tests.harness.grammar import END, GRAMMAR, LANGUAGE, TOKENS, constraint_of, may_follow, written
from tests.harness.toys import TableToy

from ..sentences import refuses, tells


@pytest.fixture(scope="module")
def toy() -> TableToy:
    """A target that may write anything."""
    return TableToy(target=random_table(1), eos_ids=frozenset({END}))


def in_language(text: Sequence[int]) -> list[bool]:
    """Which tokens can follow a text, from the list of all texts that satisfy the grammar."""
    begun = written(text)
    longer = [any(whole.startswith(begun + token.decode()) for whole in LANGUAGE) for token in TOKENS[:END]]
    return [*longer, begun in LANGUAGE]


def asked(settings: Settings) -> Settings:
    return replace(settings, grammar=GRAMMAR)


def run(toy: Any, name: str, settings: Settings) -> list[Event]:
    return list(start(toy, name, PROMPT, settings))


# The mask --------------------------------------------------------------------------------------------------


def all_beginnings() -> Iterator[tuple[int, ...]]:
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        text = waiting.pop()
        yield text
        waiting += [(*text, token) for token, allowed in enumerate(may_follow(text)[:END]) if allowed]


def test_the_mask_is_that_of_the_grammar_and_the_end_is_allowed_where_a_text_is_complete() -> None:
    """Where one text is forced, the mask allows its own tokens alone, else whatever can follow."""
    beginnings, certain = list(all_beginnings()), 0
    for text in beginnings:
        constraint = constraint_of()
        constraint.advance(text)
        allowed, possible = may_follow(text), in_language(text)
        assert constraint.finished == (written(text) in LANGUAGE) == allowed[END]
        if allowed != possible:
            assert [token for token in range(VOCAB) if allowed[token]] == constraint.forced()[:1]
            assert possible[constraint.forced()[0]]
            certain += 1
    assert len(beginnings) > 50
    assert 0 < certain < len(beginnings) / 2


def test_the_mask_depends_on_the_text_alone() -> None:
    """And not on what was asked or tried before: else a draft could change the text."""
    waiting: list[tuple[tuple[int, ...], Constraint]] = [((), constraint_of())]
    while waiting:
        text, constraint = waiting.pop()
        constraint.forced()
        constraint.masked(torch.zeros(4, VOCAB), Draft([2, 2, 1]))
        assert constraint.allowed(VOCAB).tolist() == may_follow(text)
        for token in range(END):
            if may_follow(text)[token]:
                following = constraint.fork()
                following.advance([token])
                waiting.append(((*text, token), following))


def test_what_is_forced_is_the_beginning_of_every_text_that_can_follow() -> None:
    some = 0
    for text in all_beginnings():
        constraint = constraint_of()
        constraint.advance(text)
        forced, begun = constraint.forced(), written(text)
        assert all(whole.startswith(begun + written(forced)) for whole in LANGUAGE if whole.startswith(begun))
        assert constraint.allowed(VOCAB).tolist() == may_follow(text), "asking changes nothing"
        some += bool(forced)
    assert some > 5


def test_a_text_that_can_only_end_is_forced_to() -> None:
    constraint = constraint_of('start: "ab" "ba"')
    assert constraint.forced() == [2, 1, 0, END]
    constraint.advance([2, 1, 0])
    assert constraint.forced() == [END]


def test_each_row_of_a_tree_is_masked_by_the_tokens_before_it() -> None:
    constraint = constraint_of()
    draft = Draft(
        [0, 1, END, 2, 0], parents=[-1, 0, 0, -1, 2], tree=True
    )  # token 2 is forbidden, and so is what follows it
    masked = constraint.masked(torch.zeros(6, VOCAB), draft)
    anything = [True] * VOCAB
    expected = [may_follow(()), may_follow((0,)), may_follow((0, 1)), anything, may_follow((2,)), anything]
    assert (masked == 0).tolist() == expected
    assert constraint.allowed(VOCAB).tolist() == may_follow(())


def test_padding_is_forbidden() -> None:
    masked = constraint_of().masked(torch.zeros(1, VOCAB + 2), Draft())
    assert (masked == 0).tolist() == [[True, True, True, False, False, False]]


def test_the_mask_changes_the_text(toy: TableToy) -> None:
    settings = Settings(k=0, max_new_tokens=20)
    assert ids_of(run(toy, "none", settings)) != ids_of(run(toy, "none", asked(settings)))


# JSON ------------------------------------------------------------------------------------------------------

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "persons": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": 12},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                },
                "required": ["name", "age"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["persons"],
    "additionalProperties": False,
}


def check_persons(text: str) -> None:
    """The text is as `SCHEMA` wants it, on one line."""
    read = json.loads(text)
    assert list(read) == ["persons"]
    assert 2 <= len(read["persons"]) <= 3
    for person in read["persons"]:
        assert list(person) == ["name", "age"]
        assert isinstance(person["name"], str)
        assert 1 <= len(person["name"]) <= 12
        assert isinstance(person["age"], int)
        assert 0 <= person["age"] <= 120
    assert text == json.dumps(read, ensure_ascii=False) or "\\" in text
    assert "\n" not in text


@cache
def characters() -> LLTokenizer:
    tokenizer = byte_tokenizer()
    return tokenizer_of(tokenizer, len(tokenizer), frozenset({261}))


def test_what_a_schema_forces_is_tokenised_as_the_target_would() -> None:
    tokenizer = byte_tokenizer()
    constraint = Constraint.of(json.dumps(SCHEMA), characters())
    assert constraint.forced() == tokenizer.encode('{"persons": [{"name": "', add_special_tokens=False)
    constraint.advance(tokenizer.encode('{"persons": [{"name": "Ann"', add_special_tokens=False))
    assert constraint.forced() == tokenizer.encode(', "age": ', add_special_tokens=False)


@pytest.fixture(scope="module")
def default() -> Iterator[Loaded]:
    loaded = load(find_preset(DEFAULT_PRESET))
    yield loaded
    loaded.release()


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_default_preset_writes_what_a_schema_asks_for(default: Loaded, temperature: float) -> None:
    prompt = default.encode("List two persons with name and age.")
    settings = Settings(k=4, temperature=temperature, max_new_tokens=90, seed=5, grammar=json.dumps(SCHEMA))
    alone = list(start(default, "none", prompt, settings))
    found = report(default, prompt, alone, settings.grammar)
    check_persons(found["text"])
    assert found["satisfied"]
    for name in ("prompt-lookup", "lookup-eagle", "ngram"):
        drafted = list(start(default, name, prompt, settings))
        assert ids_of(drafted) == ids_of(alone)
        assert (
            sum(token.outcome is DraftOutcome.ACCEPTED for event in rounds_of(drafted) for token in event.drafted) > 9
        )
    if temperature:
        sampled = report(default, prompt, list(start(default, "eagle", prompt, replace(settings, rule="rejection"))))
        check_persons(sampled["text"])


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.usefixtures("loads_once")
def test_a_text_that_ends_in_the_middle_is_said(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "persons.json"
    path.write_text(json.dumps(SCHEMA))
    words = ["--prompt", "List two persons.", "--schema", str(path), "--max-new-tokens", "12"]
    status, out, _ = command("generate", *words)
    assert status == 0
    assert tells(out, "middle: 12 few.")
    status, out, _ = command("race", *words, "--json")
    assert json.loads(out)["plain"]["satisfied"] is json.loads(out)["speculative"]["satisfied"] is False
    assert tells(json.loads(out)["sentence"], "middle: 12 few.")


# What is refused -------------------------------------------------------------------------------------------


DEEP = '{"items":' * 5000 + "{}" + "}" * 5000


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('{"type": "objct"}', "JSON used: objct."),
        ('{"type": ', "JSON read:"),
        ('{"type": "array", "contains": {}}', 'JSON used: ["contains"].'),
        ("start: b", 'grammar used: 1(8): "b".'),
        (DEEP, "JSON read: nested"),
        ('{"$ref": "#"}', "JSON used: satisfy it."),
        ("start: T\nT: /a/ & /b/", "grammar used: satisfy it."),
        (
            '{"type": "object", "properties": {"a": {"type": "string"}}, '
            '"patternProperties": {"a": {"type": "null"}}, "required": ["a"]}',
            "JSON used: satisfy it: 'a'",
        ),
        ('{"properties": {"zip": {"type": "string", "pattern": "(?=a)b"}}}', "JSON used: '(?=a)b', look-behind,"),
        ("start: /[/", "grammar used: pattern '[', unclosed"),
        ('start: a\na: "a" a', "grammar used: only never long."),
        ("start: T\nT: /(a|b)*a(a|b){20}/ & ~/(a|b)*a(a|b){20}/", "grammar used: complex: fuel"),
        ("start: /a" + "b" * 300 + "[/", f"grammar used: pattern 'a{'b' * 55}..., unclosed"),
        (f"start: {'x' * 300}", "grammar used: 1(8): name:"),
    ],
)
def test_a_wrong_grammar_is_refused_in_one_sentence(toy: TableToy, grammar: str, said: str) -> None:
    with refuses(BadInput, said) as refused:
        start(toy, "none", PROMPT, Settings(grammar=grammar))  # type: ignore[arg-type]
    assert len(str(refused.value)) < 300


def test_what_cannot_be_satisfied_after_what_is_forced_is_said_at_once() -> None:
    loop = {"$ref": "#/$defs/loop"}
    schema = {"type": "object", "properties": {"a": loop}, "required": ["a"], "$defs": {"loop": loop}}
    with refuses(BadInput, "JSON used: satisfy it."):
        Constraint.of(json.dumps(schema), characters())


def test_what_cannot_be_satisfied_in_the_middle_of_a_text_is_said() -> None:
    constraint = constraint_of('start: "a" | "b" T\nT: /a/ & /b/')
    constraint.advance([1])
    with refuses(BadInput, "grammar further: satisfy it."):
        constraint.allowed(VOCAB)


# What it may cost ------------------------------------------------------------------------------------------

CHAIN = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(6000)) + '\nr6000: "a"'
COSTLY = {
    "time": '{"type": "integer", "multipleOf": 100000007}',
    "together": json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (101, 103, 107, 109)]}),
    "in a grammar": 'start: %json {"type": "integer", "multipleOf": 100000007}',
    "escaped": '{"type": "integer", "multiple\\u004ff": 100000007}',
    "stack": CHAIN,  # it ended the whole process
}


@pytest.mark.parametrize("grammar", COSTLY.values(), ids=[*COSTLY])
def test_a_grammar_that_costs_too_much_is_refused(monkeypatch: pytest.MonkeyPatch, grammar: str) -> None:
    monkeypatch.setattr("specdemo.decoding.constraint.SECONDS", 0.2)
    with refuses(BadInput, "used: time memory. multipleOf,"):
        constraint_of(grammar)


@pytest.mark.skipif(sys.platform != "linux", reason="has no such limit")
def test_its_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdemo.decoding.constraint.MEMORY", 1)
    with refuses(BadInput, "used: time memory. multipleOf,"):
        constraint_of("start: /a|b/\n" + "//" * 1000)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The processes that are started."""
    begun: list[subprocess.Popen[str]] = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            begun.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return begun


def test_it_is_tried_apart_once_and_only_where_it_may_cost_much(started: list[subprocess.Popen[str]]) -> None:
    Constraint.of(json.dumps(SCHEMA), characters())
    constraint_of()
    assert not started
    for _ in range(3):
        constraint = Constraint.of('{"type": "integer", "minimum": 10, "maximum": 98, "multipleOf": 7}', characters())
        assert constraint.advance(characters().tokenize_str("98")) == len(characters().tokenize_str("98"))
        assert constraint.finished
    assert [process.returncode for process in started] == [0]


def test_the_trial_ends_when_it_is_stopped(started: list[subprocess.Popen[str]]) -> None:
    with attended(lambda: bool(started)), pytest.raises(Stopped):
        constraint_of(COSTLY["time"])
    assert started[0].returncode


@pytest.mark.sampled(3)
@pytest.mark.real
@pytest.mark.usefixtures("loads_once")
@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--schema", '{"type": "objct"}', "JSON used: objct."),
        ("--schema", "{", "{path} JSON:"),
        ("--schema", "[]", "{path} JSON object."),
        ("--schema", " ", "{path} empty."),
        ("--grammar", "start: b", 'grammar used: 1(8): "b".'),
        ("--grammar", "{}", "{path} JSON --schema."),
    ],
)
def test_a_wrong_file_ends_with_status_2(command: Any, tmp_path: Path, option: str, text: str, said: str) -> None:
    path = tmp_path / "wrong"
    path.write_text(text)
    status, out, err = command("generate", "--prompt", "Hi", option, str(path))
    assert (status, out) == (2, "")
    assert tells(err, said.format(path=path))
    assert err.count("\n") == 1


def test_a_deep_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(DEEP)
    with refuses(BadInput, f"{path} nested"):
        read_grammar(path, None)


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    """As PowerShell writes it."""
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "string"}', encoding="utf-8-sig")
    grammar.write_text("start: /a/", encoding="utf-8-sig")
    assert read_grammar(schema, None) == '{"type": "string"}'
    assert read_grammar(None, grammar) == "start: /a/"


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with refuses(BadInput, "pip llguidance."):
        tokenizer_of(byte_tokenizer(), 300, frozenset({0}))


def test_a_model_that_ends_no_text_is_refused() -> None:
    with refuses(BadInput, "token ends"):
        tokenizer_of(byte_tokenizer(), 300, frozenset())


def test_drafting_ahead_of_a_grammar_is_refused(toy: TableToy) -> None:
    with refuses(BadInput, "ahead grammar"):
        start(toy, "draft-model", PROMPT, asked(Settings(ahead=2)))  # type: ignore[arg-type]


def test_a_drafter_that_knows_no_allowed_token_drafts_nothing(toy: TableToy) -> None:
    """Its draft ends there; the target goes on."""
    mute = replace(toy, draft_model=torch.eye(VOCAB, dtype=torch.float64)[END].expand(VOCAB, VOCAB, VOCAB))
    settings = asked(Settings(k=3, max_new_tokens=20))
    drafted = run(mute, "draft-model", settings)
    assert ids_of(drafted) == ids_of(run(toy, "none", settings))
    assert any(not event.drafted for event in drafted if isinstance(event, Round))


def test_what_is_forced_is_no_longer_than_a_tree_may_be_deep() -> None:
    constraint = constraint_of('start: "abba"')
    forced = constraint.forced()
    drafter = ForcedFirst(constraint, NoDrafter())
    assert len(forced) > 2
    assert proposed(drafter, [0], 8, depth=2).token_ids == forced[:2]
    assert proposed(drafter, [0], 8).token_ids == forced
