"""Flink in one process, which runs one chain of stages after the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import httpx

from spark_agent.maven_jars import Bundle, JarsUnavailableError
from tests.support.binaries import free_port

FIRST: Final = 1_767_225_600_000
"""Event time of the first tick, as in `Chain.java`."""
DEFAULT_FETCH_MS: Final = 10_000
"""Flink's own interval between two collections of its metrics (`metrics.fetcher.update-interval`)."""
_HERE: Final = Path(__file__).parent
_SOURCE: Final = _HERE / "Chain.java"
_BUNDLE: Final = Bundle(
    name="flink",
    contents="the jars of Flink",
    pom=_HERE / "pom.xml",
    digests=_HERE / "jars.sha256",
    parts=("flink",),
)
_OPENED: Final = ("java.base/java.lang=ALL-UNNAMED", "java.base/java.util=ALL-UNNAMED")
_DONE: Final = "done"
_POLL_S: Final = 0.005
_TIMEOUT_S: Final = 10

Json = dict[str, Any]
Moments = list[tuple[int, int]]
"""For each tick, the emission of its event and its visibility, in ns of the monotonic clock."""


class FlinkUnavailableError(Exception):
    """Flink cannot be run here, with the reason and what would help."""


def moments(line: str) -> Moments:
    """Parse the answer of `Chain.java`, such as `done 5:9 7:12`."""
    word, *pairs = line.split()
    if word != _DONE:
        raise ValueError(f"no answer of a chain: {line[:200]!r}")
    return [(int(emitted), int(seen)) for emitted, _, seen in (p.partition(":") for p in pairs)]


def lowest(watermarks: list[dict[str, str]], tasks: int) -> int | None:
    """Return the lowest watermark that Flink's REST API lists, as the first time that may still come.

    `None` until each task has one. Flink's watermark t promises times above t.
    """
    values = [int(each["value"]) for each in watermarks]
    return min(values) + 1 if len(values) == tasks else None


def first_shown(emitted: list[int], readings: list[tuple[int, int]]) -> Moments:
    """Return the moment of the first reading that shows each tick.

    Readings are moments and watermarks, both of which rise. Ticks above the last one are left out.
    """
    found: Moments = []
    for now, watermark in readings:
        count = max(0, min(watermark - FIRST + 1, len(emitted)))
        found += [(start, now) for start in emitted[len(found) : count]]
    return found


@dataclass(frozen=True)
class Job:
    """A chain that Flink runs: an event of each source task at each tick."""

    settings: str
    stages: int
    ticks: int
    interval_ms: int
    fetch_ms: int = DEFAULT_FETCH_MS

    def line(self) -> str:
        return f"{self.settings} {self.stages} {self.ticks} {self.interval_ms} {self.fetch_ms}\n"


class Flink:
    """The process, and the REST API of the job that it runs."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self._process = process
        self._log = log
        self._url = f"http://127.0.0.1:{port}"

    def run(self, job: Job) -> Moments:
        """Run a chain to its end."""
        self._input.write(job.line())
        self._input.flush()
        return moments(self.answer())

    def run_read_outside(self, job: Job, tasks: int) -> Moments:
        """Run a chain to its end, with the moments at which the REST API has shown each tick.

        Ticks that the API has never shown are left out.
        """
        with ThreadPoolExecutor(1) as thread, httpx.Client(base_url=self._url) as client:
            running = thread.submit(self.run, job)
            shown = self._shown(client, running.done, tasks)
            emitted = [start for start, _ in running.result()]
        return first_shown(emitted, shown)

    def _shown(
        self, client: httpx.Client, is_done: Callable[[], bool], tasks: int
    ) -> list[tuple[int, int]]:
        """Return each watermark of the last stage that the API has shown, with the moment."""
        found: list[tuple[int, int]] = []
        path = ""
        while not is_done():
            try:
                path = path or _path(client)
                if path:
                    answer = client.get(path, timeout=_TIMEOUT_S).raise_for_status().json()
                    now, value = time.monotonic_ns(), lowest(answer, tasks)
                    if value is not None and (not found or value > found[-1][1]):
                        found.append((now, value))
            except httpx.HTTPError:
                path = ""
            time.sleep(_POLL_S)
        return found

    def answer(self) -> str:
        """Return the next line of the process."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Flink has ended: {self._log.read_text()[-4_000:]}")
        return line

    @property
    def _input(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin


def _path(client: httpx.Client) -> str:
    """Return the path of the watermarks of the running job's last stage, or nothing."""
    jobs = client.get("/jobs", timeout=_TIMEOUT_S).raise_for_status().json()["jobs"]
    for job in (each["id"] for each in jobs if each["status"] == "RUNNING"):
        plan = client.get(f"/jobs/{job}", timeout=_TIMEOUT_S).raise_for_status().json()
        for vertex in plan["vertices"]:
            if vertex["name"] == "last":
                return f"/jobs/{job}/vertices/{vertex['id']}/watermarks"
    return ""


@contextmanager
def flink(folder: Path, say: Callable[[str], None]) -> Generator[Flink]:
    """Run Flink in a process of its own. Raises `FlinkUnavailableError`."""
    javac, java = shutil.which("javac"), shutil.which("java")
    if javac is None or java is None:
        raise FlinkUnavailableError("javac or java is not on the PATH: install a JDK 17")
    try:
        jars = _BUNDLE.fetch(say, environment=os.environ) / "flink"
    except JarsUnavailableError as error:
        raise FlinkUnavailableError(str(error)) from None
    folder.mkdir()
    subprocess.run([javac, "-cp", f"{jars}/*", "-d", folder, _SOURCE], check=True)
    port, log = free_port(), folder / "flink.log"
    opened = [word for each in _OPENED for word in ("--add-opens", each)]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [java, *opened, "-cp", f"{folder}:{jars}/*", "Chain", str(port)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            running = Flink(process, port, log)
            running.answer()
            yield running
        finally:
            process.kill()
