"""Guess yourself: a person plays on the page, a room on phones, with a real model in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from specdemo.decoding.events import emitted_tokens
from specdemo.models.presets import load_presets
from specdemo.racing import again
from specdemo.racing.game import LONGEST_GUESS, MOST_GUESSES, OPENING
from specdemo.racing.lanes import LaneText
from specdemo.racing.race import start
from specdemo.racing.trace import read_trace
from specdemo.settings import Settings
from specdemo.ui.engine import Backend
from specdemo.ui.watch import watches
from specdemo.ui.watch.watches import Ballot, Watch
from tests.harness.ui_classes import Engine

from ..fakes.engine import Script
from ..sentences import telling, tells
from .browser import in_a_loop_of_its_own, served, served_engine, shared, wait_until
from .conftest import Visit
from .test_page import following, link_of, share, watcher

NAME, PROMPT = "nanogpt-shakespeare", "ROMEO:\nWhat light"
FIELD, SCORE, ROOM, TILES = ".sd-game input", ".sd-score", ".sd-room [data-part=room]", ".sd-guessed .tok"


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    preset = load_presets()[0][NAME]
    engine = Engine({NAME: replace(preset, defaults=replace(preset.defaults, max_new_tokens=80))}, Backend())
    *_, status = engine.follow(NAME)
    assert status.stage == "ready", status.words
    yield engine
    list(engine.stream(NAME, lambda loaded: (loaded.release() for _ in "1")))


@pytest.fixture(scope="module")
def at(engine: Any) -> Iterator[str]:
    with served_engine(engine, {"plays": [PROMPT]}) as url:
        yield url


def alone(engine: Any, temperature: float, prompt: str = PROMPT) -> list[str]:
    """The tokens, as texts, that the target alone writes."""
    loaded = engine._loaded
    prompt_ids = loaded.encode(prompt)
    text, tokens = LaneText(loaded.tokenizer, prompt_ids), list[str]()
    for event in start(loaded, "none", prompt_ids, Settings(temperature=temperature, max_new_tokens=80)):
        tokens += [token.text for token in emitted_tokens(text.read(event))]
    return tokens


def waits(page: Page, rounds: int) -> None:
    """Wait until a game asks for the guess that follows so many rounds."""
    page.wait_for_function(
        "rounds => specdemo.race.game.waits && specdemo.race.show.request.guesses.length === rounds",
        arg=OPENING + rounds,
    )


def chips(page: Page) -> list[tuple[str, str]]:
    """Of each token of the last draft its kind and its text, the target's own last."""
    found = page.locator(TILES).evaluate_all("tiles => tiles.map((tile) => [tile.classList[2], tile.textContent])")
    return [(kind, text) for kind, text in found]


def text_of(page: Page) -> str:
    return str(page.evaluate("() => specdemo.race.game.text"))


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_person_plays_five_rounds(visit: Visit, at: str, engine: Any, temperature: float) -> None:
    tokens = alone(engine, temperature)
    page = visit(f"?temperature={temperature}&seed=0", at=at)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Guess yourself").click()
    waits(page, 0)
    assert text_of(page) == "".join(tokens[: OPENING + 1])
    expect(page.locator(".sd-lane:visible")).to_have_count(1)
    written = OPENING + 1

    def guess(right: int, wrong: str = "") -> list[tuple[str, str]]:
        nonlocal written
        played = page.evaluate("() => specdemo.race.game.rounds.length") - OPENING
        expect(page.locator(FIELD)).to_be_focused()
        page.fill(FIELD, "".join(tokens[written : written + right]) + wrong)
        page.keyboard.press("Enter")
        waits(page, played + 1)
        written += right + 1
        assert text_of(page) == "".join(tokens[:written])
        return chips(page)

    first, second, third = tokens[written : written + 3]
    assert guess(2) == [("a", first), ("a", second), ("b", third)]
    expect(page.locator(".sd-sentence").first).to_contain_text(telling("2 accepted bonus"))
    assert "3.00" in page.locator(SCORE).inner_text()
    found = guess(1, "ZZ")
    assert [kind for kind, _ in found][:2] == ["a", "x"]
    assert found[-1] == ("r", tokens[written - 1])
    expect(page.locator(".sd-sentence").first).to_contain_text(telling("1 accepted rejected"))
    assert guess(0) == [("t", tokens[written - 1])]
    assert ("x", "Z") in guess(0, "Z")
    if temperature:
        assert tells(page.locator(".sd-sentence").first.inner_text(), "p")
    guess(2)
    expect(page.locator(SCORE)).to_have_text(telling("You 2.00 5 10"))  # 3, 2, 1, 1 and 3 tokens

    page.get_by_role("button", name="End the game").click()
    lanes = page.locator(".sd-lane:visible")
    rivals = lanes.count() - 2
    assert rivals >= 1
    expect(page.locator(".sd-ratio").first).to_have_text("2.00")
    written_by = "(text) => [...text.querySelectorAll('.tok:not(.x, .u)')].map((token) => token.textContent).join('')"
    texts = page.locator(".sd-lane .sd-text").evaluate_all(f"(all) => all.map({written_by})")
    assert texts[0] == texts[1] == "".join(tokens[:written])
    assert all(text.startswith(texts[0]) and "".join(tokens).startswith(text) for text in texts)
    with page.expect_download() as download:
        shared(page, "trace")
    header, entries = read_trace(download.value.path().read_text(encoding="utf-8").splitlines())
    assert [lane["drafter"] for lane in header["lanes"]][:2] == ["none", "you"]
    assert not any(
        place is not None
        for place in again.differences(entries, list(again.again(engine._loaded, header, entries))).values()
    )
    assert tells(page.locator(".sd-picture").get_attribute("aria-label"), "2.00 You")


def test_ten_rounds_are_a_game_and_run_begins_something_else(visit: Visit, at: str) -> None:
    page = visit("?temperature=0", at=at)
    page.keyboard.press("Escape")
    page.locator("h1").first.click()
    page.keyboard.press("g")
    for played in range(10):
        waits(page, played)
        page.keyboard.press("Enter")
    expect(page.locator(".sd-ratio").first).to_have_text("1.00")
    expect(page.locator(".sd-game")).to_be_hidden()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Guess yourself").click()
    waits(page, 0)
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator("#race .sd-arena[data-state=ended]").wait_for()
    expect(page.locator(".sd-game")).to_be_hidden()
    expect(page.locator(".sd-lane:visible")).to_have_count(2)


def test_a_game_goes_on_with_what_it_began_with(visit: Visit, at: str, engine: Any) -> None:
    page = visit("?temperature=0", at=at)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Guess yourself").click()
    waits(page, 0)
    page.fill("#prompt textarea", "")
    page.fill(FIELD, " x")
    page.get_by_role("button", name="Guess", exact=True).click()
    waits(page, 1)
    assert text_of(page) == "".join(alone(engine, 0)[: OPENING + 2])
    page.evaluate("() => specdemo.race.game.rounds.push(...Array(20).fill([]))")  # more than the server takes
    page.get_by_role("button", name="Guess", exact=True).click()
    expect(page.locator("#problem")).to_contain_text(telling("18 65 80"))
    waits(page, 1)
    page.get_by_role("button", name="Guess", exact=True).click()
    waits(page, 2)


def test_a_game_ends_with_the_text_and_bears_stop(visit: Visit, at: str, engine: Any) -> None:
    page = visit("?temperature=0&max_new_tokens=12", at=at)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Guess yourself").click()
    waits(page, 0)
    page.fill(FIELD, " Z")
    # The race ends before any of its events is there, as when Stop is pressed.
    page.evaluate("""() => {
        const { race } = specdemo, { hear } = race;
        race.hear = (message) => hear.call(race, { ...message, lanes: message.end && {} });
    }""")
    page.keyboard.press("Enter")
    expect(page.locator(".sd-sentence").first).to_have_text("Stopped.")
    waits(page, 0)
    assert page.input_value(FIELD) == " Z"
    page.evaluate("() => { delete specdemo.race.hear; }")
    tokens = alone(engine, 0)[:12]
    page.fill(FIELD, "".join(tokens[OPENING + 1 :]))
    page.keyboard.press("Enter")
    expect(page.locator(".sd-game")).to_be_hidden()
    expect(page.locator(".sd-badge").first).to_have_text(telling("Same word"))
    expect(page.locator("#race [data-part=guess].sd-button")).to_be_focused()
    assert page.evaluate("() => localStorage['specdemo-races']") is None


def test_a_game_that_is_ended_while_a_guess_is_read_shows_all_lanes(visit: Visit, at: str) -> None:
    page = visit("?temperature=0", at=at)
    page.keyboard.press("Escape")
    page.evaluate("() => { specdemo.race.game.playing = true; specdemo.race.game.known = null; }")  # about to begin
    page.evaluate("() => { specdemo.race.game.end(); return specdemo.race.game.begin(); }")
    waits(page, 0)
    page.evaluate("() => { specdemo.race.game.test(); specdemo.race.game.end(); }")
    page.wait_for_function("() => !specdemo.race.game.playing && !specdemo.race.busy")
    expect(page.locator(".sd-game")).to_be_hidden()
    expect(page.locator(".sd-lane:visible")).not_to_have_count(1)


def test_a_prompt_of_ones_own_is_played_and_one_that_was_shown_is_not(visit: Visit, script: Script, url: str) -> None:
    page = visit()
    prompt = page.locator("#prompt textarea")
    page.keyboard.press("Escape")
    shown = page.evaluate("() => specdemo.race.show.request.prompt")
    asked = page.evaluate("() => { specdemo.race.game.ask = () => {}; }")
    assert asked is None
    for own, plays in ((shown, False), ("my own", True)):
        prompt.fill(own)
        page.evaluate("() => { specdemo.race.game.playing = false; return specdemo.race.game.begin(); }")
        assert (prompt.input_value() == own) == plays


def test_on_stage_what_is_typed_is_no_key(visit: Visit, at: str) -> None:
    page = visit("?temperature=0", at=at, width=853, height=480)
    page.evaluate("() => { document.documentElement.requestFullscreen = null; }")
    page.keyboard.press("Escape")
    page.locator("h1").first.click()
    page.keyboard.press("f")
    page.keyboard.press("g")
    waits(page, 0)
    page.keyboard.type("1f.g")
    assert page.input_value(FIELD).endswith("1f.g")
    assert page.evaluate("() => specdemo.stage.on")
    for part in (FIELD, SCORE, ROOM):
        box = page.locator(part).bounding_box()
        assert box
        assert box["y"] + box["height"] <= 480
    page.keyboard.press("PageDown")
    waits(page, 1)
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.type("1f")  # the first key leads into the field
    assert page.input_value(FIELD).endswith("1f")
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.type("ff")  # and this one leaves the stage
    assert not page.evaluate("() => specdemo.stage.on")
    assert page.input_value(FIELD).endswith("1ff")
    page.evaluate("() => specdemo.stage.toggle()")
    expect(page.locator(FIELD)).to_be_focused()
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("Enter")
    waits(page, 2)
    page.evaluate("() => specdemo.race.game.end()")
    page.keyboard.press("PageDown")  # one too many leaves what came of it
    expect(page.locator(".sd-ratio").first).to_have_text("1.00")


# The room ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_three_phones_vote_for_five_rounds(
    visit: Visit, at: str, engine: Any, chromium: Browser, temperature: float
) -> None:
    tokens = alone(engine, temperature)
    page = visit(f"?temperature={temperature}&seed=0", at=at)
    page.keyboard.press("Escape")
    link = link_of(page)
    with ExitStack() as stack:
        phones = [
            stack.enter_context(watcher(chromium, link, viewport={"width": 390, "height": 844}, has_touch=True))
            for _ in range(3)
        ]
        page.get_by_role("button", name="Guess yourself").click()
        written = OPENING + 1
        for played in range(5):
            waits(page, played)
            two, three = ("".join(tokens[written : written + count]) for count in (2, 3))
            votes = [[two, three, "Z"], ["Z", "Z", f"{two}Z"], ["Z", "Z", "Z"], [three, three, three], []][played]
            for phone, vote in zip(phones, votes, strict=False):
                field = phone.locator(FIELD)
                expect(field).to_be_enabled()
                assert phone.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
                field.fill(vote)
                phone.get_by_role("button", name="Vote").click()
                expect(phone.locator(ROOM)).to_have_text(telling("You"))
            expect(page.locator(ROOM)).to_have_text(telling(f"{len(votes)} 3 Enter"))
            page.fill(FIELD, "")
            page.locator(FIELD).press("Enter")
            waits(page, played + 1)
            found = chips(page)
            votes_shown = page.locator(".sd-guessed small").all_inner_texts()
            if played == 0:
                assert [kind for kind, _ in found] == ["a", "a", "a", "b", "x"]
                counts = [re.findall(r"\d votes?", text) for text in votes_shown]
                assert counts == [["2 votes"], ["2 votes"], ["1 vote"], [], ["1 vote"]]
            if played == 1:  # the target wrote its own token in the place of the last, not of the first
                assert [kind for kind, _ in found] == ["x", "a", "a", "x", "r"]
                words = page.locator(".sd-sentence").first
                expect(words.locator(".tok")).to_have_text(["accepted", "“Z”", "rejected", re.compile("“")])
                expect(words).to_contain_text(telling("2 accepted Then"))
            written += [4, 3, 1, 4, 1][played]
            assert text_of(page) == "".join(tokens[:written])
            for phone in phones:
                expect(phone.locator(SCORE)).to_have_text(page.locator(SCORE).inner_text())
                assert phone.locator(".sd-text").nth(1).inner_text() == page.locator(".sd-text").nth(1).inner_text()
        expect(page.locator(SCORE)).to_have_text(telling("room 2.60 5 10"))
        page.get_by_role("button", name="End the game").click()
        for phone in phones:
            expect(phone.locator(FIELD)).to_be_disabled()


def vote(url: str, token: str, voter: str, number: int, guess: str) -> int:
    body = json.dumps({"voter": voter, "number": number, "guess": guess})
    return httpx.put(f"{url}votes/{token}", content=body).status_code


@contextmanager
def voting(url: str, client: httpx.Client) -> Iterator[tuple[str, Callable[..., httpx.Response]]]:
    """A page that shares: the token, and what asks for its votes."""
    with following(url, "mine", client):
        token = share(url, "mine", client).json()["token"]

        def votes(method: str, session: str = "mine") -> httpx.Response:
            return client.request(method, f"{url}votes/{token}", params={"session": session})

        yield token, votes


def test_sixty_phones_vote_and_no_vote_is_lost() -> None:
    async def phones(url: str, token: str, opened: Callable[[], Any]) -> list[int]:
        async with AsyncExitStack() as stack:
            limits = httpx.Limits(max_connections=200)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=30, limits=limits))
            ids = [f"{number:016x}" for number in range(60)]
            streams = [
                await stack.enter_async_context(client.stream("GET", f"{url}watched/{token}?voter={voter}"))
                for voter in ids
            ]

            async def votes(voter: str, stream: httpx.Response) -> int:
                ballot, number, lines = False, 0, stream.aiter_lines()  # which end the stream when they are let go
                async for line in lines:
                    if ballot:
                        number = int(line.removeprefix("data: "))
                    if number:
                        break
                    ballot = line == "event: vote"
                body = json.dumps({"voter": voter, "number": number, "guess": f" guess {int(voter, 16) % 7}"})
                return (await client.put(f"{url}votes/{token}", content=body)).status_code

            assert {stream.status_code for stream in streams} == {200}
            await asyncio.to_thread(opened)
            return list(await asyncio.gather(*map(votes, ids, streams)))

    with served(Script()) as url, httpx.Client(timeout=30) as client, voting(url, client) as (token, votes):
        assert set(in_a_loop_of_its_own(phones(url, token, lambda: votes("POST")))) == {204}
        guesses = votes("DELETE").json()["guesses"]
    assert len(guesses) == 60
    assert len(set(guesses)) == 7


def test_who_comes_and_goes_cannot_fill_a_ballot() -> None:
    ballot, here = Ballot(1), [f"here {number}" for number in range(64)]
    for number in range(200):
        assert ballot.take(f"gone {number}", " a", here)
    for voter in here:
        assert ballot.take(voter, " b", here)
    assert {*ballot.guesses} == {*here}
    assert len(here) == MOST_GUESSES - 1
    assert not ballot.take("one more", " c", here)
    watch = Watch("")
    for number in range(1000):
        watch.admit(str(number))
    assert len(watch.known) < 1000
    assert "999" in watch.known


def test_a_vote_is_of_a_watcher_for_the_open_ballot_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    me, other = "0" * 16, "f" * 16
    with served(Script()) as url, httpx.Client(timeout=30) as client, voting(url, client) as (token, votes):
        with client.stream("GET", f"{url}watched/{token}?voter={me}"), client.stream("GET", f"{url}watched/{token}"):
            assert vote(url, token, me, 1, " a") == 409  # nobody asks
            assert votes("POST", "stranger").status_code == votes("GET", "stranger").status_code == 404
            assert votes("DELETE", "stranger").status_code == 404
            assert votes("POST").json() == {"votes": 0, "watchers": 2}
            assert vote(url, token, me, 2, " a") == 409
            assert vote(url, token, other, 1, " a") == 404
            assert vote(url, f"{token}s", me, 1, " a") == 404
            for wrong in ("", "[]", "{}", '{"voter": 1, "number": 1, "guess": ""}', "x" * 10_000):
                assert httpx.put(f"{url}votes/{token}", content=wrong).status_code == 400
            assert vote(url, token, me, 1, "x" * (LONGEST_GUESS + 1)) == 400
            assert vote(url, token, me, 1, " a") == 204
            assert vote(url, token, me, 1, " b") == 429
            monkeypatch.setattr(watches, "BETWEEN_VOTES", 0)
            assert vote(url, token, me, 1, " b") == 204
            assert votes("GET").json() == {"votes": 1, "watchers": 2}
            assert votes("DELETE").json() == {"guesses": [" b"]}
            assert vote(url, token, me, 1, " c") == 409
        wait_until(lambda: votes("GET").json()["watchers"] == 0)
        votes("POST")
        assert vote(url, token, me, 2, " a") == 204  # its connection may be back in a moment
