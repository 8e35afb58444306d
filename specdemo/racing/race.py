"""Starts runs of a loaded preset, and races drafters against the target alone.

>>> entries = list(race(loaded, "prompt-lookup", loaded.encode("ROMEO:"), Settings(k=4, max_new_tokens=16)))
>>> texts = {PLAIN: "", SPECULATIVE: ""}
>>> for entry in entries:
...     texts[entry.lane] += text_of(entry.event)
>>> texts[PLAIN] == texts[SPECULATIVE]
True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat

from ..decoding.adaptive_k import DraftLengthController
from ..decoding.batch import decode
from ..decoding.costs import CostModel
from ..decoding.events import Event
from ..decoding.loop import Chooser, Decoding, Form, Given, check_room
from ..decoding.measuring import measure_passes, try_out
from ..decoding.rejection import Rejection
from ..decoding.rule import Match, Rule
from ..drafters.ahead import DraftingAhead
from ..drafters.forced import ForcedFirst
from ..drafters.names import DRAFTERS, PARALLEL, behind, check_known, drafter_class
from ..errors import BadInput
from ..models.loaded import Loaded
from ..models.sizes import check_caches
from ..settings import AUTO, MAX_K, MAX_NODES, REJECTION, Settings
from ..system.progress import tell
from .lanes import Lane, LaneText, StopStrings, race_lanes
from .request import PLAIN, DraftedLane, lanes_by_name
from .trace import Entry

TRIED_TOKENS = 32  # of the prompts and texts of the runs by which a drafter is tried out
TRIED_DRAFTS = 16  # of such a run by a published head: enough to find one wired wrongly, see `summary.FirstGuesses`


def rule_for(settings: Settings) -> Rule:
    """The verification rule of a run. At temperature 0 both rules accept the same tokens, and match is faster."""
    return Rejection(settings) if settings.rule == REJECTION and settings.temperature > 0 else Match(settings)


def check_drafter(loaded: Loaded, drafter: str) -> None:
    """Refuse a drafter that does not exist or that this preset has nothing for."""
    check_known(drafter)
    if reason := drafter_class(drafter).needs(loaded.parts).missing:
        raise BadInput(f"The drafter {drafter} cannot be used here: {reason}.")


def check_lanes(
    loaded: Loaded,
    lanes: Sequence[DraftedLane],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    at_once: int = 1,
) -> None:
    """Refuse lanes that the preset or the memory cannot serve, before any of them takes memory.

    Args:
        lanes: each reads all `prompts`, `at_once` of them at a time.
        settings: those of the race, see `DraftedLane.settings_in`.
    """
    for lane in lanes:
        check_run(loaded, lane.drafter, prompts, lane.settings_in(settings), at_once)
    target, drafters = loaded.token_bytes["target"], [behind(lane.drafter) for lane in lanes]
    caches = [target + loaded.token_bytes.get(drafter, 0) for drafter in drafters]
    check_caches(caches * at_once, max(map(len, prompts)) + settings.max_new_tokens, loaded.device)


def check_run(
    loaded: Loaded, drafter: str, prompts: Sequence[Sequence[int]], settings: Settings, at_once: int = 1
) -> None:
    """Refuse a drafter, settings or prompts that the preset cannot serve."""
    check_drafter(loaded, drafter)
    check_rule(drafter, settings, at_once)
    limit = drafter_class(drafter).needs(loaded.parts).context
    for prompt in prompts:
        check_room(len(prompt), settings, loaded.context)
        if limit is not None:
            check_room(len(prompt), settings, limit, f" of the draft model {loaded.parts.draft_name}")


def check_rule(drafter: str, settings: Settings, readers: int = 1) -> None:
    """Refuse a tree by a drafter of chains, drafting ahead by one that cannot, and K = auto with rejection sampling.

    Under rejection sampling a K that depends on drawn tokens would change the distribution.
    """
    if settings.tree and not (drafter == "none" or DRAFTERS[drafter].branches):
        able = ", ".join(name for name, entry in DRAFTERS.items() if entry.branches)
        raise BadInput(f"The drafter {drafter} drafts chains only. Those that can draft a tree: {able}.")
    if DRAFTERS[drafter].asks and readers > 1:
        raise BadInput("People guess for one prompt at a time: leave out the readers.")
    if settings.ahead and drafter != "none":
        if readers > 1:
            raise BadInput("Several prompts at once cannot be drafted ahead.")
        if settings.grammar:
            raise BadInput("A text with a grammar cannot be drafted ahead: leave out one of the two.")
        if not DRAFTERS[drafter].drafts_ahead:
            able = ", ".join(name for name, entry in DRAFTERS.items() if entry.drafts_ahead)
            raise BadInput(f"The drafter {drafter} cannot draft ahead. Those that can: {able}.")
        if settings.tree:
            raise BadInput("Only chains can be drafted ahead: leave out the tree.")
    if settings.k == AUTO and settings.rule == REJECTION and settings.temperature > 0 and drafter != "none":
        raise BadInput(f"Above temperature 0, K = {AUTO} needs the match rule: choose it, or a K from 1 to {MAX_K}.")


def drafters_of(loaded: Loaded, names: str) -> list[str]:
    """The drafters in a list separated by commas; if it is empty, all that this preset can use."""
    if not names:
        able = (name for name in DRAFTERS if not drafter_class(name).needs(loaded.parts).missing)
        return [name for name in able if name != "none"]
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        check_drafter(loaded, name)
    return chosen


def start(
    loaded: Loaded,
    drafter: str,
    prompt_ids: Sequence[int],
    settings: Settings,
    rule: Rule | None = None,
    distributions: bool = False,
) -> Iterator[Event]:
    """Start a decode of `prompt_ids` by the loaded target with a drafter by name. `rule` is by default `rule_for`.
    With `distributions` its rounds come with what they were drawn from.

    `loaded.costs` learns from the run, for later runs of the same kind. What auto needs to know before it begins is
    measured first, see `decoding.measuring`.

    Raises:
        Stopped: the person who waits for it stopped it while costs were measured.
    """
    check_run(loaded, drafter, [prompt_ids], settings)
    if drafter == "none":
        settings = replace(settings, k=0)
    elif DRAFTERS[drafter].asks and settings.k == AUTO:
        settings = replace(settings, k=MAX_NODES if settings.tree else MAX_K)
    costs = costs_of(loaded, settings)
    if costs and settings.k == AUTO and (drafter, settings.tree) not in costs.tried:
        limit = min(drafter_class(drafter).needs(loaded.parts).context or loaded.context, loaded.context)
        tried = prompt_ids[-TRIED_TOKENS:]
        short = replace(settings, max_new_tokens=min(TRIED_TOKENS, limit - len(tried)), stop=(), ahead=0)

        def run(k: int, tree: bool) -> Decoding:
            return decoding_of(loaded, drafter, tried, rule_for(replace(short, k=k, tree=tree)), costs)

        try_out(costs, drafter, settings.tree, run, TRIED_DRAFTS if drafter in loaded.head_formats else 0)
    decoding = decoding_of(loaded, drafter, prompt_ids, rule or rule_for(settings), costs)
    decoding.distributions = distributions
    return decode(decoding)


def decoding_of(
    loaded: Loaded,
    drafter: str,
    prompt_ids: Sequence[int],
    rule: Rule,
    costs: CostModel | None,
    chooser: Chooser | None = None,
) -> Decoding:
    """What decodes a prompt by the loaded target with a drafter by name; `none` drafts nothing at any K."""
    if drafter == "none":
        chooser = Given(repeat(Form(0)))
    elif chooser is None and rule.settings.k == AUTO:
        assert costs, "K = auto needs costs"
        chooser = DraftLengthController(costs, rule.settings.tree)
    branching = rule.settings.tree and drafter != "none"
    nodes = MAX_NODES if branching else 0  # room for branches that are not kept
    rule.constraint = loaded.constraint(rule.settings.grammar) if rule.settings.grammar else None
    runner = loaded.target_runner(len(prompt_ids) + rule.settings.max_new_tokens + nodes)
    if branching:
        runner.check_branches()
    proposing = drafter_class(drafter).build(loaded.parts, runner, rule)
    if rule.settings.ahead and drafter != "none":
        proposing = DraftingAhead(proposing, runner, rule)
    if rule.constraint and drafter != "none":
        proposing = ForcedFirst(rule.constraint, proposing)
    stop = StopStrings(loaded.tokenizer, prompt_ids, rule.settings.stop)
    drafts_on = drafter_class(drafter).needs(loaded.parts).device
    return Decoding(runner, proposing, prompt_ids, rule, loaded.eos_ids, stop, costs, chooser, drafts_on=drafts_on)


def costs_of(loaded: Loaded, settings: Settings, readers: int = 1) -> CostModel | None:
    """The entry of `loaded.costs` for this kind of sampling and so many readers; None if there is none.

    For K = auto it is made at the first call, from a measurement of passes that takes a part of a second.
    """
    kind: tuple[int, ...] = (settings.temperature > 0, settings.top_k > 0, settings.top_p < 1, readers)
    if settings.grammar:  # other guesses pass there
        kind = (*kind, True)
    if settings.k == AUTO and kind not in loaded.costs:
        tell("measuring the cost of a pass")
        runner = loaded.target_runner((MAX_K + 1) * readers + 1)
        loaded.costs[kind] = CostModel(measure_passes(runner, rule_for(settings), readers), PARALLEL)
    return loaded.costs.get(kind)


def race(
    loaded: Loaded,
    drafter: str,
    prompt_ids: Sequence[int],
    settings: Settings,
    isolated: bool = False,
    more: Sequence[DraftedLane] = (),
) -> Iterator[Entry]:
    """Race the target alone, with a drafter, and with those of `more` lanes, see `race_lanes`.

    Above temperature 0 the drafted rounds come with their probabilities.
    """
    drafted = lanes_by_name([DraftedLane.of(drafter, settings), *more])
    alone = DraftedLane("none", 0)
    check_lanes(loaded, [alone, *drafted.values()], [prompt_ids], settings)
    runs = {PLAIN: start(loaded, alone.drafter, prompt_ids, settings)}
    for name, lane in drafted.items():
        runs[name] = start(loaded, lane.drafter, prompt_ids, lane.settings_in(settings), distributions=True)
    yield from race_lanes(lanes_of(loaded, prompt_ids, runs), isolated)


def lanes_of(loaded: Loaded, prompt_ids: Sequence[int], runs: Mapping[str, Iterator[Event]]) -> list[Lane]:
    """The lanes of some runs of a loaded preset."""
    tokenizer, eos_ids = loaded.tokenizer, loaded.eos_ids
    return [Lane(name, events, LaneText(tokenizer, prompt_ids, eos_ids)) for name, events in runs.items()]
