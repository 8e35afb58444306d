"""The drafters by name: the one list that the page, the command line, the benches and the tests read.

It imports no torch: a drafter's own module is imported when its class is asked for.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import BadInput
from ..formats import brief

if TYPE_CHECKING:
    from ..decoding.drafter import Drafter


class Listing(NamedTuple):
    """What is known of a drafter without importing it."""

    path: str  # of its class, "module:Class" in this package
    does: str  # in a few words
    description: str  # one line more
    parallel_drafting: bool = False  # a draft of many tokens costs what a draft of one costs
    branches: bool = True  # it can draft a tree
    drafts_ahead: bool = False  # it can draft while the target verifies, see `drafters.ahead`
    remembers: bool = False  # it copies from `DrafterParts.remembered`
    asks: bool = False  # people draft, see `DrafterParts.guesses`; K = auto reads all that they guess


DRAFTERS = {
    "none": Listing("none:NoDrafter", "Nothing", "No speculation: the target alone.", branches=False),
    "prompt-lookup": Listing(
        "prompt_lookup:PromptLookup",
        "Copies earlier words",
        "Copies what followed the last time the same words appeared in prompt or text. Free; shines on quoting.",
    ),
    "suffix": Listing(
        "suffix:Suffix",
        "Copies what mostly followed, also in earlier answers",
        "Counts what followed the same words in prompt, text and remembered answers. Free; shines on repeated work.",
        remembers=True,
    ),
    "ngram": Listing(
        "ngram:Ngram",
        "Looks up which word mostly follows",
        "A table of which token follows which, counted in the target's own writing. Nearly free; knows phrases.",
    ),
    "lookup-ngram": Listing(
        "lookup_first:LookupFirst",
        "Copies earlier words, else looks up what mostly follows",
        "Prompt lookup where the text repeats itself, the n-gram table elsewhere. Nearly free.",
    ),
    "eagle": Listing(
        "heads.eagle:Eagle",
        "A small trained head",
        "A trained head that reads the target's hidden states. Good guesses; each costs one thin layer.",
    ),
    "p-eagle": Listing(
        "heads.peagle:PEagle",
        "A trained head of several layers that guesses all at once",
        "Experimental: a P-EAGLE head, which reads what eagle reads and drafts all K tokens in one pass.",
        parallel_drafting=True,
    ),
    "block": Listing(
        "heads.block:Block",
        "A trained head that guesses all at once",
        "A trained head that drafts all K tokens in one pass. Cheaper than eagle, and a little less accurate.",
        parallel_drafting=True,
    ),
    "dspark": Listing(
        "heads.block:DSpark",
        "A trained head that guesses all at once, then in order",
        "Experimental: a head like DSpark. One pass for all K tokens, then each is adjusted to the token before it.",
        parallel_drafting=True,
    ),
    "dflash2": Listing(
        "heads.block:DFlash2",
        "A trained head that guesses all at once, then chooses in order",
        "Experimental: a head like DFlash 2. One pass names candidates; each is then chosen by the token before it.",
        parallel_drafting=True,
    ),
    "medusa": Listing(
        "heads.medusa:Medusa",
        "Several trained outputs, one for each guess",
        "A trained head with one output for each position of the draft, all from one hidden state. The cheapest head.",
        parallel_drafting=True,
    ),
    "mtp": Listing(
        "mtp:Mtp",
        "A layer that the target brings along",
        "Experimental: the target's own layer for further tokens (MTP). Each guess costs one pass of that layer.",
        branches=False,
    ),
    "lookup-block": Listing(
        "lookup_first:LookupFirst",
        "Copies earlier words, else a head that guesses all at once",
        "Prompt lookup where the text repeats itself, the block head elsewhere.",
        parallel_drafting=True,
    ),
    "lookup-eagle": Listing(
        "lookup_first:LookupFirst",
        "Copies earlier words, else a small trained head",
        "Prompt lookup where the text repeats itself, the eagle head elsewhere.",
    ),
    "lookup-draft-model": Listing(
        "lookup_first:LookupFirst",
        "Copies earlier words, else a smaller model",
        "Prompt lookup where the text repeats itself, the draft model elsewhere.",
    ),
    "lookup-mtp": Listing(
        "lookup_first:LookupFirst",
        "Copies earlier words, else a layer that the target brings along",
        "Prompt lookup where the text repeats itself, the layer for further tokens (MTP) elsewhere. Experimental.",
        branches=False,
    ),
    "draft-model": Listing(
        "draft_model:DraftModel",
        "A smaller model",
        "A smaller model drafts. Good guesses, but each costs a small pass.",
        drafts_ahead=True,
    ),
    "lookahead": Listing(
        "lookahead:Lookahead",
        "The target's own guesses, collected",
        "The target's own passes guess ahead and collect phrases. Needs no model. Pays off if long passes are cheap.",
    ),
    "layer-skip": Listing(
        "draft_model:LayerSkip",
        "The target's own first layers",
        "The target's own first layers draft for it. Needs no second model; helps only targets trained for it.",
        drafts_ahead=True,
    ),
    "you": Listing(
        "you:You",
        "You, or a room",
        "People type what comes next. Of several guesses the draft is a tree, those of most people first.",
        asks=True,
    ),
}


# What a list of few shows besides a preset's own, as far as the preset can use it: one of each kind.
FRONT = "prompt-lookup", "ngram", "eagle", "draft-model", "suffix", "lookahead"
LOOKUP = "lookup-"  # begins the names of those that copy first, before that of another drafter
PARALLEL = {"forced", *(name for name, entry in DRAFTERS.items() if entry.parallel_drafting)}


def behind(name: str) -> str:
    """The drafter of this name, without the lookup before it."""
    return name.removeprefix(LOOKUP)


def menu() -> list[tuple[str, str]]:
    """The drafters for a list to choose from: what each does with its name, and its name."""
    return [(f"{entry.does} ({name})", name) for name, entry in DRAFTERS.items()]


def check_known(name: Any) -> None:
    if name not in [*DRAFTERS]:
        raise BadInput(f"There is no drafter called {brief(name)}. Choose one of: {', '.join(DRAFTERS)}.")


@cache
def drafter_class(name: str) -> type[Drafter]:
    """The class of a drafter in `DRAFTERS`; this imports its module."""
    module, _, cls = DRAFTERS[name].path.partition(":")
    found: Any = getattr(import_module(f"{__package__}.{module}"), cls)
    if name.startswith(LOOKUP):
        found = type(name, (found,), {"name": name, "behind": drafter_class(behind(name))})
    kind: type[Drafter] = found
    return kind
