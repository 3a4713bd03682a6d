"""The documents for users, and the blocks of code in them: which test runs which."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import getdoc
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]

EXECUTED: Final = {
    "post()": "tests/acceptance/test_readme.py",
    "define()": "tests/acceptance/test_readme.py",
    "seq 60": "tests/acceptance/test_readme.py",
    "define parcels": "tests/acceptance/test_readme.py",
    "def pending(": "tests/acceptance/test_readme.py",
    "define trams": "tests/acceptance/test_readme.py",
    "define meters": "tests/acceptance/test_readme.py",
    "times=$(python3": "tests/acceptance/test_readme.py",
    "define orders": "tests/acceptance/test_readme.py",
    "define uploads": "tests/acceptance/test_readme.py",
    "define changed": "tests/acceptance/test_readme.py",
    "define wells ": "tests/acceptance/test_readme.py",
    "define flights": "tests/acceptance/test_readme.py",
    "claim flights sessions": "tests/acceptance/test_readme.py",
    'job="water"': "tests/acceptance/test_readme.py",
    'job="sales"': "tests/acceptance/test_readme.py",
    'job="nightly"': "tests/acceptance/test_readme.py",
    'job="wind"': "tests/acceptance/test_readme.py",
    'job="gas"': "tests/acceptance/test_readme.py",
    'job="pumps"': "tests/acceptance/test_readme.py",
    'job="sun"': "tests/acceptance/test_readme.py",
    'job=f"arcade-{output_time}"': "tests/acceptance/test_readme.py",
    'job="power"': "tests/acceptance/test_readme.py",
    'job=f"taps-{name}"': "tests/acceptance/test_readme.py",
    'job="election"': "tests/acceptance/test_readme.py",
    'job="lifts"': "tests/spark/test_kafka.py",
    "compileall": "tests/acceptance/test_python_processes.py",
    "tidegauge keys revoke": "tests/acceptance/test_readme.py",
    "tidegauge serve --port 8000": "tests/acceptance/test_readme.py",
    "tidegauge explain scores": "tests/acceptance/test_readme.py",
    "tidegauge explain JOB STAGE": "tests/acceptance/test_readme.py",
    "./close-books": "tests/integration/test_client.py",
    "/etc/tidegauge/reader.key": "tests/integration/test_client.py",
    "import asyncio": "tests/integration/test_client.py",
    "waited.seen": "tests/integration/test_client.py",
    "from airflow": "tests/integration/schedulers/test_airflow.py",
    "from dagster": "tests/integration/schedulers/test_dagster.py",
    "openapi-python-client generate": "tests/integration/test_generated_clients.py",
    "tidegauge_http.api.leases": "tests/integration/test_generated_clients.py",
    "npx openapi-typescript": "tests/integration/test_generated_clients.py",
    "tidegauge schema >": "tests/integration/test_schema_command.py",
    "relay.step()": "tests/integration/test_relays.py",
}
"""Code that one block of shell or Python contains, and the tests that run the block."""

NOT_EXECUTED: Final = {
    "pip install 'tidegauge[spark]'        #": "installs packages",
    "pip install 'tidegauge[spark]'\n": "installs packages",
    "spark-submit --packages": "downloads packages; the tests have the same in spark.jars",
    "make demo     #": "the demo is tests/acceptance/test_demo.py, and the tests do not run themselves",
    "make bench    #": "takes minutes, and measures",
    "python -m benchmarks --only scale    #": "takes minutes, and measures",
    "--workers 2": "needs Redis and Postgres at these addresses; tests/integration/test_replicas.py",
    "docker build -f": "needs Docker and a registry; tests/acceptance/test_deploy.py reads the file",
    "kubectl create namespace": "needs a cluster; tests/acceptance/test_helm.py checks the entries",
    "docker compose up": "needs Docker; tests/acceptance/test_deploy.py runs the programs without it",
    "OTEL_TRACES_EXPORTER=otlp": "variables of a process: tests/integration/test_tracing.py sets them",
}
"""Code that one block contains which no test runs, and the reason."""


DOCSTRINGS: Final = {
    **dict.fromkeys(
        (
            "AggregatorError",
            "Arrival",
            "AsyncClient",
            "Client",
            "NotInTime",
            "Relay",
            "Unavailable",
            "Wrong",
        ),
        "tests/integration/test_docstrings.py",
    ),
    **dict.fromkeys(
        ("FinalSourceError", "OldCheckpointError", "StageTakenError", "UnsoundPlanError"),
        "tests/spark/test_docstrings.py",
    ),
    "Pipeline": "tests/spark/test_examples.py",
}
"""Public classes with a block of Python in the docstring, and the tests that run the block.

The others have doctests, which pytest runs itself.
"""


class Block(NamedTuple):
    """A fenced block of code."""

    page: str
    language: str
    text: str


def pages() -> dict[str, str]:
    """Return the README and all pages of `docs/`, by their paths."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def blocks() -> Iterator[Block]:
    """Return every fenced block of these pages."""
    for page, text in pages().items():
        for language, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            yield Block(page, language, code)


def example_of(public: type) -> str:
    """Return the block of Python in the docstring of a public class."""
    [code] = re.findall(r"^```python\n(.*?)^```$", getdoc(public) or "", re.DOTALL | re.MULTILINE)
    return code


def promised_output(code: str) -> str:
    """Return the pattern of an example's output: the comments of its prints, with `…` for anything."""
    lines = re.findall(r"print\(.*\)    # (.+)$", code, re.MULTILINE)
    return "".join(re.escape(each).replace("…", ".*") + "\n" for each in lines)


def block(language: str, containing: str) -> str:
    """Return the one block with this code, which the tests are to run."""
    assert language not in {"sh", "python"} or containing in EXECUTED, "add it to EXECUTED"
    [one] = [
        each.text for each in blocks() if each.language == language and containing in each.text
    ]
    return one
