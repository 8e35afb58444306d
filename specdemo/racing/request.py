"""What a race is asked for: a prompt, settings, and the lanes with a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, cycle, islice, zip_longest
from typing import TYPE_CHECKING, Any, get_type_hints

from ..drafters.names import DRAFTERS, check_known, drafter_class
from ..errors import BadInput
from ..formats import brief
from ..models.presets import Defaults, load_prompts
from ..settings import AUTO, MAX_K, MAX_NODES, SETTINGS, Field, Settings, read_k, whole_if_it_is

if TYPE_CHECKING:
    from ..models.loaded import Loaded

PLAIN, SPECULATIVE = "plain", "speculative"  # the lanes of a race of one drafter, and of version 1 of traces
MOST_DRAFTED = 3  # lanes with a drafter; with the target alone they are four
TREE = "tree-"  # stands before the K of a lane that drafts trees
AHEAD = ":ahead"  # stands after the K of a lane that drafts ahead
USUAL_AHEAD = 3  # `Settings.ahead` of such a lane
ALONE = "alone"  # the lanes of several readers are `alone 1`, `alone 2`, ..., and `eagle 1`, ... with a drafter
AT_ONCE = Field(
    "readers",
    "Readers at once",
    "choice",
    "1",
    choices={"1": "a race", **{str(count): f"{count} prompts" for count in (2, 4, 8, 16)}},
    info="A reader has one prompt. With several, examples are decoded together with yours.",
    in_sentences="The number of readers",
    help="How many prompts are decoded at once, 1, 2, 4, 8 or 16: this one and examples.",
)
LONG = "code", "story", "lists", "dialogue", "poem"  # kinds of examples for readers: few of their texts end early
MAX_PROMPT = 200_000  # characters: more than any context here holds, and cheap to refuse before tokenising
MOST_OF_ALL = 8192  # new tokens of all readers together: with and without a drafter they fit in a trace


@dataclass(frozen=True, slots=True)
class DraftedLane:
    """A lane that is asked for: the drafter, and the settings that can differ from lane to lane.

    In a race of several lanes its name is `eagle:4`, `eagle:tree-8` or `draft-model:4:ahead`, for example. `name` alone
    writes such names and `read` alone reads them, wherever they are from: a form, a call, a link, a command or a trace.
    """

    drafter: str
    k: int | str
    tree: bool = False
    ahead: int = 0

    @classmethod
    def of(cls, drafter: str, settings: Settings) -> DraftedLane:
        return cls(drafter, settings.k, settings.tree, settings.ahead)

    @classmethod
    def read(cls, text: Any) -> DraftedLane:
        drafter, colon, words = text.strip().partition(":") if isinstance(text, str) else ("", "", "")
        if not colon and drafter in DRAFTERS and DRAFTERS[drafter].asks:
            colon, words = ":", AUTO
        tree, ahead = words.startswith(TREE), words.endswith(AHEAD)
        try:
            k = read_k(words.removeprefix(TREE).removesuffix(AHEAD))
        except ValueError:
            k = 0
        if not colon or not (k == AUTO or 1 <= int(k) <= (MAX_NODES if tree else MAX_K)):
            raise BadInput(
                f"A lane is a drafter and its K, from 1 to {MAX_K} or {AUTO}, as in eagle:4 or ngram:auto, or for "
                f"trees up to {MAX_NODES}, as in eagle:{TREE}8, and may end in {AHEAD}, not {brief(text)}."
            )
        check_known(drafter)
        if drafter == "none":
            raise BadInput(f"The target alone races in any case: leave out the lane {text.strip()}.")
        return cls(drafter, k, tree, USUAL_AHEAD if ahead else 0)

    @property
    def name(self) -> str:
        return f"{self.drafter}:{self.draft}"

    @property
    def draft(self) -> str:
        """How it drafts: its name without the drafter."""
        return f"{TREE if self.tree else ''}{self.k}{AHEAD if self.ahead else ''}"

    @property
    def own_settings(self) -> dict[str, Any]:
        """The settings that its name says; the others are those of the race."""
        own: dict[str, Any] = {"k": self.k, "tree": self.tree}
        return {**own, "ahead": self.ahead} if self.ahead else own

    def settings_in(self, settings: Settings) -> Settings:
        """The settings of the race as they are in this lane."""
        return replace(settings, k=self.k, tree=self.tree, ahead=self.ahead)


def lanes_by_name(lanes: Sequence[DraftedLane]) -> dict[str, DraftedLane]:
    """A single lane is called SPECULATIVE, each of several by its drafter and K."""
    return {SPECULATIVE: lanes[0]} if len(lanes) == 1 else {lane.name: lane for lane in lanes}


@dataclass(frozen=True, slots=True)
class Request:
    """What a form, a link, a call or a trace asks of a race. Whether the preset can do it is not known yet.

    The target alone races with a lane of `drafter`, whose K and `tree` are in the settings, and with `more` lanes.
    If there are `others`, which are prompts of further readers, all are decoded at once, without the drafter and with
    it; reader i, counted from 0, has the seed + i.
    `guesses` are those of people, round by round, in a game (`guesses.play`); None in any other race.
    """

    prompt: str
    preset: str
    drafter: str
    settings: Settings
    raw: bool = False
    isolated: bool = False
    more: tuple[DraftedLane, ...] = ()
    others: tuple[str, ...] = ()
    guesses: tuple[tuple[str, ...], ...] | None = None

    @property
    def drafted(self) -> dict[str, DraftedLane]:
        """The lanes with a drafter by name."""
        first = DraftedLane.of(self.drafter, self.settings)
        return dict.fromkeys(self.pairs, first) if self.others else lanes_by_name([first, *self.more])

    @property
    def asks(self) -> bool:
        """Whether people guess in one of its lanes."""
        return any(DRAFTERS[lane.drafter].asks for lane in self.drafted.values())

    @property
    def prompts(self) -> tuple[str, ...]:
        return self.prompt, *self.others

    @property
    def pairs(self) -> dict[str, str]:
        """Of several readers, for each lane with a drafter the lane in which the same reader has none."""
        readers = range(1, len(self.prompts) + 1) if self.others else ()
        return {f"{self.drafter} {reader}": f"{ALONE} {reader}" for reader in readers}

    @property
    def lanes(self) -> dict[str, DraftedLane]:
        """All lanes by name, those without a drafter first."""
        return {**dict.fromkeys(self.pairs.values() or [PLAIN], DraftedLane("none", 0)), **self.drafted}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_request(
    *,
    prompt: Any,
    preset: str,
    drafter: Any = None,
    defaults: Defaults | None = None,
    lanes: Any = None,
    readers: Any = 1,
    stop: Any = (),
    raw: Any = False,
    isolated: Any = False,
    most_new_tokens: int | None = None,
    **settings: Any,
) -> Request:
    r"""What a form, a call or a command asks for: all is checked that can be without the models. Nothing is clamped.

    Args:
        preset: the name of one that is known.
        defaults: what is meant by None; a form has none, and says everything.
        lanes: texts like eagle:4 instead of `drafter`, K and `tree`; None if those are given.
        readers: how many prompts are decoded at once; the others are examples.
        stop: a list, or a text with one string a line (where \n stands for a line break).
        most_new_tokens: how many may be asked for on a page, where prompts are also bounded; None if the context is the
            only limit.
    """
    if not isinstance(prompt, str):
        raise BadInput("The prompt must be a text.")
    if not prompt.strip():
        raise BadInput("The prompt is empty: type something first.")
    if most_new_tokens is not None and len(prompt) > MAX_PROMPT:
        raise BadInput(f"The prompt has {len(prompt):,} characters; at most {MAX_PROMPT:,} are taken. Shorten it.")
    asked = {**settings, "drafter": drafter, "raw": raw}
    more: tuple[DraftedLane, ...] = ()
    if lanes is not None:
        if (drafter, settings.get("k")) != (None, None) or settings.get("tree"):
            raise BadInput(
                f"Each lane says its own drafter, whether it drafts trees, as in eagle:{TREE}8, and its K: leave out "
                "tree and k."
            )
        first, *rest = read_lanes(lanes)
        asked, more = {**asked, "drafter": first.drafter, **first.own_settings}, tuple(rest)
    if asked.get("k") is None and drafter in [*DRAFTERS] and DRAFTERS[drafter].asks:
        asked["k"] = AUTO  # a preset's own K is for its drafter, and would cut what people type
    asked = asked if defaults is None else defaults.filled_in(asked)
    drafter, raw = asked.pop("drafter"), asked.pop("raw")
    check_known(drafter)
    for name, value in (("raw", raw), ("isolated", isolated)):
        Field(name, "", "switch", in_sentences=name).check(value)
    asked |= {name: whole_if_it_is(value) for name, value in asked.items() if SETTINGS[name].kind == "whole"}
    if most_new_tokens is not None:
        tokens = SETTINGS["max_new_tokens"]
        tokens.check(asked.get("max_new_tokens", tokens.value), most_new_tokens)
    read = Settings(**asked, stop=_stop_strings(stop))
    return with_readers(Request(prompt, preset, drafter, read, raw, isolated, more), readers)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return tuple(line.replace("\\n", "\n") for line in stop.split("\n") if line)
    if not isinstance(stop, (list, tuple)):
        raise BadInput("The stop strings must be a list of texts.")
    return tuple(stop)


def with_readers(request: Request, readers: Any) -> Request:
    """A request with as many readers as somebody asks for. The others get examples, one of each kind in turn."""
    AT_ONCE.check(readers if isinstance(readers, str) else brief(whole_if_it_is(readers)))
    count, tokens = int(readers), request.settings.max_new_tokens
    if count == 1:
        return request
    if request.more:
        raise BadInput("Several readers at once have one drafter: leave out the other lanes, or ask for 1 reader.")
    if count * tokens > MOST_OF_ALL:
        raise BadInput(f"{count} readers at once can write {MOST_OF_ALL // count:,} tokens each, not {tokens:,}.")
    prompts = load_prompts()
    by_kind = zip_longest(*(prompts[kind] for kind in LONG))
    examples = [text for text in chain(*by_kind) if text and text != request.prompt]
    return replace(request, others=tuple(islice(cycle(examples), count - 1)))


def parameters() -> dict[str, tuple[Any, Any]]:
    """The types and the defaults of the settings where somebody asks for them; None is as the preset has it."""
    types, usual = {**get_type_hints(Settings), "stop": list[str]}, {"stop", *(each.name for each in fields(Defaults))}
    defaults = {name: None if name in usual else one.value for name, one in SETTINGS.items()}
    return {name: (types[name] if name not in usual else types[name] | None, it) for name, it in defaults.items()}


def fitted(request: Request, loaded: Loaded) -> tuple[Request, str]:
    """A request as the loaded preset can serve it, and a sentence on what was changed, or "".

    If trees are the preset's default or those of a game and cannot be drafted, the drafts are chains: a default must
    not make a race fail. Other trees stay, and are refused when the race starts. A game goes on without drafters that
    the preset cannot use.
    """
    if request.guesses is not None:
        able = [lane for lane in request.more if not drafter_class(lane.drafter).needs(loaded.parts).missing]
        request = replace(request, more=tuple(able))
    settings, drafter = request.settings, request.drafter
    usual = settings.tree and (loaded.preset.defaults.tree or request.guesses is not None) and drafter != "none"
    if not usual or (settings.k != AUTO and int(settings.k) > MAX_K) or not (reason := loaded.cannot_branch(drafter)):
        return request, ""
    settings = replace(settings, tree=False)
    more = tuple(lane for lane in request.more if lane != DraftedLane(drafter, settings.k))  # or it would race twice
    return replace(request, settings=settings, more=more), f"The drafts are chains and not trees: {reason}."


def lane_of(lane: Mapping[str, Any], request: Request) -> DraftedLane:
    """What a lane of a trace was asked for. What it does not say holds for the whole race, as in older traces."""
    drafter = lane.get("drafter", "none" if lane["name"] == PLAIN else request.drafter)
    if not isinstance(drafter, str):
        raise BadInput(f"The trace does not say who drafted in its lane {lane['name']}.")
    settings = {name: lane.get(name, getattr(request.settings, name)) for name in ("k", "tree", "ahead")}
    return DraftedLane.of(drafter, replace(request.settings, **settings))


def read_lanes(texts: Any) -> list[DraftedLane]:
    """The drafted lanes of a race as a person gives them: `["eagle:4", "ngram:auto", "eagle:tree-8"]`."""
    if not isinstance(texts, (list, tuple)) or not texts:
        raise BadInput(f"The lanes must be a list of texts like eagle:4, not {brief(texts)}.")
    if len(texts) > MOST_DRAFTED:
        raise BadInput(f"At most {MOST_DRAFTED} lanes with a drafter race the target alone, not {len(texts)}.")
    lanes = [DraftedLane.read(text) for text in texts]
    for place, lane in enumerate(lanes):
        if lane in lanes[:place]:
            raise BadInput(f"The lane {lane.name} is given twice.")
    return lanes
