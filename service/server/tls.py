"""The service's certificate, and those of its clients."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import uvloop

from service.errors import CannotStartError
from service.settings import Settings

log = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0


@dataclass(frozen=True)
class TlsFiles:
    """The files, in PEM format."""

    cert: Path
    key: Path
    client_ca: Path | None

    def stamp(self) -> object:
        """Return a value that changes with every write or replacement of a file."""
        return tuple(_stamp(file) for file in (self.cert, self.key, self.client_ca) if file)

    def load(self) -> ssl.SSLContext:
        """Read the files. Raises `CannotStartError` if one is missing or invalid."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for setting, file in (
            ("CERT", self.cert),
            ("KEY", self.key),
            ("CLIENT_CA", self.client_ca),
        ):
            _check_readable(setting, file)
        try:
            # Without a function here, OpenSSL would prompt for a key's password on the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except ssl.SSLError as error:
            raise CannotStartError(
                f"TIDEGAUGE_TLS_CERT {self.cert} and TIDEGAUGE_TLS_KEY {self.key} cannot be used"
                f" together: {_reason(error)}; they must be a certificate chain and its key, without a"
                " password, in PEM format"
            ) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise CannotStartError(
                    f"TIDEGAUGE_TLS_CLIENT_CA {self.client_ca} has no certificates: {_reason(error)}"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def tls_files(settings: Settings) -> TlsFiles | None:
    """Return the files; None: without TLS. Raises `CannotStartError` if some are missing."""
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None and key is None:
        if settings.tls_client_ca is not None:
            raise CannotStartError(
                "TIDEGAUGE_TLS_CLIENT_CA needs TIDEGAUGE_TLS_CERT and TIDEGAUGE_TLS_KEY"
            )
        return None
    if cert is None or key is None:
        missing = "TIDEGAUGE_TLS_CERT" if cert is None else "TIDEGAUGE_TLS_KEY"
        raise CannotStartError(f"{missing} is not set: TLS needs a certificate and its key")
    return TlsFiles(cert, key, settings.tls_client_ca)


class Renewing:
    """A context that serves each new connection with the present files."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = files.stamp()
        self._current = self.context = files.load()
        # Called for each handshake, with or without a name. Two or three system calls are negligible
        # beside a handshake. A background task would be late, and would have to be stopped.
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: ssl.SSLContext
    ) -> None:
        stamp = self._files.stamp()
        if stamp != self._stamp:
            # Also if the files cannot be used: a renewal in progress changes them once more.
            self._stamp = stamp
            try:
                self._current = self._files.load()
            except CannotStartError as error:
                log.warning("the previous certificate stays in use: %s", error.detail)
            else:
                log.info("the certificate was renewed from %s", self._files.cert)
        connection.context = self._current


def make_context(files: TlsFiles, *_: object) -> ssl.SSLContext:
    """Make the context of one process, for uvicorn. Raises `CannotStartError`."""
    return Renewing(files).context


class HandshakeLoop(uvloop.Loop):
    """An event loop whose servers limit the time of a client's handshake.

    uvicorn does not pass on such a limit, and the default is a minute. A connection reaches the guard
    only after its handshake, so this is the only limit until then.
    """

    async def create_server(self, *args: Any, **options: Any) -> asyncio.AbstractServer:  # noqa: ANN401
        """See `asyncio.loop.create_server`."""
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", _HANDSHAKE_S)
        return await super().create_server(*args, **options)


def _stamp(file: Path) -> object:
    try:
        found = os.stat(file)  # noqa: PTH116  (called for each handshake)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _check_readable(setting: str, file: Path | None) -> None:
    if file is None:
        return
    try:
        # Opening a pipe would wait for a writer, and every handshake with it.
        regular = S_ISREG(file.stat().st_mode)
        if regular:
            file.open("rb").close()
    except OSError as error:
        raise CannotStartError(
            f"TIDEGAUGE_TLS_{setting} {file} cannot be read: {error.strerror}"
        ) from None
    if not regular:
        raise CannotStartError(
            f"TIDEGAUGE_TLS_{setting} {file} is not a regular file: copy its contents to one"
        )


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not in PEM format").replace("_", " ").lower()
