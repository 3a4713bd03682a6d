"""Lags and durations, as the page writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.web.conftest import Opened

DATA: Final = Path(__file__).resolve().parents[1] / "data"
AT: Final = 1_767_225_600_000
LAGS: Final = """async ([stages, now]) => {
  const { systemLag } = await import("/site/parts/status.js");
  return stages.map((each) => systemLag(each, now));
}"""


def _stage(health: str) -> dict[str, Any]:
    return {"health": health, "processing_watermark": AT, "system_lag_ms": 0}


def test_the_system_lag_of_a_stage_without_work_does_not_count_on(open_page: Opened):
    """Between two answers of the service, it rose by seconds."""
    stages = [_stage(each) for each in ("idle", "ended", "final", "ok", "no_worker")]
    with open_page() as page:
        shown = page.evaluate(LAGS, [stages, AT + 61_000])
        assert shown == ["0 s", "0 s", "0 s", "1 min 1 s", "1 min 1 s"]
        unknown = {**_stage("silent"), "processing_watermark": None}
        assert page.evaluate(LAGS, [[unknown], AT]) == [None]


DURATIONS: Final = """async (all) => {
  const { duration } = await import("/site/lib/time.js");
  return all.map(duration);
}"""


def test_durations_have_the_rule_of_the_service(open_page: Opened):
    vectors = json.loads((DATA / "durations.json").read_text(encoding="utf-8"))["texts"]
    with open_page() as page:
        shown = page.evaluate(DURATIONS, [each["ms"] for each in vectors])
        assert shown == [each["text"] for each in vectors]
        assert page.evaluate(DURATIONS, [None, -61_000, 1.5]) == ["–", "−1 min 1 s", "1 ms"]  # noqa: RUF001


COARSE: Final = """async (texts) => {
  const { coarse } = await import("/site/lib/time.js");
  return texts.map(coarse);
}"""


def test_a_lag_without_its_smaller_unit(open_page: Opened):
    with open_page() as page:
        texts = ["7 h 59 min ahead", "59 min 59 s", "7.2 s", "2 d 3 h"]
        shorter = ["7 h ahead", "59 min", "7.2 s", "2 d"]
        assert page.evaluate(COARSE, texts) == shorter


UNBROKEN: Final = """async (texts) => {
  const { unbroken } = await import("/site/lib/text.js");
  const joined = (part) => part.props?.children.replaceAll(" ", "_") ?? part;
  return texts.map((each) => unbroken(each).props.children.map(joined).join(""));
}"""


def test_a_moment_and_a_number_with_its_unit_stay_on_one_line(open_page: Opened):
    texts = {
        "at 2026-01-02 03:04:05Z, by phone": "at 2026-01-02_03:04:05Z, by phone",
        "since 2026-01-01 22:30 (gone)": "since 2026-01-01_22:30 (gone)",
        "for 3 min 20 s, then 1 s-2": "for 3_min_20_s, then 1 s-2",
        "in 7.2 s. In 80 of 100": "in 7.2_s. In 80 of 100",
        "1 d 2 hours, 4,748 d 8 h": "1_d 2 hours, 4,748_d_8_h",
    }
    with open_page() as page:
        assert page.evaluate(UNBROKEN, list(texts)) == list(texts.values())
