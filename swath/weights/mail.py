"""Weights on their way to another thread."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn

Ready = list[tuple[nn.Module, dict[str, Any]]]
"""Modules, and the weights that they are to take."""


class WeightsMail:
    """Weights on their way to a collector that runs in another thread: whole, and only the newest."""

    def __init__(self) -> None:
        """Begin with nothing on the way."""
        self._lock = threading.Lock()
        self._newest: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        self._sent = 0

    def send(self, ready: Ready) -> None:
        """Leave copies of the weights: the trainer goes on changing its own."""
        copies = [(m, {n: w.clone() if isinstance(w, Tensor) else w for n, w in ws.items()}) for m, ws in ready]
        with self._lock:
            for module, weights in copies:
                former = self._newest.get(id(module), (module, {}))[1]
                self._newest[id(module)] = (module, {**former, **weights})
            self._sent += 1

    def fetch(self) -> list[Ready]:
        """What has come since the last time, as if each had been taken on its own: older ones change nothing."""
        if not self._sent:
            return []
        with self._lock:
            newest, sent = list(self._newest.values()), self._sent
            self._newest, self._sent = {}, 0
        return [[] for _ in range(sent - 1)] + [newest]
