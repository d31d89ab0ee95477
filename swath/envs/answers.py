"""What the `_reset` and `_step` of an env on TensorDicts are given, and what they return, entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.entries import Form, first_entries, trusted
from swath.envs.rows import Rows
from swath.errors import suggestion, wrong_shape
from swath.keys import DONE, FLAGS, RESET, REWARD, TERMINATED, TRUNCATED, Key

if TYPE_CHECKING:
    from swath.envs.base import EnvBase

CPU = torch.device("cpu")


class Requests:
    """What an env is given: TensorDicts with copies of rows, which it may keep."""

    def __init__(self, env: EnvBase, sources: Sequence[tuple[Rows, Key]]) -> None:
        """Copy these entries for each."""
        self._copiers = [(key, rows.copier(key)) for rows, key in sources]
        self._size = env.batch_size
        self._form = Form(trusted({}, env.batch_size, None))
        self._is_flat = all(isinstance(key, str) for key, _ in self._copiers)

    def make(self, given: dict[Key, Tensor]) -> TensorDict:
        """One with what is `given`, and copies of what is in the rows now."""
        for key, copy in self._copiers:
            given[key] = copy()
        return self._form.filled(given) if self._is_flat else trusted(given, self._size, None)


class Resets:
    """Resets of some lanes of an env with `_reset`, to rows: what does not change is found out once."""

    def __init__(self, env: EnvBase, out: Rows) -> None:
        """Give the env copies of the observations in `out`."""
        self.out = out
        self._env = env
        self._requests = Requests(env, [(out, key) for key in env.observation_keys])
        self._told = [(key, out.tensors[key].shape) for key in env.observation_keys]
        self._flags = (*env.batch_size, 1)
        self._elsewhere = None if env.rows_device in (None, CPU) else env.rows_device

    def make(self, reset: Callable[[TensorDictBase], TensorDictBase], lanes: Sequence[int]) -> None:
        """Begin anew in `lanes` with the env's `_reset`; of what it tells, write only what is about these."""
        env, out, chosen = self._env, self.out, np.array(lanes, np.int64)
        if len(chosen) == env.num_lanes:
            request = trusted({}, env.batch_size, None)
        else:
            mask = np.zeros(env.num_lanes, bool)
            mask[chosen] = True
            marked = torch.from_numpy(mask.reshape(self._flags))
            request = self._requests.make({RESET: marked if self._elsewhere is None else marked.to(self._elsewhere)})
        answer = EnvAnswer(env, "_reset", reset(request))
        for key, shape in self._told:
            out.set_some(key, chosen, answer.entry(key, shape))


class Steps:
    """Steps of an env with `_step`, from rows to rows: what does not change from one to the next is found out once."""

    def __init__(self, env: EnvBase, action: Rows, out: Rows) -> None:
        """Give the env copies of the observations in `out` and of `action`."""
        self.action, self.out = action, out
        self._env = env
        sources = [(out, key) for key in env.observation_keys] + [(action, key) for key in env.action_keys]
        self._requests = Requests(env, sources)
        self._told, self._flags = (
            [(key, out.tensors[key].shape, out.taker(key)) for key in keys]
            for keys in ((*env.observation_keys, REWARD), (TERMINATED, TRUNCATED))
        )
        self._ends: list[Any] = [out.arrays[key] for key in (TERMINATED, TRUNCATED) if key in out.arrays]
        self._none = bytes(env.num_lanes)

    def make(self, step: Callable[[TensorDictBase], TensorDictBase]) -> bool:
        """Make a step with the env's `_step`, and tell whether any lane finished."""
        out, answer = self.out, step(self._requests.make({}))
        entries: Mapping[Any, Any] = first_entries(answer)
        for key, shape, take in self._told:
            value = entries.get(key)
            if value is None or value.shape != shape:
                value = EnvAnswer(self._env, "_step", answer).entry(key, shape)
            take(value.detach() if value.requires_grad else value)
        for key, shape, take in self._flags:
            value = entries.get(key)
            if value is None or value.shape != shape:
                terminated, truncated = EnvAnswer(self._env, "_step", answer).ends(out.tensors[TERMINATED])
                out.set(TERMINATED, terminated)
                out.set(TRUNCATED, truncated)
                break
            take(value.detach() if value.requires_grad else value)
        if self._ends:  # as bytes, which are compared at once
            return bool(self._ends[0].tobytes() != self._none or self._ends[1].tobytes() != self._none)
        return bool(out.tensors[TERMINATED].any() or out.tensors[TRUNCATED].any())


class EnvAnswer:
    """The entries of what a method of an env has returned, in the shapes that they must have."""

    def __init__(self, env: EnvBase, method: str, given: TensorDictBase) -> None:
        """Look at what `method` has `given`."""
        self._env, self._method, self._given = env, method, given
        self._entries = first_entries(given)

    def _find(self, key: Key) -> Tensor | None:
        return self._entries.get(key) if isinstance(key, str) else self._given.get(key, None)

    def entry(self, key: Key, shape: torch.Size) -> Tensor:
        """The entry `key`, in this shape."""
        value = self._find(key)
        if value is None:
            known = [str(known) for known in self._given.keys(True, True)]
            raise KeyError(
                f"{self._where} returned no {key!r}, only {known}.{suggestion(str(key), known)} It must return all "
                f"entries of the observation space {self._env.observation_space}, and a step its reward."
            )
        return self._shaped(key, value, shape)

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
        found = {key: self._shaped(key, flag, like.shape).bool() for key, flag in given.items()}
        done, terminated, truncated = (found.get(key) for key in FLAGS)
        if terminated is not None and truncated is not None:
            return terminated, truncated
        never = torch.zeros_like(like)
        if terminated is None:
            terminated = never if done is None else done if truncated is None else done & ~truncated
        if truncated is None:
            truncated = never if done is None else done & ~terminated
        return terminated, truncated

    def _shaped(self, key: Key, value: Tensor, shape: torch.Size) -> Tensor:
        if value.shape == shape:
            return value
        if key not in (REWARD, *FLAGS) or value.shape != self._env.batch_size:
            raise wrong_shape(key, shape, value.shape, self._where)
        return value.unsqueeze(-1)

    @property
    def _where(self) -> str:
        return f"{type(self._env).__name__}.{self._method}"
