"""Policies and clients for the tests of InferenceServer; also imported by the processes that they start."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from swath.modules import exploration_type

WAIT_S = 30.0


def ask(number: float, *size: int) -> TensorDict:
    """A request that tells its answer: that of `Doubling` is twice the number, in each row."""
    return TensorDict({"question": torch.full((*size, 2), float(number))}, size)


def is_answered(td: TensorDictBase, factor: float = 2.0) -> bool:
    return bool((td["answer"] == factor * td["question"]).all())


class Doubling:
    """A policy that notes how many rows each of its calls had, and can be held up."""

    in_keys = ("question",)
    out_keys = ("answer",)

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.types: list[Any] = []
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.rows.append(len(tensordict))
        self.types.append(exploration_type())
        self.entered.set()
        assert self.open.wait(WAIT_S)
        self.entered.clear()
        if (tensordict["question"] < 0).any():
            raise ZeroDivisionError("a negative question")
        return tensordict.set("answer", 2 * tensordict["question"])

    @contextlib.contextmanager
    def held_up(self, client: Any) -> Iterator[None]:
        """A context in which the server is busy with a request, so that others have to wait; they are served then."""
        self.open.clear()
        first = client.submit(ask(0))
        assert self.entered.wait(WAIT_S)
        try:
            yield
        finally:
            self.open.set()
        first.result(WAIT_S)


class Factor(nn.Module):
    """Multiplies twice by what should be the same number: an answer of two versions would show."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor(factor))
        self.two = nn.Parameter(torch.tensor(factor))

    def forward(self, question: Tensor) -> tuple[Tensor, Tensor]:
        first = question * self.one
        time.sleep(0.001)
        return first, question * self.two


def factor_policy(factor: float = 2.0) -> TensorDictModule:
    return TensorDictModule(Factor(factor), in_keys=["question"], out_keys=["answer", "again"])


def mlp_policy() -> TensorDictModule:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def until(condition: Callable[[], Any], seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.005)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    taken = time.monotonic() - begun
    assert taken < seconds, f"it took {taken:.2f} s instead of at most {seconds} s"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- what other processes do -----------------------------------------------------------------------------------------


def ask_many(client: Any, first: int, count: int, results: Any) -> None:
    """Ask different questions, from two threads; tells how many answers were right."""
    right: list[bool] = []

    def run(start: int) -> None:
        for number in range(start, start + count):
            size = () if number % 3 else (2,)
            right.append(is_answered(client(ask(number, *size), timeout=WAIT_S)))

    threads = [threading.Thread(target=run, args=(first + 10_000 * i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((sum(right), len(right)))


def ask_forever(client: Any, told: Any) -> None:
    """Ask until an error comes, and tell it."""
    try:
        client(ask(1))
        told.put(("pid", os.getpid()))
        while True:
            client(ask(1))
    except Exception as error:
        told.put((type(error).__name__, str(error)))


def ask_and_stop(client: Any, told: Any) -> None:
    """Ask, and be stopped before the answer is taken; go on when continued."""
    client(ask(1))
    future = client.submit(ask(7))
    told.send(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    told.send(is_answered(future.result(WAIT_S)))
