"""Settings: the environment `TIDEGAUGE_*`, a `.env` file, or the options of `tidegauge serve`."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

DAY_MS = 86_400_000


class Settings(BaseSettings):
    """All settings, with their defaults."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEGAUGE_", env_file=".env", env_file_encoding="utf-8-sig", extra="ignore"
    )

    ledger_url: str = "sqlite+aiosqlite:///tidegauge.db"
    live_url: str = "memory://"
    ledger_url_file: Path | None = None
    live_url_file: Path | None = None
    """Files with the URLs, so that passwords are not in the environment or the list of processes."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    allowed_hosts: str = ""
    """Names of the service in requests, separated by commas; `*`: any.

    By default those of the loopback interface if it listens there, else any.
    """
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """Authority of client certificates. If set, clients must present a certificate of it."""
    max_connections: int = Field(default=0, ge=0)
    """0: by the limit of file descriptors, at most 16,000."""
    max_connections_per_client: int = Field(default=0, ge=0)
    """Connections of one address; 0: unlimited. Clients of a load balancer share its address."""
    max_readers_per_client: int = Field(default=0, ge=0)
    """Long polls and streams of one address; 0: half the limit of connections."""
    max_header_bytes: int = Field(default=32 * 2**10, ge=1_024, le=2**20)
    max_headers: int = Field(default=100, ge=10, le=10_000)
    max_url_bytes: int = Field(default=8 * 2**10, ge=256, le=65_535)
    max_pipelined: int = Field(default=64, ge=1, le=10_000)
    """Unanswered requests of one connection."""
    max_bodies_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Bodies of all unanswered requests together, without small ones."""
    header_timeout_ms: int = Field(default=10_000, ge=100)
    body_stall_timeout_ms: int = Field(default=10_000, ge=100)
    """Longest time without progress of a body."""
    body_timeout_ms: int = Field(default=120_000, ge=100)
    """Longest time for a body."""
    write_timeout_ms: int = Field(default=60_000, ge=100)
    """Longest time in which a client reads nothing of its response."""
    idle_timeout_ms: int = Field(default=75_000, ge=100)
    """Longest time for which a connection may be idle."""
    checkpoint_interval_ms: int = Field(default=1_000, ge=10, le=60_000)
    """Largest age of a saved promise after a crash. Age costs time, never correctness."""
    history_fine_ms: int = Field(default=DAY_MS, ge=0)
    """History younger than this keeps every advance; older is thinned to one row per minute."""
    history_retention_ms: int = Field(default=30 * DAY_MS, ge=0)
    """History older than this is deleted."""
    max_jobs: int = Field(default=10_000, ge=1)
    """Number of jobs."""
    max_ranges_per_job: int = Field(default=2_000_000, ge=1)
    """Ranges of one job, in all its stages. Each takes about a hundred bytes in every replica."""
    max_ranges: int = Field(default=4_000_000, ge=1)
    """Ranges of all jobs together."""
    metrics_stages: int = Field(default=2_000, ge=0)
    """Number of stages with metrics. Each is about twenty series in Prometheus."""
    audit_retention_ms: int = Field(default=90 * DAY_MS, ge=0)
    """Records of the audit older than this are deleted."""
    admin_key: SecretStr | None = None
    """A key of the operator's own, with every right, including the creation of the first key."""
    admin_key_file: Path | None = None
    scrape_key: SecretStr | None = None
    """Likewise, for the metrics alone."""
    scrape_key_file: Path | None = None
    insecure: bool = False
    """Serve everyone, on any address, as long as the service has no key."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    @field_validator("ledger_url_file", "live_url_file", mode="before")
    @classmethod
    def _leave_out_empty(cls, file: object) -> object:
        """Return None for an empty name. A variable without a value hides the file that `.env` names."""
        return None if file == "" else file

    @model_validator(mode="after")
    def _read_files(self) -> Settings:
        for name in ("ledger_url", "live_url"):
            file: Path | None = getattr(self, f"{name}_file")
            if file is not None:
                setattr(self, name, _first_line(file))
        return self


def _first_line(file: Path) -> str:
    try:
        line = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file {file} cannot be read: {error}") from None
    if not line or "\n" in line:
        raise ValueError(f"the file {file} must have one line, the URL")
    return line


def read_text(path: Path) -> str:
    """Return a file's text without a byte order mark and without space around it.

    The text is UTF-8, or UTF-16 with its mark, as written by a redirection in Windows' PowerShell.
    Raises `OSError`, or `UnicodeDecodeError`.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        data = file.read()
    utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if utf_16 else "utf-8-sig").strip()


def _open_at_once(path: str, flags: int) -> int:
    """Open a file. A pipe without a writer is at its end, and is not waited for."""
    if not hasattr(os, "O_NONBLOCK"):  # Windows
        return os.open(path, flags)
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor
