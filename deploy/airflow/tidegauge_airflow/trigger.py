"""The trigger of a deferred sensor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from spark_agent import Arrival, Wrong
from spark_agent.exceptions import WrongAddress
from tidegauge_airflow.hook import TidegaugeHook


class WatermarkTrigger(BaseTrigger):
    """Poll until the watermark has arrived.

    The trigger keeps the name of the connection, and not its key, since Airflow's database has a row for
    each trigger. Between two polls a trigger holds neither a thread nor a connection.
    """

    def __init__(self, conn_id: str, job: str, stage: str, until_ms: int, poll_s: float) -> None:
        super().__init__()
        self.conn_id, self.job, self.stage = conn_id, job, stage
        self.until_ms, self.poll_s = until_ms, poll_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the name of the class and its arguments."""
        members = ("conn_id", "job", "stage", "until_ms", "poll_s")
        return "tidegauge_airflow.trigger.WatermarkTrigger", {
            name: getattr(self, name) for name in members
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event: `wrong` is empty, or the text of an error that a retry does not mend."""
        try:
            with await TidegaugeHook(self.conn_id).async_conn() as client:
                arrival = Arrival(client, self.job, self.stage, self.until_ms)
                while not await asyncio.to_thread(arrival.is_complete):
                    self.log.info("waiting: %s", arrival.because)
                    client.close()
                    await asyncio.sleep(self.poll_s)
        except (AirflowNotFoundException, Wrong, WrongAddress, ValueError) as error:
            yield TriggerEvent({"wrong": str(error)})
        else:
            yield TriggerEvent({"wrong": ""})
