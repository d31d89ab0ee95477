"""What an inference server tells of itself: how many requests, in which batches, and how long they took."""

from __future__ import annotations

from collections import deque
from time import perf_counter

import numpy as np


class InferenceStats:
    """Counts, and the latencies of the last batches."""

    def __init__(self, window: int, max_batch_size: int) -> None:
        """Keep the last `window` batches and requests."""
        self._window, self._max_batch_size = window, max_batch_size
        self.weight_updates = 0
        self.reset()

    def reset(self) -> None:
        """Count anew; weight updates are counted for ever."""
        self._requests = self._batches = self._errors = 0
        self._recent: deque[tuple[list[float], float, float]] = deque(maxlen=self._window)
        """Of each batch when its requests arrived, when it began and when it ended."""
        self._since = perf_counter()

    def record(self, arrivals: list[float], begun: float, ended: float, *, failed: bool) -> None:
        """Count a forward that was made for requests that arrived then."""
        self._requests += len(arrivals)
        self._batches += 1
        if failed:
            self._errors += len(arrivals)
        self._recent.append((arrivals, begun, ended))

    def summary(self) -> dict[str, float]:
        """The names that users of TorchRL know, and a few more."""
        elapsed = max(perf_counter() - self._since, 1e-9)
        recent = self._recent.copy()
        average = sum(len(arrivals) for arrivals, _, _ in recent) / max(len(recent), 1)
        waits = [begun - arrived for arrivals, begun, _ in recent for arrived in arrivals]
        return {
            "requests": self._requests,
            "batches": self._batches,
            "errors": self._errors,
            "requests_per_s": self._requests / elapsed,
            "batches_per_s": self._batches / elapsed,
            "avg_batch_size": average,
            "batch_fill": average / self._max_batch_size,
            **_percentiles("queue", waits[-self._window :]),
            **_percentiles("forward", [ended - begun for _, begun, ended in recent]),
            "weight_updates": self.weight_updates,
        }


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    p50, p95 = np.percentile(seconds or [0.0], [50, 95]) * 1e3
    return {f"p50_{name}_ms": float(p50), f"p95_{name}_ms": float(p95)}
