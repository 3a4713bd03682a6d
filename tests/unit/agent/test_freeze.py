"""A worker's imports are frozen once."""

import gc
from unittest.mock import patch

from spark_agent.executor.task import freeze_imports


def test_later_tasks_of_a_worker_walk_through_none_of_its_objects() -> None:
    freeze_imports.cache_clear()
    with (
        patch.object(gc, "freeze") as freeze,
        patch.object(gc, "get_freeze_count", side_effect=AssertionError),
    ):
        freeze_imports()
        freeze_imports()
    freeze.assert_called_once()
    freeze_imports.cache_clear()
