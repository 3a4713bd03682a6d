"""A real HTTP server that gives the answers it was told to give, and keeps what it was asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from typing_extensions import override

from tests.support.loopback import Loopback


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: Mapping[str, Any] | str = field(default_factory=dict[str, Any])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


class Answers(Loopback):
    """Gives one answer after the other; the last one again and again."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self._left = list(answers)

    @override
    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        read = json.loads(body) if body else None
        self.asked.append(Asked(request.command, request.path, dict(request.headers), read))
        answer = self.choose(request.path)
        text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
        data = b"" if answer.status == 304 else text.encode()
        request.send_response(answer.status)
        for name, value in answer.headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def choose(self, path: str) -> Answer:
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


class Routes(Answers):
    """Gives each path its answer, whatever the query; for others, there is not a job."""

    def __init__(self, bodies: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(problem(404, "unknown-job"))
        self._bodies = bodies

    def choose(self, path: str) -> Answer:
        body = self._bodies.get(path.partition("?")[0])
        return super().choose(path) if body is None else Answer(body=body)


def problem(status: int, slug: str) -> Answer:
    body = {"type": f"/problems/{slug}", "title": "No.", "status": status, "detail": "so it is"}
    return Answer(status, body, {"Content-Type": "application/problem+json"})


class FakeClock:
    """Time that passes only when somebody pauses."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.now_ms = now_ms
        self.pauses_ms: list[int] = []
        self._ahead_ms = 0

    def wall_ms(self) -> int:
        return self.now_ms + self._ahead_ms

    def steady_ms(self) -> int:
        return self.now_ms

    def set_ahead(self, ms: int) -> None:
        """Set the wall clock, which the steady one does not follow."""
        self._ahead_ms += ms

    def pause(self, pause_ms: int) -> None:
        self.pauses_ms.append(pause_ms)
        self.now_ms += pause_ms
