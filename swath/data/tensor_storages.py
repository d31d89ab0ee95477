"""Storages in columns: one piece of memory for each entry, private, shared between processes, or in a file."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from swath.data.contents import EMPTY
from swath.data.forms import Entries, Form, TensorDictForm, as_tensor, form_of, gathered
from swath.data.ledger import SIZE, Ledger
from swath.data.storage_layout import StorageLayout
from swath.data.storages import Collate, Storage
from swath.data.stored_episodes import episodes_in
from swath.errors import NothingToSampleError, ShapeError, check_foreign_arguments
from swath.keys import Key, as_key
from swath.runtime import Block, MemoryBlock, ProcessLock
from swath.runtime.columns import Columns, array_of, nbytes, tensor_of, writable
from swath.runtime.memory import page_aligned

ARGUMENTS = ("max_size", "scratch_dir", "device", "ndim", "existsok")
WITHOUT_EFFECT = ("auto_cleanup", "cleanup_memmap", "compilable", "consolidated", "shared_init")
"""Arguments of TorchRL that change nothing here."""


class LastingEntries(dict[Key, Tensor]):
    """Entries that are written again and again, with other values in the same memory: once looked at, they fit."""

    pairs: tuple[Any, list[tuple[Any, Any]]] | None = None
    """The columns that they fit, and what goes to each."""


class TensorStorage(Storage):
    """Columns of memory, one for each entry: `[*lanes, time]` frames, lane by lane.

    NOTE [Shared storages]: a shared storage has two blocks of memory. One is small and there from the beginning: the
    ledger's counters. The other is empty until the first write, in any process: under the ledger's lock the
    layout is put there in words, with room for the stamps, the seams and the columns behind it. All others read the
    words when they first see that there are any.
    """

    def __init__(self, max_size: int, *, device: Any = "cpu", ndim: int = 1) -> None:
        """Have room for `max_size` frames, in `ndim` dimensions of which the last is time."""
        super().__init__(max_size, ndim, None if device == "auto" else device)
        self._follows_data = isinstance(device, str) and device == "auto"
        self.layout: StorageLayout | None = None
        self._columns = Columns({}, (0,))
        self._arrays: dict[Key, np.ndarray] = {}
        self._targets: dict[Key, Any] = {}
        """The columns as they are written: with a dimension for lanes, where the storage has one."""
        self._is_plain = False
        """Whether numpy knows the types of all entries."""
        self._counters: Block | None = None
        """The ledger's memory, if it is shared."""
        self._data: Block | None = None
        """The memory of everything else, if it is shared or in a file."""

    # -- memory ------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the layout is known, here or in another process."""
        if self.layout is None and self._data is not None and self.ledger.layout:
            self._attach(self._data)
        return self.layout is not None

    def lay_out(self, layout: StorageLayout, rows: int = 0) -> None:
        """Take memory for `layout`, which nobody has done yet in this process; have room for the first `rows`."""
        if self._data is None:
            columns = Columns(layout.leaves, (layout.frames,), device=self.device)
            self._hold(layout, columns, np.zeros(layout.rows, np.int64), np.zeros(layout.frames, bool))
            return
        words = layout.to_json().encode()
        with self.ledger.lock:
            if not self.ledger.layout:  # no other process was quicker
                size = nbytes(layout.leaves, (layout.frames,), layout.columns_start(len(words)))
                self._take(size, [(0, len(words)), *layout.pieces(len(words), 0, rows)])
                self._data.array((len(words),), np.uint8)[:] = np.frombuffer(words, np.uint8)
                self.ledger.room = rows
                self.ledger.layout = len(words)  # from now on, others see it
        self._attach(self._data)
        assert self.layout is not None
        if self.layout.leaves == layout.leaves:  # words do not say of which classes data are
            self.layout = replace(self.layout, form=layout.form)

    def _take(self, size: int, pieces: Iterable[tuple[int, int]]) -> None:
        """Make room for `size` bytes, of which `pieces` (where, how many) are going to be written."""
        assert self._data is not None
        self._data.resize(size)

    def _attach(self, block: Block) -> None:
        """Map memory that has a layout already."""
        size = self.ledger.layout
        layout = StorageLayout.from_json(block.array((size,), np.uint8).tobytes().decode())
        start = page_aligned(size)
        stamps = block.array((layout.rows,), np.int64, start)
        seams = block.array((layout.frames,), bool, start + stamps.nbytes)
        columns = Columns(layout.leaves, (layout.frames,), block=block, offset=layout.columns_start(size))
        self._hold(layout, columns, stamps, seams)

    def _hold(self, layout: StorageLayout, columns: Columns, stamps: np.ndarray, seams: np.ndarray) -> None:
        self._columns, self._arrays = columns, columns.arrays
        self._is_plain = bool(self._arrays) and all(
            torch.from_numpy(array[:0]).dtype == layout.leaves[key].dtype for key, array in self._arrays.items()
        )
        by_key: Mapping[Key, Any] = self._arrays or columns.tensors
        shape = (layout.lanes, layout.rows) if layout.dims else (layout.rows,)
        self._targets = {key: column.reshape(*shape, *column.shape[1:]) for key, column in by_key.items()}
        self.seams = seams
        self.ledger.attach(stamps, layout.lanes)
        self.layout = layout

    @property
    def is_shared(self) -> bool:
        """Whether other processes can read and write."""
        return self._counters is not None

    def share(self) -> None:
        """Move to memory that other processes can be given; what is stored is copied."""
        if self.is_shared:
            return
        if self.device.type != "cpu":
            raise ValueError(f"A storage on {self.device} cannot be shared with other processes; use device='cpu'.")
        before, layout, tensors, seams = self.ledger, self.layout, self._columns.tensors, self.seams
        is_mapped, self._contents = self._data is not None, None
        self._share_ledger(MemoryBlock(8 * SIZE))
        self.ledger.load_state_dict(before.state_dict())
        if is_mapped and layout is not None:
            self.ledger.layout, self.ledger.room = before.layout, before.room
            self.ledger.attach(before.stamps, layout.lanes)
        elif not is_mapped:
            self._data, self.layout = MemoryBlock(), None
            if layout is not None:
                self.lay_out(layout)
                self.ledger.stamps[:], self.seams[:] = before.stamps, seams
                self._columns.fill(tensors)

    def _share_ledger(self, counters: Block) -> None:
        self._counters = counters
        self.ledger = Ledger(counters.array((SIZE,), np.int64), ProcessLock(counters))

    def __getstate__(self) -> dict[str, Any]:
        """Private memory is copied. Mapped memory travels as descriptors, and is shared by those who receive it."""
        own: dict[str, Any] = {"_columns": {}, "_arrays": {}, "_targets": {}, "_contents": None}
        with self.ledger.writing, self.ledger.at_rest():
            if self._data is None:
                copies = {key: tensor.clone() for key, tensor in self._columns.tensors.items()}
                return {**self.__dict__, **own, "ledger": copy.deepcopy(self.ledger), "_columns": copies}
            self.share()
        return {**self.__dict__, **own, "layout": None, "ledger": None, "seams": np.empty(0, bool), "_last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_columns": Columns({}, (0,))})
        if self._counters is not None:
            self._share_ledger(self._counters)
        elif self.layout is not None:
            columns = Columns(self.layout.leaves, (self.layout.frames,), device=self.device)
            columns.fill(state["_columns"])
            self._hold(self.layout, columns, self.ledger.stamps, self.seams)

    # -- frames ------------------------------------------------------------------------------------------------

    def entry(self, key: Key, index: np.ndarray) -> np.ndarray:
        """The entry `key` of the frames `index`; only those travel from an accelerator."""
        if key in self._arrays:
            return np.asarray(self._arrays[key][index])
        if key not in self._columns.tensors:
            raise KeyError(f"The buffer has no entry {key!r}; it has {list(self._columns.tensors)}.")
        return array_of(self._columns.tensors[key][torch.from_numpy(index).to(self.device)].cpu())

    def read(self, index: np.ndarray, overrides: Mapping[Any, np.ndarray], collate: Collate | None) -> Any:
        """A batch of copies of the frames `index`."""
        entries = self.read_entries(index)
        for key, override in overrides.items():
            entries[as_key(key)] = as_tensor(override).to(self.device)
        batch = self._known_layout().form.put_together(entries, (len(index),))
        return batch if collate is None else collate(batch)

    def public_index(self, index: np.ndarray) -> Any:
        """Frames as users know them: numbers of rows, or with several dimensions (rows, lanes...)."""
        return self._known_layout().public_index(index)

    def flat_index(self, public: Any) -> np.ndarray:
        """The reverse of `public_index`; `[..., ndim]` will do as well as a tuple."""
        return self._known_layout().flat_index(public)

    @property
    def shape(self) -> torch.Size:
        """`[*lanes, rows]`, once it is known."""
        layout = self._known_layout()
        return torch.Size((*layout.dims, layout.rows))

    def _known_layout(self) -> StorageLayout:
        if not self.is_ready or self.layout is None:
            raise IndexError("The buffer is empty: it is not yet known what its frames look like.")
        return self.layout

    def _chosen(self, index: Any, dim: int | None) -> Tensor:
        """The frames at `index` among all rows that are used, in any shape; `dim` is that of time."""
        layout = self._known_layout()
        grid = torch.arange(layout.frames, device="cpu").view(*layout.dims, layout.rows)[..., : self.rows_used]
        return grid.movedim(-1, -1 if dim is None else dim)[index]

    def get(self, index: Any, dim: int | None = None) -> Any:
        """Copies of frames by where they lie; `dim` is that of time among the storage's dimensions."""
        layout, chosen = self._known_layout(), self._chosen(index, dim)
        flat = chosen.reshape(-1).numpy()
        with self.ledger.lock:
            held = self.ledger.stamps[flat % self.ledger.capacity] != EMPTY
            if not held.all():  # what a writer left unfinished, or is just writing
                if not isinstance(index, slice) or chosen.ndim != 1:
                    raise IndexError(
                        f"Some frames of {index} cannot be read: they are just being written, or were lost."
                    )
                chosen, flat = chosen[torch.from_numpy(held)], flat[held]
            entries = self.read_entries(flat)
        shaped = {key: entry.view((*chosen.shape, *entry.shape[1:])) for key, entry in entries.items()}
        return layout.form.put_together(shaped, chosen.shape)

    def set(self, index: Any, data: Any, dim: int | None = None) -> None:
        """Change frames where they lie; `data` may be one frame for all. Nobody reads them meanwhile."""
        layout, chosen = self._known_layout(), self._chosen(index, dim)
        entries = layout.form.take_apart(data)
        for key, entry in entries.items():
            shape = layout.leaves[key].shape if key in layout.leaves else ()
            try:
                entries[key] = entry.expand((*chosen.shape, *shape))
            except RuntimeError:
                raise ValueError(
                    f"{key!r} has shape {tuple(entry.shape)}, but there are {tuple(chosen.shape)} frames of {shape}."
                ) from None
        self.check(entries, chosen.ndim)
        flat = torch.from_numpy(chosen.reshape(-1).numpy())
        with self.ledger.hiding(flat.numpy() % self.ledger.capacity):
            for key, entry in entries.items():
                tensor = self._columns.tensors[key]
                values = entry.detach().reshape(len(flat), *tensor.shape[1:]).to(tensor)
                writable(tensor)[flat.to(tensor.device)] = writable(values)

    def take_apart(self, data: Any, dim: int, is_one: bool = False) -> tuple[Form, Entries, tuple[int, ...]]:
        """The form of `data`, its entries `[*dims, rows, ...]`, and `(*dims, rows)`; `dim` is that of time.

        `data` has all dimensions of the storage, or is one frame of each lane.
        """
        ndim, data = self.ndim, data if is_one else gathered(data)
        form = self.layout.form if self.is_ready and self.layout is not None else form_of(data, ndim - is_one)
        entries = form.take_apart(data)
        if is_one:
            entries = {key: entry.unsqueeze(dim) for key, entry in entries.items()}
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
        return form, entries, shape

    def write_entries(
        self,
        form: Form | None,
        entries: Entries,
        shape: Sequence[int],
        seams: np.ndarray | None = None,
        source: Any = None,
    ) -> Tensor:
        """Write `entries` `[*shape, ...]`, `shape` being lanes and time; returns where, as users know it.

        `form` is how the first are put together when they are read, and all that come later; None is a TensorDict.
        """
        *lanes, rows = shape
        if not self.is_ready:
            if self._follows_data:
                self.device = next(iter(entries.values())).device
            self.lay_out(StorageLayout.of(form or TensorDictForm(), entries, lanes, self.max_size))
        layout = self._known_layout()
        dims, pairs = len(layout.dims), self._pairs(layout, entries, tuple(lanes), rows)

        def put(where: slice, which: slice) -> None:
            at, of = ((slice(None), where), (slice(None), which)) if dims else (where, which)
            is_all = which.stop - which.start == rows
            for target, given in pairs:
                target[at] = given if is_all else given[of]

        return layout.public_index_of_rows(self.write(rows, put, seams, source))

    def _pairs(
        self, layout: StorageLayout, entries: Entries, lanes: tuple[int, ...], rows: int
    ) -> list[tuple[Any, Any]]:
        """For each entry the column that it goes to, and its values as they are copied."""
        known = entries.pairs if isinstance(entries, LastingEntries) else None
        if known is not None and known[0] is self._targets:
            return known[1]
        if lanes != layout.dims:
            raise ValueError(f"The buffer has lanes of shape {layout.dims}, and was given {lanes}.")
        self.check(entries, len(lanes) + 1)
        dims, pairs, is_lasting = len(lanes), list[tuple[Any, Any]](), isinstance(entries, LastingEntries)
        for key, entry in entries.items():
            target: Any = self._targets[key]
            given: Any = entry.detach()
            if isinstance(target, np.ndarray):
                wanted = layout.leaves[key].dtype
                is_lasting = is_lasting and entry.device.type == "cpu" and entry.dtype == wanted
                given = array_of(entry.cpu() if entry.dtype == wanted else entry.to("cpu", wanted))
            pairs.append((target, given.reshape(layout.lanes, rows, *given.shape[dims + 1 :]) if dims else given))
        if is_lasting and isinstance(entries, LastingEntries):
            entries.pairs = self._targets, pairs
        return pairs

    def check(self, entries: Entries, batch_dims: int) -> None:
        """Raise unless `entries`, with so many batch dimensions, fit into the layout."""
        assert self.layout is not None
        leaves = self.layout.leaves
        if entries.keys() != leaves.keys():
            missing, unknown = [k for k in leaves if k not in entries], [k for k in entries if k not in leaves]
            found = [f"lack {missing}"] if missing else []
            found += [f"have {unknown}, which it has not"] if unknown else []
            raise KeyError(
                f"The data do not fit the buffer, whose entries the first write has fixed: they {' and '.join(found)}."
            )
        for key, entry in entries.items():
            shape, dtype = leaves[key].shape, leaves[key].dtype
            if entry.shape[batch_dims:] != shape:
                raise ShapeError(
                    f"{key!r} was written with frames of shape {tuple(entry.shape[batch_dims:])}, but the buffer holds "
                    f"{shape}, fixed by the first write."
                )
            if entry.dtype != dtype and not torch.can_cast(entry.dtype, dtype):
                raise TypeError(
                    f"{key!r} was written as {entry.dtype}, but the buffer holds {dtype}, fixed by the first write."
                )

    def read_entries(self, index: np.ndarray) -> Entries:
        """Copies of the frames `index`."""
        # `take` with a mode that cannot fail is several times quicker than indexing, for small frames.
        if self._is_plain:
            return {key: torch.from_numpy(array.take(index, 0, mode="clip")) for key, array in self._arrays.items()}
        if self._arrays:
            leaves = self._columns.leaves
            return {k: tensor_of(a.take(index, 0, mode="clip"), leaves[k].dtype) for k, a in self._arrays.items()}
        where = torch.from_numpy(index).to(self.device)
        return {key: tensor.index_select(0, where) for key, tensor in self._columns.tensors.items()}

    def view(self, rows: int | None = None) -> Entries:
        """The first `rows` rows (all that were used) in the order of memory, over it: `[*dims, rows, ...]`."""
        assert self.layout is not None
        used, dims = self.rows_used if rows is None else rows, self.layout.dims
        return {
            key: tensor.view(*dims, self.layout.rows, *tensor.shape[1:]).narrow(len(dims), 0, used)
            for key, tensor in self._columns.tensors.items()
        }

    def episodes(self, **keep: bool) -> Iterator[TensorDictBase]:
        """The complete episodes, one `[T]` at a time; see `episodes_in`. Only while nobody writes."""
        if not self.is_ready:
            raise NothingToSampleError("The buffer is empty: it holds no episode.")

        def read(index: np.ndarray) -> TensorDictBase:
            return TensorDictForm().put_together(self.read_entries(index), [len(index)])

        return episodes_in(self.contents(), read, **keep)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.max_size} frames, device={str(self.device)!r})"


class LazyTensorStorage(TensorStorage):
    """In memory, laid out when the first frames are written.

    Args:
        max_size: how many frames there is room for, over all lanes.
        device: where they lie; "auto" is where the first ones come from.
        ndim: how many dimensions of what is written are those of frames; the last is time, the others are lanes.
        options: `compilable`, `consolidated`, `shared_init` and `cleanup_memmap` of TorchRL change nothing.
    """

    def __init__(self, max_size: int, *, device: Any = "cpu", ndim: int = 1, **options: Any) -> None:
        check_foreign_arguments("LazyTensorStorage", options, ignored=WITHOUT_EFFECT, known=ARGUMENTS)
        super().__init__(max_size, device=device, ndim=ndim)
