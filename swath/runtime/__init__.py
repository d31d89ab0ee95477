"""Processes, and what they share. Knows nothing of reinforcement learning."""

from swath.runtime.liveness import is_alive, own_birth
from swath.runtime.locks import ProcessLock
from swath.runtime.memory import Block, FileBlock, MemoryBlock

__all__ = ["Block", "FileBlock", "MemoryBlock", "ProcessLock", "is_alive", "own_birth"]
