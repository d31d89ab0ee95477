"""Many threads write to one buffer and sample from it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from buffer_tools import WAIT_S, Feeder, buffer_of, check, together
from buffer_tools import large_frames as frames

from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NothingToSampleError,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
)
from swath.data.pacing import Feeders
from swath.data.prioritized import PrioritizedSampler


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        (LazyTensorStorage, None),
        (LazyMemmapStorage, None),
        (ListStorage, None),
        (LazyTensorStorage, SamplerWithoutReplacement),
        (LazyTensorStorage, lambda: PrioritizedSampler(128, 0.7, 0.5)),
    ],
)
def test_frames_are_whole_and_none_is_lost(
    kind: type[Storage], sampler: Callable[[], Sampler] | None, shared: bool
) -> None:
    if shared and kind is ListStorage:
        pytest.skip("a list cannot be shared")
    buffer = ReplayBuffer(storage=kind(128), sampler=sampler, shared=shared)
    rounds, over = 120, threading.Event()
    buffer.extend(frames(range(10)))

    def write(place: int) -> list[tuple[int, int]]:
        """Where each of our frames went."""
        chance, number, told = random.Random(place), 1_000_000 * (place + 1), []
        for _ in range(rounds):
            numbers = range(number, number + chance.randint(1, 20))
            told += list(zip(buffer.extend(frames(numbers)).tolist(), numbers, strict=True))
            number = numbers.stop
        return told

    def sample(place: int) -> int:
        batches = 0
        while not over.is_set() or not batches:
            check(buffer.sample(random.Random(place).randint(1, 40)))
            if batches % 7 == 0:
                check(buffer[:])
                assert 0 < len(buffer) <= 128
            batches += 1
        return batches

    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(sample, place) for place in range(3)]
        try:
            written = [told for job in [pool.submit(write, place) for place in range(3)] for told in job.result(WAIT_S)]
        finally:
            over.set()
        assert all(reader.result(WAIT_S) > 0 for reader in readers)
    assert buffer.write_count == 10 + len(written)
    assert buffer.stats()["lost"] == 0
    held = check(buffer[:])
    assert len(held) == len(set(held)) == 128
    places = {number: where for where, number in written}
    assert [places[number] for number in held] == list(range(128))
    # Every place was given out equally often, one after the other.
    counts = np.bincount([where for where, _ in written], minlength=128)
    counts[:10] += 1
    assert counts.max() - counts.min() <= 1


def test_threads_may_race_to_be_the_first() -> None:
    for _ in range(20):
        buffer = ReplayBuffer(storage=LazyTensorStorage(16))
        barrier = threading.Barrier(4)

        def write(place: int, buffer: ReplayBuffer = buffer, barrier: threading.Barrier = barrier) -> list[int]:
            barrier.wait(WAIT_S)
            return list(buffer.extend(frames(range(100 * place, 100 * place + 2))).tolist())

        where = together(*(lambda place=place: write(place) for place in range(4)))
        assert sorted(at for pair in where for at in pair) == list(range(8))
        assert sorted(check(buffer[:])) == sorted(100 * place + at for place in range(4) for at in range(2))


def test_threads_may_take_what_is_drawn_ahead() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), prefetch=1, batch_size=8)
    buffer.extend(frames(range(64)))

    def sample() -> int:
        return sum(len(check(buffer.sample())) for _ in range(100))

    try:
        assert together(sample, sample, sample, sample) == [800] * 4
    finally:
        buffer.shutdown()


def test_emptying_and_saving_between_writes_of_others() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(64))
    buffer.extend(frames(range(64)))
    over = threading.Event()

    def write(place: int) -> None:
        number = 0
        while not over.is_set():
            first = 10_000 * place + number % 5000
            buffer.extend(frames(range(first, first + 7)))
            number += 7

    def save() -> None:
        try:
            for at in range(30):
                twin = buffer_of(size=64)
                twin.load_state_dict(buffer.state_dict())
                if len(twin):
                    assert len(check(twin[:])) == len(twin)
                if at % 5 == 0:
                    buffer.empty()
        finally:
            over.set()

    together(lambda: write(1), lambda: write(2), save)


def test_two_buffers_over_one_storage_may_be_used_by_two_threads() -> None:
    storage = LazyTensorStorage(64)
    buffers = [ReplayBuffer(storage=storage) for _ in range(2)]
    buffers[0].extend(frames(range(64)))

    def write(place: int) -> None:
        for number in range(10_000 * (place + 1), 10_000 * (place + 1) + 3000, 10):
            buffers[place].extend(frames(range(number, number + 10)))
            check(buffers[place].sample(10))

    together(lambda: write(0), lambda: write(1))
    assert buffers[0].write_count == 64 + 6000
    assert len(buffers[0]) == 64
    assert buffers[0].stats()["lost"] == 0


# -- feeders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def waiting(pool: ThreadPoolExecutor, buffer: ReplayBuffer, feeder: Feeder) -> Future[Any]:
    """A `sample()` in another thread that has found nothing, and waits."""
    sampling = pool.submit(buffer.sample, 4)
    feeder.await_waiting(sampling)
    return sampling


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("options", [{}, {"prefetch": 2, "batch_size": 4}])
def test_sampling_waits_for_the_first_frames(pool: ThreadPoolExecutor, shared: bool, options: dict[str, Any]) -> None:
    buffer, feeder = buffer_of(size=16, shared=shared, **options), Feeder()
    buffer.attach(feeder)
    sampling = waiting(pool, buffer, feeder)
    buffer.extend(frames(range(3)))
    assert set(check(sampling.result(WAIT_S))) <= {0, 1, 2}
    buffer.shutdown()


def test_sampling_waits_for_enough(pool: ThreadPoolExecutor) -> None:
    sampler = SamplerWithoutReplacement(drop_last=True)
    buffer, feeder = buffer_of(size=16, sampler=sampler), Feeder()
    buffer.attach(feeder)
    buffer.extend(frames(range(3)))
    sampling = waiting(pool, buffer, feeder)
    buffer.extend(frames([3]))
    assert sorted(check(sampling.result(WAIT_S))) == [0, 1, 2, 3]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("failure", [None, ZeroDivisionError("in the env")])
def test_a_feeder_that_ends_or_fails_ends_the_wait(
    pool: ThreadPoolExecutor, shared: bool, failure: Exception | None
) -> None:
    buffer, feeder = buffer_of(size=16, shared=shared), Feeder()
    buffer.attach(feeder)
    sampling = waiting(pool, buffer, feeder)
    feeder.failure, feeder.feeding = failure, False
    with pytest.raises(type(failure) if failure else NothingToSampleError):
        sampling.result(WAIT_S)


def test_a_failure_is_raised_though_there_are_frames() -> None:
    buffer, feeder = buffer_of(size=16), Feeder()
    buffer.extend(frames(range(4)))
    buffer.attach(feeder)
    check(buffer.sample(4))
    feeder.failure = ZeroDivisionError("in the env")
    with pytest.raises(ZeroDivisionError):
        buffer.sample(4)


def test_a_feeder_that_nobody_holds_is_forgotten() -> None:
    buffer, feeder = buffer_of(size=16), Feeder()
    buffer.attach(feeder)
    del feeder
    begun = time.monotonic()
    with pytest.raises(NothingToSampleError):
        buffer.sample(4)
    assert time.monotonic() - begun < 10.0


def test_feeders_by_themselves() -> None:
    feeders, one, two = Feeders(), Feeder(), Feeder()
    assert not feeders.are_feeding()
    assert not feeders.have_ended(), "there were none"
    feeders.add(one)
    feeders.add(one)
    feeders.add(two)
    one.feeding = False
    assert feeders.are_feeding()
    two.feeding = False
    assert not feeders.are_feeding()
    assert feeders.have_ended()
    two.failure = KeyError("x")
    with pytest.raises(KeyError):
        feeders.raise_failure()
    feeders.remove(two)
    feeders.raise_failure()
