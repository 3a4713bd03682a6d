"""Topics of Kafka as sources: their partitions are the shards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.types import StructType

FORMAT: Final = "kafka"
STAGE_OPTION: Final = "tidegaugeStage"
"""An option of a topic's data frame, which Spark's connector ignores: the source's stage."""
TOPICS_OPTION: Final = "subscribe"
SERVERS_OPTION: Final = "kafka.bootstrap.servers"

FAIL_OPTION: Final = "failOnDataLoss"
ISOLATION_OPTION: Final = "kafka.isolation.level"

TOPIC_LIMIT: Final = "maxoffsetspertrigger"
"""The option, in lower case, that limits the rows of a batch."""

_PARSED: Final = "tidegauge_parsed"
_OWN: Final[Mapping[str, str]] = {
    SERVERS_OPTION: "servers",
    TOPICS_OPTION.lower(): "topics",
    "startingoffsets": "starting",
}
"""Options, in lower case, that are arguments of `read_kafka`."""
_REFUSED: Final[Mapping[str, str]] = {
    "assign": "name whole topics: the partitions that are added later would be left out",
    "subscribepattern": "name the topics: a topic that joins later would not hold the watermark",
    "minpartitions": "each partition must be read by one task, which reports for it",
    "maxrecordsperpartition": "each partition must be read by one task, which reports for it",
    "minoffsetspertrigger": "rows would be unread while a trigger finds nothing",
    "includeheaders": "read headers by hand, with readStream and source()",
}
"""Options, in lower case, that are refused, with what to do."""

_AS_SHARD: Final = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
"""Names of topics whose partitions are named as shards are, with room for the partition."""
VERSION: Final = "4.2.0"
"""The version of Spark's connector with which the tests run."""
PACKAGE: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"

Offsets: TypeAlias = Mapping[str, Mapping[int, int]]
"""By topic and partition: the offset of the next row."""


def shard_of(topic: str, partition: int) -> str:
    """Return the shard of a partition.

    >>> shard_of("taps", 3)
    'taps-3'
    """
    return f"{topic}-{partition}"


def check_topics(topics: str | Sequence[str]) -> list[str]:
    """Return the names of topics. Raises `ValueError`.

    >>> check_topics("taps"), check_topics(["taps", "pumps"])
    (['taps'], ['taps', 'pumps'])
    """
    if not isinstance(topics, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(  # noqa: TRY004  (a wrong argument, like all that read_kafka() rejects)
            f"invalid topics {topics!r}: write the name of a topic, or a list of names"
        )
    found = [topics] if isinstance(topics, str) else list(topics)
    for each in found:
        if not isinstance(each, str) or not each or "," in each:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"invalid topic {each!r}: write the name of a topic, or a list of names"
            )
        if not _AS_SHARD.fullmatch(each):
            raise ValueError(
                f"topic {each!r} cannot be read: its partitions are shards, and the name of a shard "
                f"begins with a letter or a digit and has 128 characters at most. Read it by hand, with "
                f"readStream and source(), and give the shards other names"
            )
    if not found or len(set(found)) < len(found):
        raise ValueError(f"invalid topics {topics!r}: write each topic once, and one at least")
    return found


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of Spark's connector. Raises `ValueError`."""
    for name, value in options.items():
        lower = name.lower()
        if lower in _OWN:
            raise ValueError(f"option {name!r} is the argument {_OWN[lower]}= of read_kafka")
        if lower in _REFUSED:
            raise ValueError(f"option {name!r} is not supported: {_REFUSED[lower]}")
        if lower == TOPIC_LIMIT:
            check_limit(str(value))
        if lower == FAIL_OPTION.lower() and str(value).lower() != "true":
            raise ValueError(loss_message())


def check_limit(rows: str) -> None:
    """Check a limit of the rows of a batch. Raises `ValueError`."""
    if not rows.isascii() or not rows.isdigit() or not int(rows):
        raise ValueError(
            f"invalid maxOffsetsPerTrigger {rows!r}: write a number of rows, 1 or more: with less, a "
            f"batch reads nothing"
        )


def check_servers(servers: object) -> None:
    """Check addresses of brokers. Raises `ValueError`."""
    if not isinstance(servers, str) or not all(
        re.fullmatch(r"\S+:\d+", each.strip()) for each in servers.split(",")
    ):
        raise ValueError(
            f"invalid servers {servers!r}: write addresses of brokers with their ports, "
            f"'broker-1:9092,broker-2:9092'"
        )


def loss_message() -> str:
    """Return the message of a query that would go on after a loss."""
    return (
        f"option {FAIL_OPTION!r}: rows that a topic has lost would be left out without a word: leave it "
        f"at true. After a loss, start over with Pipeline.reset(), a new checkpoint and an empty output"
    )


def read(
    spark: SparkSession,
    *,
    servers: str,
    topics: Sequence[str],
    stage: str,
    starting: str,
    options: Mapping[str, Any],
) -> DataFrame:
    """Return the rows of topics, as Spark's connector has them. Raises `ValueError` without one."""
    reader = spark.readStream.format(FORMAT).options(**options)
    try:
        return (
            reader.option(SERVERS_OPTION, servers)
            .option(TOPICS_OPTION, ",".join(topics))
            .option("startingOffsets", starting)
            .option(STAGE_OPTION, stage)
            .load()
        )
    except AnalysisException as error:
        if "Failed to find data source" not in str(error):
            raise
        raise ValueError(
            f"Spark's connector to Kafka is not there: start Spark with --packages {PACKAGE}:{VERSION}, "
            f"or set spark.jars.packages to it before the session begins"
        ) from None


def with_columns(rows: DataFrame, shard: str, schema: StructType | str | None) -> DataFrame:
    """Add the shard, and the columns of a JSON value with a schema, to a topic's rows.

    A row that its producer has not dated has the timestamp -1, which becomes null. Raises `ValueError`.
    """
    columns: list[Column] = [F.col(name) for name in rows.columns if name != "timestamp"]
    timestamp = F.when(F.col("timestampType") >= 0, F.col("timestamp")).alias("timestamp")
    at_shard = F.concat_ws("-", "topic", "partition").alias(shard)
    kept = [*columns, timestamp, at_shard]
    if shard in rows.columns:
        raise ValueError(
            f"shard {shard!r} is a column of Kafka's: write another name, shard='shard'"
        )
    if schema is None:
        return rows.select(*kept)
    wide = rows.select(*kept, _parsed_once(schema).alias(_PARSED))
    parsed_type = wide.schema[_PARSED].dataType
    if not isinstance(parsed_type, StructType):
        raise ValueError(  # noqa: TRY004
            f"invalid value {schema!r}: write the members of the JSON object and their types, "
            f"value='tap string, litres double'"
        )
    for name in (names := parsed_type.names):
        if name.lower() == shard.lower():
            raise ValueError(
                f"shard {shard!r} is a member of the value: write another name, shard='partition_name'"
            )
        if name.lower() in {each.lower() for each in rows.columns} - {"value"}:
            raise ValueError(
                f"column {name!r} of the value is a column of Kafka's too: leave it out of the "
                f"schema, or decode the value by hand, with readStream and source()"
            )
    others = [each for each in wide.columns if each not in {"value", _PARSED}]
    return wide.select(*others, *(F.col(_PARSED)[name].alias(name) for name in names))


def with_computed(rows: DataFrame, shard: str, columns: Mapping[str, Column | str]) -> DataFrame:
    """Add columns one after the other, each of which may use those before. Raises `ValueError`."""
    for name, expression in columns.items():
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"invalid columns: {name!r} is not the name of a column")
        if name.lower() == shard.lower():
            raise ValueError(
                f"column {name!r} is the shard: write another name, shard='partition_name'"
            )
        if not isinstance(expression, Column | str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(  # noqa: TRY004
                f"invalid column {name!r}, {expression!r}: write an expression, F.col('ride.at'), or "
                f"its SQL, 'timestamp_millis(ms)'"
            )
        value = F.expr(expression) if isinstance(expression, str) else expression
        try:
            rows = rows.withColumn(name, _once(value))
        except (AnalysisException, ParseException) as error:
            raise ValueError(f"invalid column {name!r}: {error}") from None
    return rows


def _parsed_once(schema: StructType | str) -> Column:
    """Return the value as parsed JSON."""
    return _once(F.from_json(F.col("value").cast("string"), cast("str", schema)))


def _once(value: Column) -> Column:
    """Return a column that Spark computes once for each row.

    Spark moves filters below a deterministic column, and would compute it again for each filter by the
    column, of which the agent's own is one. Partition ids count as not deterministic.
    """
    return F.when(F.spark_partition_id() >= 0, value)


def offsets_of(stored: object) -> Offsets:
    """Return the offsets in a source's progress event; empty: not those of topics.

    >>> offsets_of({"taps": {"0": 7, "1": 9}}), offsets_of({"logOffset": 1}), offsets_of(None)
    ({'taps': {0: 7, 1: 9}}, {}, {})
    """
    if not isinstance(stored, dict):
        return {}
    found = cast("dict[str, Any]", stored)
    if not all(isinstance(each, dict) for each in found.values()):
        return {}
    return {
        topic: {int(partition): int(offset) for partition, offset in each.items()}
        for topic, each in found.items()
    }


def unread(read: Offsets, latest: Offsets, topics: Iterable[str]) -> dict[str, int]:
    """Return the number of rows that a batch has left unread, by shard.

    A partition that the batch has not begun to read is unread as a whole.

    >>> unread({"taps": {0: 7}}, {"taps": {0: 9, 1: 4}, "pumps": {0: 5}}, ["taps"])
    {'taps-0': 2, 'taps-1': 4}
    """
    found: dict[str, int] = {}
    for topic in topics:
        begun, ends = read.get(topic, {}), latest.get(topic, {})
        for partition in sorted({*begun, *ends}):
            rows = ends.get(partition, 0) - begun.get(partition, 0)
            found[shard_of(topic, partition)] = max(rows, 0)
    return found


def positions(read: Offsets, topics: Iterable[str]) -> dict[str, str]:
    """Return where the reader of each shard is, as text.

    >>> positions({"taps": {0: 7}, "pumps": {0: 5}}, ["taps"])
    {'taps-0': 'offset 7'}
    """
    return {
        shard_of(topic, partition): f"offset {offset}"
        for topic in topics
        for partition, offset in read.get(topic, {}).items()
    }


def is_read(read: Offsets, end: Offsets) -> bool:
    """Return whether all partitions are read through their end.

    >>> is_read({"taps": {0: 7, 1: 4}}, {"taps": {0: 7}}), is_read({}, {"taps": {0: 7}})
    (True, False)
    """
    return not any(unread(read, end, end).values())
