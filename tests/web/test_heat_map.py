"""The map of a stage's ranges: trouble alone looks like trouble."""

from __future__ import annotations

import colorsys
import re
from typing import Any, Final

from playwright.sync_api import Page, expect

from tests.support.server import Service
from tests.web.conftest import Opened
from tests.web.flights import DAY, HOUR, START, Feed

HEAT: Final = """async ([buckets, ended]) => {
  const { heatOf, scaleOf } = await import("/site/lib/heat.js");
  const scale = scaleOf(buckets);
  return [scale.usual, ...buckets.map((each) => heatOf(each, scale, ended))];
}"""
MINUTE: Final = 60_000
END: Final = 2**63 - 1


def _bucket(lag: int | None, **others: Any) -> dict[str, Any]:
    at = None if lag is None else START - lag
    counts = dict.fromkeys(("never_reported", "expired", "idle", "final", "retired"), 0)
    return {"ranges": 1, "lowest": at, "highest": at, **counts, **others}


def test_a_usual_lag_has_the_palest_shade(open_page: Opened):
    lags = [0, MINUTE // 2, MINUTE, 3 * MINUTE, 6 * MINUTE, 12 * MINUTE, DAY]
    with open_page() as page:
        usual, *classes = page.evaluate(HEAT, [[_bucket(each) for each in lags], False])
        # Twice the median, which is three minutes.
        assert (usual, classes) == (6 * MINUTE, ["level0"] * 5 + ["level2", "level4"])
        near = [_bucket(each) for each in (0, 1_000, 5_000)]
        assert page.evaluate(HEAT, [near, False]) == [MINUTE, *["level0"] * 3]


def test_trouble_is_marked_unless_the_run_has_finished(open_page: Opened):
    buckets = [
        _bucket(0, expired=1),
        _bucket(None, never_reported=1),
        _bucket(None, idle=1),
        {**_bucket(0, final=1), "lowest": END, "highest": END},
    ]
    with open_page() as page:
        assert page.evaluate(HEAT, [buckets, False])[1:] == [
            "level0 expired",
            "never",
            "idle",
            "final",
        ]
        assert page.evaluate(HEAT, [buckets[:1], True])[1:] == ["level0"]


def _hues(page: Page) -> list[float]:
    """Return the hues of the cells, in degrees."""
    colours = page.locator(".heat button").evaluate_all(
        "all => all.map((each) => getComputedStyle(each).backgroundColor)"
    )
    parts = [[int(each) / 255 for each in re.findall(r"\d+", colour)[:3]] for colour in colours]
    return [colorsys.rgb_to_hsv(*each)[0] * 360 for each in parts]


def test_the_slowest_range_of_a_sound_stage_is_not_an_alarm(service: Service, open_page: Opened):
    """Ranges that were a second apart had the colours of an alarm."""
    with Feed(service.url, "calm") as feed:
        feed.define({"s": {"shards": ["a", "b", "c"]}})
        lags = {"a": 0, "b": 1_000, "c": 3 * HOUR}
        lease = feed.claim("s", holder="worker")
        lease.report({name: START - lag for name, lag in lags.items()})
        with open_page("/#/jobs/calm/stages/s") as page:
            expect(page.locator(".heat .level0")).to_have_count(2)
            expect(page.locator(".heat .level4")).to_have_count(1)
            assert all(180 < hue < 260 for hue in _hues(page)), "shades of blue"
            expect(page.locator(".heat-box .legend").last).to_contain_text(
                "up to 1 min behind the furthest"
            )
            page.emulate_media(color_scheme="dark")
            assert all(180 < hue < 260 for hue in _hues(page)), "in the dark theme, too"


def test_a_range_without_a_worker_is_an_alarm(service: Service, open_page: Opened):
    with Feed(service.url, "alarmed") as feed:
        feed.define({"s": {"shards": ["a", "b"]}})
        feed.claim("s", ["a"], holder="worker").promise(START)
        gone = feed.claim("s", ["b"], holder="gone")
        gone.promise(START)
        gone.release()
        with open_page("/#/jobs/alarmed/stages/s") as page:
            expect(page.locator(".heat .expired")).to_have_text("!")
            calm, alarm = _hues(page)
            assert 180 < calm < 260
            assert alarm < 20 or alarm > 340, "red"
