"""Generates pages of the site that are not in `docs/`: top-level documents, the OpenAPI, problems."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from service.api import spec_schema
from service.api.problem_pages import problem_types, remedy
from service.server.app import create_app
from service.settings import Settings

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
"""Documents outside `docs/`, and their pages in the site."""
LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
PICTURE: Final = re.compile(r'(src(?:set)?)="docs/')
SERVERS: Final = [
    {
        "url": "{address}",
        "description": "Any service",
        "variables": {"address": {"default": "http://127.0.0.1:8000"}},
    }
]
"""In the published document: the document of a service has its own address."""
METHODS: Final = ("get", "put", "post", "delete")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for source, page in PAGES.items():
        text = PICTURE.sub(r'\1="', (ROOT / source).read_text())
        files.append(File.generated(config, page, content=relinked(text, source, page)))
    settings = Settings(_env_file=None)  # pyright: ignore[reportCallIssue]
    document: dict[str, Any] = create_app(settings).openapi()
    files.append(File.generated(config, "api/openapi.md", content=openapi_page(document)))
    published = json.dumps({**document, "servers": SERVERS}, indent=2)
    files.append(File.generated(config, "api/openapi.json", content=published))
    schema = spec_schema.written()
    files.append(File.generated(config, "api/specification.schema.json", content=schema))
    files.append(File.generated(config, "api/problems.md", content=problems_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Direct links that leave `docs/` to the generated pages."""
    uri = page.file.src_uri
    return markdown if uri in PAGES.values() else relinked(markdown, f"docs/{uri}", uri)


def relinked(text: str, source: str, page: str) -> str:
    """Return a document with the site's links; links to files that are not pages become text.

    >>> relinked("[a](docs/eta.md#history), [b](LICENSE)", "README.md", "index.md")
    '[a](eta.md#history), b'
    >>> relinked("[c](../../README.md)", "docs/api/lags.md", "api/lags.md")
    '[c](../index.md)'
    """

    def link(found: re.Match[str]) -> str:
        path, hash_, anchor = found[2].partition("#")
        if not path or ":" in path:
            return found[0]
        target = page_of(_normal(PurePosixPath(source).parent / path))
        if target is None:
            return found[1]
        ups = "../" * (len(PurePosixPath(page).parts) - 1)
        return f"[{found[1]}]({ups}{target}{hash_}{anchor})"

    return LINK.sub(link, text)


def page_of(path: str) -> str | None:
    """Return the page of a file of the repository, or `None` for a file that is not a page."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def problems_page() -> str:
    """Return the page of all types of problems: a section for each slug."""
    lines = [
        "# Problems",
        "",
        "Errors are RFC 9457 problems. The `type` is `/problems/` and one of these names, and is also",
        "the address of a page of the service. A rejected request changes nothing.",
        "",
    ]
    for error in problem_types():
        lines += [f"## {error.slug}", "", f"`{error.status}`: {error.title()}", ""]
        lines += [remedy(error), ""]
    return "\n".join(lines)


def openapi_page(document: Mapping[str, Any]) -> str:
    """Return an OpenAPI document as Markdown: each operation, then each schema."""
    lines = [
        "# Reference of the HTTP API",
        "",
        "Generated from the service's OpenAPI document, [`openapi.json`](openapi.json). Every service",
        "shows the document at `/docs`. A service without keys leaves out `security`.",
        "",
    ]
    for tag, operations in _by_tag(document).items():
        lines += [f"## {tag.capitalize()}", ""]
        for method, path, operation in operations:
            lines += _operation(method, path, operation)
    lines += ["## Schemas", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += _schema(name, schema)
    return "\n".join(lines)


def _by_tag(document: Mapping[str, Any]) -> dict[str, list[tuple[str, str, Mapping[str, Any]]]]:
    """Return the operations by their first tag, each with its method and path."""
    found: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for path, operations in document["paths"].items():
        for method in METHODS:
            if method in operations:
                tag = operations[method]["tags"][0]
                found.setdefault(tag, []).append((method, path, operations[method]))
    return found


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"### {operation['summary']}", "", f"`{method.upper()} {path}`", "")
    if described := operation.get("description"):
        yield from (described, "")
    if parameters := operation.get("parameters"):
        yield from ("| parameter | in | type | |", "|---|---|---|---|")
        for each in parameters:
            name = f"`{each['name']}`" + ("" if each.get("required") else " (optional)")
            kind = _type(each.get("schema", {}))
            yield f"| {name} | {each['in']} | {kind} | {_cell(each.get('description', ''))} |"
        yield ""
    if body := operation.get("requestBody"):
        yield from (f"Body: {_content(body)}", "")
    yield from ("| status | response | |", "|---|---|---|")
    for status, response in operation["responses"].items():
        yield f"| {status} | {_content(response)} | {_cell(response.get('description', ''))} |"
    yield ""


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"### {name}", "")
    if described := schema.get("description"):
        yield from (described, "")
    properties: Mapping[str, Any] = schema.get("properties", {})
    if not properties:
        yield from (_type(schema), "")
        return
    required = set(schema.get("required", ()))
    yield from ("| member | type | |", "|---|---|---|")
    for member, each in properties.items():
        shown = f"`{member}`" + ("" if member in required else " (optional)")
        yield f"| {shown} | {_type(each)} | {_cell(each.get('description', ''))} |"
    yield ""


def _content(holder: Mapping[str, Any]) -> str:
    """Return the types of a body, or of a response."""
    content: Mapping[str, Any] = holder.get("content", {})
    return "; ".join(
        f"`{media}` {_type(each.get('schema', {}))}".rstrip() for media, each in content.items()
    )


def _type(schema: Mapping[str, Any]) -> str:  # noqa: PLR0911  (one line for each form)
    """Return a schema in a few words, with a link to a named one."""
    if reference := schema.get("$ref"):
        name = str(reference).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_type(each) for each in schema[several])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    match schema.get("type"):
        case "array":
            return f"array of {_type(schema.get('items', {})) or 'any'}"
        case "object":
            values: Mapping[str, Any] | bool = schema.get("additionalProperties", False)
            return "object" if isinstance(values, bool) else f"object of {_type(values) or 'any'}"
        case None:
            return ""
        case kind:
            return str(kind)


def _cell(text: str) -> str:
    """Return a description in one line of a table."""
    return " ".join(text.split()).replace("|", "\\|")
