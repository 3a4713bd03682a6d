"""The schema: made by migrations, on both databases, whoever else is at it, with nothing lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, inspect, select, text

from service.errors import StoreRefusedError
from service.frontier.graph import StageWatermark
from service.frontier.timestamps import MIN
from service.ledger.migrate import migrations_folder, upgrade
from service.ledger.port import JobRecord
from service.ledger.sql import SqlLedger
from service.ledger.tables import history, incarnations, metadata
from tests.support.server import ROOT

NEWEST = "0011"
SPEC = b'{"stages":{"s":{"shards":["a","b"]},"k":{"inputs":["s"],"ranges":2}}}'


@pytest.fixture
def engine(ledger_url: str) -> Iterator[Engine]:
    engine = create_engine(ledger_url.replace("+aiosqlite", ""))
    yield engine
    engine.dispose()


def revision(engine: Engine) -> str | None:
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def fill(connection: Connection) -> None:
    """Put in what the first release wrote: only columns of the first schema."""

    def add(to: str, /, **values: object) -> None:
        columns = ", ".join(values)
        places = ", ".join(f":{column}" for column in values)
        connection.execute(text(f"INSERT INTO {to} ({columns}) VALUES ({places})"), values)

    for number in (1, 2, 3):
        add("incarnations", number=number, opened_at_ms=number)
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT setval('incarnations_number_seq', 3)"))
    for name, deleted in (("j", False), ("gone", True)):
        add(
            "jobs",
            name=name,
            generation=4,
            layout_version=5,
            revision=6,
            last_run=7,
            spec=SPEC,
            deleted=deleted,
            created_at_ms=8,
            updated_at_ms=9,
        )
    for stage, epoch in (("s", None), ("k", 11)):
        add(
            "stages",
            job="j",
            stage=stage,
            layout_since=5,
            run=7,
            epoch=epoch,
            input=MIN,
            output=12,
            idle=False,
            version=13,
            revision=6,
            updated_at_ms=14,
        )
    add(
        "promise_chunks",
        job="j",
        stage="k",
        chunk=0,
        generation=4,
        layout_since=5,
        promises=np.array([20, 30], dtype="<i8").tobytes(),
    )
    add(
        "watermark_history",
        job="j",
        stage="s",
        generation=4,
        version=13,
        input=MIN,
        output=12,
        idle=False,
        at_ms=14,
    )


def test_the_migrations_make_the_tables_that_the_code_declares(engine: Engine) -> None:
    with engine.begin() as connection:
        upgrade(connection)
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []


def test_what_the_first_release_wrote_is_all_there_after_an_upgrade(
    engine: Engine, ledger_url: str, runner: asyncio.Runner
) -> None:
    with engine.begin() as connection:
        upgrade(connection, "0001")
    with engine.begin() as connection:
        fill(connection)
    ledger = SqlLedger(ledger_url)
    runner.run(ledger.open(exclusive=True))
    [head] = runner.run(ledger.heads())
    assert list(runner.run(ledger.deleted(["gone", "j", "never"]))) == ["gone"]
    assert (head.generation, head.layout_version, head.revision, head.last_run) == (4, 5, 6, 7)
    stored = runner.run(ledger.begin_incarnations({"j": head.incarnation}, 20))["j"]
    # Above all that the first release has granted leases by.
    assert stored.installed.incarnation > 3
    assert stored.spec == SPEC
    stages = stored.installed.stages
    columns = stages["k"].columns or {}
    assert columns["promises"].tolist() == [20, 30]
    assert columns["raised_at_ms"].tolist() == [0, 0], "it is not known"
    assert (stages["k"].progress.run, stages["k"].progress.epoch) == (7, 11)
    [run] = runner.run(ledger.runs("j", 10))
    assert (run.run, run.opened.stages, run.started_at_ms, run.epoch) == (7, ["k", "s"], None, 11)
    assert stages["s"].view.watermark == StageWatermark(MIN, 12)
    this = JobRecord(
        job="j",
        incarnation=stored.installed.incarnation,
        generation=4,
        layout_version=5,
        seen=6,
        advances={"s": StageWatermark(MIN, 13)},
        epochs={},
    )
    assert runner.run(ledger.record([this], 21))["j"].views["s"].version == 14
    with engine.connect() as connection:
        outputs = select(history.c.output).order_by(history.c.id)
        assert list(connection.scalars(outputs)) == [12, 13]
        drawn = select(incarnations.c.job).order_by(incarnations.c.number)
        assert list(connection.scalars(drawn)) == [None, None, None, "j"]
    runner.run(ledger.close())


def test_a_migration_that_is_cut_off_leaves_nothing_behind(engine: Engine) -> None:
    def cut_off() -> None:
        with engine.begin() as connection:
            upgrade(connection)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        cut_off()
    assert inspect(engine).get_table_names() == []
    with engine.begin() as connection:
        upgrade(connection, "0001")
        fill(connection)
    with pytest.raises(RuntimeError):
        cut_off()
    assert revision(engine) == "0001"
    assert "incarnation" not in {c["name"] for c in inspect(engine).get_columns("jobs")}
    with engine.begin() as connection:
        upgrade(connection)
        assert connection.scalar(text("SELECT count(*) FROM jobs")) == 2


def test_a_schema_of_a_newer_release_is_refused(
    engine: Engine, ledger_url: str, runner: asyncio.Runner
) -> None:
    with engine.begin() as connection:
        upgrade(connection)
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    ledger = SqlLedger(ledger_url)
    with pytest.raises(StoreRefusedError, match="newer release"):
        runner.run(ledger.open(exclusive=False))
    runner.run(ledger.close())


@pytest.mark.parametrize("ledger_url", ["postgres"], indirect=True)
def test_many_processes_may_migrate_at_once(engine: Engine, ledger_url: str) -> None:
    program = (
        "import asyncio, sys\n"
        "from service.ledger.sql import SqlLedger\n"
        "async def main():\n"
        "    ledger = SqlLedger(sys.argv[1])\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    await ledger.open(exclusive=False)\n"
        "    await ledger.close()\n"
        "asyncio.run(main())\n"
    )
    replicas = [
        subprocess.Popen(
            [sys.executable, "-c", program, ledger_url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for replica in replicas:
        assert replica.stdout is not None
        assert replica.stdout.readline() == b"ready\n"
    for replica in replicas:
        assert replica.stdin is not None
        replica.stdin.write(b"go\n")
        replica.stdin.flush()
    said = [replica.communicate(timeout=120)[1] for replica in replicas]
    assert [replica.returncode for replica in replicas] == [0] * 4, said
    assert revision(engine) == NEWEST


@pytest.mark.parametrize("ledger_url", ["postgres"], indirect=True)
def test_many_ledgers_and_threads_of_one_process_may_migrate_at_once(
    engine: Engine, ledger_url: str, runner: asyncio.Runner
) -> None:
    ledgers = [SqlLedger(ledger_url) for _ in range(4)]

    def migrate() -> None:
        with engine.begin() as connection:
            upgrade(connection)

    async def together() -> None:
        await asyncio.gather(*(ledger.open(exclusive=False) for ledger in ledgers))
        await asyncio.gather(*(ledger.close() for ledger in ledgers))

    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(migrate) for _ in range(3)]
        runner.run(together())
        for other in others:
            other.result()
    assert revision(engine) == NEWEST


def test_the_second_migration_can_be_undone(engine: Engine) -> None:
    with engine.begin() as connection:
        upgrade(connection, "0001")
        before = shape(connection)
    with engine.begin() as connection:
        upgrade(connection)
        assert shape(connection) != before
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(migrations_folder()))
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    with engine.begin() as connection:
        assert shape(connection) == before


def shape(connection: Connection) -> dict[str, list[str]]:
    found = inspect(connection)
    return {
        name: sorted(column["name"] for column in found.get_columns(name))
        for name in found.get_table_names()
    }
