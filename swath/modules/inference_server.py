"""InferenceServer: one policy for many clients, which it answers in batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from swath.errors import ClosedError, check_foreign_arguments
from swath.keys import POLICY_VERSION, as_key
from swath.modules.inference_client import InferenceClient
from swath.modules.inference_far import Reach
from swath.modules.inference_hosts import Change, Host, ProcessHost, ThreadHost
from swath.modules.inference_settings import InferenceSettings
from swath.runtime.columns import Columns, Leaf
from swath.weights import flat_weights, load_weights

BACKENDS = ("thread", "process")
ALIASES = {
    "model": "policy",
    "service_backend": "backend",
    "policy_device": "device",
    "stats_window_size": "stats_window",
}
"""TorchRL's names of our arguments."""
TUNING = ("transport", "transport_options", "request_spec", "response_spec", "num_clients", "collect_stats")
"""Arguments of TorchRL that tune its implementation, and mean nothing here."""
REFUSED = {
    "server_config": "Give its fields as arguments.",
    "device_config": "Give its fields as arguments.",
    "storing_device": "Answers lie on the CPU, or on output_device.",
    "collate_fn": "Requests are put together row by row.",
    "static_batch_size": "A forward has as many rows as its requests.",
    "weight_sync": "Call update_policy_weights_.",
    "weight_sync_model_id": "Call update_policy_weights_.",
    "service_backend_options": "Give startup_timeout and mp_start_method as arguments.",
    "mp_context": "Give mp_start_method.",
}
HARMLESS = {name: (None,) for name in REFUSED} | {"weight_sync_model_id": (None, "policy")}


class InferenceServer:
    """Serves a policy to many clients: their requests are put together, and one forward answers them all.

    Clients are got from `client()`. They work in all threads of this process and, pickled, in others. As a collector's
    policy, a client lets all workers share one model, which lives in one place and is updated in one place.

    Args:
        policy: what acts: a module or a function that takes a TensorDict. The server works with a copy of a module, so
            that the one that was given can be trained; `update_policy_weights_()` brings its weights over.
        policy_factory: makes the policy, instead of `policy`; in the server's process, if it has one.
        max_batch_size: the most requests in a forward.
        min_batch_size: how many requests to wait for before a forward; fewer once `timeout` has passed.
        timeout: the most seconds that a request waits for others.
        device: where the policy computes.
        output_device: where clients in the server's process get their answers; by default on the CPU, or where their
            TensorDict lies.
        backend: "thread" serves in a thread of this process, "process" in a process of its own.
        policy_version: the version to begin with; each update of the weights adds one.
        policy_version_key: under which each answer says the version; None leaves it out.
        stats_window: of how many batches and requests `stats()` tells latencies.
        startup_timeout: how many seconds a process may take to make the policy.
        mp_start_method: how the process is started: "forkserver", "spawn" or "fork".
        num_threads: for torch in the server's process.
        foreign: arguments of TorchRL's server: those with another name here, and those that have no effect.
    """

    def __init__(
        self,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        max_batch_size: int = 64,
        min_batch_size: int = 1,
        timeout: float = 0.01,
        device: torch.device | str | int | None = None,
        output_device: torch.device | str | int | None = None,
        backend: str = "thread",
        policy_version: int = 0,
        policy_version_key: Any = POLICY_VERSION,
        stats_window: int = 1024,
        startup_timeout: float = 300.0,
        mp_start_method: str = "forkserver",
        num_threads: int = 1,
        **foreign: Any,
    ) -> None:
        """Check the arguments; `start` starts it."""
        own = {"policy": policy, "backend": backend, "device": device, "stats_window": stats_window}
        defaults = {"policy": None, "backend": "thread", "device": None, "stats_window": 1024}
        for alias, name in ALIASES.items():
            if alias in foreign:
                if own[name] is not defaults[name]:
                    raise TypeError(f"InferenceServer got both {name} and {alias}, which mean the same.")
                own[name] = foreign.pop(alias)
        check_foreign_arguments(
            "InferenceServer", foreign, ignored=TUNING, refused=REFUSED, harmless=HARMLESS, known=[*own, *ALIASES]
        )
        policy, backend = own["policy"], own["backend"]
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}.")
        if (policy is None) == (policy_factory is None):
            which = "neither" if policy is None else "both"
            raise ValueError(f"InferenceServer takes either policy or policy_factory, got {which}.")
        self._settings = InferenceSettings(
            max_batch_size=max_batch_size,
            min_batch_size=min_batch_size,
            timeout=timeout,
            device=_device(own["device"]),
            output_device=_device(output_device),
            version_key=None if policy_version_key is None else as_key(policy_version_key),
            stats_window=own["stats_window"],
        )
        self._given = policy
        self._state = "new"
        self._reach: Reach | None = None
        self._host: Host
        if backend == "thread":
            made = policy_factory() if policy_factory is not None else policy
            made = copy.deepcopy(made) if isinstance(policy, nn.Module) else made
            self._host = ThreadHost(made, self._settings, policy_version)
        else:
            self._host = ProcessHost(
                policy, policy_factory, self._settings, policy_version, startup_timeout, mp_start_method, num_threads
            )

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> InferenceServer:
        """Begin to serve; returns itself."""
        if self._state != "new":
            raise RuntimeError(f"This InferenceServer is {self._state} already; make a new one.")
        self._state = "started"
        try:
            self._host.start()
        except BaseException:
            self._state = "shut down"
            raise
        return self

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop, within `timeout` seconds. Whoever waits for an answer gets a ClosedError. May be called again."""
        if self._state == "started":
            self._host.stop(timeout)
        if self._reach is not None:
            self._reach.close()
        self._state = "shut down"

    def __enter__(self) -> InferenceServer:
        """Start, unless it is started."""
        return self if self._state == "started" else self.start()

    def __exit__(self, *exc: object) -> None:
        """Shut down."""
        self.shutdown()

    @property
    def is_alive(self) -> bool:
        """Whether it serves."""
        return self._state == "started" and self._host.is_alive

    # -- clients -----------------------------------------------------------------------------------------------

    def client(self, address: str | None = None) -> InferenceClient:
        """A client, for any thread and, pickled, for any process.

        Collectors send it to other machines by themselves. To pickle it for another machine yourself, give an `address`
        at which this one is reached from there: its copies connect to that, where this process listens then.
        """
        self._reach = self._reach or Reach(self._host.door())
        return InferenceClient(self._host.door(), self._host.signature, self._reach, address)

    def clients(self, n: int) -> list[InferenceClient]:
        """So many clients."""
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"The number of clients must be a whole number, got {n!r}.")
        if n < 1:
            raise ValueError(f"The number of clients must be 1 or more, got {n}.")
        return [self.client() for _ in range(n)]

    # -- the policy --------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The version of the weights that answers are made with."""
        return self._host.version

    def update_model(self, fn: Callable[[Any], Any], *, mark_weight_update: bool = True) -> Any:
        """Call `fn` with the server's policy, between two batches, and return what it returns.

        `fn` is sent by value to a server in another process, and what it returns comes back. With
        `mark_weight_update`, answers have the next version from then on.
        """
        self._must_serve()
        return self._host.change(Change(fn, mark_weight_update))

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, weights: Any = None, mark_weight_update: bool = True
    ) -> None:
        """Give the policy other weights, between two batches: of a module, a TensorDict or a state dict.

        Without any, they are those of the policy that was given to the server, as they are now.
        """
        self._must_serve()
        if policy_or_weights is not None and weights is not None:
            raise ValueError("update_policy_weights_ takes one source of weights, got two.")
        source = policy_or_weights if policy_or_weights is not None else weights
        source = self._given if source is None else source
        layout = self._host.layout
        if layout is None:
            raise RuntimeError("The server's policy is no module: it has no weights to update.")
        if source is None:
            raise ValueError("The server's policy was made by a factory: say which weights it shall have.")
        named = layout.named(flat_weights(source))
        self._host.change(Change(NewWeights(named, share=isinstance(self._host, ProcessHost)), mark_weight_update))

    update_model_weights = update_policy_weights_

    def stats(self, reset: bool = False) -> dict[str, float]:
        """Requests, batches, rates and latencies, since the start or the last `reset`."""
        return self._host.stats(reset)

    def health(self) -> dict[str, Any]:
        """Whether it serves, and the process that it does so in; never raises."""
        return {"process_alive": self.is_alive, "pid": self._host.pid, "policy_version": self.policy_version}

    def _must_serve(self) -> None:
        if self._state != "started":
            raise ClosedError(f"This InferenceServer is {'not started' if self._state == 'new' else self._state}.")

    def __repr__(self) -> str:
        """Backend and state."""
        return f"InferenceServer({type(self._host).__name__}, {self._state})"


class NewWeights:
    """Weights on their way: called with the policy, loads them. To another process they go as shared memory."""

    def __init__(self, named: Mapping[str, Any], *, share: bool) -> None:
        """Take the weights by the policy's own names."""
        tensors = {name: weight for name, weight in named.items() if isinstance(weight, torch.Tensor)}
        self._extras = {name: value for name, value in named.items() if name not in tensors}
        self._tensors: Mapping[str, Any] = tensors
        self._columns: Columns | None = None
        if share:
            self._columns = Columns.shared({name: Leaf.of(weight, 0) for name, weight in tensors.items()}, ())
            with torch.no_grad():
                for name, weight in tensors.items():
                    self._columns.tensors[name].copy_(weight)
            self._tensors = {}

    def __call__(self, policy: nn.Module) -> None:
        """Load them."""
        tensors = self._tensors if self._columns is None else self._columns.tensors
        load_weights(policy, {**tensors, **self._extras})  # type: ignore[dict-item]


def _device(device: Any) -> torch.device | None:
    return None if device is None else torch.device(device)
