"""Slices: pieces of trajectories as batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from swath.data.contents import Contents
from swath.data.runs import FrameRuns, RunFinder, Signs
from swath.data.samplers import Draw, Sampler
from swath.errors import NothingToSampleError, check_foreign_arguments
from swath.keys import DONE, IS_INIT, MASK, NEXT, TERMINATED, TRUNCATED, Key, as_key, as_path

Span: TypeAlias = bool | int | Sequence[bool | int]

_IGNORED = ("compile", "use_gpu")
"""Arguments of TorchRL that promise speed. Boundaries are kept up to date here as frames come."""
_REFUSED = {
    "fragmented": "Write each env to a lane of its own, or whole trajectories, so that frames lie in order.",
    "step_key": "It belongs to `fragmented`, which is not supported.",
}
_HARMLESS = {"fragmented": (False,), "step_key": ("step_count",)}


class SliceSampler(Sampler):
    """Draws pieces of trajectories: frames that follow each other, one slice after the other in a flat batch.

    Each slice is of one run: a stretch of frames of one trajectory without a gap. All runs have the same chance, and
    then all places within the run. No slice contains the end of a trajectory except as its last frame, none goes past
    the newest frame, and none contains a frame that is being overwritten. Trajectories are told apart by their ids and
    by the flag of their last frame, by both where both exist, unless the arguments name one of them. What two writers
    wrote is never of one run. Boundaries are found once, when frames come or are changed.

    All entries that are replaced in the batch come with the draw's info as well, and what is terminated.

    Args:
        num_slices: how many slices make a batch; they are `batch_size // num_slices` long.
        slice_len: how long slices are; `batch_size // slice_len` make a batch. Give this or `num_slices`.
        end_key: entry that is true for the last frame of a trajectory. It must exist. If None, `("next", "done")` if
            there is one, and if `traj_key` does not do without it.
        traj_key: entry with the trajectory's id; frames with the id -1 are padding and are never drawn. Without
            `end_key` the ids alone count, and flags only if there is no such entry. If None, `("collector",
            "traj_ids")` or else `"episode"`, if there is one, and flags count too.
        ends: instead of both, whether each frame is the last of its trajectory `[frames]`. Needs `cache_values=True`.
        trajectories: instead of both, the id of each frame's trajectory `[frames]`. Needs `cache_values=True`.
        cache_values: makes no difference otherwise: boundaries are always kept.
        truncated_key: entry that is made true for the last frame of each slice, and false elsewhere; "done" beside it
            is made true there as well. None: both stay as they are.
        init_key: entry that is made true for the first frame of each slice, if the buffer has it. None: it stays.
        strict_length: draw from runs only that are as long as a slice. Otherwise shorter ones are drawn as they are,
            and the batch is shorter too.
        pad_output: fill up slices that are too short with their last frame. The batch is flat all the same, `[slices *
            length]`, and can be reshaped to `[slices, length]`; `("collector", "mask")` is false where it was filled
            up. Needs `strict_length=False`.
        span: let slices stick out of their run, and be shorter by that: at both sides, or a pair for left and right.
            A number is by how many frames at most; True: all but one.
        end_keys: several entries like `end_key`; any of them ends a trajectory. Those that do not exist are left out.
        replacement: whether a run may come again before all have come. `SliceSampler(replacement=False, ...)` makes a
            `SliceSamplerWithoutReplacement`.
        others: `compile` and `use_gpu` make no difference; what else is not known is named in the error.

    Raises:
        TypeError: neither or both of `num_slices` and `slice_len` are given, or something that is not supported.
        ValueError: `pad_output` with `strict_length`, or a number that makes no sense.
        RuntimeError: arguments that exclude each other.
    """

    def __new__(cls, *, replacement: bool = True, **options: Any) -> SliceSampler:
        """Make the kind that was asked for."""
        return super().__new__(SliceSamplerWithoutReplacement if cls is SliceSampler and not replacement else cls)

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        traj_key: Any = None,
        ends: Any = None,
        trajectories: Any = None,
        cache_values: bool = False,
        truncated_key: Any = (NEXT, TRUNCATED),
        init_key: Any = IS_INIT,
        strict_length: bool = True,
        pad_output: bool = False,
        span: Span = False,
        end_keys: Sequence[Any] | None = None,
        replacement: bool = True,
        **others: Any,
    ) -> None:
        check_foreign_arguments(type(self).__name__, others, ignored=_IGNORED, refused=_REFUSED, harmless=_HARMLESS)
        if not replacement:
            raise TypeError(
                f"{type(self).__name__} does not support `replacement=False`. Derive it from "
                "`SliceSamplerWithoutReplacement`."
            )
        if (num_slices is None) == (slice_len is None):
            raise TypeError(
                f"Give either `num_slices` or `slice_len`, and not both: got num_slices={num_slices} and "
                f"slice_len={slice_len}."
            )
        if (given := num_slices if slice_len is None else slice_len) is not None and given < 1:
            raise ValueError(f"Slices need a number or a length of at least 1, got {given}.")
        if pad_output and strict_length:
            raise ValueError(
                "`pad_output=True` needs `strict_length=False`: otherwise no slice is too short, and there is nothing "
                "to fill up."
            )
        self.num_slices, self.slice_len = num_slices, slice_len
        self.truncated_key = None if truncated_key is None else as_key(truncated_key)
        self.init_key = None if init_key is None else as_key(init_key)
        self.strict_length, self.pad_output, self.cache_values = strict_length, pad_output, cache_values
        self.span = _both_sides(span)
        """By how many frames slices may stick out on the left and on the right, at most; True: all but one."""
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self.end_key = None if end_key is None else as_key(end_key)
        self.end_keys = None if end_keys is None else tuple(map(as_key, end_keys))
        self._finder = RunFinder(self._signs(ends, trajectories))
        self._long: tuple[FrameRuns, int, FrameRuns] | None = None

    def _signs(self, ends: Any, trajectories: Any) -> Signs:
        """What tells trajectories apart; raises if it says so in two ways."""
        if self.end_key is not None and self.end_keys is not None:
            raise RuntimeError("`end_key` and `end_keys` exclude each other: give all keys as `end_keys`.")
        if ends is not None and trajectories is not None:
            raise RuntimeError("`ends` and `trajectories` exclude each other.")
        for name, given in (("ends", ends), ("trajectories", trajectories)):
            if given is None:
                continue
            if not self.cache_values:
                raise RuntimeError(f"`{name}` holds for data that do not change: it needs `cache_values=True`.")
            if any(key is not None for key in (self.end_key, self.end_keys, self.traj_key)):
                raise RuntimeError(
                    f"`{name}` and keys of entries (`end_key`, `end_keys`, `traj_key`) exclude each other."
                )
        return Signs(
            self.traj_key,
            self.end_keys if self.end_key is None else (self.end_key,),
            None if ends is None else np.asarray(ends, bool).reshape(-1),
            None if trajectories is None else np.asarray(trajectories).reshape(-1),
        )

    def draw(self, contents: Contents, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Choose slices that are `batch_size` frames together, or fewer if short ones are among them."""
        count, length = self._sizes(batch_size)
        while True:
            runs = self._long_enough(self._finder.find(contents), length)
            slices = self._place(self._choose(contents, runs, count, length, generator), length, generator)
            drawn = self._cut(contents, slices, length)
            if contents.whole or (there := contents.holds(drawn.index)).all():
                return drawn
            # Rare: a writer has taken their rows meanwhile. It takes rows in order, so all older ones are gone as well.
            self._finder.drop_before(int(contents.positions(drawn.index[~there]).max()) + 1)
            self._start_over()

    def empty(self) -> None:
        """Forget all boundaries."""
        self._finder.empty()
        self._long = None

    def _sizes(self, batch_size: int) -> tuple[int, int]:
        """How many slices, and how long."""
        given, name = (self.num_slices, "num_slices") if self.slice_len is None else (self.slice_len, "slice_len")
        if given is None or batch_size < 1 or batch_size % given:
            raise RuntimeError(f"The batch size must be a multiple of {name}={given}, got {batch_size}.")
        other = batch_size // given
        return (given, other) if self.slice_len is None else (other, given)

    def _long_enough(self, runs: FrameRuns, length: int) -> FrameRuns:
        """The runs that slices can be of."""
        if self._long is None or self._long[0] is not runs or self._long[1] != length:
            long = runs[runs.length >= length] if self.strict_length else runs
            self._long = (runs, length, long)
        long = self._long[2]
        if not len(runs):
            raise NothingToSampleError("The buffer holds no frame of any trajectory.")
        if not len(long):
            raise NothingToSampleError(
                f"There is no trajectory as long as a slice: slices are of {length} frames, the trajectories in the "
                f"buffer of {runs.length.min()} to {runs.length.max()}. Ask for shorter slices, or set "
                "`strict_length=False`."
            )
        return long

    def _choose(
        self, contents: Contents, runs: FrameRuns, count: int, length: int, generator: torch.Generator | None
    ) -> FrameRuns:
        """The runs of which there shall be a slice each."""
        return runs[torch.randint(len(runs), (count,), generator=generator, device="cpu").numpy()]

    def _start_over(self) -> None:
        """FrameRuns that were found before are not valid any more."""

    def _place(self, runs: FrameRuns, length: int, generator: torch.Generator | None) -> FrameRuns:
        """Choose a slice of each run, all places with the same chance."""
        lengths = np.minimum(runs.length, length)
        left, right = (lengths - 1 if side is True else np.minimum(lengths - 1, side) for side in self.span)
        places = runs.length - lengths + 1 + left + right
        chance = torch.rand(len(runs), dtype=torch.float64, generator=generator, device="cpu").numpy()
        # The product may be rounded up to what it must stay below.
        start = np.minimum((chance * places).astype(np.int64), places - 1) - left
        stop = np.minimum(start + lengths, runs.length)
        start = np.maximum(start, 0)
        return FrameRuns(runs.lane, runs.begin + start, stop - start)

    def _cut(self, contents: Contents, slices: FrameRuns, length: int) -> Draw:
        """Turn slices into frames."""
        steps, lengths = np.arange(length), slices.length
        begins = np.arange(0, len(slices) * length, length)  # of the slices, in the batch
        if lengths.min() == length:
            index = contents.index(slices.begin[:, None] + steps, slices.lane[:, None]).reshape(-1)
            return self._draw(contents, index, begins, lengths)
        last = lengths[:, None] - 1
        index = contents.index(slices.begin[:, None] + np.minimum(steps, last), slices.lane[:, None])
        mask = steps <= last
        if self.pad_output:
            return self._draw(contents, index.reshape(-1), begins, lengths, mask)
        return self._draw(contents, index[mask], np.cumsum(lengths) - lengths, lengths)

    def _draw(
        self,
        contents: Contents,
        index: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        mask: np.ndarray | None = None,
    ) -> Draw:
        """Frames, and flags that tell where slices begin and end: bool `[B, ...]`, shaped like the entry."""
        overrides: dict[Key, np.ndarray] = {}
        terminated: dict[Key, np.ndarray] = {}
        if self.truncated_key is not None:
            overrides, terminated = _truncation(contents, self.truncated_key, index, begins + lengths - 1)
        if self.init_key is not None and (stored := _stored(contents, self.init_key, index)) is not None:
            overrides[self.init_key] = _flags(stored, begins)
        if self.pad_output:
            overrides[MASK] = np.ones(len(index), bool) if mask is None else mask.reshape(-1)
        info: dict[Any, np.ndarray] = {**terminated, **overrides}
        return Draw(index, info, overrides)


class SliceSamplerWithoutReplacement(SliceSampler):
    """Draws a slice of each run, and of none a second one before all have had their turn.

    An epoch is over when all runs have had theirs; when frames come meanwhile, a new one begins. Its last batch has
    fewer slices if there are not enough left.

    Args:
        drop_last: leave out the last batch of an epoch if it is not full.
        shuffle: take runs in random order; otherwise from the oldest to the newest. Places within are always random.
        replacement: False, if it is given at all.
        options: as of `SliceSampler`.
    """

    can_repeat = False

    def __init__(
        self, *, drop_last: bool = False, shuffle: bool = True, replacement: bool = False, **options: Any
    ) -> None:
        if replacement:
            raise TypeError(f"{type(self).__name__} does not support `replacement=True`. Use `SliceSampler`.")
        super().__init__(**options)
        self.drop_last, self.shuffle = drop_last, shuffle
        self._edits: int | None
        self._start_over()

    @property
    def ran_out(self) -> bool:
        """Whether the last draw was the last of its epoch."""
        return self._ran_out

    def empty(self) -> None:
        """Begin before the first epoch again."""
        super().empty()
        self._start_over()

    def state_dict(self) -> dict[str, Any]:
        """What is left of the epoch."""
        left = np.stack((self._left.lane, self._left.begin, self._left.length))
        return {"left": torch.from_numpy(left), "epoch": self._epoch, "ran_out": self._ran_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in a saved epoch."""
        self._left = FrameRuns(*state["left"].numpy().copy())
        first, end, length = state["epoch"]
        self._epoch, self._ran_out = (first, end, length), bool(state["ran_out"])
        self._edits = None

    def _start_over(self) -> None:
        nothing = np.empty(0, np.int64)
        self._left = FrameRuns(nothing, nothing, nothing)
        """The runs that are still to come."""
        self._epoch = (0, 0, 0)
        """What the epoch is of: the oldest and the newest position, and the length of slices."""
        self._edits = None
        """How often frames had been changed then; None: as often as at the next draw. That differs between buffers."""
        self._ran_out = False

    def _choose(
        self, contents: Contents, runs: FrameRuns, count: int, length: int, generator: torch.Generator | None
    ) -> FrameRuns:
        """The next runs of the epoch."""
        epoch = (contents.first, contents.end, length)
        if epoch != self._epoch or self._edits not in (None, contents.edits) or not len(self._left):
            self._left, self._epoch = self._ordered(runs, generator), epoch
        self._edits = contents.edits
        if self.drop_last and len(self._left) < count:
            raise NothingToSampleError(
                f"The buffer holds {len(self._left)} trajectories of sufficient length, fewer than the {count} slices "
                "of one batch."
            )
        chosen, self._left = self._left[:count], self._left[count:]
        self._ran_out = len(self._left) < (count if self.drop_last else 1)
        if self._ran_out:
            self._left = self._left[:0]
        return chosen

    def _ordered(self, runs: FrameRuns, generator: torch.Generator | None) -> FrameRuns:
        if self.shuffle:
            return runs[torch.randperm(len(runs), generator=generator, device="cpu").numpy()]
        return runs[np.lexsort((runs.lane, runs.begin))]


def _both_sides(span: Span) -> tuple[bool | int, bool | int]:
    """The span on the left and on the right."""
    sides = tuple(span) if isinstance(span, Sequence) else (span, span)
    if len(sides) != 2:
        raise ValueError(f"`span` must be a number, a bool, or one for the left and one for the right, got {span}.")
    left, right = sides
    if left < 0 or right < 0:
        raise ValueError(f"`span` must not be negative, got {span}.")
    return left, right


def _beside(key: Key, name: str) -> Key:
    """The key of the entry `name` in the same place."""
    return as_key((*as_path(key)[:-1], name))


def _stored(contents: Contents, key: Key, index: np.ndarray) -> np.ndarray | None:
    """What the buffer has for the frames `index`, if there is such an entry."""
    try:
        return contents.entry(key, index)
    except KeyError:
        return None


def _truncation(
    contents: Contents, key: Key, index: np.ndarray, lasts: np.ndarray
) -> tuple[dict[Key, np.ndarray], dict[Key, np.ndarray]]:
    """The flags of a batch that is cut off after the frames `lasts`, and which frames are terminated."""
    done_key, terminated_key = _beside(key, DONE), _beside(key, TERMINATED)
    truncated = _stored(contents, key, index[:1])  # all but its shape is replaced
    done, terminated = (_stored(contents, each, index) for each in (done_key, terminated_key))
    shape = next((known.shape[1:] for known in (truncated, done) if known is not None), (1,))
    none = np.zeros((len(index), *shape), bool)
    flags = {key: _flags(none, lasts), done_key: _flags(none if done is None else done, lasts)}
    if terminated is None:
        flags[terminated_key] = none
    return flags, {terminated_key: none if terminated is None else terminated}


def _flags(stored: np.ndarray, where: np.ndarray) -> np.ndarray:
    """What is stored, but true at `where`."""
    flags = np.array(stored, bool)
    flags[where] = True
    return flags
