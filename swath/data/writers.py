"""Writers: in which order rows are overwritten."""

from __future__ import annotations


class Writer:
    """Base class of writers."""


class RoundRobinWriter(Writer):
    """The oldest frames are overwritten first. This is how a storage works; the class exists to say so."""


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """The same; sampled TensorDicts tell their `index` with any writer of a `TensorDictReplayBuffer`."""
