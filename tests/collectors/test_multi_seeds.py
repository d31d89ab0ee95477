"""Seeds belong to lanes: the same seed gives the same episodes however lanes are spread over workers. And ids."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.workers import WorkerRestartedWarning
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymEnv, SerialEnv
from swath.keys import TRAJ_IDS
from swath.rollout.trajectories import WORKER_BITS
from swath.testing import CountingEnv


class Noisy(gym.Env[Any, Any]):
    """Observations, rewards and episode lengths come from the env's own generator."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def _observed(self) -> Any:
        return self.np_random.standard_normal(3).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        reward = float(action[0]) + float(self.np_random.standard_normal())
        return self._observed(), reward, bool(self.np_random.random() < 0.1), False, {}


def lanes(count: int) -> Callable[[], Any]:
    return lambda: SerialEnv(count, lambda: GymEnv(Noisy()))


def policy(observation: torch.Tensor) -> torch.Tensor:
    """The same for an observation in whichever batch it is."""
    return torch.tanh(observation[..., :1])


def stochastic() -> nn.Module:
    return TensorDictSequential(
        TensorDictModule(
            nn.Sequential(nn.Linear(3, 2), NormalParamExtractor()), in_keys=["observation"], out_keys=["loc", "scale"]
        ),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"], out_keys=["action"], distribution_class=torch.distributions.Normal
        ),
    )


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Any] = []

    def build(kind: Any, *args: Any, **options: Any) -> Any:
        made.append(kind(*args, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


def collected(collector: Any, seed: int | None, count: int = 3) -> TensorDictBase:
    """Batches one after the other as `[lanes, T]`, without what tells workers apart."""
    if seed is not None:
        collector.set_seed(seed)
    batches = [collector.next() for _ in range(count)]
    rows = [batch.reshape(-1, batch.shape[-1]) for batch in batches]
    return torch.cat(rows, 1).exclude("collector", "policy_version", ("next", "policy_version"))


def equal(first: TensorDictBase, second: TensorDictBase) -> bool:
    return bool((first == second).all())


def test_the_same_episodes_in_1x8_2x4_and_8x1(make: Any) -> None:
    whole = collected(make(Collector, lanes(8), policy, frames_per_batch=80), 7)
    assert whole["next", "done"].any(), "episodes must end for this to tell anything"
    for workers, own in ((2, lanes(4)), (8, lambda: GymEnv(Noisy()))):
        spread = collected(make(MultiSyncCollector, [own] * workers, policy, frames_per_batch=80), 7)
        assert equal(spread, whole), f"{workers} workers"


def test_async_workers_have_the_same_episodes(make: Any) -> None:
    whole = collected(make(Collector, lanes(4), policy, frames_per_batch=40), 7, 4)
    collector = make(MultiAsyncCollector, [lanes(2)] * 2, policy, frames_per_batch=20)
    collector.set_seed(7)
    parts: dict[int, list[TensorDictBase]] = {0: [], 1: []}
    while min(len(own) for own in parts.values()) < 4:
        batch = collector.next()
        parts[int(batch[TRAJ_IDS][0, 0] >> WORKER_BITS)].append(batch)
    for index, own in parts.items():
        found = torch.cat(own[:4], 1).exclude("collector", "policy_version", ("next", "policy_version"))
        assert equal(found, whole[2 * index : 2 * index + 2])


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
@pytest.mark.parametrize("acts", [stochastic, None], ids=["stochastic", "random"])
def test_sync_collection_is_repeatable_bit_by_bit(make: Any, acts: Any, debug: bool) -> None:
    torch.manual_seed(0)
    own = None if acts is None else acts()
    runs = []
    for seed in (3, 3, 4):
        collector = make(MultiSyncCollector, [lanes(2)] * 2, own, frames_per_batch=40, debug=debug)
        runs.append(collected(collector, seed))
        torch.rand(7)  # what happens here in between has no part in it
    assert equal(runs[0], runs[1])
    assert not torch.equal(runs[0]["action"], runs[2]["action"])
    assert not torch.equal(runs[0]["observation"], runs[2]["observation"])


def test_this_process_and_others_agree(make: Any) -> None:
    torch.manual_seed(0)
    own = stochastic()
    runs = [
        collected(make(MultiSyncCollector, [lanes(2)] * 2, own, frames_per_batch=40, debug=debug), 5)
        for debug in (True, False)
    ]
    assert equal(*runs)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_seeding_in_the_middle(make: Any, kind: Any) -> None:
    """The next batches depend on the seed alone: what was under way is given up, and counted."""
    collector = make(kind, [lanes(2)], policy, frames_per_batch=10)
    first = collected(collector, 11)
    for _ in range(3):
        collector.next()
    before = collector.stats()
    again = collected(collector, 11)
    assert equal(first, again)
    if kind is MultiAsyncCollector:
        assert 0 <= collector.stats()["dropped_frames"] - before["dropped_frames"] <= 20
        assert collector.stats()["dropped_frames"] % 10 == 0


def test_seeding_in_the_middle_with_many_async_workers(make: Any) -> None:
    collector = make(MultiAsyncCollector, [lanes(1)] * 3, policy, frames_per_batch=5)

    def firsts() -> list[torch.Tensor]:
        """The first batch of each worker."""
        collector.set_seed(11)
        found: dict[int, torch.Tensor] = {}
        while len(found) < 3:
            batch = collector.next()
            found.setdefault(int(batch[TRAJ_IDS][0, 0] >> WORKER_BITS), batch["observation"].clone())
        return [found[number] for number in sorted(found)]

    first = firsts()
    collector.next()
    assert all(map(torch.equal, first, firsts()))


def test_a_static_seed_is_the_same_for_all_lanes(make: Any) -> None:
    collector = make(MultiSyncCollector, [lanes(2)] * 2, policy, frames_per_batch=40, debug=True)
    assert collector.set_seed(5, static_seed=True) == 5
    batch = collector.next()
    assert (batch["observation"] == batch["observation"][:1, :1]).all()
    assert collector.set_seed(5) != 5
    batch = collector.next()
    assert len(batch["observation"][:, :, 0, 0].unique()) == 4


def test_what_set_seed_returns_has_not_been_used(make: Any) -> None:
    given = {
        make(MultiSyncCollector, [lanes(4 // n)] * n, policy, frames_per_batch=8, debug=True).set_seed(5)
        for n in (1, 2, 4)
    }
    assert len(given) == 1, "it depends on how lanes are spread"
    assert given == {make(Collector, lanes(4), policy, frames_per_batch=8).set_seed(5)}


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_without_a_seed_workers_differ(make: Any, debug: bool) -> None:
    class Still(Noisy):
        """Always the same, so that only the policy's noise differs."""

        def _observed(self) -> Any:
            return np.ones(3, np.float32)

    batch = make(MultiSyncCollector, [lambda: GymEnv(Noisy())] * 3, policy, frames_per_batch=30, debug=debug).next()
    assert len(batch["observation"][:, 0, 0].unique()) == 3
    for acts in (None, stochastic()):
        batch = make(MultiSyncCollector, [lambda: GymEnv(Still())] * 3, acts, frames_per_batch=30, debug=debug).next()
        assert len(batch["action"][:, 0, 0].unique()) == 3


def test_workers_leave_the_random_numbers_of_this_process_alone(make: Any) -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    for debug in (True, False):
        torch.manual_seed(1)
        collector = make(MultiSyncCollector, [lanes(2)] * 2, None, frames_per_batch=8, debug=debug)
        collector.set_seed(3)
        collector.next()
        assert torch.equal(torch.rand(3), wanted)


# -- ids -------------------------------------------------------------------------------------------------------------


def ids_of(batches: Any) -> set[int]:
    return {number for batch in batches for number in batch[TRAJ_IDS].unique().tolist() if number >= 0}


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_ids_name_one_trajectory_each(make: Any, kind: Any) -> None:
    collector = make(kind, [lambda: CountingEnv((2,), lengths=[3, 2])] * 3, None, frames_per_batch=24, total_frames=240)
    names: dict[int, tuple[float, float]] = {}
    for batch in collector:
        for frame in batch.reshape(-1):
            name = tuple(frame["observation"][:2].tolist())
            assert names.setdefault(int(frame[TRAJ_IDS]), name) == name
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_restarted_worker_has_ids_of_its_own(make: Any, kind: Any) -> None:
    collector = make(
        kind,
        [lambda: CountingEnv(lengths=3)] * 2,
        None,
        frames_per_batch=12,
        total_frames=240,
        on_worker_failure="restart",
    )
    names: dict[int, list[tuple[int, ...]]] = {}

    def collect() -> None:
        for number, batch in enumerate(collector):
            if number == 1:
                os.kill(collector.worker_pids[1], signal.SIGKILL)
            for frame in batch.reshape(-1):
                lane, episode, step = frame["observation"].long().tolist()
                names.setdefault(int(frame[TRAJ_IDS]), []).append((lane, episode, step))

    with pytest.warns(WorkerRestartedWarning, match="Worker 1"):
        collect()
    for frames in names.values():
        assert [step for *_, step in frames] == list(range(len(frames))), "one id names two trajectories"
        assert len({name[:2] for name in frames}) == 1
    assert sum(len(frames) for frames in names.values()) == 240
    assert collector.stats()["worker_restarts"] == 1
    numbers = {number >> WORKER_BITS for number in names}
    assert {0, 2} <= numbers <= {0, 1, 2}  # whether the one that was killed had delivered before is a matter of speed


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_restored_collector_uses_no_id_again(make: Any, kind: Any) -> None:
    seen: set[int] = set()
    state = None
    for _ in range(3):
        collector = make(kind, [lambda: CountingEnv(lengths=3)] * 2, None, frames_per_batch=12, debug=True)
        if state is not None:
            collector.load_state_dict(state)
        found = ids_of([collector.next() for _ in range(4)])
        assert not found & seen
        seen |= found
        state = collector.state_dict()
        later = ids_of([collector.next() for _ in range(2)])
        assert max(later) >> WORKER_BITS <= 10
        collector.shutdown()


def test_collectors_that_write_to_one_buffer(make: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(2000), shared=True)
    for _ in range(2):
        collector = make(
            MultiAsyncCollector,
            [lambda: CountingEnv(lengths=4)] * 2,
            None,
            frames_per_batch=20,
            total_frames=120,
            replay_buffer=buffer,
        )
        for _ in collector:
            pass
    options = {"frames_per_batch": 20, "total_frames": 40, "track_policy_version": True, "replay_buffer": buffer}
    list(make(Collector, CountingEnv(lengths=4), None, **options))
    data = buffer[:]
    assert len(data) == 280
    names: dict[int, list[float]] = {}
    for number, step in zip(data[TRAJ_IDS].tolist(), data["observation"][:, 2].tolist(), strict=True):
        names.setdefault(number, []).append(step)
    for steps in names.values():
        assert steps == list(range(len(steps))), "one id names two trajectories"
    assert len({number >> WORKER_BITS for number in names}) == 5


def test_ids_after_a_buffer_and_its_collector_were_restored(make: Any, tmp_path: Any) -> None:
    def build(buffer: ReplayBuffer) -> Any:
        return make(
            MultiSyncCollector, [lambda: CountingEnv(lengths=4)] * 2, None, frames_per_batch=24, replay_buffer=buffer
        )

    first = ReplayBuffer(storage=LazyTensorStorage(2000), shared=True)
    collector = build(first)
    for _ in range(4):
        collector.next()
    state = collector.state_dict()
    first.dumps(tmp_path / "buffer")
    before = set(first[:][TRAJ_IDS].tolist())
    collector.shutdown()
    second = ReplayBuffer(storage=LazyTensorStorage(2000), shared=True)
    second.loads(tmp_path / "buffer")
    collector = build(second)
    collector.load_state_dict(state)
    for _ in range(4):
        collector.next()
    data = second[:]
    assert len(data) == 192
    assert not set(data[TRAJ_IDS][96:].tolist()) & before


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_work_that_is_given_up_tells_of_its_memory_all_the_same(make: Any, debug: bool) -> None:
    """A worker that was seeded before it had begun with its second slot did not know it when it came round again."""
    collector = make(MultiAsyncCollector, [CountingEnv] * 2, None, frames_per_batch=40, slots_per_worker=4, debug=debug)
    for seed in range(12):
        collector.next()
        collector.set_seed(seed)
    for _ in range(12):
        collector.next()
