"""Accept, resample, bonus: the rule as a pure function."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from specdemo.decoding import sampling
from specdemo.decoding.rejection import acceptance_probability, residual, verify
from specdemo.tokens import Draft, TokenKind

VOCAB = 5
ALMOST_ONE = math.nextafter(1, 0)

weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1)), min_size=VOCAB, max_size=VOCAB)
distributions = weights.filter(any).map(lambda row: torch.tensor(row, dtype=torch.float64) / sum(row))
tokens = st.integers(0, VOCAB - 1)
draws = st.one_of(st.sampled_from([0.0, ALMOST_ONE]), st.floats(0, 1, exclude_max=True))


def rows(*probs: list[float] | Tensor) -> Tensor:
    return torch.stack([torch.as_tensor(row, dtype=torch.float64) for row in probs])


def uniform(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_hot(token: int) -> list[float]:
    return [float(x == token) for x in range(VOCAB)]


# The parts -------------------------------------------------------------------------------------------------


@given(distributions, distributions)
def test_accepting_and_resampling_together_give_the_targets_distribution(p: Tensor, q: Tensor) -> None:
    accepted = torch.where(q > 0, q * acceptance_probability(p, q), 0)
    left = residual(p, q)
    emitted = accepted + (1 - accepted.sum()) * left / left.sum()
    assert torch.allclose(emitted, p, atol=1e-12)


@given(distributions)
def test_the_residual_of_equal_distributions_is_the_distribution_itself_and_never_empty(p: Tensor) -> None:
    assert torch.equal(residual(p, p), p)


@given(distributions, tokens)
def test_the_residual_of_a_one_hot_draft_is_the_target_without_that_token(p: Tensor, token: int) -> None:
    assume(p[token] < 1)
    expected = p.clone()
    expected[token] = 0
    assert torch.equal(residual(p, torch.tensor(one_hot(token), dtype=torch.float64)), expected)


@given(distributions)
def test_a_residual_left_by_rounding_alone_still_gives_a_possible_token(p: Tensor) -> None:
    single = p.float()
    nudged = torch.nextafter(single, torch.ones(VOCAB))
    token = int(single.argmax())
    draft = Draft([token], nudged[None])
    found = verify(torch.stack([single, single]), draft, uniform(ALMOST_ONE, ALMOST_ONE))
    assert single[found.last.id] > 0


# The tests, from left to right -----------------------------------------------------------------------------


@given(distributions, distributions, st.data())
def test_a_token_passes_just_below_min_1_p_over_q_and_fails_at_it(p: Tensor, q: Tensor, data: st.DataObject) -> None:
    token = data.draw(st.sampled_from(q.nonzero().flatten().tolist()))
    border = min(1.0, float(p[token] / q[token]))
    draft = Draft([token], q[None])
    if border > 0:
        assert verify(rows(p, p), draft, uniform(math.nextafter(border, 0), 0.5)).accepted == 1
    if border < 1:
        assert verify(rows(p, p), draft, uniform(border, 0.5)).accepted == 0


def test_each_test_uses_its_own_draw_and_the_last_token_the_last_one() -> None:
    half = [0.5, 0.5, 0, 0, 0]
    p = rows(half, half, [0.25, 0.25, 0.25, 0.25, 0])
    passed = verify(p, Draft([0, 0]), uniform(0.4, 0.4, 0.6))
    assert (passed.accepted, passed.last.id, passed.last.kind) == (2, 2, TokenKind.BONUS)
    assert verify(p, Draft([0, 0]), uniform(0.6, 0.4, 0.6)).accepted == 0
    assert verify(p, Draft([0, 0]), uniform(0.4, 0.6, 0.6)).accepted == 1
    assert [verify(p, Draft([0, 0]), uniform(0.4, 0.4, last)).last.id for last in (0, 0.3, 0.99)] == [0, 1, 3]


def test_an_ngram_rejection_strikes_the_token_out_and_keeps_that_sample() -> None:
    p = rows([0.5, 0.3, 0.2, 0, 0], one_hot(4))
    for last, expected in ((0.0, 1), (0.59, 1), (0.61, 2), (ALMOST_ONE, 2)):  # 0.3 and 0.2, renormalised
        found = verify(p, Draft([0]), uniform(0.5, last))
        assert (found.accepted, found.last.id, found.last.kind) == (0, expected, TokenKind.RESAMPLED)


@given(st.lists(st.tuples(distributions, tokens, draws), max_size=4), distributions, draws)
def test_a_draft_without_probabilities_is_a_one_hot_draft(
    places: list[tuple[Tensor, int, float]], end: Tensor, last: float
) -> None:
    p = rows(*(row for row, _, _ in places), end)
    ids, noise = [token for _, token, _ in places], uniform(*(draw for _, _, draw in places), last)
    explicit = torch.tensor([one_hot(token) for token in ids], dtype=torch.float64).reshape(-1, VOCAB)
    assert verify(p, Draft(ids), noise) == verify(p, Draft(ids, explicit), noise)


@given(st.lists(st.tuples(tokens, tokens, draws), max_size=4), tokens, draws)
def test_greedy_accepts_exactly_the_argmax_and_emits_the_argmax_whatever_the_draws(
    places: list[tuple[int, int, float]], end: int, last: float
) -> None:
    best = [*(token for token, _, _ in places), end]
    guesses = [guess for _, guess, _ in places]
    found = verify(rows(*map(one_hot, best)), Draft(guesses), uniform(*(draw for _, _, draw in places), last))
    right = [guess == token for guess, token in zip(guesses, best, strict=False)]
    assert found.accepted == (right.index(False) if False in right else len(right))
    assert found.last.id == best[found.accepted]
    assert found.last.p == 1


@given(st.lists(st.tuples(distributions, distributions, st.integers(0, 4), draws), max_size=4), distributions, draws)
def test_the_verdict_agrees_with_its_own_figures(
    places: list[tuple[Tensor, Tensor, int, float]], end: Tensor, last: float
) -> None:
    ids = [q.nonzero().flatten().tolist()[pick % int((q > 0).sum())] for _, q, pick, _ in places]
    draft = Draft(ids, torch.stack([q for _, q, _, _ in places])) if places else Draft()
    p = rows(*(row for row, _, _, _ in places), end)
    found = verify(p, draft, uniform(*(draw for *_, draw in places), last))

    assert [guess.p for guess in found.guesses] == [
        float(row[token]) for (row, *_), token in zip(places, ids, strict=True)
    ]
    assert [guess.q for guess in found.guesses] == [
        float(q[token]) for (_, q, *_), token in zip(places, ids, strict=True)
    ]
    assert [guess.draw for guess in found.guesses] == [draw for *_, draw in places]
    figures: list[Any] = [(guess.p, guess.q, guess.draw) for guess in found.guesses]
    passed = [u < min(1, a / b) for a, b, u in figures]
    assert found.accepted == (passed.index(False) if False in passed else len(passed))
    assert found.last.p == float(p[found.accepted, found.last.id]) > 0
    if not places:
        assert found.last.kind == TokenKind.TARGET
    else:
        assert found.last.kind == (TokenKind.BONUS if all(passed) else TokenKind.RESAMPLED)


def test_the_answer_holds_plain_numbers() -> None:
    found = verify(rows(one_hot(0), one_hot(1)).float(), Draft([0], rows(one_hot(0)).float()), uniform(0.5, 0.5))
    assert type(found.accepted) is int
    assert type(found.last.id) is int
    assert {type(value) for guess in found.guesses for value in (found.last.p, guess.p, guess.q, guess.draw)} == {float}


def test_a_chosen_tree_of_one_token_is_not_tested_as_a_drawn_chain() -> None:
    """Its q is an estimate that nothing was drawn from. Tested by p / q, token 0 would come up in 0.5 of the cases."""
    p, q = torch.tensor([0.294, 0.406, 0.3, 0, 0]).double(), torch.tensor([0.5]).double()
    emitted = torch.zeros(VOCAB, dtype=torch.float64)
    grid = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    for first in grid:
        tree = verify(torch.stack([p, p]), Draft([0], q=q, parents=[-1], tree=True), torch.stack([first, first]))
        emitted[tree.emitted[0].id] += 1 / 200
    assert emitted.tolist() == pytest.approx(p.tolist(), abs=1 / 200)


def test_a_large_vocabulary_keeps_its_ids() -> None:
    vocab = 262_144  # ids travel to the host as floats and must come back whole
    p = torch.zeros(2, vocab)
    p[0, vocab - 1] = p[1, vocab - 2] = 1
    found = verify(p, Draft([vocab - 1]), uniform(0.5, 0.5))
    assert (found.accepted, found.last.id) == (1, vocab - 2)


def test_draft_and_draws_are_brought_to_where_the_targets_probabilities_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fake transfer: a model that is spread over devices may put its logits elsewhere than it takes its input."""
    brought: list[tuple[list[float], torch.device]] = []

    def to_device(numbers: list[int] | Tensor, device: torch.device) -> Tensor:
        numbers = torch.as_tensor(numbers)
        brought.append((numbers.tolist(), device))
        return numbers

    monkeypatch.setattr("specdemo.decoding.rejection.to_device", to_device)
    verify(rows(one_hot(1), one_hot(2)), Draft([1]), uniform(0.25, 0.75))
    assert brought == [([1], torch.device("cpu")), ([0.25, 0.75], torch.device("cpu"))]


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "one-hot"])
def test_the_library_for_cpus_changes_no_verdict(monkeypatch: pytest.MonkeyPatch, k: int, drawn: bool) -> None:
    noise = torch.Generator().manual_seed(k)
    kinds = set()
    for _ in range(200):
        p = (5 * torch.randn(k + 1, 700, generator=noise)).softmax(-1)
        q = (p[:k].log() + torch.randn(k, 700, generator=noise)).softmax(-1)
        draft = Draft(q.multinomial(1, generator=noise).squeeze(1), q if drawn else None) if k else Draft()
        draws = torch.rand(k + 1, generator=noise, dtype=torch.float64)
        found = verify(p, draft, draws)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "library", lambda: None)
            assert verify(p, draft, draws) == found
        kinds.add(found.last.kind)
    assert kinds == ({TokenKind.BONUS, TokenKind.RESAMPLED} if k else {TokenKind.TARGET})
