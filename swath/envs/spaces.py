"""Between gymnasium's values and rows: which entries a space becomes, and how values are written and read.

Observations are written into rows, actions are read from them. Both work on memory that stays where it is, so the
functions returned here are bound once and called every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from swath.envs.draw import drawer
from swath.envs.rows import Index, Leaf, Rows
from swath.errors import ShapeError, UnsupportedSpaceError, wrong_shape
from swath.keys import ACTION, COLLECTOR, FLAGS, NEXT, OBSERVATION, PIXELS, RESET, REWARD, Key, as_path

RESERVED = (*FLAGS, REWARD, NEXT, RESET, COLLECTOR)
"""Names at the root of a TensorDict that no space may use."""

Path = tuple[str | int, ...]
"""Where a value lies inside a nested gymnasium value: the keys and indices to follow."""

LaneWriter = Callable[[int, Any], None]
"""Takes a lane and its value, and writes it where it belongs."""

Decode = Callable[[np.ndarray], np.ndarray]
"""Takes rows of encoded actions, and gives gymnasium's values of them in memory of their own."""


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
    except (TypeError, ValueError) as error:  # no such type, or another byte order
        raise UnsupportedSpaceError(
            f"{key!r} is a Box of dtype {space.dtype}, for which torch has no type. "
            "gymnasium.wrappers.DtypeObservation can convert it, for instance to float32."
        ) from error


def must_not_clash(observations: Iterable[Key], actions: Iterable[Key]) -> None:
    """Refuse spaces whose entries would overwrite each other, or the reward and the flags."""
    taken: dict[tuple[str, ...], str] = {(name,): "swath's own entries" for name in RESERVED}
    for kind, keys in (("the observation space", observations), ("the action space", actions)):
        for key in keys:
            path = as_path(key)
            for other, owner in taken.items():
                if path[: len(other)] == other[: len(path)]:
                    raise UnsupportedSpaceError(
                        f"The entry {'/'.join(path)!r} of {kind} would lie in the same place as {'/'.join(other)!r} of "
                        f"{owner}. Give it another name in its Dict, for instance with "
                        "gymnasium.wrappers.TransformObservation or TransformAction."
                    )
            taken[path] = kind


def _index_shapes(space: gs.Space[Any]) -> tuple[tuple[int, ...], ...]:
    """In which shapes integers name the values of `space`, if they do."""
    if isinstance(space, gs.MultiDiscrete):
        return (tuple(space.nvec.shape),)
    return ((), (1,)) if isinstance(space, gs.Discrete) else ()


def _offsets(space: gs.MultiDiscrete) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each component, flat: its number of values, its lowest value, and where its one-hot block begins."""
    sizes = space.nvec.reshape(-1)
    return sizes, np.asarray(space.start).reshape(-1), np.cumsum(sizes) - sizes


def _outside(key: Key, value: Any, space: gs.Space[Any], lane: int) -> ValueError:
    return ValueError(f"The env of lane {lane} gave {key!r} = {value!r}, which is not in its space {space}.")


class ObservationCodec:
    """Writes gymnasium observations into rows."""

    def __init__(self, space: gs.Space[Any], categorical: bool = False) -> None:
        """Choose entries for `space`; `categorical` keeps discrete values as integers."""
        self.space = space
        self.categorical = categorical
        self.entries = entries_of(space, observation_root(space))
        self.leaves = {entry.key: leaf_of(entry, categorical) for entry in self.entries}

    def lane_writer(self, rows: Rows) -> LaneWriter:
        """A function that writes one lane's observation into `rows`."""
        writers = [(e.path, self._writer(e, rows.arrays[e.key])) for e in self.entries]
        if len(writers) == 1 and not writers[0][0]:
            return writers[0][1]

        def write(lane: int, observation: Any) -> None:
            for path, writer in writers:
                writer(lane, _follow(observation, path))

        return write

    def views(self, rows: Rows) -> list[memoryview] | None:
        """The row of each lane, where an observation is one vector that is copied as it is.

        `view[:] = observation` takes a third of the time of numpy, and only what has the same shape and type.
        """
        (entry, *others), boxes = self.entries, gs.Box | gs.MultiBinary
        target = rows.arrays[entry.key]
        if others or entry.path or not isinstance(entry.space, boxes) or target.ndim != 2:
            return None
        return [memoryview(row) for row in target]

    def batch_writer(self, rows: Rows) -> Callable[[Any], None]:
        """A function that writes the observations of all lanes, given as gymnasium's vector envs give them."""
        lanes = range(rows.lanes)
        targets = [(e, rows.arrays[e.key], self._writer(e, rows.arrays[e.key])) for e in self.entries]

        def write(observation: Any) -> None:
            for entry, target, write_lane in targets:
                values = _follow(observation, entry.path)
                same = isinstance(values, np.ndarray) and values.shape == target.shape and values.dtype == target.dtype
                if same and isinstance(entry.space, gs.Box | gs.MultiBinary):
                    target[:] = values
                elif len(values) != len(target):
                    where = f"The vector env of {len(target)} envs"
                    raise wrong_shape(entry.key, target.shape, np.shape(values), where)
                else:
                    for lane in lanes:
                        write_lane(lane, values[lane])

        return write

    def some_writer(self, rows: Rows) -> Callable[[Any, np.ndarray, np.ndarray], None]:
        """A function that writes the observations at some places of an answer to some lanes."""
        targets = [(e, rows.arrays[e.key], self._writer(e, rows.arrays[e.key])) for e in self.entries]

        def write(observation: Any, places: np.ndarray, lanes: np.ndarray) -> None:
            for entry, target, write_lane in targets:
                values = np.asarray(_follow(observation, entry.path))
                same = values.shape[1:] == target.shape[1:] and values.dtype == target.dtype
                if same and isinstance(entry.space, gs.Box | gs.MultiBinary):
                    target[lanes] = values[places]
                else:
                    for place, lane in zip(places.tolist(), lanes.tolist(), strict=True):
                        write_lane(lane, values[place])

        return write

    def _writer(self, entry: Entry, target: np.ndarray) -> LaneWriter:
        space, key = entry.space, entry.key
        if isinstance(space, gs.Discrete):
            return _discrete_writer(key, space, target, not self.categorical)
        if isinstance(space, gs.MultiDiscrete):
            return _multi_discrete_writer(key, space, target, not self.categorical)
        shape, dtype = target.shape[1:], target.dtype
        rows = [target[lane, ...] for lane in range(len(target))]  # to cut them each time takes longer than to write

        def write(lane: int, value: Any) -> None:
            if type(value) is not np.ndarray:
                value = np.asarray(value)
            if value.shape != shape:
                raise wrong_shape(key, shape, value.shape, f"The env of lane {lane}")
            if value.dtype is not dtype and value.dtype != dtype:
                value = _converted(value, dtype, key, lane)
            rows[lane][...] = value

        return write


def _discrete_writer(key: Key, space: gs.Discrete, target: np.ndarray, one_hot: bool) -> LaneWriter:
    start, n = int(space.start), int(space.n)

    def write(lane: int, value: Any) -> None:
        index = int(value) - start
        if not 0 <= index < n:  # as an index it might wrap around unnoticed
            raise _outside(key, value, space, lane)
        if one_hot:
            target[lane] = 0
            target[lane, index] = 1
        else:
            target[lane] = index

    return write


def _multi_discrete_writer(key: Key, space: gs.MultiDiscrete, target: np.ndarray, one_hot: bool) -> LaneWriter:
    sizes, starts, blocks = _offsets(space)
    shape = space.nvec.shape

    def write(lane: int, value: Any) -> None:
        value = np.asarray(value)
        if value.shape != shape:
            raise wrong_shape(key, shape, value.shape, f"The env of lane {lane}")
        indices = value.reshape(-1) - starts
        if ((indices < 0) | (indices >= sizes)).any():
            raise _outside(key, value, space, lane)
        if one_hot:
            target[lane] = 0
            target[lane, blocks + indices] = 1
        else:
            target[lane] = indices.reshape(shape)

    return write


class ActionCodec:
    """Reads gymnasium actions from rows, and draws random ones."""

    def __init__(self, space: gs.Space[Any], categorical: bool = False) -> None:
        """Choose entries for `space`; `categorical` says how random actions are encoded by default."""
        self.space = space
        self.categorical = categorical
        self.entries = entries_of(space, ACTION)
        self.leaves = {entry.key: leaf_of(entry, categorical) for entry in self.entries}

    def lane_reader(self, rows: Rows) -> Callable[[Sequence[int] | None], list[Any]]:
        """A function that gives a list of gymnasium actions, for all lanes or some, that the envs may keep."""
        sources = [(e.path, *self._source(e, rows.arrays[e.key])) for e in self.entries]
        if len(sources) == 1 and not sources[0][0]:
            _, array, decode = sources[0]
            # Discrete actions stay np.int64, as gymnasium samples them: it checks plain ints at twice the price.
            if rows.lanes == 1 and decode is _as_they_are:  # numbers are copied as they are taken out
                return lambda lanes: [array[0]] if lanes is None or len(lanes) else []
            if rows.lanes == 1:  # to take the first is quicker than to make a list
                return lambda lanes: [decode(array)[0]] if lanes is None or len(lanes) else []
            return lambda lanes: list(decode(array if lanes is None else array[list(lanes)]))

        def read(lanes: Sequence[int] | None) -> list[Any]:
            values = [(path, decode(array if lanes is None else array[list(lanes)])) for path, array, decode in sources]
            count = rows.lanes if lanes is None else len(lanes)
            return [_assemble(self.space, {path: value[i] for path, value in values}) for i in range(count)]

        return read

    def batch_reader(self, rows: Rows) -> Callable[..., Any]:
        """A function that gives the actions of all lanes, or some, as gymnasium's vector envs take them."""
        sources = [(e.path, *self._source(e, rows.arrays[e.key])) for e in self.entries]

        def read(lanes: Index = slice(None)) -> Any:
            return _assemble(self.space, {path: decode(array[lanes]) for path, array, decode in sources})

        return read

    def _source(self, entry: Entry, array: np.ndarray) -> tuple[np.ndarray, Decode]:
        """Where the actions of one entry lie, `[N, ...]`, and what makes gymnasium's values of these or of some rows.

        For a Discrete space the rows may hold indices, one-hot vectors or scores, of which the largest counts.
        """
        space, shape, dtype = entry.space, array.shape[1:], np.dtype(entry.space.dtype)
        integral = array.dtype.kind in "iub"
        if isinstance(space, gs.Discrete):
            start = dtype.type(space.start)
            if shape == (int(space.n),):
                if start == 0 and dtype == np.int64:
                    return array, lambda given: given.argmax(1)
                return array, lambda given: given.argmax(1).astype(dtype) + start
            if integral and shape in ((), (1,)):
                flat = array.reshape(-1)
                if flat.dtype == dtype and start == 0:
                    return flat, _as_they_are
                if flat.dtype == dtype:
                    return flat, lambda given: given + start
                return flat, lambda given: given.astype(dtype) + start
        elif isinstance(space, gs.MultiDiscrete):
            starts = space.start
            if shape == (int(space.nvec.sum()),):
                cuts = _offsets(space)[-1][1:]

                def pick(given: np.ndarray) -> np.ndarray:
                    indices = [block.argmax(1) for block in np.split(given, cuts, 1)]
                    return np.stack(indices, 1).reshape(-1, *starts.shape).astype(dtype) + starts

                return array, pick
            if integral and shape == starts.shape:
                return array, lambda given: given.astype(dtype) + starts
        elif shape == tuple(space.shape or ()):
            return array, lambda given: given.astype(dtype)
        where = f"The policy, for the action space {space},"
        if not integral and shape in _index_shapes(space):
            raise ShapeError(
                f"{where} gave {entry.key!r} as {array.dtype} of shape {shape}: what is no whole number names no "
                f"action. Return action.long(), or scores of shape {leaf_of(entry, categorical=False).shape}, of which "
                "the largest counts."
            )
        raise wrong_shape(entry.key, self.leaves[entry.key].shape, shape, where)

    def index_limits(self, leaves: Mapping[Key, Leaf]) -> dict[Key, Tensor]:
        """Of entries that name actions by integers from 0, as `leaves` says: how many there are, in the entry's shape.

        All others are read as scores or as they are, so that none of their values is outside.
        """
        found: dict[Key, Tensor] = {}
        for entry in self.entries:
            leaf, scores = leaves[entry.key], leaf_of(entry, categorical=False).shape
            if leaf.shape in _index_shapes(entry.space) and leaf.shape != scores and not leaf.dtype.is_floating_point:
                sizes = entry.space.nvec if isinstance(entry.space, gs.MultiDiscrete) else entry.space.n  # type: ignore[attr-defined]
                found[entry.key] = torch.as_tensor(sizes, device="cpu").expand(leaf.shape)
        return found

    def drawer(
        self, leaves: Mapping[Key, Leaf], steps: int, lanes: int
    ) -> Callable[[torch.Generator | None], dict[Key, Tensor]]:
        """What draws random actions for `steps` steps of `lanes` lanes, `[T, N, ...]`, encoded as `leaves` says.

        It may write over those that it drew before.
        """
        drawers = {entry.key: drawer(entry.space, leaves[entry.key], (steps, lanes)) for entry in self.entries}
        return lambda generator: {key: draw(generator) for key, draw in drawers.items()}

    def draw(
        self, leaves: Mapping[Key, Leaf], steps: int, lanes: int, generator: torch.Generator | None
    ) -> dict[Key, Tensor]:
        """Such actions."""
        return self.drawer(leaves, steps, lanes)(generator)


_as_they_are = np.ndarray.copy
"""What decodes numbers that are actions themselves."""


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


def _converted(value: np.ndarray, dtype: np.dtype[Any], key: Key, lane: int) -> np.ndarray:
    """`value` as `dtype`: other precisions are rounded, but nothing is turned into another number."""
    where = f"The env of lane {lane} gave {key!r} of dtype {value.dtype}"
    try:
        with np.errstate(all="ignore"):
            converted = value.astype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}, which cannot be held as {dtype}.") from error
    if not np.can_cast(value.dtype, dtype, "same_kind") and not (converted == value).all():
        raise TypeError(f"{where}, with values that {dtype} does not have; the space should have another dtype.")
    return converted
