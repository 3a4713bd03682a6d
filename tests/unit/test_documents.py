"""Names and links in the documents exist, and each term has one definition."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from inspect import getdoc
from pathlib import Path
from pydoc import locate
from typing import Final

import pytest

import service
import spark_agent
from service.aggregator.conditions import Condition
from service.frontier.graph import Status
from service.frontier.health import Health, Outcome
from tests.support.documents import DOCSTRINGS, example_of

ROOT = Path(__file__).parent.parent.parent
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
FOLDERS = (
    "",
    "docs",
    "service",
    "service/api",
    "service/frontier",
    "service/live",
    "tests/conformance",
    "tests",
)
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder, pattern in (("", "*.md"), ("docs", "**/*.md"), ("examples", "*.md"))
    for path in (ROOT / folder).glob(pattern)
)
WRITTEN: Final = "deploy/secrets"
"""Folder that `make secrets` writes, and git ignores."""
GLOSSARY: Final = "docs/glossary.md"
TERMS: Final = (
    "advance", "agreement", "attempt", "backlog", "checkpoint", "claim", "commit",
    "dynamic source", "early result", "epoch", "facts", "fence", "fenced", "final", "generation",
    "health", "hold", "holder", "idle", "incarnation",
    "input watermark", "job", "key range", "keyed stage", "late row", "layout", "lease", "ledger",
    "live store", "mark", "oldest work", "outcome", "output time", "output watermark", "pending",
    "percentile watermark", "policy", "problem", "processing watermark", "promise", "range", "report",
    "retired", "run", "shard", "source", "stage", "strategy", "throttle", "token", "watermark", "worker",
)  # fmt: skip


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def prose(document: str) -> str:
    """Return a document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text_of(document), flags=re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    plain = re.sub(r"[`*]", "", heading.strip().lower())
    return re.sub(r"[^\w -]", "", plain).replace(" ", "-")


def anchors(document: str) -> list[str]:
    return [anchor(each) for each in re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)]


def links(document: str) -> Iterator[tuple[Path, str]]:
    """Return the relative links of a document, and of its pictures, with their anchors."""
    text = prose(document)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text)
    for link in found:
        if not re.match(r"[a-z]+:", link):
            path, _, fragment = link.partition("#")
            target = (ROOT / document).parent / path if path else ROOT / document
            yield target.resolve(), fragment


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_named_is_there(document: str) -> None:
    names = re.findall(r"`([\w./-]+)`", prose(document))
    for name in names:
        if name.startswith("test_") and not name.endswith(".py"):
            assert f"def {name}(" in TESTS
        elif is_a_path(name, document) and not name.startswith(WRITTEN):
            folders = [*FOLDERS, str(Path(document).parent)]
            assert any((ROOT / folder / name).exists() for folder in folders), name


def is_a_path(name: str, document: str) -> bool:
    """Check that a name is of a file; in the pages for users, by the folder that it begins with."""
    if document in {"ARCHITECTURE.md", "CONTRIBUTING.md"}:
        return bool(re.search(r"/|\.(py|md|lua|json)$", name))
    return name.partition("/")[0] in {
        "benchmarks",
        "deploy",
        "docs",
        "examples",
        "service",
        "tests",
    } and ("/" in name)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_and_members_that_are_named_are_there(document: str) -> None:
    for name in re.findall(r"`((?:spark_agent|service)(?:\.\w+)+)[`(]", prose(document)):
        assert locate(name) is not None, name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_lead_to_files_and_headings(document: str) -> None:
    generated = {
        "openapi.md",
        "openapi.json",
        "problems.md",
        "specification.schema.json",
    }  # files of the site alone
    for target, fragment in links(document):
        if target.name not in generated:
            assert target.exists(), target
            assert target.is_relative_to(ROOT), target
            if fragment:
                assert fragment in anchors(target.relative_to(ROOT).as_posix()), (target, fragment)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_of_python_and_tests_are_there(document: str) -> None:
    text = text_of(document)
    for module in re.findall(r"python -m ((?:benchmarks|service|tests)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for argument in re.findall(r"\b(tests/[\w/.]*\w)", text):
        assert (ROOT / argument).exists(), argument
    makefile = text_of("Makefile")
    for target in re.findall(r"(?:`|^)make ([a-z]+(?:-[a-z]+)?)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_public_class_has_an_example_that_a_test_runs() -> None:
    for name in sorted(spark_agent.__all__):
        document = getdoc(getattr(spark_agent, name)) or ""
        if name in DOCSTRINGS:
            assert example_of(getattr(spark_agent, name))
            assert re.search(rf"(run|example_of)\({name}\b", text_of(DOCSTRINGS[name])), name
        else:
            assert ">>> " in document, name
            assert "```" not in document, name
        summary, _, context = document.partition("\n\n")
        assert summary.endswith("."), name
        assert context[:1].isupper() or context.startswith("`"), f"{name} lacks a paragraph"


def test_the_readme_is_for_five_minutes() -> None:
    assert len(text_of("README.md").splitlines()) <= 250


def test_each_term_is_defined_once() -> None:
    defined = re.findall(r"^### (.+)\n(.+)$", text_of(GLOSSARY), re.MULTILINE)
    assert sorted(term.lower() for term, _ in defined) == list(TERMS)
    for term, definition in defined:
        assert len(definition) > 10, term
    assert len(anchors(GLOSSARY)) == len(set(anchors(GLOSSARY))), "each anchor is one definition"


def test_no_other_document_has_a_table_of_terms() -> None:
    for document in DOCUMENTS:
        assert "| term | meaning |" not in text_of(document), document


def glossary_links(document: str) -> set[str]:
    return {
        fragment for target, fragment in links(document) if target == (ROOT / GLOSSARY).resolve()
    }


def test_the_terms_of_the_architecture_lead_to_the_glossary() -> None:
    text, linked = prose("ARCHITECTURE.md"), glossary_links("ARCHITECTURE.md")
    assert linked - {""} <= {anchor(term) for term in TERMS}
    for term in TERMS:
        if re.search(rf"\b{term}s?\b", text, re.IGNORECASE):
            assert anchor(term) in linked, term


EVERYDAY: Final = {"health", "job", "mark", "run"}
"""Terms that the README also uses as everyday words."""


def test_the_readme_links_each_term_where_it_is_first_used() -> None:
    text = re.sub(r"`[^`]*`|^#.*$", "", prose("README.md"), flags=re.MULTILINE)
    linked = {anchor(term) for term in TERMS}
    assert glossary_links("README.md") - {""} <= linked
    for term in set(TERMS) - EVERYDAY:
        # Addresses of links are not uses of a term.
        first = re.search(rf"\b{term}s?\b(?![^()\s]*\))", text, re.IGNORECASE)
        if first is not None:
            rest = text[first.start() :]
            assert re.match(rf"[^\[\]]*\]\(docs/glossary\.md#{anchor(term)}\)", rest), rest[:80]


def test_the_health_states_are_the_code_s() -> None:
    table = text_of("docs/api/health.md").partition("| health | severity | |")[2].split("\n\n")[0]
    states = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)))
    assert sorted(states) == sorted(Health)


STATES: Final[Mapping[str, type[StrEnum]]] = {
    "status": Status,
    "health": Health,
    "condition": Condition,
    "outcome": Outcome,
}


def states_of_the_glossary() -> dict[str, tuple[list[str], str]]:
    """Each state, with what may have it, and its meaning."""
    table = text_of(GLOSSARY).partition("| state | of | meaning |")[2].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    return {state: (of.split(", "), meaning) for state, of, meaning in rows}


def test_one_table_has_all_states_and_no_other() -> None:
    found = states_of_the_glossary()
    for of, states in STATES.items():
        assert sorted(s for s, (owners, _) in found.items() if of in owners) == sorted(states), of
    assert {of for owners, _ in found.values() for of in owners} == STATES.keys()


@pytest.mark.parametrize(
    ("path", "pattern", "of"),
    [
        ("spark_agent/cli/health.py", r"_WORST_FIRST[^=]+= \(([^)]+)\)", "health"),
        ("spark_agent/client/responses.py", r"\bHealth = Literal\[([^\]]+)\]", "health"),
        ("spark_agent/client/responses.py", r"\bRunOutcome = Literal\[([^\]]+)\]", "outcome"),
    ],
)
def test_the_states_of_the_agent_are_the_service_s(path: str, pattern: str, of: str) -> None:
    [listed] = re.findall(pattern, text_of(path))
    assert sorted(re.findall(r'"(\w+)"', listed)) == sorted(STATES[of])


def test_the_page_has_the_states_of_the_glossary() -> None:
    code = text_of("service/api/site/parts/status.js")
    [table] = re.findall(r"KINDS = \{\n(.*?)^\};", code, re.DOTALL | re.MULTILINE)
    kinds = re.findall(r'^  (\w+): \["(.)", "([^"]+)", "([^"]+)"\],$', table, re.MULTILINE)
    assert len(kinds) == len(table.splitlines())
    found = states_of_the_glossary()
    shown = {*Status, *Health} - {Health.OK}
    assert {kind for kind, *_ in kinds} == shown
    for kind, _, word, title in kinds:
        meaning = found[kind][1]
        assert (word, title) == (kind.replace("_", " "), meaning[0].upper() + meaning[1:])


def test_the_site_is_not_committed() -> None:
    assert "/site/" in text_of(".gitignore").splitlines()


def test_the_version_is_the_changelog_s_and_the_manifests() -> None:
    [version] = re.findall(r'^version = "(.+)"$', text_of("pyproject.toml"), re.MULTILINE)
    newest = re.findall(r"^## ([\d.]+)", text_of("CHANGELOG.md"), re.MULTILINE)[0]
    [deployed] = re.findall(r"newTag: (.+)", text_of("deploy/kubernetes/base/kustomization.yaml"))
    chart = text_of("deploy/helm/tidegauge/Chart.yaml")
    charted = re.findall(r"^(?:version|appVersion): (.+)$", chart, re.MULTILINE)
    assert len(charted) == 2
    assert {version, newest, deployed, *charted, service.__version__} == {version}
    assert f"Release {version}." in text_of("README.md")
