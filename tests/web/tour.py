"""A shop's job of twelve stages, one in each condition: `python -m tests.web.tour` runs it until Ctrl-C.

Clicks become sessions, orders and payments become paid orders, and two joins read the results. The
conditions last for as long as the workers of the moving stages report.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.binaries import wait_until
from tests.support.server import Service
from tests.web.flights import Feed

JOB: Final = "shop"
SECOND: Final = 1_000
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE
STEP_S: Final = 1.0
STAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "clicks": {"shards": ["web-0", "web-1", "ios", "android"]},
    "catalogue": {"shards": ["books", "music"]},
    "orders": {"shards": ["eu", "us", "asia"]},
    "payments": {"shards": ["cards", "invoices", "cheques"]},
    "coupons": {"shards": ["print", "mail"]},
    "prices": {"shards": ["list", "discounts"]},
    "refunds": {"shards": ["cards", "invoices"]},
    "shipments": {"shards": ["berlin", "lagos", "lima"]},
    "sessions": {"inputs": ["clicks", "catalogue"], "ranges": 8},
    "paid-orders": {"inputs": ["orders", "payments", "coupons", "prices"], "ranges": 4},
    "conversions": {"inputs": ["sessions", "paid-orders"], "ranges": 8},
    "revenue": {"inputs": ["paid-orders", "refunds", "shipments"], "ranges": 4},
}
THROTTLE: Final = {"groups": [{"stages": ["clicks", "orders"], "max_drift_ms": MINUTE}]}
HEALTH: Final[Mapping[str, str]] = {
    "clicks": "ok",
    "catalogue": "final",
    "orders": "ok",
    "payments": "ok",
    "coupons": "idle",
    "prices": "ended",
    "refunds": "no_worker",
    "shipments": "failed",
    "sessions": "ok",
    "paid-orders": "ok",
    "conversions": "silent",
    "revenue": "waiting",
}
"""The health of each stage, as `docs/api/health.md` defines it."""
MARKS: Final[Mapping[str, str]] = {"orders": "throttled 1", "payments": "retired 1"}
"""A shard of `orders` is throttled, and one of `payments` is retired: neither is a health."""


class Tour(Feed):
    """The job, with a worker for each stage that moves."""

    def __init__(self, url: str, job: str = JOB, *, key: str | None = None) -> None:
        super().__init__(url, job, key=key)
        self.define(STAGES, throttle=THROTTLE)
        self._still()
        moving = ("clicks", "orders", "coupons", "sessions", "paid-orders", "revenue")
        self._leases = {stage: self.claim(stage, holder=f"executor-{stage}") for stage in moving}
        self._leases["payments"] = self.claim(
            "payments", ["cards", "invoices"], holder="executor-payments"
        )
        *reporting, _ = self._names("conversions")
        self._leases["conversions"] = self.claim("conversions", reporting, holder="executor-7")
        self.advance()
        wait_until(self._is_as_declared, "each stage is in its condition")

    def advance(self) -> None:
        """Report the next rows of each source that moves, then the stages below."""
        now = self.now()
        clicks = {
            name: now - (150 + 5 * k) * SECOND for k, name in enumerate(STAGES["clicks"]["shards"])
        }
        self._read("clicks", clicks)
        self._read("orders", {"eu": now - 140 * SECOND, "us": now - 130 * SECOND, "asia": now})
        self._read("payments", {"cards": now - 160 * SECOND, "invoices": now - 200 * SECOND})
        quiet = self._leases["coupons"]
        # Repeated, since idleness ends with the lease.
        quiet.report({name: {"idle": True} for name in quiet.granted})
        self._leases["sessions"].observe(hold=now - 30 * MINUTE)
        self._leases["paid-orders"].observe()
        for stage in ("conversions", "revenue"):
            if self.watermark(stage)["input_watermark"] is not None:
                self._leases[stage].observe()

    def healths(self) -> Mapping[str, str]:
        """Return the health of each stage."""
        found = self.send("GET", "/watermarks")["watermarks"]
        return {name: each["health"] for name, each in found.items()}

    def _read(self, stage: str, watermarks: Mapping[str, int]) -> None:
        rows = {name: {"watermark": at, "records": 40} for name, at in watermarks.items()}
        self._leases[stage].report(rows)

    def _still(self) -> None:
        """Bring each stage that does not move into its condition."""
        now = self.now()
        books = self.claim("catalogue", holder="loader")
        books.report({name: {"final": True} for name in books.granted})
        self.claim("coupons", holder="executor-coupons").promise(now - HOUR)
        self._run("prices", now + 8 * HOUR, {"outcome": "finished"})
        self._run("shipments", now - 20 * MINUTE, {"outcome": "failed", "because": "out of memory"})
        self.claim("refunds", holder="executor-refunds", ttl_ms=SECOND).promise(now - 40 * MINUTE)
        cheques = self.claim("payments", ["cheques"], holder="executor-cheques")
        cheques.promise(now - 3 * HOUR)
        cheques.release()
        self.send(
            "POST", "/stages/payments/ranges/cheques/retire", {"because": "cheques have ended"}
        )

    def _run(self, stage: str, watermark: int, end: Mapping[str, str]) -> None:
        run = self.send("POST", "/runs", {"stages": [stage], "holder": f"driver-{stage}"})["run"]
        self.claim(stage, holder=f"executor-{stage}", run=run).promise(watermark)
        self.send("POST", f"/runs/{run}/end", end)

    def _names(self, stage: str) -> list[str]:
        found = self.send("GET", f"/stages/{stage}/ranges")["ranges"]
        return sorted(each["range"] for each in found)

    def now(self) -> int:
        """Return the service's clock."""
        return self.client.get("/v1/whoami").json()["now"]

    def _is_as_declared(self) -> bool:
        return self.healths() == HEALTH


def main() -> None:
    """Start a service with the embedded stores, and report until Ctrl-C."""
    argparse.ArgumentParser(prog="python -m tests.web.tour", description=main.__doc__).parse_args()
    # A supervisor ends the program in the same way, and the service with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        tempfile.TemporaryDirectory() as folder,
        Service(Path(folder)) as service,
        Tour(service.url) as tour,
        contextlib.suppress(KeyboardInterrupt),
    ):
        sys.stdout.write(f"page: {service.url}/#/jobs/{JOB}\n")
        sys.stdout.write(f"commands: tidegauge --url {service.url} status {JOB}\n")
        sys.stdout.flush()
        while True:
            time.sleep(STEP_S)
            # A stage that somebody has taken over, or deleted, stays as it is.
            with contextlib.suppress(AssertionError):
                tour.advance()


if __name__ == "__main__":
    main()
