"""Recordings: races that are played in the lanes of a race with no model loaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...errors import BadInput
from ..part import Part
from ..race.run import RaceRun
from ..runs import Runs
from .opening import MAX_TRACE
from .playable import playable_json
from .routes import recordings


def add_replay(runs: Runs) -> None:
    """Add the player to the page that is being built: the page shows it in the place of the race."""
    Part(
        "mountReplay",
        server_functions=[_run_of(runs)],
        recordings=recordings(),
        limit=MAX_TRACE,
        elem_id="replay",
    )


def _run_of(runs: Runs) -> Callable[[Any], Awaitable[str]]:
    async def race(run_id: Any) -> str:
        """What the script plays for a race that the page has just shown."""

        def lines() -> Sequence[str]:
            run = runs.find(RaceRun, str(run_id))
            if run is None:
                raise BadInput("This race is no longer kept. Run it again to replay it.")
            return run.trace().split("\n")

        return await runs.large(lambda: playable_json("race", lines))

    return race
