"""Whether everything before a moment has arrived: for schedulers that ask again and again."""

from __future__ import annotations

from datetime import UTC, datetime

from spark_agent.client import Client
from spark_agent.errors import Unavailable
from spark_agent.times import instant_text, read_instant_ms


class Arrival:
    """Answers whether a stage's output watermark has reached a moment, and why not.

    `until` is a `datetime` (UTC, unless it says otherwise), text such as `2026-01-01T00:00Z`, or ms.
    """

    def __init__(self, client: Client, job: str, stage: str, until: datetime | str | int) -> None:
        self._client = client
        self._job = job
        self._stage = stage
        self.until_ms = _moment_ms(until)
        self.because = ""
        """Why it had not, when it was asked last."""

    def is_complete(self) -> bool:
        """Ask now. A service that does not answer is no error: it may be on its way up again.

        Raises `Refused` if the job or the stage is unknown, or the key may not read it.
        """
        try:
            seen = self._client.show(self._job, self._stage)
            output = seen["output_watermark"]
            if output is not None and output >= self.until_ms:
                self.because = ""
                return True
            self.because = (
                f"{self._stage} is at {instant_text(output)} and not at {instant_text(self.until_ms)}:"
                f" {self._client.explain(self._job, self._stage, limit=1)['because']}"
            )
        except Unavailable as error:
            self.because = str(error)
        return False


def _moment_ms(moment: datetime | str | int) -> int:
    """Read a moment.

    >>> _moment_ms(datetime(1970, 1, 2)), _moment_ms("1970-01-02"), _moment_ms(5)
    (86400000, 86400000, 5)
    """
    if isinstance(moment, datetime):
        moment = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()
    return moment if isinstance(moment, int) else read_instant_ms(moment, name="until")
