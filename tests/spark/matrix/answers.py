"""Expected results, and differences from them. Rows are lines of JSON, as Spark writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from tests.spark.matrix.data import DAYS, HOUR_MS, SCHEMA, iso, logs
from tests.spark.matrix.observer import stamp_ms
from tests.spark.matrix.rows import LIMIT, Operator

Lines = Counter[str]

SECOND_WINDOW: Final = "2 hours"
_SECOND_WINDOW_MS: Final = 2 * HOUR_MS
_SHOWN: Final = 5


class Answers:
    """The batch answers, each computed once."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._known: dict[str, Lines] = {}
        for ascending in (False, True):
            for log in logs(ascending=ascending).values():
                inbox = self._inbox(log.name, ascending=ascending)
                inbox.mkdir(parents=True)
                for day in range(DAYS):
                    log.write(inbox, day)

    def of(self, operator: Operator) -> Lines:
        """Return the result of Spark's batch for all rows."""
        if operator.name not in self._known:
            frames = {
                name: self._spark.read.schema(SCHEMA).json(
                    str(self._inbox(name, ascending=operator.ascending))
                )
                for name in operator.sources
            }
            answer = (operator.batch or operator.apply)(frames)
            written = answer.select(F.to_json(F.struct("*")).alias("line")).collect()
            self._known[operator.name] = Counter(row["line"] for row in written)
        return self._known[operator.name]

    def _inbox(self, name: str, *, ascending: bool) -> Path:
        return self._folder / ("ascending" if ascending else "unordered") / name


def counted(lines: Lines, stamp: str) -> Lines:
    """Return stage 2's result for stage 1's rows: how many of them in each window, over their stamps."""
    ends: Counter[int] = Counter()
    for line, times in lines.items():
        if (ms := stamp_ms(line, stamp)) is not None:
            ends[(ms // _SECOND_WINDOW_MS + 1) * _SECOND_WINDOW_MS] += times
    return Counter(
        json.dumps({"closed_at": iso(end), "rows": rows}, separators=(",", ":"))
        for end, rows in ends.items()
    )


def due(lines: Lines, stamp: str, watermark_ms: int, *, at_watermark: bool) -> Lines:
    """Those that must have come when a reader is told that watermark."""
    last_ms = watermark_ms if at_watermark else watermark_ms - 1
    return _which(lines, lambda line: (ms := stamp_ms(line, stamp)) is not None and ms <= last_ms)


def differences(operator: Operator, answer: Lines, written: Lines) -> list[str]:
    """Return the differences of stage 1's final output from the batch answer."""
    match operator.equal:
        case "rows":
            return compared(answer, written)
        case "ids":
            return compared(_each(answer, _id), _each(written, _id))
        case "newest":
            return compared(answer, _newest(written))
        case "some":
            few = [f"{written.total()} rows, not {LIMIT}"] if written.total() != LIMIT else []
            return few + unexpected(answer, written)


def missing(operator: Operator, expected: Lines, written: Lines) -> list[str]:
    """Return the expected rows that have not come."""
    match operator.equal:
        case "rows":
            return named("missing", expected - written)
        case "ids":
            return named("missing", _each(expected, _id) - _each(written, _id))
        case "newest":
            return named("missing", expected - _newest(written))
        case "some":
            return []


def foreign(operator: Operator, answer: Lines, written: Lines) -> list[str]:
    """Return rows that came at any time and are not in the answer."""
    match operator.equal:
        case "rows" | "some":
            return unexpected(answer, written)
        case "ids":
            return unexpected(_each(answer, _id), _each(written, _id))
        case "newest":  # an open window's version is in no answer
            return []


def unexpected(answer: Lines, written: Lines) -> list[str]:
    """Return rows that are not in the answer, or came too often."""
    return named("unexpected", written - answer)


def compared(answer: Lines, written: Lines) -> list[str]:
    return named("missing", answer - written) + unexpected(answer, written)


def named(what: str, lines: Lines) -> list[str]:
    if not lines:
        return []
    shown = sorted(lines.elements())[:_SHOWN]
    return [f"{lines.total()} {what}:", *(f"  {line}" for line in shown)]


def _which(lines: Lines, wanted: Callable[[str], bool]) -> Lines:
    return Counter({line: times for line, times in lines.items() if wanted(line)})


def _each(lines: Lines, part: Callable[[str], str]) -> Lines:
    found: Lines = Counter()
    for line, times in lines.items():
        found[part(line)] += times
    return found


def _id(line: str) -> str:
    return str(json.loads(line)["id"])


def _newest(lines: Lines) -> Lines:
    """Return the version of each window and key that has counted most."""
    newest: dict[str, tuple[int, str]] = {}
    for line in lines:
        row = json.loads(line)
        what = json.dumps([row.get("key"), row["closed_at"]])
        newest[what] = max((row["rows"], line), newest.get(what, (0, "")))
    return Counter(line for _, line in newest.values())
