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

from specdemo.decoding.rejection import verify
from specdemo.engines.runner import ANY_ROWS
from specdemo.errors import BadInput
from specdemo.models.loaded import load
from specdemo.racing.compare import NEAR_TIE
from specdemo.racing.race import start
from specdemo.settings import REJECTION, RULES, Settings
from specdemo.studies import greedy as greedy_lab
from specdemo.studies.distributions import (
    CAUGHT,
    PRECISION,
    DraftOnPaper,
    DraftPosition,
    Samples,
    exact,
    exact_in_words,
    sampling,
    telling_context,
)
from specdemo.studies.greedy import greedy
from specdemo.studies.prompts import Prompt
from specdemo.studies.remember import RunnerWithMemory, from_one_context
from specdemo.studies.rules import BROKEN, Acceptance, accepted_of, emitted_distribution, harm, make_rule
from specdemo.studies.statistics import Distances, chi_square, smallest_caught
from specdemo.studies.study import ABLE
from specdemo.system.progress import Stopped, attended
from specdemo.tokens import Draft, Token
from tests.harness.classes import Loaded, Match, Rejection
from tests.harness.doubles import ids_of

from ..sentences import refuses, tells

DRAFTING = [*ABLE]
HOT = Settings(k=2, temperature=1.0, top_k=3, max_new_tokens=40)  # so few tokens that the text repeats itself
PROMPT = "the cat sat on the mat and the dog sat"


# The distribution on paper ---------------------------------------------------------------------------------


weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1)), min_size=2, max_size=9).filter(any)


@given(weights, weights)
def test_the_emitted_distribution_is_p_whatever_q_is(p: list[float], q: list[float]) -> None:
    width = max(len(p), len(q))
    rows = [torch.tensor([*row, *[0.0] * (width - len(row))], dtype=torch.float64) for row in (p, q)]
    probs = rows[0] / rows[0].sum()
    assert (emitted_distribution(rows[0], rows[1]) - probs).abs().max() < 1e-12


def test_the_emitted_distribution_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.2, 0.1])
    # Passing: 0.5, 0.2, 0.1. The other 0.2 are resampled, one half each from the tokens that q gives too little.
    assert emitted_distribution(p, q).tolist() == pytest.approx([0.5, 0.2 + 0.1, 0.1 + 0.1])
    assert emitted_distribution(p, p).tolist() == pytest.approx(p.tolist())
    # Token 0 is always drafted and passes in 5 of 7 cases; the others share the rest, half and half.
    assert emitted_distribution(p, q, broken="likeliest-by-ratio").tolist() == pytest.approx([5 / 7, 1 / 7, 1 / 7])
    assert emitted_distribution(p, torch.tensor([0.0, 1, 0])).tolist() == pytest.approx(p.tolist())


def distribution_of(broken: str, p: Tensor, q: Tensor, draws: int = 28) -> Tensor:
    """What rejection sampling emits for one drafted token, summed over the token and a grid of both draws."""
    rule = make_rule(replace(HOT, rule=REJECTION), broken)
    assert isinstance(rule, Rejection)
    probs = torch.zeros_like(p)
    grid = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    for token, test, drawn in product(range(len(p)), grid, grid):
        found = verify(torch.stack([p, p]), Draft([token], q[None]), torch.stack([test, drawn]), *rule._parts)
        probs[token if found.accepted else found.last.id] += q[token] / draws**2
    return probs


@pytest.mark.parametrize(
    ("broken", "probs"),
    [
        ("", [0.5, 0.3, 0.2]),
        # Tokens 1 and 2 pass, 0 never does: all of its 0.7 goes to the residual, half and half.
        ("accept-if-p-exceeds-q", [0.0, 0.2 + 0.35, 0.1 + 0.35]),
        # Token 0 fails in 0.2 of all cases, which are drawn from p again.
        ("resample-from-p", [0.5 + 0.1, 0.2 + 0.06, 0.1 + 0.04]),
    ],
)
def test_the_distributions_of_the_rules_by_hand(broken: str, probs: list[float]) -> None:
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.7, 0.2, 0.1]))
    assert distribution_of(broken, p, q).tolist() == pytest.approx(probs, abs=0.02)
    assert emitted_distribution(p, q, broken=broken).tolist() == pytest.approx(probs)


def test_the_harm_of_the_broken_rules_by_hand() -> None:
    # Total variations of both from p: 0.5, and 0.1 of which a half is too much and a half too little.
    assert harm(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.2, 0.1])) == pytest.approx(0.1)
    assert harm(torch.tensor([0.9, 0.1]), torch.tensor([0.9, 0.1])) == pytest.approx(0, abs=1e-7)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("drafter", DRAFTING)
@pytest.mark.parametrize("rule", RULES)
def test_the_emitted_distribution_is_exact_at_every_position_of_real_drafts(
    loaded: Loaded, drafter: str, rule: str
) -> None:
    rounds = list(exact(loaded, drafter, loaded.encode(PROMPT), replace(HOT, rule=rule)))
    positions = [position for step in rounds for position in step.positions]
    assert positions
    assert max(position.error for position in positions) < PRECISION
    assert {position.position for position in positions} == {1, 2}
    assert "equals" in exact_in_words(rounds)[0]
    assert tells(exact_in_words(rounds)[1], "guesses rejection match")


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rejection_rule_fails_on_paper_too(loaded: Loaded, broken: str) -> None:
    rounds = list(exact(loaded, "draft-model", loaded.encode(PROMPT), HOT, broken))
    wrong = broken != "noise-used-twice"  # which keeps to p in every single token
    assert ("DIFFERS" if wrong else "equals") in exact_in_words(rounds)[0]


# What each rule accepts ------------------------------------------------------------------------------------


def random_rows(seed: int, k: int, vocab: int = 4) -> tuple[Tensor, Tensor]:
    """p and q of every text of up to k tokens would be a tree; these do not depend on the text."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, k, vocab, generator=generator, dtype=torch.float64) + 0.02
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_what_the_rules_accept_is_what_they_accept_in_many_drafts(seed: int) -> None:
    """Token verification and match, by hand and by their own code."""
    k, runs = 2, 1500
    p, q = random_rows(seed, k)
    means = {"rejection": 0.0, "match": 0.0}
    for draft in product(range(4), repeat=k):
        weight = float(q[0, draft[0]] * q[1, draft[1]])
        found = accepted_of(p, q, draft)
        for name in means:
            means[name] += weight * getattr(found, name)
    overlap = torch.minimum(p, q).sum(-1)
    assert means["rejection"] == pytest.approx(float(overlap[0] + overlap[0] * overlap[1]))
    settings, rows, total = Settings(temperature=1.0), torch.cat([p, p[-1:]]).log(), 0
    for run in range(runs):
        rule = Match(replace(settings, seed=run))
        drafted = [int(rule.draw(q[i : i + 1].log(), rule.draft_numbers([9 + i])).column) for i in range(k)]
        total += rule.verify(rows, Draft(drafted), 9).accepted
    assert total / runs == pytest.approx(means["match"], abs=0.06)


def test_a_chosen_draft_is_accepted_as_often_by_both_rules() -> None:
    p, _ = random_rows(5, 3)
    q = torch.eye(4, dtype=torch.float64)[[1, 0, 2]]
    found = accepted_of(p, q, [1, 0, 2])
    assert found.rejection == pytest.approx(found.match)


def test_a_distribution_that_is_off_is_said_to_be() -> None:
    off = DraftOnPaper([DraftPosition(0, 1, 0.01, 0.5, 0.1)], Acceptance(1, 0.5, 0.4))
    assert "DIFFERS" in exact_in_words([off])[0]
    assert tells(exact_in_words([DraftOnPaper((), None)])[0], "nothing compute")


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


@pytest.mark.parametrize("cells", [2, 8])
@pytest.mark.parametrize("samples", [300, 3000])
def test_the_smallest_difference_that_is_caught_is_caught_19_times_in_20(cells: int, samples: int) -> None:
    """Half of the cells get more and half less, in proportion: the distribution that is hardest to catch."""
    noise, fair = np.random.default_rng(0), np.full(cells, 1 / cells)
    distance = smallest_caught(noise.multinomial(samples, fair), fair, CAUGHT)
    assert distance is not None
    off = fair * (1 + 2 * distance * np.resize([1, -1], cells))
    assert np.abs(off - fair).sum() / 2 == pytest.approx(distance)
    p_values = [chi_square(noise.multinomial(samples, off), fair) for _ in range(600)]
    assert np.mean([value < CAUGHT for value in p_values if value is not None]) == pytest.approx(0.95, abs=0.04)
    assert smallest_caught(np.array([100, 0]), np.array([0.99, 0.01]), CAUGHT) is None


def test_fair_samples_have_even_p_values() -> None:
    noise, probs = np.random.default_rng(0), np.random.default_rng(1).dirichlet(np.ones(30))
    values = [chi_square(noise.multinomial(500, probs), probs) for _ in range(400)]
    shares = np.histogram([value for value in values if value is not None], bins=4, range=(0, 1))[0] / 400
    assert shares == pytest.approx([0.25] * 4, abs=0.07)


# Real rounds from one context ------------------------------------------------------------------------------


def last(loaded: Loaded, drafter: str, settings: Settings, rounds: int, broken: str = "") -> Samples:
    context = telling_context(loaded, drafter, loaded.encode(PROMPT), settings)
    return list(sampling(loaded, drafter, context, settings, rounds, broken))[-1]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("drafter", DRAFTING)
def test_every_drafter_keeps_to_the_targets_distribution(loaded: Loaded, drafter: str) -> None:
    found = last(loaded, drafter, HOT, 200)
    assert (found.rounds, found.with_draft) == (200, 200)
    assert found.first_passed is not None
    assert not found.caught, found.in_words()
    assert found.tests[0].cells == 3
    assert found.tests[0].distances.total_variation < 3 * max(floor.total_variation for floor in found.tests[0].floor)
    smallest = found.tests[0].smallest_caught
    assert smallest is not None
    assert tells(found.in_words()[-1], f"No {smallest:.3f} first")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_the_right_rule_passes_with_any_seed(loaded: Loaded, seed: int) -> None:
    assert not last(loaded, "draft-model", replace(HOT, k=1, seed=seed), 200).caught


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_caught(loaded: Loaded, rule: str) -> None:
    found = last(loaded, "draft-model", replace(HOT, k=1, top_k=12), 600, rule)
    p_values = [test.p_value for test in found.tests]
    assert min(value for value in p_values if value is not None) < CAUGHT, found.in_words()
    assert found.caught
    assert tells(found.in_words()[-1], "1e-06 CHANGES")


@pytest.mark.slow
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
    with refuses(BadInput, "temperature"):
        next(sampling(loaded, "ngram", ids, replace(HOT, temperature=0)))
    with refuses(BadInput, "'honest'"):
        next(exact(loaded, "ngram", ids, HOT, "honest"))
    with refuses(BadInput, "two"):
        next(sampling(loaded, "ngram", ids[:1], HOT))
    with refuses(BadInput, "nothing"):
        telling_context(loaded, "none", ids, HOT)


# Runners that remember -------------------------------------------------------------------------------------


def test_a_remembering_runner_says_what_the_real_one_says(loaded: Loaded) -> None:
    ids = loaded.encode(PROMPT)
    real = loaded.target_runner(64)
    real.prefill(ids)
    memory = RunnerWithMemory(loaded.target_runner(64), ids)
    memory.prefill(ids)
    for text in ([5, 6, 7], [5, 6, 8], [5, 6], [9]):
        for _ in range(2):
            for runner in (real, memory):
                runner.rollback(len(ids))
            torch.testing.assert_close(memory.forward(text), real.forward(text))
            assert memory.length == real.length
    assert memory.passes == 3  # [5, 6] is part of a text that was read


def test_states_and_what_the_first_layers_say_are_remembered_too(loaded: Loaded) -> None:
    ids = loaded.encode(PROMPT)
    real, memory = loaded.target_runner(64), RunnerWithMemory(loaded.target_runner(64), ids)
    part = real.first_layers(1, 64)
    for runner in (real, memory):
        runner.capture_hidden_states([0, 1])
    for _ in range(2):
        seen: list[list[Tensor]] = []
        for runner, first in ((real, part), (memory, memory.first_layers(1, 64))):
            answers = [runner.prefill(ids)]
            assert runner.hidden_states is not None
            answers.append(runner.hidden_states)
            answers += [first.prefill(ids), first.forward([5, 6]), runner.forward([5, 6, 7])]
            first.rollback(0)
            answers.append(runner.hidden_states)
            runner.rollback(len(ids) + 2)
            answers += [runner.forward([8, 9]), runner.hidden_states]
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
        list(start(remembered, "layer-skip", context[:-1], replace(settings, k=1)))
        assert (part := target.parts[1]).passes
    assert target.real.length == part.real.length == 0


# Greedy ----------------------------------------------------------------------------------------------------


PROMPTS = [Prompt("a", "one", PROMPT), Prompt("b", "two", "one two three")]


def test_greedy_texts_are_the_targets_and_transformers_own(loaded: Loaded) -> None:
    checks = list(greedy(loaded, PROMPTS, ["ngram", "layer-skip"], Settings(k=3, max_new_tokens=24)))
    assert len(checks) == greedy_lab.steps(PROMPTS, ["ngram", "layer-skip"]) == 6
    assert {check["text"] for check in checks} == {"ngram", "layer-skip", "transformers"}
    assert all(check["identical"] for check in checks)
    sentence = greedy_lab.in_words(checks)[0]
    assert tells(sentence, "K 3 0 2 target's")
    assert tells(sentence, "78% 95%")
    assert tells(greedy_lab.in_words(checks[:1])[0], "K 3 0 1 target's")
    alone = list(greedy(loaded, PROMPTS, ["ngram"], Settings(k=3, max_new_tokens=24), transformers=False))
    assert alone == checks[::3]
    assert greedy_lab.steps(PROMPTS, ["ngram"], transformers=False) == 2


def test_transformers_stops_before_its_next_layer(loaded: Loaded) -> None:
    held = loaded.model
    passes: list[int] = []
    counted = held.register_forward_hook(lambda *_: passes.append(1))
    try:
        with attended(lambda: len(passes) == 3), pytest.raises(Stopped):
            greedy_lab._theirs(loaded, loaded.encode(PROMPT), 24)
    finally:
        counted.remove()
    assert len(passes) == 3


def test_a_difference_that_is_no_near_tie_is_told(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = greedy_lab._theirs

    def wrong(loaded: Loaded, prompt_ids: Any, count: int) -> list[int]:
        text = honest(loaded, prompt_ids, count)
        return [*text[:4], (text[4] + 7) % 200, *text[5:]]

    monkeypatch.setattr(greedy_lab, "_theirs", wrong)
    checks = list(greedy(loaded, PROMPTS[:1], [], Settings(k=3, max_new_tokens=16)))
    assert (checks[0]["identical"], checks[0]["first_difference"], checks[0]["near_tie"]) == (False, 4, False)
    assert checks[0]["margin"] is not None
    assert checks[0]["margin"] > 0.001
    assert tells(greedy_lab.in_words(checks)[0], "something wrong")


def test_on_an_engine_that_is_exact_a_drafters_difference_is_never_a_near_tie(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = greedy_lab._text

    def wrong(loaded: Loaded, drafter: str, prompt_ids: Any, settings: Settings) -> list[Token]:
        text = honest(loaded, drafter, prompt_ids, settings)
        return text if drafter == "none" else [*text[:4], replace(text[4], id=(text[4].id + 7) % 200), *text[5:]]

    monkeypatch.setattr(greedy_lab, "_text", wrong)
    monkeypatch.setitem(NEAR_TIE, "float32", 1e9)  # any gap is then small
    for exact_rows, near_tie in ((ANY_ROWS, False), (9, False), (3, True), (0, True)):
        monkeypatch.setattr(loaded, "exact_rows", exact_rows)
        (check,) = greedy(loaded, PROMPTS[:1], ["ngram"], Settings(k=3, max_new_tokens=16), transformers=False)
        assert check["margin"] is not None
        assert check["near_tie"] is near_tie


def test_transformers_own_text_may_part_at_a_near_tie_on_any_engine(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greedy_lab, "_theirs", lambda loaded, prompt_ids, count: [7, *[0] * (count - 1)])
    monkeypatch.setitem(NEAR_TIE, "float32", 1e9)
    monkeypatch.setattr(loaded, "engine", "native")
    (check,) = greedy(loaded, PROMPTS[:1], [], Settings(k=3, max_new_tokens=16))
    assert check["near_tie"] is True


# The real model --------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.slow
# Noise that is used twice harms the second token, and the context is chosen for the first: the toys catch it.
@pytest.mark.parametrize("broken", ["", *(name for name in BROKEN if name != "noise-used-twice")])
def test_the_real_model(real: Loaded, broken: str) -> None:
    ids = real.encode("List three colours.")
    settings = Settings(k=1, temperature=1.0, top_k=8, max_new_tokens=12)
    context = telling_context(real, "ngram", ids, settings)
    found = list(sampling(real, "ngram", context, settings, 1500, broken))[-1]
    assert found.caught == bool(broken), found.in_words()


@pytest.fixture(scope="module")
def real() -> Iterator[Loaded]:
    from specdemo.models.presets import DEFAULT_PRESET, find_preset

    loaded = load(find_preset(DEFAULT_PRESET))
    yield loaded
    loaded.release()
