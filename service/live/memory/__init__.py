"""The live store of one process."""

from service.live.memory.store import MemoryLiveStore

__all__ = ["MemoryLiveStore"]
