"""Processes, and what they share. Knows nothing of reinforcement learning."""

from swath.runtime.channel import Channel
from swath.runtime.faults import Failure
from swath.runtime.interrupts import Section, undisturbed
from swath.runtime.liveness import is_alive, own_birth
from swath.runtime.locks import ProcessLock
from swath.runtime.memory import Block, FileBlock, MemoryBlock
from swath.runtime.paths import follow
from swath.runtime.rounds import Event, Member, Rounds

__all__ = [
    "Block",
    "Channel",
    "Event",
    "Failure",
    "FileBlock",
    "Member",
    "MemoryBlock",
    "ProcessLock",
    "Rounds",
    "Section",
    "follow",
    "is_alive",
    "own_birth",
    "undisturbed",
]
