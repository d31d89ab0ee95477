"""FdWatch: waiting for descriptors, by any thread, and by a signal handler while its thread waits already."""

from __future__ import annotations

import select


class FdWatch:
    """What `select.poll` does, which refuses whoever comes while another waits: he gets one of his own."""

    def __init__(self, *fds: int) -> None:
        self._poll = select.poll()
        self._events: dict[int, int] = {}
        for fd in fds:
            self.add(fd)

    def add(self, fd: int, *, for_room: bool = False) -> None:
        """Wait for something to read from `fd` as well, or also for room to write; again, to change which."""
        self._events[fd] = select.POLLIN | (select.POLLOUT if for_room else 0)
        self._poll.register(fd, self._events[fd])

    def remove(self, fd: int) -> None:
        """Wait for `fd` no longer."""
        if self._events.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def wait(self, timeout_s: float) -> list[int]:
        """The descriptors that are ready."""
        milliseconds = max(0.0, timeout_s) * 1000
        try:
            return [fd for fd, _ in self._poll.poll(milliseconds)]
        except RuntimeError:
            other = select.poll()
            for fd, events in list(self._events.items()):
                other.register(fd, events)
            return [fd for fd, _ in other.poll(milliseconds)]
