"""The certificates: they hold for the real rule with every drafter, and a broken rule fails them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdemo.drafters import DRAFTERS
from specdemo.lab import greedy as greedy_lab
from specdemo.lab.bench import Prompt
from specdemo.lab.greedy import greedy
from specdemo.lab.law import EXACT, RULES, Distances, chi_square, emitted_law, harm
from specdemo.lab.lossless import (
    CAUGHT,
    PRECISION,
    PlaceLaw,
    Sampled,
    exact,
    exact_in_words,
    sampling,
    telling_context,
)
from specdemo.lab.remember import Remembering, from_one_context
from specdemo.models import Loaded, load
from specdemo.race import start
from specdemo.types import BadInput, Draft, Settings

from .toys import ids_of

pytestmark = pytest.mark.usefixtures("one_thread")

BROKEN = [name for name in RULES if name != EXACT]
DRAFTING = [name for name in DRAFTERS if name != "none"]
HOT = Settings(k=2, temperature=1.0, top_k=3, max_new_tokens=40)  # so few tokens that the text repeats itself
PROMPT = "the cat sat on the mat and the dog sat"


# The law on paper ------------------------------------------------------------------------------------------


weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1)), min_size=2, max_size=9).filter(any)


@given(weights, weights)
def test_the_emitted_law_is_p_whatever_q_is(p: list[float], q: list[float]) -> None:
    width = max(len(p), len(q))
    rows = [torch.tensor([*row, *[0.0] * (width - len(row))], dtype=torch.float64) for row in (p, q)]
    law = rows[0] / rows[0].sum()
    assert (emitted_law(rows[0], rows[1]) - law).abs().max() < 1e-12


def test_the_emitted_law_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.2, 0.1])
    # Passing: 0.5, 0.2, 0.1. The other 0.2 are resampled, one half each from the tokens that q gives too little.
    assert emitted_law(p, q).tolist() == pytest.approx([0.5, 0.2 + 0.1, 0.1 + 0.1])
    assert emitted_law(p, p).tolist() == pytest.approx(p.tolist())
    assert emitted_law(p, torch.tensor([0.0, 1, 0])).tolist() == pytest.approx(p.tolist())


def law_of(rule: str, p: Tensor, q: Tensor, draws: int = 28) -> Tensor:
    """The law that a rule emits for one drafted token, summed over the token and a grid of both draws."""
    law = torch.zeros_like(p)
    grid = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    for token, test, drawn in product(range(len(p)), grid, grid):
        verdict = RULES[rule](torch.stack([p, p]), Draft([token], q[None]), torch.stack([test, drawn]))
        law[token if verdict.accepted else verdict.token_id] += q[token] / draws**2
    return law


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (EXACT, [0.5, 0.3, 0.2]),
        # Tokens 1 and 2 pass, 0 never does: all of its 0.7 goes to the residual, half and half.
        ("accept-if-p-exceeds-q", [0.0, 0.2 + 0.35, 0.1 + 0.35]),
        # Token 0 fails in 0.2 of all cases, which are drawn from p again.
        ("resample-from-p", [0.5 + 0.1, 0.2 + 0.06, 0.1 + 0.04]),
    ],
)
def test_the_laws_of_the_rules_by_hand(rule: str, law: list[float]) -> None:
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.7, 0.2, 0.1]))
    assert law_of(rule, p, q).tolist() == pytest.approx(law, abs=0.02)


def test_the_harm_of_the_broken_rules_by_hand() -> None:
    # Total variations of the two laws above from p: 0.5, and 0.1 of which a half is too much and a half too little.
    assert harm(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.2, 0.1])) == pytest.approx(0.1)
    assert harm(torch.tensor([0.9, 0.1]), torch.tensor([0.9, 0.1])) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("drafter", DRAFTING)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_law_is_exact_in_every_place_of_real_drafts(loaded: Loaded, drafter: str, temperature: float) -> None:
    settings = replace(HOT, temperature=temperature)
    rounds = list(exact(loaded, drafter, loaded.encode(PROMPT), settings))
    places = [place for step in rounds for place in step]
    assert places
    assert max(place.error for place in places) < PRECISION
    assert {place.place for place in places} == {1, 2}
    assert "equals" in exact_in_words(places)[0]


def test_a_law_that_is_off_is_said_to_be() -> None:
    assert "DIFFERS" in exact_in_words([PlaceLaw(0, 1, 0.01, 0.5, 0.1)])[0]
    assert "no law" in exact_in_words([])[0]


# Distances and the test ------------------------------------------------------------------------------------


def test_distances_by_hand() -> None:
    found = Distances.between(np.array([3, 1, 0]), np.array([0.5, 0.25, 0.25]))
    assert found.total_variation == pytest.approx(0.25)
    assert found.kl == pytest.approx(0.75 * np.log(1.5))
    middle = [0.625, 0.25, 0.125]
    left = 0.75 * np.log(0.75 / 0.625)
    right = sum(p * np.log(p / m) for p, m in zip([0.5, 0.25, 0.25], middle, strict=True))
    assert found.jensen_shannon == pytest.approx((left + right) / 2)
    assert Distances.between(np.array([1, 1]), np.array([1.0, 0.0])).kl is None


def test_chi_square_by_hand() -> None:
    # ((60 - 50)^2 + (40 - 50)^2) / 50 = 4 with one degree of freedom
    assert chi_square(np.array([60, 40]), np.array([0.5, 0.5])) == pytest.approx(0.0455, abs=1e-4)
    # The last three cells are expected to hold 2 each: pooled to 6, so that ((94 - 94)^2 ...) is 0.
    assert chi_square(np.array([94, 6, 0, 0]), np.array([0.94, 0.02, 0.02, 0.02])) == pytest.approx(1)
    assert chi_square(np.array([100, 1]), np.array([1.0, 0.0])) == 0
    assert chi_square(np.array([100, 0]), np.array([0.99, 0.01])) is None


def test_fair_samples_have_even_p_values() -> None:
    noise, law = np.random.default_rng(0), np.random.default_rng(1).dirichlet(np.ones(30))
    values = [chi_square(noise.multinomial(500, law), law) for _ in range(400)]
    shares = np.histogram([value for value in values if value is not None], bins=4, range=(0, 1))[0] / 400
    assert shares == pytest.approx([0.25] * 4, abs=0.07)


# Real rounds from one context ------------------------------------------------------------------------------


def last(loaded: Loaded, drafter: str, settings: Settings, rounds: int, rule: str = EXACT) -> Sampled:
    context = telling_context(loaded, drafter, loaded.encode(PROMPT), settings)
    return list(sampling(loaded, drafter, context, settings, rounds, rule))[-1]


@pytest.mark.parametrize("drafter", DRAFTING)
def test_every_drafter_keeps_to_the_targets_law(loaded: Loaded, drafter: str) -> None:
    found = last(loaded, drafter, HOT, 400)
    assert (found.rounds, found.with_draft) == (400, 400)
    assert found.first_passed is not None
    assert not found.caught, found.in_words()
    assert found.tests[0].cells == 3
    assert found.tests[0].distances.total_variation < 3 * max(floor.total_variation for floor in found.tests[0].floor)
    assert "No sign of a difference" in found.in_words()[-1]


@pytest.mark.parametrize("seed", range(20))
def test_the_right_rule_passes_with_any_seed(loaded: Loaded, seed: int) -> None:
    assert not last(loaded, "draft-model", replace(HOT, k=1, seed=seed), 200).caught


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_caught(loaded: Loaded, rule: str) -> None:
    found = last(loaded, "draft-model", replace(HOT, k=1, top_k=12), 600, rule)
    p_values = [test.p_value for test in found.tests]
    assert min(value for value in p_values if value is not None) < CAUGHT, found.in_words()
    assert found.caught
    assert "NOT" in found.in_words()[-1]


def test_results_come_while_the_rounds_are_run(loaded: Loaded) -> None:
    context = telling_context(loaded, "ngram", loaded.encode(PROMPT), HOT)
    results = list(sampling(loaded, "ngram", context, HOT, rounds=450))
    assert [result.rounds for result in results] == [200, 400, 450]
    likeliest = results[-1].likeliest
    assert sum(token.count for token in likeliest) == 450  # top-k leaves three tokens
    assert [token.probability for token in likeliest] == sorted((t.probability for t in likeliest), reverse=True)
    assert sum(token.probability for token in likeliest) == pytest.approx(1)


def test_what_cannot_be_tested_is_refused(loaded: Loaded) -> None:
    ids = loaded.encode(PROMPT)
    with pytest.raises(BadInput, match="above 0"):
        next(sampling(loaded, "ngram", ids, replace(HOT, temperature=0)))
    with pytest.raises(BadInput, match="two tokens"):
        next(sampling(loaded, "ngram", ids[:1], HOT))
    with pytest.raises(BadInput, match="proposed nothing"):
        telling_context(loaded, "none", ids, HOT)


# Runners that remember -------------------------------------------------------------------------------------


def test_a_remembering_runner_says_what_the_real_one_says(loaded: Loaded) -> None:
    ids = loaded.encode(PROMPT)
    real = loaded.target_runner(64)
    real.prefill(ids)
    memory = Remembering(loaded.target_runner(64), ids)
    memory.prefill(ids)
    for text in ([5, 6, 7], [5, 6, 8], [5, 6], [9]):
        for _ in range(2):
            for runner in (real, memory):
                runner.rollback(len(ids))
            torch.testing.assert_close(memory.forward(text), real.forward(text))
            assert memory.length == real.length
    assert memory.passes == 3  # [5, 6] is part of a text that was read


def test_reading_ahead_and_states_are_remembered_too(loaded: Loaded) -> None:
    ids = loaded.encode(PROMPT)
    real, memory = loaded.target_runner(64), Remembering(loaded.target_runner(64), ids)
    for runner in (real, memory):
        runner.keep_states([0, 1])
    for _ in range(2):
        seen: list[list[Tensor]] = []
        for runner in (real, memory):
            answers = [runner.prefill(ids)]
            assert runner.states is not None
            answers.append(runner.states)
            answers += [runner.read_ahead([5], 1), runner.read_ahead([6], 1), runner.forward([5, 6, 7])]
            answers.append(runner.states)
            runner.rollback(len(ids) + 2)
            answers += [runner.forward([8, 9]), runner.states]
            seen.append(answers)
        for theirs, ours in zip(*seen, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_every_run_begins_in_the_context(loaded: Loaded) -> None:
    context = loaded.encode(PROMPT)
    settings = replace(HOT, max_new_tokens=3)
    with from_one_context(loaded, context, 4) as (remembered, target):
        for seed in range(5):
            events = list(start(remembered, "ngram", context[:-1], replace(settings, seed=seed)))
            assert ids_of(events)[0] == context[-1]
        read = target.passes
        list(start(remembered, "ngram", context[:-1], replace(settings, seed=0)))
        assert target.passes == read
    assert target.real.length == 0


# Greedy ----------------------------------------------------------------------------------------------------


PROMPTS = [Prompt("a", "one", PROMPT), Prompt("b", "two", "one two three")]


def test_greedy_texts_are_the_targets_and_transformers_own(loaded: Loaded) -> None:
    checks = list(greedy(loaded, PROMPTS, ["ngram", "layer-skip"], 3, 24))
    assert len(checks) == greedy_lab.steps(PROMPTS, ["ngram", "layer-skip"]) == 6
    assert {check.text for check in checks} == {"ngram", "layer-skip", "transformers"}
    assert all(check.identical for check in checks)
    assert greedy_lab.in_words(checks)[0] == "ngram: 2 of 2 texts are the target's own, token for token."
    assert greedy_lab.in_words(checks[:1])[0] == "ngram: 1 of 1 text is the target's own, token for token."
    alone = list(greedy(loaded, PROMPTS, ["ngram"], 3, 24, transformers=False))
    assert alone == checks[::3]
    assert greedy_lab.steps(PROMPTS, ["ngram"], transformers=False) == 2


def test_a_difference_that_is_no_near_tie_is_told(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = greedy_lab._theirs

    def wrong(loaded: Loaded, prompt_ids: Any, count: int) -> list[int]:
        text = honest(loaded, prompt_ids, count)
        return [*text[:4], (text[4] + 7) % 200, *text[5:]]

    monkeypatch.setattr(greedy_lab, "_theirs", wrong)
    checks = list(greedy(loaded, PROMPTS[:1], [], 3, 16))
    assert (checks[0].identical, checks[0].first_difference, checks[0].near_tie) == (False, 4, False)
    assert checks[0].logit_gap is not None
    assert checks[0].logit_gap > 0.001
    assert "something is wrong" in greedy_lab.in_words(checks)[0]


# The real model --------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("rule", list(RULES))
def test_the_real_model(real: Loaded, rule: str) -> None:
    ids = real.encode("List three colours.")
    settings = Settings(k=1, temperature=1.0, top_k=8, max_new_tokens=12)
    context = telling_context(real, "ngram", ids, settings)
    found = list(sampling(real, "ngram", context, settings, 300, rule))[-1]
    assert found.caught == (rule != EXACT), found.in_words()


@pytest.fixture(scope="module")
def real() -> Iterator[Loaded]:
    from specdemo.presets import DEFAULT_PRESET, find_preset

    loaded = load(find_preset(DEFAULT_PRESET))
    yield loaded
    loaded.release()
