"""Taking the registered gymnasium envs along to another process.

A script that registers an env does so in its own process; a worker that knows only what gymnasium and installed
packages have would not find it.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import dataclass

import cloudpickle
import gymnasium as gym


@dataclass(frozen=True)
class Registered:
    """What was registered in the process that made it, on its way to another."""

    packed: tuple[bytes, ...]

    @staticmethod
    def here() -> Registered:
        """All that is registered in this process, by value: entry points may be classes or functions of a script.

        What cannot be pickled stays here. A worker that asks for it hears that there is no such env.
        """
        packed: list[bytes] = []
        for spec in gym.registry.values():
            with suppress(Exception):  # whatever its parts may do when they are pickled
                packed.append(cloudpickle.dumps(spec))
        return Registered(tuple(packed))

    def adopt(self) -> None:
        """Register here what is not, or not in the same way."""
        for packed in self.packed:
            with suppress(Exception):  # made of a module that is not there; without it the env could not be made either
                spec = pickle.loads(packed)
                if gym.registry.get(spec.id) != spec:
                    gym.registry[spec.id] = spec
