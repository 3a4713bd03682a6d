"""Code that runs in Spark's tasks."""
