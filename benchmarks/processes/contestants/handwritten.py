"""What a careful author writes by hand: the hand-written loop in each process, a pipe each to say go.

Batches lie in shared memory and are not copied on their way; sync ones are overwritten by the next batch. For async, a
worker copies each batch into one of two places and goes on while the trainer has the other. The network's parameters
are shared memory as well, so that new weights need no message.
"""

from __future__ import annotations

from itertools import cycle
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor, nn
from torch import multiprocessing as mp

from benchmarks import pixels
from benchmarks.batch import Batch, Run
from benchmarks.contestants import handwritten
from benchmarks.processes.parts import Collecting
from benchmarks.processes.workloads import ProcessWorkload
from benchmarks.workloads import WORKLOADS

_PLACES = 2


def collect(workload: ProcessWorkload) -> Collecting:
    torch.manual_seed(0)
    net = workload.one.make_net().share_memory()
    workers = [_Worker(workload, net, index) for index in range(workload.workers)]
    loop = _sync(workers) if workload.sync else _async(workers)

    def close() -> None:
        for worker in workers:
            worker.pipe.send(False)
            worker.process.join()

    return Collecting(Run(*loop, net, close), workload.whole, joined=workload.sync)


class _Worker:
    """A process that has begun to collect; it sends its first answer when a batch is there."""

    def __init__(self, workload: ProcessWorkload, net: nn.Module, index: int) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        work = _work_sync if workload.sync else _work_async
        self.process = context.Process(target=work, args=(workload.one.name, net, 100 * index, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        return self.pipe.recv()


def _sync(workers: list[_Worker]) -> tuple[Any, Any]:
    batches: list[Batch] = [worker.receive() for worker in workers]
    frames = sum(batch["reward"].numel() for batch in batches)

    def run() -> int:
        for worker in workers:
            worker.pipe.send(True)
        for worker in workers:
            worker.receive()
        return frames

    def last() -> Batch:
        return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}

    return run, last


def _work_sync(name: str, net: nn.Module, seed: int, pipe: Connection) -> None:
    loop, batch = _loop(name, net, seed, shared=True)
    pipe.send(batch)
    while pipe.recv():
        loop()
        pipe.send(True)


def _async(workers: list[_Worker]) -> tuple[Any, Any]:
    places: dict[Any, list[dict[str, Tensor]]] = {worker.pipe: worker.receive() for worker in workers}
    ready: list[Any] = []
    held: list[tuple[Connection, int]] = []

    def run() -> int:
        if held:  # the trainer is through with it
            held.pop()[0].send(True)
        if not ready:
            ready.extend(wait(list(places)))
        pipe = ready.pop(0)
        held.append((pipe, pipe.recv()))
        return last()["reward"].numel()

    def last() -> Batch:
        pipe, place = held[0]
        return places[pipe][place]

    return run, last


def _work_async(name: str, net: nn.Module, seed: int, pipe: Connection) -> None:
    loop, batch = _loop(name, net, seed, shared=False)
    places = [{key: value.clone().share_memory_() for key, value in batch.items()} for _ in range(_PLACES)]
    pipe.send(places)
    free = _PLACES
    for place in cycle(range(_PLACES)):
        loop()
        while not free:
            if not pipe.recv():
                return
            free += 1
        for key, value in batch.items():
            places[place][key].copy_(value)
        free -= 1
        pipe.send(place)


def _loop(name: str, net: nn.Module, seed: int, shared: bool) -> tuple[Run, Batch]:
    torch.set_num_threads(1)
    pixels.register()
    loop = handwritten.build(WORKLOADS[name], net, seed, shared)
    assert loop.last_batch is not None
    return loop, loop.last_batch()
