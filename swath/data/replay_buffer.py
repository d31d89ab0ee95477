"""ReplayBuffer: where experience goes in, and batches come out."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from swath.data import checkpoints
from swath.data.ahead import DrawnAhead, Sampled
from swath.data.columns import TensorStorage
from swath.data.contents import Contents
from swath.data.forms import Entries, Form, TensorDictForm, collated, form_of, gathered
from swath.data.pacing import POLL_S, Pace
from swath.data.rate_limiter import RateLimiter
from swath.data.samplers import Draw, NothingToSampleError, RandomSampler, Sampler
from swath.data.storages import ListStorage, Storage, positive
from swath.data.writers import RoundRobinWriter, Writer
from swath.keys import as_key

DEFAULT_SIZE = 1000
HOPEFUL_TRIES = 3
"""How often a batch is drawn again because frames were overwritten, before writers are made to wait."""
PATIENCE_S = 60.0
"""How long `sample` waits for a batch while frames come of which none can be made."""
STALL_WARNING_S = 15.0
STALL_S = 600.0
"""How long it waits for somebody who should fill the buffer and does not."""


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
        compilable: for the founding API; changes nothing, as does `delayed_init`.
    """

    def __init__(
        self,
        *,
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
        """Put the parts together."""
        if transform is not None and transform_factory is not None:
            raise TypeError("Give either transform or transform_factory, not both.")
        self.storage: Storage = made("storage", storage, Storage, lambda: ListStorage(DEFAULT_SIZE))
        self.sampler: Sampler = made("sampler", sampler, Sampler, RandomSampler)
        self.writer: Writer = made("writer", writer, Writer, RoundRobinWriter)
        self.batch_size = None if batch_size is None else positive("batch_size", batch_size)
        self.rate_limiter = rate_limiter
        self.dim_extend = self._checked_dim(dim_extend)
        self._collate = collate_fn
        self._pins = pin_memory and torch.cuda.is_available()
        self._generator = generator
        self._prefetch = 0 if not prefetch else positive("prefetch", prefetch)
        self._saved_draws: deque[Draw] = deque()
        """Draws that the buffer whose state was loaded had made, and not delivered."""
        first = transform if transform_factory is None else transform_factory()
        self._transforms: list[Callable[[Any], Any]] = [] if first is None else [first]
        self._begin()
        if shared:
            self.share()

    def _begin(self) -> None:
        """What belongs to this process."""
        self._sampling = threading.RLock()
        self._pace = Pace(self.storage, self.rate_limiter)
        self._ahead = DrawnAhead(self._sample_ahead, self._prefetch) if self._prefetch else None
        self._undelivered: list[Draw] = []
        """What was drawn ahead and not yet delivered."""
        _buffers.add(self)

    def _checked_dim(self, dim: int | None) -> int:
        last = self.storage.ndim - 1
        if dim is not None and not 0 <= dim <= last:
            raise ValueError(f"dim_extend must be one of the storage's {last + 1} dimensions, got {dim!r}.")
        return last if dim is None else dim

    # -- writing -----------------------------------------------------------------------------------------------

    def add(self, data: Any) -> Any:
        """Write one frame (with `ndim` above 1, one of each lane); returns where it lies."""
        data = self._inverted(data)
        if isinstance(self.storage, ListStorage):
            return int(self._write_items([data])[0])
        form = self._form(data, self.storage.ndim - 1)
        entries = {key: entry.unsqueeze(self.dim_extend) for key, entry in form.take_apart(data).items()}
        index = self._write_entries(form, entries)
        return int(index[0]) if self.storage.ndim == 1 else index

    def extend(self, data: Any, *, source: Any = None, seams: np.ndarray | None = None) -> Tensor:
        """Write a batch of frames; returns where they lie.

        The first dimensions, as many as the storage has, are those of frames; what follows belongs to each of them. A
        list is a list of frames. `source` and `seams` are as for `write`.
        """
        return self._extend(data, source=source, seams=seams)

    def _extend(self, data: Any, source: Any = None, seams: np.ndarray | None = None, **options: Any) -> Tensor:
        data = self._inverted(data)
        if isinstance(self.storage, ListStorage):
            if isinstance(data, Mapping) and not isinstance(data, TensorDictBase):
                raise TypeError("A ListStorage takes a list of items, and was given a dict: give a list of dicts.")
            items = list(data.unbind(0)) if isinstance(data, TensorDictBase) or is_tensorclass(data) else list(data)
            return torch.from_numpy(self._write_items(items, source, seams))
        data = gathered(data)
        form = self._form(data, self.storage.ndim)
        return self._write_entries(form, form.take_apart(data), source=source, seams=seams, **options)

    def _inverted(self, data: Any) -> Any:
        for transform in reversed(self._transforms):
            if hasattr(transform, "inv"):
                data = transform.inv(data)
        return data

    def _form(self, data: Any, batch_dims: int) -> Form:
        storage = self._tensor_storage()
        return storage.layout.form if storage.is_ready and storage.layout is not None else form_of(data, batch_dims)

    def _tensor_storage(self) -> TensorStorage:
        if not isinstance(self.storage, TensorStorage):
            raise TypeError(f"{type(self.storage).__name__} has no columns; use LazyTensorStorage.")
        return self.storage

    def _write_items(self, items: list[Any], source: Any = None, seams: np.ndarray | None = None) -> np.ndarray:
        assert isinstance(self.storage, ListStorage)
        if not items:
            return np.empty(0, np.int64)
        self._pace.await_insert(len(items), self.batch_size, None)
        with self.storage.ledger.writing:
            index = self.storage.write_items(items, source, seams)
        self._pace.tell()
        return index

    def _write_entries(self, form: Form, entries: Entries, **options: Any) -> Tensor:
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
        for key, entry in entries.items():
            if entry.shape[:ndim] != shape:
                raise ValueError(f"{key!r} is a batch of {tuple(entry.shape[:ndim])} frames, and others of {shape}.")
        return self.write(entries, shape, form=form, **options)

    @property
    def takes_columns(self) -> bool:
        """Whether `write` does all that `extend` would do, so that a collector may hand over its columns."""
        own = getattr(type(self).extend, "__module__", "").startswith("swath.data") and "extend" not in vars(self)
        inverts = any(hasattr(transform, "inv") for transform in self._transforms)
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
        storage, (*dims, rows) = self._tensor_storage(), shape
        if not rows:
            return torch.empty(0, dtype=torch.int64)
        self._pace.await_insert(math.prod(shape), self.batch_size, stopping)
        with self.storage.ledger.writing:
            layout = storage.prepare(TensorDictForm() if form is None else form, entries, dims)
            if tuple(dims) != layout.dims:
                raise ValueError(f"The buffer has lanes of shape {layout.dims}, and was given {tuple(dims)}.")
            storage.check(entries, len(shape))
            where = storage.write_entries(entries, rows, seams, source)
        self._pace.tell()
        return layout.told_by_row(where)

    # -- sampling ----------------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: Any = None) -> Any:
        """A batch of `batch_size` frames, and with `return_info` what the sampler tells of it.

        While a collector fills the buffer in the background, this waits for the first frames, and raises whatever went
        wrong there. `include_info` is there for the founding API, and changes nothing.
        """
        sampled = self._next(batch_size)
        return (sampled.batch, sampled.info) if return_info else sampled.batch

    def _next(self, batch_size: int | None = None) -> Sampled:
        if self._pace.feeders:
            self._pace.feeders.raise_failure()
        size = self.batch_size if batch_size is None else positive("batch_size", batch_size)
        if size is None:
            raise RuntimeError("How many frames? Give batch_size to the buffer, or to sample(batch_size).")
        if self._ahead is None or size != self.batch_size:
            return self._sample(size)
        self._pace.is_closed = False
        try:
            sampled = self._ahead.take(size, self._pace.feeders.have_ended)
        except BaseException:
            self._put_back()
            raise
        if sampled is None:  # the thread that draws ahead waits, and we need not
            self._put_back()
            return self._sample(size)
        with self._sampling:
            self._undelivered = [draw for draw in self._undelivered if draw is not sampled.draw]
        return sampled

    def _put_back(self) -> None:
        """Let what was drawn ahead, and is not going to be delivered from there, be drawn next."""
        with self._sampling:
            self._saved_draws.extend(self._undelivered)
            self._undelivered.clear()

    def _sample_ahead(self, size: int) -> Sampled:
        return self._sample(size, ahead=True)

    def _sample(self, size: int, ahead: bool = False) -> Sampled:
        draw, data = self._draw_when_possible(size, ahead)
        self._pace.drew(size, len(draw.index))
        index = self._told_index(draw.index)
        info = {"index": index, **{name: _tensor(value) for name, value in draw.info.items()}}
        batch = self._finished(data, info)
        for transform in self._transforms:
            batch = transform(batch)
        return Sampled(batch.pin_memory() if self._pins else batch, info, draw)

    def _finished(self, batch: Any, info: dict[Any, Any]) -> Any:
        """A chance to add to the batch before transforms see it."""
        return batch

    def _draw_when_possible(self, size: int, ahead: bool) -> tuple[Draw, Any]:
        """Draw and copy; while somebody fills the buffer, wait until it can be done."""
        ledger, quiet, warned = self.storage.ledger, -1, False
        begun: tuple[float, int] | None = None
        while True:
            self._pace.await_sample(size)
            try:
                with self._sampling:
                    draw, data = self._drawn(size)
                    if ahead:
                        self._undelivered.append(draw)
                    return draw, data
            except NothingToSampleError as error:
                self._pace.drew(size, 0)
                now = -1 if ledger.is_busy else ledger.head
                if now != quiet and now >= 0:  # writers may just have been at all there is: look once more
                    quiet = now
                    continue
                begun = begun or (time.monotonic(), self.write_count)
                waited = time.monotonic() - begun[0]
                if now >= 0 and not self._pace.feeders.are_feeding():
                    self._pace.feeders.raise_failure()
                    raise
                if self._pace.is_closed or waited > (PATIENCE_S if self.write_count > begun[1] else STALL_S):
                    raise
                if waited > STALL_WARNING_S and not warned:
                    warned = True
                    warnings.warn(f"sample() has waited {waited:.0f} s for frames: {error}", stacklevel=2)
            self._pace.feeders.raise_failure()
            self._pace.wait()

    def _drawn(self, size: int) -> tuple[Draw, Any]:
        """Draw and copy; again, if frames were overwritten meanwhile. See NOTE [Writing and reading at once]."""
        tries = HOPEFUL_TRIES if self.sampler.can_repeat else 0
        with contextlib.suppress(NothingToSampleError):  # all there is may just be changed: look again under the lock
            for _ in range(tries):
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
        if not self.storage.is_ready:
            raise NothingToSampleError("Cannot sample from an empty buffer: nothing has been written to it yet.")
        contents = self.storage.contents()
        draw = self._choose(contents, size)
        data = self._read(draw)
        ledger = self.storage.ledger
        untouched = contents.whole and ledger.head == contents.end
        is_good = ledger.edits == contents.edits and (untouched or bool(contents.holds(draw.index).all()))
        return draw, data, is_good

    def _choose(self, contents: Contents, size: int) -> Draw:
        while self._saved_draws and size == self.batch_size:
            saved = self._saved_draws.popleft()
            if contents.holds(saved.index).all():
                return saved
        draw = self.sampler.draw(contents, size, self._generator)
        return replace(draw, ends_epoch=True) if self.sampler.ran_out else draw

    def _read(self, draw: Draw) -> Any:
        if isinstance(self.storage, ListStorage):
            items = self.storage.read_items(draw.index)
            if self._collate is not None:
                return self._collate(items)
            kept = collated(items)
            if isinstance(kept, TensorDictBase):
                for key, override in draw.overrides.items():
                    kept.set(key, _tensor(override))
            return kept
        storage = self._tensor_storage()
        assert storage.layout is not None
        entries = storage.read_entries(draw.index)
        for key, override in draw.overrides.items():
            entries[as_key(key)] = _tensor(override).to(storage.device)
        batch = storage.layout.form.put_together(entries, (len(draw.index),))
        return batch if self._collate is None else self._collate(batch)

    def _told_index(self, index: np.ndarray) -> Any:
        if self.storage.ndim == 1:
            return torch.from_numpy(index)
        layout = self._tensor_storage().layout
        assert layout is not None
        return layout.told(index)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Sample the frames `index` by a new `priority`; without effect for samplers that have none.

        With several dimensions, `index` is what `extend` or `sample` told, and `priority` has an element for each frame
        of it, or the shape of the batch that was written.
        """
        values = torch.as_tensor(priority).detach().cpu().double()
        if isinstance(self.storage, ListStorage):
            flat = np.asarray(torch.as_tensor(index).cpu().reshape(-1), np.int64)
        else:
            layout = self._tensor_storage().layout
            if layout is None:
                raise IndexError("The buffer is empty: there is no frame that could have a priority.")
            flat = layout.index_of(index)
            ndim = self.storage.ndim
            if ndim > 1 and values.ndim >= ndim and math.prod(values.shape[:ndim]) == len(flat) != len(values):
                values = values.movedim(self.dim_extend, 0).flatten(0, ndim - 1)  # row by row, as the index is
        if values.numel() == 1:
            values = values.reshape(1).expand(len(flat))
        with self._sampling:
            self.sampler.update_priority(self.storage.contents(), flat, values.numpy())

    def __iter__(self) -> Iterator[Any]:
        """Batches: one epoch of them without replacement, without end otherwise."""
        while True:
            try:
                sampled = self._next()
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

    # -- contents ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many frames can be sampled."""
        return len(self.storage)

    @property
    def write_count(self) -> int:
        """How many frames were ever written, since the buffer was last emptied."""
        return self.storage.write_count

    def stats(self) -> dict[str, int]:
        """Frames held, written, sampled (where a rate limiter counts them), and lost with writers that died."""
        ledger = self.storage.ledger
        return {
            "frames": len(self),
            "written": self.write_count,
            "sampled": ledger.sampled,
            "lost": ledger.lost,
        }

    def __getitem__(self, index: Any) -> Any:
        """Copies of frames by where they lie: a number, a slice, numbers, a mask; or an entry of all, by its key."""
        if isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(part, str) for part in index)):
            return self[:][index]
        if isinstance(self.storage, ListStorage) and self._collate is not None:
            data = self.storage.get(index, collate=self._collate)
        else:
            data = self.storage.get(index, self.dim_extend)
        for transform in self._transforms:
            data = transform(data)
        return data

    def __setitem__(self, index: Any, data: Any) -> None:
        """Change frames where they lie. Nobody samples them meanwhile."""
        with self.storage.ledger.writing:
            self.storage.set(index, self._inverted(data), self.dim_extend)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget everything that was written, and, unless told otherwise, how much it was."""
        with self.storage.ledger.writing, self._sampling:
            self.storage.empty(keep_count=not empty_write_count)
            self.sampler.empty()
            self._forget_draws()

    def _forget_draws(self) -> None:
        self._saved_draws.clear()
        self._undelivered.clear()
        if self._ahead is not None:
            self._ahead.clear()

    # -- sharing and saving ------------------------------------------------------------------------------------

    def share(self, shared: bool = True) -> ReplayBuffer:
        """Let other processes that are given this buffer write and sample."""
        if shared:
            with self.storage.ledger.writing, self._sampling:
                self.storage.share()
                self.storage.forget_contents()
        return self

    @property
    def is_shared(self) -> bool:
        """Whether other processes can write and sample."""
        return self.storage.is_shared

    def enrol(self) -> int:
        """A number that nobody else who writes to this buffer has, for the ids of trajectories."""
        return self.storage.ledger.enrol()

    def attach(self, feeder: Any) -> None:
        """Know of somebody who fills the buffer in the background: `sample` waits for it, and raises its errors."""
        self._pace.feeders.add(feeder)

    def detach(self, feeder: Any) -> None:
        """Forget somebody who filled the buffer."""
        self._pace.feeders.remove(feeder)

    def append_transform(self, transform: Callable[[Any], Any], *, invert: bool = False) -> ReplayBuffer:
        """Call `transform` with every batch, after those that are there; or with what is written, to `invert` it."""
        self._transforms.append(Inverted(transform) if invert else transform)
        return self

    def insert_transform(self, index: int, transform: Callable[[Any], Any], *, invert: bool = False) -> ReplayBuffer:
        """Call `transform` with every batch, as the one at `index`."""
        if not -len(self._transforms) <= index <= len(self._transforms):
            raise ValueError(f"There are {len(self._transforms)} transforms; {index} is no place among them.")
        self._transforms.insert(index, Inverted(transform) if invert else transform)
        return self

    @property
    def transform(self) -> list[Callable[[Any], Any]]:
        """What is called with every batch, in order."""
        return self._transforms

    def set_sampler(self, sampler: Sampler) -> None:
        """Draw with another sampler from now on."""
        with self._sampling:
            self.sampler = made("sampler", sampler, Sampler, RandomSampler)
            self._forget_draws()

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from another generator from now on."""
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Frames, cursor, sampler and random state, as plain tensors, numbers and dicts. Nobody writes meanwhile."""
        with self._at_rest():
            return self._state(copy=True)

    @contextlib.contextmanager
    def _at_rest(self) -> Iterator[None]:
        """A context in which nobody writes or draws."""
        with self.storage.ledger.writing, self._sampling:
            len(self)  # what another process has laid out is known here from now on
            with self.storage.ledger.at_rest():
                yield

    def _state(self, copy: bool) -> dict[str, Any]:
        return {
            "storage": checkpoints.storage_state(self.storage, copy),
            "sampler_kind": type(self.sampler).__name__,
            "sampler": self.sampler.state_dict(),
            "random": torch.get_rng_state() if self._generator is None else self._generator.get_state(),
            "ahead": [checkpoints.draw_state(draw) for draw in (*self._undelivered, *self._saved_draws)],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what was saved, and draw from it what would have been drawn there.

        The buffer then has a random generator of its own, in the state of the one that was saved.
        """
        kind = state_dict.get("sampler_kind", type(self.sampler).__name__)
        if kind != type(self.sampler).__name__:
            raise ValueError(
                f"The saved buffer has a {kind} as its sampler, and this one a {type(self.sampler).__name__}."
            )
        with self._at_rest():
            checkpoints.load_storage_state(self.storage, state_dict["storage"])
            self.storage.forget_contents()
            self.sampler.load_state_dict(state_dict["sampler"])
            self._generator = torch.Generator()
            self._generator.set_state(state_dict["random"])
            self._forget_draws()
            self._saved_draws.extend(checkpoints.restored_draw(draw) for draw in state_dict.get("ahead", ()))

    def dumps(self, path: str | Path) -> None:
        """Save to the directory `path`, beside whatever else is there.

        What was saved there before is replaced once the new is complete.
        """
        with self._at_rest():
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

        with self._at_rest():
            if not storage.is_ready:
                raise NothingToSampleError("The buffer is empty: there is nothing to write to a dataset.")
            contents = storage.contents()
            episodes = episodes_in(contents, read, keep_headless=keep_headless, keep_unfinished=keep_unfinished)
            return write_minari(episodes, dataset_id, env, **options)

    def shutdown(self) -> None:
        """Stop drawing ahead."""
        self._pace.is_closed = True
        if self._ahead is not None:
            self._ahead.close()
            self._put_back()

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: threads, batches drawn ahead, who fills it."""
        own = ("_sampling", "_pace", "_ahead", "_undelivered")
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


class Inverted:
    """A transform the other way round: what it does to batches is done to what is written, and the reverse."""

    def __init__(self, transform: Any) -> None:
        """Turn `transform` round."""
        self.transform = transform

    def __call__(self, batch: Any) -> Any:
        """What the transform does to what is written, if anything."""
        return self.transform.inv(batch) if hasattr(self.transform, "inv") else batch

    def inv(self, data: Any) -> Any:
        """What the transform does to batches."""
        return self.transform(data)


_buffers: weakref.WeakSet[ReplayBuffer] = weakref.WeakSet()


def _begin_in_child() -> None:
    """After a fork: threads, and what they held, did not come along."""
    for buffer in list(_buffers):
        buffer._begin()
        buffer.storage.ledger.renew_lock()


os.register_at_fork(after_in_child=_begin_in_child)


def made(name: str, given: Any, kind: type[Any], default: Callable[[], Any]) -> Any:
    """What was given, or made by what was given."""
    if given is None:
        return default()
    result = given() if callable(given) and not isinstance(given, kind) else given
    if not isinstance(result, kind):
        raise TypeError(f"{name} must be a {kind.__name__} or a function that makes one, got {given!r}.")
    return result


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.as_tensor(value)
