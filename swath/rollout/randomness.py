"""Whose random numbers a rollout uses.

Without a seed, torch's default generator decides, and with it `torch.manual_seed`. Once seeded, a loop has a stream of
its own: what the trainer draws between two batches does not change them, nor the other way round.

In a thread beside the trainer, torch's default generator cannot be borrowed for a while: the trainer may draw at any
moment. There a loop has a generator of its own in any case, and only modules that we do not know draw from the default
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

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
        self._lends = True

    def stand_alone(self) -> None:
        """From now on leave torch's default generator alone; see above."""
        self._lends = False
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), device="cpu")))

    def seed(self, seed: int, worker: int = 0) -> None:
        """Begin a stream of our own."""
        own = policy_seed(seed, worker)
        self.generator = torch.Generator().manual_seed(own)
        cpu = torch.Generator().manual_seed(own + 1).get_state()
        cuda = None if self._cuda is None else torch.Generator(self._cuda).manual_seed(own + 1).get_state()
        self._states = (cpu, cuda)

    def applied(self) -> AbstractContextManager[None]:
        """Let policies that draw from torch's default generator draw from our stream."""
        return self._lent(self._states) if self._states is not None and self._lends else nullcontext()

    @contextmanager
    def _lent(self, states: tuple[Tensor, Tensor | None]) -> Iterator[None]:
        saved = self._swap(states)
        try:
            yield
        finally:
            self._states = self._swap(saved)

    def _swap(self, states: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        cpu, cuda = states
        before = (torch.get_rng_state(), None if self._cuda is None else torch.cuda.get_rng_state(self._cuda))
        torch.set_rng_state(cpu)
        if self._cuda is not None and cuda is not None:
            torch.cuda.set_rng_state(cuda, self._cuda)
        return before

    def state_dict(self) -> dict[str, Tensor | None] | None:
        """Where the stream is, or None without a seed."""
        if self.generator is None:
            return None
        cpu, cuda = self._states or (None, None)
        return {"noise": self.generator.get_state(), "cpu": cpu, "cuda": cuda}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from where the stream was."""
        if state is not None:
            self.generator = torch.Generator()
            self.generator.set_state(state["noise"])
            self._states = None if state["cpu"] is None else (state["cpu"], state["cuda"])
