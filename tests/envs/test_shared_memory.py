"""Nobody's arrays change behind his back: actions that envs keep, and observations that envs use again."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from gymnasium.vector import SyncVectorEnv
from space_zoo import SPACES, PlaybackEnv
from tensordict import TensorDict, TensorDictBase

from swath.envs import EnvBase, GymEnv, Rows, SerialEnv
from swath.keys import NEXT
from swath.testing import CountingEnv, CountingGymEnv


@pytest.mark.parametrize("name", ["Box float32", "MultiDiscrete", "MultiBinary", "Dict", "Tuple"])
@pytest.mark.parametrize("lanes", [0, 2])
def test_an_env_may_keep_its_actions(name: str, lanes: int) -> None:
    env = GymEnv(partial(PlaybackEnv, action_space=SPACES[name], length=100), num_envs=lanes)
    out, action = Rows(env.out_leaves, env.batch_size), Rows(env.actions.leaves, env.batch_size)
    drawn = env.actions.draw(env.actions.leaves, 20, env.num_lanes, torch.Generator().manual_seed(0))
    env.reset_into(range(env.num_lanes), out)
    kept: list[str] = []
    for step in range(20):
        for key, values in drawn.items():
            action.tensors[key].copy_(values[step].view(action.tensors[key].shape))
        env.step_into(action, out)
        kept.append(repr([inner.acts[-1] for inner in env.gym_envs]))  # type: ignore[attr-defined]
    assert len(set(kept)) > 5
    for step, text in enumerate(kept):
        assert repr([inner.acts[step] for inner in env.gym_envs]) == text  # type: ignore[attr-defined]


def test_the_actions_of_a_vector_env_may_be_kept() -> None:
    inner = SyncVectorEnv([partial(PlaybackEnv, action_space=gs.Box(-1, 1, (2,)), length=100)] * 2)
    env = GymEnv(inner)
    td = env.rollout(10)
    for lane, single in enumerate(inner.envs):
        np.testing.assert_array_equal(np.stack(single.acts), td["action"][lane].numpy())  # type: ignore[attr-defined]


class Keeping(CountingEnv):
    """A custom env that keeps everything it is given."""

    def __init__(self) -> None:
        super().__init__((2,), lengths=50)
        self.given: list[TensorDictBase] = []

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.given.append(tensordict)
        return super()._reset(tensordict)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.given.append(tensordict)
        return super()._step(tensordict)


def test_a_custom_env_may_keep_what_it_is_given() -> None:
    env = Keeping()
    out, action = Rows(env.out_leaves, env.batch_size), Rows(env.actions.leaves, env.batch_size)
    env.reset_into(range(2), out)
    copies = [env.given[0].clone()]
    for step in range(8):
        action.tensors["action"].copy_(torch.eye(2, dtype=torch.int64)[[step % 2, step // 2 % 2]])
        if step == 4:
            env.reset_into([1], out)
        env.step_into(action, out)
        copies.extend(given.clone() for given in env.given[len(copies) :])
    assert len(env.given) == 10
    for given, copy in zip(env.given, copies, strict=True):
        assert set(given.keys()) == set(copy.keys())
        assert given.is_empty() or (given == copy).all()


class Reusing(CountingGymEnv):
    """Always returns the same arrays."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._buffer: Any = None

    def _observe(self) -> Any:
        fresh = super()._observe()
        if self._buffer is None:
            self._buffer = fresh
        elif isinstance(fresh, dict):
            self._buffer["count"][:] = fresh["count"]
            self._buffer["inner"]["step"][:] = fresh["inner"]["step"]
        else:
            self._buffer[:] = fresh
        return self._buffer


LAYOUTS: dict[str, Any] = {
    "one": lambda kind, make: GymEnv(make(0, [3, 4], kind)),
    "serial": lambda kind, make: SerialEnv(2, [partial(make, lane, [3, 4], kind) for lane in range(2)]),
    "next step": lambda kind, make: GymEnv(
        SyncVectorEnv([partial(make, lane, [3, 4], kind) for lane in range(2)], copy=False)
    ),
    "disabled": lambda kind, make: GymEnv(
        SyncVectorEnv([partial(make, lane, [3, 4], kind) for lane in range(2)], autoreset_mode="Disabled", copy=False)
    ),
}


@pytest.mark.parametrize("kind", ["vector", "dict", "pixels"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_env_may_use_its_arrays_again(layout: str, kind: str) -> None:
    torch.manual_seed(0)
    again = LAYOUTS[layout](kind, Reusing).rollout(12, break_when_any_done=False)
    torch.manual_seed(0)
    fresh = LAYOUTS[layout](kind, CountingGymEnv).rollout(12, break_when_any_done=False)
    assert (again == fresh).all()


class ReusingCustom(EnvBase):
    """A custom env that writes into the tensors it returned before."""

    def __init__(self) -> None:
        super().__init__(gs.Box(0, 100, (1,), np.float32), gs.Discrete(2), batch_size=(2,))
        flag = torch.zeros(2, 1, dtype=torch.bool)
        self.answer = TensorDict(
            {"observation": torch.zeros(2, 1), "reward": torch.zeros(2, 1), "terminated": flag}, batch_size=(2,)
        )

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.answer.zero_()
        return self.answer

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.answer["observation"].add_(1)
        self.answer["reward"].add_(2)
        self.answer["terminated"].copy_(self.answer["observation"] >= 3)
        return self.answer


def test_a_custom_env_may_use_its_tensors_again() -> None:
    td = ReusingCustom().rollout(5, break_when_any_done=False)
    assert td["observation"][0, :, 0].tolist() == [0, 1, 2, 0, 1]
    assert td[NEXT, "observation"][0, :, 0].tolist() == [1, 2, 3, 1, 2]
    assert td[NEXT, "reward"][1, :, 0].tolist() == [2, 4, 6, 2, 4]
