"""What a bench runs: our drafters, and the methods of others that `--against` names."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ..drafters.names import drafter_class
from ..models.loaded import Loaded
from ..racing.race import SPECULATIVE, drafters_of
from ..types import AUTO, BadInput
from . import hf, llamacpp
from .cases import TREE, Case

# K of transformers: some to find the best among where no number is given, and what its documentation uses.
TUNED_K, LOOKUP_K = (3, 5, 8), 10


def theirs(against: str) -> dict[str, str | None]:
    """The methods that `--against` names, each with the address given for it.

    Raises:
        BadInput: there is no such method, or it takes no address.
    """
    named: dict[str, str | None] = {}
    for words in filter(None, map(str.strip, against.split(","))):
        method, given, address = words.partition("=")
        if method not in {**hf.METHODS, **llamacpp.METHODS}:
            known = ", ".join([*hf.METHODS, *llamacpp.METHODS])
            raise BadInput(f"There is no method called {method!r} to compare with. Choose from: {known}.")
        if given and (method != llamacpp.LLAMA or not address.startswith(("http://", "https://"))):
            raise BadInput(f"{words!r}: only llama.cpp takes an address, and it begins with http:// or https://.")
        named[method] = address or None
    return named


def cases_of_theirs(loaded: Loaded, methods: Mapping[str, str | None], ks: list[int | str]) -> list[Case]:
    """What to run of others. A method that cannot run here is left out, and stderr says why."""
    numbers = [k for k in ks if k != AUTO and k != 0]
    tuned = [Case(hf.TUNED, "draft-model", k) for k in numbers or TUNED_K]
    cases: list[Case] = []
    for method, address in methods.items():
        served = method == llamacpp.LLAMA
        if reason := llamacpp.unavailable_reason(loaded, address) if served else hf.unavailable_reason(method, loaded):
            print(reason, file=sys.stderr)
        elif served:
            cases += llamacpp.cases(loaded, address, numbers)
        elif method == hf.ASSISTED:
            cases += [Case(method, "draft-model"), *tuned]
        elif method == hf.TUNED:
            cases += tuned
        elif method == hf.PROMPT_LOOKUP:
            cases += [Case(method, "prompt-lookup", k) for k in [*numbers, LOOKUP_K]]
        else:
            cases.append(Case(method))
    return list(dict.fromkeys(cases))


def cases_of_ours(
    loaded: Loaded, names: str, ks: list[int | str], rules: list[str], trees: Sequence[int | str] = ()
) -> list[Case]:
    """Each drafter with each K and rule, and with trees of these sizes if it branches.

    K = 0 is the target alone, which is run anyway.
    """
    drafters = drafters_of(loaded, names)
    cases = [Case(SPECULATIVE, name, k, rule) for name in drafters for k in ks for rule in rules if k != 0]
    branching = [name for name in drafters if drafter_class(name).branches]
    cases += [Case(TREE, name, nodes, rule) for name in branching for nodes in trees for rule in rules]
    return list(dict.fromkeys(cases))
