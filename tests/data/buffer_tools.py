"""Frames that show whether they are whole, processes that use a buffer, and what else several tests need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from swath.data import LazyTensorStorage, ReplayBuffer, Storage

WAIT_S = 60.0
"""How long a test waits for what must come."""


def frames(numbers: Iterable[int], width: int = 2, episode: int = 5) -> TensorDict:
    """Frames all of whose entries follow from one number: the last of every `episode` numbers ends an episode."""
    n = torch.as_tensor(np.fromiter(numbers, np.int64))
    done = (n % episode == episode - 1)[:, None]
    return TensorDict(
        {
            "n": n,
            "body": n[:, None] + torch.arange(width),
            "pixels": (n[:, None, None] * 7 % 251).to(torch.uint8).expand(-1, 3, 2),
            "odd": (n % 2).bool()[:, None],
            "half": (n % 128).to(torch.bfloat16),
            "next": {
                "n": n + 1,
                "deep": {"x": n.double()[:, None] / 3},
                "done": done,
                "truncated": done.clone(),
                "terminated": torch.zeros_like(done),
            },
        },
        [len(n)],
    )


def check(batch: TensorDict, flags: bool = True) -> list[int]:
    """The numbers of a batch of frames, each of which must be whole; without `flags`, those may be anything."""
    numbers = batch["n"].reshape(-1).tolist()
    expected = frames(numbers, batch["body"].shape[-1])
    if not flags:
        expected = expected.exclude(*(("next", name) for name in ("done", "truncated", "terminated")))
    for key, value in expected.items(True, True):
        given = batch[key].reshape(value.shape)
        assert given.dtype == value.dtype, key
        assert torch.equal(given, value), f"{key} of a frame is torn"
    return numbers


def large_frames(numbers: Iterable[int]) -> TensorDict:
    """Frames of about 4 KB, which take a while to copy."""
    return frames(numbers, width=512)


def buffer_of(kind: type[Storage] = LazyTensorStorage, size: int = 10, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=kind(size), **options)


def lose(buffer: ReplayBuffer, rows: int) -> None:
    """A writer gives up in the middle of its rows."""

    def put(where: slice, which: slice) -> None:
        buffer.storage.view(buffer.storage.layout.rows)["n"][..., where] = -1
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        buffer.storage.write(rows, put, None, None)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """What the jobs return, each of which ran in a thread of its own; the first error is raised."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        begun = [pool.submit(job) for job in jobs]
        return [job.result(WAIT_S) for job in begun]


class Feeder:
    """Fills a buffer, as far as the buffer knows."""

    def __init__(self) -> None:
        self.feeding = True
        self.failure: Exception | None = None
        self.asked = threading.Event()

    def is_feeding(self) -> bool:
        self.asked.set()
        return self.feeding

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def await_waiting(self, sampling: Any) -> None:
        """Until the draw `sampling` in another thread has looked twice, and so does wait."""
        for _ in range(2):
            self.asked.clear()
            assert self.asked.wait(WAIT_S)
        assert not sampling.done()
