"""Requests to the service over HTTP, retried, with JSON both ways."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final, Self, cast

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError
from urllib3.util import parse_url

from spark_agent.client import tracing
from spark_agent.client.credentials import KeySource, UnusableKeyError
from spark_agent.client.errors import (
    ChangedMeanwhile,
    Forbidden,
    InputAhead,
    LeaseConflict,
    LeaseLost,
    LimitReached,
    NoUsableKey,
    PreconditionRequired,
    Refused,
    StaleEpoch,
    StaleRun,
    TooLarge,
    Unauthenticated,
    UnknownJob,
    UnknownRange,
    UnknownStage,
)
from spark_agent.client.reports import Json
from spark_agent.clock import Clock
from spark_agent.exceptions import NotServing, Unavailable, WrongAddress

_RETRYABLE_STATUSES: Final = frozenset({429, 500, 502, 503, 504})
_FIRST_PAUSE_MS: Final = 50
_LONGEST_PAUSE_MS: Final = 1_000

_PROBLEMS: Final = "/problems/"
_TAGS: Final = re.compile("<[^>]*>")
_SHOWN_CHARACTERS: Final = 100
"""Shown of an answer that is not the service's."""

_REFUSALS: Final = {
    refusal.slug: refusal
    for refusal in (
        Unauthenticated,
        Forbidden,
        UnknownJob,
        UnknownStage,
        UnknownRange,
        PreconditionRequired,
        ChangedMeanwhile,
        LimitReached,
        LeaseConflict,
        LeaseLost,
        StaleRun,
        StaleEpoch,
        InputAhead,
    )
}


class Transport:
    """A connection pool to one service. `timeout_ms` limits an attempt, `patience_ms` a whole call."""

    def __init__(
        self,
        url: str,
        key: KeySource,
        *,
        timeout_ms: int,
        patience_ms: int,
        connections: int,
        clock: Clock,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._key = key
        self._url = _base_url(url)
        self._timeout_ms = timeout_ms
        self._patience_ms = patience_ms
        self._retries = True
        self._clock = clock
        self._jitter = jitter
        self._pool = urllib3.PoolManager(maxsize=connections, retries=False)

    def without_retries(self, timeout_ms: int) -> Self:
        """Return the same connections, for single attempts of this length."""
        made = copy(self)
        made.__dict__.update(_timeout_ms=timeout_ms, _patience_ms=timeout_ms, _retries=False)
        return made

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._pool.clear()

    def ready(self) -> bool:
        """Return whether the service and its stores answer, without retrying."""
        try:
            return self._pool.request("GET", f"{self._url}/readyz", timeout=1.0).status == 200
        except HTTPError:
            return False

    def call(
        self,
        method: str,
        path: str,
        body: Json | Callable[[], Json] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[Json, str | None]:
        """Send a request, and retry until it is answered or patience runs out; return body and ETag.

        A `body` that depends on the time is a function, which each attempt calls.
        """
        deadline_ms = self._clock.steady_ms() + self._patience_ms
        pause_ms = _FIRST_PAUSE_MS
        while True:
            left_ms = max(deadline_ms - self._clock.steady_ms(), 1)
            try:
                return self._try_once(method, path, body, headers or {}, left_ms)
            except (HTTPError, _RetryableError) as error:
                now_ms = self._clock.steady_ms()
                requested_ms = error.retry_after_ms if isinstance(error, _RetryableError) else 0
                if now_ms + requested_ms + pause_ms >= deadline_ms:
                    # The caller waits no longer than its patience. Ending the call at once instead
                    # would lose the report of a task to an outage of a few milliseconds.
                    requested_ms = 0
                if not self._retries or now_ms + pause_ms >= deadline_ms:
                    kind = NotServing if isinstance(error, _NotServingError) else Unavailable
                    raise kind(f"{method} {self._url}{path}: {error}") from error
            # Full jitter: tasks that lost the service together must not retry together.
            self._clock.pause(requested_ms + int(pause_ms * self._jitter()) + 1)
            pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)

    def _try_once(
        self,
        method: str,
        path: str,
        body: Json | Callable[[], Json] | None,
        headers: Mapping[str, str],
        left_ms: int,
    ) -> tuple[Json, str | None]:
        content = body() if callable(body) else body
        answer = self._pool.request(
            method,
            f"{self._url}{path}",
            body=None if content is None else json.dumps(content).encode(),
            headers={
                "Content-Type": "application/json",
                **self._authorization(),
                **tracing.headers(),
                **headers,
            },
            timeout=min(self._timeout_ms, left_ms) / 1_000,
        )
        etag = answer.headers.get("ETag")
        if answer.status == 304:
            return {}, etag
        if answer.status in _RETRYABLE_STATUSES:
            least_ms = _retry_after_ms(answer.headers.get("Retry-After"), self._clock.wall_ms())
            raise _retryable(answer.status, answer.data, least_ms)
        if answer.status >= 300 and answer.status < 400:
            location = answer.headers.get("Location", "another address")
            raise WrongAddress(
                f"{method} {self._url}{path}: {answer.status} to {location}: give that as the URL"
            )
        if answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            raise TooLarge(answer.status, _problem(answer.data))
        answered = _json_object(answer.status, answer.data)
        if answer.status >= 400:
            raise _refusal(answer.status, answered)
        return answered, etag

    def _authorization(self) -> Mapping[str, str]:
        try:
            key = self._key.read()
        except UnusableKeyError as error:
            raise NoUsableKey(str(error)) from None
        return {} if key is None else {"Authorization": f"Bearer {key}"}


def _base_url(url: str) -> str:
    """Return a service's URL without a slash at its end.

    Raises `ValueError` for one that cannot be requested: a retry would not mend it.

    >>> _base_url("https://gauge.example/base/"), _base_url("http://[::1]:8000")
    ('https://gauge.example/base', 'http://[::1]:8000')
    """
    if url.rstrip("/").endswith("/v1"):
        raise ValueError(f"the URL {url!r} has the path of the API: leave /v1 out")
    if "@" in url:
        # Not shown, and not of any use: the service takes a key, and urllib3 leaves out a login.
        raise ValueError(
            "the URL has a user or a password, which errors and lists of processes would show: write"
            " http://HOST:PORT, and put the key into a file (TIDEGAUGE_KEY_FILE)"
        )
    with suppress(LocationParseError):
        parsed = parse_url(url)
        is_base = parsed.query is None and parsed.fragment is None
        if parsed.scheme in {"http", "https"} and parsed.host and is_base:
            return url.rstrip("/")
    raise ValueError(
        f"the URL {url!r} is not that of a service: write http://HOST:PORT, "
        "and an IPv6 address in brackets, as in http://[::1]:8000"
    )


class _RetryableError(Exception):
    """An answer that is worth a retry, `retry_after_ms` from now at the earliest."""

    def __init__(self, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class _NotServingError(_RetryableError):
    """A problem (RFC 9457) that is worth a retry: the service itself answers, with the reason."""


def _retry_after_ms(value: str | None, wall_ms: int) -> int:
    """Return the pause that a `Retry-After` requests, in seconds or until a date (RFC 9110, 10.2.3).

    0: there is none, or an invalid one.

    >>> _retry_after_ms("2", 0), _retry_after_ms("Thu, 01 Jan 1970 00:00:09 GMT", 4_000)
    (2000, 5000)
    >>> _retry_after_ms("soon", 0), _retry_after_ms(None, 0)
    (0, 0)
    """
    if value is None:
        return 0
    with suppress(ValueError, OverflowError):
        if value.isdigit():
            return int(value) * 1_000
        at = parsedate_to_datetime(value)
        # A date in the form of asctime names no zone, and is one of UTC.
        at = at.replace(tzinfo=at.tzinfo or UTC)
        return max(int(at.timestamp() * 1_000) - wall_ms, 0)
    return 0


def _retryable(status: int, data: bytes, retry_after_ms: int) -> _RetryableError:
    """Return the error for a status. Proxies answer with such ones, too, but not with a problem."""
    if problem := _problem(data):
        return _NotServingError(f"status {status}: {problem['detail']}", retry_after_ms)
    return _RetryableError(f"status {status}{_shown(data)}", retry_after_ms)


def _problem(data: bytes) -> Json:
    """Return the service's problem (RFC 9457); empty: another program has answered.

    >>> _problem(b'{"type": "/problems/unavailable", "detail": "wait"}')["detail"]
    'wait'
    >>> _problem(b'{"message": "Forbidden"}'), _problem(b"<h1>Forbidden</h1>")
    ({}, {})
    """
    with suppress(_RetryableError):
        found = _json_object(0, data)
        if str(found.get("type", "")).startswith(_PROBLEMS) and "detail" in found:
            return found
    return {}


def _shown(data: bytes) -> str:
    """Return the beginning of a page as the end of a message; empty: it has not a text.

    >>> _shown(b"<title>403 Forbidden</title>  <h1>Ask IT</h1>"), _shown(bytes([255]))
    (': 403 Forbidden Ask IT', '')
    >>> _shown(b"{}")
    ''
    """
    try:
        words = _TAGS.sub(" ", data[: 10 * _SHOWN_CHARACTERS].decode()).split()
    except UnicodeDecodeError:
        return ""
    text = " ".join(words)
    if not text.isprintable() or text in {"", "{}"}:
        return ""
    return f": {text}" if len(text) <= _SHOWN_CHARACTERS else f": {text[:_SHOWN_CHARACTERS]}…"


class _AnswerObject(dict[str, Any]):
    """A JSON object of an answer. If a required member is missing, the answer is unusable."""

    def __missing__(self, name: str) -> Any:  # noqa: ANN401
        raise Unavailable(f"the answer has no member {name!r}: is this tidegauge?")


def _json_object(status: int, data: bytes) -> Json:
    """Parse an answer. One that is not a JSON object, such as a proxy's error page, is retried."""
    if not data:
        return {}
    try:
        content = json.loads(data, object_pairs_hook=_AnswerObject)
    except ValueError:
        raise _RetryableError(f"status {status} without JSON{_shown(data)}") from None
    if not isinstance(content, dict):
        raise _RetryableError(f"status {status} without a JSON object{_shown(data)}")
    return cast("Json", content)


def _refusal(status: int, problem: Json) -> Refused:
    slug = str(problem.get("type", "")).rpartition("/")[2]
    return _REFUSALS.get(slug, Refused)(status, problem)
