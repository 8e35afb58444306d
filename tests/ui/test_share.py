"""What a visitor takes away from a race: a web page, a card, a film, links, and the list of the races run here."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Download, Locator, Page, expect

from specdemo.models.presets import load_prompts
from specdemo.racing.race import PLAIN, SPECULATIVE
from specdemo.racing.trace import Entry, trace_lines
from specdemo.ui.replay.playable import playable_json
from specdemo.ui.replay.routes import RECORDINGS
from specdemo.ui.share.saved import saved_page

from ..fakes.engine import PRESETS, Script
from .browser import fill, run, settings, shared, tokens_of, tokens_shown
from .conftest import Tabs, Used, Visit, listening, reused
from .test_page import serious
from .test_playable import traced
from .test_replay import replayed

HOSTILE = "one </script><img src=x onerror=window.pwned=1> <b>two</b> </template> three"
PNG = b"\x89PNG\r\n\x1a\n"
KEY = "specdemo-races"
UNREADABLE = "The race in this link cannot be read: the link is damaged or was cut off."


def download(page: Page, way: str) -> Download:
    with page.expect_download() as download:
        shared(page, way)
    return download.value


def story(page: Page) -> str:
    """The text of the large number and of what stands beside it."""
    return page.locator(".sd-board").inner_text()


def opened(mine: Locator) -> None:
    mine.evaluate("mine => { mine.open = true; }")


@pytest.fixture
def alone(chromium: Browser) -> Iterator[Page]:
    """A browser without a network."""
    context = chromium.new_context(offline=True, reduced_motion="reduce")
    page = context.new_page()
    troubles: list[str] = []
    page.on("request", lambda request: troubles.append(request.url) if request.url.startswith("http") else None)
    with listening(page, troubles, forgive="file:///"):
        yield page
    context.close()
    assert [trouble for trouble in troubles if not trouble.startswith("request to file:///")] == []


# A web page ----------------------------------------------------------------------------------------------------


def test_a_saved_race_plays_from_a_disk_without_a_network(
    page: Page, alone: Page, script: Script, tmp_path: Path
) -> None:
    run(page, HOSTILE)
    found = story(page)
    file = download(page, "save-page")
    assert file.suggested_filename == "specdemo-race.html"
    file.save_as(tmp_path / "race.html")
    written = (tmp_path / "race.html").read_text(encoding="utf-8")
    assert "onerror" not in written
    alone.goto((tmp_path / "race.html").as_uri())
    expect(alone.locator(".sd-asked")).to_have_text(HOSTILE)
    expect(alone.locator(".sd-facts-of")).to_contain_text("A race that was saved in this file. scripted")
    alone.get_by_role("button", name="4×", exact=True).click()
    alone.get_by_role("button", name="Play", exact=True).click()
    alone.locator("[data-state=ended]").wait_for()
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(alone, lane) == tokens_of(script.entries, lane)
    assert story(alone) == found.replace("speed-up", "speed-up, recorded")
    alone.locator(".sd-behind summary").click()
    expect(alone.locator(".sd-behind dd").first).to_be_visible()
    alone.get_by_role("button", name="Step through").click()
    expect(alone.locator(".sd-step")).to_be_visible()
    assert alone.evaluate("window.pwned === undefined")


def test_a_saved_race_of_a_usual_length_is_small() -> None:
    prompt = " ".join(load_prompts()["story"])
    text, _ = traced(prompt, max_new_tokens=300)
    assert len(saved_page(playable_json("saved", lambda: text.split("\n")))) < 300_000
    recorded = trace_lines(RECORDINGS / "code-5-eagle-tree.jsonl.gz")  # with all that was possible at each token
    assert len(saved_page(playable_json("saved", lambda: recorded))) < 400_000


def test_a_saved_race_holds_only_what_it_needs() -> None:
    written = saved_page('{"error":"none"}')
    imports = json.loads(written.partition('type="importmap">')[2].partition("</script>")[0])["imports"]
    assert {"specdemo/race/race.js", "specdemo/replay/step.js", "specdemo/templates.js"} <= imports.keys()
    assert not [name for name in imports if "/lab/" in name or name.endswith(("main.js", "share/share.js"))]
    for address in ("http:", "https:", "src=", "href=", "url("):
        assert address not in written.replace(imports["specdemo/templates.js"], "")


@pytest.mark.slow
@pytest.mark.parametrize("shade", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_saved_race_fits_and_can_be_read(chromium: Browser, tmp_path: Path, shade: str, width: int) -> None:
    text, _ = traced(HOSTILE)
    (tmp_path / "race.html").write_text(saved_page(playable_json("saved", lambda: text.split("\n"))), encoding="utf-8")
    context = chromium.new_context(color_scheme=shade, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
    page = context.new_page()
    page.goto((tmp_path / "race.html").as_uri())
    page.get_by_role("button", name="Play", exact=True).click()
    page.locator("[data-state=ended]").wait_for()
    assert page.evaluate("document.body.classList.contains('dark')") == (shade == "dark")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert serious(page) == []
    assert page.evaluate("fetch('data:,x').then(() => true, () => false)") is False  # the page itself forbids it
    context.close()


# Pictures ------------------------------------------------------------------------------------------------------


def test_the_card_is_a_picture_of_the_race(page: Page, script: Script, tmp_path: Path) -> None:
    run(page, HOSTILE)
    file = download(page, "save-card")
    assert file.suggested_filename == "specdemo-race.png"
    drawn = file.path().read_bytes()
    assert drawn.startswith(PNG)
    assert (int.from_bytes(drawn[16:20], "big"), int.from_bytes(drawn[20:24], "big")) == (1200, 630)
    assert len(drawn) > 20_000
    ratio = page.locator("#race .sd-ratio").inner_text()
    label = page.locator(".sd-picture").get_attribute("aria-label") or ""
    assert label.startswith(f"{ratio} speed-up. the same text, word for word. scripted with prompt-lookup. K 4, ")
    script.differ_at = 5
    run(page)
    page.click(".sd-share-open")
    label = page.locator(".sd-picture").get_attribute("aria-label") or ""
    assert "the same text" not in label
    assert page.locator("#race .sd-badge").get_attribute("data-mark") == "differs"
    assert page.locator("#race .sd-badge").inner_text() in label
    page.keyboard.press("Escape")


@pytest.mark.slow
def test_the_film_shows_the_race_in_eight_seconds(page: Page, script: Script, chromium: Browser) -> None:
    run(page, HOSTILE)
    page.click(".sd-share-open")
    with page.expect_download() as download:
        page.click(".sd-save-film")
        expect(page.locator(".sd-save-card")).to_be_disabled()
    name = download.value.suggested_filename
    film = download.value.path().read_bytes()
    assert name in ("specdemo-race.mp4", "specdemo-race.webm")
    assert len(film) > 20_000
    expect(page.locator(".sd-save-film")).to_have_text("Download film")
    watched = chromium.new_page()
    seen = watched.evaluate(
        """([type, film]) => new Promise((done) => {
          const video = document.createElement('video');
          video.onloadedmetadata = () => done([video.videoWidth, video.videoHeight]);
          video.onerror = () => done(video.error.message);
          video.src = `data:video/${type};base64,${film}`;
        })""",
        [name.rpartition(".")[2], b64encode(film).decode()],
    )
    watched.close()
    assert seen == [1200, 630]


def test_a_film_ends_when_the_dialog_is_closed(page: Page, script: Script) -> None:
    run(page, "one two three")
    page.evaluate(
        "() => { const save = URL.createObjectURL; window.saved = 0; "
        "URL.createObjectURL = (blob) => { window.saved += 1; return save.call(URL, blob); }; }"
    )
    shared(page, "save-film")
    expect(page.locator(".sd-save-film")).to_have_text("Download film")
    assert page.evaluate("window.saved") == 0
    page.evaluate("delete URL.createObjectURL")


@pytest.mark.slow
def test_without_a_race_there_are_only_the_settings_to_share(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one", before="delete window.MediaRecorder")
    shown = page.locator(".sd-share button:visible")
    page.click(".sd-share-open")
    expect(shown).to_have_text(["✕ Close", "Copy link to the settings"])
    page.keyboard.press("Escape")
    script.gate.clear()
    run(page, "one two", until="waiting")
    page.click(".sd-share-open")
    expect(shown).to_have_count(2)
    page.keyboard.press("Escape")
    script.gate.set()
    page.locator(".sd-arena[data-state=ended]").wait_for()
    page.click(".sd-share-open")
    expect(shown).to_have_text(
        [
            *("✕ Close", "Download card", "Download web page", "Download trace"),  # no film: this browser records none
            *("Copy link to this race", "Copy link to the settings"),
        ]
    )


@pytest.mark.slow
def test_the_dialog_is_accessible_and_fits(page: Page, script: Script) -> None:
    run(page, HOSTILE)
    opened(page.locator(".sd-mine"))
    page.click(".sd-share-open")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert serious(page) == []
        page.keyboard.press("Escape")
        assert serious(page) == []
        page.click(".sd-share-open")


# Links ---------------------------------------------------------------------------------------------------------


def copied(page: Page, way: str) -> str:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#race .sd-share-open")
    page.click(f".sd-share .sd-{way}")
    expect(page.locator(f".sd-{way}")).to_have_text("Copied")
    page.keyboard.press("Escape")
    return str(page.evaluate("navigator.clipboard.readText()"))


def plays(page: Page, entries: list[Entry], found: str) -> None:
    """The Replay tab plays the race of a link."""
    replay = page.locator("#replay")
    expect(replay.locator(".sd-facts-of")).to_contain_text("From a link, not measured here.")
    expect(replay.locator(".sd-asked")).to_have_text(HOSTILE)
    replay.get_by_role("button", name="Play", exact=True).click()
    replay.locator("[data-state=ended]").wait_for()
    assert replayed(page, SPECULATIVE) == tokens_of(entries, SPECULATIVE)
    assert replay.locator(".sd-board").inner_text() == found.replace("speed-up", "speed-up, recorded")


def test_a_link_holds_a_small_race(page: Page, script: Script) -> None:
    run(page, HOSTILE)
    entries, found = script.entries, story(page)
    link = urlsplit(copied(page, "raced"))
    assert link.query == ""
    assert 500 < len(link.fragment) < 6000
    page.evaluate("fragment => { window.location.hash = fragment; }", link.fragment)
    plays(page, entries, found)
    page.evaluate("history.replaceState(null, '', window.location.pathname)")


@pytest.mark.slow
def test_a_link_opens_a_page_with_its_race(page: Page, tabs: Tabs, url: str, script: Script) -> None:
    fill(page, temperature=0.7)
    page.uncheck("#match input")
    run(page, HOSTILE)
    fresh, troubles = tabs.take(), list[str]()
    with listening(fresh, troubles):
        fresh.goto(copied(page, "raced"))
        plays(fresh, script.entries, story(page))
    tabs.give_back(fresh)
    assert troubles == []


def test_a_link_that_was_cut_off_is_said(tabs: Tabs, used: list[Used], url: str, script: Script) -> None:
    said = "#replay [role=alert]"
    with reused(tabs, used, url, replayed=True) as page:
        for fragment in ("", "H4sIAAAA", "%3Cimg%20src=x%20onerror=window.pwned=1%3E", "H4sIAAAAAAAAA"):
            page.evaluate("fragment => { window.location.hash = fragment; }", f"#race={fragment}")
            expect(page.locator(said)).to_have_text(UNREADABLE)
            page.locator(said).evaluate("said => { said.textContent = ''; }")
        assert page.evaluate("window.pwned === undefined")
        page.evaluate("history.replaceState(null, '', window.location.pathname)")


@pytest.mark.slow
def test_a_long_race_is_too_long_for_a_link(page: Page, script: Script) -> None:
    fill(page, max_new_tokens=120)
    run(page, " ".join(sha256(bytes([at])).hexdigest() for at in range(120)))  # nothing to pack
    page.click(".sd-share-open")
    raced = page.locator(".sd-raced")
    raced.click()
    expect(raced).to_have_text("Too long for a link")
    page.keyboard.press("Escape")
    fill(page, max_new_tokens=400)
    run(page)
    page.click(".sd-share-open")
    expect(page.locator(".sd-trace")).to_be_visible()
    expect(raced).to_be_hidden()


# The races of this browser -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_races_of_this_browser_are_kept_and_forgotten(page: Page, script: Script) -> None:
    mine, rows = page.locator(".sd-mine"), page.locator(".sd-mine li")
    for prompt in ("one two three", HOSTILE):
        run(page, prompt)
    ratio, badge = page.locator("#race .sd-ratio").inner_text(), page.locator("#race .sd-badge").inner_text()
    fill(page, temperature=0.5)
    page.reload()
    page.locator("[data-stage=ready]").wait_for()
    expect(mine.locator("summary")).to_have_text("Your races (2)")
    opened(mine)
    expect(rows.nth(0)).to_contain_text(HOSTILE)
    expect(rows.nth(0)).to_contain_text("scripted: prompt-lookup, K 4, temperature 0")
    expect(rows.nth(0)).to_contain_text(badge)
    expect(rows.nth(0).locator("b")).to_have_text(ratio)
    expect(rows.nth(1)).to_contain_text("one two three")
    rows.nth(0).get_by_role("button", name="Run again").click()
    expect(page.locator("#prompt textarea")).to_have_value(HOSTILE)
    expect(page.locator("#run")).to_be_focused()
    settings(page)
    expect(page.locator("#temperature input[type=number]")).to_have_value("0")
    assert len(script.races) == 2  # it runs nothing by itself
    assert page.evaluate("window.pwned === undefined")
    mine.get_by_role("button", name="Forget all").click()
    expect(mine).to_be_hidden()
    assert HOSTILE not in page.evaluate("Object.values(localStorage).join()")
    run(page)
    expect(mine.locator("summary")).to_have_text("Your races (1)")


@pytest.mark.slow
def test_a_race_that_was_stopped_is_not_kept(page: Page, script: Script) -> None:
    script.pace = 0.05
    run(page, "stopped " * 9, until="running")
    page.click("#stop")
    page.locator(".sd-arena[data-state=ended]").wait_for()
    assert page.evaluate("key => localStorage.getItem(key)", KEY) is None
    page.click(".sd-share-open")
    expect(page.locator(".sd-picture")).to_be_visible()
    assert "the same text" not in (page.locator(".sd-picture").get_attribute("aria-label") or "")


@pytest.mark.slow
def test_only_the_last_twenty_are_kept(page: Page, script: Script) -> None:
    row = {"when": 1e12, "preset": "p", "how": "h", "ratio": 2, "exact": "e", "query": ""}
    kept = {"version": 1, "races": [{**row, "prompt": f"race {at}"} for at in range(20)]}
    page.evaluate("([key, kept]) => localStorage.setItem(key, kept)", [KEY, json.dumps(kept)])
    run(page, "the newest")
    rows = page.locator(".sd-mine li .sd-mine-prompt")
    texts = rows.all_text_contents()
    assert texts == ["the newest", *(f"race {at}" for at in range(19))]


FULL = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }"
FORBIDDEN = (
    "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } })"
)


def races_on(page: Page) -> None:
    run(page, "one two three")
    expect(page.locator("#race .sd-badge")).to_have_attribute("data-mark", "same")
    expect(page.locator(".sd-mine summary")).to_have_text("Your races (1)")
    expect(page.locator(".sd-mine li")).to_contain_text("one two three")


@pytest.mark.slow
def test_what_else_is_kept_under_its_name_is_left_out(page: Page, script: Script) -> None:
    for odd in ('{"version": 1, "races": [null, 3, {}]}', '{"version": 2, "races": "all"}', "{", '"<b>"', "null"):
        page.evaluate("([key, odd]) => localStorage.setItem(key, odd)", [KEY, odd])
        races_on(page)


@pytest.mark.slow
@pytest.mark.parametrize("before", [FULL, FORBIDDEN], ids=["full", "forbidden"])
def test_a_storage_that_cannot_be_used_loses_nothing_else(visit: Visit, script: Script, before: str) -> None:
    races_on(visit(before=before))


@pytest.mark.slow
def test_run_again_describes_the_preset_of_its_race(page: Page, script: Script) -> None:
    query = "prompt=one&preset=other&drafter=ngram"
    race = {"when": 1e12, "prompt": "one", "preset": "other", "how": "", "ratio": 2, "exact": "", "query": query}
    page.evaluate(
        "([key, kept]) => localStorage.setItem(key, kept)", [KEY, json.dumps({"version": 1, "races": [race]})]
    )
    page.reload()
    page.locator("[data-stage=ready]").wait_for()
    opened(page.locator(".sd-mine"))
    page.get_by_role("button", name="Run again").click()
    settings(page)
    expect(page.locator("#preset input")).to_have_value("Other 1.7B")
    expect(page.locator("#preset")).to_contain_text(PRESETS["other"].description)
    expect(page.locator("#drafter input")).to_have_value(re.compile("· ngram$"))


def test_run_again_gives_the_query_of_a_link(page: Page, script: Script) -> None:
    fill(page, k=7)
    run(page, "one & two = three?")
    link = parse_qs(urlsplit(copied(page, "link")).query)
    kept = json.loads(page.evaluate("key => localStorage.getItem(key)", KEY))["races"][0]
    assert parse_qs(kept["query"]) == link
    assert link["prompt"] == ["one & two = three?"]
