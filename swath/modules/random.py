"""RandomPolicy: actions drawn from the action space."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces as gs
from tensordict import TensorDictBase
from torch import nn

from swath.envs.spaces import ActionCodec


class RandomPolicy(nn.Module):
    """Writes random actions, whatever the observations.

    Args:
        actions: the gymnasium action space of one lane (`env.action_space`), or an env's own codec (`env.actions`).
        categorical_action_encoding: integers instead of one-hot vectors for discrete actions.
    """

    def __init__(self, actions: gs.Space[Any] | ActionCodec, categorical_action_encoding: bool = False) -> None:
        """Draw from `actions`."""
        super().__init__()
        self.codec = actions if isinstance(actions, ActionCodec) else ActionCodec(actions, categorical_action_encoding)
        self.in_keys: list[Any] = []
        self.out_keys: list[Any] = list(self.codec.leaves)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an action for each element of `tensordict`."""
        lanes = tensordict.numel()
        for key, value in self.codec.draw(self.codec.leaves, 1, lanes, None).items():
            tensordict.set(key, value[0].view((*tensordict.batch_size, *value.shape[2:])))
        return tensordict
