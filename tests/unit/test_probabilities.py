"""What the step-through shows of a round: what it was tested and drawn by, and nothing that moves its clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdemo.decoding.events import Distributions, Round, emitted_tokens
from specdemo.decoding.noise import key_of, uniforms
from specdemo.racing.lanes import LaneText
from specdemo.racing.probabilities import LEAST, SHOWN, probabilities_of
from specdemo.racing.race import race
from specdemo.racing.trace import PLAIN, SPECULATIVE
from specdemo.settings import REJECTION, RULES, Settings
from specdemo.tokens import DraftedToken, DraftOutcome, Token, TokenKind
from tests.harness.doubles import PROMPT, VOCAB, byte_tokenizer, letters_tokenizer, random_table
from tests.harness.texts import warped
from tests.harness.toys import TableToy, ngram_file

SETTINGS = Settings(temperature=0.8, top_p=0.95, k=3, max_new_tokens=40, seed=3)
TARGET = random_table(1, support=4)
MIXED = 0.6 * TARGET + 0.4 * random_table(2, support=2)


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    table = ngram_file(tmp_path, VOCAB)
    return TableToy(target=TARGET, draft_model=MIXED, early=MIXED, ngram_table=table, tokenizer=letters_tokenizer())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["draft-model", "prompt-lookup", "none"])
def test_the_places_of_a_round_are_the_distributions_of_its_tokens(toy: Any, name: str, rule: str) -> None:
    settings = replace(SETTINGS, rule=rule)
    entries = [entry for entry in race(toy, name, PROMPT, settings) if entry.lane == SPECULATIVE]
    ids = list(PROMPT)
    kinds = set()
    for entry in entries:
        if not isinstance(entry.event, Round):
            assert entry.probabilities == ()
        else:
            event = entry.event
            assert len(entry.probabilities) == len(event.emitted)
            for at, place in enumerate(entry.probabilities):
                after = tuple([*ids, *(token.id for token in event.emitted[:at])][-2:])
                p = warped(TARGET[after].tolist(), SETTINGS)
                q = [0.0] * VOCAB
                if at < len(event.drafted):
                    one_hot = [float(token == event.drafted[at].id) for token in range(VOCAB)]
                    q = warped(MIXED[after].tolist(), SETTINGS) if name == "draft-model" else one_hot
                shown = {c.id: (c.p, c.q) for c in place.candidates}
                assert len(shown) == len(place.candidates) <= 2 * SHOWN + 2
                if rule == REJECTION:
                    left = sum(max(0.0, a - b) for a, b in zip(p, q, strict=True))
                    assert place.residual == pytest.approx(left, abs=1e-5)
                    assert all(c.e is None for c in place.candidates)
                else:
                    assert place.residual is None
                    drawn_by_p, drawn_by_q = (
                        min((c for c in place.candidates if getattr(c, by)), key=lambda c: c.e / getattr(c, by)).id
                        for by in ("p", "q" if at < len(event.drafted) else "p")
                    )
                    assert drawn_by_p == event.emitted[at].id
                    assert at >= len(event.drafted) or drawn_by_q == event.drafted[at].id
                expected = {i: (p[i], q[i]) for i in range(VOCAB) if i in shown or max(p[i], q[i]) >= LEAST}
                assert shown.keys() == expected.keys()
                for token, pair in expected.items():
                    assert shown[token] == pytest.approx(pair, abs=1e-5)
                assert event.emitted[at].id in shown
                assert at >= len(event.drafted) or event.drafted[at].id in shown
                kinds.add(event.emitted[at].kind.value)
        ids += [token.id for token in emitted_tokens(entry.event)]
    assert kinds >= ({"target"} if name == "none" else {"accepted", "resampled"})


def test_only_drafted_rounds_that_are_sampled_have_places(toy: Any) -> None:
    assert not any(entry.probabilities for entry in race(toy, "draft-model", PROMPT, SETTINGS) if entry.lane == PLAIN)
    assert not any(entry.probabilities for entry in race(toy, "draft-model", PROMPT, replace(SETTINGS, temperature=0)))


def test_in_a_large_vocabulary_the_likeliest_are_shown_and_those_that_were_tested_or_drawn() -> None:
    vocab, generator = 60, torch.Generator().manual_seed(0)
    p, q = (torch.rand(3, vocab, generator=generator, dtype=torch.float64).pow(3) for _ in range(2))
    p[0, 7] = q[0, 7] = 1e-9  # hardly likely, but guessed, and passes
    p[1, 8] = 0.0  # guessed as well, and fails
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    q[0, 7] = p[0, 7]
    text = LaneText(letters_tokenizer(vocab), [0])
    seen = Distributions(5, p, [(row[None], None) for row in q[:2]])
    drawn = 11
    drafted = DraftedToken(7, DraftOutcome.ACCEPTED, 0, 0, 0), DraftedToken(8, DraftOutcome.REJECTED, 0, 0, 0)
    emitted = Token(7, TokenKind.ACCEPTED, 0), Token(drawn, TokenKind.RESAMPLED, 0)
    first, second = probabilities_of(Round(0, drafted, emitted, 0, 0, 0, distributions=seen), text.name)

    def likeliest(probs: torch.Tensor) -> set[int]:
        return set(probs.topk(SHOWN).indices.tolist())

    assert {c.id for c in first.candidates} >= likeliest(torch.maximum(p[0], q[0])) | {7}
    left = (p[1] - q[1]).clamp(min=0)
    assert {c.id for c in second.candidates} == likeliest(torch.maximum(p[1], q[1])) | likeliest(left) | {8, drawn}
    assert second.residual == pytest.approx(float(left.sum()), abs=1e-6)
    for at, place in enumerate((first, second)):
        for c in place.candidates:
            assert (c.p, c.q) == pytest.approx((float(p[at, c.id]), float(q[at, c.id])), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_the_match_rule_the_first_of_both_races_are_shown(dtype: torch.dtype) -> None:
    vocab, position = 900, 5
    p, q = torch.randn(2, 1, vocab, generator=torch.Generator().manual_seed(1)).softmax(-1).to(dtype)
    text = LaneText(letters_tokenizer(vocab), [0])
    own = torch.arange(0, vocab, 2)  # what the drafter knows
    seen = Distributions(position, p, [(q[:, own], own)], seed=4)
    e = -torch.log1p(-uniforms(key_of(4, position), torch.arange(vocab)))
    q = torch.zeros_like(q).index_copy(1, own, q[:, own])
    first = [set((e / row[0].double()).topk(SHOWN, largest=False).indices.tolist()) for row in (p, q)]
    drafted, emitted = DraftedToken(1, DraftOutcome.REJECTED), Token(2, TokenKind.RESAMPLED)
    (place,) = probabilities_of(Round(0, (drafted,), (emitted,), 0, 0, 0, distributions=seen), text.name)
    assert {c.id for c in place.candidates} == first[0] | first[1] | {1, 2}
    assert all(c.e == pytest.approx(float(e[c.id]), rel=1e-3) for c in place.candidates)


def test_a_token_is_named_as_it_would_be_written() -> None:
    tokenizer = byte_tokenizer()
    text = LaneText(tokenizer, tokenizer.encode("hello"))
    for piece in (" he", "l", " ", "\n"):
        for token in tokenizer.encode(piece):
            assert text.name(token) == tokenizer.decode([token])
    first = tokenizer.encode("😀")[0]
    assert text.name(first) == "\ufffd" == text.name(first)
    assert text.text == ""
