"""Costs of the simulation's parts, fitted to measured points.

A report's processor time depends on the reports with which it shares a call, and only the simulation has
these numbers. So fits and simulations alternate until both agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchmarks.scale import CONNECTIONS, JOBS, NODES, REPLICAS, Measured, Point
from benchmarks.simulation import Cost, Host, Profile, Site, simulate

_TURNS: Final = 4
_SECONDS: Final = 0.5


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
class _Seen:
    """A point, and the mean number of reports in its calls."""

    point: Point
    batch: float


def _fit(seen: Sequence[_Seen], ranges: int, measured: Measured) -> Profile:
    def row(each: _Seen, *, servers: int) -> list[float]:
        point = each.point
        return [1 / each.batch, 1.0, point.publications, servers / point.rate]

    points = [each.point for each in seen]
    replica = solve(
        [row(each, servers=each.point.setting.replicas) for each in seen],
        [each.costs.replica for each in points],
    )
    redis = solve(
        [row(each, servers=each.point.setting.nodes) for each in seen],
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
        beside_replica=replica[3],
        beside_redis=redis[3],
        commit_s=measured.commit_s,
        hop_s=measured.hop_s,
        ranges=ranges,
    )


def fitted(measured: Measured, ranges: int) -> Profile:
    """Return the costs of reports of so many ranges."""
    points = [e for e in measured.points if e.setting.ranges == ranges and is_fitted(e)]
    batches = [1.0 + (each.setting.connections - 1) / 2 for each in points]
    profile = Profile(Cost(0, 0), Cost(0, 0))
    for _ in range(_TURNS):
        seen = [_Seen(*each) for each in zip(points, batches, strict=True)]
        profile = _fit(seen, ranges, measured)
        batches = [
            simulate(site_of(measured, each), with_load(profile, each), seconds=_SECONDS).batch
            for each in points
        ]
    return profile


def with_load(profile: Profile, point: Point) -> Profile:
    """Return the profile with the measured cost of the load, which is not a part of the system."""
    return replace(profile, load=point.costs.load)


def with_own_costs(profile: Profile, point: Point, batch: float) -> Profile:
    """Return the profile, scaled so that its costs are those which were measured at the point.

    `batch` is the mean number of reports in a call there. The parts keep their proportions.
    """
    setting, costs = point.setting, point.costs

    def factor(measured: float, call: Cost, round_: float, beside: float, servers: int) -> float:
        modelled = call.of(batch) / batch + point.publications * round_
        modelled += beside * servers / point.rate
        return measured / modelled if modelled else 1.0

    def scaled(cost: Cost, by: float) -> Cost:
        return Cost(cost.per_call * by, cost.per_report * by)

    replica = factor(
        costs.replica,
        profile.replica,
        profile.round_replica,
        profile.beside_replica,
        setting.replicas,
    )
    redis = factor(
        costs.redis, profile.redis, profile.round_redis, profile.beside_redis, setting.nodes
    )
    return replace(
        profile,
        replica=scaled(profile.replica, replica),
        redis=scaled(profile.redis, redis),
        round_replica=profile.round_replica * replica,
        round_redis=profile.round_redis * redis,
        beside_replica=profile.beside_replica * replica,
        beside_redis=profile.beside_redis * redis,
    )
