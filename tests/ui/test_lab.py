"""The Lab: every view measures a real, if tiny, model in a real browser; and what it is asked and told without one."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Locator, Page, expect

from specdemo.lab import profile
from specdemo.types import BadInput
from specdemo.ui import lab_run
from specdemo.ui.engine import Engine, EngineTrouble, real_backend
from specdemo.ui.lab_run import LabRun
from specdemo.ui.lab_studies import some_of_each, theory_of
from specdemo.ui.lab_views import VIEWS
from tests.unit.checkpoints import full_preset

from .browser import run as race
from .browser import served_engine
from .conftest import Visit
from .test_page import AXE

QUICK: dict[str, dict[str, Any]] = {
    "profile": {"repeats": 1},
    "theory": {},
    "sweep": {"prompts": 1, "max_new_tokens": 8},
    "domains": {"prompts": 1, "max_new_tokens": 16},
    "lossless": {"prompts": 2, "rounds": 400, "drafter": "ngram"},
}
Open = Callable[..., tuple[Page, Locator]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A tiny model with everything, and the same with nothing but itself."""
    full = full_preset(tmp_path_factory.mktemp("lab"))
    bare = replace(full, name="bare", draft_model=None, ngram_table=None, skip_layers=None, heads={})
    engine = Engine({"toy": full, "bare": bare}, real_backend())
    *_, status = engine.follow("toy")
    assert status.stage == "ready", status.words
    yield engine
    list(engine.stream(engine.status.preset, lambda loaded: (loaded.release() for _ in "1")))


@pytest.fixture(scope="module")
def lab_url(engine: Engine) -> Iterator[str]:
    with served_engine(engine, {"facts": ["What is rain?"]}) as url:
        yield url


@pytest.fixture
def lab(visit: Visit, lab_url: str) -> Open:
    """Opens a view of the Lab as a new visitor."""

    def _open(view: str, **options: Any) -> tuple[Page, Locator]:
        page = visit(at=lab_url, **options)
        page.locator("[data-stage=ready]").wait_for()
        page.get_by_role("tab", name="Lab").click()
        page.get_by_role("button", name=VIEWS[view].title, exact=True).click()
        return page, page.locator(f"#lab-{view}")

    return _open


def fill(page: Page, view: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        control = page.locator(f"#lab-{view}-{name}")
        if control.evaluate("node => node.tagName") == "SELECT":
            control.select_option(str(value))
        else:
            control.fill(str(value))


def measure(page: Page, view: str, until: str = "ended", **values: Any) -> None:
    """Fill in the form, press Run and wait."""
    fill(page, view, QUICK[view] | values)
    page.click(f"#lab-{view} .sd-lab-run")
    page.locator(f"#lab-{view}[data-state={until}]").wait_for()


def files(page: Page, shown: Locator) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What the two buttons download."""
    texts = []
    for kind in ("json", "csv"):
        with page.expect_download() as download:
            shown.locator(f".sd-{kind}").click()
        texts.append(download.value.path().read_text(encoding="utf-8"))
    return json.loads(texts[0]), list(csv.DictReader(io.StringIO(texts[1], newline="")))


def bars(shown: Locator, title: str) -> list[tuple[str, str]]:
    """The names and the values of a plot's bars."""
    figure = shown.locator("figure", has_text=title)
    items = figure.locator(".sd-bars li").all()
    return [(item.locator(".sd-bar-name").inner_text(), item.locator("b").inner_text()) for item in items]


# Every view ------------------------------------------------------------------------------------------------


def test_profile(lab: Open) -> None:
    page, shown = lab("profile")
    measure(page, "profile")
    whole, rows = files(page, shown)
    assert [row["drafter"] for row in whole["drafters"]] == [*whole["asked"]["drafters"]]
    assert {"eagle", "block", "draft-model", "layer-skip"} <= set(whole["asked"]["drafters"])
    assert whole["environment"]["dtype"]
    assert len(rows) == sum(len(whole[part]) for part in ("models", "passes", "drafters"))
    assert shown.locator(".sd-verdict").inner_text().startswith("One pass over 5 tokens takes")
    told = shown.locator("svg[role=img]").get_attribute("aria-label") or ""
    one, last = whole["passes"][0], whole["passes"][16]
    assert (one["cost"], last["tokens"]) == (1.0, 17)
    assert f"1: 1.00×, 2: {whole['passes'][1]['cost']:.2f}×" in told
    assert f"17: {last['cost']:.2f}×" in told
    assert shown.locator(".sd-s0 .sd-marker").count() >= 17
    costs = dict(bars(shown, "One token, one guess"))
    assert list(costs)[:2] == ["target: a token", "draft model: a token"]
    assert float(costs["target: a token"]) == pytest.approx(whole["models"][0]["p50_ms"], rel=0.01)


def test_what_cannot_be_downloaded_is_told(lab: Open) -> None:
    page, shown = lab("profile", forgive="ERR_INTERNET_DISCONNECTED")
    measure(page, "profile")
    page.evaluate("specdemo.lab.views[0].job = 'another'")
    shown.locator(".sd-csv").click()
    expect(shown.locator(".sd-lab-says")).to_contain_text("This run is no longer kept.")
    page.context.set_offline(True)
    shown.locator(".sd-json").click()
    expect(shown.locator(".sd-lab-says")).to_contain_text("The server cannot be reached.")


def test_theory_answers_at_once_and_sets_a_measurement_beside_it(lab: Open) -> None:
    page, shown = lab("theory")
    fill(page, "theory", {"draft_ms": 22.09, "target_ms": 29.92, "alpha": 0.9})
    table = shown.locator("details.sd-table")
    expect(shown.locator(".sd-verdict")).to_contain_text("If 90% pass")
    table.locator("summary").click()
    cells = [row.locator("td").all_inner_texts()[:4] for row in table.locator("tr").all()[1:]]
    assert ["1", "1.151×", "1.00×", "0.738"] in cells
    assert ["10", "1.312×", "1.00×", "0.944"] in cells
    assert shown.locator(".sd-point").count() == 0
    measure(page, "theory", drafter="draft-model", k=3)
    whole, _ = files(page, shown)
    assert float(page.input_value("#lab-theory-alpha")) == pytest.approx(whole["alpha"], rel=1e-3)
    assert len(whole["passes"]) == 17
    # The plot beside it has a point of its own where some acceptance rate would break even.
    point = shown.get_by_role("img", name="Speed-up for each K").locator(".sd-point")
    assert point.text_content() == f"{whole['race']['measured']:.2f}×"
    parts = dict(bars(shown, "From the formula to the clock"))
    assert parts["what the formula says"] == f"{whole['race']['predicted']:.2f}×"
    assert len(parts) == len(whole["race"]["parts"]) + 2
    expect(table).to_contain_text(f"{whole['rows'][2]['verify_cost']:.2f}×")  # of a pass over 4 tokens, as measured


def test_theory_takes_the_numbers_of_the_last_race(lab: Open) -> None:
    page, shown = lab("theory")
    shown.locator(".sd-from-race").click()
    expect(shown.locator(".sd-lab-says")).to_contain_text("run one in the Race tab first")
    page.get_by_role("tab", name="Race").click()
    page.fill("#max-new-tokens input", "48")
    page.locator("#auto input").uncheck()
    race(page, "Hello there, how are you today?")
    stats = page.evaluate("[...document.querySelectorAll('.sd-figures dd')].map(dd => dd.textContent)")
    ratio = page.locator(".sd-ratio").inner_text()
    page.get_by_role("tab", name="Lab").click()
    shown.locator(".sd-from-race").click()
    expect(shown.locator(".sd-point")).to_have_text(ratio)
    assert f"{100 * float(page.input_value('#lab-theory-alpha')):.0f}%" == stats[0]


def test_sweep(lab: Open) -> None:
    page, shown = lab("sweep")
    measure(page, "sweep")
    whole, rows = files(page, shown)
    assert [(row["category"], row["k"]) for row in rows] == [
        (c, k) for c in ("easy", "hard") for k in ["0", "1", "2", "4", "8", "16"]
    ]
    assert [line.inner_text() for line in shown.locator(".sd-words li").all()] == [
        best["sentence"] for best in whole["best"]
    ]
    label = shown.locator("svg[role=img]").first.get_attribute("aria-label") or ""
    assert ", ".join(f"{row['k']}: {float(row['speedup.mean']):.2f}×" for row in rows[:6]) in label
    measure(page, "sweep", vary="temperature")
    whole, rows = files(page, shown)
    assert {row["temperature"] for row in whole["summary"]} == {0, 0.3, 0.7, 1.0, 1.5}
    assert "target alone, easy" in shown.locator("figure", has_text="Tokens per second").inner_text()


def test_domains(lab: Open) -> None:
    page, shown = lab("domains")
    measure(page, "domains")
    _, rows = files(page, shown)
    for title, by in (
        ("By sort of text", "category"),
        ("By kind of token", "kind of token"),
        ("By place", "place in the draft"),
    ):
        rates = {row["name"]: row["acceptance_rate"] for row in rows if row["by"] == by and row["acceptance_rate"]}
        assert dict(bars(shown, title)) == {name: f"{100 * float(rate):.0f}%" for name, rate in rates.items()}
        assert rates


@pytest.mark.parametrize(("rule", "verdict"), [("exact", "No sign of a difference"), ("resample-from-p", "NOT keep")])
def test_lossless(lab: Open, rule: str, verdict: str) -> None:
    page, shown = lab("lossless")
    measure(page, "lossless", rule=rule, rounds=2000, prompt="the cat sat on the mat and the dog sat")
    whole, rows = files(page, shown)
    assert verdict in shown.locator(".sd-verdict").all_inner_texts()[-1]
    assert all(check["identical"] or check["near_tie"] for check in whole["greedy"])
    assert dict(bars(shown, "Texts that are the target's own")).keys() == {"ngram", "transformers"}
    shares = [token["count"] / 2000 for token in whole["sampling"][-1]["likeliest"]]
    drawn = [float(value.removesuffix("%")) / 100 for _, value in bars(shown, "The likeliest")]
    assert drawn == pytest.approx(shares, abs=0.00051)
    assert {row["part"] for row in rows} == {"greedy", "sampling"}


# While it runs ---------------------------------------------------------------------------------------------


def test_pictures_come_while_it_runs_and_stop_keeps_them(lab: Open, engine: Engine) -> None:
    page, shown = lab("lossless")
    fill(page, "lossless", {"rounds": 20_000, "prompts": 0, "drafter": "ngram"})
    shown.locator(".sd-lab-run").click()
    expect(page.locator("#lab-sweep .sd-lab-run")).to_be_disabled()
    shown.locator("figure", has_text="How far off").wait_for()
    expect(shown.locator(".sd-lab-says")).to_contain_text("s left")
    assert 0 < shown.locator("progress").evaluate("bar => bar.value") < 1
    shown.locator(".sd-lab-stop").click()
    expect(shown.locator(".sd-lab-says")).to_have_text("Stopped. This is what there was until then.")
    whole, _ = files(page, shown)
    assert whole["stopped"]
    assert 0 < whole["sampling"][-1]["rounds"] < 20_000
    page.get_by_role("button", name=VIEWS["domains"].title).click()
    measure(page, "domains")  # the model is free again


def test_stop_does_not_wait_for_the_warm_up(lab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, stopped = profile._timed_passes, threading.Event()

    def held(*args: Any) -> list[profile.Timing]:
        assert stopped.wait(20)
        return timed(*args)

    page, shown = lab("profile")
    fill(page, "profile", QUICK["profile"])
    with monkeypatch.context() as patch:
        patch.setattr(profile, "_timed_passes", held)
        shown.locator(".sd-lab-run").click()
        expect(shown.locator(".sd-lab-says")).to_contain_text("Warming up. About")
        with page.expect_response(lambda response: response.request.method == "POST"):
            shown.locator(".sd-lab-stop").click()
        page.evaluate("specdemo.lab.views[0].apply({ progress: { done: 1, of: 9, words: 'About 9 s left.' } })")
        expect(shown.locator(".sd-lab-says")).to_have_text("Stopping after this step.")
        stopped.set()
        expect(shown.locator(".sd-lab-says")).to_have_text("Stopped. There was nothing to show yet.")
    expect(shown.locator(".sd-json")).to_be_hidden()
    measure(page, "profile")
    expect(shown.locator(".sd-json")).to_be_visible()


def test_a_closed_tab_frees_the_model(lab: Open, engine: Engine) -> None:
    page, shown = lab("lossless")
    fill(page, "lossless", {"rounds": 20_000, "prompts": 0, "drafter": "ngram"})
    shown.locator(".sd-lab-run").click()
    shown.locator("figure", has_text="How far off").wait_for()
    page.close()
    began = time.monotonic()
    assert list(engine.stream("toy", lambda loaded: (number for number in (1, 2)))) in ([[1, 2]], [[1], [2]])
    assert time.monotonic() - began < 5


def test_a_server_that_is_lost_during_a_run_is_told(lab: Open, engine: Engine) -> None:
    page, shown = lab("profile", forgive="ERR_FAILED")
    page.evaluate("specdemo.LOST_MS = 200")
    page.route("**/races/*", lambda route: route.abort())
    measure(page, "profile", until="failed")
    expect(shown.locator(".sd-lab-says")).to_have_text("The server cannot be reached. Try again.")
    expect(shown.locator(".sd-lab-run")).to_be_enabled()
    page.unroute_all()
    measure(page, "profile")


def test_what_is_wrong_is_said(lab: Open) -> None:
    page, shown = lab("sweep")
    measure(page, "sweep", until="failed", max_new_tokens=9999)
    expect(shown.locator(".sd-lab-says")).to_have_text(
        '"Tokens of each text" must be a whole number from 8 to 512, not 9999.'
    )
    measure(page, "sweep")
    page.get_by_role("button", name=VIEWS["theory"].title).click()
    page.fill("#lab-theory-alpha", "2")
    expect(page.locator("#lab-theory .sd-lab-says")).to_contain_text("from 0 to 1, not 2")


def test_it_measures_the_preset_of_the_form_whatever_others_have_loaded(
    visit: Visit, lab_url: str, engine: Engine
) -> None:
    list(engine.follow("bare"))  # as another visitor would
    page = visit(at=lab_url)
    page.get_by_role("tab", name="Lab").click()
    shown = page.locator("#lab-profile")
    measure(page, "profile")
    whole = files(page, shown)[0]
    assert whole["preset"] == "toy"
    assert "draft-model" in whole["asked"]["drafters"]  # which the other one lacks
    expect(page.locator(".sd-model")).to_have_text("Toy")


def test_drafters_that_were_not_known_to_be_missing_are_left_out(visit: Visit, lab_url: str, engine: Engine) -> None:
    list(engine.follow("toy"))
    page = visit("?preset=bare", at=lab_url)
    page.get_by_role("tab", name="Lab").click()
    measure(page, "profile")
    asked = files(page, page.locator("#lab-profile"))[0]["asked"]
    assert set(asked["drafters"]) == {"prompt-lookup"}
    list(engine.follow("toy"))


def test_a_preset_that_lacks_a_drafter_is_refused_in_words(lab: Open, engine: Engine) -> None:
    page, shown = lab("domains")
    page.get_by_role("tab", name="Race").click()
    page.locator("#preset input").click()
    page.get_by_role("option").nth(1).click()
    page.get_by_role("tab", name="Lab").click()
    option = shown.locator("#lab-domains-drafter option", has_text="draft-model")
    expect(option).to_have_text("draft-model (this preset has no draft model)")
    assert option.is_disabled()
    option.evaluate("option => { option.disabled = false; option.selected = true; }")
    measure(page, "domains", until="failed")
    assert shown.locator(".sd-lab-says").inner_text() == (
        "The drafter draft-model cannot be used here: this preset has no draft model."
    )
    list(engine.follow("toy"))


# How it looks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_every_view_fits_and_is_accessible(lab: Open, width: int, dark: bool) -> None:
    page, _ = lab("domains", width=width)
    if dark:
        page.keyboard.press("d")
        assert page.evaluate("document.body.classList.contains('dark')")
    for name in ("domains", "sweep"):
        page.get_by_role("button", name=VIEWS[name].title).click()
        measure(page, name)
        page.locator(f"#lab-{name} details summary").click()
    page.evaluate(AXE)
    for view in VIEWS.values():
        page.get_by_role("button", name=view.title).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = page.evaluate("axe.run('#tabs')")["violations"]
        serious = [v for v in found if v["impact"] in ("serious", "critical")]
        assert [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in serious] == []


def test_the_keys_of_the_race_rest_while_the_lab_shows(lab: Open) -> None:
    page, _ = lab("profile")
    page.keyboard.press("r")
    page.keyboard.press("h")
    page.get_by_role("tab", name="Race").click()
    assert page.locator(".sd-arena").get_attribute("data-state") == "idle"
    assert not page.locator(".sd-hide input").is_checked()
    page.keyboard.press("h")
    assert page.locator(".sd-hide input").is_checked()


def box(part: Locator) -> dict[str, float]:
    found = part.bounding_box()
    assert found is not None
    return dict(found)  # type: ignore[arg-type]


HOSTILE = "<img src=x onerror='window.hurt = 1'>${window.hurt = 1}{{value}}"


def test_plots_are_drawn_to_scale_and_take_any_text_as_text(lab: Open) -> None:
    page, _ = lab("profile")
    points = [[0, 1, 0.5, 1.5], [1, 2, None, None], [4, 4, 3, 100]]
    spec = {
        **{"kind": "lines", "title": HOSTILE, "words": HOSTILE, "rules": [{"y": 1, "name": HOSTILE}]},
        "x": {"label": HOSTILE, "format": "whole"},
        "y": {"label": HOSTILE, "format": "two", "from": 0},
        "series": [{"name": HOSTILE, "points": points}],
    }
    rows = [{"name": HOSTILE, "value": 0.25, "low": 0.1, "high": 0.5, "mark": 0.4, "words": HOSTILE}]
    flat = {"kind": "bars", "title": HOSTILE, "words": HOSTILE, "format": "percent", "rows": rows, "mark": HOSTILE}
    bare = flat | {"rows": [{"name": "bare", "value": 1}], "whisker": "a whisker", "mark": ""}
    page.evaluate(
        "specs => document.querySelector('#lab-profile .sd-lab-show').append(...specs.map(specdemo.plot))",
        [spec, flat, bare, bare | {"rows": rows}],
    )
    keys = [key.inner_text() for key in page.locator("#lab-profile .sd-bars + .sd-plot-key").all()]
    assert keys == [HOSTILE, "", "a whisker"]  # of what is drawn
    dots = page.locator("#lab-profile .sd-field .sd-marker")
    dots.first.wait_for()
    boxes = [box(dot) for dot in dots.all()]
    x, y = ([box[at] + box[size] / 2 for box in boxes] for at, size in (("x", "width"), ("y", "height")))
    assert (x[2] - x[0]) / (x[1] - x[0]) == pytest.approx(4, rel=0.01)
    assert (y[0] - y[2]) / (y[0] - y[1]) == pytest.approx(3, rel=0.01)
    field = box(page.locator("#lab-profile .sd-field svg"))
    for whisker in page.locator("#lab-profile .sd-field .sd-whisker").all():
        reached = box(whisker)
        assert field["y"] <= reached["y"]  # the one up to 100 ends where the plot does
        assert reached["y"] + reached["height"] <= field["y"] + field["height"]
    parts = ("bar-track", "bar", "reach", "mark")
    track, bar, reach, mark = (box(page.locator(f"#lab-profile .sd-bars .sd-{part}").first) for part in parts)
    assert bar["width"] / track["width"] == pytest.approx(0.5, abs=0.02)
    assert (reach["x"] - track["x"]) / track["width"] == pytest.approx(0.2, abs=0.02)
    assert (mark["x"] + mark["width"] / 2 - track["x"]) / track["width"] == pytest.approx(0.8, abs=0.02)
    dots.first.hover()
    expect(page.locator("#sd-tooltip")).to_contain_text("1.00, 0.50 to 1.50")
    assert page.locator("#lab-profile img").count() == 0
    assert page.evaluate("window.hurt") is None


# Without a browser -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("view", VIEWS)
@given(data=st.data())
def test_any_form_is_read_or_refused_in_words(view: str, data: st.DataObject) -> None:
    fields = VIEWS[view].fields
    given = data.draw(st.fixed_dictionaries({field.name: st.one_of(values, st.just(field.value)) for field in fields}))
    try:
        read = VIEWS[view].read(given)
    except BadInput:
        return
    assert all(field.low <= read[field.name] <= field.high for field in fields if field.kind in ("whole", "number"))


@given(st.dictionaries(st.sampled_from(["draft_ms", "target_ms", "alpha", "passes"]), values))
def test_theory_of_any_numbers_is_a_picture_or_refused(asked: dict[str, Any]) -> None:
    try:
        picture = theory_of(asked, None)
    except BadInput:
        return
    assert "NaN" not in json.dumps(picture, allow_nan=False)


def test_a_page_on_this_machine_is_known(lab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    stream = Engine.stream

    def listen(engine: Engine, preset: str, run: Any, local: bool = False) -> Any:
        told.append(local)
        return stream(engine, preset, run, local)

    monkeypatch.setattr(Engine, "stream", listen)
    page, _ = lab("domains")
    measure(page, "domains")
    assert told == [True]


def test_only_the_latest_picture_is_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_run, "PICTURE_SECONDS", 0.0)
    form = {field.name: field.value for field in VIEWS["lossless"].fields}
    form |= {"drafter": "ngram", "rounds": 400, "prompts": 0}
    job = LabRun("toy", VIEWS["lossless"], VIEWS["lossless"].read(form))
    said = [json.loads(message) for message in job.play(engine)]
    assert sum("picture" in message for message in said) >= 2
    kept = [json.loads(message) for message in job.messages]
    assert [message["seq"] for message in kept] == list(range(len(said)))
    assert ["picture" in message for message in kept] == [False] * (len(kept) - 1) + [True]
    assert kept[-1]["end"] == {"stopped": False}


def test_a_failure_of_a_run_is_its_last_message(engine: Engine) -> None:
    form = {field.name: field.value for field in VIEWS["domains"].fields} | {"drafter": "none"}
    with pytest.raises(BadInput, match="none"):
        VIEWS["domains"].read(form)
    job = LabRun("toy", VIEWS["domains"], VIEWS["domains"].read(form | {"drafter": "ngram"}) | {"drafter": "psychic"})
    with pytest.raises(EngineTrouble, match="psychic"):
        list(job.play(engine))
    assert "psychic" in json.loads(job.messages[-1])["error"]


def test_prompts_are_taken_from_each_category_in_turn() -> None:
    assert [prompt.id for prompt in some_of_each("easy-hard", 2)] == ["easy-1", "hard-1", "easy-2", "hard-2"]
    assert len({prompt.category for prompt in some_of_each("domains", 3)}) == 8
