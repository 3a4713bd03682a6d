"""The demonstration's options and its outcome."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


class CannotRunError(Exception):
    """The demonstration cannot run here. The message is one line with the remedy."""


class NotInstalledError(CannotRunError):
    """A package is missing. The message is one line with the command that installs it."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of a run."""

    days: int
    bound_ms: int
    slice_days: int
    port: int | None
    keep: bool
    quiet: bool
    kafka: bool = False
    """True if the logs and the output are topics of a broker."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run."""

    flights: int
    days: int
    seconds: float
    late_rows: int
    """Rows that came after their source's watermark had passed them."""
    dropped_rows: int
    """Those of them that Spark dropped because their windows were closed."""
    equal_sessions: int
    sessions: int
    equal_weeks: int
    weeks: int
    equal_departures: int
    departures: int
    """Departures from New York's airports, joined with the weather of the hour."""
    service_url: str | None = None
    """URL of the service that was kept running, if any; kill `service_pid` to stop it."""
    service_pid: int | None = None
    page_url: str | None = None
    """URL of the job's page, likewise."""
    folder: str | None = None

    @property
    def all_equal(self) -> bool:
        """True if every window and every joined row equals the batch job's."""
        equal = (self.equal_sessions, self.equal_weeks, self.equal_departures)
        return equal == (self.sessions, self.weeks, self.departures)

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as JSON."""
        return asdict(self) | {"all_equal": self.all_equal}
