"""TrajectoryIds against a loop that hands out one number after the other."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swath.rollout.trajectory_ids import TrajectoryIds


class OneByOne:
    """The same, frame by frame."""

    def __init__(self, lanes: int, worker: int) -> None:
        self.next = worker * 2**40
        self.current = [self.new() for _ in range(lanes)]

    def new(self) -> int:
        self.next += 1
        return self.next - 1

    def assign(self, done: np.ndarray) -> np.ndarray:
        out = np.empty(done.shape, np.int64)
        for t in range(done.shape[1]):
            for lane in range(len(done)):
                out[lane, t] = self.current[lane]
            for lane in np.flatnonzero(done[:, t]):
                self.current[lane] = self.new()
        return out

    def renew(self, lanes: list[int]) -> None:
        for lane in lanes:
            self.current[lane] = self.new()


@st.composite
def slots(draw: Any, lanes: int) -> np.ndarray:
    steps = draw(st.integers(1, 7))
    return np.array(draw(st.lists(st.booleans(), min_size=lanes * steps, max_size=lanes * steps))).reshape(lanes, steps)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), lanes=st.integers(1, 5), worker=st.integers(0, 5))
def test_ids_are_those_handed_out_one_by_one(data: Any, lanes: int, worker: int) -> None:
    ids, plain = TrajectoryIds(lanes, worker), OneByOne(lanes, worker)
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            chosen = data.draw(st.lists(st.integers(0, lanes - 1), unique=True))
            ids.renew(chosen)
            plain.renew(chosen)
        done = data.draw(slots(lanes))
        out = np.full(done.shape, -7, np.int64)
        ids.assign(done, out)
        np.testing.assert_array_equal(out, plain.assign(done))
        np.testing.assert_array_equal(ids.current, plain.current)
        assert ids.count == plain.next - worker * 2**40


def test_workers_never_share_an_id() -> None:
    found: set[int] = set()
    for worker in range(4):
        ids = TrajectoryIds(2, worker)
        out = np.empty((2, 100), np.int64)
        ids.assign(np.ones((2, 100), dtype=bool), out)
        assert not found & set(out.reshape(-1).tolist())
        found |= set(out.reshape(-1).tolist())
    assert len(found) == 4 * 200


def test_restored_ids_were_never_used() -> None:
    ids = TrajectoryIds(3)
    ids.restore(50)
    assert ids.current.tolist() == [50, 51, 52]
    assert ids.count == 53
