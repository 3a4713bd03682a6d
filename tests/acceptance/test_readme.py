"""The examples of the README and of `docs/`, run as they stand there."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from docs.drawings import PLAYS, averages
from service.model.keys import Role
from service.server.app import create_app
from service.settings import Settings
from spark_agent import Client
from spark_agent.cli.common import URL_VARIABLE
from spark_agent.cli.profile import CONFIG_VARIABLE, PROFILE_VARIABLE
from spark_agent.client.credentials import FILE_VARIABLE, KEY_VARIABLE
from spark_agent.demo.session import link_spark_home
from spark_agent.executor.tally import Count
from spark_agent.soundness.operators import TABLE
from tests.support.binaries import free_port, wait_until
from tests.support.commands import run
from tests.support.documents import EXECUTED, NOT_EXECUTED, block, blocks, pages
from tests.support.local_files import FILE_MANAGER_SETTING, ONE_STEP
from tests.support.server import Service

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = "\n\n".join(pages().values())
Test = TypeVar("Test", bound=Callable[..., None])


def test_the_http_example(tmp_path: Path) -> None:
    with Service(tmp_path) as service:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block("sh", "post()")],
            env={**os.environ, "URL": service.url},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout[done.stdout.rindex('{"job"') :])
    assert (last["stage"], last["output_watermark"]) == ("sessions", 1_767_225_580_000)


def test_the_commands_that_ask(tmp_path: Path) -> None:
    """They continue the example before them."""
    asking = block("sh", "seq 60").replace("tidegauge ", "python -m service ")
    with Service(tmp_path) as service:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block("sh", "post()") + asking],
            env={
                **os.environ,
                "URL": service.url,
                "TIDEGAUGE_URL": service.url,
                "PYTHONPATH": str(ROOT),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mobile is at 2026-01-01T01:00:00.000Z\nall of it has arrived\n" in done.stdout
    assert re.search("mobile (will reach|is not at) 2026-01-01T01:04:00.000Z", done.stdout)
    eta, end = json.JSONDecoder().raw_decode(done.stdout, done.stdout.index('{"at":1767229440000'))
    # On a busy machine it may seem to stand still.
    assert not eta["reached"]
    assert eta.keys() == json.loads(block("json", '"confidence"')).keys()
    history, _ = json.JSONDecoder().raw_decode(done.stdout, end)
    assert len(history["points"]) <= 5
    assert history["points"][-1]["output_watermark"] == 1_767_229_200_000


def answers(text: str) -> list[dict[str, Any]]:
    """The JSON objects in what an example prints, one after the other."""
    found: list[dict[str, Any]] = []
    at = text.find("{")
    while at >= 0:
        one, end = json.JSONDecoder().raw_decode(text, at)
        found.append(one)
        at = text.find("{", end)
    return found


def run_example(service: Service, *containing: str) -> str:
    """Run shell examples with what they take from the HTTP example; return what they print."""
    helpers = block("sh", "post()").partition("\n\n")[0] + "\n" + block("sh", "define()")
    return run_script(service, helpers + "".join(block("sh", each) for each in containing))


def run_script(service: Service, script: str) -> str:
    """Run a script of shell against a service; return what it prints."""
    return run(
        *("bash", "-euo", "pipefail", "-c", script.replace("tidegauge ", "python -m service ")),
        folder=service.folder,
        variables={
            "URL": service.url,
            "TIDEGAUGE_URL": service.url,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
        },
    )


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """For examples with jobs of their own."""
    with Service(tmp_path_factory.mktemp("readme")) as service:
        yield service


def test_the_example_of_lags(service: Service) -> None:
    shown = answers(run_example(service, "define parcels"))[-1]
    # The example counts in whole seconds.
    assert shown["system_lag_ms"] >= 90_000
    assert shown["data_lag_ms"] > shown["system_lag_ms"]
    assert (shown["records"], shown["late"]) == (200, 2)


def test_the_example_of_percentiles(service: Service, tmp_path: Path) -> None:
    script = block("python", "def pending(")
    done = subprocess.run(
        [sys.executable, "-c", script.replace("http://127.0.0.1:8000", service.url)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == script.rstrip().rpartition("# ")[2]


def test_the_example_of_a_packed_report(service: Service) -> None:
    printed = run_example(service, "define meters", "times=$(python3")
    for reported in answers(printed)[-2:]:
        assert reported["accepted"] == 3
        assert reported["watermark"]["output_watermark"] == 1_767_225_600_000, "c is not waited for"


def test_the_example_of_quiet_shards(service: Service) -> None:
    reported = answers(run_example(service, "define orders"))[-1]
    assert reported["watermark"]["output_watermark"] == 1_767_225_600_000 + 30 * 60_000


def test_the_example_of_a_claim_within_a_report(service: Service) -> None:
    reported = answers(run_example(service, "define trams"))[-1]
    assert reported["granted"] == ["north", "south"]
    assert reported["watermark"]["output_watermark"] == 1_767_225_590_000


def test_the_example_of_dynamic_shards(service: Service) -> None:
    _, both, final, shown = answers(run_example(service, "define uploads"))
    assert both["watermark"]["output_watermark"] == 1_767_225_590_000
    assert final["watermark"]["output_watermark"] == shown["output_watermark"] == 1_767_225_600_000


def test_the_example_of_changes(service: Service) -> None:
    newest, opened, created = answers(run_example(service, "define changed"))[-1]["changes"]
    assert (newest["detail"], newest["because"]) == ("run 1 failed", "out of memory")
    assert opened["detail"] == "run 1 of taps was opened by driver-1"
    assert created["action"] == "create-job"


def test_the_example_of_retirement(service: Service) -> None:
    text = run_example(service, "define wells ")
    assert "taps: output 2025-12-31T23:00:00.000Z -> 2026-01-01T00:00:00.000Z" in text
    assert "tap-2 of taps is retired until its next report" in text
    json_part, _, after = text.partition("tap-2 of taps has promised")
    shown = answers(json_part)[-1]
    assert (shown["retired"], shown["moves"][0]["after"]["output_watermark"]) == (
        False,
        1767225600000,
    )
    explained, last = answers(after[after.index("{") :])
    assert explained["retired"][0]["because"] == "the site is closed"
    assert last["watermark"]["output_watermark"] == 1767225600000


def test_the_examples_of_throttling_and_explaining(service: Service) -> None:
    shown = run_example(service, "define flights", "claim flights sessions")
    json_part, _, tree = shown.rpartition("sessions: 2025")
    reported = next(
        each for each in answers(json_part) if "throttle" in each and "accepted" in each
    )
    assert {"throttle": reported["throttle"]} == json.loads(block("json", "ahead of shard"))
    assert "held by" in json_part, "the table of `tidegauge throttle`"
    explained = answers(json_part)[-1]
    assert explained["holders"][0]["reason"] == "buffering"
    told = block("text", "sessions: 2025")
    assert without_times("sessions: 2025" + tree) == without_times(told)


def without_times(tree: str) -> list[str]:
    """Return a tree's text without its time of printing and its line breaks."""
    tree = re.sub(r", unchanged for .*", "", tree)
    changing = r"2026-1\d-\S+Z|fence \d+|[\d.]+ s left"
    return [re.sub(changing, "…", line).strip() for line in tree.strip().splitlines()]


def operators() -> list[str]:
    """The table of operators as the page must have it, from the code's."""
    rows: dict[str, list[str]] = {}
    for row in TABLE.values():
        if row.in_code not in {"readStream", "withWatermark"}:
            late = "yes" if row.late_at_watermark else "no"
            said = rows.setdefault(f"{row.emits} | {row.output} | {late} |", [])
            if row.in_code not in said:
                said.append(row.in_code)
    return [f"| {', '.join(codes)} | {rest}" for rest, codes in rows.items()]


def test_the_table_of_operators_is_the_code_s() -> None:
    for row in operators():
        assert row in DOCUMENTS.splitlines()


def test_every_count_is_explained() -> None:
    for count in Count:
        assert f"`{count}`" in DOCUMENTS


SESSION = """
import sys, traceback
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    .config("spark.sql.session.timeZone", "UTC").config("%s", "%s")
    .getOrCreate())
for line in sys.stdin:
    # An example sets the number of its ranges itself, whatever ran before.
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    try:
        exec(open(line.strip()).read(), {"spark": spark})
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        print("failed", flush=True)
    else:
        print("ended", flush=True)
"""


SETTING = 'spark.conf.set("spark.sql.shuffle.partitions", 4)\n'
"""The setting of Spark that the page of the first job makes for all others."""


def in_spark(test: Test) -> Test:
    """Mark a test of an example; they share one Spark, so they run in one process."""
    return pytest.mark.spark(pytest.mark.xdist_group("examples")(test))


class Session:
    """One Spark for all examples, each of which has folders of its own: starting it takes longest."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.folder = folder
        self.url = service.url
        self._scripts = itertools.count()
        self._errors = (folder / "stderr").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", SESSION % (FILE_MANAGER_SETTING, ONE_STEP)],
            env={
                **os.environ,
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_HOME": str(link_spark_home(folder / "spark-home")),
            },
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def run(self, script: str) -> None:
        """Run an example to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        file = self.folder / f"{next(self._scripts)}.py"
        file.write_text(script.replace("http://127.0.0.1:8000", self.url))
        self._process.stdin.write(f"{file.name}\n")
        self._process.stdin.flush()
        printed: list[str] = []
        for line in self._process.stdout:
            printed.append(line)
            if line in {"ended\n", "failed\n"}:
                break
        assert printed[-1:] == ["ended\n"], "".join(printed) + self._log()

    def _log(self) -> str:
        return (self.folder / "stderr").read_text()[-5_000:]

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=60)
        self._errors.close()


@pytest.fixture(scope="module")
def session(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    session = Session(service, tmp_path_factory.mktemp("examples"))
    yield session
    session.close()


def write(folder: Path, name: str, rows: Sequence[Mapping[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(map(json.dumps, rows)))


def written(folder: Path) -> list[dict[str, object]]:
    lines = "".join(part.read_text() for part in folder.glob("part-*.json"))
    return [json.loads(line) for line in lines.splitlines()]


def taps() -> list[dict[str, object]]:
    """Two rows of each of two taps in each of three hours."""
    return [
        {"tap": tap, "at": f"2026-01-01T0{hour}:{minute}:00Z", "litres": 1.5}
        for hour in range(3)
        for minute in ("05", "35")
        for tap in ("north", "south")
    ]


def of_two_hours(rows: list[dict[str, object]]) -> bool:
    """Check the sums of both taps in the two hours that are over."""
    return sorted((str(row["tap"]), row["litres"]) for row in rows) == [
        (tap, 3.0) for tap in ("north", "south") for _ in range(2)
    ]


@in_spark
def test_the_change_of_a_job(session: Session) -> None:
    """The README's job runs before the change, in Spark alone, and after it."""
    write(session.folder / "readings", "1.json", taps())
    change = block("diff", 'job="readings"').splitlines()
    before, after = (
        "\n".join(line[1:] for line in change if not line.startswith(without)) for without in "+-"
    )
    session.run(before.replace("readings-", "before-"))
    session.run(after)
    assert of_two_hours(written(session.folder / "readings-hourly"))
    assert len(change) < 26


@in_spark
def test_the_first_example(session: Session) -> None:
    """Every hour that is over comes out, with all that ran in it."""
    write(session.folder / "taps", "1.json", taps())
    session.run(block("python", 'job="water"'))
    assert of_two_hours(written(session.folder / "hourly"))


@in_spark
def test_the_join(session: Session) -> None:
    """A payment after an hour and a second is for nothing."""
    for number, late in enumerate(("10:59:59", "11:00:00", "11:00:01")):
        write(
            session.folder / "orders",
            f"{number}.json",
            [{"by": "shop", "id": number, "ordered_at": "2026-01-01T10:00:00Z"}],
        )
        write(
            session.folder / "payments",
            f"{number}.json",
            [{"by": "bank", "order_id": number, "paid_at": f"2026-01-01T{late}Z"}],
        )
    session.run(SETTING + block("python", 'job="sales"'))
    assert sorted(str(row["id"]) for row in written(session.folder / "paid")) == ["0", "1"]


@in_spark
def test_a_job_of_every_night(session: Session) -> None:
    nights = []
    for day in (1, 2, 3):
        rows = [{"host": "web", "at": f"2026-01-0{day}T{hour:02d}:00:00Z"} for hour in range(24)]
        write(session.folder / "later", f"{day}.json", rows)
        nights.append(
            "import os; os.makedirs('visits', exist_ok=True); "
            f"os.rename('later/{day}.json', 'visits/{day}.json'); tonight(last={day == 3})"
        )
    script = block("python", 'job="nightly"') + "\n" + "\n".join(nights)
    session.run(SETTING + script)
    days = written(session.folder / "daily")
    assert [day["count"] for day in days] == [24, 24, 24]


@in_spark
def test_logs_in_folders(session: Session) -> None:
    """The southern meters have sent two hours more than the northern ones."""
    (session.folder / "meters").mkdir()
    for shard, hours in (("north", 46), ("south", 48)):
        for number, first in enumerate(range(0, hours, 8)):
            rows = [
                {"at": f"2026-01-0{1 + hour // 24}T{hour % 24:02d}:30:00Z", "kwh": 0.5}
                for hour in range(first, min(first + 8, hours))
            ]
            write(session.folder / "meters" / shard, f"{number:04d}.json", rows)
    session.run(SETTING + block("python", 'job="power"'))
    days = written(session.folder / "power")
    assert sorted((str(day["shard"]), day["kwh"]) for day in days) == [
        ("north", 12.0),
        ("south", 12.0),
    ]


@in_spark
def test_late_rows(session: Session) -> None:
    """On the second night a row comes for the first day, which is closed."""

    def readings(night: int, *times: str) -> None:
        rows = [
            {"meter": meter, "at": at, "m3": 1.0} for meter in ("north", "south") for at in times
        ]
        write(session.folder / "gas/meters", f"{night}.json", rows)

    example = block("python", 'job="gas"')
    readings(1, "2026-01-01T12:00:00Z", "2026-01-02T02:00:00Z")
    session.run(example)
    assert [row["m3"] for row in written(session.folder / "gas/daily")] == [1.0, 1.0]
    assert not written(session.folder / "gas/late")
    readings(2, "2026-01-01T13:00:00Z", "2026-01-02T12:00:00Z", "2026-01-03T02:00:00Z")
    session.run(example)
    days = written(session.folder / "gas/daily")
    assert sorted(str(row["m3"]) for row in days) == ["1.0", "1.0", "2.0", "2.0"]
    late = written(session.folder / "gas/late")
    assert sorted(str(row["meter"]) for row in late) == ["north", "south"]
    assert {str(row["at"])[:13] for row in late} == {"2026-01-01T13"}


@in_spark
def test_allowed_lateness(session: Session) -> None:
    """On the second night, a row comes for an hour of the first night, after its hour and its day."""

    def readings(night: int, *times: str) -> None:
        rows = [
            {"pump": pump, "at": f"2026-01-0{at}:00Z", "m3": 1.0}
            for pump in ("north", "south")
            for at in times
        ]
        write(session.folder / "water/pumps", f"{night}.json", rows)

    def newest(stage: str) -> dict[tuple[object, str], tuple[object, object]]:
        rows = sorted(
            written(session.folder / f"water/{stage}"), key=lambda row: int(str(row["version"]))
        )
        return {(row["pump"], str(row["at"])[:13]): (row["m3"], row["on_time"]) for row in rows}

    example = block("python", 'job="pumps"')
    readings(1, "1T12:10", "1T12:20", "1T23:50", "2T02:00")
    session.run(example)
    assert newest("hours")["north", "2026-01-01T12"] == (2.0, True)
    session.run(example)  # The second stage reads what the first one has written before its start.
    assert newest("days")["north", "2026-01-01T23"] == (3.0, True)
    readings(2, "1T23:55", "2T03:00")
    session.run(example)
    assert newest("hours")["south", "2026-01-01T23"] == (2.0, False)
    assert newest("hours")["south", "2026-01-01T12"] == (2.0, True)
    session.run(example)
    assert newest("days") == {
        ("north", "2026-01-01T23"): (4.0, False),
        ("south", "2026-01-01T23"): (4.0, False),
    }


@in_spark
def test_a_stage_in_sql(session: Session) -> None:
    rows = [
        {"panel": panel, "at": f"2026-01-01T{at}:00Z", "kwh": 0.5}
        for panel in ("roof", "field")
        for at in ("10:10", "10:50", "11:09")
    ]
    write(session.folder / "sun/panels", "1.json", rows)
    session.run(block("python", 'job="sun"'))
    assert not written(session.folder / "sun/yields"), "it is 10:59 for the watermark"
    later = [
        {"panel": panel, "at": "2026-01-01T11:10:00Z", "kwh": 1} for panel in ("roof", "field")
    ]
    write(session.folder / "sun/panels", "2.json", later)
    session.run(block("python", 'job="sun"'))
    found = written(session.folder / "sun/yields")
    assert [(row["kwh"], str(row["until"])[11:16]) for row in found] == [(1.0, "11:00")] * 2


@in_spark
def test_output_times(session: Session) -> None:
    """The averages are those of the drawing."""
    played = [
        {"device": device, "player": player, "at": f"2026-01-01T12:{minute:02}:00Z"}
        for device, player, minutes in PLAYS
        for minute in minutes
    ]
    last = [
        {"device": device, "player": None, "at": "2026-01-01T12:40:00Z"}
        for device in ("console", "mobile")
    ]
    write(session.folder / "arcade/plays", "1.json", [*played, *last])
    session.run(block("python", 'job=f"arcade-{output_time}"'))
    for output_time in ("end_of_window", "earliest"):
        rows = written(session.folder / f"arcade/{output_time}/averages")
        found = {int(str(row["window"]["start"])[14:16]): row["minutes"] for row in rows}  # type: ignore[index]
        assert found == averages(output_time)


@in_spark
def test_strategies(session: Session) -> None:
    """Each strategy promises what its row of the table has."""
    rows = [
        {"tap": tap, "at": f"2026-01-01T00:{at}Z", "action": action, "litres": litres}
        for tap in ("north", "south")
        for at, action, litres in (
            ("10:00", "open", 2.0),
            ("19:00", "close", 1.0),
            ("15:00", "open", 3.0),
            ("20:00", "open", 0.5),
        )
    ]
    write(session.folder / "taps", "1.json", rows)
    began_ms = time.time_ns() // 1_000_000
    session.run(SETTING + block("python", 'job=f"taps-{name}"'))
    ended_ms = time.time_ns() // 1_000_000
    client = Client(session.url)
    found = {
        name: client.watermark(f"taps-{name}", "taps").output_ms
        for name in re.findall(
            r'^    "(\w+)": ', block("python", 'job=f"taps-{name}"'), re.MULTILINE
        )
    }
    clock = {name: found.pop(name) for name in ("clock", "lag", "ingress")}
    midnight_ms, minute_ms = 1_767_225_600_000, 60_000
    assert found == {
        "ascending": midnight_ms + 20 * minute_ms,
        "bounded": midnight_ms + 10 * minute_ms,
        "text": midnight_ms + 20 * minute_ms - 5_000,
        "expression": midnight_ms + 15 * minute_ms - 5_000,
        "punctuated": midnight_ms + 18 * minute_ms,
        "column": midnight_ms + 19 * minute_ms,
        "none": None,
        "learned": midnight_ms + 10 * minute_ms,
        "generator": midnight_ms + 20 * minute_ms - 3_500,
    }
    for name, output_ms in clock.items():
        lag_ms = 0 if name == "ingress" else 5_000
        assert output_ms is not None
        assert began_ms - lag_ms <= output_ms <= ended_ms - lag_ms, name


@in_spark
def test_complete_folders(session: Session) -> None:
    """Three nights: one log goes on in the first, and nothing is left to read in the last."""
    (session.folder / "turbines").mkdir()

    def log(shard: str, hours: range) -> None:
        for hour in hours:
            rows = [{"at": f"2026-01-01T{hour:02d}:{at}:00Z", "kw": hour} for at in ("05", "35")]
            write(session.folder / "turbines" / shard, f"{hour:02d}.json", rows)

    script = SETTING + block("python", 'job="wind"')
    log("east", range(6))
    log("west", range(3))
    (session.folder / "turbines" / "east" / "_SUCCESS").touch()
    session.run(script)
    assert len(written(session.folder / "wind")) == 4, (
        "two hours of both, for the western one goes on"
    )
    log("west", range(3, 5))
    (session.folder / "turbines" / "west" / "_SUCCESS").touch()
    for _ in range(2):
        session.run(script)
        hours = written(session.folder / "wind")
        assert sorted((str(hour["shard"]), hour["kw"]) for hour in hours) == [
            *(("east", float(hour)) for hour in range(6)),
            *(("west", float(hour)) for hour in range(5)),
        ]


@in_spark
def test_early_results(session: Session) -> None:
    """Ten hours, the last one open; its last forty minutes have two thirds of the rows in flight."""
    rows = [
        {"county": county, "at": f"2026-01-01T{hour:02d}:{minute:02d}:00Z"}
        for hour in range(10)
        for minute in range(60)
        for county in ("north", "south")
    ]
    write(session.folder / "votes", "1.json", rows)
    session.run(SETTING + block("python", 'job="election"'))
    found = {
        folder: {str(row["window"]): row["count"] for row in written(session.folder / folder)}
        for folder in ("complete", "early")
    }
    # The promise is 08:59, and the percentile 09:19.
    assert len(found["complete"]) == 6 * 8 + 5
    assert len(found["early"]) == 6 * 9 + 1
    assert set(found["early"].values()) == {20}


def test_the_commands_of_the_readme_and_of_the_runbook(service: Service) -> None:
    helpers = block("sh", "post()")
    commands = block("sh", "tidegauge explain scores").replace(
        "2026-01-01T00:00Z", "2025-12-31T00:00Z"
    )
    alert = block("sh", "tidegauge explain JOB STAGE")
    alert = alert.replace("JOB", "scores").replace("STAGE", "sessions")
    shown = run_script(service, helpers + commands + alert)
    assert "all of it has arrived" in shown
    assert "sessions waits for" in shown


def test_the_service_of_the_documents(tmp_path: Path) -> None:
    """But for its port, and without installing it."""
    port = free_port()
    script = block("sh", "tidegauge serve --port 8000").replace("8000", str(port))
    command = script.splitlines()[-1].replace("tidegauge ", f"exec {sys.executable} -m service ", 1)
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: is_ready(f"http://127.0.0.1:{port}/readyz"), "it is ready")
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert (tmp_path / "tidegauge.db").exists()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def test_every_block_is_run_or_has_a_reason() -> None:
    """Each block of shell or Python contains one of these codes, and each code is in one block."""
    code = [each for each in blocks() if each.language in {"sh", "python"}]
    known = [*EXECUTED, *NOT_EXECUTED]
    for each in code:
        found = [one for one in known if one in each.text]
        assert found, f"{each.page}: no test runs\n{each.text}"
    for one in known:
        assert sum(one in each.text for each in code) == 1, one
    assert not any(each.language == "" for each in blocks()), "name the language, `text` at least"


def test_every_executed_block_is_in_its_test() -> None:
    for containing, test in EXECUTED.items():
        written = (ROOT / test).read_text()
        assert any(form in written for form in (f'"{containing}"', f"'{containing}'")), containing


def test_the_table_of_routes_has_all_of_them() -> None:
    """By what comes after the last name in the path: the table leaves out what comes before."""
    table = DOCUMENTS[DOCUMENTS.index("| `PUT`, `GET`, `DELETE /v1/jobs/{job}`") :].split("\n\n")[0]
    for path in create_app(Settings(_env_file=None)).openapi()["paths"]:  # pyright: ignore[reportCallIssue]
        assert path.rpartition("}")[2] in table, path


def test_every_setting_it_names_is_there() -> None:
    named = {name.lower() for name in re.findall(r"TIDEGAUGE_([A-Z_]+)", DOCUMENTS)}
    of_the_agent = {KEY_VARIABLE, FILE_VARIABLE, CONFIG_VARIABLE, PROFILE_VARIABLE, URL_VARIABLE}
    assert {f"TIDEGAUGE_{name.upper()}" for name in Settings.model_fields} | of_the_agent == {
        f"TIDEGAUGE_{name.upper()}" for name in named
    }


def test_the_table_of_roles_is_the_code_s() -> None:
    table = DOCUMENTS[DOCUMENTS.index("| role | may |") :].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [role.value for role in Role]


def test_the_commands_for_keys(tmp_path: Path) -> None:
    """As they stand there, but for the address and the port."""
    script = block("sh", "tidegauge keys revoke").replace("tidegauge ", "python -m service ")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    script = script.replace("--host 0.0.0.0", f"--host 0.0.0.0 --port {port}")
    ready = f"for _ in $(seq 600); do curl -fsS {url}/readyz && break; sleep 0.1; done"
    script = script.replace(
        "\nexport ", f"\ntrap 'kill %1; wait' EXIT\n{ready} 2>/dev/null\nexport "
    )
    clean = {name: value for name, value in os.environ.items() if "TIDEGAUGE" not in name}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-m", "-c", script],
        env=clean
        | {
            "TIDEGAUGE_URL": url,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "drivers.key").read_text().startswith("tg_")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.key")} == {0o600}
    assert "key drivers is revoked" in done.stdout
    assert "revoke-key" in done.stdout
