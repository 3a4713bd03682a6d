"""Texts in the code open with a noun or a verb, and do not use verbs of people for programs."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = (
    "service",
    "spark_agent",
    "tests",
    "benchmarks",
    "migrations",
    "deploy",
    "docs",
    "examples",
)
VERBS_OF_PEOPLE = re.compile(
    r"\b(says|said|asks|asked|knows|hears|heard|tells|told)\b", re.IGNORECASE
)
PACKAGES = ("service", "spark_agent")

WITHOUT_NOUN = re.compile(r"(what|whether|how|who|whose|whom|where|which|of)\b", re.IGNORECASE)


def notes(source: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring and attribute note, with its line."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()
            case _:
                pass


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line of each block of comments, with its number."""
    before = -1
    with path.open(encoding="utf-8") as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                line = token.start[0]
                if line != before + 1:
                    yield line, token.string.lstrip("# ")
                before = line


def openings_without_noun(path: Path) -> list[str]:
    found = [*notes(path.read_text(encoding="utf-8")), *comments(path)]
    return [f"{path}:{line}: {text[:60]}" for line, text in found if WITHOUT_NOUN.match(text)]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line of a comment or a string constant, with its number."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)):
                for number, line in enumerate(text.splitlines()):
                    yield node.lineno + number, line
            case _:
                pass
    with path.open(encoding="utf-8") as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def verbs_of_people(path: Path) -> list[str]:
    return [
        f"{path}:{line}: {text.strip()[:80]}"
        for line, text in texts(path)
        if VERBS_OF_PEOPLE.search(text)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_text_in_the_code_opens_with_a_noun_or_a_verb(folder: str) -> None:
    assert [
        each for path in (ROOT / folder).rglob("*.py") for each in openings_without_noun(path)
    ] == []


def test_an_opening_without_a_noun_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('x = 1\n"""Whether x is set."""\n# Of two, the greater.\ny = 2  # fine\n')
    assert [each.rpartition(": ")[2] for each in openings_without_noun(path)] == [
        "Whether x is set.",
        "Of two, the greater.",
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_programs_do_not_say_ask_hear_tell_or_know(package: str) -> None:
    assert [
        each for path in sorted((ROOT / package).rglob("*.py")) for each in verbs_of_people(path)
    ] == []


def test_a_verb_of_people_is_found_in_every_kind_of_text(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""It is told."""\nasked = 1\n"""Heard\nor known."""\n# It Says so.\n'
        "message = f'{asked} knows'\nunsaid = 'unsaid'\n"
    )
    found = [each.rpartition(": ")[2] for each in verbs_of_people(path)]
    assert sorted(found) == ["# It Says so.", "Heard", "It is told.", "knows"]
