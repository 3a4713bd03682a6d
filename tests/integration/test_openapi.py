"""The OpenAPI document as other programs read it: names, media types, patterns, problems and keys."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import re2

from service.api.problem_pages import REMEDIES, problem_types
from service.api.problems import problem_response
from service.errors import ProblemError
from service.server.app import create_app
from service.settings import Settings
from tests.support.api import Api, ok
from tests.support.inprocess import InProcess, with_schema

pytestmark = pytest.mark.anyio

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final[dict[str, Any]] = create_app(Settings(_env_file=None)).openapi()  # pyright: ignore[reportCallIssue]
OPERATIONS: Final[dict[str, dict[str, Any]]] = {
    f"{method.upper()} {path}": operation
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
}


def patterns(schema: Any) -> Iterator[str]:
    match schema:
        case dict():
            for name, value in schema.items():
                if name == "pattern" and isinstance(value, str):
                    yield value
                else:
                    yield from patterns(value)
        case list():
            for each in schema:
                yield from patterns(each)
        case _:
            pass


def test_operation_ids_read_well_in_generated_clients() -> None:
    ids = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+){0,2}", each) for each in ids), ids
    path = "/v1/jobs/{job}/stages/{stage}/watermark"
    assert OPERATIONS[f"GET {path}"]["operationId"] == "get_watermark"


def test_licence_and_description_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = DOCUMENT["info"]
    assert info["license"]["identifier"] == project["license"]
    assert "RFC 3339" in info["description"]
    used = {tag for operation in OPERATIONS.values() for tag in operation["tags"]}
    assert used == {tag["name"] for tag in DOCUMENT["tags"]}


def test_the_server_is_relative_to_the_document() -> None:
    (server,) = DOCUMENT["servers"]
    base = httpx.URL("https://proxy.example/gauge/openapi.json").join(server["url"])
    assert str(base) == "https://proxy.example/gauge/"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_answer_has_one_media_type(operation: str) -> None:
    responses = OPERATIONS[operation]["responses"]
    for status, response in responses.items():
        assert len(response.get("content", {})) == (0 if status in {"204", "304"} else 1), status


def test_streams_and_metrics_are_text() -> None:
    for operation, media_type in {
        "GET /v1/jobs/{job}/events": "text/event-stream",
        "GET /metrics": "text/plain",
    }.items():
        content = OPERATIONS[operation]["responses"]["200"]["content"]
        assert content == {media_type: {"schema": {"type": "string"}}}


def test_other_engines_compile_every_pattern() -> None:
    """RE2 and Go have neither look-around nor references, which JavaScript has."""
    found = set(patterns(DOCUMENT))
    assert len(found) >= 4
    for pattern in found:
        re2.compile(pattern)
        assert r"\Z" not in pattern, "not in JavaScript"


def test_patterns_still_exclude_a_newline_at_the_end() -> None:
    """For Python the checks keep their addition."""
    name = DOCUMENT["components"]["schemas"]["OpenRun"]["properties"]["holder"]["pattern"]
    assert re2.search(name, "worker\n") is None
    assert re.search(name, "worker\n") is not None


async def test_a_name_with_a_newline_is_rejected(api: Api) -> None:
    await api.define({"s": {"shards": ["0"]}})
    response = await api.client.post(f"{api.root}/runs", json={"stages": ["s"], "holder": "w\n"})
    assert response.status_code == 422


async def test_security_is_there_only_with_keys(tmp_path: Path) -> None:
    async with InProcess(with_schema(tmp_path)) as gauge:
        before = ok(await gauge.client.get("/openapi.json"))
        assert "securitySchemes" not in before["components"]
        assert not [each for each in operations(before) if "security" in each]
        created = ok(
            await gauge.client.post("/v1/keys", json={"name": "root", "role": "admin"}), 201
        )
        after = ok(await gauge.client.get("/openapi.json"))
        assert list(after["components"]["securitySchemes"]) == ["key"]
        assert [each for each in operations(after) if each.get("security") == [{"key": []}]]
        assert after == json.loads(json.dumps(DOCUMENT))
        bearer = {"Authorization": f"Bearer {created['secret']}"}
        ok(await gauge.client.delete("/v1/keys/root", headers=bearer), 204)
        assert ok(await gauge.client.get("/openapi.json")) == before


def operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for path in document["paths"].values() for each in path.values()]


def test_each_type_of_problem_has_a_remedy() -> None:
    assert set(REMEDIES) == set(problem_types())
    slugs = [error.slug for error in problem_types()]
    assert len(set(slugs)) == len(slugs)


def test_errors_of_other_modules_have_the_slugs_of_these() -> None:
    known = {error.slug for error in problem_types()}
    ahead = [ProblemError]
    while ahead:
        ahead += ahead.pop().__subclasses__()
        for error in ahead:
            assert error.slug in known | {"store-refused", "cannot-start"}, error


async def test_the_type_of_each_problem_is_the_address_of_its_page(gauge: InProcess) -> None:
    for error in problem_types():
        # Some need more parameters, and their pages do not depend on them.
        made = error.__new__(error)
        ProblemError.__init__(made, "", denied=[])
        kind = json.loads(bytes(problem_response(made).body))["type"]
        page = await gauge.client.get(kind)
        assert page.status_code == 200, kind
        assert page.headers["content-type"].startswith("text/html")
        assert f"<h1>{error.slug}</h1>" in page.text
        assert str(error.status) in page.text
        assert "<script" not in page.text
    index = await gauge.client.get("/problems")
    for error in problem_types():
        assert f'href="problems/{error.slug}"' in index.text


async def test_a_page_of_a_problem_needs_no_key(tmp_path: Path) -> None:
    async with InProcess(with_schema(tmp_path)) as gauge:
        ok(await gauge.client.post("/v1/keys", json={"name": "root", "role": "admin"}), 201)
        refused = await gauge.client.get("/v1/jobs")
        assert refused.status_code == 401
        page = await gauge.client.get(refused.json()["type"])
        assert page.status_code == 200
        assert "unauthenticated" in page.text
