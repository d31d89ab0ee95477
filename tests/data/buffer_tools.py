"""Frames that show whether they are whole, and what else several tests of buffers need."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

WAIT_S = 60.0
"""How long a test waits for what must come."""
WIDTH = 512
"""Numbers in the body of a frame, which is about 4 KB then: it takes a while to copy."""
BODY = np.arange(WIDTH)


def frames(numbers: Iterable[int]) -> TensorDict:
    """Large frames all of whose entries follow from one number."""
    n = torch.as_tensor(np.asarray(numbers, np.int64))
    return TensorDict(
        {
            "n": n,
            "body": n[:, None] + torch.from_numpy(BODY),
            "small": (n % 251).to(torch.uint8)[:, None],
            "next": {"n": n + 1, "flag": (n % 2).bool()},
        },
        [len(n)],
    )


def check(batch: TensorDict) -> list[int]:
    """The numbers of a batch of frames, each of which must be whole."""
    n = batch["n"].numpy()
    assert (batch["body"].numpy() == n[:, None] + BODY).all(), "a frame is torn"
    assert (batch["small"].numpy()[:, 0] == n % 251).all(), "a frame is torn"
    assert (batch["next", "n"].numpy() == n + 1).all(), "a frame is torn"
    assert (batch["next", "flag"].numpy() == n % 2).all(), "a frame is torn"
    return [int(number) for number in n]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
