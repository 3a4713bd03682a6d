"""Errors of Redis and of its library, translated to those of a store."""

from __future__ import annotations

import re

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from service.errors import StoreRefusedError, UnavailableError
from service.live.redis import schema
from service.live.redis.rights import DENIED, DeniedError, denied
from service.telemetry.redaction import shown

_REFUSED = re.compile(
    r"(?:^|[ -])(OOM|MISCONF|NOREPLICAS|READONLY|LOADING|MASTERDOWN|BUSY|CLUSTERDOWN|TRYAGAIN) "
)
"""Errors of a server that is up, but cannot take a write now.

Of a plain command the code is the first word, or is taken off (then it is the error's `status_code`).
Of a command within a script, older servers put it into the middle: `Error running script …: -OOM …`.
"""

_WRONG_DATABASE = re.compile(r"DB index is out of range|invalid DB index|SELECT is not allowed")
_WRONG_TYPE = re.compile(r"(?:^|[ -])WRONGTYPE ")


class WrongTypeError(Exception):
    """A key holds something else than what this program writes there."""


def broken(error: RuntimeError | AttributeError) -> RedisConnectionError:
    """Translate the error for a connection that breaks during a write; raise any other error.

    uvloop's is a `RuntimeError`. And when a node of a cluster fails, redis-py closes all connections to
    it, those in use included, whose streams then are None.
    """
    closed = "closed" in str(error) if isinstance(error, RuntimeError) else error.obj is None
    if not closed:
        raise error
    return RedisConnectionError(str(error))


def denial(words: str, source: str | None = None) -> DeniedError:
    """Return the error for a refusal: see `rights.denied`."""
    return denied(words, schema.CHANNELS, schema.KEYS, source=source)


def translated(error: ResponseError, url: str, source: str | None = None) -> Exception:
    """Return the error that a server's reply means; the reply itself if it was not foreseen.

    `source` is the script that failed; None: it was a plain command.
    """
    message = f"{error.status_code or ''} {error}"
    if DENIED.search(message):
        return denial(str(error), source)
    if _WRONG_DATABASE.search(message):
        return StoreRefusedError(
            f"TIDEGAUGE_LIVE_URL {shown(url)} cannot be used: {error}. Choose another database"
            " (…/0), or raise `databases` in Redis"
        )
    if _WRONG_TYPE.search(message):
        return WrongTypeError(str(error))
    refused = _REFUSED.search(message)
    if refused is None:
        return error
    return UnavailableError(f"the live store refuses commands now: {message[refused.start(1) :]}")


def unavailable(error: BaseException) -> UnavailableError:
    """Return the error of a store that does not answer, for the one that was raised."""
    return UnavailableError(f"the live store does not answer: {error or type(error).__name__}")
