"""The JSON Schema of a specification's file, for editors.

`python -m service.api.spec_schema > spark_agent/cli/specification.schema.json` writes the file of
`tidegauge schema`, which has the schema without the service.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from service.api.openapi import portable
from service.model.pipeline_spec import Name, PipelineSpec


def specification_schema() -> dict[str, Any]:
    """Return the schema of the file that `tidegauge apply` reads.

    It accepts whatever the service accepts. The service rejects more: rules between members.
    """
    (spec, name), components = msgspec.json.schema_components(
        (PipelineSpec, Name), ref_template="#/$defs/{name}"
    )
    root = components.pop(spec["$ref"].rpartition("/")[2])
    of_the_file = {
        "$schema": {"description": "The address of this schema, for editors", "type": "string"},
        "job": {**name, "description": f"The job's name. {name['description']}"},
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **root,
        "title": "A specification of tidegauge",
        "properties": {**of_the_file, **root["properties"]},
        "$defs": components,
    }
    return portable(schema)


def written() -> str:
    """Return the schema as text."""
    return json.dumps(specification_schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(written())
