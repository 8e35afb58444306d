"""What an examination means: its figures, the answer, a verdict in words, and the flag to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, zip_longest
from operator import mul
from typing import TYPE_CHECKING, Any

from ..formats import formatted
from ..racing.compare import NEAR_TIE
from ..racing.figures import EVEN, alpha_for, speeds_by_k
from ..servers.flags import FLAGS, k_flag
from ..settings import AUTO
from .statistics import Spread, geometric_mean, pooled_rate
from .tables import grouped

if TYPE_CHECKING:
    from .examination import Examination, Sample

YES, NO, UNCLEAR = "yes", "no", "unclear"
PAYS = 1.05  # a speed-up below is not worth a second model
LEAST_TEXTS = 5  # fewer give no answer
RARE = 0.25  # share of rounds with a draft below which the drafter is called rare
NEAR = NEAR_TIE["bfloat16"]  # of two logits: a server does not tell in what it computes
WORTH = 0.03  # how much faster another K must be by the model to be named


class Diagnosis:
    """What is known by one sample or more, ready for JSON (`as_dict`).

    Attributes:
        positions: for each position of a draft how many of the texts' drafts there were, how many guesses were tested
            and accepted there; `conditional` is accepted / tested, `unconditional` accepted / drafts.
        tokens_per_round: the last token of each round, which is the target's own, included.
        often: the share of rounds with a draft.
        round: milliseconds of a mean round, of one of the baseline, and `cost`, the first in the second; the parts of
            a round where they are known.
        break_even: how many `tokens_per_round` make it as fast as the baseline, and which share of tested guesses
            (`alpha`) would do that if all passed alike.
        speed_up: over prompts of eight kinds, see `racing.figures.ratio_of_speeds`, with a bootstrap interval.
        texts: how many texts were compared, how many are the same, and where the others part.
        adapts: whether K changes from round to round.
        best_k: the K with the most tokens a second by these figures, 0 for none; None if they do not tell.

    Args:
        looks: how often the interval of the speed-up is looked at before one is acted on; it is wider for it.
    """

    def __init__(self, examination: Examination, looks: int = 1) -> None:
        usual = [sample for sample in examination.samples if sample.context is None]
        kinds = grouped(usual, lambda sample: sample.prompt.category)
        longer = grouped((sample for sample in examination.samples if sample.context), lambda sample: sample.context)
        notes = dict.fromkeys(note for sample in usual for note in sample.with_drafts.notes)
        self.engine = examination.with_drafts.facts
        self.baseline = examination.alone.facts if examination.alone else None
        self.plan = asdict(examination.plan)
        self.adapts = self.engine.get("k") == AUTO
        self.speed_up = _speed_up(usual, looks)
        self.tokens_per_round = _tokens_per_round(usual)
        self.often = _often(usual)
        self.positions = _positions(usual)
        self.round = _round(usual)
        cost = self.round["cost"].mean if self.round["cost"] else None
        self.break_even = {"tokens_per_round": cost, "alpha": _alpha(cost, self.often, len(self.positions))}
        self.kinds = [_group({"kind": kind}, found) for kind, found in kinds.items()]
        self.at_once = [*examination.at_once]
        self.contexts = [_group({"context": length}, found) for length, found in longer.items()]
        self.texts = _texts(examination.samples)
        self.samples = [_sample(sample) for sample in examination.samples]
        self.left_out = [*examination.left_out, *notes]
        self.best_k = _best_k(self._reached(), cost, self.often, _mean_draft(usual) if self.adapts else None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, the sentences first."""
        return {"verdict": self.verdict, "advice": self.advice(), **vars(self)}

    def _reached(self) -> list[float]:
        """How often a draft passes to each position; if K adapts, one that is long enough to have it."""
        if not self.adapts:
            return [row["unconditional"].mean for row in self.positions]
        tested = [row["conditional"].mean if row["conditional"] else 0.0 for row in self.positions]
        return [*accumulate(tested, mul)]

    # --- in words

    @property
    def answer(self) -> str:
        """Whether speculation is at least `PAYS` times as fast: yes or no where the whole interval says so."""
        if len(self.samples) < LEAST_TEXTS:
            return UNCLEAR
        if self.often == 0:
            return NO
        speed = self.speed_up
        if speed is None or speed.low is None or speed.high is None:
            return UNCLEAR
        return YES if speed.low > PAYS else NO if speed.high < PAYS else UNCLEAR

    @property
    def verdict(self) -> str:
        """The figures that the answer rests on, in a few sentences."""
        if self.often == 0:
            return "Nothing was drafted: speculation is off, or the drafter found nothing to draft."
        tokens = f"A round writes {formatted(self.tokens_per_round, '.2f')} tokens"
        if self.speed_up is None:
            return f"{tokens}; only a baseline shows whether that pays."
        who, needed = self.engine.get("drafter", "speculation"), self.break_even["tokens_per_round"]
        lines = [f"With {who} it is {formatted(self.speed_up, '.2f')} times as fast."]
        lines += [f"{tokens} and needs {needed:.2f} to break even."] * (needed is not None)
        lines += [f"A speed-up that pays is one of {PAYS:g} or more."] * (self.answer != YES)
        return " ".join(lines)

    def facts(self) -> list[str]:
        """The other figures that are one number each, as sentences."""
        lines, round_ = [], self.round
        if self.often is not None:
            lines.append(f"Rounds with a draft: {self.often:.0%}.")
        if round_["ms"] is not None:
            parts = [("drafting", "draft_ms"), ("verifying", "verify_ms"), ("the rest", "other_ms")]
            split = ", ".join(f"{name} {round_[key]:.1f} ms" for name, key in parts if round_[key] is not None)
            lines.append(f"A round takes {round_['ms']:.1f} ms{f': {split}' if split else ''}.")
        if round_["cost"] is not None:
            cost = formatted(round_["cost"], ".2f")
            lines.append(f"One of the baseline takes {round_['baseline_ms']:.1f} ms, so a round costs {cost} of them.")
        if (alpha := self.break_even["alpha"]) is not None:
            lines.append(f"If all positions passed alike, {alpha:.0%} of the tested guesses would break even.")
        return lines

    def measured(self) -> list[str]:
        """What was measured, and how."""
        sides = [("With speculation", self.engine), ("Baseline", self.baseline)]
        settings = self.plan["settings"]
        return [
            *(f"{name}: {', '.join(f'{key} {value}' for key, value in side.items())}." for name, side in sides if side),
            f"Texts of {settings['max_new_tokens']} tokens at temperature {settings['temperature']:g}.",
            "The speed-up counts the text after the first token, that of requests at once all tokens and the waiting.",
            "Both sides took turns. Intervals are of 95%, by a bootstrap over prompts.",
        ]

    def advice(self) -> list[str]:
        """What to change, each with its flag, and what the texts show."""
        name = str(self.engine["engine"])
        flags = FLAGS[name]
        lines = []
        if self.often == 0:
            lines.append(f"To switch it on: {flags.on}.")
        elif self.often is not None and self.often < RARE and self.best_k != 0:
            words = f"Only {self.often:.0%} of the rounds had a draft. To draft more often: {flags.more_often}."
            lines.append(words)
        if not self.positions and self.often != 0:
            hint = f" Start it with {flags.more_reported} to know." if flags.more_reported else ""
            lines.append(f"What was accepted at each position is unknown.{hint}")
        lines += self._on_k(name)
        lines += self._on_cost()
        lines += self._on_load(flags.crowd)
        lines += self._on_texts()
        if self.baseline is None:
            lines.append(f"There is no baseline: start the same server without speculation ({flags.off}).")
        return lines

    def _on_k(self, engine: str) -> list[str]:
        if self.best_k is None or not self.positions or (self.adapts and self.best_k):
            return []
        now, best = len(self.positions), self.best_k
        if best == 0:
            return [f"No draft of up to {now} tokens would pay here: {FLAGS[engine].off}, or use another drafter."]
        if best < now:
            return [f"Shorter drafts should be faster, K = {best} instead of {now}: {k_flag(engine, best)}."]
        last = self.positions[-1]["unconditional"].mean
        if last > 0.5:
            return [
                f"{last:.0%} of the drafts pass up to their last position: try longer ones, K = {2 * now}: "
                f"{k_flag(engine, 2 * now)}."
            ]
        return []

    def _on_cost(self) -> list[str]:
        cost, tokens = self.round["cost"], self.tokens_per_round
        if cost is None or tokens is None or self.speed_up is None or self.speed_up.mean >= EVEN[0]:
            return []
        slow = cost.mean > tokens.mean > 1.5  # enough passes
        cause = "a round takes too long" if slow else "too few guesses pass"
        return [
            f"The cause: {cause}. A round takes as long as {cost.mean:.2f} rounds of the baseline and emits "
            f"{tokens.mean:.2f} tokens."
        ]

    def _on_load(self, flag: str) -> list[str]:
        lines = []
        slower = [row for row in self.at_once if row["speed_up"] is not None and row["speed_up"] < EVEN[0]]
        if slower and self.at_once[0]["speed_up"] is not None and self.at_once[0]["speed_up"] > EVEN[1]:
            lines.append(
                f"With {slower[0]['at_once']} or more requests at once it is slower than the baseline: {flag}."
            )
        known = [row for row in self.contexts if row["speed_up"] is not None]
        if len(known) > 1 and (drop := known[-1]["speed_up"].mean / known[0]["speed_up"].mean) < 0.9:
            lines.append(
                f"With prompts of {known[-1]['prompt_tokens']:,.0f} tokens the speed-up is {1 - drop:.0%} smaller than "
                f"with {known[0]['prompt_tokens']:,.0f}."
            )
        return lines

    def _on_texts(self) -> list[str]:
        compared, same = self.texts["compared"], self.texts["same"]
        if not compared:
            return []
        if same == compared:
            return [f"All {compared} texts are the same with and without speculation, token for token."]
        lines = [f"{compared - same} of {compared} texts differ."]
        for row in self.texts["differences"]:
            gap = row["margin"]
            near = f"the two tokens were {formatted(gap, 'gap')} of a logit apart there"
            if gap is None:
                why = "it is unknown how close the two tokens were there"
            elif gap <= NEAR:
                why = f"{near}, a near-tie that rounding can decide"
            else:
                why = f"{near}, more than rounding explains: report this"
            lines.append(f"{row['prompt']}: from token {row['token']} on; {why}.")
        return lines


# The figures -------------------------------------------------------------------------------------------------


def _tokens_per_round(samples: Sequence[Sample]) -> Spread | None:
    return pooled_rate([(len(found.tokens) - 1, found.rounds) for found in (s.with_drafts for s in samples)])


def _speed_up(samples: Sequence[Sample], looks: int = 1) -> Spread | None:
    return geometric_mean({s.prompt.id: [s.speed_up] if s.speed_up else [] for s in samples}, looks)


def _mean_draft(samples: Sequence[Sample]) -> float | None:
    drafts = sum(sample.with_drafts.drafts or 0 for sample in samples)
    return sum(sample.with_drafts.drafted or 0 for sample in samples) / drafts if drafts else None


def _often(samples: Sequence[Sample]) -> float | None:
    drafts, rounds = [s.with_drafts.drafts for s in samples], sum(s.with_drafts.rounds for s in samples)
    known = [count for count in drafts if count is not None]
    return min(1.0, sum(known) / rounds) if rounds and len(known) == len(drafts) else None


def _positions(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The texts are the units of the intervals: guesses of one text pass or fail together."""
    if any(s.with_drafts.places is None for s in samples):
        return []
    rows = []
    drafts = [s.with_drafts.drafts or 0 for s in samples]
    of_each = zip_longest(*(s.with_drafts.places or () for s in samples), fillvalue=(0, 0))
    for position, there in enumerate(of_each, start=1):
        tested, accepted = zip(*there, strict=True)
        known = None not in tested
        rows.append(
            {
                "position": position,
                "drafts": sum(drafts),
                "tested": sum(tested) if known else None,
                "accepted": sum(accepted),
                "conditional": pooled_rate([*zip(accepted, tested, strict=True)], 1.0) if known else None,
                "unconditional": pooled_rate([*zip(accepted, drafts, strict=True)], 1.0),
            }
        )
    return [row for row in rows if row["unconditional"] is not None]


def _round(samples: Sequence[Sample]) -> dict[str, Any]:
    def mean_ms(side: str, part: str = "") -> float | None:
        """Of a round, or of one part of it; None if that is unknown."""
        written = [found for s in samples if (found := getattr(s, side)) is not None and found.round_seconds]
        seconds = [getattr(f.stats, part) if part else f.round_seconds * f.rounds for f in written]
        rounds = sum(found.rounds for found in written)
        return None if not rounds or None in seconds else 1000 * sum(seconds) / rounds

    return {
        "ms": mean_ms("with_drafts"),
        "baseline_ms": mean_ms("alone"),
        "cost": geometric_mean({s.prompt.id: [s.cost] if s.cost else [] for s in samples}),
        "draft_ms": mean_ms("with_drafts", "draft_seconds"),
        "verify_ms": mean_ms("with_drafts", "verify_seconds"),
        "other_ms": mean_ms("with_drafts", "other_seconds"),
    }


def _alpha(cost: float | None, often: float | None, k: int) -> float | None:
    """The acceptance rate that pays, if all positions were alike (Leviathan et al., equation 1)."""
    if cost is None or not often or not k:
        return None
    # What a round with a draft costs, if the others cost what the baseline's do.
    return alpha_for(1 + (cost - 1) / often, k)


def _best_k(
    reached: Sequence[float], cost: float | None, often: float | None, mean_draft: float | None = None
) -> int | None:
    """The K up to that of the drafts with the most tokens a second, 0 for none.

    `reached` is how often a draft passes to each position. The cost of a round is taken to grow evenly with its draft,
    from that of a round of the baseline. The K in use is kept unless another is faster by `WORTH`. Where K adapts there
    is none in use, and a draft has `mean_draft` tokens.
    """
    if cost is None or not often or not reached:
        return None
    longest = len(reached)
    each = max(0.0, (cost - 1) / often / (mean_draft or longest))
    speeds = speeds_by_k(reached, [1 + each * k for k in range(longest + 1)])
    best = max(range(longest + 1), key=speeds.__getitem__)
    return best if mean_draft or speeds[best] > (1 + WORTH) * speeds[longest] else longest


def _group(of: dict[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    tested = [(s.with_drafts.stats.accepted, s.with_drafts.stats.tested) for s in samples]
    known = all(None not in pair for pair in tested)
    prompt = [s.with_drafts.stats.prompt_tokens for s in samples]
    speeds = {s.prompt.id: s.alone.stats.tokens_per_second for s in samples if s.alone}
    return {
        **of,
        "texts": len(samples),
        "prompt_tokens": sum(prompt) / len(prompt),
        "speed_up": _speed_up(samples),
        "tokens_per_round": _tokens_per_round(samples),
        "acceptance_rate": pooled_rate(tested, 1.0) if known else None,
        "baseline_tokens_per_second": geometric_mean({name: [speed] for name, speed in speeds.items() if speed}),
    }


def _texts(samples: Sequence[Sample]) -> dict[str, Any]:
    compared, differences = 0, []
    for sample in samples:
        if (found := sample.comparison) is not None:
            compared += 1
            if found.first_difference is not None:
                after = "" if sample.context is None else f" after {sample.context:,} tokens"
                name, token = f"{sample.prompt.id}{after}", found.first_difference + 1
                differences.append({"prompt": name, "token": token, "margin": found.margin})
    return {"compared": compared, "same": compared - len(differences), "differences": differences}


def _sample(sample: Sample) -> dict[str, Any]:
    written, alone = sample.with_drafts, sample.alone
    return {
        "prompt": sample.prompt.id,
        "kind": sample.prompt.category,
        "context": sample.context,
        "tokens": len(written.tokens),
        "rounds": written.rounds,
        "drafts": written.drafts,
        "drafted": written.drafted,
        "tokens_per_second": written.stats.tokens_per_second,
        "first_token_seconds": written.stats.ttft_seconds,
        "baseline_tokens_per_second": alone.stats.tokens_per_second if alone else None,
        "speed_up": sample.speed_up,
        "same_text": sample.comparison.identical if sample.comparison else None,
    }
