"""Is sampling with a drafter really lossless? The emitted distribution, computed and sampled.

On paper: the distribution that the chosen rule emits, from p and q at every position of real drafts. Live: the token
frequencies in thousands of real rounds from one context, tested against the target's probabilities. A broken rule
fails both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..decoding.acceptance import places_tested
from ..decoding.events import Event, Round, emitted_tokens
from ..decoding.rule import Rule
from ..decoding.warping import probabilities
from ..errors import BadInput
from ..formats import formatted
from ..models.loaded import Loaded
from ..racing.probabilities import target_and_draft_probs
from ..racing.race import check_run, start
from ..settings import MAX_K, MAX_NODES, MAX_SEED, Settings
from ..tokens import Token, TokenKind
from .remember import RunnerWithMemory, from_one_context
from .rules import Acceptance, accepted_of, emitted_distribution, harm, make_rule
from .statistics import POWER, Distances, chi_square, smallest_caught

CAUGHT = 1e-6  # a p-value below this is not chance
LIKELY = 25  # times a first token must be expected for what follows it to be tested
LIKELIEST = 8  # first tokens that are listed one by one
BATCH = 200  # rounds between two results
PRECISION = 1e-13  # of float64 sums over a vocabulary


# On paper --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """One position of a real draft: the emitted distribution against the target's, computed from p and q.

    `error` is their largest difference in any token, `overlap` the sum of min(p, q), which is the probability that a
    guess passes here under rejection sampling (Leviathan et al., theorem 3.5). `harm` is the least total variation of
    a broken rule here.
    """

    round: int
    position: int
    error: float
    overlap: float
    harm: float


@dataclass(frozen=True, slots=True)
class DraftOnPaper:
    """The positions of one draft, and what each rule accepts of it; no draft has no position."""

    positions: Sequence[DraftPosition]
    accepted: Acceptance | None


def exact(
    loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings, broken: str = ""
) -> Iterator[DraftOnPaper]:
    """Generate once, and compute what a rule emits at each position of each draft; yields the draft of a round.

    The first position holds the distribution of the round's first token, the second that of the next one if the first
    passed, and so on. The text itself is written by the rule of the settings.

    Args:
        broken: one of `rules.BROKEN` to compute with, instead of the rule of the settings.
    """
    make_rule(settings, broken)
    for event, draft in _on_paper(loaded, drafter, prompt_ids, settings, broken):
        if isinstance(event, Round):
            yield draft


def _on_paper(
    loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings, broken: str = ""
) -> Iterator[tuple[Event, DraftOnPaper]]:
    """The events of a run, each with its draft."""
    with closing(start(loaded, drafter, prompt_ids, settings, distributions=True)) as events:  # type: ignore[type-var]
        for event in events:
            draft = DraftOnPaper((), None)
            if isinstance(event, Round) and event.drafted and event.distributions:
                drafted = [token.id for token in (places_tested(event.drafted) if settings.tree else event.drafted)]
                p, q = target_and_draft_probs(event.distributions, event.drafted, drafted)
                rows = enumerate(zip(p, q, strict=False), 1)
                positions = [DraftPosition(event.index, at, *_figures(*row, settings.rule, broken)) for at, row in rows]
                draft = DraftOnPaper(positions, accepted_of(p[: len(q)], q, drafted))
            yield event, draft


def _figures(p: Tensor, q: Tensor, rule: str, broken: str) -> tuple[float, float, float]:
    """The error, the overlap and the harm of a `DraftPosition`."""
    fair = p.double() / p.double().sum()
    overlap = float(torch.minimum(fair, q.double() / q.double().sum()).sum())
    error = float((emitted_distribution(p, q, rule, broken) - fair).abs().max())
    return error, overlap, harm(p, q)


def exact_in_words(drafts: Sequence[DraftOnPaper]) -> list[str]:
    """What was computed, in sentences; the probabilities are in double precision."""
    positions = [position for draft in drafts for position in draft.positions]
    if not positions:
        return ["Nothing was drafted in this text, so there was nothing to compute."]
    worst = max(position.error for position in positions)
    verdict = "equals" if worst < PRECISION else "DIFFERS FROM"
    table = ", ".join(f"{name} {mean:.2f}" for name, mean in accepted_means(drafts).items())
    return [
        f"Computed from p and q at {len(positions)} positions of real drafts, the distribution of the emitted token "
        f"{verdict} the target's: no token's probability is more than {worst:.0e} off.",
        f"Of {len(positions) / sum(map(bool, (draft.positions for draft in drafts))):.1f} guesses a round, the "
        f"rules accept on average: {table}.",
    ]


def accepted_means(drafts: Sequence[DraftOnPaper]) -> dict[str, float]:
    """The mean number of accepted tokens of a draft, by rule; empty where nothing was drafted."""
    made = [draft.accepted for draft in drafts if draft.accepted]
    names = ("rejection", "match")
    return {name: sum(getattr(draft, name) for draft in made) / len(made) for name in names} if made else {}


# Live ------------------------------------------------------------------------------------------------------


def telling_context(loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings) -> list[int]:
    """The text up to the round, of one generated answer, where a broken rule would do most harm to the first token.

    Where p is nearly certain, or p and q agree or have nothing in common, it would be hard to notice.
    """
    harms: list[tuple[float, int]] = []
    text = list(prompt_ids)
    for event, draft in _on_paper(loaded, drafter, prompt_ids, settings):
        if draft.positions:
            harms.append((draft.positions[0].harm, len(text)))
        text += [token.id for token in emitted_tokens(event)]
    if not harms:
        raise BadInput(f"The drafter {drafter} guessed nothing in the whole answer: choose another prompt.")
    return text[: max(harms)[1]]


@dataclass(frozen=True, slots=True)
class SampleTest:
    """The first token after the context (`tokens` 1), or the first two (2), against the target's own distribution.

    `floor` holds the distances of two samples of the target itself, equally large: closer is only chance.
    `p_value` is the chi-square test's; None if only one outcome can be expected. `smallest_caught` is the total
    variation that would be caught in 19 of 20 samples of this size, None where nothing is tested.
    """

    tokens: int
    cells: int
    distances: Distances
    floor: tuple[Distances, Distances]
    p_value: float | None
    smallest_caught: float | None


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """One of the likeliest first tokens: how often it came, and the target's probability of it."""

    token_id: int
    count: int
    probability: float


@dataclass(frozen=True, slots=True)
class Samples:
    """The rounds so far: how many, how many tested a draft, the share of first guesses that passed, the tests, and the
    `LIKELIEST` first tokens."""

    rule: str
    rounds: int
    with_draft: int
    first_passed: float | None
    passes: int
    tests: tuple[SampleTest, ...]
    likeliest: tuple[LikelyToken, ...]

    @property
    def caught(self) -> bool:
        """Whether the frequencies cannot be the target's."""
        return any(test.p_value is not None and test.p_value < CAUGHT for test in self.tests)

    def in_words(self) -> list[str]:
        first = self.tests[0]
        floor = " and ".join(f"{distances.total_variation:.4f}" for distances in first.floor)
        lines = [
            f"{self.rounds} rounds from one context, {self.with_draft} of them with a draft"
            + (
                f", whose first guess was accepted in {self.first_passed:.0%}."
                if self.first_passed is not None
                else "."
            ),
            f"The first token's frequencies are {first.distances.total_variation:.4f} (total variation) from the "
            f"target's probabilities; two samples of the target itself, equally large, are {floor} from them.",
        ]
        for test in self.tests:
            name = "first token" if test.tokens == 1 else "first two tokens"
            if test.p_value is None:
                lines.append(f"The {name}: with one likely outcome, or so few rounds, there is nothing to test.")
            else:
                chance = formatted(test.p_value, "p")
                lines.append(f"The {name}: a fair sample lies at least this far off with probability {chance}.")
        if not self.with_draft:
            return [*lines, "Nothing was drafted in this context, so the rule was not put to the test."]
        if self.caught:
            return [*lines, f"Not chance (p < {CAUGHT:.0e}): this rule CHANGES the output distribution."]
        if first.smallest_caught is None:
            return [*lines, "Nothing could be tested."]
        return [
            *lines,
            f"No difference was found. A total variation of {first.smallest_caught:.3f} or more in the first token "
            f"(rare tokens taken together) would have been caught in {POWER:.0%} of such runs; a smaller one may be "
            "missed.",
        ]


def sampling(
    loaded: Loaded, drafter: str, context: Sequence[int], settings: Settings, rounds: int = 3000, broken: str = ""
) -> Iterator[Samples]:
    """Run the real loop again and again from one context; yields the result so far after every `BATCH` rounds.

    Each run is `race.start`: the real drafter, sampling, verification, emission and rollback, with draws of its own
    seed. Only the networks do not run twice on the same text: their logits are stored, and the tests compare with the
    `probabilities` of those. So they show that speculation turns logits into tokens as sampling does. The greedy
    certificate shows that a pass over several tokens gives the same logits as passes over one.
    """
    if settings.temperature == 0:
        raise BadInput("At temperature 0 nothing is sampled: choose a temperature above 0.")
    if len(context) < 2 or rounds < 1:
        raise BadInput("At least one round and a context of at least two tokens are needed.")
    longest = MAX_NODES if settings.tree else MAX_K
    new_tokens = 2 * (longest + 1)  # so that the end of the text shortens no draft of the first round
    settings = replace(settings, max_new_tokens=new_tokens, stop=())
    check_run(loaded, drafter, [context], settings)
    make_rule(settings, broken)
    seeds = torch.Generator().manual_seed(settings.seed)
    counts: Counter[tuple[int, int]] = Counter()
    with_draft = passed = 0
    with from_one_context(loaded, context, new_tokens) as (remembered, target):
        for done in range(1, rounds + 1):
            seed = int(torch.randint(MAX_SEED + 1, (), generator=seeds))
            rule = make_rule(replace(settings, seed=seed), broken)
            first, drafted = _first_two(remembered, drafter, context, rule)
            counts[first[0].id, first[1].id] += 1
            with_draft += drafted
            passed += first[0].kind is TokenKind.ACCEPTED
            if done % BATCH == 0 or done == rounds:
                tests = tuple(_tests(target, context, settings, counts))
                share = passed / with_draft if with_draft else None
                likeliest = tuple(_likeliest(_probs_after(target, context, settings), counts))
                yield Samples(broken or settings.rule, done, with_draft, share, target.passes, tests, likeliest)


def _first_two(loaded: Loaded, drafter: str, context: Sequence[int], rule: Rule) -> tuple[list[Token], bool]:
    """The first two tokens emitted after the context in one run, and whether the first round had a draft."""
    tokens: list[Token] = []
    drafted = False
    with closing(start(loaded, drafter, context[:-1], rule.settings, rule)) as events:  # type: ignore[type-var]
        for event in events:
            if isinstance(event, Round):
                drafted = drafted or (not tokens and bool(event.drafted))
                tokens += event.emitted
                if len(tokens) >= 2:
                    break
    return tokens[:2], drafted


def _tests(
    target: RunnerWithMemory, context: Sequence[int], settings: Settings, counts: Counter[tuple[int, int]]
) -> Iterator[SampleTest]:
    """Test the first tokens against p, and pairs of tokens against the product of p and the next p.

    For pairs, the second distribution is asked for only after first tokens expected `LIKELY` times or more; all other
    pairs are one cell.
    """
    rounds = counts.total()
    first = _probs_after(target, context, settings)
    found = np.zeros_like(first)
    for (token, _), count in counts.items():
        found[token] += count
    yield _test(1, found, first, settings.seed)

    pair_found, pair_probs = [], []
    for token in np.flatnonzero(first * rounds >= LIKELY).tolist():
        pair_probs.append(first[token] * _probs_after(target, [*context, token], settings))
        pair_found.append(np.zeros_like(first))
        for (one, two), count in counts.items():
            if one == token:
                pair_found[-1][two] += count
    rest = max(0.0, 1 - sum(probs.sum() for probs in pair_probs)), rounds - sum(part.sum() for part in pair_found)
    yield _test(2, np.append(np.ravel(pair_found), rest[1]), np.append(np.ravel(pair_probs), rest[0]), settings.seed)


def _likeliest(probs: np.ndarray, counts: Counter[tuple[int, int]]) -> Iterator[LikelyToken]:
    for token in probs.argsort()[::-1][: min(LIKELIEST, np.count_nonzero(probs))].tolist():
        count = sum(count for (first, _), count in counts.items() if first == token)
        yield LikelyToken(token, count, float(probs[token]))


def _probs_after(target: RunnerWithMemory, text: Sequence[int], settings: Settings) -> np.ndarray:
    """The target's own distribution of the token after a text, [V] float64, summing to 1."""
    probs = probabilities(target.prefill(text), settings)[0].double().cpu().numpy()
    return probs / probs.sum()


def _test(tokens: int, counts: np.ndarray, probs: np.ndarray, seed: int) -> SampleTest:
    possible = (probs > 0) | (counts > 0)
    counts, probs = counts[possible], probs[possible] / probs.sum()
    noise = np.random.default_rng(seed)
    samples = [Distances.between(noise.multinomial(int(counts.sum()), probs), probs) for _ in range(2)]
    distances = Distances.between(counts, probs)
    tested = chi_square(counts, probs), smallest_caught(counts, probs, CAUGHT)
    return SampleTest(tokens, len(probs), distances, (samples[0], samples[1]), *tested)
