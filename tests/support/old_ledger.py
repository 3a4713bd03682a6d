"""The ledger that an older release has written, with the answers that it gave from it.

Made once for each release, from a checkout of its code:
`python -m tests.support.old_ledger CHECKOUT VERSION [PACKAGES …]`.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx

from tests.support.binaries import free_port, wait_until
from tests.support.server import ROOT

FOLDER: Final = ROOT / "tests" / "data" / "ledgers"
HOUR: Final = 3_600_000
STAGES: Final = {
    "taps": {"shards": ["tap-0", "tap-1"]},
    "hourly": {"inputs": ["taps"], "ranges": 2},
    "all": {"inputs": ["hourly"], "passthrough": True},
}
PATHS: Final = (
    *(f"/v1/jobs/water/stages/{stage}/watermark" for stage in STAGES),
    *(f"/v1/jobs/water/stages/{stage}/commits" for stage in ("taps", "hourly")),
    "/v1/jobs/again/stages/taps/watermark",
)
"""Reads whose answers an upgrade leaves as they are."""


def walk(client: httpx.Client) -> None:
    """Drive a job through two epochs of a run, and another one through a reset."""
    put(client, "PUT", "/v1/jobs/water", {"stages": STAGES})
    opened = {"stages": ["taps", "hourly"], "holder": "driver"}
    run = put(client, "POST", "/v1/jobs/water/runs", opened)["run"]
    for epoch, hour in ((0, 3), (1, 5)):
        taps = {"tap-0": promise(hour), "tap-1": promise(hour + 1)}
        report(client, "water/stages/taps", taps, run=run, epoch=epoch)
        put(
            client,
            "POST",
            "/v1/jobs/water/commits",
            {"run": run, "epoch": epoch, "stages": {"taps": {}}},
        )
        tiles = {
            "00000000-80000000": {"holds": {"state": (hour - 1) * HOUR}},
            "80000000-100000000": {},
        }
        above = {"input_watermark": hour * HOUR}
        report(client, "water/stages/hourly", tiles, above, run=run, epoch=epoch)
        put(
            client,
            "POST",
            "/v1/jobs/water/commits",
            {"run": run, "epoch": epoch, "stages": {"hourly": above}},
        )
    put(client, "PUT", "/v1/jobs/again", {"stages": {"taps": {"shards": ["tap-0"]}}})
    report(client, "again/stages/taps", {"tap-0": promise(7)})
    put(client, "POST", "/v1/jobs/again/reset", None)
    report(client, "again/stages/taps", {"tap-0": promise(2)})


def promise(hour: int) -> Mapping[str, Any]:
    """Return a shard's promise."""
    return {"watermark": hour * HOUR}


def report(
    client: httpx.Client,
    stage: str,
    ranges: Mapping[str, Any],
    others: Mapping[str, Any] = MappingProxyType({}),
    *,
    run: int | None = None,
    epoch: int | None = None,
) -> None:
    """Claim ranges, and report for them."""
    claim = {"holder": "worker", "ranges": list(ranges), "ttl_ms": 600_000}
    numbers = {} if run is None else {"run": run, "epoch": epoch, "attempt": 0}
    lease = put(client, "POST", f"/v1/jobs/{stage}/leases", claim | numbers)
    ending = {} if epoch is None else {"epoch": epoch}
    body = {"token": lease["token"], "ranges": ranges} | ending | dict(others)
    put(client, "POST", f"/v1/jobs/{stage}/reports", body)


def put(client: httpx.Client, method: str, path: str, body: object) -> Any:
    """Send a request; return the answer."""
    response = client.request(method, path, json=body)
    assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
    return response.json() if response.content else None


def make(checkout: Path, version: str, others: Sequence[str] = ()) -> None:
    """Write the ledger, as SQL, and the answers. `others`: folders of further packages."""
    with tempfile.TemporaryDirectory() as folder:
        file, port = Path(folder) / "ledger.db", free_port()
        command = [sys.executable, "-m", "service.cli", "serve", "--port", str(port)]
        service = subprocess.Popen(
            [*command, "--ledger-url", f"sqlite+aiosqlite:///{file}"],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(checkout), *others))},
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                wait_until(lambda: _is_ready(client), "the service is ready")
                walk(client)
                answers = {path: client.get(path).raise_for_status().json() for path in PATHS}
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait()
        with sqlite3.connect(file) as connection:
            dump = "\n".join(connection.iterdump())
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{version}.sql").write_text(dump + "\n")
    (FOLDER / f"{version}.json").write_text(json.dumps(answers, indent=1) + "\n")


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    make(Path(sys.argv[1]).absolute(), sys.argv[2], sys.argv[3:])
