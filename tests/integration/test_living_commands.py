"""`tidegauge jobs`, `watch`, `ranges`, `apply`, `delete`, profiles, completion, on a real service."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from spark_agent.client.client import Client
from spark_agent.client.errors import UnknownJob
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.times import MAX_MS
from tests.support.server import ROOT, Service
from tests.unit.agent.test_inspection import run

NEW_YEAR = 1_767_225_600_000
SPEC = """
job: JOB
stages:
  taps: {shards: [north, south]}
  hourly: {inputs: [taps], ranges: 2}   # by house
"""


class Water:
    """A job of two stages; one of them has a watermark."""

    def __init__(self, service: Service, job: str) -> None:
        self.url, self.job = ("--url", service.url), job
        self.client = Client(service.url, patience_ms=30_000)

    def report(self, watermark_ms: int) -> None:
        rank = Rank(self.client.open_run(self.job, ["taps"], holder="me"), 0, 0)
        lease = self.client.claim(self.job, "taps", None, holder="me", ttl_ms=600_000, rank=rank)
        promised = {name: RangeReport(watermark_ms) for name in ("north", "south")}
        self.client.report(self.job, "taps", lease, promised)


@pytest.fixture
def water(server: Service, request: pytest.FixtureRequest) -> Water:
    return Water(server, re.sub(r"\W+", "-", request.node.name)[:100])


def applied(water: Water, tmp_path: Path, text: str = SPEC, *options: str) -> list[str]:
    file = tmp_path / "spec.yaml"
    file.write_text(text.replace("JOB", water.job))
    done = run("apply", str(file), *options, *water.url)
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("job: JOB\nstages:\n  taps: {shards: [1, no]}", "shards"),
        ("job: JOB\nstages: {taps: {shards: [x]}}\nfoo: 1", "foo"),
        ("job: JOB\nstages: {hourly: {inputs: [taps], ranges: 2}}", "taps"),
    ],
)
def test_a_dry_run_says_what_the_service_would_refuse(
    water: Water, tmp_path: Path, spec: str, names: str
) -> None:
    applied(water, tmp_path)
    before = water.client.job(water.job)
    (tmp_path / "spec.yaml").write_text(spec.replace("JOB", water.job))
    done = run("apply", str(tmp_path / "spec.yaml"), "--dry-run", *water.url)
    assert done.exit_code == 5, done.stdout
    assert names in done.stderr
    assert water.client.job(water.job) == before


def test_apply_names_shards_that_come_too_late(water: Water, tmp_path: Path) -> None:
    applied(water, tmp_path)
    water.report(MAX_MS)
    assert applied(water, tmp_path, SPEC.replace("south]", "south, east]"), "--dry-run")[1] == (
        "taps is final, and all rows of new shards are late: east; reset the job if they must count"
    )


def test_apply_shows_what_changes_and_changes_that(water: Water, tmp_path: Path) -> None:
    planned = applied(water, tmp_path, SPEC, "--dry-run")
    assert planned == [
        '+ stage taps: {"shards": ["north", "south"]}',
        '+ stage hourly: {"inputs": ["taps"], "ranges": 2}',
        f"job {water.job} is not created: --dry-run",
    ]
    with pytest.raises(UnknownJob):
        water.client.job(water.job)
    created = f"job {water.job} is created, with stages taps, hourly"
    assert applied(water, tmp_path)[-1] == created
    assert applied(water, tmp_path) == ["nothing changes"]
    throttled = f"{SPEC}\nthrottle: {{stages: {{hourly: {{max_lag_ms: 60000}}}}}}"
    line = '+ throttle: {"stages": {"hourly": {"max_lag_ms": 60000}}}'
    assert applied(water, tmp_path, throttled) == [line, f"job {water.job} is as in the file"]
    assert applied(water, tmp_path)[0].startswith("- throttle: ")
    wider = SPEC.replace("south]", "south, east]")
    assert applied(water, tmp_path, wider)[:2] == [
        '~ stage taps: shards: + "east"',
        "taps stands still until new shards have reported: east",
    ]
    assert list(water.client.job(water.job)[0]["stages"]["taps"]["shards"])[-1] == "east"
    assert not any("final" in line for line in applied(water, tmp_path, wider, "--dry-run"))
    assert applied(water, tmp_path, wider.replace("ranges: 2", "ranges: 4"), "--dry-run")[:2] == [
        "~ stage hourly: ranges: 2 -> 4",
        "hourly stands still until its workers claim the new ranges",
    ]
    (tmp_path / "spec.yaml").write_text(SPEC.replace("JOB", water.job))
    one = run("apply", str(tmp_path / "spec.yaml"), *water.url)
    assert f"shard east of taps of job {water.job} will be removed" in one.stderr
    assert "the watermark no longer waits for it." in one.stderr
    fewer = json.dumps({"job": water.job, "stages": {"taps": {"shards": ["north"]}}})
    (tmp_path / "spec.json").write_text(fewer)
    # Nobody answers the question.
    asked = run("apply", str(tmp_path / "spec.json"), *water.url)
    assert asked.exit_code == 1
    assert "the watermark no longer waits for them" in asked.stderr
    for gone in ("stage hourly", "shard south of taps", "shard east of taps"):
        assert gone in asked.stderr
    assert "hourly" in water.client.job(water.job)[0]["stages"]
    done = run("apply", str(tmp_path / "spec.json"), "--yes", "--json", *water.url)
    shown = json.loads(done.stdout)
    assert shown["changes"] == [
        "- stage hourly",
        '~ stage taps: shards: - "south", - "east"',
    ]
    assert shown["effects"] == ["taps does not wait any longer for: south, east"]
    assert list(water.client.job(water.job)[0]["stages"]) == ["taps"]


def test_apply_shows_that_a_retired_shard_was_not_waited_for(water: Water, tmp_path: Path) -> None:
    applied(water, tmp_path)
    water.client.retire(water.job, "taps", "south", because="the tap is closed")
    planned = applied(water, tmp_path, SPEC.replace("north, south", "north"), "--dry-run")
    assert planned[1] == "taps has not waited for: south, which is retired"


def test_apply_takes_what_export_prints_and_what_the_service_shows(
    water: Water, tmp_path: Path
) -> None:
    throttle = "throttle: {stages: {hourly: {max_lag_ms: 60000}}}\n"
    promise = SPEC.replace("south]", "south], watermark: at - INTERVAL 10 MINUTES")
    applied(water, tmp_path, promise + throttle)
    exported = [run("export", water.job, *form, *water.url).stdout for form in ([], ["--json"])]
    shown = json.dumps(water.client.job(water.job)[0])
    assert "layout_version" in shown
    assert "health" in shown
    assert "max_lag_ms: 60000" in exported[0]
    for text in (*exported, shown):
        assert applied(water, tmp_path, text) == ["nothing changes"]
    fewer = json.loads(shown)
    del fewer["throttle"]
    assert applied(water, tmp_path, json.dumps(fewer))[0].startswith("- throttle: ")
    # Only these members are ignored.
    (tmp_path / "spec.json").write_text(json.dumps({**fewer, "generations": 1}))
    refused = run("apply", str(tmp_path / "spec.json"), *water.url)
    assert refused.exit_code == 5
    assert "generations" in refused.stderr
    assert refused.stdout == "", "a change that the service rejects is not shown"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages: {s: {shards: [a]}}", "has no job: write 'job: NAME'"),
        ("job: x", "has no stages: write 'stages:'"),
        ("- 5", "has no stages"),
        ("job: [", "is neither YAML nor JSON: "),
        ("job: j\nstages: &a {s: *a}", "an alias (*name) is inside its own anchor (&name)"),
        ("job: JOB\nstages: {s: {shrads: [a]}}", "shrads"),
        ("job: JOB\nstages: {s: {inputs: [nosuch], ranges: 1}}", "nosuch"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_line(
    water: Water, tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(text.replace("JOB", "wrong"))
    done = run("apply", str(file), *water.url)
    assert done.exit_code == 5
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_jobs_are_shown_by_their_slowest_stage(water: Water, tmp_path: Path) -> None:
    applied(water, tmp_path)
    water.report(NEW_YEAR)
    [head, row, _, *problem] = run("jobs", water.job, *water.url).stdout.splitlines()
    assert problem[0].startswith(f"{water.job}: silent: ")
    assert head.split()[:5] == ["job", "stages", "state", "slowest", "stage"]
    assert row.split()[:-1] == [water.job, "2", "silent", "hourly", "none", "yet"]
    listed = json.loads(run("jobs", "--json", "--limit", "10000", *water.url).stdout)["jobs"]
    [ours] = [each for each in listed if each["job"] == water.job]
    assert (ours["slowest"], ours["output_watermark"]) == ("hourly", None)


def test_jobs_are_in_the_order_of_the_page(water: Water) -> None:
    """The longest unchanged of equal health comes first, and not the furthest behind."""
    for name, at in ((f"{water.job}-b", NEW_YEAR), (f"{water.job}-a", NEW_YEAR - 60_000)):
        water.client.declare(name, {"taps": {"shards": ["a"]}})
        rank = Rank(water.client.open_run(name, ["taps"], holder="me"), 0, 0)
        lease = water.client.claim(name, "taps", None, holder="me", ttl_ms=600_000, rank=rank)
        water.client.report(name, "taps", lease, {"a": RangeReport(at)})
    found = json.loads(run("jobs", f"{water.job}-*", "--json", *water.url).stdout)["jobs"]
    assert [each["job"] for each in found] == [f"{water.job}-b", f"{water.job}-a"]
    assert found[0]["since"] < found[1]["since"]


def test_a_run_that_has_lost_a_stage_is_fenced_there(water: Water, tmp_path: Path) -> None:
    """`runs JOB STAGE` showed the run as going on, unlike the page."""
    applied(water, tmp_path)
    water.client.open_run(water.job, ["taps", "hourly"], holder="nightly")
    water.client.open_run(water.job, ["taps"], holder="other")
    of_job = run("runs", water.job, *water.url).stdout
    assert "goes on (without taps)" in of_job
    of_stage = run("runs", water.job, "taps", *water.url).stdout.splitlines()
    assert [line.split()[1] for line in of_stage[1:3]] == ["goes", "fenced"]
    assert "goes on (without" not in run("runs", water.job, "hourly", *water.url).stdout


def test_an_idle_stage_is_not_the_slowest_one(water: Water) -> None:
    """`jobs` and `watch` named it, unlike the page. Stages below do not wait for it."""
    water.client.declare(water.job, {"quiet": {"shards": ["a"]}, "busy": {"shards": ["a"]}})
    rank = Rank(water.client.open_run(water.job, ["quiet", "busy"], holder="me"), 0, 0)
    for stage, said in (
        ("quiet", RangeReport(NEW_YEAR, idle=True)),
        ("busy", RangeReport(NEW_YEAR + 60_000)),
    ):
        lease = water.client.claim(water.job, stage, None, holder="me", ttl_ms=600_000, rank=rank)
        water.client.report(water.job, stage, lease, {"a": said})
    listed = json.loads(run("jobs", water.job, "--json", *water.url).stdout)["jobs"]
    assert [each["slowest"] for each in listed] == ["busy"]


def test_ranges_are_shown_slowest_first(water: Water, tmp_path: Path) -> None:
    applied(water, tmp_path)
    water.report(NEW_YEAR)
    shown = run("ranges", water.job, "taps", "--order", "range", *water.url).stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["range", "north", "south"]
    assert "2026-01-01T00:00:00.000Z" in shown
    one = run("ranges", water.job, "taps", "--limit", "1", *water.url).stdout
    assert one.splitlines()[-1] == "and 1 more: --limit"
    found = json.loads(run("ranges", water.job, "hourly", "--json", *water.url).stdout)
    assert [each["promise"] for each in found["ranges"]] == [None, None]


def test_watch_shows_the_job_and_what_holds_it(water: Water, tmp_path: Path) -> None:
    applied(water, tmp_path)
    water.report(NEW_YEAR)
    shown = run("watch", water.job, "--count", "1", *water.url).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == f"{water.job}, generation 1"
    assert any(line.startswith("taps active none 2026-01-01T00:00:00.000Z") for line in lines)
    assert any(line.startswith("silent: ") and "never reported" in line for line in lines)
    shown = run("watch", water.job, "--count", "2", "--interval", "0.1", *water.url).stdout
    assert shown.count("generation 1") == 2, "in a file, no look replaces another"
    looks = run("watch", water.job, "--json", "--count", "2", "--interval", "0.1", *water.url)
    [first, second] = [json.loads(line) for line in looks.stdout.splitlines()]
    assert [(each["stage"], each["output_watermark"]) for each in first["stages"]] == [
        ("taps", NEW_YEAR),
        ("hourly", None),
    ]
    assert first.keys() == second.keys()


def test_a_deleted_job_is_gone(water: Water, tmp_path: Path) -> None:
    applied(water, tmp_path)
    assert run("delete", water.job, *water.url).exit_code == 1
    water.client.job(water.job)
    done = run("delete", water.job, "--yes", *water.url)
    assert done.stdout == f"job {water.job} is deleted\n"
    with pytest.raises(UnknownJob):
        water.client.job(water.job)


def test_a_time_may_be_said_from_now(water: Water, tmp_path: Path) -> None:
    applied(water, tmp_path)
    water.report(NEW_YEAR)
    done = run("history", water.job, "taps", "--from", "-2h", "--to", "now", "--json", *water.url)
    assert json.loads(done.stdout)["points"]
    done = run("wait", water.job, "taps", "--until", "-9 h", "--timeout", "0s", *water.url)
    assert done.exit_code == 3
    assert json.loads(run("eta", water.job, "taps", "+1h", "--json", *water.url).stdout)["at"] > 0


# ---- the profile, and completion


def tidegauge(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as it is installed, with every command that is added to it."""
    code = "import sys; sys.argv[0] = 'tidegauge'; from service.cli import main; main()"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGAUGE_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_version_and_short_help() -> None:
    """Also of commands that the agent adds."""
    shown = tidegauge("--version")
    assert (shown.returncode, shown.stdout) == (0, f"{version('tidegauge')}\n")
    for arguments in (["-h"], ["status", "-h"], ["keys", "list", "-h"]):
        assert "Usage: tidegauge" in tidegauge(*arguments).stdout


SECRET = "operator-0123456789abcdef0123456789abcdef"


def test_a_profile_says_where_and_with_which_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    (tmp_path / "key").write_text(SECRET)
    monkeypatch.setenv("TIDEGAUGE_CONFIG", str(config))
    with Service(tmp_path, environment={"TIDEGAUGE_ADMIN_KEY": SECRET}) as service:
        config.write_text(
            f'[default]\nurl = "{service.url}/"\nkey_file = "{tmp_path / "key"}"\n'
            f'[other]\nurl = "http://127.0.0.1:1"\n[odd]\nkey = "x"\n'
        )
        assert run("jobs").exit_code == 0
        # No other service is shown the key, not even the same one by another name.
        elsewhere = run("jobs", "--url", service.url.replace("127.0.0.1", "localhost"))
        assert "Name a file with a key that may read" in elsewhere.stderr
        monkeypatch.setenv("TIDEGAUGE_PROFILE", "other")
        assert "is tidegauge at http://127.0.0.1:1?" in run("jobs").stderr
        for name, says in {
            "nosuch": "has no profile 'nosuch': it has default, other, odd",
            "odd": "profile 'odd' has 'key': it may have url and key_file",
        }.items():
            monkeypatch.setenv("TIDEGAUGE_PROFILE", name)
            done = run("jobs")
            assert (done.exit_code, says in done.stderr) == (5, True), done.stderr


def test_the_url_and_the_profile_stand_before_the_command_or_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line comes before the environment, and the end of it before its begin."""
    (tmp_path / "key").write_text(SECRET)
    away = "http://127.0.0.1:1"
    config = tmp_path / "config.toml"
    with Service(tmp_path, environment={"TIDEGAUGE_ADMIN_KEY": SECRET}) as service:
        key = f'key_file = "{tmp_path / "key"}"'
        config.write_text(f'[here]\nurl = "{service.url}"\n{key}\n[away]\nurl = "{away}"\n')
        elsewhere = {
            "TIDEGAUGE_CONFIG": str(config),
            "TIDEGAUGE_PROFILE": "away",
            "TIDEGAUGE_URL": away,
        }
        by_profile = elsewhere | {"TIDEGAUGE_KEY": "another-key"}
        by_url = elsewhere | {"TIDEGAUGE_KEY": SECRET}
        here, url = ("--profile", "here"), ("--url", service.url)
        for arguments, environment in (
            ((*here, "jobs"), by_profile),
            (("jobs", *here), by_profile),
            ((*here, "keys", "list"), by_profile),
            (("--profile", "away", "keys", "list", *here), by_profile),
            ((*url, "jobs"), by_url),
            (("--url", away, "keys", "list", *url), by_url),
        ):
            done = tidegauge(*arguments, **environment)
            assert done.returncode == 0, (arguments, done.stderr)
        # The key of a profile is sent to its own service only.
        unsent = tidegauge(*here, "jobs", "--url", service.url.replace("127.0.0.1", "localhost"))
        assert unsent.returncode != 0
        wrong = tidegauge("--profile", "nosuch", "keys", "list", **by_url)
        assert wrong.returncode == 5
        assert wrong.stderr.startswith("tidegauge keys list: ")
        assert "has no profile 'nosuch': it has here, away" in wrong.stderr


def test_a_shell_completes_jobs_and_stages(water: Water, tmp_path: Path) -> None:
    applied(water, tmp_path)

    def completed(*words: str) -> list[str]:
        done = tidegauge(
            _TIDEGAUGE_COMPLETE="complete_bash",
            COMP_WORDS=" ".join(["tidegauge", *words]),
            COMP_CWORD=str(len(words)),
            TIDEGAUGE_URL=water.url[1],
        )
        return done.stdout.split()

    assert water.job in completed("show", water.job[:-2])
    assert completed("explain", water.job, "h") == ["hourly"]
    assert completed("--url", "http://127.0.0.1:1", "show", water.job[:-2]) == []
    assert completed("show", "no-such-job") == []
