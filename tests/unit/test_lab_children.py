"""Rules for the children of a token: the sound ones emit p whatever is drafted, and the classic mistake does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdemo.studies.lossless import DraftOnPaper, DraftPosition, children_means, exact_in_words
from specdemo.studies.rules import (
    BROKEN,
    BY_RATIO,
    IN_TURN,
    OWN_DRAW,
    SIZES,
    each_rule,
    emitted_distribution,
    emitted_with,
)

from ..sentences import tells

P, Q = (torch.tensor(row, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.7, 0.2, 0.1]))
weights = st.lists(st.floats(1e-3, 1), min_size=3, max_size=9)


def by_enumeration(p: list[float], q: list[float], children: list[int]) -> list[float]:
    """What the test by p / q emits, over all of its outcomes."""
    emitted, reached = [0.0] * len(p), 1.0
    for child in children:
        chance = min(1.0, p[child] / q[child])
        emitted[child] += reached * chance
        reached *= 1 - chance
        left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        p = [a / sum(left) for a in left] if sum(left) else p
        q = [0.0 if token == child else b for token, b in enumerate(q)]
        q = [b / sum(q) for b in q] if sum(q) else q
    return [a + reached * b for a, b in zip(emitted, p, strict=True)]


def test_the_rules_by_hand() -> None:
    # Token 0 passes in 5 of 7 cases; the others are drawn from what q gives too little, half and half.
    accepted, emitted = emitted_with(P, Q, [0], BY_RATIO)
    assert accepted == pytest.approx(5 / 7)
    assert emitted.tolist() == pytest.approx([5 / 7, 1 / 7, 1 / 7])
    for rule in (OWN_DRAW, IN_TURN):
        accepted, emitted = emitted_with(P, Q, [0, 1], rule)
        assert accepted == pytest.approx(0.8)
        assert emitted.tolist() == pytest.approx(P.tolist())
    off = {(one.rule, one.children): one.off for one in each_rule(P, Q)}
    assert off[BY_RATIO, 1] == pytest.approx(5 / 7 - 0.5)


@given(weights, weights, st.integers(1, 8))
def test_the_sound_rules_emit_p_and_accept_as_much(p: list[float], q: list[float], size: int) -> None:
    width = min(len(p), len(q))
    target, drafter = (torch.tensor(row[:width], dtype=torch.float64) for row in (p, q))
    target, drafter = target / target.sum(), drafter / drafter.sum()
    children = drafter.topk(min(size, width)).indices.tolist()
    own, turn = (emitted_with(target, drafter, children, rule) for rule in (OWN_DRAW, IN_TURN))
    assert own[0] == pytest.approx(turn[0])
    assert turn[1].tolist() == pytest.approx(target.tolist())
    wrong = emitted_with(target, drafter, children, BY_RATIO)[1]
    assert wrong.tolist() == pytest.approx(by_enumeration(target.tolist(), drafter.tolist(), children))
    assert float(wrong.sum()) == pytest.approx(1)


def random_pair(seed: int, vocab: int = 50) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(vocab, generator=noise, dtype=torch.float64)
    return logits.softmax(-1), (logits + torch.randn(vocab, generator=noise, dtype=torch.float64)).softmax(-1)


def test_a_test_by_ratio_of_the_likeliest_children_is_far_from_p() -> None:
    for seed in range(5):
        found = list(each_rule(*random_pair(seed)))
        assert {one.children for one in found} == set(SIZES)
        for one in found:
            assert (one.off > 0.01) if one.rule == BY_RATIO else (one.off < 1e-12)


def test_what_is_alone_in_q_has_no_siblings_and_is_tested_by_p() -> None:
    found = list(each_rule(P, torch.tensor([0.0, 1.0, 0.0])))
    assert max(one.off for one in found) < 1e-12
    assert [one.accepted for one in found] == pytest.approx([0.3] * len(found))


def test_the_broken_rule_is_that_of_one_child() -> None:
    assert "likeliest-by-ratio" in BROKEN
    emitted = emitted_distribution(P, Q, broken="likeliest-by-ratio")
    assert emitted.tolist() == pytest.approx([5 / 7, 1 / 7, 1 / 7])


def test_the_means_of_a_text_and_their_sentence() -> None:
    positions = [DraftPosition(0, i, 0.0, 0.5, 0.1, list(each_rule(*random_pair(i)))) for i in range(3)]
    drafts = [DraftOnPaper(positions, None)]
    rows = children_means(drafts)
    assert len(rows) == 3 * len(SIZES)
    (wrong,) = [row for row in rows if row["rule"] == BY_RATIO and row["children"] == 4]
    assert wrong["worst"] >= wrong["off"] > 0.01
    assert tells(exact_in_words(drafts)[-1], f"p / q, {wrong['off']:.2f} average {wrong['worst']:.2f} worst")
    assert children_means([DraftOnPaper([], None)]) == []
