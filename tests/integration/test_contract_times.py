"""Times in RFC 3339 in bodies mean the same as in ms, at every place of a report and of a commit."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from service.server.app import create_app
from service.settings import Settings
from tests.support.api import Api, ok, problem

pytestmark = pytest.mark.anyio

SPEC = {"s": {"shards": ["0", "1"]}, "k": {"inputs": ["s"], "ranges": 1}}
WHOLE = "00000000-100000000"
TEXT = "2026-01-01T01:00:00.5+01:00"
MS = 1767225600500
EARLIER = "2026-01-01T00:00:00Z"
EARLIER_MS = 1767225600000


@pytest.fixture
async def token(api: Api) -> str:
    await api.define(SPEC)
    return await api.token("s")


@pytest.mark.parametrize(
    "members",
    [
        {"ranges": {"0": TEXT, "1": MS}},
        {"ranges": {"0": {"watermark": TEXT}, "1": TEXT}},
        {"ranges": {"0": {"watermark": TEXT, "records": 1, "position": EARLIER}, "1": TEXT}},
        {"columns": {"watermark": [TEXT, MS]}},
        {"columns": {"watermark": [MS, TEXT], "idle": base64.b64encode(b"\0\0").decode()}},
    ],
)
async def test_watermarks_of_a_source(api: Api, token: str, members: dict[str, Any]) -> None:
    body = {"token": token, **members}
    reported = ok(await api.client.post(f"{api.root}/stages/s/reports", json=body))
    assert reported["watermark"]["output_watermark"] == MS
    found = ok(await api.client.get(f"{api.root}/stages/s/explain"))["holders"]
    if "position" in str(members):
        assert [each["position"] for each in found if each["range"] == "0"] == [EARLIER]


@pytest.mark.parametrize(
    "members",
    [
        {"ranges": {"0": {"watermark": MS, "holds": {"late": EARLIER}}, "1": MS}},
        {"columns": {"watermark": [MS, TEXT], "holds": {"late": [EARLIER, None]}}},
    ],
)
async def test_holds_of_a_source(api: Api, token: str, members: dict[str, Any]) -> None:
    body = {"token": token, **members}
    reported = ok(await api.client.post(f"{api.root}/stages/s/reports", json=body))
    assert reported["watermark"]["output_watermark"] == EARLIER_MS


@pytest.mark.parametrize("as_column", [True, False])
async def test_oldest_work(api: Api, token: str, as_column: bool) -> None:
    if as_column:
        members: dict[str, Any] = {
            "columns": {"watermark": [MS, MS], "oldest_work": [EARLIER, None]}
        }
    else:
        members = {"ranges": {"0": {"watermark": MS, "oldest_work": EARLIER}, "1": MS}}
    body = {"token": token, **members}
    ok(await api.client.post(f"{api.root}/stages/s/reports", json=body))
    assert (await api.watermark("s"))["processing_watermark"] == EARLIER_MS


@pytest.mark.parametrize(
    "members",
    [
        {"input_watermark": TEXT, "ranges": {WHOLE: {"holds": {"state": EARLIER}}}},
        {"input_watermark": TEXT, "columns": {"holds": {"state": [EARLIER]}}},
    ],
)
async def test_reports_of_key_ranges(api: Api, token: str, members: dict[str, Any]) -> None:
    await api.report("s", token, {"0": MS, "1": MS})
    body = {"token": await api.token("k"), **members}
    reported = ok(await api.client.post(f"{api.root}/stages/k/reports", json=body))
    assert reported["watermark"]["output_watermark"] == EARLIER_MS


async def test_commits(api: Api, token: str) -> None:
    await api.report("s", token, {"0": MS, "1": MS})
    run = await api.run("k")
    keys = await api.token("k", run=run)
    await api.report("k", keys, {WHOLE: {}}, epoch=1)
    stages = {"k": {"input_watermark": TEXT, "holds": {"state": EARLIER}}}
    body = {"run": run, "epoch": 1, "stages": stages}
    committed = ok(await api.client.post(f"{api.root}/commits", json=body))
    assert committed["watermarks"]["k"]["output_watermark"] == EARLIER_MS


@pytest.mark.parametrize(
    ("ranges", "names"),
    [
        ({"0": "2026-02-30T00:00:00Z"}, "ranges.0 is '2026-02-30T00:00:00Z'"),
        ({"0": "2026-01-01T00:00:00"}, "RFC 3339 is like"),
        ({"0": "2026-01-01T00:00:00.0001Z"}, "a part of a millisecond"),
        ({"0": {"holds": {"h": "2026-13-01T00:00:00Z"}}}, "ranges.0.holds.h is"),
        ({"0": "0001-01-01T00:00:00+01:00"}, "ranges"),
        ({"0": "soon"}, "got `str`"),
        ({"0": TEXT, "1": "soon"}, "got `str`"),
    ],
)
async def test_what_is_not_a_time_is_named(
    api: Api, token: str, ranges: dict[str, Any], names: str
) -> None:
    body = {"token": token, "ranges": ranges}
    refused = await api.client.post(f"{api.root}/stages/s/reports", json=body)
    assert names in problem(refused, 422, "invalid-report")["detail"]
    assert (await api.watermark("s"))["ranges"]["reported"] == 0


async def test_bytes_in_place_of_an_array_stay_bytes(api: Api, token: str) -> None:
    """Even if they begin like a year: base64 has digits, and a hyphen is not among its characters."""
    column = base64.b64encode(struct.pack("<2q", MS, MS)).decode()
    body = {"token": token, "columns": {"watermark": column, "oldest_work": [EARLIER, None]}}
    reported = ok(await api.client.post(f"{api.root}/stages/s/reports", json=body))
    assert reported["watermark"]["output_watermark"] == MS


async def test_a_large_body_has_ms_alone(api: Api) -> None:
    """Such a body takes long to search."""
    shards = [f"a-rather-long-name-of-a-shard-{i:05}" for i in range(6_000)]
    await api.define({"s": {"shards": shards}})
    token = await api.token("s")
    refused = await api.post_report("s", token, dict.fromkeys(shards, TEXT))
    assert "got `str`" in problem(refused, 422, "invalid-report")["detail"]
    await api.report("s", token, dict.fromkeys(shards, MS))


def test_the_document_has_both_forms() -> None:
    schemas = create_app(Settings(_env_file=None)).openapi()["components"]["schemas"]  # pyright: ignore[reportCallIssue]
    both = [{"type": "integer"}, {"type": "string", "format": "date-time"}]
    watermark = schemas["ShardReport"]["properties"]["watermark"]["anyOf"]
    assert watermark[0]["anyOf"] == both
    assert schemas["ShardReport"]["properties"]["holds"]["additionalProperties"]["anyOf"] == both
    assert "x-rfc-3339" not in str(schemas)
