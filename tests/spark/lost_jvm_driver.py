"""A driver in a process of its own, whose JVM is killed while a query runs."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from spark_agent.demo.session import spark_session
from spark_agent.driver.job import host
from tests.spark.flow import DEADLINE_S, RANGES, SOURCE, Flow, steady, until

SUPERVISOR = f"tidegauge-{host()}-"


def run(url: str, folder: Path, trigger: Mapping[str, object]) -> None:
    with spark_session(folder / "own", RANGES) as spark:
        flow = Flow(spark, url, folder)
        flow.write(steady(range(30)))
        pipeline = flow.pipeline()
        flow.start(pipeline, flow.counts(pipeline), trigger=trigger)
        until(lambda: flow.output_of(SOURCE) > 0, "its watermark advances")
        cast("Any", spark.sparkContext)._gateway.proc.kill()
        deadline = time.monotonic() + DEADLINE_S / 2
        while any(each.name.startswith(SUPERVISOR) for each in threading.enumerate()):
            if time.monotonic() > deadline:
                os._exit(1)
            time.sleep(0.05)
        pipeline.stop()
        os._exit(0)  # Spark's own end would wait for its JVM


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    run(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
