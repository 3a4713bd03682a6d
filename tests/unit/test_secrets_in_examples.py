"""Examples take keys and passwords from files: none is in a command or in an environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.documents import blocks

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("deploy", "examples", ".ci", ".github")
TEXT: Final = {
    ".yaml",
    ".yml",
    ".tpl",
    ".md",
    ".txt",
    ".py",
    ".cfg",
    ".toml",
    ".json",
    ".conf",
    ".sh",
    "",
}

# TLS_KEY is a path.
SECRET: Final = r"(?:(?!\w*TLS_KEY\b)\w*(?:KEY|PASSWORD|PASSWD|SECRET|TOKEN)|REDISCLI_AUTH)"
FORMS: Final = {
    "variable": rf"(?<![\w$-]){SECRET}=[^\s=]",
    "variable of YAML": rf"^[\s#-]*{SECRET}:[ \t]+\S",
    "variable of a list": rf"\bname: *[\"']?{SECRET}\b[\"']?(?! *, *value: *[\"']{{2}})",
    "variable of Docker": rf"\b(?:ENV|ARG)[ \t]+{SECRET}\b",
    "option": r"--(?:requirepass|password|key|admin-key|scrape-key|from-literal|set|set-string)\b(?!-)",
    "option of redis-cli": r"\bredis-cli\b.* -a\b",
    "URL": r"\b[a-z][a-z0-9+]*://[^\s/@:\"']*:[^\s/@\"']+@",
    "password of Redis": r"ACL SETUSER .* >",
    "reference to a secret": r"\b(?:secretKeyRef|envFrom)\b",
}
"""Forms of a secret that a list of processes, a history of the shell or `docker inspect` shows."""


def examples() -> Iterator[tuple[str, str]]:
    """Return the path and the text of each example, and of each block of code in the pages."""
    yield "docker-compose.yml", (ROOT / "docker-compose.yml").read_text()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and path.suffix in TEXT and not name.startswith("deploy/secrets/"):
                yield name, path.read_text()
    for block in blocks():
        yield block.page, block.text


def findings(text: str) -> Iterator[str]:
    for line in text.splitlines():
        for form, pattern in FORMS.items():
            if re.search(pattern, line):
                yield f"{form}: {line.strip()}"


def test_no_example_has_a_secret_in_a_command_or_an_environment() -> None:
    found = [f"{name}: {finding}" for name, text in examples() for finding in findings(text)]
    assert found == []


@pytest.mark.parametrize("name", ["docker-compose.yml", "deploy/Dockerfile", "README.md"])
def test_the_examples_are_found(name: str) -> None:
    assert name in {each for each, _ in examples()}


@pytest.mark.parametrize(
    "line",
    [
        "export ADMIN_KEY=$(openssl rand -hex 32)",
        'docker run -e TIDEGAUGE_ADMIN_KEY="$(openssl rand -hex 32)" tidegauge',
        "    TIDEGAUGE_ADMIN_KEY: ${ADMIN_KEY:?a secret}",
        "      REDISCLI_AUTH: tidegauge",
        "      POSTGRES_PASSWORD: ${POSTGRES_PASSWORD:-tidegauge}",
        "  - {name: TIDEGAUGE_SCRAPE_KEY, valueFrom: {}}",
        "ENV TIDEGAUGE_ADMIN_KEY x",
        "      - --requirepass",
        "#   --from-literal=admin-key=x",
        "redis-cli -h redis -a hush ping",
        "tidegauge serve --live-url redis://:hush@redis:6379/0",
        "    TIDEGAUGE_LIVE_URL: redis://:${REDIS_PASSWORD:-tidegauge}@redis:6379/0",
        "ACL SETUSER tidegauge on >PASSWORD ~*",
        "helm install tidegauge --set adminKey=x",
        "            secretKeyRef: {name: tidegauge, key: admin-key}",
    ],
)
def test_each_form_is_found(line: str) -> None:
    assert list(findings(line))


@pytest.mark.parametrize(
    "line",
    [
        "export TIDEGAUGE_KEY_FILE=admin.key",
        "    TIDEGAUGE_ADMIN_KEY_FILE: /run/secrets/admin-key",
        "tidegauge serve --admin-key-file admin.key --live-url redis://redis:6379/0",
        "kubectl create secret generic tidegauge --from-file=admin-key",
        "            - {name: TIDEGAUGE_ADMIN_KEY_FILE, value: /etc/tidegauge/admin-key}",
        "tidegauge serve --ledger-url postgresql+psycopg://tidegauge@postgres/tidegauge",
    ],
)
def test_files_of_secrets_are_no_findings(line: str) -> None:
    assert list(findings(line)) == []
