"""A stage on a phone: what stands, and why, on the first screen; the others are unfolded."""

from __future__ import annotations

from typing import Final

from playwright.sync_api import Page, expect

from tests.support.server import Service
from tests.web.conftest import Opened
from tests.web.flights import Feed, Flights

STAGE: Final = "/#/jobs/nyc-flights/stages/newark"
WIDTH: Final = 360
HEIGHT: Final = 740
TITLES: Final = ("Watermarks over time", "Runs", "When will it be done?", "Ranges")


def _length(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollHeight")


def test_a_stage_is_short_and_unfolds(flights: Flights, open_page: Opened):
    requests: list[str] = []
    with open_page("/", width=WIDTH, height=HEIGHT) as page:
        page.on("request", lambda request: requests.append(request.url))
        page.goto(STAGE)
        folds = page.locator("details.fold")
        expect(folds).to_have_count(5)
        for part in (".facts .status", "[data-fact=output]", ".because"):
            expect(page.locator(part)).to_be_in_viewport(ratio=1)
        for title in TITLES:
            expect(page.get_by_role("heading", name=title)).to_be_visible()
        # Each fact of a watermark is one line.
        for name in ("Output watermark", "Input watermark"):
            fact = page.locator(".facts > div", has_text=name)
            lines = "each => each.clientHeight / parseFloat(getComputedStyle(each).fontSize)"
            assert fact.evaluate(lines) < 2.5
        # The list of jobs, which was shown before, may still request the picture of its row.
        unfolded = ("/newark/history?from=", "/runs?stage=", "/changes?", "range-summary")
        assert not [each for each in requests if any(part in each for part in unfolded)]
        folded = _length(page)
        for summary in page.locator("details.fold > summary").all():
            summary.click()
        expect(page.locator(".chart .u-over")).to_be_visible()
        expect(page.locator(".heat button").first).to_be_visible()
        expect(page.get_by_text("1 range holds newark back")).to_have_count(2)
        for title in TITLES:
            # A title has become the line that unfolds, and is not repeated below.
            expect(page.get_by_role("heading", name=title)).to_have_count(1)
        assert folded * 3 <= _length(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH


def test_a_link_unfolds_what_it_shows(flights: Flights, open_page: Opened):
    with open_page(f"{STAGE}?show=all", width=WIDTH, height=HEIGHT) as page:
        expect(page.locator(".ranges tbody tr")).to_have_count(5)
        expect(page.locator(".chart .u-over")).to_have_count(0)


LABEL_EMS: Final = """each => {
  const label = getComputedStyle(each, "::before");
  return parseFloat(label.width) / parseFloat(label.fontSize);
}"""


def test_a_long_reason_leaves_its_label_whole(service: Service, open_page: Opened):
    """The label had a letter on each line."""
    because = f"java.lang.OutOfMemoryError: Java heap space at org.apache.{'spark.' * 30}Task"
    with Feed(service.url, "long-reason") as feed:
        feed.define({"s": {"shards": ["a"]}})
        run = feed.send("POST", "/runs", {"stages": ["s"], "holder": "driver"})["run"]
        feed.send("POST", f"/runs/{run}/end", {"outcome": "failed", "because": because})
        with open_page("/#/jobs/long-reason/stages/s", width=WIDTH, height=HEIGHT) as page:
            page.locator("summary", has_text="Runs").click()
            cell = page.locator('td[data-label="Reason"]')
            expect(cell).to_contain_text("OutOfMemoryError")
            assert cell.evaluate(LABEL_EMS) > 2
            assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH


def test_a_wide_view_has_nothing_to_unfold(flights: Flights, open_page: Opened):
    with open_page(STAGE, width=WIDTH, height=HEIGHT) as page:
        expect(page.locator("details.fold")).to_have_count(5)
        page.set_viewport_size({"width": 1_366, "height": 800})
        expect(page.locator(".chart .u-over")).to_be_visible()
        expect(page.locator("details.fold")).to_have_count(0)
