"""TLS: its certificate, a renewed one, its clients' certificates, and what it does not start with."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from spark_agent import Client
from tests.integration.test_cli import run
from tests.integration.test_guard import wait_for
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.server import Service


class Issued:
    """A service's certificate in two files, and who has signed it."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.cert = folder / "cert.pem"
        self.key = folder / "key.pem"
        self.issue()

    def issue(self) -> None:
        """Write a new certificate with a new key."""
        issued = self.authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(str(self.key))
        self.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    @property
    def options(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key))

    def trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def issued(tmp_path: Path) -> Issued:
    return Issued(tmp_path)


@pytest.fixture
def secure(tmp_path: Path, issued: Issued) -> Iterator[Service]:
    with Service(tmp_path, options=issued.options, tls=issued.trust()) as service:
        yield service


def served(service: Service, trust: ssl.SSLContext) -> bytes | None:
    """The certificate that a new connection gets."""
    with (
        socket.create_connection(("127.0.0.1", service.port), 30) as plain,
        trust.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
    ):
        return tls.getpeercert(binary_form=True)


def test_it_serves(secure: Service, issued: Issued) -> None:
    with httpx.Client(base_url=secure.url, verify=issued.trust()) as client:
        body = {"stages": {"s": {"shards": ["0"]}}}
        assert client.put("/v1/jobs/j", json=body).status_code == 201
        refused = client.post("/v1/jobs/j/reset", headers={"Origin": "https://evil.example"})
        assert refused.status_code == 403
        own = client.post("/v1/jobs/j/reset", headers={"Origin": secure.url})
        assert own.status_code == 200
    assert f"listens on {secure.url}" in secure.log()


def test_a_stranger_s_certificate_is_not_trusted(secure: Service) -> None:
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{secure.url}/healthz")


def test_who_speaks_no_tls_is_not_served(secure: Service, issued: Issued) -> None:
    for data in (b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\0"):
        with socket.create_connection(("127.0.0.1", secure.port), 30) as plain:
            plain.sendall(data)
            if data != b"\0":
                assert b"HTTP" not in plain.recv(1_000)
    assert served(secure, issued.trust()) is not None
    assert "Traceback" not in secure.log()


def test_a_handshake_has_a_time(secure: Service, issued: Issued) -> None:
    """Else whoever connects and says nothing has a file descriptor for as long as he likes."""
    with socket.create_connection(("127.0.0.1", secure.port), 45) as silent:
        assert not silent.recv(1)
    assert served(secure, issued.trust()) is not None


def test_a_renewed_certificate_is_served_to_new_connections(
    secure: Service, issued: Issued
) -> None:
    with httpx.Client(base_url=secure.url, verify=issued.trust()) as open_before:
        assert open_before.get("/healthz").status_code == 200
        first = served(secure, issued.trust())
        issued.key.write_text("half renewed")
        assert served(secure, issued.trust()) == first
        assert "stays in use" in secure.log()
        issued.issue()
        wait_for(lambda: served(secure, issued.trust()) != first, "the new certificate")
        assert open_before.get("/healthz").status_code == 200
    assert "Traceback" not in secure.log()


def test_clients_show_their_certificates(tmp_path: Path, issued: Issued) -> None:
    clients = trustme.CA()
    clients.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    known, stranger = issued.trust(), issued.trust()
    clients.issue_cert("worker").configure_cert(known)
    trustme.CA().issue_cert("worker").configure_cert(stranger)
    options = (*issued.options, "--tls-client-ca", str(tmp_path / "clients.pem"))
    with Service(tmp_path, options=options, tls=known) as service:
        assert httpx.get(f"{service.url}/healthz", verify=known).status_code == 200
        for context in (stranger, issued.trust()):
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                httpx.get(f"{service.url}/healthz", verify=context)
        issued.issue()
        assert httpx.get(f"{service.url}/healthz", verify=known).status_code == 200
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            httpx.get(f"{service.url}/healthz", verify=issued.trust())


def test_a_pipe_is_no_certificate_and_stops_no_handshake(secure: Service, issued: Issued) -> None:
    first = served(secure, issued.trust())
    issued.cert.unlink()
    os.mkfifo(issued.cert)
    assert served(secure, issued.trust()) == first
    assert "is not a regular file" in secure.log()
    issued.cert.unlink()
    issued.issue()
    wait_for(lambda: served(secure, issued.trust()) != first, "the new certificate")


def test_several_processes_serve_it(
    tmp_path: Path, issued: Issued, redis_server: RedisServer, postgres_server: PostgresServer
) -> None:
    redis_server.command("FLUSHALL")
    options = (*issued.options, "--workers", "2", "--live-url", redis_server.url)
    service = Service(tmp_path, options=options, tls=issued.trust())
    service.ledger_url = postgres_server.database()
    with service:
        body = {"stages": {"s": {"shards": ["0"]}}}
        for n in range(8):
            # A connection each, so that either process is likely to get one.
            with httpx.Client(base_url=service.url, verify=issued.trust()) as client:
                assert client.put("/v1/jobs/j", json=body).status_code == (200 if n else 201)
        first = served(service, issued.trust())
        issued.issue()
        for _ in range(8):
            assert served(service, issued.trust()) != first
        assert f"listens on {service.url}" in service.log()
        assert "Traceback" not in service.log()


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (("--tls-key", "{key}"), "TIDEGAUGE_TLS_CERT is not set"),
        (("--tls-cert", "{cert}"), "TIDEGAUGE_TLS_KEY is not set"),
        (("--tls-client-ca", "{cert}"), "needs TIDEGAUGE_TLS_CERT"),
        (
            ("--tls-cert", "{none}", "--tls-key", "{key}"),
            "TIDEGAUGE_TLS_CERT {none} cannot be read",
        ),
        (
            ("--tls-cert", "{cert}", "--tls-key", "{none}"),
            "TIDEGAUGE_TLS_KEY {none} cannot be read",
        ),
        (("--tls-cert", "{cert}", "--tls-key", "{other}"), "key values mismatch"),
        (("--tls-cert", "{key}", "--tls-key", "{key}"), "cannot be used together"),
        (("--tls-cert", "{cert}", "--tls-key", "{cert}"), "cannot be used together"),
        (
            ("--tls-cert", "{cert}", "--tls-key", "{key}", "--tls-client-ca", "{key}"),
            "TIDEGAUGE_TLS_CLIENT_CA",
        ),
    ],
)
def test_what_it_does_not_start_with(
    tmp_path: Path, issued: Issued, missing: tuple[str, ...], says: str
) -> None:
    other = tmp_path / "other.pem"
    issued.authority.issue_cert("other").private_key_pem.write_to_path(str(other))
    names = {"cert": issued.cert, "key": issued.key, "other": other, "none": tmp_path / "none.pem"}
    options = [part.format(**names) for part in missing]
    done = run("serve", "--port", "0", *options, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says.format(**names) in done.stderr
    assert "Traceback" not in done.stderr


def test_the_agent_s_client_goes_by_what_the_machine_trusts(
    secure: Service, issued: Issued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = tmp_path / "authority.pem"
    issued.authority.cert_pem.write_to_path(str(authority))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    assert Client(secure.url).ready()
