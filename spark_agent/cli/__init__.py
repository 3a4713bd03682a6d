"""Commands that the agent adds to `tidegauge`. Does not import Spark."""
