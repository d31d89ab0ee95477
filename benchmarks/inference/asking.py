"""Clients that ask, and check what they are answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from benchmarks import policies
from benchmarks.inference.workloads import INPUTS, OUTPUTS

WARM_UP = 20


@dataclass
class Serving:
    """A server that serves."""

    clients: list[Any]
    """As many as the workload says; each is called with a TensorDict and returns one."""
    close: Callable[[], Any]


def make_policy() -> TensorDictModule:
    """The same network for everybody, without random numbers: threads that make it disturb each other's."""
    net = policies.mlp(INPUTS, OUTPUTS)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.arange(weight.numel()).sin().view_as(weight) / 4)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def ask(client: Any, number: int, seconds: float, gate: Any) -> list[float]:
    """Ask without pause; the seconds that each answer took, of those that came in time.

    All clients pass the `gate` together when each has been answered rightly.
    """
    request = TensorDict({"observation": torch.linspace(-1.0, 1.0, INPUTS) * (number + 1) / 64}, [])
    wanted = make_policy()(request.clone())["action"].detach()
    for _ in range(WARM_UP):
        answer = client(request)
    if not torch.allclose(answer["action"], wanted, atol=1e-5):
        raise ValueError(f"client {number} was answered {answer['action']} instead of {wanted}")
    gate.wait(120)
    taken: list[float] = []
    begun = now = time.perf_counter()
    while now - begun < seconds:
        client(request)
        before, now = now, time.perf_counter()
        taken.append(now - before)
    return taken


def ask_and_tell(client: Any, number: int, seconds: float, gate: Any, results: Any) -> None:
    """The same in a process of its own."""
    torch.set_num_threads(1)
    try:
        results.put(ask(client, number, seconds, gate))
    except BaseException as error:
        gate.abort()
        results.put(repr(error))
