"""A task for workers whose job is put together from functions, and what tests ask of carriers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil

from swath.runtime.carrier import Carrier, Link, News, Ordered, Topic
from swath.runtime.snapshots import Snapshots


def echo(link: Link, order: Ordered) -> Any:
    return os.getpid(), order.request


class Doing:
    """A task, and the job that it begins. Questions are functions of the job; their results are the answers."""

    def __init__(
        self,
        work: Callable[[Link, Ordered], Any] = echo,
        begin: Callable[[Link], Any] = lambda link: "ready",
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.work_with, self.begin_with, self.idle = work, begin, idle
        self.subscribed: dict[Topic, Snapshots] = {}
        self.log: list[Any] = []
        self.is_stopped = False

    def begin(self, link: Link) -> Doing:
        self.link = link
        self.description = self.begin_with(link)
        return self

    def describe(self) -> Any:
        return self.description

    def work(self, order: Ordered, has_questions: Callable[[], bool]) -> Any:
        self.has_questions = has_questions
        self.log.append(order.request)
        return self.work_with(self.link, order)

    def answer(self, request: Any) -> Any:
        self.log.append("question")
        return request(self)

    def subscribe(self, topic: Topic, snapshots: Snapshots) -> None:
        self.subscribed[topic] = snapshots

    def stop(self) -> None:
        self.is_stopped = True


def sleep(link: Link) -> None:
    """Instead of beginning."""
    link.send("asleep")  # type: ignore[arg-type]
    time.sleep(3600)


def sleep_deaf(link: Link) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep(link)


def hear(carrier: Carrier, count: int, seconds: float = 50.0) -> list[tuple[int, News]]:
    """The next `count` things that come."""
    deadline, news = time.monotonic() + seconds, []
    while len(news) < count:
        assert time.monotonic() < deadline, f"only {news} has come"
        if carrier.wait(1.0):
            news += carrier.receive()
    return news


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def server() -> psutil.Process:
    """The process from which workers are forked."""
    (found,) = [child for child in psutil.Process().children() if "'swath.collectors'" in " ".join(child.cmdline())]
    return found
