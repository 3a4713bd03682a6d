"""`tidegauge explain` and `throttle` against a real service, and the others on what they show."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from spark_agent.client.client import Client
from spark_agent.client.reports import RangeReport, Rank
from tests.support.server import Service
from tests.unit.agent.test_inspection import run

NEW_YEAR = 1_767_225_600_000
MINUTE = 60_000
KEYS = ("00000000-80000000", "80000000-100000000")
STAGES = {
    "mobile": {"shards": ["mobile-0", "mobile-1"]},
    "console": {"shards": ["console-0"]},
    "sessions": {"inputs": ["mobile", "console"], "ranges": 2},
    "average": {"inputs": ["sessions"], "passthrough": True},
}
THROTTLE = {
    "groups": [{"stages": ["mobile", "console"], "max_drift_ms": MINUTE}],
    "stages": {"sessions": {"max_lag_ms": MINUTE}},
}


class Scores:
    """A job of two sources, which are aligned, and a keyed stage that keeps state."""

    def __init__(self, service: Service, job: str) -> None:
        self.url, self.job = service.url, job
        self._client = Client(service.url, patience_ms=30_000)
        self._client.declare(job, STAGES, throttle=THROTTLE)
        stages = [name for name in STAGES if name != "average"]
        self._rank = Rank(self._client.open_run(job, stages, holder="driver-1"), 0, 0)

    def report(
        self, stage: str, ranges: dict[str, RangeReport], *, input_ms: int | None = None
    ) -> None:
        lease = self._client.claim(
            self.job, stage, None, holder="exec-3", ttl_ms=600_000, rank=self._rank
        )
        self._client.report(self.job, stage, lease, ranges, input_ms=input_ms)

    def run(self, name: str, *arguments: str, exit_code: int = 0) -> str:
        done = run(name, self.job, *arguments, "--url", self.url)
        assert done.exit_code == exit_code, done.stderr
        return done.stdout

    def json(self, name: str, *arguments: str, exit_code: int = 0) -> Any:
        return json.loads(self.run(name, *arguments, "--json", exit_code=exit_code))


@pytest.fixture
def scores(server: Service, request: pytest.FixtureRequest) -> Scores:
    """Everything is at new year; then both sources bring an hour, and one range keeps its state."""
    job = Scores(server, re.sub(r"\W+", "-", request.node.name)[:100])
    for at in (NEW_YEAR, NEW_YEAR + 60 * MINUTE):
        job.report("mobile", {f"mobile-{k}": RangeReport(at) for k in range(2)})
        job.report("console", {"console-0": RangeReport(at)})
        kept = RangeReport(holds={"state[0]": NEW_YEAR})
        job.report("sessions", {KEYS[0]: kept, KEYS[1]: RangeReport()}, input_ms=at)
    return job


BUFFERING = (
    r"average waits for sessions, where range 00000000-80000000 \(holder exec-3\) keeps a hold"
    r" 'state\[0\]' at 2026-01-01T00:00:00Z(, unchanged for .*)?"
)


def lines(tree: str) -> list[tuple[int, str]]:
    """The branches of a tree, each with its depth."""
    found: list[tuple[int, str]] = []
    for line in tree.splitlines():
        text = line.lstrip("│├└─ \N{NO-BREAK SPACE}")
        found.append(((len(line) - len(text)) // 4, text.rstrip()))
    return found


def test_explain_names_the_range_its_holder_and_its_hold(scores: Scores) -> None:
    tree = lines(scores.run("explain", "average"))
    patterns = [
        (0, r"average: 2026-01-01T00:00:00.000Z \(active, unchanged since \S+Z\)"),
        (1, BUFFERING),
        (1, "average waits for its input"),
        (2, "sessions waits for its ranges"),
        (3, r"00000000-80000000: buffering by 'state\[0\]', unchanged since \S+Z"),
        (4, "promise 2026-01-01T00:00:00.000Z; without it, 2026-01-01T01:00:00.000Z"),
        (4, r"holder exec-3 \(fence \d+, 9 min( \d+ s)? left\), reported at \S+Z"),
    ]  # fmt: skip
    assert [depth for depth, _ in tree] == [depth for depth, _ in patterns]
    for (_, line), (_, pattern) in zip(tree, patterns, strict=True):
        assert re.fullmatch(pattern, line), line
    found = scores.json("explain", "average")
    assert re.fullmatch(BUFFERING, found["because"])
    assert (found["holders_total"], found["holders"][0]["component"]) == (1, "state[0]")


def test_explain_says_how_many_more_there_are(scores: Scores) -> None:
    tree = lines(scores.run("explain", "mobile", "--limit", "1"))
    assert tree[-1] == (2, "and 1 more: --limit")
    assert len(scores.json("explain", "mobile")["holders"]) == 2
    # As many as the service shows at once.
    assert scores.json("explain", "mobile", "--limit", "1000")["holders_total"] == 2
    beyond = run("explain", scores.job, "mobile", "--limit", "1001", "--url", scores.url)
    assert (beyond.exit_code, "1000" in beyond.stderr) == (2, True)


def test_explain_of_what_is_final_is_that_alone(scores: Scores) -> None:
    scores.report("console", {"console-0": RangeReport(final=True)})
    tree = [text for _, text in lines(scores.run("explain", "console"))]
    assert tree[1:] == ["console is final: nothing more will come", "console is final"]


def test_explain_of_a_job_in_which_nobody_has_spoken(server: Service) -> None:
    job = Scores(server, "silent")
    tree = [text for _, text in lines(job.run("explain", "mobile", "--limit", "1"))]
    assert "mobile-0: never reported" in tree
    assert "holder none" in tree
    assert "promise none yet" in tree
    [_, group, _, last] = job.run("throttle").splitlines()
    assert group.split() == ["mobile,", "console", "no", "limit"]
    assert last == "no shard of job silent is throttled"


def test_throttle_says_who_is_asked_to_wait_for_whom(scores: Scores) -> None:
    scores.report("mobile", {"mobile-0": RangeReport(NEW_YEAR + 90 * MINUTE)})
    shown = " ".join(scores.run("throttle").split())
    limit = "2026-01-01T01:01:00.000Z"
    assert f"group limit held by mobile, console {limit} console console-0" in shown
    # By back-pressure all shards that are an hour ahead of what sessions emits are slowed down;
    # only the one beyond the limit pauses.
    assert f"mobile mobile-0 pause {limit} mobile mobile-1 read at 10 % {limit}" in shown
    assert "mobile-0 of mobile: it is at 2026-01-01T01:30:00.000Z" in shown
    assert "mobile-1 of mobile: sessions is more than 1 min behind mobile" in shown
    found = scores.json("throttle")
    assert found["groups"][0]["held_by"] == {"stage": "console", "range": "console-0"}
    [first, *_] = found["shards"]
    assert (first["stage"], first["shard"], first["pause"]) == ("mobile", "mobile-0", True)


def test_throttle_says_that_nobody_is_asked(scores: Scores) -> None:
    at = NEW_YEAR + 60 * MINUTE
    scores.report("sessions", {key: RangeReport() for key in KEYS}, input_ms=at)
    shown = scores.run("throttle").splitlines()
    assert shown[-1] == f"no shard of job {scores.job} is throttled"
    assert scores.json("throttle")["shards"] == []


def test_the_other_commands_agree_on_where_it_is(scores: Scores) -> None:
    *_, last = scores.json("show")["stages"]
    assert (last["stage"], last["output_watermark"]) == ("average", NEW_YEAR)
    [first, *_] = scores.json("show", "sessions")["held_by"]
    assert (first["range"], first["holds"]) == (KEYS[0], {"state[0]": NEW_YEAR})
    points = scores.json("history", "sessions")["points"]
    assert (points[-1]["input_watermark"], points[-1]["output_watermark"]) == (
        NEW_YEAR + 60 * MINUTE,
        NEW_YEAR,
    )
    assert scores.json("eta", "average", str(NEW_YEAR))["reached"] is True
    later = scores.json("eta", "average", str(NEW_YEAR + MINUTE), exit_code=7)
    assert (later["reached"], later["expected_at"]) == (False, None)
    waited = scores.json("wait", "average", "--until", str(NEW_YEAR))
    assert (waited["reached"], waited["output_watermark"]) == (True, NEW_YEAR)
