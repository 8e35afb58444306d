"""What an examination means: its figures, the answer, a verdict in words, and the flag to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, zip_longest
from operator import mul
from typing import TYPE_CHECKING, Any

from ..formats import formatted
from ..racing.bandwidth import NOWHERE
from ..racing.busy import Pace
from ..racing.compare import NEAR_TIE
from ..racing.figures import EVEN, alpha_for, speeds_by_k
from ..racing.words import sentence
from ..servers.flags import FLAGS, k_flag
from ..settings import AUTO
from .summaries import (
    ACCEPTANCE_RATE,
    TOKENS_PER_ROUND,
    Figures,
    Runs,
    average,
    cell,
    mean,
    rate,
    share,
    summarise,
    total,
)

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
        positions: for each position of a draft, the number of drafts and of guesses tested and accepted there;
            `conditional` is accepted / tested, `unconditional` accepted / drafts.
        tokens_per_round: the last token of each round, which is the target's own, included.
        often: the share of rounds with a draft.
        round: milliseconds of a mean round and of one of the baseline; `cost` is their ratio; the parts of a round if
            known.
        break_even: how many `tokens_per_round` make it as fast as the baseline, and which share of tested guesses
            (`alpha`) would do that at equal rates for all positions.
        speed_up: over prompts of eight kinds, see `racing.figures.ratio_of_speeds`, with a bootstrap interval.
        texts: how many texts were compared, how many are the same, and where the others part.
        adapts: whether K changes from round to round.
        pace: of the target alone over all texts; if the machine is busy, there is no answer.
        best_k: the K with the most tokens a second by these figures, 0 for none; None if they do not tell.

    Args:
        looks: how often the interval of the speed-up is looked at before one is acted on; it is wider for it.
        environment: has the `best_passes`; that of a server is not known.
    """

    def __init__(self, examination: Examination, looks: int = 1, environment: Mapping[str, Any] = NOWHERE) -> None:
        samples = [sample for sample in examination.samples if sample.context is None]
        usual = [sample.run for sample in samples]
        notes = dict.fromkeys(note for sample in samples for note in sample.with_drafts.notes)
        whole = cell(usual, {**WHOLE, "speed_up": mean("speed_up", looks)}, UNITS)
        self.engine = examination.with_drafts.facts
        self.baseline = examination.alone.facts if examination.alone else None
        self.plan = asdict(examination.plan)
        self.adapts = self.engine.get("k") == AUTO
        self.pace = Pace.of([sample.alone.stats for sample in samples if sample.alone], environment)
        self.speed_up = whole["speed_up"]
        self.tokens_per_round = whole["tokens_per_round"]
        self.often = whole["often"]
        self.positions = _positions(samples)
        self.round = cell(usual, ROUND, UNITS)
        cost = self.round["cost"].mean if self.round["cost"] else None
        self.break_even = {"tokens_per_round": cost, "alpha": _alpha(cost, self.often, len(self.positions))}
        self.kinds = summarise(usual, ("kind",), GROUP, UNITS)
        self.at_once = [*examination.at_once]
        runs = [sample.run for sample in examination.samples]
        self.contexts = summarise([run for run in runs if run["context"]], ("context",), GROUP, UNITS)
        self.texts = _texts(examination.samples)
        self.samples = [{name: run[name] for name in OF_SAMPLE} for run in runs]
        self.left_out = [*examination.left_out, *notes]
        self.best_k = _best_k(self._reached(), cost, self.often, whole["mean_draft"] if self.adapts else None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, the sentences first."""
        figures = {name: value for name, value in vars(self).items() if name != "pace"}
        return {"verdict": self.verdict, "advice": self.advice(), "busy": self.pace.busy, **figures}

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
        if len(self.samples) < LEAST_TEXTS or self.pace.busy:
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
        known = self.speed_up is not None and self.often != 0 and not self.pace.busy
        return " ".join([f"With {self.gain}."] * known + self.basis())

    @property
    def gain(self) -> str:
        """The speed-up as the end of a sentence."""
        who = self.engine.get("drafter", "speculation")
        return f"{who} the target is {formatted(self.speed_up, '.2f')} times as fast"

    def basis(self) -> list[str]:
        """What the speed-up rests on, or why there is none."""
        if self.pace.busy:
            return [sentence("busy", self)]
        if self.often == 0:
            return ["Nothing was drafted: speculation is off, or the drafter found nothing to draft."]
        tokens = f"A round writes {formatted(self.tokens_per_round, '.2f')} tokens"
        if self.speed_up is None:
            return [f"{tokens}; only the target alone shows whether that pays."]
        needed = self.break_even["tokens_per_round"]
        lines = [f"{tokens} and needs {needed:.2f} to break even."] * (needed is not None)
        return lines + [f"Speculation pays from a speed-up of {PAYS:g} on."] * (self.answer != YES)

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
            lines.append(f"A round of the target alone takes {round_['baseline_ms']:.1f} ms.")
        if (alpha := self.break_even["alpha"]) is not None:
            lines.append(f"At equal rates for all positions, accepting {alpha:.0%} of the tested guesses breaks even.")
        return lines

    def measured(self) -> list[str]:
        """What was measured, and how."""
        sides = [("With speculation", self.engine), ("Target alone", self.baseline)]
        settings = self.plan["settings"]
        return [
            *(f"{name}: {', '.join(f'{key} {value}' for key, value in side.items())}." for name, side in sides if side),
            f"Texts of {settings['max_new_tokens']} tokens at temperature {settings['temperature']:g}.",
            "The speed-up is measured after the first token. For requests at once it includes prompts and waiting.",
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
        lines += self.on_k()
        lines += self._on_cost()
        lines += self._on_load(flags.crowd)
        lines += self._on_texts()
        if self.baseline is None:
            lines.append(f"The target alone was not timed: start the same server without speculation ({flags.off}).")
        return lines

    def on_k(self) -> list[str]:
        """Another draft length that should be faster."""
        engine = str(self.engine["engine"])
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
                f"{last:.0%} of the drafts are accepted in full: try longer ones, K = {2 * now}: "
                f"{k_flag(engine, 2 * now)}."
            ]
        return []

    def _on_cost(self) -> list[str]:
        cost, tokens = self.round["cost"], self.tokens_per_round
        if cost is None or tokens is None or self.speed_up is None or self.speed_up.mean >= EVEN[0]:
            return []
        slow = cost.mean > tokens.mean > 1.5  # enough passes
        return ["The cause: " + ("a round takes too long." if slow else "too few guesses are accepted.")]

    def _on_load(self, flag: str) -> list[str]:
        lines = []
        slower = [row for row in self.at_once if row["speed_up"] is not None and row["speed_up"] < EVEN[0]]
        if slower and self.at_once[0]["speed_up"] is not None and self.at_once[0]["speed_up"] > EVEN[1]:
            lines.append(f"With {slower[0]['at_once']} or more requests at once speculation is slower: {flag}.")
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


def _often(runs: Runs) -> float | None:
    drafts, rounds = [run["drafts"] for run in runs], sum(run["rounds"] for run in runs)
    return min(1.0, sum(drafts) / rounds) if rounds and None not in drafts else None


UNITS = ("prompt",)
WHOLE: Figures = {
    "tokens_per_round": TOKENS_PER_ROUND,
    "often": _often,
    "mean_draft": share(lambda run: run["drafted"] or 0, "drafts"),
}
ROUND: Figures = {
    "ms": share("ms", "rounds"),
    "baseline_ms": share("baseline_ms", "baseline_rounds"),
    "cost": mean("cost"),
    **{name: share(name, "rounds") for name in ("draft_ms", "verify_ms", "other_ms")},
}
GROUP: Figures = {
    "texts": len,
    "prompt_tokens": average("prompt_tokens"),
    "speed_up": mean("speed_up"),
    "tokens_per_round": TOKENS_PER_ROUND,
    "acceptance_rate": ACCEPTANCE_RATE,
    "baseline_tokens_per_second": mean("baseline_tokens_per_second"),
}
OF_SAMPLE = (
    "prompt",
    "kind",
    "context",
    "tokens",
    "rounds",
    "drafts",
    "drafted",
    "tokens_per_second",
    "first_token_seconds",
    "baseline_tokens_per_second",
    "speed_up",
    "same_text",
)
OF_POSITION: Figures = {
    "drafts": total("drafts"),
    "tested": lambda runs: None if None in (tested := [run["tested"] for run in runs]) else sum(tested),
    "accepted": total("accepted"),
    "conditional": rate("accepted", "tested", 1.0),
    "unconditional": rate("accepted", "drafts", 1.0),
}


def _positions(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The texts are the units of the intervals: guesses of one text pass or fail together."""
    if any(s.with_drafts.places is None for s in samples):
        return []
    of_each = zip_longest(*(s.with_drafts.places or () for s in samples), fillvalue=(0, 0))
    runs = [
        {**s.run, "position": position, "tested": tested, "accepted": accepted}
        for position, places in enumerate(of_each, start=1)
        for s, (tested, accepted) in zip(samples, places, strict=True)
    ]
    rows = summarise(runs, ("position",), OF_POSITION, UNITS)
    return [row for row in rows if row["unconditional"] is not None]


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
