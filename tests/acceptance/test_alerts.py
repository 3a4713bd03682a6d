"""The alerts: what is committed, promtool's own tests of it, and one run from a fault to a message."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from ruamel.yaml import YAML

from deploy.prometheus.alerts import Thresholds, alerts, main, rules
from tests.support.api import ok
from tests.support.binaries import limit_files, wait_until
from tests.support.prometheus_server import Alertmanager, Prometheus, Webhook, promtool
from tests.support.redis_server import RedisServer
from tests.support.server import Service

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
NAMES = [alert.name for alert in alerts(Thresholds())]


def test_the_committed_alerts_are_what_is_generated() -> None:
    assert (FOLDER / "alerts.yml").read_text() == rules(Thresholds()), (
        "run: python deploy/prometheus/alerts.py > deploy/prometheus/alerts.yml"
    )


def test_every_alert_has_its_section_of_the_runbook() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}
    without_an_alert = {"ledger-lost-or-restored"}
    assert {alert.section for alert in alerts(Thresholds())} == anchors - without_an_alert
    for alert in alerts(Thresholds()):
        assert f"*{alert.name}.*" in (ROOT / "docs/runbook.md").read_text()


def test_the_jobs_that_are_watched_can_be_chosen() -> None:
    written = rules(Thresholds(jobs=r"a\.b|c"))
    assert r'tidegauge_lag_seconds{job=~"a\\.b|c"}' in written


def annotations_of(written: str) -> list[dict[str, str]]:
    """The annotations of each alert."""
    [group] = YAML(typ="safe").load(written)["groups"]
    return [rule["annotations"] for rule in group["rules"]]


def test_a_link_to_the_runbook_is_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("runbook_url" in each for each in annotations_of(rules(Thresholds())))
    main(["--runbook", "https://wiki.example/tidegauge.html"])
    linked = annotations_of(capsys.readouterr().out)
    assert len(linked) == len(NAMES)
    for alert, each in zip(alerts(Thresholds()), linked, strict=True):
        assert each["runbook_url"] == f"https://wiki.example/tidegauge.html#{alert.section}"
        assert each["runbook"] == f"docs/runbook.md#{alert.section}"
    with pytest.raises(SystemExit):
        main(["--runbook", "docs/runbook.md"])
    assert "it must be an address" in capsys.readouterr().err


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(promtool()), "test", "rules", str(folder / "alerts_test.yml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_promtool_tests_the_alerts() -> None:
    done = check(FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("broken", ["vector(0) > 1", "vector(1)"])
def test_each_alert_is_tested(broken: str, tmp_path: Path) -> None:
    """An alert that never fires, or always does, fails promtool's tests."""
    content = YAML(typ="safe").load((FOLDER / "alerts.yml").read_text())
    for rule in content["groups"][0]["rules"]:
        rule["expr"] = broken
    with (tmp_path / "alerts.yml").open("w") as file:
        YAML().dump(content, file)
    (tmp_path / "alerts_test.yml").write_text((FOLDER / "alerts_test.yml").read_text())
    done = check(tmp_path)
    assert done.returncode == 1
    failed = set(re.findall(r"alertname: *\"?(\w+)", done.stdout + done.stderr))
    assert failed == set(NAMES)


# ---- one run, of everything that is real


QUICK = Thresholds(window_s=4, lag_s=3, system_lag_s=3, soon_s=1, while_s=1, long_s=1)


class Worker:
    """Reports for shards of a job, over and over."""

    def __init__(self, client: httpx.Client, job: str, *shards: str, ttl_ms: int = 600_000) -> None:
        self._client, self._stage, self._shards = client, f"/v1/jobs/{job}/stages/s", shards
        self._ttl_ms = ttl_ms
        self.token = ""

    def claim(self) -> None:
        lease = {"ranges": list(self._shards), "holder": "w", "ttl_ms": self._ttl_ms}
        self.token = ok(self._client.post(f"{self._stage}/leases", json=lease), 201)["token"]

    def report(self, watermark: int, **members: int) -> int:
        """Return the status: a fault may be what is tested."""
        ranges = {shard: {"watermark": watermark, **members} for shard in self._shards}
        body = {"token": self.token, "ranges": ranges}
        return self._client.post(f"{self._stage}/reports", json=body).status_code


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Beat:
    """Does something ten times a second, until it ends."""

    def __init__(self, *does: Callable[[], object]) -> None:
        self._does = does
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            for each in self._does:
                each()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Service, RedisServer]]:
    with RedisServer(tmp_path / "redis") as redis:
        (tmp_path / "service").mkdir()
        with Service(tmp_path / "service", options=("--live-url", redis.url)) as service:
            yield service, redis


def test_faults_become_messages_and_end(
    tmp_path: Path, service: tuple[Service, RedisServer]
) -> None:
    """Each fault is made, its alert arrives, it is repaired, and the alert ends."""
    ours, redis = service
    with (
        Webhook() as webhook,
        Alertmanager(tmp_path / "alertmanager", webhook.url) as manager,
        Prometheus(
            tmp_path / "prometheus",
            [f"127.0.0.1:{ours.port}"],
            rules=rules(QUICK),
            alertmanager=manager,
        ) as prometheus,
        httpx.Client(base_url=ours.url, timeout=30) as client,
    ):

        def fires(name: str, **labels: str) -> bool:
            return webhook.states(name, **labels)[-1:] == ["firing"]

        def ends(name: str, **labels: str) -> bool:
            return webhook.states(name, **labels)[-1:] == ["resolved"]

        def await_all(said: Callable[..., bool], expected: dict[str, dict[str, str]]) -> None:
            try:
                for name, labels in expected.items():
                    wait_until(lambda n=name, at=labels: said(n, **at), f"{name} {said.__name__}")
            except AssertionError as error:
                error.add_note(str(prometheus.query("ALERTS")))
                error.add_note(str(webhook.received()))
                raise

        for job in ("held", "lost", "mute", "planned"):
            ok(client.put(f"/v1/jobs/{job}", json={"stages": {"s": {"shards": ["a", "b"]}}}), 201)
        # Prometheus must have seen the counts before they rise.
        wait_until(
            lambda: bool(prometheus.query('tidegauge_stage_late_total{job="lost"}')), "a scrape"
        )

        # One shard of `held` stands still while the other one goes on. The worker of one of `lost` is
        # gone. One of `mute` has never reported. Nobody works on `planned`.
        began = now_ms()
        fast, slow = Worker(client, "held", "a"), Worker(client, "held", "b")
        gone, other = Worker(client, "lost", "a", ttl_ms=1_000), Worker(client, "lost", "b")
        heard, mute = Worker(client, "mute", "a"), Worker(client, "mute", "b")
        for worker in (fast, slow, gone, other, heard, mute):
            worker.claim()
        slow.report(began)
        heard.report(began)
        other.report(began)
        gone.report(began, late=3)
        held, lost = {"job": "held", "stage": "s"}, {"job": "lost", "stage": "s"}
        unheard = {"job": "mute", "stage": "s"}
        planned = {"job": "planned"}
        with Beat(lambda: fast.report(now_ms())):
            await_all(
                fires,
                {
                    "TidegaugeLateRows": lost,
                    "TidegaugeNoWorker": lost,
                    "TidegaugeRangeNeverReported": unheard,
                    "TidegaugeNeverStarted": planned,
                    "TidegaugeWatermarkStandsStill": held,
                    "TidegaugeLagRises": held,
                    "TidegaugeSystemLag": held,
                },
            )
        gone.claim()
        begins = Worker(client, "planned", "a", "b")
        begins.claim()
        repaired = (fast, slow, gone, other, heard, mute, begins)
        with Beat(*(lambda w=worker: w.report(now_ms()) for worker in repaired)):
            await_all(
                ends,
                {
                    "TidegaugeLateRows": lost,
                    "TidegaugeNoWorker": lost,
                    "TidegaugeRangeNeverReported": unheard,
                    "TidegaugeNeverStarted": planned,
                    "TidegaugeWatermarkStandsStill": held,
                    "TidegaugeLagRises": held,
                    "TidegaugeSystemLag": held,
                },
            )
            assert not webhook.states("TidegaugeLiveStoreLost")

            # The disk of the ledger is full.
            limit_files([ours.pid], 0)
            try:
                await_all(fires, {"TidegaugePublishingFails": {}})
            finally:
                limit_files([ours.pid], -1)
            await_all(ends, {"TidegaugePublishingFails": {}})

        redis.restart()
        await_all(fires, {"TidegaugeLiveStoreLost": {"job": "tidegauge"}})
        await_all(ends, {"TidegaugeLiveStoreLost": {"job": "tidegauge"}})

        ours.stop()
        await_all(fires, {"TidegaugeDown": {}})
        ours.start()
        await_all(ends, {"TidegaugeDown": {}})
        assert not webhook.states("TidegaugeLabelsRenamed")
