"""A server of the tests: one process at a time, which can be stopped, killed and paused."""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from tests.support.binaries import end


class Started(ABC):
    """Started on entry, killed on exit."""

    @abstractmethod
    def start(self) -> None:
        """Start, and return once it serves."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it, as a machine failure would."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


class ServerProcess(Started):
    """One server, through any number of processes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def pid(self) -> int:
        assert self._process is not None, "not running"
        return self._process.pid

    def stop(self) -> None:
        """Stop in order, with everything written."""
        if self._process is not None:
            self.resume()
            self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, as a machine failure would."""
        if self._process is not None:
            self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None, "not running"
        process, self._process, self._paused = self._process, None, False
        end(process, how)

    def pause(self) -> None:
        """Pause: connections stay open, nothing is answered."""
        assert self._process is not None, "not running"
        self._process.send_signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Resume after `pause`."""
        if self._paused:
            assert self._process is not None, "not running"
            self._process.send_signal(signal.SIGCONT)
            self._paused = False
