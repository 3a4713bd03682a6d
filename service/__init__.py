"""tidegauge's service: the one place that knows how far a pipeline has come in event time."""
