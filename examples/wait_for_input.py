"""Sum the litres of all taps up to a moment, once everything before the moment has arrived.

    python examples/wait_for_input.py http://127.0.0.1:8000 /tmp/water 2026-01-01T02:00:00Z

The program reads the output of `windows.py`, without Spark. In a shell, the same is
`tidegauge wait water hourly --until 2026-01-01T02:00:00Z && …`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spark_agent import Client, NotInTime


def main(url: str, folder: Path, until: str) -> None:
    """Wait for the watermark, then read the windows before the moment."""
    waited = Client(url).wait_until("water", "hourly", until, timeout="10 min")
    try:
        waited.require()
    except NotInTime as error:
        raise SystemExit(f"{error}: see `tidegauge explain water hourly`") from error
    windows = [
        json.loads(line)
        for part in (folder / "hourly").glob("part-*.json")
        for line in part.read_text().splitlines()
    ]
    before = [each for each in windows if each["window"]["end"] <= until.replace("Z", ".000Z")]
    print("windows", len(before), "litres", sum(each["litres"] for each in before))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
