"""The check that the installed PySpark runs the agent."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from spark_agent.exceptions import NO_CONNECT, SparkImportError

OLDEST: Final = (4, 2)
"""The oldest PySpark that runs the agent. `pyproject.toml` has the same bound, and an upper one."""
_INSTALL: Final = "pip install 'tidegauge[spark]'"


def refusal(version: str | None, *, has_classic: bool = True) -> SparkImportError | None:
    """Return the error for an installed PySpark, or None if the agent runs on it.

    `version` is None if PySpark is not installed. `has_classic` is false for `pyspark-client`, which has
    Spark Connect alone. An unreadable version is accepted, as is any newer one.

    >>> for version in ("4.2.0", "4.2.0-SNAPSHOT", "4.3.0.dev1", "4.10.0", "5.0.0", "nightly"):
    ...     assert refusal(version) is None
    >>> print(refusal("4.1.4"))
    spark_agent needs PySpark 4.2 or newer, and this is 4.1.4: in an older one, windows would not close \
in an availableNow run. Upgrade it: pip install 'tidegauge[spark]'
    >>> print(refusal(None))
    spark_agent needs PySpark, which is not installed: pip install 'tidegauge[spark]'
    >>> print(refusal("4.2.0", has_classic=False))
    Spark Connect is not supported: tidegauge needs accumulators, local properties and the query's \
plan, which a Connect client does not have. Run the driver as a classic Spark application \
(spark-submit, or SparkSession.builder.master(…)). The installed PySpark is pyspark-client: \
uninstall it, then pip install 'tidegauge[spark]'
    """
    if version is None:
        return SparkImportError(f"spark_agent needs PySpark, which is not installed: {_INSTALL}")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
        return SparkImportError(
            f"spark_agent needs PySpark {OLDEST[0]}.{OLDEST[1]} or newer, and this is {version}: in an "
            f"older one, windows would not close in an availableNow run. Upgrade it: {_INSTALL}"
        )
    if not has_classic:
        return SparkImportError(
            f"{NO_CONNECT}. The installed PySpark is pyspark-client: uninstall it, then {_INSTALL}"
        )
    return None


@cache
def check_pyspark() -> None:
    """Check that the installed PySpark runs the agent. Raises `SparkImportError`."""
    if find_spec("pyspark") is None:
        version, has_classic = None, False
    else:
        # Read from the module: a Spark that was unpacked has no metadata of a distribution.
        version = str(import_module("pyspark.version").__version__)
        has_classic = find_spec("pyspark.core") is not None
    error = refusal(version, has_classic=has_classic)
    if error is not None:
        raise error
