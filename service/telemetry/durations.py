"""Durations of requests, as a histogram.

A report for one range takes less than a tenth of a millisecond, so its duration is counted in a plain
list: a histogram of `prometheus_client` takes two locks for each observation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import INF

BOUNDS_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, INF
)  # fmt: skip
_LABELS: Final = (*(str(bound) for bound in BOUNDS_S[:-1]), "+Inf")

Route = tuple[str, str]
"""A method, and the path of a route."""


class RouteDurations:
    """The durations of the requests to a route.

    >>> durations = RouteDurations()
    >>> for seconds in (0.0005, 0.0006, 99):
    ...     durations.add(seconds)
    >>> durations.cumulative()[:2], durations.cumulative()[-2:], durations.sum_s
    ([1, 2], [2, 3], 99.0011)
    """

    __slots__ = ("_counts", "sum_s")

    def __init__(self) -> None:
        self._counts = [0] * len(BOUNDS_S)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a request."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[int]:
        """Return the number of requests up to each bound."""
        return list(accumulate(self._counts))


class Durations:
    """The durations of all requests."""

    def __init__(self) -> None:
        self._routes: dict[Route, RouteDurations] = {}

    def of(self, method: str, path: str) -> RouteDurations:
        """Return the durations of a route, to which requests may be added."""
        found = self._routes.get((method, path))
        if found is None:
            found = self._routes[method, path] = RouteDurations()
        return found

    def copy(self) -> DurationMetrics:
        """Return a collector of the present durations, for another thread."""
        return DurationMetrics(
            {route: (each.cumulative(), each.sum_s) for route, each in self._routes.items()}
        )


class DurationMetrics:
    """A collector of durations that no longer change."""

    def __init__(self, routes: Mapping[Route, tuple[list[int], float]]) -> None:
        self._routes = routes

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client`'s collectors."""
        family = HistogramMetricFamily(
            "tidegauge_request_duration_seconds",
            "Time from a request's header to the end of its response, by route; without long polls and"
            " streams of events",
            labels=("method", "route"),
        )
        for (method, path), (counts, sum_s) in self._routes.items():
            family.add_metric([method, path], list(zip(_LABELS, counts, strict=True)), sum_s)
        yield family
