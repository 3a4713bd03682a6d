"""The agent runs without any package of the service."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import service
import spark_agent

ROOT = Path(__file__).parent.parent.parent

OF_THE_SERVICE = {
    "aiosqlite",
    "alembic",
    "fastapi",
    "httptools",
    "pydantic-settings",
    "psycopg",
    "redis",
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "uvloop",
}


def brought(name: str, extra: str = "") -> set[str]:
    """The distributions that come with one, with an extra of it or without."""
    found: set[str] = set()
    ahead = [(name, extra)]
    while ahead:
        name, extra = ahead.pop()
        for requirement in distribution(name).requires or ():
            wanted, _, marker = requirement.partition(";")
            if "extra ==" in marker and not re.search(f"extra == ['\"]{extra or '-'}['\"]", marker):
                continue
            match = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", wanted)
            assert match is not None
            each = match[1].lower().replace("_", "-")
            if each == "tidegauge":
                ahead.extend((each, part) for part in match[2].split(","))
            elif each not in found and _is_here(each):
                found.add(each)
                ahead.append((each, ""))
    return found


def _is_here(name: str) -> bool:
    return any(name == each.lower().replace("_", "-") for each in _installed())


def _installed() -> set[str]:
    return {each for several in packages_distributions().values() for each in several}


def test_the_agent_brings_nothing_of_the_service() -> None:
    with_spark = brought("tidegauge", "spark")
    assert {"pyspark", "pyarrow", "urllib3"} <= with_spark
    assert not with_spark & OF_THE_SERVICE
    assert brought("tidegauge", "production") >= OF_THE_SERVICE - {"httptools", "uvloop"}


def test_the_agent_and_the_command_run_without_the_service() -> None:
    away = sorted(
        module
        for module, several in packages_distributions().items()
        if {each.lower().replace("_", "-") for each in several} & OF_THE_SERVICE
    )
    code = f"""
import sys
sys.modules.update(dict.fromkeys({away!r}))
import spark_agent.pipeline, spark_agent.sources.control, spark_agent.demo.cli
sys.argv = ["tidegauge", *sys.argv[1:]]
from service.cli import main
main()
"""
    command = [sys.executable, "-c", code]
    served = subprocess.run([*command, "serve"], capture_output=True, text=True, check=False)
    assert served.returncode == 2
    assert "pip install 'tidegauge[service]'" in served.stderr
    reset = subprocess.run(
        [*command, "reset", "--help"], capture_output=True, text=True, check=False
    )
    assert reset.returncode == 0
    assert "Start a job over" in reset.stdout


def built(form: str, folder: Path) -> Path:
    """Build a distribution; return its file."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", form, "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    [found] = folder.iterdir()
    return found


def test_the_source_distribution_has_what_builds_the_wheel(tmp_path: Path) -> None:
    with tarfile.open(built("sdist", tmp_path)) as archive:
        names = {name.split("/")[1] for name in archive.getnames()}
    assert names == {
        *("service", "spark_agent", "migrations", "pyproject.toml"),
        *("README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", ".gitignore"),
    }


def test_one_version_everywhere() -> None:
    version = distribution("tidegauge").version
    for folder in (ROOT, ROOT / "deploy/airflow", ROOT / "deploy/dagster"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["version"] == version
    assert service.__version__ == spark_agent.__version__ == version
    assert "__version__" in dir(spark_agent)


def test_the_wheel_has_the_two_packages_alone(tmp_path: Path) -> None:
    """No documentation, examples, tests or benchmarks."""
    wheel = built("wheel", tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {
        "service",
        "spark_agent",
    }
    assert not [name for name in names if name.endswith((".md", "mkdocs.yml"))]
