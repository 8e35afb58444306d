"""The drafters by name: the one list that the page, the command line, the benches and the tests read.

It imports no torch: a drafter's own module is imported when its class is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ..types import BadInput

if TYPE_CHECKING:
    from ..decoding.drafter import Drafter


class Entry(NamedTuple):
    """The path of a drafter's class, "module:Class" in this package, what it does in a few words, and one line more.

    `drafts_ahead` says whether it can draft ahead, see `drafters.ahead`. The others are those of the class, for code
    that must not import it.
    """

    path: str
    does: str
    description: str
    parallel_drafting: bool = False
    branches: bool = True
    drafts_ahead: bool = False
    remembers: bool = False


DRAFTERS = {
    "none": Entry("none:NoDrafter", "Nothing", "No speculation: the target alone.", branches=False),
    "prompt-lookup": Entry(
        "prompt_lookup:PromptLookup",
        "Copies earlier words",
        "Copies what followed the last time the same words appeared in prompt or text. Free; shines on quoting.",
    ),
    "suffix": Entry(
        "suffix:Suffix",
        "Copies what mostly followed, also in earlier answers",
        "Counts what followed the same words in prompt, text and remembered answers. Free; shines on repeated work.",
        remembers=True,
    ),
    "ngram": Entry(
        "ngram:Ngram",
        "Looks up which word mostly follows",
        "A table of which token follows which, counted in the target's own writing. Nearly free; knows phrases.",
    ),
    "lookup-ngram": Entry(
        "lookup_first:LookupNgram",
        "Copies earlier words, else looks up what mostly follows",
        "Prompt lookup where the text repeats itself, the n-gram table elsewhere. Nearly free.",
    ),
    "eagle": Entry(
        "heads.eagle:Eagle",
        "A small trained head",
        "A trained head that reads the target's hidden states. Good guesses; each costs one thin layer.",
    ),
    "p-eagle": Entry(
        "heads.peagle:PEagle",
        "A trained head of several layers that guesses all at once",
        "A P-EAGLE head: it reads what eagle reads, and drafts all K tokens in one pass.",
        parallel_drafting=True,
    ),
    "block": Entry(
        "heads.block:Block",
        "A trained head that guesses all at once",
        "A trained head that drafts all K tokens in one pass. Cheaper than eagle, and a little less accurate.",
        parallel_drafting=True,
    ),
    "dspark": Entry(
        "heads.block:DSpark",
        "A trained head that guesses all at once, then in order",
        "A block head like DSpark: one pass for all K tokens, then a small term for each token and the one before.",
        parallel_drafting=True,
    ),
    "dflash2": Entry(
        "heads.block:DFlash2",
        "A trained head that guesses all at once, then chooses in order",
        "A block head like DFlash 2: one pass names candidates for all places, then the token before chooses of them.",
        parallel_drafting=True,
    ),
    "medusa": Entry(
        "heads.medusa:Medusa",
        "Several trained outputs, one for each guess",
        "A trained head with one output for each position of the draft, all from one hidden state. The cheapest head.",
        parallel_drafting=True,
    ),
    "mtp": Entry(
        "mtp:Mtp",
        "A layer that the target brings along",
        "The layer for further tokens (MTP) that some targets were trained with. Good guesses; each costs that layer.",
        branches=False,
    ),
    "lookup-block": Entry(
        "lookup_first:LookupBlock",
        "Copies earlier words, else a head that guesses all at once",
        "Prompt lookup where the text repeats itself, the block head elsewhere.",
        parallel_drafting=True,
    ),
    "lookup-eagle": Entry(
        "lookup_first:LookupEagle",
        "Copies earlier words, else a small trained head",
        "Prompt lookup where the text repeats itself, the eagle head elsewhere.",
    ),
    "draft-model": Entry(
        "draft_model:DraftModel",
        "A smaller model",
        "A smaller model drafts. Good guesses, but each costs a small pass.",
        drafts_ahead=True,
    ),
    "lookahead": Entry(
        "lookahead:Lookahead",
        "The target's own guesses, collected",
        "The target's own passes guess ahead and collect phrases. Needs no model. Pays off if long passes are cheap.",
    ),
    "layer-skip": Entry(
        "layer_skip:LayerSkip",
        "The target's own first layers",
        "The target's own first layers draft for it. Needs no second model; helps only targets trained for it.",
        drafts_ahead=True,
    ),
}


def menu() -> list[tuple[str, str]]:
    """The drafters for a list to choose from: what each does with its name, and its name."""
    return [(f"{entry.does} · {name}", name) for name, entry in DRAFTERS.items()]


def check_known(name: str) -> None:
    """Refuse the name of a drafter that does not exist.

    Raises:
        BadInput: the message names those that do.
    """
    if name not in DRAFTERS:
        raise BadInput(f"There is no drafter called {name!r}. Choose one of: {', '.join(DRAFTERS)}.")


def drafter_class(name: str) -> type[Drafter]:
    """The class of a drafter in `DRAFTERS`; this imports its module."""
    module, _, cls = DRAFTERS[name].path.partition(":")
    found: type[Drafter] = getattr(import_module(f"{__package__}.{module}"), cls)
    return found
