"""Torch's defaults of the user's process are the user's own: they do not reach what we allocate, nor our workers.

Each program runs without them and with them, and must come to the same. "meta" stands for any accelerator.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import actor, buffer, net, until
from gymnasium import spaces as gs
from kinds import AS_READY, EVERY, MIXED, SINGLE, SYNC, SYNC_HERE, Kind, over
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn

from swath.collectors.utils import split_trajectories
from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from swath.envs import AsyncEnvPool, EnvBase, GymEnv, ParallelEnv, SerialEnv, check_env
from swath.modules import InferenceServer, TanhNormal
from swath.testing import CountingEnv, CountingGymEnv, counting_envs

Program = Callable[[], list[Any]]
"""A program, and all that it came to: TensorDicts, tensors and what can be compared."""


@contextlib.contextmanager
def device_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def dtype_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[device_meta, dtype_double])
def same(request: pytest.FixtureRequest) -> Callable[[Program], None]:
    """Runs a program without and with a default of the process."""

    def compare(program: Program, exactly: bool = True) -> None:
        torch.manual_seed(0)
        expected = program()
        torch.manual_seed(0)
        with request.param():
            found = program()
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            assert type(one) is type(other)
            one, other = (_flat(each) for each in (one, other))
            assert list(one) == list(other)
            for key, value in one.items():
                if isinstance(value, Tensor):
                    assert (value.dtype, value.device) == (other[key].dtype, other[key].device), key
                    value, other[key] = (each.values() if each.is_nested else each for each in (value, other[key]))
                    assert torch.equal(value, other[key]) or not exactly, key
                    torch.testing.assert_close(value, other[key])
                else:
                    assert value == other[key]

    return compare


def _flat(value: Any) -> dict[Any, Any]:
    return dict(value.items(True, True)) if isinstance(value, TensorDictBase) else {"": value}


def gaussian() -> ProbabilisticTensorDictSequential:
    """A policy that is ours to compute, with noise drawn ahead."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), in_keys=["observation"], out_keys=["loc", "scale"]
        ),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=TanhNormal,
            distribution_kwargs={"low": -2.0, "high": 2.0},
            return_log_prob=True,
        ),
    )


class Clock(nn.Module):
    """Recurrent, and not known to us."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 2)

    def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(observation, state)
        return state, state


def recurrent() -> TensorDictModule:
    return TensorDictModule(Clock(), in_keys=["observation", "h"], out_keys=["action", ("next", "h")])


POLICIES = {"random": None, "linear": net(0.5), "categorical": actor(), "normal": gaussian(), "recurrent": recurrent()}
"""Made before the process has defaults: where a policy lies is up to the user."""


# -- collectors -----------------------------------------------------------------------------------------------------


def batches_of(kind: Kind, policy: str = "linear", count: int = 2, **options: Any) -> list[Any]:
    """Seeded batches of the first worker, which are the same however often they are collected."""
    workers = {} if kind.joins else {"workers": min(kind.workers, 1)}
    collector = kind.build(None, copy.deepcopy(POLICIES[policy]), **workers, **options)
    try:
        collector.set_seed(7)
        return [collector.next().clone() for _ in range(count)]
    finally:
        collector.shutdown()


@over(EVERY)
def test_collectors(kind: Kind, same: Any) -> None:
    same(lambda: batches_of(kind, max_frames_per_traj=3))


@pytest.mark.parametrize("policy", POLICIES)
@over([SINGLE, AS_READY])
def test_policies(kind: Kind, policy: str, same: Any) -> None:
    # For how many envs the policy acts at a time is chance where they have a pace of their own, and so is the rounding.
    same(lambda: batches_of(kind, policy, lanes=3), exactly=kind is not AS_READY)


@pytest.mark.parametrize(
    "options",
    [
        {"trajs_per_batch": 2, "frames_per_batch": 10},
        {"split_trajs": True},
        {"set_truncated": True, "compact_obs": True},
        {"init_random_frames": 20},
        {"policy_device": "cpu", "storing_device": "cpu"},
        {"post_collect_hook": lambda batch: batch.set("ones", torch.ones_like(batch["action"]))},
        {"reset_at_each_iter": True},
    ],
    ids=", ".join,
)
def test_options(options: dict[str, Any], same: Any) -> None:
    same(lambda: batches_of(SINGLE, lanes=2, **options))


@over([SYNC_HERE])
def test_workers_that_stop_early(kind: Kind, same: Any) -> None:
    same(lambda: batches_of(kind, count=1, lanes=2, preemptive_threshold=0.99999))


@over(MIXED)
def test_control(kind: Kind, same: Any) -> None:
    def program() -> list[Any]:
        collector, other = (kind.build(None, copy.deepcopy(POLICIES["linear"]), lanes=2) for _ in range(2))
        try:
            collector.set_seed(1)
            collector.update_policy_weights_({"module.bias": torch.full((2,), 3.0, device="cpu")})
            collector.reset([0])
            other.load_state_dict(collector.state_dict())
            return [other.policy_version, other.rollout()["action"][..., -1, 0].unique()]
        finally:
            collector.shutdown()
            other.shutdown()

    same(program)


@over([kind for kind in MIXED if kind.workers < 2])
def test_collecting_into_a_buffer(kind: Kind, same: Any) -> None:
    def program() -> list[Any]:
        kept = buffer(100)
        for options in ({"batches": 2}, {"total_frames": 20, "trajs_per_batch": 1}):
            collector = kind.build(None, copy.deepcopy(POLICIES["categorical"]), replay_buffer=kept, **options)
            collector.set_seed(3)
            for _ in collector:
                pass
            collector.shutdown()
        return [kept[:].exclude(("collector", "traj_ids"))]

    same(program)


@over([kind for kind in MIXED if kind.workers < 2])
def test_collecting_in_the_background(kind: Kind, same: Any) -> None:
    def program() -> list[Any]:
        kept = buffer(100)
        collector = kind.build(None, copy.deepcopy(POLICIES["linear"]), replay_buffer=kept, total_frames=20)
        collector.start()
        until(lambda: kept.write_count == 20)
        collector.shutdown()
        return [kept[:].exclude(("collector", "traj_ids"))]

    same(program)


class SaysDefaults(CountingEnv):
    """Tells, as its observation, whether the process that it runs in has defaults."""

    def _observe(self) -> dict[str, Any]:
        has_device = torch.get_default_device().type != "cpu"
        has_dtype = torch.get_default_dtype() != torch.float32
        return {"observation": super()._observe()["observation"] * 0 + has_device + 2 * has_dtype}


@over([kind for kind in EVERY if kind.workers and not kind.options])
def test_no_default_reaches_a_worker(kind: Kind, same: Any) -> None:
    def program() -> list[Any]:
        collector = kind.build(SaysDefaults)
        try:
            return [collector.next()["observation"].sum()]
        finally:
            collector.shutdown()

    same(program)


def test_a_default_device_of_a_fork_changes_nothing(same: Any) -> None:
    same(lambda: batches_of(SYNC, "categorical", mp_start_method="fork"))


# -- envs -----------------------------------------------------------------------------------------------------------


SPACES = {
    "discrete": gs.Discrete(3),
    "many": gs.MultiDiscrete([2, 3]),
    "bits": gs.MultiBinary(3),
    "box": gs.Box(-1, 1, (2,)),
    "half": gs.Box(np.array([0, -np.inf], np.float32), np.array([np.inf, np.inf], np.float32)),
}


class Spacious(CountingGymEnv):
    """Takes actions of many kinds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.action_space = gs.Dict(SPACES)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv(Spacious),
        lambda: GymEnv(Spacious, categorical_action_encoding=True),
        partial(CountingEnv, (2, 3), kind="dict"),
        lambda: SerialEnv(2, counting_envs(2)),
        lambda: ParallelEnv(2, counting_envs(2)),
        lambda: AsyncEnvPool(counting_envs(2)),
    ],
    ids=["gym", "categorical", "custom", "serial", "parallel", "async"],
)
def test_envs(make: Callable[[], EnvBase], same: Any) -> None:
    def program() -> list[Any]:
        env = make()
        try:
            env.set_seed(5)
            chosen = torch.zeros(*env.batch_size, 1, dtype=torch.bool, device="cpu")
            chosen.view(-1)[0] = True
            rollout = env.rollout(8, break_when_any_done=False)
            return [rollout, env.reset(TensorDict({"_reset": chosen}, env.batch_size)), env.fake_tensordict()]
        finally:
            env.close()

    same(program)


def test_envs_at_their_own_pace(same: Any) -> None:
    def program() -> list[Any]:
        env = AsyncEnvPool(counting_envs(2))
        try:
            env.async_reset()
            first = env.recv(min_ready=2)
            env.send(np.eye(2, dtype=np.int64), [0, 1])
            second = env.recv(min_ready=2)
            return [each[each["env_index"].argsort()] for each in (first, second)]
        finally:
            env.close()

    same(program)


def test_checking_an_env(same: Any) -> None:
    same(lambda: [check_env(GymEnv("CartPole-v1"))])


# -- data -----------------------------------------------------------------------------------------------------------


def rollout() -> TensorDictBase:
    """Frames `[2, 12]` of several episodes."""
    return SINGLE.build(lanes=2, steps=12, lengths=5).next().clone()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler,
        SamplerWithoutReplacement,
        partial(PrioritizedSampler, 50, 0.7, 0.5),
        partial(SliceSampler, num_slices=2),
        partial(SliceSampler, slice_len=2, strict_length=False, compile=False),
        partial(SliceSamplerWithoutReplacement, num_slices=2),
    ],
    ids=["random", "epochs", "prioritized", "slices", "short slices", "slice epochs"],
)
def test_buffers(storage: Any, sampler: Any, same: Any, tmp_path: Path) -> None:
    data, paths = rollout().reshape(-1), iter([tmp_path / "one", tmp_path / "two"])

    def program() -> list[Any]:
        buffers = [TensorDictReplayBuffer(storage=storage(50), sampler=sampler(), batch_size=8) for _ in range(2)]
        kept, loaded = buffers
        kept.extend(data)
        kept.add(data[3])
        sampled, _ = kept.sample(return_info=True)
        kept.update_tensordict_priority(sampled.set("td_error", torch.ones_like(sampled["next", "reward"])[..., 0]))
        kept[2] = data[1]
        path = next(paths)
        kept.dumps(path)
        loaded.loads(path)
        found = [sampled, kept.sample(), loaded.sample(4), kept[:], kept[[1, 2]], loaded[3]]
        loaded.load_state_dict(kept.state_dict())
        return [*found, loaded.sample()]

    same(program)


def test_plain_and_prioritized_buffers(same: Any) -> None:
    data = rollout()

    def program() -> list[Any]:
        plain = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
        plain.extend({"x": np.arange(6), "y": data["observation"][0, :6]})
        ranked = TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.5, storage=LazyTensorStorage(50, ndim=2), batch_size=4
        )
        ranked.extend(data)
        sampled, _ = ranked.sample(return_info=True)
        ranked.update_priority(sampled["index"], 2.0)
        ranked.update_priority(sampled["index"], np.ones(4))
        flat = plain.sample()
        return [flat["x"], flat["y"], sampled, ranked.sample()]

    same(program)


@pytest.mark.parametrize("as_nested", [False, True])
def test_splitting(as_nested: bool, same: Any) -> None:
    data = rollout()
    same(
        lambda: [
            split_trajectories(data, as_nested=as_nested),
            split_trajectories(data.exclude("collector"), as_nested=as_nested),
        ]
    )


# -- inference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("policy", ["linear", "normal"])
def test_inference(policy: str, backend: str, same: Any) -> None:
    def program() -> list[Any]:
        with InferenceServer(copy.deepcopy(POLICIES[policy]), backend=backend) as server:
            client = server.client()
            asked = TensorDict({"observation": torch.ones(3, device="cpu", dtype=torch.float32)}, [])
            answer = client(asked)
            return [answer.select("loc" if policy == "normal" else "action"), answer["action"].dtype]

    same(program)
