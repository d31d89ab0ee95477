"""ReplayBuffer: where experience goes in, and batches come out."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from swath.data import checkpoint_files, checkpoints
from swath.data.drawing import Drawer
from swath.data.forms import Entries, Form, as_tensor
from swath.data.pacing import Feeder, RateLimiter
from swath.data.prefetching import Prefetcher, Sampled
from swath.data.samplers import RandomSampler, Sampler
from swath.data.storages import ListStorage, Storage, created, positive, refuse_misplaced
from swath.data.tensor_storages import TensorStorage
from swath.data.transforms import InvertedTransform, TransformList
from swath.data.writers import RoundRobinWriter, Writer
from swath.errors import NothingToSampleError

DEFAULT_SIZE = 1000


class ReplayBuffer:
    """Frames go in with `add` and `extend`, batches come out with `sample`.

    Threads may write and sample at the same time, and with `shared=True` processes too.

    Args:
        storage: where frames lie, or a function that creates it; a `ListStorage` of 1,000 by default.
        sampler: how batches are drawn; uniformly with replacement by default.
        writer: for TorchRL; the oldest frames are overwritten first.
        collate_fn: makes a batch of the list of items that a `ListStorage` gives.
        pin_memory: put batches into pinned memory, where there is a GPU to send them to.
        prefetch: how many batches to draw ahead, in a thread of its own.
        transform: called with every batch; what it returns is delivered. If it has a method `inv`, that is called with
            what is written.
        transform_factory: a function that creates the transform.
        batch_size: how many frames `sample()` draws.
        dim_extend: along which dimension of the storage new frames come; the last by default.
        generator: where random numbers come from; torch's own by default.
        shared: let other processes that are given this buffer write and sample.
        rate_limiter: holds writing and sampling in proportion.
        compilable: for TorchRL; changes nothing, as does `delayed_init`.
    """

    def __init__(
        self,
        *misplaced: NoReturn,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Callable[[Any], Any]] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        rate_limiter: RateLimiter | None = None,
        compilable: Any = None,
        delayed_init: Any = None,
    ) -> None:
        refuse_misplaced(type(self).__name__, misplaced)
        if transform is not None and transform_factory is not None:
            raise TypeError("Give either transform or transform_factory, not both.")
        self.storage: Storage = created("storage", storage, Storage, lambda: ListStorage(DEFAULT_SIZE))
        self.writer: Writer = created("writer", writer, Writer, RoundRobinWriter)
        self.batch_size = None if batch_size is None else positive("batch_size", batch_size)
        last = self.storage.ndim - 1
        if dim_extend is not None and not 0 <= dim_extend <= last:
            raise ValueError(f"dim_extend must be one of the storage's {last + 1} dimensions, got {dim_extend!r}.")
        self.dim_extend = last if dim_extend is None else dim_extend
        self.rate_limiter = rate_limiter
        self._collate = collate_fn
        chooser: Sampler = created("sampler", sampler, Sampler, RandomSampler)
        self._drawer = Drawer(self.storage, chooser, rate_limiter, generator, self.batch_size, collate_fn)
        self._pins = pin_memory and torch.cuda.is_available()
        self._prefetch = 0 if not prefetch else positive("prefetch", prefetch)
        first = transform if transform_factory is None else transform_factory()
        self._transforms = TransformList([] if first is None else [first])
        self._start()
        if shared:
            self.share()

    def _start(self) -> None:
        """Make what belongs to this process: locks and threads, which neither a copy nor a forked child has."""
        self._drawer.start()
        self._prefetcher = Prefetcher(self._sample, self._prefetch) if self._prefetch else None
        _buffers.add(self)

    # -- writing -----------------------------------------------------------------------------------------------

    def add(self, data: Any) -> Any:
        """Write one frame (with `ndim` above 1, one of each lane); returns where it lies."""
        data = self._transforms.inv(data)
        if isinstance(self.storage, ListStorage):
            return int(self._write_items([data])[0])
        form, entries, shape = self._tensor_storage().take_apart(data, self.dim_extend, is_one=True)
        index = self.write(entries, shape, form=form)
        return int(index[0]) if self.storage.ndim == 1 else index

    def extend(self, data: Any, *, source: Any = None, seams: np.ndarray | None = None) -> Tensor:
        """Write a batch of frames; returns where they lie.

        The first dimensions, as many as the storage has, are those of frames; what follows belongs to each of them. A
        list is a list of frames. `source` and `seams` are as for `write`.
        """
        return self._extend(data, source=source, seams=seams)

    def _extend(self, data: Any, source: Any = None, seams: np.ndarray | None = None, **options: Any) -> Tensor:
        data = self._transforms.inv(data)
        if isinstance(self.storage, ListStorage):
            if isinstance(data, Mapping) and not isinstance(data, TensorDictBase):
                raise TypeError("A ListStorage takes a list of items, and was given a dict: give a list of dicts.")
            items = list(data.unbind(0)) if isinstance(data, TensorDictBase) or is_tensorclass(data) else list(data)
            return torch.from_numpy(self._write_items(items, source, seams))
        form, entries, shape = self._tensor_storage().take_apart(data, self.dim_extend)
        return self.write(entries, shape, form=form, source=source, seams=seams, **options)

    def _tensor_storage(self) -> TensorStorage:
        if not isinstance(self.storage, TensorStorage):
            raise TypeError(f"{type(self.storage).__name__} has no columns; use LazyTensorStorage.")
        return self.storage

    def _write_items(self, items: list[Any], source: Any = None, seams: np.ndarray | None = None) -> np.ndarray:
        assert isinstance(self.storage, ListStorage)
        if not items:
            return np.empty(0, np.int64)
        self._drawer.pace.await_insert(len(items), self.batch_size, None)
        with self.storage.ledger.writing:
            index = self.storage.write_items(items, source, seams)
        self._drawer.pace.notify()
        return index

    @property
    def takes_columns(self) -> bool:
        """Whether `write` does all that `extend` would do, so that a collector may hand over its columns."""
        own = getattr(type(self).extend, "__module__", "").startswith("swath.data") and "extend" not in vars(self)
        inverts = any([hasattr(transform, "inv") for transform in self._transforms])
        return own and not inverts and isinstance(self.storage, TensorStorage)

    def write(
        self,
        entries: Entries,
        shape: Sequence[int],
        *,
        form: Form | None = None,
        seams: np.ndarray | None = None,
        source: Any = None,
        stopping: Callable[[], bool] | None = None,
    ) -> Tensor:
        """Write tensors `[*shape, ...]` by key, `shape` being lanes and time; the data's one copy on their way here.

        Args:
            entries: the tensors.
            shape: the batch dimensions of `entries`; their number is the storage's `ndim`.
            form: how they are put together when read; as a TensorDict by default.
            seams: bool `[lanes, time]`: which frames do not continue the one before; see `Contents`.
            source: who writes, where several do: frames of different sources never continue each other.
            stopping: asked while waiting for the rate limiter; if it says so, the frames are written at once.
        """
        storage = self._tensor_storage()
        if not shape[-1]:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        self._drawer.pace.await_insert(math.prod(shape), self.batch_size, stopping)
        with storage.ledger.writing:
            where = storage.write_entries(form, entries, shape, seams, source)
        self._drawer.pace.notify()
        return where

    # -- sampling ----------------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: Any = None) -> Any:
        """A batch of `batch_size` frames, and with `return_info` what the sampler says of it.

        While a collector fills the buffer in the background, this waits for the first frames, and raises any error of
        the collector. `include_info` is there for TorchRL, and changes nothing.
        """
        sampled = self.take(batch_size)
        return (sampled.batch, sampled.info) if return_info else sampled.batch

    def take(self, batch_size: int | None = None, stopping: Callable[[], bool] | None = None) -> Sampled:
        """As `sample`, with how the batch was drawn. `stopping` is as for `write`."""
        drawer = self._drawer
        drawer.pace.feeders.raise_failure()
        if (size := self.batch_size if batch_size is None else positive("batch_size", batch_size)) is None:
            raise RuntimeError("How many frames? Give batch_size to the buffer, or to sample(batch_size).")
        if self._prefetcher is None or size != self.batch_size:
            return self._sample(size, stopping=stopping)
        drawer.pace.is_closed = False
        try:
            sampled = self._prefetcher.take(size, lambda: drawer.pace.is_over(stopping))
        except BaseException:
            drawer.put_back()
            raise
        if sampled is None:  # the thread that draws ahead waits, and we need not
            drawer.put_back()
            return self._sample(size, stopping=stopping)
        drawer.deliver(sampled.draw)
        return sampled

    def _sample(self, size: int, is_ahead: bool = False, stopping: Callable[[], bool] | None = None) -> Sampled:
        draw, data = self._drawer.draw(size, is_ahead, stopping)
        index = self.storage.public_index(draw.index)
        info = {"index": index, **{name: as_tensor(value) for name, value in draw.info.items()}}
        batch = self._transforms(self._completed(data, info))
        return Sampled(batch.pin_memory() if self._pins else batch, info, draw)

    def _completed(self, batch: Any, info: dict[Any, Any]) -> Any:
        """A chance to add to the batch before transforms see it."""
        return batch

    def update_priority(self, index: Any, priority: Any) -> None:
        """Sample the frames `index` by a new `priority`; without effect for samplers that have none.

        With several dimensions, `index` is as `extend` or `sample` gave it, and `priority` has an element for each
        frame of it, or the shape of the batch that was written.
        """
        values, ndim = torch.as_tensor(priority, device="cpu").detach().double(), self.storage.ndim
        flat = self.storage.flat_index(index)
        if ndim > 1 and values.ndim >= ndim and math.prod(values.shape[:ndim]) == len(flat) != len(values):
            values = values.movedim(self.dim_extend, 0).flatten(0, ndim - 1)  # row by row, as the index is
        if values.numel() == 1:
            values = values.reshape(1).expand(len(flat))
        with self._drawer.lock:
            self.sampler.update_priority(self.storage.contents(), flat, values.numpy())

    def __iter__(self) -> Iterator[Any]:
        """Batches: one epoch of them without replacement, without end otherwise."""
        while True:
            try:
                sampled = self.take()
            except NothingToSampleError:
                if not len(self):
                    raise
                return
            yield sampled.batch
            if sampled.draw.ends_epoch:
                return

    def next(self) -> Any:
        """The next batch."""
        return self.sample()

    @property
    def sampler(self) -> Sampler:
        """What chooses the frames of batches."""
        return self._drawer.sampler

    def set_sampler(self, sampler: Sampler) -> None:
        """Draw with another sampler from now on."""
        with self._drawer.lock:
            self._drawer.sampler = created("sampler", sampler, Sampler, RandomSampler)
            self._forget_draws()

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from another generator from now on."""
        self._drawer.generator = generator

    def append_transform(self, transform: Callable[[Any], Any], *, invert: bool = False) -> ReplayBuffer:
        """Call `transform` with every batch, after those that are there; or with what is written, to `invert` it."""
        self._transforms.append(InvertedTransform(transform) if invert else transform)
        return self

    def insert_transform(self, index: int, transform: Callable[[Any], Any], *, invert: bool = False) -> ReplayBuffer:
        """Call `transform` with every batch, as the one at `index`."""
        if not -len(self._transforms) <= index <= len(self._transforms):
            raise ValueError(f"There are {len(self._transforms)} transforms; {index} is no place among them.")
        self._transforms.insert(index, InvertedTransform(transform) if invert else transform)
        return self

    @property
    def transform(self) -> list[Callable[[Any], Any]]:
        """What is called with every batch, in order."""
        return self._transforms

    # -- contents ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many frames can be sampled."""
        return len(self.storage)

    @property
    def write_count(self) -> int:
        """How many frames were ever written, since the buffer was last emptied."""
        return self.storage.write_count

    def stats(self) -> dict[str, int]:
        """Frames held, written, sampled, and lost with writers that died."""
        ledger = self.storage.ledger
        return {"frames": len(self), "written": self.write_count, "sampled": ledger.delivered, "lost": ledger.lost}

    def __getitem__(self, index: Any) -> Any:
        """Copies of frames by where they lie: a number, a slice, numbers, a mask; or an entry of all, by its key."""
        if isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(part, str) for part in index)):
            return self[:][index]
        if isinstance(self.storage, ListStorage) and self._collate is not None:
            return self._transforms(self.storage.get(index, collate=self._collate))
        return self._transforms(self.storage.get(index, self.dim_extend))

    def __setitem__(self, index: Any, data: Any) -> None:
        """Change frames where they lie. Nobody samples them meanwhile."""
        with self.storage.ledger.writing:
            self.storage.set(index, self._transforms.inv(data), self.dim_extend)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget everything that was written, and, unless `empty_write_count` is False, how much it was."""
        with self._drawer.lock, self.storage.ledger.writing:
            self.storage.empty(keep_count=not empty_write_count)
            self.sampler.empty()
            self._forget_draws()

    def _forget_draws(self) -> None:
        self._drawer.reset()
        if self._prefetcher is not None:
            self._prefetcher.clear()

    # -- sharing and saving ------------------------------------------------------------------------------------

    def share(self, shared: bool = True) -> ReplayBuffer:
        """Let other processes that are given this buffer write and sample."""
        if shared:
            with self._drawer.lock, self.storage.ledger.writing:
                self.storage.share()
        return self

    @property
    def is_shared(self) -> bool:
        """Whether other processes can write and sample."""
        return self.storage.is_shared

    def enrol(self) -> int:
        """A number that no other writer of this buffer has, for the ids of trajectories."""
        return self.storage.ledger.enrol()

    def attach(self, feeder: Feeder) -> None:
        """Know of a feeder that fills the buffer in the background: `sample` waits for it, and raises its errors."""
        self._drawer.pace.feeders.add(feeder)

    def detach(self, feeder: Feeder) -> None:
        """Forget a feeder."""
        self._drawer.pace.feeders.remove(feeder)

    @contextlib.contextmanager
    def _at_rest(self) -> Iterator[None]:
        """A context in which nobody writes or draws."""
        with self._drawer.lock, self.storage.ledger.writing:
            len(self)  # what another process has laid out is known here from now on
            with self.storage.ledger.at_rest():
                yield

    def state_dict(self) -> dict[str, Any]:
        """Frames, cursor, sampler and random state, as plain tensors, numbers and dicts. Nobody writes meanwhile."""
        with self._at_rest():
            return self._state(copy=True)

    def _state(self, copy: bool) -> dict[str, Any]:
        return {"storage": checkpoints.storage_state(self.storage, copy), **self._drawer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what was saved, and draw from it what would have been drawn there; or refuse it and change nothing.

        The buffer then has a random generator of its own, in the state of the one that was saved.
        """
        kind = state_dict.get("sampler_kind", type(self.sampler).__name__)
        if kind != type(self.sampler).__name__:
            raise ValueError(
                f"The saved buffer has a {kind} as its sampler, and this one a {type(self.sampler).__name__}."
            )
        with self._at_rest(), self._drawer.loading(state_dict):
            checkpoints.load_storage_state(self.storage, state_dict["storage"])
            self._forget_draws()

    def dumps(self, path: str | Path) -> None:
        """Save to the directory `path`, beside what else is there.

        What was saved there before is replaced once the new is complete and on the disk.
        """
        with checkpoint_files.replacing(Path(path)) as write, self._at_rest():
            write(self._state(copy=False))

    def loads(self, path: str | Path) -> None:
        """Load what `dumps` has saved; nothing in the files is ever executed.

        What is damaged, or does not fit, is refused with a CheckpointError that names the file. Nothing changes then.
        """
        with checkpoint_files.refusing(Path(path) / checkpoint_files.STATE_FILE):
            self.load_state_dict(checkpoint_files.load(Path(path)))

    dump, load, save = dumps, loads, dumps

    @contextlib.contextmanager
    def episodes(
        self, *, keep_headless: bool = False, keep_unfinished: bool = False
    ) -> Iterator[Iterator[TensorDictBase]]:
        """A context in which the complete episodes can be read, one `[T]` at a time, and nobody writes.

        See `swath.data.stored_episodes` for what is complete.

        Args:
            keep_headless: give also episodes whose beginning may have been overwritten.
            keep_unfinished: give also episodes that have not ended, the last frame marked as truncated.
        """
        with self._at_rest():
            yield self._tensor_storage().episodes(keep_headless=keep_headless, keep_unfinished=keep_unfinished)

    def shutdown(self) -> None:
        """Stop drawing ahead."""
        self._drawer.pace.is_closed = True
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._drawer.put_back()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_prefetcher"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(storage={self.storage!r}, sampler={type(self.sampler).__name__}, "
            f"batch_size={self.batch_size})"
        )


_buffers: weakref.WeakSet[ReplayBuffer] = weakref.WeakSet()


def _start_in_child() -> None:
    """After a fork: threads, and the locks that they held, are not those of this process."""
    for buffer in list(_buffers):
        buffer._start()
        buffer.storage.ledger.renew_lock()


os.register_at_fork(after_in_child=_start_in_child)
