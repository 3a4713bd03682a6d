"""The deployment on Kubernetes: as kustomize makes it, by Kubernetes' schemas, and with the image."""

from __future__ import annotations

import subprocess
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import ValidationError, latest_version, validate
from ruamel.yaml import YAML

from deploy.prometheus.alerts import Thresholds, rules
from service.server.app import create_app
from service.settings import Settings
from tests.acceptance.test_deploy import image_environment, routes, said
from tests.support.required import program

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
OF_THE_OPERATOR = {"ServiceMonitor"}
Resource = dict[str, Any]


def read_all(text: str) -> list[Resource]:
    return [one for one in YAML(typ="safe").load_all(StringIO(text)) if one]


BASE = KUBERNETES / "base"
LISTED: list[str] = read_all((BASE / "kustomization.yaml").read_text())[0]["resources"]
FILES = {name: read_all((BASE / name).read_text()) for name in LISTED}


def of_kind(kind: str) -> Resource:
    [found] = [one for resources in FILES.values() for one in resources if one["kind"] == kind]
    return found


def pod(kind: str) -> Resource:
    return of_kind(kind)["spec"]["template"]["spec"]


def container(kind: str) -> Resource:
    [one] = pod(kind)["containers"]
    return one


def test_every_file_is_listed() -> None:
    assert {path.name for path in BASE.iterdir()} == {*LISTED, "kustomization.yaml"}


@pytest.mark.parametrize("name", LISTED)
def test_each_file_is_valid(name: str) -> None:
    for resource in FILES[name]:
        validate(resource, latest_version(), strict=True)


def test_the_schemas_find_faults() -> None:
    broken = of_kind("Deployment") | {"spec": of_kind("Deployment")["spec"] | {"replica": 2}}
    with pytest.raises(ValidationError, match="replica"):
        validate(broken, latest_version(), strict=True)


@pytest.mark.parametrize("folder", ["base", "monitoring"])
def test_kustomize_makes_valid_resources_that_fit(folder: str) -> None:
    kubectl = program("kubectl", install="https://kubernetes.io/docs/tasks/tools/", required=False)
    done = subprocess.run(
        [kubectl, "kustomize", "--load-restrictor", "LoadRestrictionsNone", KUBERNETES / folder],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = {one["kind"]: one for one in read_all(done.stdout)}
    for kind, resource in made.items():
        assert resource["metadata"]["namespace"] == "tidegauge"
        if kind not in OF_THE_OPERATOR:
            validate(resource, latest_version(), strict=True)
    # The selector finds the replicas, and nothing else.
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    migrating = made["Job"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        made["Deployment"]["spec"]["selector"]["matchLabels"],
        made["Service"]["spec"]["selector"],
        made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert not selector.items() <= migrating.items()
    policy = made["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    clients, scrapers = policy["ingress"][0]["from"]
    assert clients["podSelector"]["matchLabels"] == {"tidegauge.client": "true"}
    assert "podSelector" not in scrapers
    if folder == "monitoring":
        monitor = made["ServiceMonitor"]["spec"]
        found = monitor["selector"]["matchLabels"].items()
        assert found <= made["Service"]["metadata"]["labels"].items()
        [endpoint] = monitor["endpoints"]
        assert endpoint["port"] in {port["name"] for port in made["Service"]["spec"]["ports"]}
        assert endpoint["honorLabels"] is True
        assert len(made["ConfigMap"]["data"]) == 4


def test_two_replicas_of_which_one_may_be_drained() -> None:
    assert of_kind("Deployment")["spec"]["replicas"] == 2
    assert of_kind("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_probes_ask_what_the_service_answers() -> None:
    made = container("Deployment")
    probes = {name: made[name]["httpGet"]["path"] for name in made if name.endswith("Probe")}
    assert probes == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert set(probes.values()) <= routes()
    [port] = made["ports"]
    assert port["containerPort"] == int(said("EXPOSE"))


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_the_service_takes_its_settings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {each["name"]: each["value"] for each in container(kind)["env"]}
    known = {f"TIDEGAUGE_{name.upper()}" for name in Settings.model_fields}
    assert set(given) <= known
    keys = {Path(value).name for name, value in given.items() if name.endswith("_FILE")}
    [mount] = [m for m in container(kind)["volumeMounts"] if m["name"] == "secrets"]
    for name, value in given.items():
        if name.endswith("_FILE"):
            assert Path(value).parent == Path(mount["mountPath"]), name
    # The comment that says how to make the secret names each of them.
    for key in keys:
        assert f"--from-file={key}" in (BASE / "kustomization.yaml").read_text().split()
    # Kubernetes would set it to a URL.
    assert pod(kind)["enableServiceLinks"] is False
    for name, value in {**image_environment(), **given}.items():
        if name.startswith("TIDEGAUGE_") and not name.endswith("_FILE"):
            monkeypatch.setenv(name, value)
    settings = Settings(_env_file=None)  # pyright: ignore[reportCallIssue]
    assert create_app(settings).title == "tidegauge"
    assert settings.host == "0.0.0.0"


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_the_secrets_are_files_for_the_service_alone(kind: str) -> None:
    [volume] = [each for each in pod(kind)["volumes"] if each["name"] == "secrets"]
    assert volume["secret"]["defaultMode"] == 0o400
    # By which Kubernetes lets this group, and so the service, read them.
    security = pod(kind)["securityContext"]
    assert security["fsGroup"] == security["runAsUser"]
    assert "envFrom" not in container(kind)
    assert not [each for each in container(kind)["env"] if "valueFrom" in each]


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_nothing_runs_as_root_or_writes(kind: str) -> None:
    security = container(kind)["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert pod(kind)["securityContext"]["runAsNonRoot"] is True
    assert f"--uid {pod(kind)['securityContext']['runAsUser']} " in said("RUN")


def test_the_alerts_are_written_for_the_operator() -> None:
    read = YAML(typ="safe").load
    made = read(rules(Thresholds(), operator=True))
    assert made["kind"] == "PrometheusRule"
    assert made["spec"] == read(rules(Thresholds()))
