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

_source: list[Tensor] = []


def _give(size: int) -> Tensor:
    """In the node: what it sends lies there already."""
    if not _source:
        _source.append(torch.zeros(size, dtype=torch.uint8))
    return _source[0]


def _byte(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.uint8)


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
    wanted = _byte(1)
    while True:
        dist.recv(wanted, 0)
        if not wanted.item():
            break
        dist.send(_give(size), 0)
    dist.destroy_process_group()


class Giver:
    """The same as an actor."""

    def __init__(self, size: int) -> None:
        self._data = np.zeros(size, np.uint8)

    def give(self) -> Any:
        return self._data


def engine(workload: NodeWorkload) -> NodeRun:
    backend, size = workload.backend, workload.megabytes * 2**20
    run = _ray(size) if backend == "y" else _process(backend, size)
    run.sent = lambda: float(size)
    return run


def _ray(size: int) -> NodeRun:
    import ray

    start_ray()
    actor, space = ray.remote(Giver).remote(size), np.zeros(size, np.uint8)
    return NodeRun(lambda: np.copyto(space, ray.get(actor.give.remote())), ray.shutdown)


def _process(backend: str, size: int) -> NodeRun:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (backend, f"file://{folder}/meet", size)
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
        process.start()
        _join(*arguments[:2], 0)
    if backend == "p":
        return NodeRun(partial(rpc.rpc_sync, "1", _give, (size,)), rpc.shutdown)
    space = torch.empty(size, dtype=torch.uint8)

    def batch() -> None:
        dist.send(_byte(1), 1)
        dist.recv(space, 1)

    def close() -> None:
        dist.send(_byte(0), 1)
        dist.destroy_process_group()
        process.join(10)

    return NodeRun(batch, close)
