"""`-o table|wide|json|yaml` of the commands that print data, and the shapes of the data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

from tests.unit.agent.answers import Routes
from tests.unit.agent.shown_job import (
    AUDIT,
    BODIES,
    JOB,
    KEYS,
    LAST,
    PROBLEM,
    RETIREMENT,
    RUNS,
    SHARDS,
    SOURCE,
    STAGES,
)
from tests.unit.agent.test_inspection import COMMANDS, app_of, run
from tests.unit.agent.test_tables import SNAPSHOTS, in_a_terminal

LISTS: dict[tuple[str, ...], Mapping[str, Any]] = {
    ("jobs",): {"jobs": ["scores", "a-job-with-a-name-that-is-much-longer-than-others-7"]},
    ("show",): BODIES["/v1/jobs"],
    ("show", "scores"): {"stages": list(STAGES.values()), "problems": [PROBLEM]},
    ("show", "scores", SOURCE): {"held_by": SHARDS, "problems": [PROBLEM]},
    ("watch", "scores", "--count", "1"): {"stages": list(STAGES.values()), "problems": [PROBLEM]},
    ("ranges", "scores", SOURCE): {"ranges": SHARDS},
    ("history", "scores", SOURCE): BODIES[f"/v1/jobs/scores/stages/{SOURCE}/history"],
    ("throttle", "scores"): {"groups": BODIES["/v1/jobs/scores/throttle"]["groups"]},
    ("runs", "scores"): RUNS,
    ("keys", "list"): KEYS,
    ("audit",): AUDIT,
    ("status",): {"problems": [PROBLEM]},
    ("status", "scores"): {"problems": [PROBLEM]},
    ("retire", "scores", SOURCE, SHARDS[1]["range"], "--because", "gone", "--dry-run"): {
        "moves": RETIREMENT["moves"]
    },
    ("explain", "scores", LAST): {
        "holders": BODIES[f"/v1/jobs/scores/stages/{LAST}/explain"]["holders"]
    },
}
"""Commands, and lists of their data."""

VALUES: dict[tuple[str, ...], str] = {
    ("eta", "scores", LAST, "2026-01-01"): "expected_at",
    ("wait", "scores", SOURCE, "--until", "2026-01-01"): "reached",
}
"""Commands without a list, and a member of their data."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Routes(BODIES) as server:
        yield server.url


def data_of(url: str, arguments: tuple[str, ...], *form: str) -> Any:
    done = run(*arguments, *form, "--url", url)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    if "yaml" in form:
        return YAML(typ="safe", pure=True).load(done.stdout)
    return json.loads(done.stdout)


def options_of(command: Any) -> Iterator[set[str]]:
    """Yield the options of a command, or of each command of a group."""
    if hasattr(command, "commands"):
        for each in command.commands.values():
            yield from options_of(each)
    else:
        yield {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"demo", "schema"}))
def test_each_command_has_the_common_options(name: str) -> None:
    """The demo runs a service of its own, and the schema is the same for all."""
    common = {"--output", "-o", "--json", "--url", "--profile", "--key-file"}
    app, _ = app_of(name)
    found = list(options_of(typer.main.get_command(app)))
    assert found
    for options in found:
        assert common <= options


@pytest.mark.parametrize("arguments", LISTS, ids=" ".join)
def test_data_is_an_object_with_a_named_list(arguments: tuple[str, ...], url: str) -> None:
    found = data_of(url, arguments, "-o", "json")
    for name, expected in LISTS[arguments].items():
        if name == "jobs" and arguments == ("jobs",):
            assert [each["job"] for each in found[name]] == expected
        else:
            assert found[name] == expected


@pytest.mark.parametrize("arguments", [*LISTS, *VALUES], ids=" ".join)
def test_data_is_the_same_in_each_form(arguments: tuple[str, ...], url: str) -> None:
    found = data_of(url, arguments, "-o", "json")
    assert arguments in LISTS or VALUES[arguments] in found
    others = [data_of(url, arguments, *form) for form in (["--json"], ["--output", "yaml"])]
    for each in (found, *others):
        # The only value that time changes.
        each.pop("waited_ms", None)
    assert others == [found, found]


def test_throttle_lists_the_advice_of_each_shard(url: str) -> None:
    found = data_of(url, ("throttle", "scores"), "-o", "json")["shards"]
    stages = BODIES["/v1/jobs/scores/throttle"]["shards"]
    assert found == [
        {"stage": stage, "shard": shard, **advice}
        for stage, shards in stages.items()
        for shard, advice in shards.items()
    ]


def test_each_update_of_watch_is_a_document(url: str) -> None:
    twice = ("watch", "scores", "--count", "2", "--interval", "0.1", "--url", url, "-o")
    lines = [json.loads(line) for line in run(*twice, "json").stdout.splitlines()]
    documents = list(YAML(typ="safe", pure=True).load_all(run(*twice, "yaml").stdout))
    assert len(lines) == 2
    assert documents == lines


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("jobs", ("jobs",)),
        ("show", ("show",)),
        ("show-job", ("show", "scores")),
        ("show-stage", ("show", "scores", SOURCE)),
        ("ranges", ("ranges", "scores", SOURCE)),
        ("history", ("history", "scores", SOURCE)),
        ("throttle", ("throttle", "scores")),
        ("runs", ("runs", "scores")),
        ("keys-list", ("keys", "list")),
        ("audit", ("audit",)),
    ],
)
def test_a_wide_table_has_all_columns_in_a_narrow_terminal(
    name: str, arguments: tuple[str, ...], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = in_a_terminal((*arguments, "-o", "wide"), 80, monkeypatch, url).splitlines()
    whole = (SNAPSHOTS / f"{name}-pipe.txt").read_text().splitlines()
    # Sentences below a table are wrapped as in any terminal.
    assert [line.rstrip() for line in shown if len(line.rstrip()) > 80] == [
        line for line in whole if len(line) > 80 and ": " not in line
    ]


def test_export_prints_the_specification_alone(url: str) -> None:
    expected = {name: JOB[name] for name in ("job", "stages", "throttle")}
    for form in ((), ("-o", "yaml"), ("-o", "json"), ("--json",)):
        shown = run("export", "scores", *form, "--url", url).stdout
        assert YAML(typ="safe", pure=True).load(shown) == expected
        assert shown.startswith("{") == ("json" in "".join(form))
    assert run("export", "scores", "-o", "table", "--url", url).exit_code == 2
    unknown = run("export", "nosuch", "--url", url)
    assert (unknown.exit_code, unknown.stdout) == (5, "")


def test_two_forms_are_rejected(url: str) -> None:
    done = run("show", "--json", "-o", "yaml", "--url", url)
    assert done.exit_code == 2
    assert "--json is a short form of -o json" in " ".join(done.stderr.split())
    assert data_of(url, ("show",), "--json", "-o", "json") == BODIES["/v1/jobs"]


def test_a_job_in_yaml_keeps_its_order(url: str) -> None:
    shown = run("show", "scores", "-o", "yaml", "--url", url).stdout
    assert shown.startswith("job: scores\ngeneration: 3\nstages:\n- job: scores\n")
