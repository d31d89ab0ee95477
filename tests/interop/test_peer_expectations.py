"""What code that was written for TorchRL's collectors relies on, beyond the layout of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from swath.collectors import Collector, MultiSyncCollector, ProfileConfig
from swath.envs import GymEnv, SerialEnv
from swath.testing import CountingEnv

pytest.importorskip("torchrl")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.torchrl]

from torchrl import modules as peer_modules  # noqa: E402
from torchrl.data import Composite, Unbounded  # noqa: E402
from torchrl.envs import EnvBase as PeerEnv  # noqa: E402
from torchrl.envs import SerialEnv as PeerSerialEnv  # noqa: E402
from torchrl.testing import mocking_classes as mocks  # noqa: E402

CPU = torch.device("cpu")


# -- policies that wait for their env --------------------------------------------------------------------------


def peer_env(lanes: int) -> Any:
    return PeerSerialEnv(lanes, mocks.ContinuousActionVecMockEnv) if lanes else mocks.ContinuousActionVecMockEnv()


@pytest.mark.parametrize("trust", [None, True])
@pytest.mark.parametrize("lanes", [0, 2])
def test_a_random_policy_without_a_spec_takes_that_of_the_env(lanes: int, trust: bool | None) -> None:
    policy = peer_modules.RandomPolicy()
    with Collector(peer_env(lanes), policy, frames_per_batch=6, total_frames=6, trust_policy=trust) as collector:
        assert policy.action_spec is not None  # the one that was given, not a copy
        assert collector.next()["action"].any()


def test_so_does_one_that_a_factory_makes_or_that_is_sent_to_workers() -> None:
    env, options = mocks.ContinuousActionVecMockEnv, {"frames_per_batch": 6, "total_frames": 6}
    for collector in (
        Collector(env, policy_factory=peer_modules.RandomPolicy, **options),
        MultiSyncCollector([env] * 2, peer_modules.RandomPolicy(), **options),
    ):
        with collector:
            assert collector.next()["action"].any()


@pytest.mark.parametrize("lanes", [0, 2])
def test_so_does_noise_inside_a_policy(lanes: int) -> None:
    linear = TensorDictModule(nn.Linear(7, 7), in_keys=["observation"], out_keys=["action"])
    policy = TensorDictSequential(linear, peer_modules.AdditiveGaussianModule(spec=None))
    with Collector(peer_env(lanes), policy, frames_per_batch=6, total_frames=6) as collector:
        assert collector.next().numel() == 6


# -- the device that a policy is told --------------------------------------------------------------------------


class Seeing(TensorDictModuleBase):
    """Notes the device that its TensorDicts say they are on."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.seen: set[torch.device | None] = set()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.seen.add(tensordict.device)
        return tensordict.set("action", torch.zeros(*tensordict.shape, 1))


@pytest.mark.parametrize("trust", [None, True])
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ({}, None),
        ({"env_device": "cpu"}, None),
        ({"storing_device": "cpu"}, None),
        ({"policy_device": "cpu"}, CPU),
        ({"device": "cpu"}, CPU),
    ],
)
def test_the_policy_is_told_the_device_that_was_asked_for(
    devices: dict[str, str], expected: torch.device | None, lanes: int, trust: bool | None
) -> None:
    env = SerialEnv(lanes, lambda: GymEnv("Pendulum-v1")) if lanes else GymEnv("Pendulum-v1")
    policy = Seeing()
    with Collector(env, policy, frames_per_batch=4, total_frames=8, trust_policy=trust, **devices) as collector:
        assert sum(batch.numel() for batch in collector) == 8
    assert policy.seen == {expected}


@pytest.mark.parametrize("fast", [True, False])
def test_the_policy_does_the_same_whether_its_own_place_is_named_or_not(fast: bool) -> None:
    batches = []
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    for device in (None, "cpu"):
        env = GymEnv("Pendulum-v1")
        options: dict[str, Any] = {"policy_device": device, "fast_policy": fast, "total_frames": 5}
        with Collector(env, policy, frames_per_batch=5, **options) as collector:
            collector.set_seed(3)
            batches.append(collector.next())
    assert torch.equal(batches[0]["action"], batches[1]["action"])


# -- flags that are numbers ------------------------------------------------------------------------------------


class NumberFlags(PeerEnv):
    """Its flags are of the default dtype, which TorchRL reads as True and False. Every third step ends an episode."""

    def __init__(self) -> None:
        super().__init__()
        self.action_spec = Composite(action=Unbounded((1,)))
        self.reward_spec = Composite(reward=Unbounded((1,)))
        self.done_spec = Composite(done=Unbounded((1,)))
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.count = 0

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        self.count = 0
        return self._answer()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        return self._answer().set("reward", torch.ones(1))

    def _answer(self) -> TensorDictBase:
        ends = torch.tensor([float(self.count == 3)])
        flags = {"done": ends, "terminated": ends.clone(), "truncated": torch.zeros(1)}
        return TensorDict({"observation": torch.tensor([float(self.count)]), **flags})

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random."""


def test_flags_may_be_declared_as_numbers() -> None:
    with Collector(NumberFlags(), None, frames_per_batch=7, total_frames=7) as collector:
        batch = collector.next()
    assert batch["next", "terminated"].dtype == torch.bool
    assert batch["next", "done"].squeeze(-1).tolist() == [False, False, True, False, False, True, False]
    assert not batch["next", "truncated"].any()
    assert batch["observation"].squeeze(-1).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_the_error_of_such_an_env_is_its_own() -> None:
    collector = Collector(mocks.EnvThatErrorsAfter10Iters, None, frames_per_batch=30, total_frames=60)
    with pytest.raises(RuntimeError, match="max steps"):
        collector.next()


# -- hooks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pre_collect_hook", "post_collect_hook"])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_what_cannot_be_called_is_no_hook(kind: Any, name: str) -> None:
    with kind(CountingEnv if kind is Collector else [CountingEnv], frames_per_batch=3) as collector:
        with pytest.raises(TypeError, match=f"{name} must be callable or None, got 3"):
            setattr(collector, name, 3)
        assert collector.next().numel() == 3


# -- arguments and answers ---------------------------------------------------------------------------------------


def test_a_recurrent_policy_gets_its_state_whatever_is_said_of_transforms() -> None:
    names = {"in_keys": ["observation", "memory", "is_init"], "out_keys": ["features", ("next", "memory")]}
    for value in (None, True, False):
        gru = peer_modules.GRUModule(input_size=4, hidden_size=8, **names)
        policy = TensorDictSequential(gru, TensorDictModule(nn.Linear(8, 2), ["features"], ["action"]))
        options: dict[str, Any] = {"frames_per_batch": 40, "auto_register_policy_transforms": value}
        with Collector(GymEnv("CartPole-v1"), policy, **options) as collector:
            batch = collector.next()
        begins = batch["is_init"].squeeze(-1)
        assert begins[0]
        assert not batch["memory"][begins].any()
        assert batch["memory"][~begins].any()


def test_a_profile_says_what_it_will_do() -> None:
    config = ProfileConfig(workers=[0, 2], activities=["cpu"], save_path="traces/{worker_idx}/trace.json")
    assert [config.should_profile_worker(index) for index in range(3)] == [True, False, True]
    assert config.get_save_path(2) == Path("traces/2/trace.json")
    assert ProfileConfig().get_save_path(worker_idx=0) == Path("collector_profile_0.json")
    assert config.get_activities() == [torch.profiler.ProfilerActivity.CPU]


def test_refusals_can_be_told_apart_by_their_words() -> None:
    env = CountingEnv()
    with pytest.raises(ValueError, match=r"num_rollouts.*must be greater"):
        ProfileConfig(num_rollouts=2, warmup_rollouts=2)
    with pytest.raises(ValueError, match="warmup_rollouts must be >= 0"):
        ProfileConfig(warmup_rollouts=-1)
    with pytest.raises(ValueError, match="must be 'padded' or 'cat'"):
        Collector(env, frames_per_batch=4, trajs_per_batch=1, traj_format="flat")
    with Collector(env, frames_per_batch=4) as collector:
        collector.next()
        with pytest.raises(ValueError, match="same length"):
            collector.map_fn("get_distant_attr", [("env",)], [{}, {}])
        with pytest.raises(RuntimeError, match="Cannot enable profiling after iteration"):
            collector.enable_profile()
    workers = MultiSyncCollector([CountingEnv] * 2, frames_per_batch=4)
    with workers, pytest.raises(ValueError, match="Expected 2 argument entries"):
        workers.map_fn("get_distant_attr", [("env",)])
