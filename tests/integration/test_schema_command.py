"""`tidegauge schema`: the schema that editors use for the file of `tidegauge apply`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import re2
from jsonschema import Draft202012Validator, ValidationError
from ruamel.yaml import YAML

from service.api.spec_schema import written
from service.model.pipeline_spec import PipelineSpec
from tests.support.documents import block
from tests.support.server import ROOT, Service
from tests.unit.agent.test_inspection import run

SCHEMA: Final = json.loads(written())

ACCEPTED: Final[tuple[dict[str, Any], ...]] = (
    {"stages": {"s": {"shards": ["0"]}}},
    {"job": "scores", "stages": {"s": {"shards": ["0"], "dynamic": True, "percentiles": [1, 99]}}},
    {"$schema": "x", "stages": {"s": {"shards": ["0"], "idle": None}}},
    {"stages": {"s": {"shards": ["0"], "idle": {"after_ms": 1, "then": "exclude"}}}},
    {"stages": {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": 4}}},
    {"stages": {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": [{"start": 0, "end": 2**32}]}}},
    {"stages": {"s": {"shards": ["0"]}}, "throttle": {"groups": [{"stages": ["s"], "max_drift_ms": 0}]}},
    {"stages": {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": 1}},
     "throttle": {"stages": {"k": {"max_lag_ms": 1}}}},
)  # fmt: skip

REJECTED: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"stages": {}},
    {"stages": {"s": {"shard": ["0"]}}},
    {"stages": {"s": {"shards": []}}},
    {"stages": {"s": {"shards": ["a b"]}}},
    {"stages": {"a b": {"shards": ["0"]}}},
    {"stages": {"s": {"shards": "0"}}},
    {"stages": {"s": {"shards": ["0"], "percentiles": [100]}}},
    {"stages": {"s": {"shards": ["0"], "idle": {"after_ms": 1, "then": "wait"}}}},
    {"stages": {"s": {"shards": ["0"]}}, "throttles": {}},
)


def is_valid(spec: dict[str, Any]) -> bool:
    try:
        Draft202012Validator(SCHEMA).validate(spec)
    except ValidationError:
        return False
    return True


def test_the_command_prints_the_schema_of_the_service() -> None:
    """If it differs: `python -m service.api.spec_schema > spark_agent/cli/specification.schema.json`."""
    done = run("schema")
    assert done.exit_code == 0
    assert done.stdout == written()


def test_it_is_a_schema_with_patterns_for_every_engine() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    re2.compile(SCHEMA["properties"]["job"]["pattern"])


@pytest.mark.parametrize("spec", ACCEPTED)
def test_the_schema_accepts_what_the_service_accepts(spec: dict[str, Any]) -> None:
    of_the_service = {k: v for k, v in spec.items() if k not in {"$schema", "job"}}
    msgspec.convert(of_the_service, PipelineSpec).pipeline()
    assert is_valid(spec)


@pytest.mark.parametrize("spec", REJECTED)
def test_the_schema_rejects_what_the_service_rejects(spec: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(spec, PipelineSpec)
    assert not is_valid(spec)


def test_the_example_of_the_page(tmp_path: Path, server: Service) -> None:
    script = block("sh", "tidegauge schema >").replace("tidegauge ", "python -m service ")
    variables = {"TIDEGAUGE_URL": server.url, "PYTHONPATH": str(ROOT)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={**os.environ, **variables, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "+ stage harbours" in done.stdout
    assert json.loads((tmp_path / "tidegauge.schema.json").read_text()) == SCHEMA
    yaml: Any = YAML(typ="safe", pure=True)
    assert is_valid(yaml.load((tmp_path / "ferries.yaml").read_text()))


def test_apply_leaves_out_the_address_of_the_schema(tmp_path: Path, server: Service) -> None:
    spec = {"$schema": "s.json", "job": "of-an-editor", "stages": {"s": {"shards": ["0"]}}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    done = run("apply", str(tmp_path / "spec.json"), "--yes", "--url", server.url)
    assert done.exit_code == 0, done.stderr
