"""What the `_reset` and `_step` of an env on TensorDicts are given, and what they return, entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from swath.entries import Form, first_entries, trusted
from swath.envs.rows import Rows
from swath.errors import suggestion, wrong_shape
from swath.keys import DONE, FLAGS, REWARD, TERMINATED, TRUNCATED, Key

if TYPE_CHECKING:
    from swath.envs.base import EnvBase


class Steps:
    """Steps of an env with `_step`, from rows to rows: what does not change from one to the next is found out once."""

    def __init__(self, env: EnvBase, action: Rows, out: Rows) -> None:
        """Give the env copies of the observations in `out` and of `action`."""
        self.action, self.out = action, out
        self._env = env
        sources = [(out, key) for key in env.observation_keys] + [(action, key) for key in env.action_keys]
        self._copiers = {key: rows.copier(key) for rows, key in sources}
        self._form = Form(trusted({}, env.batch_size, None))
        self._is_flat = all(isinstance(key, str) for key in self._copiers)
        self._told = [(key, out.tensors[key]) for key in (*env.observation_keys, REWARD)]
        self._flags = [out.tensors[key] for key in (TERMINATED, TRUNCATED)]
        self._ends: list[Any] = [out.arrays[key] for key in (TERMINATED, TRUNCATED) if key in out.arrays]

    def make(self, step: Callable[[TensorDictBase], TensorDictBase]) -> bool:
        """Make a step with the env's `_step`, and tell whether any lane finished."""
        env, out = self._env, self.out
        given = {key: copy() for key, copy in self._copiers.items()}
        request = self._form.filled(given) if self._is_flat else trusted(given, env.batch_size, None)
        answer = EnvAnswer(env, "_step", step(request))
        for key, like in self._told:
            out.set(key, answer.entry(key, like))
        terminated, truncated = answer.ends(self._flags[0])
        out.set(TERMINATED, terminated)
        out.set(TRUNCATED, truncated)
        if self._ends:
            return bool(np.count_nonzero(self._ends[0]) or np.count_nonzero(self._ends[1]))
        return bool(self._flags[0].any() or self._flags[1].any())


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
        if len(given) == 2 and all(flag.shape == like.shape and flag.dtype is like.dtype for flag in given.values()):
            return given[TERMINATED], given[TRUNCATED]
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
