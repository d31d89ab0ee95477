"""Samplers: every frame gets its chance, and no frame that is not there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from buffer_tools import buffer_of, check, frames, lose, seeded
from hypothesis import given, settings
from hypothesis import strategies as st

from swath.data import (
    LazyTensorStorage,
    ListStorage,
    NothingToSampleError,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
)
from swath.data.contents import Contents
from swath.data.samplers import Draw


def assert_uniform(drawn: list[int], expected: set[int]) -> None:
    """Pearson's test, at a level of about one in a million."""
    assert set(drawn) == expected
    counts = np.array([drawn.count(n) for n in expected])
    mean = len(drawn) / len(expected)
    statistic, freedom = float(((counts - mean) ** 2 / mean).sum()), len(expected) - 1
    # Wilson and Hilferty: the cube root of chi-square is nearly normal.
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 4.9, counts


def drawn_from(buffer: ReplayBuffer, batches: int = 200, size: int = 100) -> list[int]:
    return [n for _ in range(batches) for n in check(buffer.sample(size))]


# -- with replacement ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("written", [13, 40, 57, 123])
def test_all_frames_have_the_same_chance(kind: type[Storage], written: int) -> None:
    buffer = buffer_of(kind, 40, generator=seeded(written))
    for start in range(0, written, 10):
        buffer.extend(frames(range(start, min(start + 10, written))))
    assert_uniform(drawn_from(buffer), set(range(max(0, written - 40), written)))


@pytest.mark.parametrize("rows", [4, 10, 17])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("lost", [0, 4])
def test_all_frames_of_all_lanes_have_the_same_chance(rows: int, dim: int, lost: int) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2), generator=seeded(rows), dim_extend=dim)
    for t in range(rows):
        buffer.add(frames([1000 * lane + t for lane in range(3)]))
    if lost:
        lose(buffer, lost)
    kept = range(max(0, rows + lost - 10), rows)
    assert_uniform(drawn_from(buffer), {1000 * lane + t for lane in range(3) for t in kept})
    assert (len(buffer), buffer.stats()["lost"]) == (3 * len(kept), 3 * lost)


def test_holes_are_never_drawn_and_the_others_alike() -> None:
    buffer = buffer_of(size=40, generator=seeded())
    buffer.extend(frames(range(30)))
    lose(buffer, 7)
    buffer.extend(frames(range(30, 45)))
    lose(buffer, 5)
    present = set(buffer[:]["n"].tolist())
    assert present == {*range(17, 30), *range(30, 45)}
    assert_uniform(drawn_from(buffer), present)
    assert len(buffer) == len(present) == 28


def test_a_buffer_that_holds_only_holes_has_nothing() -> None:
    buffer = buffer_of(size=5)
    buffer.extend(frames(range(5)))
    lose(buffer, 5)
    assert len(buffer) == 0
    with pytest.raises(NothingToSampleError):
        buffer.sample(2)
    buffer.extend(frames([9]))
    assert set(check(buffer.sample(20))) == {9}


@settings(max_examples=50, deadline=None)
@given(
    capacity=st.integers(1, 12),
    story=st.lists(st.tuples(st.booleans(), st.integers(1, 15)), min_size=1, max_size=12),
    without=st.booleans(),
)
def test_what_is_drawn_is_what_is_there(capacity: int, story: list[tuple[bool, int]], without: bool) -> None:
    sampler = SamplerWithoutReplacement() if without else RandomSampler()
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)
    buffer.extend(frames([0]))
    held: list[int | None] = [None] * (capacity - 1) + [0]
    number = 1
    for is_lost, count in story:
        if is_lost:
            count = min(count, capacity)
            lose(buffer, count)
            held += [None] * count
        else:
            buffer.extend(frames(range(number, number + count)))
            held += list(range(number, number + count))
            number += count
        held = held[-capacity:]
        there = {n for n in held if n is not None}
        assert len(buffer) == len(there)
        assert buffer.storage.ledger.written == number
        if not there:
            with pytest.raises(NothingToSampleError):
                buffer.sample(3)
            continue
        assert set(check(buffer.sample(5))) <= there
        assert set(check(buffer[:])) == there
        epoch = ReplayBuffer(storage=buffer.storage, sampler=SamplerWithoutReplacement(), batch_size=4)
        assert sorted(n for batch in epoch for n in check(batch)) == sorted(there)


# -- without replacement ---------------------------------------------------------------------------------------------


def once(size: int = 40, **options: Any) -> ReplayBuffer:
    sampler = SamplerWithoutReplacement(**options)
    return ReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=8, generator=seeded())


def numbers_of_an_epoch(buffer: ReplayBuffer) -> list[int]:
    return sorted(n for batch in buffer for n in check(batch))


@pytest.mark.parametrize("written", [1, 8, 37, 40, 55])
def test_every_frame_comes_once_in_an_epoch(written: int) -> None:
    buffer = once()
    buffer.extend(frames(range(written)))
    expected = list(range(max(0, written - 40), written))
    orders = []
    for _ in range(4):
        batches = [check(batch) for batch in buffer]
        assert [len(batch) for batch in batches[:-1]] == [8] * (len(batches) - 1)
        orders.append([n for batch in batches for n in batch])
        assert sorted(orders[-1]) == expected
    assert written < 5 or any(order != orders[0] for order in orders)


def test_single_samples_run_through_epochs_too() -> None:
    buffer = once()
    buffer.extend(frames(range(20)))
    for _ in range(3):
        drawn = [check(buffer.sample()) for _ in range(3)]
        assert [len(batch) for batch in drawn] == [8, 8, 4]
        assert sorted(n for batch in drawn for n in batch) == list(range(20))
        assert buffer.sampler.ran_out
    assert len(check(buffer.sample(100))) == 20


def test_the_last_batch_is_left_out_if_it_is_not_full() -> None:
    buffer = once(drop_last=True)
    buffer.extend(frames(range(5)))
    assert list(buffer) == []
    with pytest.raises(NothingToSampleError, match="5"):
        buffer.sample()
    buffer.extend(frames(range(5, 20)))
    for _ in range(3):
        batches = [check(batch) for batch in buffer]
        assert [len(batch) for batch in batches] == [8, 8]
        assert len({n for batch in batches for n in batch}) == 16
    with pytest.raises(NothingToSampleError, match=r"20.*21"):
        buffer.sample(21)


def test_from_the_oldest_to_the_newest() -> None:
    buffer = once(shuffle=False)
    buffer.extend(frames(range(30)))
    assert [n for batch in buffer for n in check(batch)] == list(range(30))
    buffer.extend(frames(range(30, 57)))
    assert [n for batch in buffer for n in check(batch)] == list(range(17, 57))


def test_lanes_are_taken_row_by_row() -> None:
    sampler = SamplerWithoutReplacement(shuffle=False)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=sampler, batch_size=3)
    for t in range(6):
        buffer.add(frames([100 + t, 200 + t]))
    drawn = [n for batch in buffer for n in check(batch)]
    assert drawn == [lane + t for t in range(2, 6) for lane in (100, 200)]


def test_new_frames_begin_a_new_epoch() -> None:
    buffer = once()
    buffer.extend(frames(range(20)))
    buffer.sample()
    buffer.extend(frames([20]))
    assert numbers_of_an_epoch(buffer) == list(range(21))
    buffer.sample()
    buffer.extend(frames([]))  # nothing new
    assert len([n for batch in buffer for n in check(batch)]) == 13


@pytest.mark.parametrize("is_told", [True, False])
def test_emptying_ends_the_epoch(is_told: bool) -> None:
    """Also where another buffer empties the storage, of which the sampler is not told."""
    buffer = once()
    buffer.extend(frames(range(40)))
    buffer.sample()
    (buffer if is_told else ReplayBuffer(storage=buffer.storage)).empty()
    with pytest.raises(NothingToSampleError):
        buffer.sample()
    buffer.extend(frames(range(100, 140)))
    assert numbers_of_an_epoch(buffer) == list(range(100, 140))


def test_a_list_runs_through_epochs() -> None:
    buffer = ReplayBuffer(storage=ListStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4, collate_fn=list)
    buffer.extend([str(n) for n in range(13)])
    assert sorted(int(n) for batch in buffer for n in batch) == list(range(3, 13))


# -- samplers of users -----------------------------------------------------------------------------------------------


class Newest(Sampler):
    """The newest frames, with words about them."""

    def __init__(self) -> None:
        self.priorities: list[tuple[list[int], list[float]]] = []
        self.emptied = 0
        self.seen = 0

    def draw(self, contents: Contents, batch_size: int, generator: torch.Generator | None) -> Draw:
        if contents.rows < batch_size:
            raise NothingToSampleError("too few")
        self.seen = contents.end
        index = contents.index(np.arange(contents.end - batch_size, contents.end))
        age = np.arange(batch_size)[::-1].copy()
        return Draw(index, {"age": age}, {"odd": contents.entry("odd", index), "extra": age * 10})

    def update_priority(self, contents: Contents, index: np.ndarray, priority: np.ndarray) -> None:
        self.priorities.append((index.tolist(), priority.tolist()))

    def empty(self) -> None:
        self.emptied += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_sampler_of_ones_own() -> None:
    sampler = Newest()
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
    buffer.extend(frames(range(14)))
    batch, info = buffer.sample(5, return_info=True)
    assert check(batch) == [9, 10, 11, 12, 13]
    assert info["age"].tolist() == [4, 3, 2, 1, 0]
    assert batch["extra"].tolist() == [40, 30, 20, 10, 0]
    assert info["index"].tolist() == [9, 0, 1, 2, 3]
    buffer.update_priority(info["index"], torch.arange(5.0))
    buffer.update_priority(3, 2.0)
    assert sampler.priorities == [([9, 0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0, 4.0]), ([3], [2.0])]
    with pytest.raises(NothingToSampleError, match="too few"):
        buffer.sample(11)
    state = buffer.state_dict()
    buffer.empty()
    assert sampler.emptied == 1
    other = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Newest())
    other.load_state_dict(state)
    assert isinstance(other.sampler, Newest)
    assert other.sampler.seen == 14


def test_priorities_are_for_frames_of_lanes_too() -> None:
    sampler = Newest()
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=sampler)
    where = buffer.extend(frames(range(6)).reshape(2, 3))
    buffer.update_priority(where, torch.arange(6.0))
    # Rows of four frames each lane: (row, lane) is lane * 4 + row.
    assert sampler.priorities == [([0, 4, 1, 5, 2, 6], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])]
    buffer.update_priority((torch.tensor([2]), torch.tensor([1])), 0.5)
    assert sampler.priorities[1] == ([6], [0.5])


def test_priorities_mean_nothing_to_other_samplers() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(frames(range(4)))
    buffer.update_priority([0, 1], [1.0, 2.0])
    assert set(check(buffer.sample(100))) == {0, 1, 2, 3}


# -- contents --------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(capacity=st.integers(1, 9), lanes=st.integers(1, 3), written=st.integers(0, 30), origin=st.integers(0, 30))
def test_positions_and_indices_are_each_others_reverse(capacity: int, lanes: int, written: int, origin: int) -> None:
    end = origin + written
    first = max(origin, end - capacity)
    stamps = np.zeros(capacity, np.int64)
    positions = np.arange(first, end)
    stamps[positions % capacity] = positions + 1
    contents = Contents(lanes, capacity, first, end, stamps, np.zeros(lanes * capacity, bool), lambda key: stamps)
    for lane in range(lanes):
        index = contents.index(positions, lane)
        assert np.array_equal(contents.positions(index), positions)
        assert contents.holds(index).all()
    there = contents.holds(np.arange(lanes * capacity))
    assert there.sum() == lanes * (end - first)
