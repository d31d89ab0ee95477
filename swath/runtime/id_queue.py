"""IdQueue: small numbers from many processes and threads to one reader."""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Sequence

from swath.runtime.descriptors import Descriptor

MOST = select.PIPE_BUF // 4
"""How many numbers can be put in at once: so many bytes the system never mixes with those of others."""
CAPACITY = 1 << 16


class IdQueue:
    """A queue of numbers below 2**31, taken out in the order in which they were put in, whoever has done so.

    It is a pipe: putting in and taking out are one call of the system each, however many numbers there are, and a
    writer that is killed leaves a number whole or not at all. `fileno` is readable when there is something.
    """

    def __init__(self) -> None:
        """Begin empty."""
        out, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._out, self._into = Descriptor(out), Descriptor(into)

    def fileno(self) -> int:
        """For `poll`."""
        return self._out.fd

    def put(self, numbers: Sequence[int]) -> None:
        """Put `numbers` in."""
        for first in range(0, len(numbers), MOST):
            some = numbers[first : first + MOST]
            os.write(self._into.fd, struct.pack(f"={len(some)}i", *some))

    def take(self) -> list[int]:
        """All that is there."""
        try:
            data = os.read(self._out.fd, CAPACITY)
        except BlockingIOError:
            return []
        return list(struct.unpack(f"={len(data) // 4}i", data))

    def close(self) -> None:
        """Close both ends. May be called again."""
        self._out.release()
        self._into.release()
