"""LocalCarrier: workers are objects of this process, which work while they are waited for.

For one process, and for `debug=True`: the same sessions as everywhere, one after the other, where a debugger can look.
"""

# ruff: noqa: D102 - what the methods of carriers and links do is told in `swath.runtime.carrier`

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from swath.keys import Key
from swath.runtime.board import Board
from swath.runtime.carrier import Finished, Message, News, Order, Subscribe, Task, Topic
from swath.runtime.columns import Columns, Leaf, Place
from swath.runtime.session import Session
from swath.runtime.snapshots import SnapshotContents, Snapshots, SnapshotStore
from swath.runtime.work import W


class LocalLink:
    """A worker's end, and the pool's."""

    is_local = True

    def __init__(self, board: Board, index: int) -> None:
        self._row = board.row(index)
        self.beat, self.is_interrupted = self._row.beat, self._row.is_interrupted
        self.reported: Mapping[str, float] | Callable[[], Mapping[str, float]] = {}
        self.to_worker: deque[Message] = deque()
        self.to_pool: deque[News] = deque()

    def send(self, news: News) -> None:
        self.to_pool.append(news)

    def report(self, numbers: Mapping[str, float] | Callable[[], Mapping[str, float]]) -> None:
        """Let the pool see `numbers`; as a function they are computed only when they are looked at."""
        self.reported = numbers
        self._row.settle()

    def has_news(self) -> bool:
        return bool(self.to_worker)

    def receive(self, *, wait: bool) -> list[Message]:
        return [self.to_worker.popleft() for _ in range(len(self.to_worker))]

    def memory(self, place: Place) -> Columns:
        """The worker's rows of the memory; the memory itself, if they are all of it."""
        memory = place.memory
        assert memory is not None
        return memory if place.rows == memory.shape[0] else memory.part(place.first_row, place.first_row + place.rows)

    def finish(self, order: Order, receipt: object) -> None:
        self.send(Finished(order.ticket, receipt))


class LocalCarrier:
    """Workers in this process."""

    is_local = True

    def __init__(self, workers: int, fields: Sequence[str] = ()) -> None:
        """Begin without workers; they report `fields`."""
        self.workers: list[int] = []
        board = self._board = Board(workers, fields, private=True)
        self.interrupt, self.resume, self.heartbeat = board.interrupt, board.resume, board.heartbeat
        self.unreported_steps = board.unreported_steps
        self._links: dict[int, LocalLink] = {}
        self.sessions: dict[int, Session] = {}
        self._mail: list[deque[Any]] = []
        """Where anything but orders waits to be seen to, on either side."""
        self.is_at_work = False
        """Whether a worker has begun to work, and whoever lets it answer a question has come in between."""

    def start(self, index: int, task: Task) -> None:
        self.stop(index)
        self._board.clear(index)
        link = self._links[index] = LocalLink(self._board, index)
        session = self.sessions[index] = Session(task, link)
        self._mail = [*self._mail, link.to_worker, link.to_pool, session.control]
        self.workers = sorted({*self.workers, index})

    def stop(self, index: int, timeout_s: float = 0.0) -> None:
        session = self.sessions.pop(index, None)
        if session is not None:
            self.workers = [worker for worker in self.workers if worker != index]
            link = self._links[index]
            gone = (link.to_worker, link.to_pool, session.control)
            self._mail = [one for one in self._mail if not any(one is other for other in gone)]
            session.job.stop()

    def shutdown(self, timeout_s: float | None = None) -> None:
        for index in list(self.sessions):
            self.stop(index)

    def send(self, index: int, message: Message) -> None:
        """Leave a message for a worker, until somebody waits for it."""
        if index in self.sessions:
            self._links[index].to_worker.append(message)

    def wait(self, timeout_s: float) -> bool:
        """Let each worker do the first thing that it was sent; without time, only answer questions."""
        for session in list(self.sessions.values()):
            if timeout_s > 0:
                session.step(wait=False)
            else:
                session.answer_questions(self.is_at_work)
        return True

    @property
    def has_mail(self) -> bool:
        """Whether anything but orders waits to be seen to, on either side."""
        return any(self._mail)

    def let_work(
        self,
        outstanding: Mapping[int, deque[W]],
        lock: AbstractContextManager[bool],
        finish: Callable[[int, int, object], None],
    ) -> None:
        """Let each worker do the first that is `outstanding` of its work, in this thread; `finish` it with the lock."""
        self.is_at_work = True
        try:
            for index in self.workers:
                works, session = outstanding[index], self.sessions.get(index)
                if not works or session is None:  # a signal handler has just stopped it
                    continue
                work = works[0]
                try:
                    receipt = session.perform(work)
                except BaseException:
                    work.is_over = work.is_lost = True
                    with lock:
                        if works and works[0] is work:
                            works.popleft()
                    raise
                with lock:
                    finish(index, work.ticket, receipt)
        finally:
            self.is_at_work = False

    def receive(self) -> list[tuple[int, News]]:
        news: list[tuple[int, News]] = []
        for index, link in self._links.items():
            while link.to_pool:
                news.append((index, link.to_pool.popleft()))
        return news

    def report(self, index: int) -> dict[str, float]:
        found = self._board.report(index)
        if index in self._links:
            reported = self._links[index].reported
            numbers = reported() if callable(reported) else reported
            found.update({name: float(numbers[name]) for name in found if name in numbers})
        return found

    def alive(self) -> list[int]:
        return list(self.workers)

    def is_stopped(self, index: int) -> bool:
        """Never: it would be us."""
        return False

    def kill(self, index: int) -> None:
        """Not without this process: a step that hangs here is waited for."""

    def pid(self, index: int) -> int:
        return os.getpid()

    def lease(self, leaves: Mapping[Key, Leaf], shape: Sequence[int], device: torch.device | None) -> Columns:
        return Columns(leaves, shape, device=device)

    def open_snapshots(self, contents: SnapshotContents) -> SnapshotStore:
        return Snapshots(contents, private=True)

    def subscribe(self, index: int, topic: Topic, snapshots: SnapshotStore) -> None:
        assert isinstance(snapshots, Snapshots)
        self.send(index, Subscribe(topic, snapshots))
