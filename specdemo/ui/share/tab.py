"""The dialog that shares a race, and the list of a visitor's own races below the arena."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..part import Part
from ..race.form import FIELDS, OF_PRESET
from ..race.run import RaceRun
from ..replay.playable import playable_json
from ..runs import Runs
from .saved import saved_page


def add_share(runs: Runs, form: dict[str, Any]) -> Any:
    """Add both to the tab that is being built. Returns the event that fills in the form as it was for an earlier race.

    Args:
        form: the controls of the form by name.
    """
    part = Part("mountShare", ("link", "again"), server_functions=[_saved(runs)], elem_id="share")
    fields = [form[name] for name in FIELDS]
    part.link(None, fields, None, js="(...values) => { specdemo.copyLink(values); }")
    filled = f"(...values) => [...specdemo.filledAgain(values), '{OF_PRESET}']"
    return part.again(None, fields, [*fields, form["raced"]], js=filled)


def _saved(runs: Runs) -> Callable[[Any], Awaitable[str | None]]:
    async def saved(run_id: Any) -> str | None:
        """The race as an HTML file; None if it is no longer kept."""
        if run := runs.find(RaceRun, str(run_id)):
            return await runs.large(lambda: saved_page(playable_json("saved", lambda: run.trace().split("\n"))))
        return None

    return saved
