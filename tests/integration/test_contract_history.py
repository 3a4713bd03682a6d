"""Contract section 3, additions: where a watermark was over wall time, and when it will be somewhere."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from service.frontier.timestamps import iso
from tests.support.api import MAX, WHOLE, Api, ok, problem
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

SPEC = {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": 1}}
HOUR = 3_600_000


class Stage:
    """The source `s`, its only shard, and the clock."""

    def __init__(self, api: Api, gauge: InProcess, token: str) -> None:
        self.api = api
        self.gauge = gauge
        self.token = token
        self.began_ms = gauge.clock.wall_ms()

    async def report(self, word: Any, after_ms: int = 0) -> None:
        self.gauge.advance(after_ms)
        await self.api.report("s", self.token, {"0": word})

    async def get(self, what: str, stage: str = "s", **query: Any) -> Any:
        query = {name.rstrip("_"): value for name, value in query.items()}
        path = f"{self.api.root}/stages/{stage}/{what}"
        return await self.api.client.get(path, params=query)

    async def points(self, stage: str = "s", **query: Any) -> list[tuple[int, Any, Any, str]]:
        """Times are since the beginning."""
        return [
            (
                point["at"] - self.began_ms,
                point["input_watermark"],
                point["output_watermark"],
                point["status"],
            )
            for point in ok(await self.get("history", stage, **query))["points"]
        ]

    async def eta(self, at: int | str) -> Any:
        return ok(await self.get("eta", at=at))

    def ms(self, text: str) -> int:
        """An instant of an answer, since the beginning."""
        return round(1_000 * datetime.fromisoformat(text).timestamp()) - self.began_ms


@pytest.fixture
async def stage(api: Api, gauge: InProcess) -> Stage:
    await api.define(SPEC)
    return Stage(api, gauge, await api.token("s", ttl_ms=600_000))


# ---- history


async def test_by_default_it_is_the_last_hour(stage: Stage):
    # A minute apart: of each 7.2 seconds, the default shows the last change.
    await stage.report(10, 60_000)
    await stage.report({"idle": True}, 60_000)
    await stage.report(20, 60_000)
    everything = [
        (60_000, None, 10, "active"),
        (120_000, None, 10, "idle"),
        (180_000, None, 20, "active"),
    ]
    assert await stage.points() == [(0, None, None, "unknown"), *everything], "not before the job"
    stage.gauge.advance(HOUR - 50_000)
    assert await stage.points() == [(130_000, None, 10, "idle"), everything[-1]]


async def test_both_watermarks_of_a_keyed_stage(stage: Stage):
    await stage.report(10, 1_000)
    token = await stage.api.token("k")
    stage.gauge.advance(500)
    await stage.api.report("k", token, {WHOLE: {"holds": {"h": 7}}}, input_watermark=10)
    await stage.report(MAX, 500)
    assert await stage.points("k", from_=stage.began_ms) == [
        (0, None, None, "unknown"),
        (1_000, 10, None, "unknown"),
        (1_500, 10, 7, "active"),
        (2_000, MAX, 7, "active"),
    ]


async def test_rows_up_to_each_change(stage: Stage):
    await stage.report({"watermark": 10, "records": 5, "late": 1}, 1_000)
    await stage.report({"watermark": 10, "records": 3}, 1_000)
    await stage.report({"watermark": 20, "records": 2, "late": 1}, 1_000)
    token = await stage.api.token("k")
    await stage.api.report("k", token, {WHOLE: {"records": 4}}, input_watermark=20)

    async def rows(name: str = "s", from_ms: int = 0) -> list[tuple[int | None, int | None]]:
        answer = ok(await stage.get("history", name, from_=stage.began_ms + from_ms))
        return [(each["records"], each["late"]) for each in answer["points"]]

    assert await rows() == [(None, None), (5, 1), (10, 2)]
    # The state at `from` is not a change then: a rate from there would be too high.
    assert await rows(from_ms=1_500) == [(None, None), (10, 2)]
    assert (await rows("k"))[-1] == (4, 0)
    ok(await stage.api.reset())
    assert await rows() == [(None, None)]
    token = await stage.api.token("s")
    await stage.api.report("s", token, {"0": {"watermark": 1, "records": 1}})
    assert (await rows())[-1] == (1, 0)


async def test_before_the_first_report_there_was_no_watermark(stage: Stage):
    nothing = [(0, None, None, "unknown")]
    assert await stage.points() == nothing
    assert await stage.points(to=stage.began_ms - 1) == [], "the job did not exist"
    await stage.report(10, 1_000)
    until = stage.began_ms + 999
    assert await stage.points(from_=until - 5, to=until) == [(994, None, None, "unknown")]


async def test_there_are_no_more_points_than_asked_for_and_each_is_the_last_of_its_interval(
    stage: Stage,
):
    for number in range(1, 101):
        await stage.report(number, 100)
    began = stage.began_ms
    found = await stage.points(from_=began + 100, to=began + 10_000, points=4)
    assert [(at, output) for at, _, output, _ in found] == [
        (100, 1), (3_400, 34), (6_700, 67), (10_000, 100),
    ]  # fmt: skip
    assert await stage.points(from_=began + 150, points=1) == [(150, None, 1, "active")]
    everything = await stage.points(from_=began, points=10_000)
    assert [output for _, _, output, _ in everything] == [None, *range(1, 101)]
    # Read in several transactions.
    many = await stage.points(from_=began, to=began + 10_000, points=1_201)
    assert many == everything


async def test_a_reset_starts_over(stage: Stage):
    await stage.report(10, 1_000)
    stage.gauge.advance(1_000)
    ok(await stage.api.reset())
    nothing = [(0, None, None, "unknown")]
    assert await stage.points(from_=stage.began_ms) == nothing
    stage.token = await stage.api.token("s", ttl_ms=600_000)
    await stage.report(3, 1_000)
    assert await stage.points(from_=stage.began_ms) == [*nothing, (3_000, None, 3, "active")]
    assert (await stage.points(from_=stage.began_ms + 1_500))[0] == (1_500, None, None, "unknown")


async def test_a_watermark_that_stands_for_longer_than_history_is_kept_is_known_all_the_same(
    stage: Stage,
):
    await stage.report(10, 1_000)
    stage.gauge.forget_history()
    stage.gauge.advance(2 * HOUR)
    assert await stage.points() == [(1_000 + HOUR, None, 10, "active")]
    # Nobody knows any more whether there was one before.
    assert await stage.points(from_=stage.began_ms) == [(1_000, None, 10, "active")]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"from_": "x"}, "from is 'x'"),
        ({"to": "1.5"}, "to is '1.5'"),
        ({"to": str(2**63 - 1)}, "to is 9223372036854775807"),
        (
            {"from_": "5", "to": "4"},
            "from is 1970-01-01T00:00:00.005Z, which is after to, 1970-01-01T00:00:00.004Z",
        ),
        ({"points": "0"}, "points is '0'"),
        ({"points": "10001"}, "points is '10001'"),
    ],
)
async def test_what_does_not_fit_is_named(stage: Stage, query: dict[str, str], says: str):
    refused = problem(await stage.get("history", **query), 422, "invalid-request")
    assert says in refused["detail"]


async def test_any_instant_will_do(stage: Stage):
    await stage.report(10, 1_000)
    everything = {"from_": "-62135596800000", "to": "253402300799999"}
    assert len(await stage.points(**everything)) == 2
    assert await stage.points(to="-62135596800000") == []


async def test_moments_in_rfc_3339(stage: Stage):
    await stage.report(10, 1_000)
    began = iso(stage.began_ms)
    ended = iso(stage.began_ms + 1_500).replace("Z", "+00:00")
    in_ms = await stage.points(from_=stage.began_ms, to=stage.began_ms + 1_500)
    assert await stage.points(from_=began, to=ended) == in_ms
    reached = await stage.eta("1970-01-01T00:00:00.005Z")
    assert (reached["at"], reached["reached"]) == (5, True)


@pytest.mark.parametrize("what", ["history", "eta?at=5"])
async def test_what_is_not_there(stage: Stage, what: str):
    client = stage.api.client
    problem(await client.get(f"{stage.api.root}/stages/x/{what}"), 404, "unknown-stage")
    problem(await client.get(f"/v1/jobs/nosuch/stages/s/{what}"), 404, "unknown-job")
    problem(await client.get(f"{stage.api.root}/stages/-/{what}"), 422, "invalid-request")


# ---- eta


async def test_a_steady_stage_is_expected_as_far_ahead_as_it_goes(stage: Stage):
    for number in range(40):
        await stage.report(60_000 * number, 10_000)
    stage.gauge.advance(3_000)
    now = 403_000
    found = await stage.eta(60_000 * 41)
    assert {name: found[name] for name in ("at", "reached", "confidence")} == {
        "at": 60_000 * 41,
        "reached": False,
        "confidence": 0.8,
    }
    low, high = map(stage.ms, found["between"])
    assert now <= low <= stage.ms(found["expected_at"]) <= high
    assert (low, high) == (420_000, 420_000)
    assert "in the last 6 min 33 s the stage advanced by 2 min" in found["because"]


async def test_what_is_reached(stage: Stage):
    await stage.report(1_767_225_600_000, 1_000)
    found = await stage.eta(1_767_225_600_000)
    assert found == {
        "at": 1_767_225_600_000,
        "reached": True,
        "expected_at": None,
        "between": None,
        "confidence": 0.8,
        "because": "the output watermark is at 2026-01-01T00:00:00.000Z",
    }
    await stage.report(MAX)
    for at in (5, MAX):
        found = await stage.eta(at)
        assert found["reached"] is True
        assert found["because"] == "the output watermark is at the end of time"


async def test_the_answer_says_which_instant_was_understood(stage: Stage):
    await stage.report(1_767_225_600_000, 1_000)
    client, path = stage.api.client, f"{stage.api.root}/stages/s/eta"
    response = await client.get(path, params={"at": 1_767_225_600})
    assert response.json()["reached"] is True
    assert response.headers["tidegauge-at"] == "1970-01-21T10:53:45.600Z"
    assert (await client.get(path, params={"at": MAX})).headers["tidegauge-at"] == str(MAX)


async def test_where_nothing_can_be_said_it_says_why(stage: Stage):
    async def why(at: int) -> str:
        found = await stage.eta(at)
        assert (found["reached"], found["expected_at"], found["between"]) == (False, None, None)
        return found["because"]

    assert "does not have an output watermark yet" in await why(5)
    for number in range(30):
        await stage.report(60_000 * number, 10_000)
    assert "an estimate needs 9 advances" in await why(60_000 * 100)
    assert "the end of a stage cannot be estimated" in await why(MAX)
    stage.gauge.advance(15_000)
    assert "the stage has stood still for 15 s" in await why(60_000 * 31)


async def test_a_reset_makes_an_estimate_start_over(stage: Stage):
    for number in range(30):
        await stage.report(60_000 * number, 10_000)
    assert (await stage.eta(60_000 * 30))["expected_at"] is not None
    ok(await stage.api.reset())
    assert "does not have an output watermark yet" in (await stage.eta(60_000 * 30))["because"]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({}, "at is missing"),
        ({"at": "soon"}, "at is 'soon'"),
        ({"at": "253402300800000"}, "at is 253402300800000"),
        ({"at": "2026-02-30T00:00:00Z"}, "not an instant"),
        ({"at": "2026-01-01T00:00:00.0005Z"}, "a part of a millisecond"),
    ],
)
async def test_a_time_that_is_none(stage: Stage, query: dict[str, str], says: str):
    refused = problem(await stage.get("eta", **query), 422, "invalid-request")
    assert says in refused["detail"]
