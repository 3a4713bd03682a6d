"""All requests and answers, in the order in which the answers arrived.

One process records all of it, so one monotonic clock tells what was certainly before what: a request
takes effect, if at all, after its `start_ns`; what an answer tells was true before its `end_ns`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Action = Literal[
    "define", "run", "claim", "renew", "release", "report", "commit",
    "watermark", "snapshot", "event", "spec", "reset", "delete",
]  # fmt: skip
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, and what its client knows of the outcome."""

    who: str
    replica: str
    action: Action
    job: str
    start_ns: int
    end_ns: int
    """When the answer was complete, or the client gave up."""
    stage: str | None = None
    request: Json = field(default_factory=dict[str, Any])
    status: int | None = None
    """None: unknown. It may have been executed, may be later, or never."""
    answer: Any = None
    content_type: str = ""
    retry_after: str | None = None
    etag: str = ""
    why: str = ""
    """Why the answer is unknown."""
    stream: int | None = None
    """Stream with which an event came. `start_ns` is when that was opened."""
    sent: bool = True
    """False: there was not even a connection to send it on."""
    number: int = -1

    @property
    def may_have_happened(self) -> bool:
        """A refusal changes nothing; a failure may have come after the request was executed."""
        return self.sent and (self.status is None or self.status < 300 or self.status >= 500)

    def __str__(self) -> str:
        asked = json.dumps(self.request, separators=(",", ":"))
        said = self.why if self.status is None else json.dumps(self.answer, separators=(",", ":"))
        where = self.job if self.stage is None else f"{self.job}/{self.stage}"
        return (
            f"#{self.number} [{self.start_ns / 1e9:.4f}-{self.end_ns / 1e9:.4f} s] {self.who} at"
            f" {self.replica}: {self.action} {where} {asked[:400]} -> {self.status} {said[:900]}"
        )


MarkKind = Literal["fault", "live-lost", "final"]


@dataclass(frozen=True, slots=True)
class Mark:
    """An event in the system: a fault, the loss of the live store, or the end of either."""

    kind: MarkKind
    name: str
    start_ns: int
    end_ns: int
    expected: Mapping[str, int] | None = None
    """Output of every stage after all workers' final reports, for `final`."""
    number: int = -1

    def __str__(self) -> str:
        span = f"{self.start_ns / 1e9:.4f}-{self.end_ns / 1e9:.4f} s"
        return f"#{self.number} [{span}] {self.kind} {self.name} {self.expected or ''}"


Record = Exchange | Mark


@dataclass(frozen=True, slots=True)
class Topology:
    """Facts about a job that the checker needs: its stages' ranges and inputs."""

    ranges: Mapping[str, tuple[str, ...]]
    inputs: Mapping[str, tuple[str, ...]]

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple({**self.ranges, **self.inputs})

    def upstreams(self, stage: str) -> tuple[str, ...]:
        return self.inputs.get(stage, ())


class History:
    """Append-only; safe to use from any thread."""

    def __init__(self, topology: Topology, records: Iterable[Record] = ()) -> None:
        self.topology = topology
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._shown: dict[str, int] = {}
        self.requests = 0
        self.reads = 0
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        with self._lock:
            self._records.append(replace(record, number=len(self._records)))
            if isinstance(record, Exchange):
                self.requests += record.action != "event"
                self._note_shown(record)

    def _note_shown(self, record: Exchange) -> None:
        for stage, state in states(record).items():
            self.reads += 1
            output = state["output_watermark"]
            if output is not None and output > self._shown.get(stage, output - 1):
                self._shown[stage] = output

    def shown(self, stage: str) -> int | None:
        """The largest output of the stage that anybody has been shown."""
        with self._lock:
            return self._shown.get(stage)

    def __iter__(self) -> Iterator[Record]:
        with self._lock:
            return iter(list(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def dump(self, path: Path) -> None:
        """Write it to a file: one line of JSON per record, the topology first."""
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self.topology)) + "\n")
            for record in self:
                file.write(json.dumps({"type": type(record).__name__} | asdict(record)) + "\n")

    @classmethod
    def load(cls, path: Path) -> History:
        with path.open(encoding="utf-8") as file:
            shape = json.loads(next(file))
            topology = Topology(
                {stage: tuple(names) for stage, names in shape["ranges"].items()},
                {stage: tuple(names) for stage, names in shape["inputs"].items()},
            )
            return cls(topology, (_record(json.loads(line)) for line in file))


def _record(line: dict[str, Any]) -> Record:
    return Mark(**line) if line.pop("type") == "Mark" else Exchange(**line)


def states(record: Exchange) -> dict[str, Any]:
    """The stages that an answer shows, each with its input, its output and its version."""
    if record.status is None or not 200 <= record.status < 300:
        return {}
    match record.action:
        case "watermark" | "event":
            return {record.answer["stage"]: record.answer}
        case "snapshot" | "commit":
            return dict(record.answer["watermarks"])
        case "report":
            return {str(record.stage): record.answer["watermark"]}
        case _:
            return {}
