"""The matrix's data keeps what it says: else it would show nothing, or accuse the wrong one."""

from __future__ import annotations

import pytest

from tests.spark.matrix.data import DAYS, FILES, FILES_A_DAY, GAP_MIN, SHARDS, Log, logs, newest

LOGS = [log for ascending in (False, True) for log in logs(ascending=ascending).values()]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log.name}-{log.bound_min}")
def test_no_row_is_older_than_its_shard_has_promised(log: Log) -> None:
    at_the_edge = 0
    for number in range(1, FILES):
        before = [event for file in log.files[:number] for event in file]
        for shard in SHARDS:
            promise = newest(before, shard) - log.bound_min
            oldest = min(e.minute for e in log.files[number] if e.shard == shard)
            assert oldest >= promise
            at_the_edge += oldest == promise
    assert at_the_edge == (FILES - 1) * len(SHARDS)


def test_clicks_are_behind_views() -> None:
    found = logs()
    for day in range(DAYS):
        assert found["clicks"].promised_ms(day) < found["views"].promised_ms(day)


def test_each_kind_of_edge_is_there() -> None:
    found = logs()
    views = [event for file in found["views"].files for event in file]
    clicks = [event for file in found["clicks"].files for event in file]
    assert FILES == DAYS * FILES_A_DAY
    assert 200 < len(views) < 600
    assert sum(view.minute % 60 == 0 for view in views) > 50
    assert len({view.minute for view in views}) < len(views) * 2 / 3
    assert len({(view.id, view.minute) for view in views}) < len(views)
    assert len({view.id for view in views}) < len({(view.id, view.minute) for view in views})
    apart = {c.minute - v.minute for v in views for c in clicks if v.key and v.key == c.key}
    assert {-1, 0, GAP_MIN, GAP_MIN + 1} <= apart
    assert any(view.key is None for view in views)
