"""Errors of the agent and its client, by the action that is left to a caller: retry, or correct."""

from __future__ import annotations

from typing import Final


class AggregatorError(Exception):
    """A request to the service failed."""


class Unavailable(AggregatorError):  # noqa: N818  (it names a state, not a fault of the caller)
    """The service did not give a usable answer within the caller's patience. A retry may succeed."""


class WrongAddress(Unavailable):
    """The address is not that of a service. The only `Unavailable` that a retry does not mend."""


class NotServing(Unavailable):
    """The service answers that it cannot serve now, and why: a store does not answer, for example.

    Retry.
    """


class NotInTime(AggregatorError):  # noqa: N818
    """The watermark did not reach the instant within the timeout. Raised by `WaitResult.require`."""


class Wrong(AggregatorError):  # noqa: N818
    """The request is wrong, and a retry does not help. The base of every such error."""


class WrongInstant(Wrong, ValueError):  # noqa: N818
    """The instant cannot be read, or is ambiguous."""


class WrongName(Wrong, ValueError):  # noqa: N818
    """The name of a job or of a stage is not a valid one."""


class EarlyRowsError(Exception):
    """Rows left a stage that are older than its promise."""


class OldCheckpointError(ValueError):
    """A query starts with a batch that the job or its output already has. The query writes nothing."""


class FinalSourceError(ValueError):
    """A source is final: it has promised that no more rows come."""


class UnsoundPlanError(ValueError):
    """A query's plan could break the promise of its stage.

    The message names a plan that keeps the promise.
    """


class StageTakenError(ValueError):
    """Another query of this pipeline executes the stage."""


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


CONTINUES: Final = "With on_lost_checkpoint='continue' it would go on regardless"
