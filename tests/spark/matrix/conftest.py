"""Fixtures: one service and one set of batch answers for the whole matrix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.spark.matrix.answers import Answers
from tests.support.server import Service


@pytest.fixture(scope="session")
def aggregator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all cells: each has a job of its own."""
    with Service(tmp_path_factory.mktemp("aggregator")) as running:
        yield running


@pytest.fixture(scope="session")
def batch(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return the answers with which the cells are compared."""
    return Answers(spark, tmp_path_factory.mktemp("batch"))
