"""The page while things happen: advances, an outage, many updates at once."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.support.server import Service
from tests.web.conftest import Opened
from tests.web.flights import START, Feed, Flights, shown


def test_an_advance_appears_by_itself(flights: Flights, open_page: Opened):
    before = flights.advance()
    with open_page("/#/jobs/nyc-flights", allowed=frozenset({"ERR_FAILED"})) as page:
        newark = page.locator('a[data-stage="newark"] .output')
        expect(newark).to_have_text(before)
        expect(page.locator('[data-state="live"]')).to_be_visible()
        # No other reading: so what comes, comes by the stream of events.
        page.route("**/watermarks", lambda route: route.abort())
        for _ in range(3):
            at = flights.advance()
            expect(newark).to_have_text(at)
            expect(page.locator('a[data-stage="weekly-average"] .output')).to_have_text(at)


FOLLOW_AT_ONCE = """
new MutationObserver((_, observer) => {
  if (!document.querySelector("#app .waiting[role=status]")) return;
  observer.disconnect();
  location.hash = "#/jobs/nyc-flights";
}).observe(document, { childList: true, subtree: true });
"""


def test_a_link_that_is_followed_at_once_is_not_lost(flights: Flights, open_page: Opened):
    with open_page() as page:
        page.add_init_script(FOLLOW_AT_ONCE)
        page.reload()
        expect(page.get_by_role("heading", level=1)).to_have_text("nyc-flights")


def test_a_job_that_is_deleted_and_defined_again_is_another_one(
    service: Service, open_page: Opened
):
    gone = frozenset({"404", "Failed to load resource"})
    with Feed(service.url, "anew") as feed, open_page(allowed=gone) as page:
        feed.define({"old": {"shards": ["0"]}, "k": {"inputs": ["old"], "ranges": 1}})
        page.goto("/#/jobs/anew")
        expect(page.locator('[data-stage="old"]').first).to_be_visible()
        feed.send("DELETE", "")
        expect(page.get_by_role("alert")).to_contain_text("anew")
        expect(page.locator("[data-stage]")).to_have_count(0)
        feed.define({"new": {"shards": ["0"]}, "k": {"inputs": ["new"], "ranges": 1}})
        expect(page.locator('[data-stage="new"]').first).to_be_visible()
        expect(page.locator('[data-state="live"]')).to_be_visible()
        expect(page.locator('[data-stage="old"]')).to_have_count(0)
        # At once, with the same names: only the edges tell.
        feed.send("DELETE", "")
        feed.define({"new": {"shards": ["0"]}, "k": {"shards": ["0"]}})
        feed.claim("k", holder="worker").promise(START)
        expect(page.locator('[data-stage="k"] .output').first).to_have_text(shown(START))


def test_a_view_that_cannot_be_drawn_does_not_take_the_page_along(
    service: Service, open_page: Opened
):
    with Feed(service.url, "odd") as feed:
        feed.define({"s": {"shards": ["0"]}})
        with open_page(allowed=frozenset({"a view cannot be drawn"})) as page:
            page.route(
                "**/odd/graph", lambda route: route.fulfill(json={"stages": [{"stage": "s"}]})
            )
            page.goto("/#/jobs/odd")
            expect(page.get_by_role("alert")).to_contain_text("cannot be drawn")
            page.unroute("**/odd/graph")
            page.get_by_role("button", name="Try again").click()
            expect(page.locator('[data-stage="s"]').first).to_be_visible()
            page.route(
                "**/odd/graph", lambda route: route.fulfill(json={"stages": [{"stage": "s"}]})
            )
            page.reload()
            expect(page.get_by_role("alert")).to_contain_text("cannot be drawn")
            page.get_by_role("link", name="tidegauge").click()
            expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")


COUNT_DRAWINGS = """() => {
  const counted = { frames: 0, drawings: 0 };
  window.counted = counted;
  const frame = () => { counted.frames += 1; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  const drawn = document.querySelector('[data-stage="s"] .output');
  new MutationObserver(() => (counted.drawings += 1)).observe(
    drawn, { characterData: true, subtree: true, childList: true });
}"""
EVENTS = 200


def test_many_updates_are_drawn_once_for_each_picture(service: Service, open_page: Opened):
    """However fast they come: of 200 advances in a burst, each picture shows the newest, once."""
    with Feed(service.url, "fast") as feed:
        feed.define({"s": {"shards": ["0"]}})
        lease = feed.claim("s", holder="worker")
        lease.promise(START)
        with open_page("/#/jobs/fast") as page:
            expect(page.locator('[data-stage="s"] .output')).to_have_text(shown(START))
            page.evaluate(COUNT_DRAWINGS)
            for second in range(1, EVENTS + 1):
                lease.promise(START + second * 1_000)
            expect(page.locator('[data-stage="s"] .output')).to_have_text(
                shown(START + EVENTS * 1_000)
            )
            counted = page.evaluate("window.counted")
            assert 0 < counted["drawings"] <= counted["frames"] + 1
            assert counted["drawings"] < EVENTS + 10
