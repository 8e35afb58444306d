"""How much showing a race slows down the engine: the same race alone, through the page's server, in a browser, and with
others watching along.

    python -m tools.page

The server runs in a process of its own, and the rates are those that the race reports. They vary by more than a page
costs, so the kernel's count of how long the engine's threads waited for a core is read as well, and of how much of a
core the server's other threads took: what serves the page and its watchers, without their browsers.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import httpx
import typer
from tqdm import tqdm
from typer import Option

from specdemo.cli.main import main
from specdemo.cli.options import (
    AnyK,
    Drafter,
    JsonFile,
    PresetName,
    check_writable,
    save_json,
)
from specdemo.errors import BadInput
from specdemo.models.presets import DEFAULT_PRESET, find_preset
from specdemo.racing.figures import LaneFigures
from specdemo.racing.provenance import provenance
from specdemo.racing.race import race
from specdemo.racing.trace import PLAIN, SPECULATIVE
from specdemo.settings import Settings
from specdemo.studies.study import NEW_TOKENS
from specdemo.system.imports import import_quickly
from tools.bench.rows import Row, command
from tools.bench.tables import text_table
from tools.bench.turns import in_turns, mean_of, ratio

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from specdemo.models.loaded import Loaded

APP = Path(__file__).resolve().parents[1] / "app.py"
BROWSERS = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"  # the shell takes the least time
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PROMPT = "Explain what a list is in Python, with three short examples."
START_SECONDS, RACE_SECONDS = 120.0, 600.0
SETTLE_SECONDS = 1.0  # before a race: a page that has just opened or shown a race is still busy

LANES = (PLAIN, SPECULATIVE)
BOTH = "both"  # the tokens of both lanes over the seconds of both, as both write the same text
WATCHERS = 64
ALONE, UNSEEN, PROGRAM, BROWSER = "engine alone", "server, unseen", "a program", "a browser"
WATCHED = f"a browser, {WATCHERS} watchers"
WAYS = ALONE, UNSEEN, PROGRAM, BROWSER, WATCHED
COLUMNS = {
    **{"way": "", "lane": "", "tokens_per_second": ".1f"},
    **{"ratio_to_alone": ".3f", "ratio_to_unseen": ".3f", "waiting": ".3f", "serving": ".3f"},
}

Rates = dict[str, float]  # tokens per second by lane
Threads = dict[str, tuple[int, int]]  # by thread: nanoseconds it has run, and waited for a core to run on
Measured = tuple[Rates, float | None, float | None]  # and the shares `waiting` and `serving`


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: str
    preset: str
    drafter: str
    k: int | str
    max_new_tokens: int
    temperature: float = 0.0


def bench_page(asked: Asked, repeats: int, progress: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Run a race in every way there is, all of them in turn, `repeats` times.

    The server and a page are there all the while, so that nothing but the race differs. The answer holds the race
    and what it ran on, and the `rows`, see `speed_rows`.

    Raises:
        BadInput: the race cannot be run, there is no browser or no playwright, or the page does not start.
    """
    check_browser()
    # A process of its own for the engine alone: this one has threads of clients, which would slow it down.
    with ProcessPoolExecutor(1, get_context("spawn"), _load, (asked.preset,)) as engine:

        def alone() -> Rates:
            return engine.submit(_alone, asked).result()

        def settled(process: int, run: Callable[[], Rates]) -> Measured:
            time.sleep(SETTLE_SECONDS)
            progress()
            return measured(process, run)

        facts, process = engine.submit(_provenance).result(), engine.submit(os.getpid).result()
        alone()  # warms up, and refuses what cannot be run
        with served() as (url, server), opened(url, asked) as page:
            show = partial(shown, page)
            seen, by_program = partial(unseen, url, asked), partial(in_a_program, url, asked)
            for run in (seen, show):  # the first races of a server and of a page take longer
                run()
            ways: dict[str, tuple[int, Callable[[], Rates]]] = {ALONE: (process, alone), UNSEEN: (server, seen)}
            ways |= {PROGRAM: (server, by_program), BROWSER: (server, show)}
            turns: dict[str, Callable[[], Measured]]
            turns = {name: partial(settled, *way) for name, way in ways.items()}
            token = page.evaluate(SHARE)

            def watched() -> Measured:
                with watching(f"{url}watched/{token}"):
                    return settled(server, show)

            found = in_turns({**turns, WATCHED: watched}, repeats)
    return {"command": command("tools.page"), **facts, "race": asdict(asked), "rows": speed_rows(found)}


def measured(process: int, run: Callable[[], Rates]) -> Measured:
    before, began = threads_of(process), time.perf_counter()
    rates = run()
    after, seconds = threads_of(process), time.perf_counter() - began
    return rates, waiting(before, after), serving(before, after, seconds)


def speed_rows(found: Mapping[str, Sequence[Measured]]) -> list[Row]:
    """For each way and lane the median tokens per second, and the mean ratio to two ways of the same turn.

    The rows called `both` also have `waiting`: the time that a thread of the engine waited for a core, on average, as a
    share of the time in which it ran or wanted to. Threads also wait for each other: the loss is this share if all of
    them wait at the same time, and at most this share times the number of threads. `serving` is how much of one core
    all other threads of the process took.
    """

    def rates_of(way: str, lane: str) -> list[float]:
        return [harmonic_mean(rates.values()) if lane == BOTH else rates[lane] for rates, *_ in found[way]]

    rows: list[Row] = []
    for way, turns in found.items():
        for lane in (*LANES, BOTH):
            rates = rates_of(way, lane)
            row = {"way": way, "lane": lane, "runs": len(turns), "tokens_per_second": median(rates)}
            bases = {"ratio_to_alone": ALONE, "ratio_to_unseen": UNSEEN}
            rows.append(row | {name: ratio(rates, rates_of(base, lane)) for name, base in bases.items()})
        for name, place in (("waiting", 1), ("serving", 2)):
            shares: list[Any] = [turn[place] for turn in turns if turn[place] is not None]
            rows[-1][name] = mean_of(shares, most=1.0)
    return rows


def threads_of(process: int) -> Threads:
    """How long each thread of a process has run and waited; empty if the kernel does not count it (Linux does)."""
    threads = {}
    for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            ran, waited, _ = file.read_text().split()
            threads[file.parent.name] = int(ran), int(waited)
    return threads


def waiting(before: Threads, after: Threads) -> float | None:
    """The share of its time that a computing thread waited for a core, on average."""
    spent = _spent(before, after)
    most = max((ran for ran, _ in spent), default=0)
    return fmean(waited / (ran + waited) for ran, waited in spent if ran > most / 2) if most else None


def serving(before: Threads, after: Threads, seconds: float) -> float | None:
    """How much of a core all threads took that do not compute."""
    ran = [ran for ran, _ in _spent(before, after)]
    most = max(ran, default=0)
    return sum(one for one in ran if one <= most / 2) / 1e9 / seconds if most else None


def _spent(before: Threads, after: Threads) -> list[tuple[int, int]]:
    earlier = {name: before.get(name, (0, 0)) for name in after}
    return [(ran - earlier[name][0], waited - earlier[name][1]) for name, (ran, waited) in after.items()]


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """Start the page by `python app.py`. Returns its address and the id of its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    environment = {**os.environ, "GRADIO_SERVER_PORT": str(port)}
    with subprocess.Popen([sys.executable, APP], env=environment, cwd=APP.parent, stdout=subprocess.DEVNULL) as app:
        try:
            end = time.monotonic() + START_SECONDS
            while not _answers(url):
                if time.monotonic() > end or app.poll() is not None:
                    raise BadInput("The page did not start; run `python app.py` to see why.")
                time.sleep(0.1)
            yield url, app.pid
        finally:
            app.terminate()


def _answers(url: str) -> bool:
    try:
        with urlopen(url):
            return True
    except URLError:
        return False


_loaded: list[Loaded] = []  # in the process of the engine alone


def _load(preset: str) -> None:
    _loaded.append(import_quickly("specdemo.models.loaded").load(find_preset(preset)))


def _provenance() -> dict[str, Any]:
    return provenance(_loaded[0])


def _alone(asked: Asked) -> Rates:
    """No server and no page."""
    settings = Settings(k=asked.k, max_new_tokens=asked.max_new_tokens, temperature=asked.temperature)
    entries = list(race(_loaded[0], asked.drafter, _loaded[0].encode(asked.prompt), settings))
    stats = {lane: LaneFigures.of(entry.event for entry in entries if entry.lane == lane) for lane in LANES}
    return {lane: stats[lane].tokens_per_second or 0.0 for lane in LANES}


def unseen(url: str, asked: Asked) -> Rates:
    """One call, and one answer at the end."""
    with closing(_client(url)) as client:
        outcome = client.predict(**asdict(asked), api_name="/compare")
    return {lane: outcome[lane]["stats"]["tokens_per_second"] for lane in LANES}


def in_a_program(url: str, asked: Asked) -> Rates:
    """A program that reads the messages of the race as they come."""
    with closing(_client(url)) as client:
        *_, last = client.submit(**asdict(asked), api_name="/race")
    return {lane: json.loads(last)["end"]["stats"][lane]["tokens_per_second"] for lane in LANES}


def _client(url: str) -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from gradio_client import Client

    return Client(url, verbose=False, analytics_enabled=False)


def check_browser() -> None:
    """Raises BadInput if there is no browser, or no playwright to control it."""
    if executable() is None:
        raise BadInput(f"No browser was found to show the page: install one of {', '.join(BROWSERS)}.")
    if find_spec("playwright") is None:
        raise BadInput("The browser is controlled by playwright: pip install -r tests/requirements.txt")


@contextmanager
def headless() -> Iterator[Browser]:
    """A headless browser on this machine.

    Raises:
        BadInput: there is none, or no playwright to control it.
    """
    check_browser()
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=executable(), args=ARGUMENTS) as browser,
    ):
        yield browser


@contextmanager
def opened(url: str, asked: Asked) -> Iterator[Page]:
    """The page in a headless browser on the same processor, ready to run the race."""
    with headless() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(START_SECONDS * 1000)
        page.goto(f"{url}?{urlencode(asdict(asked))}")
        page.get_by_text("Press Run to start.").wait_for()
        page.locator("[data-stage=ready]").wait_for()
        yield page


def shown(page: Page) -> Rates:
    """Run the race in an open page, to its end."""
    return {lane: float(rate) for lane, rate in page.evaluate(RACE, RACE_SECONDS * 1000).items()}


@contextmanager
def watching(url: str) -> Iterator[None]:
    """So many `WATCHERS` read the events of a page that shares, in a process of their own.

    Raises:
        BadInput: they cannot.
    """
    spawn = get_context("spawn")
    here = spawn.Event()
    followers = spawn.Process(target=_follow, args=(url, here), daemon=True)
    followers.start()
    try:
        while not here.wait(0.1):
            if not followers.is_alive():
                raise BadInput("So many cannot watch the page at once.")
        yield
    finally:
        followers.terminate()
        followers.join()


def _follow(url: str, here: Any) -> None:
    """Read the events until this process is ended; `here` is set when all watchers do."""

    async def follow(client: httpx.AsyncClient, began: asyncio.Semaphore) -> None:
        async with client.stream("GET", url) as events:
            if events.is_error:
                sys.exit(1)
            began.release()
            async for _ in events.aiter_raw():
                pass

    async def follow_all() -> None:
        began = asyncio.Semaphore(0)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            tasks = [asyncio.create_task(follow(client, began)) for _ in range(WATCHERS)]
            for _ in tasks:
                await began.acquire()
            here.set()
            await asyncio.gather(*tasks)

    asyncio.run(follow_all())


SHARE = """async () => {
  specdemo.race.parts.watch.click();
  const dialog = document.querySelector("dialog[open]");
  dialog.querySelector("[data-part=share]").click();
  for (let waited = 0; !specdemo.shares; waited++) await new Promise((done) => setTimeout(done, 50));
  dialog.close();
  return specdemo.shares.token;
}"""

# Waits for an event and asks nothing meanwhile: a waiting Playwright would keep the page busy.
RACE = """(most) => new Promise((done, failed) => {
  const arena = document.querySelector(".sd-arena");
  const rate = (lane) => specdemo.race.show.end.stats[lane].tokens_per_second;
  const fail = (sentence) => failed(new Error(sentence));
  const late = setTimeout(() => fail("The race did not end in time."), most);
  const watch = new MutationObserver(() => {
    const state = arena.dataset.state;
    if (state === "showing") return specdemo.race.skip(); // it is measured, and the engine is free
    if (state === "ended") done({ plain: rate("plain"), speculative: rate("speculative") });
    else if (state === "failed") fail(document.querySelector(".sd-sentence").textContent);
    else return;
    watch.disconnect();
    clearTimeout(late);
  });
  watch.observe(arena, { attributes: true, attributeFilter: ["data-state"] });
  document.querySelector("#run").click();
})"""


def executable() -> str | None:
    """The path of the browser of the system, if there is one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def page(
    preset: PresetName = DEFAULT_PRESET,
    prompt: Annotated[str, Option(help="The prompt of both lanes.")] = PROMPT,
    drafter: Drafter = None,
    k: AnyK = None,
    max_new_tokens: Annotated[int, Option(help=NEW_TOKENS.help)] = 128,
    repeats: Annotated[int, Option(min=1, help="How often everything is run.")] = 5,
    out: JsonFile = None,
) -> None:
    """What it costs the engine to show a race in a browser on the same machine."""
    check_writable(out)
    usual = find_preset(preset).defaults
    asked = Asked(prompt, preset, drafter or usual.drafter, usual.k if k is None else k, max_new_tokens)
    Settings(k=asked.k, max_new_tokens=max_new_tokens)
    with tqdm(total=repeats * len(WAYS)) as bar:
        outcome = bench_page(asked, repeats, bar.update)
    typer.echo(text_table(outcome["rows"], COLUMNS) + "\n")
    save_json(out, outcome)


if __name__ == "__main__":
    main(app, "python -m tools.page")
