"""Settings of Spark for checkpoints on a local disk."""

from __future__ import annotations

from typing import Final

FILE_MANAGER_SETTING: Final = "spark.sql.streaming.checkpointFileManagerClass"
ONE_STEP: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
"""Value of the setting with which a file of a checkpoint takes its place by one rename.

By default Spark starts a program for each of several steps (`readlink`), which takes much of the time
of a batch with few rows.
"""
