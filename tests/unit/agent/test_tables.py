"""Every table at three widths and in a pipe, as files in `snapshots`, and the rules of their columns."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from spark_agent.cli.stage_tables import print_ranges
from spark_agent.cli.tables import Column, left_out, table_lines
from tests.unit.agent.answers import Answer, Answers, Routes
from tests.unit.agent.shown_job import BODIES, LAST, NEW_YEAR, SOURCE, stage
from tests.unit.agent.test_inspection import ROOT, app_of, at, run

SNAPSHOTS = Path(__file__).parent / "snapshots"
WRITE = os.environ.get("TIDEGAUGE_TEST_SNAPSHOTS") == "write"
WIDTHS = (80, 100, 120)
TABLES: dict[str, tuple[str, ...]] = {
    "jobs": ("jobs",),
    "show": ("show",),
    "show-job": ("show", "scores"),
    "show-stage": ("show", "scores", SOURCE),
    "watch": ("watch", "scores", "--count", "1"),
    "ranges": ("ranges", "scores", SOURCE),
    "history": ("history", "scores", SOURCE),
    "eta": ("eta", "scores", LAST, "2026-01-01T00:00:00Z"),
    "throttle": ("throttle", "scores"),
    "runs": ("runs", "scores"),
    "keys-list": ("keys", "list"),
    "audit": ("audit",),
    "status": ("status",),
    "status-job": ("status", "scores"),
    "explain": ("explain", "scores", LAST),
}
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
CLEAR_LINE = "\x1b[2K"


class Terminal(io.StringIO):
    """A terminal as programs see it. Its width is in `COLUMNS`."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Routes(BODIES) as server:
        yield server.url


def in_a_terminal(
    arguments: tuple[str, ...],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    *,
    height: int = 30,
) -> str:
    terminal = Terminal()
    with monkeypatch.context() as patched:
        for name, value in {"COLUMNS": width, "LINES": height, "TERM": "xterm"}.items():
            patched.setenv(name, str(value))
        patched.setattr(sys, "stdout", terminal)
        name, *rest = arguments
        app, before = app_of(name)
        typer.main.get_command(app)([*before, *rest, "--url", url], standalone_mode=False)
    # A screen that was overwritten ends with the command that clears its lines.
    return CONTROLS.sub("", terminal.getvalue().rpartition(CLEAR_LINE)[2])


def compare(name: str, shown: str) -> None:
    """Compare a text to its file. Ends of lines have blanks where a terminal is overwritten."""
    text = "".join(f"{line.rstrip()}\n" for line in shown.rstrip().splitlines())
    file = SNAPSHOTS / f"{name}.txt"
    if WRITE:
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_in_a_terminal(
    name: str, width: int, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = in_a_terminal(TABLES[name], width, monkeypatch, url)
    compare(f"{name}-{width}", shown)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width


@pytest.mark.parametrize("name", TABLES)
def test_a_table_in_a_pipe_is_whole(name: str, url: str) -> None:
    command, *rest = TABLES[name]
    shown = run(command, *rest, "--url", url).stdout
    compare(f"{name}-pipe", shown)
    assert "…" not in shown


def test_each_file_is_of_a_table() -> None:
    sizes = (*map(str, WIDTHS), "pipe")
    expected = {f"{name}-{size}.txt" for name in TABLES for size in sizes}
    assert {each.name for each in SNAPSHOTS.iterdir()} == expected


@pytest.mark.parametrize("name", ["show-job", "watch"])
def test_80_columns_show_the_time_of_day_and_the_status(
    name: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = in_a_terminal(TABLES[name], 80, monkeypatch, url)
    assert re.search(r"^session\S+ +waiting .*2025-12-31T23:59:00Z", shown, re.MULTILINE)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["show-job", "watch"])
def test_late_rows_are_seen_in_each_terminal(
    name: str, width: int, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 100 columns, three other columns took their room."""
    shown = in_a_terminal(TABLES[name], width, monkeypatch, url)
    assert re.search(r"^session\S+ +waiting .* 17$", shown, re.MULTILINE)


def test_a_passthrough_stage_is_shown_without_ranges() -> None:
    none = dict.fromkeys(("total", "reported", "idle", "final", "leased"), 0)
    passed = stage("both", NEW_YEAR, ranges=none)
    throttle = {"version": 1, "groups": [], "shards": {}}
    bodies = {
        **BODIES,
        "/v1/jobs/scores/watermarks": {
            "job": "scores",
            "generation": 3,
            "watermarks": {"both": passed},
        },
        "/v1/jobs/scores/throttle": throttle,
        "/v1/jobs/scores/stages/both/watermark": passed,
        "/v1/jobs/scores/stages/both/ranges": {
            "job": "scores",
            "stage": "both",
            "total": 0,
            "ranges": [],
        },
    }
    with Routes(bodies) as server:
        shown = run("show", "scores", "--url", server.url).stdout
        listed = run("ranges", "scores", "both", "--url", server.url).stdout
    assert re.search(r"^both +active .* none of its own", shown, re.MULTILINE)
    assert listed == "ranges of both: none of its own\n"


def test_the_width_is_that_of_a_real_terminal(url: str) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    code = "import typer; from spark_agent.cli.watermarks import show; typer.run(show)"
    kept = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
    done = subprocess.run(
        [sys.executable, "-c", code, "scores", "--url", url],
        env={**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        timeout=120,
        check=False,
    )
    os.close(slave)
    shown = CONTROLS.sub("", os.read(master, 65_536).decode())
    os.close(master)
    assert done.returncode == 0, shown
    compare("show-job-80", shown)


def test_the_reason_of_a_throttle_is_wrapped_and_not_cut(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column for it had room for a few words."""
    shown = " ".join(in_a_terminal(TABLES["throttle"], 80, monkeypatch, url).split())
    assert shown.endswith("which is the slowest stage of its group")


def test_watch_fits_the_height_of_a_terminal(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sentences are wrapped, and leave room for fewer stages."""
    lines = in_a_terminal(TABLES["watch"], 80, monkeypatch, url, height=9).splitlines()
    assert len(lines) <= 9
    assert "and 2 more stages" in [line.rstrip() for line in lines]
    assert lines[-1].startswith(f"wait for {SOURCE}")


def test_wait_shows_its_progress_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"COLUMNS": "80", "LINES": "30", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    cause = Answer(body={"because": "average waits for mobile [0]"})
    unknown = Answer(body={"at": 50, "reached": False, "expected_at": None, "between": None})
    with Answers(at(7), unknown, cause, at(50)) as server:
        arguments = ["scores", "average", "--until", "50", "--url", server.url]
        app, _ = app_of("wait")
        typer.main.get_command(app)(arguments, standalone_mode=False)
    shown = " ".join(CONTROLS.sub("", terminal.getvalue()).split())
    assert "average is at 1970-01-01T00:00:00.007Z of 1970-01-01T00:00:00.050Z" in shown
    assert "no estimate of the time left; timeout in " in shown
    assert "average waits for mobile [0]" in shown


# ---- the rules

COLUMNS = (
    Column("stage", kind="name", least=8),
    Column("output"),
    Column("since", 1),
    Column("because", 2, kind="text", least=10),
)
ROW = (
    "mobile-events-0007",
    "2026-01-01T00:00:00.123Z",
    "2026-01-01T00:00:00.456Z",
    "it is behind",
)


def row_at(width: int | None) -> list[str]:
    [_, row] = table_lines(COLUMNS, [ROW], width)
    return re.split(r"\s{2,}", row.plain)


def test_a_table_that_fits_is_whole() -> None:
    whole = sum(map(len, ROW)) + 2 * 3
    assert row_at(None) == row_at(whole) == list(ROW)
    assert row_at(whole - 1) == ["mobile-e…nts-0007", *ROW[1:]]


def test_names_are_shortened_before_values() -> None:
    # The least widths are 8, 24, 24 and 10, and the gaps 2.
    assert row_at(72) == ["mobi…007", *ROW[1:3], "it is beh…"]
    assert row_at(71)[1:3] == ["2026-01-01T00:00:00Z"] * 2
    assert row_at(71)[0].endswith("-0007"), "the milliseconds make room for names"


def test_columns_are_left_out_by_their_rank() -> None:
    # Without milliseconds: 8, 20, 20 and 10, and the gaps 2.
    assert len(row_at(64)) == 4
    assert row_at(63)[1:] == ["2026-01-01T00:00:00Z"] * 2
    assert row_at(44)[1:] == ["2026-01-01T00:00:00Z", "it is beh…"], "narrower than the other"
    assert row_at(41)[1:] == ["2026-01-01T00:00:00Z"]
    assert row_at(10) == ["mobi…007", "2026-01-01T00:00:00Z"], "values are not cut"


def test_empty_columns_are_left_out_before_names_are_shortened() -> None:
    row = (*ROW[:2], "", ROW[3])
    whole = sum(map(len, row)) + 2 * 2
    assert [column.heading for column in COLUMNS if column.heading in heading_at(None, row)] == [
        "stage", "output", "since", "because",
    ]  # fmt: skip
    assert "since" not in heading_at(whole, row)
    [_, line] = table_lines(COLUMNS, [row], whole)
    assert line.plain.split("  ") == [each for each in row if each]


SAID = "the executors have run out of memory"
RUNS = (
    Column("run"),
    Column("holder", 2, kind="sentence"),
    Column("reason", 1, kind="sentence", least=20),
)


def test_a_sentence_is_wrapped_in_the_last_column_or_follows_below() -> None:
    """It was cut at its end."""
    rows = [("7", "driver-7f6bd9c4", SAID), ("8", "driver-8", "")]
    assert lines_of(RUNS, rows, 46) == [
        "run  holder           reason",
        "7    driver-7f6bd9c4  the executors have run",
        "                      out of memory",
        "8    driver-8",
    ]
    assert lines_of(RUNS, rows, 40) == [
        "run  reason",
        "7    the executors have run out of",
        "     memory",
        "    holder: driver-7f6bd9c4",
        "8",
        "    holder: driver-8",
    ]
    assert lines_of(RUNS, rows, 20)[:2] == ["run", "7"]
    assert left_out(RUNS, rows, 20) == []
    assert SAID in " ".join(" ".join(lines_of(RUNS, rows, 20)).split())


def lines_of(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    return [line.plain for line in table_lines(columns, rows, width)]


def test_a_column_with_its_usual_value_in_each_row_is_left_out_first() -> None:
    columns = (Column("stage"), Column("from", usual="127.0.0.1"), Column("at", 1))
    usual, other = ("taps", "127.0.0.1", "noon"), ("taps", "10.0.0.1", "noon")
    assert lines_of(columns, [usual], 40)[0].split() == ["stage", "from", "at"]
    assert lines_of(columns, [usual, usual], 15)[0].split() == ["stage", "at"]
    assert left_out(columns, [usual], 15) == []
    assert lines_of(columns, [usual, other], 17)[0].split() == ["stage", "from"]


def test_a_column_that_needs_another_is_not_shown_alone() -> None:
    columns = (Column("range"), Column("ends in", 2, needs="holder"), Column("holder", 1))
    rows = [("r-1", "9 s", "executor-12")]
    assert lines_of(columns, rows, 18)[0].split() == ["range", "holder"]
    assert lines_of(columns, rows, 15)[0].split() == ["range"]


def heading_at(width: int | None, row: Sequence[str]) -> str:
    [heading, _] = table_lines(COLUMNS, [row], width)
    return heading.plain


def test_a_key_range_is_named_whole_beside_its_hold() -> None:
    """At 100 columns it was `0000000…000000`, which names none."""
    terminal = Terminal()
    held = KEY_RANGE | {"holds": {"state": 1_795_980_000_000}, "promise": 1_795_980_000_000}
    shown = shown_ranges([KEY_RANGE, held], terminal)
    assert shown.count("e0000000-100000000") == 2
    assert "state 2026-11-29T19:20:00Z" in shown


def test_a_range_with_a_promise_has_reported() -> None:
    """After a restart the instant of its report is lost. It was shown as `never`."""
    assert shown_ranges([KEY_RANGE | {"reported_at": None}]).split()[-1] == "unknown"
    unknown = KEY_RANGE | {"reported_at": None, "promise": None, "status": "unknown"}
    assert shown_ranges([unknown]).split()[-1] == "never"


KEY_RANGE: Any = {
    "range": "e0000000-100000000",
    "status": "active",
    "promise": 1_795_980_123_456,
    "holds": {},
    "holder": "executor-sessions",
    "fence": 7,
    "expires_in_ms": 599_000,
    "reported_at": "2026-11-29T19:55:52.983Z",
}


def shown_ranges(ranges: Sequence[Any], terminal: io.StringIO | None = None) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "100")
        patched.setattr(sys, "stdout", terminal or io.StringIO())
        print_ranges(ranges, "ok", frozenset(), wide=terminal is None)
        return sys.stdout.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_names_do_not_control_a_terminal() -> None:
    [_, line] = table_lines([Column("name")], [["\x1b[2J[red]x"]], 80)
    assert line.plain == "\ufffd[2J[red]x"
