"""Writing and sampling in proportion."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from buffer_tools import WAIT_S, Feeder, together
from children import child, hear
from hypothesis import given, settings
from hypothesis import strategies as st

from swath.data import LazyTensorStorage, RateLimiter, RateLimitError, ReplayBuffer


def frames(count: int) -> torch.Tensor:
    return torch.ones(count, 3)


def limited(
    ratio: float, batch_size: int | None = 8, shared: bool = False, size: int = 64, **options: Any
) -> ReplayBuffer:
    limiter = RateLimiter(ratio, **options)
    return ReplayBuffer(storage=LazyTensorStorage(size), batch_size=batch_size, rate_limiter=limiter, shared=shared)


# -- by the book -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"samples_per_insert": 0}, "samples_per_insert"),
        ({"samples_per_insert": -1.0}, "samples_per_insert"),
        ({"samples_per_insert": float("nan")}, "samples_per_insert"),
        ({"samples_per_insert": 1, "tolerance": -1}, "tolerance"),
        ({"samples_per_insert": 1, "tolerance": float("nan")}, "tolerance"),
        ({"samples_per_insert": 1, "min_size_to_sample": 0}, "min_size_to_sample"),
        ({"samples_per_insert": 1, "timeout_s": 0}, "timeout_s"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RateLimiter(**options)


ratios = st.one_of(st.floats(0.01, 300.0), st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0, 256.0]))
tolerances = st.one_of(st.none(), st.just(0.0), st.floats(0.0, 100.0))


@settings(max_examples=300, deadline=None)
@given(
    ratio=ratios,
    tolerance=tolerances,
    minimum=st.integers(1, 50),
    count=st.integers(1, 100),
    batch=st.integers(1, 300),
    written=st.integers(0, 10_000),
    sampled=st.integers(0, 100_000),
)
def test_never_do_both_sides_wait(
    ratio: float, tolerance: float | None, minimum: int, count: int, batch: int, written: int, sampled: int
) -> None:
    limiter = RateLimiter(ratio, tolerance, minimum)
    assert limiter.may_sample(batch, written, sampled) or limiter.may_insert(count, batch, written, sampled)


@settings(max_examples=150, deadline=None)
@given(
    ratio=ratios,
    tolerance=tolerances,
    minimum=st.integers(1, 50),
    count=st.integers(1, 20),
    batch=st.integers(1, 64),
    turns=st.lists(st.booleans(), min_size=50, max_size=50),
)
def test_the_ratio_is_held_whoever_comes_first(
    ratio: float, tolerance: float | None, minimum: int, count: int, batch: int, turns: list[bool]
) -> None:
    limiter = RateLimiter(ratio, tolerance, minimum)
    written = sampled = 0
    slack = batch if tolerance is None else tolerance
    for writes in turns * 6:
        if writes and limiter.may_insert(count, batch, written, sampled):
            written += count
        elif not writes and limiter.may_sample(batch, written, sampled):
            sampled += batch
            assert written >= minimum
        due = ratio * (written - minimum + 1)
        # At most one step of either side beyond what is tolerated.
        assert sampled <= max(due, 0.0) + slack + 1e-6
        if sampled:
            assert due <= sampled + slack + ratio * count + batch + 1e-6


def test_nothing_is_sampled_before_there_is_enough() -> None:
    limiter = RateLimiter(4.0, min_size_to_sample=100)
    assert not limiter.may_sample(1, 99, 0)
    assert limiter.may_sample(4, 100, 0)
    assert limiter.may_insert(1000, 8, 0, 0)


# -- with a buffer ---------------------------------------------------------------------------------------------------


def test_one_thread_is_told_instead_of_waiting_for_ever() -> None:
    buffer = limited(1.0, timeout_s=0.05)
    assert buffer.rate_limiter is not None
    with pytest.raises(RateLimitError, match=r"sample\(\).*0 frames were written and 0 sampled"):
        buffer.sample()
    buffer.extend(frames(4))
    buffer.sample()
    with pytest.raises(RateLimitError, match=r"sample\(\).*4 frames were written and 8 sampled"):
        buffer.sample()
    with pytest.raises(TimeoutError):
        buffer.sample()
    while buffer.rate_limiter.may_insert(4, 8, buffer.write_count, 8):
        buffer.extend(frames(4))
    with pytest.raises(RateLimitError, match=r"writing.*written and 8 sampled"):
        buffer.extend(frames(4))
    assert buffer.stats()["sampled"] == 8
    before = buffer.write_count
    assert before <= 8 + 8 + 4
    assert buffer.write({"_": frames(2)}, [2], stopping=lambda: True).tolist()  # collection is being stopped
    assert buffer.write_count == before + 2


def test_the_minimum_is_awaited() -> None:
    buffer = limited(8.0, min_size_to_sample=20, timeout_s=0.02)
    buffer.extend(frames(19))
    with pytest.raises(RateLimitError, match="19"):
        buffer.sample()
    buffer.extend(frames(1))
    buffer.sample()


def test_without_a_limiter_nothing_is_awaited() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(frames(100))
    buffer.sample(50)
    assert buffer.stats()["sampled"] == 50


def run_both(
    buffer: ReplayBuffer, inserts: int, count: int, samples: int, batch: int | None = None
) -> list[tuple[int, int]]:
    """Write and sample in two threads as fast as they may; what was written and sampled after each step."""
    seen: list[tuple[int, int]] = []

    def write() -> None:
        for _ in range(inserts):
            buffer.extend(frames(count))
            seen.append((buffer.write_count, buffer.storage.ledger.sampled))

    def sample() -> None:
        for _ in range(samples):
            buffer.sample(batch)
            seen.append((buffer.write_count, buffer.storage.ledger.sampled))

    together(write, sample)
    return seen


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("ratio", "count", "batch"), [(1.0, 4, 8), (8.0, 1, 16), (0.25, 16, 4), (2.0, 32, 8)])
def test_threads_are_held_in_proportion(ratio: float, count: int, batch: int, shared: bool) -> None:
    buffer = limited(ratio, batch_size=batch, shared=shared)
    inserts = 100
    samples = int(ratio * inserts * count / batch)
    seen = run_both(buffer, inserts, count, samples)
    assert buffer.write_count == inserts * count
    assert buffer.stats()["sampled"] == samples * batch
    for written, sampled in seen:
        assert abs(ratio * written - sampled) <= 2 * batch + 2 * ratio * count + ratio


def write_many(pipe: Any, buffer: ReplayBuffer, inserts: int, count: int) -> None:
    torch.set_num_threads(1)
    for _ in range(inserts):
        buffer.extend(frames(count))
    pipe.send(buffer.write_count)


def test_processes_are_held_in_proportion() -> None:
    buffer = limited(2.0, batch_size=8, shared=True)
    with child(write_many, buffer, 60, 4) as (_, one), child(write_many, buffer, 60, 4) as (_, two):
        for _ in range(2 * 60 * 4 * 2 // 8):
            buffer.sample()
            # Each of the two writers may be one step ahead, and we one behind.
            assert abs(2.0 * buffer.write_count - buffer.stats()["sampled"]) <= 8 + 2 * (2 * 2.0 * 4) + 8 + 2
        hear(one)
        hear(two)
        assert buffer.write_count == 480
        assert buffer.stats()["sampled"] == 960


@pytest.mark.parametrize("batch_size", [None, 2])
def test_batches_of_another_size_than_the_buffers_own_do_not_lock_both_sides_up(batch_size: int | None) -> None:
    run_both(
        limited(1.0, batch_size=batch_size, tolerance=0.0, timeout_s=1.0), inserts=64, count=1, samples=4, batch=16
    )


def sampling_when(buffer: ReplayBuffer, feeder: Feeder, happens: Callable[[], None]) -> Any:
    """What a `sample()` gives that waits for the limiter when something happens."""
    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(buffer.sample)
        feeder.await_waiting(sampling)
        happens()
        return sampling.result(WAIT_S)


@pytest.fixture(params=[False, True])
def fed(request: pytest.FixtureRequest) -> tuple[ReplayBuffer, Feeder]:
    """A buffer of which nothing more may be sampled before more is written."""
    buffer, feeder = limited(1.0, shared=request.param), Feeder()
    buffer.attach(feeder)
    buffer.extend(frames(8))
    for _ in range(2):
        buffer.sample()
    return buffer, feeder


def test_when_nobody_feeds_any_more_sampling_goes_on(fed: tuple[ReplayBuffer, Feeder]) -> None:
    buffer, feeder = fed
    assert sampling_when(buffer, feeder, lambda: setattr(feeder, "feeding", False)).shape == (8, 3)
    for _ in range(10):
        buffer.sample()


def test_a_failure_of_the_feeder_is_raised_to_who_waits(fed: tuple[ReplayBuffer, Feeder]) -> None:
    buffer, feeder = fed
    with pytest.raises(ZeroDivisionError):
        sampling_when(buffer, feeder, lambda: setattr(feeder, "failure", ZeroDivisionError()))


def test_a_writer_that_is_stopped_writes_at_once() -> None:
    buffer = limited(1.0, tolerance=0.0, timeout_s=WAIT_S)
    buffer.extend(frames(20))
    stopping, asked = threading.Event(), threading.Event()

    def is_stopping() -> bool:
        asked.set()
        return stopping.is_set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(buffer.write, {"_": frames(4)}, [4], stopping=is_stopping)
        for _ in range(2):
            asked.clear()
            assert asked.wait(WAIT_S)
        assert not writing.done()
        stopping.set()
        writing.result(WAIT_S)
    assert buffer.write_count == 24


def test_counts_survive_saving_and_end_with_emptying() -> None:
    buffer = limited(1.0, timeout_s=0.02)
    buffer.extend(frames(8))
    buffer.sample()
    twin = limited(1.0, timeout_s=0.02)
    twin.load_state_dict(buffer.state_dict())
    assert twin.stats()["sampled"] == 8
    twin.sample()
    with pytest.raises(RateLimitError):
        twin.sample()
    twin.empty()
    assert twin.stats() == {"frames": 0, "written": 0, "sampled": 0, "lost": 0}
    twin.extend(frames(8))
    twin.sample()
