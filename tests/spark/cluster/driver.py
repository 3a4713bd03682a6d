# pyright: basic, reportCallIssue=false, reportOptionalCall=false, reportOptionalMemberAccess=false
"""A driver in a process of its own, with executors in processes of theirs: one query to its end.

Run by `tests.spark.cluster.cluster`, which may kill it, or its executors, at any time.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.functions import pandas_udf
from pyspark.sql.types import LongType

from spark_agent import BoundedOutOfOrderness, Pipeline, Strategy
from tests.spark.cluster.data import APART_S, BOUND, CLICKS, GAP_S, VIEWS, WINDOW_S, Shape
from tests.spark.cluster.straggler import KEYED, Straggler, StragglingStrategy
from tests.support.local_files import FILE_MANAGER_SETTING, ONE_STEP

RANGES: Final = 2
STAGE: Final = "keyed"
JOB: Final = "cluster"
OTHER_HOST: Final = "127.0.0.2"
"""Spark runs a task's copy on another host only; to it, another address of this machine is one."""


@dataclass(frozen=True)
class Order:
    """Order to a driver."""

    shape: Shape
    url: str
    folder: str
    speculation: bool = False
    """True if Spark runs copies of slow tasks; some tasks are then slow."""
    jars: str = ""
    """Jars that Spark needs, as the setting `spark.jars` lists them."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Order:
        members = json.loads(text)
        return cls(Shape(members.pop("shape")), **members)


def session(order: Order) -> SparkSession:
    """Two executors, each with a core; with speculation, on two hosts."""
    workers = 1 if order.speculation else 2
    builder = (
        SparkSession.builder.master(f"local-cluster[{workers},1,1024]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.executor.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.executor.memory", "1g")
        .config("spark.executor.cores", 1)
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", RANGES)
        .config("spark.sql.streaming.pollingDelay", "20ms")
        # By default Spark puts a state file in the place of another by two steps on a local disk: it
        # deletes the one, then renames the other. An executor whose driver is gone ends at any moment,
        # also between the two, and the state of its partition is lost. With these it is one step.
        .config(FILE_MANAGER_SETTING, ONE_STEP)
        .config("spark.hadoop.fs.file.impl", "org.apache.hadoop.fs.RawLocalFileSystem")
        .config("spark.locality.wait", "50ms")
        .config("spark.jars", order.jars)
        .config("spark.local.dir", order.folder)
        .config("spark.sql.warehouse.dir", f"{order.folder}/warehouse")
        # Executors die by intent here; Spark would give up at the fourth time.
        .config("spark.task.maxFailures", 1_000)
        .config("spark.stage.maxConsecutiveAttempts", 1_000)
        .config("spark.deploy.maxExecutorRetries", -1)
    )
    if order.speculation:
        builder = (
            builder.config("spark.speculation", "true")
            .config("spark.speculation.interval", "50ms")
            .config("spark.speculation.quantile", 0.1)
            .config("spark.speculation.multiplier", 1.1)
            .config("spark.speculation.minTaskRuntime", "300ms")
            .config("spark.speculation.task.duration.threshold", "2s")
        )
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    if order.speculation:
        _add_host(spark)
    return spark


def _add_host(spark: SparkSession) -> None:
    """Let another worker, on another address, join the cluster that runs in the driver's JVM."""
    jvm: Any = spark._jvm
    context: Any = spark.sparkContext._jsc.sc()
    backend = context.schedulerBackend()
    masters = backend.getClass().getDeclaredField("masters")
    masters.setAccessible(True)
    none = jvm.scala.Option.empty()
    number, where = jvm.scala.Option.apply(2), masters.get(backend)
    jvm.org.apache.spark.deploy.worker.Worker.startRpcEnvAndEndpoint(
        OTHER_HOST, 0, 0, 1, 1024, where, None, number, context.conf(), none
    )


def readings(spark: SparkSession, folder: Path) -> DataFrame:
    """One file a batch."""
    return (
        spark.readStream.schema("number long, shard string, key string, at timestamp")
        .option("maxFilesPerTrigger", 1)
        .json(str(folder))
    )


def spec(shape: Shape) -> dict[str, dict[str, Any]]:
    sources: dict[str, dict[str, Any]] = {
        name: {"shards": ["left", "right"]} for name in shape.inputs
    }
    return {**sources, STAGE: {"inputs": list(shape.inputs), "ranges": RANGES}}


def shaped(shape: Shape, frames: dict[str, DataFrame], last: Callable[[str], Column]) -> DataFrame:
    """The operators; the last column passes through a function."""
    views = frames[VIEWS]
    if shape is Shape.JOIN:
        clicks = frames[CLICKS].select(
            F.col("key").alias("other"),
            F.col("at").alias("clicked_at"),
            F.col("number").alias("click"),
        )
        within = F.expr(
            f"key = other AND clicked_at BETWEEN at AND at + INTERVAL {APART_S} SECONDS"
        )
        return views.join(clicks, within).select(
            F.col("number").alias("view"), "at", last("click").alias("click")
        )
    window = (
        F.window("at", f"{WINDOW_S} seconds")
        if shape is Shape.TUMBLING
        else F.session_window("at", f"{GAP_S} seconds")
    )
    counted = views.groupBy(window.alias("during"), "key").agg(F.count("*").alias("rows"))
    return counted.select("key", F.col("during.end").alias("ended_at"), last("rows").alias("rows"))


def run(order: Order) -> None:
    spark = session(order)
    folder = Path(order.folder)
    straggler = Straggler(folder / "races")
    strategy: Strategy = BoundedOutOfOrderness(BOUND)
    if order.speculation:
        strategy = StragglingStrategy(strategy, straggler)
    with Pipeline(
        order.url, JOB, spec(order.shape), spark=spark, poll="50 ms", patience="5 s"
    ) as pipeline:
        frames = {
            name: pipeline.watermarked(
                pipeline.source(
                    readings(spark, folder / name),
                    stage=name,
                    shard="shard",
                    event_time="at",
                    strategy=strategy,
                ),
                stage=STAGE,
                event_time="at",
            )
            for name in order.shape.inputs
        }

        def slowly(values: pd.Series) -> pd.Series:
            straggler.pass_by(KEYED)
            return values

        last: Any = pandas_udf(LongType())(slowly) if order.speculation else F.col
        reported = pipeline.report(shaped(order.shape, frames, last), stage=STAGE)
        query = pipeline.start(
            reported.writeStream.format("json")
            .option("path", str(folder / "output"))
            .option("checkpointLocation", str(folder / "checkpoint")),
            bounded=True,
        )
        query.awaitTermination()
    (folder / "counts.json").write_text(json.dumps(pipeline.counts))
    spark.stop()


def end_with_parent() -> None:
    """Never outlive the tests, whatever becomes of them: their end closes this pipe."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    run(Order.load(sys.argv[1]))
