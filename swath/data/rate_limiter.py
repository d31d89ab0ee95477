"""RateLimiter: as much training as collecting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RateLimiter:
    """Holds the number of sampled frames near a fixed multiple of those written; either side waits for the other.

    Nobody waits when the other side could not go on either: if there is too little for one more batch, writers may
    always write. Nothing is ever dropped.

    Attributes:
        samples_per_insert: how many frames are sampled for each frame written. One update with a batch of 256 per
            frame is 256.
        tolerance: by how many sampled frames that may be missed, both ways; by default as much as one batch.
        min_size_to_sample: how many frames must be written before any is sampled.
        timeout_s: how long a caller waits before it raises TimeoutError. Collection in the background waits on.
    """

    samples_per_insert: float
    tolerance: float | None = None
    min_size_to_sample: int = 1
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what cannot be held."""
        if not self.samples_per_insert > 0:  # not a number is refused too
            raise ValueError(f"samples_per_insert must be positive, got {self.samples_per_insert!r}.")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueError(f"tolerance must not be negative, got {self.tolerance!r}.")
        if self.min_size_to_sample < 1:
            raise ValueError(f"min_size_to_sample must be at least 1, got {self.min_size_to_sample!r}.")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s!r}.")

    def may_sample(self, batch: int, written: int, sampled: int) -> bool:
        """Whether `batch` more frames may be sampled."""
        if written < self.min_size_to_sample:
            return False
        return sampled + batch <= self._due(written) + self._slack(batch)

    def may_insert(self, frames: int, batch: int, written: int, sampled: int) -> bool:
        """Whether `frames` more may be written, while the other side samples `batch` at a time."""
        if not self.may_sample(batch, written, sampled):
            return True
        return self._due(written + frames) - self._slack(batch) <= sampled

    def _due(self, written: int) -> float:
        """How many frames should be sampled by now. What had to be there before the first sample does not count."""
        return self.samples_per_insert * (written - self.min_size_to_sample + 1)

    def _slack(self, batch: int) -> float:
        return batch if self.tolerance is None else self.tolerance
