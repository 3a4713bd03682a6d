"""The command `tidegauge doctor`: it checks the settings, the stores and this machine."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from service.clock import Clock, SystemClock
from service.errors import CannotStartError
from service.ledger.doctor import examine as examine_ledger
from service.model.findings import Finding
from service.server.bootstrap_keys import operator_keys
from service.server.serve import read_settings
from service.server.tls import tls_files
from service.settings import Settings

_FEW_DESCRIPTORS = 4_096
_ANY_WIDTH = 100_000
_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}


def doctor(form: Literal["table", "wide", "json", "yaml"], **options: object) -> None:
    """Print the findings; exit with 1 for a fault. Raises `ProblemError`."""
    found = asyncio.run(examine(read_settings(**options), SystemClock()))
    data = {"findings": [asdict(finding) for finding in found]}
    if form == "json":
        typer.echo(json.dumps(data, indent=2))
    elif form == "yaml":
        yaml: Any = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.width = _ANY_WIDTH
        yaml.sort_base_mapping_type_on_output = False
        yaml.dump(data, sys.stdout)
    else:
        is_whole = form == "wide" or not sys.stdout.isatty()
        _print(found, width=_ANY_WIDTH if is_whole else None)
    if any(finding.verdict == "fault" for finding in found):
        raise typer.Exit(1)


async def examine(settings: Settings, clock: Clock) -> Sequence[Finding]:
    """Examine a deployment with these settings."""
    found = [*_examine_settings(settings), _examine_machine()]
    found += await examine_ledger(settings.ledger_url, clock)
    if settings.live_url.startswith("memory:"):
        found.append(Finding("live store", "ok", "is in the memory of a single process"))
    else:
        # Imported only for Redis: the package is optional, and slow to import.
        from service.live.redis.doctor import examine as examine_live  # noqa: PLC0415

        found += await examine_live(settings.live_url, clock)
    return found


def _examine_settings(settings: Settings) -> list[Finding]:
    if (fault := _fault_of_files(settings)) is not None:
        return [Finding("settings", "fault", fault)]
    memory, file = settings.live_url.startswith("memory:"), settings.ledger_url.startswith("sqlite")
    if file and not memory:
        return [
            Finding(
                "settings",
                "warning",
                "a shared live store with SQLite: the ledger is still for one process; use"
                " postgresql+psycopg://… for several",
            )
        ]
    return [Finding("settings", "ok", "can be read, and match")]


def _fault_of_files(settings: Settings) -> str | None:
    """Return the fault of the operator's keys or of the certificate, which are read as at a start."""
    try:
        operator_keys(settings)
        files = tls_files(settings)
        if files is not None:
            files.load()
    except CannotStartError as error:
        return error.detail
    return None


def _examine_machine() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FEW_DESCRIPTORS:
        return Finding(
            "file descriptors",
            "warning",
            f"a process may have {hard:,}: each long poll takes one, so raise the limit",
        )
    return Finding("file descriptors", "ok", "are sufficient")


def _print(found: Sequence[Finding], *, width: int | None) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in found:
        colour = _COLOURS[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict}[/]", finding.what, finding.says)
    Console(width=width).print(table)
