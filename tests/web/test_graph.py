"""The graph fits its place, and its texts fit their boxes: measured in Chromium."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import pytest
from playwright.sync_api import Page, expect

from tests.support.binaries import wait_until
from tests.support.server import Service
from tests.web.conftest import Opened
from tests.web.flights import DAY, START, Feed

LONG: Final = "sessions-of-each-customer-by-country-and-device-of-the-last-seven-days"
WIDTHS: Final = (1_366, 360)

FAULTS: Final = """() => {
  const faults = [];
  const round = (box) => [box.left, box.top, box.right, box.bottom].map(Math.round).join(" ");
  const inside = (a, b) => a.left >= b.left - 1 && a.top >= b.top - 1
    && a.right <= b.right + 1 && a.bottom <= b.bottom + 1;
  const places = [];
  const long = LONG;
  for (const stage of document.querySelectorAll(".graph a[data-stage]")) {
    const box = stage.querySelector(".box").getBoundingClientRect();
    places.push([stage.dataset.stage, box]);
    const texts = [...stage.querySelectorAll("text")].map((each) => [
      each.textContent, each.getBoundingClientRect(),
      each.closest(".badge")?.querySelector("rect").getBoundingClientRect()]);
    for (const each of stage.querySelectorAll("text")) {
      const size = parseFloat(getComputedStyle(each).fontSize) * each.getScreenCTM().a;
      if (size < 11) faults.push(`${each.textContent} has ${size} pixels`);
    }
    for (const [text, place, badge] of texts) {
      const isShortened = text.includes("…") && !stage.dataset.stage.startsWith(long);
      if (isShortened) faults.push(`${text} is shortened`);
      if (!inside(place, box)) faults.push(`${text} at ${round(place)} leaves ${round(box)}`);
      if (badge && !inside(place, badge)) faults.push(`${text} is outside of its badge`);
    }
    const overlap = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
      && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    texts.forEach(([one, a], k) => texts.slice(k + 1).forEach(([other, b]) => {
      if (overlap(a, b)) faults.push(`${one} and ${other} overlap`);
    }));
    const near = (a, b) => a.left < b.right + 1 && b.left < a.right + 1
      && a.top < b.bottom + 1 && b.top < a.bottom + 1;
    for (const [word, , badge] of texts) {
      for (const [text, place] of badge ? texts.filter(([each]) => each !== word) : []) {
        if (near(badge, place)) faults.push(`the badge ${word} touches ${text}`);
      }
    }
  }
  places.sort(([, a], [, b]) => a.left - b.left || a.top - b.top);
  places.slice(1).forEach(([name, box], k) => {
    const [before, last] = places[k];
    const overlaps = box.left < last.right && box.top < last.bottom && last.left < box.right;
    if (overlaps) faults.push(`${name} overlaps ${before}`);
  });
  const canvas = document.querySelector(".graph .canvas").getBoundingClientRect();
  const svg = document.querySelector(".graph svg").getBoundingClientRect();
  const hint = document.querySelector(".graph .in-view");
  const hinted = hint && hint.getBoundingClientRect().height > 0;
  if (!inside(svg, canvas) && !hinted) faults.push("it is cropped without a hint");
  if (inside(svg, canvas) && hint) faults.push("a hint, and all is in view");
  if (hint && !document.querySelector(".pan").dataset.more) faults.push("a hint, but not a shadow");
  const large = canvas.right > innerWidth || canvas.height > innerHeight * 0.71;
  if (large) faults.push("its place is larger than the screen");
  return faults.slice(0, 10);
}""".replace("LONG", f'"{LONG}"')
"""All that is wrong with the graph on the screen: only the longest name is shortened."""


def _job(size: int) -> Mapping[str, Any]:
    """Define sources, and layers of stages below, one of them with a long name."""
    if size == 3:
        return {
            "clicks": {"shards": ["web", "app"]},
            LONG: {"inputs": ["clicks"], "ranges": 4},
            "totals": {"inputs": [LONG], "passthrough": True},
        }
    wide = size // 4
    stages: dict[str, Any] = {f"source-{k}": {"shards": ["0", "1"]} for k in range(wide)}
    layers = ["source", "counts", "sums", LONG]
    for above, layer in pairwise(layers):
        for k in range(wide):
            inputs = sorted({f"{above}-{k}", f"{above}-{(k + 1) % wide}"})
            stages[f"{layer}-{k}"] = {"inputs": inputs, "ranges": 2}
    return stages


@pytest.fixture(scope="module", params=[3, 12, 100, 1_000])
def job(request: pytest.FixtureRequest, service: Service) -> str:
    size: int = request.param
    name = f"graph-{size}"
    with Feed(service.url, name) as feed:
        stages = _job(size)
        feed.define(stages)
        source = next(iter(stages))
        # A holder for the longest name that a range of a source has here, and two lags.
        feed.claim(source, holder="worker").promise(START)
    return f"/#/jobs/{name}"


def _drawn(page: Page, size: str) -> None:
    expect(page.locator(".graph a[data-stage]")).to_have_count(int(size))
    expect(page.locator(".because")).to_be_visible()
    expect(page.locator(".problems li").first).to_be_visible()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("zone", ["", "?tz=local"])
def test_it_fits(job: str, open_page: Opened, width: int, zone: str):
    with open_page(job + zone, width=width, height=800) as page:
        _drawn(page, job.rpartition("-")[2])
        assert page.evaluate(FAULTS) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_small_graph_is_shown_whole_and_a_large_one_says_how_much_of_it(
    service: Service, open_page: Opened
):
    with Feed(service.url, "whole") as feed:
        feed.define(_job(3))
        with open_page("/#/jobs/whole", width=1_366, height=800) as page:
            expect(page.locator(".graph a[data-stage]")).to_have_count(3)
            expect(page.locator(".in-view")).to_have_count(0)
            page.set_viewport_size({"width": 360, "height": 800})
            expect(page.locator(".in-view")).to_have_text(
                re.compile("1 of 3 stages in view. Scroll or drag for the others")
            )
            page.set_viewport_size({"width": 1_366, "height": 800})
            expect(page.locator(".in-view")).to_have_count(0)


IN_VIEW: Final = """(name) => {
  const canvas = document.querySelector(".graph .canvas").getBoundingClientRect();
  const box = document.querySelector(`a[data-stage="${name}"] .box`).getBoundingClientRect();
  return box.left >= canvas.left && box.right <= canvas.right + 1
    && box.top >= canvas.top && box.bottom <= canvas.bottom + 1;
}"""


@pytest.mark.parametrize("width", WIDTHS)
def test_the_cause_is_in_view_at_first_and_after_fit(
    service: Service, open_page: Opened, width: int
):
    with Feed(service.url, f"far-{width}") as feed:
        feed.define(_job(100))
        for k in range(24):
            feed.claim(f"source-{k}", holder="worker").promise(START + DAY)
        with open_page(f"/#/jobs/far-{width}?why={LONG}-24", width=width, height=800) as page:
            cause = page.locator("a.stage.held", has=page.locator(".holder"))
            expect(cause).to_have_count(1)
            name = cause.get_attribute("data-stage")
            assert page.evaluate(IN_VIEW, name)
            page.locator(".graph .canvas").focus()
            page.keyboard.press("End")
            wait_until(lambda: not page.evaluate(IN_VIEW, name), "the cause is out of view")
            page.get_by_role("button", name="Centre").click()
            wait_until(lambda: page.evaluate(IN_VIEW, name), "the cause is in view again")


PRESS_AMID_THE_SCROLL: Final = """(count) => {
  const box = document.querySelector(".graph .canvas");
  const fit = [...document.querySelectorAll("button")].find((each) => each.textContent === "Centre");
  const still = (top, frames, done) => requestAnimationFrame(() => {
    if (top !== box.scrollTop) still(box.scrollTop, 0, done);
    else if (frames < 30) still(top, frames + 1, done);
    else done();
  });
  window.stands = new Promise((done) => {
    let pressed = false;
    const press = () => {
      if (pressed) return;
      pressed = true;
      fit.click();
      still(null, 0, done);
    };
    box.addEventListener("scroll", () => --count || press());
    // A busy machine draws fewer steps: then the scroll would be over before this one.
    box.addEventListener("scrollend", press);
    setTimeout(press, 10_000);
  });
  box.focus();
}"""
"""Press *Centre* at this step of an animated scroll; `stands` then waits for its end."""

FRAMES: Final = """() => new Promise((done) => {
  const after = (left) => requestAnimationFrame(() => (left ? after(left - 1) : done()));
  after(5);
})"""
"""Wait until the browser has drawn the page anew, and the page has followed its new size."""


@pytest.fixture(scope="module")
def large(service: Service) -> str:
    """Define a job of a hundred stages, with causes far from each other."""
    with Feed(service.url, "large") as feed:
        feed.define(_job(100))
        for k in range(24):
            feed.claim(f"source-{k}", holder="worker").promise(START + DAY)
    return f"/#/jobs/large?why={LONG}-24"


def _cause(page: Page) -> str:
    _drawn(page, "100")
    cause = page.locator("a.stage.held", has=page.locator(".holder"))
    return cause.get_attribute("data-stage") or ""


@pytest.mark.parametrize("step", [1, 3, 6])
def test_fit_holds_against_a_scroll_that_is_under_way(large: str, open_page: Opened, step: int):
    with open_page(large, width=1_366, height=800) as page:
        cause = _cause(page)
        page.evaluate(PRESS_AMID_THE_SCROLL, step)
        page.keyboard.press("End")
        page.evaluate("window.stands")
        assert page.evaluate(IN_VIEW, cause)


@pytest.mark.parametrize("by", ["its problem", "the focus"])
def test_a_stage_that_the_viewer_chose_stays_in_view(large: str, open_page: Opened, by: str):
    with open_page(large, width=1_366, height=800) as page:
        cause = _cause(page)
        problems = page.locator(".problems > ol > li")
        assert page.evaluate(IN_VIEW, cause)
        # The first problem may be one in view.
        problem, chosen = next(
            (each, stage)
            for each in problems.all()
            if (stage := each.get_attribute("data-problem")) and not page.evaluate(IN_VIEW, stage)
        )
        if by == "its problem":
            problem.get_by_role("button").click()
        else:
            page.locator(f'a[data-stage="{chosen}"]').focus()
        wait_until(lambda: page.evaluate(IN_VIEW, chosen), "the stage is in view")
        page.set_viewport_size({"width": 1_366, "height": 780})
        page.evaluate(FRAMES)
        assert page.evaluate(IN_VIEW, chosen)


def test_dragging_pans_and_opens_nothing(service: Service, open_page: Opened):
    with Feed(service.url, "dragged") as feed:
        feed.define(_job(100))
        with open_page("/#/jobs/dragged", width=1_366, height=800) as page:
            # Later, the list would push the graph down.
            _drawn(page, "100")
            canvas = page.locator(".graph .canvas")
            canvas.scroll_into_view_if_needed()
            place = canvas.bounding_box()
            assert place is not None
            before = canvas.evaluate("(box) => box.scrollTop")
            x, y = place["x"] + 100, place["y"] + 300
            page.mouse.move(x, y)
            page.mouse.down()
            page.mouse.move(x + 5, y - 200, steps=4)
            page.mouse.up()
            wait_until(
                lambda: canvas.evaluate("(box) => box.scrollTop") >= before + 190,
                "the graph is panned",
            )
            assert "/stages/" not in page.url


def test_what_is_not_well_has_a_badge(service: Service, open_page: Opened):
    spread = {"groups": [{"stages": ["fast", "slow"], "max_drift_ms": 60_000}], "stages": {}}
    stages = {
        "fast": {"shards": ["f-0", "f-1"]},
        "slow": {"shards": ["s", "closed"]},
        "both": {"inputs": ["fast", "slow"], "ranges": 2},
        "crashed": {"shards": ["c"]},
        "after-it": {"inputs": ["crashed"], "passthrough": True},
        "lost": {"shards": ["l"]},
        "dump": {"shards": ["d"]},
        "after-dump": {"inputs": ["dump"], "passthrough": True},
    }
    with Feed(service.url, "badges") as feed:
        feed.define(stages, throttle=spread)
        feed.claim("slow", ["s"], holder="a").promise(START)
        feed.send("POST", "/stages/slow/ranges/closed/retire", {"because": "it is gone"})
        feed.claim("fast", holder="b").promise(START + DAY)
        run = feed.send("POST", "/runs", {"stages": ["crashed"], "holder": "c"})["run"]
        feed.claim("crashed", holder="c", run=run).promise(START)
        feed.send("POST", f"/runs/{run}/end", {"outcome": "failed", "because": "out of memory"})
        feed.claim("lost", holder="l", ttl_ms=1_000).promise(START)
        dump = feed.send("POST", "/runs", {"stages": ["dump"], "holder": "d"})["run"]
        feed.claim("dump", holder="d", run=dump).promise(START)
        feed.send("POST", f"/runs/{dump}/end", {"outcome": "finished"})
        with open_page("/#/jobs/badges") as page:
            for stage, words in {
                "fast": "throttled 2",
                "slow": "retired 1",
                "both": "silent",
                "crashed": "failed",
                "after-it": "waiting",
                "lost": "no worker",
                "after-dump": "input ended",
            }.items():
                badge = page.locator(f'a[data-stage="{stage}"] .badge', has_text=words)
                expect(badge).to_be_visible()
                name = page.locator(f'a[data-stage="{stage}"]').get_attribute("aria-label")
                assert words in (name or "")
            assert page.evaluate(FAULTS) == []


def test_the_focus_is_shown_on_the_stage_that_is_explained(service: Service, open_page: Opened):
    """Its own colour had hidden the focus."""
    with Feed(service.url, "focus") as feed:
        feed.define({"held": {"shards": ["a"]}, "other": {"shards": ["a"]}})
        run = feed.send("POST", "/runs", {"stages": ["held"], "holder": "c"})["run"]
        feed.send("POST", f"/runs/{run}/end", {"outcome": "failed"})
        with open_page("/#/jobs/focus") as page:
            expect(page.locator('a.held[data-stage="held"]')).to_be_visible()
            strokes = set[str]()
            for stage in ("held", "other"):
                link = page.locator(f'a[data-stage="{stage}"]')
                link.focus()
                strokes.add(link.locator(".box").evaluate("each => getComputedStyle(each).stroke"))
            assert len(strokes) == 1


def test_each_problem_has_its_number_in_the_list_and_in_the_graph(
    service: Service, open_page: Opened
):
    with Feed(service.url, "numbered") as feed:
        feed.define({f"s-{k}": {"shards": ["0"]} for k in range(8)} | {"late": {"shards": ["0"]}})
        run = feed.send("POST", "/runs", {"stages": ["late"], "holder": "c"})["run"]
        feed.claim("late", holder="c", run=run).promise(START)
        feed.send("POST", f"/runs/{run}/end", {"outcome": "failed", "because": "out of memory"})
        with open_page("/#/jobs/numbered") as page:
            expect(page.get_by_role("heading", name="9 problems")).to_be_visible()
            first = page.locator(".problems li").first
            expect(first).to_have_attribute("data-problem", "late")
            page.locator(".problems summary").click()
            lines = page.locator(".problems li")
            expect(lines).to_have_count(9)
            for line in lines.all():
                stage = line.get_attribute("data-problem")
                number = line.locator(".number").inner_text()
                expect(page.locator(f'a[data-stage="{stage}"] .badge.number')).to_have_text(number)
            box = page.locator('a[data-stage="late"]')
            first.hover()
            expect(box).to_have_attribute("data-marked", "")
            lines.nth(1).hover()
            expect(box).not_to_have_attribute("data-marked", "")
            first.get_by_role("link", name="late").focus()
            expect(box).to_have_attribute("data-marked", "")
            first.get_by_role("button", name="Show problem 1").click()
            expect(box).to_be_in_viewport()


def test_a_stage_has_the_numbers_of_all_its_problems(service: Service, open_page: Opened):
    """The badge had the number of the first one only: the list had a 2 that the graph lacked."""
    with Feed(service.url, "two-at-once") as feed:
        feed.define({"taps": {"shards": ["gone", "new"]}})
        lost = feed.claim("taps", ["gone"], holder="w")
        lost.promise(START)
        lost.release()
        with open_page("/#/jobs/two-at-once") as page:
            expect(page.locator(".problems li")).to_have_count(2)
            box = page.locator('a[data-stage="taps"]')
            expect(box.locator(".badge.number")).to_have_text("1, 2")
            expect(box).to_have_attribute("aria-label", re.compile("^problems 1, 2, taps,"))


def test_the_badges_have_the_order_of_the_table(service: Service, open_page: Opened):
    with Feed(service.url, "in-order") as feed:
        feed.define({"taps": {"shards": ["t-0"]}})
        feed.send("POST", "/stages/taps/ranges/t-0/retire", {"because": "the disk is lost"})
        feed.claim("taps", ["t-0"], holder="w").promise(START)
        etag = feed.client.get(feed.root).headers["etag"]
        stages = {"stages": {"taps": {"shards": ["t-0", "t-1"]}}}
        feed.client.put(feed.root, json=stages, headers={"If-Match": etag}).raise_for_status()
        feed.send("POST", "/stages/taps/ranges/t-1/retire", {"because": "the disk is lost"})
        with open_page("/#/jobs/in-order") as page:
            badges = page.locator('a[data-stage="taps"] .badge')
            expect(badges).to_have_text(["late ranges 1", "retired 1"])
            late, retired = (each.bounding_box() for each in badges.all())
            assert late is not None
            assert retired is not None
            assert late["x"] < retired["x"]
            expect(page.locator("tbody .chip")).to_have_text(["late ranges 1", "retired 1"])
