"""Whose random numbers a rollout uses.

Without a seed, torch's default generator decides, and with it `torch.manual_seed`. Once seeded, a loop has a stream of
its own: what the trainer draws between two batches does not change them, nor the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from swath.seeding import policy_seed


class Randomness:
    """The random numbers of one loop."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Begin with torch's default generator. `device` is where the policy computes."""
        self.generator: torch.Generator | None = None
        """For noise drawn ahead; None is torch's own."""
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._states: tuple[Tensor, Tensor | None] | None = None

    def seed(self, seed: int, worker: int = 0) -> None:
        """Begin a stream of our own."""
        own = policy_seed(seed, worker)
        self.generator = torch.Generator().manual_seed(own)
        cpu = torch.Generator().manual_seed(own + 1).get_state()
        cuda = None if self._cuda is None else torch.Generator(self._cuda).manual_seed(own + 1).get_state()
        self._states = (cpu, cuda)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let policies that draw from torch's default generator draw from our stream."""
        if self._states is None:
            yield
            return
        saved = self._swap(self._states)
        try:
            yield
        finally:
            self._states = self._swap(saved)

    def _swap(self, states: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        cpu, cuda = states
        before = (
            torch.get_rng_state(),
            None if self._cuda is None else torch.cuda.get_rng_state(self._cuda),
        )
        torch.set_rng_state(cpu)
        if self._cuda is not None and cuda is not None:
            torch.cuda.set_rng_state(cuda, self._cuda)
        return before

    def state_dict(self) -> dict[str, Tensor | None] | None:
        """Where the stream is, or None without a seed."""
        if self.generator is None or self._states is None:
            return None
        return {
            "noise": self.generator.get_state(),
            "cpu": self._states[0],
            "cuda": self._states[1],
        }

    def load_state_dict(self, state: dict[str, Tensor] | None) -> None:
        """Go on from where the stream was."""
        if state is not None:
            self.generator = torch.Generator()
            self.generator.set_state(state["noise"])
            self._states = (state["cpu"], state["cuda"])
