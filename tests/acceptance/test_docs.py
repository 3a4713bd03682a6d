"""The site of the documentation: built as `make docs` does, strictly and without another host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import spark_agent
from service.api import spec_schema
from service.api.problem_pages import problem_types
from spark_agent.cli.common import DEFAULT_URL
from tests.support.server import ROOT

REQUESTED = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
}
"""The attributes of a page that a browser requests by itself."""


class Requests(HTMLParser):
    """The addresses that a browser requests for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value for name, value in attrs if value and name in REQUESTED.get(tag, ())
        ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


pytestmark = pytest.mark.xdist_group("site")


def test_no_page_makes_a_request_to_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        requests = Requests()
        requests.feed(page.read_text())
        assert requests.addresses
        for address in requests.addresses:
            assert not address.startswith(("http:", "https:", "//")), (page.name, address)
            # The page of an unknown address is served at any depth, with absolute addresses.
            if page.name != "404.html" and not address.startswith("data:"):
                path = address.partition("#")[0].partition("?")[0]
                assert (page.parent / path).exists(), (page.name, address)
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(), style.name
        assert "@import" not in style.read_text(), style.name


def test_every_page_is_in_the_navigation(site: Path) -> None:
    navigation = (site / "glossary.html").read_text()
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    generated = ["examples.md", "architecture.md", "contributing.md", "changelog.md"]
    for page in [*map(Path.as_posix, pages), *generated, "api/openapi.md", "api/problems.md"]:
        link = Path(page).with_suffix(".html").as_posix()
        shown = "./" if page == "glossary.md" else link
        assert f'href="{shown}"' in navigation or f'href="{link}"' in navigation, page


def test_the_public_names_have_their_reference(site: Path) -> None:
    page = (site / "python-api.html").read_text()
    for name in spark_agent.__all__:
        assert f'id="spark_agent.{name}"' in page, name


def test_the_reference_of_the_http_api_has_every_route(site: Path) -> None:
    page = (site / "api/openapi.html").read_text()
    assert "/v1/jobs/{job}/stages/{stage}/watermark" in page
    assert 'href="openapi.json"' in page
    assert (site / "api/openapi.json").exists()
    assert not list(site.rglob("*.py")), "the hooks are not part of the site"


def test_each_problem_has_its_section(site: Path) -> None:
    page = (site / "api/problems.html").read_text()
    for error in problem_types():
        assert f'id="{error.slug}"' in page, error.slug


def test_the_schema_of_specifications_is_published(site: Path) -> None:
    assert (site / "api/specification.schema.json").read_text() == spec_schema.written()


def test_the_published_document_does_not_name_its_own_site_as_the_server(site: Path) -> None:
    published = json.loads((site / "api/openapi.json").read_text())
    (server,) = published["servers"]
    assert server["variables"]["address"]["default"] == DEFAULT_URL
