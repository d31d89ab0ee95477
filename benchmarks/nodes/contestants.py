"""Who takes part with nodes. Each is a function that gives a `NodeRun`; `engine` is in a module of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks import policies
from benchmarks.figures import NotAvailableError
from benchmarks.nodes.workloads import STEPS, FrameEnv, NodeWorkload, Still

CONTESTANTS: dict[str, str] = {
    "swath": "swath's DistributedCollector, RPCCollector and RayCollector, nodes on this machine, sync",
    "swath_here": "swath's Collector with the same env in this process: what collecting itself costs",
    "engine": "the bare transfer of as many bytes, just written as a batch's are, on request: send and recv of gloo, "
    "rpc_sync, ray.get and a copy",
    "peer": "TorchRL's DistributedCollector, RPCCollector and RayCollector, nodes on this machine, sync; of what it "
    "sends, the bytes of tensors are counted",
}
NAMES = {"g": "DistributedCollector", "p": "RPCCollector", "y": "RayCollector"}
WIRES = {"g": ("groups", "GroupWire"), "p": ("rpc_wire", "RpcWire"), "y": ("ray_wire", "RayWire")}
ENDLESS = 10**12
"""The peer delivers nothing if it is asked for -1 frames."""


@dataclass
class NodeRun:
    """A collector with its nodes."""

    batch: Callable[[], Any]
    """The next batch; the previous one is let go."""
    close: Callable[[], None]
    prepare: Callable[[], Any] = lambda: None
    """What comes before a batch, and is not measured."""
    update: Callable[[], Any] = lambda: None
    net: nn.Module | None = None
    sent: Callable[[], float] = lambda: 0.0
    """How many bytes a batch takes on the wire; it is collected for that."""
    keeps_order: bool = True
    """Whether the parts of nodes follow each other in the same order in all batches."""


def start_ray() -> None:
    """One machine that says that it has room for all nodes: the same for everybody."""
    connect = import_module("swath.collectors.distributed.ray_collector").connect
    connect({"num_cpus": 8, "object_store_memory": 2**30, "log_to_driver": False, "logging_level": "error"})


def _run(collector: Any, net: nn.Module | None = None) -> NodeRun:
    batches: Iterator[TensorDictBase] = iter(collector)
    last: list[TensorDictBase] = []

    def batch() -> TensorDictBase:
        last.clear()
        last.append(next(batches))
        return last[0]

    return NodeRun(batch, collector.shutdown, update=collector.update_policy_weights_, net=net)


def _still() -> TensorDictModule:
    return TensorDictModule(Still(), in_keys=["observation"], out_keys=["action"])


def _collecting(kind: Any, workload: NodeWorkload, serial: Any, frames: Any, **options: Any) -> NodeRun:
    """A collector with nodes, of either library, with what makes its envs."""
    if workload.backend == "y":
        start_ray()
    else:
        options["launcher"] = "mp"
    if workload.kind == "batches":
        return _run(kind([partial(frames, workload.floats)], _still(), frames_per_batch=STEPS, sync=True, **options))
    torch.manual_seed(0)
    one = workload.one
    net, makers = one.make_net(), [partial(serial, one.env_id, one.num_envs)] * workload.workers
    actor, count = policies.actor(net, None, None), workload.whole.frames_per_batch
    return _run(kind(makers, actor, frames_per_batch=count, sync=True, **options), net)


# -- swath -----------------------------------------------------------------------------------------------------------


def _frames(floats: int) -> Any:
    from swath.envs import GymEnv

    return GymEnv(FrameEnv(floats))


def _counted(backend: str) -> list[int]:
    """The sizes of all parcels and bodies at the trainer's end of wires from now on; not of pulses, which keep time."""
    sizes: list[int] = []
    module, name = WIRES[backend]
    wire = getattr(import_module(f"swath.collectors.distributed.{module}"), name)

    def count(method: str, size: Callable[..., int]) -> None:
        own = getattr(wire, method)

        def counting(self: Any, *args: Any) -> Any:
            given = own(self, *args)
            sizes.append(size(given, *args))
            return given

        setattr(wire, method, counting)

    count("send", lambda _, parcel, body=None, number=0: _size(parcel) + (0 if body is None else body.numel()))
    count("receive", _size)
    count("fetch", lambda _, space, number=0: space.numel())
    return sizes


def _size(parcel: bytes) -> int:
    return 0 if b"Pulse" in parcel else len(parcel)


def swath(workload: NodeWorkload) -> NodeRun:
    from benchmarks.processes.contestants.swath import serial

    kind = getattr(import_module("swath.collectors.distributed"), NAMES[workload.backend], None)
    if kind is None:
        raise NotAvailableError("this version has none")
    sizes = _counted(workload.backend) if workload.kind == "batches" else []
    run = _collecting(kind, workload, serial, _frames, total_frames=-1)

    def sent() -> float:
        sizes.clear()
        run.batch()
        return float(sum(sizes))

    run.sent = sent
    return run


def swath_here(workload: NodeWorkload) -> NodeRun:
    from swath.collectors import Collector

    return _run(Collector(_frames(workload.floats), _still(), frames_per_batch=STEPS, total_frames=-1))


# -- the peer --------------------------------------------------------------------------------------------------------


def _peer_serial(env_id: str, num_envs: int) -> Any:
    from benchmarks.processes.contestants._peer import serial

    torch.set_num_threads(1)  # in the node, which has as many as there are cores otherwise
    return serial(env_id, num_envs)


def _peer_frames(floats: int) -> Any:
    from torchrl.envs import GymWrapper

    torch.set_num_threads(1)
    return GymWrapper(FrameEnv(floats))


def peer(workload: NodeWorkload) -> NodeRun:
    kind, options = getattr(import_module("torchrl.collectors.distributed"), NAMES[workload.backend]), {}
    if workload.backend != "y":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            options = {"tcp_port": unused.getsockname()[1]}
    run = _collecting(kind, workload, _peer_serial, _peer_frames, total_frames=ENDLESS, **options)
    run.sent = lambda: float(run.batch().bytes())
    run.keeps_order = workload.backend != "p"
    return run
