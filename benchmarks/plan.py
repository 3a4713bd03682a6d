"""Checks of the simulation against measured points, and plans of sites that no machine here can run.

`python -m benchmarks.plan` reads the points in `benchmarks/scale.json`, simulates, and saves the results
in the same file. `python -m docs.drawings` draws them for `docs/service/scaling.md`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from benchmarks import scale
from benchmarks.figures import Figure
from benchmarks.fitting import Batching, fitted, is_fitted, site_of, with_load, with_own_costs
from benchmarks.scale import RANGES, Measured, Point
from benchmarks.simulation import (
    CALLS_OF_ROUND,
    POSTGRES_CORES,
    TURNS_OF_REPORT,
    TURNS_OF_ROUND,
    Found,
    Outage,
    Profile,
    Site,
    simulate,
)

BUSY: Final = 0.6
"""Share of its core that a planned process may use."""
PERIOD_S: Final = 10
"""Seconds from batch to batch of each job."""
PARTITIONS: Final = 100
"""Partitions of a job's source, and key ranges of its keyed stage."""
TOTALS: Final = tuple(10**power for power in range(3, 8))
REPLICAS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NODES: Final = (1, 3, 10, 30)
_CHECK_S: Final = 2.0
_TURNS: Final = 2
"""Repetitions of a check with the measured costs, which depend on the simulated batches."""
_REPORTS: Final = 20_000
"""Simulated reports of a planned site."""
LOOK_JOBS_S: Final = 40e-6
"""Seconds of a replica's core for a job in a look at all jobs (docs/benchmarks.md, many jobs)."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """A measured point, and the simulation's."""

    name: str
    is_fitted: bool
    measured: float
    simulated: float
    """Reports per second with the costs that were measured at this point."""
    predicted: float
    """Reports per second with the costs that were fitted to other points, too."""

    @property
    def error(self) -> float:
        """Relative error of the simulated rate.

        >>> Check("", True, 100, 110, 90).error, Check("", True, 100, 110, 90).prediction_error
        (0.1, -0.1)
        """
        return round(self.simulated / self.measured - 1, 4)

    @property
    def prediction_error(self) -> float:
        """Relative error of the predicted rate."""
        return round(self.predicted / self.measured - 1, 4)


def check(measured: Measured, point: Point, profile: Profile) -> Check:
    """Simulate a measured point, with its own costs and with fitted ones."""
    site, loaded = site_of(measured, point), with_load(profile, point)
    predicted = simulate(site, loaded, seconds=_CHECK_S)
    simulated = predicted
    for _ in range(_TURNS):
        own = with_own_costs(loaded, point, Batching.of(simulated))
        simulated = simulate(site, own, seconds=_CHECK_S)
    return Check(point.setting.name, is_fitted(point), point.rate, simulated.rate, predicted.rate)


@dataclass(frozen=True, slots=True)
class Load:
    """The load of jobs in micro-batches: reports per second, and commits, which advance."""

    reports: float
    commits: float
    jobs: float

    @property
    def share(self) -> float:
        """Commits of all requests."""
        return self.commits / (self.reports + self.commits)


def load_of(ranges: int, *, per_report: int) -> Load:
    """Return the load of so many ranges, of jobs with a source and a keyed stage.

    >>> load_of(2_000, per_report=1)
    Load(reports=200.0, commits=1.0, jobs=10.0)
    >>> load_of(1_000_000, per_report=1_000)
    Load(reports=100.0, commits=0.5, jobs=5.0)
    """
    jobs = ranges / (2 * PARTITIONS * per_report)
    return Load(ranges / per_report / PERIOD_S, jobs / PERIOD_S, jobs)


@dataclass(frozen=True, slots=True)
class Demand:
    """Cores that a load takes, at batches of one report, in turns of their own."""

    replica: float
    redis: float
    postgres: float
    hints: float
    """Cores of each replica, for the advances of the others."""


def demand(load: Load, profile: Profile, hint_s: float) -> Demand:
    """Return the cores that a load takes, by the utilisation law.

    Reports that share calls or turns take less.
    """
    requests = load.reports + load.commits
    turn_s = profile.turn_replica
    return Demand(
        requests * (profile.replica.of(1) + TURNS_OF_REPORT * turn_s)
        + load.commits * (profile.round_replica + TURNS_OF_ROUND * turn_s),
        requests * (profile.redis.of(1) + profile.turn_redis)
        + load.commits * (profile.round_redis + CALLS_OF_ROUND * profile.turn_redis),
        load.commits * profile.round_postgres,
        load.commits * hint_s,
    )


def costs(profile: Profile) -> Json:
    """Return the costs (s) of a report alone, of one that shares turns and calls, and of an advance."""
    alone = demand(Load(1.0, 0.0, 1.0), profile, 0.0)
    with_advance = demand(Load(0.0, 1.0, 1.0), profile, 0.0)
    return {
        "alone": [alone.replica, alone.redis],
        "shared": [profile.replica.per_report, profile.redis.per_report],
        "advance": [
            with_advance.replica - alone.replica,
            with_advance.redis - alone.redis,
            with_advance.postgres,
        ],
    }


def replicas_for(found: Demand) -> int | None:
    """Return the number of replicas; None: the hints alone take what a replica has."""
    left = BUSY - found.hints
    return max(1, math.ceil(found.replica / left)) if left > 0 else None


def nodes_for(found: Demand) -> int:
    """Return the number of Redis nodes."""
    return max(1, math.ceil(found.redis / BUSY))


def sized(ranges: int, profile: Profile, hint_s: float, *, per_report: int) -> Json:
    """Return the size of a site for so many ranges, and its simulated latency."""
    load = load_of(ranges, per_report=per_report)
    need = demand(load, profile, hint_s)
    replicas, nodes = replicas_for(need), nodes_for(need)
    requests = load.reports + load.commits
    cores = need.replica + need.redis + need.postgres + (replicas or 0) * need.hints
    result: Json = {
        "ranges": ranges,
        "per_report": per_report,
        "jobs": load.jobs,
        "reports_s": load.reports,
        "commits_s": load.commits,
        "replicas": replicas,
        "nodes": nodes,
        "postgres_cores": need.postgres,
        "look_s": load.jobs * LOOK_JOBS_S,
        "core_s_per_million": 1e6 * cores / requests if replicas is not None else None,
    }
    if replicas is not None:
        seconds = min(20.0, _REPORTS / requests)
        site = Site(replicas, nodes, max(1, round(load.jobs)), load.share, rate=requests)
        found = simulate(site, profile, seconds=seconds)
        result |= {"p50_ms": 1e3 * found.quantile(0.5), "p99_ms": 1e3 * found.quantile(0.99)}
        result["busy"] = {
            kind: found.utilisation(kind) for kind in ("replica", "redis", "postgres")
        }
    return result


def capacity(replicas: int, nodes: int, profile: Profile, hint_s: float) -> tuple[float, str]:
    """Return the most reports per second of a site, and the part that saturates first.

    Every part may use `BUSY` of its core. Each commit is a hint to all other replicas.
    """
    load = load_of(2 * PARTITIONS, per_report=1)
    one = demand(replace(load, reports=1.0, commits=load.commits / load.reports), profile, hint_s)
    limits = {
        "replicas": BUSY / (one.replica / replicas + one.hints),
        "Redis": nodes * BUSY / one.redis,
        "Postgres": BUSY * POSTGRES_CORES / one.postgres if one.postgres else math.inf,
    }
    first = min(limits, key=lambda part: limits[part])
    return max(0.0, limits[first]), first


OUTAGES: Final = (Outage("replica", 4, 8), Outage("redis", 4, 5), Outage("postgres", 4, 6))
"""A replica restarts; a node fails over, after its timeout; a standby of Postgres is promoted."""
_BIN_S: Final = 0.5
_AFTER_S: Final = 20.0


def outage(profile: Profile, away: Outage) -> Json:
    """Return the latencies of a site through a failure: median and p99 by the instant of the report."""
    one = demand(Load(1.0, 0.1, 1), profile, 0.0)
    rate = 2 * BUSY / one.replica * 0.8
    site = Site(3, 3, 30, 0.1, rate=rate, outage=away)
    found = simulate(site, profile, seconds=_AFTER_S)
    return {**asdict(away), "rate": rate, "series": series(found)}


def series(found: Found) -> Sequence[tuple[float, float, float]]:
    """Return the instant, the median and the p99 (ms) of the reports in each half second."""
    bins: dict[int, list[float]] = {}
    for at, latency in zip(found.arrivals, found.latencies, strict=True):
        bins.setdefault(int(at // _BIN_S), []).append(1e3 * latency)
    return [
        (_BIN_S * number, statistics.median(each), sorted(each)[int(0.99 * len(each))])
        for number, each in sorted(bins.items())
        if number >= 0
    ]


def results(measured: Measured) -> Json:
    """Return everything that is simulated, in its JSON form."""
    profiles = {ranges: fitted(measured, ranges) for ranges in RANGES}
    small, large = profiles[RANGES[0]], profiles[RANGES[-1]]
    hint_s = measured.hint_s
    checks = [check(measured, each, profiles[each.setting.ranges]) for each in measured.points]
    sizes = [sized(total, small, hint_s, per_report=1) for total in TOTALS]
    sizes += [
        sized(total, large, hint_s, per_report=RANGES[-1])
        for total in TOTALS
        if total >= 2 * PARTITIONS * RANGES[-1]
    ]
    capacities = [
        {"nodes": nodes, "replicas": replicas, "reports_s": most, "first": first}
        for nodes in NODES
        for replicas in REPLICAS
        for most, first in [capacity(replicas, nodes, small, hint_s)]
    ]
    return {
        "profiles": {str(ranges): asdict(profile) for ranges, profile in profiles.items()},
        "costs": {str(ranges): costs(profile) for ranges, profile in profiles.items()},
        "checks": [asdict(each) for each in checks],
        "sizes": sizes,
        "capacities": capacities,
        "outages": [outage(small, each) for each in OUTAGES],
    }


def checks_of(saved: Mapping[str, Any]) -> list[Check]:
    """Decode the checks."""
    return [Check(**each) for each in saved["checks"]]


def figures() -> Iterator[Figure]:
    """Simulate, save the results, and yield the errors and the sizes."""
    measured = scale.load()
    found = results(measured)
    saved = json.loads(scale.SAVED.read_text()) | {"simulated": found}
    scale.SAVED.write_text(json.dumps(saved, indent=1) + "\n")
    checks = checks_of(found)
    for each in checks:
        detail = (
            f"{each.simulated:,.0f}/s to {each.measured:,.0f}/s measured; with fitted costs"
            f" {100 * each.prediction_error:+.0f} %{' (fitted here)' if each.is_fitted else ''}"
        )
        yield Figure(f"error at {each.name}", 100 * each.error, "%", None, False, detail)
    errors = sorted(abs(each.error) for each in checks)
    within = sum(each <= 0.15 for each in errors)
    detail = f"median {100 * statistics.median(errors):.0f} %, largest {100 * errors[-1]:.0f} %"
    yield Figure("points within 15 %", 100 * within / len(errors), "%", 100, True, detail)
    predicted = sorted(abs(each.prediction_error) for each in checks if not each.is_fitted)
    within = sum(each <= 0.15 for each in predicted)
    detail = (
        f"median {100 * statistics.median(predicted):.0f} %, largest {100 * predicted[-1]:.0f} %"
    )
    share = 100 * within / len(predicted)
    yield Figure("predicted points within 15 %", share, "%", None, True, detail)
    for size in found["sizes"]:
        name = f"{size['ranges']:,} ranges, {size['per_report']:,} in a report"
        detail = (
            f"{size['replicas']} replicas, {size['nodes']} Redis nodes, {size['reports_s']:,.0f} reports"
            f" and {size['commits_s']:,.1f} commits a second; p99 {size.get('p99_ms', math.nan):.1f} ms"
        )
        cost = size["core_s_per_million"]
        yield Figure(name, cost, "core seconds per million reports", None, False, detail)


if __name__ == "__main__":
    for figure in figures():
        value = "" if figure.value is None else f"{figure.value:.1f} {figure.unit}"
        print(f"{figure.name}: {value} ({figure.detail})")
