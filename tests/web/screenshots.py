"""Takes the documentation's pictures of the page: `python -m tests.web.screenshots`, into `docs/`.

Each view of the job of twelve stages, at 1,366 pixels in both themes and at 360 pixels. A folder as its
argument is written to instead.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Page, expect

from tests.support.binaries import wait_until
from tests.support.server import ROOT, Service
from tests.web.browser import chromium, opened, started
from tests.web.flights import DAY, START, Feed, Flights
from tests.web.tour import JOB, SECOND, Tour

DOCS: Final = ROOT / "docs"
DESK, PHONE = (1_366, 860), (360, 740)
VARIANTS: Final = {"light": (DESK, False), "dark": (DESK, True), "phone": (PHONE, False)}
"""The size of a picture, and if its theme is dark."""
STEPS: Final = 30
AHEAD_MS: Final = 2 * SECOND
"""Event time that the picture of a stage has an estimate for."""
STAGE: Final = "paid-orders"
CAUSED: Final = "revenue"
"""The stage that the picture of the graph explains: another one is its root cause."""
RANGES: Final = 10_000
READY: Final = {
    "jobs": "tr[data-job]",
    "job": ".holder",
    "problems": ".problems li",
    "stage": ".because",
    "ranges": ".heat button",
}
TOP: Final = {"job": ".graph", "ranges": ".ranges"}
"""The part that a picture begins with; the others begin with the page."""

TO_WEBP: Final = """async (png) => {
  const picture = new Image();
  picture.src = "data:image/png;base64," + png;
  await picture.decode();
  const canvas = document.createElement("canvas");
  canvas.width = picture.width;
  canvas.height = picture.height;
  canvas.getContext("2d").drawImage(picture, 0, 0);
  return canvas.toDataURL("image/webp", 0.7).split(",")[1];
}"""


def main() -> None:
    """Start a service, feed it, and take a picture of each view in each variant."""
    path = chromium()
    if path is None:
        raise SystemExit("no Chromium: install it (Debian: apt-get install chromium)")
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    into.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Service(Path(folder)) as service,
        Tour(service.url) as tour,
        Flights(service.url) as flights,
        Feed(service.url, "clicks") as clicks,
        Feed(service.url, "nightly-export") as nightly,
        started(path) as browser,
    ):
        _fill_ranges(clicks)
        nightly.define({"dump": {"shards": ["orders", "customers"]}})
        nightly.claim("dump", ["orders"], holder="exporter-1").promise(START)
        flights.advance()
        for _ in range(STEPS):
            _advance_in_its_own_time(tour)
        for view in READY:
            for variant in VARIANTS:
                tour.advance()
                picture = _take(browser, service.url, view, _addresses(tour)[view], variant)
                (into / f"{view}-{variant}.webp").write_bytes(picture)


def _addresses(tour: Tour) -> Mapping[str, str]:
    ahead = tour.watermark(STAGE)["output_watermark"] + AHEAD_MS
    return {
        "jobs": "/",
        "job": f"/#/jobs/{JOB}?why={CAUSED}",
        "problems": f"/#/jobs/{JOB}",
        "stage": f"/#/jobs/{JOB}/stages/{STAGE}?span=60000&at={ahead}",
        "ranges": "/#/jobs/clicks/stages/sessions",
    }


def _advance_in_its_own_time(tour: Tour) -> None:
    """Advance once the service's clock has moved on: steps at one instant make no picture."""
    now = tour.now()
    wait_until(lambda: tour.now() >= now + SECOND, "a second has passed")
    tour.advance()


def _fill_ranges(feed: Feed) -> None:
    """Ten thousand ranges: most well, some slow, a few without a worker or silent."""
    feed.define(
        {"clicks": {"shards": ["web"]}, "sessions": {"inputs": ["clicks"], "ranges": RANGES}}
    )
    feed.claim("clicks", holder="reader").promise(START + DAY)
    everything = feed.claim("sessions", holder="executor-1")
    gone, silent = everything.granted[7_000:7_040], everything.granted[9_100:9_120]
    everything.release()
    lost = feed.claim("sessions", gone, holder="executor-9")
    lost.report({name: {} for name in gone}, input_watermark=START + DAY // 2)
    rest = [name for name in everything.granted if name not in {*gone, *silent}]
    lease = feed.claim("sessions", rest, holder="executor-1")
    holds = {
        name: {"holds": {"state": START + (k % 997) * DAY // 997}}
        for k, name in enumerate(rest)
        if 2_000 <= k < 3_000
    }
    lease.report({name: holds.get(name, {}) for name in rest}, input_watermark=START + DAY)
    lost.release()


def _take(browser: Browser, url: str, view: str, address: str, variant: str) -> bytes:
    (width, height), dark = VARIANTS[variant]
    with opened(browser, url, dark=dark, width=width, height=height) as page:
        page.goto(address)
        expect(page.get_by_text("live").or_(page.get_by_text("4 jobs")).first).to_be_visible()
        if variant == "phone" and view == "ranges":
            page.get_by_role("heading", name="Ranges").click()
        expect(page.locator(READY[view]).first).to_be_visible()
        if variant != "phone" and view == "stage":
            expect(page.locator(".answer")).to_be_visible()
        if view in TOP:
            page.evaluate("(top) => document.querySelector(top).scrollIntoView()", TOP[view])
        # Everything in the next picture is there.
        page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        return _webp(page, page.screenshot())


def _webp(page: Page, png: bytes) -> bytes:
    """Compress a picture, by the browser itself: a fifth of the size."""
    blank = page.context.new_page()
    return base64.b64decode(blank.evaluate(TO_WEBP, base64.b64encode(png).decode()))


if __name__ == "__main__":
    main()
