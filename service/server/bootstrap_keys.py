"""The operator's own keys, from the environment; and the conditions for a service without keys."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from pydantic import SecretStr

from service.errors import CannotStartError
from service.model.keys import EVERY_JOB, SECRET_PATTERN, Key, Role, digest_of
from service.settings import Settings, read_text

log = logging.getLogger(__name__)


def operator_keys(settings: Settings) -> Sequence[Key]:
    """Read the operator's keys. Raises `CannotStartError`; no message shows a secret."""
    given = (
        ("ADMIN_KEY", Role.ADMIN, settings.admin_key, settings.admin_key_file),
        ("SCRAPE_KEY", Role.SCRAPE, settings.scrape_key, settings.scrape_key_file),
    )
    found = [
        Key(f"{role} (environment)", role, EVERY_JOB, digest_of(secret))
        for name, role, value, path in given
        if (secret := _read(f"TIDEGAUGE_{name}", value, path)) is not None
    ]
    if len({key.digest for key in found}) < len(found):
        raise CannotStartError("TIDEGAUGE_ADMIN_KEY and TIDEGAUGE_SCRAPE_KEY are the same secret")
    return found


def _read(name: str, value: SecretStr | None, path: Path | None) -> str | None:
    if value is not None and path is not None:
        raise CannotStartError(f"{name} and {name}_FILE are both set: leave one out")
    if path is not None:
        name = f"{name}_FILE"
        try:
            secret = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise CannotStartError(f"{name} {str(path)!r} cannot be read: {reason}") from None
    elif value is not None:
        # `$(cat FILE)` keeps a byte order mark and a carriage return of the file.
        secret = value.get_secret_value().lstrip("\ufeff").rstrip("\r\n")
    else:
        return None
    if SECRET_PATTERN.fullmatch(secret) is None:
        raise CannotStartError(
            f"{name} has {len(secret)} characters: it must have 32 to 256, all visible ASCII, and be"
            " random. Make one with: openssl rand -hex 32"
        )
    return secret


def may_be_open(settings: Settings) -> bool:
    """Return whether everyone is served while the service has no key: on loopback only, or as set."""
    return settings.insecure or is_loopback(settings.host)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8")]
    [True, True, True, True]
    >>> [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "gauge.example", "")]
    [False, False, False, False, False]
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_not_exposed(settings: Settings, *, protected: bool) -> None:
    """Check that the service is not open to other machines without a key. Raises `CannotStartError`.

    `protected`: the service has a key, so every request needs one.
    """
    if protected or is_loopback(settings.host):
        return
    if not settings.insecure:
        raise CannotStartError(
            f"the service has no key, and everyone with access to {settings.host}:{settings.port} "
            f"could change"
            " every job. Set TIDEGAUGE_ADMIN_KEY_FILE or TIDEGAUGE_ADMIN_KEY (openssl rand -hex 32),"
            " or listen on --host 127.0.0.1, or allow it with --insecure (TIDEGAUGE_INSECURE=true)"
        )
    log.warning(
        "the service has no key: everyone with access to %s:%d has every right (--insecure)",
        settings.host,
        settings.port,
    )
