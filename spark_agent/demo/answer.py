# pyright: basic, reportAttributeAccessIssue=false
"""The expected answer of the streams, computed by a plain batch job without Spark."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import pandas as pd

from spark_agent.demo.flights import NEW_YORK, Flights

GAP: Final = timedelta(hours=48)
"""An aircraft's session ends after this time without a departure from New York."""
WEEK: Final = timedelta(days=7)
FIRST_MONDAY: Final = datetime(1970, 1, 5)  # noqa: DTZ001  (all of pandas' times here are UTC, without a time zone)

SessionKey = tuple[str, str, int]
"""Source, aircraft, start (ms)."""
Departure = tuple[str, int, float]
"""Aircraft, departure time (ms), and visibility (miles)."""


@dataclass(frozen=True)
class Answer:
    """Sessions by key: their end (ms) and flights. Weeks by start (ms): sessions and mean minutes.

    Departures from New York's airports with the weather of the hour, and the number of each.
    """

    sessions: dict[SessionKey, tuple[int, int]] = field(default_factory=dict)
    weeks: dict[int, tuple[int, float]] = field(default_factory=dict)
    departures: Counter[Departure] = field(default_factory=Counter)


@dataclass(frozen=True)
class Comparison:
    """Number of windows and joined rows that are equal in two answers, and number in both together."""

    equal_sessions: int
    sessions: int
    equal_weeks: int
    weeks: int
    equal_departures: int
    departures: int

    @property
    def all_equal(self) -> bool:
        """True if all of them are equal."""
        equal = (self.equal_sessions, self.equal_weeks, self.equal_departures)
        return equal == (self.sessions, self.weeks, self.departures)


def compare(one: Answer, other: Answer) -> Comparison:
    """Compare two answers; a window that only one of them has counts as unequal."""
    return Comparison(
        equal_sessions=_equal(one.sessions, other.sessions),
        sessions=len(one.sessions.keys() | other.sessions.keys()),
        equal_weeks=_equal(one.weeks, other.weeks),
        weeks=len(one.weeks.keys() | other.weeks.keys()),
        equal_departures=(one.departures & other.departures).total(),
        departures=(one.departures | other.departures).total(),
    )


def _equal(one: dict, other: dict) -> int:
    return sum(other.get(key) == value for key, value in one.items())


def batch_answer(flights: Flights) -> Answer:
    """Compute the sessions of each aircraft at each source, and the weekly average over all."""
    table = flights.table.sort_values(["source", "tailnum", "departed_at"])
    aircraft = table.groupby(["source", "tailnum"])["departed_at"]
    # A departure exactly at the end of a session still belongs to it.
    number = (aircraft.diff() > GAP).groupby([table["source"], table["tailnum"]]).cumsum()
    sessions = (
        table.groupby([table["source"], table["tailnum"], number.rename("number")])["departed_at"]
        .agg(["min", "max", "count"])
        .reset_index()
    )
    ends = sessions["max"] + GAP
    minutes = (ends - sessions["min"]) // timedelta(minutes=1)
    naive = ends.dt.tz_localize(None)
    weeks = naive - (naive - FIRST_MONDAY) % WEEK
    averages = minutes.groupby(weeks).agg(["count", "sum"])
    return Answer(
        {
            (source, tailnum, _ms(start)): (_ms(end), int(count))
            for source, tailnum, start, end, count in zip(
                sessions["source"],
                sessions["tailnum"],
                sessions["min"],
                ends,
                sessions["count"],
                strict=True,
            )
        },
        {
            _ms(week): (int(count), int(total) / int(count))
            for week, count, total in averages.itertuples()
        },
        _departures(flights),
    )


def _departures(flights: Flights) -> Counter[Departure]:
    """Join each departure with the observation of its airport's station at the full hour."""
    table = flights.table[flights.table["source"] == NEW_YORK]
    hours = table.assign(hour=table["departed_at"].dt.floor("h"))
    observed = flights.weather.rename(columns={"station": "origin", "observed_at": "hour"})
    joined = hours.merge(observed, on=["origin", "hour"])
    return Counter(
        (tailnum, _ms(departed), visibility)
        for tailnum, departed, visibility in zip(
            joined["tailnum"], joined["departed_at"], joined["visibility"], strict=True
        )
    )


def _ms(instant: pd.Timestamp) -> int:
    return instant.value // 1_000_000
