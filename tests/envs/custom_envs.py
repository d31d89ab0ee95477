"""Custom envs written with `_reset` and `_step`."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from tensordict import TensorDict, TensorDictBase

from swath.envs import EnvBase
from swath.keys import RESET


class Walk(EnvBase):
    """A random walk of each lane; nothing is wrong with it."""

    def __init__(self, batch_size: tuple[int, ...] = (2,)) -> None:
        super().__init__(gs.Box(-100, 100, (1,), np.float32), gs.Discrete(2), batch_size=batch_size)
        self.random = torch.Generator()
        self.state = torch.zeros(*batch_size, 1)
        self.count = torch.zeros(*batch_size, 1)

    def _set_seed(self, seed: int) -> None:
        self.random.manual_seed(seed)

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        chosen = tensordict.get(RESET, torch.ones(*self.batch_size, 1, dtype=torch.bool))
        noise = torch.randn(self.state.shape, generator=self.random)
        self.state = torch.where(chosen, noise, self.state)
        self.count = torch.where(chosen, 0, self.count)
        return TensorDict({"observation": self.state}, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.state = self.state + 0.5
        self.count = self.count + 1
        return TensorDict(
            {"observation": self.state, "reward": self.count, "terminated": self.count >= 5}, batch_size=self.batch_size
        )


def changed(where: str, batch_size: tuple[int, ...] = (2,), **entries: Any) -> EnvBase:
    """A walk whose `_reset` or `_step` returns other entries: tensors, or functions of its own; None leaves one out."""

    class Changed(Walk):
        def _changed(self, td: TensorDictBase) -> TensorDictBase:
            for name, change in entries.items():
                if change is None:
                    td = td.exclude(name)
                else:
                    td.set(name, change if isinstance(change, torch.Tensor) else change(td.get(name, None)))
            return td

        def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
            answer = super()._reset(tensordict)
            return self._changed(answer) if where == "reset" else answer

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            answer = super()._step(tensordict)
            return self._changed(answer) if where == "step" else answer

    return Changed(batch_size)
