"""Jars of Kafka: checked once they are fetched, and a sentence where they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_agent.kafka_jars import JarsUnavailableError, fetch

LISTS_ONE_JAR = """#!/bin/sh
for each in "$@"; do case "$each" in -DoutputDirectory=*) into="${each#*=}";; esac; done
mkdir -p "$into" && echo other > "$into/kafka-clients-3.9.2.jar"
"""


def maven(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of this name on the path, in place of Maven."""
    program = folder / "mvn"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def fetched(folder: Path) -> None:
    fetch(lambda _: None, cache=folder / "cache", environment={})


def test_without_maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JarsUnavailableError, match="mvn is not on the PATH: install Maven 3"):
        fetched(tmp_path)


def test_other_jars_than_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maven(tmp_path, LISTS_ONE_JAR, monkeypatch)
    with pytest.raises(
        JarsUnavailableError, match=r"another .*jar than expected, with the SHA-256"
    ):
        fetched(tmp_path)
    assert not list((tmp_path / "cache").iterdir())


def test_the_error_of_maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maven(tmp_path, "#!/bin/sh\necho '[ERROR] Could not transfer artifact'\nexit 1\n", monkeypatch)
    with pytest.raises(JarsUnavailableError, match="of the broker: Could not transfer artifact"):
        fetched(tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maven(tmp_path, LISTS_ONE_JAR, monkeypatch)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(JarsUnavailableError, match=r"cannot be written.*XDG_CACHE_HOME"):
        fetched(tmp_path)
