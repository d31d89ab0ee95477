"""Writers: in which order rows are overwritten."""

from __future__ import annotations

from typing import Any


class Writer:
    """Base class of writers."""


class RoundRobinWriter(Writer):
    """The oldest frames are overwritten first. This is how a storage works; the class exists to say so.

    `compilable` is there for TorchRL, and changes nothing.
    """

    def __init__(self, compilable: Any = None) -> None:
        """Nothing to keep."""


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """The same; sampled TensorDicts have their `index` with any writer of a `TensorDictReplayBuffer`."""
