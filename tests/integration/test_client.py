"""The Python client: typed as the service answers, with and without asyncio, and without PySpark."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from inspect import signature
from pathlib import Path
from typing import Any, NotRequired, get_origin, get_type_hints

import pytest

from service.server.app import create_app
from service.settings import Settings
from spark_agent.client import responses as answers
from spark_agent.client.async_client import AsyncClient
from spark_agent.client.client import Client
from spark_agent.client.errors import ChangedMeanwhile, UnknownStage
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.client.sensor import Arrival
from tests.support.documents import block
from tests.support.server import ROOT, Service

NEW_YEAR = 1_767_225_600_000
SPEC = {"mobile": {"shards": ["a"]}, "sessions": {"inputs": ["mobile"], "passthrough": True}}

SCHEMAS = {
    "JobsBody": answers.JobsAnswer,
    "JobLine": answers.JobLine,
    "JobBody": answers.JobAnswer,
    "SnapshotBody": answers.SnapshotAnswer,
    "WatermarkBody": answers.WatermarkAnswer,
    "RangeCounts": answers.RangeCounts,
    "CommitsBody": answers.CommitsAnswer,
    "RangesBody": answers.RangesAnswer,
    "RangeBody": answers.RangeAnswer,
    "HistoryBody": answers.HistoryAnswer,
    "PastWatermarkBody": answers.PastWatermark,
    "EtaBody": answers.EtaAnswer,
    "ExplanationBody": answers.ExplainAnswer,
    "StepBody": answers.StepAnswer,
    "HolderBody": answers.HolderAnswer,
    "ThrottleBody": answers.ThrottleAnswer,
    "GroupBody": answers.GroupAnswer,
    "HeldByBody": answers.HeldByAnswer,
    "AdviceBody": answers.AdviceAnswer,
}


def test_the_types_are_those_of_the_service() -> None:
    settings = Settings(_env_file=None)  # pyright: ignore[reportCallIssue]
    schemas: dict[str, Any] = create_app(settings).openapi()["components"]["schemas"]
    for name, typed in SCHEMAS.items():
        hints = get_type_hints(typed, include_extras=True)
        assert set(hints) == set(schemas[name]["properties"]), name
        required = {member for member, hint in hints.items() if get_origin(hint) is not NotRequired}
        assert required == set(schemas[name]["required"]), name


def test_the_async_client_has_what_the_other_has() -> None:
    theirs = {name for name in vars(AsyncClient) if not name.startswith("_")} - {"close"}
    for name in theirs:
        # A coroutine's wait is ended by its cancellation, as another thread ends a blocking one.
        assert signature(getattr(AsyncClient, name)).parameters.keys() == (
            signature(getattr(Client, name)).parameters.keys() - {"is_over"}
        ), name
    assert theirs >= {"jobs", "show", "explain", "history", "eta", "throttle", "ranges", "apply"}


def test_no_pyspark_is_needed() -> None:
    files = [*ROOT.glob("spark_agent/client/*.py"), *ROOT.glob("spark_agent/cli/*.py")]
    without_otel = [path.stem for path in files if path.stem not in {"__init__", "otel"}]
    assert len(without_otel) > 15
    modules = ", ".join(
        f"spark_agent.{path.parent.name}.{path.stem}" for path in files if path.stem in without_otel
    )
    code = f"import sys; sys.modules['pyspark'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0


class Scores:
    """A job whose source is reported for here."""

    def __init__(self, service: Service, job: str) -> None:
        self.job, self.client = job, Client(service.url, patience_ms=30_000)
        self.client.declare(job, SPEC)
        rank = Rank(self.client.open_run(job, ["mobile"], holder="me"), 0, 0)
        self.lease = self.client.claim(job, "mobile", None, holder="me", ttl_ms=600_000, rank=rank)

    def report(self, watermark_ms: int) -> None:
        self.client.report(self.job, "mobile", self.lease, {"a": RangeReport(watermark_ms)})


@pytest.fixture
def scores(server: Service, request: pytest.FixtureRequest) -> Scores:
    return Scores(server, re.sub(r"\W+", "-", request.node.name)[:100])


def test_apply_never_overwrites_what_it_has_not_seen(scores: Scores) -> None:
    found, etag = scores.client.job(scores.job)
    wider = {"stages": {**found["stages"], "more": {"shards": ["b"]}}}
    assert "more" in scores.client.apply(scores.job, wider, etag=etag)["stages"]
    with pytest.raises(ChangedMeanwhile):
        scores.client.apply(scores.job, {"stages": SPEC}, etag=etag)


@pytest.mark.anyio
async def test_asyncio_waits_for_several_and_goes_on(server: Service, scores: Scores) -> None:
    async with AsyncClient(server.url, patience_ms=30_000) as client:
        both = asyncio.gather(
            *(client.wait_until(scores.job, stage, NEW_YEAR) for stage in ("mobile", "sessions"))
        )
        # Meanwhile others are answered.
        assert (await client.show(scores.job, "mobile"))["output_watermark"] is None
        assert "never reported" in (await client.explain(scores.job, "sessions"))["because"]
        await asyncio.to_thread(scores.report, NEW_YEAR)
        first, second = await both
        assert first.reached
        assert second.seen["output_watermark"] == NEW_YEAR
        late = await client.wait_until(scores.job, "mobile", NEW_YEAR + 1, timeout="0 s")
        assert not late.reached
        with pytest.raises(UnknownStage):
            await client.show(scores.job, "nosuch")


def test_an_arrival_is_asked_until_it_is_complete(server: Service, scores: Scores) -> None:
    until = datetime(2026, 1, 1, tzinfo=UTC)
    arrival = Arrival(scores.client, scores.job, "sessions", until)
    assert arrival.until_ms == NEW_YEAR
    assert not arrival.is_complete()
    assert "has never reported" in arrival.because
    scores.report(NEW_YEAR)
    assert arrival.is_complete()
    east = until.astimezone(timezone(timedelta(hours=8)))
    assert scores.client.wait_until(scores.job, "sessions", east).reached
    away = Arrival(Client("http://127.0.0.1:1", patience_ms=10), "scores", "s", "2026-01-01")
    assert not away.is_complete()
    assert "127.0.0.1:1" in away.because
    with pytest.raises(UnknownStage):
        Arrival(scores.client, scores.job, "nosuch", NEW_YEAR).is_complete()


def run_block(server: Service, scores: Scores, folder: Path, containing: str) -> str:
    """Run an example of the client's page; return what it prints."""
    (folder / "reader.key").write_text("a-key-that-nobody-asks-for")
    code = block("python", containing).replace("http://127.0.0.1:8000", server.url)
    code = code.replace('"scores"', f'"{scores.job}"')
    code = code.replace("/etc/tidegauge/reader.key", str(folder / "reader.key"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_examples_of_its_page_run(server: Service, tmp_path: Path) -> None:
    scores = Scores(server, "scores-of-the-page")
    scores.report(NEW_YEAR)
    first = run_block(server, scores, tmp_path, "/etc/tidegauge/reader.key")
    assert "sessions active 1767225600000" in first
    assert run_block(server, scores, tmp_path, "import asyncio") == "True True\n"
    assert run_block(server, scores, tmp_path, "waited.seen") == (
        "everything before it has arrived\n"
    )


def test_the_shell_s_example_waits(server: Service, tmp_path: Path) -> None:
    scores = Scores(server, "scores-of-the-shell")
    scores.report(NEW_YEAR)
    (tmp_path / "close-books").write_text("#!/bin/sh\necho closed\n")
    (tmp_path / "close-books").chmod(0o755)
    script = block("sh", "./close-books").replace("tidegauge ", f"{sys.executable} -m service ")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.replace("scores", scores.job)],
        env={**os.environ, "TIDEGAUGE_URL": server.url, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("closed\n")
