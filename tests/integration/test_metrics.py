"""Metrics by Prometheus' rules: their names, former names, and sums."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.api import Api
from tests.support.inprocess import InProcess
from tests.support.prometheus_server import promtool

pytestmark = pytest.mark.anyio

T0 = 1_767_225_600_000


@pytest.fixture
async def job(api: Api) -> Api:
    """A source with a range that has reported and one that has not, and a stage below."""
    await api.define({"s": {"shards": ["0", "1"]}, "k": {"inputs": ["s"], "ranges": 2}})
    return api


async def scrape(gauge: InProcess) -> str:
    return (await gauge.client.get("/metrics")).text


def values(text: str, name: str) -> dict[str, float]:
    """The samples of one metric by their labels."""
    found = (line.rpartition(" ") for line in text.splitlines() if line.startswith(f"{name}{{"))
    return {sample.removeprefix(name): float(value) for sample, _, value in found}


async def test_promtool_finds_no_fault(job: Api, gauge: InProcess):
    await job.report("s", await job.token("s"), {"0": T0, "1": T0})
    checked = subprocess.run(
        [str(promtool()), "check", "metrics"],
        input=await scrape(gauge),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


async def test_a_watermark_is_a_timestamp_by_its_name(job: Api, gauge: InProcess):
    await job.report("s", await job.token("s"), {"0": T0, "1": T0})
    text = await scrape(gauge)
    found = values(text, "tidegauge_watermark_timestamp_seconds")
    assert found['{job="job",kind="output",stage="s"}'] == T0 / 1_000
    # The name of the last release, for one more.
    assert values(text, "tidegauge_watermark_seconds") == found
    assert "# HELP tidegauge_watermark_seconds Deprecated: " in text
