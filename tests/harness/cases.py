"""The table of the first promise: what is drafted, in which form, how it is sampled, for how many readers, under a
grammar, on which engine, and how the text ends.

Not every combination is a case: the forms and samplings meet each drafter on models given by a table, where a run takes
milliseconds, and the engines meet each drafter in a few forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import cycle, product
from typing import Any, NamedTuple

from specdemo.drafters.names import DRAFTERS
from specdemo.settings import AUTO, MAX_K, MAX_NODES

DRAFTING = [name for name in DRAFTERS if name != "none"]


class Form(NamedTuple):
    """The K of a draft, and whether it is a tree."""

    k: int | str
    tree: bool = False

    def __str__(self) -> str:
        return f"{'tree' if self.tree else 'chain'} {self.k}"


MIXED = Form(0)  # readers with a K of their own each, chains and trees beside each other
CHAINS, TREES = [Form(1), Form(3), Form(MAX_K)], [Form(1, True), Form(8, True), Form(MAX_NODES, True)]
FORMS = [*CHAINS, *TREES, Form(AUTO), Form(AUTO, True)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "top-p": {"temperature": 0.9, "top_p": 0.7},
    "top-k": {"temperature": 1.5, "top_k": 2},
}
ENDS = "limit", "eos", "stop", "context"
SHARED = "native", "fused", "graph", "ops", "table"  # engines whose passes read several texts
ENGINES = *SHARED[:3], "eager", "eager qwen3", "eager gpt2"
OTHER_TOKENS = "table, renumbered"  # a draft model with another tokenizer


@dataclass(frozen=True)
class Case:
    drafter: str
    form: Form
    sampling: str
    readers: int = 1
    grammar: bool = False
    end: str = "limit"
    engine: str = "table"

    def __str__(self) -> str:
        readers, grammar = f"{self.readers} readers" * (self.readers > 1), "grammar" * self.grammar
        parts = self.drafter, str(self.form), self.sampling, readers, grammar, self.end, self.engine
        return ", ".join(filter(None, parts))


def all_cases() -> Iterator[Case]:
    ends = cycle(ENDS[1:])
    for name, form, sampling in product(DRAFTING, FORMS, SAMPLINGS):
        yield Case(name, form, sampling, end=next(ends))
        yield Case(name, form, sampling)
    for name, form, sampling in product(DRAFTING, FORMS, ("greedy", "sampled")):
        yield Case(name, form, sampling, grammar=True)
    for name, engine, form, sampling in product(DRAFTING, ENGINES, (*CHAINS, Form(20, True)), ("greedy", "sampled")):
        yield Case(name, form, sampling, engine=engine, end=next(ends))
    for name, engine, readers, sampling in product(DRAFTERS, SHARED, (3, 16), ("greedy", "sampled")):
        yield Case(name, MIXED, sampling, readers, end=next(ends), engine=engine)
    for form, sampling in product((*CHAINS, Form(AUTO)), SAMPLINGS):
        yield Case("draft-model", form, sampling, end=next(ends), engine=OTHER_TOKENS)


# Of a table every n-th case is tested every day, and n has no factor in common with the number of values of an axis.
EVERY = 37
CASES = [case for case in all_cases() if not case.form.tree or DRAFTERS[case.drafter].branches]


def values(cases: list[Case]) -> dict[str, set[Any]]:
    """Of each axis, those that come up."""
    return {axis.name: {getattr(case, axis.name) for case in cases} for axis in fields(Case)}
