"""The simulation of many replicas agrees with the formulas of queueing theory, where there are some."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.processes import JITTER, Host
from benchmarks.simulation import TURNS_OF_REPORT, Cost, Outage, Profile, Site, simulate

FREE = Profile(Cost(0, 0), Cost(0, 0))
MANY_JOBS = 100_000
"""So many that no two reports share a call."""


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_a_redis_node_is_a_queue_of_m_g_1(busy: float) -> None:
    """The mean time in an M/G/1 queue is s + s u (1 + c²) / 2 (1 - u) (Pollaczek and Khinchine)."""
    service_s = 0.001
    profile = replace(FREE, redis=Cost(service_s, 0))
    found = simulate(Site(1, 1, MANY_JOBS, 0, rate=busy / service_s), profile, seconds=60)
    mean = sum(found.latencies) / len(found.latencies)
    variation = JITTER**2 / 3
    wait = busy * (1 + variation) / 2 / (1 - busy)
    assert mean == pytest.approx(service_s * (1 + wait), rel=0.1)
    assert found.utilisation("redis") == pytest.approx(busy, rel=0.05)
    assert found.rate == pytest.approx(busy / service_s, rel=0.05)


def test_a_single_connection_waits_for_each_part_in_turn() -> None:
    profile = Profile(Cost(0.001, 0.002), Cost(0.003, 0.001), load=0.003)
    found = simulate(Site(1, 1, 1, 0, connections=1), profile, seconds=5)
    assert found.rate == pytest.approx(100, rel=0.01)
    assert found.batch == 1
    assert found.quantile(0.5) == pytest.approx(0.007, rel=0.05)


def test_reports_that_share_a_turn_cost_less() -> None:
    profile = replace(FREE, turn_replica=0.001, redis=Cost(1e-4, 0))
    alone = simulate(Site(1, 1, 1, 0, connections=1), profile, seconds=5)
    many = simulate(Site(1, 1, 50, 0, connections=1), profile, seconds=5)
    assert alone.turns_per_report("replica") == pytest.approx(TURNS_OF_REPORT, rel=0.01)
    assert many.turns_per_report("replica") < 0.5
    assert many.rate > 10 * alone.rate


def test_processes_wait_for_a_core() -> None:
    """A short use waits behind long ones of other processes, up to a time slice each."""
    profile = Profile(Cost(0.02, 0), Cost(1e-4, 0), load=1e-4)
    free = simulate(Site(4, 1, 4, 0, connections=1), profile, seconds=5)
    shared = simulate(Site(4, 1, 4, 0, connections=1, host=Host(1)), profile, seconds=5)
    assert free.rate == pytest.approx(4 / 0.0202, rel=0.02)
    assert shared.rate == pytest.approx(1 / 0.0202, rel=0.05)


def test_reports_that_share_a_call_cost_less() -> None:
    profile = Profile(Cost(0.001, 0), Cost(0.009, 0))
    found = simulate(Site(1, 1, 1, 0, connections=50), profile, seconds=5)
    assert found.batch > 20
    assert found.rate > 20 * 100


def test_a_shared_host_has_no_more_than_its_cores() -> None:
    profile = Profile(Cost(0.001, 0), Cost(0.001, 0), load=0.001)
    site = Site(4, 4, 16, 0, connections=1, host=Host(2, 0.5))
    found = simulate(site, profile, seconds=5)
    assert found.rate * 0.003 == pytest.approx(1.5, rel=0.1)


def test_advances_that_arrive_together_share_a_round() -> None:
    profile = replace(FREE, commit_s=0.01, round_postgres=0.001)
    alone = simulate(Site(1, 1, 1, 1, connections=1), profile, seconds=5)
    many = simulate(Site(1, 1, 1, 1, connections=20), profile, seconds=5)
    assert alone.rate == pytest.approx(1 / 0.011, rel=0.02)
    assert many.rate > 10 * alone.rate
    assert many.rounds <= alone.rounds + 1, "one more may end within the run"


def test_replicas_share_a_write_to_the_disk() -> None:
    """A write that is under way cannot take more: so a commit waits for two writes at most."""
    profile = replace(FREE, commit_s=0.01)
    found = simulate(Site(8, 1, 8, 1, connections=1), profile, seconds=5)
    assert found.rate > 8 / 0.021
    assert max(found.latencies) < 0.021


@pytest.mark.parametrize("component", ["replica", "redis", "postgres"])
def test_a_failure_delays_reports_and_loses_none(component: str) -> None:
    profile = Profile(Cost(1e-4, 1e-4), Cost(1e-4, 1e-4), 1e-4, 1e-4, 1e-4, commit_s=1e-3)
    site = Site(3, 3, 12, 0.5, rate=200, outage=Outage(component, 2, 4))
    found = simulate(site, profile, seconds=15)
    without = simulate(replace(site, outage=None), profile, seconds=15)
    assert len(found.latencies) == pytest.approx(len(without.latencies), rel=0.003)
    within = [
        latency
        for at, latency in zip(found.arrivals, found.latencies, strict=True)
        if 2.1 <= at < 5
    ]
    assert max(within) > 0.9
    late = [x for at, x in zip(found.arrivals, found.latencies, strict=True) if at > 8]
    assert max(late) < 0.1


def test_the_same_seed_is_the_same_run() -> None:
    profile = Profile(Cost(1e-4, 1e-4), Cost(1e-4, 1e-4))
    site = Site(2, 3, 12, 0.5, rate=500)
    assert simulate(site, profile, seed=7).latencies == simulate(site, profile, seed=7).latencies
    assert simulate(site, profile, seed=7).latencies != simulate(site, profile, seed=8).latencies
