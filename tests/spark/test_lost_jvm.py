"""The end of a query whose driver has lost Spark's JVM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.spark.flow import COUNTS, DEADLINE_S, JOB, SOURCE, Flow
from tests.support.server import ROOT

pytestmark = pytest.mark.spark


@pytest.mark.parametrize(
    "trigger",
    [
        pytest.param({"processingTime": "100 milliseconds"}, marks=pytest.mark.slow),
        {"processingTime": "1 hour"},
    ],
    ids=str,
)
def test_a_query_whose_jvm_is_lost_ends_its_run_as_failed(
    flow: Flow, tmp_path: Path, trigger: Mapping[str, str]
) -> None:
    """Its supervisor ended by a traceback, or kept the leases of a query that was no more."""
    (tmp_path / "own").mkdir()
    driver = [sys.executable, "-m", "tests.spark.lost_jvm_driver", flow.url, str(tmp_path)]
    ended = subprocess.run(
        [*driver, json.dumps(trigger)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    [run] = flow.client.runs(JOB)["runs"]
    assert run["outcome"] == "failed"
    assert run["because"] == "the connection to Spark is lost"
    for stage in (SOURCE, COUNTS):
        ranges = flow.client.ranges(JOB, stage, limit=10)["ranges"]
        assert [each["holder"] for each in ranges] == [None] * len(ranges)
    lines = [each for each in ended.stderr.splitlines() if each.startswith("spark_agent ERROR")]
    assert len(lines) == 1, ended.stderr
    assert "the connection to Spark is lost" in lines[0]
    assert "Exception in thread" not in ended.stderr
