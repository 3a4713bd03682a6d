"""Each view, with a job like the demonstration's, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Final

import pytest
from playwright.sync_api import Page, expect

from tests.support.binaries import wait_until
from tests.support.server import Service
from tests.web.conftest import Opened
from tests.web.flights import DAY, STAGES, START, Feed, Flights

JOB = "/#/jobs/nyc-flights"
STAGE = f"{JOB}/stages/newark"


def test_jobs(flights: Flights, service: Service, open_page: Opened):
    with Feed(service.url, "quiet-one") as quiet:
        quiet.define({"s": {"shards": ["0"]}})
    with open_page() as page:
        row = page.locator('tr[data-job="nyc-flights"]')
        expect(row).to_contain_text("8 stages")
        expect(row).to_contain_text("newark")
        expect(row).to_contain_text("2013-01-")
        # The pictures of rows that are out of view are not read, and other tests leave jobs in trouble.
        row.scroll_into_view_if_needed()
        expect(row.get_by_role("img", name="moved in the last hour", exact=True)).to_be_visible()
        without = page.locator('tr[data-job="quiet-one"]')
        expect(without).to_contain_text("silent")
        # Without a rise, the begin of the generation counts.
        expect(without.locator('[data-label="Unchanged for"]')).to_have_text(re.compile(r"^\d"))
        expect(page.get_by_role("img", name="has not moved in the last hour").first).to_be_visible()


def test_what_stands_still_comes_first_and_is_found(
    flights: Flights, service: Service, open_page: Opened
):
    with Feed(service.url, "stands-still") as still:
        still.define({"s": {"shards": ["0"]}})
        flights.advance()
        with open_page() as page:
            names = page.locator("tbody tr th a")
            expect(names.filter(has_text="nyc-flights")).to_be_visible()
            # Other tests may have left jobs behind.
            order = names.all_inner_texts()
            assert order.index("stands-still") < order.index("nyc-flights")
            page.get_by_role("searchbox").fill("STANDS")
            expect(names).to_have_text(["stands-still"])
            assert "q=STANDS" in page.url
            # Whoever gets the link sees the same.
            page.reload()
            expect(names).to_have_text(["stands-still"])
            names.first.click()
            expect(page.get_by_role("heading", level=1)).to_have_text("stands-still")
            expect(page.locator(".because")).to_contain_text("has never reported")


def test_a_job(flights: Flights, open_page: Opened):
    flights.advance()
    with open_page(JOB) as page:
        for stage in STAGES:
            expect(page.locator(f'a[data-stage="{stage}"]')).to_be_visible()
        # Sources left, sinks right.
        newark, weekly = (_left(page, stage) for stage in ("newark", "weekly-average"))
        assert newark < _left(page, "newark-rotations") < weekly
        # The culprit: down to the range, in one colour, and in words.
        held = page.locator("a.stage.held")
        expect(held).to_have_count(3)
        expect(page.locator(".holder")).to_have_attribute("data-range", "UA")
        expect(page.locator("path.edge.held")).to_have_count(2)
        expect(page.locator(".because")).to_contain_text("weekly-average waits for newark, where")
        expect(page.locator(".because")).to_contain_text("UA (holder executor-0)")
        waits = page.locator('path[data-edge="new-york-rotations→weekly-average"]')
        expect(waits).to_have_class(re.compile("waits"))
        cells = page.locator("tbody tr", has_text="newark-rotations").first
        expect(cells).to_contain_text("4 of 4")


def _left(page: Page, stage: str) -> float:
    box = page.locator(f'a[data-stage="{stage}"]').bounding_box()
    assert box is not None
    return box["x"]


def test_another_stage_is_explained_by_its_link(flights: Flights, open_page: Opened):
    with open_page(f"{JOB}?why=departures-weather") as page:
        expect(page.locator(".because")).to_contain_text("keeps a hold 'state'")
        expect(page.locator(".holder")).to_have_attribute("data-range", "00000000-40000000")


def test_a_stage(flights: Flights, open_page: Opened):
    at = flights.advance()
    with open_page(STAGE) as page:
        expect(page.locator('[data-fact="output"]')).to_have_text(at)
        expect(page.locator(".chart .u-over")).to_be_visible()
        # Its newest advance is the last step of the table beside the chart, too.
        page.get_by_text(re.compile("The last .* steps")).click()
        expect(page.locator("details tbody tr").first).to_contain_text(at)
        expect(page.locator(".facts")).to_contain_text(re.compile(r"Late rows\d+ of \d+"))
        row = page.locator(".ranges tbody tr").first
        expect(row).to_contain_text("UA")
        expect(row).to_contain_text("executor-0")
        expect(page.locator(".heat button")).to_have_count(5)


def test_corrections_of_a_stage_are_shown_if_there_are_some(service: Service, open_page: Opened):
    with Feed(service.url, "corrected") as feed:
        feed.define({"s": {"shards": ["0"]}, "sums": {"inputs": ["s"], "ranges": 2}})
        with open_page("/#/jobs/corrected/stages/sums") as page:
            facts = page.locator(".facts")
            expect(facts).to_contain_text("Late rows")
            expect(facts).not_to_contain_text("Corrections")
            feed.send("POST", "/commits", {"epoch": 1, "stages": {"sums": {"corrections": 1_234}}})
            expect(facts).to_contain_text("Corrections1,234")


def test_times_are_local_or_utc(flights: Flights, open_page: Opened):
    at = flights.advance()
    assert at.endswith(" 17:00:00Z")
    # The browser is in New York.
    local = at.replace("17:00:00Z", "12:00:00")
    with open_page(STAGE) as page:
        output = page.locator('[data-fact="output"]')
        expect(output).to_have_text(at)
        page.get_by_role("link", name="Times are in UTC").click()
        expect(output).to_have_text(local)
        # The link holds it, and it stays from view to view.
        page.get_by_role("link", name="nyc-flights").click()
        expect(page.locator('a[data-stage="newark"]')).to_contain_text(local)


def test_times_in_texts_of_the_service_follow_the_zone(service: Service, open_page: Opened):
    with Feed(service.url, "texts") as feed:
        feed.define({"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": 1}})
        feed.claim("s", holder="reader").promise(START + DAY)
        feed.claim("k", holder="worker").observe(hold=START)
        with open_page("/#/jobs/texts") as page:
            because = page.locator(".because")
            expect(because).to_contain_text("at 2013-01-01 05:00:00Z")
            page.get_by_role("link", name="Times are in UTC").click()
            expect(because).to_contain_text("at 2013-01-01 00:00:00,")
            # A moment without its day, as in a problem: the day is added where it is another.
            moments = page.evaluate(
                """async () => {
                  const { moments } = await import("/site/lib/time.js");
                  const noon = Date.UTC(2026, 0, 2, 12);
                  const at = (zone) => moments("no worker since 03:30Z (gone)", zone, noon);
                  const failed = moments("failed at 2026-01-02 16:38Z: full", "local", noon);
                  return [at("utc"), at("local"), failed];
                }"""
            )
            assert moments == [
                "no worker since 03:30Z (gone)",
                "no worker since 2026-01-01 22:30 (gone)",
                "failed at 11:38: full",
            ]


def test_zoom(flights: Flights, open_page: Opened):
    with open_page(STAGE) as page:
        chart = page.locator(".chart .u-over")
        box = chart.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60, steps=4)
        page.mouse.up()
        page.wait_for_url(re.compile(r"from=\d+.*to=\d+"))
        first = page.url
        page.get_by_role("button", name="Zoom in").click()
        page.wait_for_url(lambda url: "from=" in url and url != first)
        page.get_by_role("link", name="1 h", exact=True).click()
        page.wait_for_url(lambda url: "from=" not in url)


NOTE_WHAT_COMES_FIRST = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector(".u-over")) return;
  window.explainedFirst = document.querySelector(".because") !== null;
  observer.disconnect();
}).observe(document, { childList: true, subtree: true })
"""


def test_the_chart_does_not_jump_when_the_explanation_comes(flights: Flights, open_page: Opened):
    with open_page() as page:
        page.evaluate(NOTE_WHAT_COMES_FIRST)
        page.goto(STAGE)
        expect(page.locator(".chart .u-over")).to_be_visible()
        # It stands above the chart: if it came later, whoever has begun to drag would lose the place.
        assert page.evaluate("window.explainedFirst") is True


def test_a_stage_is_shown_without_an_explanation(flights: Flights, open_page: Opened):
    with open_page(allowed=frozenset({"ERR_FAILED"})) as page:
        page.route("**/explain?*", lambda route: route.abort())
        page.goto(STAGE)
        expect(page.locator(".chart .u-over")).to_be_visible()
        expect(page.locator(".because")).to_have_count(0)


def test_eta(service: Service, open_page: Opened):
    with Feed(service.url, "steady") as feed:
        feed.define({"s": {"shards": ["0"]}})
        lease = feed.claim("s", holder="worker")
        for step in range(40):
            lease.promise(START + step * 60_000)
        there, never = START + 30 * 60_000, START + 400 * DAY
        with open_page(f"/#/jobs/steady/stages/s?at={there}") as page:
            answer = page.locator(".answer")
            expect(answer).to_have_text(
                "s has reached 2013-01-01 05:30:00Z: the output watermark is at 2013-01-01 05:39:00Z."
            )
            expect(page.locator(".ask .zone")).to_have_text("UTC")
            page.get_by_role("link", name="Times are in UTC").click()
            expect(page.locator(".ask .zone")).to_have_text("America/New_York")
            expect(answer).to_have_text(
                "s has reached 2013-01-01 00:30:00: the output watermark is at 2013-01-01 00:39:00."
            )
            page.goto(f"/#/jobs/steady/stages/s?at={never}")
            expect(answer).to_have_text(
                re.compile(
                    "^An estimate for 2014-02-05 05:00:00Z is not possible:"
                    " the history is too short: an estimate needs 9 advances by .*:"
                    " fewer in the last .*$"
                )
            )
            page.get_by_label("Everything before").fill("2013-01-01T05:10:00")
            page.get_by_role("button", name="has arrived when?").click()
            expect(answer).to_contain_text("s has reached 2013-01-01 05:10:00Z")
            assert f"at={START + 10 * 60_000}" in page.url


def test_an_estimate_is_a_sentence(service: Service, open_page: Opened):
    with Feed(service.url, "moving") as feed:
        feed.define({"s": {"shards": ["0"]}})
        lease = feed.claim("s", holder="worker")
        with open_page("/#/jobs/moving/stages/s") as page:

            def estimated(step: Iterator[int]) -> bool:
                at = START + next(step) * 60_000
                lease.promise(at)
                # Another question each time, so that the page does not wait to repeat the last one.
                page.goto(f"/#/jobs/moving/stages/s?at={at + 60_000}")
                text = page.locator(".answer").inner_text()
                return re.fullmatch(_ESTIMATE, text) is not None

            steps = count()
            wait_until(lambda: estimated(steps), "an estimate")


_ESTIMATE: Final = (
    r"s reaches 2013-\d\d-\d\d \d\d:\d\d:00Z at about (\S+ )?\d\d:\d\dZ, in \d[^,]*\."
    r" In 80 of 100 cases, the moment is between \S+ \S+Z and \S+ \S+Z:"
    r" in the last .* the stage advanced by 1 min \d+ times; estimated from these durations.*\."
)


def test_throttled_shards_and_why(service: Service, open_page: Opened):
    with Feed(service.url, "aligned") as feed:
        throttle = {"groups": [{"stages": ["fast", "slow"], "max_drift_ms": 60_000}], "stages": {}}
        feed.define({"fast": {"shards": ["f"]}, "slow": {"shards": ["s"]}}, throttle=throttle)
        feed.claim("slow", holder="a").promise(START)
        feed.claim("fast", holder="b").promise(START + DAY)
        with open_page("/#/jobs/aligned/stages/fast") as page:
            expect(page.get_by_text("Throttled: 1 shard")).to_be_visible()
            expect(page.get_by_text("more than 1 min ahead of shard s").first).to_be_visible()
            expect(page.locator(".ranges td.condition")).to_have_text("throttled")


def test_a_throttled_reader_whose_run_has_ended_is_shown_as_throttled(
    service: Service, open_page: Opened
):
    """The summary counted it, and its row showed that it has ended."""
    with Feed(service.url, "ended-ahead") as feed:
        throttle = {"groups": [{"stages": ["fast", "slow"], "max_drift_ms": 60_000}], "stages": {}}
        feed.define({"fast": {"shards": ["f"]}, "slow": {"shards": ["s"]}}, throttle=throttle)
        feed.claim("slow", holder="a").promise(START)
        run = feed.send("POST", "/runs", {"stages": ["fast"], "holder": "b"})["run"]
        feed.claim("fast", holder="b", run=run).promise(START + DAY)
        with open_page("/#/jobs/ended-ahead/stages/fast") as page:
            expect(page.locator(".ranges td.condition")).to_have_text("throttled")
            feed.send("POST", f"/runs/{run}/end", {"outcome": "finished"})
            expect(page.locator(".facts .chip")).to_have_text("throttled 1")
            expect(page.locator(".ranges td.condition")).to_have_text("ended, throttled")


def test_the_explanation_follows_the_state(service: Service, open_page: Opened):
    """After the end of a run, it was up to five seconds older than the state beside it."""
    with Feed(service.url, "ends-now") as feed:
        feed.define({"taps": {"shards": ["0"]}})
        run = feed.send("POST", "/runs", {"stages": ["taps"], "holder": "driver"})["run"]
        feed.claim("taps", holder="w", run=run).promise(START)
        with open_page("/#/jobs/ends-now/stages/taps") as page:
            expect(page.locator(".because")).to_contain_text("taps waits for range 0")
            feed.send("POST", f"/runs/{run}/end", {"outcome": "failed", "because": "no memory"})
            expect(page.locator(".facts .status")).to_contain_text("failed")
            expect(page.locator(".because")).to_contain_text("no memory", timeout=1_500)


def test_the_only_range_of_a_stage_is_called_so(service: Service, open_page: Opened):
    """It was 1 of 1 ranges."""
    with Feed(service.url, "single") as feed:
        feed.define({"taps": {"shards": ["0"]}})
        with open_page("/#/jobs/single") as page:
            box = page.locator('a[data-stage="taps"]')
            expect(box).to_contain_text("its only range has not reported")
            feed.claim("taps", holder="w").promise(START)
            expect(box).to_contain_text("its only range has reported")
            page.goto("/#/jobs/single/stages/taps")
            expect(page.locator(".ranges caption")).to_have_text("The only range")


def test_a_passthrough_stage_has_one_wording_for_its_ranges(service: Service, open_page: Opened):
    with Feed(service.url, "union") as feed:
        feed.define({"taps": {"shards": ["0"]}, "both": {"inputs": ["taps"], "passthrough": True}})
        with open_page("/#/jobs/union") as page:
            expect(page.locator('a[data-stage="both"]')).to_contain_text("ranges: none of its own")
            row = page.locator("tbody tr", has=page.get_by_role("rowheader", name="both"))
            expect(row.get_by_text("none of its own")).to_be_visible()
            page.goto("/#/jobs/union/stages/both")
            expect(page.locator(".facts")).to_contain_text("none of its own")
            expect(page.get_by_text("The ranges of the stage: none of its own.")).to_be_visible()


def test_what_is_expired_idle_or_silent_is_easy_to_find(service: Service, open_page: Opened):
    with Feed(service.url, "mixed") as feed:
        feed.define({"s": {"shards": ["gone", "quiet", "silent", "well"]}})
        gone = feed.claim("s", ["gone"], holder="one")
        gone.promise(START)
        gone.release()
        rest = feed.claim("s", ["quiet", "silent", "well"], holder="two")
        rest.report({"quiet": {"idle": True}, "well": START + DAY})
        with open_page("/#/jobs/mixed/stages/s") as page:
            listed = page.locator(".ranges tbody tr th")
            expect(page.locator(".heat button")).to_have_text(["!", "z", "?", ""])
            for link, name in {
                "No worker 1": "gone",
                "Never reported 1": "silent",
                "Idle 1": "quiet",
            }.items():
                page.get_by_role("link", name=link).click()
                expect(listed).to_have_text([name])
            page.get_by_role("link", name="No worker 1").click()
            expect(page.locator(".ranges tbody tr")).to_contain_text("none")


def test_a_name_that_is_none(flights: Flights, open_page: Opened):
    refused = frozenset({"404"})
    with open_page("/#/jobs/no-such-job", allowed=refused) as page:
        expect(page.get_by_role("alert")).to_contain_text("no-such-job")
        expect(page.get_by_role("alert").get_by_role("link", name="All jobs")).to_be_visible()
    with open_page(f"{JOB}/stages/none", allowed=refused) as page:
        expect(page.get_by_role("alert")).to_contain_text("has no stage none")
        page.get_by_role("alert").get_by_role("link", name="Its stages").click()
        expect(page.get_by_role("heading", level=1)).not_to_have_text("none")


def test_an_idle_stage_is_not_explained_before_an_active_one(service: Service, open_page: Opened):
    with Feed(service.url, "idle-and-active") as feed:
        feed.define({"quiet": {"shards": ["0"]}, "busy": {"shards": ["0"]}})
        feed.claim("quiet", holder="w").report({"0": {"watermark": START, "idle": True}})
        feed.claim("busy", holder="w").promise(START + 60_000)
        with open_page("/#/jobs/idle-and-active") as page:
            expect(page.locator(".because")).to_contain_text("busy waits for range 0")


@pytest.mark.parametrize("path", ["/", JOB, STAGE])
def test_360_pixels(flights: Flights, open_page: Opened, path: str):
    with open_page(path, width=360, height=740) as page:
        expect(page.get_by_text("2013-01-").first).to_be_visible()
        # Nothing is wider than the screen but what scrolls by itself.
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 360


def test_a_report_without_a_promise_is_a_report(service: Service, open_page: Opened):
    with Feed(service.url, "null") as feed:
        feed.define({"s": {"shards": ["0", "1"]}})
        feed.claim("s", ["0"], holder="w").report({"0": None})
        with open_page("/#/jobs/null/stages/s?show=all") as page:
            conditions = page.locator(".ranges td.condition")
            expect(conditions).to_have_text(["no promise yet", "never reported"])
