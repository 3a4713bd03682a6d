"""The use cases, without HTTP. They know the two ports and no store."""

from service.aggregator.aggregator import Aggregator
from service.aggregator.background import Retention
from service.aggregator.definitions import Limits, Precondition
from service.aggregator.explain import Explanation, HoldingRange
from service.aggregator.feeds import Change, Changes
from service.aggregator.history import PastWatermark
from service.aggregator.keys import Keys
from service.aggregator.states import StageState
from service.aggregator.throttling import version_of

__all__ = [
    "Aggregator",
    "Change",
    "Changes",
    "Explanation",
    "HoldingRange",
    "Keys",
    "Limits",
    "PastWatermark",
    "Precondition",
    "Retention",
    "StageState",
    "version_of",
]
