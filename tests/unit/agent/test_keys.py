"""The agent's key: where it comes from, and that it is shown nowhere."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spark_agent.client.client import Client, shared_client
from spark_agent.client.credentials import UnusableKeyError, key_source
from spark_agent.client.errors import (
    Forbidden,
    NotAllowed,
    NoUsableKey,
    Unauthenticated,
    UnknownJob,
)
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.exceptions import AggregatorError
from spark_agent.executor.tally import Count
from spark_agent.executor.task import ReportTarget, Task, TaskAttempt
from tests.unit.agent.answers import Answer, Answers, FakeClock, problem

SECRET = "tg_hush-hush-hush-hush-hush-hush-hush-hush-hush"
OTHER = "tg_another-another-another-another-another-anot"
SPEC = {"taps": {"shards": ["north"]}, "hourly": {"inputs": ["taps"], "ranges": 2}}


def sent(server: Answers) -> list[str | None]:
    return [asked.headers.get("Authorization") for asked in server.asked]


def client(server: Answers, **arguments: Any) -> Client:
    return Client(server.url, clock=FakeClock(), jitter=lambda: 1.0, **arguments)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEGAUGE_KEY", "TIDEGAUGE_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_a_key_is_taken_from_a_parameter_then_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")

    def read(environment: Mapping[str, str], **given: str) -> str | None:
        return key_source(given.get("key"), given.get("key_file"), environment).read()

    everything = {"TIDEGAUGE_KEY": OTHER, "TIDEGAUGE_KEY_FILE": "/nowhere"}
    assert read(everything, key="mine") == "mine"
    assert read(everything, key_file=str(file)) == SECRET
    assert read(everything) == OTHER
    assert read({"TIDEGAUGE_KEY_FILE": str(file)}) == SECRET
    assert read({"TIDEGAUGE_KEY": ""}) is None
    assert read({}) is None


def test_every_request_has_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with Answers(Answer(201, {"run": 7})) as server:
        client(server, key=SECRET).open_run("j", ["s"], "me")
        client(server).open_run("j", ["s"], "me")
        monkeypatch.setenv("TIDEGAUGE_KEY", OTHER)
        client(server).open_run("j", ["s"], "me")
    assert sent(server) == [f"Bearer {SECRET}", None, f"Bearer {OTHER}"]


def test_a_key_in_a_file_is_rotated_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET)
    with Answers(Answer(201, {"run": 7})) as server:
        asking = client(server, key_file=str(file))
        asking.open_run("j", ["s"], "me")
        file.write_text("")
        asking.open_run("j", ["s"], "me")
        file.unlink()
        asking.open_run("j", ["s"], "me")
        file.write_text(OTHER + " \n")
        asking.open_run("j", ["s"], "me")
    assert sent(server) == [*[f"Bearer {SECRET}"] * 3, f"Bearer {OTHER}"]


def test_what_is_no_key_is_an_error_that_does_not_show_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("hush hush\nhush")
    for source in (key_source("hush\nhush", None), key_source(None, str(file))):
        with pytest.raises(UnusableKeyError) as caught:
            source.read()
        assert "hush" not in str(caught.value)
    with Answers(Answer()) as server:
        asking = client(server, key_file=str(tmp_path / "none"))
        with pytest.raises(NoUsableKey, match="none' cannot be used: No such file"):
            asking.open_run("j", ["s"], "me")
    assert not server.asked


@pytest.mark.parametrize(
    ("status", "slug", "kind"),
    [(401, "unauthenticated", Unauthenticated), (403, "forbidden", Forbidden)],
)
def test_a_key_that_is_refused_is_an_error_at_once(
    status: int, slug: str, kind: type[NotAllowed]
) -> None:
    with Answers(problem(status, slug)) as server, pytest.raises(kind) as caught:
        client(server, key=SECRET).open_run("j", ["s"], "me")
    assert len(server.asked) == 1
    assert str(caught.value).startswith(f"{status}: No. so it is")
    assert SECRET not in str(caught.value)
    assert ("TIDEGAUGE_KEY_FILE" in str(caught.value)) == (status == 401)


def test_a_key_that_may_not_declare_jobs_will_do_for_a_job_that_is_declared() -> None:
    stored = {"job": "j", "generation": 1, "stages": SPEC}
    with Answers(problem(403, "forbidden"), Answer(200, stored)) as server:
        assert client(server).declare("j", SPEC) == stored
    for found, why in (
        (Answer(200, stored | {"stages": {"taps": {"shards": ["south"]}}}), "with other stages"),
        (problem(404, UnknownJob.slug), "is not declared yet"),
    ):
        with (
            Answers(problem(403, "forbidden"), found) as server,
            pytest.raises(Forbidden, match=f"{why}: declare it with an admin key"),
        ):
            client(server).declare("j", SPEC)


def test_the_key_is_shown_by_nothing(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET)
    with Answers(Answer(201, {"run": 7})) as server:
        asking = client(server, key=SECRET)
        asking.open_run("j", ["s"], "me")
    assert SECRET not in repr(asking)
    assert SECRET not in repr(key_source(SECRET, None))
    by_file = key_source(None, str(file))
    by_file.read()
    assert SECRET not in repr(by_file)


class Tallies:
    """Takes what a task sends to the driver."""

    def add(self, term: object) -> None:
        """See `Accumulator`."""


def target(url: str, clock: FakeClock, key_file: str | None) -> ReportTarget:
    return ReportTarget(url, "j", "taps", 5_000, 100, clock, Tallies(), key_file)  # pyright: ignore[reportArgumentType]


def test_what_spark_carries_to_the_executors_has_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET)
    monkeypatch.setenv("TIDEGAUGE_KEY", SECRET)
    with Answers(Answer(200, {"x": 1})) as server:
        made = target(server.url, FakeClock(), str(file))
        # The client of this process, which has read the key, is not part of it.
        shared_client(server.url, 100, str(file)).ready()
        assert SECRET.encode() not in pickle.dumps(made)
    assert SECRET not in repr(made)


@pytest.mark.parametrize(
    ("status", "slug"), [(401, "unauthenticated"), (403, "forbidden"), (0, "no key")]
)
def test_a_task_does_not_fail_for_a_key_that_is_refused(
    tmp_path: Path, status: int, slug: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts what it could not report, as for any other refusal."""
    file = tmp_path / "key"
    if status:
        file.write_text(SECRET)
    caplog.set_level("DEBUG")
    with Answers(problem(status or 200, slug)) as server:
        attempt = TaskAttempt(
            target(server.url, FakeClock(), str(file)),
            Task("q", Rank(1, 0, 0), 0, 0, f"task-{os.getpid()}"),
        )
        assert attempt.promised_ms() is None
        attempt.report_shards({"north": RangeReport(1)})
    assert attempt.counts[Count.REPORTS_DROPPED] == 1
    assert "report failed" in caplog.text
    assert SECRET not in caplog.text
    assert issubclass(NoUsableKey, AggregatorError)
