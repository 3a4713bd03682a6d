"""Bring Spark's structured streaming under a tidegauge watermark. Start with `Pipeline`."""
