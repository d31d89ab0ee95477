"""What the `_reset` and `_step` of an env on TensorDicts return, entry by entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor

from swath.entries import first_entries
from swath.errors import suggestion, wrong_shape
from swath.keys import DONE, FLAGS, REWARD, TERMINATED, TRUNCATED, Key

if TYPE_CHECKING:
    from swath.envs.base import EnvBase


class EnvAnswer:
    """The entries of what a method of an env has returned, in the shapes that they must have."""

    def __init__(self, env: EnvBase, method: str, given: TensorDictBase) -> None:
        """Look at what `method` has `given`."""
        self._env, self._method, self._given = env, method, given
        self._entries = first_entries(given)

    def _find(self, key: Key) -> Tensor | None:
        return self._entries.get(key) if isinstance(key, str) else self._given.get(key, None)

    def entry(self, key: Key, like: Tensor) -> Tensor:
        """The entry `key`, in the shape of `like`."""
        value = self._find(key)
        if value is None:
            known = [str(known) for known in self._given.keys(True, True)]
            raise KeyError(
                f"{self._where} returned no {key!r}, only {known}.{suggestion(str(key), known)} It must return all "
                f"entries of the observation space {self._env.observation_space}, and a step its reward."
            )
        return self._shaped(key, value, like)

    def ends(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """terminated and truncated, from whichever of the three flags there are."""
        given = {key: flag for key in (TERMINATED, TRUNCATED) if (flag := self._find(key)) is not None}
        if len(given) < 2 and (over := self._find(DONE)) is not None:
            given[DONE] = over
        if not given:
            raise KeyError(
                f"{self._where} returned none of {FLAGS}, only {[str(key) for key in self._given.keys(True, True)]}. "
                "Every step must tell whether the episode has ended."
            )
        found = {key: self._shaped(key, flag, like).bool() for key, flag in given.items()}
        done, terminated, truncated = (found.get(key) for key in FLAGS)
        if terminated is not None and truncated is not None:
            return terminated, truncated
        never = torch.zeros_like(like)
        if terminated is None:
            terminated = never if done is None else done if truncated is None else done & ~truncated
        if truncated is None:
            truncated = never if done is None else done & ~terminated
        return terminated, truncated

    def _shaped(self, key: Key, value: Tensor, like: Tensor) -> Tensor:
        if value.shape == like.shape:
            return value
        if key not in (REWARD, *FLAGS) or value.shape != self._env.batch_size:
            raise wrong_shape(key, like.shape, value.shape, self._where)
        return value.unsqueeze(-1)

    @property
    def _where(self) -> str:
        return f"{type(self._env).__name__}.{self._method}"
