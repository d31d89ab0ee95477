"""TorchRL environments, taken as they are: their TensorDicts are copied to and from rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from gymnasium import spaces as gs
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl import modules as torchrl_modules
from torchrl.envs import EnvBase as TorchRLEnvBase
from torchrl.envs.utils import step_mdp

from swath.envs.base import EnvBase
from swath.envs.rows import Leaf, Rows
from swath.envs.spaces import ActionCodec, ObservationCodec
from swath.errors import UnsupportedEnvError
from swath.keys import DONE, NEXT, RESET, REWARD, TERMINATED, TRUNCATED, Key, as_key

ANYTHING = gs.Box(-float("inf"), float("inf"), ())
"""Stands where a gymnasium space is expected; the env's specs tell what there is."""


class SpecObservations(ObservationCodec):
    """The observations that a TorchRL env's spec tells of."""

    def __init__(self, leaves: dict[Key, Leaf]) -> None:
        """Only the layout is needed: the env writes TensorDicts."""
        self.space = ANYTHING
        self.entries = []
        self.leaves = leaves


class SpecActions(ActionCodec):
    """The actions that a TorchRL env's spec tells of."""

    def __init__(self, env: TorchRLEnvBase, leaves: dict[Key, Leaf]) -> None:
        """Random actions are drawn by the spec."""
        self.space = ANYTHING
        self.categorical = False
        self.entries = []
        self.leaves = leaves
        lane = env.full_action_spec
        for _ in env.batch_size:
            lane = lane[0]
        self._lane_spec = lane  # not the env: what the actions look like may have to travel without it

    def drawer(
        self, leaves: Mapping[Key, Leaf], steps: int, lanes: int
    ) -> Callable[[torch.Generator | None], dict[Key, Tensor]]:
        """What draws random actions `[T, N, ...]`."""
        return partial(self._drawn, leaves, self._lane_spec.expand(steps, lanes))

    def _drawn(self, leaves: Mapping[Key, Leaf], spec: Any, generator: torch.Generator | None) -> dict[Key, Tensor]:
        with torch.random.fork_rng(enabled=generator is not None):
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device="cpu")))
            drawn = spec.rand()
        return {key: drawn.get(key).reshape(*spec.shape, *leaf.shape).to(leaf.dtype) for key, leaf in leaves.items()}


class TorchRLEnv(EnvBase):
    """A TorchRL env of any batch size, with flags and reward at the root.

    The env keeps what it wants to see again (state, transforms' entries) in a TensorDict of its own; only what the
    specs declare as observations is recorded.
    """

    _owns_simulators = False

    def __init__(self, env: TorchRLEnvBase) -> None:
        """Take over `env`."""
        self.env = env
        dims = len(env.batch_size)
        observations = _leaves(env.full_observation_spec, dims)
        super().__init__(ANYTHING, ANYTHING, batch_size=env.batch_size, device=env.device)
        self.observations = SpecObservations(observations)
        self.actions = SpecActions(env, _leaves(env.full_action_spec, dims))
        rewards = _leaves(env.full_reward_spec, dims)
        flags = set(map(as_key, env.done_keys))
        if set(rewards) != {REWARD} or not flags <= {DONE, TERMINATED, TRUNCATED}:
            raise UnsupportedEnvError(
                f"{env} has rewards {sorted(map(str, rewards))} and flags {sorted(map(str, flags))}; only one 'reward' "
                "and flags at the root can be collected."
            )
        self.reward_leaf = rewards[REWARD]
        self.has_truncated = TRUNCATED in flags
        self._root: TensorDictBase | None = None

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked for, the env itself may have."""
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def introduce_to(self, policy: Any) -> None:
        """TorchRL's random policy and its noise may be made without a spec, to take that of the env's actions."""
        if hasattr(policy, "set_action_spec_from_env"):
            policy.set_action_spec_from_env(self.env)
        elif isinstance(policy, nn.Module) and hasattr(torchrl_modules, "set_exploration_modules_spec_from_env"):
            torchrl_modules.set_exploration_modules_spec_from_env(policy, self.env)  # not in older versions

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Reset all lanes, or by mask those of `lanes`."""
        if self._root is None or len(lanes) == self.num_lanes:
            self._root = self.env.reset()
        else:
            mask = torch.zeros(self.num_lanes, dtype=torch.bool, device=self.device or "cpu")
            mask[list(lanes)] = True
            self._root.set(RESET, mask.view(*self.batch_size, 1))
            self._root = self.env.reset(self._root)
        self._write(self._root, out)

    def step_into(self, action: Rows, out: Rows) -> bool:
        """Step with the env's own TensorDict."""
        assert self._root is not None, "step before reset"
        for key in self.action_keys:
            self._root.set(key, action.tensors[key].clone())
        stepped = self.env.step(self._root)
        answer = stepped.get(NEXT)
        self._write(answer, out)
        out.put(REWARD, answer.get(REWARD), repr(self))
        done = answer.get(DONE).bool()  # specs may declare flags as numbers, which TorchRL takes for True or False
        truncated = answer.get(TRUNCATED, torch.zeros_like(done)).bool()
        out.put(TRUNCATED, truncated, repr(self))
        out.put(TERMINATED, answer.get(TERMINATED, done & ~truncated).bool(), repr(self))
        self._root = step_mdp(stepped)
        return bool(done.any())

    def _write(self, source: TensorDictBase, out: Rows) -> None:
        for key in self.observation_keys:
            out.put(key, source.get(key), repr(self))

    def seed_lanes(self, seeds: list[int]) -> None:
        """Seed the env with the first; it derives the others itself."""
        self.env.set_seed(seeds[0], static_seed=len(set(seeds)) == 1 and len(seeds) > 1)

    def _close(self) -> None:
        if not self.env.is_closed:
            self.env.close()

    def __repr__(self) -> str:
        """The env's class and batch size."""
        return f"TorchRLEnv({type(self.env).__name__}, batch_size={list(self.batch_size)})"


def _leaves(spec: Any, batch_dims: int) -> dict[Key, Leaf]:
    """Shapes and dtypes of all entries of a composite spec."""
    leaves = {}
    for key, inner in spec.items(True, True):
        if inner.dtype is None or any(size < 0 for size in inner.shape):
            raise UnsupportedEnvError(f"{key!r} has the spec {inner}, which is no tensor of one fixed shape.")
        leaves[as_key(key)] = Leaf(tuple(inner.shape[batch_dims:]), inner.dtype)
    return leaves
