"""The use cases, without HTTP. They know the two ports and no store."""

from service.aggregator.aggregator import Aggregator
from service.aggregator.background import Retention
from service.aggregator.definitions import Limits, Precondition, layout_etag
from service.aggregator.feeds import Change
from service.aggregator.history import PastWatermark
from service.aggregator.keys import Keys
from service.aggregator.states import StageState

__all__ = [
    "Aggregator",
    "Change",
    "Keys",
    "Limits",
    "PastWatermark",
    "Precondition",
    "Retention",
    "StageState",
    "layout_etag",
]
