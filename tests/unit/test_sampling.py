"""Logits to probabilities to a token, and the settings that say how."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdemo.decoding import sampling, warping
from specdemo.decoding.rejection import sample
from specdemo.decoding.sampling import largest
from specdemo.decoding.warping import probabilities
from specdemo.errors import BadInput
from specdemo.formats import brief
from specdemo.settings import MAX_K, MAX_SEED, MAX_STOP_STRINGS, Settings

from ..sentences import refuses, tells

JUST_BELOW_ONE = math.nextafter(1, 0)

logit = st.floats(-30, 30, width=32)
rows = st.lists(logit, min_size=2, max_size=12)
distinct_rows = st.lists(logit, min_size=2, max_size=12, unique=True)
temperatures = st.floats(0.05, 2)
all_settings = st.builds(
    Settings, temperature=st.floats(0, 2), top_k=st.integers(0, 15), top_p=st.floats(0, 1, exclude_min=True)
)
weights = st.lists(st.one_of(st.just(0.0), st.floats(0, 1e6)), min_size=1, max_size=12)
draws = st.one_of(st.sampled_from([0.0, JUST_BELOW_ONE]), st.floats(0, 1, exclude_max=True))


@pytest.fixture(params=["by sampling.c", "by torch"], scope="module", autouse=True)
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """As on a machine where the library can be had, and as on any other."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "by torch":
            patch.setattr(sampling, "library", lambda: None)
        elif sampling.library() is None:
            pytest.skip("no C library here")
        yield


def warped(row: list[float], **settings: Any) -> torch.Tensor:
    return probabilities(torch.tensor(row), Settings(**settings))


# probabilities ---------------------------------------------------------------------------------------------


@given(rows, all_settings)
def test_probabilities_are_a_distribution_under_any_settings(row: list[float], settings: Settings) -> None:
    probs = probabilities(torch.tensor(row), settings)
    assert bool((probs >= 0).all())
    assert float(probs.sum()) == pytest.approx(1, abs=1e-5)


@given(distinct_rows, st.floats(0, 1e-9), st.integers(0, 4), st.floats(0.01, 1))
def test_a_vanishing_temperature_is_the_argmax(row: list[float], temperature: float, top_k: int, top_p: float) -> None:
    assume(sorted(row)[-1] - sorted(row)[-2] > 1e-6)
    probs = warped(row, temperature=temperature, top_k=top_k, top_p=top_p)
    assert probs.tolist() == [float(x == max(row)) for x in row]


@given(rows, temperatures)
def test_temperature_divides_the_logits(row: list[float], temperature: float) -> None:
    exact = [math.exp((x - max(row)) / temperature) for x in row]
    assert warped(row, temperature=temperature).tolist() == pytest.approx([x / sum(exact) for x in exact], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@given(seed=st.integers(0, 10_000), vocab=st.integers(1, 3000), values=st.integers(1, 50))
def test_the_largest_is_the_first_one_on_a_tie(dtype: torch.dtype, seed: int, vocab: int, values: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randint(values, (3, vocab), generator=noise).to(dtype)
    rows_of_logits = logits.tolist()
    found, places, margins = largest(logits)
    assert places.tolist() == [row.index(max(row)) for row in rows_of_logits]
    seconds = [
        max([*row[:place], *row[place + 1 :]], default=-math.inf)
        for row, place in zip(rows_of_logits, places.tolist(), strict=True)
    ]
    assert margins.tolist() == [max(row) - second for row, second in zip(rows_of_logits, seconds, strict=True)]
    assert found.dtype == dtype
    assert found.tolist() == [max(row) for row in rows_of_logits]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("place", [0, 1, 255, 256, 300, 698, 699])
def test_the_first_that_is_not_a_number_counts_as_the_largest(dtype: torch.dtype, place: int) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, place:] = math.nan
    logits[2, [0, 400, 690]] = math.inf
    logits[2, place] = math.nan
    found, places, _ = largest(logits)
    assert places[1:].tolist() == [place, place]
    assert found.isnan().tolist() == [False, True, True]
    assert places[0] == logits[0].float().argmax()


NOT_FINITE = {
    "one NaN": [1.0, math.nan, 3.0, 0.5],
    "NaN first": [math.nan, 2.0, 3.0, 0.5],
    "all NaN": [math.nan] * 4,
    "one infinity": [1.0, 2.0, math.inf, 0.5],
    "infinities": [math.inf, -math.inf, math.inf, math.nan],
    "none possible": [-math.inf] * 4,
}


@pytest.mark.parametrize("row", NOT_FINITE.values(), ids=NOT_FINITE.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(temperature=0.7),
        Settings(temperature=1, top_k=3),
        Settings(temperature=1, top_p=0.9),
        Settings(temperature=1, top_k=3, top_p=0.9),
    ],
    ids=["T0", "T0.7", "top-k", "top-p", "both"],
)
def test_no_token_is_drawn_of_logits_that_are_not_finite(
    row: list[float], dtype: torch.dtype, settings: Settings
) -> None:
    """And the rows beside such a one are what they are alone."""
    finite = [0.0, 1.0, -math.inf, 0.5]
    probs = probabilities(torch.tensor([finite, row], dtype=dtype), settings)
    assert sample(probs, torch.tensor([0.5, 0.5], dtype=torch.float64))[1] == 4
    assert torch.equal(probs[0], probabilities(torch.tensor([finite], dtype=dtype), settings)[0])
    assert float(probs[0].sum()) == pytest.approx(1)


@given(rows, st.integers(1, 15), temperatures)
def test_top_k_keeps_exactly_k_even_among_equals(row: list[float], k: int, temperature: float) -> None:
    probs = warped([x / 10 for x in row], temperature=1 + temperature / 2, top_k=k)
    assert int((probs > 0).sum()) == min(k, len(row))
    kept = [x for x, p in zip(row, probs.tolist(), strict=True) if p > 0]
    assert sorted(kept) == sorted(row)[-len(kept) :]


@given(distinct_rows, temperatures, st.floats(0.001, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_it(row: list[float], temperature: float, top_p: float) -> None:
    plain = probabilities(torch.tensor(row, dtype=torch.float64), Settings(temperature=temperature)).tolist()
    kept = probabilities(torch.tensor(row, dtype=torch.float64), Settings(temperature=temperature, top_p=top_p))
    inside = [p for p, q in zip(plain, kept.tolist(), strict=True) if q > 0]
    outside = [p for p, q in zip(plain, kept.tolist(), strict=True) if q == 0]
    assert min(inside) >= max(outside, default=0)
    assert sum(inside) >= top_p - 1e-9
    assert sum(inside) - min(inside) < top_p + 1e-9  # without its least likely token it falls short
    assert kept[kept > 0].sort().values.tolist() == pytest.approx(sorted(p / sum(inside) for p in inside))


def test_top_p_is_reached_where_it_is_met_exactly() -> None:
    assert warped([0.0, 0.0, 0.0, 0.0], temperature=1, top_p=0.5).tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize("top_p", [5e-324, 1e-60, 1e-9, 0.2])
def test_top_p_always_keeps_the_most_likely_token(top_p: float) -> None:
    assert warped([0.0, 1.0, 2.0], temperature=1, top_p=top_p).tolist() == [0, 0, 1]


@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(0, 20), all_settings)
def test_top_p_sorts_a_few_tokens_and_finds_what_sorting_all_does(
    seed: int, values: int, spread: float, settings: Settings
) -> None:
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randint(values, (3, 300), generator=noise) / values * torch.tensor([[0.5], [1], [2]]) * spread
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warping, "FEW", 300)
        by_all = probabilities(logits, settings)
        patch.setattr(warping, "FEW", 4)
        patch.setattr(warping, "MANY_MORE", 3)
        by_few = probabilities(logits, settings)
        alone = torch.cat([probabilities(row[None], settings) for row in logits])
    assert torch.equal(by_few, by_all)
    assert torch.equal(by_few, alone)


@given(st.lists(rows.filter(lambda row: len(row) >= 5).map(lambda row: row[:5]), min_size=1, max_size=4), all_settings)
def test_rows_do_not_influence_each_other(block: list[list[float]], settings: Settings) -> None:
    together = probabilities(torch.tensor(block), settings)
    for row, probs in zip(block, together, strict=True):
        assert torch.equal(probs, probabilities(torch.tensor([row]), settings)[0])


@given(
    distinct_rows,
    st.floats(0.05, 2),
    st.one_of(st.just(0), st.integers(1, 12)),
    st.one_of(st.just(1.0), st.floats(0.05, 0.95)),
)
def test_the_warping_is_that_of_transformers(row: list[float], temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.tensor([row], dtype=torch.float64)
    ids = torch.zeros(1, 1, dtype=torch.long)
    expected = TemperatureLogitsWarper(temperature)(ids, logits)
    likely = [p for p in expected.softmax(-1)[0].tolist() if p]
    assume(len(set(likely)) == len(likely))  # logits 1e-38 apart tie as probabilities: then ours keeps the lowest id
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1:
        reached = expected.softmax(-1).sort(descending=True).values.cumsum(-1)
        assume(bool(((reached - top_p).abs() > 1e-9).all()))  # at the very border either answer is right
        expected = TopPLogitsWarper(top_p)(ids, expected)
    ours = probabilities(logits, Settings(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.allclose(ours, expected.softmax(-1), atol=1e-9)


@pytest.mark.parametrize("settings", [Settings(), Settings(temperature=0.7, top_k=3, top_p=0.9)], ids=["T0", "T0.7"])
def test_the_width_of_the_floats(settings: Settings) -> None:
    logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for given_dtype, dtype in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        probs = probabilities(logits.to(given_dtype), settings)
        assert probs.dtype == dtype
        assert torch.equal(probs, probabilities(logits.to(given_dtype).to(dtype), settings))


@pytest.mark.parametrize("temperature", [0, 1e-300, 0.7, 2])
def test_a_padding_entry_never_gets_probability(temperature: float) -> None:
    probs = warped([0.5, -math.inf, 0.7, -math.inf], temperature=temperature, top_k=3, top_p=0.99)
    assert probs[[1, 3]].tolist() == [0, 0]
    assert float(probs.sum()) == pytest.approx(1)


# sample ----------------------------------------------------------------------------------------------------


@given(weights, draws, st.sampled_from([torch.float32, torch.float64]))
@example([5e-324, 0.0], 0.9, torch.float64)
def test_an_impossible_token_is_never_drawn(row: list[float], draw: float, dtype: torch.dtype) -> None:
    probs = torch.tensor(row, dtype=dtype)
    assume(float(probs.sum()) > 0)
    token = sample(probs, torch.tensor(draw, dtype=torch.float64))
    assert token.shape == ()
    assert token.dtype == torch.int64
    assert float(probs[token]) > 0


@given(weights, draws)
def test_the_first_token_whose_cumulative_weight_exceeds_the_draw(row: list[float], draw: float) -> None:
    assume(sum(row) > 1e-3)
    cumulative = torch.tensor(row, dtype=torch.float64).cumsum(-1)
    threshold = draw * float(cumulative[-1])
    assume(bool(((cumulative - threshold).abs() > 1e-12 * cumulative[-1]).all()))
    token = int(sample(torch.tensor(row, dtype=torch.float64), torch.tensor(draw, dtype=torch.float64)))
    assert token == next(x for x in range(len(row)) if cumulative[x] > threshold)


def test_a_rare_token_between_likely_ones_has_its_place() -> None:
    probs = torch.tensor([0.5, 1e-9, 0.5])  # lost if these were summed in float32
    places = [0.5 - 1e-10, 0.5 + 1e-10, 0.5 + 1.1e-9]
    tokens = [sample(probs, torch.tensor(place / (1 + 1e-9), dtype=torch.float64)) for place in places]
    assert [int(token) for token in tokens] == [0, 1, 2]


@given(st.integers(0, 10_000), st.integers(1, 3000), st.floats(0, 1), st.lists(draws, min_size=3, max_size=3))
def test_a_token_is_drawn_by_all_weights_before_it(seed: int, vocab: int, empty: float, drawn: list[float]) -> None:
    noise = torch.Generator().manual_seed(seed)
    probs = torch.rand(3, vocab, generator=noise) * (torch.rand(3, vocab, generator=noise) >= empty)
    probs[:, int(vocab * empty) // 2] = 1
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    draw = torch.tensor(drawn, dtype=torch.float64)
    threshold = draw[:, None] * cumulative[:, -1:]
    tokens = sample(probs, draw)
    assert bool((probs.gather(1, tokens[:, None]) > 0).all())
    clear = ((cumulative - threshold).abs() > 1e-9).all(-1)  # at the very border either answer is right
    assert torch.equal(tokens[clear], (cumulative > threshold).int().argmax(-1)[clear])
    assert [int(sample(row, u)) for row, u in zip(probs, draw, strict=True)] == tokens.tolist()
    assert torch.equal(sample(probs.T.contiguous().T, draw), sample(probs, draw))


@pytest.mark.parametrize("weight", [0.0, math.nan])
def test_where_nothing_is_possible_nothing_is_drawn(weight: float) -> None:
    draw = torch.tensor(0.5, dtype=torch.float64)
    assert int(sample(torch.full((700,), weight), draw)) == 700
    if math.isnan(weight):
        assert int(sample(torch.tensor([0.5, weight, 0.5]), draw)) == 3


# Settings --------------------------------------------------------------------------------------------------

FIELDS = {
    "k": ("K", 0, MAX_K),
    "top_k": ("top-k", 0, 1_000_000),
    "max_new_tokens": ("max new tokens", 1, 1_000_000),
    "seed": ("seed", 0, MAX_SEED),
    "temperature": ("temperature", 0, 2),
    "top_p": ("top-p", 0, 1),
}
WHOLE = ("k", "top_k", "max_new_tokens", "seed")
not_numbers: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [math.nan, math.inf, -math.inf, True, False, None, "4", b"4", [4], {}, 4j, 10**400, -(10**400), 10**5000]
    ),
    st.text(max_size=5),
)


@given(st.sampled_from(sorted(FIELDS)), not_numbers)
def test_what_is_no_number_is_refused_in_words(name: str, value: Any) -> None:
    with pytest.raises(BadInput) as refusal:
        Settings(**{name: value})
    said, low, high = FIELDS[name]
    assert str(refusal.value).startswith(said)
    assert tells(refusal.value, f"{low} {high:,}")
    assert ("empty" if value is None else brief(value)) in str(refusal.value)
    assert len(str(refusal.value)) < 150


@given(st.sampled_from(sorted(FIELDS)), st.data())
def test_what_is_out_of_range_is_refused_and_what_is_in_range_is_kept(name: str, data: st.DataObject) -> None:
    said, low, high = FIELDS[name]
    whole = name in WHOLE
    number = st.integers() if whole else st.floats(allow_nan=False)
    value: Any = data.draw(st.one_of(number, st.sampled_from([low - 1, low, high, high + 1])))
    if low <= value <= high and not (name == "top_p" and value == 0):
        assert getattr(Settings(**{name: value}), name) == value
    else:
        with refuses(BadInput, said):
            Settings(**{name: value})


@given(st.sampled_from(WHOLE), st.floats(0, 16))
def test_a_count_is_never_rounded(name: str, value: Any) -> None:
    with refuses(BadInput, "whole"):
        Settings(**{name: value})


@pytest.mark.parametrize("stop", [("",), ("a", ""), (1,), (None,), ("x",) * (MAX_STOP_STRINGS + 1), ("x" * 1001,)])
def test_stop_strings_that_cannot_be_used_are_refused(stop: tuple) -> None:
    with pytest.raises(BadInput, match=r"[Ss]top"):
        Settings(stop=stop)


def test_usual_stop_strings_are_taken() -> None:
    assert Settings(stop=("\n", " ", "END")).stop == ("\n", " ", "END")
    assert Settings(stop=("x" * 1000,)).stop == ("x" * 1000,)
