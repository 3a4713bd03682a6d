"""For everyone: keyboard, screen readers, both themes; nothing from elsewhere, and not much of it."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.web.browser import accessibility_faults
from tests.web.conftest import Opened
from tests.web.flights import Flights

VIEWS = {
    "jobs": "/",
    "job": "/#/jobs/nyc-flights",
    "stage": "/#/jobs/nyc-flights/stages/newark?at=1357603200000",
}


@pytest.mark.parametrize("view", VIEWS)
def test_no_accessibility_fault(flights: Flights, open_page: Opened, view: str):
    with open_page(VIEWS[view]) as page:
        _shown(page, view)
        assert accessibility_faults(page) == []
        page.emulate_media(color_scheme="dark")
        # Themes differ in colours alone.
        assert accessibility_faults(page, "{runOnly: ['color-contrast']}") == []


def _shown(page: Page, view: str) -> None:
    wanted = {"jobs": "tr[data-job]", "job": ".because", "stage": ".heat button"}[view]
    expect(page.locator(wanted).first).to_be_visible()


def test_by_keyboard_alone(flights: Flights, open_page: Opened):
    with open_page() as page:
        expect(page.locator('tr[data-job="nyc-flights"]')).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        _tab_to(page, "document.activeElement.textContent === 'nyc-flights'")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("nyc-flights")
        expect(page.locator('a[data-stage="newark"]')).to_be_visible()
        _tab_to(page, "document.activeElement.dataset.stage === 'newark'")
        page.keyboard.press("Enter")
        expect(page.locator(".heat button")).to_have_count(5)
        _tab_to(page, "document.activeElement.parentElement.className === 'heat'")
        page.keyboard.press("ArrowRight")
        expect(page.locator(".heat button").nth(1)).to_be_focused()


def _tab_to(page: Page, condition: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(condition):
            return
    raise AssertionError(f"never: {condition}")


def test_the_theme_is_chosen_and_kept(flights: Flights, open_page: Opened):
    ground = "getComputedStyle(document.body).backgroundColor"
    with open_page() as page:
        button = page.get_by_role("button", name="Theme: auto")
        light = page.evaluate(ground)
        button.click()
        page.get_by_role("button", name="Theme: light").click()
        expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
        dark = page.evaluate(ground)
        assert dark != light
        page.reload()
        expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
        assert page.evaluate(ground) == dark


def test_all_of_it_is_small_and_compressed(flights: Flights, open_page: Opened):
    sizes = """performance.getEntries().filter((each) => each.initiatorType !== 'fetch')
      .map((each) => each.decodedBodySize ?? 0).reduce((sum, size) => sum + size, 0)"""
    with open_page("/#/jobs/nyc-flights/stages/newark") as page:
        expect(page.locator(".heat button").first).to_be_visible()
        assert 50_000 < page.evaluate(sizes) < 300_000


def test_the_content_policy_holds(flights: Flights, open_page: Opened):
    """Anything that the page does not need is refused: a working page does not prove a refusal."""
    with open_page(
        allowed=frozenset({"Content Security Policy", "Content-Security-Policy"})
    ) as page:
        expect(page.locator("tr[data-job]").first).to_be_visible()
        page.evaluate(
            """() => {
              const script = document.createElement("script");
              script.textContent = "window.inlined = true";
              document.body.append(script);
              const element = document.createElement("p");
              element.innerHTML = '<b style="color: red" onclick="window.clicked = true">x</b>';
              document.body.append(element);
              element.firstChild.click();
            }"""
        )
        assert page.evaluate("[window.inlined, window.clicked]") == [None, None]
        style = "getComputedStyle(document.querySelector('p > b')).color"
        assert page.evaluate(style) != "rgb(255, 0, 0)"
        elsewhere = "fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => error.name)"
        assert page.evaluate(elsewhere) == "TypeError"
