"""What is done to batches on their way out of a buffer, and the reverse to what is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class InvertedTransform:
    """A transform the other way round: what it does to batches is done to what is written, and the reverse."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, batch: Any) -> Any:
        """What the transform does to what is written, if anything."""
        return self.transform.inv(batch) if hasattr(self.transform, "inv") else batch

    def inv(self, data: Any) -> Any:
        """What the transform does to batches."""
        return self.transform(data)


class TransformList(list[Callable[[Any], Any]]):
    """Transforms in the order in which they are called with batches. Those with a method `inv` can invert."""

    def __call__(self, batch: Any) -> Any:
        """What comes out of all of them."""
        for transform in self:
            batch = transform(batch)
        return batch

    def inv(self, data: Any) -> Any:
        """What is written instead of `data`."""
        for transform in reversed(self):
            if hasattr(transform, "inv"):
                data = transform.inv(data)
        return data
