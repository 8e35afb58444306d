"""The random numbers of a run: what a seed decides, and that no number decides twice.

That texts and their distribution are the target's is tested in `test_texts` and `test_distribution`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdemo.decoding import noise
from specdemo.decoding.events import Event, emitted_tokens
from specdemo.racing.race import start
from specdemo.settings import MAX_SEED, REJECTION, Settings
from specdemo.tokens import DraftOutcome
from tests.harness.doubles import PROMPT, ids_of, rounds_of
from tests.harness.toys import DRAFTER_NAMES, TableToy, certain_toy

SEEDED = Settings(temperature=1, k=3, max_new_tokens=40, seed=7)
MATCHED = Settings(temperature=0.9, k=3, max_new_tokens=60)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TableToy:
    return certain_toy(tmp_path_factory.mktemp("ngram"))


def run(toy: Any, name: str, settings: Settings) -> list[Event]:
    return list(start(toy, name, PROMPT, settings))


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
def test_no_random_number_of_rejection_sampling_is_used_twice(
    toy: TableToy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []
    uniform = noise.uniform

    def watched(*key: Any) -> float:
        used.append(uniform(*key))
        return used[-1]

    monkeypatch.setattr(noise, "uniform", watched)
    events = run(toy, name, replace(SEEDED, rule=REJECTION))
    assert len(set(used)) == len(used) >= SEEDED.max_new_tokens
    tested = [token.draw for event in rounds_of(events) for token in event.drafted]
    assert set(tested) <= set(used)


def test_margins_tell_how_close_another_token_came(toy: TableToy) -> None:
    """At temperature 0 that is the gap of the two largest logits."""
    events = run(toy, "none", Settings(max_new_tokens=20))
    text, margins = [*PROMPT, *ids_of(events)], [token.margin for event in events for token in emitted_tokens(event)]
    for place, margin in enumerate(margins, start=len(PROMPT)):
        best, second = toy.target[text[place - 2], text[place - 1]].log().topk(2).values.tolist()
        assert margin == (None if second == -math.inf else pytest.approx(best - second))


def test_drafts_share_the_noise_of_their_positions(toy: TableToy) -> None:
    """A drafter with the target's own distribution is always right, one with another more often than by chance."""
    same = replace(toy, draft_model=toy.target)
    for found, least in ((run(same, "draft-model", MATCHED), 1.0), (run(toy, "draft-model", MATCHED), 0.5)):
        outcomes = [token.outcome for event in rounds_of(found) for token in event.drafted]
        assert outcomes.count(DraftOutcome.ACCEPTED) >= least * (len(outcomes) - outcomes.count(DraftOutcome.UNTESTED))
