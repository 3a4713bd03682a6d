"""A client that switches between replicas, gives up at times, and records everything."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from tests.chaos.checker import RESUME_S
from tests.chaos.history import Action, Exchange, History

PATIENCE_S = 3.0
NO_LIMIT = httpx.Limits(max_connections=None, max_keepalive_connections=None)
SILENCE = httpx.Timeout(PATIENCE_S, read=RESUME_S + 5)
"""A stream that is silent for this long is behind; the checker must detect that."""
_streams = itertools.count(1)


@dataclass
class Mischief:
    """Rates of a client's misbehaviour; faults increase them."""

    cancel: float = 0.01
    """Gives up in the middle of a request."""
    repeat: float = 0.03
    """Repeats a request, late and out of order."""


class Client:
    """Sends and records the requests of a whole workload, on one event loop."""

    def __init__(
        self, history: History, job: str, fronts: Mapping[str, str], mischief: Mischief, seed: int
    ) -> None:
        self._history = history
        self._job = job
        self._mischief = mischief
        self._chance = random.Random(seed)
        self._doors = {
            name: httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=NO_LIMIT)
            for name, url in fronts.items()
        }

    @property
    def replicas(self) -> Sequence[str]:
        return tuple(self._doors)

    async def close(self) -> None:
        for door in self._doors.values():
            await door.aclose()

    async def ask(
        self,
        who: str,
        action: Action,
        method: str,
        path: str,
        *,
        stage: str | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        request: Mapping[str, Any] | None = None,
        wait_s: float = 0,
        replica: str | None = None,
    ) -> Exchange:
        """Send a request to a replica, a random one unless named; never raises if the service fails."""
        name = replica or self._chance.choice(self.replicas)
        start_ns = time.monotonic_ns()
        status, answer, why, kind, retry, etag = None, None, "", "", None, ""
        sent = True
        limit_s = PATIENCE_S + wait_s
        given_up = self._chance.random() < self._mischief.cancel
        if given_up:
            limit_s = self._chance.uniform(0, 0.01)
        try:
            async with asyncio.timeout(limit_s):
                response = await self._doors[name].request(
                    method,
                    f"/v1/jobs/{self._job}{path}",
                    json=body,
                    headers=dict(headers or {}),
                    timeout=PATIENCE_S + wait_s,
                )
            answer = _json(response)
            status = response.status_code
            kind = response.headers.get("content-type", "")
            retry = response.headers.get("retry-after")
            etag = response.headers.get("etag", "")
        except TimeoutError:
            why = "cancelled" if given_up else "timeout"
        except (httpx.TransportError, ValueError) as error:
            # An answer that was cut off is unusable: it may end in the middle of a number.
            why = repr(error)
            sent = not isinstance(error, httpx.ConnectError)
        exchange = Exchange(
            who=who,
            replica=name,
            action=action,
            job=self._job,
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
            stage=stage,
            request=request if request is not None else body or {},
            status=status,
            answer=answer,
            content_type=kind,
            retry_after=retry,
            etag=etag,
            why=why,
            sent=sent,
        )
        self._history.add(exchange)
        return exchange

    async def listen(
        self, who: str, replica: str, last_event_id: str | None
    ) -> AsyncGenerator[str | None]:
        """Record what a stream of events shows, and its end; yields the ids of what it has shown."""
        stream = Exchange(
            who=who,
            replica=replica,
            action="event",
            job=self._job,
            start_ns=time.monotonic_ns(),
            end_ns=0,
            request={"last_event_id": last_event_id},
            stream=next(_streams),
        )
        headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
        why, event = "left", ""
        try:
            async with self._doors[replica].stream(
                "GET", f"/v1/jobs/{self._job}/events", headers=headers, timeout=SILENCE
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._hear(stream, response, _json(response))
                    return
                async for line in response.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "event":
                        event = value
                    elif name == "id":
                        last_event_id = value
                    elif name == "data" and event == "watermark":
                        self._hear(stream, response, json.loads(value))
                    elif not line:
                        yield last_event_id
        except (httpx.TransportError, ValueError) as error:
            # httpx hands out the last line even where the connection was cut within it.
            why = repr(error)
        finally:
            self._history.add(replace(stream, end_ns=time.monotonic_ns(), why=why))

    def _hear(self, stream: Exchange, response: httpx.Response, answer: Any) -> None:
        heard = replace(
            stream,
            end_ns=time.monotonic_ns(),
            stage=answer["stage"] if response.status_code == 200 else None,
            status=response.status_code,
            answer=answer,
            content_type=response.headers.get("content-type", ""),
            retry_after=response.headers.get("retry-after"),
        )
        self._history.add(heard)


def _json(response: httpx.Response) -> Any:
    """The body, which is JSON unless it is empty or an error that is no problem."""
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        if response.status_code < 400:
            raise
        return response.text[:1_000]
