"""Environments of their own: Airflow and Dagster need other versions of packages than the service."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests.support.commands import run
from tests.support.server import ROOT

_SCRIPTS: Final = Path(sys.executable).parent


def environment_with(package: str, folder: Path, *, locked: bool = True) -> Path:
    """Return the Python of a new environment with a package of `deploy/` and its locked versions.

    `locked=False`: with the oldest version of the scheduler that the package names.
    """
    source = ROOT / "deploy" / package
    # Building leaves files in the folder of a source.
    copy = shutil.copytree(source, folder / package)
    python = folder / "environment" / "bin" / "python"
    uv = shutil.which("uv", path=f"{_SCRIPTS}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        run(sys.executable, "-m", "venv", folder / "environment")
        install = [python, "-m", "pip", "install", "--quiet"]
    else:
        run(uv, "venv", "--quiet", "--python", sys.executable, folder / "environment")
        install = [uv, "pip", "install", "--quiet", "--python", python]
    if locked:
        run(*install, "-r", source / "requirements.lock")
        run(*install, "--no-deps", ROOT, copy)
    else:
        run(*install, ROOT, _oldest(source))
        run(*install, "--no-deps", copy)
    return python


def _oldest(source: Path) -> str:
    """Return the requirement of a package's scheduler, in the oldest version."""
    named = tomllib.loads((source / "pyproject.toml").read_text())["project"]["dependencies"]
    [scheduler] = [each for each in named if not each.startswith("tidegauge")]
    return f"{scheduler.replace('>=', '==')}.0"


def type_errors(package: str, python: Path, folder: Path) -> str:
    """Return the errors of types of a package, whose imports are those of an environment."""
    settings = folder / "pyrightconfig.json"
    settings.write_text('{"typeCheckingMode": "standard", "pythonVersion": "3.11"}')
    shutil.copytree(ROOT / "deploy" / package, folder / f"{package}-types")
    done = subprocess.run(
        [_SCRIPTS / "basedpyright", "--pythonpath", python, "-p", settings],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout if done.returncode else ""


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with Airflow."""
    return environment_with("airflow", tmp_path_factory.mktemp("airflow"))


@pytest.fixture(scope="session")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with Dagster."""
    return environment_with("dagster", tmp_path_factory.mktemp("dagster"))
