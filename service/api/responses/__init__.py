"""The bodies of responses, contract version 1: a type each, for encoding and documentation."""

from __future__ import annotations

from typing import Final

from service.api.responses.changes import ChangesBody
from service.api.responses.common import HealthBody, ProblemBody
from service.api.responses.explanations import ExplanationBody
from service.api.responses.history import EtaBody, HistoryBody
from service.api.responses.jobs import CommitsBody, GraphBody, JobBody, JobsBody
from service.api.responses.keys import AuditBody, KeysBody, NewKeyBody, WhoAmIBody
from service.api.responses.leases import GrantBody, ReleasedBody, RenewedBody
from service.api.responses.problems import JobProblemsBody, ProblemsBody
from service.api.responses.ranges import RangesBody
from service.api.responses.reports import ReportedBody
from service.api.responses.retirements import RetiringBody
from service.api.responses.runs import EndedBody, RunBody, RunsBody
from service.api.responses.summaries import OverviewBody, RangeSummaryBody
from service.api.responses.throttle import ThrottleBody
from service.api.responses.watermarks import CommittedBody, SnapshotBody, WatermarkBody

RESPONSES: Final = (
    JobBody, JobsBody, RunBody, RunsBody, EndedBody, GrantBody, RenewedBody, ReleasedBody,
    ReportedBody, WatermarkBody,
    CommittedBody, SnapshotBody, HistoryBody, EtaBody, RangesBody, ProblemBody, HealthBody,
    ThrottleBody, ExplanationBody,
    KeysBody, NewKeyBody, AuditBody, RangeSummaryBody, OverviewBody, WhoAmIBody,
    GraphBody, CommitsBody, JobProblemsBody, ProblemsBody, RetiringBody, ChangesBody,
)  # fmt: skip
"""Every body, for the documentation."""
