"""Stepping envs without a policy: the actions, and the check that envs were stepped and reset.

Actions are drawn and brought into each contestant's form before the clock starts. Uniform ones end a CartPole episode
after some twenty steps, so that resets are a part of what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np

from benchmarks.processes.parts import Stepper

_PREPARED = 512
_CALLS_PER_RUN = 64
_CHECKED = 100
_START = 0.05 + 1e-6
"""CartPole begins an episode with numbers no larger than this."""


def endless(made: Stepper, envs: int) -> Callable[[], int]:
    """What makes some steps and returns how many frames they were."""
    prepared = cycle([made.prepare(actions) for actions in _draw(_PREPARED, envs)])
    step = made.step

    def run() -> int:
        return sum(step(next(prepared)) for _ in range(_CALLS_PER_RUN))

    return run if made.steps == 1 else lambda: step(None)


def check(made: Stepper, envs: int) -> None:
    """Raise ValueError unless each env moves as CartPole does or has just been reset, now and then."""
    if made.steps > 1:
        return  # it delivers whole batches, which are checked elsewhere
    seen, resets = made.observation().copy(), 0
    for actions in _draw(_CHECKED, envs):
        made.step(made.prepare(actions))
        coming = made.observation().copy()
        if coming.shape != (envs, 4):
            raise ValueError(f"observations are {coming.shape}, expected {(envs, 4)}")
        moved = np.isclose(coming[:, 0], seen[:, 0] + 0.02 * seen[:, 1], atol=1e-5)
        begun = (np.abs(coming) <= _START).all(-1)
        if not (moved | begun).all():
            raise ValueError("an observation follows neither from the last one nor from a reset")
        resets += int((begun & ~moved).sum())
        seen = coming
    if not resets:
        raise ValueError(f"no env was reset in {_CHECKED} steps")


def _draw(steps: int, envs: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(2, size=(steps, envs)))
