"""Between gymnasium's values and rows: which entries a space becomes, and how values are written and read.

Observations are written into rows, actions are read from them. Both work on memory that stays where it is, so the
functions returned here are bound once and called every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from swath.envs.rows import Leaf, Rows
from swath.errors import UnsupportedSpaceError, wrong_shape
from swath.keys import ACTION, OBSERVATION, PIXELS, Key, as_path

Path = tuple[str | int, ...]
"""Where a value lies inside a nested gymnasium value: the keys and indices to follow."""


@dataclass(frozen=True)
class Entry:
    """One leaf of a space: its key in rows, its place in gymnasium's value, and its space."""

    key: Key
    path: Path
    space: gs.Space[Any]


def entries_of(space: gs.Space[Any], root: str) -> list[Entry]:
    """The leaves of `space`. A Dict's names become keys of their own; anything else lies under `root`."""
    found: list[Entry] = []

    def visit(node: gs.Space[Any], key: tuple[str, ...], path: Path) -> None:
        if isinstance(node, gs.Dict):
            for name, child in node.spaces.items():
                visit(child, (*key, str(name)), (*path, name))
        elif isinstance(node, gs.Tuple):
            for index, child in enumerate(node.spaces):
                visit(child, (*(key or (root,)), str(index)), (*path, index))
        else:
            names = key or (root,)
            found.append(Entry(names[0] if len(names) == 1 else names, path, node))

    visit(space, (), ())
    if not found:
        raise UnsupportedSpaceError(f"The {root} space {space} is empty: there is nothing to hold in tensors.")
    return found


def observation_root(space: gs.Space[Any]) -> str:
    """The key of an observation that is not a Dict: RGB images are "pixels", all else "observation"."""
    image = (
        isinstance(space, gs.Box)
        and len(space.shape) == 3
        and space.shape[-1] == 3
        and bool((space.low == 0).all() and (space.high == 255).all())
    )
    return PIXELS if image else OBSERVATION


def leaf_of(entry: Entry, categorical: bool) -> Leaf:
    """How `entry` is held: Discrete and MultiDiscrete one-hot unless `categorical`."""
    space = entry.space
    if isinstance(space, gs.Box):
        return Leaf(tuple(space.shape), _torch_dtype(space, entry.key))
    if isinstance(space, gs.Discrete):
        return Leaf(() if categorical else (int(space.n),), torch.int64)
    if isinstance(space, gs.MultiDiscrete):
        return Leaf(tuple(space.nvec.shape) if categorical else (int(space.nvec.sum()),), torch.int64)
    if isinstance(space, gs.MultiBinary):
        return Leaf(tuple(space.shape), torch.int8)
    raise UnsupportedSpaceError(
        f"{type(space).__name__} spaces (at {entry.key!r}: {space}) cannot be held in tensors of one fixed shape. "
        "Use Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of these; "
        "gymnasium.wrappers.TransformObservation can turn the values into one of them."
    )


def _torch_dtype(space: gs.Box, key: Key) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype=space.dtype)).dtype
    except TypeError as error:
        raise UnsupportedSpaceError(
            f"{key!r} is a Box of dtype {space.dtype}, for which torch has no type. "
            "gymnasium.wrappers.DtypeObservation can convert it, for instance to float32."
        ) from error


def _bounds(space: gs.MultiDiscrete) -> tuple[np.ndarray, np.ndarray]:
    """The flat start of each component's values, and of its one-hot block."""
    sizes = space.nvec.reshape(-1)
    return np.asarray(space.start).reshape(-1), np.concatenate([[0], np.cumsum(sizes)[:-1]])


class ObservationCodec:
    """Writes gymnasium observations into rows."""

    def __init__(self, space: gs.Space[Any], categorical: bool = False) -> None:
        """Choose entries for `space`; `categorical` keeps discrete values as integers."""
        self.space = space
        self.entries = entries_of(space, observation_root(space))
        self.leaves = {entry.key: leaf_of(entry, categorical) for entry in self.entries}

    def lane_writer(self, rows: Rows) -> Callable[[int, Any], None]:
        """A function that writes one lane's observation into `rows`."""
        writers = [(e.path, self._writer(e, rows.arrays[e.key])) for e in self.entries]
        if len(writers) == 1 and not writers[0][0]:
            return writers[0][1]

        def write(lane: int, observation: Any) -> None:
            for path, writer in writers:
                writer(lane, _follow(observation, path))

        return write

    def batch_writer(self, rows: Rows) -> Callable[[Any], None]:
        """A function that writes the observations of all lanes, given as gymnasium's vector envs give them."""
        writers = [(e.path, self._writer(e, rows.arrays[e.key])) for e in self.entries]
        lanes = range(rows.lanes)
        whole = [
            (e.path, rows.arrays[e.key]) if isinstance(e.space, gs.Box | gs.MultiBinary) else None for e in self.entries
        ]

        def write(observation: Any) -> None:
            for target, (path, writer) in zip(whole, writers, strict=True):
                values = _follow(observation, path)
                if target is not None and np.shape(values) == target[1].shape:
                    target[1][:] = values
                else:
                    for lane in lanes:
                        writer(lane, values[lane])

        return write

    def _writer(self, entry: Entry, target: np.ndarray) -> Callable[[int, Any], None]:
        space, key = entry.space, entry.key
        if isinstance(space, gs.Discrete) and target.ndim == 2:
            start = int(space.start)

            def write_one_hot(lane: int, value: Any) -> None:
                target[lane] = 0
                target[lane, int(value) - start] = 1

            return write_one_hot
        if isinstance(space, gs.Discrete):
            start = int(space.start)

            def write_index(lane: int, value: Any) -> None:
                target[lane] = int(value) - start

            return write_index
        if isinstance(space, gs.MultiDiscrete):
            starts, blocks = _bounds(space)
            one_hot = target.shape[1:] != space.nvec.shape

            def write_indices(lane: int, value: Any) -> None:
                indices = np.asarray(value).reshape(-1) - starts
                if one_hot:
                    target[lane] = 0
                    target[lane, blocks + indices] = 1
                else:
                    target[lane] = indices.reshape(space.nvec.shape)

            return write_indices
        shape = target.shape[1:]

        def write(lane: int, value: Any) -> None:
            if type(value) is not np.ndarray:
                value = np.asarray(value)
            if value.shape != shape:
                raise wrong_shape(key, shape, value.shape, f"The env of lane {lane}")
            target[lane] = value

        return write


class ActionCodec:
    """Reads gymnasium actions from rows, and draws random ones."""

    def __init__(self, space: gs.Space[Any], categorical: bool = False) -> None:
        """Choose entries for `space`; `categorical` says how random actions are encoded by default."""
        self.space = space
        self.categorical = categorical
        self.entries = entries_of(space, ACTION)
        self.leaves = {entry.key: leaf_of(entry, categorical) for entry in self.entries}

    def lane_reader(self, rows: Rows) -> Callable[[], list[Any]]:
        """A function that gives a list of gymnasium actions, one per lane, that the envs may keep."""
        readers = [(e, self.reader(e, rows.arrays[e.key])) for e in self.entries]
        if len(readers) == 1 and not readers[0][0].path:
            entry, read = readers[0]
            if isinstance(entry.space, gs.Discrete):
                return lambda: read().tolist()  # plain ints: gymnasium checks them fastest
            return lambda: list(read())

        def read_all() -> list[Any]:
            values = [(entry, read()) for entry, read in readers]
            return [
                _assemble(self.space, {entry.path: value[lane] for entry, value in values})
                for lane in range(rows.lanes)
            ]

        return read_all

    def batch_reader(self, rows: Rows) -> Callable[[], Any]:
        """A function that gives the actions of all lanes as gymnasium's vector envs take them."""
        readers = [(e.path, self.reader(e, rows.arrays[e.key])) for e in self.entries]
        return lambda: _assemble(self.space, {path: read() for path, read in readers})

    def reader(self, entry: Entry, array: np.ndarray) -> Callable[[], np.ndarray]:
        """A function that gives gymnasium's values `[N, ...]` of one entry, in memory of their own.

        For a Discrete space the rows may hold indices, one-hot vectors or scores, of which the largest counts.
        """
        space, shape = entry.space, array.shape[1:]
        integral = array.dtype.kind in "iub"
        if isinstance(space, gs.Discrete):
            start = space.start
            if shape == (int(space.n),) and not (shape == (1,) and integral):
                if start == 0:
                    return lambda: array.argmax(1)
                return lambda: array.argmax(1) + start
            if integral and shape in ((), (1,)):
                flat = array.reshape(-1)
                return lambda: flat + start
        elif isinstance(space, gs.MultiDiscrete):
            starts, blocks = _bounds(space)
            nvec = space.nvec
            if integral and shape == nvec.shape:
                return lambda: array + space.start
            if shape == (int(nvec.sum()),):
                cuts = blocks[1:]
                return lambda: (np.stack([b.argmax(1) for b in np.split(array, cuts, 1)], 1) + starts).reshape(
                    -1, *nvec.shape
                )
        elif shape == tuple(space.shape or ()):
            dtype = space.dtype
            return lambda: array.astype(dtype)
        expected = leaf_of(entry, categorical=False).shape
        raise wrong_shape(entry.key, expected, shape, f"The policy, for the action space {space},")

    def draw(
        self, leaves: dict[Key, Leaf], steps: int, lanes: int, generator: torch.Generator | None
    ) -> dict[Key, Tensor]:
        """Random actions for `steps` steps of `lanes` lanes, `[T, N, ...]`, encoded as `leaves` says."""
        return {
            entry.key: self._draw(entry.space, leaves[entry.key], (steps, lanes), generator) for entry in self.entries
        }

    @staticmethod
    def _draw(space: gs.Space[Any], leaf: Leaf, shape: tuple[int, ...], g: torch.Generator | None) -> Tensor:
        if isinstance(space, gs.Discrete):
            return _encode(torch.randint(int(space.n), shape, generator=g), int(space.n), leaf)
        if isinstance(space, gs.MultiDiscrete):
            sizes = space.nvec.reshape(-1).tolist()
            parts = [torch.randint(int(n), shape, generator=g) for n in sizes]
            if leaf.shape == space.nvec.shape:
                return torch.stack(parts, -1).view(*shape, *leaf.shape).to(leaf.dtype)
            hot = [torch.nn.functional.one_hot(p, int(n)) for p, n in zip(parts, sizes, strict=True)]
            return torch.cat(hot, -1).to(leaf.dtype)
        if isinstance(space, gs.MultiBinary):
            return torch.randint(2, (*shape, *leaf.shape), generator=g).to(leaf.dtype)
        assert isinstance(space, gs.Box)
        return _draw_box(space, (*shape, *leaf.shape), g).to(leaf.dtype)


def _encode(indices: Tensor, n: int, leaf: Leaf) -> Tensor:
    """Indices as the policy writes them: plain, with a trailing 1, or one-hot."""
    if leaf.shape == (n,) and not (n == 1 and not leaf.dtype.is_floating_point):
        return torch.nn.functional.one_hot(indices, n).to(leaf.dtype)
    return indices.view(*indices.shape, *leaf.shape).to(leaf.dtype)


def _draw_box(space: gs.Box, shape: tuple[int, ...], g: torch.Generator | None) -> Tensor:
    """Uniform between finite bounds, exponential from one bound, normal without bounds: as gymnasium does."""
    low = torch.from_numpy(space.low.astype(np.float64))
    high = torch.from_numpy(space.high.astype(np.float64))
    if space.dtype is not None and space.dtype.kind in "iu":
        span = high - low + 1
        return (low + torch.rand(shape, generator=g, dtype=torch.float64) * span).floor().minimum(high)
    below, above = torch.from_numpy(space.bounded_below), torch.from_numpy(space.bounded_above)
    uniform = low.nan_to_num() + torch.rand(shape, generator=g, dtype=torch.float64) * (high - low).nan_to_num(
        0.0, 0.0, 0.0
    )
    if bool((below & above).all()):
        return uniform
    tail = torch.empty(shape, dtype=torch.float64).exponential_(generator=g)
    normal = torch.randn(shape, generator=g, dtype=torch.float64)
    one_sided = torch.where(below, low + tail, high - tail)
    return torch.where(below & above, uniform, torch.where(below | above, one_sided, normal))


def _follow(value: Any, path: Path) -> Any:
    for name in path:
        value = value[name]
    return value


def _assemble(space: gs.Space[Any], values: dict[Path, Any], path: Path = ()) -> Any:
    """The inverse of following paths: gymnasium's nested value from its leaves."""
    if isinstance(space, gs.Dict):
        return {n: _assemble(s, values, (*path, n)) for n, s in space.spaces.items()}
    if isinstance(space, gs.Tuple):
        return tuple(_assemble(s, values, (*path, i)) for i, s in enumerate(space.spaces))
    return values[path]


def names_of(entries: list[Entry]) -> str:
    """The keys of `entries` for a message."""
    return ", ".join("/".join(as_path(entry.key)) for entry in entries)
