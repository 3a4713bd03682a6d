"""The chart of a stage: its marks, its rates, and the runs that explain it."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect

from tests.support.binaries import wait_until
from tests.support.server import Service
from tests.web.conftest import Opened
from tests.web.flights import START, Feed
from tests.web.test_phone import NOTE_LABELS

STAGES = {"taps": {"shards": ["tap-0", "tap-1"]}, "other": {"shards": ["0"]}}
LINKS = {"spark": "http://driver:4040/jobs", "logs": "https://logs.example/?q=taps"}


def _open(feed: Feed, *stages: str, **members: object) -> int:
    body = {"stages": stages, "holder": "driver-1", **members}
    return feed.send("POST", "/runs", body)["run"]


def _end(feed: Feed, run: int, outcome: str, because: str = "") -> None:
    feed.send("POST", f"/runs/{run}/end", {"outcome": outcome, "because": because})


def _change(feed: Feed) -> None:
    etag = feed.client.get(feed.root).headers["etag"]
    taps = {**STAGES["taps"], "percentiles": [50]}
    stages = {**STAGES, "taps": taps, "below": {"inputs": ["taps"], "passthrough": True}}
    changed = feed.client.put(feed.root, json={"stages": stages}, headers={"If-Match": etag})
    assert changed.is_success, changed.text


def _marks(page: Page) -> Locator:
    return page.locator(".chart .mark")


def _retire(feed: Feed, stage: str, shard: str) -> None:
    feed.send("POST", f"/stages/{stage}/ranges/{shard}/retire", {"because": "the site is closed"})


def test_changes_are_marked_on_the_chart(service: Service, open_page: Opened):
    with Feed(service.url, "marked") as feed:
        feed.define(STAGES)
        feed.send("POST", "/reset")
        first = _open(feed, "taps")
        feed.claim("taps", holder="worker", run=first).promise(START)
        _end(feed, first, "finished")
        second = _open(feed, "taps")
        _end(feed, second, "failed", "out of memory at 2026-01-02T03:04:05Z")
        _open(feed, "other")
        _retire(feed, "taps", "tap-1")
        _retire(feed, "other", "0")
        _change(feed)
        with open_page("/#/jobs/marked/stages/taps?span=900000") as page:
            # Those of another stage are not marked.
            expect(_marks(page)).to_have_count(8)
            for kind, number in {
                "opened": 2,
                "ended": 1,
                "failed": 1,
                "reset": 1,
                "retired": 1,
                "specification": 1,
                "created": 1,
            }.items():
                expect(page.locator(f".chart .mark.{kind}")).to_have_count(number)
            expect(page.locator(".marks-legend")).to_contain_text(
                "✕ run failed◆ reset◇ range retired▼ specification changed✚ job created"
                "▶ run opened□ run ended"
            )
            _hover(page, page.locator(".chart .mark.failed"))
            expect(page.locator(".chart + .readout")).to_contain_text(
                f"run {second} failed (out of memory at 2026-01-02 03:04:05Z)"
            )
            page.get_by_text("8 changes as a table").click()
            rows = page.locator(".changes tbody tr")
            expect(rows).to_have_count(8)
            expect(rows.first).to_contain_text(
                "the specification changed: layout 2; taps: another policy; below: new"
            )
            expect(rows.filter(has_text="was retired")).to_contain_text("the site is closed")
            # A mark neither takes the mouse from the chart nor hides the line.
            events = "getComputedStyle(document.querySelector('.marks')).pointerEvents"
            assert page.evaluate(events) == "none"


def _hover(page: Page, mark: Locator) -> None:
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] - 2, box["y"] + box["height"] / 2)


def test_a_change_comes_to_the_chart_that_is_shown(service: Service, open_page: Opened):
    with Feed(service.url, "coming") as feed:
        feed.define(STAGES)
        with open_page("/#/jobs/coming/stages/taps") as page:
            expect(_marks(page)).to_have_count(1)
            _end(feed, _open(feed, "taps"), "failed")
            expect(page.locator(".chart .mark.failed")).to_have_count(1)


def test_a_stopped_run_has_a_mark_of_its_own(service: Service, open_page: Opened):
    with Feed(service.url, "stopped-run") as feed:
        feed.define(STAGES)
        for outcome in ("finished", "stopped"):
            _end(feed, _open(feed, "taps"), outcome)
        with open_page("/#/jobs/stopped-run/stages/taps") as page:
            for kind in ("ended", "stopped"):
                expect(page.locator(f".chart .mark.{kind}")).to_have_count(1)
            expect(page.locator(".marks-legend")).to_contain_text("⊘ run stopped")


def test_the_chart_of_a_stage_without_a_watermark_is_not_labelled(
    service: Service, open_page: Opened
):
    """The axis of watermarks had the wall times of the last hour."""
    with Feed(service.url, "just-reset") as feed:
        feed.define(STAGES)
        feed.claim("taps", holder="worker").promise(START)
        feed.send("POST", "/reset")
        with open_page() as page:
            page.evaluate(NOTE_LABELS)
            page.goto("/#/jobs/just-reset/stages/taps?span=900000")
            expect(page.locator("section .empty").first).to_have_text(
                "The stage does not have a watermark in this time."
            )
            labels = page.evaluate("window.labels().filter(([text, left]) => left < 90)")
            assert labels == []
            expect(page.locator(".marks-legend")).to_contain_text("◆ reset")


def test_many_marks_leave_the_chart_visible(service: Service, open_page: Opened):
    with Feed(service.url, "crowded") as feed:
        feed.define(STAGES)
        run = 0
        for _ in range(70):
            run = _open(feed, "taps")
        _end(feed, run, "failed")
        with open_page("/#/jobs/crowded/stages/taps") as page:
            expect(page.locator(".chart .mark.failed")).to_have_count(1)
            width = page.evaluate("document.querySelector('.u-over').clientWidth")
            drawn = width // 24
            assert 20 < drawn < 72
            expect(_marks(page)).to_have_count(drawn)
            expect(page.locator(".marks-legend")).to_contain_text(
                f"{72 - drawn} marks not drawn: zoom in"
            )


def _last_step(feed: Feed) -> int:
    """Return the moment of the last step of `taps`."""
    return feed.send("GET", "/stages/taps/history?points=1000")["points"][-1]["at"]


INKED = """() => {
  const canvas = document.querySelector('.chart canvas');
  const ink = getComputedStyle(document.documentElement).getPropertyValue('--output').trim();
  const one = new OffscreenCanvas(1, 1).getContext('2d');
  one.fillStyle = ink;
  one.fillRect(0, 0, 1, 1);
  const [r, g, b] = one.getImageData(0, 0, 1, 1).data;
  // A copy: the browser warns of a canvas of the page that is read again and again.
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const read = copy.getContext('2d', { willReadFrequently: true });
  read.drawImage(canvas, 0, 0);
  const { data } = read.getImageData(0, 0, copy.width, copy.height);
  let found = 0;
  for (let k = 0; k < data.length; k += 4) {
    found += data[k] === r && data[k + 1] === g && data[k + 2] === b;
  }
  return found;
}"""
"""Counts the pixels of a chart in the colour of the output watermark."""


def test_the_line_of_a_final_stage_lasts_until_its_end(service: Service, open_page: Opened):
    """A source with one watermark before the end of time had an empty chart."""
    with Feed(service.url, "over") as feed:
        feed.define({"taps": {"shards": ["tap-0"]}})
        feed.claim("taps", holder="worker").promise(START)
        at = _last_step(feed)
        feed.send("POST", "/stages/taps/ranges/tap-0/retire", {"because": "the site is closed"})
        with open_page(f"/#/jobs/over/stages/taps?from={at - 100}&to={at + 200}") as page:
            expect(page.locator(".chart canvas")).to_be_visible()
            # The page's policy forbids a function that is evaluated again and again in it.
            wait_until(lambda: page.evaluate(INKED) > 0, "the line is drawn")


def test_a_single_step_is_counted_in_words(service: Service, open_page: Opened):
    with Feed(service.url, "declared") as feed:
        feed.define({"taps": {"shards": ["tap-0"]}})
    with open_page("/#/jobs/declared/stages/taps") as page:
        expect(page.get_by_text("The last step as a table")).to_be_visible()


def test_a_first_watermark_has_not_come_after_another(service: Service, open_page: Opened):
    with Feed(service.url, "first-steps") as feed:
        feed.define({"taps": {"shards": ["tap-0"]}})
        lease = feed.claim("taps", holder="worker")
        lease.promise(START)
        at = _last_step(feed)
        with open_page(
            f"/#/jobs/first-steps/stages/taps?from={at - 1_000}&to={at + 1_000}"
        ) as page:
            page.get_by_text(re.compile(r"The last \d steps as a table")).click()
            after = page.locator("details tbody tr td:nth-child(4)")
            expect(after.first).to_have_text("at first")
            expect(after.last).to_have_text("–")  # noqa: RUF001
            status = page.locator('.steps [data-label="Status"]')
            expect(status.first).to_have_text("● active")
            expect(status.last).to_have_text("○ unknown")


def test_rates_beside_the_watermark(service: Service, open_page: Opened):
    with Feed(service.url, "rates") as feed:
        feed.define(STAGES)
        lease = feed.claim("taps", holder="worker")
        with open_page("/#/jobs/rates/stages/taps?span=60000") as page:
            expect(page.locator(".chart .u-over")).to_be_visible()
            expect(page.locator(".rates")).to_have_count(0)
            for step in range(2):
                shards = {"tap-0": {"watermark": START + step, "records": 900, "late": 1}}
                lease.report({**shards, "tap-1": START + step})
                # The steps are a second apart at least, as their rates are.
                page.wait_for_timeout(1_100)
            page.reload()
            strips = page.locator(".rates .strip")
            expect(strips).to_have_count(2)
            expect(strips.first).to_have_attribute("aria-label", re.compile(r"^rows a second .*\d"))
            chart, strip = (
                page.locator(f"{each} .u-over").first.bounding_box()
                for each in (".chart", ".rates")
            )
            assert chart is not None
            assert strip is not None
            # A moment is at the same place in both.
            assert (chart["x"], chart["width"]) == (strip["x"], strip["width"])
            page.get_by_text(re.compile("The last .* steps")).click()
            cells = page.locator("details tbody tr").first.locator("td")
            rows, late = (float(cells.nth(k).inner_text().replace(",", "")) for k in (5, 6))
            assert 0 < rows <= 900 / 1.1
            assert 0 < late <= 1 / 1.1


RATES = """async ([points, shown, stage]) => {
  const { ratesOf } = await import("/site/parts/rates.js");
  return ratesOf(points, shown, stage);
}"""


def test_rates_are_of_whole_seconds_and_never_negative(open_page: Opened):
    def point(at: int, records: int | None, late: int | None) -> dict[str, int | None]:
        return {"at": at, "records": records, "late": late}

    points = [
        point(0, None, None),  # the state at the begin of the history
        point(1_000, 100, 1),
        point(1_001, 160, 1),  # too near for a rate of its own
        point(3_000, 300, 3),
        point(5_000, 20, 0),  # the live store was lost
        point(7_000, 60, 0),
    ]
    with open_page() as page:
        shown = {"from": 0, "to": 20_000}
        assert page.evaluate(RATES, [points, shown, None]) == [
            [1_000, 3_000, 5_000, 7_000],
            [None, 100, None, 20],
            [None, 1, None, 0],
        ]
        # While the watermark stands still, rows may come.
        stage = {"records": 190, "late": 13}
        at, rows, late = page.evaluate(RATES, [points, shown, stage])
        assert (at[-1], rows[-1], late[-1]) == (20_000, 10, 1)


def test_the_runs_of_a_stage(service: Service, open_page: Opened):
    with Feed(service.url, "executed") as feed:
        feed.define(STAGES)
        with open_page("/#/jobs/executed/stages/taps") as page:
            runs = page.locator(".runs")
            expect(runs).to_contain_text("The stage does not have a run.")
            for number in range(5):
                _end(feed, _open(feed, "taps"), "stopped", f"reason {number}")
            fenced = _open(feed, "taps")
            _open(feed, "other")
            run = _open(feed, "taps", program="water", links=LINKS)
            expect(runs.locator(".executes")).to_contain_text(
                re.compile(
                    rf"Run {run} of driver-1 \(water\) was opened at \d.*Z, \d.* ago;"
                    " no worker holds a range"
                )
            )
            feed.claim("taps", ["tap-0"], holder="w", run=run)
            expect(runs.locator(".executes")).to_contain_text(
                re.compile(
                    rf"Run {run} of driver-1 \(water\) executes the stage since \d.*, for \d"
                )
            )
            for name, address in (("Spark's UI", LINKS["spark"]), ("logs", LINKS["logs"])):
                link = runs.locator(".executes").get_by_role("link", name=name)
                expect(link).to_have_attribute("href", address)
                expect(link).to_have_attribute("rel", "noopener noreferrer")
            rows = runs.locator("tbody tr")
            expect(rows).to_have_count(5)
            expect(rows.nth(0)).to_contain_text("goes on")
            expect(rows.nth(1)).to_contain_text(f"{fenced}fenced")
            expect(rows.nth(2)).to_contain_text("stoppedreason 4")
            _end(feed, run, "failed", "out of memory")
            expect(rows.first).to_contain_text("✕ failedout of memory")
            expect(runs.locator(".executes")).to_contain_text(
                f"Run {run} of driver-1 (water) failed at"
            )
            feed.send("POST", "/reset")
            expect(runs).to_contain_text("The stage does not have a run since the reset.")


def test_the_runs_of_a_stage_are_cards_on_a_phone(service: Service, open_page: Opened):
    with Feed(service.url, "carried") as feed:
        feed.define(STAGES)
        _open(feed, "taps", program="w" * 200, links=LINKS)
        with open_page("/#/jobs/carried/stages/taps", width=360, height=740) as page:
            expect(page.locator(".runs")).to_have_count(0)
            page.get_by_role("heading", name="Runs").click()
            expect(page.locator(".runs td[data-label=Holder]")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
