"""How the envs of an AsyncEnvPool are called with arrays or TensorDicts, a few at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.envs.env_layout import EnvLayout, JoinedEnv
from swath.envs.own_pace import OwnPaceEnv
from swath.envs.parallel_worker import BEGIN, STEP, STEP_AND_BEGIN
from swath.errors import wrong_shape
from swath.keys import DONE, ENV_INDEX, FLAGS, IS_INIT, NEXT, TERMINATED, TRUNCATED, Key, nest
from swath.runtime.columns import writable

RESET_CALL, STEP_CALL, MAYBE_RESET_CALL, SEND_CALL = "async_reset", "async_step", "async_step_and_maybe_reset", "send"
EnvIds = int | Sequence[int] | np.ndarray | Tensor | None


class AsyncCalls(JoinedEnv, OwnPaceEnv):
    """Calls in pairs: one lets some envs begin, the other waits for those that have finished first.

    A result that was not asked for is kept. Results are sorted by env, and `env_index` says which they are of.
    """

    def __init__(self, layouts: Sequence[EnvLayout], device: torch.device | str | None) -> None:
        super().__init__(layouts, device)
        self.num_envs = len(layouts)
        self.lanes_per_env = self.num_lanes // self.num_envs
        self._lanes = np.arange(self.num_lanes).reshape(self.num_envs, -1)
        self._sent: dict[int, TensorDictBase] = {}
        """What was sent for each env."""

    def lanes_of(self, envs: Sequence[int]) -> np.ndarray:
        """The lanes of `envs`, in their order."""
        return self._lanes[envs].reshape(-1)

    # -- what a pool gives -------------------------------------------------------------------------------------

    @abstractmethod
    def begin_call(self, call: str, envs: Sequence[int], what: int, actions: Mapping[Key, Tensor] | None) -> None:
        """Let `envs`, which must be idle, do `what` as part of `call`; with `actions` `[k, *child]`, if they step."""

    @abstractmethod
    def end_call(
        self, call: str, least: int, most: int | None, timeout_s: float | None, env: int | None = None
    ) -> list[int]:
        """The envs that have finished `call`, at least and at most so many of them; or that one."""

    @abstractmethod
    def _begun(self, envs: Sequence[int]) -> list[int]:
        """Those of `envs` that have begun anew, and not stepped."""

    # -- in the manner of EnvPool ------------------------------------------------------------------------------

    def async_reset(self) -> None:
        """Let all envs begin anew; `recv` gives their first observations."""
        self.begin_call(SEND_CALL, range(self.num_envs), BEGIN, None)

    def send(self, action: Any, env_ids: EnvIds = None) -> None:
        """Step some envs (all, if it is not said which); one that finishes begins anew by itself.

        Args:
            action: an array or tensor `[k, ...]`, or a dict or TensorDict of them where there are several.
            env_ids: the envs, as `recv` has given them in `env_index`.
        """
        envs = self._envs(env_ids, None)
        given = action if isinstance(action, Mapping | TensorDictBase) else {self.action_key: action}
        actions = {key: torch.as_tensor(given[key], device="cpu") for key in self.action_keys}
        self.begin_call(SEND_CALL, envs, STEP_AND_BEGIN, actions)

    def recv(self, min_ready: int = 1, max_ready: int | None = None, timeout: float | None = None) -> TensorDict:
        """Envs that are ready, in the order in which they became so.

        The observations `[k]` are those to act on now, `is_init` says where an episode begins with them, and "next" has
        what the last step has brought. TimeoutError, if fewer than `min_ready` are ready after `timeout` seconds.
        """
        envs = self.end_call(SEND_CALL, min_ready, max_ready, timeout)
        stepped = self._results(envs)
        has_begun = torch.from_numpy(np.isin(envs, self._begun(envs)))
        for value in stepped.values(True, True):
            writable(value)[has_begun] = 0
        root, begins = self._roots(envs)
        return root.set(IS_INIT, begins).set(NEXT, stepped)

    # -- in the manner of TorchRL ------------------------------------------------------------------------------

    def async_reset_send(self, tensordict: TensorDictBase | None = None, env_index: EnvIds = None) -> None:
        """Let some envs begin anew: those of `env_index`, or of the entry of that name, or all."""
        self.begin_call(RESET_CALL, self._envs(env_index, tensordict), BEGIN, None)

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """The first observations of envs that were reset."""
        envs = sorted(self.end_call(RESET_CALL, _least(min_get), max_get, timeout, env_index))
        return self._roots(envs)[0]

    def async_step_send(self, tensordict: TensorDictBase, env_index: EnvIds = None) -> None:
        """Step some envs with the actions in `tensordict`."""
        self._step_send(STEP_CALL, STEP, tensordict, env_index)

    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """What was sent, with what happened in "next", of envs that have stepped."""
        envs = sorted(self.end_call(STEP_CALL, _least(min_get), max_get, timeout, env_index))
        return self._sent_with_results(envs)

    def async_step_and_maybe_reset_send(self, tensordict: TensorDictBase, env_index: EnvIds = None) -> None:
        """Step some envs with the actions in `tensordict`; those that finish begin anew."""
        self._step_send(MAYBE_RESET_CALL, STEP_AND_BEGIN, tensordict, env_index)

    def async_step_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """What `async_step_recv` gives, and what to act on next."""
        envs = sorted(self.end_call(MAYBE_RESET_CALL, _least(min_get), max_get, timeout, env_index))
        stepped = self._sent_with_results(envs)
        return stepped, self._roots(envs)[0]

    def _step_send(self, call: str, what: int, tensordict: TensorDictBase, env_index: EnvIds) -> None:
        envs = self._envs(env_index, tensordict)
        shape = (len(envs), *self.batch_size[1:])
        if tensordict.shape == shape[1:] and len(envs) == 1:
            tensordict = tensordict.unsqueeze(0)
        if tensordict.shape != shape:
            raise wrong_shape(ENV_INDEX, shape, tensordict.shape, f"The TensorDict given to {call}_send")
        actions: dict[Key, Tensor] = {}
        for key in self.action_keys:
            value = tensordict.get(key, None)
            if value is None:
                known = sorted(map(str, tensordict.keys()))
                raise KeyError(f"{call}_send found no {key!r} in the TensorDict, only {known}.")
            actions[key] = value
        self.begin_call(call, envs, what, actions)
        sent = tensordict.exclude(ENV_INDEX)
        self._sent.update({env: sent[row] for row, env in enumerate(envs)})

    # -- helpers -----------------------------------------------------------------------------------------------

    def _envs(self, given: EnvIds, tensordict: TensorDictBase | None) -> list[int]:
        """The envs that are meant, each once."""
        if given is None and tensordict is not None:
            given = tensordict.get(ENV_INDEX, None)
        if given is None:
            return list(range(self.num_envs))
        envs = [int(env) for env in np.asarray(given.cpu() if isinstance(given, Tensor) else given).reshape(-1)]
        if len(set(envs)) < len(envs) or any(not 0 <= env < self.num_envs for env in envs):
            raise ValueError(f"env_index must name envs of 0 to {self.num_envs - 1}, each once, got {envs}.")
        return envs

    def _sent_with_results(self, envs: list[int]) -> TensorDictBase:
        sent: TensorDictBase = torch.stack([self._sent.pop(env) for env in envs])
        return sent.set(NEXT, self._results(envs)).set(ENV_INDEX, self._index(envs))

    def _results(self, envs: list[int]) -> TensorDict:
        """What the last step of `envs` has brought."""
        out = self._rows_of(envs, list(self.out_leaves))
        out[DONE] = out[TERMINATED] | out[TRUNCATED]
        return self._dict(out, envs)

    def _roots(self, envs: list[int]) -> tuple[TensorDict, Tensor]:
        """What to act on, with no flag set, and which lanes begin an episode there."""
        out, lanes = self.new_out_rows(), self.lanes_of(envs)
        over = (out.arrays[TERMINATED] | out.arrays[TRUNCATED])[lanes, 0]
        begins = over | np.isin(lanes, self.lanes_of(self._begun(envs)))
        if over.any():
            self.reset_into(lanes[over].tolist(), out)  # they have begun by themselves: this copies
        root = self._rows_of(envs, self.observation_keys)
        shape = (len(envs), *self.batch_size[1:], 1)
        root |= {key: torch.zeros(shape, dtype=torch.bool, device="cpu") for key in FLAGS}
        found = self._dict(root, envs).set(ENV_INDEX, self._index(envs))
        return found, torch.from_numpy(begins).view(shape)

    def _rows_of(self, envs: list[int], keys: Sequence[Key]) -> dict[Key, Tensor]:
        out, lanes = self.new_out_rows(), self.lanes_of(envs)
        size = (len(envs), *self.batch_size[1:])
        return {key: out.flat(key)[lanes].view(*size, *out.leaf(key).shape) for key in keys}

    def _dict(self, entries: dict[Key, Tensor], envs: list[int]) -> TensorDict:
        return TensorDict(nest(entries), batch_size=(len(envs), *self.batch_size[1:]), device=self.device)

    def _index(self, envs: list[int]) -> Tensor:
        size = (len(envs), *self.batch_size[1:])
        index = torch.tensor(envs, dtype=torch.int64, device=self.device or "cpu")
        return index.view(-1, *[1] * (len(size) - 1)).expand(size).contiguous()


def _least(given: int | None) -> int:
    return 1 if given is None else given
