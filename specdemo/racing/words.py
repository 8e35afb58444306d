"""All sentences on a race: a table of the conditions under which each is said.

A slot has rows in an order, and the first whose condition holds is said; of some slots all are. Conditions look at
facts: a `LaneVerdict`, the `Texts` of a badge, an `Outcome`, or what else the slot's user hands in. In a sentence
`{name:format}` is what another slot says of the same facts, or one of these facts, in a format of `formatted`. Where it
is empty, the space before it goes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from ..formats import formatted
from ..settings import MATCH
from ..tokens import DraftOutcome, FinishReason, TokenKind
from .verdict_words import VERDICT, Row


def sentence(slot: str, facts: Any) -> str:
    """The sentence of the first row whose condition holds; "" if none does."""
    return next((_filled(row, facts) for row in TABLE[slot].values() if _holds(row, facts)), "")


def sentences(slot: str, facts: Any) -> dict[str, str]:
    """The sentences of all rows whose conditions hold, by row name; empty ones are left out."""
    found = {name: _filled(row, facts) for name, row in TABLE[slot].items() if _holds(row, facts)}
    return {name: words for name, words in found.items() if words}


def _holds(row: Row, facts: Any) -> bool:
    return not isinstance(row, tuple) or bool(row[0](facts))


def _filled(row: Row, facts: Any) -> str:
    words = row[1] if isinstance(row, tuple) else row
    if not isinstance(words, str):
        return words(facts)
    parts = []
    for before, name, form, _ in _Filling().parse(words):
        value = "" if name is None else formatted(_Filling().get_field(name, (), facts)[0], form or "", "")
        parts.append(f"{before if value or name is None else before.removesuffix(' ')}{value}")
    return "".join(parts).lstrip()


class _Filling(Formatter):
    def get_value(self, key: Any, args: Any, facts: Any) -> Any:
        return sentence(key, facts) if key in TABLE else getattr(facts, key)


TABLE: Mapping[str, Mapping[str, Row]] = {
    **VERDICT,
    # An `Outcome`: all drafted lanes of a race
    "race": {
        "busy": (lambda o: o.busy, "{best.finding}"),
        "one": (lambda o: len(o.verdicts) == 1, "{best.finding}"),
        "several": (lambda o: o.verdicts, "The fastest lane is {fastest}{tied with}. {best.finding} {more pass}"),
    },
    "tied with": {"": (lambda o: o.tied, ", tied with {tied}")},
    "more pass": {
        "": (
            lambda o: o.most_apt != o.fastest,
            "{most_apt} has more guesses accepted ({apt_rate:.0%} of those tested), but takes longer for each token.",
        ),
    },
    "race headline": {
        "busy": (lambda o: o.busy, ""),
        "one": (lambda o: len(o.verdicts) == 1 and o.speed_up, "{best.headline}"),
        "several": (lambda o: o.speed_up, "{fastest}: {best.headline}"),
    },
    "badge of readers": {
        "so far": (lambda o: o.stopped, "So far {all readers} get exactly the text that they get without the drafter."),
        "both": (lambda o: o.readers == 2, "Both readers get exactly the text that they get without the drafter."),
        "": "All {readers} readers get exactly the text that they get without the drafter.",
    },
    "all readers": {"both": (lambda o: o.readers == 2, "both readers"), "": "all {readers} readers"},
    # The `Texts` of a drafted lane and of the target alone
    "badge title": {
        "nothing": (lambda t: not t.mark, ""),
        "servers": (lambda t: t.mark == "chance" and t.is_of_servers, "{same or not}"),
        "chance": (lambda t: t.mark == "chance", "{same or not}, same distribution"),
        "so far": (lambda t: t.mark == "same" and t.stopped, "Same text so far"),
        "same": (lambda t: t.mark == "same", "Same text, word for word"),
        "": "First difference at token {number}",
    },
    "same or not": {"same": (lambda t: t.is_same, "Same text"), "": "Different text"},
    "badge margin": {
        "": (lambda t: t.mark == "differs" and t.comparison.margin is not None, "{comparison.margin:gap} apart"),
    },
    "badge words": {
        "nothing": (lambda t: not t.mark, "There is nothing to compare yet."),
        "servers": (
            lambda t: t.mark == "chance" and t.is_of_servers,
            "Each server draws random numbers of its own, so above temperature 0 the texts {by chance}. Whether both "
            "draw from the same distribution cannot be seen in one text.",
        ),
        "chance": (
            lambda t: t.mark == "chance",
            "Rejection sampling draws fresh random numbers in each lane, from the same distribution, so the texts "
            "{by chance}.",
        ),
        "one token": (
            lambda t: t.mark == "same" and t.both == 1,
            "The one token is exactly that of the target alone. {same when sampled} {exact by test}",
        ),
        "same": (
            lambda t: t.mark == "same",
            "{how many} {both} tokens are exactly those that the target alone wrote. {same when sampled} "
            "{exact by test}",
        ),
        "": "{same draws} {same up to} {why different} {exact by test}",
    },
    "by chance": {"same": (lambda t: t.is_same, "could differ, though these do not"), "": "differ by chance"},
    "how many": {"so far": (lambda t: t.stopped, "The first"), "": "All"},
    "same when sampled": {
        "": (
            lambda t: t.settings.temperature > 0,
            "Both lanes use the same random draws, so the text is the same above temperature 0 too.",
        ),
    },
    "exact by test": {
        "replaced": (lambda t: t.replaced, "{replaced}"),
        "": (
            lambda t: t.tested_rows,
            "The engine is exact to the bit in passes of up to {tested_rows} rows: tested on the machine that ran it.",
        ),
    },
    "same draws": {"": (lambda t: t.settings.temperature > 0, "Both lanes use the same random draws.")},
    "same up to": {
        "one": (lambda t: t.place == 1, "The texts are the same for 1 token."),
        "": "The texts are the same for {place} tokens.",
    },
    "why different": {
        "tie": (
            lambda t: t.is_near_tie,
            "There the two candidate tokens were {comparison.margin:gap} apart for the target: a near-tie. This engine "
            "is not exact to the bit. In {dtype} the last digits of a logit depend on how many tokens a pass reads, so "
            "either token can win.",
        ),
        "no tie": (
            lambda t: t.comparison.margin is not None,
            "There the two candidate tokens were {comparison.margin:gap} apart for the target, which is more than "
            "rounding explains. Please report this.",
        ),
        "servers": (
            lambda t: t.is_of_servers,
            "The servers do not report how close the two candidate tokens were there.",
        ),
        "exact": (
            lambda t: t.is_exact,
            "This engine is exact to the bit, so rounding does not explain that. Please report this.",
        ),
    },
    # `FirstGuesses` of a published head, and the `Ending` of a text with a grammar
    "first guesses": {
        "": (
            lambda g: g.are_few,
            "Only {share:.0%} of the first guesses of this {head} head pass, where {usual[0]:.0%} to {usual[1]:.0%} "
            "are usual. Likely causes, in this order: {causes}.",
        ),
    },
    "ending": {
        "": (
            lambda e: e.is_cut_short,
            "The text does not satisfy the schema or grammar, because it ends in the middle: {why cut}.",
        ),
    },
    "why cut": {
        "limit": (lambda e: e.reason == FinishReason.LENGTH, "{tokens} new tokens were too few"),
        "": "a stop string ended it",
    },
    # A round, a `Guess` and a written `Token`, see `explained`
    "round": {
        "unknown": (
            lambda r: not r.drafted and r.last is TokenKind.UNKNOWN,
            "The server does not say how many passes wrote these tokens, nor what was guessed.",
        ),
        "no draft": (lambda r: not r.drafted, "{wrote}: nothing was guessed."),
        "": "{wrote}: it accepted {event.accepted} of {drafted} guesses {and last}.",
    },
    "wrote": {
        "one": (lambda r: r.written == 1, "One pass of the target wrote 1 token"),
        "": "One pass of the target wrote {written} tokens",
    },
    "and last": {
        "resampled": (lambda r: r.last is TokenKind.RESAMPLED, "and corrected the next one"),
        "bonus": (lambda r: r.last is TokenKind.BONUS, "and added a bonus"),
    },
    "guess": {
        "untested": (
            lambda g: g.token.outcome is DraftOutcome.UNTESTED,
            "Not tested: it comes after a rejected guess, or is on another branch.",
        ),
        "likeliest": (lambda g: g.settings.temperature == 0, "It is {not} the target's likeliest token here."),
        "match": (
            lambda g: g.settings.rule == MATCH,
            "The target drew {this} token here, with the random numbers of this position.",
        ),
        "unknown": (lambda g: g.least is None, "It {passed} the test of rejection sampling."),
        "": "The number drawn, {token.draw:.3f}, is {not} below min(1, p / q) = {least:.3f}.",
    },
    "not": {"": (lambda g: not g.has_passed, "not")},
    "this": {"": (lambda g: g.has_passed, "this"), "other": "another"},
    "passed": {"": (lambda g: g.has_passed, "passed"), "failed": "failed"},
    "origin": {
        "accepted": (lambda t: t.kind is TokenKind.ACCEPTED, "A guess that the target accepted."),
        "resampled": (
            lambda t: t.kind is TokenKind.RESAMPLED,
            "The target's own token, in place of the rejected guess.",
        ),
        "bonus": (
            lambda t: t.kind is TokenKind.BONUS,
            "All guesses were accepted. The same pass also computed the token after them, so this one is free.",
        ),
        "target": (
            lambda t: t.kind is TokenKind.TARGET,
            "Nothing was guessed here: the target wrote this token alone.",
        ),
        "": "The server does not say where this token came from.",
    },
}
