"""Kafka's broker and Spark's connector to Kafka, fetched once with Maven and checked.

PyPI has neither. `fetch` keeps them in the user's cache, so that the demonstration and the tests share
them.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_POM: Final = _HERE / "pom.xml"
_DIGESTS: Final = _HERE / "jars.sha256"
_BROKER: Final = "broker"
_CONNECTOR: Final = "connector"
_TIMEOUT_S: Final = 300


class JarsUnavailableError(Exception):
    """Jars that cannot be fetched here, with the reason and what would help."""


@dataclass(frozen=True, slots=True)
class KafkaJars:
    """Folders with the jars of a broker and of Spark's connector."""

    broker: Path
    connector: Path

    @property
    def connector_files(self) -> str:
        """The connector's jars, as the setting `spark.jars` lists them."""
        return ",".join(str(jar) for jar in sorted(self.connector.glob("*.jar")))


def fetch(
    say: Callable[[str], None], *, cache: Path | None = None, environment: Mapping[str, str]
) -> KafkaJars:
    """Return the jars, fetched unless the cache has them. Raises `JarsUnavailableError`.

    `say` takes lines of progress. In the cache, each version of the jars has a folder. Without `cache`,
    the user's cache is taken, by the `environment`.
    """
    folder = (cache or _cache(environment)) / f"kafka-{_digest(_DIGESTS)[:16]}"
    if not folder.exists():
        _fetch_into(folder, say)
    return KafkaJars(folder / _BROKER, folder / _CONNECTOR)


def _cache(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tidegauge"


def _fetch_into(folder: Path, say: Callable[[str], None]) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise JarsUnavailableError(
            "Kafka's broker and Spark's connector are fetched with Maven, and mvn is not on the PATH: "
            "install Maven 3"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JarsUnavailableError(
            f"the cache of Kafka's jars cannot be written: {error}. Set XDG_CACHE_HOME to another folder"
        ) from None
    # Complete when it gets its name: another process may fetch the same.
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        whole = Path(made) / "jars"
        for part in (_BROKER, _CONNECTOR):
            say(f"fetching the jars of the {part} with Maven")
            _run(maven, part, whole / part)
        _check(whole)
        try:
            whole.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def _run(maven: str, part: str, into: Path) -> None:
    command = [maven, "-q", "-B", "-f", str(_POM), f"-P{part}", "dependency:copy-dependencies"]
    options = [f"-DoutputDirectory={into}", "-DincludeScope=runtime"]
    try:
        done = subprocess.run(  # noqa: S603  (arguments of our own)
            [*command, *options], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise JarsUnavailableError(
            f"Maven has not fetched the jars of the {part} within {_TIMEOUT_S} s: check the network, "
            f"and try again"
        ) from None
    if done.returncode:
        line = next((line for line in done.stdout.splitlines() if "ERROR" in line), "")
        raise JarsUnavailableError(
            f"Maven cannot fetch the jars of the {part}: {line.removeprefix('[ERROR] ')[:300]}"
        )


def _check(folder: Path) -> None:
    """Check that the jars are the expected ones. Raises `JarsUnavailableError`."""
    lines = (line.split("  ", 1) for line in _DIGESTS.read_text().splitlines())
    expected = {name: digest for digest, name in lines}
    found = {str(jar.relative_to(folder)): _digest(jar) for jar in folder.glob("*/*.jar")}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise JarsUnavailableError(
                f"Maven has fetched another {name} than expected, with the SHA-256 "
                f"{found.get(name, 'none')} in place of {expected.get(name, 'none')}: check where Maven "
                f"takes its artefacts from"
            )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
