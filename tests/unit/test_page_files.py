"""The page's files: what is vendored is what it says, all is small, and nothing is from elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from service.api.page import policy

SITE = Path(__file__).resolve().parents[2] / "service" / "api" / "site"
VENDOR = SITE / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text())
OWN = [path for path in SITE.rglob("*") if path.is_file() and VENDOR not in path.parents]
MOST_BYTES = 300_000
MOST_LINES = 400


def test_vendored_files_are_those_of_the_manifest() -> None:
    listed = {
        name: each["sha256"]
        for library in MANIFEST["libraries"]
        for name, each in library["files"].items()
    }
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.is_file() and path.name != "manifest.json"
    }
    assert found == listed


def test_each_library_comes_with_its_licence_and_source() -> None:
    for library in MANIFEST["libraries"]:
        assert library["licence"] in {"MIT", "Apache-2.0"}
        text = (VENDOR / library["licence_file"]).read_text()
        assert {"MIT": "Permission is hereby granted", "Apache-2.0": "Apache License"}[
            library["licence"]
        ] in text
        assert library["source"] == f"npm:{library['name'].lower()}@{library['version']}"
    licences = {library["licence_file"] for library in MANIFEST["libraries"]}
    assert licences == {f"licences/{path.name}" for path in (VENDOR / "licences").iterdir()}


def test_all_of_it_is_small() -> None:
    files = [
        path for path in SITE.rglob("*") if path.suffix in {".js", ".mjs", ".css", ".html", ".svg"}
    ]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES


@pytest.mark.parametrize("path", OWN, ids=lambda path: str(path.relative_to(SITE)))
def test_no_own_file_is_long_or_names_another_server(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES
    # The namespace of SVG is no address that anybody fetches.
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", text) == []


def test_modules_import_only_files_that_are_there() -> None:
    names = set(
        json.loads(re.findall(r'importmap">(.*?)</script>', (SITE / "index.html").read_text())[0])[
            "imports"
        ]
    )
    for path in SITE.rglob("*.js"):
        if VENDOR in path.parents:
            continue
        for imported in re.findall(r'\bfrom "([^"]+)"', path.read_text()):
            assert imported in names or (path.parent / imported).is_file(), (path, imported)


def test_the_policy_allows_the_import_map_alone() -> None:
    page = (SITE / "index.html").read_bytes()
    allowed = policy(page)
    assert allowed.count("sha256-") == 1
    assert policy(page.replace(b"htm.mjs", b"other.mjs")) != allowed
