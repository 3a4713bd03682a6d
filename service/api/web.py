"""The web's rules, which protect the service from pages of other sites in a user's browser.

A browser sends a page's requests to any address, loopback included, and with the network rights of the
user's machine. It sends a *preflight* first (which this service never grants), unless the request could
come from a form. So bodies must declare that they are JSON, and changes must not come from another site.
A page can also point its own name at the address of this service, and then is the same site; so the name
in `Host` must be a name of the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from starlette.types import Scope

from service.errors import (
    CrossSiteError,
    MalformedHttpError,
    UnknownHostError,
    UnsupportedMediaTypeError,
)

JSON_HEADERS: Final = [
    # Watermarks move: caches must not keep them.
    (b"cache-control", b"no-store"),
    # A browser never takes JSON for a page. The remaining headers are about pages.
    (b"x-content-type-options", b"nosniff"),
]
"""Headers of each JSON response: few, since uvicorn takes a microsecond for each."""

HEADERS: Final = [
    *JSON_HEADERS,
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]
"""Headers of every other response, unless the response sets them itself."""

_HEADER_NAMES: Final = frozenset(name for name, _ in HEADERS)
JSON: Final = (b"content-type", b"application/json")

RawHeaders = Sequence[tuple[bytes, bytes]]
"""Names in lower case, and values, in ASGI's form."""

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class AllowedHosts:
    """The names of the service. None: any."""

    names: frozenset[str] | None

    @classmethod
    def of(cls, setting: str, bound_to: str) -> AllowedHosts:
        """Read the setting; by default any name, unless the service is bound to loopback.

        >>> AllowedHosts.of("", "127.0.0.1").allows(b"evil.example")
        False
        >>> AllowedHosts.of("", "0.0.0.0").allows(b"tidegauge-1:8000")
        True
        """
        names = frozenset(name.strip().lower() for name in setting.split(",") if name.strip())
        if "*" in names or (not names and not _is_loopback(bound_to)):
            return cls(None)
        return cls(names | _LOOPBACK | {bound_to.lower()})

    def allows(self, host: bytes) -> bool:
        """Return whether a request may be addressed to this host, with or without a port.

        An address is always allowed, for probes and scrapers: a page that points its own name at the
        address of the service still sends its name.

        >>> hosts = AllowedHosts.of("gauge.example", "0.0.0.0")
        >>> some = (b"Gauge.Example:443", b"[::1]:8000", b"10.0.0.7", b"x.example")
        >>> [hosts.allows(host) for host in some]
        [True, True, True, False]
        """
        return self.names is None or _is_among(self.names, host)


@lru_cache(256)
def _is_among(names: frozenset[str], host: bytes) -> bool:
    # Without a host: HTTP/1.0 allows this, and browsers do not send it.
    name = _without_port(host.decode("latin-1")).lower().removesuffix(".")
    return not name or name in names or _is_address(name)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def with_browser_headers(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Return a response's headers, and the ones of `HEADERS` that it does not set itself."""
    if JSON in headers:
        return [*headers, *JSON_HEADERS]
    own = {name for name, _ in headers if name in _HEADER_NAMES}
    return [*headers, *(header for header in HEADERS if header[0] not in own)]


_CHECKED: Final = frozenset(
    {b"host", b"origin", b"sec-fetch-site", b"content-type", b"content-length", b"authorization"}
)


def checked_headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers that the checks of every request need. Raises `MalformedHttpError`.

    A single pass, since every report takes it.
    """
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in _CHECKED and found.setdefault(name, value) != value:
            raise MalformedHttpError(f"the request has two {name.decode().title()} headers")
    return found


def check_browser(method: str, found: Mapping[bytes, bytes], hosts: AllowedHosts) -> None:
    """Reject a request that a page of another site could have sent, by its `checked_headers`.

    Raises `UnknownHostError`, `CrossSiteError` or `UnsupportedMediaTypeError`.
    """
    host = found.get(b"host", b"")
    if not hosts.allows(host):
        raise UnknownHostError(
            f"Host is {host.decode('latin-1')[:200]!r}: list the names of the service in"
            " TIDEGAUGE_ALLOWED_HOSTS"
        )
    if method not in SAFE_METHODS:
        _check_site(host, found.get(b"origin"), found.get(b"sec-fetch-site"))
        _check_kind(found.get(b"content-type", b""))


def _check_site(host: bytes, origin: bytes | None, site: bytes | None) -> None:
    if site == b"cross-site" or site == b"same-site":  # noqa: PLR1714  (narrows the type)
        raise CrossSiteError(
            f"Sec-Fetch-Site is {site.decode()!r}: only pages of this service itself, and clients that"
            " are not browsers, may change something"
        )
    # Without the scheme: behind a proxy that ends TLS it differs from the browser's.
    if origin is not None and origin.partition(b"://")[2].lower() != host.lower():
        raise CrossSiteError(
            f"Origin is {origin.decode('latin-1')[:200]!r}, and Host is"
            f" {host.decode('latin-1')[:200]!r}: only pages of this service itself, and clients that"
            " are not browsers, may change something"
        )


def _check_kind(kind: bytes) -> None:
    # A missing type is fine: the origin identifies a page that sends none.
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
