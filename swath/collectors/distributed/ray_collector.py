"""RayCollector: nodes are actors of a Ray cluster."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

from swath.collectors.arguments import takes
from swath.collectors.distributed.classes import RemoteCollector
from swath.collectors.distributed.remote_config import RemoteConfig
from swath.collectors.distributed.wire import Launch
from swath.collectors.kinds import check_kind, check_least
from swath.runtime.ray_joining import connect, imported_ray

MOST_JOINING = 1000
"""So many nodes may be added to a collector."""
EXIT_S = 2.0
"""How long actors may take to close their envs when the interpreter exits."""
OWN_OPTIONS = {
    "lifetime": "an actor ends with its trainer",
    "max_restarts": "the collector replaces actors itself: see on_worker_failure= and max_restarts=",
    "max_task_retries": "the collector gives out work again itself",
    "max_concurrency": "an actor has the threads that it needs",
    "concurrency_groups": "an actor has the threads that it needs",
}
"""Options of actors that users cannot choose, and why."""


@dataclass(frozen=True)
class RayConfig(RemoteConfig):
    """What `RayCollector` can be given, beside what every collector with nodes can.

    `num_collectors` (or `num_workers`) says how many nodes there are where `create_env_fn` is one factory; 1 otherwise.

    Attributes:
        remote_configs: options of the nodes' actors, which say what Ray must have for each (`num_cpus`, `num_gpus`,
            `memory`, `resources`), where it is placed (`scheduling_strategy`) and in which `runtime_env`; a list with
            one element for each node. By default a node takes a CPU, or one for each of its processes, and a fifth of
            a GPU if it is given a CUDA device.
        ray_init_config: arguments for `ray.init`, which is called if Ray is not initialized already. Without an
            `address`, here or in `RAY_ADDRESS`, a new cluster is started: it has no dashboard, and can be reached from
            this machine alone.
    """

    _: KW_ONLY
    remote_configs: dict[str, Any] | Sequence[dict[str, Any]] | None = None
    ray_init_config: dict[str, Any] | None = None

    per_worker: ClassVar[tuple[str, ...]] = (*RemoteConfig.per_worker, "remote_configs")
    foreign: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "use_env_creator": ((None, False, True), "Envs are made where they run, by what create_env_fn holds.")
    }

    def _check_values(self) -> None:
        super()._check_values()
        for worker in range(self.workers):
            for name in self.of("remote_configs", worker) or {}:
                if name in OWN_OPTIONS:
                    raise ValueError(f"remote_configs cannot have {name!r}: {OWN_OPTIONS[name]}.")

    def wants(self, worker: int) -> dict[str, Any]:
        """The options of a node's actor."""
        devices = self.devices_of(worker)
        has_gpu = any(device is not None and device.type == "cuda" for device in (devices.policy, devices.env))
        own = {"num_cpus": self.num_workers_per_collector, **({"num_gpus": 0.2} if has_gpu else {})}
        return {**own, **(self.of("remote_configs", worker) or {})}

    def with_more(self, makers: Sequence[Callable[[], Any]], **given: Any) -> RayConfig:
        """The same with further nodes, which are given what the first one is, and what is `given` for them."""
        lists: dict[str, Any] = {}
        for name in self.per_worker:
            value, new = getattr(self, name), given.get(name)
            if isinstance(value, list | tuple) or new is not None:
                old = list(value) if isinstance(value, list | tuple) else [value] * self.workers
                new = list(new) if isinstance(new, list | tuple) else [old[0] if new is None else new] * len(makers)
                if len(new) != len(makers):
                    raise ValueError(f"{name} has {len(new)} elements for {len(makers)} further nodes.")
                lists[name] = [*old, *new]
        all_makers = [*self.create_env_fn, *makers]
        return replace(self, create_env_fn=all_makers, num_workers=None, num_collectors=None, **lists)


class RayCollector(RemoteCollector):
    """Nodes that are actors of a Ray cluster: batches and weights go through Ray's object store.

    See `RayConfig` for the arguments.
    """

    config_class = RayConfig
    config: RayConfig
    room = MOST_JOINING

    @classmethod
    def adapt_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """One factory is for as many nodes as there are said to be."""
        arguments = super().adapt_arguments(arguments)
        if not isinstance(arguments.get("create_env_fn"), list | tuple) and arguments.get("num_workers") is None:
            lists = [value for name in RayConfig.per_worker if isinstance(value := arguments.get(name), list | tuple)]
            count = arguments.get("num_collectors")
            arguments["num_workers"] = count if count is not None else len(lists[0]) if lists else 1
        return arguments

    @takes(RayConfig)
    def __init__(self, config: RayConfig) -> None:
        """Start the actors, and wait until each has made its env and policy."""
        if not config.debug:
            connect(config.ray_init_config or {})
            atexit.register(_shut_down, weakref.ref(self))  # before Ray, which was imported before, shuts itself down
        self._most = config.workers + self.room
        self._set_up(config)

    def make_launch(self, config: RayConfig) -> Launch:
        """As actors."""
        import swath
        from swath.collectors.distributed.ray_wire import RayLaunch

        warns = not swath.filter_warnings_subprocess
        self._launch = RayLaunch(config.start_timeout_s, config.num_sub_threads, warns)
        self._launch.wants = [config.wants(index) for index in range(config.workers)]
        return Launch(self._launch, imported_ray().util.get_node_ip_address())

    # -- nodes -------------------------------------------------------------------------------------------------

    @property
    def remote_collectors(self) -> list[Any]:
        """Handles of the actors that there are."""
        return [] if self.config.debug else [self._launch.nodes[index].actor for index in self._pool.indices]

    def add_collectors(
        self,
        create_env_fn: int | Callable[[], Any] | Sequence[Callable[[], Any]] = 1,
        *,
        remote_configs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        collector_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Let nodes join, and wait until they are ready; their indices.

        Each contributes to batches as the first node does: sync batches have so many rows more. If one cannot be
        started, the error is raised, and collection can go on without them.

        Args:
            create_env_fn: an env factory, or one for each of them, or how many they are: then with the first node's.
            remote_configs: options of their actors; by default the first node's.
            collector_kwargs: more arguments for their collectors; likewise.
        """
        self._must_be_open()
        if self.config.debug:
            raise RuntimeError("With debug=True there are no nodes, so that none can join.")
        if isinstance(create_env_fn, int):
            check_kind("create_env_fn", create_env_fn, "int")
            check_least("create_env_fn", create_env_fn, 1)
            makers = [self.config.create_env_fn[0]] * create_env_fn
        else:
            makers = list(create_env_fn) if isinstance(create_env_fn, Sequence) else [create_env_fn]
        before, terms = self.config, self._delivery.terms
        config = before.with_more(makers, remote_configs=remote_configs, collector_kwargs=collector_kwargs)
        if config.workers > self._most:
            raise ValueError(f"A collector can have {self._most} nodes, counting those that have left.")
        new = range(before.workers, config.workers)
        terms.steps.update(dict.fromkeys(new, terms.steps[0]))
        self._use(config)
        try:
            return self._pool.add(len(new), lambda index: self._check_layout(index, terms.layout))
        except BaseException:
            self._use(before)
            raise

    def _use(self, config: RayConfig) -> None:
        self.config = self._roster.config = config
        self._weights.workers = config.workers
        self._launch.wants = [config.wants(index) for index in range(config.workers)]

    def stop_remote_collectors(self) -> None:
        """Stop all nodes, and shut down."""
        self.shutdown(raise_on_error=False)

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
        *,
        shutdown_ray: bool = False,
    ) -> None:
        """Stop all nodes, within `timeout` seconds whatever they do; `shutdown_ray` also leaves the cluster.

        A cluster that was started for the collector ends with this process, or when it is left.
        """
        try:
            super().shutdown(timeout, close_env, raise_on_error)
        finally:
            if shutdown_ray and not self.config.debug:
                imported_ray().shutdown()

    def async_shutdown(
        self, timeout: float | None = None, close_env: bool = True, *, shutdown_ray: bool = False
    ) -> None:
        """Shut down a collector that was started in the background; raises what went wrong there."""
        try:
            super().async_shutdown(timeout, close_env)
        finally:
            if shutdown_ray:
                self.shutdown(raise_on_error=False, shutdown_ray=True)


def _shut_down(collector: weakref.ref[RayCollector]) -> None:
    if (own := collector()) is not None:
        own.shutdown(timeout=EXIT_S, raise_on_error=False)
