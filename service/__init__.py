"""tidegauge's service: the central record of a pipeline's progress in event time."""
