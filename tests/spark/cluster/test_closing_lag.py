"""A window that a row lets close is shown at most one batch later than by plain Spark, in each stage."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.cluster.chain import FILES, STAGES, Chain, TopicChain
from tests.support.kafka_server import KafkaServer
from tests.support.server import Service

pytestmark = pytest.mark.spark


@pytest.mark.matrix
@pytest.mark.parametrize("trigger", ["processingTime", "availableNow"])
def test_closing_lag(spark: SparkSession, service: Service, tmp_path: Path, trigger: str) -> None:
    plain, ours = Chain(spark, tmp_path / "plain"), Chain(spark, tmp_path / "ours", service.url)
    _compare(plain, ours, trigger)


@pytest.mark.matrix
@pytest.mark.parametrize("trigger", ["processingTime", "availableNow"])
def test_closing_lag_from_a_topic(
    spark: SparkSession, service: Service, broker: KafkaServer, tmp_path: Path, trigger: str
) -> None:
    plain = TopicChain(spark, tmp_path / "plain", broker=broker)
    ours = TopicChain(spark, tmp_path / "ours", service.url, broker=broker)
    _compare(plain, ours, trigger)
    for trail in (plain.trail(0), ours.trail(0)):
        assert len(trail.read.newest_ms(trail.checkpoint)) == FILES, (
            "a batch reads as much as a file"
        )


def _compare(plain: Chain, ours: Chain, trigger: str) -> None:
    for chain in (plain, ours):
        chain.land()
        chain.run(trigger)
    for stage, name in enumerate(STAGES):
        expected = {lag.end_ms: lag.batches for lag in plain.lags(stage)}
        found = {lag.end_ms: lag.batches for lag in ours.lags(stage)}
        assert len(expected) == plain.closable(stage)
        assert found.keys() == expected.keys()
        assert ours.lines(stage) == plain.lines(stage)
        late = {end: lag for end, lag in found.items() if lag > expected[end] + 1}
        assert not late, f"{name}: plain {list(expected.values())}, ours {list(found.values())}"
