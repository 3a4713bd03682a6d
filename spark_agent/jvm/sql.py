# pyright: basic, reportCallIssue=false, reportOptionalCall=false
# ruff: noqa: SLF001
"""The clause `WATERMARK … DELAY OF …` of Spark's SQL, read from Spark's parser and replaced in the text.

The parser's nodes have their places in the text, in code points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from py4j.java_gateway import get_field
from pyspark.errors import IllegalArgumentException, ParseException
from pyspark.sql import SparkSession

from spark_agent.jvm import JavaObject
from spark_agent.jvm.catalyst import is_a, items

_CLAUSE: Final = "UnresolvedEventTimeWatermark"
_RELATION: Final = "UnresolvedRelation"
_STATEMENTS: Final = ("Command", "ParsedStatement")
"""Plans that are not of queries."""
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

    def replaced(self, text: str, view: str) -> str:
        """Return the text with a view in place of the relation and its clause.

        >>> clause = WatermarkClause(14, 53, ("taps",), False, "at", 60_000)
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
    parser: JavaObject = spark._jsparkSession.sessionState().sqlParser()
    try:
        plan = parser.parsePlan(text)
    except (ParseException, IllegalArgumentException) as error:
        if "WATERMARK" in text.upper() and not _parses_clause(parser):
            raise ValueError(
                f"Spark {spark.version} does not parse WATERMARK in SQL: use Spark 4.3 or later, or a "
                f"view of what watermarked() returns"
            ) from error
        raise ValueError(f"the query cannot be parsed: {error}") from error
    clauses = (_clause(node, text) for node in _walk(plan) if node.nodeName() == _CLAUSE)
    found = sorted({each.start: each for each in clauses}.values(), key=_start)
    defined = {str(name).lower() for node in _walk(plan) for name in _definitions(node)}
    for clause in found:
        if clause.name[-1].lower() in defined and len(clause.name) == 1:
            raise ValueError(
                f"WATERMARK follows {clause.name[0]!r}, which WITH defines in the query: put the clause "
                f"after the view inside of the definition"
            )
    if _is_statement(spark, plan):
        raise ValueError(
            f"{plan.nodeName()} is not a query, and sql() takes only queries: give what it returns to "
            f"start(), which writes it"
        )
    return found


def _is_statement(spark: SparkSession, plan: JavaObject) -> bool:
    jvm: JavaObject = spark._jvm
    package = "org.apache.spark.sql.catalyst.plans.logical"
    classes = [jvm.java.lang.Class.forName(f"{package}.{name}") for name in _STATEMENTS]
    return any(each.isInstance(plan) for each in classes)


def _parses_clause(parser: JavaObject) -> bool:
    try:
        parser.parsePlan("SELECT * FROM a WATERMARK b DELAY OF INTERVAL 1 SECOND")
    except ParseException:
        return False
    return True


def _start(clause: WatermarkClause) -> int:
    return clause.start


def _walk(plan: JavaObject) -> Iterator[JavaObject]:
    """Yield all nodes of a plan, also those in WITH and in subqueries."""
    yield plan
    # A node may be a child and an inner child, too, and then comes twice.
    for each in (*items(plan.children()), *_plans(plan.innerChildren()), *items(plan.subqueries())):
        yield from _walk(each)


def _plans(inner: JavaObject) -> list[JavaObject]:
    return [each for each in items(inner) if hasattr(each, "subqueries")]


def _definitions(node: JavaObject) -> Sequence[str]:
    """Return the names that a WITH defines."""
    if node.nodeName() != "UnresolvedWith":
        return ()
    return [each.alias() for each in _plans(node.innerChildren()) if is_a(each, "SubqueryAlias")]


def _clause(node: JavaObject, text: str) -> WatermarkClause:
    shown = text[node.origin().startIndex().get() : node.origin().stopIndex().get() + 1]
    relation, is_named = _relation(node.child(), shown)
    column = node.eventTimeColExpr()
    if not is_a(column, "UnresolvedAttribute"):
        raise ValueError(
            f"{shown!r} has an expression as event time: compute it in a column before source(), and "
            f"write WATERMARK column DELAY OF …"
        )
    delay = node.delay()
    if _field(delay, "months"):
        raise ValueError(f"{shown!r} has months, whose length differs: write it in days")
    microseconds = _field(delay, "days") * _DAY_MS * 1_000 + _field(delay, "microseconds")
    if microseconds < 0 or microseconds % 1_000:
        raise ValueError(f"{shown!r}: the delay must be whole milliseconds, 0 or more")
    return WatermarkClause(
        relation.origin().startIndex().get(),
        node.origin().stopIndex().get() + 1,
        tuple(map(str, items(relation.multipartIdentifier()))),
        is_named,
        ".".join(map(str, items(column.nameParts()))),
        microseconds // 1_000,
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
            f"{shown!r} follows a subquery, a sample or a function: make a view of it, and write "
            f"FROM view WATERMARK …"
        )
    return child, is_named


def _field(of: JavaObject, name: str) -> int:
    found: JavaObject = get_field(of, name)
    return int(found)
