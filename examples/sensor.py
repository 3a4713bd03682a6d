"""Poll a watermark as the sensor of a scheduler does, until the input of a task is complete.

    python examples/sensor.py http://127.0.0.1:8000 water hourly 2026-01-01T02:00:00Z

`Arrival` has the two members that a sensor needs: `is_complete()` and `because`. A service that is
away makes `is_complete()` false. A wrong job or key raises an error, since another poll does not
help. Sensors for Airflow and Dagster: `docs/schedulers.md`.
"""

from __future__ import annotations

import sys
import time

from spark_agent import Arrival, Client, Wrong

POLL_S = 60.0


def main(url: str, job: str, stage: str, until: str, *, poll_s: float) -> None:
    """Poll until the watermark is there."""
    arrival = Arrival(Client(url), job, stage, until)
    try:
        while not arrival.is_complete():
            print("incomplete:", arrival.because)
            time.sleep(poll_s)
    except Wrong as error:
        raise SystemExit(str(error)) from error
    print(f"complete: {stage} has reached {until}")


if __name__ == "__main__":
    poll_s = float(sys.argv[5]) if len(sys.argv) > 5 else POLL_S
    main(*sys.argv[1:5], poll_s=poll_s)
