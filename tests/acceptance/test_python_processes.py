"""Spark's Python processes import a compiled PySpark, as documented."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pyspark

from tests.support.commands import run
from tests.support.documents import block

INSTALLED = Path(pyspark.__file__).parent


def test_workers_import_compiled_modules_from_the_archive(tmp_path: Path) -> None:
    lib = tmp_path / "python" / "lib"
    lib.mkdir(parents=True)
    archive = Path(shutil.copy(INSTALLED / "python" / "lib" / "pyspark.zip", lib))
    script = block("sh", "compileall")
    run("bash", "-euo", "pipefail", "-c", script, variables={"SPARK_HOME": str(tmp_path)})
    origin = run(
        *(sys.executable, "-c", "import pyspark.worker as it; print(it.__spec__.origin)"),
        variables={"PYTHONPATH": str(archive)},
    )
    assert origin.strip() == str(archive / "pyspark" / "worker.pyc")
    assert sorted(each.name for each in lib.iterdir()) == ["pyspark.zip"]
