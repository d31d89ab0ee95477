"""A ring of frames that know where they belong, as a buffer would show it to samplers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from swath.data.contents import EMPTY, Contents
from swath.keys import Key

PADDING = -1
DONE, TRUNCATED, TERMINATED = (("next", name) for name in ("done", "truncated", "terminated"))
IDS = ("collector", "traj_ids")


@dataclass
class Writer:
    """An env that is stepped for ever; its episodes have random lengths."""

    env: int
    chance: random.Random
    episode: int = 0
    step: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        self.length = self.chance.randint(1, 9)

    def frame(self) -> tuple[int, int, int, bool]:
        """Env, episode, step, and whether the episode ends with it."""
        frame = (self.env, self.episode, self.step, self.step + 1 == self.length)
        self.step += 1
        if self.step == self.length:
            self.cut()
        return frame

    def cut(self) -> None:
        """Begin the next episode."""
        self.episode, self.step, self.length = self.episode + 1, 0, self.chance.randint(1, 9)


class Ring:
    """Columns "env", "episode_number" and "step" are the truth; all others are what samplers may use."""

    def __init__(self, lanes: int, capacity: int, seed: int = 0) -> None:
        self.lanes, self.capacity = lanes, capacity
        self.first = self.end = 0
        frames = lanes * capacity
        self.stamps = np.full(capacity, EMPTY, np.int64)
        self.seams = np.zeros(frames, bool)
        self.truth = np.full((frames, 3), -1)
        self.columns = {key: np.zeros((frames, 1), bool) for key in (DONE, TRUNCATED, TERMINATED, "is_init")}
        self.columns[IDS] = np.zeros(frames, np.int64)
        self.hidden: object = None
        """A column that samplers do not get to see."""
        self.edits = 0
        self.asked: list[tuple[Key, int]] = []
        """The entries that were asked for, and of how many frames."""
        self._chance = random.Random(seed)
        self._envs = 3 if lanes == 1 else lanes
        self.writers = [Writer(env, self._chance) for env in range(self._envs)]

    def contents(self, whole: bool = False) -> Contents:
        columns = {key: column for key, column in self.columns.items() if key != self.hidden}

        def entry(key: Key, index: np.ndarray) -> np.ndarray:
            self.asked.append((key, index.size))
            return np.asarray(columns[key][index])

        return Contents(
            lanes=self.lanes,
            capacity=self.capacity,
            first=self.first,
            end=self.end,
            stamps=self.stamps,
            seams=self.seams,
            entry=entry,
            whole=whole,
            edits=self.edits,
        )

    @property
    def is_whole(self) -> bool:
        return all(map(self.there, range(self.first, self.end)))

    def write(self, rows: int, env: int = 0) -> None:
        """With one lane, write frames of one env; with several, each has its own env."""
        for _ in range(rows):
            row = self.end % self.capacity
            for lane in range(self.lanes):
                self._put(lane, self.writers[env % self._envs if self.lanes == 1 else lane].frame())
            self._advance(row, self.end + 1)

    def pad(self, rows: int) -> None:
        """Write frames that are padding, in all lanes."""
        for _ in range(rows):
            for lane in range(self.lanes):
                self._put(lane, (-1, -1, -1, False))
                self.columns[IDS][lane * self.capacity + self.end % self.capacity] = PADDING
            self._advance(self.end % self.capacity, self.end + 1)

    def lose(self, rows: int) -> None:
        """A writer dies before it has written its rows."""
        for _ in range(rows):
            for lane in range(self.lanes):  # garbage that looks like more of the same
                index = lane * self.capacity + self.end % self.capacity
                self.truth[index] = -1
                self.seams[index] = False
                for key in (DONE, TRUNCATED, TERMINATED):
                    self.columns[key][index] = False
            self._advance(self.end % self.capacity, EMPTY)

    def cut(self) -> None:
        """Break off all episodes without telling by any flag."""
        for writer in self.writers:
            if writer.step:
                writer.cut()

    def edit(self, rows: int) -> None:
        """Change frames where they lie: the last run of each lane is told to be two, the first of `rows` frames."""
        self.edits += 1
        last = {lane: (begin, length) for lane, begin, length in self.runs()}
        for lane, (begin, length) in last.items():
            index = [lane * self.capacity + position % self.capacity for position in range(begin, begin + rows)]
            if rows < length:
                self.truth[index, 1] += 1000 * self.edits
                self.columns[IDS][index] += 1000 * self.edits
                self.columns[DONE][index[-1]] = True

    def reserve(self, rows: int, told: bool = True) -> None:
        """A writer takes the next rows, but has not written them yet."""
        taken = range(self.end, self.end + min(rows, self.capacity))
        self.stamps[[position % self.capacity for position in taken]] = EMPTY
        if told:
            self.first = max(self.first, min(self.end, taken.stop - self.capacity))

    def _put(self, lane: int, frame: tuple[int, int, int, bool]) -> None:
        row, before = self.end % self.capacity, (self.end - 1) % self.capacity
        index = lane * self.capacity + row
        env, episode, step, ends = frame
        previous = self.truth[lane * self.capacity + before]
        continues = self.stamps[before] == self.end and tuple(previous) == (env, episode, step - 1)
        ended = self.stamps[before] == self.end and self.columns[DONE][lane * self.capacity + before].all()
        self.seams[index] = not continues and not ended  # what neither follows nor begins anew is a seam
        self.seams[index] |= not continues and previous[0] != env
        self.truth[index] = env, episode, step
        self.columns[DONE][index] = ends
        self.columns[TERMINATED if episode % 2 else TRUNCATED][index] = ends
        self.columns[TRUNCATED if episode % 2 else TERMINATED][index] = False
        self.columns["is_init"][index] = step == 0
        self.columns[IDS][index] = env * 10_000 + episode

    def _advance(self, row: int, stamp: int) -> None:
        self.stamps[row] = stamp
        self.end += 1
        self.first = max(self.first, self.end - self.capacity)

    def there(self, position: int) -> bool:
        return self.first <= position < self.end and self.stamps[position % self.capacity] == position + 1

    def runs(self) -> list[tuple[int, int, int]]:
        """Lane, position of the first frame and length of all runs, by looking at every frame."""
        found: list[tuple[int, int, int]] = []
        for lane in range(self.lanes):
            last: tuple[int, ...] | None = None
            for position in range(self.first, self.end):
                frame = tuple(self.truth[lane * self.capacity + position % self.capacity].tolist())
                if not self.there(position) or frame[0] < 0:
                    last = None
                    continue
                if last is not None and frame == (*last[:2], last[2] + 1):
                    found[-1] = (lane, found[-1][1], found[-1][2] + 1)
                else:
                    found.append((lane, position, 1))
                last = frame
        return found


def operations() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """What may happen to a ring: see `play`."""
    others = ["pad", "lose", "cut", "reserve", "edit", "look"]
    names = st.sampled_from(["write"] * 5 + others)
    return st.lists(st.tuples(names, st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=25)


def rings() -> st.SearchStrategy[Ring]:
    return st.builds(Ring, st.integers(1, 3), st.integers(1, 23), st.integers(0, 999))


def play(ring: Ring, happenings: list[tuple[str, int, int]]) -> Iterator[None]:
    """Let it happen, and pause to look now and then, and at the end."""
    for name, number, env in happenings:
        if name == "write":
            ring.write(number, env)
        elif name == "cut":
            ring.cut()
        elif name == "look":
            yield
        else:
            getattr(ring, name)(max(1, number // 4))
    yield
