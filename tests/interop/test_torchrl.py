"""TorchRL's envs in our collector, and our batches beside TorchRL's."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from peer_batches import layout
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv
from swath.errors import UnsupportedEnvError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer_collectors = pytest.importorskip("torchrl.collectors")
    peer_envs = pytest.importorskip("torchrl.envs")
    peer_modules = pytest.importorskip("torchrl.modules")
    mocks = pytest.importorskip("torchrl.testing.mocking_classes")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("lanes", [0, 3])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 7}, {"compact_obs": True}, {"track_traj_ids": False}])
def test_batches_have_the_peers_layout(name: str, lanes: int, options: dict[str, Any]) -> None:
    theirs: Any = peer_envs.GymEnv(name)
    ours: Any = GymEnv(name)
    if lanes:
        theirs = peer_envs.SerialEnv(lanes, lambda: peer_envs.GymEnv(name))
        ours = SerialEnv(lanes, lambda: GymEnv(name))
    size = {"frames_per_batch": 12, "total_frames": 24, **options}
    their_batch = next(iter(peer_collectors.Collector(theirs, None, **size)))
    our_batch = next(iter(Collector(ours, None, **size)))
    assert layout(our_batch) == layout(their_batch)
    assert our_batch.names == their_batch.names
    assert our_batch.device == their_batch.device


ENVS = {
    "counting": lambda: mocks.CountingEnv(max_steps=5),
    "counting batched": lambda: mocks.CountingEnv(max_steps=5, batch_size=[3]),
    "serial": lambda: peer_envs.SerialEnv(3, lambda: mocks.CountingEnv(max_steps=5)),
    "gym": lambda: peer_envs.GymEnv("CartPole-v1"),
    "continuous": lambda: mocks.ContinuousActionVecMockEnv(),
    "discrete": lambda: mocks.DiscreteActionVecMockEnv(),
    "pixels": lambda: mocks.DiscreteActionConvMockEnv(),
    "transformed": lambda: peer_envs.TransformedEnv(
        peer_envs.GymEnv("Pendulum-v1"), peer_envs.Compose(peer_envs.StepCounter(7), peer_envs.RewardSum())
    ),
    "stateless": lambda: peer_envs.PendulumEnv(),
}


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS.keys())
def test_a_torchrl_env_is_collected_from(make: Any) -> None:
    batches = list(Collector(make, None, frames_per_batch=12, total_frames=36))
    assert sum(batch.numel() for batch in batches) == 36
    for before, behind in itertools.pairwise(batches):
        root = set(before.exclude("next", "collector", "action").keys(True, True))
        for key in root & set(before.get("next").keys(True, True)) - {"done", "terminated", "truncated"}:
            seen = torch.cat([before.get(key), behind.get(key)], len(before.shape) - 1)
            path = ("next", key) if isinstance(key, str) else ("next", *key)
            happened = torch.cat([before.get(path), behind.get(path)], len(before.shape) - 1)
            done = torch.cat([before["next", "done"], behind["next", "done"]], len(before.shape) - 1)[..., :-1, 0]
            steps = len(before.shape) - 1
            later = seen.narrow(steps, 1, seen.shape[steps] - 1)[~done]
            assert torch.equal(happened.narrow(steps, 0, seen.shape[steps] - 1)[~done], later), key


def test_a_counting_env_counts_in_every_lane() -> None:
    class Forward(torch.nn.Module):
        in_keys = ("observation",)
        out_keys = ("action",)

        def forward(self, td: TensorDictBase) -> TensorDictBase:
            return td.set("action", torch.ones(*td.batch_size, 1))

    env = peer_envs.SerialEnv(2, lambda: mocks.CountingEnv(max_steps=3))
    batch = next(iter(Collector(env, Forward(), frames_per_batch=20, total_frames=20)))
    assert batch["observation"][..., 0].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]] * 2
    assert batch["next", "observation"][..., 0].tolist() == [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]] * 2
    assert batch["collector", "traj_ids"].tolist() == [[0] * 4 + [2] * 4 + [4] * 2, [1] * 4 + [3] * 4 + [5] * 2]


def test_an_env_with_nested_rewards_is_refused_in_a_sentence() -> None:
    with pytest.raises(UnsupportedEnvError, match="flags at the root"):
        Collector(mocks.NestedCountingEnv(), None, frames_per_batch=10)


def test_max_frames_per_traj_and_an_env_that_counts_steps_itself() -> None:
    with pytest.raises(ValueError, match="step_count"):
        Collector(ENVS["transformed"], None, frames_per_batch=10, max_frames_per_traj=3)


def test_set_truncated_needs_a_truncated_entry() -> None:
    with pytest.raises(RuntimeError, match="truncated"):
        Collector(mocks.CountingEnv(max_steps=3), None, frames_per_batch=10, set_truncated=True)


def test_seeded_torchrl_envs_repeat_themselves() -> None:
    def run() -> TensorDictBase:
        collector = Collector(ENVS["gym"], None, frames_per_batch=50, total_frames=50)
        collector.set_seed(7)
        return next(iter(collector))

    assert (run() == run()).all()


@pytest.mark.parametrize("bias", [0.0, 3.0])
@pytest.mark.parametrize("kind", [InteractionType.RANDOM, InteractionType.DETERMINISTIC])
def test_torchrls_squashed_normal_is_sampled_quickly_and_rightly(bias: float, kind: InteractionType) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2), NormalParamExtractor())
    with torch.no_grad():
        net[2].bias += bias
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=peer_modules.TanhNormal,
            distribution_kwargs={"low": -2.0, "high": 2.0},
            return_log_prob=True,
        ),
    )
    collector = Collector(
        SerialEnv(2, lambda: GymEnv("Pendulum-v1")),
        policy,
        frames_per_batch=200,
        total_frames=200,
        exploration_type=kind,
    )
    batch = collector.next()
    assert batch is not None
    assert collector.policy_stages == ["MLPStage", "NormalStage"]
    wanted = policy.get_dist(batch).log_prob(batch["action"])
    torch.testing.assert_close(batch["action_log_prob"], wanted, atol=1e-4, rtol=1e-4)
    if kind is InteractionType.DETERMINISTIC:
        torch.testing.assert_close(batch["action"], policy.get_dist(batch).deterministic_sample)


@pytest.mark.parametrize("make", [lambda: GymEnv("CartPole-v1"), lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1"))])
def test_transforms_around_our_envs_are_refused_at_once(make: Any) -> None:
    with pytest.raises(UnsupportedEnvError, match=r"TransformedEnv wraps envs of TorchRL, not .*torchrl.envs.GymEnv"):
        peer_envs.TransformedEnv(make(), peer_envs.RewardSum())
