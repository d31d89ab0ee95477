"""The same seed gives the same batches, bit by bit, and nobody else's random numbers are disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from swath.collectors import Collector
from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.modules import TanhNormal
from swath.seeding import lane_seed, next_seed

IDS = ("collector", "traj_ids")


def mlp(inputs: int, outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def categorical() -> Any:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(mlp(4, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


class Scale(nn.Module):
    def forward(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc, scale = both.chunk(2, -1)
        return loc, scale.exp()


def tanh_normal() -> Any:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(mlp(3, 2), Scale()), in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"], out_keys=["action"], distribution_class=TanhNormal, return_log_prob=True
        ),
    )


def opaque() -> Callable[[TensorDictBase], TensorDictBase]:
    """A function of a TensorDict that draws from torch's own generator."""
    net = mlp(4, 2)

    def policy(td: TensorDictBase) -> TensorDictBase:
        choice = Categorical(logits=net(td.get("observation"))).sample()
        return td.set("action", nn.functional.one_hot(choice, 2))

    return policy


def noisy() -> Any:
    """Draws from torch's own generator inside a module."""

    class Noise(nn.Module):
        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            return logits + torch.randn_like(logits)

    return TensorDictSequential(
        TensorDictModule(mlp(4, 2), in_keys=["observation"], out_keys=["logits"]),
        TensorDictModule(Noise(), in_keys=["logits"], out_keys=["action"]),
    )


POLICIES: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "random": (lambda: None, "CartPole-v1", {}),
    "random box": (lambda: None, "Pendulum-v1", {}),
    "categorical, fast": (categorical, "CartPole-v1", {}),
    "categorical, module by module": (categorical, "CartPole-v1", {"fast_policy": False}),
    "categorical, trusted": (categorical, "CartPole-v1", {"trust_policy": True}),
    "tanh-normal": (tanh_normal, "Pendulum-v1", {}),
    "a function of a TensorDict": (opaque, "CartPole-v1", {}),
    "a module that draws": (noisy, "CartPole-v1", {}),
    "random at first": (categorical, "CartPole-v1", {"init_random_frames": 30}),
}
ENVS: dict[str, Callable[[str], Any]] = {
    "one env": lambda name: GymEnv(name, categorical_action_encoding="Pole" in name),
    "SerialEnv": lambda name: SerialEnv(3, lambda: GymEnv(name, categorical_action_encoding="Pole" in name)),
    "num_envs": lambda name: GymEnv(name, num_envs=3, categorical_action_encoding="Pole" in name),
    "SyncVectorEnv": lambda name: GymEnv(
        gymnasium.make_vec(name, num_envs=3, vectorization_mode="sync"), categorical_action_encoding="Pole" in name
    ),
    "vector entry point": lambda name: GymEnv(
        gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"),
        categorical_action_encoding=True,
    ),
}


def make(policy: str, env: str, **options: Any) -> Collector:
    build, name, more = POLICIES[policy]
    if policy in ("a function of a TensorDict", "a module that draws"):
        made = GymEnv(name) if env == "one env" else SerialEnv(3, lambda: GymEnv(name))
    else:
        made = ENVS[env](name)
    return Collector(made, build(), **{"frames_per_batch": 24, **more, **options})


def same(first: TensorDictBase, second: TensorDictBase, *, but_ids: bool = False) -> None:
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key, value in first.items(True, True):
        if not (but_ids and key == IDS):
            assert torch.equal(value, second.get(key)), key


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("env", ["one env", "SerialEnv"])
def test_seeded_at_the_start_two_collectors_agree_in_every_bit(policy: str, env: str) -> None:
    first, second = make(policy, env), make(policy, env)
    first.set_seed(5)
    torch.rand(7)  # what the trainer draws
    second.set_seed(5)
    drawn = set()
    for _ in range(4):
        one = first.next()
        torch.rand(3)
        two = second.next()
        assert one is not None
        assert two is not None
        same(one, two)
        drawn.add(str(one.get("action").tolist()))
    assert len(drawn) == 4, "every batch must have random numbers of its own"


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("env", ["one env", "SerialEnv"])
def test_seeded_in_the_middle_batches_are_those_from_the_start(policy: str, env: str) -> None:
    first, second = make(policy, env), make(policy, env)
    for _ in range(3):  # more frames than the random ones at first
        second.next()
    if policy == "random at first":
        for _ in range(3):
            first.next()
    first.set_seed(5)
    second.set_seed(5)
    for _ in range(4):
        one = first.next()
        torch.rand(3)
        two = second.next()
        assert one is not None
        assert two is not None
        same(one, two, but_ids=True)


@pytest.mark.parametrize("env", sorted(ENVS))
def test_every_kind_of_env_is_seeded(env: str) -> None:
    first, second = make("categorical, fast", env), make("categorical, fast", env)
    second.next()
    first.set_seed(9)
    second.set_seed(9)
    for _ in range(5):
        one, two = first.next(), second.next()
        assert one is not None
        assert two is not None
        same(one, two, but_ids=True)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_another_seed_gives_other_batches(policy: str) -> None:
    first, second = make(policy, "SerialEnv"), make(policy, "SerialEnv")
    first.set_seed(1)
    second.set_seed(2)
    one, two = first.next(), second.next()
    assert one is not None
    assert two is not None
    assert not torch.equal(one.get("observation"), two.get("observation"))
    assert not torch.equal(one.get("action"), two.get("action"))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_collecting_after_set_seed_leaves_the_global_generators_alone(policy: str) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    collector = make(policy, "SerialEnv")
    collector.set_seed(5)
    before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()
    for _ in range(3):
        collector.next()
    collector.set_seed(6)
    collector.next()
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == legacy).all()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_without_set_seed_the_global_generator_decides(policy: str) -> None:
    def actions(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        collector = make(policy, "one env")
        collector.env.set_seed(1)
        collector.reset()
        torch.manual_seed(seed)
        batches = [collector.next() for _ in range(3)]
        return torch.cat([batch.get("action") for batch in batches if batch is not None])

    assert torch.equal(actions(1), actions(1))
    assert not torch.equal(actions(1), actions(2))


@pytest.mark.parametrize("moment", ["at the start", "in the middle"])
@pytest.mark.parametrize("options", [{}, {"reset_at_each_iter": True}], ids=["", "reset_at_each_iter"])
def test_the_first_observation_after_set_seed_is_the_envs(moment: str, options: dict[str, Any]) -> None:
    collector = make("random", "one env", **options)
    if moment == "in the middle":
        collector.next()
        collector.next()
    collector.set_seed(11)
    batch = collector.next()
    assert batch is not None
    expected, _ = gymnasium.make("CartPole-v1").reset(seed=11)
    np.testing.assert_array_equal(batch.get("observation")[0].numpy(), expected)


def test_lanes_are_seeded_by_their_index() -> None:
    collector = Collector(SerialEnv(8, lambda: GymEnv("CartPole-v1")), None, frames_per_batch=80)
    collector.set_seed(21)
    batch = collector.next()
    assert batch is not None
    for lane in range(8):
        env = gymnasium.make("CartPole-v1")
        observation, _ = env.reset(seed=lane_seed(21, lane))
        for frame in batch[lane]:
            np.testing.assert_array_equal(frame.get("observation").numpy(), observation)
            observation, reward, terminated, truncated, _ = env.step(int(frame.get("action").argmax()))
            np.testing.assert_array_equal(frame.get(("next", "observation")).numpy(), observation)
            assert float(frame.get(("next", "reward"))) == reward
            if terminated or truncated:
                observation, _ = env.reset()


def test_static_seed_gives_every_lane_the_same() -> None:
    collector = Collector(SerialEnv(3, lambda: GymEnv("CartPole-v1")), None, frames_per_batch=12)
    assert collector.set_seed(4, static_seed=True) == 4
    batch = collector.next()
    assert batch is not None
    first = batch.get("observation")[:, 0]
    assert torch.equal(first, first[:1].expand_as(first))


def test_the_returned_seed_is_one_that_no_lane_has() -> None:
    collector = Collector(SerialEnv(3, lambda: GymEnv("CartPole-v1")), None, frames_per_batch=12)
    following = collector.set_seed(4)
    assert following == next_seed(4, 3)
    assert following not in [lane_seed(4, lane) for lane in range(3)]
    assert collector.set_seed(4) == following


def test_episodes_from_before_set_seed_are_not_delivered_after_it() -> None:
    def run(warm: int) -> list[TensorDictBase]:
        collector = make("random", "SerialEnv", trajs_per_batch=4, traj_format="cat")
        for _ in range(warm):
            collector.next()
        collector.set_seed(2)
        return [batch for batch in (collector.next() for _ in range(3)) if batch is not None]

    for one, two in zip(run(0), run(2), strict=True):
        same(one, two, but_ids=True)


class Drawing(EnvBase):
    """Draws from torch's own generator in reset and step, and seeds it, as many envs written for TorchRL do."""

    def __init__(self, seeds_itself: bool) -> None:
        super().__init__(gs.Box(-np.inf, np.inf, (2,), np.float32), gs.Discrete(2), batch_size=(2,))
        self.seeds_itself = seeds_itself

    def _set_seed(self, seed: int) -> None:
        if self.seeds_itself:
            torch.manual_seed(seed)

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict({"observation": torch.rand(2, 2)}, batch_size=[2])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        ended = torch.rand(2, 1) < 0.2
        return TensorDict(
            {"observation": torch.rand(2, 2), "reward": torch.rand(2, 1), "terminated": ended}, batch_size=[2]
        )


@pytest.mark.parametrize("seeds_itself", [True, False])
def test_envs_that_draw_from_torchs_own_generator_are_repeatable_too(seeds_itself: bool) -> None:
    def run(warm: int, drawn: int) -> list[TensorDictBase]:
        collector = Collector(Drawing(seeds_itself), None, frames_per_batch=10)
        for _ in range(warm):
            collector.next()
        torch.rand(drawn)
        before = torch.get_rng_state()
        collector.set_seed(8)
        batches = [collector.next() for _ in range(3)]
        assert torch.equal(torch.get_rng_state(), before), "the trainer's generator was disturbed"
        return [batch for batch in batches if batch is not None]

    for one, two in zip(run(0, 1), run(2, 5), strict=True):
        same(one, two, but_ids=True)


def test_a_restored_collector_goes_on_with_the_random_stream() -> None:
    """Envs begin anew, but two that are restored from one state agree."""
    first = make("categorical, fast", "SerialEnv")
    first.set_seed(5)
    first.next()
    state = first.state_dict()
    restored = []
    for _ in range(2):
        collector = make("categorical, fast", "SerialEnv")
        torch.rand(4)
        collector.load_state_dict(state)
        restored.append([collector.next() for _ in range(2)])
    for one, two in zip(*restored, strict=True):
        assert one is not None
        assert two is not None
        same(one, two)
