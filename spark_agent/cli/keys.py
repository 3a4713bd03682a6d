"""Commands that manage keys and list the changes made with them. They need a running service."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from spark_agent.cli.common import (
    DEFAULT_URL,
    AsJson,
    Form,
    KeyFile,
    ProfileName,
    Url,
    client_of,
    complete_job,
    explained,
    output,
    print_data,
    print_table,
)
from spark_agent.cli.tables import Column
from spark_agent.times import duration_ms

Name = Annotated[str, typer.Argument(help="The key's name.")]
_KEYS: Final = (
    Column("name", kind="name"),
    Column("role"),
    Column("jobs", kind="name", least=10, usual="*"),
    Column("expires"),
    Column("last used", 1, kind="sentence"),
    Column("created by", 2, kind="sentence"),
)
_AUDIT: Final = (
    Column("at"),
    Column("by", kind="name", least=8),
    Column("from", 1, usual="127.0.0.1", needs="by"),
    Column("action"),
    Column("of", kind="name", least=8),
    Column("detail", kind="sentence", least=44),
)

keys = typer.Typer(
    no_args_is_help=True,
    help="Create, list and revoke the keys that requests are sent with. Needs an admin key, once a key"
    " exists.",
)


@keys.command("create")
def create(
    name: Name,
    *,
    role: Annotated[str, typer.Option(help="read, report, drive, admin or scrape.")],
    jobs: Annotated[
        str, typer.Option(help="The jobs that the key is for, such as 'scores-*'.")
    ] = "*",
    expires_in: Annotated[
        str | None, typer.Option(help="Such as '90 days'; never if left out.", show_default=False)
    ] = None,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Create a key. Its secret is printed once, on the standard output, and stored nowhere.

    Examples: `tidegauge keys create workers --role report --jobs 'scores-*' > workers.key`,
    `tidegauge keys create ci --role admin --expires-in '90 days'`
    """
    with explained("keys create", url):
        expires_in_ms = None if expires_in is None else duration_ms(expires_in, name="--expires-in")
        made = client_of(url, key_file).create_key(name, role, jobs, expires_in_ms)
    if print_data(form, made):
        return
    typer.echo(made["secret"])
    until = f", until {made['expires_at']}" if made["expires_at"] else ""
    typer.echo(
        f"key {name} has role {role} for {jobs}{until}. Keep the secret: it is not shown again",
        err=True,
    )


@keys.command("list")
def list_keys(
    *,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """List the keys, without their secrets.

    Examples: `tidegauge keys list`, `tidegauge keys list --json`
    """
    with explained("keys list", url):
        found = client_of(url, key_file).keys()
    if print_data(form, {"keys": found}):
        return
    print_table(
        _KEYS,
        [
            (
                each["name"],
                each["role"],
                each["jobs"],
                each["expires_at"] or "never",
                each["used_at"] or "never",
                each["created_by"],
            )
            for each in found
        ],
        wide=form == "wide",
    )


@keys.command("revoke")
def revoke(
    name: Name,
    *,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Revoke a key. Every replica rejects it within two seconds.

    Example: `tidegauge keys revoke workers`
    """
    with explained("keys revoke", url):
        client_of(url, key_file).revoke_key(name)
    if not print_data(form, {"revoked": name}):
        typer.echo(f"key {name} is revoked")


def audit(
    job: Annotated[
        str | None,
        typer.Argument(help="The job; all if left out.", autocompletion=complete_job),
    ] = None,
    *,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Number of records.")] = 20,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Show the audit: changes and resets of jobs, runs, retired ranges, made and revoked keys.

    Examples: `tidegauge audit`, `tidegauge audit scores --limit 5 --json`
    """
    with explained("audit", url):
        found = client_of(url, key_file).audit(limit=limit, job=job)
    if print_data(form, {"records": found}):
        return
    if not found and job is not None:
        output().print(f"the audit has not a record of job {job!r}", markup=False)
        return
    print_table(
        _AUDIT,
        [
            (
                each["at"],
                each["by"],
                each["address"],
                each["action"],
                each["job"] or each["key"] or "",
                each["detail"],
            )
            for each in found
        ],
        wide=form == "wide",
    )
