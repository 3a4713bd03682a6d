"""Settings: the environment `TIDEGAUGE_*`, a `.env` file, or the options of `tidegauge serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

DAY_MS = 86_400_000


class Settings(BaseSettings):
    """Everything that can be set, with its default."""

    model_config = SettingsConfigDict(env_prefix="TIDEGAUGE_", env_file=".env", extra="ignore")

    ledger_url: str = "sqlite+aiosqlite:///tidegauge.db"
    live_url: str = "memory://"
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    checkpoint_interval_ms: int = Field(default=1_000, ge=10, le=60_000)
    """How old a saved promise may be after a crash. That costs time, never correctness."""
    history_fine_ms: int = Field(default=DAY_MS, ge=0)
    """History younger than this keeps every advance; older is thinned to one row per minute."""
    history_retention_ms: int = Field(default=30 * DAY_MS, ge=0)
    """History older than this is deleted."""
    max_jobs: int = Field(default=10_000, ge=1)
    """Jobs that the service keeps."""
    max_ranges_per_job: int = Field(default=2_000_000, ge=1)
    """Ranges of one job, in all its stages. Each takes about a hundred bytes in every replica."""
    max_ranges: int = Field(default=4_000_000, ge=1)
    """Ranges of all jobs together."""
    audit_retention_ms: int = Field(default=90 * DAY_MS, ge=0)
    """Records of the audit older than this are deleted."""
    admin_key: SecretStr | None = None
    """A key of the operator's own, for everything: also to create the first key with."""
    admin_key_file: Path | None = None
    scrape_key: SecretStr | None = None
    """Likewise, for the metrics alone."""
    scrape_key_file: Path | None = None
    insecure: bool = False
    """Serve everyone, on any address, as long as there is no key."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
