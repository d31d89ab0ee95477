"""Taking the registered gymnasium envs along to another process.

A script that registers an env does so in its own process; a worker that knows only what gymnasium and installed
packages have would not find it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium.envs.registration import EnvSpec


@dataclass(frozen=True)
class Registered:
    """What was registered in the process that made it, on its way to another."""

    packed: tuple[bytes, ...]

    @staticmethod
    def here() -> Registered:
        """All that is registered in this process, by value: entry points may be classes or functions of a script.

        What cannot be pickled stays here. A worker that asks for it hears that there is no such env.
        """
        named = [spec for spec in gym.registry.values() if isinstance(spec.entry_point, str)]
        together = _packed(named)
        if together is not None:
            named = []
        rest = [spec for spec in gym.registry.values() if spec in named or not isinstance(spec.entry_point, str)]
        each = [_packed([spec]) for spec in rest]
        return Registered(tuple(packed for packed in (together, *each) if packed is not None))

    def adopt(self) -> None:
        """Register here what is not, or not in the same way."""
        for packed in self.packed:
            try:
                specs: Iterable[EnvSpec] = pickle.loads(packed)
            except Exception:  # made of a module that is not there; without it the env could not be made either
                continue
            for spec in specs:
                if gym.registry.get(spec.id) != spec:
                    gym.registry[spec.id] = spec


def _packed(specs: list[Any]) -> bytes | None:
    try:
        return bytes(cloudpickle.dumps(specs))
    except Exception:  # whatever its parts may do when they are pickled
        return None
