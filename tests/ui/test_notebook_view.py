"""The view of a race in a notebook, in a real browser."""

from __future__ import annotations

from playwright.sync_api import Browser

from specdemo import race


def test_the_view_plays_in_its_frame_and_cannot_reach_the_notebook(chromium: Browser) -> None:
    found = race("To be", preset="nanogpt-shakespeare", drafter="ngram", k=4, max_new_tokens=20)
    page = chromium.new_page(reduced_motion="reduce")
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.set_content(f"<title>a notebook</title>{found._repr_html_()}")
    view = page.frames[1]
    view.get_by_role("button", name="Play", exact=True).click()
    view.locator("[data-state=ended]").wait_for()
    assert found.text.strip()[:10] in view.locator("#replay").inner_text()
    assert troubles == []
    assert view.evaluate("(() => { try { return parent.document.title } catch { return 'no' } })()") == "no"
    page.context.close()
