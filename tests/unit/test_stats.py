"""The figures, against events written out by hand, and the sentence."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.events import Event, Finished, Prefilled, Round
from specdemo.stats import Stats, counts_by_place, in_words, speed_up
from specdemo.types import DraftedToken, Fate, FinishReason, Token, TokenKind

A, R, U = Fate.ACCEPTED, Fate.REJECTED, Fate.UNTESTED


def round_(fates: list[Fate], emitted: int, draft: float, verify: float, seconds: float) -> Round:
    drafted = tuple(DraftedToken(0, fate, 0.5, 0.5, 0.5) for fate in fates)
    return Round(0, drafted, (Token(0, TokenKind.ACCEPTED, 0.5),) * emitted, draft, verify, seconds)


PREFILLED = Prefilled(5, Token(1, TokenKind.TARGET, 0.5), 0.4)
RUN: list[Event] = [
    PREFILLED,
    round_([A, A, R, U], 3, 0.02, 0.10, 0.13),
    round_([A, A], 3, 0.04, 0.12, 0.17),
    round_([], 1, 0.0, 0.10, 0.10),
    Finished(FinishReason.EOS),
]


def lane(
    rounds: int, emitted: int, seconds: float, fates: list[Fate], draft: float = 0.0, verify: float = 0.1
) -> Stats:
    """A lane of equal rounds whose prefill took no time."""
    prefilled = Prefilled(5, Token(1, TokenKind.TARGET, 0.5), 0.0)
    return Stats.of([prefilled, *[round_(fates, emitted, draft, verify, seconds)] * rounds])


def test_the_figures_of_a_run_written_out_by_hand() -> None:
    figures = Stats.of(RUN).as_dict()
    assert figures.pop("accepted_lengths") == {"2": 2}
    assert figures == pytest.approx(
        {
            "tokens": 8,
            "rounds": 3,
            "drafted": 6,
            "tested": 5,
            "accepted": 4,
            "seconds": 0.8,
            "ttft_seconds": 0.4,
            "draft_seconds": 0.06,
            "verify_seconds": 0.32,
            "other_seconds": 0.02,
            "prompt_tokens": 5,
            "finish_reason": "eos",
            "tokens_per_second": 10,
            "acceptance_rate": 4 / 5,
            "draft_efficiency": 4 / 6,
            "tokens_per_round": 7 / 3,
            "draft_cost": 0.03 / 0.11,
        }
    )


@pytest.mark.parametrize(("plain", "speculative"), [(14, 63), (127, 9)])
def test_lanes_that_end_at_different_places_are_compared_at_equal_length(plain: int, speculative: int) -> None:
    """Both read the prompt in 2.5 s, the drafter in 1 s; drafting then halves the time of a token."""

    def ended(rounds: int, emitted: int, first: float = 0.0) -> Stats:
        prefilled, fates = Prefilled(900, PREFILLED.token, 2.5), [A] * (emitted - 1)
        rows = [round_(fates, emitted, later, 0.1, later + 0.1) for later in (first, *[0.0] * (rounds - 1))]
        return Stats.of([prefilled, *rows, Finished(FinishReason.EOS)])

    lanes = ended(plain, 1), ended(speculative, 2, first=1.0)
    longest = max(lane.tokens for lane in lanes)
    ratio = (2.5 + 0.1 * (longest - 1)) / (3.5 + 0.05 * (longest - 1))
    assert speed_up(*lanes) == pytest.approx(ratio)
    words = in_words(*lanes)
    assert words.startswith(f"{ratio:.2f}x faster at equal length: 2.0 tokens per target pass")
    low, high = sorted((2.5 / (2.5 + 0.1 * (longest - 1)), 3.5 / (3.5 + 0.05 * (longest - 1))))
    reading = f"Reading the prompt, which drafting does not shorten, took {low:.0%} to {high:.0%} of the time"
    assert f". {reading}: 2.00x without it." in words
    assert words.endswith("So short a text tells little.") == (plain < 15)


def test_a_single_token_says_nothing_of_the_pace() -> None:
    ended = Finished(FinishReason.EOS)
    short = Stats.of([PREFILLED, ended])
    long = Stats.of([PREFILLED, round_([A, A], 3, 0.02, 0.1, 0.13), ended])
    assert speed_up(short, long) is None
    assert in_words(short, long) == in_words(short, short) == "A lane wrote a single token: too little to compare."
    assert speed_up(short, short) is None
    stopped = Stats.of([PREFILLED])
    assert in_words(stopped, stopped) == in_words(stopped, long) == "Nothing to compare yet."


def test_acceptance_is_of_the_tested_and_efficiency_of_the_drafted() -> None:
    stats = Stats.of([PREFILLED, round_([R, U, U, U], 1, 0.1, 0.1, 0.2), round_([A, R, U, U], 2, 0.1, 0.1, 0.2)])
    assert stats.acceptance_rate == 1 / 3
    assert stats.draft_efficiency == 1 / 8
    assert stats.accepted_lengths == {0: 1, 1: 1}


def test_tokens_per_round_leaves_out_the_token_of_the_prefill() -> None:
    assert Stats.of([PREFILLED, round_([], 1, 0, 0.1, 0.1)]).tokens_per_round == 1


def test_figures_that_do_not_exist_yet_are_none() -> None:
    names = (
        "tokens_per_second",
        "acceptance_rate",
        "draft_efficiency",
        "tokens_per_round",
        "draft_cost",
        "finish_reason",
    )
    fresh = Stats().as_dict()
    assert {name: fresh[name] for name in names} == dict.fromkeys(names)
    assert fresh["accepted_lengths"] == {}
    assert fresh["tokens"] == fresh["seconds"] == fresh["other_seconds"] == 0


def test_a_lane_whose_clock_never_moved_divides_by_nothing() -> None:
    stopped = Stats.of([Prefilled(1, PREFILLED.token, 0.0), round_([A], 2, 0.0, 0.0, 0.0)])
    assert stopped.tokens_per_second is None
    assert stopped.draft_cost is None
    assert in_words(stopped, stopped) == "Nothing to compare yet."
    assert "tokens per target pass" in in_words(
        lane(9, 1, 0.1, [], verify=0.0), lane(9, 2, 0.1, [A], draft=0.01, verify=0.0)
    )


def test_rounds_that_auto_left_without_a_draft_do_not_make_drafts_look_cheap() -> None:
    rounds = [round_([], 1, 1e-6, 0.1, 0.1)] * 9 + [round_([R, U], 1, 0.3, 0.12, 0.42)]
    stats = Stats.of([PREFILLED, *rounds * 5])
    assert stats.draft_cost == pytest.approx(0.3 / 0.12)
    plain = Stats.of([PREFILLED, *[round_([], 1, 0.0, 0.1, 0.1)] * 50])
    costs = "a draft, made in 5 of 50 rounds, costs 250% of a pass, and checking it makes a pass 20% longer"
    assert f"{costs}, so a round takes as long as 1.32 tokens of the target alone." in in_words(plain, stats)


def test_the_figures_after_every_event_are_those_of_the_events_so_far() -> None:
    running = Stats()
    for end, event in enumerate(RUN, start=1):
        running.add(event)
        assert running.as_dict() == Stats.of(RUN[:end]).as_dict()
        json.dumps(running.as_dict(), allow_nan=False)


def test_accepted_lengths_are_in_order_and_leave_empty_drafts_out() -> None:
    fates = [[A, A, A], [R, U], [], [A, R], [R]]
    stats = Stats.of([PREFILLED, *(round_(f, f.count(A) + 1, 0.1, 0.1, 0.2) for f in fates)])
    assert list(stats.as_dict()["accepted_lengths"].items()) == [("0", 2), ("1", 1), ("3", 1)]


def test_what_was_tested_and_accepted_at_each_place_is_counted_over_all_rounds() -> None:
    rounds = [round_(fates, 1, 0.1, 0.1, 0.2) for fates in ([A, R, U], [A, A], [], [R])]
    assert counts_by_place([PREFILLED, *rounds]) == [(3, 2), (2, 1), (0, 0)]
    assert counts_by_place([]) == []


def test_speed_up_is_the_ratio_of_tokens_a_second() -> None:
    assert speed_up(lane(9, 1, 0.1, []), lane(3, 3, 0.15, [A, A])) == pytest.approx((10 / 0.45) / (10 / 0.9))
    assert speed_up(Stats(), lane(3, 1, 0.1, [])) is None
    assert speed_up(lane(3, 1, 0.1, []), Stats()) is None


ALONE = lane(30, 1, 0.1, [])  # 31 tokens in 3 s


@pytest.mark.parametrize(
    ("speculative", "sentence"),
    [
        (
            lane(10, 3, 0.11, [A, A], draft=0.006),
            "2.73x faster: 3.0 tokens per target pass; a draft costs 6% of a pass.",
        ),
        (
            lane(10, 3, 0.135, [A, A], draft=0.0001, verify=0.13),
            "2.22x faster: 3.0 tokens per target pass; a draft costs under 1% of a pass, "
            "and checking it makes a pass 30% longer.",
        ),
        (
            lane(10, 3, 0.2, [A, A], draft=0.006),  # half of it is neither drafting nor checking
            "1.50x faster: 3.00 tokens per target pass; on average a round takes as long as 2.00 tokens of the "
            "target alone.",
        ),
        (
            lane(30, 1, 0.2, [R], draft=0.1),
            "Slower, 0.50x the speed of the target alone: 1.00 tokens per target pass; a draft costs 100% of a pass, "
            "so a round takes as long as 2.00 tokens of the target alone.",
        ),
        (
            lane(30, 1, 0.101, [R], draft=0.002),
            "No faster and no slower: 1.00 tokens per target pass; a draft costs 2% of a pass.",
        ),
        (
            lane(30, 1, 0.08, [R], draft=0.01),
            "1.25x faster: 1.00 tokens per target pass; a draft costs 10% of a pass; what is beyond 1.00x is chance.",
        ),
        (lane(30, 1, 0.1, []), "Nothing was drafted, so both lanes did the same work."),
        (
            lane(30, 1, 0.08, []),
            "Nothing was drafted, so both lanes did the same work; the 25% between them is chance.",
        ),
        (Stats(), "Nothing to compare yet."),
    ],
    ids=[
        *(
            "faster",
            "faster but a longer pass",
            "more than drafts and passes",
            "slower",
            "equal",
            "beyond what drafts explain",
        ),
        *("nothing drafted", "chance", "nothing yet"),
    ],
)
def test_the_sentence(speculative: Stats, sentence: str) -> None:
    assert in_words(ALONE, speculative) == sentence


def test_what_is_chance_is_no_speed_up() -> None:
    assert speed_up(ALONE, lane(30, 1, 0.08, [])) is None
    assert speed_up(ALONE, lane(30, 1, 0.08, [R])) == pytest.approx(1.25)


def raced(prompt: float, rounds: list[Round]) -> Stats:
    return Stats.of([Prefilled(5, PREFILLED.token, prompt), *rounds, Finished(FinishReason.LENGTH)])


def alone(tokens: int, prompt: float = 0.0) -> Stats:
    return raced(prompt, [round_([], 1, 0.0, 0.1, 0.1)] * (tokens - 1))


def test_a_few_passes_say_nothing_of_what_drafting_and_checking_cost() -> None:
    def drafting(checks: int, check: float) -> str:
        rows = [round_([], 1, 0.0, 0.1, 0.1)] * 12 + [round_([A, R], 2, 0.1, check, check + 0.1)] * checks
        return in_words(alone(13 + 2 * checks), raced(0.0, rows))

    assert drafting(4, 0.01).endswith(": 1.25 tokens per target pass; a draft was made in 4 of 16 rounds.")
    assert drafting(4, 0.5).endswith(
        ": 1.25 tokens per target pass; on average a round takes as long as 2.25 tokens of the target alone."
    )
    assert drafting(8, 0.5).endswith(
        ": 1.40 tokens per target pass; a draft, made in 8 of 20 rounds, costs 20% of a pass, and checking it makes a "
        "pass 400% longer, so a round takes as long as 3.00 tokens of the target alone."
    )


def test_a_short_race_is_told_to_be_short() -> None:
    rounds = [round_([A], 2, 0.004, 0.18, 0.19)] * 4
    told = in_words(alone(9, prompt=0.1), raced(0.21, rounds))
    assert told == (
        "Slower, 0.93x the speed of the target alone: 2.0 tokens per target pass. Reading the prompt took longer with "
        "the drafter, 11% to 22% of the time: 1.05x without it. So short a text tells little."
    )
    assert "short" in in_words(alone(15), raced(0.0, [round_([A], 2, 0.01, 0.1, 0.11)] * 7))
    assert "short" not in in_words(alone(17), raced(0.0, [round_([A], 2, 0.01, 0.1, 0.11)] * 8))


def test_a_long_prompt_explains_why_many_tokens_a_pass_gain_little() -> None:
    drafting = raced(6.0, [round_([A] * 7, 8, 0.001, 0.172, 0.175)] * 5)
    assert in_words(alone(41, prompt=6.0), drafting) == (
        "1.45x faster: 8.0 tokens per target pass; a draft costs under 1% of a pass, and checking it makes a pass 72% "
        "longer. Reading the prompt, which drafting does not shorten, took 60% to 87% of the time: 4.57x without it."
    )


TOLD = re.compile(
    r"(?:(?P<faster>[\d.]+)x faster|Slower, (?P<slower>[\d.]+)x the .* alone|No faster and no slower)"
    r"(?: at equal length)?: "
    r"(?P<tokens>[\d.]+) tokens per target pass"
    r"(?:; a draft(?:, made in (?P<drafts>\d+) of (?P<rounds>\d+) rounds,)? costs (?P<cost>\d+|under 1)% of a pass"
    r"(?:, and checking it makes a pass (?P<longer>\d+)% longer)?)?"
    r"(?:; a draft was made in \d+ of \d+ rounds)?"
    r"(?:(?:, so|; on average) a round takes as long as (?P<average>[\d.]+) tokens of the target alone)?"
    r"(?P<chance>; what is beyond [\d.]+x is chance)?\."
    r"(?: Reading the prompt(?:, which drafting does not shorten,)? took (?P<reading>[^:]+) of the time: "
    r"(?P<rest>[\d.]+)x without it\.)?"
    r"(?P<short> So short a text tells little\.)?"
)


@given(
    guesses=st.integers(1, 8),
    accepted=st.integers(0, 8),
    drafted=st.integers(1, 40),
    empty=st.integers(0, 40),
    costs=st.tuples(st.floats(0, 3), st.floats(0.8, 6), st.floats(0, 1)),
    prompts=st.tuples(st.floats(0, 9), st.floats(0, 9)),
    slow=st.integers(0, 3),
    plain_tokens=st.none() | st.integers(2, 80),
)
def test_the_sentence_adds_up(
    guesses: int,
    accepted: int,
    drafted: int,
    empty: int,
    costs: tuple[float, float, float],
    prompts: tuple[float, float],
    slow: int,
    plain_tokens: int | None,
) -> None:
    """What its figures give is the ratio that it states, or it names what else is in that: the prompt or chance.

    `costs` of a draft, a check and what else a round takes are in plain passes; `slow` rounds take ten times as long.
    """
    draft, check, other = (0.1 * cost for cost in costs)
    fates = [A] * min(accepted, guesses) + [R, *[U] * guesses][: guesses - min(accepted, guesses)]
    rows = [round_(fates, fates.count(A) + 1, draft, check, draft + check + other)] * drafted
    rows += [round_([], 1, 0.0, 0.1, 0.1 + other)] * empty
    rows[:slow] = [
        replace(row, verify_seconds=10 * row.verify_seconds, seconds=10 * row.seconds) for row in rows[:slow]
    ]
    lanes = [alone(plain_tokens or 1 + sum(len(row.emitted) for row in rows), prompts[0]), raced(prompts[1], rows)]
    ratio, words = speed_up(*lanes), in_words(*lanes)
    told = TOLD.fullmatch(words)
    assert told, words
    assert ratio is not None
    assert bool(told["short"]) == (min(lane.tokens for lane in lanes) < 16)
    if told["short"]:
        return

    tokens, base = float(told["tokens"]), float(told["rest"] or ratio)
    if told["chance"]:
        assert base > tokens
    elif told["average"]:
        assert tokens / float(told["average"]) == pytest.approx(base, rel=0.12)
        assert (tokens / float(told["average"]) - 1) * (base - 1) > 0 or abs(base - 1) < 0.025
    else:
        often = int(told["drafts"]) / int(told["rounds"]) if told["drafts"] else 1.0
        cost = 0.0 if told["cost"] in (None, "under 1") else int(told["cost"]) / 100
        passes = (1 + int(told["longer"] or 0) / 100) * (1 + cost) if told["cost"] else 1.0
        given_by_parts = tokens / (often * passes + 1 - often)
        assert given_by_parts == pytest.approx(base, rel=0.25), words
        assert (given_by_parts - 1) * (base - 1) > 0 or abs(given_by_parts - base) < 0.06, words

    if not told["rest"]:
        same_length = lanes[0].tokens == lanes[1].tokens
        assert not same_length or all(lane.prompt_seconds < 0.1 * lane.seconds for lane in lanes)
        assert (told["faster"], told["slower"]) != (None, None) or abs(base - 1) < 0.025
    elif "drafter" in told["reading"]:
        assert ("longer" in told["reading"]) == (lanes[1].prompt_seconds > lanes[0].prompt_seconds)
    else:
        assert 0.97 * min(base, 1) - 0.01 < ratio < 1.03 * max(base, 1) + 0.01
