"""A job of a thousand stages, and a stage of a million ranges."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.support.api import KEYS
from tests.support.server import Service
from tests.web.conftest import Opened
from tests.web.flights import DAY, START, Feed

RANGES = 1_000_000
MOST = 10_000
"""The largest number of ranges in one report."""
SLOW, EXPIRED = 123_456, 999_999


def test_a_job_of_a_thousand_stages(service: Service, open_page: Opened):
    stages: dict[str, object] = {f"source-{k}": {"shards": ["0"]} for k in range(250)}
    for layer in range(3):
        above = "source" if layer == 0 else f"layer{layer - 1}"
        for k in range(250):
            inputs = [f"{above}-{k}", f"{above}-{(k + 7) % 250}"]
            stages[f"layer{layer}-{k}"] = {"inputs": inputs, "ranges": 2}
    with Feed(service.url, "wide") as feed:
        feed.define(stages)
        lease = feed.claim("source-0", holder="worker")
        lease.promise(START)
        with open_page("/#/jobs/wide") as page:
            expect(page.locator("a[data-stage]")).to_have_count(1_000)
            expect(page.locator('a[data-stage="source-0"] .output')).to_have_text(
                re.compile("2013")
            )
            lease.promise(START + DAY)
            expect(page.locator('a[data-stage="source-0"] .output')).to_have_text(
                "2013-01-02 05:00:00Z"
            )
            page.get_by_role("searchbox").fill("layer2-249")
            expect(page.locator("tbody tr th", has_text="layer2-249")).to_be_visible()
            expect(page.locator("section table").last.locator("tbody tr")).to_have_count(1)


def test_a_stage_of_a_million_ranges(service: Service, open_page: Opened):
    """The map shows all of them: one that is slow, and one that expired, are seen and found."""
    edges = [KEYS * k // RANGES for k in (SLOW, SLOW + 1, EXPIRED, EXPIRED + 1)]
    slow, expired = (f"{edges[k]:08x}-{edges[k + 1]:08x}" for k in (0, 2))
    with Feed(service.url, "million") as feed:
        feed.define({"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": RANGES}})
        feed.claim("s", holder="source").promise(START + DAY)
        behind = feed.claim("k", [slow], holder="slow-worker")
        gone = feed.claim("k", [expired], holder="gone-worker")
        for first in range(0, RANGES, MOST):
            ends = [KEYS * k // RANGES for k in range(first, first + MOST + 1)]
            some = [f"{ends[k]:08x}-{ends[k + 1]:08x}" for k in range(MOST)]
            worker = feed.claim("k", some, holder=f"worker-{first}")
            worker.columns({}, input_watermark=START + DAY)
        behind.report({slow: {"holds": {"state": START}}}, input_watermark=START + DAY)
        gone.report({expired: {}}, input_watermark=START + DAY)
        gone.release()
        with open_page("/#/jobs/million/stages/k") as page:
            cells = page.locator(".heat button")
            expect(page.get_by_text("1,000,000 ranges in 400 cells").first).to_be_visible()
            expect(cells).to_have_count(400)
            expect(page.locator(".heat .level4")).to_have_count(1)
            expect(page.locator(".heat .expired")).to_have_count(1)
            first = page.locator(".ranges tbody tr").first
            expect(first).to_contain_text(slow)
            expect(first).to_contain_text("slow-worker")
            page.get_by_role("link", name="No worker 1").click()
            expect(first).to_contain_text(expired)
            # Down to the range: 2,500, then six or seven, then one in each cell.
            for size in ("2,500", "[67]"):
                page.locator(".heat .level4").click()
                shown = page.get_by_text(re.compile(f"^{size} of 1,000,000 ranges"))
                expect(shown.first).to_be_visible()
            expect(page.get_by_text("a cell for each").first).to_be_visible()
            assert slow in (page.locator(".heat .level4").get_attribute("aria-label") or "")
