"""The ledger on Postgres when there are several of them, and when Postgres fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import psycopg
import pytest
import uvloop
from psycopg.sql import SQL
from sqlalchemy import Executable, event, text
from sqlalchemy.ext.asyncio import AsyncConnection

from service.errors import UnavailableError
from service.frontier.graph import StageWatermark
from service.frontier.timestamps import MAX, MIN
from service.ledger import database
from service.ledger import history_statements as sql
from service.ledger.port import JobHead, JobRecord, NewLayout
from service.ledger.sql import SqlLedger
from service.model.checkpoints import CheckpointChunk, joined_columns
from service.model.runs import NewRun
from tests.support.binaries import WAIT_S
from tests.support.postgres_server import PostgresServer
from tests.support.proxy import Proxy

T = TypeVar("T")
SPEC = b'{"stages":{"s":{"shards":["a","b"]},"k":{"inputs":["s"],"ranges":2}}}'
JOBS = ("a", "b", "c", "d")
PATIENCE_S = 1.0


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """One that nobody else uses: it is stopped and worse."""
    with PostgresServer(tmp_path_factory.mktemp("own"), max_connections=30) as server:
        yield server


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@pytest.fixture
def server(own_server: PostgresServer) -> Iterator[PostgresServer]:
    yield own_server
    own_server.resume()
    if not own_server.running:
        own_server.start()


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.database()


@pytest.fixture
def two(url: str, runner: asyncio.Runner) -> Iterator[Sequence[SqlLedger]]:
    """Two replicas' ledgers on one database, with the job `a`."""
    ledgers = [SqlLedger(url) for _ in range(2)]
    for ledger in ledgers:
        runner.run(ledger.open(exclusive=False))
    runner.run(ledgers[0].create(layout("a"), 1))
    yield ledgers
    for ledger in ledgers:
        runner.run(ledger.close())


@pytest.fixture
def ledger(two: Sequence[SqlLedger]) -> SqlLedger:
    return two[0]


@pytest.mark.parametrize("job", ["a", "z"])
@pytest.mark.parametrize("analysed", ["never", "before", "after"])
def test_history_costs_by_what_is_asked_for_whatever_postgres_knows_of_the_table(
    ledger: SqlLedger, url: str, runner: asyncio.Runner, analysed: str, job: str
) -> None:
    """A few of 60,000 rows, of three stages and two generations, are touched for each interval."""
    add = SQL(
        "INSERT INTO watermark_history (job, stage, generation, version, input, output, idle, at_ms)"
        " SELECT {job}, (array['r', 's', 't'])[1 + n % 3], 1 + (n > 30000)::int, n % 30000 + 1, 0, n,"
        " false, n FROM generate_series(0, 59999) AS rows(n)"
    )
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as db:
        if analysed == "before":
            # So it takes the job, before or after all that it knows, for one without rows.
            db.execute(add.format(job="m"))
            db.execute("ANALYZE watermark_history")
        db.execute(add.format(job=job))
        if analysed == "after":
            db.execute("ANALYZE watermark_history")

    async def rows_read(db: AsyncConnection) -> int:
        counts = await db.execute(
            text(
                "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)"
                " FROM pg_stat_xact_user_tables WHERE relname = 'watermark_history'"
            )
        )
        return int(counts.scalar_one())

    async def work(db: AsyncConnection, statement: Executable, **asked: int) -> int:
        of = {"b_job": job, "b_stage": "s", "b_generation": 2, "b_newest": MAX}
        before = await rows_read(db)
        await db.execute(statement, of | asked)
        return await rows_read(db) - before

    def touched(statement: Executable, **asked: int) -> int:
        return runner.run(ledger.database.read(lambda db: work(db, statement, **asked)))

    for from_ms, span_ms in ((0, 59_999), (40_000, 100), (0, 10), (59_000, 10**6)):
        asked = {"b_from_ms": from_ms, "b_span_ms": span_ms, "b_intervals": 200}
        assert touched(sql.FIND_HISTORY, **asked) <= 201 * 6
    assert touched(sql.FIND_LAST_HISTORY, b_limit=100) <= 2 * 100
    assert touched(sql.FIND_NEXT_HISTORY, b_at_ms=5, b_limit=10) <= 2 * 10


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_TRANSACTION_TIMEOUT_S", PATIENCE_S)


def layout(job: str) -> NewLayout:
    return NewLayout(job, SPEC, ("s", "k"))


def record(job: str, value: int, *, incarnation: int = 1) -> JobRecord:
    return JobRecord(
        job=job,
        incarnation=incarnation,
        generation=1,
        layout_version=1,
        seen=0,
        advances={"s": StageWatermark(MIN, value), "k": StageWatermark(value, value)},
        epochs={"k": value},
        chunks=(CheckpointChunk(job, "k", incarnation, 1, 1, 0, value, {"promises": bytes(16)}),),
    )


def advance(job: str, value: int, *, seen: int = 0) -> JobRecord:
    """No more than an advance: one statement takes it, if nobody has moved the job since."""
    return replace(record(job, value), seen=seen, epochs={}, chunks=())


def either(head: JobHead, value: int) -> JobRecord:
    """One way or the other, of what the job is now."""
    current = {"incarnation": head.incarnation, "layout_version": head.layout_version}
    if value % 4 < 2:
        return replace(advance(head.job, value, seen=head.revision), **current)
    return replace(record(head.job, value), **current)


both_ways = pytest.mark.parametrize("say", [record, advance])
Say = Callable[[str, int], JobRecord]


def name(url: str) -> str:
    return url.rsplit("/", 1)[1]


def unavailable(runner: asyncio.Runner, ask: Callable[[], Awaitable[object]]) -> UnavailableError:
    """See the call fail by itself, while whatever fails it lasts."""

    async def asked() -> object:
        async with asyncio.timeout(WAIT_S):
            return await ask()

    with pytest.raises(UnavailableError, match="does not answer") as refused:
        runner.run(asked())
    return refused.value


# ---- several replicas


def test_replicas_never_block_each_other_for_good_and_never_go_back(
    two: Sequence[SqlLedger], runner: asyncio.Runner, server: PostgresServer, url: str
) -> None:
    shown: list[list[tuple[int, int]]] = []
    begun: list[int] = []

    async def record_all(ledger: SqlLedger, order: Sequence[str], first: int) -> None:
        for value in range(first, 60, 2):
            heads = {head.job: head for head in await ledger.heads()}
            records = [either(heads[job], value) for job in order]
            await ledger.record(records, value)
            await ledger.checkpoint([chunk for r in records for chunk in r.chunks], 5)

    async def upheave(ledger: SqlLedger, order: Sequence[str]) -> None:
        for _ in range(10):
            for job in order:
                head = await ledger.head(job)
                new = NewLayout(job, SPEC, ("k",), {"k": joined_columns(2, ())})
                await ledger.replace(new, head.generation, head.layout_version, 1)
                stored = await ledger.begin_incarnations({job: head.incarnation}, 1)
                begun.extend(each.installed.incarnation for each in stored.values())
                await ledger.open_run(job, NewRun(["s", "k"], "driver-1"), 1)

    async def watch(ledger: SqlLedger, done: asyncio.Event) -> None:
        seen: list[tuple[int, int]] = []
        shown.append(seen)
        while not done.is_set():
            installed = (await ledger.get("a")).installed
            views = {name: stage.view for name, stage in installed.stages.items()}
            assert views["k"].watermark.input <= views["s"].watermark.output
            assert max(view.revision for view in views.values()) <= installed.revision
            seen.append((installed.revision, views["s"].watermark.output))

    async def together() -> None:
        one, other = two
        created = await asyncio.gather(
            *(ledger.create(layout(job), 1) for ledger in two for job in JOBS[1:] * 3)
        )
        assert sum(stored is not None for stored in created) == len(JOBS) - 1
        done = asyncio.Event()
        watchers = [asyncio.create_task(watch(ledger, done)) for ledger in two]
        await asyncio.gather(
            record_all(one, JOBS, 0),
            record_all(other, JOBS[::-1], 1),
            upheave(one, JOBS[::-1]),
            upheave(other, JOBS),
        )
        done.set()
        await asyncio.gather(*watchers)

    runner.run(together())
    for seen in shown:
        assert seen == sorted(seen)
        assert seen[-1][1] > 0
    assert len(begun) == len(set(begun)) >= 10
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert server.execute(deadlocks, name(url)) == [(0,)]


def test_of_many_that_begin_an_incarnation_one_does(
    two: Sequence[SqlLedger], runner: asyncio.Runner
) -> None:
    async def together() -> list[int]:
        asked = [ledger.begin_incarnations({"a": 1}, 2) for ledger in two for _ in range(4)]
        answers = await asyncio.gather(*asked)
        return [each["a"].installed.incarnation for each in answers if each]

    [begun] = runner.run(together())
    assert runner.run(two[0].head("a")).incarnation == begun


@both_ways
def test_a_record_waits_for_whoever_has_the_job_and_then_looks_again(
    two: Sequence[SqlLedger], runner: asyncio.Runner, server: PostgresServer, url: str, say: Say
) -> None:
    with psycopg.connect(url.replace("+psycopg", "")) as holder:
        holder.execute("UPDATE jobs SET incarnation = 99 WHERE name = 'a'")

        async def readers() -> None:
            assert (await two[1].get("a")).installed.incarnation == 1
            assert len(await two[0].heads()) == 1

        task = runner.run(_blocked(lambda: two[0].record([say("a", 5)], 1), server))
        # A mere read waits for nothing.
        runner.run(readers())
        holder.commit()
    assert runner.run(_awaited(task)) == {}


def test_an_advance_that_waited_tells_of_what_it_waited_for(
    two: Sequence[SqlLedger], runner: asyncio.Runner, server: PostgresServer, url: str
) -> None:
    """The statement that takes an advance at once has looked at the stages before it waited."""
    with psycopg.connect(url.replace("+psycopg", "")) as holder:
        holder.execute("UPDATE jobs SET revision = 7 WHERE name = 'a'")
        holder.execute("UPDATE stages SET output = 9, idle = true, revision = 7 WHERE stage = 's'")
        late = replace(advance("a", 5), advances={"s": StageWatermark(MIN, 5)})
        task = runner.run(_blocked(lambda: two[0].record([late], 1), server))
        holder.commit()
    taken = runner.run(_awaited(task))["a"]
    assert taken.revision == 8
    assert taken.views["s"].watermark == StageWatermark(MIN, 9, idle=False)


def test_of_many_jobs_those_that_stand_still_are_taken_at_once(
    two: Sequence[SqlLedger], runner: asyncio.Runner, server: PostgresServer, url: str
) -> None:
    ledger = two[0]
    for job in JOBS[1:]:
        runner.run(ledger.create(layout(job), 1))
    records = [
        replace(advance(job, value), incarnation=runner.run(ledger.head(job)).incarnation)
        for job, value in zip("dcba", (8, 7, 6, 5), strict=True)
    ]
    _, c, b, _ = records
    runner.run(two[1].record([record("b", 3, incarnation=b.incarnation)], 1))
    runner.run(two[1].begin_incarnations({"c": c.incarnation}, 1))
    taken = runner.run(ledger.record(records, 2))
    assert {job: recorded.revision for job, recorded in taken.items()} == {"a": 1, "b": 2, "d": 1}
    for job, value in (("a", 5), ("b", 6), ("d", 8)):
        recorded = taken[job]
        assert recorded.views["s"].watermark == StageWatermark(MIN, value)
        assert recorded.views["k"].watermark == StageWatermark(value, value)
        stored = runner.run(ledger.get(job)).installed
        assert {name: stage.view for name, stage in stored.stages.items()} == recorded.views
    advances = "SELECT job, stage, version, output, at_ms FROM watermark_history WHERE at_ms = 2"
    assert sorted(server.execute(advances, name(url))) == [
        ("a", "k", 1, 5, 2),
        ("a", "s", 1, 5, 2),
        ("b", "k", 2, 6, 2),
        ("b", "s", 2, 6, 2),
        ("d", "k", 1, 8, 2),
        ("d", "s", 1, 8, 2),
    ]


def test_an_advance_whose_answer_is_lost_is_not_taken_twice(
    runner: asyncio.Runner, server: PostgresServer, url: str
) -> None:
    with Proxy(server.port) as proxy:
        ledger = SqlLedger(url.replace(f":{server.port}/", f":{proxy.port}/"))
        runner.run(ledger.open(exclusive=False))
        created = runner.run(ledger.create(layout("a"), 1))
        assert created is not None
        proxy.cut_answers(1)
        taken = runner.run(ledger.record([advance("a", 5)], 2))["a"]
        assert proxy.answers_cut == 1
        assert taken.revision == 2
        assert {view.version for view in taken.views.values()} == {1}
        strict = replace(advance("a", 6, seen=2), unless_newer=True)
        proxy.cut_answers(1)
        # It was taken, and then what is newer is one's own: whoever looks afresh finds that out.
        assert runner.run(ledger.record([strict], 3)) == {}
        assert runner.run(ledger.head("a")).revision == 3
        runner.run(ledger.close())


def test_a_checkpoint_waits_for_the_incarnation_that_is_about_to_begin(
    ledger: SqlLedger, runner: asyncio.Runner, server: PostgresServer, url: str
) -> None:
    with psycopg.connect(url.replace("+psycopg", "")) as holder:
        holder.execute("UPDATE jobs SET incarnation = 99 WHERE name = 'a'")
        task = runner.run(_blocked(lambda: ledger.checkpoint(record("a", 1).chunks, 5), server))
        holder.commit()
    runner.run(_awaited(task))
    assert server.execute("SELECT count(*) FROM promise_chunks", name(url)) == [(0,)]


async def _blocked(ask: Callable[[], Awaitable[T]], server: PostgresServer) -> asyncio.Task[T]:
    """Ask, and come back once the answer waits for a lock."""
    task = asyncio.ensure_future(_awaited(ask()))
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    while server.execute(waits) != [(1,)]:  # noqa: ASYNC110 - nobody here could set an event
        await asyncio.sleep(0)
    return task


async def _awaited(task: Awaitable[T]) -> T:
    return await task


@both_ways
def test_who_holds_a_job_for_too_long_is_not_waited_for(
    ledger: SqlLedger, runner: asyncio.Runner, url: str, say: Say
) -> None:
    with psycopg.connect(url.replace("+psycopg", "")) as holder:
        holder.execute("SELECT FROM jobs WHERE name = 'a' FOR UPDATE")
        error = unavailable(runner, lambda: ledger.record([say("a", 5)], 1))
        assert "lock timeout" in error.detail
        assert "UPDATE" not in error.detail
    assert set(runner.run(ledger.record([record("a", 5)], 1))) == {"a"}


def test_whoever_loses_its_lock_on_the_database_goes_on_until_it_is_fenced(
    url: str, runner: asyncio.Runner, server: PostgresServer
) -> None:
    one, other = SqlLedger(url), SqlLedger(url)
    runner.run(one.open(exclusive=True))
    runner.run(one.create(layout("a"), 1))
    owner = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
    assert server.execute(owner, name(url)) == [(True,)]
    assert set(runner.run(one.record([record("a", 5)], 1))) == {"a"}
    runner.run(other.open(exclusive=True))
    assert "a" in runner.run(other.begin_incarnations({"a": 1}, 2))
    assert runner.run(one.record([record("a", 6)], 1)) == {}
    runner.run(other.close())
    runner.run(one.open(exclusive=True))
    runner.run(one.close())


# ---- failures of Postgres


@both_ways
def test_a_restart_of_postgres_costs_no_transaction(
    ledger: SqlLedger, runner: asyncio.Runner, server: PostgresServer, url: str, say: Say
) -> None:
    async def many(value: int) -> None:
        await asyncio.gather(*(ledger.record([say("a", value)], 1) for _ in range(10)))

    runner.run(many(1))
    server.restart()
    runner.run(many(2))
    server.kill()
    server.start()
    assert runner.run(ledger.get("a")).installed.stages["s"].view.watermark.output == 2
    server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE datname = '{name(url)}' AND pid != pg_backend_pid()"
    )
    runner.run(many(3))


def test_while_postgres_is_down_everything_says_so_and_recovers(
    ledger: SqlLedger, runner: asyncio.Runner, server: PostgresServer
) -> None:
    server.stop()
    for ask in (
        lambda: ledger.record([record("a", 5)], 1),
        lambda: ledger.create(layout("b"), 1),
        lambda: ledger.begin_incarnations({"a": 1}, 1),
        lambda: ledger.get("a"),
        ledger.heads,
        ledger.ping,
    ):
        unavailable(runner, ask)
    server.start()
    assert set(runner.run(ledger.record([record("a", 5)], 1))) == {"a"}


@both_ways
@pytest.mark.usefixtures("impatient")
def test_a_postgres_that_stands_still_is_not_waited_for(
    ledger: SqlLedger, runner: asyncio.Runner, server: PostgresServer, say: Say
) -> None:
    async def many(value: int) -> list[object]:
        asked = (ledger.record([say("a", value)], 1) for _ in range(5))
        async with asyncio.timeout(WAIT_S):
            return list(await asyncio.gather(*asked, return_exceptions=True))

    assert not any(isinstance(got, Exception) for got in runner.run(many(1)))
    server.pause()
    assert {type(got) for got in runner.run(many(2))} == {UnavailableError}
    # There is no connection left now: the next one has to be made, which is bounded by itself.
    unavailable(runner, lambda: ledger.get("a"))
    server.resume()
    assert not any(isinstance(got, Exception) for got in runner.run(many(3)))
    assert runner.run(ledger.get("a")).installed.stages["s"].view.watermark.output == 3


@pytest.mark.usefixtures("impatient")
def test_a_postgres_that_stands_still_in_mid_greeting_is_not_waited_for(
    url: str, runner: asyncio.Runner, server: PostgresServer
) -> None:
    ledger = SqlLedger(url)
    engine = ledger.database._engine.sync_engine

    def pause(*_: object) -> None:
        server.pause()

    # Ahead of what SQLAlchemy asks of a first connection.
    event.listen(engine, "connect", pause, insert=True)
    unavailable(runner, ledger.ping)
    event.remove(engine, "connect", pause)
    server.resume()
    runner.run(ledger.open(exclusive=False))
    runner.run(_awaited(ledger.ping()))
    runner.run(ledger.close())


@pytest.mark.usefixtures("impatient")
def test_whoever_gives_up_does_not_end_the_transaction(
    ledger: SqlLedger, runner: asyncio.Runner, server: PostgresServer
) -> None:
    """Nor does the transaction outlast its time."""
    runner.run(ledger.ping())
    server.pause()

    async def give_up() -> None:
        async with asyncio.timeout(0.1):
            await ledger.record([record("a", 5)], 1)

    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        runner.run(give_up())
    assert time.monotonic() - begun > PATIENCE_S / 2
    server.resume()
    assert set(runner.run(ledger.record([record("a", 6)], 1))) == {"a"}


def test_too_many_connections_are_an_answer(
    ledger: SqlLedger, runner: asyncio.Runner, server: PostgresServer, url: str
) -> None:
    runner.run(ledger.close())
    held: list[psycopg.Connection] = []
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            held.append(psycopg.connect(url.replace("+psycopg", "")))
    error = unavailable(runner, lambda: ledger.get("a"))
    assert "too many clients" in error.detail or "reserved" in error.detail
    for connection in held:
        connection.close()
    assert server.running
    assert runner.run(ledger.get("a")).installed.name == "a"


def test_a_queue_that_is_too_long_is_an_answer(
    ledger: SqlLedger, runner: asyncio.Runner, url: str
) -> None:
    async def many() -> list[object]:
        asked = (ledger.record([record("a", 5)], 1) for _ in range(12))
        async with asyncio.timeout(WAIT_S):
            return list(await asyncio.gather(*asked, return_exceptions=True))

    with psycopg.connect(url.replace("+psycopg", "")) as holder:
        holder.execute("SELECT FROM jobs WHERE name = 'a' FOR UPDATE")
        got = runner.run(many())
    assert {type(error) for error in got} == {UnavailableError}
    assert set(runner.run(ledger.record([record("a", 5)], 1))) == {"a"}


def test_a_commit_of_unknown_outcome_is_not_repeated_but_may_be(
    ledger: SqlLedger, runner: asyncio.Runner, server: PostgresServer, url: str
) -> None:
    for statement in (
        "CREATE SEQUENCE attempts",
        """CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN PERFORM nextval('attempts'), pg_terminate_backend(pg_backend_pid());
                 RETURN NULL; END $$""",
        """CREATE CONSTRAINT TRIGGER lose AFTER UPDATE ON jobs
           DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION lose()""",
    ):
        server.execute(statement, name(url))
    unavailable(runner, lambda: ledger.record([record("a", 5)], 1))
    assert server.execute("SELECT last_value FROM attempts", name(url)) == [(1,)]
    server.execute("DROP TRIGGER lose ON jobs", name(url))
    for _ in range(2):
        taken = runner.run(ledger.record([record("a", 5)], 1))["a"]
        assert taken.views["s"].watermark.output == 5
        assert taken.views["s"].version == 1
