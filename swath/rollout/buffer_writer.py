"""How what is collected gets into a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from swath.data.ray_buffer import OwnBuffer
from swath.data.tensor_storages import LastingEntries
from swath.keys import MASK, Key, as_key
from swath.rollout.slots import Slot


class BufferWriter:
    """Writes batches of `[*lanes, T]` frames to a buffer, lane by lane.

    A buffer of ours with columns takes them straight from the slot, in one copy; others are given TensorDicts.
    """

    def __init__(self, buffer: Any, lanes: Iterable[int]) -> None:
        self.buffer = buffer
        self.stopping: Callable[[], bool] | None = None
        """Asked while the buffer makes us wait, in the background; elsewhere, waiting has an end."""
        self._lanes = tuple(lanes)
        self._source = object()
        self._is_interrupted = False
        self._seams: np.ndarray | None = None
        """The last that were found without a mask."""
        self._is_ours = isinstance(buffer, OwnBuffer)
        ndim = buffer.storage.ndim if self._is_ours else 1
        if ndim not in (1, len(self._lanes) + 1):
            raise ValueError(
                f"The replay buffer's storage has ndim={ndim}, but batches are {[*self._lanes, 'T']}: use ndim=1, "
                f"which takes them frame by frame, or ndim={len(self._lanes) + 1}."
            )
        self.is_flat = ndim == 1
        """Whether frames of all lanes lie in one row."""

    @property
    def takes_columns(self) -> bool:
        """Whether the buffer takes columns as they are; others are given TensorDicts to `extend`."""
        return self._is_ours and self.buffer.takes_columns

    def interrupt(self) -> None:
        """What is written next does not continue what was written last: something came between."""
        self._is_interrupted = True

    @property
    def frames_written(self) -> int:
        """How many frames were ever written to the buffer, by whomever."""
        return int(self.buffer.write_count)

    def write_slot(self, slot: Slot, keys: Iterable[Key], steps: int) -> None:
        """Write the first `steps` steps of `slot`; of a full one, it is remembered how."""
        if steps < slot.steps or MASK in slot.tensors:
            self._write({key: slot.tensors[key][:, :steps] for key in keys}, (slot.lanes, steps))
            return
        if slot.written is None or slot.written[0] is not self:
            slot.written = self, LastingEntries(self._laid_out({key: slot.tensors[key] for key in keys}, steps))
        shape = (slot.lanes * steps,) if self.is_flat else (*self._lanes, steps)
        self._send(slot.written[1], shape, self._lane_seams(steps, None) if self.is_flat else None)

    def _laid_out(self, columns: dict[Key, Tensor], steps: int) -> dict[Key, Tensor]:
        """Columns `[N, T, ...]` with the dimensions that the buffer has for frames."""
        shape = (math.prod(self._lanes) * steps,) if self.is_flat else (*self._lanes, steps)
        return {key: column.reshape(*shape, *column.shape[2:]) for key, column in columns.items()}

    def write_batch(self, batch: TensorDictBase) -> None:
        """Write a batch: as it was collected, or as a `postproc` has left it."""
        mask = batch.get(MASK, None)
        if 0 in batch.shape:
            return
        if not self.takes_columns and self.is_flat:
            seams = self._lane_seams(batch.shape[-1], mask) if tuple(batch.shape[:-1]) == self._lanes else None
            self._extend(batch.reshape(-1) if mask is None else batch[mask].exclude(MASK), seams)
        elif self.takes_columns and tuple(batch.shape[:-1]) == self._lanes:
            lanes = math.prod(self._lanes)
            shape = (lanes, batch.shape[-1])
            columns = {as_key(k): v.reshape(*shape, *v.shape[batch.ndim :]) for k, v in batch.items(True, True)}
            self._write(columns, shape)
        else:
            batch = batch if mask is None else batch[mask].exclude(MASK)
            if batch.ndim == 1 and self.is_flat and self.takes_columns:
                self._send({as_key(key): value for key, value in batch.items(True, True)}, tuple(batch.shape), None)
            else:
                self._extend(batch)

    def write_episodes(self, episodes: TensorDictBase, lengths: list[int]) -> None:
        """Write complete episodes that lie one after the other."""
        if not self.takes_columns:
            self._extend(episodes)
            return
        columns = {as_key(key): value for key, value in episodes.items(True, True)}
        seams = None
        if sum(lengths) == episodes.shape[0]:  # a postproc may have changed that
            seams = np.zeros((1, episodes.shape[0]), bool)
            seams[0, np.cumsum([0, *lengths[:-1]])] = True
        self._send(columns, (episodes.shape[0],), seams)

    def _write(self, columns: dict[Key, Tensor], shape: tuple[int, int]) -> None:
        """Columns `[N, T, ...]` to the buffer, without frames in which a lane was idle."""
        lanes, steps = shape
        mask = columns.pop(MASK, None)
        if not self.is_flat:
            if mask is not None and not bool(mask.all()):
                raise ValueError(
                    "The env has steps in which some lanes are idle, for which a storage with lanes (ndim above 1) has "
                    "no place: use ndim=1."
                )
            self._send(self._laid_out(columns, steps), (*self._lanes, steps), None)
            return
        flat = self._laid_out(columns, steps)
        if mask is not None and not bool(mask.all()):
            real = mask.reshape(-1)
            flat = {key: column[real] for key, column in flat.items()}
        count = lanes * steps if mask is None else int(mask.sum())
        self._send(flat, (count,), self._lane_seams(steps, mask))

    def _lane_seams(self, steps: int, mask: Tensor | None) -> np.ndarray | None:
        """Where lanes begin that lie one after the other: `[1, frames]`, without those that `mask` leaves out."""
        lanes = math.prod(self._lanes)
        if lanes == 1:
            return None
        if mask is None:
            if self._seams is None or self._seams.size != lanes * steps:
                self._seams = (np.arange(lanes * steps) % steps == 0)[None]
            return self._seams
        real = mask.reshape(lanes, steps)
        first = (real.cumsum(1) == 1) & real
        return np.asarray(first[real].cpu().numpy())[None]

    def _extend(self, batch: TensorDictBase, seams: np.ndarray | None = None) -> None:
        """Give the buffer a batch as anybody would, and tell it what it may want to know."""
        if self._is_ours and {"source", "seams"} <= set(signature(self.buffer.extend).parameters):
            self.buffer.extend(batch, source=self._source, seams=self._interrupted(seams, tuple(batch.shape)))
        else:
            self.buffer.extend(batch)

    def _send(self, columns: dict[Key, Tensor], shape: tuple[int, ...], seams: np.ndarray | None) -> None:
        seams = self._interrupted(seams, shape)
        self.buffer.write(columns, shape, seams=seams, source=self._source, stopping=self.stopping)

    def _interrupted(self, seams: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray | None:
        """`seams`, with one before the first frames if something came between."""
        if self._is_interrupted and shape[-1]:
            seams = np.zeros((math.prod(shape[:-1]), shape[-1]), bool) if seams is None else seams.copy()
            seams[:, 0], self._is_interrupted = True, False
        return seams


def is_buffer(value: Any) -> bool:
    """Whether `value` can be written to as a replay buffer."""
    return callable(getattr(value, "extend", None)) and callable(getattr(value, "sample", None))
