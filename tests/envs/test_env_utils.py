"""The names that users of torchrl.envs.utils look for."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType

from swath.envs import GymEnv, check_env
from swath.envs.utils import ExplorationType, check_env_specs, exploration_type, set_exploration_type, step_mdp
from swath.keys import NEXT


def test_exploration_types_are_tensordicts() -> None:
    assert ExplorationType is InteractionType
    with set_exploration_type(ExplorationType.MODE):
        assert exploration_type() is ExplorationType.MODE
    assert exploration_type() is not ExplorationType.MODE


def test_check_env_has_its_other_name() -> None:
    assert check_env_specs is check_env
    check_env_specs(GymEnv("CartPole-v1"))


def test_step_mdp_gives_the_next_root() -> None:
    env = GymEnv("CartPole-v1")
    td = env.rand_step(env.reset().set("memory", torch.ones(2)))
    root = step_mdp(td)
    assert torch.equal(root["observation"], td[NEXT, "observation"])
    assert torch.equal(root["memory"], torch.ones(2))
    for name in ("action", "reward", NEXT):
        assert root.get(name, None) is None
    assert env.rand_step(root)[NEXT, "observation"].shape == (4,)


@pytest.mark.parametrize("key", ["move", ("arm", "move")])
def test_step_mdp_leaves_out_the_actions_that_it_is_told(key: str | tuple[str, str]) -> None:
    td = TensorDict({"seen": torch.zeros(1), NEXT: {"seen": torch.ones(1), "reward": torch.ones(1)}})
    root = step_mdp(td.set(key, torch.ones(1)), [key])
    assert root.get(key, None) is None
    assert root["seen"].item() == 1
