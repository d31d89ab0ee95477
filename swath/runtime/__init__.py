"""Processes, and what they share. Knows nothing of reinforcement learning."""

from swath.runtime.channel import Channel, ChannelClosedError
from swath.runtime.crew import Crew, Died, Goodbye
from swath.runtime.faults import Failure, RemoteTraceback, StallWarning, WorkerDiedError, WorkerError
from swath.runtime.interrupts import Undisturbed
from swath.runtime.liveness import is_alive, own_birth
from swath.runtime.locks import ProcessLock
from swath.runtime.memory import Block, FileBlock, MemoryBlock
from swath.runtime.paths import follow
from swath.runtime.rounds import Event, Member, Rounds

__all__ = [
    "Block",
    "Channel",
    "ChannelClosedError",
    "Crew",
    "Died",
    "Event",
    "Failure",
    "FileBlock",
    "Goodbye",
    "Member",
    "MemoryBlock",
    "ProcessLock",
    "RemoteTraceback",
    "Rounds",
    "StallWarning",
    "Undisturbed",
    "WorkerDiedError",
    "WorkerError",
    "follow",
    "is_alive",
    "own_birth",
]
