"""Bring Spark's structured streaming under a tidegauge watermark.

```python
pipeline = Pipeline("http://127.0.0.1:8000", job="nyc-flights", spec=...)
flights = pipeline.source(frame, stage="newark", shard="log", event_time="departed_at",
                          strategy=BoundedOutOfOrderness("12 hours"))
windowed = pipeline.watermarked(flights, stage="rotations", event_time="departed_at")
sessions = windowed.groupBy(F.session_window("departed_at", "48 hours"), "tailnum").agg(...)
query = pipeline.start(pipeline.report(sessions, stage="rotations").writeStream...)
```
"""

from spark_agent.pipeline import Pipeline
from spark_agent.strategies import Ascending, BoundedOutOfOrderness, Strategy

__all__ = ["Ascending", "BoundedOutOfOrderness", "Pipeline", "Strategy"]
