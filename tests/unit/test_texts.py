"""The first promise: by the match rule a text with drafts is the one that the target writes alone.

Whatever drafts, in whichever form, beside whichever other texts, on whichever engine, and wherever the text ends.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from specdemo.decoding.acceptance import branches
from specdemo.decoding.batch import Failed, decode, decode_batch
from specdemo.decoding.events import Event, emitted_tokens
from specdemo.decoding.loop import Decoding
from specdemo.drafters.names import DRAFTERS
from specdemo.racing.race import decoding_of, rule_for, start
from specdemo.settings import AUTO, MAX_K, MAX_NODES, Settings
from specdemo.tokens import TokenKind
from tests.harness.cases import CASES, EVERY, MIXED, OTHER_TOKENS, SAMPLINGS, Case, values
from tests.harness.doubles import (
    HOSTILE,
    HOSTILE_TREES,
    MODEL_VOCAB,
    PROMPT,
    Clock,
    KnownCosts,
    Planting,
    Renumbering,
    Scripted,
    Together,
    ids_of,
    random_table,
    rounds_of,
    set_clock,
    texts_read,
)
from tests.harness.engines import EngineToy, mixed, tiny_model
from tests.harness.grammar import END, GRAMMAR, LANGUAGE, written
from tests.harness.toys import TableToy, certain_toy, ngram_file

SEEDS = 2
Toys = Callable[[Case], Any]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """What a preset would load for a case."""
    ngrams = {size: ngram_file(tmp_path_factory.mktemp(f"ngram{size}"), size) for size in (4, MODEL_VOCAB)}

    @cache
    def made(engine: str, grammar: bool) -> Any:
        if engine.startswith("table"):
            toy: Any = certain_toy(tmp_path_factory.mktemp("toy"))
            if grammar:
                target = random_table(1)
                near = 0.5 * target + 0.5 * random_table(2, support=2)
                toy = TableToy(target=target, draft_model=near, early=random_table(3), eos_ids=frozenset({END}))
            toy.translator = Renumbering() if engine == OTHER_TOKENS else None
            toy.together, toy.ngram_table = Together(), ngrams[4]
            return toy
        engine, _, architecture = engine.partition(" ")
        model, other = (tiny_model(architecture or "llama", seed, layers=2) for seed in (0, 1))
        toy = EngineToy(model=model, draft_model=mixed(model, other, 0.05), engine=engine)
        toy.ngram_table = ngrams[MODEL_VOCAB]
        return toy

    return lambda case: copy.copy(made(case.engine, case.grammar))


def prompts_of(case: Case) -> list[list[int]]:
    """Of different lengths, each with a part that comes again; of one reader on an engine several prompts."""
    if case.engine.startswith("table"):
        return [[*PROMPT, *PROMPT[: index % 5]] for index in range(case.readers)] * (SEEDS if case.readers == 1 else 1)
    if case.readers == 1:
        return [[7, 12, 3, 44, 7, 12, 3, 44, 7, 12], [0, 0, 0, 0], [17]]
    lengths = (3 + 5 * index % 17 for index in range(case.readers))
    texts = [[(length + 5 * place + place * place) % MODEL_VOCAB for place in range(length)] for length in lengths]
    return [[*text, *text[:3]] for text in texts]


def settings_of(case: Case, index: int) -> Settings:
    """Of one of the texts."""
    long = 20 if case.grammar else 60 if case.engine.startswith("table") else 24
    grammar = GRAMMAR * case.grammar
    settings = Settings(k=0, seed=index, max_new_tokens=long, grammar=grammar, **SAMPLINGS[case.sampling])
    if case.form is MIXED:
        tree = index % 2 == 1 and DRAFTERS[case.drafter].branches
        return replace(settings, k=1 + index % 4, tree=tree, max_new_tokens=4 + 3 * index % 23)
    return replace(settings, k=case.form.k, tree=case.form.tree)


def alone(toy: Any, prompt: Sequence[int], settings: Settings) -> list[Event]:
    return list(start(toy, "none", prompt, replace(settings, k=0, tree=False)))


def ended(
    case: Case, toy: Any, wholes: Sequence[list[Event]], prompts: Sequence[Sequence[int]], asked: list[Settings]
) -> tuple[Any, list[Settings]]:
    """The toy and the settings with which the texts end as the case says, and not much before their middle."""
    texts = [ids_of(whole) for whole in wholes]
    if case.end == "eos":
        firsts = {token: min(text.index(token) if token in text else len(text) for text in texts) for token in texts[0]}
        toy.eos_ids |= {max(firsts, key=lambda token: firsts[token])}
    elif case.end == "stop":
        middles = [text[len(text) // 2 :][:2] for text in texts]
        asked = [replace(each, stop=(toy.tokenizer.decode(ids),)) for each, ids in zip(asked, middles, strict=True)]
    elif case.end == "context":
        toy.context = max(len(prompt) + each.max_new_tokens for prompt, each in zip(prompts, asked, strict=True))
    return toy, asked


def drafted(toy: Any, case: Case, prompts: Sequence[Sequence[int]], asked: Sequence[Settings]) -> list[list[Event]]:
    """The texts with drafts; of one reader after each other, of several at once."""
    if case.readers == 1:
        return [list(start(toy, case.drafter, *each)) for each in zip(prompts, asked, strict=True)]
    made = [decoding_of(toy, case.drafter, ids, rule_for(each), None) for ids, each in zip(prompts, asked, strict=True)]
    events: list[list[Event]] = [[] for _ in prompts]
    for index, event in decode_batch(made, case.readers):
        assert not isinstance(event, Failed)
        events[index].append(event)
    return events


def check_end(case: Case, toy: Any, text: Sequence[int], settings: Settings, whole: Sequence[int]) -> None:
    """That the target alone ended its text where it had to."""
    assert whole[: len(text)] == text
    ends = [place for place, token in enumerate(whole, start=1) if token in toy.eos_ids]
    if settings.stop:
        begins = ((place, toy.tokenizer.decode(whole[:place])) for place in range(1, len(whole) + 1))
        ends.append(next(place for place, begin in begins if settings.stop[0] in begin))
    assert len(text) == min([*ends, settings.max_new_tokens])


@pytest.mark.sampled(EVERY)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_text_is_the_targets_own(toys: Toys, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    toy, prompts = toys(case), prompts_of(case)
    asked = [settings_of(case, index) for index in range(len(prompts))]
    wholes = [alone(toy, *each) for each in zip(prompts, asked, strict=True)]
    toy, asked = ended(case, toy, wholes, prompts, asked)
    changed = case.end in ("eos", "stop")
    plain = [alone(toy, *each) for each in zip(prompts, asked, strict=True)] if changed else wholes
    for text, settings, whole in zip(map(ids_of, plain), asked, map(ids_of, wholes), strict=True):
        check_end(case, toy, text, settings, whole)
    toy.runners, toy.draft_runners = [], []
    if case.form.k == AUTO:  # the clock has its say in every K, and in whether a draft is a tree
        toy.costs = KnownCosts({1: 1.0, MAX_K + 1: 1.0}, case.drafter, 0.0 if case.form.tree else 0.02)
        set_clock(monkeypatch, lambda: Clock(8))
    found = drafted(toy, case, prompts, asked)

    for events, others in zip(found, plain, strict=True):
        assert ids_of(events) == ids_of(others)
        assert events[-1] == others[-1], "for the same reason"
        if case.engine.startswith("table"):
            assert margins_of(events) == pytest.approx(margins_of(others))
        if case.grammar:
            assert written(ids_of(events)) in LANGUAGE
            assert ids_of(events)[-1] == END
        assert not any(event.drafted for event in rounds_of(others)), "plain decoding drafts nothing"
    check_drafts(case, found, asked)
    check_passes(case, toy)


def margins_of(events: Sequence[Event]) -> list[float | None]:
    return [token.margin for event in events for token in emitted_tokens(event)]


def check_drafts(case: Case, found: Sequence[Sequence[Event]], asked: Sequence[Settings]) -> None:
    """That there were some, no larger than asked for, and of the form that was asked for."""
    rounds = [event for events in found for event in rounds_of(events)]
    for events, settings in zip(found, asked, strict=True):
        assert settings.k == AUTO or all(len(event.drafted) <= int(settings.k) for event in rounds_of(events))
    if case.drafter == "none":
        return
    repeats = case.engine.startswith("table")  # elsewhere a short text often does not, and there is nothing to look up
    assert any(event.drafted for event in rounds) or (case.drafter == "prompt-lookup" and not repeats)
    if case.engine == "table" and case.end in ("limit", "context") and case.form is not MIXED:
        forms = {branches(event.drafted) for event in rounds if event.drafted}
        if case.form.k != AUTO:
            assert any(token.kind is TokenKind.ACCEPTED for event in rounds for token in event.emitted)
            assert forms == {case.form.tree} or (case.grammar and False in forms)  # what is forced is a chain
        elif not case.grammar:
            assert True in forms if case.form.tree else len({event.k for event in rounds}) > 2


def check_passes(case: Case, toy: Any) -> None:
    """That the caches are free again, and that nothing was read twice."""
    for runner in (*toy.runners, *toy.draft_runners):
        assert not runner.length
        if case.engine == "table" and not case.form.tree and case.form is not MIXED:
            assert set(Counter(texts_read(runner.passes)).values()) <= {1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("script", [*HOSTILE, *HOSTILE_TREES])
def test_whatever_is_proposed_the_text_stays(toys: Toys, script: str, temperature: float) -> None:
    """Also where it ends by a token on a branch, or after a few."""
    toy, tree = toys(Case("none", MIXED, "sampled")), script in HOSTILE_TREES
    double: Any = Planting if tree else Scripted
    for seed, limit, eos in product(range(3), (1, 2, 3, 60), (-1, 1)):
        settings = Settings(k=16, temperature=temperature, max_new_tokens=limit, seed=seed, tree=tree)
        toy.eos_ids = frozenset({eos})
        runner = toy.target_runner(len(PROMPT) + limit + MAX_NODES * tree)
        drafter = double({**HOSTILE, **HOSTILE_TREES}[script])
        events = list(decode(Decoding(runner, drafter, PROMPT, rule_for(settings), toy.eos_ids)))
        assert ids_of(events) == ids_of(alone(toy, PROMPT, settings))
        assert not runner.length


def test_every_day_each_value_of_each_axis_is_tested() -> None:
    assert values(CASES[::EVERY]) == values(CASES)
