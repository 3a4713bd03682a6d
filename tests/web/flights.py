"""The demonstration's job, fed over HTTP: the same stages, and the same ways to stand still.

Two logs of flights with a shard for each carrier, sessions for each, and the weekly average over both;
departures joined with the weather. One of the carriers is behind, and holds everything back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Self

import httpx

START: Final = 1_357_016_400_000
"""2013-01-01T05:00:00Z, when the first of them left."""
HOUR: Final = 3_600_000
DAY: Final = 24 * HOUR
CARRIERS: Final = {"newark": ("AA", "B6", "DL", "UA", "US"), "new-york": ("AA", "B6", "DL", "UA")}
STAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "newark": {"shards": list(CARRIERS["newark"])},
    "new-york": {"shards": list(CARRIERS["new-york"])},
    "newark-rotations": {"inputs": ["newark"], "ranges": 4},
    "new-york-rotations": {"inputs": ["new-york"], "ranges": 4},
    "weekly-average": {"inputs": ["newark-rotations", "new-york-rotations"], "ranges": 4},
    "weather": {"shards": ["JFK", "LGA"]},
    "departures": {"shards": list(CARRIERS["new-york"])},
    "departures-weather": {"inputs": ["departures", "weather"], "ranges": 4},
}
TTL_MS: Final = 600_000


class Feed:
    """One job of a service, as its workers see it."""

    def __init__(self, url: str, job: str, *, key: str | None = None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.client = httpx.Client(base_url=url, timeout=60, headers=headers)
        self.root = f"/v1/jobs/{job}"
        self.job = job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()

    def send(self, method: str, path: str, body: object = None) -> Any:
        """Send a request that must succeed."""
        response = self.client.request(method, self.root + path, json=body)
        assert response.is_success, f"{path}: {response.status_code}: {response.text[:2_000]}"
        return response.json() if response.content else None

    def define(self, stages: Mapping[str, Any], **others: object) -> None:
        self.send("PUT", "", {"stages": stages, **others})

    def claim(
        self,
        stage: str,
        ranges: Sequence[str] | str = "all",
        *,
        holder: str,
        ttl_ms: int = TTL_MS,
        **others: object,
    ) -> Lease:
        body = {"ranges": ranges, "holder": holder, "ttl_ms": ttl_ms, **others}
        granted = self.send("POST", f"/stages/{stage}/leases", body)
        return Lease(self, stage, granted["token"], granted["granted"])

    def watermark(self, stage: str) -> Any:
        return self.send("GET", f"/stages/{stage}/watermark")


@dataclass
class Lease:
    """Ranges that a worker may report for."""

    feed: Feed
    stage: str
    token: str
    granted: list[str] = field(repr=False)

    def report(self, ranges: Mapping[str, Any], **others: object) -> Any:
        body = {"token": self.token, "ranges": ranges, **others}
        return self.feed.send("POST", f"/stages/{self.stage}/reports", body)

    def columns(self, columns: Mapping[str, Any], **others: object) -> Any:
        body = {"token": self.token, "columns": columns, **others}
        return self.feed.send("POST", f"/stages/{self.stage}/reports", body)

    def promise(self, watermark: int) -> None:
        """Report the same for all."""
        self.report(dict.fromkeys(self.granted, watermark))

    def observe(self, hold: int | None = None) -> None:
        """Report for key ranges: all of the published input, but for a hold on the first."""
        observed = self.feed.watermark(self.stage)["input_watermark"]
        ranges: dict[str, Any] = {name: {} for name in self.granted}
        if hold is not None:
            ranges[self.granted[0]] = {"holds": {"state": hold}}
        self.report(ranges, input_watermark=observed)

    def release(self) -> None:
        self.feed.send("POST", "/leases/release", {"tokens": [self.token]})


class Flights(Feed):
    """The job, with a worker for each stage."""

    def __init__(self, url: str, job: str = "nyc-flights", *, key: str | None = None) -> None:
        super().__init__(url, job, key=key)
        self.define(STAGES)
        self.days = 0
        self.leases = {
            stage: self.claim(stage, holder=f"executor-{number}")
            for number, stage in enumerate(STAGES)
        }

    def advance(self) -> str:
        """Read another day of all logs; return where that leaves Newark, as the page writes it.

        United's log at Newark is half a day behind, as it has most flights.
        """
        self.days += 1
        at = START + self.days * DAY
        behind = DAY // 2
        for stage in ("newark", "new-york", "weather", "departures"):
            late = {"UA": at - behind} if stage == "newark" else {}
            lease = self.leases[stage]
            lease.report(
                {
                    name: {
                        "watermark": late.get(name, at),
                        "records": 40,
                        "late": int(name == "B6"),
                    }
                    for name in lease.granted
                }
            )
        for stage in ("newark-rotations", "new-york-rotations", "weekly-average"):
            self.leases[stage].observe()
        self.leases["departures-weather"].observe(hold=at - behind // 2)
        return shown(at - behind)


def shown(at_ms: int) -> str:
    """An instant as the page writes it."""
    return f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S}Z"
