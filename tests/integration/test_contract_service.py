"""Contract section 3, the service itself: health, metrics, documentation, and every odd request."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from service.server.app import create_app
from tests.support.api import Api, ok, problem
from tests.support.binaries import free_port
from tests.support.inprocess import InProcess, with_schema
from tests.support.server import ROOT, Service
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio

SPEC = {
    "s": {"shards": ["0", "1"]},
    "k": {"inputs": ["s"], "ranges": 2},
}


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


def samples(text: str) -> dict[str, float]:
    """Prometheus' text format, as sample → value."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def total(found: dict[str, float], *words: str) -> float:
    """The sum of the samples whose name and labels contain all the words."""
    return sum(v for k, v in found.items() if all(w in k for w in words) and "_created" not in k)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_health(api: Api, path: str):
    ok(await api.client.get(path))


async def test_the_documentation(api: Api):
    page = await api.client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    schema = ok(await api.client.get("/openapi.json"))
    for path, method in {
        "/v1/jobs/{job}": "put",
        "/v1/jobs/{job}/reset": "post",
        "/v1/jobs/{job}/runs": "post",
        "/v1/jobs/{job}/commits": "post",
        "/v1/jobs/{job}/watermarks": "get",
        "/v1/jobs/{job}/events": "get",
        "/v1/jobs/{job}/leases/renew": "post",
        "/v1/jobs/{job}/leases/release": "post",
        "/v1/jobs/{job}/stages/{stage}/leases": "post",
        "/v1/jobs/{job}/stages/{stage}/reports": "post",
        "/v1/jobs/{job}/stages/{stage}/watermark": "get",
        "/v1/jobs/{job}/stages/{stage}/ranges": "get",
    }.items():
        operation = schema["paths"][path][method]
        assert any("application/problem+json" in str(r) for r in operation["responses"].values()), (
            path
        )


async def test_metrics(job: Api, gauge: InProcess):
    metrics = await gauge.client.get("/metrics")
    assert metrics.status_code == 200
    assert metrics.headers["content-type"].startswith("text/plain")
    before = samples(metrics.text)

    token = await job.token("s", ["0"], holder="a", ttl_ms=1_000)
    problem(await job.post_claim("s", ["0"], holder="b"), 409)
    await job.report("s", token, {"0": 1_767_225_600_000})
    gauge.advance(1_001)
    problem(await job.post_report("s", token, {"0": 10}), 410)
    token = await job.token("s")
    await job.report("s", token, {"0": 1_767_225_600_000, "1": 1_767_225_590_000})

    after = samples((await gauge.client.get("/metrics")).text)
    for words, least in {
        ("request", "409"): 1,
        ("request", "410"): 1,
        ("report",): 2,
        ("lease", "granted"): 1,
        ("range", "denied"): 1,
        ("lease", "expired"): 1,
    }.items():
        assert total(after, *words) - total(before, *words) >= least, words
    assert any("watermark" in name and 'stage="s"' in name for name in after), after
    assert any("lag" in name and 'stage="s"' in name for name in after), after
    assert not any(token in name for name in after)


def series(text: str, name: str) -> dict[str, float]:
    """The samples of one metric by their labels other than the job."""
    found = re.findall(rf'^{name}{{job="job",(.*)}} (\S+)$', text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


async def test_metrics_have_the_versions_of_the_process(gauge: InProcess):
    text = (await gauge.client.get("/metrics")).text
    labels = f'python="{platform.python_version()}",version="{metadata.version("tidegauge")}"'
    assert f"tidegauge_build_info{{{labels}}} 1.0" in text


async def test_metrics_of_a_stage(job: Api, gauge: InProcess):
    async def read(name: str) -> dict[str, float]:
        return series((await gauge.client.get("/metrics")).text, f"tidegauge_{name}")

    quiet = 'stage="s"'
    assert (await read("stage_ranges"))['stage="s",state="never_reported"'] == 2
    # From the start, or Prometheus would not see the first one.
    assert (await read("stage_arrivals_total"))[quiet] == 0
    assert (await read("stage_leases_expired_total"))[quiet] == 0
    assert quiet not in await read("system_lag_seconds")

    now = gauge.clock.wall_ms()
    token = await job.token("s", ttl_ms=1_000)
    said = {"watermark": now - 5_000, "records": 7, "late": 2, "oldest_work": now - 3_000}
    await job.report("s", token, {"0": said, "1": now - 4_000})
    await job.report("s", token, {"0": {"watermark": now - 5_000, "records": 0}})
    assert (await read("lag_seconds"))[quiet] == 5
    assert (await read("stage_records_total"))[quiet] == 7
    assert (await read("stage_late_total"))[quiet] == 2
    # From the start, or Prometheus would not see the first ones.
    assert (await read("stage_corrections_total"))[quiet] == 0
    await job.commit(1, {"s": {"corrections": 3}})
    assert (await read("stage_corrections_total"))[quiet] == 3
    assert (await read("stage_arrivals_total"))[quiet] == 1
    ranges = await read("stage_ranges")
    assert ranges['stage="s",state="reported"'] == ranges['stage="s",state="leased"'] == 2
    assert ranges['stage="s",state="unleased"'] == 0

    gauge.advance(1_001)
    assert (await read("stage_ranges"))['stage="s",state="unleased"'] == 2
    assert (await read("stage_leases_expired_total"))[quiet] == 1
    # Nobody has said anything for so long.
    assert (await read("system_lag_seconds"))[quiet] == pytest.approx(1.001)


async def test_metrics_are_of_so_many_stages_and_no_more(tmp_path: Path, stores: Stores):
    async with InProcess(with_schema(tmp_path), stores=stores, metrics_stages=3) as gauge:
        for name in ("b", "a"):
            job = gauge.api(name)
            await job.define({stage: {"shards": ["0"]} for stage in ("x", "y")})
            await job.report("x", await job.token("x"), {"0": 5})
        text = (await gauge.client.get("/metrics")).text
        shown = re.findall(r'tidegauge_watermark_version\{job="(\w)",stage="(\w)"\}', text)
        assert shown == [("a", "x"), ("a", "y"), ("b", "x")]
        assert 'tidegauge_left_out_stages{metrics="all"} 1.0' in text
        await gauge.api("a").delete()
        text = (await gauge.client.get("/metrics")).text
        assert 'tidegauge_left_out_stages{metrics="all"} 0.0' in text
        assert 'job="a"' not in text


async def test_metrics_do_not_grow_with_what_strangers_ask(api: Api):
    for i in range(50):
        await api.client.get(f"/v1/jobs/stranger-{i}")
        await api.client.get(f"/nowhere/{i}")
    text = (await api.client.get("/metrics")).text
    assert "stranger-7" not in text
    assert "nowhere/7" not in text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/jobs/job"),
        ("PATCH", "/v1/jobs/job"),
        ("DELETE", "/v1/jobs"),
        ("GET", "/v1/jobs/job/reset"),
        ("PUT", "/v1/jobs/job/runs"),
        ("GET", "/v1/jobs/job/runs/1/end"),
        ("GET", "/v1/jobs/job/commits"),
        ("GET", "/v1/jobs/job/leases/renew"),
        ("GET", "/v1/jobs/job/leases/release"),
        ("GET", "/v1/jobs/job/stages/s/leases"),
        ("GET", "/v1/jobs/job/stages/s/reports"),
        ("POST", "/v1/jobs/job/stages/s/watermark"),
        ("POST", "/v1/jobs/job/stages/s/ranges"),
        ("POST", "/v1/jobs/job/watermarks"),
        ("POST", "/v1/jobs/job/events"),
        ("POST", "/healthz"),
        ("PUT", "/metrics"),
    ],
)
async def test_another_method(job: Api, method: str, path: str):
    response = await job.client.request(method, path)
    problem(response, 405)
    assert response.headers["allow"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/jobs/job", "DELETE, GET, HEAD, PUT"),
        ("/v1/keys", "GET, HEAD, POST"),
        ("/v1/keys/k", "DELETE"),
        ("/v1/jobs", "GET, HEAD"),
        ("/v1/jobs/job/stages/s/watermark", "GET, HEAD"),
        ("/v1/jobs/job/stages/s/reports", "POST"),
        ("/v1/jobs/job/commits", "POST"),
        ("/docs", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
        ("/", "GET, HEAD"),
        ("/metrics", "GET, HEAD"),
    ],
)
async def test_another_method_is_told_every_one_there_is(job: Api, path: str, methods: str):
    for method in ("PATCH", "OPTIONS", "TRACE"):
        response = await job.client.request(method, path)
        assert methods in problem(response, 405, "method-not-allowed")["detail"]
        assert response.headers["allow"] == methods
    if "GET" not in methods:
        assert (await job.client.head(path)).headers["allow"] == methods


def test_head_is_get_without_its_body(tmp_path: Path) -> None:
    """Each on the same connection, which a body or a stream without an end would spoil."""
    with Service(tmp_path) as service, httpx.Client(base_url=service.url) as client:
        ok(client.put("/v1/jobs/job", json={"stages": SPEC}), 201)
        stage = "/v1/jobs/job/stages/s"
        for path in ("/healthz", "/", "/docs", "/v1/jobs", f"{stage}/watermark", f"{stage}/ranges"):
            get, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == get.headers["content-length"]
            assert head.headers["content-type"] == get.headers["content-type"]
        assert (
            client.head("/v1/jobs/job/events")
            .headers["content-type"]
            .startswith("text/event-stream")
        )
        assert ok(client.get("/v1/jobs/job"))["job"] == "job", "the connection is still good"
        assert client.head(f"{stage}/watermark", headers={"Prefer": "wait=30"}).status_code == 200
        for route in create_app().routes:
            if isinstance(route, Route) and "GET" in (route.methods or ()):
                path = route.path.format(job="job", stage="s")
                head = client.head(f"{path}?at=5")
                assert (head.status_code, head.content) == (200, b""), path
                assert head.headers["content-type"], path
        assert client.head("/v1/jobs/other").status_code == 404
        assert client.head("/v1/jobs/job/commits").status_code == 405
        assert ok(client.get("/v1/jobs/job"))["job"] == "job"


@pytest.mark.parametrize(
    "path",
    ["/site", "/site/../app.py", "/v1", "/v2/jobs", "/v1/jobs/job/nothing", "/v1/jobs/a/b/c"],
)
async def test_another_path(job: Api, path: str):
    problem(await job.client.get(path), 404)


@pytest.mark.parametrize("stage", ["-x", "x" * 129, "a b", "%00", "a:b"])
@pytest.mark.parametrize("path", ["watermark", "ranges"])
async def test_a_malformed_stage_name(job: Api, stage: str, path: str):
    problem(await job.client.get(f"{job.root}/stages/{stage}/{path}"), 422, "invalid-request")


async def test_a_malformed_stage_name_in_a_post(job: Api):
    problem(await job.post_claim("-x"), 422)
    problem(await job.post_report("-x", "t", {"0": 1}), 422)


async def test_deeply_nested_json_is_refused(job: Api):
    for path in ("runs", "commits", "stages/s/leases", "stages/s/reports", "leases/renew"):
        response = await job.client.post(f"{job.root}/{path}", content=b"[" * 100_000)
        assert response.status_code in {400, 422}
        problem(response, response.status_code)


@pytest.mark.parametrize(
    "text", [b'{"\x89": 1}', b'{"token": "\x89"}', b"\x89", b'{"a": "\xed\xa0\x80"}']
)
async def test_json_is_utf_8(job: Api, text: bytes):
    for path in ("runs", "commits", "stages/s/leases", "stages/s/reports", "stages/k/reports"):
        response = await job.client.post(f"{job.root}/{path}", content=text)
        problem(response, 400, "malformed-json")
    problem(await job.client.put("/v1/jobs/other", content=text), 400, "malformed-json")


@pytest.mark.parametrize("path", ["runs", "commits", "leases/renew"])
async def test_a_body_beyond_sixteen_mebibytes(job: Api, path: str):
    response = await job.client.post(f"{job.root}/{path}", content=b" " * ((16 << 20) + 1))
    problem(response, 413)


async def test_no_server_error_is_hidden_in_a_detail(job: Api):
    body = problem(await job.post_claim("s", ["0"], ttl_ms="x"), 422)
    assert "Traceback" not in str(body)
    assert not re.search(r"service/|\.py", str(body))


def test_restarting_on_the_same_ledger(tmp_path: Path):
    with Service(tmp_path) as service:
        with httpx.Client(base_url=service.url, timeout=60) as client:
            ok(client.put("/v1/jobs/job", json={"stages": SPEC}), 201)
        service.restart()
        with httpx.Client(base_url=service.url, timeout=60) as client:
            assert set(ok(client.get("/v1/jobs/job"))["stages"]) == {"s", "k"}
        service.stop()


def test_a_memory_live_store_is_for_one_process(tmp_path: Path):
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGAUGE_")}
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", "serve", "--port", str(port), "--workers", "2"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "redis://" in done.stdout + done.stderr
