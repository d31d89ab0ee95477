"""Who takes part in W9: one module each.

A module has those of `background(capacity)`, `buffer(capacity, pixels)` and `prioritized(capacity)`
that its workloads ask for; see `parts.py` for what they return.
"""

from __future__ import annotations

CONTESTANTS: dict[str, str] = {
    "swath": "swath's Collector with start(), ReplayBuffer and, for priorities, TensorDictReplayBuffer",
    "peer_default": "TorchRL as its documentation shows it: SerialEnv, start(), TensorDictReplayBuffer",
    "peer_fastest": "TorchRL with the fastest settings found: a wrapped vector env, start(), ReplayBuffer",
    "sb3": "Stable-Baselines3's ReplayBuffer, written by 8 envs' steps; it collects nothing in the background, so "
    "one thread steps its DummyVecEnv and samples in turn",
    "numpy_ring": "a ring of numpy arrays written by hand; in the background, the hand-written loop in a thread",
    "peer_tree": "the bare C++ sum tree of TorchRL: find and set alone, no frames",
    "memcpy": "the observations' bytes alone: copied into a ring, rows gathered from it",
}
