"""An interrupt at any instruction of a buffer leaves it to others: no lock stays held, and no frame is torn."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from buffer_tools import WAIT_S, check, frames
from interrupting import LOCKS, at_every_instruction

from swath.data import LazyTensorStorage, RateLimiter, ReplayBuffer
from swath.errors import RateLimitError

DEEDS: dict[str, tuple[Callable[[ReplayBuffer], Any], int]] = {
    "extend": (lambda buffer: buffer.extend(frames(range(6))), 1),
    "sample": (lambda buffer: buffer.sample(4), 1),
    "change": (lambda buffer: buffer.__setitem__(slice(0, 3), frames(range(3))), 1),
    "empty": (lambda buffer: buffer.empty(), 1),
    "state": (lambda buffer: buffer.state_dict(), 3),
    "copy": (lambda buffer: pickle.dumps(buffer.storage), 3),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("deed", DEEDS)
def test_no_lock_stays_held(deed: str, shared: bool) -> None:
    if deed == "copy" and shared:
        pytest.skip("shared memory is sent to processes, not pickled by itself")
    do, step = DEEDS[deed]
    buffer = ReplayBuffer(storage=LazyTensorStorage(16), shared=shared)
    buffer.extend(frames(range(16)))
    jobs: list[str] = []

    def use() -> None:
        buffer.extend(frames(range(100, 104)))
        check(buffer.sample(8))
        assert set(check(buffer[:]))
        jobs.append("done")

    def others_can_use_it() -> None:
        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert jobs.pop() == "done"

    assert at_every_instruction(lambda: do(buffer), others_can_use_it, step) > 5


def test_an_interrupted_wait_for_frames_keeps_nobody_from_writing() -> None:
    limiter = RateLimiter(samples_per_insert=1, min_size_to_sample=10_000, timeout_s=0.15)
    buffer = ReplayBuffer(storage=LazyTensorStorage(16), rate_limiter=limiter)

    def wait() -> None:
        with contextlib.suppress(RateLimitError):
            buffer.sample(8)

    def others_can_write() -> None:
        thread = threading.Thread(target=buffer.extend, args=(frames(range(4)),), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()

    assert at_every_instruction(wait, others_can_write, 1, LOCKS) > 5
