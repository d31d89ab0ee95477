"""Storages: where the frames of a replay buffer lie.

A storage is a ring of rows, and the ledger of what is written and read. Memory is laid out by the first write,
and then never moves.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.data.contents import Contents
from swath.data.forms import as_tensor, collated
from swath.data.ledger import Ledger
from swath.keys import Key

Collate = Callable[[Any], Any]
LIST_SIZE = 1_000_000
"""How many items a list has room for by default."""


class Storage(ABC):
    """A ring of `max_size` frames."""

    def __init__(self, max_size: int, ndim: int = 1, device: Any = "cpu") -> None:
        """Have room for `max_size` frames, in `ndim` dimensions of which the last is time."""
        self.max_size = positive("max_size", max_size)
        self.ndim = positive("ndim", ndim)
        self.device = torch.device("cpu" if device is None else device)
        self.ledger = Ledger()
        self.seams = np.empty(0, bool)
        """`[lanes * capacity]`: see `Contents`."""
        self._last: tuple[Any, int] | None = None
        """Which source of this process wrote last, and up to where."""
        self._contents: Contents | None = None

    def contents(self) -> Contents:
        """What can be read now."""
        ledger, known = self.ledger, self._contents
        if known is not None and known.whole and ledger.is_still_at(known.end) and known.edits == ledger.edits:
            return known
        edits = ledger.edits  # before anything else: an edit that begins from now on is noticed
        end = ledger.settled()
        first = min(ledger.first, end)
        whole = end == ledger.head and not ledger.is_busy and not ledger.holes  # holes last: the count is renewed first
        self._contents = Contents(
            lanes=ledger.lanes,
            capacity=ledger.capacity,
            first=first,
            end=end,
            stamps=ledger.stamps,
            seams=self.seams,
            entry=self.entry,
            origin=ledger.origin,
            whole=whole,
            edits=edits,
        )
        return self._contents

    @property
    def is_ready(self) -> bool:
        """Whether anything was ever written, so that it is known what frames look like."""
        return True

    @property
    def write_count(self) -> int:
        """How many frames were ever written, since the storage was last emptied."""
        return self.ledger.written if self.is_ready else 0

    @abstractmethod
    def entry(self, key: Key, index: np.ndarray) -> np.ndarray:
        """The entry `key` of the frames `index`, of any shape; KeyError if there is none."""

    @abstractmethod
    def read(self, index: np.ndarray, overrides: Mapping[Any, np.ndarray], collate: Collate | None) -> Any:
        """A batch of the frames `index`, with some entries replaced by `overrides`."""

    def public_index(self, index: np.ndarray) -> Any:
        """Frames as users know them."""
        return torch.from_numpy(index)

    def flat_index(self, public: Any) -> np.ndarray:
        """The reverse of `public_index`."""
        return np.asarray(torch.as_tensor(public, device="cpu").reshape(-1), np.int64)

    @abstractmethod
    def get(self, index: Any, dim: int | None = None) -> Any:
        """Copies of frames by where they lie: a number, a slice, numbers or a mask; `dim` is that of time."""

    @abstractmethod
    def set(self, index: Any, data: Any, dim: int | None = None) -> None:
        """Change frames where they lie. Nobody reads them meanwhile."""

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, data: Any) -> None:
        self.set(index, data)

    def __len__(self) -> int:
        """How many frames can be read."""
        return self.ledger.held if self.is_ready else 0

    @property
    def rows_used(self) -> int:
        """How many rows, from the first on, hold something or did."""
        return min(self.ledger.head - self.ledger.origin, self.ledger.capacity)

    def write(
        self, rows: int, put: Callable[[slice, slice], None], seams: np.ndarray | None, source: Any
    ) -> np.ndarray:
        """Write `rows` rows: `put(where, which)` copies those of the slice `which` to the slice `where` of the ring.

        `seams` `[lanes, rows]` tells which frames do not continue the one before; the first does if the `source` that
        writes now also wrote the row before. Of more rows than there is room for, only the last are written. Returns
        where the rows lie (or would).
        """
        ledger, own_seams = self.ledger, self.seams.reshape(self.ledger.lanes, -1)
        kept = min(rows, ledger.capacity)
        begin = ledger.reserve(kept, self.make_room, skipped=rows - kept)
        try:
            done = rows - kept
            for where in ledger.parts(begin, kept):
                which = slice(done, done + where.stop - where.start)
                put(where, which)
                own_seams[:, where] = False if seams is None else seams[:, which]
                done = which.stop
            source = (os.getpid(), source)
            if self._last != (source, begin) or kept < rows:
                own_seams[:, begin % ledger.capacity] = True
        except BaseException:
            ledger.give_up()
            raise
        ledger.commit(begin, kept)
        self._last = (source, begin + kept)
        first = (begin + kept - rows) % ledger.capacity
        index = np.arange(first, first + rows)
        return index if first + rows <= ledger.capacity else index % ledger.capacity

    def make_room(self, rows: int) -> None:
        """Be sure that the first `rows` rows can be written, or raise. With the ledger's lock."""
        return None

    def forget_sources(self) -> None:
        """What is written next continues nothing: what it would continue was replaced."""
        self._last = None

    @property
    def is_shared(self) -> bool:
        """Whether other processes can read and write."""
        return False

    def share(self) -> None:
        """Let other processes read and write."""
        raise TypeError(f"{type(self).__name__} cannot be shared with other processes; use LazyTensorStorage.")

    def empty(self, keep_count: bool = False) -> None:
        """Forget everything that was written, and how much it was unless that is to be kept."""
        if self.is_ready:
            with self.ledger.at_rest():
                self.ledger.clear(keep_count)
        self.forget_sources()


class ListStorage(Storage):
    """Python objects of any kind, one by one, in a list. For one process.

    Args:
        max_size: how many there is room for; a million if nothing is said.
        device: where tensors and TensorDicts are moved when they are written.
    """

    def __init__(self, max_size: int | None = None, *, compilable: Any = None, device: Any = None) -> None:
        """Begin with an empty list. `compilable` is there for TorchRL, and changes nothing."""
        super().__init__(LIST_SIZE if max_size is None else max_size, device=device)
        self._moves = device is not None
        self.items: list[Any] = []
        self.ledger.attach(np.zeros(self.max_size, np.int64), lanes=1)
        self.seams = np.zeros(self.max_size, bool)

    def write_items(self, items: Sequence[Any], source: Any = None, seams: np.ndarray | None = None) -> np.ndarray:
        """Keep `items`; returns where."""
        if self._moves:
            items = [item.to(self.device) if hasattr(item, "to") else item for item in items]
        missing = min(self.rows_used + len(items), self.max_size) - len(self.items)
        self.items.extend([None] * missing)

        def put(where: slice, which: slice) -> None:
            self.items[where] = items[which]

        return self.write(len(items), put, seams, source)

    def empty(self, keep_count: bool = False) -> None:
        """Forget all items, and let them go."""
        super().empty(keep_count)
        self.items.clear()

    def read(self, index: np.ndarray, overrides: Mapping[Any, np.ndarray], collate: Collate | None) -> Any:
        """A batch of the items at `index`; with a function `collate`, what that returns."""
        items = [self.items[at] for at in index.tolist()]
        if collate is not None:
            return collate(items)
        batch = collated(items)
        if isinstance(batch, TensorDictBase):
            for key, override in overrides.items():
                batch.set(key, as_tensor(override))
        return batch

    def get(self, index: Any, dim: int | None = None, collate: Collate | None = None) -> Any:
        """One item (itself, not a copy), or a batch of several, as `collate` makes it."""
        chosen = torch.arange(self.rows_used, device="cpu")[index]
        return self.items[int(chosen)] if chosen.ndim == 0 else self.read(chosen.reshape(-1).numpy(), {}, collate)

    def set(self, index: Any, data: Any, dim: int | None = None) -> None:
        """Put other items in the place of some."""
        chosen = torch.arange(self.rows_used, device="cpu")[index]
        items = [data] if chosen.ndim == 0 else list(data)
        if len(items) != chosen.numel():
            raise ValueError(f"{len(items)} items were given for {chosen.numel()} places.")
        with self.ledger.hiding(chosen.reshape(-1).numpy()):
            for at, item in zip(chosen.reshape(-1).tolist(), items, strict=True):
                self.items[at] = item

    def entry(self, key: Key, index: np.ndarray) -> np.ndarray:
        """The entry `key` of the items at `index`, which are looked at one by one; of places not used, the first's."""
        used = [self.items[at if at < len(self.items) else 0] for at in index.reshape(-1).tolist()]
        entries = np.stack([as_tensor(item[key]).numpy() for item in used])
        return entries.reshape(*index.shape, *entries.shape[1:])


def created(name: str, given: Any, kind: type[Any], default: Callable[[], Any]) -> Any:
    """What was given, or what the function returns that was given."""
    if given is None:
        return default()
    result = given() if callable(given) and not isinstance(given, kind) else given
    if not isinstance(result, kind):
        cure = f" Write {_spelled(given)}." if kind is Storage else ""
        raise TypeError(f"{name} must be a {kind.__name__} or a function that makes one, got {given!r}.{cure}")
    return result


def refuse_misplaced(owner: str, misplaced: Sequence[Any]) -> None:
    """Raise if arguments were given by their place: the first is most often the storage, or its size."""
    if misplaced:
        raise TypeError(
            f"{owner} takes all arguments by name, and was given {misplaced[0]!r} without one. Write "
            f"{owner}({_spelled(misplaced[0])})."
        )


def _spelled(storage: Any) -> str:
    """How something that was given as a storage should be given."""
    if isinstance(storage, int):
        return f"storage=LazyTensorStorage({storage})"
    return "storage=..." if isinstance(storage, Storage) else "storage=LazyTensorStorage(max_size)"


def positive(name: str, value: Any) -> int:
    """`value` as a number, if it is a positive whole one."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}.")
    return int(value)
