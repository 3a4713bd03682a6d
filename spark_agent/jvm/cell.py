# pyright: basic
# ruff: noqa: SLF001
"""A number in a query's plan that the driver changes from batch to batch."""

from __future__ import annotations

from pyspark.sql import Column, SparkSession
from pyspark.sql.classic.column import Column as ClassicColumn

from spark_agent.jvm import JavaObject


class Cell:
    """A number (Java's long) that each batch of a query reads as a constant.

    Spark optimises the plan of each batch anew, from the same objects. The number is the only item of a
    literal array in this plan, and the optimiser folds the item to a constant. So a batch has the value
    at the time when it is planned, in each place of the plan and in each task, and the plan stays
    deterministic: a scalar subquery or a function of Python would not.
    """

    def __init__(self, spark: SparkSession) -> None:
        jvm: JavaObject = spark._jvm
        gateway: JavaObject = spark.sparkContext._gateway
        package = jvm.org.apache.spark.sql
        expressions = package.catalyst.expressions
        self._array: JavaObject = expressions.UnsafeArrayData.fromPrimitiveArray(
            gateway.new_array(jvm.long, 1)
        )
        of_numbers = package.types.ArrayType(package.types.DataTypes.LongType, False)
        literal = expressions.Literal(self._array, of_numbers)
        columns: JavaObject = getattr(getattr(package.classic, "ExpressionUtils$"), "MODULE$")
        self.column: Column = ClassicColumn(columns.column(literal))[0]
        """The number, as a column."""

    @property
    def value(self) -> int:
        """The number that the next batch will read."""
        return int(self._array.getLong(0))

    def set(self, value: int) -> None:
        """Set the number. Call it between two batches."""
        self._array.setLong(0, value)
