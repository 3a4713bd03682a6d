"""Access to the JVM: plans, writers, progress and checkpoints, from Spark's internal objects."""

from typing import Any, TypeAlias

JavaObject: TypeAlias = Any
"""An object of the JVM. py4j resolves its methods as they are called, so it has no type."""
