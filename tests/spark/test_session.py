"""The session of the tests and of the demo."""

from __future__ import annotations

from pathlib import Path

import pyspark
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)


def test_python_processes_import_the_compiled_package(spark: SparkSession) -> None:
    """Not the one of a zip, which each process would compile."""

    def imported(_: int) -> str:
        # The name of the module in the process, and not the one of this file's import.
        return str(__import__("pyspark").__file__)

    found = spark.range(1).select(F.udf(imported, "string", useArrow=False)("id")).collect()
    assert [Path(row[0]).resolve() for row in found] == [Path(pyspark.__file__)]
