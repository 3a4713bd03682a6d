"""Settings of Spark for checkpoints on a local disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LOCAL_FILES: Final[Mapping[str, str]] = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}
"""Settings with which a file takes the place of another in one step, and without a checksum file.

By default Spark deletes the one, then renames the other, and starts programs for both (`readlink`,
`chmod`): about a fifth of a test's processor time. An executor whose driver is gone ends at any moment,
also between the two steps, and the state of its partition is lost.
"""
