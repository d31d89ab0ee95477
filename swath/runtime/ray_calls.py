"""How actors of Ray are waited for, and what is said of those that end. Imported where Ray is used."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray

from swath.errors import ChannelClosedError, StallWarning

# Without what starts Ray where it is not initialized: once it was shut down, that is an error.
get, kill, put, wait = map(inspect.unwrap, (ray.get, ray.kill, ray.put, ray.wait))
FAILURES = (Exception, SystemExit)
"""What calls of Ray raise: in a thread that waits, SystemExit when Ray is shut down."""
LOOK_S = 1.0
"""How often one who waits looks whether Ray was shut down: a wait that has begun does not end by it."""
ROOM_S = 10.0
"""After how many seconds users are told what an actor waits for."""


class Spot(NamedTuple):
    """Where an actor runs."""

    address: str
    node: str
    actor: str
    pid: int

    @staticmethod
    def here() -> Spot:
        """That of the actor that calls this."""
        context = ray.get_runtime_context()
        return Spot(ray.util.get_node_ip_address(), context.get_node_id(), context.get_actor_id(), os.getpid())


def check_ray() -> None:
    """Raise if Ray was shut down: otherwise a call would start another one."""
    if not ray.is_initialized():
        raise ChannelClosedError("Ray was shut down.")


def first_answer(answer: Any, wants: Mapping[str, Any], limit_s: float, what: str, options: str) -> Any:
    """The first answer of an actor, for which Ray must find a machine within `limit_s`, with all that it `wants`.

    It is `what` it is called in messages, and users can say what it wants by `options`.
    """
    first_s = min(ROOM_S, limit_s / 2)
    if not wait([answer], timeout=first_s)[0]:
        if missing := missing_room(wants):
            warnings.warn(f"A {what} waits until Ray has room for it: {missing}.", StallWarning, stacklevel=3)
        if not wait([answer], timeout=limit_s - first_s)[0]:
            missing = missing_room(wants) or "no machine that has room, or its process takes long"
            raise TimeoutError(
                f"Ray has not started an actor within {limit_s:.0f} s: {missing}. Add machines to the cluster, ask for "
                f"less by {options}=, or wait longer by start_timeout_s=."
            )
    return get(answer)


def missing_room(wants: Mapping[str, Any]) -> str:
    """What of `wants` the cluster has not at the moment, in words."""
    asked = {"CPU": wants.get("num_cpus"), "GPU": wants.get("num_gpus"), "memory": wants.get("memory")}
    asked.update(wants.get("resources") or {})
    free, machines = ray.available_resources(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
    missing = []
    for name, amount in asked.items():
        most = max((machine.get(name, 0.0) for machine in machines), default=0.0)
        if amount and amount > most:
            missing.append(f"it asks for {amount:g} {name}, but no machine has more than {most:g}")
        elif amount and amount > free.get(name, 0.0):
            missing.append(f"it asks for {amount:g} {name}, but only {free.get(name, 0.0):g} are free")
    return " and ".join(missing)


def said_of(error: BaseException) -> str:
    """What Ray says of an actor's end, without what is known anyway."""
    text = str(error).strip()
    _, is_known, reason = text.partition("The actor is dead because ")
    text = reason if is_known else text.rpartition("\n")[2]
    return " ".join(text.partition("Some common causes")[0].split()).rstrip(".")
