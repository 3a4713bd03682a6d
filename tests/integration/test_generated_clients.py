"""Clients that generators make from the OpenAPI document: type-checked, and run against a service."""

from __future__ import annotations

import importlib
import json
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import httpx
import pytest

from tests.support.api import ok
from tests.support.commands import run
from tests.support.documents import block
from tests.support.required import program
from tests.support.server import Service

ROOT: Final = Path(__file__).parents[2]
WATERMARK: Final = 1767225590000
"""The output watermark at the end of the walk."""

# The TypeScript client is made once, and each client from the one running service.
pytestmark = pytest.mark.xdist_group("generated clients")

CHECKED: Final[dict[str, Any]] = {
    "typeCheckingMode": "standard",
    "pythonVersion": "3.11",
    "include": ["walk.py", "tidegauge_http"],
    # The same for every document, and with parameters of `object` that httpx does not take.
    "ignore": ["tidegauge_http/client.py"],
}


@pytest.fixture(scope="module")
def generated(server: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the generated package and the walk of the page."""
    folder = tmp_path_factory.mktemp("python")
    command = block("sh", "openapi-python-client generate").strip()
    run("bash", "-c", f"{command} --fail-on-warning", folder=folder, variables={"URL": server.url})
    (folder / "walk.py").write_text(block("python", "tidegauge_http.api.leases"))
    sys.path.insert(0, str(folder))
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def walk(generated: Path) -> ModuleType:
    assert generated.exists()
    return importlib.import_module("walk")


def test_the_python_client_passes_a_type_check(generated: Path) -> None:
    environment = {"venvPath": str(Path(sys.prefix).parent), "venv": Path(sys.prefix).name}
    settings = {**CHECKED, **environment}
    (generated / "pyrightconfig.json").write_text(json.dumps(settings))
    found = run("basedpyright", "-p", "pyrightconfig.json", folder=generated)
    assert "0 errors, 0 warnings" in found


def test_the_python_client_has_a_module_for_each_operation(
    generated: Path, server: Service
) -> None:
    document = ok(httpx.get(f"{server.url}/openapi.json"))
    ids = {each["operationId"] for path in document["paths"].values() for each in path.values()}
    assert {path.stem for path in generated.glob("tidegauge_http/api/*/*.py")} - {"__init__"} == ids


@pytest.fixture(scope="module")
def walked(walk: ModuleType, server: Service) -> int:
    """Result of the walk, which a service takes once: its epoch is committed then."""
    return walk.walk(server.url)


def test_the_walk_of_the_python_client(walked: int) -> None:
    assert walked == WATERMARK


def test_the_python_client_reads_each_answer(
    walk: ModuleType, walked: int, server: Service
) -> None:
    """Only what reads: with the job of the walk, and without the stream, which has no end."""
    package = importlib.import_module("tidegauge_http.api")
    names = {"job": "generated", "stage": "mobile", "at": walked}
    read: list[str] = []
    with walk.Client(server.url, raise_on_unexpected_status=True) as client:
        for info in pkgutil.walk_packages(package.__path__, "tidegauge_http.api."):
            name = info.name.rpartition(".")[2]
            if not name.startswith(("get_", "list_", "explain", "who_")) or name == "get_events":
                continue
            if info.ispkg:
                continue
            module = importlib.import_module(info.name)
            needed = {k: v for k, v in names.items() if k in module.sync_detailed.__annotations__}
            answered = module.sync_detailed(client=client, **needed)
            assert answered.status_code == 200, (name, answered.content)
            if name != "get_metrics":
                assert shape(answered.parsed.to_dict()) == shape(json.loads(answered.content)), name
            read.append(name)
    assert len(read) >= 18


def shape(value: Any) -> Any:
    """Return the members and types of JSON. A client may write an instant in another form."""
    match value:
        case dict():
            return {name: shape(each) for name, each in value.items()}
        case list():
            return [shape(each) for each in value]
        case _:
            return type(value)


def test_the_python_client_reads_a_problem(walk: ModuleType, server: Service) -> None:
    with walk.Client(server.url) as client:
        problem = walk.get_watermark.sync("no-such-job", "mobile", client=client)
    assert problem.type_ == "/problems/unknown-job"
    assert httpx.get(f"{server.url}{problem.type_}").status_code == 200


@pytest.fixture(scope="module")
def compiled(server: Service, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the generated types and the walk of the page, compiled strictly."""
    install = "install Node.js 20 or later"
    program("node", install=install, required=False)
    npm = program("npm", install=install, required=False)
    folder = tmp_path_factory.mktemp("typescript")
    shutil.copytree(ROOT / "tests/data/typescript", folder, dirs_exist_ok=True)
    fetch_packages(npm, folder)
    run(
        "bash",
        "-c",
        block("sh", "npx openapi-typescript"),
        folder=folder,
        variables={"URL": server.url},
    )
    (folder / "walk.ts").write_text(block("typescript", "openapi-fetch"))
    run("npx", "--no-install", "tsc", "--project", ".", folder=folder)
    return folder


def fetch_packages(npm: Path, folder: Path) -> None:
    """Fetch the locked packages; skip the test where their registry is not reached."""
    quiet = ("--prefer-offline", "--ignore-scripts", "--no-audit", "--no-fund")
    done = subprocess.run(
        [npm, "ci", *quiet], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        for code in ("EAI_AGAIN", "ECONNREFUSED", "ENETUNREACH", "ENOTFOUND", "ETIMEDOUT"):
            if code in done.stderr:
                pytest.skip(f"packages of npm cannot be fetched: {code}")
        pytest.fail(done.stderr)


def test_the_walk_of_the_typescript_client(compiled: Path, server: Service) -> None:
    start = "import { walk } from './out/walk.js'; console.log(await walk(process.env.URL));"
    (compiled / "start.mjs").write_text(start)
    printed = run("node", "start.mjs", folder=compiled, variables={"URL": server.url})
    assert printed.strip() == str(WATERMARK)


def test_the_types_of_typescript_are_strict(compiled: Path) -> None:
    wrong = (compiled / "walk.ts").read_text().replace('holder: "driver-1"', "holder: 1")
    (compiled / "walk.ts").write_text(wrong)
    refused = subprocess.run(
        ["npx", "--no-install", "tsc", "--project", ".", "--noEmit"],
        cwd=compiled,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Type 'number' is not assignable to type 'string'" in refused.stdout
