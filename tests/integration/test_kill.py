"""`kill -9` under load: no reader is ever told too much or less than before, and it goes on."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api import LAST_TIME, tile_ids
from tests.support.oracle import Oracle
from tests.support.server import Service

DEADLINE_S = 60
RETRY_S = 0.1
"""Between two tries while the service is down: it needs the processor to come up again."""
PAUSE_S = 0.002
KEYED = tile_ids(4)
STAGES: dict[str, Any] = {
    "web": {"shards": ["0", "1"]},
    "batch": {"shards": ["0", "1"]},
    "keyed": {"inputs": ["web"], "ranges": 4},
    "both": {"inputs": ["keyed", "batch"], "passthrough": True},
}
RANGES = {"web": ("0", "1"), "batch": ("0", "1"), "keyed": KEYED}
INPUTS = {"keyed": ("web",), "both": ("keyed", "batch")}
ROOT = "/v1/jobs/job"


class Load:
    """Threads that work and read until they are told to stop, whatever becomes of the service."""

    def __init__(self, url: str, oracle: Oracle) -> None:
        self.url = url
        self.oracle = oracle
        self.stop_working = threading.Event()
        self.stop_reading = threading.Event()
        self.reports = 0
        self.zombies_refused = 0
        self.lost: list[tuple[str, str, str]] = []
        """Stage, range and token of leases that are no longer current."""
        self._lock = threading.Lock()
        self._workers = [
            *(self._thread(self.source, shard) for shard in RANGES["web"]),
            *(self._thread(self.keyed, keys) for keys in (KEYED[:1], KEYED[1:])),
            self._thread(self.driver),
        ]
        self._readers = [
            self._thread(self.zombie),
            *(self._thread(self.plain, stage) for stage in ("both", "keyed")),
            self._thread(self.poll, "keyed"),
            self._thread(self.poll, "both"),
            self._thread(self.snapshot),
            self._thread(self.listen),
        ]

    def _thread(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                with httpx.Client(base_url=self.url, timeout=DEADLINE_S) as client:
                    target(client, *arguments)
            except Exception as error:  # noqa: BLE001 - a thread's error would be lost
                self.oracle.fault(f"{target.__name__}{arguments} ended: {error!r}")

        return threading.Thread(target=run, daemon=True)

    @contextmanager
    def running(self) -> Generator[None]:
        for thread in (*self._workers, *self._readers):
            thread.start()
        try:
            yield
        finally:
            self.rest()
            self.stop_reading.set()
            for thread in self._readers:
                thread.join(DEADLINE_S)

    def rest(self) -> None:
        """Let the workers deliver what they have promised, and end."""
        self.stop_working.set()
        for thread in self._workers:
            thread.join(DEADLINE_S)

    # -- asking ------------------------------------------------------------------------------

    def ask(
        self, client: httpx.Client, method: str, path: str, until: threading.Event, **more: Any
    ) -> httpx.Response | None:
        """Ask until it answers; None if it is time to stop."""
        while True:
            try:
                response = client.request(method, ROOT + path, **more)
            except httpx.TransportError:
                if until.wait(RETRY_S):
                    return None
                continue
            if response.status_code >= 500 and response.status_code != 503:
                self.oracle.fault(f"{method} {path}: {response.status_code} {response.text}")
            if response.status_code != 503:
                return response
            if until.wait(RETRY_S):
                return None

    def claim(self, client: httpx.Client, stage: str, ranges: list[str], **members: Any) -> str:
        """Claim twice: the first token is superseded by the second, and goes to the zombie."""
        tokens: list[str] = []
        while len(tokens) < 2:
            body = {"ranges": ranges, "holder": f"w-{stage}-{ranges[0]}", "ttl_ms": 60_000}
            response = self.ask(
                client, "POST", f"/stages/{stage}/leases", self.stop_reading, json=body | members
            )
            assert response is not None
            assert response.status_code == 201, response.text
            tokens.append(response.json()["token"])
        with self._lock:
            self.lost = [*self.lost[-20:], (stage, ranges[0], tokens[0])]
        return tokens[1]

    def deliver(
        self,
        client: httpx.Client,
        stage: str,
        ranges: list[str],
        token: str,
        body: Any,
        **more: Any,
    ) -> str:
        """Report until it is taken, by whatever lease that needs; the token that it took."""
        while True:
            response = self.ask(
                client,
                "POST",
                f"/stages/{stage}/reports",
                self.stop_reading,
                json={"token": token} | body,
            )
            assert response is not None
            if response.status_code == 410:
                with self._lock:
                    self.lost = [*self.lost[-20:], (stage, ranges[0], token)]
                token = self.claim(client, stage, ranges, **more)
                continue
            assert response.status_code == 200, response.text
            with self._lock:
                self.reports += 1
            return token

    # -- workers -----------------------------------------------------------------------------

    def source(self, client: httpx.Client, shard: str) -> None:
        """A shard of `web`, as fast as it goes."""
        chance = random.Random(shard)
        token = self.claim(client, "web", [shard])
        value = 0
        while not self.stop_working.wait(PAUSE_S):
            value += chance.randint(1, 50)
            self.oracle.promise("web", shard, value)
            token = self.deliver(client, "web", [shard], token, {"ranges": {shard: value}})

    def keyed(self, client: httpx.Client, keys: tuple[str, ...]) -> None:
        """Ranges of `keyed`: look at the input, then promise at most that."""
        chance = random.Random(keys[0])
        token = self.claim(client, "keyed", list(keys))
        while not self.stop_working.wait(PAUSE_S):
            response = self.ask(client, "GET", "/stages/keyed/watermark", self.stop_working)
            observed = None if response is None else response.json()["input_watermark"]
            if observed is None:
                continue
            words: dict[str, Any] = {}
            for key in keys:
                hold = observed - chance.randint(-5, 20)
                self.oracle.promise("keyed", key, min(observed, hold))
                words[key] = {"holds": {"state": hold}}
            body = {"input_watermark": observed, "ranges": words}
            token = self.deliver(client, "keyed", list(keys), token, body)
        # A promise that was taken less than a checkpoint before a kill is lost, and a later hold may
        # have been below it. So the last word is without holds: it is as much as was ever promised.
        response = self.ask(client, "GET", "/stages/keyed/watermark", self.stop_reading)
        assert response is not None
        observed = response.json()["input_watermark"]
        for key in keys:
            self.oracle.promise("keyed", key, observed)
        last: dict[str, Any] = {"input_watermark": observed, "ranges": {key: {} for key in keys}}
        self.deliver(client, "keyed", list(keys), token, last)

    def driver(self, client: httpx.Client) -> None:
        """`batch` in epochs: a promise counts, for the oracle too, from its commit on."""
        response = self.ask(
            client, "POST", "/runs", self.stop_reading, json={"stages": ["batch"], "holder": "d"}
        )
        assert response is not None
        run = response.json()["run"]
        epoch = 0
        while not self.stop_working.is_set():
            token = self.claim(client, "batch", ["0", "1"], run=run, epoch=epoch)
            value = epoch * 10
            promises = {"0": value, "1": value + 3}
            body = {"ranges": promises, "epoch": epoch}
            self.deliver(client, "batch", ["0", "1"], token, body, run=run, epoch=epoch)
            for shard, promise in promises.items():
                self.oracle.promise("batch", shard, promise)
            response = self.ask(
                client,
                "POST",
                "/commits",
                self.stop_reading,
                json={"run": run, "epoch": epoch, "stages": {"batch": {}}},
            )
            assert response is not None
            assert response.status_code == 200, response.text
            epoch += 1

    def zombie(self, client: httpx.Client) -> None:
        """Reports far ahead under leases that are lost: one that counted would be seen."""
        while not self.stop_reading.wait(RETRY_S):
            with self._lock:
                known = list(self.lost)
            for stage, name, token in known[-5:]:
                body: dict[str, Any] = {"token": token, "ranges": {name: LAST_TIME}}
                if stage == "keyed":
                    body |= {"ranges": {name: {}}, "input_watermark": None}
                response = self.ask(
                    client, "POST", f"/stages/{stage}/reports", self.stop_reading, json=body
                )
                if response is not None:
                    if response.status_code != 410:
                        self.oracle.fault(f"a lost lease was taken: {response.text}")
                    self.zombies_refused += 1

    # -- readers -----------------------------------------------------------------------------

    def plain(self, client: httpx.Client, stage: str) -> None:
        while not self.stop_reading.wait(PAUSE_S):
            floor = self.oracle.ask()
            response = self.ask(client, "GET", f"/stages/{stage}/watermark", self.stop_reading)
            if response is not None:
                assert response.status_code == 200, response.text
                self.oracle.answered(f"plain {stage}", floor, {stage: response.json()})

    def poll(self, client: httpx.Client, stage: str) -> None:
        headers = {"Prefer": "wait=2"}
        while not self.stop_reading.wait(PAUSE_S):
            floor = self.oracle.ask()
            response = self.ask(
                client, "GET", f"/stages/{stage}/watermark", self.stop_reading, headers=headers
            )
            if response is not None and response.status_code != 304:
                assert response.status_code == 200, response.text
                headers["If-None-Match"] = response.headers["etag"]
                self.oracle.answered(f"poll {stage}", floor, {stage: response.json()})

    def snapshot(self, client: httpx.Client) -> None:
        while not self.stop_reading.wait(PAUSE_S):
            floor = self.oracle.ask()
            response = self.ask(client, "GET", "/watermarks", self.stop_reading)
            if response is not None:
                assert response.status_code == 200, response.text
                self.oracle.answered(
                    "snapshot", floor, response.json()["watermarks"], snapshot=True
                )

    def listen(self, client: httpx.Client) -> None:
        """Server-sent events. What a stream shows may be older than what others were shown since
        it was opened, but not than what they were shown before."""
        headers: dict[str, str] = {}
        while not self.stop_reading.wait(RETRY_S):
            floor = self.oracle.ask()
            try:
                with client.stream("GET", f"{ROOT}/events", headers=headers) as response:
                    if response.status_code != 200:
                        continue
                    for line in response.iter_lines():
                        name, _, value = line.partition(": ")
                        if name == "id":
                            headers["Last-Event-ID"] = value
                        if name == "data":
                            state = json.loads(value)
                            self.oracle.answered("events", floor, {state["stage"]: state})
                        if self.stop_reading.is_set():
                            return
            except httpx.TransportError:
                continue


def wait_until(condition: Callable[[], bool], oracle: Oracle, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert not oracle.violations, oracle.violations[:5]
        assert time.monotonic() < deadline, f"{what} did not happen in {DEADLINE_S} s"
        time.sleep(0.005)


@pytest.mark.parametrize(
    "kills", [pytest.param(4, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.matrix)]
)
def test_kill_nine_under_load(tmp_path: Path, kills: int):
    oracle = Oracle(RANGES, INPUTS)
    chance = random.Random(9)
    with Service(tmp_path) as service:
        created = httpx.put(service.url + ROOT, json={"stages": STAGES})
        assert created.status_code == 201, created.text
        load = Load(service.url, oracle)
        with load.running():
            for kill in range(kills):
                went_on(oracle, load, f"progress before kill {kill}")
                more = load.reports + chance.randint(0, 60)
                wait_until(lambda more=more: load.reports >= more, oracle, "more load")
                service.kill()
                service.launch()
            went_on(oracle, load, "progress after the last kill")
            load.rest()
            # Nothing that was delivered is missing: what stands is exactly what was promised.
            for stage in STAGES:
                wait_until(
                    lambda stage=stage: output(service, stage) == oracle.bound(stage),
                    oracle,
                    f"{stage} at what was promised",
                )
    assert not oracle.violations, oracle.violations[:5]
    assert load.zombies_refused > kills
    assert set(oracle.observations) == {
        "plain both",
        "plain keyed",
        "poll both",
        "poll keyed",
        "snapshot",
        "events",
    }
    assert min(oracle.observations.values()) > kills, oracle.observations


def went_on(oracle: Oracle, load: Load, what: str) -> None:
    """Every stage has been seen to move, and reports of every kind of worker have been taken."""
    before = {stage: oracle.shown(stage) for stage in ("keyed", "both")}
    reports = load.reports

    def moved() -> bool:
        return load.reports > reports and all(
            (now := oracle.shown(stage)) is not None and (was is None or now > was)
            for stage, was in before.items()
        )

    wait_until(moved, oracle, what)


def output(service: Service, stage: str) -> int | None:
    response = httpx.get(f"{service.url}{ROOT}/stages/{stage}/watermark")
    assert response.status_code == 200, response.text
    return response.json()["output_watermark"]


# -- the checker itself: histories that it must refuse, and one that it must not -------------------


def state(given: int | None, made: int | None) -> dict[str, int | None]:
    return {"input_watermark": given, "output_watermark": made}


@pytest.fixture
def oracle() -> Oracle:
    """`s` has promised 10 with both shards, `k` 8 with its one range; `u` follows `k`."""
    known = Oracle({"s": ("0", "1"), "k": ("r",)}, {"k": ("s",), "u": ("k",)})
    for shard in ("0", "1"):
        known.promise("s", shard, 10)
    known.promise("k", "r", 8)
    return known


def test_the_checker_takes_an_honest_history(oracle: Oracle):
    oracle.answered("a", oracle.ask(), {"s": state(None, None)})
    oracle.answered("a", oracle.ask(), {"s": state(None, 9), "k": state(9, 8)})
    early = oracle.ask()
    oracle.promise("s", "0", 20)
    oracle.promise("s", "1", 30)
    oracle.answered("b", oracle.ask(), {"s": state(None, 20)})
    # An answer that was asked for before the other arrived may be older than it.
    oracle.answered("c", early, {"s": state(None, 10)})
    oracle.answered(
        "d",
        oracle.ask(),
        {"s": state(None, 20), "k": state(20, 8), "u": state(8, 8)},
        snapshot=True,
    )
    assert oracle.violations == []
    assert oracle.bound("s") == 20


@pytest.mark.parametrize(
    ("stage", "shown"),
    [
        ("s", state(None, 11)),
        ("k", state(11, 8)),
        ("k", state(10, 9)),
        ("u", state(9, 8)),
        ("u", state(8, 9)),
    ],
    ids=repr,
)
def test_the_checker_refuses_what_is_ahead(oracle: Oracle, stage: str, shown: Any):
    oracle.answered("a", oracle.ask(), {stage: shown})
    assert len(oracle.violations) == 1
    assert "ahead" in oracle.violations[0]


def test_the_checker_refuses_an_output_over_a_hole():
    oracle = Oracle({"s": ("0", "1")}, {})
    oracle.promise("s", "0", 10)
    oracle.answered("a", oracle.ask(), {"s": state(None, 5)})
    assert "ahead of None" in oracle.violations[0]


@pytest.mark.parametrize("later", [9, None])
@pytest.mark.parametrize("reader", ["a", "b"])
def test_the_checker_refuses_what_goes_down(oracle: Oracle, reader: str, later: int | None):
    oracle.answered("a", oracle.ask(), {"s": state(None, 10)})
    oracle.answered(reader, oracle.ask(), {"s": state(None, later)})
    assert len(oracle.violations) == 1
    assert "went from 10" in oracle.violations[0]


def test_the_checker_refuses_a_reader_that_goes_down_within_one_stream(oracle: Oracle):
    floor = oracle.ask()
    oracle.answered("a", floor, {"s": state(None, 10)})
    oracle.answered("a", floor, {"s": state(None, 9)})
    assert len(oracle.violations) == 1


def test_the_checker_refuses_an_inconsistent_snapshot(oracle: Oracle):
    oracle.answered(
        "a",
        oracle.ask(),
        {"s": state(None, 9), "k": state(10, 8), "u": state(None, None)},
        snapshot=True,
    )
    assert len(oracle.violations) == 1
    assert "k has input 10" in oracle.violations[0]


def test_the_checker_does_not_forget_a_promise(oracle: Oracle):
    oracle.promise("s", "0", 3)
    assert oracle.bound("s") == 10
