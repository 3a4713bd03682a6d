# pyright: basic, reportCallIssue=false, reportOptionalCall=false
# ruff: noqa: SLF001
"""The clause `WATERMARK … DELAY OF …` of Spark's SQL, read from Spark's parser and replaced in the text.

The parser's nodes have their places in the text, in code points.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_agent.jvm import JavaObject
from spark_agent.jvm.catalyst import is_a, items, number

_CLAUSE: Final = "UnresolvedEventTimeWatermark"
_RELATION: Final = "UnresolvedRelation"
_STATEMENTS: Final = ("Command", "ParsedStatement")
"""Plans that are not of queries."""
_WITH: Final = "UnresolvedWith"
_STREAM: Final = re.compile(r"\s*STREAM\b\s*\(?(.*?)\)?\s*", re.IGNORECASE | re.DOTALL)
_DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True)
class WatermarkClause:
    """A relation with its clause in a text of SQL."""

    start: int
    """The place of the relation's name."""
    stop: int
    """The place after the clause."""
    name: tuple[str, ...]
    """The parts of the relation's name."""
    is_named: bool
    """True if an alias follows the clause."""
    event_time: str
    delay_ms: int

    @property
    def relation(self) -> str:
        """The relation's name, as Spark reads it.

        >>> WatermarkClause(14, 55, ("a.b", "c`d"), False, "at", 0).relation
        '`a.b`.`c``d`'
        """
        return ".".join("`{}`".format(part.replace("`", "``")) for part in self.name)

    def replaced(self, text: str, view: str) -> str:
        """Return the text with a view in place of the relation and its clause.

        >>> clause = WatermarkClause(14, 55, ("taps",), False, "at", 60_000)
        >>> clause.replaced("SELECT * FROM taps WATERMARK at DELAY OF INTERVAL 1 MIN, b", "v")
        'SELECT * FROM `v` AS `taps`, b'
        """
        last = self.name[-1].replace("`", "``")
        alias = "" if self.is_named else f" AS `{last}`"
        return f"{text[: self.start]}`{view}`{alias}{text[self.stop :]}"


def clauses_of(spark: SparkSession, text: str) -> list[WatermarkClause]:
    """Return the clauses of a query, in the order of the text.

    Raises `ValueError` for a text that Spark cannot parse, and for what cannot be replaced.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"sql() takes the text of a query, not {text!r}")  # noqa: TRY004
    if "${" in text and spark.conf.get("spark.sql.variable.substitute") == "true":
        raise ValueError(
            "the query has ${…}, which Spark replaces before it reads the text, so places in the text "
            "would be wrong: write the value itself"
        )
    parser: JavaObject = spark._jsparkSession.sessionState().sqlParser()
    try:
        plan = parser.parsePlan(text)
    except PySparkException as error:
        if "WATERMARK" in text.upper() and not _parses_clause(parser):
            raise ValueError(
                f"Spark {spark.version} does not parse WATERMARK in SQL: use Spark 4.2 or later, or a "
                f"view of what watermarked() returns"
            ) from error
        raise ValueError(f"the query cannot be parsed: {error}") from error
    nodes = list(_walk(plan))
    _check_query(spark, nodes)
    found = [_clause(parser, node, text) for node in nodes if node.nodeName() == _CLAUSE]
    return sorted(found, key=_start)


def _check_query(spark: SparkSession, nodes: Sequence[JavaObject]) -> None:
    """Check that a plan is of a query that sql() takes. Raises `ValueError`."""
    jvm: JavaObject = spark._jvm
    package = "org.apache.spark.sql.catalyst.plans.logical"
    classes = [jvm.java.lang.Class.forName(f"{package}.{name}") for name in _STATEMENTS]
    for node in nodes:
        if any(each.isInstance(node) for each in classes):
            raise ValueError(
                f"{node.nodeName()} is not a query, and sql() takes only queries: give what it returns "
                f"to start(), which writes it"
            )
        if node.nodeName() == _WITH:
            raise ValueError(
                "the query has WITH: write its definition where it is read, as a subquery, FROM (SELECT "
                "… FROM view WATERMARK …) AS name"
            )


def _parses_clause(parser: JavaObject) -> bool:
    try:
        parser.parsePlan("SELECT * FROM a WATERMARK b DELAY OF INTERVAL 1 SECOND")
    except PySparkException:
        return False
    return True


def _start(clause: WatermarkClause) -> int:
    return clause.start


def _walk(plan: JavaObject) -> Iterator[JavaObject]:
    """Yield all nodes of a plan, also those in subqueries."""
    yield plan
    for each in (*items(plan.children()), *items(plan.subqueries())):
        yield from _walk(each)


def _clause(parser: JavaObject, node: JavaObject, text: str) -> WatermarkClause:
    begins, stops = node.origin().startIndex().get(), node.origin().stopIndex().get() + 1
    shown = text[begins:stops]
    relation, is_named = _relation(node.child(), shown)
    start = relation.origin().startIndex().get()
    name = tuple(map(str, items(relation.multipartIdentifier())))
    _check_name(parser, text[start:begins], name, shown)
    column = node.eventTimeColExpr()
    if not is_a(column, "UnresolvedAttribute"):
        raise ValueError(
            f"{shown!r} has an expression as event time: compute it in a column before source(), and "
            f"write WATERMARK column DELAY OF …"
        )
    parts = list(map(str, items(column.nameParts())))
    if len(parts) > 1:
        raise ValueError(
            f"{shown!r} has {len(parts)} parts as event time: write the column's name alone, between "
            f"backquotes if it has a dot, and make a column of a part of a structure"
        )
    delay = node.delay()
    if number(delay, "months"):
        raise ValueError(f"{shown!r} has years or months, whose length differs: write it in days")
    microseconds = number(delay, "days") * _DAY_MS * 1_000 + number(delay, "microseconds")
    if microseconds < 0 or microseconds % 1_000:
        raise ValueError(f"{shown!r}: the delay must be whole milliseconds, 0 or more")
    return WatermarkClause(start, stops, name, is_named, parts[0], microseconds // 1_000)


def _check_name(parser: JavaObject, before: str, name: Sequence[str], shown: str) -> None:
    """Check that the text before a clause is a name alone. Raises `ValueError`."""
    streamed = _STREAM.fullmatch(before)
    try:
        found = items(parser.parseMultipartIdentifier(streamed[1] if streamed else before))
    except PySparkException:
        found = []
    if list(map(str, found)) != list(name):
        raise ValueError(
            f"{shown!r} follows {before.strip()!r}, which is more than the name of a view: make a view "
            f"of it, and write FROM view WATERMARK …"
        )


def _relation(child: JavaObject, shown: str) -> tuple[JavaObject, bool]:
    """Return the relation below a clause, and True if it has an alias."""
    is_named = child.nodeName() == "SubqueryAlias"
    if is_named:
        child = child.child()
    if child.nodeName() == "NamedStreamingRelation":
        child = child.child()
    if child.nodeName() != _RELATION:
        raise ValueError(
            f"{shown!r} follows a subquery, a sample, a function or an alias with columns: make a view "
            f"of it, and write FROM view WATERMARK …"
        )
    return child, is_named
