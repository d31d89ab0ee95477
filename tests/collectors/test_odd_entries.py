"""Entries of types that torch can do little with, and entries without any number, come through everything."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from common import buffer
from gymnasium import spaces as gs
from kinds import ALL, AS_READY, AS_READY_SPREAD, Make, over
from tensordict import TensorDict, TensorDictBase

from swath.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from swath.envs import AsyncEnvPool, EnvBase, GymEnv, ParallelEnv, SerialEnv

LENGTH = 4
COUNT = "count"
ODD = {
    f"{name} {shape}": (np.dtype(name), shape)
    for name, shapes in {
        "uint16": ((), (2,), (0,)),
        "uint32": ((), (2,)),
        "uint64": ((), (2,)),
        "float32": ((0,), (2, 0)),
    }.items()
    for shape in shapes
}
"""Type and shape of odd entries."""
BOXES = {name: gs.Box(0, 100, shape, dtype.type) for name, (dtype, shape) in ODD.items()}


class OddEnv(gym.Env[Any, Any]):
    """Says in odd entries, and in one that is not, how many steps its episode has; takes odd actions."""

    observation_space = gs.Dict({**BOXES, COUNT: gs.Box(0, 100, (1,), np.int64)})
    action_space = gs.Dict({f"do {name}": box for name, box in BOXES.items()})
    count = 0

    def seen(self) -> dict[str, np.ndarray]:
        odd = {name: np.full(shape, self.count, dtype) for name, (dtype, shape) in ODD.items()}
        return {**odd, COUNT: np.array([self.count])}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        for name, kind in ODD.items():
            assert (action[f"do {name}"].dtype, action[f"do {name}"].shape) == kind
        self.count += 1
        return self.seen(), 1.0, self.count == LENGTH, False, {}


def odd_env() -> GymEnv:
    return GymEnv(OddEnv)


class OddLanes(EnvBase):
    """The same as a custom env of two lanes that end at different times."""

    def __init__(self) -> None:
        self.inner = [OddEnv(), OddEnv()]
        super().__init__(OddEnv.observation_space, OddEnv.action_space, batch_size=(2,))

    def _seen(self) -> dict[str, torch.Tensor]:
        seen = [env.seen() for env in self.inner]
        return {key: torch.from_numpy(np.stack([one[key] for one in seen])) for key in seen[0]}

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        chosen = tensordict.get("_reset", torch.ones(2, 1, dtype=torch.bool))
        for lane, env in enumerate(self.inner):
            if chosen[lane]:
                env.count = lane
        return TensorDict(self._seen(), [2])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        ended = []
        for lane, env in enumerate(self.inner):
            ended.append(env.step({f"do {name}": tensordict[f"do {name}"][lane].numpy() for name in ODD})[2])
        return TensorDict({**self._seen(), "reward": torch.ones(2, 1), "terminated": torch.tensor(ended)[:, None]}, [2])


def check(batch: TensorDictBase) -> None:
    """Whether odd entries say what the one says that is not, also where there is no frame."""
    for part in (batch, batch["next"]):
        for name, (dtype, shape) in ODD.items():
            odd = part[name]
            assert odd.shape == (*batch.shape, *shape)
            assert odd.dtype == torch.from_numpy(np.empty(0, dtype)).dtype
            assert (odd.long() == part[COUNT].view(*batch.shape, *[1] * len(shape))).all(), name
    assert (batch["next", COUNT] > 0).any()


EACH: list[dict[str, Any]] = [{}, {"split_trajs": True}, {"trajs_per_batch": 2}]


@pytest.mark.parametrize("options", EACH, ids=", ".join)
@over((*ALL, AS_READY_SPREAD))
def test_collecting(make: Make, options: dict[str, Any]) -> None:
    for batch in make(odd_env, batches=2, **options):
        check(batch)


@pytest.mark.parametrize("options", [*EACH, {"return_same_td": True}], ids=", ".join)
def test_a_custom_env(make: Make, options: dict[str, Any]) -> None:
    for batch in make(OddLanes(), lanes=2, batches=2, storing_device="cpu", **options):
        check(batch)


@over([AS_READY])
def test_a_policy_that_acts_for_some(make: Make) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.update({f"do {name}": td[name] for name in ODD})

    for batch in make(odd_env, policy, batches=2):
        check(batch)
        for name in ODD:
            assert torch.equal(batch[f"do {name}"].long(), batch[name].long()), name


@pytest.mark.parametrize("make", [lambda: SerialEnv(2, odd_env), lambda: ParallelEnv(2, odd_env), OddLanes])
def test_envs(make: Any) -> None:
    env = make()
    try:
        check(env.rollout(2 * LENGTH, break_when_any_done=False))
    finally:
        env.close()


def test_envs_at_their_own_pace() -> None:
    pool = AsyncEnvPool([odd_env] * 2)
    try:
        pool.async_reset()
        first = pool.recv(min_ready=2)
        assert not any(first["next", name].long().any() for name in ODD)
        actions = {f"do {name}": np.ones((2, *shape), dtype) for name, (dtype, shape) in ODD.items()}
        pool.send(actions, first["env_index"])
        check(pool.recv(min_ready=2))
    finally:
        pool.close()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_buffers(make: Make, storage: Any) -> None:
    kept = TensorDictReplayBuffer(storage=storage(50), batch_size=8)
    kept.extend(make(OddLanes(), lanes=2).next().reshape(-1))
    kept[3] = kept[4]
    assert kept[3][COUNT] == kept[4][COUNT]
    for batch in (kept[:], kept.sample(), kept[[1, 2]]):
        check(batch)


@pytest.mark.parametrize("options", [{}, {"postproc": lambda batch: batch}, {"trajs_per_batch": 1}], ids=", ".join)
def test_collecting_into_a_buffer(make: Make, options: dict[str, Any]) -> None:
    kept = buffer(50, batch_size=8)
    for _ in make(OddLanes(), lanes=2, batches=2, replay_buffer=kept, **options):
        pass
    check(kept[:])
