"""The second promise: the distribution of a text with drafts is the target's, by either rule.

By full enumeration, and by chi-square on sampled runs. And the harness catches the mistakes of public implementations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from specdemo.decoding.batch import decode
from specdemo.decoding.events import Event
from specdemo.decoding.loop import Decoding
from specdemo.decoding.rule import Rule
from specdemo.drafters.names import DRAFTERS
from specdemo.racing.race import decoding_of, rule_for
from specdemo.settings import MATCH, MAX_NODES, REJECTION, RULES, Settings
from specdemo.studies.rules import NoiseUsedTwice
from specdemo.tokens import TokenKind
from tests.harness import enumeration, mistakes
from tests.harness.doubles import (
    HOSTILE,
    HOSTILE_TREES,
    PROMPT,
    VOCAB,
    Doubtful,
    Planting,
    Renumbering,
    Scripted,
    Together,
    draft_in_turn,
    ids_of,
    oracle,
    random_table,
    rounds_of,
)
from tests.harness.enumeration import VerifyFn, distance, emitted_distribution
from tests.harness.grammar import END, GRAMMAR, as_on_a_gpu, may_follow
from tests.harness.mistakes import HOT, MISTAKES, SLIGHT, Wrong
from tests.harness.texts import p_of_pairs, p_value, true_texts
from tests.harness.toys import TableToy, certain_toy

EXACT = 1e-12  # in float64
ROUNDED = 1e-6  # where a drafter's own distribution is in float32
DOUBLE = {"none", "prompt-lookup", "suffix", "draft-model", "layer-skip"}  # what these do in float64 stays in float64
DRAWING = ["draft-model", "ngram", "eagle"]  # one of each kind of drawn draft, every day
BRANCHING = [name for name, entry in DRAFTERS.items() if entry.branches]

asked = partial(Settings, rule=REJECTION)
CHAINS = [
    asked(temperature=0, k=2, max_new_tokens=4),
    asked(temperature=0, k=3, max_new_tokens=6),
    EVERY_KIND := asked(temperature=1, k=2, max_new_tokens=4),
    asked(temperature=0.7, k=1, max_new_tokens=3),
    asked(temperature=1.5, k=1, max_new_tokens=3),
    NARROW := asked(temperature=0.7, k=2, max_new_tokens=4, top_p=0.8),
    FEW := asked(temperature=HOT, k=2, max_new_tokens=4, top_k=2),
    LONG := asked(temperature=1.0, k=3, max_new_tokens=5, top_k=2),
    asked(temperature=1.5, k=1, max_new_tokens=3, top_k=3, top_p=0.9),
]
TREES = [
    TREE := asked(temperature=1, k=6, max_new_tokens=4, tree=True),
    asked(temperature=0.7, k=6, max_new_tokens=3, tree=True),
    asked(temperature=1.5, k=6, max_new_tokens=4, top_k=2, tree=True),
    asked(temperature=0, k=6, max_new_tokens=6, tree=True),
]
MASKED = [
    asked(temperature=1, k=2, max_new_tokens=4, grammar=GRAMMAR),
    asked(temperature=0.7, k=3, max_new_tokens=5, grammar=GRAMMAR),
    asked(temperature=1.5, k=2, max_new_tokens=4, top_k=2, grammar=GRAMMAR),
    asked(temperature=0.8, k=2, max_new_tokens=4, top_p=0.8, grammar=GRAMMAR),
]
AHEAD = asked(k=1, temperature=1.0, max_new_tokens=4, ahead=1)


def label(value: Any) -> str | None:
    if not isinstance(value, Settings):
        return None
    given = (f"{name}={getattr(value, name)}" for name in ("k", "temperature", "top_k", "top_p", "ahead"))
    return ",".join([*given, *["tree"] * value.tree])


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TableToy:
    return certain_toy(tmp_path_factory.mktemp("ngram"))


@pytest.fixture(scope="module")
def masked(toy: TableToy) -> TableToy:
    """A target that may write anything, and drafters that know little of it."""
    target = random_table(1)
    near = 0.5 * target + 0.5 * random_table(2, support=2)
    changed = replace(toy, target=target, draft_model=near, early=random_table(3))
    return replace(changed, eos_ids=frozenset({END}))


def by_name(toy: Any, name: str) -> Callable[[Rule], Decoding]:
    """A decoding as a race makes it."""
    return lambda rule: decoding_of(toy, name, PROMPT, rule, None)


def scripted(
    toy: Any, make: Callable[[], Scripted], eos_ids: frozenset[int] = frozenset()
) -> Callable[[Rule], Decoding]:
    return lambda rule: Decoding(toy.target_runner(32 + MAX_NODES), make(), PROMPT, rule, eos_ids)


def true_of(toy: TableToy, settings: Settings, eos: int = -1) -> dict[tuple[int, ...], float]:
    eos, allowed = (END, may_follow) if settings.grammar else (eos, None)
    return true_texts(toy.target, PROMPT, settings.max_new_tokens, settings, eos, allowed)


def error(toy: TableToy, make: Callable[[Rule], Decoding], settings: Settings, eos: int = -1, **more: Any) -> float:
    """The largest error in the probability of a text, over every run that can be."""
    emitted = emitted_distribution(make, settings, **more)
    assert "test" in more or sum(emitted.values()) == pytest.approx(1, abs=EXACT)
    return distance(emitted, true_of(toy, settings, eos))


# Enumeration -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, marks=pytest.mark.slow if settings is LONG and name not in DRAWING else ())
        for name in DRAFTERS
        for settings in CHAINS
    ],
    ids=label,
)
def test_every_drafter_emits_the_targets_distribution(toy: TableToy, name: str, settings: Settings) -> None:
    kinds: set[tuple[int, TokenKind]] = set()

    def note(events: list[Event]) -> None:
        kinds.update((place, token.kind) for event in rounds_of(events) for place, token in enumerate(event.emitted))

    assert error(toy, by_name(toy, name), settings, seen=note) < (EXACT if name in DOUBLE else ROUNDED)
    if settings is EVERY_KIND and name != "none":
        failed = [(place, kind) for place in range(2) for kind in (TokenKind.ACCEPTED, TokenKind.RESAMPLED)]
        assert kinds >= {*failed, (2, TokenKind.BONUS)}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("settings", TREES, ids=label)
@pytest.mark.parametrize("name", BRANCHING)
def test_every_drafter_of_trees_does(toy: TableToy, name: str, settings: Settings, rule: str) -> None:
    assert error(toy, by_name(toy, name), replace(settings, rule=rule)) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_remembers_earlier_answers_does(toy: TableToy, rule: str) -> None:
    remembering = replace(toy, remembered=[[*PROMPT, 0, 1, 2, 3], [*PROMPT, 1, 1]])
    assert error(remembering, by_name(remembering, "suffix"), replace(TREE, rule=rule)) < EXACT


@pytest.mark.sampled(5)
@pytest.mark.parametrize("masked_q", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("settings", MASKED, ids=label)
def test_under_a_grammar_it_is_that_of_the_masked_target(
    masked: TableToy, name: str, settings: Settings, masked_q: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not masked_q:
        as_on_a_gpu(monkeypatch)
    assert error(masked, by_name(masked, name), settings) < (EXACT if name in DOUBLE else ROUNDED)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_draft_model_with_another_tokenizer_leaves_it(toy: TableToy, temperature: float, k: int) -> None:
    other, kinds = replace(toy, translator=Renumbering()), set[TokenKind]()

    def note(events: list[Event]) -> None:
        kinds.update(token.kind for event in rounds_of(events) for token in event.emitted)

    settings = asked(temperature=temperature, k=k, max_new_tokens=4)
    assert error(other, by_name(other, "draft-model"), settings, seen=note) < EXACT
    assert len(kinds) > 1


@pytest.mark.parametrize("draft_vocab", [VOCAB - 1, VOCAB + 2])
def test_a_draft_model_with_a_vocabulary_of_another_size_leaves_it(toy: TableToy, draft_vocab: int) -> None:
    settings = asked(temperature=1, k=1, max_new_tokens=3, top_k=2)
    table = random_table(6, vocab=VOCAB + 2)[..., :draft_vocab]  # it may read any token, and writes its own
    other = replace(toy, draft_model=table)
    assert error(other, by_name(other, "draft-model"), settings) < EXACT


@pytest.mark.parametrize("script", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("settings", [CHAINS[0], EVERY_KIND, NARROW], ids=label)
def test_whatever_is_proposed_it_stays(toy: TableToy, script: Callable, settings: Settings) -> None:
    assert error(toy, scripted(toy, lambda: Scripted(script)), settings) < EXACT


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("name", "settings", "eos"),
    [
        *((name, settings, -1) for name in HOSTILE_TREES for settings in TREES),
        ("any", TREE, 1),  # a drafted child ends the text
    ],
    ids=label,
)
def test_whatever_a_tree_holds_it_stays(toy: TableToy, name: str, settings: Settings, eos: int, rule: str) -> None:
    make = scripted(toy, lambda: Planting(HOSTILE_TREES[name]), frozenset({eos}))
    assert error(toy, make, replace(settings, rule=rule), eos) < EXACT


def test_the_first_token_follows_it() -> None:
    other = TableToy(target=random_table(4))
    settings = asked(temperature=0.8, k=3, max_new_tokens=1)
    assert error(other, scripted(other, lambda: Scripted(lambda context, k: [0])), settings) < EXACT


def test_it_stays_when_texts_end_early(toy: TableToy) -> None:
    ending = replace(toy, eos_ids=frozenset({2}))
    assert error(ending, by_name(ending, "draft-model"), EVERY_KIND, eos=2) < EXACT


@pytest.mark.slow
def test_it_stays_whatever_is_decoded_beside(toy: TableToy) -> None:
    """Beside one text that ends sooner, one that ends later and one that fails."""
    shared = replace(toy, together=Together())

    def beside() -> Iterator[Decoding]:
        for make, settings in (
            (lambda: oracle([], 0), Settings(k=1, max_new_tokens=1)),
            (lambda: oracle([], 0), Settings(k=1, max_new_tokens=5)),
            (lambda: Doubtful(lambda _, k: [1] * k), replace(EVERY_KIND, rule=MATCH)),
        ):
            yield scripted(shared, make)(rule_for(settings))

    assert error(shared, by_name(shared, "draft-model"), EVERY_KIND, beside=lambda: [*beside()]) < EXACT
    assert max(shared.together.sizes) > 1  # type: ignore[union-attr]


# Sampled runs ----------------------------------------------------------------------------------------------------

RULE = Callable[[Settings], Rule]
SAMPLED_GRAMMAR = asked(temperature=0.9, k=3, max_new_tokens=6, grammar=GRAMMAR)


def sampled(toy: Any, name: str, settings: Settings, texts: int, make_rule: RULE = rule_for) -> list[list[int]]:
    """Texts of as many seeds."""
    seeded = (replace(settings, seed=seed) for seed in range(texts))
    return [ids_of(decode(decoding_of(toy, name, PROMPT, make_rule(each), None))) for each in seeded]


def p_of_long(toy: TableToy, name: str, make_rule: RULE = rule_for, rule: str = REJECTION) -> float:
    settings = Settings(temperature=0.9, k=2, max_new_tokens=120, rule=rule)
    return p_of_pairs(toy.target, PROMPT, sampled(toy, name, settings, 20, make_rule), settings.temperature)


def p_of_short(toy: TableToy, name: str, settings: Settings, texts: int, make_rule: RULE = rule_for) -> float:
    found = Counter(map(tuple, sampled(toy, name, settings, texts, make_rule)))
    return p_value(found, true_of(toy, settings))


# Under the match rule the text with a drafter is that of the target alone, token for token: see `test_texts`.
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("none", MATCH),
        (DRAWING[0], REJECTION),
        *(pytest.param(name, REJECTION, marks=pytest.mark.slow) for name in DRAFTERS if name != DRAWING[0]),
    ],
)
def test_sampled_runs_follow_the_targets_distribution(toy: TableToy, name: str, rule: str) -> None:
    assert p_of_long(toy, name, rule=rule) > 1e-4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("draft-model", AHEAD), ("layer-skip", AHEAD), ("draft-model", replace(AHEAD, k=2))],
    ids=label,
)
def test_sampled_runs_with_drafts_ahead_do(
    toy: TableToy, name: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_in_turn(monkeypatch)
    assert p_of_short(toy, name, settings, 400) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("masked_q", [True, False])
def test_sampled_runs_under_a_grammar_do(masked: TableToy, masked_q: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not masked_q:
        as_on_a_gpu(monkeypatch)
    assert p_of_short(masked, "draft-model", SAMPLED_GRAMMAR, 1000) > 1e-4


# The harness catches mistakes ------------------------------------------------------------------------------------

WARM = asked(temperature=1, k=1, max_new_tokens=3)
CAUGHT = {
    **{mistake: ("draft-model", FEW, wrong) for mistake, wrong in MISTAKES.items()},
    "prompt lookup resampled from p": ("prompt-lookup", EVERY_KIND, MISTAKES["resampled from p"]),
    **{mistake: ("draft-model", WARM, wrong) for mistake, wrong in SLIGHT.items()},
}


def test_the_rule_written_in_plain_python_is_exact(toy: TableToy) -> None:
    assert error(toy, by_name(toy, "draft-model"), FEW, test=mistakes.rule()) < EXACT


@pytest.mark.parametrize(("name", "settings", "wrong"), CAUGHT.values(), ids=CAUGHT.keys())
def test_the_enumeration_catches(toy: TableToy, name: str, settings: Settings, wrong: VerifyFn) -> None:
    assert error(toy, by_name(toy, name), settings, test=wrong) > 1e-3


def test_the_enumeration_catches_greedy_accepted_by_the_full_softmax(
    toy: TableToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enumeration, "probabilities", lambda logits, settings: logits.softmax(-1))
    argmax = mistakes.argmax_of
    wrong = mistakes.rule(unwarp=argmax, left=lambda p, q: p, bonus=argmax)
    assert error(toy, by_name(toy, "draft-model"), CHAINS[0], test=wrong) > 1e-3


@pytest.mark.parametrize("naive", [mistakes.masked_afterwards, mistakes.forbidden_dropped])
def test_the_enumeration_catches_naive_grammars(
    masked: TableToy, naive: VerifyFn, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    assert error(masked, by_name(masked, "draft-model"), MASKED[0], test=naive) > 1e-3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mistake", ["accepted if p exceeds q", "resampled from p", "bonus by argmax"])
def test_chi_square_catches(toy: TableToy, mistake: str) -> None:
    assert p_of_long(toy, "draft-model", lambda settings: Wrong(settings, MISTAKES[mistake])) < 1e-6


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [mistakes.Reseeded, mistakes.Shared, NoiseUsedTwice])
def test_chi_square_catches_random_numbers_that_are_used_again(toy: TableToy, kind: type[Rule]) -> None:
    assert p_of_long(toy, "draft-model", kind) < 1e-6


@pytest.mark.slow
def test_chi_square_catches_a_naive_grammar(masked: TableToy) -> None:
    assert p_of_short(masked, "draft-model", SAMPLED_GRAMMAR, 1000, mistakes.Unmasked) < 1e-6


def test_likely_children_tested_by_a_ratio_are_caught(toy: TableToy) -> None:
    """The classic mistake: top-k children are not drawn from q, so min(1, p / q) is no test of them."""
    children = scripted(toy, lambda: Planting(lambda *_: ([0, 1], [-1, -1])))
    assert error(toy, children, TREE, test=mistakes.children_by_ratio) > 1e-3
    seeded = (replace(TREE, seed=seed) for seed in range(400))
    texts = (ids_of(decode(children(Wrong(each, mistakes.children_by_ratio)))) for each in seeded)
    assert p_value(Counter(map(tuple, texts)), true_of(toy, TREE)) < 1e-6
