"""The ways to write a text that are compared: our drafters, and the methods of others that `--against` names."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from specdemo.drafters.names import DRAFTERS
from specdemo.errors import BadInput
from specdemo.racing.request import PLAIN, SPECULATIVE
from specdemo.servers.llamacpp_process import can_start
from specdemo.settings import AUTO, MATCH, one_of

if TYPE_CHECKING:
    from specdemo.models.loaded import Loaded

TREE = "tree"
OURS = (PLAIN, SPECULATIVE, TREE)

# transformers' generate: nothing else; with assistant_model, as it comes; with assistant_model and K guesses in every
# round, at any confidence; with prompt_lookup_num_tokens = K.
HF, ASSISTED, TUNED, LOOKUP = "hf", "hf-assisted", "hf-assisted-tuned", "hf-prompt-lookup"
COMPILED = "hf-compiled"  # with cache_implementation="static", for which transformers compiles the forward; on a GPU
# Its server on the same GGUF file, alone and with its own speculation.
LLAMA, NGRAM, DRAFTING = "llama.cpp", "llama.cpp-ngram", "llama.cpp-draft"
OPENVINO = "openvino"  # OpenVINO GenAI, on the same GGUF file
METHODS = HF, ASSISTED, LOOKUP, LLAMA, OPENVINO

# K of transformers: some to find the best among where no number is given, and what its documentation uses.
TUNED_K, LOOKUP_K = (3, 5, 8), 10
NGRAM_SIZES, NGRAM_K = (3, 5), 8  # of llama.cpp: words that are looked up, and how many are drafted then
DRAFT_K = 4  # of llama.cpp, where no number is given


@dataclass(frozen=True, slots=True)
class Case:
    """A way to write a text: a method, and its drafter, K and verification rule as far as it has them.

    The K of the method TREE is the number of tokens of a tree, or auto; in that of SPECULATIVE drafts are chains.
    """

    method: str
    drafter: str | None = None
    k: int | str | None = None
    rule: str | None = None


ALONE = Case(PLAIN, "none", 0, MATCH)


def named_commands(texts: Sequence[str], methods: Sequence[str] = ()) -> dict[Case, list[str]]:
    """The commands of servers, `NAME=COMMAND` each, by a case whose method has that name.

    Args:
        methods: what `--against` names, which a server must not be called.
    """
    commands: dict[Case, list[str]] = {}
    for text in texts:
        name, _, command = text.partition("=")
        case = Case(name.strip())
        if not case.method or "{target}" not in command:
            raise BadInput(f"A server is given as NAME=COMMAND, with {{target}} for the GGUF file: not {text!r}.")
        if case in commands or case.method in (*OURS, *methods, *(set(METHODS) - {LLAMA})):
            raise BadInput(f"The name {case.method} is taken: give the server another.")
        try:
            commands[case] = shlex.split(command)
        except ValueError as error:
            raise BadInput(f"The command of {case.method} cannot be read: {error}.") from error
    return commands


def theirs(against: str) -> list[str]:
    """The methods that `--against` names."""
    named = [*filter(None, map(str.strip, against.split(",")))]
    for method in named:
        one_of("method", method, METHODS)
    return named


def cases_of_theirs(loaded: Loaded, methods: Sequence[str], ks: Sequence[int | str]) -> list[Case]:
    """What to run of others. A method that cannot run here is left out, and stderr says why."""
    numbers = [k for k in ks if k != AUTO and k != 0]
    served = [Case(LLAMA), *(Case(NGRAM, f"ngram-simple {size}", NGRAM_K) for size in NGRAM_SIZES)]
    if has_gguf(loaded, "draft_model"):
        served += [Case(DRAFTING, "draft-model", k) for k in numbers or (DRAFT_K,)]
    of_method = {
        HF: [Case(HF)],
        ASSISTED: [Case(ASSISTED, "draft-model"), *(Case(TUNED, "draft-model", k) for k in numbers or TUNED_K)],
        LOOKUP: [Case(LOOKUP, "prompt-lookup", k) for k in [*numbers, LOOKUP_K]],
        LLAMA: served,
        OPENVINO: [Case(OPENVINO)],
    }
    cases: list[Case] = []
    for method in methods:
        reason = None
        if method == ASSISTED and loaded.parts.make_draft_runner is None:
            reason = f"the preset {loaded.preset.name} has no draft model to assist"
        elif method == ASSISTED and loaded.parts.translator is not None:
            reason = f"the draft model of {loaded.preset.name} has another tokenizer"
        elif method in (LLAMA, OPENVINO) and not has_gguf(loaded, "target"):
            reason = f"{loaded.preset.name} was not loaded from a GGUF file"
        elif method == LLAMA and not can_start():
            reason = "the package xllamacpp is not installed"
        elif method == OPENVINO and find_spec("openvino_genai") is None:
            reason = "the package openvino-genai is not installed"
        if reason:
            print(f"{method} is left out: {reason}.", file=sys.stderr)
        else:
            cases += of_method[method]
    return list(dict.fromkeys(cases))


def has_gguf(loaded: Loaded, part: str) -> bool:
    """Whether its "target" or "draft_model" was loaded from a GGUF file. One that both the hub and the package index
    have is asked for on the hub first, where it is no such file."""
    return "gguf_sha256" in (loaded.weights[part] or {})


def cases_of_ours(
    loaded: Loaded, names: str, ks: Sequence[int | str], rules: Sequence[str], trees: Sequence[int | str] = ()
) -> list[Case]:
    """Each drafter with each K and rule, and with trees of these sizes if it branches.

    K = 0 is the target alone, which is run anyway.
    """
    from specdemo.racing.race import drafters_of

    drafters = drafters_of(loaded, names)
    cases = [Case(SPECULATIVE, name, k, rule) for name in drafters for k in ks for rule in rules if k != 0]
    branching = [name for name in drafters if DRAFTERS[name].branches]
    cases += [Case(TREE, name, nodes, rule) for name in branching for nodes in trees for rule in rules]
    return list(dict.fromkeys(cases))
