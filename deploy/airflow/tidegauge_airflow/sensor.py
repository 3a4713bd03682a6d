"""The sensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException

from spark_agent import Arrival, Wrong
from spark_agent.exceptions import WrongAddress
from tidegauge_airflow.hook import TidegaugeHook
from tidegauge_airflow.trigger import WatermarkTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context


class WatermarkSensor(BaseSensorOperator):
    """Wait until the output watermark of a stage has reached a moment: everything before it is in.

    `until` is the end of the task's data interval by default; a `datetime`, text or milliseconds of an
    event time. The task holds a worker slot only while it polls: it is rescheduled between two polls,
    each `poke_interval`, or with `deferrable=True` handed to the triggerer. A service that does not
    answer is polled again. A connection, job, stage, moment or key that is wrong fails the task at once,
    without Airflow's retries: a retry does not mend it.
    """

    template_fields: Collection[str] = ("job", "stage", "until", "conn_id")

    def __init__(
        self,
        *,
        job: str,
        stage: str,
        until: datetime | str | int = "{{ data_interval_end }}",
        conn_id: str = TidegaugeHook.default_conn_name,
        deferrable: bool | None = None,
        mode: str = "reschedule",
        **options: Any,  # noqa: ANN401  (the arguments of each operator)
    ) -> None:
        super().__init__(mode=mode, **options)
        self.job, self.stage, self.until, self.conn_id = job, stage, until, conn_id
        self.deferrable = (
            conf.getboolean("operators", "default_deferrable", fallback=False)
            if deferrable is None
            else deferrable
        )

    def execute(self, context: Context) -> None:
        """Poll, or defer to the triggerer."""
        if not self.deferrable:
            super().execute(context)
        elif not self.poke(context):
            self.defer(
                trigger=WatermarkTrigger(
                    self.conn_id, self.job, self.stage, self._until_ms(), self.poke_interval
                ),
                method_name="execute_complete",
                timeout=timedelta(seconds=self.timeout),
            )

    def execute_complete(self, context: Context, event: Mapping[str, str]) -> None:  # noqa: ARG002
        """Return once the trigger has seen the watermark. Raises `AirflowFailException`."""
        if event["wrong"]:
            raise AirflowFailException(event["wrong"])

    def poke(self, context: Context) -> bool:  # noqa: ARG002
        """Check once. Raises `AirflowFailException` where a retry does not help."""
        try:
            with TidegaugeHook(self.conn_id).get_conn() as client:
                arrival = Arrival(client, self.job, self.stage, self.until)
                if arrival.is_complete():
                    return True
        except (AirflowNotFoundException, Wrong, WrongAddress, ValueError) as error:
            raise AirflowFailException(str(error)) from error
        self.log.info("waiting: %s", arrival.because)
        return False

    def _until_ms(self) -> int:
        with TidegaugeHook(self.conn_id).get_conn() as client:
            return Arrival(client, self.job, self.stage, self.until).until_ms
