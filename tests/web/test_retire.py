"""An administrator retires a range on the page, and is shown before what moves."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect

from tests.support.server import Service
from tests.web.conftest import Opened
from tests.web.flights import START, Feed

SHARDS = {"taps": {"shards": ["t-0", "t-1"]}, "counts": {"inputs": ["taps"], "ranges": 1}}


def _dialog(page: Page) -> Locator:
    """Open the dialog, once what loads above the button no longer moves it: a click has one place."""
    expect(page.get_by_text("Loading…")).to_have_count(0)
    page.get_by_role("button", name="Retire t-1").click()
    return page.get_by_role("dialog")


def test_a_range_is_retired_and_each_view_shows_it(service: Service, open_page: Opened):
    with Feed(service.url, "retiring") as feed:
        feed.define(SHARDS)
        feed.claim("taps", ["t-0"], holder="worker").promise(START)
    with open_page("/#/jobs/retiring/stages/taps") as page:
        page.get_by_role("link", name="Never reported").click()
        dialog = _dialog(page)
        expect(dialog.get_by_role("listitem")).to_have_count(2)
        expect(dialog.get_by_role("listitem").first).to_contain_text(
            "taps: output watermark from none to"
        )
        submit = dialog.get_by_role("button", name="Retire", exact=True)
        expect(submit).to_be_disabled()
        dialog.get_by_label("Reason").fill("the site is closed")
        submit.click()
        expect(dialog).to_be_hidden()
        page.get_by_role("link", name="Retired").click()
        listed = page.locator(".ranges").get_by_role("rowheader", name="t-1")
        expect(listed).to_be_visible()
        expect(page.locator("td.condition.retired")).to_be_visible()
        expect(page.get_by_role("button", name="Retire t-1")).to_have_count(0)
        expect(page.locator(".facts")).to_contain_text("1 retired")
        expect(page.locator("ul.retired")).to_contain_text("t-1 of taps is retired")
        expect(page.locator("ul.retired")).to_contain_text("the site is closed")
        with Feed(service.url, "retiring") as feed:
            feed.claim("taps", ["t-1"], holder="again").promise(START)
            feed.send("POST", "/stages/taps/ranges/t-1/retire", {"because": "gone again"})
        expect(page.locator(".marks-legend")).to_contain_text(
            "◇ range retired◈ range reports again"
        )
        page.locator("details.changes summary").click()
        expect(page.locator("details.changes")).to_contain_text(
            "range t-1 of taps reports again, by again: its retirement has ended"
        )
        page.goto("/#/jobs/retiring")
        expect(page.locator('a[data-stage="taps"]').first).to_contain_text(
            re.compile("2 of 2 ranges reported.*retired 1")
        )


def test_a_range_that_returns_to_a_final_stage_is_marked(service: Service, open_page: Opened):
    with Feed(service.url, "returning") as feed:
        feed.define({"taps": {"shards": ["t-0"]}})
        feed.send("POST", "/stages/taps/ranges/t-0/retire", {"because": "the disk is lost"})
        feed.claim("taps", ["t-0"], holder="disk-2").promise(START)
    with open_page("/#/jobs/returning") as page:
        expect(page.locator('a[data-stage="taps"]').first).to_contain_text("late ranges 1")
        page.goto("/#/?q=returning")
        expect(page.locator('tr[data-job="returning"] .chip')).to_have_text("late ranges 1")
        page.goto("/#/jobs/returning/stages/taps")
        expect(page.locator(".because")).to_contain_text("has reported again after its retirement")
        expect(page.locator(".remedy")).to_contain_text("Reset the job")


def test_a_final_stage_waits_for_none_of_its_late_ranges(service: Service, open_page: Opened):
    """The list called them ranges that the stage waits for."""
    with Feed(service.url, "late-again") as feed, open_page() as page:
        feed.define({"taps": {"shards": ["t-0"]}})
        feed.send("POST", "/stages/taps/ranges/t-0/retire", {"because": "the disk is lost"})
        feed.claim("taps", ["t-0"], holder="disk-2").promise(START)
        page.goto("/#/jobs/late-again/stages/taps")
        caption = page.locator(".ranges caption")
        expect(caption).to_have_text("The only range, whose rows are late: the stage is final")
        expect(page.locator(".facts")).to_contain_text("1 of 1 reported, 1 leased, 1 late")
        etag = feed.client.get(feed.root).headers["etag"]
        stages = {"stages": {"taps": {"shards": ["t-0", "t-1"]}}}
        feed.client.put(feed.root, json=stages, headers={"If-Match": etag}).raise_for_status()
        expect(caption).to_have_text(
            "2 of 2 ranges that are not final: the stage is final, and does not wait for them"
        )
        expect(page.locator(".facts")).to_contain_text("1 of 2 reported, 1 leased, 1 late")
        expect(page.locator(".facts .chip")).to_have_text("late ranges 1")


def test_the_focus_is_at_the_ranges_after_a_retirement(service: Service, open_page: Opened):
    """It was lost with the button that had opened the dialog."""
    with Feed(service.url, "focused") as feed:
        feed.define({"taps": {"shards": ["t-1", "t-2", "t-3"]}})
    for width, shard in ((1_280, "t-1"), (360, "t-2")):
        with open_page("/#/jobs/focused/stages/taps?show=all", width=width) as page:
            page.get_by_role("button", name=f"Retire {shard}").press("Enter")
            dialog = page.get_by_role("dialog")
            dialog.get_by_role("button", name="Cancel").press("Enter")
            expect(page.get_by_role("button", name=f"Retire {shard}")).to_be_focused()
            page.keyboard.press("Enter")
            dialog.get_by_label("Reason").fill("the site is closed")
            expect(dialog.get_by_role("button", name="Retire", exact=True)).to_be_enabled()
            page.keyboard.press("Enter")
            expect(page.get_by_role("button", name=f"Retire {shard}")).to_have_count(0)
            focused = page.locator("#ranges-title:focus, summary:focus")
            expect(focused).to_have_text("Ranges")
            expect(focused).to_be_in_viewport()


def test_a_stage_that_becomes_final_is_announced(service: Service, open_page: Opened):
    with Feed(service.url, "to-the-end") as feed:
        feed.define(SHARDS)
        feed.claim("taps", ["t-0"], holder="worker").report({"t-0": {"final": True}})
    with open_page("/#/jobs/to-the-end/stages/taps?show=all") as page:
        effects = _dialog(page).locator(".effects")
        expect(effects).to_contain_text(
            "taps: output watermark from none to the end of time."
            " taps becomes final, which cannot be taken back."
        )
        expect(effects.get_by_text("cannot be taken back")).to_have_count(1)


def test_a_refusal_is_shown_in_the_dialog(service: Service, open_page: Opened):
    gone = frozenset({"404", "Failed to load resource"})
    with Feed(service.url, "refusing") as feed, open_page(allowed=gone) as page:
        feed.define(SHARDS)
        page.goto("/#/jobs/refusing/stages/taps")
        dialog = _dialog(page)
        dialog.get_by_label("Reason").fill("gone")
        expect(dialog.get_by_role("button", name="Retire", exact=True)).to_be_enabled()
        page.route("**/retire", lambda route: route.abort())
        dialog.get_by_role("button", name="Retire", exact=True).click()
        expect(dialog.get_by_role("alert")).to_contain_text("does not answer")


def test_the_reason_of_a_retirement_follows_the_zone(service: Service, open_page: Opened):
    with Feed(service.url, "reasons") as feed:
        feed.define(SHARDS)
        because = "closed since 2013-01-01T05:00:00Z, by phone at 12:00"
        feed.send("POST", "/stages/taps/ranges/t-1/retire", {"because": because})
    with open_page("/#/jobs/reasons/stages/taps") as page:
        retired = page.locator("ul.retired")
        expect(retired).to_contain_text("closed since 2013-01-01 05:00:00Z, by phone at 12:00")
        page.get_by_role("link", name="Times are in UTC").click()
        expect(retired).to_contain_text("closed since 2013-01-01 00:00:00, by phone at 12:00")


def test_columns_and_texts_name_their_subject(service: Service, open_page: Opened):
    with Feed(service.url, "subjects") as feed:
        feed.define(SHARDS)
    for path in ("/#/jobs/subjects", "/#/jobs/subjects/stages/taps"):
        with open_page(path) as page:
            expect(page.locator(".because")).to_contain_text("not held by a lease")
            for column in page.locator("thead th").all_text_contents():
                assert not re.search(r"\bit\b", column, re.IGNORECASE)


ROWS = """(facts) => {
  const tops = [...document.querySelectorAll(`${facts} > div`)].map((each) => each.offsetTop);
  return [...new Set(tops)].map((top) => tops.filter((each) => each === top).length);
}"""


COPY = """(count) => {
  const shown = document.querySelector(".facts");
  const copy = shown.cloneNode(true);
  while (copy.children.length < count) copy.append(shown.children[1].cloneNode(true));
  document.querySelector("#copy")?.remove();
  copy.id = "copy";
  shown.after(copy);
}"""
"""Have so many cards: percentiles of a stage add some."""


TOO_WIDE = """() => [...document.querySelectorAll("#copy > div")]
  .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.textContent)"""


def test_no_fact_of_a_stage_stands_alone_in_a_row(service: Service, open_page: Opened):
    with Feed(service.url, "facts") as feed:
        feed.define(SHARDS)
    with open_page("/#/jobs/facts/stages/taps") as page:
        page.set_viewport_size({"width": 1366, "height": 800})
        expect(page.locator(".facts > div")).to_have_count(7)
        assert page.evaluate(ROWS, ".facts") == [4, 3]
        for width in (1_366, 1_280, 1_024, 800):
            page.set_viewport_size({"width": width, "height": 800})
            for count in range(7, 15):
                page.evaluate(COPY, count)
                rows = page.evaluate(ROWS, "#copy")
                assert (sum(rows), rows[-1] > 1) == (count, True), (width, rows)
                assert page.evaluate(TOO_WIDE) == [], (width, count)


def test_a_problem_is_apart_from_its_stage(service: Service, open_page: Opened):
    with Feed(service.url, "apart") as feed:
        feed.define(SHARDS)
    with open_page("/#/jobs/apart") as page:
        expect(page.locator('[data-problem="taps"]')).to_contain_text("silent taps:")
