"""The web's rules: what a page that somebody has opened must not do to a service that he can reach.

A browser sends a page's requests to any address, loopback included, and with whatever rights the user's
machine has. It asks first (a *preflight*, which this service never grants) unless the request looks like
a form's. So bodies must say that they are JSON, and what changes something must not come from another
site. A page can also give its own name the address of this service, and then is no other site; so the
name in `Host` must be one that the service goes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from starlette.types import Scope

from service.errors import CrossSiteError, UnknownHostError, UnsupportedMediaTypeError

HEADERS: Final = [
    # Watermarks move: nothing between here and the reader may keep one.
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]
"""Of every response, unless it has such a header of its own."""

_HEADER_NAMES: Final = frozenset(name for name, _ in HEADERS)

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class AllowedHosts:
    """The names that the service goes by. None: any."""

    names: frozenset[str] | None

    @classmethod
    def of(cls, setting: str, bound_to: str) -> AllowedHosts:
        """Read the setting; by default any name, unless the service is bound to loopback.

        >>> AllowedHosts.of("", "127.0.0.1").allows("evil.example")
        False
        >>> AllowedHosts.of("", "0.0.0.0").allows("tidegauge-1:8000")
        True
        """
        names = frozenset(name.strip().lower() for name in setting.split(",") if name.strip())
        if "*" in names or (not names and not _is_loopback(bound_to)):
            return cls(None)
        return cls(names | _LOOPBACK | {bound_to.lower()})

    def allows(self, host: str) -> bool:
        """Return whether a request may be addressed to this host, with or without a port.

        An address is always allowed, as probes and scrapers use it: a page that gives its own name the
        address of the service still sends its name.

        >>> hosts = AllowedHosts.of("gauge.example", "0.0.0.0")
        >>> [hosts.allows(host) for host in ("Gauge.Example:443", "[::1]:8000", "10.0.0.7", "x.example")]
        [True, True, True, False]
        """
        if self.names is None:
            return True
        name = _without_port(host).lower().removesuffix(".")
        return name in self.names or _is_address(name)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


@lru_cache(256)
def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def with_browser_headers(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return a response's headers with those of `HEADERS` that it has not set itself."""
    own = {name for name, _ in headers if name in _HEADER_NAMES}
    return [*headers, *(HEADERS if not own else [h for h in HEADERS if h[0] not in own])]


def check_browser(scope: Scope, hosts: AllowedHosts) -> None:
    """Refuse what a page of another site could have sent.

    Raises `UnknownHostError`, `CrossSiteError` or `UnsupportedMediaTypeError`.
    """
    host = origin = site = kind = b""
    for name, value in scope["headers"]:
        if name == b"host":
            if host and value != host:
                raise UnknownHostError("the request has two Host headers that differ")
            host = value
        elif name == b"origin":
            origin = value
        elif name == b"sec-fetch-site":
            site = value
        elif name == b"content-type":
            kind = value
    if hosts.names is not None and host and not hosts.allows(host.decode("latin-1")):
        raise UnknownHostError(
            f"Host is {host.decode('latin-1')[:200]!r}: list the names that the service goes by in"
            " TIDEGAUGE_ALLOWED_HOSTS"
        )
    if scope["method"] not in SAFE_METHODS:
        _check_site(host, origin, site)
        _check_kind(kind)


def _check_site(host: bytes, origin: bytes, site: bytes) -> None:
    if site in (b"cross-site", b"same-site"):
        raise CrossSiteError(
            f"Sec-Fetch-Site is {site.decode()!r}: only pages of this service itself, and clients that"
            " are no browsers, may change something"
        )
    # Without the scheme: a proxy that ends TLS has another one than the browser.
    if origin and origin.partition(b"://")[2].lower() != host.lower():
        raise CrossSiteError(
            f"Origin is {origin.decode('latin-1')[:200]!r}, and Host is"
            f" {host.decode('latin-1')[:200]!r}: only pages of this service itself, and clients that"
            " are no browsers, may change something"
        )


def _check_kind(kind: bytes) -> None:
    # None at all is fine: a page that sends none is told by its origin.
    if not kind or kind == b"application/json":
        return
    media = kind.partition(b";")[0].strip().lower()
    if media != b"application/json" and not (
        media.startswith(b"application/") and media.endswith(b"+json")
    ):
        raise UnsupportedMediaTypeError(
            f"Content-Type is {kind.decode('latin-1')[:200]!r}: send JSON, as application/json"
            " (with curl: -H 'Content-Type: application/json')"
        )
