"""The end of a query's run: its outcome, sent to the service."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

from spark_agent.client.client import Client
from spark_agent.client.errors import Refused, StaleRun, UnknownJob
from spark_agent.client.responses import RunOutcome
from spark_agent.exceptions import AggregatorError
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.driver_reporter import DriverReporter

_log: Final = logging.getLogger("spark_agent")

_LONGEST_REASON: Final = 1_000
"""Characters that the service takes of the reason why a run has ended."""


def end_run(
    query: StartedQuery,
    client: Client,
    reporter: DriverReporter,
    outcome: RunOutcome,
    because: str,
) -> None:
    """End a run with the query's outcome, so that it is neither shown as dead nor as alive.

    No request for the run follows: its commits have been sent, as far as the service took them. One
    attempt is made, which the client's patience limits.
    """
    try:
        client.end_run(query.job, reporter.run, outcome, because[:_LONGEST_REASON])
    except (StaleRun, UnknownJob) as error:
        _log.debug("query %s: its run is over already: %s", query.name, error)
    except Refused as error:
        if error.status != HTTPStatus.NOT_FOUND:
            _log_unended(query.name, outcome, error)
        elif outcome != "failed":
            # A service that is older than this agent has no ends of runs.
            _release_leases(query, client, reporter)
    except AggregatorError as error:
        _log_unended(query.name, outcome, error)


def _log_unended(query: str, outcome: RunOutcome, error: AggregatorError) -> None:
    _log.warning(
        "query %s has %s, but its run could not be ended: the service shows the query as dead until its "
        "next start. %s",
        query,
        "been stopped" if outcome == "stopped" else outcome,
        error,
    )


def _release_leases(query: StartedQuery, client: Client, reporter: DriverReporter) -> None:
    """Give back the tasks' leases, whose tokens the driver does not have: its claim takes them over."""
    try:
        leases = [reporter.claim(stage, None) for stage in query.stages.names]
        client.release(query.job, [each for each in leases if each is not None])
    except AggregatorError as error:
        _log.debug("query %s: leases are not given back: %s", query.name, error)
