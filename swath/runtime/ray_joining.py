"""How a program comes to a Ray cluster. Ray itself is imported when it is needed: it is an extra."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any


def imported_ray() -> Any:
    """Ray; an error that says how to get it, if it is not there."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError('This needs Ray: pip install "swath[ray]".') from error


def connect(options: Mapping[str, Any]) -> None:
    """Be connected to the cluster that is asked for, or to a new one on this machine."""
    ray = imported_ray()
    if not ray.is_initialized():
        _init(ray, options)
    if ray.util.client.ray.is_connected():
        raise ValueError(
            "swath cannot work through a Ray client (ray://...): run the program on a machine of the cluster, "
            "as `ray job submit` does."
        )


def _init(ray: Any, options: Mapping[str, Any]) -> Any:
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("address", os.environ.get("RAY_ADDRESS", "local")) != "local":
        return ray.init(**given)
    # Ray would listen on all devices of this machine, if it did not hold that it is none for clusters, as a Mac.
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        return ray.init(**{"include_dashboard": False, **given, "address": "local"})
    finally:
        constants.ENABLE_RAY_CLUSTER = before
