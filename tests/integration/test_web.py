"""Requests that a page of another site must not make, in every way that a browser can send them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from tests.support.api import Api, eventually, ok, problem
from tests.support.inprocess import InProcess, with_schema
from tests.support.server import Service
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio

SPEC = {"s": {"shards": ["0", "1"]}}
SAFELISTED = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
"""A browser sends these to any site without asking it first."""


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


async def generation(job: Api) -> int:
    return ok(await job.client.get(job.root))["generation"]


@pytest.mark.parametrize("kind", [*SAFELISTED, "application/octet-stream", "nonsense"])
async def test_a_body_that_does_not_say_that_it_is_json(job: Api, kind: str):
    body = b'{"stages": ["s"], "holder": "me"}'
    response = await job.client.post(
        f"{job.root}/runs", content=body, headers={"Content-Type": kind}
    )
    assert "application/json" in problem(response, 415, "unsupported-media-type")["detail"]


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON ; charset=utf-8", "application/vnd.gauge+json", None],
)
async def test_a_body_that_does(job: Api, kind: str | None):
    body = b'{"stages": ["s"], "holder": "me"}'
    headers = {} if kind is None else {"Content-Type": kind}
    ok(await job.client.post(f"{job.root}/runs", content=body, headers=headers), 201)


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": "file://"},
        {"Origin": "http://127.0.0.1.evil.example"},
    ],
)
async def test_another_site_changes_nothing(job: Api, headers: dict[str, str]):
    before = await generation(job)
    for method, path in [
        ("POST", "/reset"),
        ("DELETE", ""),
        ("PUT", ""),
        ("POST", "/runs"),
        ("POST", "/stages/s/leases"),
        ("POST", "/stages/s/reports"),
        ("POST", "/commits"),
    ]:
        response = await job.client.request(method, job.root + path, headers=headers)
        problem(response, 403, "cross-site")
    assert await generation(job) == before


@pytest.mark.parametrize("kind", SAFELISTED)
async def test_a_form_resets_nothing(job: Api, kind: str):
    before = await generation(job)
    response = await job.client.post(
        f"{job.root}/reset", content=b"x", headers={"Content-Type": kind}
    )
    problem(response, 415)
    assert await generation(job) == before


async def test_the_service_s_own_page_may(job: Api):
    for headers in (
        {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "https://127.0.0.1"},
        {"Sec-Fetch-Site": "none"},
    ):
        ok(await job.client.post(f"{job.root}/reset", headers=headers))


async def test_nobody_is_allowed_to_read_from_another_site(job: Api):
    headers = {"Origin": "http://evil.example"}
    response = await job.client.get(job.root, headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control")]
    asked = headers | {"Access-Control-Request-Method": "PUT"}
    problem(await job.client.options(job.root, headers=asked), 405)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io"]
)
async def test_another_name(job: Api, host: str):
    """A page may give its own name this address; then the browser takes it for the same site."""
    for path in ("/stages/s/watermark", "", "/events"):
        response = await job.client.get(job.root + path, headers={"Host": host})
        assert "TIDEGAUGE_ALLOWED_HOSTS" in problem(response, 421, "unknown-host")["detail"]
    response = await job.client.post(f"{job.root}/reset", headers={"Host": host})
    problem(response, 421)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.0.0.7:8000"]
)
async def test_its_own_names(job: Api, host: str):
    ok(await job.client.get(job.root, headers={"Host": host}))


@pytest.fixture
async def public(tmp_path: Path, stores: Stores) -> AsyncIterator[InProcess]:
    names = "gauge.example, tidegauge-1"
    folder = with_schema(tmp_path)
    async with InProcess(
        folder, stores=stores, host="0.0.0.0", insecure=True, allowed_hosts=names
    ) as service:
        yield service


async def test_names_that_are_set(public: InProcess):
    for host, status in {
        "gauge.example": 200,
        "Gauge.Example.:443": 200,
        "tidegauge-1:8000": 200,
        "10.0.0.7:8000": 200,
        "localhost:8000": 200,
        "evil.example": 421,
        "x.gauge.example": 421,
    }.items():
        response = await public.client.get("/healthz", headers={"Host": host})
        assert response.status_code == status, host


async def test_any_name_where_it_listens_for_others(tmp_path: Path, stores: Stores):
    async with InProcess(
        with_schema(tmp_path), stores=stores, host="0.0.0.0", insecure=True
    ) as service:
        ok(await service.client.get("/healthz", headers={"Host": "tidegauge"}))


async def test_nothing_is_redirected(job: Api):
    for path in ("/v1/jobs/", f"{job.root}/", "/docs/"):
        for host, status in (("127.0.0.1", 404), ("evil.example", 421)):
            response = await job.client.get(path, headers={"Host": host})
            assert response.status_code == status
            assert "location" not in response.headers


@pytest.mark.parametrize("path", ["/docs", "/docs/start.js", "/openapi.json", "/nowhere", "/v1"])
async def test_no_address_is_for_any_host(job: Api, path: str):
    problem(await job.client.get(path, headers={"Host": "evil.example"}), 421, "unknown-host")


async def test_a_method_that_there_is_not_is_for_no_host_either(job: Api):
    response = await job.client.patch("/v1/jobs", headers={"Host": "evil.example"})
    problem(response, 421, "unknown-host")


async def test_files_are_compressed_for_who_reads_that(job: Api):
    for path in ("/docs/swagger-ui-bundle.js", "/openapi.json"):
        plain = await job.client.get(path, headers={"Accept-Encoding": "identity"})
        small = await job.client.get(path, headers={"Accept-Encoding": "gzip"})
        assert "content-encoding" not in plain.headers
        assert small.headers["content-encoding"] == "gzip"
        assert small.content == plain.content
        assert int(small.headers["content-length"]) * 2 < len(plain.content)


async def test_a_client_waits_for_so_many_answers_and_no_more(tmp_path: Path):
    async with InProcess(tmp_path, max_readers_per_client=2) as gauge:
        job = gauge.api()
        await job.define({"s": {"shards": ["0"]}})
        path = f"{job.root}/stages/s/watermark?at_least=5"
        waiting = asyncio.create_task(job.client.get(path, headers={"Prefer": "wait=60"}))
        async with job.client.stream("GET", f"{job.root}/events") as stream:
            assert stream.status_code == 200
            refused = await eventually(
                lambda: job.client.get(path, headers={"Prefer": "wait=0"}),
                lambda response: response.status_code == 503,
            )
            assert (
                "TIDEGAUGE_MAX_READERS_PER_CLIENT" in problem(refused, 503, "overloaded")["detail"]
            )
            problem(await job.client.get(f"{job.root}/events"), 503, "overloaded")
            assert (await job.get_watermark("s")).status_code == 200, "it waits for nothing"
            text = (await job.client.get("/metrics")).text
            assert 'tidegauge_refused_requests_total{reason="overloaded"}' in text
        await job.report("s", await job.token("s"), {"0": 5})
        ok(await waiting)
        for _ in range(3):
            # Those that have ended count no more.
            again = await job.client.get(f"{path}0", headers={"Prefer": "wait=0"})
            assert again.status_code == 200


async def test_two_different_keys_are_no_key(job: Api):
    twice = [("Authorization", "Bearer one"), ("Authorization", "Bearer two")]
    problem(await job.client.get("/v1/jobs", headers=twice), 400, "malformed-http")


@pytest.mark.parametrize("path", ["/v1/jobs", "/nowhere", "/metrics", "/docs", "/v1/jobs/-"])
async def test_every_response_tells_browsers_what_it_is_not(job: Api, path: str):
    headers = (await job.client.get(path)).headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    if headers["content-type"] == "application/json":
        return  # No browser makes a page of it: the rest is about pages.
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "default-src 'none'" in headers["content-security-policy"]


async def test_etags_work_although_nothing_is_stored(job: Api):
    response = await job.get_watermark("s")
    known = response.headers["etag"]
    assert (await job.get_watermark("s", If_None_Match=known)).status_code == 304


class Links(HTMLParser):
    """Resources of a page, and inline code in it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.code = ""
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name in {"src", "href"} and value and not value.startswith("data:"):
                self.links.append(value)

    def handle_data(self, data: str) -> None:
        if self._tag in {"script", "style"}:
            self.code += data.strip()


async def test_the_documentation_needs_no_other_server(api: Api):
    page = await api.client.get("/docs")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "unsafe-eval" not in policy
    found = Links()
    found.feed(page.text)
    assert not found.code
    assert len(found.links) == 3
    for link in found.links:
        assert link.startswith("docs/"), link
        file = await api.client.get(urljoin("/docs", link))
        assert file.status_code == 200
        assert file.headers["content-type"].startswith(
            "text/css" if link.endswith(".css") else "text/javascript"
        )
    start = (await api.client.get("/docs/start.js")).text
    [schema] = re.findall(r'url: "([^"]+)"', start)
    document = ok(await api.client.get(urljoin("/docs", schema)))
    assert [server["url"] for server in document["servers"]] == ["."]


@pytest.mark.parametrize("start", ["/", "/docs"])
def test_pages_are_whole_below_a_path_of_a_proxy(server: Service, start: str) -> None:
    """As of a proxy that serves it at /gauge and takes that off."""
    with httpx.Client(base_url=server.url) as client:

        def get(address: str) -> httpx.Response:
            path = urlsplit(address).path
            assert path.startswith("/gauge/"), address
            return client.get(path.removeprefix("/gauge"))

        here = f"http://proxy/gauge{start}"
        page = get(here)
        found = Links()
        found.feed(page.text)
        assert found.links
        for link in found.links:
            file = get(urljoin(here, link))
            assert file.status_code == 200, link
            for schema in re.findall(r'^ *url: "([^"]+)"', file.text, re.MULTILINE):
                # Relative to the page, as scripts have it; its server relative to the document.
                at = urljoin(here, schema)
                [named] = ok(get(at))["servers"]
                assert urljoin(at, named["url"]) == "http://proxy/gauge/"


# ---- names


async def test_a_name_does_not_end_in_a_newline(job: Api):
    """To Python's `$`, a text also ends before its last newline."""
    client: httpx.AsyncClient = job.client
    for path in ("/v1/jobs/job%0A", f"{job.root}/stages/s%0A/watermark"):
        problem(await client.get(path), 422)
    problem(await client.put("/v1/jobs/other%0A", json={"stages": SPEC}), 422)
    for stages in (
        {"s\n": {"shards": ["0"]}},
        {"s": {"shards": ["0\n"]}},
        {"s": {"shards": ["0"]}, "t": {"inputs": ["s\n"], "ranges": 1}},
    ):
        problem(await client.put("/v1/jobs/other", json={"stages": stages}), 422)
    problem(await job.post_claim("s", holder="me\n"), 422)
    problem(await job.post_claim("s", ["0\n"]), 422)
    problem(await client.post(f"{job.root}/runs", json={"stages": ["s\n"], "holder": "me"}), 422)
    problem(await client.post(f"{job.root}/runs", json={"stages": ["s"], "holder": "me\n"}), 422)
    problem(await job.post_commit(1, {"s\n": {}}), 422)


@pytest.mark.parametrize("cursor", ["9" * 5_000, f"1-{'9' * 5_000}", "٣-٤", "1-2\n", "-1--1"])
async def test_a_cursor_that_is_none_is_the_beginning(
    job: Api, cursor: str, caplog: pytest.LogCaptureFixture
):
    headers = [(b"Last-Event-ID", cursor.encode())]
    async with job.client.stream("GET", f"{job.root}/events", headers=headers) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("event:"):
                break
    assert len(caplog.text) < 500
