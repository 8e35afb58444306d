"""The noise of the match rule: its integers, its distribution, and the same tokens in C and in torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdemo.decoding import noise
from specdemo.decoding.acceptance import path_of
from specdemo.decoding.noise import draw, key_of, mix, uniform, uniforms
from specdemo.errors import NotFinite
from specdemo.settings import Settings
from specdemo.studies.statistics import chi_square
from specdemo.tokens import Draft, TokenKind
from tests.harness.classes import Match

UNLIKELY = 1e-6  # the chance that a right sampler fails one of the tests below
P = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.009, 0.001])
RUNS = 40_000
AGREED = 1e-6  # margins above this decide the same everywhere

needs_c = pytest.mark.skipif(noise.library() is None, reason="there is no compiler here")


def test_mix_is_that_of_splitmix64() -> None:
    """The first outputs of splitmix64 with the seed 1234567, as its authors publish them."""
    states = [1234567 + (i + 1) * noise.STEP & noise.MASK for i in range(3)]
    assert list(map(mix, states)) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**20), st.integers(0, 3))
def test_uniforms_are_the_integers_of_mix(seed: int, position: int, purpose: int) -> None:
    key = key_of(seed, position, purpose)
    expected = [((mix(key + (i + 1) * noise.STEP & noise.MASK) >> 11) + 0.5) * 2.0**-53 for i in range(9)]
    assert uniforms(key, torch.arange(9)).tolist() == expected == [uniform(key, index) for index in range(9)]
    assert all(0 < u < 1 for u in expected)


def test_every_seed_position_and_purpose_has_a_key_of_its_own() -> None:
    """A seed's noise is not another seed's, shifted by some positions."""
    keys = [key_of(seed, position, purpose) for seed in range(60) for position in range(60) for purpose in range(3)]
    assert len(set(keys)) == len(keys)


def test_the_numbers_are_those_of_this_version_in_whose_traces_they_were_drawn() -> None:
    assert noise.VERSION == 1
    assert (key_of(1, 2), key_of(1, 2, 1)) == (0x6D339D1740130EDD, 0x76E36D629CAE6121)
    assert uniform(key_of(1, 2), 3) == 0.9530972680037906


def test_small_uniforms_are_as_frequent_as_they_should_be() -> None:
    """What tokens with a probability down to 1e-7 are drawn by."""
    columns, rows = torch.arange(2**17), 96
    drawn = (uniforms(key_of(3, position), columns) for position in range(rows))
    small = torch.cat([u[u < 1e-3] for u in drawn])
    for limit in (1e-3, 1e-5, 1e-6, 1e-7):
        expected, found = limit * rows * len(columns), int((small < limit).sum())
        assert abs(found - expected) < 5.5 * math.sqrt(expected) + 1, limit
    assert float(small.min()) < 1e-6


def tokens_of(keys: list[int], p: torch.Tensor = P) -> torch.Tensor:
    return draw(p.expand(len(keys), -1), keys)[0]


def check(tokens: torch.Tensor, p: torch.Tensor) -> None:
    counts, probs = tokens.bincount(minlength=len(p)), p.double() / p.double().sum()
    assert (chi_square(counts.numpy(), probs.numpy()) or 0.0) > UNLIKELY


def test_tokens_are_distributed_as_p_over_seeds_and_over_positions() -> None:
    check(tokens_of([key_of(seed, 17) for seed in range(RUNS)]), P)
    check(tokens_of([key_of(5, position) for position in range(RUNS)]), P)
    equal = torch.full((5,), 0.2)
    check(tokens_of([key_of(seed, 3) for seed in range(RUNS)], equal), equal)


def test_neighbouring_positions_are_independent() -> None:
    p = P[:4] / P[:4].sum()
    first, second = (tokens_of([key_of(seed, position) for seed in range(RUNS)], p) for position in (8, 9))
    check(4 * first + second, torch.outer(p, p).flatten())
    seeds, next_seeds = (tokens_of([key_of(seed + more, 8) for seed in range(RUNS)], p) for more in (0, 1))
    check(4 * seeds + next_seeds, torch.outer(p, p).flatten())


def test_margins_are_those_of_a_race() -> None:
    """The gap of the two best ln(p / e) of two equal tokens is |ln(e_1 / e_0)|, whose distribution is known: with
    r = e_1 / e_0, P(|ln r| < m) = tanh(m / 2)."""
    _, margins = draw(torch.full((RUNS, 2), 0.5), [key_of(seed, 0) for seed in range(RUNS)])
    for m in (0.01, 0.3, 1.0, 3.0):
        share, expected = float((margins < m).double().mean()), math.tanh(m / 2)
        assert abs(share - expected) < 5.5 * math.sqrt(expected * (1 - expected) / RUNS)


@needs_c
@given(st.integers(0, 2**32 - 1), st.integers(1, 700), st.sampled_from([0.1, 1.0, 4.0, 20.0]), st.booleans())
def test_c_and_torch_draw_the_same_tokens(seed: int, size: int, spread: float, holes: bool) -> None:
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(seed)) * spread
    p = logits.softmax(-1)
    if holes:
        p = torch.where(p < p.mean(), 0, p)
    keys = [key_of(seed, position) for position in range(3)]
    (tokens, margins), (expected, exact) = draw(p, keys), draw(p.double(), keys)
    clear = exact > AGREED
    assert torch.equal(tokens[clear], expected[clear])
    torch.testing.assert_close(margins, exact, rtol=1e-6, atol=1e-9)


@needs_c
def test_c_and_torch_agree_on_a_large_vocabulary() -> None:
    for spread in (0.0, 3.0, 10.0):
        p = (spread * torch.randn(2, 151_936, generator=torch.Generator().manual_seed(1))).softmax(-1)
        keys = [key_of(2, position) for position in range(2)]
        (tokens, margins), (expected, exact) = draw(p, keys), draw(p.double(), keys)
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(margins, exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_tokens_are_never_drawn(dtype: torch.dtype) -> None:
    p = torch.zeros(2, 600, dtype=dtype)
    p[0, 517], p[1, [3, 599]] = 1e-30, torch.tensor([0.25, 1e-38], dtype=dtype)
    tokens, margins = draw(p, [key_of(0, 0), key_of(0, 1)])
    assert tokens.tolist() == [517, 3]
    assert margins[0] == math.inf
    assert 50 < margins[1] < 150


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_a_distribution_give_no_token(dtype: torch.dtype, bad: float) -> None:
    p = torch.full((3, 300), 1 / 300, dtype=dtype)
    p[0], p[1, 299] = 0, bad
    tokens, _ = draw(p, [key_of(1, position) for position in range(3)])
    assert tokens[:2].tolist() == [-1, -1]
    assert 0 <= tokens[2] < 300


def test_the_same_noise_draws_nearly_the_same_from_a_nearly_equal_distribution() -> None:
    """The point of a shared key: tokens of p and q agree more often than independent draws could, and at least as
    often as (1 - TV) / (1 + TV) (Gumbel coupling)."""
    q = (P.log() + 0.3 * torch.randn(len(P), generator=torch.Generator().manual_seed(4))).softmax(-1)
    keys = [key_of(seed, 2) for seed in range(RUNS)]
    same = float((tokens_of(keys) == tokens_of(keys, q)).double().mean())
    tv = float((P - q).abs().sum() / 2)
    assert same > (1 - tv) / (1 + tv) - 5.5 * math.sqrt(0.25 / RUNS)
    assert same > float((P * q).sum()) + 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_smaller_vocabulary_draws_with_the_noise_of_the_same_tokens(dtype: torch.dtype) -> None:
    p = torch.randn(6, 900, generator=torch.Generator().manual_seed(3)).softmax(-1).to(dtype)
    known = torch.arange(0, 900, 7)
    keys = [key_of(6, position) for position in range(6)]
    columns, margins = draw(p[:, known], keys, known)
    tokens, others = draw(torch.zeros_like(p).index_copy(1, known, p[:, known]), keys)
    assert torch.equal(known[columns], tokens)
    torch.testing.assert_close(margins, others)


def test_the_match_rule_emits_what_the_target_draws_whatever_is_drafted() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(6))
    p, rule = logits.softmax(-1), Match(Settings(temperature=1, seed=9))
    own = draw(p, [key_of(9, 20 + i) for i in range(4)])[0].tolist()
    for right in range(4):  # drafted tokens are the target's own, the next is another
        draft = [*own[:right], *((token + 1) % 50 for token in own[right:3])]
        found = rule.verify(logits, Draft(draft), 20)
        assert (found.accepted, found.last.id) == (right, own[right])
        assert found.last.kind is (TokenKind.BONUS if right == 3 else TokenKind.RESAMPLED)
        assert [token.margin is not None for token in found.emitted] == [True] * (right + 1)
    assert rule.verify(logits[:1], Draft(), 20).last.kind is TokenKind.TARGET
    drafted = [rule.draw(logits[i : i + 1], rule.draft_numbers([20 + i])) for i in range(4)]
    assert [int(token.column) for token in drafted] == own  # a drafter that knows p drafts it
    assert [float(token.q) for token in drafted] == pytest.approx(p[range(4), own].tolist())
    with pytest.raises(NotFinite):
        rule.verify(torch.full((1, 5), torch.nan), Draft(), 3)


def test_a_verdict_on_a_tree_tells_the_margins_of_the_rows_of_its_path() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(6))
    p = logits.softmax(-1)
    own, margins = draw(p, [key_of(9, position) for position in (20, 21, 21)])
    first, _, last = own.tolist()
    draft = Draft([(first + 1) % 50, first], parents=[-1, -1], tree=True)  # a wrong sibling comes first
    found = Match(Settings(temperature=1, seed=9)).verify(logits, draft, 20)
    assert (path_of(found.guesses), found.last.id) == ([-1, 1], last)
    assert [token.margin for token in found.emitted] == pytest.approx(margins[[0, 2]].tolist())
    assert found.last.p == pytest.approx(float(p[2, last]))
