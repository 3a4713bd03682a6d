"""schemathesis over the service's own OpenAPI: no server error, nothing that is not documented.

Half of what it makes up is pointed at a job that exists and given a token that is current, so that
the ways of success are walked too, and not only those of refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.server.app import create_app
from service.settings import Settings
from tests.support.api import WHOLE, ok
from tests.support.server import Service

# The last test is about what the others have seen, so one process is to run them all.
pytestmark = pytest.mark.xdist_group("schemathesis")

STAGES: dict[str, Any] = {
    "s": {"shards": ["0", "1"]},
    "k": {"inputs": ["s"], "ranges": 1},
    "u": {"inputs": ["k"], "passthrough": True},
}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class Seeded:
    """A job that exists, whatever the last request did to it."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.job = "seeded"
        self.root = f"/v1/jobs/{self.job}"
        self.statuses: set[tuple[str, int]] = set()

    def token(self, stage: str) -> str:
        """A lease on the stage, in a job that is made anew if it is gone or changed."""
        body = {"ranges": "all", "holder": "schemathesis", "ttl_ms": 600_000}
        refusal = ""
        for _ in range(2):
            put = self.client.put(self.root, json={"stages": STAGES})
            assert put.status_code in {200, 201, 428}, put.text
            grant = self.client.post(f"{self.root}/stages/{stage}/leases", json=body)
            if grant.status_code == 201:
                return ok(grant, 201)["token"]
            refusal = grant.text
            self.client.delete(self.root)
        raise AssertionError(refusal)

    def run(self) -> int:
        """A run that has not ended, in the job that `token` has made."""
        body = {"stages": ["u"], "holder": "schemathesis"}
        return ok(self.client.post(f"{self.root}/runs", json=body), 201)["run"]

    def key(self) -> str:
        """A key that exists."""
        body = {"name": "seeded", "role": "read"}
        assert self.client.post("/v1/keys", json=body).status_code in {201, 409}
        return body["name"]


ADMIN = "operator-0123456789abcdef0123456789abcdef"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One of its own, with a key: what is made up here creates others."""
    environment = {"TIDEGAUGE_ADMIN_KEY": ADMIN}
    with Service(tmp_path_factory.mktemp("schemathesis"), environment=environment) as service:
        yield service


@pytest.fixture(scope="module")
def seeded(server: Service) -> Iterator[Seeded]:
    with httpx.Client(base_url=server.url, timeout=60, headers=HEADERS) as client:
        yield Seeded(client)


# The document is the same as at `/openapi.json`; making the application starts nothing.
schema = schemathesis.openapi.from_dict(create_app(Settings(_env_file=None)).openapi())  # pyright: ignore[reportCallIssue]
# The stream of events never ends; `test_contract_events.py` is for it.
schema = schema.exclude(path="/v1/jobs/{job}/events")


def aim(case: Any, seeded: Seeded) -> None:
    """Point half of the requests at what exists."""
    path = case.path_parameters or {}
    if sum(map(ord, f"{path}{case.body}")) % 2:
        return
    if "key" in path:
        path["key"] = seeded.key()
    if case.operation.method.upper() == "PUT" or case.operation.path.endswith("/check"):
        case.body = {"stages": STAGES}
    elif "job" in path:
        aim_at_job(case, path, seeded)


def aim_at_job(case: Any, path: dict[str, Any], seeded: Seeded) -> None:
    stage = "k" if len(str(path.get("stage", ""))) % 4 == 0 else "s"
    token = seeded.token(stage)
    path["job"] = seeded.job
    if "stage" in path:
        path["stage"] = stage
    if "run" in path:
        path["run"] = seeded.run()
    if not isinstance(case.body, dict):
        return
    if "token" in case.body:
        case.body["token"] = token
        words = case.body.get("ranges")
        if isinstance(words, dict) and words:
            case.body["ranges"] = {WHOLE if stage == "k" else "0": next(iter(words.values()))}
    if "tokens" in case.body:
        case.body["tokens"] = [token]
    if "stages" in case.body:
        case.body["stages"] = {"s": {}} if isinstance(case.body["stages"], dict) else ["u"]


@schema.parametrize()
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.generate],
)
def test_nothing_undocumented(case: Any, seeded: Seeded, server: Service):
    aim(case, seeded)
    response = case.call(base_url=server.url, timeout=60, headers=HEADERS)
    operation = f"{case.operation.method.upper()} {case.operation.path}"
    seeded.statuses.add((operation, response.status_code))
    case.validate_response(response, checks=CHECKS)


def test_success_was_reached(seeded: Seeded):
    """Runs last, and is about the whole: a suite that only ever sees refusals shows nothing."""
    if not seeded.statuses:
        pytest.skip("the requests above did not run")
    operations = {operation for operation, _ in seeded.statuses}
    successful = {operation for operation, status in seeded.statuses if status < 300}
    assert operations == successful, operations - successful
