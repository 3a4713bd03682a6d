"""Firings of random batches against a model, with batches that are repeated."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from spark_agent.driver import firings as module
from spark_agent.driver.firings import Firings
from spark_agent.firing_frames import kept_schema
from spark_agent.jvm.nodes import WindowGrid
from spark_agent.jvm.unfired import Unfired
from spark_agent.soundness.firings import Firing

COLUMNS = "key string, until timestamp, value long"
SIZE_S = 10
FIRING = Firing(
    "s", 40_000, WindowGrid(SIZE_S * 10**6, SIZE_S * 10**6, 0), "until", ("until", "key")
)
START_S = 1_700_000_000

Value = tuple[str, int, int, bool, int]
"""Key, end, value, on time, version."""


@dataclass
class Checkpoint:
    """Spark's watermarks by batch."""

    spark_ms: list[int] = field(default_factory=list[int])

    def watermark_before(self, batch: int) -> int:
        return self.spark_ms[batch - 1] if batch else 0


@dataclass
class Model:
    """Windows that have not fired, and the values that fire in a batch."""

    unfired: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    def fire(
        self, values: Mapping[tuple[str, int], int], batch: int, before_ms: int, now_ms: int
    ) -> list[Value]:
        corrections = {key: value for key, value in values.items() if key[1] * 1_000 <= before_ms}
        self.unfired |= {key: value for key, value in values.items() if key not in corrections}
        first = {key: value for key, value in self.unfired.items() if key[1] * 1_000 <= now_ms}
        self.unfired = {key: value for key, value in self.unfired.items() if key not in first}
        return sorted(
            [(*key, value, False, batch) for key, value in corrections.items()]
            + [(*key, value, True, batch) for key, value in first.items()]
        )


@pytest.mark.parametrize("seed", range(3))
def test_each_window_fires_once_on_time_and_again_for_each_change(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(module, "_WHOLE_EVERY", 3)
    chance = random.Random(seed)
    schema = spark.createDataFrame([], COLUMNS).schema
    checkpoint, model = Checkpoint(), Model()
    folder = tmp_path / "unfired"
    watermark_s = START_S

    def firings() -> Firings:
        unfired = Unfired(spark, str(folder), kept_schema(schema))
        return Firings(FIRING, checkpoint, unfired)

    fired_ms = 0
    running = firings()
    for batch in range(14):
        watermark_s += chance.choice([0, 0, 3, 10, 25]) if batch else 0
        checkpoint.spark_ms.append(watermark_s * 1_000 - 40_000 if batch > 1 else 0)
        before_ms, fired_ms = fired_ms, watermark_s * 1_000 if batch > 1 else 0
        oldest = (watermark_s - 40) // SIZE_S + 1
        values = {
            (chance.choice("abc"), end * SIZE_S): chance.randrange(100)
            for end in (oldest + chance.randrange(9) for _ in range(chance.choice([0, 2, 6])))
        }
        rows = spark.createDataFrame(
            [
                Row(key=key, until=datetime.fromtimestamp(end, UTC), value=value)
                for (key, end), value in values.items()
            ],
            schema,
        )
        expected = model.fire(values, batch, before_ms, fired_ms)
        for _ in range(chance.choice([1, 1, 2])):  # A batch that failed is repeated.
            with running.fire(rows, batch) as fires:
                found = sorted(
                    (row.key, int(row.until.timestamp()), row.value, row.on_time, row.version)
                    for row in fires.collect()
                )
            assert found == expected
            assert running.corrections(batch) == sum(not each[3] for each in expected)
            if chance.random() < 0.5:
                running = firings()
    kept = {int(each.name.removesuffix(".whole")) for each in folder.iterdir()}
    assert len(kept) <= 5, "what no batch reads is deleted"
