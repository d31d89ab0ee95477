"""ReplayBuffer: where experience goes in, and batches come out."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from swath.data import checkpoints
from swath.data.contents import Contents
from swath.data.feeding import Feeders
from swath.data.forms import Entries, TensorDictForm, collated, form_of, gathered
from swath.data.rate_limiter import RateLimiter
from swath.data.samplers import Draw, NothingToSampleError, RandomSampler, Sampler
from swath.data.storages import ListStorage, Storage, TensorStorage
from swath.data.writers import RoundRobinWriter, Writer
from swath.errors import SwathError
from swath.keys import as_key

DEFAULT_SIZE = 1000
HOPEFUL_TRIES = 3
"""How often a batch is drawn again because frames were overwritten, before writers are made to wait."""
PATIENCE_S = 60.0
LOOK_AGAIN_S = 0.05
"""How long a wait goes on before the other side's health is looked at again."""
POLL_S = 1e-3
"""The same between processes, which have no way to wake each other that survives a kill."""


class RateLimitError(SwathError, TimeoutError):
    """Writing or sampling waited too long for the other side."""


class ReplayBuffer:
    """Frames go in with `add` and `extend`, batches come out with `sample`.

    Threads may write and sample at the same time, and with `shared=True` processes too.

    Args:
        storage: where frames lie, or a function that makes it; a `ListStorage` of 1,000 by default.
        sampler: how batches are drawn; uniformly with replacement by default.
        writer: for the founding API; the oldest frames are overwritten first.
        collate_fn: makes a batch of the list of items that a `ListStorage` gives.
        pin_memory: put batches into pinned memory, where there is a GPU to send them to.
        prefetch: how many batches to draw ahead, in a thread of its own.
        transform: called with every batch; what it returns is delivered. If it has a method `inv`, that is called with
            whatever is written.
        transform_factory: a function that makes the transform.
        batch_size: how many frames `sample()` draws.
        dim_extend: along which dimension of the storage new frames come; the last by default.
        generator: where random numbers come from; torch's own by default.
        shared: let other processes that are given this buffer write and sample.
        rate_limiter: holds writing and sampling in proportion.
    """

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Callable[[Any], Any]] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        """Put the parts together."""
        if transform is not None and transform_factory is not None:
            raise TypeError("Give either transform or transform_factory, not both.")
        self.storage: Storage = _made("storage", storage, Storage, lambda: ListStorage(DEFAULT_SIZE))
        self.sampler: Sampler = _made("sampler", sampler, Sampler, RandomSampler)
        self.writer: Writer = _made("writer", writer, Writer, RoundRobinWriter)
        self.batch_size = None if batch_size is None else _count("batch_size", batch_size)
        self.rate_limiter = rate_limiter
        self.dim_extend = self._checked_dim(dim_extend)
        self._collate = collate_fn
        self._pins = pin_memory and torch.cuda.is_available()
        self._generator = generator
        self._prefetch = 0 if not prefetch else _count("prefetch", prefetch)
        made = transform if transform_factory is None else transform_factory()
        self._transforms: list[Callable[[Any], Any]] = [] if made is None else [made]
        self._begin()
        if shared:
            self.share()

    def _begin(self) -> None:
        """What belongs to this process."""
        self._writing = threading.RLock()
        self._sampling = threading.RLock()
        self._news = threading.Condition()
        self._listeners = 0
        self._feeders = Feeders()
        self._ahead: deque[Future[Any]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def _checked_dim(self, dim: int | None) -> int:
        last = self.storage.ndim - 1
        if dim is not None and not 0 <= dim <= last:
            raise ValueError(f"dim_extend must be one of the storage's {last + 1} dimensions, got {dim!r}.")
        return last if dim is None else dim

    # -- writing -----------------------------------------------------------------------------------------------

    def add(self, item: Any) -> Any:
        """Write one frame (with `ndim` above 1, one of each lane); returns where it lies."""
        if isinstance(self.storage, ListStorage):
            return int(self._write_items([self._inverted(item)])[0])
        item = self._inverted(item)
        form = self._form(item)
        entries = {key: entry.unsqueeze(self.dim_extend) for key, entry in form.take_apart(item).items()}
        index = self._write_entries(form, entries)
        return int(index[0]) if self.storage.ndim == 1 else index

    def extend(self, data: Any) -> Tensor:
        """Write a batch of frames; returns where they lie.

        The first dimensions, as many as the storage has, are those of frames; what follows belongs to each of them.
        """
        data = self._inverted(data)
        if isinstance(self.storage, ListStorage):
            items = list(data.unbind(0)) if isinstance(data, TensorDictBase) or is_tensorclass(data) else list(data)
            return torch.from_numpy(self._write_items(items))
        data = gathered(data)
        form = self._form(data)
        return self._write_entries(form, form.take_apart(data))

    def _inverted(self, data: Any) -> Any:
        for transform in reversed(self._transforms):
            if hasattr(transform, "inv"):
                data = transform.inv(data)
        return data

    def _form(self, data: Any) -> Any:
        storage = self._tensor_storage()
        return storage.layout.form if storage.is_ready and storage.layout is not None else form_of(data)

    def _tensor_storage(self) -> TensorStorage:
        if not isinstance(self.storage, TensorStorage):
            raise TypeError(f"{type(self.storage).__name__} has no columns; use LazyTensorStorage.")
        return self.storage

    def _write_items(self, items: list[Any]) -> np.ndarray:
        assert isinstance(self.storage, ListStorage)
        if not items:
            return np.empty(0, np.int64)
        self._await_insert(len(items), None)
        with self._writing:
            index = self.storage.write_items(items)
        self._tell()
        return index

    def _write_entries(self, form: Any, entries: Entries) -> Tensor:
        """Write `entries` whose first dimensions are the storage's."""
        ndim, dim = self.storage.ndim, self.dim_extend
        if not entries:
            raise ValueError("There is nothing to write: the data have no entries.")
        for key, entry in entries.items():
            if entry.ndim < ndim:
                raise ValueError(
                    f"{key!r} has shape {tuple(entry.shape)}, fewer dimensions than the storage's ndim={ndim}."
                )
        if dim != ndim - 1:
            entries = {key: entry.movedim(dim, ndim - 1) for key, entry in entries.items()}
        shape = tuple(next(iter(entries.values())).shape[:ndim])
        return self.write(entries, shape, form=form)

    def write(
        self,
        entries: Entries,
        shape: Sequence[int],
        *,
        form: Any = None,
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
        storage, (*dims, rows) = self._tensor_storage(), shape
        if not rows:
            return torch.empty(0, dtype=torch.int64)
        self._await_insert(math.prod(shape), stopping)
        with self._writing:
            layout = storage.prepare(TensorDictForm() if form is None else form, entries, dims)
            if tuple(dims) != layout.dims:
                raise ValueError(f"The buffer has lanes of shape {layout.dims}, and was given {tuple(dims)}.")
            storage.check(entries, len(shape))
            where = torch.from_numpy(storage.write_entries(entries, rows, seams, source))
        self._tell()
        return where if not dims else self._told_by_row(where, layout.dims)

    def _told_by_row(self, rows: Tensor, dims: tuple[int, ...]) -> Tensor:
        """(row, lane...) of each frame, for storages with lanes: `[rows * lanes, ndim]`."""
        lanes = torch.cartesian_prod(*(torch.arange(n) for n in dims)).view(-1, len(dims))
        return torch.cat([rows.repeat_interleave(len(lanes))[:, None], lanes.repeat(len(rows), 1)], 1)

    # -- sampling ----------------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A batch of `batch_size` frames, and with `return_info` what the sampler tells of it.

        While a collector fills the buffer in the background, this waits for the first frames, and raises whatever went
        wrong there.
        """
        if self._feeders:
            self._feeders.raise_failure()
        size = self._size(batch_size)
        if self._prefetch and (batch_size is None or batch_size == self.batch_size):
            batch, info = self._next_ahead(size)
        else:
            batch, info = self._sample(size)
        return (batch, info) if return_info else batch

    def _size(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else _count("batch_size", batch_size)
        if size is None:
            raise RuntimeError("How many frames? Give batch_size to the buffer, or to sample(batch_size).")
        return size

    def _sample(self, size: int) -> tuple[Any, dict[str, Any]]:
        draw, data = self._draw_when_possible(size)
        if self.rate_limiter is not None:
            self.storage.ledger.count_samples(len(draw.index))
            self._tell()
        info = {"index": self._told_index(draw.index), **{name: _tensor(value) for name, value in draw.info.items()}}
        batch = self._finished(data, info)
        for transform in self._transforms:
            batch = transform(batch)
        return (batch.pin_memory() if self._pins else batch), info

    def _draw_when_possible(self, size: int) -> tuple[Draw, Any]:
        while True:
            self._await_sample(size)
            try:
                with self._sampling:
                    return self._drawn(size)
            except NothingToSampleError:
                if not self._feeders.are_feeding():
                    self._feeders.raise_failure()
                    raise
            self._wait()

    def _finished(self, batch: Any, info: dict[str, Any]) -> Any:
        """A chance to add to the batch before transforms see it."""
        return batch

    def _drawn(self, size: int) -> tuple[Draw, Any]:
        """Draw and copy; again, if frames were overwritten meanwhile. See NOTE [Writing and reading at once]."""
        if self.sampler.can_repeat:
            for _ in range(HOPEFUL_TRIES):
                draw, data, is_good = self._try(size)
                if is_good:
                    return draw, data
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with self.storage.ledger.lock:  # nobody reserves: what is there stays
                draw, data, is_good = self._try(size)
            if is_good:
                return draw, data
            time.sleep(POLL_S)
        raise TimeoutError(
            f"No whole batch could be read for {PATIENCE_S:.0f} s: writers are stopped, or far too slow."
        )

    def _try(self, size: int) -> tuple[Draw, Any, bool]:
        contents = self._contents_to_draw()
        draw = self.sampler.draw(contents, size, self._generator)
        data = self._read(draw)
        untouched = contents.whole and self.storage.ledger.head == contents.end
        return draw, data, untouched or bool(contents.holds(draw.index).all())

    def _contents_to_draw(self) -> Contents:
        storage = self.storage
        if isinstance(storage, TensorStorage) and not storage.is_ready:
            raise NothingToSampleError("Cannot sample from an empty buffer: nothing has been written to it yet.")
        return storage.contents()

    def _read(self, draw: Draw) -> Any:
        if isinstance(self.storage, ListStorage):
            items = self.storage.read_items(draw.index)
            return self._collate(items) if self._collate is not None else collated(items)
        storage = self._tensor_storage()
        assert storage.layout is not None
        entries = storage.read_entries(draw.index)
        for key, override in draw.overrides.items():
            entries[as_key(key)] = _tensor(override).to(storage.device)
        shape: tuple[int, ...] = (len(draw.index),)
        if draw.shape is not None:
            shape = draw.shape
            entries = {key: entry.view(*shape, *entry.shape[1:]) for key, entry in entries.items()}
        batch = storage.layout.form.put_together(entries, shape)
        return batch if self._collate is None else self._collate(batch)

    def _told_index(self, index: np.ndarray) -> Any:
        """Frames as users know them: row numbers, or (rows, lanes...) with several dimensions."""
        if self.storage.ndim == 1:
            return torch.from_numpy(index)
        layout = self._tensor_storage().layout
        assert layout is not None
        lanes = np.unravel_index(index // layout.rows, layout.dims)
        return tuple(torch.from_numpy(part) for part in (index % layout.rows, *lanes))

    def _flat_index(self, index: Any) -> np.ndarray:
        """The reverse of `_told_index`; also takes `[B, ndim]`."""
        if self.storage.ndim == 1:
            return np.asarray(torch.as_tensor(index).cpu().reshape(-1), np.int64)
        layout = self._tensor_storage().layout
        assert layout is not None
        if not isinstance(index, tuple):
            index = torch.as_tensor(index).cpu().reshape(-1, self.storage.ndim).unbind(1)
        rows, *lanes = (np.asarray(part) for part in index)
        return np.asarray(np.ravel_multi_index(tuple(lanes), layout.dims) * layout.rows + rows)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Sample the frames `index` by a new `priority`; without effect for samplers that have none."""
        flat = self._flat_index(index)
        values = torch.as_tensor(priority).detach().cpu().numpy()
        if values.ndim == 0:
            values = np.broadcast_to(values, (len(flat),))
        with self._sampling:
            self.sampler.update_priority(self.storage.contents(), flat, values)

    def _next_ahead(self, size: int) -> tuple[Any, dict[str, Any]]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="swath-prefetch")
        while len(self._ahead) < self._prefetch:
            self._ahead.append(self._pool.submit(self._sample, size))
        batch, info = self._ahead.popleft().result()
        self._ahead.append(self._pool.submit(self._sample, size))
        return batch, info

    def __iter__(self) -> Iterator[Any]:
        """Batches: one epoch of them without replacement, without end otherwise."""
        while True:
            try:
                yield self.sample()
            except NothingToSampleError:
                if not len(self):
                    raise
                return
            if self.sampler.ran_out:
                return

    def next(self) -> Any:
        """The next batch."""
        return self.sample()

    # -- waiting -----------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Wake those of this process who wait for something to change."""
        if self._listeners:
            with self._news:
                self._news.notify_all()

    def _wait(self) -> None:
        """Until something may have changed."""
        if self.storage.is_shared:
            time.sleep(POLL_S)
            return
        with self._news:
            self._listeners += 1
            self._news.wait(LOOK_AGAIN_S)
            self._listeners -= 1

    def _await_sample(self, size: int) -> None:
        """Until the rate limiter lets us sample."""
        limiter, begun = self.rate_limiter, time.monotonic()
        if limiter is None:
            return
        while not limiter.may_sample(size, self.write_count, self.storage.ledger.sampled):
            self._feeders.raise_failure()
            if self._feeders and not self._feeders.are_feeding():
                return  # nobody will write any more: there is nothing to be in proportion to
            if time.monotonic() - begun > limiter.timeout_s:
                raise RateLimitError(self._told_ratio("sample()", limiter))
            self._wait()

    def _await_insert(self, frames: int, stopping: Callable[[], bool] | None) -> None:
        limiter, begun = self.rate_limiter, time.monotonic()
        if limiter is None:
            return
        batch = self.batch_size or 1
        while not limiter.may_insert(frames, batch, self.write_count, self.storage.ledger.sampled):
            if stopping is not None and stopping():
                return
            if stopping is None and time.monotonic() - begun > limiter.timeout_s:
                raise RateLimitError(self._told_ratio("writing", limiter))
            self._wait()

    def _told_ratio(self, who: str, limiter: RateLimiter) -> str:
        return (
            f"{who} has waited {limiter.timeout_s:.0f} s for {limiter}: {self.write_count} frames were written and "
            f"{self.storage.ledger.sampled} sampled. Does anybody write and sample at the same time? In one thread "
            "that takes turns, leave the rate limiter out."
        )

    # -- contents ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many frames can be sampled."""
        return len(self.storage) if self._is_ready else 0

    @property
    def _is_ready(self) -> bool:
        return not isinstance(self.storage, TensorStorage) or self.storage.is_ready

    @property
    def write_count(self) -> int:
        """How many frames were ever written, since the buffer was last emptied."""
        return self.storage.ledger.written if self._is_ready else 0

    def stats(self) -> dict[str, int]:
        """Frames held, written, sampled (where a rate limiter counts them), and lost with writers that died."""
        ledger = self.storage.ledger
        return {"frames": len(self), "written": self.write_count, "sampled": ledger.sampled, "lost": ledger.lost}

    def __getitem__(self, index: Any) -> Any:
        """Copies of frames by where they lie: a number, a slice, numbers, a mask; or an entry of all, by its key."""
        if isinstance(index, str):
            return self[:][index]
        if isinstance(self.storage, ListStorage):
            return self._items_at(index)
        storage = self._tensor_storage()
        if not storage.is_ready or storage.layout is None:
            raise IndexError("The buffer is empty.")
        used, layout = storage.rows_used, storage.layout
        grid = torch.arange(layout.frames).view(*layout.dims, layout.rows)[..., :used].movedim(-1, self.dim_extend)
        chosen = grid[index]
        flat = chosen.reshape(-1).numpy()
        with storage.ledger.lock:
            held = storage.contents().holds(flat)
            if not held.all() and chosen.ndim == 1:  # what a writer left unfinished, or is just writing
                chosen, flat = chosen[torch.from_numpy(held)], flat[held]
            entries = storage.read_entries(flat)
        shaped = {key: entry.view(*chosen.shape, *entry.shape[1:]) for key, entry in entries.items()}
        return layout.form.put_together(shaped, chosen.shape)

    def _items_at(self, index: Any) -> Any:
        assert isinstance(self.storage, ListStorage)
        chosen = torch.arange(self.storage.rows_used)[index]
        items = self.storage.read_items(np.atleast_1d(chosen.numpy()))
        if chosen.ndim == 0:
            return items[0]
        return self._collate(items) if self._collate is not None else collated(items)

    def __setitem__(self, index: Any, data: Any) -> None:
        """Change frames where they lie. Nobody samples them meanwhile."""
        storage = self._tensor_storage()
        if not storage.is_ready or storage.layout is None:
            raise IndexError("The buffer is empty.")
        layout = storage.layout
        grid = torch.arange(layout.frames).view(*layout.dims, layout.rows)[..., : storage.rows_used]
        chosen = grid.movedim(-1, self.dim_extend)[index]
        entries = layout.form.take_apart(data)
        storage.check(entries, chosen.ndim)
        with self._writing:
            storage.overwrite(chosen.reshape(-1).numpy(), entries)

    def empty(self) -> None:
        """Forget everything that was written."""
        with self._writing, self._sampling:
            if self._is_ready:
                self.storage.empty()
            self.sampler.empty()
            self._ahead.clear()

    # -- sharing and saving ------------------------------------------------------------------------------------

    def share(self, shared: bool = True) -> ReplayBuffer:
        """Let other processes that are given this buffer write and sample."""
        if shared:
            with self._writing, self._sampling:
                self.storage.share()
        return self

    @property
    def is_shared(self) -> bool:
        """Whether other processes can write and sample."""
        return self.storage.is_shared

    def attach(self, feeder: Any) -> None:
        """Know of somebody who fills the buffer in the background: `sample` waits for it, and raises its errors."""
        self._feeders.add(feeder)

    def append_transform(self, transform: Callable[[Any], Any]) -> ReplayBuffer:
        """Call `transform` with every batch, after those that are there."""
        self._transforms.append(transform)
        return self

    def insert_transform(self, index: int, transform: Callable[[Any], Any]) -> ReplayBuffer:
        """Call `transform` with every batch, as the one at `index`."""
        self._transforms.insert(index, transform)
        return self

    @property
    def transform(self) -> list[Callable[[Any], Any]]:
        """What is called with every batch, in order."""
        return self._transforms

    def set_sampler(self, sampler: Sampler) -> None:
        """Draw with another sampler from now on."""
        with self._sampling:
            self.sampler = _made("sampler", sampler, Sampler, RandomSampler)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from another generator from now on."""
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Frames, cursor, sampler and random state, as plain tensors, numbers and dicts. Nobody writes meanwhile."""
        with self._writing, self._sampling, self.storage.ledger.at_rest():
            return self._state(copy=True)

    def _state(self, copy: bool) -> dict[str, Any]:
        return {
            "storage": checkpoints.storage_state(self.storage, copy),
            "sampler": self.sampler.state_dict(),
            "random": torch.get_rng_state() if self._generator is None else self._generator.get_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what was saved, and draw from it what would have been drawn there.

        The buffer then has a random generator of its own, in the state of the one that was saved.
        """
        with self._writing, self._sampling, self.storage.ledger.at_rest():
            checkpoints.load_storage_state(self.storage, state_dict["storage"])
            self.sampler.load_state_dict(state_dict["sampler"])
            self._generator = torch.Generator()
            self._generator.set_state(state_dict["random"])
            self._ahead.clear()

    def dumps(self, path: str | Path) -> None:
        """Save to the directory `path`. What was saved there before is replaced once the new is complete."""
        with self._writing, self._sampling, self.storage.ledger.at_rest():
            checkpoints.dump(self._state(copy=False), Path(path))

    def loads(self, path: str | Path) -> None:
        """Load what `dumps` has saved; nothing in the files is ever executed."""
        self.load_state_dict(checkpoints.load(Path(path)))

    dump, load, save = dumps, loads, dumps

    def to_minari(
        self,
        dataset_id: str,
        env: Any = None,
        *,
        keep_headless: bool = False,
        keep_unfinished: bool = False,
        **options: Any,
    ) -> Any:
        """Write the complete episodes to a Minari dataset, and return that. Nobody writes to the buffer meanwhile.

        Args:
            dataset_id: the dataset's name, as in "cartpole/random-v0".
            env: the env that the frames come from; without one, `observation_space` and `action_space` are needed.
            keep_headless: also write episodes whose beginning may have been overwritten.
            keep_unfinished: also write episodes that have not ended, as truncated.
            options: see `swath.data.minari.write_minari`.
        """
        from swath.data.minari import episodes_in, write_minari

        storage = self._tensor_storage()

        def read(index: np.ndarray) -> TensorDictBase:
            return TensorDictForm().put_together(storage.read_entries(index), [len(index)])

        with self._writing, storage.ledger.at_rest():
            contents = self._contents_to_draw()
            episodes = episodes_in(contents, read, keep_headless=keep_headless, keep_unfinished=keep_unfinished)
            return write_minari(episodes, dataset_id, env, **options)

    def shutdown(self) -> None:
        """Stop drawing ahead."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()
        self._pool = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: threads, batches drawn ahead, who fills it."""
        own = ("_writing", "_sampling", "_news", "_listeners", "_feeders", "_ahead", "_pool")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        if self._generator is not None:
            state["_generator"] = (str(self._generator.device), self._generator.get_state())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin here."""
        self.__dict__.update(state)
        if self._generator is not None:
            device, random = state["_generator"]
            self._generator = torch.Generator(device)
            self._generator.set_state(random)
        self._begin()

    def __repr__(self) -> str:
        """Storage, sampler and batch size."""
        return (
            f"{type(self).__name__}(storage={self.storage!r}, sampler={type(self.sampler).__name__}, "
            f"batch_size={self.batch_size})"
        )


def _made(name: str, given: Any, kind: type[Any], default: Callable[[], Any]) -> Any:
    """What was given, or made by what was given."""
    if given is None:
        return default()
    made = given() if callable(given) and not isinstance(given, kind) else given
    if not isinstance(made, kind):
        raise TypeError(f"{name} must be a {kind.__name__} or a function that makes one, got {given!r}.")
    return made


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}.")
    return int(value)


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.as_tensor(value)
