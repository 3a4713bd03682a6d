"""A release: `make release` builds, checks and installs its files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ROOT


def release(root: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, root / "deploy" / "release.py", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A repository with a tag, a changelog behind the version, and a file that is not committed."""
    root = tmp_path / "repository"
    (root / "deploy").mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "release.py", root / "deploy")
    (root / "pyproject.toml").write_text('[project]\nname = "tidegauge"\nversion = "1.2.3"\n')
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- A line.\n\n## 1.2.2\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    subprocess.run(["git", "tag", "v1.2.3"], cwd=root, check=True)
    return root


def test_sources_that_are_not_those_of_a_release_are_rejected(unfinished: Path) -> None:
    done = release(unfinished)
    assert done.returncode == 1
    assert [
        re.sub(r":.*", "", line.removeprefix("not a release: "))
        for line in done.stdout.splitlines()
    ] == [
        "CHANGELOG.md has not a section '## 1.2.3'",
        "CHANGELOG.md has lines under 'Unreleased'",
        "files differ from the commit",
        "the tag v1.2.3 exists",
        "change the sources, or build with --rehearse",
    ]
    assert not (unfinished / "dist").exists()


def test_a_folder_with_files_is_not_written_to(unfinished: Path) -> None:
    (unfinished / "dist").mkdir()
    done = release(unfinished, "--rehearse")
    assert done.returncode == 1
    assert done.stdout.endswith("dist exists: remove the folder, or name another with --out\n")


@pytest.mark.slow
def test_a_release_is_built_checked_and_installed(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    # A relative path is one of the caller's folder, for each of the distributions.
    done = release(ROOT, "--rehearse", "--out", os.path.relpath(out))
    assert done.returncode == 0, done.stdout + done.stderr
    [version] = re.findall(r"git tag --sign v(\S+)", done.stdout)
    assert {each.name for each in out.iterdir()} == {
        "SHA256SUMS",
        f"tidegauge-{version}.cdx.json",
        f"tidegauge-{version}.tar.gz",
        *(
            f"{name}-{version}-py3-none-any.whl"
            for name in ("tidegauge", "tidegauge_airflow", "tidegauge_dagster")
        ),
    }
    _check_digests(out)
    _check_bill(json.loads((out / f"tidegauge-{version}.cdx.json").read_text()), version)
    with zipfile.ZipFile(out / f"tidegauge_airflow-{version}-py3-none-any.whl") as archive:
        packages = {name.partition("/")[0] for name in archive.namelist()}
    assert packages == {"tidegauge_airflow", f"tidegauge_airflow-{version}.dist-info"}


def _check_digests(out: Path) -> None:
    listed = dict(line.split()[::-1] for line in (out / "SHA256SUMS").read_text().splitlines())
    others = [each for each in out.iterdir() if each.name != "SHA256SUMS"]
    assert listed == {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in others}


def _check_bill(bill: dict[str, Any], version: str) -> None:
    """The packages of a service, in the locked versions, and not the ones of its development."""
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("tidegauge", version)
    components = {each["name"].lower(): each["version"] for each in bill["components"]}
    lock = (ROOT / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([^ ;\\]+)", lock, re.MULTILINE))
    assert {"fastapi", "sqlalchemy", "redis", "psycopg", "opentelemetry-sdk"} <= components.keys()
    assert not {"pytest", "pyspark", "mkdocs"} & components.keys()
    for name in ("fastapi", "sqlalchemy", "redis", "uvicorn"):
        assert components[name] == locked[name]
