"""The use cases, without HTTP. They know the two ports and no store."""

from service.aggregator.aggregator import Aggregator
from service.aggregator.background import Retention
from service.aggregator.definitions import Precondition, layout_etag
from service.aggregator.keys import Keys
from service.aggregator.reader import StageState

__all__ = ["Aggregator", "Keys", "Precondition", "Retention", "StageState", "layout_etag"]
