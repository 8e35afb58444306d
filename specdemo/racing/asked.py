"""What a race is asked for: a prompt, settings, and the lanes with a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from ..drafters.names import check_known
from ..models.presets import Defaults
from ..types import AUTO, MAX_K, MAX_NODES, SETTINGS, BadInput, Settings, brief, read_k

if TYPE_CHECKING:
    from ..models.loaded import Loaded

PLAIN, SPECULATIVE = "plain", "speculative"  # the lanes of a race of one drafter, and of version 1 of traces
MOST_DRAFTED = 3  # lanes with a drafter; with the target alone they are four
TREE = "tree-"  # stands before the K of a lane that drafts trees
AHEAD = ":ahead"  # stands after the K of a lane that drafts ahead
USUAL_AHEAD = 3  # `Settings.ahead` of such a lane


@dataclass(frozen=True, slots=True)
class DraftedLane:
    """A lane that is asked for: the drafter, and the settings that can differ from lane to lane.

    In a race of several lanes its name is `eagle:4`, `eagle:tree-8` or `draft-model:4:ahead`, for example.
    """

    drafter: str
    k: int | str
    tree: bool = False
    ahead: int = 0

    @classmethod
    def of(cls, drafter: str, settings: Settings) -> DraftedLane:
        return cls(drafter, settings.k, settings.tree, settings.ahead)

    @property
    def name(self) -> str:
        return f"{self.drafter}:{TREE if self.tree else ''}{self.k}{AHEAD if self.ahead else ''}"

    def settings_in(self, settings: Settings) -> Settings:
        """The settings of the race as they are in this lane."""
        return replace(settings, k=self.k, tree=self.tree, ahead=self.ahead)


def lanes_by_name(lanes: Sequence[DraftedLane]) -> dict[str, DraftedLane]:
    return {SPECULATIVE: lanes[0]} if len(lanes) == 1 else {lane.name: lane for lane in lanes}


@dataclass(frozen=True, slots=True)
class Request:
    """What a form, a link, a call or a trace asks of a race. Whether the preset can do it is not known yet.

    The target alone races with a lane of `drafter`, whose K and `tree` are in the settings, and with `more` lanes.
    """

    prompt: str
    preset: str
    drafter: str
    settings: Settings
    raw: bool = False
    isolated: bool = False
    more: tuple[DraftedLane, ...] = ()

    @property
    def drafted(self) -> dict[str, DraftedLane]:
        return lanes_by_name([DraftedLane.of(self.drafter, self.settings), *self.more])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parameters() -> dict[str, tuple[Any, Any]]:
    """The types and the defaults of the settings where somebody asks for them; None is as the preset has it."""
    types, usual = {**get_type_hints(Settings), "stop": list[str]}, {"stop", *(each.name for each in fields(Defaults))}
    defaults = {name: None if name in usual else one.value for name, one in SETTINGS.items()}
    return {name: (types[name] if name not in usual else types[name] | None, it) for name, it in defaults.items()}


def fitted(request: Request, loaded: Loaded) -> tuple[Request, str]:
    """A request as the loaded preset can serve it, and a sentence on what was changed, or "".

    If trees are the preset's default and cannot be drafted, the drafts are chains: a default must not make a race fail.
    Other trees stay, and are refused when the race starts.
    """
    settings, drafter = request.settings, request.drafter
    usual = settings.tree and loaded.preset.defaults.tree and drafter != "none"
    if not usual or (settings.k != AUTO and int(settings.k) > MAX_K) or not (reason := loaded.cannot_branch(drafter)):
        return request, ""
    settings = replace(settings, tree=False)
    more = tuple(lane for lane in request.more if lane != DraftedLane(drafter, settings.k))  # or it would race twice
    return replace(request, settings=settings, more=more), f"The drafts are chains and not trees: {reason}."


def lane_of(lane: Mapping[str, Any], request: Request) -> DraftedLane:
    """What a lane of a trace was asked for. What it does not say holds for the whole race, as in older traces.

    Raises:
        BadInput: it has something else than a drafter or a K.
    """
    drafter = lane.get("drafter", "none" if lane["name"] == PLAIN else request.drafter)
    if not isinstance(drafter, str):
        raise BadInput(f"The trace does not say who drafted in its lane {lane['name']}.")
    told = {name: lane.get(name, getattr(request.settings, name)) for name in ("k", "tree", "ahead")}
    return DraftedLane.of(drafter, replace(request.settings, **told))


def read_lanes(texts: Any) -> list[DraftedLane]:
    """The drafted lanes of a race as a person gives them: `["eagle:4", "ngram:auto", "eagle:tree-8"]`.

    Raises:
        BadInput: there are too many or none, one of them is not a lane, or two are the same.
    """
    if not isinstance(texts, (list, tuple)) or not texts:
        raise BadInput(f"The lanes must be a list of texts like eagle:4, not {brief(texts)}.")
    if len(texts) > MOST_DRAFTED:
        raise BadInput(f"At most {MOST_DRAFTED} lanes with a drafter race the target alone, not {len(texts)}.")
    lanes = [_read_lane(text) for text in texts]
    for place, lane in enumerate(lanes):
        if lane in lanes[:place]:
            raise BadInput(f"The lane {lane.name} is given twice.")
    return lanes


def _read_lane(text: Any) -> DraftedLane:
    drafter, colon, words = text.strip().partition(":") if isinstance(text, str) else ("", "", "")
    tree, ahead = words.startswith(TREE), words.endswith(AHEAD)
    try:
        k = read_k(words.removeprefix(TREE).removesuffix(AHEAD))
    except ValueError:
        k = 0
    if not colon or not (k == AUTO or 1 <= int(k) <= (MAX_NODES if tree else MAX_K)):
        raise BadInput(
            f"A lane is a drafter and its K, from 1 to {MAX_K} or {AUTO}, as in eagle:4 or ngram:auto, or for trees up "
            f"to {MAX_NODES}, as in eagle:{TREE}8, and may end in {AHEAD}, not {brief(text)}."
        )
    check_known(drafter)
    if drafter == "none":
        raise BadInput(f"The target alone races in any case: leave out the lane {text.strip()}.")
    return DraftedLane(drafter, k, tree, USUAL_AHEAD if ahead else 0)
