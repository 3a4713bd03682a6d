"""The command that prints the schema of specifications. Does not import Spark."""

from __future__ import annotations

from importlib.resources import files

import typer


def schema() -> None:
    """Print the JSON Schema of the file that `tidegauge apply` reads, for editors.

    An editor completes and checks a YAML file that begins with
    `# yaml-language-server: $schema=tidegauge.schema.json`. JSON files name the schema in `"$schema"`.

    Examples: `tidegauge schema > tidegauge.schema.json`
    """
    found = files("spark_agent.cli") / "specification.schema.json"
    typer.echo(found.read_text(encoding="utf-8"), nl=False)
