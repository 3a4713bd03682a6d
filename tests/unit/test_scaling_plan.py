"""Sizes of sites, and fitted costs, follow from the costs that are put in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import fitting, plan
from benchmarks.fitting import Batching, solve, with_own_costs
from benchmarks.plan import Check, capacity, demand, load_of, nodes_for, replicas_for, sized
from benchmarks.scale import Costs, Measured, Point, Setting, load
from benchmarks.simulation import Cost, Found, Profile, simulate

PROFILE = Profile(
    Cost(2e-4, 1e-4),
    Cost(1e-4, 0.5e-4),
    round_replica=5e-4,
    round_redis=2e-4,
    round_postgres=1e-4,
    turn_replica=0.5e-4,
    turn_redis=0.2e-4,
    commit_s=1e-3,
)
POINT = Point(Setting(1, 1, 1, True, 16), 1_000, Costs(6e-4, 2e-4, 1e-5, 5e-5), 0.1, 0.0)


def test_costs_that_no_cost_explains_are_not_negative() -> None:
    assert solve([[1, 1], [1, 2], [1, 4]], [3, 5, 9]) == pytest.approx([1, 2])
    assert min(solve([[1, 1], [1, 2]], [4, 2])) == 0


def test_a_load_follows_from_jobs_partitions_and_batches() -> None:
    found = load_of(2_000_000, per_report=1)
    jobs, tasks = 10_000, 2 * plan.PARTITIONS
    assert (found.jobs, found.reports, found.commits) == (jobs, jobs * tasks / 10, jobs / 10)


def test_twice_the_load_takes_twice_the_processes() -> None:
    one, two = (demand(load_of(n * 10**6, per_report=1), PROFILE, 0.0) for n in (1, 2))
    assert replicas_for(two) == pytest.approx(2 * (replicas_for(one) or 0), abs=1)
    assert nodes_for(two) == pytest.approx(2 * nodes_for(one), abs=1)


def test_no_number_of_replicas_can_follow_too_many_advances() -> None:
    load_ = load_of(10**7, per_report=1)
    assert replicas_for(demand(load_, PROFILE, 1.01 * plan.BUSY / load_.commits)) is None
    assert replicas_for(demand(load_, PROFILE, 0.5 * plan.BUSY / load_.commits))
    found = sized(10**7, PROFILE, 2 * plan.BUSY / load_.commits, per_report=1)
    assert found["replicas"] is None
    assert found["core_s_per_million"] is None


def test_the_part_that_saturates_first() -> None:
    assert capacity(1, 3, PROFILE, 0.0)[1] == "replicas"
    assert capacity(16, 1, PROFILE, 0.0)[1] == "Redis"
    slow = replace(PROFILE, round_postgres=1.0)
    assert capacity(256, 256, slow, 0.0)[1] == "Postgres"
    assert capacity(2, 3, PROFILE, 0.0)[0] == pytest.approx(2 * capacity(1, 3, PROFILE, 0.0)[0])


def test_a_sized_site_is_not_overloaded() -> None:
    found = sized(100_000, PROFILE, 0.0, per_report=1)
    assert found["p99_ms"] < 50
    assert all(busy < 0.8 for busy in found["busy"].values())


def test_own_costs_are_those_of_the_point() -> None:
    batch, turns = 4.0, 1.5
    own = with_own_costs(PROFILE, POINT, Batching(batch, turns, turns))
    replica = own.replica.of(batch) / batch + POINT.publications * own.round_replica
    redis = own.redis.of(batch) / batch + POINT.publications * own.round_redis
    replica, redis = replica + turns * own.turn_replica, redis + turns * own.turn_redis
    assert (replica, redis) == pytest.approx((POINT.costs.replica, POINT.costs.redis))


def _costs(profile: Profile, found: Found) -> Costs:
    published, turns = found.round_jobs / len(found.latencies), found.turns_per_report
    return Costs(
        profile.replica.of(found.batch) / found.batch
        + published * profile.round_replica
        + turns("replica") * profile.turn_replica,
        profile.redis.of(found.batch) / found.batch
        + published * profile.round_redis
        + turns("redis") * profile.turn_redis,
        published * profile.round_postgres,
        1e-5,
    )


def test_a_fit_finds_the_costs_of_a_site_that_is_simulated() -> None:
    """Points that the simulation itself has made, with their costs, give these costs back.

    Calls and turns are shared alike, so their parts alone are not found.
    """
    points: list[Point] = []
    loaded = replace(PROFILE, load=1e-5)
    for connections in (1, 16):
        for advancing in (False, True):
            setting = Setting(1, 1, 1, advancing, connections)
            empty = Point(setting, 1.0, Costs(0, 0, 0, 1e-5), 0.0, 0.0)
            found = simulate(fitting.site_of(Measured(2, 1e-3, 0.0, 0.0), empty), loaded, seconds=2)
            published = found.round_jobs / len(found.latencies)
            points.append(Point(setting, found.rate, _costs(loaded, found), published, 0.0))
    measured = Measured(2, 1e-3, 0.0, 0.0, points)
    fit = fitting.with_load(fitting.fitted(measured, 1), points[0])
    for point in points:
        found = simulate(fitting.site_of(measured, point), fit, seconds=2)
        assert found.rate == pytest.approx(point.rate, rel=0.05)
        assert _costs(fit, found).replica == pytest.approx(point.costs.replica, rel=0.05)
        assert _costs(fit, found).redis == pytest.approx(point.costs.redis, rel=0.05)
    assert fit.round_postgres == pytest.approx(PROFILE.round_postgres, rel=0.01)


def test_errors_are_relative_to_the_measured_rate() -> None:
    found = Check("", is_fitted=True, measured=100, simulated=110, predicted=90)
    assert (found.error, found.prediction_error) == (0.1, -0.1)


def test_saved_points_are_read_as_they_were_written() -> None:
    found = load()
    assert len({each.setting for each in found.points}) == len(found.points) == 48
    assert all(each.rate > 0 and each.costs.total > 0 for each in found.points)
