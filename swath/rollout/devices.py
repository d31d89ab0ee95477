"""Where things happen: the devices of env, policy and storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Devices:
    """The three devices of a collector; None leaves things where they are."""

    env: torch.device | None = None
    policy: torch.device | None = None
    storing: torch.device | None = None

    @staticmethod
    def resolve(device: Any = None, storing: Any = None, policy: Any = None, env: Any = None) -> Devices:
        """`device` fills in what is not given; data stay where env and policy are, if these are in one place."""
        common = as_device("device", device)
        env_device = as_device("env_device", env) or common
        policy_device = as_device("policy_device", policy) or common
        storing_device = as_device("storing_device", storing) or common
        if storing_device is None and env_device == policy_device:
            storing_device = env_device
        return Devices(env_device, policy_device, storing_device)


def as_device(name: str, given: Any) -> torch.device | None:
    """`given` as a device with an index, or an error that names the argument."""
    if given is None:
        return None
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name}={given!r} is no device: {error}") from None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", 0)
    return torch.device("cpu") if device.type == "cpu" else device  # there is one, whatever its index
