"""Costs of the simulation's parts, fitted to measured points.

A report's processor time depends on the reports with which it shares a call, and only the simulation has
these numbers. So fits and simulations alternate until both agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchmarks.processes import Host
from benchmarks.scale import CONNECTIONS, JOBS, NODES, REPLICAS, Measured, Point
from benchmarks.simulation import Cost, Found, Profile, Site, simulate

_TURNS: Final = 4
_SECONDS: Final = 0.5
_FIRST: Final = Profile(
    Cost(1e-4, 1e-4), Cost(5e-5, 5e-5), 2e-4, 1e-4, 1e-4, turn_replica=5e-5, turn_redis=2e-5
)
"""Costs of the first simulation: no more than their order of magnitude matters."""


def is_fitted(point: Point) -> bool:
    """Return whether a point serves the fit: the least and the most connections, but for the largest
    site. The others are for checks alone.
    """
    setting = point.setting
    is_largest = (setting.replicas, setting.nodes) == (REPLICAS[-1], NODES[-1])
    return setting.connections in {CONNECTIONS[0], CONNECTIONS[-1]} and not is_largest


def site_of(measured: Measured, point: Point) -> Site:
    """Return the site of a measured point, on its shared host."""
    setting = point.setting
    return Site(
        replicas=setting.replicas,
        nodes=setting.nodes,
        jobs=JOBS,
        advancing=setting.advancing,
        connections=setting.connections,
        host=Host(measured.cores, point.others),
    )


def solve(rows: Sequence[Sequence[float]], costs: Sequence[float]) -> list[float]:
    """Return the coefficients, none negative, with the least relative errors.

    >>> [round(each, 6) for each in solve([[1, 1], [1, 2], [1, 4]], [3, 5, 9])]
    [1.0, 2.0]
    >>> [round(each, 6) for each in solve([[1, 1], [1, 2]], [4, 2])][1]
    0.0
    """
    scale = np.asarray(costs, dtype=float)
    matrix = np.asarray(rows, dtype=float) / scale[:, None]
    kept = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, kept], np.ones(len(scale)), rcond=None)[0]
        if not len(found) or found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    solved = [0.0] * matrix.shape[1]
    for at, value in zip(kept, found.tolist(), strict=True):
        solved[at] = value
    return solved


@dataclass(frozen=True, slots=True)
class Batching:
    """The sharing of work between reports, which the simulation finds."""

    batch: float
    """Mean number of reports in a call."""
    replica_turns: float
    """Turns of all replicas' event loops, per report."""
    redis_turns: float

    @classmethod
    def of(cls, found: Found) -> Batching:
        """Return the batching of a run."""
        turns = found.turns_per_report
        return cls(found.batch, turns("replica"), turns("redis"))


@dataclass(frozen=True, slots=True)
class _Seen:
    point: Point
    batching: Batching


def _fit(seen: Sequence[_Seen], ranges: int, measured: Measured) -> Profile:
    def row(each: _Seen, turns: float) -> list[float]:
        return [1 / each.batching.batch, 1.0, each.point.publications, turns]

    points = [each.point for each in seen]
    replica = solve(
        [row(each, each.batching.replica_turns) for each in seen],
        [each.costs.replica for each in points],
    )
    redis = solve(
        [row(each, each.batching.redis_turns) for each in seen],
        [each.costs.redis for each in points],
    )
    advancing = [each for each in points if each.setting.advancing and each.costs.postgres > 0]
    postgres = solve(
        [[each.publications] for each in advancing], [e.costs.postgres for e in advancing]
    )
    return Profile(
        Cost(replica[0], replica[1]),
        Cost(redis[0], redis[1]),
        round_replica=replica[2],
        round_redis=redis[2],
        round_postgres=postgres[0],
        turn_replica=replica[3],
        turn_redis=redis[3],
        commit_s=measured.commit_s,
        hop_s=measured.hop_s,
        ranges=ranges,
    )


def fitted(measured: Measured, ranges: int) -> Profile:
    """Return the costs of reports of so many ranges."""
    points = [e for e in measured.points if e.setting.ranges == ranges and is_fitted(e)]
    profile = _FIRST
    for _ in range(_TURNS):
        seen = [
            _Seen(
                each,
                Batching.of(
                    simulate(site_of(measured, each), with_load(profile, each), seconds=_SECONDS)
                ),
            )
            for each in points
        ]
        profile = _fit(seen, ranges, measured)
    return profile


def with_load(profile: Profile, point: Point) -> Profile:
    """Return the profile with the measured cost of the load, which is not a part of the system."""
    return replace(profile, load=point.costs.load)


def with_own_costs(profile: Profile, point: Point, found: Batching) -> Profile:
    """Return the profile, scaled so that its costs are those which were measured at the point.

    `found` is the batching there. The parts keep their proportions.
    """
    costs, batch = point.costs, found.batch

    def factor(measured: float, call: Cost, round_: float, turns: float) -> float:
        modelled = call.of(batch) / batch + point.publications * round_ + turns
        return measured / modelled if modelled else 1.0

    def scaled(cost: Cost, by: float) -> Cost:
        return Cost(cost.per_call * by, cost.per_report * by)

    replica = factor(
        costs.replica,
        profile.replica,
        profile.round_replica,
        profile.turn_replica * found.replica_turns,
    )
    redis = factor(
        costs.redis, profile.redis, profile.round_redis, profile.turn_redis * found.redis_turns
    )
    return replace(
        profile,
        replica=scaled(profile.replica, replica),
        redis=scaled(profile.redis, redis),
        round_replica=profile.round_replica * replica,
        round_redis=profile.round_redis * redis,
        turn_replica=profile.turn_replica * replica,
        turn_redis=profile.turn_redis * redis,
    )
