"""Who takes part in W14: one module each, with a function `serving(workload)`; see `asking.py` for what it returns."""

from __future__ import annotations

CONTESTANTS: dict[str, str] = {
    "swath": "swath's InferenceServer; for clients in processes, in a process of its own",
    "peer_default": "TorchRL's InferenceServer with its default transport",
    "peer_fastest": "TorchRL's InferenceServer with its fastest: 'direct' for threads, 'process_slot' for processes",
}
