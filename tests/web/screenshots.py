"""Takes the documentation's pictures of the page: `python -m tests.web.screenshots`, into `docs/`.

With a folder as its argument, it writes each view there at 1,366 and 360 pixels, light and dark.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Page, expect

from tests.support.binaries import wait_until
from tests.support.server import ROOT, Service
from tests.web.browser import chromium, opened, started
from tests.web.flights import DAY, START, Feed, Flights

DOCS: Final = ROOT / "docs"
SIZE: Final = (1_280, 860)
DESK, PHONE = (1_366, 860), (360, 800)
DAYS: Final = 24
RANGES: Final = 10_000
NAME_OF: Final = {
    "jobs": "/",
    "job": "/#/jobs/nyc-flights",
    "problems": "/#/jobs/orders",
    "stage": f"/#/jobs/nyc-flights/stages/newark?span=60000&at={START + (DAYS + 3) * DAY}",
    "ranges": "/#/jobs/clicks/stages/sessions",
}
READY: Final = {
    "jobs": "tr[data-job]",
    "job": ".holder",
    "problems": ".problems li",
    "stage": ".answer",
    "ranges": ".heat button",
}

TO_WEBP: Final = """async (png) => {
  const picture = new Image();
  picture.src = "data:image/png;base64," + png;
  await picture.decode();
  const canvas = document.createElement("canvas");
  canvas.width = picture.width;
  canvas.height = picture.height;
  canvas.getContext("2d").drawImage(picture, 0, 0);
  return canvas.toDataURL("image/webp", 0.85).split(",")[1];
}"""


def main() -> None:
    """Start a service, feed it, and take a picture of each view in each theme."""
    path = chromium()
    if path is None:
        raise SystemExit("no Chromium: install it (Debian: apt-get install chromium)")
    DOCS.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Service(Path(folder)) as service,
        Flights(service.url) as flights,
        Feed(service.url, "clicks") as clicks,
        Feed(service.url, "nightly-export") as nightly,
        Feed(service.url, "orders") as orders,
        started(path) as browser,
    ):
        _fill_ranges(clicks)
        _get_into_trouble(orders)
        nightly.define({"dump": {"shards": ["orders", "customers"]}})
        nightly.claim("dump", ["orders"], holder="exporter-1").promise(START)
        for _ in range(DAYS):
            _advance_in_its_own_time(flights)
        _take_all(browser, service.url)


def _take_all(browser: Browser, url: str) -> None:
    for view in NAME_OF:
        for theme in ("light", "dark"):
            if len(sys.argv) == 1:
                _take(browser, url, view, theme, SIZE, DOCS / f"{view}-{theme}.webp")
                continue
            for size in (DESK, PHONE):
                path = Path(sys.argv[1]) / f"{view}-{size[0]}-{theme}.webp"
                _take(browser, url, view, theme, size, path)


def _advance_in_its_own_time(flights: Flights) -> None:
    """Advance once the service's clock has moved on: steps at one instant make no picture."""
    now = flights.client.get("/v1/whoami").json()["now"]
    wait_until(
        lambda: flights.client.get("/v1/whoami").json()["now"] >= now + 1_000, "a second has passed"
    )
    flights.advance()


def _fill_ranges(feed: Feed) -> None:
    """Ten thousand ranges: most well, some slow, a few idle, expired or silent."""
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


def _get_into_trouble(feed: Feed) -> None:
    """Define a job in which each kind of trouble has a stage."""
    spread = {"groups": [{"stages": ["mobile", "shops"], "max_drift_ms": 60_000}], "stages": {}}
    feed.define(
        {
            "mobile": {"shards": ["ios", "android"]},
            "shops": {"shards": ["berlin", "lagos", "lima"]},
            "payments": {"shards": ["cards", "invoices"]},
            "orders-of-each-customer-and-day": {"inputs": ["mobile", "shops"], "ranges": 4},
            "paid-orders": {
                "inputs": ["orders-of-each-customer-and-day", "payments"],
                "ranges": 4,
            },
            "revenue": {"inputs": ["paid-orders"], "ranges": 2},
        },
        throttle=spread,
    )
    feed.claim("mobile", holder="executor-1").promise(START + DAY)
    feed.claim("shops", ["berlin", "lima"], holder="executor-2").promise(START)
    feed.send("POST", "/stages/shops/ranges/lagos/retire", {"because": "the shop is closed"})
    run = feed.send("POST", "/runs", {"stages": ["payments"], "holder": "driver-3"})["run"]
    feed.claim("payments", holder="executor-3", run=run).promise(START)
    feed.send("POST", f"/runs/{run}/end", {"outcome": "failed", "because": "out of memory"})


def _take(
    browser: Browser, url: str, view: str, theme: str, size: tuple[int, int], path: Path
) -> None:
    width, height = size
    with opened(browser, url, dark=theme == "dark", width=width, height=height) as page:
        page.goto(NAME_OF[view])
        expect(page.locator(READY[view]).first).to_be_visible()
        expect(page.get_by_text("live").or_(page.get_by_text("4 jobs")).first).to_be_visible()
        if view == "ranges":
            page.locator(".ranges").scroll_into_view_if_needed()
            page.evaluate("document.querySelector('.ranges').scrollIntoView()")
        # Everything in the next picture is there.
        page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        picture = _webp(page, page.screenshot())
    path.write_bytes(picture)


def _webp(page: Page, png: bytes) -> bytes:
    """Compress a picture, by the browser itself: a fifth of the size."""
    blank = page.context.new_page()
    return base64.b64decode(blank.evaluate(TO_WEBP, base64.b64encode(png).decode()))


if __name__ == "__main__":
    main()
