"""The emitted text follows the target's distribution exactly: by full enumeration, and by chi-square on sampled runs.

Every drafter in `DRAFTERS` is tested here without being named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import chdtrc
from torch import Tensor

from specdemo.decoding.events import Event, Round, emitted_tokens
from specdemo.decoding.loop import rule_for
from specdemo.decoding.rejection import TESTING, Rejection, verify
from specdemo.decoding.rule import Rule
from specdemo.decoding.sampling import probabilities
from specdemo.drafters.draft_model import DraftModel
from specdemo.studies.rules import NoiseUsedTwice
from specdemo.types import MAX_K, MAX_NODES, MAX_SEED, Draft, DraftOutcome, Settings, TokenKind, Verdict
from tests.unit import enumerate_decode
from tests.unit.enumerate_decode import VerifyFn, distance, emitted_distribution
from tests.unit.toys import (
    DRAFTER_NAMES,
    PROMPT,
    VOCAB,
    Scripted,
    TableRunner,
    TableToy,
    certain_toy,
    decode,
    ids_of,
    random_table,
    true_texts,
)

EXACT = 1e-12  # in float64
ROUNDED = 1e-6  # where a drafter's own distribution is in float32
DRAWING = ["draft-model", "ngram", "eagle"]  # one of each kind of drawn draft, every day
DOUBLE = {"none", "prompt-lookup", "suffix", "draft-model", "layer-skip"}  # what these do in float64 stays in float64

ENUMERATED = [
    Settings(temperature=0, k=2, max_new_tokens=4),
    Settings(temperature=0, k=3, max_new_tokens=6),
    EVERY_KIND := Settings(temperature=1, k=2, max_new_tokens=4),
    Settings(temperature=0.7, k=1, max_new_tokens=3),
    Settings(temperature=1.5, k=1, max_new_tokens=3),
    Settings(temperature=0.7, k=2, max_new_tokens=4, top_p=0.8),
    Settings(temperature=1.5, k=2, max_new_tokens=4, top_k=2),
    LONG := Settings(temperature=1.0, k=3, max_new_tokens=5, top_k=2),
    Settings(temperature=1.5, k=1, max_new_tokens=3, top_k=3, top_p=0.9),
]


def label(settings: Settings) -> str:
    return f"T{settings.temperature:g}-k{settings.k}-topk{settings.top_k}-topp{settings.top_p:g}"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TableToy:
    return certain_toy(tmp_path_factory.mktemp("ngram"))


def texts_with(
    toy: TableToy,
    name: str,
    settings: Settings,
    rule: VerifyFn = verify,
    **more: Any,
) -> dict:
    def start(shared: Rule):
        runner = toy.target_runner(32)
        return runner, toy.drafter(name, runner, settings, shared)

    return emitted_distribution(start, PROMPT, settings, rule=rule, **more)


# Enumeration -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, marks=pytest.mark.slow if settings is LONG and name not in DRAWING else ())
        for name in DRAFTER_NAMES
        for settings in ENUMERATED
    ],
    ids=lambda value: value if isinstance(value, str) else label(value),
)
def test_every_drafter_emits_the_targets_distribution(toy: TableToy, name: str, settings: Settings) -> None:
    kinds: set[tuple[int, TokenKind]] = set()

    def note(events: list[Event]) -> None:
        rounds = [event for event in events if isinstance(event, Round)]
        kinds.update((place, token.kind) for event in rounds for place, token in enumerate(event.emitted))

    emitted = texts_with(toy, name, settings, seen=note)
    assert sum(emitted.values()) == pytest.approx(1, abs=EXACT)
    assert distance(emitted, true_texts(toy.target, PROMPT, settings.max_new_tokens, settings)) < (
        EXACT if name in DOUBLE else ROUNDED
    )
    if settings is EVERY_KIND and name != "none":
        failed = [(place, kind) for place in range(2) for kind in (TokenKind.ACCEPTED, TokenKind.RESAMPLED)]
        assert kinds >= {*failed, (2, TokenKind.BONUS)}


def test_the_first_token_follows_the_targets_distribution() -> None:
    table = random_table(4)
    settings = Settings(temperature=0.8, k=3, max_new_tokens=1)
    emitted = emitted_distribution(lambda _: (TableRunner(table), Scripted(lambda context, k: [0])), PROMPT, settings)
    assert distance(emitted, true_texts(table, PROMPT, 1, settings)) < EXACT


HOSTILE = {
    "impossible": lambda context, k: [int(random_table(1, support=3)[context[-2], context[-1]].argmin())] * k,
    "empty": lambda context, k: [],
    "shorter than K": lambda context, k: [context[0]] * (k - 1),
    "now and then": lambda context, k: [1] * (k * (len(context) % 2)),
    "always token 0": lambda context, k: [0] * k,
    "always the last token of the vocabulary": lambda context, k: [VOCAB - 1] * k,
}


@pytest.mark.parametrize("script", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("settings", [ENUMERATED[0], ENUMERATED[2], ENUMERATED[5]], ids=label)
def test_whatever_is_proposed_the_distribution_stays(toy: TableToy, script: Callable, settings: Settings) -> None:
    emitted = emitted_distribution(lambda _: (toy.target_runner(32), Scripted(script)), PROMPT, settings)
    assert distance(emitted, true_texts(toy.target, PROMPT, settings.max_new_tokens, settings)) < EXACT


def test_the_distribution_stays_when_texts_end_early(toy: TableToy) -> None:
    emitted = texts_with(toy, "draft-model", EVERY_KIND, eos_ids=frozenset({2}))
    assert distance(emitted, true_texts(toy.target, PROMPT, 4, EVERY_KIND, eos=2)) < EXACT


@pytest.mark.parametrize("draft_vocab", [VOCAB - 1, VOCAB + 2])
def test_the_distribution_stays_when_the_draft_models_vocabulary_has_another_size(
    toy: TableToy, draft_vocab: int
) -> None:
    settings = Settings(temperature=1, k=1, max_new_tokens=3, top_k=2)
    table = random_table(6, vocab=VOCAB + 2)[..., :draft_vocab]  # it may read any token, and writes its own

    def start(shared: Rule):
        draft = DraftModel(TableRunner(table), VOCAB, shared)
        return toy.target_runner(32), draft

    emitted = emitted_distribution(start, PROMPT, settings)
    assert distance(emitted, true_texts(toy.target, PROMPT, 3, settings)) < EXACT


# The harness catches the mistakes found in public implementations ---------------------------------------------


def rule(
    accept: Callable[[float, float], float] = lambda p, q: min(1.0, p / q),
    left: Callable[[float, float], float] = lambda p, q: max(0.0, p - q),
    unwarp: Callable[[list[float]], list[float]] = lambda row: row,
    bonus: Callable[[list[float]], list[float]] = lambda row: row,
    bonus_row: int = 0,
) -> VerifyFn:
    """The rule of `verify` in plain Python, with its parts replaceable by wrong ones."""

    def verified(target_probs: Tensor, draft: Draft, draws: Tensor) -> Verdict:
        ids, p_rows, k = [int(token) for token in draft.token_ids], target_probs.tolist(), len(draft.token_ids)
        one_hot = [[float(x == token) for x in range(VOCAB)] for token in ids]
        q_rows = draft.probs.tolist() if draft.probs is not None else one_hot
        n, weights, kind = k, bonus(p_rows[k - bonus_row if k else 0]), TokenKind.BONUS
        for place, token in enumerate(ids):
            if not float(draws[place]) < accept(p_rows[place][token], q_rows[place][token]):
                n, kind = place, TokenKind.RESAMPLED
                weights = [left(p, q) for p, q in zip(unwarp(p_rows[place]), q_rows[place], strict=True)]
                break
        sums = np.cumsum(weights)
        token = int(np.searchsorted(sums, float(draws[k]) * sums[-1], side="right"))
        tests = [0.0] * k
        return Verdict(range(n), min(token, VOCAB - 1), kind, 0.0, tests, tests, ids, tests)

    return verified


def argmax_of(row: list[float]) -> list[float]:
    return [float(p == max(row)) for p in row]


def unwarped(temperature: float) -> Callable[[list[float]], list[float]]:
    """Undoes the temperature: what the target said before it."""

    def undo(row: list[float]) -> list[float]:
        raised = [p**temperature for p in row]
        return [p / sum(raised) for p in raised]

    return undo


HOT = Settings(temperature=1.5, k=2, max_new_tokens=4, top_k=2)
MISTAKES = {
    "accepted if p exceeds q": rule(accept=lambda p, q: float(p > q)),
    "accepted by p alone": rule(accept=lambda p, q: p),
    "p and q swapped in the test": rule(accept=lambda p, q: min(1.0, q / p) if p else 1.0),
    "p and q swapped in the residual": rule(left=lambda p, q: max(0.0, q - p)),
    "resampled from p": rule(left=lambda p, q: p),
    "residual of un-warped p": rule(unwarp=unwarped(HOT.temperature)),
    "residual keeps its size": rule(left=lambda p, q: abs(p - q)),
    "bonus by argmax": rule(bonus=argmax_of),
    "bonus from the place before": rule(bonus_row=1),
}


def test_the_rule_written_in_plain_python_is_exact(toy: TableToy) -> None:
    assert distance(texts_with(toy, "draft-model", HOT, rule()), true_texts(toy.target, PROMPT, 4, HOT)) < EXACT


WARM = Settings(temperature=1, k=1, max_new_tokens=3)
CAUGHT = {name: ("draft-model", HOT, wrong) for name, wrong in MISTAKES.items()} | {
    "prompt lookup resampled from p": ("prompt-lookup", EVERY_KIND, MISTAKES["resampled from p"]),
    "a test slightly off": ("draft-model", WARM, rule(accept=lambda p, q: min(1.0, p / q) * 0.999)),
    "a residual slightly off": ("draft-model", WARM, rule(left=lambda p, q: max(0.0, p - q) ** 1.001)),
    "a bonus slightly off": ("draft-model", WARM, rule(bonus=lambda row: [p**0.999 for p in row])),
}


@pytest.mark.parametrize(("name", "settings", "wrong"), CAUGHT.values(), ids=CAUGHT.keys())
def test_the_enumeration_catches(toy: TableToy, name: str, settings: Settings, wrong: VerifyFn) -> None:
    emitted = texts_with(toy, name, settings, wrong)
    assert distance(emitted, true_texts(toy.target, PROMPT, settings.max_new_tokens, settings)) > 1e-3


def test_the_enumeration_catches_greedy_accepted_by_the_full_softmax(
    toy: TableToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enumerate_decode, "probabilities", lambda logits, settings: logits.softmax(-1))
    settings = ENUMERATED[0]
    wrong = rule(unwarp=argmax_of, left=lambda p, q: p, bonus=argmax_of)
    assert distance(texts_with(toy, "draft-model", settings, wrong), true_texts(toy.target, PROMPT, 4, settings)) > 1e-3


# Sampled runs ----------------------------------------------------------------------------------------------

SAMPLED = Settings(temperature=0.9, k=2, max_new_tokens=120)
RUNS = 20


def chi_square(toy: TableToy, name: str, make_rule: Callable[[Settings], Rule] = rule_for, **asked: Any) -> float:
    """The p-value of sampled texts: counts of each token after each pair of tokens, against p."""
    counts = np.zeros((VOCAB, VOCAB, VOCAB))
    for seed in range(RUNS):
        settings = replace(SAMPLED, seed=seed, **asked)
        runner = toy.target_runner(len(PROMPT) + settings.max_new_tokens)
        drafter = toy.drafter(name, runner, settings, make_rule(settings))
        text = [*PROMPT, *ids_of(list(decode(runner, drafter, PROMPT, settings)))]
        for triple in list(zip(text, text[1:], text[2:], strict=False))[len(PROMPT) - 2 :]:
            counts[triple] += 1
    probs = (toy.target.log() / SAMPLED.temperature).softmax(-1).numpy()
    assert counts[probs == 0].sum() == 0, "an impossible token was emitted"
    expected = counts.sum(-1, keepdims=True) * probs
    cells = expected > 0
    statistic = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    degrees = cells.sum() - (counts.sum(-1) > 0).sum()
    return float(chdtrc(degrees, statistic))


# Under the match rule the text with a drafter is that of the target alone, token for token: see below.
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("none", "match"),
        (DRAWING[0], "rejection"),
        *(pytest.param(name, "rejection", marks=pytest.mark.slow) for name in DRAFTER_NAMES if name != DRAWING[0]),
    ],
)
def test_sampled_runs_follow_the_targets_distribution(toy: TableToy, name: str, rule: str) -> None:
    assert chi_square(toy, name, rule=rule) > 1e-4


class Wrong(Rejection):
    """Rejection sampling with another test."""

    def __init__(self, settings: Settings, test: VerifyFn) -> None:
        super().__init__(settings)
        self.test = test

    def verify(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
        draws = self._uniforms(TESTING, range(len(logits)))
        self._round += 1
        return self.test(probabilities(logits, self.settings), draft, draws)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mistake", ["accepted if p exceeds q", "resampled from p", "bonus by argmax"])
def test_chi_square_catches(toy: TableToy, mistake: str) -> None:
    assert chi_square(toy, "draft-model", lambda settings: Wrong(settings, MISTAKES[mistake])) < 1e-6


class Reseeded(Rejection):
    """Its random numbers are the same in every round."""

    def _uniforms(self, purpose: int, indices: Iterable[int]) -> Tensor:
        self._round = 0
        return super()._uniforms(purpose, indices if purpose == TESTING else [0 for _ in indices])


class Shared(Rejection):
    """Proposes and accepts with the same numbers."""

    def _draft_numbers(self, positions: Iterable[int]) -> Tensor:
        return super()._draft_numbers(range(len([*positions])))  # the places in the draft

    def _uniforms(self, purpose: int, indices: Iterable[int]) -> Tensor:
        return super()._uniforms(TESTING, indices)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Reseeded, Shared, NoiseUsedTwice])
def test_chi_square_catches_random_numbers_that_are_used_again(toy: TableToy, kind: type[Rule]) -> None:
    assert chi_square(toy, "draft-model", kind) < 1e-6


# Randomness ------------------------------------------------------------------------------------------------

SEEDED = Settings(temperature=1, k=3, max_new_tokens=40, seed=7)


def run(toy: TableToy, name: str, settings: Settings) -> list[Event]:
    runner = toy.target_runner(128)
    return list(decode(runner, toy.drafter(name, runner, settings), PROMPT, settings))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(toy: TableToy, name: str) -> None:
    texts: list[tuple[int, ...]] = []
    for seed in (0, MAX_SEED, 0, MAX_SEED):
        torch.manual_seed(len(texts))  # the global generator has no say, and is left alone
        before = torch.get_rng_state()
        texts.append(tuple(ids_of(run(toy, name, replace(SEEDED, seed=seed)))))
        assert torch.equal(before, torch.get_rng_state())
    assert texts[:2] == texts[2:]
    assert len(set(texts)) == 2


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_no_random_number_of_rejection_sampling_is_used_twice(toy: TableToy, name: str) -> None:
    used: list[float] = []

    class Watched(Rejection):
        def _uniforms(self, purpose: int, indices: Iterable[int]) -> Tensor:
            draws = super()._uniforms(purpose, indices)
            used.extend(draws.tolist())
            return draws

    runner = toy.target_runner(64)
    events = list(decode(runner, toy.drafter(name, runner, SEEDED, Watched(SEEDED)), PROMPT, SEEDED))
    assert len(set(used)) == len(used)
    tested = [token.draw for event in events if isinstance(event, Round) for token in event.drafted]
    assert set(tested) <= set(used)


# The match rule --------------------------------------------------------------------------------------------

MATCHED = Settings(temperature=0.9, k=3, max_new_tokens=60)


GREEDY, NARROW, FEW = {"temperature": 0.0}, {"top_p": 0.7}, {"temperature": 1.5, "top_k": 2}


@pytest.fixture(scope="module")
def alone(toy: TableToy) -> Callable[[Settings], list[Any]]:
    """What the target writes alone, once for all drafters and all K."""
    return cache(lambda settings: run(toy, "none", settings))


CHAINS: list[tuple[int, dict[str, Any]]] = [(3, GREEDY), (1, {}), (3, NARROW), (MAX_K, FEW), (MAX_K, {})]
TREES: list[tuple[int, dict[str, Any]]] = [(8, GREEDY), (8, {}), (1, {}), (8, FEW)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", [name for name in DRAFTER_NAMES if name != "none"])
@pytest.mark.parametrize(
    ("k", "asked", "tree"),
    [
        *((*chain, False) for chain in CHAINS),
        *((*tree, True) for tree in TREES),
        pytest.param(MAX_NODES, {"temperature": 0.7}, True, marks=pytest.mark.slow),
    ],
)
def test_the_text_is_that_of_the_target_alone(
    toy: TableToy, alone: Callable[[Settings], list[Any]], name: str, k: int, asked: dict[str, Any], tree: bool
) -> None:
    accepted = 0
    for seed in range(2):
        settings = replace(MATCHED, seed=seed, **asked)
        plain, drafted = alone(settings), run(toy, name, replace(settings, k=k, tree=tree))
        assert all(len(event.drafted) <= k for event in drafted if isinstance(event, Round))
        assert ids_of(drafted) == ids_of(plain)
        assert margins_of(drafted) == pytest.approx(margins_of(plain))
        accepted += sum(token.kind is TokenKind.ACCEPTED for event in drafted for token in emitted_tokens(event))
    assert accepted > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("script", HOSTILE.values(), ids=HOSTILE.keys())
def test_whatever_is_proposed_the_text_stays(toy: TableToy, script: Callable) -> None:
    for seed in range(5):
        settings = replace(MATCHED, seed=seed)
        plain = run(toy, "none", settings)
        assert ids_of(list(decode(toy.target_runner(128), Scripted(script), PROMPT, settings))) == ids_of(plain)


def margins_of(events: Sequence[Event]) -> list[float | None]:
    return [token.margin for event in events for token in emitted_tokens(event)]


def test_margins_tell_how_close_another_token_came(toy: TableToy) -> None:
    """At temperature 0 that is the gap of the two largest logits."""
    events = run(toy, "none", Settings(max_new_tokens=20))
    text = [*PROMPT, *ids_of(events)]
    for place, margin in enumerate(margins_of(events), start=len(PROMPT)):
        best, second = toy.target[text[place - 2], text[place - 1]].log().topk(2).values.tolist()
        assert margin == (None if second == -math.inf else pytest.approx(best - second))


def test_drafts_share_the_noise_of_their_positions(toy: TableToy) -> None:
    """A drafter with the target's own distribution is always right, one with another more often than by chance."""
    same = replace(toy, draft_model=toy.target)
    for found, least in ((run(same, "draft-model", MATCHED), 1.0), (run(toy, "draft-model", MATCHED), 0.5)):
        outcomes = [token.outcome for event in found if isinstance(event, Round) for token in event.drafted]
        assert outcomes.count(DraftOutcome.ACCEPTED) >= least * (len(outcomes) - outcomes.count(DraftOutcome.UNTESTED))
