"""Workers in this very process, for `debug=True`: the same code, one after the other, where a debugger can look."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import Any

from swath.runtime import Goodbye


class LocalChannel:
    """Both ends of a channel within one process."""

    is_local = True

    def __init__(self) -> None:
        """Begin empty."""
        self.to_worker: deque[Any] = deque()
        self.to_parent: deque[Any] = deque()

    def send(self, message: Any, **_: Any) -> None:
        """From the worker to its parent."""
        self.to_parent.append(message)

    def take_in(self) -> None:
        """Everything is there at once."""

    def has_news(self) -> bool:
        """Whether the worker was sent something."""
        return bool(self.to_worker)

    def receive_all(self) -> list[Any]:
        """What the worker was sent."""
        messages = list(self.to_worker)
        self.to_worker.clear()
        return messages

    def receive(self) -> Any:
        """The next message to the worker, which is there: it is called only when one is."""
        return self.to_worker.popleft()


class LocalProcess:
    """Stands for the process of a worker that has none."""

    is_stopped = False

    def __init__(self, target: Any) -> None:
        """Begin."""
        self.pid = os.getpid()
        self.channel = LocalChannel()
        self.session = target.begin(self.channel)


class LocalCrew:
    """A crew whose workers do what they are sent when somebody waits for them."""

    def __init__(self) -> None:
        """Begin without workers."""
        self.processes: dict[int, LocalProcess] = {}

    def __len__(self) -> int:
        """How many workers there are."""
        return len(self.processes)

    def hire(self, index: int, target: Any) -> None:
        """Begin a worker."""
        self.processes[index] = LocalProcess(target)

    def dismiss(self, index: int, timeout_s: float = 0.0) -> None:
        """End a worker."""
        self.processes.pop(index).session.end()

    def send(self, index: int, message: Any, **_: Any) -> None:
        """Leave a message for a worker."""
        self.processes[index].channel.to_worker.append(message)

    def wait(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Let each worker do the first thing that it was sent, and say what has come of it."""
        news = []
        for index, process in self.processes.items():
            if process.session.has_work:
                process.session.step()
            while process.channel.to_parent:
                news.append((index, process.channel.to_parent.popleft()))
        return news

    def unread(self, news: Iterable[tuple[int, Any]]) -> None:
        """Put messages back, to be the first that `wait` returns."""
        for index, message in reversed(list(news)):
            self.processes[index].channel.to_parent.appendleft(message)

    def alive(self) -> list[int]:
        """All of them."""
        return list(self.processes)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Close all envs."""
        for process in self.processes.values():
            process.channel.to_worker.append(Goodbye())
            process.session.end()
        self.processes = {}
