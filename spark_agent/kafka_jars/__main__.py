"""Fetch the jars: `python -m spark_agent.kafka_jars`.

Prints those of the connector, as `spark.jars` lists them.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from spark_agent.kafka_jars import JarsUnavailableError, fetch


def main() -> None:
    """Fetch the jars, with progress."""
    try:
        jars = fetch(lambda line: _print(sys.stderr, line), environment=os.environ)
    except JarsUnavailableError as error:
        sys.exit(str(error))
    _print(sys.stdout, jars.connector_files)


def _print(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")
    stream.flush()


if __name__ == "__main__":
    main()
