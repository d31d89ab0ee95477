"""The TensorDict surface of an env."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from counting_layouts import LAYOUTS
from gymnasium import spaces as gs
from tensordict import TensorDict, TensorDictBase

from swath.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv
from swath.errors import ClosedError, ShapeError
from swath.keys import NEXT, RESET
from swath.seeding import lane_seed
from swath.testing import CountingEnv, CountingGymEnv, counting_envs


def lanes(count: int = 3, **options: Any) -> EnvBase:
    return SerialEnv(count, counting_envs(count, **options))


# -- reset


@pytest.mark.parametrize("trailing", [(), (1,)])
def test_reset_begins_only_the_lanes_that_are_marked(trailing: tuple[int, ...]) -> None:
    env = lanes()
    td = env.rand_step(env.reset()).get(NEXT)
    mask = torch.tensor([True, False, True]).view(3, *trailing)
    assert env.reset(td.set(RESET, mask))["observation"].tolist() == [[0, 1, 0], [1, 0, 1], [2, 1, 0]]


def test_reset_of_no_lane_changes_nothing() -> None:
    env = lanes()
    td = env.rand_step(env.reset()).get(NEXT)
    again = env.reset(td.set(RESET, torch.zeros(3, 1, dtype=torch.bool)))
    assert torch.equal(again["observation"], td["observation"])
    assert again.get(RESET, None) is None


def test_reset_of_the_lanes_of_a_grid() -> None:
    env = CountingEnv((2, 3), lengths=9)
    td = env.rand_step(env.reset()).get(NEXT)
    mask = torch.zeros(2, 3, 1, dtype=torch.bool)
    mask[1, 0] = mask[0, 2] = True
    assert env.reset(td.set(RESET, mask))["observation"][..., 2].tolist() == [[1, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("shape", [(2, 1), (3, 2), (6,), (1, 3)])
def test_a_mask_of_a_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    env = lanes()
    with pytest.raises(ShapeError, match=r"'_reset' of shape .* but \(3, 1\) was expected"):
        env.reset(TensorDict({RESET: torch.ones(shape, dtype=torch.bool)}))


# -- step


def test_step_without_an_action_says_what_is_missing() -> None:
    env = lanes()
    with pytest.raises(KeyError, match=r"no 'action' .*'observation'.*rand_action"):
        env.step(env.reset())


def test_an_action_with_the_wrong_number_of_lanes_is_refused() -> None:
    env = lanes()
    td = TensorDict({"action": torch.zeros(2, 2)})
    with pytest.raises(ShapeError, match=r"'action'"):
        env.step(td)


def test_step_and_maybe_reset_gives_what_the_next_step_begins_from() -> None:
    env = lanes(2, lengths=[[1], [5]])
    stepped, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert stepped[NEXT, "observation"].tolist() == [[0, 0, 1], [1, 0, 1]]
    assert stepped[NEXT, "done"].tolist() == [[True], [False]]
    assert root["observation"].tolist() == [[0, 1, 0], [1, 0, 1]]
    assert not root["done"].any()


def test_rand_step_makes_its_own_tensordict() -> None:
    env = lanes()
    env.reset()
    assert env.rand_step()[NEXT, "observation"][:, 2].tolist() == [1, 1, 1]


# -- rollout


def test_rollout_ends_with_the_first_end() -> None:
    td = lanes(2, lengths=[[4], [6]]).rollout(10)
    assert td.shape == (2, 4)
    assert td.names == [None, "time"]
    assert td[NEXT, "done"][0, -1]
    assert not td[NEXT, "done"][1].any()


def test_rollout_goes_on_behind_the_end_if_asked() -> None:
    td = lanes(2, lengths=[[4], [6]]).rollout(10, break_when_any_done=False)
    assert td["observation"][0, :, 2].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert td[NEXT, "observation"][1, :, 2].tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]


def test_rollout_does_not_reset_behind_its_last_step() -> None:
    inner = CountingGymEnv(lengths=3)
    GymEnv(inner).rollout(10)
    assert (inner.episode, inner.count) == (0, 3)


def test_rollout_calls_the_policy_without_gradients() -> None:
    weight = torch.ones(3, 2, requires_grad=True)

    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", td["observation"] @ weight)

    td = GymEnv(CountingGymEnv()).rollout(3, policy)
    assert not td["action"].requires_grad
    assert td["action"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_rollout_continues_from_a_given_step() -> None:
    env = lanes(2, lengths=20)
    first = env.rollout(3)
    root = first[:, -1].get(NEXT).select("observation")
    second = env.rollout(3, auto_reset=False, tensordict=root)
    assert second["observation"][:, :, 2].tolist() == [[3, 4, 5]] * 2
    assert second["observation"][:, :, 1].eq(0).all()


def test_rollout_that_continues_begins_finished_lanes_anew() -> None:
    env = lanes(2, lengths=[[3], [9]])
    first = env.rollout(5)
    second = env.rollout(2, auto_reset=False, tensordict=first[:, -1].get(NEXT))
    assert second["observation"][:, :, 2].tolist() == [[0, 1], [3, 4]]


def test_rollout_resets_the_lanes_that_are_marked() -> None:
    env = lanes(2, lengths=20)
    root = env.rollout(3)[:, -1].get(NEXT).clone().set(RESET, torch.tensor([[True], [False]]))
    assert env.rollout(2, tensordict=root)["observation"][:, :, 2].tolist() == [[0, 1], [3, 4]]


def test_wrong_arguments_of_rollout_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensordict=env\.reset"):
        lanes().rollout(3, auto_reset=False)
    with pytest.raises(ValueError, match="max_steps must be at least 1"):
        lanes().rollout(0)


# -- seeds


def test_set_seed_returns_a_seed_for_the_next_env() -> None:
    assert GymEnv("CartPole-v1").set_seed(5) == lane_seed(5, 1)
    assert lanes(3).set_seed(5) == lane_seed(5, 3)
    assert lanes(3).set_seed(5, static_seed=True) == 5
    env = lanes(3)
    env.first_lane = 6
    assert env.set_seed(5) == lane_seed(5, 9)


def test_a_seed_counts_once() -> None:
    env = GymEnv("CartPole-v1")
    env.set_seed(1)
    first, second = env.reset()["observation"], env.reset()["observation"]
    assert not torch.equal(first, second)
    env.set_seed(1)
    assert torch.equal(env.reset()["observation"], first)
    assert torch.equal(env.reset()["observation"], second)


def test_state_dict_begins_anew_without_repeating() -> None:
    env = GymEnv("CartPole-v1")
    env.set_seed(1)
    first = env.reset()["observation"]
    state = env.state_dict()
    assert state == {"seed": 1}
    restored = []
    for _ in range(2):
        other = GymEnv("CartPole-v1")
        other.load_state_dict(state)
        restored.append(other.reset()["observation"])
    assert torch.equal(restored[0], restored[1])
    assert not torch.equal(restored[0], first)
    unseeded = GymEnv("CartPole-v1")
    unseeded.load_state_dict(GymEnv("CartPole-v1").state_dict())
    assert unseeded.state_dict() == {"seed": None}


# -- layout


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["vector", "dict", "pixels"])
def test_fake_tensordict_has_the_layout_of_a_real_step(name: str, kind: str) -> None:
    with LAYOUTS[name](2, kind=kind) as env:
        real, fake = env.rand_step(env.reset()), env.fake_tensordict()
    assert fake.batch_size == real.batch_size
    keys = set(real.keys(True, True))
    assert set(fake.keys(True, True)) == keys
    for key in keys:
        assert fake.get(key).shape == real.get(key).shape, key
        assert fake.get(key).dtype == real.get(key).dtype, key
        assert not fake.get(key).any()


def test_fake_tensordict_of_a_scalar_action() -> None:
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    assert env.fake_tensordict()["action"].shape == env.rand_action()["action"].shape == ()


@pytest.mark.parametrize("make", [lambda: GymEnv("CartPole-v1", device="cpu"), lambda: CpuEnv((2,))])
def test_a_given_device_is_told(make: Any) -> None:
    env = make()
    assert env.device == torch.device("cpu")
    td = env.rand_step(env.reset())
    assert td.device == td.get(NEXT).device == env.fake_tensordict().device == torch.device("cpu")
    assert env.rollout(3).device == torch.device("cpu")


class CpuEnv(CountingEnv):
    """A custom env on a device."""

    def __init__(self, batch_size: Any) -> None:
        super().__init__(batch_size)
        self.device = torch.device("cpu")


def test_without_a_device_none_is_told() -> None:
    assert lanes().reset().device is None


def test_serial_env_takes_the_device_of_its_envs() -> None:
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1", device="cpu"))
    assert env.device == env.reset().device == torch.device("cpu")


def test_keys_and_spaces_are_told() -> None:
    env = GymEnv(CountingGymEnv(kind="dict"))
    assert env.observation_keys == ["count", ("inner", "step")]
    assert (env.action_keys, env.action_key, env.reward_key) == (["action"], "action", "reward")
    assert env.done_keys == ["done", "terminated", "truncated"]
    assert env.action_space.n == 2  # type: ignore[attr-defined]
    assert set(env.observation_space.spaces) == {"count", "inner"}  # type: ignore[attr-defined]


# -- closing


def test_closed_envs_say_so() -> None:
    env = lanes()
    td = env.rand_action(env.reset())
    env.close()
    env.close()
    assert env.is_closed
    for call in (env.reset, lambda: env.step(td), env.rand_step, lambda: env.rollout(2)):
        with pytest.raises(ClosedError, match="is closed"):
            call()
    with pytest.raises(ClosedError, match="closed already"):
        env.close(raise_if_closed=True)


def test_a_with_block_closes() -> None:
    with pytest.raises(RuntimeError, match="stop"), lanes() as env:
        raise RuntimeError("stop")
    assert env.is_closed


# -- calls go on from each other, and what they hand out is the caller's own

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
