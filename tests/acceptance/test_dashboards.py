"""The dashboards: what is committed, and each query against a real Prometheus of a real service."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from deploy.grafana.dashboards import DASHBOARDS, FOLDER, Dashboard, build
from deploy.prometheus.alerts import Thresholds
from tests.support.api import ok
from tests.support.binaries import wait_until
from tests.support.prometheus_server import Prometheus
from tests.support.server import Service

ROOT = Path(__file__).parents[2]
PROVISIONING = ROOT / "deploy/grafana/provisioning"
by_name = pytest.mark.parametrize("wanted", DASHBOARDS, ids=lambda each: each.name)


def read_json(wanted: Dashboard) -> Any:
    return json.loads((FOLDER / f"{wanted.name}.json").read_text())


def queries(wanted: Dashboard) -> Iterator[tuple[str, str, str]]:
    """Title, expression and legend of every query, as Grafana reads them from the committed file."""
    for panel in read_json(wanted)["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


@by_name
def test_the_committed_dashboard_is_what_is_generated(wanted: Dashboard) -> None:
    assert (FOLDER / f"{wanted.name}.json").read_text() == build(wanted), (
        "run: python deploy/grafana/dashboards.py"
    )


def test_nothing_else_is_committed() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {each.name for each in DASHBOARDS}


@by_name
def test_links_lead_to_dashboards_that_are_there(wanted: Dashboard) -> None:
    uids = {each.uid for each in DASHBOARDS}
    variables = {each.uid: {name for name, _ in each.variables} for each in DASHBOARDS}
    for uid, rest in re.findall(r'"url": "/d/([\w-]+)\?([^"]*)"', json.dumps(read_json(wanted))):
        assert uid in uids
        assert set(re.findall(r"var-(\w+)=", rest)) <= variables[uid]


@by_name
def test_panels_fill_their_rows(wanted: Dashboard) -> None:
    """None lies on another, and none sticks out."""
    taken: set[tuple[int, int]] = set()
    for panel in read_json(wanted)["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def limits(wanted: Dashboard) -> dict[str, list[float]]:
    """The thresholds of each panel that has any, beyond its base color."""
    found: dict[str, list[float]] = {}
    for panel in read_json(wanted)["panels"]:
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        values = [step["value"] for step in steps if step["value"] is not None]
        if values:
            found[panel["title"]] = values
    return found


def test_panels_of_lag_have_the_thresholds_of_the_alerts() -> None:
    lag, system_lag = [Thresholds().lag_s], [Thresholds().system_lag_s]
    overview, job, stage, service = map(limits, DASHBOARDS)
    counts = ("Never reported", "Without a worker", "Without a watermark", "Problems", "Alerts")
    assert overview == {title: [1] for title in counts} | {
        "Furthest behind": lag,
        "Slowest stage of each job": lag,
        "Lag by job": lag,
        "System lag by job": system_lag,
    }
    assert job == {"Lag": lag, "System lag": system_lag}
    assert stage == {"Lag": lag}
    assert service == {}


def test_grafana_finds_the_dashboards_and_the_prometheus_of_the_compose_file() -> None:
    read = YAML(typ="safe").load
    compose = read((ROOT / "docker-compose.yml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    [provider] = read((PROVISIONING / "dashboards/tidegauge.yml").read_text())["providers"]
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (FOLDER / Path(home).name).is_file()
    [source] = read((PROVISIONING / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    scraping = read((ROOT / "deploy/prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraping


# ---- every query


def load(url: str, prometheus: Prometheus) -> None:
    """Let two jobs run, with everything that a panel counts, until Prometheus has seen some of it."""
    with httpx.Client(base_url=url, timeout=30) as client:
        for job in ("scores", "water"):
            stages = {"s": {"shards": ["a", "b"]}, "k": {"inputs": ["s"], "ranges": 2}}
            ok(client.put(f"/v1/jobs/{job}", json={"stages": stages}), 201)
        # Nobody works on this one.
        ok(client.put("/v1/jobs/planned", json={"stages": {"s": {"shards": ["a"]}}}), 201)

        def seen(expression: str) -> bool:
            return bool(prometheus.query(expression))

        # A count that rises before it is seen seems not to have risen.
        wait_until(lambda: seen('tidegauge_stage_late_total{job="water"}'), "a scrape")
        for _ in count():
            for job in ("scores", "water"):
                report(client, f"/v1/jobs/{job}/stages")
            # Refused at a limit, and for want of a lease.
            assert client.get("/" + "x" * 9_000).status_code == 414
            unknown = {"token": "none", "ranges": {"a": 5}}
            client.post("/v1/jobs/water/stages/s/reports", json=unknown)
            if seen('rate(tidegauge_stage_late_total{job="water"}[2s]) > 0') and seen(
                "rate(tidegauge_publish_seconds_count[2s]) > 0"
            ):
                return


def report(client: httpx.Client, stages: str) -> None:
    now_ms = time.time_ns() // 1_000_000
    lease = {"ranges": "all", "holder": "w", "ttl_ms": 600_000}
    token = ok(client.post(f"{stages}/s/leases", json=lease), 201)["token"]
    said = {"watermark": now_ms, "records": 10, "late": 1}
    body = {"token": token, "ranges": {"a": said, "b": said}}
    ok(client.post(f"{stages}/s/reports", json=body))
    observed = ok(client.get(f"{stages}/s/watermark"))["output_watermark"]
    lease = {"ranges": "all", "holder": "w", "ttl_ms": 600_000}
    granted = ok(client.post(f"{stages}/k/leases", json=lease), 201)
    ranges: dict[str, Any] = {name: {} for name in granted["granted"]}
    body = {"token": granted["token"], "ranges": ranges, "input_watermark": observed}
    ok(client.post(f"{stages}/k/reports", json=body))


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("dashboards")
    with (
        Service(folder) as service,
        Prometheus(folder / "prometheus", [f"127.0.0.1:{service.port}"]) as prometheus,
    ):
        load(service.url, prometheus)
        yield prometheus


def filled(expression: str, variables: Mapping[str, str]) -> str:
    """The query as Grafana sends it."""
    for name, value in variables.items():
        expression = re.sub(rf"\$({name}\b|\{{{name}\}})", lambda _, v=value: v, expression)
    assert "$" not in expression, expression
    return expression


VARIABLES = {"job": "scores", "stage": "k", "instance": ".+", "__rate_interval": "30m"}


@by_name
def test_every_query_has_data_of_the_shape_of_its_legend(
    wanted: Dashboard, scraped: Prometheus
) -> None:
    for title, expression, legend in queries(wanted):
        # A rate needs two scrapes, which a busy machine takes its time for.
        asked = filled(expression, VARIABLES)
        wait_until(lambda: bool(scraped.query(asked)), f"{title}: data for {asked}")  # noqa: B023
        samples = scraped.query(asked)
        labels = set(re.findall(r"\{\{(\w+)\}\}", legend))
        for sample in samples:
            assert labels == set(sample["metric"]) & labels, (title, sample)
            assert float(sample["value"][1]) == pytest.approx(float(sample["value"][1])), title
        # Each line has a name of its own.
        names = [tuple(sorted((n, s["metric"][n]) for n in labels)) for s in samples]
        assert len(set(names)) == len(samples), (title, samples)


@by_name
def test_every_variable_finds_its_values(wanted: Dashboard, scraped: Prometheus) -> None:
    values = {"job": {"scores", "water", "planned"}, "stage": {"s", "k"}}
    for name, query in wanted.variables:
        [[series, label]] = re.findall(r"^label_values\((.+), (\w+)\)$", query)
        assert label == name
        found = {each["metric"][label] for each in scraped.query(filled(series, VARIABLES))}
        assert found == values.get(name, found)
        assert found


def test_the_numbers_are_right(scraped: Prometheus) -> None:
    """Panels whose numbers are known show them."""
    known = {
        "Jobs": 3,
        "Stages": 5,
        "Never reported": 1,
        "Without a worker": 0,
        "Without a watermark": 1,
        "Problems": 1,
        "Alerts": 0,
    }
    found = {
        panel.title: float(scraped.query(panel.queries[0][0])[0]["value"][1])
        for panel in DASHBOARDS[0].panels
        if panel.title in known
    }
    assert found == known
    [problems] = [each for each in DASHBOARDS[0].panels if each.title == "Problems by stage"]
    [sample] = scraped.query(problems.queries[0][0])
    assert sample["metric"] == {"job": "planned", "stage": "s", "health": "silent"}
    [by_condition] = [panel for panel in DASHBOARDS[2].panels if panel.title == "Ranges"]
    samples = scraped.query(filled(by_condition.queries[0][0], VARIABLES))
    counts = {each["metric"]["condition"]: int(each["value"][1]) for each in samples}
    assert {condition: count for condition, count in counts.items() if count} == {"active": 2}
    [lines] = [panel for panel in DASHBOARDS[2].panels if panel.title == "Watermarks"]
    for sample in scraped.query(filled(lines.queries[0][0], VARIABLES)):
        assert float(sample["value"][1]) == pytest.approx(time.time() * 1_000, abs=3_600_000)
