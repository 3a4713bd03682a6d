"""The use cases, without HTTP. They know the two ports and no store."""

from service.aggregator.aggregator import Aggregator
from service.aggregator.background import Retention
from service.aggregator.definitions import Limits, Precondition, layout_etag
from service.aggregator.reader import StageState

__all__ = ["Aggregator", "Limits", "Precondition", "Retention", "StageState", "layout_etag"]
