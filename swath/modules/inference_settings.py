"""How an inference server works."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from swath.keys import POLICY_VERSION, Key


@dataclass(frozen=True, kw_only=True)
class InferenceSettings:
    """What its user has chosen.

    Attributes:
        max_batch_size: the most requests in a forward.
        min_batch_size: how many requests to wait for.
        timeout: the most seconds that a request waits for others.
        device: where the policy computes; None leaves it where it is.
        output_device: where clients in this process get their answers; None is the CPU, or their TensorDict's device.
        version_key: under which the version is written into answers; None leaves it out.
        stats_window: of how many batches and requests latencies are kept.
    """

    max_batch_size: int = 64
    min_batch_size: int = 1
    timeout: float = 0.01
    device: torch.device | None = None
    output_device: torch.device | None = None
    version_key: Key | None = POLICY_VERSION
    stats_window: int = 1024

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("max_batch_size", "min_batch_size", "stats_window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, got {value!r}.")
        if self.min_batch_size > self.max_batch_size:
            raise ValueError(f"min_batch_size={self.min_batch_size} is above max_batch_size={self.max_batch_size}.")
        timeout = self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
            raise ValueError(f"timeout must be a number of seconds, 0 or more, got {timeout!r}.")
