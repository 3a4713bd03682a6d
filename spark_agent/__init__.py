"""Run Spark Structured Streaming queries under tidegauge's watermarks.

```python
pipeline = Pipeline("http://127.0.0.1:8000", job="nyc-flights", spec=...)
flights = pipeline.source(frame, stage="newark", shard="log", event_time="departed_at",
                          strategy=BoundedOutOfOrderness("12 hours"))
windowed = pipeline.watermarked(flights, stage="rotations", event_time="departed_at")
sessions = windowed.groupBy(F.session_window("departed_at", "48 hours"), "tailnum").agg(...)
query = pipeline.start(pipeline.report(sessions, stage="rotations").writeStream...)
query.awaitTermination()
```
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from spark_agent.versions import check_pyspark

if TYPE_CHECKING:
    from spark_agent.client.async_client import AsyncClient
    from spark_agent.client.client import Client, StageWatermark
    from spark_agent.client.relay import Relay
    from spark_agent.client.sensor import Arrival
    from spark_agent.exceptions import (
        AggregatorError,
        FinalSourceError,
        NotInTime,
        OldCheckpointError,
        StageTakenError,
        Unavailable,
        UnsoundPlanError,
        Wrong,
    )
    from spark_agent.pipeline import Pipeline
    from spark_agent.soundness.output_times import OutputTime
    from spark_agent.strategies import (
        Ascending,
        BoundedOutOfOrderness,
        Expression,
        IngressTime,
        LearnedLateness,
        NoWatermarks,
        Punctuated,
        Rows,
        StatefulStrategy,
        Strategy,
        WallClock,
    )

__all__ = [
    "AggregatorError",
    "Arrival",
    "Ascending",
    "AsyncClient",
    "BoundedOutOfOrderness",
    "Client",
    "Expression",
    "FinalSourceError",
    "IngressTime",
    "LearnedLateness",
    "NoWatermarks",
    "NotInTime",
    "OldCheckpointError",
    "OutputTime",
    "Pipeline",
    "Punctuated",
    "Relay",
    "Rows",
    "StageTakenError",
    "StageWatermark",
    "StatefulStrategy",
    "Strategy",
    "Unavailable",
    "UnsoundPlanError",
    "WallClock",
    "Wrong",
]

_MODULES = {
    "AggregatorError": "spark_agent.exceptions",
    "Arrival": "spark_agent.client.sensor",
    "Ascending": "spark_agent.strategies",
    "AsyncClient": "spark_agent.client.async_client",
    "BoundedOutOfOrderness": "spark_agent.strategies",
    "Client": "spark_agent.client.client",
    "Expression": "spark_agent.strategies",
    "FinalSourceError": "spark_agent.exceptions",
    "IngressTime": "spark_agent.strategies",
    "LearnedLateness": "spark_agent.strategies",
    "NoWatermarks": "spark_agent.strategies",
    "NotInTime": "spark_agent.exceptions",
    "OldCheckpointError": "spark_agent.exceptions",
    "OutputTime": "spark_agent.soundness.output_times",
    "Pipeline": "spark_agent.pipeline",
    "Punctuated": "spark_agent.strategies",
    "Relay": "spark_agent.client.relay",
    "Rows": "spark_agent.strategies",
    "StageTakenError": "spark_agent.exceptions",
    "StageWatermark": "spark_agent.client.client",
    "StatefulStrategy": "spark_agent.strategies",
    "Strategy": "spark_agent.strategies",
    "Unavailable": "spark_agent.exceptions",
    "UnsoundPlanError": "spark_agent.exceptions",
    "WallClock": "spark_agent.strategies",
    "Wrong": "spark_agent.exceptions",
}

_WITHOUT_SPARK = ("spark_agent.client.", "spark_agent.exceptions")


def __getattr__(name: str) -> Any:  # noqa: ANN401  (PEP 562)
    """Import a name on first use: executors never need the driver's part, nor the client PySpark."""
    if name == "__version__":
        # On first use: an executor's copy of the modules may be without the metadata.
        return version("tidegauge")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _MODULES[name].startswith(_WITHOUT_SPARK):
        check_pyspark()
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for completion: most are imported on first use."""
    return sorted({*globals(), *__all__, "__version__"})
