"""AsyncBatchedCollector: what envs at their own pace have that others have not. The rest is in the suites for all."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from common import EPISODE, LANE, STEP, actor, buffer, net, until
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from swath.collectors import AsyncBatchedCollector, Collector
from swath.data import LazyTensorStorage, ReplayBuffer, SliceSampler
from swath.envs import AsyncEnvPool, GymEnv, SerialEnv
from swath.testing import CountingEnv, CountingGymEnv, assert_ids_fit, counting_envs

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def make() -> Iterator[Callable[..., AsyncBatchedCollector]]:
    made: list[AsyncBatchedCollector] = []

    def build(envs: Any, policy: Any = None, **options: Any) -> AsyncBatchedCollector:
        made.append(AsyncBatchedCollector(envs, policy, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


Make = Callable[..., AsyncBatchedCollector]


class Jittery(gym.Wrapper[Any, Any, Any, Any]):
    """An env whose steps and resets take a random while, in no relation to its seed."""

    def __init__(self, env: Any, most_s: float = 0.002) -> None:
        super().__init__(env)
        self._most_s, self._pace = most_s, random.Random()

    def step(self, action: Any) -> Any:
        time.sleep(self._pace.uniform(0.0, self._most_s))
        return super().step(action)

    def reset(self, **options: Any) -> Any:
        time.sleep(self._pace.uniform(0.0, self._most_s))
        return super().reset(**options)


def jittery(count: int, **options: Any) -> list[Callable[[], Any]]:
    """Counting envs without any rhythm."""
    return [lambda make=make: Jittery(make()) for make in counting_envs(count, **options)]


def by_env(batches: Iterable[TensorDictBase | None]) -> dict[int, TensorDictBase]:
    """The frames of each env, in the order in which they came; within a batch they must lie behind each other."""
    found: dict[int, list[TensorDictBase]] = defaultdict(list)
    for batch in batches:
        assert batch is not None
        assert batch.ndim == 1
        envs, counts = torch.unique_consecutive(batch["env_index"], return_counts=True)
        assert envs.tolist() == sorted(set(envs.tolist()))
        for env, frames in zip(envs.tolist(), batch.split(counts.tolist()), strict=True):
            found[env].append(frames)
    return {env: torch.cat(frames) for env, frames in sorted(found.items())}


def assert_in_order(env: int, frames: TensorDictBase) -> None:
    """All that a counting env has made, without a gap."""
    episode, step = 0, 0
    for row in range(len(frames)):
        assert frames["observation"][row].tolist() == [env, episode, step]
        assert frames["next", "observation"][row].tolist() == [env, episode, step + 1]
        assert frames["next", "reward"][row] == step + 1
        episode, step = (episode + 1, 0) if frames["next", "done"][row] else (episode, step + 1)
    assert_ids_fit(frames["collector", "traj_ids"][None].numpy(), frames["next", "done"][None, :, 0].numpy())


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
@pytest.mark.parametrize("frames", [1, 7, 64])
def test_the_frames_of_each_env_lie_in_order(make: Make, backend: str, frames: int) -> None:
    total = 40 * frames if frames < 10 else 640
    collector = make(jittery(5, lengths=[3, 1, 8]), frames_per_batch=frames, total_frames=total, env_backend=backend)
    made = by_env(collector)
    assert sum(map(len, made.values())) == total
    for env, own in made.items():
        assert_in_order(env, own)
    ids = torch.cat([own["collector", "traj_ids"].unique() for own in made.values()])
    assert len(ids.unique()) == len(ids)


@settings(max_examples=15, deadline=None)
@given(
    envs=st.integers(1, 4),
    frames=st.integers(1, 23),
    batches=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    limit=st.none() | st.integers(1, 4),
    most=st.none() | st.integers(1, 3),
)
def test_whatever_the_sizes(
    envs: int, frames: int, batches: int, lengths: list[int], limit: int | None, most: int | None
) -> None:
    with AsyncBatchedCollector(
        counting_envs(envs, lengths=lengths),
        None,
        frames_per_batch=frames,
        total_frames=frames * batches,
        max_frames_per_traj=limit,
        max_batch_size=most,
    ) as collector:
        made = by_env(collector)
    assert sum(map(len, made.values())) == frames * batches
    for env, own in made.items():
        assert_in_order(env, own)
        if limit is not None:
            assert own["step_count"].max() < limit
            assert (own["next", "step_count"] == own["step_count"] + 1).all()
            cut = own["next", "truncated"][:, 0] & ~own["next", "terminated"][:, 0]
            assert (own["next", "step_count"][cut] == limit).all()


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_the_same_seed_gives_the_same_episodes_as_lockstep_whatever_the_timing(make: Make, backend: str) -> None:
    """With a policy that does not depend on its batch."""
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action"])
    makers = [lambda: GymEnv("CartPole-v1")] * 3
    slow = [lambda: GymEnv(Jittery(gym.make("CartPole-v1")))] * 3
    lockstep = Collector(SerialEnv(3, makers), policy, frames_per_batch=600, total_frames=600)
    lockstep.set_seed(5)
    wanted = lockstep.next()
    collector = make(slow, policy, frames_per_batch=37, total_frames=370, env_backend=backend)
    collector.set_seed(5)
    for env, frames in by_env(collector).items():
        common = min(len(frames), wanted.shape[1])
        assert common > 50
        torch.testing.assert_close(frames["observation"][:common], wanted["observation"][env, :common])
        torch.testing.assert_close(frames["next", "done"][:common], wanted["next", "done"][env, :common])


def test_the_policy_acts_while_envs_are_stepping(make: Make) -> None:
    """Overlap, by counting: the policy is called for some envs while others have not come back from their step."""
    stepping, seen = [0], []
    lock = threading.Lock()

    class Counted(CountingGymEnv):
        def step(self, action: Any) -> Any:
            with lock:
                stepping[0] += 1
            time.sleep(0.002)
            with lock:
                stepping[0] -= 1
            return super().step(action)

    def policy(td: TensorDictBase) -> TensorDictBase:
        with lock:
            seen.append((td.numel(), stepping[0]))
        return td.set("action", torch.tensor([1, 0]).expand(*td.shape, 2))

    collector = make(
        [lambda lane=lane: Counted(lane=lane, lengths=50) for lane in range(8)], policy, frames_per_batch=400
    )
    collector.next()
    calls = seen[2:]  # the first is a trial, the second is for all envs at once
    overlapping = [size for size, busy in calls if busy]
    assert sum(overlapping) > 0.5 * sum(size for size, _ in calls)


def test_batching_of_the_policy(make: Make) -> None:
    """At most `max_batch_size` at a time; and with `min_batch_size`, as many as there are to wait for."""
    sizes: list[int] = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        sizes.append(td.numel())
        return td.set("action", torch.tensor([1, 0]).expand(*td.shape, 2))

    make(counting_envs(6), policy, frames_per_batch=200, max_batch_size=2).next()
    assert max(sizes[2:]) <= 2
    sizes.clear()
    options = {"min_batch_size": 6, "server_timeout": 30.0}
    collector = make(jittery(6), policy, frames_per_batch=120, **options)
    collector.next()
    assert sizes[1:] == [6] * 20
    figures = collector.server_stats()
    assert figures["batches"] == 20
    assert figures["requests"] == 120
    assert figures["avg_batch_size"] == 6
    assert figures["batch_fill"] == 1.0
    assert collector.stats()["server/batches"] == 20
    collector.server_stats(reset=True)
    assert collector.server_stats() == {"requests": 0, "batches": 0}


def test_frames_that_are_under_way_between_batches_keep_their_log_prob_and_version(make: Make) -> None:
    """They were begun with other weights, or at random, and are complete in a later batch."""
    policy = actor()
    collector = make(jittery(6, lengths=9), policy, frames_per_batch=20, total_frames=400, init_random_frames=60)
    versions = set()
    for number, batch in enumerate(collector):
        version = batch["policy_version"]
        versions.add(tuple(version.unique().tolist()))
        assert (batch["next", "policy_version"] == version).all()
        acted = batch["logits"].abs().sum(-1) > 0  # not at random
        choices = torch.distributions.OneHotCategorical(logits=batch["logits"])
        chosen = choices.log_prob(batch["action"].float())
        torch.testing.assert_close(batch["action_log_prob"][acted], chosen[acted])
        assert acted.all() if number > 5 else True
        with torch.no_grad():
            policy[0].module.bias.add_(0.1)
        collector.update_policy_weights_()
    assert any(len(each) > 1 for each in versions), "no frame was under way when weights were published"


class Counting(nn.Module):
    """Counts the steps of an episode in its state, and acts by it."""

    def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state + 1
        return torch.cat([state, observation[..., STEP : STEP + 1]], -1), state


@pytest.mark.parametrize("written", ["state", ("next", "state")], ids=["same", "next"])
def test_recurrent_state_stays_with_its_lane(make: Make, written: Any) -> None:
    module = TensorDictModule(Counting(), in_keys=["observation", "state"], out_keys=["action", written])
    policy = TensorDictSequential(module)
    makers = [lambda lane=lane: Jittery(FloatActions(lane=lane, lengths=[4, 1, 6])) for lane in range(4)]
    for env, frames in by_env(make(makers, policy, frames_per_batch=30, total_frames=300)).items():
        assert_in_order(env, frames)
        assert (frames["action"][:, 0] == frames["action"][:, 1] + 1).all()


class FloatActions(CountingGymEnv):
    """Takes two numbers as its action, and does nothing with them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)


def test_whole_episodes_of_uneven_envs(make: Make) -> None:
    """One env is far slower than a batch: its episodes are missing in most batches, and whole in the end."""
    makers = counting_envs(2, lengths=3)
    makers.append(lambda: Jittery(CountingGymEnv(lane=2, lengths=3), most_s=0.05))
    collector = make(makers, frames_per_batch=10, trajs_per_batch=4, traj_format="cat")
    seen: set[int] = set()
    while 2 not in seen:
        batch = collector.next()
        assert batch is not None
        episodes = batch.split(3)
        for episode in episodes:
            assert len(episode["collector", "traj_ids"].unique()) == 1
            assert episode["observation"][:, STEP].tolist() == [0, 1, 2]
            assert episode["next", "done"][:, 0].tolist() == [False, False, True]
        seen.update(batch["env_index"].tolist())
    assert collector.stats()["dropped_frames"] == 0
    for _ in range(20):  # what a reset cuts off is given up, and counted; it may come just between episodes
        collector.reset()
        for _ in range(3):
            collector.next()
        if collector.stats()["dropped_frames"]:
            break
    else:
        pytest.fail("Twenty resets have cut off nothing.")


def test_yield_completed_trajectories(make: Make) -> None:
    lengths = [3, 5, 2]
    collector = make(counting_envs(3, lengths=lengths), frames_per_batch=10, yield_completed_trajectories=True)
    for _ in range(20):
        episode = collector.next()
        assert episode is not None
        assert episode.ndim == 1
        assert len(episode["env_index"].unique()) == 1
        assert episode["next", "done"][:, 0].nonzero().tolist() == [[len(episode) - 1]]


def test_lanes_within_envs(make: Make) -> None:
    collector = make([lambda: CountingEnv((2,), lengths=[3, 4])] * 3, frames_per_batch=12, total_frames=120)
    total: dict[int, list[TensorDictBase]] = defaultdict(list)
    for batch in collector:
        assert batch.shape == (12,)
        for lane in batch["observation"][:, LANE].unique().tolist():
            total[int(lane)].append(batch[batch["observation"][:, LANE] == lane])
        assert (batch["env_index"] == batch["observation"][:, LANE].long() // 2).all()
    assert sorted(total) == list(range(6))
    for lane, frames in total.items():
        assert_in_order(lane, torch.cat(frames))


def test_stacked(make: Make) -> None:
    """Each env makes the same number of steps, however fast it is."""
    collector = make(jittery(3, lengths=[3, 4]), frames_per_batch=30, total_frames=90, stack_envs=True)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(3, 10)] * 3
    for env in range(3):
        assert_in_order(env, torch.cat([batch[env] for batch in batches]))
    with pytest.raises(ValueError, match="stack_envs"):
        make(counting_envs(2), frames_per_batch=4, stack_envs=True, on_worker_failure="drop")


def test_a_pool_may_be_given_and_a_collector_of_any_kind_uses_it_as_it_is(make: Make) -> None:
    pool = AsyncEnvPool(counting_envs(3))
    assert make(pool, frames_per_batch=10).next().shape == (10,)
    other = AsyncEnvPool(counting_envs(3))
    with Collector(other, None, frames_per_batch=10) as collector:
        assert collector.next()["env_index"].max() <= 2


def test_slices_of_a_buffer_do_not_mix_envs(make: Make) -> None:
    """Frames of an env lie behind each other in the buffer, too."""

    rb = ReplayBuffer(
        storage=LazyTensorStorage(2000), sampler=SliceSampler(slice_len=4, strict_length=False), batch_size=32
    )
    collector = make(jittery(4, lengths=11), frames_per_batch=40, total_frames=800, replay_buffer=rb)
    for _ in collector:
        pass
    for _ in range(20):
        sample = rb.sample()
        steps = sample["observation"]
        cuts = (steps[1:, :2] != steps[:-1, :2]).any(-1) | (steps[1:, STEP] != steps[:-1, STEP] + 1)
        pieces = int(cuts.sum()) + 1
        assert pieces <= 16


def test_started_with_a_buffer(make: Make) -> None:
    rb = buffer(batch_size=16)
    collector = make(jittery(4), net(), frames_per_batch=10, replay_buffer=rb)
    collector.start()
    until(lambda: len(rb) > 200)
    with collector.pause():
        size = len(rb)
        time.sleep(0.05)
        assert len(rb) == size
    until(lambda: len(rb) > size)
    collector.update_policy_weights_(net(2.0))
    until(lambda: (rb[:]["action"] == 2.0).any())
    collector.async_shutdown()


def test_state_goes_on_elsewhere(make: Make) -> None:
    first = make(jittery(3), net(1.0), frames_per_batch=20)
    first.set_seed(3)
    ids = torch.cat([first.next()["collector", "traj_ids"] for _ in range(3)])
    second = make(jittery(3), net(0.0), frames_per_batch=20)
    second.load_state_dict(first.state_dict())
    batch = second.next()
    assert (batch["action"] == 1.0).all()
    assert not set(batch["collector", "traj_ids"].tolist()) & set(ids.tolist())


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "policy", {}),
        (TypeError, "not both", {"policy": net(), "policy_factory": net}),
        (TypeError, "list", {"policy": None, "create_env_fn": CountingEnv}),
        (TypeError, "list", {"policy": None, "create_env_fn": []}),
        (ValueError, "max_batch_size", {"policy": None, "max_batch_size": 0}),
        (ValueError, "above", {"policy": None, "max_batch_size": 2, "min_batch_size": 3}),
        (ValueError, "server_timeout", {"policy": None, "server_timeout": -1.0}),
        (ValueError, "env_backend", {"policy": None, "env_backend": "ray"}),
        (ValueError, "mean the same", {"policy": None, "env_backend": "threading", "backend": "multiprocessing"}),
        (ValueError, "envs_per_worker", {"policy": None, "envs_per_worker": 0}),
        (ValueError, "trajs_per_batch", {"policy": None, "yield_completed_trajectories": True, "trajs_per_batch": 2}),
    ],
)
def test_what_it_refuses(error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        AsyncBatchedCollector(**{"create_env_fn": counting_envs(2), "frames_per_batch": 10, **arguments})


def test_a_policy_with_a_batch_of_its_own_is_called_for_what_is_ready(make: Make) -> None:
    """Whatever is not understood is called with a TensorDict of some lanes."""
    policy = lambda td: TensorDict(td, td.shape).set("action", torch.tensor([0, 1]).expand(*td.shape, 2))  # noqa: E731
    frames = by_env([make(jittery(3), policy, frames_per_batch=60).next()])
    assert all((own["action"] == torch.tensor([0, 1])).all() for own in frames.values())
    assert {int(own["observation"][0, EPISODE]) for own in frames.values()} == {0}
