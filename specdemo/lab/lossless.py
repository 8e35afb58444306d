"""Is sampling with a drafter really lossless? The emitted law, worked out and put to the test.

On paper: the law that the rule emits, from p and q in every place of real drafts. Live: the frequencies in thousands of
real rounds from one context, tested against the target's own probabilities. A broken rule fails the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..decode import check_room
from ..events import Event, Round, emitted_tokens
from ..hardware import sent
from ..race import check_drafter, start
from ..sampling import one_hot, probabilities
from ..types import MAX_K, MAX_SEED, BadInput, Draft, Settings, Token, TokenKind, Verdict
from ..verify import verify
from .law import EXACT, RULES, Distances, chi_square, emitted_law, harm
from .remember import Remembering, from_one_context

if TYPE_CHECKING:
    from ..models import Loaded

CAUGHT = 1e-6  # a p-value below this is no bad luck
LIKELY = 25  # times a first token must be expected for what follows it to be tested
LIKELIEST = 8  # first tokens that are told one by one
BATCH = 200  # rounds between two results
PRECISION = 1e-13  # of float64 sums over a vocabulary


# On paper --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlaceLaw:
    """One place of a real draft: the emitted law against the target's, worked out from p and q.

    `error` is their largest difference in any token, `overlap` the sum of min(p, q), which is the chance that
    a guess passes here (Leviathan et al., theorem 3.5). `harm` is what a broken rule would do here at least.
    """

    round: int
    place: int
    error: float
    overlap: float
    harm: float


def exact(loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings) -> Iterator[list[PlaceLaw]]:
    """Generate once, and work out the emitted law in each place of each draft; yields the places of a round.

    The first place is the law of the round's first token, the second that of the next one if the first passed, and
    so on. In between the tests of `verify` decide as always.

    Raises:
        BadInput: the drafter cannot be used here, or the prompt has no room.
    """
    for event, places in _with_laws(loaded, drafter, prompt_ids, settings):
        if isinstance(event, Round):
            yield places


def _with_laws(
    loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings
) -> Iterator[tuple[Event, list[PlaceLaw]]]:
    """The events of a run, each with the laws in the places of its draft."""
    seen: list[tuple[Tensor, Draft]] = []

    def watching(target_probs: Tensor, draft: Draft, draws: Tensor) -> Verdict:
        seen.append((target_probs, draft))
        return verify(target_probs, draft, draws)

    with closing(start(loaded, drafter, prompt_ids, settings, watching)) as events:  # type: ignore[type-var]
        for event in events:
            places = []
            if isinstance(event, Round):
                target_probs, draft = seen[-1]
                laws = zip(target_probs, _draft_laws(draft, target_probs), strict=False)
                places = [
                    PlaceLaw(event.index, place, *_error_overlap_harm(p, q)) for place, (p, q) in enumerate(laws, 1)
                ]
            seen.clear()
            yield event, places


def _draft_laws(draft: Draft, target_probs: Tensor) -> Tensor:
    """q at each place, [k, V]: one-hot where nothing was drawn."""
    if draft.probs is not None:
        return draft.probs.to(target_probs)
    return one_hot(sent(draft.token_ids, target_probs.device), target_probs.shape[-1], target_probs.dtype)


def _error_overlap_harm(p: Tensor, q: Tensor) -> tuple[float, float, float]:
    law = p.double() / p.double().sum()
    overlap = float(torch.minimum(law, q.double() / q.double().sum()).sum())
    return float((emitted_law(p, q) - law).abs().max()), overlap, harm(p, q)


def exact_in_words(places: Sequence[PlaceLaw]) -> list[str]:
    """What the places showed."""
    if not places:
        return ["Nothing was drafted in this text, so there was no law to work out."]
    worst = max(place.error for place in places)
    verdict = "equals" if worst < PRECISION else "DIFFERS FROM"
    overlap = sum(place.overlap for place in places) / len(places)
    return [
        f"Worked out from p and q in {len(places)} places of real drafts, the law of the emitted token {verdict} the "
        f"target's: no token's probability is more than {worst:.0e} off.",
        f"A guess passes with the chance that p and q have in common: {overlap:.0%} on average here.",
    ]


# Live ------------------------------------------------------------------------------------------------------


def telling_context(loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings) -> list[int]:
    """The text up to the round, of one generated answer, where a broken rule would do most harm to the first token.

    Where p is nearly certain, or p and q agree or have nothing in common, it would be hard to notice.

    Raises:
        BadInput: nothing was drafted in the whole answer.
    """
    harms: list[tuple[float, int]] = []
    text = list(prompt_ids)
    for event, places in _with_laws(loaded, drafter, prompt_ids, settings):
        if places:
            harms.append((places[0].harm, len(text)))
        text += [token.id for token in emitted_tokens(event)]
    if not harms:
        raise BadInput(f"The drafter {drafter} proposed nothing in the whole answer: choose another prompt.")
    return text[: max(harms)[1]]


@dataclass(frozen=True, slots=True)
class LawTest:
    """The first token after the context (`tokens` 1), or the first two (2), against the target's own law.

    `floor` are the distances of two samples of the target itself, equally large: nothing can be closer but by chance.
    `p_value` is the chi-square test's; None if only one outcome can be expected.
    """

    tokens: int
    cells: int
    distances: Distances
    floor: tuple[Distances, Distances]
    p_value: float | None


@dataclass(frozen=True, slots=True)
class Likely:
    """One of the likeliest first tokens: how often it came, and its probability by the target's law."""

    token_id: int
    count: int
    probability: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rounds so far: how many, how many tested a draft, what share of the first guesses passed, the tests, and the
    `LIKELIEST` first tokens."""

    rule: str
    rounds: int
    with_draft: int
    first_passed: float | None
    passes: int
    tests: tuple[LawTest, ...]
    likeliest: tuple[Likely, ...]

    @property
    def caught(self) -> bool:
        """Whether the frequencies cannot be the target's."""
        return any(test.p_value is not None and test.p_value < CAUGHT for test in self.tests)

    def in_words(self) -> list[str]:
        """What the rounds showed."""
        first = self.tests[0]
        floor = " and ".join(f"{distances.total_variation:.4f}" for distances in first.floor)
        lines = [
            f"{self.rounds} rounds from one context, {self.with_draft} of them with a draft"
            + (f", whose first guess passed in {self.first_passed:.0%}." if self.first_passed is not None else "."),
            f"The first token's frequencies are {first.distances.total_variation:.4f} (total variation) from the "
            f"target's probabilities; two samples of the target itself, equally large, are {floor} from them.",
        ]
        for test in self.tests:
            name = "first token" if test.tokens == 1 else "first two tokens"
            if test.p_value is None:
                lines.append(f"The {name}: with one likely outcome, or so few rounds, there is nothing to test.")
            else:
                lines.append(f"The {name}: a fair sample is this far off with probability {test.p_value:.2g}.")
        if not self.with_draft:
            return [*lines, "Nothing was drafted in this context, so the rule was not put to the test."]
        if self.caught:
            return [*lines, "That is no bad luck: this rule does NOT keep to the target's law."]
        return [*lines, "No sign of a difference from the target's law."]


def sampling(
    loaded: Loaded,
    drafter: str,
    context: Sequence[int],
    settings: Settings,
    rounds: int = 3000,
    rule: str = EXACT,
) -> Iterator[Sampled]:
    """Run the real loop again and again from one context; yields the result so far after every `BATCH` rounds.

    Each run is `race.start`: the real drafter, sampling, verification, emission and rollback, with draws of its own
    seed. Only the networks are not asked twice for the same text: their logits are remembered, and the tests compare
    with the `probabilities` of those. So they show that speculation makes of the logits what sampling would; that a
    pass over several tokens gives the logits of passes over one is for the greedy certificate to show.

    Raises:
        BadInput: temperature 0, a context of less than two tokens or without room, or an unusable drafter.
    """
    if settings.temperature == 0:
        raise BadInput("At temperature 0 nothing is sampled: choose a temperature above 0.")
    if len(context) < 2 or rounds < 1:
        raise BadInput("At least one round, please, and a context of at least two tokens.")
    new_tokens = 2 * (MAX_K + 1)  # so that the end of the text shortens no draft of the first round
    settings = replace(settings, max_new_tokens=new_tokens, stop=())
    check_room(len(context), settings, loaded.context)
    check_drafter(loaded, drafter)
    seeds = torch.Generator().manual_seed(settings.seed)
    counts: Counter[tuple[int, int]] = Counter()
    with_draft = passed = 0
    with from_one_context(loaded, context, new_tokens) as (remembered, target):
        for done in range(1, rounds + 1):
            seed = int(torch.randint(MAX_SEED + 1, (), generator=seeds))
            first, drafted = _first_two(remembered, drafter, context, replace(settings, seed=seed), rule)
            counts[first[0].id, first[1].id] += 1
            with_draft += drafted
            passed += first[0].kind is TokenKind.ACCEPTED
            if done % BATCH == 0 or done == rounds:
                tests = tuple(_tests(target, context, settings, counts))
                share = passed / with_draft if with_draft else None
                likeliest = tuple(_likeliest(_law_after(target, context, settings), counts))
                yield Sampled(rule, done, with_draft, share, target.passes, tests, likeliest)


def _first_two(
    loaded: Loaded, drafter: str, context: Sequence[int], settings: Settings, rule: str
) -> tuple[list[Token], bool]:
    """The first two tokens emitted behind the context in one run, and whether the first round had a draft."""
    tokens: list[Token] = []
    drafted = False
    with closing(start(loaded, drafter, context[:-1], settings, RULES[rule])) as events:  # type: ignore[type-var]
        for event in events:
            if isinstance(event, Round):
                drafted = drafted or (not tokens and bool(event.drafted))
                tokens += event.emitted
                if len(tokens) >= 2:
                    break
    return tokens[:2], drafted


def _tests(
    target: Remembering, context: Sequence[int], settings: Settings, counts: Counter[tuple[int, int]]
) -> Iterator[LawTest]:
    """Test the first tokens against p, and pairs of tokens against the product of p and the next p.

    For pairs, the second law is asked for only behind first tokens expected `LIKELY` times or more; all other
    pairs are one cell.
    """
    rounds = counts.total()
    first = _law_after(target, context, settings)
    found = np.zeros_like(first)
    for (token, _), count in counts.items():
        found[token] += count
    yield _test(1, found, first, settings.seed)

    pair_found, pair_law = [], []
    for token in np.flatnonzero(first * rounds >= LIKELY).tolist():
        pair_law.append(first[token] * _law_after(target, [*context, token], settings))
        pair_found.append(np.zeros_like(first))
        for (one, two), count in counts.items():
            if one == token:
                pair_found[-1][two] += count
    rest = max(0.0, 1 - sum(law.sum() for law in pair_law)), rounds - sum(part.sum() for part in pair_found)
    yield _test(2, np.append(np.ravel(pair_found), rest[1]), np.append(np.ravel(pair_law), rest[0]), settings.seed)


def _likeliest(law: np.ndarray, counts: Counter[tuple[int, int]]) -> Iterator[Likely]:
    for token in law.argsort()[::-1][: min(LIKELIEST, np.count_nonzero(law))].tolist():
        count = sum(count for (first, _), count in counts.items() if first == token)
        yield Likely(token, count, float(law[token]))


def _law_after(target: Remembering, text: Sequence[int], settings: Settings) -> np.ndarray:
    """The target's own distribution of the token behind a text, [V] float64, summing to 1."""
    law = probabilities(target.prefill(text), settings)[0].double().cpu().numpy()
    return law / law.sum()


def _test(tokens: int, counts: np.ndarray, law: np.ndarray, seed: int) -> LawTest:
    possible = (law > 0) | (counts > 0)
    counts, law = counts[possible], law[possible] / law.sum()
    noise = np.random.default_rng(seed)
    samples = [Distances.between(noise.multinomial(int(counts.sum()), law), law) for _ in range(2)]
    distances = Distances.between(counts, law)
    return LawTest(tokens, len(law), distances, (samples[0], samples[1]), chi_square(counts, law))
