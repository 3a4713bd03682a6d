"""Stages written in SQL, over columns with any name."""

from __future__ import annotations

from collections import Counter

import pytest

from spark_agent import Pipeline
from tests.spark.flow import AVAILABLE_NOW, BOUND, COUNTS, SOURCE, Flow, ended, steady, windows

pytestmark = pytest.mark.spark


def test_a_window_in_sql_over_a_column_with_an_odd_name(flow: Flow, pipeline: Pipeline) -> None:
    readings = steady(range(60))
    flow.write(readings)
    odd = flow.readings().withColumnRenamed("at", "when `it` was")
    rows = pipeline.source(
        odd, stage=SOURCE, shard="sensor", event_time="when `it` was", strategy=BOUND
    )
    watermarked = pipeline.watermarked(rows, stage=COUNTS, event_time="when `it` was")
    watermarked.createOrReplaceTempView("readings")
    counted = flow.spark.sql(
        "SELECT window.end AS ended_at, key, count(*) AS rows FROM readings "
        "WHERE key <> 'b' GROUP BY window(`when ``it`` was`, '10 seconds'), key HAVING rows > 1"
    )
    frame = pipeline.report(counted, stage=COUNTS)
    ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    written = flow.spark.read.schema("key string, rows long").json(str(flow.output)).collect()
    expected = {w: n for w, n in windows(readings).items() if w[0] != "b" and n > 1}
    assert Counter((row["key"], row["rows"]) for row in written) == Counter(
        (key, count) for (key, _), count in expected.items()
    )
