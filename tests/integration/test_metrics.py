"""Metrics by Prometheus' rules: their names, former names, and sums."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from service.aggregator import survey
from tests.support.api import Api, events, ok, problem
from tests.support.inprocess import InProcess, with_schema
from tests.support.prometheus_server import promtool
from tests.support.server import ROOT
from tests.support.stores import Stores

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


def check(text: str) -> subprocess.CompletedProcess[str]:
    command = [str(promtool()), "check", "metrics"]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60, check=False
    )


async def test_promtool_finds_no_fault(job: Api, gauge: InProcess):
    await job.report("s", await job.token("s"), {"0": T0, "1": T0})
    checked = check(await scrape(gauge))
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


async def test_a_watermark_is_a_timestamp_by_its_name(job: Api, gauge: InProcess):
    await job.report("s", await job.token("s"), {"0": T0, "1": T0})
    text = await scrape(gauge)
    found = values(text, "tidegauge_watermark_timestamp_seconds")
    assert found['{job="job",kind="output",stage="s"}'] == T0 / 1_000
    # The name of the last release, for one more.
    assert values(text, "tidegauge_watermark_seconds") == found
    assert "# HELP tidegauge_watermark_seconds Deprecated: " in text


async def test_a_stage_without_a_watermark_appears(job: Api, gauge: InProcess):
    text = await scrape(gauge)
    assert not values(text, "tidegauge_watermark_timestamp_seconds")
    assert values(text, "tidegauge_stage_status") == {
        '{job="job",stage="k",status="unknown"}': 1,
        '{job="job",stage="s",status="unknown"}': 1,
    }
    await job.report("s", await job.token("s"), {"0": T0, "1": T0})
    found = values(await scrape(gauge), "tidegauge_stage_status")
    assert found['{job="job",stage="s",status="active"}'] == 1
    assert '{job="job",stage="s",status="unknown"}' not in found


async def test_each_metric_is_documented(job: Api, gauge: InProcess):
    page = (ROOT / "docs/operations.md").read_text()
    helps = re.findall(r"^# HELP (tidegauge_\w+) (.+)$", await scrape(gauge), re.MULTILINE)
    assert len(helps) > 20
    for name, about in helps:
        assert (f"`{name}`" in page) is not about.startswith("Deprecated: "), name


# ---- ranges by condition


def conditions(text: str, stage: str) -> dict[str, int]:
    """The ranges of a stage by condition."""
    found = values(text, "tidegauge_ranges")
    labels = re.compile(rf'{{condition="(\w+)",job="job",stage="{stage}"}}')
    return {m[1]: int(count) for at, count in found.items() if (m := labels.fullmatch(at))}


def some(**counts: int) -> dict[str, int]:
    """The counts of all conditions."""
    names = ("final", "retired", "idle", "never_reported", "unleased", "active")
    return dict.fromkeys(names, 0) | counts


async def mixed(api: Api) -> None:
    """Bring ranges into each condition. The census alone does not tell them apart."""
    await api.define({"s": {"shards": [str(k) for k in range(8)]}})
    token = await api.token("s", ["0", "1", "2", "3", "6"])
    idle = {"idle": True}
    await api.report("s", token, {"0": {"final": True}, "2": {"watermark": T0, **idle}, "6": idle})
    await api.retire("s", "1")
    passing = await api.token("s", ["4", "5"])
    await api.report("s", passing, {"4": T0, "5": T0})
    await api.release(passing)
    await api.report("s", token, {"3": T0})


@pytest.mark.parametrize("stores", ["memory,sqlite", "redis,sqlite"], indirect=True)
async def test_conditions_add_up_to_all_ranges(api: Api, gauge: InProcess):
    await mixed(api)
    found = conditions(await scrape(gauge), "s")
    # Shard 6 is idle and has never promised, and the final shard has a lease: both count once.
    assert found == some(final=1, retired=1, idle=2, never_reported=1, unleased=2, active=1)
    summary = ok(await api.client.get(f"{api.root}/stages/s/range-summary"))["counts"]
    assert found == {{"expired": "unleased"}.get(name, name): n for name, n in summary.items()}
    assert sum(found.values()) == 8


async def test_conditions_follow_each_change(job: Api, gauge: InProcess):
    assert conditions(await scrape(gauge), "s") == some(never_reported=2)
    token = await job.token("s", ttl_ms=1_000)
    text = await scrape(gauge)
    assert conditions(text, "s") == some(never_reported=2)
    assert values(text, "tidegauge_leased_ranges")['{job="job",stage="s"}'] == 2
    await job.report("s", token, {"0": T0, "1": T0})
    assert conditions(await scrape(gauge), "s") == some(active=2)
    gauge.advance(1_001)
    text = await scrape(gauge)
    assert conditions(text, "s") == some(unleased=2)
    assert values(text, "tidegauge_leased_ranges")['{job="job",stage="s"}'] == 0


async def test_former_states_are_marked(job: Api, gauge: InProcess):
    text = await scrape(gauge)
    assert "# HELP tidegauge_stage_ranges Deprecated: " in text
    assert values(text, "tidegauge_stage_ranges")['{job="job",stage="s",state="total"}'] == 2


async def test_jobs_with_too_many_ranges_are_counted_by_the_census(
    api: Api, gauge: InProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(survey, "_RANGES", 0)
    await api.define({"s": {"shards": ["0", "1", "2"]}})
    token = await api.token("s", ["0", "1"])
    await api.report("s", token, {"0": T0})
    text = await scrape(gauge)
    assert 'tidegauge_left_out_stages{metrics="work"} 1.0' in text
    # Leases may be on ranges that have never reported: a guess would be wrong.
    assert conditions(text, "s") == {}
    await api.token("s", ["2"])
    assert conditions(await scrape(gauge), "s") == some(never_reported=2, active=1)


async def test_stages_with_too_many_ranges_are_not_examined(
    api: Api, gauge: InProcess, monkeypatch: pytest.MonkeyPatch
):
    await mixed(api)
    assert sum(conditions(await scrape(gauge), "s").values()) == 8
    monkeypatch.setattr("service.aggregator.conditions.EXAMINED", 7)
    await api.release(await api.token("s", ["7"]))
    gauge.advance(1_001)
    assert conditions(await scrape(gauge), "s") == {}


# ---- durations of requests


def durations(text: str, method: str, route: str) -> dict[str, float]:
    """The buckets of a route by their upper bound."""
    found = values(text, "tidegauge_request_duration_seconds_bucket")
    labels = re.compile(rf'{{le="([^"]+)",method="{method}",route="{re.escape(route)}"}}')
    return {m[1]: count for at, count in found.items() if (m := labels.fullmatch(at))}


def timed(text: str, method: str, route: str) -> float:
    """The number of requests to a route with a duration."""
    name = "tidegauge_request_duration_seconds_count"
    return values(text, name).get(f'{{method="{method}",route="{route}"}}', 0)


REPORTS = "/v1/jobs/{job}/stages/{stage}/reports"
WATERMARK = "/v1/jobs/{job}/stages/{stage}/watermark"


@pytest.mark.parametrize("fast_lane", [True, False])
async def test_each_request_has_a_duration(tmp_path: Path, stores: Stores, fast_lane: bool):
    async with InProcess(with_schema(tmp_path), stores=stores, fast_lane=fast_lane) as gauge:
        api = gauge.api()
        await api.define({"s": {"shards": ["0"]}})
        token = await api.token("s")
        for k in range(3):
            await api.report("s", token, {"0": T0 + k})
        problem(await api.post_report("s", "none", {"0": T0}), 410, "lease-lost", "unknown-lease")
        await api.watermark("s")
        await gauge.client.head(f"{api.root}/stages/s/watermark")
        await gauge.client.get("/nowhere")
        text = await scrape(gauge)
        assert timed(text, "POST", REPORTS) == 4
        assert timed(text, "GET", WATERMARK) == 2
        assert timed(text, "PUT", "/v1/jobs/{job}") == 1
        assert timed(text, "GET", "none") == 1
        counts = list(durations(text, "POST", REPORTS).values())
        assert counts == sorted(counts)
        assert counts[-1] == 4
        seconds = values(text, "tidegauge_request_duration_seconds_sum")
        assert seconds[f'{{method="POST",route="{REPORTS}"}}'] > 0
        answered = values(text, "tidegauge_requests_total")
        assert answered[f'{{method="POST",route="{REPORTS}",status="200"}}'] == 3
        assert answered[f'{{method="POST",route="{REPORTS}",status="410"}}'] == 1
        # Each scrape shows all requests until then, not those since the last one.
        assert timed(await scrape(gauge), "POST", REPORTS) == 4
        again = values(await scrape(gauge), "tidegauge_requests_total")
        assert again[f'{{method="POST",route="{REPORTS}",status="200"}}'] == 3


async def test_requests_that_wait_on_purpose_have_no_duration(job: Api, gauge: InProcess):
    await job.report("s", await job.token("s"), {"0": T0, "1": T0})
    waited = await job.get_watermark("s", f"?at_least={T0}", Prefer="wait=30")
    assert waited.headers["preference-applied"] == "wait=30"
    async with job.client.stream("GET", f"{job.root}/events") as response:
        async for _ in events(response):
            break
    # A preference without a condition does not wait.
    ok(await job.get_watermark("s", "", Prefer="wait=30"))
    text = await scrape(gauge)
    assert timed(text, "GET", WATERMARK) == 1
    assert timed(text, "GET", "/v1/jobs/{job}/events") == 0
    answered = values(text, "tidegauge_requests_total")
    assert answered[f'{{method="GET",route="{WATERMARK}",status="200"}}'] == 2
