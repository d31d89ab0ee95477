"""The arguments of collectors whose workers are nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from swath.collectors.distributed.inside import Inside
from swath.collectors.kinds import check_kind, check_least, check_one_of
from swath.collectors.multi_config import MultiConfig
from swath.collectors.worker import EngineTask
from swath.runtime.carrier import Task


@dataclass(frozen=True)
class RemoteConfig(MultiConfig):
    """What every collector whose workers are nodes can be given, beside what collectors with workers can.

    Attributes:
        sync: whether a batch has a part of every node, or is the first that any node has ready.
        collector_class: what each node runs: "single" (one engine), or "sync" or "async" processes of its own.
        num_workers_per_collector: how many processes a node has, for "sync" and "async".
        collector_kwargs: more arguments for the collector of a node; a list with one element for each node.
        update_after_each_batch: publish the policy's weights with every batch; the same as `update_at_each_batch`.
        max_weight_update_interval: publish the policy's weights by themselves every so many batches at the latest.
        node_timeout_s: after how many seconds without any sign a node is given up, as is a trainer by its nodes.
    """

    _: KW_ONLY
    sync: bool | None = False
    collector_class: Any = "single"
    num_workers_per_collector: int = 1
    collector_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None
    update_after_each_batch: bool = False
    max_weight_update_interval: int = -1
    node_timeout_s: float = 30.0

    per_worker: ClassVar[tuple[str, ...]] = (*MultiConfig.per_worker, "collector_kwargs")
    foreign: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}
    without_effect: ClassVar[tuple[str, ...]] = ("weight_updater", "weight_sync_schemes", "weight_recv_schemes")

    @property
    def workers_write(self) -> bool:
        """Never: the buffer is the trainer's, which writes what nodes have sent."""
        return self.debug and super().workers_write

    def task_of(self, task: EngineTask) -> Task:
        """What a node is started for."""
        return self.inside(task.index).task(task, self.supervision)

    def inside(self, node: int) -> Inside:
        """What a node runs."""
        options = self.of("collector_kwargs", node) or {}
        return Inside(self.collector_class, self.num_workers_per_collector, options)

    def _check_values(self) -> None:
        super()._check_values()
        check_kind("num_workers_per_collector", self.num_workers_per_collector, "int")
        check_least("num_workers_per_collector", self.num_workers_per_collector, 1)
        if not self.node_timeout_s > 0:
            raise ValueError(f"node_timeout_s must be positive, got {self.node_timeout_s}.")

    def _check_together(self) -> None:
        super()._check_together()
        for node in range(self.workers):
            self.inside(node)
        if self.replay_buffer is not None and not self.extend_buffer:
            raise TypeError("extend_buffer=False writes after every step, but nodes send whole batches.")
        if self.update_after_each_batch and self.max_weight_update_interval > -1:
            raise RuntimeError(
                "update_after_each_batch publishes weights with every batch, so that max_weight_update_interval="
                f"{self.max_weight_update_interval} means nothing: give one of them."
            )

    @property
    def publish_interval(self) -> int | None:
        """After how many batches the policy's weights are published by themselves."""
        if self.update_after_each_batch or self.update_at_each_batch:
            return 1
        return max(1, self.max_weight_update_interval) if self.max_weight_update_interval > -1 else None


LAUNCHERS = ("mp", "submitit", "submitit_delayed", "torchrun")


@dataclass(frozen=True)
class DistributedConfig(RemoteConfig):
    """What `DistributedCollector` can be given, beside what every collector with nodes can.

    Attributes:
        backend: what carries batches and weights: "gloo", "nccl", "mpi" or "ucc".
        launcher: how nodes are started: "mp" (processes of this machine), "submitit" (jobs of Slurm),
            "submitit_delayed" (jobs that `submitit_delayed_launcher` has submitted) or "torchrun" (the other ranks of a
            program that torchrun or mpirun has started: there, the constructor is the node and ends the process). By
            default "submitit" where there is a Slurm, otherwise "mp". Or a function that starts a command on the
            machine of a node: `lambda index, command: subprocess.Popen(["ssh", hosts[index], shlex.join(command)],
            stdin=subprocess.PIPE)`.
        slurm_kwargs: what to ask of Slurm for each node, in submitit's words. What jobs print is kept in its `folder`,
            which all machines must share; by default that is the current one, where nothing is left.
        tcp_port: at which port the trainer waits for its nodes; by default one that is free.
        address: at which address of this machine; by default that of its host name. Nothing listens with "mp".
        update_interval: publish the policy's weights by themselves every so many batches; `DistributedSyncCollector`
            does it with every batch if nothing else is said.
    """

    _: KW_ONLY
    backend: str = "gloo"
    launcher: Literal["mp", "submitit", "submitit_delayed", "torchrun"] | Callable[[int, list[str]], Any] | None = None
    slurm_kwargs: Mapping[str, Any] | None = None
    tcp_port: int | str | None = None
    address: str | None = None
    update_interval: int | None = None

    @property
    def publish_interval(self) -> int | None:
        """After how many batches the policy's weights are published by themselves."""
        return super().publish_interval if self.update_interval is None else self.update_interval

    def _check_values(self) -> None:
        super()._check_values()
        check_least("update_interval", self.update_interval, 1)
        if not callable(self.launcher):
            check_one_of("launcher", self.launcher, LAUNCHERS)

    def _check_together(self) -> None:
        super()._check_together()
        if self.launcher in ("submitit_delayed", "torchrun") and self.on_worker_failure == "restart":
            raise ValueError(
                f"launcher={self.launcher!r} has started all nodes there will be: on_worker_failure='drop' goes on "
                "without one that fails."
            )


@dataclass(frozen=True)
class RPCConfig(DistributedConfig):
    """What `RPCCollector` can be given, beside what `DistributedCollector` can.

    Attributes:
        backend: no effect: batches and weights are carried by RPC itself.
        tensorpipe_options: more arguments for torch's `TensorPipeRpcBackendOptions`. How long a call may take is
            `node_timeout_s`.
        visible_devices: no effect: batches and weights are sent from memory of the CPU.

    Nodes cannot be forks of this process ("fork"), which would have torch's agent without its threads.
    """

    _: KW_ONLY
    tensorpipe_options: dict[str, Any] | None = None
    visible_devices: Any = None

    without_effect: ClassVar[tuple[str, ...]] = (*RemoteConfig.without_effect, "visible_devices")

    def _check_values(self) -> None:
        super()._check_values()
        if self.mp_start_method == "fork":
            raise ValueError(
                "mp_start_method='fork': torch's RPC does not survive a fork of the trainer. Use 'forkserver' or "
                "'spawn'."
            )
