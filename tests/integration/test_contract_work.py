"""Facts about ranges' work: processing and percentile watermarks, lags, records and late rows."""

from __future__ import annotations

import base64
from typing import Any

import datasketches
import pytest

from tests.support.api import Api, ok, problem
from tests.support.inprocess import InProcess
from tests.support.sketches import pending, sketch_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("stores", ["memory,sqlite", "redis,postgres"], indirect=True),
]

NOW = 1_767_225_600_000
FLOW = {
    "s": {"shards": ["a", "b"], "percentiles": [33, 66]},
    "k": {"inputs": ["s"], "ranges": 1},
    "u": {"inputs": ["k"], "passthrough": True},
}
KEYS = "00000000-100000000"


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(FLOW)
    return api


async def test_processing_watermark_is_unknown_until_each_range_has_reported(
    job: Api, gauge: InProcess
) -> None:
    gauge.skip_on_redis()
    token = await job.token("s")
    await job.report("s", token, {"a": 5})
    body = await job.watermark("s")
    assert body["processing_watermark"] is None
    assert body["system_lag_ms"] is None
    await job.report("s", token, {"b": 5})
    gauge.advance(300)
    body = await job.watermark("s")
    assert (body["processing_watermark"], body["system_lag_ms"]) == (NOW, 300)


async def test_processing_watermark_is_the_oldest_work_of_ranges_and_upstreams(
    job: Api, gauge: InProcess
) -> None:
    gauge.skip_on_redis()
    s, k = await job.token("s", ttl_ms=600_000), await job.token("k", ttl_ms=600_000)
    await job.report("s", s, {"a": {"watermark": 5, "oldest_work": NOW - 700}, "b": 5})
    await job.report("k", k, {KEYS: {}}, input_watermark=5)
    states = await job.snapshot()
    assert [states[n]["processing_watermark"] for n in "sku"] == [NOW - 700] * 3
    gauge.advance(1_000)
    await job.report("s", s, {"a": 6, "b": 6})
    states = await job.snapshot()
    assert [states[n]["processing_watermark"] for n in "sku"] == [NOW + 1_000, NOW, NOW]
    assert [states[n]["system_lag_ms"] for n in "sku"] == [0, 1_000, 1_000]


@pytest.mark.parametrize("outcome", ["finished", "failed"])
async def test_a_run_that_finished_has_no_work_left(
    job: Api, gauge: InProcess, outcome: str
) -> None:
    """A job between two nights made all stages below look stuck."""
    gauge.skip_on_redis()
    run = await job.run("s")
    s, k = await job.token("s", run=run), await job.token("k", ttl_ms=600_000)
    await job.report("s", s, {"a": 5})
    await job.end(run, outcome)
    assert (await job.watermark("s"))["processing_watermark"] is None, "b has never reported"
    run = await job.run("s")
    await job.report("s", await job.token("s", run=run), {"a": 5, "b": 5})
    await job.report("k", k, {KEYS: {}}, input_watermark=5)
    await job.end(run, outcome)
    gauge.advance(60_000)
    await job.report("k", k, {KEYS: {}}, input_watermark=5)
    states = await job.snapshot()
    lag_ms = 0 if outcome == "finished" else 60_000
    assert [states[n]["system_lag_ms"] for n in "sku"] == [lag_ms] * 3


async def test_work_that_a_finished_run_has_left_counts(job: Api, gauge: InProcess) -> None:
    """As that of an idle range does: rows that wait for the next night are work."""
    gauge.skip_on_redis()
    run = await job.run("s")
    work = {"a": {"watermark": 5, "oldest_work": NOW}, "b": 5}
    await job.report("s", await job.token("s", run=run), work)
    await job.end(run, "finished")
    gauge.advance(60_000)
    assert (await job.watermark("s"))["system_lag_ms"] == 60_000


async def test_processing_watermark_never_passes_the_clock_nor_goes_back(
    job: Api, gauge: InProcess
) -> None:
    gauge.skip_on_redis()
    token = await job.token("s", ttl_ms=600_000)
    ahead = {"watermark": 5, "oldest_work": NOW + 99_999}
    await job.report("s", token, {"a": ahead, "b": ahead})
    assert (await job.watermark("s"))["processing_watermark"] == NOW
    gauge.advance(50)
    await job.report("s", token, {"a": {"watermark": 6, "oldest_work": NOW - 5_000}})
    assert (await job.watermark("s"))["processing_watermark"] == NOW


async def test_processing_watermark_is_that_of_the_upstreams_as_they_are_shown(
    job: Api, gauge: InProcess
) -> None:
    gauge.skip_on_redis()
    s, k = await job.token("s", ttl_ms=1_000), await job.token("k", ttl_ms=600_000)
    idle = {"watermark": 5, "idle": True}
    await job.report("s", s, {"a": idle, "b": idle})
    gauge.advance(700)
    assert (await job.watermark("s"))["processing_watermark"] == NOW + 700
    # Without its lease, a shard that was idle counts again, with its report of long ago.
    gauge.advance(5_000)
    await job.report("k", k, {KEYS: {}}, input_watermark=5)
    states = await job.snapshot()
    assert [states[n]["processing_watermark"] for n in "sku"] == [NOW + 700] * 3


async def test_processing_watermark_stands_still_when_a_lease_runs_out(
    job: Api, gauge: InProcess
) -> None:
    gauge.skip_on_redis()
    token = await job.token("s", ttl_ms=1_000)
    await job.report("s", token, {"a": 5, "b": 5})
    gauge.advance(60_000)
    body = await job.watermark("s")
    assert (body["processing_watermark"], body["system_lag_ms"]) == (NOW, 60_000)


async def test_final_and_idle_ranges_do_not_count_unless_they_name_work(
    job: Api, gauge: InProcess
) -> None:
    gauge.skip_on_redis()
    token = await job.token("s", ttl_ms=600_000)
    await job.report("s", token, {"a": {"final": True}, "b": {"idle": True}})
    gauge.advance(500)
    assert (await job.watermark("s"))["system_lag_ms"] == 0
    await job.report("s", token, {"a": {"final": True, "oldest_work": NOW + 100}})
    gauge.advance(500)
    assert (await job.watermark("s"))["system_lag_ms"] == 500, "it never goes back, either"


async def test_a_report_in_an_epoch_counts_at_its_commit(job: Api, gauge: InProcess) -> None:
    gauge.skip_on_redis()
    token = await job.token("s", ttl_ms=600_000)
    waiting = {"watermark": 5, "records": 7, "late": 2, "pending": pending([50])}
    await job.report("s", token, {"a": waiting, "b": waiting}, epoch=1)
    body = await job.watermark("s")
    assert (body["processing_watermark"], body["records"], body["late"]) == (None, 0, 0)
    gauge.advance(400)
    await job.commit(1, {"s": {}})
    body = await job.watermark("s")
    assert (body["processing_watermark"], body["records"], body["late"]) == (NOW + 400, 14, 4)
    assert body["percentiles"] == {"33": 50, "66": 50}
    await job.commit(1, {"s": {}})
    assert (await job.watermark("s"))["records"] == 14


async def test_of_two_attempts_the_records_of_one_count(job: Api) -> None:
    for attempt, (watermark, records) in enumerate([(9, 5), (7, 3), (8, 100)]):
        token = await job.token("s", ["a"], epoch=1, attempt=attempt)
        await job.report("s", token, {"a": {"watermark": watermark, "records": records}}, epoch=1)
    await job.commit(1, {"s": {}})
    assert (await job.watermark("s"))["records"] == 3, "of the attempt whose promise counts"


async def test_data_lag(job: Api, gauge: InProcess) -> None:
    gauge.skip_on_redis()
    token = await job.token("s", ttl_ms=600_000)
    assert (await job.watermark("s"))["data_lag_ms"] is None
    await job.report("s", token, {"a": NOW - 5_000, "b": NOW})
    gauge.advance(10)
    assert (await job.watermark("s"))["data_lag_ms"] == 5_010
    await job.report("s", token, {"a": {"final": True}, "b": {"final": True}})
    assert (await job.watermark("s"))["data_lag_ms"] == 0


async def test_percentiles_of_what_is_pending(job: Api) -> None:
    token = await job.token("s")
    await job.report("s", token, {"a": {"watermark": 10, "pending": pending([20, 30, 40])}})
    assert (await job.watermark("s"))["percentiles"] == {"33": None, "66": None}
    await job.report("s", token, {"b": {"watermark": 15, "pending": pending([50, 60, 70])}})
    assert (await job.watermark("s"))["percentiles"] == {"33": 60, "66": 40}
    plain = (await job.get_watermark("s")).headers["etag"]
    response = await job.get_watermark("s", "?percentile=66")
    assert ok(response)["output_watermark"] == 40
    own = response.headers["etag"]
    assert own != plain
    await job.report("s", token, {"b": {"watermark": 15, "pending": None}})
    assert (await job.get_watermark("s")).headers["etag"] == plain, "the plain watermark stands"
    body = await job.watermark("s")
    assert body["percentiles"] == {"33": 60, "66": 40}, "it never goes back"
    await job.report("s", token, {"a": {"watermark": 10, "pending": pending([90])}})
    response = await job.get_watermark("s", "?percentile=66", If_None_Match=own, Prefer="wait=5")
    assert ok(response)["output_watermark"] == 90
    assert response.headers["etag"] != own


async def test_nothing_pending_is_the_output_watermark(job: Api) -> None:
    token = await job.token("s")
    nothing = {"watermark": 10, "pending": None}
    await job.report("s", token, {"a": nothing, "b": nothing})
    assert (await job.watermark("s"))["percentiles"] == {"33": 10, "66": 10}
    await job.report("s", token, {"a": {"watermark": 30, "pending": pending([12])}, "b": 40})
    assert (await job.watermark("s"))["percentiles"] == {"33": 30, "66": 30}, "at least the output"


async def test_the_figure_of_the_book(api: Api) -> None:
    """*Streaming Systems*, figure 3-7: with an earlier percentile, windows close before the stragglers.

    Nine events are in flight at 12:07, one of them a straggler of 12:01. The numbers follow from the
    definition: at 33 % three events must be at or after the watermark, at 66 % six, at 100 % all.
    """
    minute = 60_000
    times = [NOW + minute * m for m in (1, 5, 5, 6, 6, 6, 7, 7, 7)]
    await api.define({"s": {"shards": ["a"], "percentiles": [33, 66]}})
    token = await api.token("s")
    await api.report("s", token, {"a": {"watermark": NOW + minute, "pending": pending(times)}})
    body = await api.watermark("s")
    assert body["percentiles"] == {"33": NOW + 7 * minute, "66": NOW + 6 * minute}
    assert body["output_watermark"] == NOW + minute
    windows = [NOW, NOW + 2 * minute, NOW + 4 * minute]

    def closed(watermark: int) -> int:
        return sum(start + 2 * minute <= watermark for start in windows)

    at = [body["percentiles"]["33"], body["percentiles"]["66"], body["output_watermark"]]
    assert [closed(watermark) for watermark in at] == [3, 3, 0]


@pytest.mark.parametrize("query", ["?percentile=50", "?percentile=0", "?percentile=x"])
async def test_a_percentile_that_is_not_declared(job: Api, query: str) -> None:
    problem(await job.get_watermark("s", query), 422, "invalid-request")


floats: Any = datasketches.kll_floats_sketch(200)  # pyright: ignore[reportAttributeAccessIssue]
for value in range(20):
    floats.update(float(value))
BAD: dict[str, Any] = {
    "a count that is not the sketch's": {"pending": pending([1, 2]) | {"count": 3}},
    "another type of sketch": {
        "pending": {"count": 20, "event_times": base64.b64encode(floats.serialize()).decode()}
    },
    "damaged bytes": {
        "pending": {"count": 9, "event_times": base64.b64encode(sketch_of(range(9))[:-3]).decode()}
    },
    "no base64": {"pending": {"count": 1, "event_times": "***"}},
    "a fraction of a millisecond": {
        "pending": pending([1]) | {"event_times": "AgIPBMgACAAAAAAAAAD4Pw=="}
    },
    "a year that is none": {"pending": pending([2**60])},
    "an oldest work that is no time": {"oldest_work": 2**60},
    "records below zero": {"records": -1},
    "late rows as text": {"late": "1"},
    "a backlog of null": {"backlog": None},
}


@pytest.mark.parametrize("case", BAD)
async def test_what_is_no_work_applies_nothing(job: Api, case: str) -> None:
    token = await job.token("s")
    sent = {"a": {"watermark": 5} | BAD[case], "b": 7}
    problem(await job.post_report("s", token, sent), 422, "invalid-report")
    assert await job.promises("s") == {"a": None, "b": None}


@pytest.mark.parametrize(
    "said",
    [
        {"ranges": {KEYS: {"idle": True, "holds": {"state": 7}}}},
        {"columns": {"idle": [True], "holds": {"state": [7]}}},
    ],
    ids=["ranges", "columns"],
)
async def test_a_key_range_that_keeps_a_hold_is_not_idle(api: Api, said: dict[str, Any]) -> None:
    shards = {"a": {"shards": ["a"]}, "b": {"shards": ["b"]}}
    await api.define(
        shards
        | {"k": {"inputs": ["a"], "ranges": 1}, "join": {"inputs": ["k", "b"], "passthrough": True}}
    )
    await api.report("a", await api.token("a"), {"a": {"watermark": 5, "idle": True}})
    await api.report("b", await api.token("b"), {"b": 1_000})
    token = await api.token("k")
    await api.report("k", token, {KEYS: {}}, input_watermark=5)
    path = f"{api.root}/stages/k/reports"
    body = {"token": token, "input_watermark": 5} | said
    found = problem(await api.client.post(path, json=body), 422, "invalid-report")
    assert "'state' at 7" in found["detail"]
    assert (await api.watermark("join"))["output_watermark"] == 5, "what is held is not late there"
    await api.report("k", token, {KEYS: {"idle": True}}, input_watermark=5)
    assert (await api.watermark("join"))["output_watermark"] == 1_000
