"""Arrival of everything before an instant: a sensor for schedulers that poll."""

from __future__ import annotations

from spark_agent.client.client import Client
from spark_agent.client.watermark_wait import WaitOutcome
from spark_agent.exceptions import Unavailable, WrongAddress
from spark_agent.times import Instant, instant_text, read_instant_ms


class Arrival:
    """Check that a stage's output watermark has reached an instant, for schedulers that poll.

    `until` is a `datetime` (UTC, unless it has an offset), text such as `2026-01-01T00:00Z`, or ms. A
    bare number of nine to eleven digits may be seconds: it raises `WrongInstant`. Between checks the
    scheduler may end the process: an `Arrival` keeps no connection and no state that matters.

    ```python
    arrival = Arrival(Client("http://127.0.0.1:8000"), "parcels", "north", "2026-01-01T00:00Z")
    if arrival.is_complete():
        print("everything before has arrived")
    else:
        print(arrival.outcome, arrival.because)    # not in time north is at …
    ```
    """

    def __init__(self, client: Client, job: str, stage: str, until: Instant) -> None:
        self._client = client
        self._job = job
        self._stage = stage
        self.until_ms = read_instant_ms(until, name="until")
        self.because = ""
        """The reason why the watermark was not there at the last check."""
        self.outcome: WaitOutcome | None = None
        """The outcome of the last check, in the words of `tidegauge wait`; None before the first."""

    def is_complete(self) -> bool:
        """Check now.

        An unavailable service is not an error: the result is False, and a retry may succeed.

        Raises `Wrong` where a retry does not help: `UnknownJob`, `UnknownStage`, `NotAllowed`,
        `NoUsableKey`.
        """
        self.outcome = WaitOutcome.WRONG
        try:
            seen = self._client.show(self._job, self._stage)
            output = seen["output_watermark"]
            if output is not None and output >= self.until_ms:
                self.because, self.outcome = "", WaitOutcome.REACHED
                return True
            self.outcome = WaitOutcome.NOT_IN_TIME
            self.because = (
                f"{self._stage} is at {instant_text(output)} and not at {instant_text(self.until_ms)}:"
                f" {self._client.explain(self._job, self._stage, limit=1)['because']}"
            )
        except WrongAddress:
            raise
        except Unavailable as error:
            self.because = str(error)
            # Once the watermark was read, only its explanation is missing.
            if self.outcome is WaitOutcome.WRONG:
                self.outcome = WaitOutcome.UNAVAILABLE
        return False
