"""The use cases, without HTTP. They know the two ports and no store."""

from service.aggregator.aggregator import Aggregator
from service.aggregator.background import Retention
from service.aggregator.definitions import Limits, Precondition
from service.aggregator.feeds import Change
from service.aggregator.keys import Keys
from service.aggregator.states import StageState

__all__ = [
    "Aggregator",
    "Change",
    "Keys",
    "Limits",
    "Precondition",
    "Retention",
    "StageState",
]
