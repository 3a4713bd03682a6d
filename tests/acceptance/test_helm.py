"""The Helm chart: its values by their schema; rendered by the real Helm, and compared with kustomize."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from jsonschema import Draft7Validator
from kubernetes_validate import latest_version, validate
from ruamel.yaml import YAML

from service.server.app import create_app
from service.settings import Settings
from service.telemetry.tracing import EXPORTER_VARIABLE
from tests.acceptance.test_deploy import image_environment, instructions, said
from tests.acceptance.test_kubernetes import FILES, KUBERNETES, OF_THE_OPERATOR, read_all
from tests.support.helm import CHART, Helm, RejectedError, Rendered, install_helm
from tests.support.required import program
from tests.support.server import ROOT

EXAMPLES: Final = sorted(path.name.removesuffix("-values.yaml") for path in CHART.glob("ci/*"))
SCHEMA: Final[dict[str, Any]] = json.loads((CHART / "values.schema.json").read_text())
OF_THE_CHART: Final = {
    *("ledger_url", "ledger_url_file", "live_url", "live_url_file"),
    *("admin_key", "admin_key_file", "scrape_key", "scrape_key_file"),
    *("host", "port", "allowed_hosts", "insecure", "tls_cert", "tls_key", "tls_client_ca"),
}
"""Settings that the chart has values of its own for, or rejects."""
ALWAYS: Final = ["Deployment", "Service", "ServiceAccount"]
HOOK: Final = "helm.sh/hook"

# Helm is installed once.
pytestmark = pytest.mark.xdist_group("helm")


def read(name: str) -> dict[str, Any]:
    return YAML(typ="safe").load((CHART / name).read_text())


def example(name: str) -> dict[str, Any]:
    return read(f"ci/{name}-values.yaml")


def faults(values: Mapping[str, Any]) -> list[str]:
    return [error.message for error in Draft7Validator(SCHEMA).iter_errors(values)]


# ---- the values


@pytest.mark.parametrize("name", ["values.yaml", *(f"ci/{each}-values.yaml" for each in EXAMPLES)])
def test_the_schema_admits(name: str) -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert faults(read(name)) == []


def leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    # The defaults of settings are those of the service.
    if "properties" not in schema or path == ".settings":
        yield path
        return
    for name, each in schema["properties"].items():
        yield from leaves(each, f"{path}.{name}")


def test_each_value_has_a_default() -> None:
    defaults = read("values.yaml")
    for path in leaves(SCHEMA):
        found: Any = defaults
        for name in path.split(".")[1:]:
            if name == "global":  # Helm's own, for charts within charts
                found = {"global": {}}
            assert name in found, path
            found = found[name]


def test_settings_are_those_of_the_service() -> None:
    """Their types and limits, too: Helm rejects a value with which a replica does not start."""
    assert set(Settings.model_fields) >= OF_THE_CHART
    assert SCHEMA["properties"]["settings"]["properties"] == {
        name: {each: own[each] for each in ("type", "enum", "minimum", "maximum") if each in own}
        for name, own in Settings.model_json_schema()["properties"].items()
        if name not in OF_THE_CHART
    }


KEYS: Final = ("ledgerUrl", "liveUrl", "adminKey", "scrapeKey")

BAD: Final[list[tuple[dict[str, Any], str]]] = [
    ({"replica": 2}, "replica"),
    ({"replicas": "two"}, "replicas"),
    ({"replicas": 0}, "minimum|less than"),
    ({"redis": {"mode": "replicated"}}, "'?single'?, '?sentinel'?"),
    ({"settings": {"log_levle": "debug"}}, "log_levle|propert"),
    ({"settings": {"admin_key": "0123456789abcdef0123456789abcdef"}}, "admin_key|propert"),
    ({"settings": {"log_level": "loud"}}, "log_level|value must be one of"),
    ({"settings": {"max_jobs": "many"}}, "max_jobs|want integer"),
    ({"settings": {"max_jobs": 0}}, "max_jobs|minimum"),
    ({"podLabels": {"app.kubernetes.io/name": "other"}}, "podLabels|'not' failed"),
    ({"serviceMonitor": {"labels": {"helm.sh/chart": "other"}}}, "labels|'not' failed"),
    ({"image": {"tag": "a b"}}, "pattern|match"),
    ({"otlp": {"endpoint": "http://collector:4318?key=hush"}}, "pattern|match"),
    ({"podDisruptionBudget": {"maxUnavailable": "0%"}}, "maxUnavailable|valid"),
    ({"podDisruptionBudget": {"maxUnavailable": "150%"}}, "maxUnavailable|valid"),
    ({"ingress": {"hosts": ["Gauge.example.com"]}}, "pattern|match"),
    ({"secret": {"name": "a", "keys": dict.fromkeys(KEYS, "..")}}, "pattern|match"),
    ({"otlp": {"endpoint": "http://user:hush@collector:4318"}}, "pattern|match"),
    ({"otlp": {"endpoint": "collector:4318"}}, "pattern|match"),
    ({"image": {"digest": "sha256:12"}}, "pattern|match"),
    ({"ingress": {"enabled": True}}, "hosts|minItems"),
    ({"secret": {"name": ""}}, "pattern|match"),
    ({"podDisruptionBudget": {"maxUnavailable": "half"}}, "maxUnavailable|valid"),
    ({"networkPolicy": {"egress": {"redis": {"ports": [0]}}}}, "minimum|less than"),
    ({"networkPolicy": {"egress": {"kafka": {"ports": [9092]}}}}, "kafka"),
]


def merged(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values into defaults, as Helm does."""
    return {
        **defaults,
        **{
            name: merged(defaults[name], value)
            if isinstance(value, dict) and isinstance(defaults.get(name), dict)
            else value
            for name, value in values.items()
        },
    }


@pytest.mark.parametrize(("values", "words"), BAD)
def test_the_schema_rejects(values: dict[str, Any], words: str) -> None:
    assert faults(merged(read("values.yaml"), values)), words


# ---- rendered by Helm


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return install_helm(tmp_path_factory.mktemp("helm") / "environment")


@pytest.fixture(scope="module")
def rendered(helm: Helm) -> Mapping[str, Rendered]:
    return {name: helm.render(example(name)) for name in EXAMPLES}


def pod(resource: Mapping[str, Any]) -> dict[str, Any]:
    return resource["spec"]["template"]["spec"]


def container(resource: Mapping[str, Any]) -> dict[str, Any]:
    [one] = pod(resource)["containers"]
    return one


@pytest.mark.slow
def test_each_example_is_made_of_valid_resources(rendered: Mapping[str, Rendered]) -> None:
    for name, made in rendered.items():
        assert made.warnings == (), name
        for resource in made.resources:
            if resource["kind"] not in OF_THE_OPERATOR:
                validate(resource, latest_version(), strict=True)
    policies = ["NetworkPolicy", "NetworkPolicy", "PodDisruptionBudget"]
    wanted = {
        "bare": [],
        "single": ["Job", *policies],
        "sentinel": ["Job", "Ingress", *policies],
        "cluster": ["Job", "HorizontalPodAutoscaler", "ServiceMonitor", *policies],
    }
    assert {name: made.kinds() for name, made in rendered.items()} == {
        name: sorted([*ALWAYS, *more]) for name, more in wanted.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("values", "words"), BAD)
def test_helm_rejects_in_words(helm: Helm, values: dict[str, Any], words: str) -> None:
    with pytest.raises(RejectedError, match=words):
        helm.render(values)


CONTRADICTORY: Final[list[tuple[dict[str, Any], str]]] = [
    (
        {"autoscaling": {"enabled": True, "minReplicas": 4, "maxReplicas": 3}},
        "minReplicas is above",
    ),
    (
        {"autoscaling": {"enabled": True}, "resources": {"requests": None}},
        "needs resources.requests.cpu",
    ),
    ({"networkPolicy": {"egress": {"dns": None}}}, r"egress\.dns has not a port"),
    ({"networkPolicy": {"egress": {"redis": {"ports": None}}}}, r"egress\.redis has not a port"),
    ({"service": {"type": "LoadBalancer"}}, r"networkPolicy\.from"),
    ({"secret": {"name": "a", "keys": dict.fromkeys(KEYS, "key")}}, "the same entry"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("values", "words"), CONTRADICTORY)
def test_helm_rejects_values_that_contradict_each_other(
    helm: Helm, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(RejectedError, match=words):
        helm.render(values)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my.release", "9lives"])
def test_helm_rejects_a_release_whose_service_could_not_have_its_name(
    helm: Helm, name: str
) -> None:
    with pytest.raises(RejectedError, match="begins with a letter and has not a dot"):
        helm.render({}, name=name)


@pytest.mark.slow
def test_a_load_balancer_with_the_addresses_of_its_clients_is_rendered(helm: Helm) -> None:
    peer = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    made = helm.render({"service": {"type": "LoadBalancer"}, "networkPolicy": {"from": [peer]}})
    assert peer in made.of_kind("NetworkPolicy")["spec"]["ingress"][0]["from"]


@pytest.mark.slow
def test_every_container_is_as_closed_as_those_of_kustomize(
    rendered: Mapping[str, Rendered],
) -> None:
    for made in rendered.values():
        for resource in made.resources:
            if resource["kind"] not in {"Deployment", "Job"}:
                continue
            assert f"--uid {pod(resource)['securityContext']['runAsUser']} " in said("RUN")
            assert pod(resource)["securityContext"]["fsGroup"] == 10001
            for volume in pod(resource)["volumes"]:
                if volume["name"] in {"secrets", "tls"}:
                    assert volume["secret"]["defaultMode"] == 0o400
            for each in container(resource)["env"]:
                assert isinstance(each["value"], str), "a secret is a file"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_service_takes_its_settings(
    name: str, rendered: Mapping[str, Rendered], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = container(rendered[name].of_kind("Deployment"))
    given = {each["name"]: each["value"] for each in made["env"]}
    ours = {each for each in given if each.startswith("TIDEGAUGE_")}
    assert ours <= {f"TIDEGAUGE_{field.upper()}" for field in Settings.model_fields}
    mounts = {mount["mountPath"] for mount in made["volumeMounts"]}
    for variable, value in {**image_environment(), **given}.items():
        if variable.endswith(("_FILE", "_TLS_CERT", "_TLS_KEY")):
            assert str(Path(value).parent) in mounts
        elif variable.startswith("TIDEGAUGE_"):
            monkeypatch.setenv(variable, value)
    settings = Settings(_env_file=None)  # pyright: ignore[reportCallIssue]
    assert create_app(settings).title == "tidegauge"
    for setting, value in example(name).get("settings", {}).items():
        assert getattr(settings, setting) == value
    names = settings.allowed_hosts.split(",")
    assert "tidegauge.tidegauge.svc.cluster.local" in names
    assert {*example(name).get("ingress", {}).get("hosts", ())} <= {*names}


@pytest.mark.slow
def test_secret_entries_are_the_files(rendered: Mapping[str, Rendered]) -> None:
    """Under the names of the values, and the migration has the ledger's URL alone."""
    for made, kind, entries in (
        (rendered["single"], "Deployment", {"ledger-url", "live-url", "admin-key", "scrape-key"}),
        (rendered["sentinel"], "Deployment", {"postgres", "redis", "operator", "prometheus"}),
        (rendered["sentinel"], "Job", {"postgres"}),
    ):
        resource = made.of_kind(kind, "-migrate" if kind == "Job" else "")
        [secret] = [v["secret"] for v in pod(resource)["volumes"] if v["name"] == "secrets"]
        assert {item["key"] for item in secret["items"]} == entries
        files = {
            Path(each["value"]).name
            for each in container(resource)["env"]
            if each["name"].endswith("_FILE")
        }
        assert files == entries


def ports(policy: Mapping[str, Any]) -> set[int]:
    return {each["port"] for rule in policy["spec"]["egress"] for each in rule["ports"]}


@pytest.mark.slow
def test_egress_is_that_of_the_mode(rendered: Mapping[str, Rendered]) -> None:
    policies = {n: made.of_kind("NetworkPolicy") for n, made in rendered.items() if n != "bare"}
    assert {name: ports(policy) for name, policy in policies.items()} == {
        "single": {53, 5432, 6379},
        "sentinel": {53, 5432, 6379, 26379},
        "cluster": {53, 5432, 6379, 4317, 4318},
    }
    [narrowed] = [rule["to"] for rule in policies["sentinel"]["spec"]["egress"] if "to" in rule]
    assert narrowed == example("sentinel")["networkPolicy"]["egress"]["sentinel"]["to"]
    admitted = policies["sentinel"]["spec"]["ingress"][0]["from"]
    assert "ingress-nginx" in json.dumps(admitted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "more"),
    [
        ("http://collector:4318", set[int]()),
        ("https://traces.example.com/tidegauge", {443}),
        ("http://collector", {80}),
        ("http://[fd00::7]:9999/v1", {9999}),
    ],
)
def test_egress_has_the_port_of_the_endpoint(helm: Helm, endpoint: str, more: set[int]) -> None:
    policy = helm.render({"otlp": {"endpoint": endpoint}}).of_kind("NetworkPolicy")
    assert ports(policy) == {53, 5432, 6379, 4317, 4318} | more
    listed = [each["port"] for each in policy["spec"]["egress"][-1]["ports"]]
    assert len(listed) == len(set(listed))


@pytest.mark.slow
def test_the_ingress_leads_to_the_service(rendered: Mapping[str, Rendered]) -> None:
    made, values = rendered["sentinel"], example("sentinel")["ingress"]
    ingress = made.of_kind("Ingress")
    spec = ingress["spec"]
    assert ingress["metadata"]["annotations"] == values["annotations"]
    assert spec["ingressClassName"] == values["className"]
    assert spec["tls"] == [{"secretName": values["tlsSecretName"], "hosts": values["hosts"]}]
    assert [rule["host"] for rule in spec["rules"]] == values["hosts"]
    service = made.of_kind("Service")
    for rule in spec["rules"]:
        [path] = rule["http"]["paths"]
        backend = path["backend"]["service"]
        assert backend["name"] == service["metadata"]["name"]
        assert backend["port"]["name"] in {each["name"] for each in service["spec"]["ports"]}
    assert f"https://{values['hosts'][0]}" in made.notes


@pytest.mark.slow
def test_probes_speak_tls_if_the_service_does(rendered: Mapping[str, Rendered]) -> None:
    for name, scheme in (("single", "HTTP"), ("cluster", "HTTPS")):
        made = container(rendered[name].of_kind("Deployment"))
        probes = [made[each]["httpGet"] for each in made if each.endswith("Probe")]
        assert [probe["scheme"] for probe in probes] == [scheme] * 3


@pytest.mark.slow
def test_the_migration_runs_before_the_release(rendered: Mapping[str, Rendered]) -> None:
    made = rendered["single"]
    job = made.of_kind("Job", "-migrate")
    policy = made.of_kind("NetworkPolicy", "-migrate")
    for resource in (job, policy):
        assert resource["metadata"]["annotations"][HOOK] == "pre-install,pre-upgrade"
    weights = [int(each["metadata"]["annotations"][f"{HOOK}-weight"]) for each in (policy, job)]
    assert weights == sorted(weights)
    assert ports(policy) == {53, 5432}
    # The account is a part of the release, and does not exist before an installation.
    assert "serviceAccountName" not in pod(job)
    assert pod(job)["automountServiceAccountToken"] is False
    for resource in made.resources:
        if resource not in (job, policy):
            assert HOOK not in resource["metadata"].get("annotations", {})


@pytest.mark.slow
def test_selectors_find_the_replicas_of_the_release_alone(helm: Helm) -> None:
    made = helm.render(example("cluster"), name="east", namespace="streams")
    service = made.of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    migrating = made.of_kind("Job", "-migrate")["spec"]["template"]["metadata"]["labels"]
    other = {**service, "app.kubernetes.io/instance": "west"}
    for selector in (
        made.of_kind("Deployment")["spec"]["selector"]["matchLabels"],
        made.of_kind("Service")["spec"]["selector"],
        made.of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        made.of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= service.items()
        assert not selector.items() <= migrating.items()
        assert not selector.items() <= other.items()
    monitor = made.of_kind("ServiceMonitor")
    labels = made.of_kind("Service")["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    [endpoint] = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("http", "https")
    assert endpoint["authorization"]["credentials"] == {"name": "tidegauge", "key": "scrape-key"}
    assert (
        made.of_kind("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"]
        == (made.of_kind("Deployment")["metadata"]["name"])
    )
    assert "replicas" not in made.of_kind("Deployment")["spec"]
    assert "https://east-tidegauge.streams.svc:8000" in made.notes


@pytest.mark.slow
def test_traces_go_to_the_endpoint_from_an_image_that_has_the_exporter(
    rendered: Mapping[str, Rendered],
) -> None:
    environment = container(rendered["cluster"].of_kind("Deployment"))["env"]
    given = {each["name"]: each["value"] for each in environment}
    assert given[EXPORTER_VARIABLE] == "otlp"
    assert given["OTEL_EXPORTER_OTLP_ENDPOINT"] == example("cluster")["otlp"]["endpoint"]
    [install] = [rest for word, rest in instructions() if word == "RUN" and "--constraint" in rest]
    assert re.search(r'"\.\[(\w+,)*otel(,\w+)*\]"', install)


# ---- beside kustomize


def comparable(resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specification of a pod without the differences that are meant."""
    spec = json.loads(json.dumps(pod(resource)))
    for name in ("serviceAccountName", "automountServiceAccountToken"):
        spec.pop(name, None)
    for constraint in spec.get("topologySpreadConstraints", ()):
        constraint["labelSelector"]["matchLabels"].pop("app.kubernetes.io/instance", None)
    for each in spec["containers"]:
        each.pop("imagePullPolicy", None)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in each:
                each[probe]["httpGet"].pop("scheme", None)
    for volume in spec["volumes"]:
        volume.get("secret", {}).pop("items", None)
    return spec


def of_files() -> dict[str, dict[str, Any]]:
    """The resources of the base as they are written, with the images' tag that kustomize gives them."""
    [kustomization] = read_all((KUBERNETES / "base/kustomization.yaml").read_text())
    [image] = kustomization["images"]
    found = {one["kind"]: one for each in FILES.values() for one in each}
    found = json.loads(json.dumps(found))
    for kind in ("Deployment", "Job"):
        container(found[kind])["image"] = f"{image['name']}:{image['newTag']}"
    return found


def of_kubectl() -> dict[str, dict[str, Any]]:
    """The resources of the base as kustomize makes them."""
    kubectl = program("kubectl", install="https://kubernetes.io/docs/tasks/tools/", required=False)
    command = [kubectl, "kustomize", KUBERNETES / "base"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {one["kind"]: one for one in read_all(done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize("made_by", [of_files, of_kubectl])
def test_the_chart_and_kustomize_make_the_same(
    helm: Helm, made_by: Callable[[], dict[str, dict[str, Any]]]
) -> None:
    theirs = made_by()
    ours = helm.render({"redis": {"mode": "sentinel"}, "otlp": {"endpoint": "http://otel:4318"}})
    plain = helm.render({})
    for kind, suffix in (("Deployment", ""), ("Job", "-migrate")):
        assert comparable(plain.of_kind(kind, suffix)) == comparable(theirs[kind]), kind
    for field in ("replicas", "strategy"):
        assert plain.of_kind("Deployment")["spec"][field] == theirs["Deployment"]["spec"][field]
    for field in ("backoffLimit", "ttlSecondsAfterFinished"):
        assert plain.of_kind("Job", "-migrate")["spec"][field] == theirs["Job"]["spec"][field]
    assert plain.of_kind("Service")["spec"]["ports"] == theirs["Service"]["spec"]["ports"]
    budgets = (plain.of_kind("PodDisruptionBudget"), theirs["PodDisruptionBudget"])
    assert len({each["spec"]["maxUnavailable"] for each in budgets}) == 1
    policy = ours.of_kind("NetworkPolicy")
    assert policy["spec"]["ingress"] == theirs["NetworkPolicy"]["spec"]["ingress"]
    # Kustomize does not know the mode, and opens the ports of each.
    assert ports(policy) == ports(theirs["NetworkPolicy"])


@pytest.mark.parametrize("page", ["deploy/helm/tidegauge/README.md", "docs/service/deployment.md"])
def test_the_page_names_every_entry_of_the_secret_and_values_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    defaults = read("values.yaml")
    for key in defaults["secret"]["keys"].values():
        assert f"--from-file={key}" in text
    for path in re.findall(r"`((?:redis|tls|otlp|serviceMonitor|networkPolicy)\.[\w.]+)`", text):
        found: Any = defaults
        for name in path.split("."):
            assert name in found, path
            found = found[name]
