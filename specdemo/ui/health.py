"""What the operator of a page may know: `/health`, a line in the log for each race, and counters at `/metrics`.

None of it holds a prompt, a text, an address or the name of a visitor's own model.
"""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from ..errors import BadInput
from ..racing.figures import LaneFigures
from .engine import OWN
from .jobs import Job
from .race.run import RaceRun
from .runs import Runs
from .serving.stream import may_see

log = logging.getLogger("specdemo.races")


def check_available() -> None:
    if find_spec("prometheus_client") is None:
        raise BadInput("--metrics needs the package prometheus-client: pip install prometheus-client.")


def log_races() -> None:
    """Write the lines of races to stderr, unless the program that serves the page has decided where logs go."""
    if not (log.handlers or logging.getLogger().handlers):
        log.addHandler(logging.StreamHandler())
        log.propagate = False
    log.setLevel(logging.INFO)


def health_routes(runs: Runs, metrics: bool = False) -> list[Route]:
    """`/health` and, if `metrics`, `/metrics`. From now on the races of `runs` are logged and counted."""

    def name(preset: str) -> str:
        return preset if preset in runs.engine.offered else OWN

    counters = RaceCounters(runs) if metrics else None

    def ended(job: Job, outcome: str) -> None:
        if isinstance(job, RaceRun):
            race = facts(job, outcome)
            race["preset"] = name(race["preset"])
            log.info(json.dumps(race))
            if counters:
                counters.add(**race)

    runs.ended = ended

    async def health(request: Request) -> Response:
        status = runs.engine.status
        ready = bool(status.loaded)
        content = {
            "ready": ready,
            "preset": name(status.loaded) if ready else None,
            "version": __version__,
            "waiting": len(runs.line.waiting),
            "running": len(runs.line.running),
        }
        return JSONResponse(content, 200 if ready else 503, {"cache-control": "no-store"})

    routes = [Route("/health", health)]
    return [*routes, counters.route()] if counters else routes


def facts(run: RaceRun, outcome: str) -> dict[str, Any]:
    """What is logged of a race that has ended: tokens and engine seconds of all lanes together."""
    if run.stop.is_set() or (run.outcome and run.outcome.stopped):
        outcome = "overdue" if run.overdue else "stopped"
    figures = LaneFigures.of(entry.event for entry in run.entries)
    drafters = [lane.drafter for lane in run.request.drafted.values()]
    return {
        "preset": run.request.preset,
        "drafter": ",".join(dict.fromkeys(drafters)),
        "tokens": figures.tokens,
        "seconds": round(figures.seconds, 3),
        "outcome": outcome,
    }


class RaceCounters:
    """The same as counters in Prometheus' format."""

    def __init__(self, runs: Runs) -> None:
        import prometheus_client as prometheus

        self._registry = prometheus.CollectorRegistry()
        labels = "preset", "drafter"
        shared: dict[str, Any] = {"namespace": "specdemo", "registry": self._registry}
        self._races = prometheus.Counter("races", "Races that ended.", (*labels, "outcome"), **shared)
        self._tokens = prometheus.Counter("tokens", "Tokens of all lanes.", labels, **shared)
        self._seconds = prometheus.Counter("engine_seconds", "Time of the models in all lanes.", labels, **shared)
        self._ready = prometheus.Gauge("ready", "Whether a preset is loaded.", **shared)
        self._ready.set_function(lambda: bool(runs.engine.status.loaded))
        waiting = prometheus.Gauge("waiting", "Requests in the line for the model.", **shared)
        waiting.set_function(lambda: len(runs.line.waiting))

    def add(self, preset: str, drafter: str, tokens: int, seconds: float, outcome: str) -> None:
        """Count a race."""
        self._races.labels(preset, drafter, outcome).inc()
        self._tokens.labels(preset, drafter).inc(tokens)
        self._seconds.labels(preset, drafter).inc(seconds)

    def route(self) -> Route:
        """`/metrics`, for those who may see the page."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        async def metrics(request: Request) -> Response:
            if not await may_see(request):
                return Response(status_code=401)
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

        return Route("/metrics", metrics)
