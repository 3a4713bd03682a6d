"""A stage on a phone: what stands, and why, on the first screen; the others are unfolded."""

from __future__ import annotations

import time
from typing import Final

import pytest
from playwright.sync_api import Page, expect

from tests.support.binaries import wait_until
from tests.support.server import Service
from tests.web.conftest import Opened
from tests.web.flights import DAY, HOUR, START, Feed, Flights
from tests.web.test_graph import FRAMES

STAGE: Final = "/#/jobs/nyc-flights/stages/newark"
WIDTH: Final = 360
HEIGHT: Final = 740
MINUTE: Final = HOUR // 60
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


NOTE_LABELS: Final = """() => {
  const { clearRect, fillText } = CanvasRenderingContext2D.prototype;
  const drawn = new Map();
  window.labels = () => [...drawn.values()].at(-1);
  CanvasRenderingContext2D.prototype.clearRect = function (...place) {
    drawn.set(this, []);
    return clearRect.apply(this, place);
  };
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const { width } = this.measureText(text);
    const height = parseFloat(/[\\d.]+px/.exec(this.font)[0]);
    const from = this.textAlign === "right" ? -width : this.textAlign === "center" ? -width / 2 : 0;
    const at = this.getTransform().transformPoint({ x: x + from, y });
    const top = this.textBaseline === "middle" ? at.y - height / 2
      : this.textBaseline === "top" ? at.y : at.y - height;
    drawn.get(this)?.push([text, at.x, top, width, height]);
    return fillText.call(this, text, x, y);
  };
}"""
"""Keeps the labels of each plot since it was drawn last, with their places on its canvas."""

HAS_VALUES: Final = "(window.labels() ?? []).some(([text]) => text.startsWith('2013'))"

OVERLAPS: Final = """() => {
  const faults = [];
  const labels = window.labels();
  labels.forEach(([one, x, y, width, height], k) => {
    if (x < 0) faults.push(`${one} leaves the chart`);
    for (const [other, x2, y2, width2, height2] of labels.slice(k + 1)) {
      const apart = x + width <= x2 || x2 + width2 <= x || y + height <= y2 || y2 + height2 <= y;
      if (!apart) faults.push(`${one} and ${other} overlap`);
    }
  });
  return labels.length > 3 ? faults : ["labels are missing"];
}"""


@pytest.mark.parametrize("step", [MINUTE // 2, MINUTE, 4 * HOUR, 9 * HOUR, 3 * DAY])
def test_the_labels_of_a_chart_do_not_overlap(service: Service, open_page: Opened, step: int):
    name = f"labels-{step}"
    with Feed(service.url, name) as feed:
        feed.define({"s": {"shards": ["a"]}})
        lease = feed.claim("s", holder="w")
        lease.promise(START)
        at = feed.send("GET", "/stages/s/history?points=1000")["points"][-1]["at"]
        # Later, so that both watermarks are steps of their own.
        time.sleep(0.1)
        lease.promise(START + 5 * step)
        with open_page(width=WIDTH, height=HEIGHT) as page:
            page.evaluate(NOTE_LABELS)
            # From a moment on that has a label, which stands in the corner of the axes.
            begin = at - at % 5_000
            page.goto(f"/#/jobs/{name}/stages/s?from={begin}&to={begin + 10_000}")
            wait_until(lambda: page.evaluate(HAS_VALUES), "the watermarks are drawn")
            page.evaluate(FRAMES)
            assert page.evaluate(OVERLAPS) == []
