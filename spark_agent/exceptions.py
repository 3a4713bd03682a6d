"""Errors of the agent and its client, by the action that is left to a caller: retry, or correct."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final


class AggregatorError(Exception):
    """A request to the service failed. The base of `Unavailable`, `NotInTime` and `Wrong`.

    The subclasses differ in the action that is left to the caller:

    ```python
    try:
        seen = client.wait_until("parcels", "north", "2026-01-01T00:00Z", timeout="1 s").require()
    except Unavailable:
        print("retry later")
    except NotInTime as error:
        print(error)    # after 1,000 ms the output watermark is at …
    except Wrong as error:
        print("correct the request:", error)
    ```
    """


class Unavailable(AggregatorError):  # noqa: N818  (it names a state, not a fault of the caller)
    """The service did not give a usable answer within the caller's patience. A retry may succeed.

    Raised after `patience_ms` without an answer, for an answer of a proxy, or by a service whose store
    does not answer (`NotServing`). Watermarks stand still meanwhile, and nothing is lost.

    ```python
    try:
        Client("http://127.0.0.1:1", patience_ms=100).jobs()
    except Unavailable as error:
        print(f"retry: {error}")
    ```
    """


class WrongAddress(Unavailable):
    """The address is not that of a service. The only `Unavailable` that a retry does not mend."""


class NotServing(Unavailable):
    """The service answers that it cannot serve now, and why: a store does not answer, for example.

    Retry.
    """


class NotInTime(AggregatorError):  # noqa: N818
    """The watermark did not reach the instant within the timeout.

    Raised by `WaitResult.require`, for programs that cannot continue without the watermark.

    ```python
    waited = client.wait_until("parcels", "south", "2026-01-01T00:00Z", timeout="1 s")
    try:
        waited.require()
    except NotInTime:
        print(client.explain("parcels", "south")["because"])
    ```
    """


class Wrong(AggregatorError):  # noqa: N818
    """The request is wrong, and a retry does not help. The base of every such error.

    A wrong instant or name raises before a request is sent. A rejected request raises a subclass of
    `Refused` in `spark_agent.client.errors`, with the service's problem in `problem`.

    ```python
    try:
        client.watermark("parcels", "nowhere")
    except UnknownStage as error:
        print(error.problem["detail"])    # job 'parcels' has no stage 'nowhere'
    ```
    """


class WrongInstant(Wrong, ValueError):  # noqa: N818
    """The instant cannot be read, or is ambiguous."""


class WrongName(Wrong, ValueError):  # noqa: N818
    """The name of a job or of a stage is not a valid one."""


class EarlyRowsError(Exception):
    """Rows left a stage that are older than its promise."""


class OldCheckpointError(ValueError):
    """A query starts with a batch that the job or its output already has. The query writes nothing.

    The query's checkpoint is new, was lost, or is an older copy, so rows would be read again after the
    watermark has passed them. Restore the checkpoint, or start over:

    ```python
    try:
        query = pipeline.start(writer)
    except OldCheckpointError:
        pipeline.reset()
        raise    # start again with a new checkpoint and an empty output
    ```
    """


class FinalSourceError(ValueError):
    """A source is final: it has promised that no more rows come.

    A bounded query ends with a final source. A job whose data begins anew needs a new generation:

    ```python
    try:
        query = pipeline.start(writer)
    except FinalSourceError:
        pipeline.reset()    # then start with a new checkpoint and an empty output
    ```
    """


class UnsoundPlanError(ValueError):
    """A query's plan could break the promise of its stage.

    The message names a plan that keeps the promise.

    Raised by `Pipeline.start` before the query runs: for an unsupported operator, an aggregation without
    an event time, a join without bounds, or rows that skip `watermarked` or `report`.

    ```python
    try:
        counts = pipeline.report(windowed.groupBy("key").count(), stage="counts")
        pipeline.start(counts.writeStream.format("noop"))
    except UnsoundPlanError as error:
        print(error)    # … group by window(…) over the event time…
    ```
    """


class StageTakenError(ValueError):
    """Another query of this pipeline executes the stage.

    A stage belongs to one query at a time, because two queries would report different progress for the
    same ranges. Stop the other query first, or give the second query a stage of its own.

    ```python
    first = pipeline.start(writer("first"))
    try:
        pipeline.start(writer("second"))
    except StageTakenError:
        print("the stage is already executed")
    ```
    """


class SparkImportError(ImportError):
    """PySpark is not installed, is too old, or is a client of Spark Connect. The message has the remedy.

    Raised on the import of a name of `spark_agent` that needs Spark. The client and the commands work
    without PySpark.
    """


class NotStartedError(Exception):
    """A query goes through a stage, but was not started with `Pipeline.start`."""

    def __init__(self, stage: str) -> None:
        super().__init__(
            f"tidegauge: a query through stage {stage!r} was not started with Pipeline.start(), so "
            f"nothing would commit its batches, and its watermark would never advance: pass "
            f"frame.writeStream… to pipeline.start() instead of calling its own start()"
        )
        self.stage = stage


class QueryFailedError(Exception):
    """A query must not run another batch. The message has the reason."""


class SparkLostError(Exception):
    """Spark's JVM does not answer any more."""


class StrategyError(Exception):
    """A strategy of the user's own has failed, or has returned an invalid value. The message names the
    stage, the shard and the value.
    """


class LogsError(Exception):
    """The folders of a source violate its rules. The message has the remedy."""


def old_checkpoint_message(query: str, does: str, latest: object) -> str:
    """Return the message for a query that runs a batch which the job already has.

    `does` is the query's action, with its batch; `latest` is the last batch that the job has.
    """
    return (
        f"tidegauge: query {query} {does}, but the job already has batches of its stages up to "
        f"{latest}: the query's checkpoint is new, was lost, or is an older copy. Rows that it rereads "
        f"are late, and windows that were closed come out again. Either restore the old checkpoint, or "
        f"call Pipeline.reset() and start over with an empty output and a new checkpoint"
    )


def final_message(job: str, source: str, *, unread: Sequence[str] = ()) -> str:
    """Return the message for a query of a final source. `unread` are shards with unread files."""
    found, remedy = "", ""
    if unread:
        found = f", but has unread files of shard {', '.join(unread)}"
        remedy = "Move them out, and start the query again. "
    return (
        f"source {source!r} of job {job!r} is final{found}: a bounded query, or complete folders of all "
        f"its shards, have promised that nothing more comes from it, so anything it read now would be "
        f"late. {remedy}To run it again, start the job over with Pipeline.reset() or "
        f"`tidegauge reset {job}`, with new checkpoints and an empty output. For a job that runs every "
        f'day, leave out bounded=True; if shards are added, give the source "dynamic": true'
    )


NO_CONNECT: Final = (
    "Spark Connect is not supported: tidegauge needs accumulators, local properties and the query's "
    "plan, which a Connect client does not have. Run the driver as a classic Spark application "
    "(spark-submit, or SparkSession.builder.master(…))"
)
CONTINUES: Final = "With on_lost_checkpoint='continue' it would go on regardless"
