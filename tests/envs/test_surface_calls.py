"""The TensorDict surface of envs: its calls go on from each other, and what it hands out is the caller's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces as gs
from tensordict import TensorDict, TensorDictBase

from swath.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv
from swath.testing import CountingGymEnv

KINDS: dict[str, Callable[[], EnvBase]] = {
    "SerialEnv": lambda: SerialEnv(2, partial(CountingGymEnv, lengths=9)),
    "ParallelEnv": lambda: ParallelEnv(2, partial(CountingGymEnv, lengths=9)),
    "GymEnv": lambda: GymEnv(partial(CountingGymEnv, lengths=9), num_envs=2),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def env(request: pytest.FixtureRequest) -> Any:
    with request.param() as made:
        yield made


def test_lanes_that_are_not_reset_stay_where_the_last_step_left_them(env: EnvBase) -> None:
    """Whichever call made that step."""
    root = env.reset()
    for _ in range(2):
        _, root = env.step_and_maybe_reset(env.rand_action(root))
    env.step(env.rand_action(root))
    env.step_and_maybe_reset(env.rand_action())
    marks = torch.tensor([[True], [False]])
    assert env.reset(TensorDict({"_reset": marks}))["observation"][:, 2].tolist() == [0, 4]


def test_what_was_handed_out_does_not_change(env: EnvBase) -> None:
    root = env.reset()
    kept = []
    for _ in range(12):
        stepped, root = env.step_and_maybe_reset(env.rand_action(root))
        kept += [(td.copy(), td.clone()) for td in (stepped, root)]  # the same tensors, and others
    assert all((td == copy).all() for td, copy in kept)


def test_flags_of_a_root_are_apart(env: EnvBase) -> None:
    root = env.reset()
    root["done"].fill_(True)
    assert not root["terminated"].any()
    assert not root["truncated"].any()


def test_no_gradient_stays_in_the_env(env: EnvBase) -> None:
    """As from an observation that was normalised by something that learns."""
    scale = torch.ones(1, requires_grad=True)
    root = env.reset()
    stepped = env.step(env.rand_action(root.set("observation", root["observation"] * scale)))
    assert not stepped["next", "observation"].requires_grad
    assert not env.reset()["observation"].requires_grad
    assert not env.rollout(3)["next", "observation"].requires_grad


class Walk(EnvBase):
    """Its state is what it is shown."""

    def __init__(self) -> None:
        super().__init__(gs.Box(-9, 9, (1,)), gs.Box(-1, 1, (1,)), batch_size=(2,))
        self.pull = torch.ones(1, requires_grad=True)

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict({"observation": torch.full((2, 1), 5.0)}, [2])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen = tensordict["observation"] + self.pull
        return TensorDict({"observation": seen, "reward": seen, "terminated": torch.zeros(2, 1, dtype=torch.bool)}, [2])


def test_a_step_that_is_shown_no_observation_goes_on_from_the_last() -> None:
    env = Walk()
    env.reset()
    for expected, step in ((6, env.step_and_maybe_reset), (7, env.step), (8, env.step_and_maybe_reset)):
        td = env.rand_action()
        step(td)
        assert td["next", "observation"].tolist() == [[expected], [expected]]
        assert not td["next", "observation"].requires_grad


class Tenfold(GymEnv):
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        stepped = super().step(tensordict)
        stepped["next", "reward"] *= 10
        return stepped


def test_a_step_of_a_subclass_is_the_one_that_counts() -> None:
    env = Tenfold("CartPole-v1")
    stepped, _ = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert stepped["next", "reward"].tolist() == [10]
    assert env.rollout(1)["next", "reward"].tolist() == [[10]]
