"""Kafka's broker and Spark's connector to Kafka, fetched once with Maven and checked.

PyPI has neither. `fetch` keeps them in the user's cache, so that the demonstration and the tests share
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spark_agent.maven_jars import Bundle, JarsUnavailableError

__all__ = ["JarsUnavailableError", "KafkaJars", "fetch"]

_HERE: Final = Path(__file__).parent
_BROKER: Final = "broker"
_CONNECTOR: Final = "connector"
_BUNDLE: Final = Bundle(
    name="kafka",
    contents="the jars of Kafka's broker and Spark's connector",
    pom=_HERE / "pom.xml",
    digests=_HERE / "jars.sha256",
    parts=(_BROKER, _CONNECTOR),
)


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
    folder = _BUNDLE.fetch(say, cache=cache, environment=environment)
    return KafkaJars(folder / _BROKER, folder / _CONNECTOR)
