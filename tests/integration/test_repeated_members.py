"""Bodies with a member that is there twice: of two promises, none may be taken for the whole."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api import LOWER, Api, problem

pytestmark = pytest.mark.anyio

SPEC = {"s": {"shards": ["a", "b"]}, "k": {"inputs": ["s"], "ranges": 2}}
REPORT = "stages/s/reports"
KEYED = "stages/k/reports"


async def refused(job: Api, path: str, body: str, member: str, method: str = "POST") -> Any:
    address = f"{job.root}/{path}" if path else job.root
    found = problem(await job.client.request(method, address, content=body.encode()), 422)
    assert f"'{member}' is there twice" in found["detail"]
    return found


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


@pytest.mark.parametrize(
    ("member", "rest"),
    [
        ("a", '"ranges":{"a":5,"b":9,"a":7}'),
        ("a", '"ranges":{"a":5,"b":9,"\\u0061":7}'),
        ("a", '"ranges":{"a":{"watermark":5},"b":9,"a":{"watermark":7}}'),
        ("watermark", '"ranges":{"a":{"watermark":5,"watermark":7}}'),
        ("x", '"ranges":{"a":{"watermark":9,"holds":{"x":5,"x":7}}}'),
        ("ranges", '"ranges":{"a":5},"ranges":{"a":7,"b":9}'),
        ("watermark", '"columns":{"watermark":[5,9],"watermark":[7,9]}'),
        ("holds", '"columns":{"watermark":[5,9],"holds":{"x":["?",1]},"holds":7}'),
        ("a", '"ranges":{"a":"1970-01-01T00:00:05Z","b":9,"a":"1970-01-01T00:00:07Z"}'),
    ],
)
async def test_invariant_4_a_report_with_a_member_twice_is_rejected(
    job: Api, member: str, rest: str
):
    token = await job.token("s", ttl_ms=600_000)
    found = await refused(job, REPORT, f'{{"token":"{token}",{rest}}}', member)
    assert found["type"] == "/problems/invalid-report"
    await job.report("s", token, {"b": 9})
    assert await job.output("s") is None


async def test_a_report_of_a_key_range_twice_is_rejected(job: Api):
    token = await job.token("k")
    for one in ('{"holds":{"x":5}}', '{"idle":true}'):
        ranges = f'{{"{LOWER}":{one},"{LOWER}":{one}}}'
        body = f'{{"token":"{token}","epoch":1,"ranges":{ranges}}}'
        await refused(job, KEYED, body, LOWER)


@pytest.mark.parametrize(
    ("path", "body", "member"),
    [
        ("stages/s/leases", '{"ranges":["a"],"holder":"x","ranges":["b"]}', "ranges"),
        ("leases/renew", '{"tokens":["a"],"tokens":["b"]}', "tokens"),
        ("runs", '{"stages":["s"],"holder":"x","holder":"y"}', "holder"),
        ("commits", '{"run":1,"epoch":1,"stages":{"s":{},"s":{"late":1}}}', "s"),
        (REPORT, '{"claim":{"holder":"x","holder":"y"},"ranges":{"a":5}}', "holder"),
    ],
)
async def test_another_request_with_a_member_twice_is_rejected(
    job: Api, path: str, body: str, member: str
):
    await refused(job, path, body, member)


async def test_a_specification_with_a_stage_twice_is_rejected(api: Api):
    body = '{"stages":{"s":{"shards":["a"]},"s":{"shards":["b"]}}}'
    await refused(api, "", body, "s", "PUT")


async def test_colons_in_values_are_not_members(job: Api):
    token = await job.token("s")
    body = f'{{"token":"{token}","ranges":{{"a":{{"watermark":5,"position":"a:1, \\"b:2\\""}},"b":9}}}}'
    response = await job.client.post(f"{job.root}/{REPORT}", content=body.encode())
    assert response.status_code == 200
