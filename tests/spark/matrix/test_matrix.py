"""Operators by triggers: each cell is equal to the batch answer in both stages, or is refused.

`make matrix` runs every cell, `make test` and `make test-slow` one of each row that is not the variation
of another. `test_oldest_spark.py` runs a few of them on the oldest PySpark.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.matrix.answers import Answers
from tests.spark.matrix.cell import Cell, Trigger
from tests.spark.matrix.rows import FATES, IN_SQL, OPERATORS, STRATEGIES, Operator
from tests.support.server import Service

pytestmark = pytest.mark.spark

FAULTS = {1, 2, 5, 7, 8}
"""Those on the list of issue 7 that are about operators."""


def marks(operator: Operator, trigger: Trigger) -> list[pytest.MarkDecorator]:
    if trigger != operator.short or operator.is_variation:
        return [pytest.mark.matrix]
    # Two queries that run while files land take the longest.
    return [pytest.mark.slow] if trigger == Trigger.PROCESSING_TIME else []


def cells() -> list[object]:
    return [
        pytest.param(
            operator,
            trigger,
            id=f"{operator.name}, {trigger}",
            marks=marks(operator, trigger),
        )
        for operator in OPERATORS
        for trigger in Trigger
    ]


@pytest.mark.parametrize(("operator", "trigger"), cells())
def test_cell(
    spark: SparkSession,
    aggregator: Service,
    batch: Answers,
    tmp_path: Path,
    operator: Operator,
    trigger: Trigger,
) -> None:
    job = f"{OPERATORS.index(operator)}-{trigger}"
    cell = Cell(spark, aggregator.url, job, tmp_path, operator)
    if operator.refused is None:
        cell.run(trigger, batch)
        return
    with pytest.raises(ValueError, match=operator.refused):
        cell.refuse(trigger)


def test_two_thirds_of_the_rows_work() -> None:
    working = [operator.name for operator in OPERATORS if operator.refused is None]
    assert len(working) >= len(OPERATORS) * 2 / 3
    variations = {*STRATEGIES, *FATES, IN_SQL}
    others = [name for name in working if variations.isdisjoint(name.split(", "))]
    joins = [name for name in others if "join" in name]
    assert len(joins) == 5
    assert {"dropDuplicates", "dropDuplicatesWithinWatermark"} <= set(working)


def test_each_fault_is_covered() -> None:
    assert {fault for operator in OPERATORS for fault in operator.issue} == FAULTS
    assert len({operator.name for operator in OPERATORS}) == len(OPERATORS)
