"""The use cases, without HTTP. They depend on the two ports, not on the stores."""

from service.aggregator.aggregator import Aggregator
from service.aggregator.background import Retention
from service.aggregator.conditions import Condition
from service.aggregator.definitions import Limits, Precondition
from service.aggregator.explain import Explanation, PathStep
from service.aggregator.feed_changes import Change, Changes
from service.aggregator.health import JobHealth, Problem
from service.aggregator.history import PastWatermark
from service.aggregator.holders import HoldingRange
from service.aggregator.keys import ANYONE, Keys
from service.aggregator.overview import JobSummary, Overview
from service.aggregator.problems import FoundProblems
from service.aggregator.range_summary import SLOWEST, RangeSummary, Window
from service.aggregator.remedies import REMEDIES
from service.aggregator.retirements import Retirement, Retiring
from service.aggregator.states import StageState
from service.aggregator.throttling import version_of

__all__ = [
    "ANYONE",
    "REMEDIES",
    "SLOWEST",
    "Aggregator",
    "Change",
    "Changes",
    "Condition",
    "Explanation",
    "FoundProblems",
    "HoldingRange",
    "JobHealth",
    "JobSummary",
    "Keys",
    "Limits",
    "Overview",
    "PastWatermark",
    "PathStep",
    "Precondition",
    "Problem",
    "RangeSummary",
    "Retention",
    "Retirement",
    "Retiring",
    "StageState",
    "Window",
    "version_of",
]
