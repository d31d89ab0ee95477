"""What the stress checks with: a ledger of all frames, and a watch that ends what hangs."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.testing  # now: a signal handler could come in between when it is first used
from tensordict import TensorDictBase

from swath.data.episodes import find_pieces
from swath.keys import DONE, MASK, NEXT, POLICY_VERSION, REWARD, TERMINATED, TRAJ_IDS, TRUNCATED, after
from swath.testing.checks import LANE, ONE_STEP, STEP, counted
from swath.testing.counting import length_of
from swath.testing.stress import MARK, processes

ACTED = "acted"
"""The least and the greatest of the weights that acted, which are all the same."""


class FrameLedger:
    """What was delivered of each trajectory: a new frame must go on where its trajectory ended.

    Trajectories may be cut off (by resets, seeds, deaths), but none has a hole, none comes twice, and no id names two.
    """

    def __init__(self, lengths: Sequence[int], limit: int | None = None) -> None:
        """For counting envs whose episodes have `lengths`, and no more steps than `limit`."""
        self._lengths, self._limit, self.frames = lengths, limit or sys.maxsize, 0
        self.next: dict[int, tuple[int, int, int] | None] = {}
        """(lane, episode, step) of the next frame of each id; None where there is none to come."""
        self._weights: dict[int, float] = {}
        """What each version has acted with."""
        self._newest: dict[int, int] = {}
        """The last version of each lane."""

    def check_frames(self, frames: TensorDictBase) -> np.ndarray:
        """Each frame alone is right; the numbers `[N, 3]` of all."""
        numbers = counted(frames).reshape(-1, 3)
        done, terminated, truncated, reward = (
            frames.get(after(name)).numpy().reshape(-1) for name in (DONE, TERMINATED, TRUNCATED, REWARD)
        )
        lasts = [step + 1 >= self._length(lane, episode) for lane, episode, step in numbers.tolist()]
        np.testing.assert_array_equal(counted(frames.get(NEXT)).reshape(-1, 3), numbers + ONE_STEP)
        np.testing.assert_array_equal(reward, numbers[:, STEP] + 1)
        np.testing.assert_array_equal(done, lasts, "done elsewhere than in the last step")
        np.testing.assert_array_equal(done, terminated | truncated)
        least, greatest = frames.get(ACTED).numpy().reshape(-1, 2).T
        np.testing.assert_array_equal(least, greatest, "weights are a mixture")
        for version, value in {*zip(frames.get(POLICY_VERSION).reshape(-1).tolist(), least.tolist(), strict=True)}:
            known = self._weights.setdefault(version, value)
            assert known == value, f"version {version} has acted with the weights {known} and {value}"
        return numbers

    def _length(self, lane: int, episode: int) -> int:
        return min(length_of(self._lengths, lane, episode), self._limit)

    def take(self, batch: TensorDictBase, *, has_rows: bool = False) -> None:
        """Check a batch `[..., T]` and count it; with `has_rows` each row is of another lane."""
        rows = batch.reshape(-1, batch.shape[-1])
        ids, mask = rows.get(TRAJ_IDS), rows.get(MASK, None)
        if mask is not None:
            assert (ids[~mask] == -1).all(), "padding has an id"
            for row, there in zip(rows, mask, strict=True):
                self.take(row[there].exclude(MASK))
            return
        assert (ids >= 0).all(), "a frame has no id"
        numbers = self.check_frames(rows).reshape(*rows.shape, 3)
        versions = rows.get(POLICY_VERSION).numpy().reshape(rows.shape)
        if has_rows:
            assert (numbers[..., LANE] == numbers[:, :1, LANE]).all(), "a row has frames of two lanes"
            assert len({*numbers[:, 0, LANE]}) == len(numbers), "two rows are of one lane"
        pieces = find_pieces(ids=ids.numpy())
        for row, first, end, name in zip(pieces.lane, pieces.first, pieces.end, pieces.name.tolist(), strict=True):
            self._take_piece(name, numbers[row, first:end], versions[row, first:end])

    def _take_piece(self, name: int, numbers: np.ndarray, versions: np.ndarray) -> None:
        lane, episode, step = numbers[0].tolist()
        expected = self.next.get(name, (lane, episode, 0))
        assert (lane, episode, step) == expected, f"{(lane, episode, step)} in trajectory {name} instead of {expected}"
        np.testing.assert_array_equal(numbers, numbers[:1] + ONE_STEP * np.arange(len(numbers))[:, None])
        is_last = step + len(numbers) >= self._length(lane, episode)
        self.next[name] = None if is_last else (lane, episode, step + len(numbers))
        assert (np.diff(versions, prepend=self._newest.get(lane, 0)) >= 0).all(), f"older weights in lane {lane}"
        self._newest[lane] = int(versions[-1])
        self.frames += len(numbers)


class Watchdog:
    """Ends the process, with the tracebacks of all threads, if a step of any thread takes too long."""

    def __init__(self, deadline_s: float) -> None:
        """Begin to look."""
        self._deadline_s, self.is_over, self._parent = deadline_s, False, os.getppid()
        self._steps: dict[int, tuple[str, float, float]] = {}
        threading.Thread(target=self._look, daemon=True).start()

    @contextlib.contextmanager
    def step(self, name: str, times: float = 1.0) -> Iterator[None]:
        """A context that must end in time, or in so many times that time."""
        me, now = threading.get_ident(), time.monotonic()
        outer = self._steps.get(me)  # where a signal's handler has come in between
        self._steps[me] = (name, now, now + times * self._deadline_s)
        try:
            yield
        finally:
            self._steps.pop(me)
            if outer is not None:
                self._steps[me] = outer

    def _look(self) -> None:
        while not self.is_over:
            time.sleep(0.2)
            if os.getppid() != self._parent:  # whoever has run the round was killed
                os._exit(4)
            for thread, (name, since, deadline) in list(self._steps.items()):
                if (now := time.monotonic()) > deadline:
                    print(f"HANGS: {name}, for {now - since:.0f} s, in thread 0x{thread:x}", flush=True)
                    faulthandler.dump_traceback(sys.stdout)
                    for pid in processes(os.environ.get(MARK, "")):
                        with contextlib.suppress(OSError):  # it has ended
                            state, place = (Path(f"/proc/{pid}/{name}").read_text() for name in ("stat", "wchan"))
                            print(f"{pid}: {state.rpartition(')')[2].split()[:2]} {place}", flush=True)
                    os._exit(3)


def mapped_memory() -> int:
    """How much shared memory of ours this process has."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:swath")


def forgive_lost_interrupts(counts: collections.Counter[str]) -> None:
    """Only count them: Python loses a Ctrl-C that comes while it frees something, whatever anybody does."""

    def hear(found: sys.UnraisableHookArgs) -> None:
        if isinstance(found.exc_value, KeyboardInterrupt):
            counts["lost interrupt"] += 1
        else:
            sys.__unraisablehook__(found)

    sys.unraisablehook = hear
