"""The proxy behaves as the faults expect."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from tests.support.proxy import Proxy

SOON_S = 0.1


class Echo:
    """Echoes each line, and remembers what it received."""

    def __init__(self, name: bytes) -> None:
        self.heard: list[bytes] = []
        self._name = name
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            for line in lines:
                self.heard.append(line)
                connection.sendall(self._name + line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Else a thread that waits in `accept` keeps the port open.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo(b"one ")
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.port) as running:
        yield running


@contextmanager
def connected(proxy: Proxy) -> Generator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as client:
        yield client


def ask(client: socket.socket, line: bytes = b"hello\n") -> bytes:
    """The answer up to its end, or as much of it as arrived."""
    client.sendall(line)
    answer = b""
    while not answer.endswith(b"\n") and (part := client.recv(100)):
        answer += part
    return answer


def is_cut(client: socket.socket, line: bytes = b"hello\n") -> bool:
    try:
        return not ask(client, line).endswith(b"\n")
    except OSError:
        return True


def test_it_forwards_both_ways(proxy: Proxy):
    with connected(proxy) as client:
        assert ask(client) == b"one hello\n"
        assert ask(client, b"again\n") == b"one again\n"


def test_a_cut_answer_has_been_asked_for(proxy: Proxy, echo: Echo):
    with connected(proxy) as client, connected(proxy) as other:
        assert ask(client) == b"one hello\n"
        proxy.cut_answers(1)
        assert is_cut(client, b"deed\n")
        assert echo.heard == [b"hello\n", b"deed\n"]
        assert ask(other) == b"one hello\n"
    assert proxy.answers_cut == 1


def test_answers_are_cut_until_it_behaves_again(proxy: Proxy):
    proxy.cut_answers(probability=1)
    for _ in range(3):
        with connected(proxy) as client:
            assert is_cut(client)
    proxy.flow()
    with connected(proxy) as client:
        assert not is_cut(client)


def test_it_cuts_what_there_is_and_takes_what_comes(proxy: Proxy):
    with connected(proxy) as client:
        ask(client)
        proxy.cut_all()
        assert is_cut(client)
    with connected(proxy) as client:
        assert not is_cut(client)


def test_it_forwards_elsewhere(proxy: Proxy):
    other = Echo(b"two ")
    with connected(proxy) as client:
        ask(client)
        proxy.retarget(other.port)
        assert is_cut(client)
    with connected(proxy) as client:
        assert ask(client) == b"two hello\n"
    other.close()


def test_it_refuses_the_new_and_keeps_the_old(proxy: Proxy):
    with connected(proxy) as old:
        ask(old)
        proxy.refuse()
        with contextlib.suppress(ConnectionError), connected(proxy) as new:
            assert is_cut(new)
        assert ask(old) == b"one hello\n"
        proxy.flow()
    with connected(proxy) as new:
        assert ask(new) == b"one hello\n"


def test_it_holds_everything_back_and_loses_nothing(proxy: Proxy, echo: Echo):
    with connected(proxy) as client:
        ask(client)
        proxy.stall()
        client.sendall(b"later\n")
        client.settimeout(SOON_S)
        with pytest.raises(TimeoutError):
            client.recv(100)
        assert echo.heard == [b"hello\n"]
        proxy.flow()
        client.settimeout(5)
        assert client.recv(100) == b"one later\n"


def test_nobody_behind_it_is_a_cut(echo: Echo, proxy: Proxy):
    echo.close()
    with contextlib.suppress(ConnectionError), connected(proxy) as client:
        assert is_cut(client)


def test_a_proxy_that_closes_while_clients_connect_leaves_nothing_open(echo: Echo) -> None:
    """The collector found an open socket later, in whichever test was running."""
    ended = threading.Event()

    def connect(port: int) -> None:
        while not ended.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=1) as connection,
            ):
                connection.settimeout(SOON_S)
                connection.sendall(b"line\n")
                connection.recv(100)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(15):
            ended.clear()
            proxy = Proxy(echo.port)
            clients = [threading.Thread(target=connect, args=(proxy.port,)) for _ in range(8)]
            for each in clients:
                each.start()
            proxy.cut_all()
            proxy.close()
            ended.set()
            for each in clients:
                each.join()
            del proxy
            gc.collect()
    assert [str(each.message) for each in found] == []
