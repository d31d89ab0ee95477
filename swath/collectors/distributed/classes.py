"""Collectors whose workers are nodes: each is a delivery of `collectors.multi` over another carrier."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, TypeVar

from torch import nn

from swath.collectors.arguments import fixed, takes
from swath.collectors.distributed.groups import GroupWire, check_backend
from swath.collectors.distributed.launchers import launcher
from swath.collectors.distributed.remote import RemoteCarrier
from swath.collectors.distributed.remote_config import DistributedConfig, RemoteConfig, RPCConfig
from swath.collectors.distributed.rpc_wire import RpcWire, check_rpc
from swath.collectors.distributed.wire import Launch
from swath.collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.collectors.worker import FIELDS
from swath.runtime.carrier import Carrier

Kind = TypeVar("Kind", bound="RemoteCollector")


@functools.cache
def _delivering(kind: type[MultiCollector], delivery: type[MultiCollector]) -> type[MultiCollector]:
    """`kind` with that delivery."""
    return type(kind.__name__, (kind, delivery), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class RemoteCollector(MultiCollector):
    """What collectors have in common whose workers are nodes: `sync` chooses how batches are delivered."""

    config: RemoteConfig
    room: ClassVar[int] = 0
    """How many nodes may join later."""

    def __new__(cls: type[Kind], *args: Any, sync: bool | None = None, **options: Any) -> Kind:
        """The delivery that `sync` asks for."""
        if issubclass(cls, MultiSyncCollector | MultiAsyncCollector):
            return object.__new__(cls)
        is_sync = cls.adapt_arguments({"sync": sync})["sync"]
        delivering: Any = _delivering(cls, MultiSyncCollector if is_sync else MultiAsyncCollector)
        made: Kind = object.__new__(delivering)
        return made

    @classmethod
    def adapt_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """By default the first batch that is ready is delivered."""
        return super().adapt_arguments({**arguments, "sync": bool(arguments.get("sync"))})

    def make_carrier(self, config: RemoteConfig) -> Carrier:  # type: ignore[override]
        """Nodes, or with `debug=True` workers in this process."""
        if config.debug:
            return super().make_carrier(config)
        return RemoteCarrier(config.workers + self.room, FIELDS, self.make_launch(config), config.node_timeout_s)

    def make_launch(self, config: Any) -> Launch:
        """How nodes are started."""
        raise NotImplementedError


class DistributedCollector(RemoteCollector):
    """Nodes that send their batches through process groups of torch (gloo, nccl, mpi, ucc).

    See `DistributedConfig` for the arguments.
    """

    config_class = DistributedConfig
    config: DistributedConfig

    @takes(DistributedConfig)
    def __init__(self, config: DistributedConfig) -> None:
        """Start the nodes, and wait until each has made its env and policy."""
        check_backend(config.backend)
        self._set_up(config)

    def make_launch(self, config: DistributedConfig) -> Launch:
        """By the launcher that was asked for."""
        return launcher(config, functools.partial(GroupWire, backend=config.backend, timeout_s=config.node_timeout_s))


class DistributedSyncCollector(DistributedCollector):
    """A `DistributedCollector` of which every batch has a part of every node.

    The weights of a policy that is given as a module are published with every batch, or as `update_interval` says.
    """

    @classmethod
    def adapt_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """It is sync."""
        if isinstance(arguments.get("policy"), nn.Module):
            arguments = {"update_interval": 1, **arguments}
        return super().adapt_arguments(fixed(cls.__name__, "sync", True, arguments))


class RPCCollector(RemoteCollector):
    """Nodes that are called, and call, through torch's RPC (TensorPipe).

    torch has one RPC agent per process, which all RPCCollectors of a process share: those that are open at the same
    time must have the same `tensorpipe_options` and address, and `rpc.init_rpc` cannot be used beside them. A call is
    unpickled before anybody can check it: whoever can connect to the agent's port can run code as its user. With
    launcher "mp" it listens at 127.0.0.1, otherwise at `address` alone, which a firewall must close to all but the
    nodes.

    See `RPCConfig` for the arguments.
    """

    config_class = RPCConfig
    config: RPCConfig

    @takes(RPCConfig)
    def __init__(self, config: RPCConfig) -> None:
        """Start the nodes, and wait until each has made its env and policy."""
        self._set_up(config)

    def make_launch(self, config: RPCConfig) -> Launch:
        """By the launcher that was asked for."""
        options = config.tensorpipe_options or {}
        check_rpc(options)
        return launcher(config, functools.partial(RpcWire, options=options, timeout_s=config.node_timeout_s))
