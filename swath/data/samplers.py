"""Samplers: which frames a batch is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from swath.data.contents import Contents
from swath.errors import NothingToSampleError
from swath.keys import as_key


@dataclass(frozen=True)
class Draw:
    """Frames chosen by a sampler.

    Attributes:
        index: the frames, int64 `[B]`; see `Contents`.
        info: what else is delivered, such as importance weights: arrays `[B, ...]` by name.
        overrides: entries of the batch that are replaced, by key: arrays `[B, ...]`.
        ends_epoch: whether nothing is left of the sampler's epoch. The buffer fills this in.
    """

    index: np.ndarray
    info: dict[Any, Any] = field(default_factory=dict)
    overrides: dict[Any, np.ndarray] = field(default_factory=dict)
    ends_epoch: bool = False

    def state_dict(self) -> dict[str, Any]:
        """The draw as plain tensors."""
        return {
            "index": torch.from_numpy(self.index),
            "info": [[key, torch.as_tensor(value, device="cpu")] for key, value in self.info.items()],
            "overrides": [[key, torch.as_tensor(value, device="cpu")] for key, value in self.overrides.items()],
            "ends_epoch": self.ends_epoch,
        }

    @staticmethod
    def restored(state: Mapping[str, Any]) -> Draw:
        """The draw that `state_dict` tells of."""
        info, overrides = (
            {as_key(key): value.numpy().copy() for key, value in state[name]} for name in ("info", "overrides")
        )
        return Draw(state["index"].numpy().copy(), info, overrides, state["ends_epoch"])


class Sampler(ABC):
    """Draws frames. It does not hear of writes: it looks at the contents when it is asked, whichever process wrote."""

    can_repeat: ClassVar[bool] = True
    """Whether a draw can be thrown away and made again, as when a frame was overwritten meanwhile."""

    @abstractmethod
    def draw(self, contents: Contents, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Choose `batch_size` frames, or raise NothingToSampleError."""

    def update_priority(self, contents: Contents, index: np.ndarray, priority: np.ndarray) -> None:
        """Draw the frames `index` more or less often; ignored by samplers that have no priorities."""
        return None

    @property
    def ran_out(self) -> bool:
        """Whether an epoch has ended with the last draw. Never, with replacement."""
        return False

    def empty(self) -> None:
        """Forget what was seen: the buffer was emptied."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What is needed to draw the same elsewhere."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        return None


class RandomSampler(Sampler):
    """Every frame with the same chance, with replacement."""

    def draw(self, contents: Contents, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Choose uniformly among all frames that are there."""
        if not contents.rows:
            raise NothingToSampleError("The buffer is empty: there is nothing to sample.")
        index = _uniform(contents, batch_size, generator)
        return Draw(index if contents.whole else _replaced(contents, index, generator))


class SamplerWithoutReplacement(Sampler):
    """Every frame once before any comes again.

    Args:
        drop_last: leave out the last batch of an epoch if it is not full; otherwise it is delivered as it is.
        shuffle: in random order; otherwise from the oldest to the newest.
    """

    can_repeat = False

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._left = np.empty(0, np.int64)
        """Positions * lanes + lane of what is still to come in this epoch."""
        self._seen_end = -1
        self._ran_out = False

    def draw(self, contents: Contents, batch_size: int, generator: torch.Generator | None) -> Draw:
        """The next frames of the epoch; a new one begins when none are left, or when new frames have come."""
        if contents.end != self._seen_end or not len(self._left):
            self._begin(contents, generator)
        if not len(self._left):
            raise NothingToSampleError("The buffer is empty: there is nothing to sample.")
        if self.drop_last and len(self._left) < batch_size:
            raise NothingToSampleError(
                f"The buffer holds {len(self._left)} frames, fewer than one batch of {batch_size}."
            )
        chosen, self._left = self._left[:batch_size], self._left[batch_size:]
        self._ran_out = len(self._left) < (batch_size if self.drop_last else 1)
        if self._ran_out:
            self._left = self._left[:0]
        return Draw(contents.index(chosen // contents.lanes, chosen % contents.lanes))

    def _begin(self, contents: Contents, generator: torch.Generator | None) -> None:
        present = _present(contents)
        frames = np.sort(contents.positions(present) * contents.lanes + present // contents.capacity)
        if self.shuffle:
            frames = frames[torch.randperm(len(frames), generator=generator, device="cpu").numpy()]
        self._left, self._seen_end = frames, contents.end

    @property
    def ran_out(self) -> bool:
        """Whether the last draw was the last of its epoch."""
        return self._ran_out

    def empty(self) -> None:
        """Begin before the first epoch again."""
        self._left, self._seen_end, self._ran_out = self._left[:0], -1, False

    def state_dict(self) -> dict[str, Any]:
        """What is left of the epoch."""
        return {"left": torch.from_numpy(self._left.copy()), "seen_end": self._seen_end, "ran_out": self._ran_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in a saved epoch."""
        self._left = state["left"].numpy().copy()
        self._seen_end, self._ran_out = state["seen_end"], state["ran_out"]


def _uniform(contents: Contents, count: int, generator: torch.Generator | None) -> np.ndarray:
    """Frames with equal chances, there or not."""
    frames = torch.randint(contents.rows * contents.lanes, (count,), generator=generator, device="cpu").numpy()
    if contents.lanes == 1:
        return contents.index(frames + contents.first)
    return contents.index(frames // contents.lanes + contents.first, frames % contents.lanes)


def _replaced(contents: Contents, index: np.ndarray, generator: torch.Generator | None) -> np.ndarray:
    """`index` with others in place of frames that are not there: a writer is at them, or has died there."""
    missing = ~contents.holds(index)
    if missing.any():
        present = _present(contents)
        if not len(present):
            raise NothingToSampleError("All frames of the buffer are just being written.")
        chosen = torch.randint(len(present), (int(missing.sum()),), generator=generator, device="cpu")
        index[missing] = present[chosen.numpy()]
    return index


def _present(contents: Contents) -> np.ndarray:
    """All frames that are there."""
    index = contents.in_all_lanes(np.arange(contents.first, contents.end)).reshape(-1)
    return np.asarray(index[contents.holds(index)])
