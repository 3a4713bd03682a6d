"""The demonstration's Spark session: small, quiet, and with this interpreter's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import py4j
import pyspark
from pyspark.sql import SparkSession

JAVA_WANTED: Final = 17

_JVM: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=128m"
"""JVM options for a program that ends before an optimising compiler pays off.

With one tier the code cache has 48 MB by default. Spark's code fills these within a minute, and then
the compiler stops.
"""

_LOGGING: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


def java_problem() -> str | None:
    """Return a line on the fault of this machine's Java; None: Spark can run with it."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    advice = (
        f"install Java {JAVA_WANTED} or newer (package openjdk-{JAVA_WANTED}-jre-headless on "
        f"Debian and Ubuntu, openjdk@{JAVA_WANTED} in Homebrew), or set JAVA_HOME to it"
    )
    if java is None:
        where = f"under JAVA_HOME ({home})" if home else "on the PATH"
        return f"Spark needs Java, which is not installed {where}: {advice}"
    result = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)  # noqa: S603
    found = _java_version(result.stderr)
    if found is not None and found < JAVA_WANTED:
        return f"Spark needs Java {JAVA_WANTED}, and {java} is Java {found}: {advice}"
    return None


def _java_version(text: str) -> int | None:
    """Parse the major version from the output of `java -version`.

    >>> _java_version('openjdk version "17.0.15" 2025-04-15'), _java_version('java version "1.8.0"')
    (17, 8)
    """
    _, _, quoted = text.partition('"')
    parts = quoted.partition('"')[0].split(".")
    number = parts[1] if parts[0] == "1" and len(parts) > 1 else parts[0]
    return int(number) if number.isdigit() else None


@contextmanager
def spark_session(folder: Path, partitions: int) -> Generator[SparkSession]:
    """Start Spark, and stop it at the end; see `starting_spark`."""
    with starting_spark(folder, partitions) as session:
        yield session()


@contextmanager
def starting_spark(
    folder: Path, partitions: int, jars: str = ""
) -> Generator[Callable[[], SparkSession]]:
    """Start Spark on all cores, in the background; its error output goes to `folder/spark.log`.

    Yields a function that waits for the session. `jars`: jars that Spark needs, as the setting
    `spark.jars` lists them.
    """
    with ThreadPoolExecutor(1) as starter:
        starting = starter.submit(_start, folder, partitions, jars)

        def session() -> SparkSession:
            starting.result()
            # Makes the session the active one of this thread, too.
            return SparkSession.builder.getOrCreate()

        try:
            yield session
        finally:
            starting.result().stop()


def link_spark_home(home: Path) -> Path:
    """Make a folder a home of Spark, whose Python processes import the installed PySpark; return it.

    Spark puts `python/lib/pyspark.zip` of its home first in the path of each Python process that it
    starts. A zip has not a cache of compiled modules, so each process compiles PySpark for itself, for
    longer than it imports the compiled one: a start of a query with a source in Python takes 0.7 s more.
    This home has folders of these names in place of the zips, with the packages of this process.
    """
    installed = Path(pyspark.__file__).parent
    home.mkdir()
    for entry in installed.iterdir():
        if entry.name != "python":
            (home / entry.name).symlink_to(entry)
    packages = {"pyspark": installed, "py4j": Path(py4j.__file__).parent}
    for archive in (installed / "python" / "lib").glob("*.zip"):
        name = archive.stem.partition("-")[0]
        folder = home / "python" / "lib" / archive.name
        folder.mkdir(parents=True)
        (folder / name).symlink_to(packages[name])
    return home


@contextmanager
def _home(folder: Path) -> Generator[None]:
    """Set Spark's home for the start of Java, which passes it on, unless the user has set it."""
    if "SPARK_HOME" in os.environ:
        yield
        return
    os.environ["SPARK_HOME"] = str(link_spark_home(folder / "spark-home"))
    try:
        yield
    finally:
        del os.environ["SPARK_HOME"]


def _start(folder: Path, partitions: int, jars: str) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = folder / "log4j2.properties"
    settings.write_text(_LOGGING)
    with _errors_to(folder / "spark.log"), _home(folder):
        return (
            SparkSession.builder.master("local[*]")
            .appName("tidegauge demo")
            .config(
                "spark.driver.extraJavaOptions", f"{_JVM} -Dlog4j2.configurationFile={settings}"
            )
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.jars", jars)
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.shuffle.partitions", partitions)
            # Compiling each batch's plan costs more than it saves on batches this small.
            .config("spark.sql.codegen.wholeStage", "false")
            .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
            # An idle query polls every 10 ms by default, which costs a core here.
            .config("spark.sql.streaming.pollingDelay", "50ms")
            .config("spark.sql.streaming.minBatchesToRetain", 2)
            # Keep all of them: the dropped rows are summed up at the end.
            .config("spark.sql.streaming.numRecentProgressUpdates", 10_000)
            .config("spark.local.dir", str(folder / "spark"))
            .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
            .getOrCreate()
        )


@contextmanager
def _errors_to(path: Path) -> Generator[None]:
    """Redirect stderr to a file for processes that are started inside the block, such as Spark's."""
    sys.stderr.flush()
    own = os.dup(2)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
