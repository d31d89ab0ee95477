"""The bare transfer of a batch's bytes from another process, on request, by what also carries swath's batches."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc

from benchmarks.nodes.contestants import NodeRun, start_ray
from benchmarks.nodes.workloads import NodeWorkload

GIVE, RENEW, END = range(3)
_source: list[Tensor] = []


def _renew(size: int) -> None:
    """In the node: write what is sent next, as whoever collects a batch does."""
    if not _source:
        _source.append(torch.zeros(size, dtype=torch.uint8))
    _source[0].add_(1)


def _give() -> Tensor:
    return _source[0]


def _ask(what: int) -> None:
    dist.send(torch.tensor([what], dtype=torch.uint8), 1)


def _join(backend: str, meet: str, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    if backend == "g":
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    else:
        options = rpc.TensorPipeRpcBackendOptions(init_method=meet)
        rpc.init_rpc(str(rank), rank=rank, world_size=2, rpc_backend_options=options)


def _serve(backend: str, meet: str, size: int) -> None:
    """What the other process does."""
    _join(backend, meet, 1)
    if backend == "p":
        rpc.shutdown()  # when the other one does
        return
    asked = torch.zeros(1, dtype=torch.uint8)
    while asked.item() != END:
        dist.recv(asked, 0)
        if asked.item() == RENEW:
            _renew(size)
            dist.send(asked, 0)
        elif asked.item() == GIVE:
            dist.send(_give(), 0)
    dist.destroy_process_group()


class Giver:
    """The same as an actor."""

    def __init__(self, size: int) -> None:
        self._data = np.zeros(size, np.uint8)

    def renew(self) -> None:
        self._data += 1

    def give(self) -> Any:
        return self._data


def _leave(folder: tempfile.TemporaryDirectory[str]) -> None:
    rpc.shutdown()
    folder.cleanup()


def engine(workload: NodeWorkload) -> NodeRun:
    size = workload.megabytes * 2**20
    run = _ray(size) if workload.backend == "y" else _process(workload.backend, size)
    run.sent = lambda: float(size)
    return run


def _ray(size: int) -> NodeRun:
    import ray

    start_ray()
    actor, space = ray.remote(Giver).remote(size), np.zeros(size, np.uint8)
    return NodeRun(
        batch=lambda: np.copyto(space, ray.get(actor.give.remote())),
        prepare=lambda: ray.get(actor.renew.remote()),
        close=ray.shutdown,
    )


def _process(backend: str, size: int) -> NodeRun:
    folder = tempfile.TemporaryDirectory()
    meet = f"file://{folder.name}/meet"
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(backend, meet, size), daemon=True)
    process.start()
    _join(backend, meet, 0)
    if backend == "p":
        call = partial(rpc.rpc_sync, "1")
        return NodeRun(
            batch=partial(call, _give), prepare=partial(call, _renew, (size,)), close=partial(_leave, folder)
        )
    space, done = torch.empty(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)

    def batch() -> None:
        _ask(GIVE)
        dist.recv(space, 1)

    def prepare() -> None:
        _ask(RENEW)
        dist.recv(done, 1)

    def close() -> None:
        _ask(END)
        dist.destroy_process_group()
        process.join(10)
        folder.cleanup()

    return NodeRun(batch=batch, prepare=prepare, close=close)
