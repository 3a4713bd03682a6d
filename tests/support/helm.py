"""The real Helm as a library of Python, in an environment of its own, since it takes 75 MB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from ruamel.yaml import YAML

from tests.support.required import REQUIRE

PACKAGE: Final = "helm-python-sdk==0.2.2"
DIGESTS: Final = (
    "28cc13abaf134c3a7e37f070c939be8d9cdc9825c3c8b8b2d35161073bcd4578",
    "078bac2464ea2f4b5af24cf7873e8f78ee3f3c216766fcdea41b7c61f47275b1",
    "16fd94117e4bc8c6f854801bda6fd84fceb608e083bc5333f8f934e79bd3dcdf",
)
"""SHA-256 of the wheels for Linux on x86-64 and on ARM, and for macOS on ARM."""
CHART: Final = Path(__file__).parents[2] / "deploy/helm/tidegauge"

_RENDER: Final = """
import json, sys
import helm_python

request = json.load(sys.stdin)
path, values = request["chart"], request["values"]
try:
    with helm_python.Chart.load(path) as chart:
        chart.validate_schema(values)
        made = chart.render(values, name=request["name"], namespace=request["namespace"])
    lint = helm_python.lint(path, values, strict=True)
    json.dump({"made": made, "lint": lint}, sys.stdout)
except helm_python.HelmError as error:
    json.dump({"error": str(error)}, sys.stdout)
"""


class RejectedError(Exception):
    """Helm rejects the values."""


class Rendered(NamedTuple):
    """Result of rendering the chart."""

    resources: tuple[dict[str, Any], ...]
    notes: str
    warnings: tuple[str, ...]
    """Findings of Helm's linter that are not mere information."""

    def of_kind(self, kind: str, suffix: str = "") -> dict[str, Any]:
        """Return the one resource of a kind, whose name ends so."""
        [found] = [
            one
            for one in self.resources
            if one["kind"] == kind and one["metadata"]["name"].endswith(f"tidegauge{suffix}")
        ]
        return found

    def kinds(self) -> list[str]:
        return sorted(one["kind"] for one in self.resources)


class Helm:
    """Helm, by the Python of an environment that has it."""

    def __init__(self, python: Path) -> None:
        self._python = python

    def render(
        self, values: Mapping[str, Any], *, name: str = "tidegauge", namespace: str = "tidegauge"
    ) -> Rendered:
        """Render the chart. Raises `RejectedError`."""
        request = {"chart": str(CHART), "values": values, "name": name, "namespace": namespace}
        done = subprocess.run(
            [self._python, "-c", _RENDER],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        if "error" in found:
            raise RejectedError(found["error"])
        notes = ""
        resources: list[dict[str, Any]] = []
        for path, text in found["made"].items():
            if path.endswith("NOTES.txt"):
                notes = text
            elif text.strip():
                resources += [one for one in YAML(typ="safe").load_all(text) if one]
        worse = [each["error"] for each in found["lint"]["messages"] if each["severity"] > 1]
        return Rendered(tuple(resources), notes, tuple(worse))


def install_helm(folder: Path) -> Helm:
    """Install Helm into a folder; skip the test where PyPI does not have it for the platform."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    python, listed = folder / "bin/python", folder / "requirements.txt"
    listed.write_text(" ".join([PACKAGE, *(f"--hash=sha256:{each}" for each in DIGESTS)]))
    done = subprocess.run(
        [
            *(python, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"),
            *("--require-hashes", "-r", listed),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if "No matching distribution" in done.stderr and not os.environ.get(REQUIRE):
        pytest.skip(f"PyPI does not have {PACKAGE} for this platform, or is not reached")
    assert done.returncode == 0, done.stderr
    return Helm(python)
