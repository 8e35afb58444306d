"""The Lab: every view measures a real, if tiny, model in a real browser."""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from gradio.utils import get_upload_folder
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Browser, Locator, Page, expect

from specdemo.errors import BadInput
from specdemo.studies import distributions, profile
from specdemo.studies.check import Check
from specdemo.studies.explain import tried
from specdemo.studies.lab import STUDIES
from specdemo.studies.lossless import DESCRIPTIONS
from specdemo.studies.plots import Axis, Plot, Section
from specdemo.studies.rules import BROKEN
from specdemo.studies.study import some_of_each
from specdemo.studies.tables import Table
from specdemo.system.progress import check_stopped
from specdemo.ui.engine import Backend, EngineTrouble
from specdemo.ui.lab import run as lab_run
from specdemo.ui.lab.draw import drawn
from specdemo.ui.lab.results import plain
from specdemo.ui.lab.run import LabRun
from tests.harness.files import full_preset
from tests.harness.ui_classes import Engine, Runs

from ..sentences import refuses, telling, tells
from .browser import choose, serious, served_engine, settings, waiting
from .browser import run as race
from .conftest import Tabs, Visit, visits

QUICK: dict[str, dict[str, Any]] = {
    "profile": {"repeats": 1},
    "theory": {},
    "sweep": {"prompts": 1, "max_new_tokens": 8},
    "domains": {"prompts": 1, "max_new_tokens": 16},
    "lossless": {"prompts": 2, "rounds": 400, "drafter": "ngram"},
    "check": {"seconds": 10},
    "causes": {"each": 1, "max_new_tokens": 16, "drafter": "ngram"},
}
LONG = {"rounds": 20_000, "prompts": 0, "drafter": "ngram"}
Open = Callable[..., tuple[Page, Locator]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A tiny model with everything, and the same with nothing but itself."""
    full = full_preset(tmp_path_factory.mktemp("lab"))
    bare = replace(full, name="bare", draft_model=None, ngram_table=None, skip_layers=None, heads={})
    engine = Engine({"toy": full, "bare": bare}, Backend())
    *_, status = engine.follow("toy")
    assert status.stage == "ready", status.words

    yield engine
    list(engine.stream(engine.status.preset, lambda loaded: (loaded.release() for _ in "1")))


@pytest.fixture(scope="module")
def lab_url(engine: Engine) -> Iterator[str]:
    with served_engine(engine, {"facts": ["What is rain?"]}, Runs(grace=1.0)) as url:
        yield url


def opened(visit: Visit, engine: Engine, lab_url: str, **options: Any) -> Page:
    list(engine.follow("toy"))
    page = visit(at=lab_url, **options)
    page.locator("[data-stage=ready]").wait_for()
    page.get_by_role("tab", name="Lab").click()
    return page


@pytest.fixture
def new_lab(visit: Visit, lab_url: str, engine: Engine) -> Open:
    """Opens a view of the Lab as a new visitor."""

    def _open(view: str, **options: Any) -> tuple[Page, Locator]:
        page = opened(visit, engine, lab_url, **options)
        return page, choose(page, view)

    return _open


@pytest.fixture(scope="module")
def page_of_all(chromium: Browser, tabs: Tabs, lab_url: str, engine: Engine) -> Iterator[Page]:
    with visits(chromium, tabs, lab_url) as visit:
        yield opened(visit, engine, lab_url)


@pytest.fixture
def lab(page_of_all: Page, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a view on a page that tests share: to open the Lab takes longer than most of its runs.

    Runs show what they have found when they end, and not before, which is tested elsewhere.
    """
    monkeypatch.setattr(lab_run, "PICTURE_SECONDS", 60.0)

    def _open(view: str) -> tuple[Page, Locator]:
        list(engine.follow("toy"))
        page_of_all.set_viewport_size({"width": 1280, "height": 900})
        return page_of_all, choose(page_of_all, view)

    return _open


def fill(page: Page, view: str, values: dict[str, Any]) -> None:
    fields = {field.name: field for field in STUDIES[view].form()}
    for name, value in values.items():
        control = page.locator(f"#lab-{view}-{name}")
        if STUDIES[view] is Check and not control.is_visible():
            page.locator("#lab-check").get_by_role("button", name=fields[name].group).click()
            page.wait_for_timeout(250)  # Gradio fills in a moment later what it begins with
        match fields[name].kind:
            case "choice":
                control.get_by_label(fields[name].choices[value]).check()
            case "list" | "drafter" as kind:
                control.locator("input").click()
                shown = value if kind == "drafter" else fields[name].choices[value]
                page.get_by_role("option", name=shown, exact=True).click()
            case "text":
                control.locator("textarea").fill(value)
            case _:
                control.locator("input").fill(str(value))
                expect(control.locator("input")).to_have_value(str(value))


def says(shown: Locator) -> Locator:
    return shown.locator("[role=status]")


def measure(page: Page, view: str, until: str = "Done.", **values: Any) -> None:
    """Fill in the form, press Run and wait."""
    fill(page, view, QUICK[view] | values)
    shown = page.locator(f"#lab-{view}")
    says(shown).evaluate_all("found => found.forEach(said => { said.textContent = ''; })")  # what an earlier run said
    shown.locator(".lab-run").click()
    expect(says(shown)).to_contain_text(until, timeout=60_000)


def files(page: Page, shown: Locator) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What the two buttons download."""
    texts = []
    for kind in ("JSON", "CSV"):
        with page.expect_download() as download:
            shown.get_by_text(f"Download {kind}").click()
        texts.append(download.value.path().read_text(encoding="utf-8"))
        assert download.value.suggested_filename.endswith(f".{kind.lower()}")
    return json.loads(texts[0]), list(csv.DictReader(io.StringIO(texts[1], newline="")))


def figure(shown: Locator, title: str) -> Locator:
    return shown.locator(".lab-figure", has_text=title)


def spoken(shown: Locator, title: str) -> str:
    """What a plot says to a screen reader."""
    return figure(shown, title).locator("[role=graphics-document]").get_attribute("aria-label") or ""


TEXTS = "svg.marks .mark-text.role-mark"


def bars(shown: Locator, title: str) -> list[tuple[str, str]]:
    """The names and the values of a plot's bars, which are also written in it."""
    found = re.findall(r"(.+?): ([^:,]+)(?:, |$)", spoken(shown, title).split(". ", 1)[1])
    names, written = (layer.locator("text").all() for layer in figure(shown, title).locator(TEXTS).all())
    assert [name for name, _ in found] == [
        " ".join(name.locator("tspan").all_text_contents()) or name.text_content() for name in names
    ]
    assert [value for _, value in found] == [value.text_content() for value in written]
    return found


def points(shown: Locator, title: str) -> Locator:
    return figure(shown, title).locator("[aria-roledescription=point]")


def cells(fold: Locator) -> list[list[str]]:
    """The rows of a table that is open."""
    rows = fold.get_by_role("row").filter(has=fold.page.get_by_role("gridcell"))
    rows.first.wait_for()
    return [[cell.strip() for cell in row.get_by_role("gridcell").all_inner_texts()] for row in rows.all()]


# Every view ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_profile_is_stopped_in_its_warm_up_and_then_measured(lab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, stopped = profile._timed_passes, threading.Event()

    def held(*args: Any) -> Any:
        assert stopped.wait(20)
        return timed(*args)

    page, shown = lab("profile")
    fill(page, "profile", QUICK["profile"])
    with monkeypatch.context() as patch:
        patch.setattr(profile, "_timed_passes", held)
        shown.locator(".lab-run").click()
        expect(shown.locator(".lab-progress")).to_contain_text("Warming up")
        expect(shown.locator(".lab-progress")).to_be_in_viewport()
        expect(says(shown)).to_be_empty()
        shown.locator(".lab-stop").click()
        expect(says(shown)).to_contain_text(telling("Stopping"))
        stopped.set()  # it does not wait for the warm-up
        expect(says(shown)).to_contain_text(telling("Stopped no results"))
    expect(shown.get_by_text("Download JSON")).to_be_hidden()
    measure(page, "profile")
    expect(shown.get_by_text("Download JSON")).to_be_visible()
    whole, rows = files(page, shown)
    assert [row["drafter"] for row in whole["drafters"]] == [*whole["asked"]["drafters"]]
    assert {"eagle", "block", "draft-model", "layer-skip"} <= set(whole["asked"]["drafters"])
    assert whole["environment"]["dtype"]
    assert len(rows) == sum(len(whole[part]) for part in ("models", "passes", "drafters"))
    assert tells(shown.locator(".lab-section strong").first.inner_text(), "5 takes")
    description = spoken(shown, "What a pass over several tokens takes")
    one, last = whole["passes"][0], whole["passes"][16]
    assert (one["cost"], last["tokens"]) == (1.0, 17)
    assert f"1: 1.00×, 2: {whole['passes'][1]['cost']:.2f}×" in description
    assert f"17: {last['cost']:.2f}×" in description
    assert points(shown, "What a pass over several tokens takes").count() == len(whole["passes"])
    (target, cost), (draft_model, _), *_ = bars(shown, "One token, one guess")
    assert (target.startswith("target: "), draft_model.startswith("draft model: ")) == (True, True)
    assert float(cost) == pytest.approx(whole["models"][0]["p50_ms"], rel=0.01)


@pytest.mark.slow
def test_files_can_be_had_after_later_runs_and_leave_nothing_beside_gradios_copies(lab: Open) -> None:
    kept = left_behind()
    page, shown = lab("domains")
    measure(page, "domains")
    first = files(page, shown)
    choose(page, "sweep")
    measure(page, "sweep")
    assert files(page, choose(page, "domains")) == first
    assert left_behind() - kept <= {Path(get_upload_folder())}


def left_behind() -> set[Path]:
    """What lies in the temporary folder, without what the browsers and the compilers of other tests put there."""
    others = re.compile(r"playwright|cc\w{6}\.")
    return {path for path in Path(tempfile.gettempdir()).iterdir() if not others.match(path.name)}


@pytest.mark.slow
def test_theory_answers_at_once_and_sets_a_measurement_beside_it(lab: Open) -> None:
    page, shown = lab("theory")
    fill(page, "theory", {"draft_ms": 22.09, "target_ms": 29.92, "alpha": 0.9})
    verdict = shown.locator(".lab-section strong").first
    expect(verdict).to_contain_text(telling("90%"))
    shown.get_by_role("button", name="For each K").click()
    table = shown.locator(".lab-section").first
    expect(table).to_contain_text("1.312×")
    rows = [row[:4] for row in cells(shown)]
    assert ["1", "1.151×", "1.00×", "0.738"] in rows
    assert ["10", "1.312×", "1.00×", "0.944"] in rows
    assert "measured" not in spoken(shown, "Speed-up for each K")
    measure(page, "theory", drafter="draft-model", k=3)
    whole, _ = files(page, shown)
    alpha = page.locator("#lab-theory-alpha input")
    expect(alpha).not_to_have_value("0.9")
    assert float(alpha.input_value()) == pytest.approx(whole["alpha"], rel=1e-3)
    assert len(whole["passes"]) == 17
    # The plot beside it has a point of its own where some acceptance rate would break even.
    lone = figure(shown, "Speed-up for each K").locator("svg.marks .role-mark text")
    expect(lone).to_have_text(f"{whole['race']['measured']:.2f}×")
    parts = dict(bars(shown, "From predicted to measured speed-up"))
    said = [value for name, value in parts.items() if tells(name, "formula")]
    assert said == [f"{whole['race']['predicted']:.2f}×"]
    assert len(parts) == len(whole["race"]["parts"]) + 2
    expect(table).to_contain_text(f"{whole['rows'][2]['verify_cost']:.2f}×")  # of a pass over 4 tokens, as measured


@pytest.mark.slow
def test_theory_takes_the_numbers_of_the_last_race(lab: Open) -> None:
    page, shown = lab("theory")
    shown.get_by_role("button", name="Use my last race").click()
    expect(says(shown)).to_contain_text(telling("Race first"))
    page.get_by_role("tab", name="Race").click()
    settings(page)
    page.fill("#max-new-tokens input", "48")
    page.locator("#auto input").uncheck()
    race(page, "Hello there, how are you today?")
    stats = page.evaluate("[...document.querySelectorAll('.sd-figures dd')].map(dd => dd.textContent)")
    ratio = page.locator(".sd-ratio").inner_text()
    choose(page, "theory")
    shown.get_by_role("button", name="Use my last race").click()
    expect(figure(shown, "Speed-up for each K").locator("svg.marks .role-mark text")).to_have_text(ratio)
    assert f"{100 * float(page.input_value('#lab-theory-alpha input')):.0f}%" == stats[0]


@pytest.mark.slow
def test_sweep(lab: Open) -> None:
    page, shown = lab("sweep")
    measure(page, "sweep")
    whole, rows = files(page, shown)
    assert [(row["category"], row["k"]) for row in rows] == [
        (c, k) for c in ("easy", "hard") for k in ["0", "1", "2", "4", "8", "16"]
    ]
    assert shown.locator(".lab-section li").all_inner_texts() == [best["sentence"] for best in whole["best"]]
    label = spoken(shown, "Speed-up")
    assert ", ".join(f"{row['k']}: {float(row['speedup.mean']):.2f}×" for row in rows[:6]) in label
    measure(page, "sweep", vary="temperature")
    expect(figure(shown, "Tokens per second").locator("svg.marks")).to_contain_text("target alone, easy")
    whole, rows = files(page, shown)
    assert {row["temperature"] for row in whole["summary"]} == {0, 0.3, 0.7, 1.0, 1.5}


def test_check(lab: Open) -> None:
    page, shown = lab("check")
    race_it = shown.get_by_role("button", name="Race it")
    expect(race_it).to_be_hidden()
    fill(page, "check", QUICK["check"])
    expect(shown.locator(".lab-wait[data-testid=markdown]")).to_have_text(telling("10 seconds"))
    measure(page, "check")
    whole, rows = files(page, shown)
    assert "server" not in str(whole["asked"])
    assert whole["answer"] in ("yes", "no", "unclear")
    tried = {row["drafter"] for row in rows}
    assert tried == {row["drafter"] for row in whole["trials"]} <= set(whole["asked"]["drafters"])
    assert len(whole["kinds"]) == 8
    verdict, to_do = (shown.locator(f".lab-section {tag}").first.inner_text() for tag in ("strong", "li"))
    assert verdict.startswith(whole["answer"].capitalize())
    assert verdict in whole["paste"]
    expect(shown.locator(".lab-wait[data-testid=markdown]")).to_be_hidden()
    expect(race_it).to_be_visible()
    expect(shown.locator(".cm-content")).to_have_text(whole["paste"].replace("\n", ""))
    assert len(bars(shown, "Speed-up by kind of prompt")) == len([row for row in whole["kinds"] if row["speed_up"]])
    expect(shown.locator(".lab-figure:visible")).to_have_count(1)
    shown.get_by_role("button", name="Details").click()
    expect(figure(shown, "Speed-up of the drafters tried").locator("svg.marks")).to_be_visible()
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    with page.expect_download() as download:
        shown.get_by_text("Download HTML").click()
    page_of_html = unescape(download.value.path().read_text(encoding="utf-8"))
    assert verdict in page_of_html
    assert to_do in page_of_html
    assert download.value.suggested_filename == "specdemo-check.html"


@pytest.mark.slow
def test_causes(lab: Open) -> None:
    page, shown = lab("causes")
    measure(page, "causes")
    _, rows = files(page, shown)
    assert {row["cause"] for row in rows} >= {"kind of text", "language", "temperature"}
    by_language = [row for row in rows if row["cause"] == "language" and row["acceptance_rate.mean"]]
    assert len(bars(shown, "By language")) == len(by_language)


@pytest.mark.slow
def test_domains(lab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    stream = Engine.stream

    def listen(engine: Engine, preset: str, run: Any, local: bool = False, *work: Any) -> Any:
        seen.append(local)
        return stream(engine, preset, run, local, *work)

    monkeypatch.setattr(Engine, "stream", listen)
    page, shown = lab("domains")
    measure(page, "domains")
    assert seen == [True]  # a page on this machine is known
    _, rows = files(page, shown)
    for title, by in (
        ("By category", "category"),
        ("By position", "position in the draft"),
    ):
        rates = {row["name"]: row["acceptance_rate"] for row in rows if row["by"] == by and row["acceptance_rate"]}
        assert dict(bars(shown, title)) == {name: f"{100 * float(rate):.0f}%" for name, rate in rates.items()}
        assert rates


@pytest.mark.slow
def test_lossless(lab: Open) -> None:
    page, shown = lab("lossless")
    rounds = 800
    prompt = "the cat sat on the mat and the dog sat"
    measure(page, "lossless", broken="resample-from-p", rounds=rounds, prompt=prompt)
    whole, rows = files(page, shown)
    assert "CHANGES" in shown.locator(".lab-section .prose strong").all_inner_texts()[-4]  # and three plots' titles
    assert {check["text"] for check in whole["texts"]} == {"ngram", "transformers"}
    assert all(check["identical"] or check["near_tie"] for check in whole["texts"])
    assert dict(bars(shown, "Texts that are the target's own")).keys() == {"ngram", "transformers"}
    shares = [token["count"] / rounds for token in whole["sampling"]["likeliest"]]
    drawn = [float(value.removesuffix("%")) / 100 for _, value in bars(shown, "The likeliest")]
    assert drawn == pytest.approx(shares, abs=0.00051)
    assert {row["part"] for row in rows} == {"texts", "sampling"}


@pytest.mark.slow
def test_the_console_is_empty_on_every_tab(tabs: Tabs, lab_url: str, engine: Engine) -> None:
    """Vega once wrote some two hundred warnings into it. All messages are heard here; errors and warnings are at every
    visit, also while the other studies of this file run."""
    list(engine.follow("toy"))
    page, heard = tabs.take(), list[str]()
    hear = lambda message: heard.append(f"{message.type}: {message.text}")  # noqa: E731
    page.on("console", hear)
    page.goto(lab_url)
    page.locator("[data-stage=ready]").wait_for()
    race(page, "Hello there, how are you today?")
    page.get_by_role("tab", name="Lab").click()
    for view in STUDIES:
        shown = choose(page, view)
        if view == "domains":
            measure(page, view)
            expect(shown.locator(".lab-figure svg.marks")).to_have_count(2)
    page.get_by_role("tab", name="Race").click()
    page.click("#race .sd-again")
    page.locator(".sd-play:enabled").click()
    page.locator("#replay [data-state=ended]").wait_for()
    page.click(".sd-through")
    page.remove_listener("console", hear)
    tabs.give_back(page)
    assert heard == []


# While it runs ---------------------------------------------------------------------------------------------


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run leaves the machine to other tests most of the time."""
    sampling = distributions.sampling

    def with_pauses(*asked: Any) -> Iterator[distributions.Samples]:
        for number, sampled in enumerate(sampling(*asked)):
            yield sampled
            for _ in range(10 if number else 1):
                time.sleep(0.1)
                check_stopped()

    monkeypatch.setattr(distributions, "sampling", with_pauses)


def begin_long(page: Page, shown: Locator) -> None:
    """A run of minutes, of which there is something to see."""
    fill(page, "lossless", LONG)
    shown.locator(".lab-run").click()
    figure(shown, "How far off").locator("svg.marks").wait_for()


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_pictures_come_while_it_runs_and_move_nothing_and_stop_keeps_them(new_lab: Open) -> None:
    page, shown = new_lab("lossless")
    begin_long(page, shown)
    level = shown.locator(".lab-progress")
    expect(level).to_contain_text("s left")
    assert 0 < float(re.findall(r"([\d.]+)%", level.inner_text())[0]) < 100
    figure(shown, "How far off").scroll_into_view_if_needed()
    page.evaluate(SHIFTS)
    before = spoken(shown, "How far off")
    changed = figure(shown, "How far off").locator(f"[role=graphics-document]:not([aria-label={json.dumps(before)}])")
    changed.wait_for()
    assert page.evaluate("window.shifts") < 0.01
    shown.locator(".lab-stop").click()
    expect(says(shown)).to_contain_text(telling("Stopped results far"))
    whole, _ = files(page, shown)
    assert whole["stopped"]
    assert 0 < whole["sampling"]["rounds"] < 20_000
    choose(page, "domains")
    measure(page, "domains")  # the model is free again


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_other_tabs_tell_what_runs_and_stop_it_and_what_is_started_there_waits_and_then_runs(new_lab: Open) -> None:
    page, shown = new_lab("lossless", forgive="429")
    begin_long(page, shown)
    elsewhere, title = page.locator(".sd-elsewhere"), STUDIES["lossless"].title
    expect(elsewhere).to_be_hidden()
    race(page, "one two three", until="waiting")
    expect(elsewhere).to_contain_text(title)
    expect(elsewhere).to_contain_text(re.compile(r"\d%.* left"))
    expect(page.locator("#race .sd-sentence")).to_contain_text(f"Waits for: {title}")
    expect(page.locator("#race .sd-why-exact")).to_contain_text(waiting(1, 1))
    third = choose(page, "sweep")
    third.locator(".lab-run").click()
    expect(says(third)).to_contain_text(telling("2 requests"))
    expect(elsewhere).to_be_visible()
    elsewhere.get_by_role("button").click()
    page.locator("#race [data-state=ended]").wait_for(state="attached")
    expect(elsewhere).to_be_hidden()
    choose(page, "lossless")
    expect(says(shown)).to_contain_text(telling("Stopped results far"))
    whole, _ = files(page, shown)  # though another run was begun after it
    assert whole["stopped"]


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_while_a_run_goes_on_another_visitor_can_leave_the_line(new_lab: Open, visit: Visit, lab_url: str) -> None:
    page, shown = new_lab("lossless")
    begin_long(page, shown)
    other = visit(at=lab_url)
    other.get_by_role("tab", name="Lab").click()
    theirs = choose(other, "domains")
    fill(other, "domains", QUICK["domains"])
    theirs.locator(".lab-run").click()
    expect(says(theirs)).to_contain_text(waiting(1, 1))
    theirs.locator(".lab-stop").click()
    expect(says(theirs)).to_have_text("Stopped.")
    theirs.locator(".lab-run").click()
    expect(says(theirs)).to_contain_text(waiting(1, 1))
    shown.locator(".lab-stop").click()
    expect(says(shown)).to_contain_text("Stopped")
    expect(says(theirs)).to_have_text("Done.")
    assert figure(shown, "How far off").is_visible()


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_a_closed_tab_frees_the_model(new_lab: Open, engine: Engine) -> None:
    page, shown = new_lab("lossless")
    begin_long(page, shown)
    page.close()
    began = time.monotonic()
    assert list(engine.stream("toy", lambda loaded: (number for number in (1, 2)))) in ([[1, 2]], [[1], [2]])
    assert time.monotonic() - began < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("**/races/*", "server reached. again."),
        ("**/gradio_api/queue/data*", "Connection server lost"),
    ],
)
def test_a_server_that_is_lost_during_a_run_is_told(new_lab: Open, engine: Engine, lost: str, words: str) -> None:
    page, shown = new_lab("profile", forgive="")
    fill(page, "profile", QUICK["profile"])
    page.evaluate("specdemo.LOST_MS = 500")
    page.route(lost, lambda route: route.abort())
    shown.locator(".lab-run").click()
    expect(page.get_by_text(telling(words))).to_be_visible()
    shown.locator(".lab-stop").click()
    page.unroute_all()
    list(engine.stream("toy", lambda loaded: (number for number in (1, 2))))  # nobody shows it any more
    if "queue" in lost:  # where Gradio itself hears of nothing
        page.reload()
        page.get_by_role("tab", name="Lab").click()
        choose(page, "profile")
    page.evaluate("specdemo.LOST_MS = 15_000")
    measure(page, "profile")


def test_what_is_wrong_is_said(lab: Open) -> None:
    page, shown = lab("domains")
    measure(page, "domains", until="not 9999", max_new_tokens=9999)
    expect(says(shown)).to_contain_text(telling('"Tokens text" 8 512 9999'))
    measure(page, "domains")
    choose(page, "theory")
    fill(page, "theory", {"alpha": 2})
    expect(says(page.locator("#lab-theory"))).to_contain_text(telling("0 1 2"))


@pytest.mark.slow
def test_it_measures_the_preset_of_the_form_whatever_others_have_loaded(
    visit: Visit, lab_url: str, engine: Engine
) -> None:
    list(engine.follow("bare"))  # as another visitor would
    page = visit(at=lab_url)
    page.get_by_role("tab", name="Lab").click()
    measure(page, "profile")
    whole = files(page, page.locator("#lab-profile"))[0]
    assert whole["preset"] == "toy"
    assert "draft-model" in whole["asked"]["drafters"]  # which the other one lacks
    expect(page.locator(".sd-model")).to_have_text("Toy")


@pytest.mark.slow
def test_drafters_that_were_not_known_to_be_missing_are_left_out(visit: Visit, lab_url: str, engine: Engine) -> None:
    list(engine.follow("toy"))
    page = visit("?preset=bare", at=lab_url)
    page.get_by_role("tab", name="Lab").click()
    measure(page, "profile")
    asked = files(page, page.locator("#lab-profile"))[0]["asked"]
    assert set(asked["drafters"]) == {"prompt-lookup", "suffix", "lookahead"}
    list(engine.follow("toy"))


@pytest.mark.slow
def test_drafters_that_a_preset_lacks_are_not_offered(new_lab: Open, engine: Engine) -> None:
    page, shown = new_lab("domains")
    page.get_by_role("tab", name="Race").click()
    settings(page)
    page.locator("#preset input").click()
    page.get_by_role("option").nth(1).click()
    page.get_by_role("tab", name="Lab").click()
    drafter = shown.locator("#lab-domains-drafter")
    page.wait_for_timeout(1000)  # a list of Gradio's that is open goes wrong if its choices get fewer
    drafter.locator("input").click()
    able = [re.compile(f"{name}$") for name in ("prompt-lookup", "suffix", "lookahead")]
    expect(page.get_by_role("option")).to_have_text(able)
    page.keyboard.press("Escape")
    boxes = choose(page, "sweep").locator("#lab-sweep-drafters")
    expect(boxes.get_by_role("checkbox")).to_have_count(3)
    list(engine.follow("toy"))


# How it looks ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_every_view_fits_and_is_accessible(lab: Open, width: int) -> None:
    page, _ = lab("domains")
    for name, fold in (("domains", "Counts"), ("sweep", "All figures")):
        shown = choose(page, name)
        if not shown.locator(".lab-figure").count():  # of an earlier test
            measure(page, name)
        if not shown.get_by_role("gridcell").first.is_visible():
            shown.get_by_role("button", name=fold).click()
        shown.get_by_role("gridcell").first.wait_for()
    page.set_viewport_size({"width": width, "height": 900})
    if width == 390:
        page.keyboard.press("d")  # dark
    for view in STUDIES:
        shown = choose(page, view)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for plot in shown.locator("[role=graphics-document] svg.marks:visible").all():
            assert box(plot)["width"] > 250  # drawn again for the room there is
        if width == 1280 or view in ("theory", "domains"):
            assert serious(page, f"#lab-{view}") == []
    assert serious(page, "#lab .tab-wrapper") == []
    if width == 390:
        page.keyboard.press("d")  # as it was


@pytest.mark.slow
def test_the_keys_of_the_race_rest_while_the_lab_shows(new_lab: Open) -> None:
    page, _ = new_lab("profile")
    page.keyboard.press("r")
    page.keyboard.press("h")
    page.get_by_role("tab", name="Race").click()
    assert page.locator(".sd-arena").get_attribute("data-state") == "opened"
    assert page.locator(".sd-hide input").is_checked()  # as the finish has it
    page.keyboard.press("h")
    assert not page.locator(".sd-hide input").is_checked()


def box(part: Locator) -> dict[str, float]:
    found = part.bounding_box()
    assert found is not None
    return dict(found)  # type: ignore[arg-type]


SHIFTS = """window.shifts = 0;
    new PerformanceObserver(list => list.getEntries().forEach(shift => { window.shifts += shift.value; }))
        .observe({ type: 'layout-shift' });"""
HOSTILE = "<img src=x onerror='window.hurt = 1'>${window.hurt = 1}{{value}}"


@pytest.mark.slow
def test_plots_are_drawn_to_scale_and_take_any_text_as_text(lab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    dots = [(0, 1, 0.5, 1.5), (1, 2, None, None), (4, 4, 3, 100)]
    dots_of = [dict(zip(("at", "value", "low", "high"), dot, strict=True)) for dot in dots]
    x, y, shares = Axis(HOSTILE), Axis(HOSTILE, ".2f"), Axis(HOSTILE, ".0%", end=1)
    rows = [{"at": HOSTILE, "value": 0.25, "low": 0.1, "high": 0.5, "own": 0.4}]
    plots: list[tuple[Plot, Any]] = [
        (Plot(HOSTILE, HOSTILE, {"value": HOSTILE}, y, "at", x, rule=(1, f"{HOSTILE} rule")), dots_of),
        (Plot(HOSTILE, HOSTILE, {"value": ""}, shares, "at", rule=("own", HOSTILE)), rows),
    ]
    hostile = Table(HOSTILE, [HOSTILE], [HOSTILE], [[HOSTILE]])
    section = Section(HOSTILE, [HOSTILE], plots, [hostile], HOSTILE)
    monkeypatch.setattr(STUDIES["domains"], "sections", lambda _: [section])
    page, shown = lab("domains")
    measure(page, "domains")
    expect(shown.locator(".lab-section li")).to_contain_text(HOSTILE)  # after the picture of an earlier test
    assert [part.inner_text() for part in shown.locator(".lab-section .prose strong").all()][:2] == [HOSTILE, HOSTILE]
    drawn = shown.locator(".lab-figure").nth(0)
    expect(drawn.locator("[aria-roledescription=point]")).to_have_count(3)
    boxes = [box(dot) for dot in drawn.locator("[aria-roledescription=point]").all()]
    across, up = ([box[at] + box[size] / 2 for box in boxes] for at, size in (("x", "width"), ("y", "height")))
    assert (across[2] - across[0]) / (across[1] - across[0]) == pytest.approx(4, rel=0.01)
    assert (up[0] - up[2]) / (up[0] - up[1]) == pytest.approx(3, rel=0.01)
    field = box(drawn.locator("svg.marks"))
    for rule in drawn.locator("svg.marks .mark-rule.role-mark line").all():
        reached = box(rule)
        assert field["y"] <= reached["y"]
        assert reached["y"] + reached["height"] <= field["y"] + field["height"]
    second = shown.locator(".lab-figure").nth(1)
    grid = [box(line)["x"] for line in second.locator("svg.marks .role-axis-grid line").all()]
    begin, long = min(grid), max(grid) - min(grid)  # from 0 to 1
    bar = box(second.locator("svg.marks .mark-rect.role-mark path").first)
    assert bar["width"] / long == pytest.approx(0.25, abs=0.02)
    reach = box(second.locator("svg.marks .mark-rule.role-mark line"))
    bar, tick = (box(path) for path in second.locator("svg.marks .mark-rect.role-mark path").all()[:2])
    for at, share in ((reach["x"], 0.1), (tick["x"] + tick["width"] / 2, 0.4)):
        assert (at - begin) / long == pytest.approx(share, abs=0.02)
    assert reach["width"] / long == pytest.approx(0.4, abs=0.02)
    assert "┃" in second.inner_text()
    drawn.locator("[aria-roledescription=point]").first.hover()
    expect(page.locator("#vg-tooltip-element")).to_contain_text(telling("1.00 0.50 1.50"))
    assert shown.locator("img").count() == 0
    assert page.evaluate("window.hurt") is None


# Without a browser -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pictures_are_made_now_and_then_and_the_last_one_stays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_run, "PICTURE_SECONDS", 0.0)
    monkeypatch.setattr("specdemo.ui.engine.pauses", lambda *_: (0.0, 0.0))  # nor do steps wait to be sent together
    form = {field.name: field.value for field in STUDIES["lossless"].form()}
    form |= {"drafter": "ngram", "rounds": 400, "prompts": 0}
    form["prompt"] = "the cat sat on the mat and the dog sat"
    job = LabRun("toy", STUDIES["lossless"], STUDIES["lossless"].read(form))
    *steps, last = map(json.loads, job.play(engine))
    shares = [step["share"] for step in steps]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert job.pictured >= 2
    assert last["pictured"] == job.pictured
    assert [section and section[0].title[:2] for section in job.picture] == [None, "2.", "3."]
    assert tells(str(job.picture), "difference found")
    assert last["end"] == "Done."
    assert job.ended.is_set()


def test_a_failure_of_a_run_is_told(engine: Engine) -> None:
    form = {field.name: field.value for field in STUDIES["domains"].form()} | {"drafter": "none"}
    with refuses(BadInput, "none"):
        STUDIES["domains"].read(form)
    job = LabRun(
        "toy", STUDIES["domains"], STUDIES["domains"].read(form | {"drafter": "ngram"}) | {"drafter": "psychic"}
    )
    with refuses(EngineTrouble, "psychic"):
        list(job.play(engine))
    assert job.ended.is_set()


# What the Lab is asked and says, without a browser or a model -----------------------------------------------

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(st.text()),
    st.lists(st.floats()),
    st.just(["ngram"]),
)


@pytest.mark.parametrize("view", STUDIES)
@given(data=st.data())
def test_any_form_is_read_or_refused_in_words(view: str, data: st.DataObject) -> None:
    fields = STUDIES[view].form()
    given = data.draw(st.fixed_dictionaries({field.name: st.one_of(values, st.just(field.value)) for field in fields}))
    try:
        read = STUDIES[view].read(given)
    except BadInput:
        return
    assert all(field.low <= read[field.name] <= field.high for field in fields if field.kind in ("whole", "number"))


@given(st.dictionaries(st.sampled_from(["draft_ms", "target_ms", "alpha"]), values))
def test_theory_of_any_numbers_is_a_picture_or_refused(asked: dict[str, Any]) -> None:
    try:
        (section,) = drawn(tried(asked))
    except BadInput:
        return
    assert section is not None
    assert not re.search(r"\bNaN\b|Infinity", "".join(figure.plot for figure in section[1] if figure))


def test_the_words_of_the_broken_rules_are_those_of_the_rules_that_there_are() -> None:
    assert list(DESCRIPTIONS) == list(BROKEN)


@given(st.text())
def test_any_text_is_plain_in_markdown(text: str) -> None:
    assert re.sub(r"\\(.)", r"\1", plain(text)) == text
    assert not re.search(r"(?<!\\)(?:\\\\)*[<`*_\[$&]", plain(text))


def test_prompts_are_taken_from_each_category_in_turn() -> None:
    assert [prompt.id for prompt in some_of_each("easy-hard", 2)] == ["easy-1", "hard-1", "easy-2", "hard-2"]
    assert len({prompt.category for prompt in some_of_each("domains", 3)}) == 8
