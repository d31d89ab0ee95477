"""From the first batch to the last: iterating, resetting, shutting down, and mistakes that must not pass silently."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import warnings
import weakref
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from common import buffer, first_steps, ids_of, net
from gymnasium import spaces as gs
from kinds import ALL, ASYNC_HERE, HERE, MIXED, ONE_ASYNC, Kind, Make, over
from tensordict import TensorDictBase
from torch.utils.data import DataLoader

from swath.collectors import Collector, PolicyVersion
from swath.envs import GymEnv
from swath.errors import ClosedError, PolicyError
from swath.keys import MASK
from swath.testing import CountingEnv, CountingGymEnv, FaultyError, FaultyGymEnv, assert_frames_belong

LONG = {"lengths": 1000}

# -- iterating ------------------------------------------------------------------------------------------------------


@over(MIXED)
def test_all_ways_of_iterating_go_on_with_one_stream(make: Make, kind: Kind) -> None:
    collector = make(**LONG, batches=7, workers=min(1, kind.workers))
    seen = [collector.next()]
    for batch in collector:
        seen.append(batch)
        break
    stream = iter(collector)
    seen += [next(stream), collector.next(), next(stream), next(collector.iterator()), collector.rollout()]
    assert [first_steps(batch) for batch in seen] == [[10 * number] for number in range(7)]
    assert next(stream, None) is None
    assert collector.next() is None


@over([*ALL, ONE_ASYNC])
def test_exhausted_means_nothing_more(make: Make, kind: Kind) -> None:
    """Envs are closed, and workers have ended."""
    collector = make(batches=4)
    pids = collector.worker_pids if "share_objects" in kind.cannot else []
    assert sum(batch.numel() for batch in collector) == collector.config.total_frames
    assert list(collector) == []
    assert collector.next() is collector.next() is None
    assert collector.closed
    assert collector.stats()["completed"]
    assert kind.workers or collector.env.is_closed
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    calls = [collector.rollout, lambda: collector.update_policy_weights_(net()), lambda: collector.set_seed(1)]
    for call in calls if pids else calls[:1]:
        with pytest.raises(RuntimeError, match=r"shut down|make a new"):
            call()


@over(HERE)
def test_an_error_of_the_env_ends_the_collection_and_keeps_its_type(make: Make, kind: Kind) -> None:
    collector = make(lambda: FaultyGymEnv(at=13))
    with pytest.raises(FaultyError, match="lane 0 fails at step 13"):
        list(collector)
    assert collector.closed
    for ask in () if kind.workers else (collector.next, lambda: list(collector)):
        with pytest.raises(ClosedError):
            ask()


@over(HERE)
def test_an_error_of_the_consumer_leaves_the_collector_usable(make: Make, kind: Kind) -> None:
    collector = make(**LONG, workers=min(1, kind.workers))

    def train() -> None:
        for _ in collector:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert not collector.closed
    assert first_steps(collector.next()) == [10]


@over(HERE)
def test_a_data_loader_may_iterate_over_it(make: Make, kind: Kind) -> None:
    collector = make(**LONG, batches=3, workers=min(1, kind.workers))
    loader = DataLoader(collector, batch_size=None, collate_fn=lambda batch: batch)
    assert [first_steps(batch) for batch in loader] == [[0], [10], [20]]


@over(HERE)
def test_rollout_is_raw_but_counted(make: Make) -> None:
    collector = make(batches=4, postproc=lambda batch: batch.select("action"), split_trajs=True)
    assert collector.rollout().shape[-1] == 10
    assert collector.stats()["frames"] == collector.requested_frames_per_batch
    assert len(list(collector)) == 3


def test_whole_episodes_do_without_frames_that_were_taken_by_rollout(make: Make) -> None:
    collector = make(lengths=7, frames_per_batch=3, total_frames=42, trajs_per_batch=1)
    taken = collector.rollout()
    episodes = [int(batch["observation"][0, 0, 1]) for batch in collector]
    assert taken["observation"][:, 2].tolist() == [0, 1, 2]
    assert episodes == [1, 2, 3, 4, 5]
    stats = collector.stats()
    assert stats["dropped_frames"] == 4
    assert stats["frames"] == 42 == 3 + 4 + 5 * 7
    assert stats["pending_frames"] == 0


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps, cloudpickle.dumps])
@over(MIXED)
def test_a_collector_cannot_be_copied(make: Make, way: Any) -> None:
    """A copy would share workers and memory, and shut them down when it is let go."""
    collector = make(batches=2)
    with pytest.raises(TypeError, match=r"(?s)Collector\(.*cannot be copied.*state_dict\(\)"):
        way(collector)
    assert len(list(collector)) == 2


@pytest.mark.parametrize("kept", [None, buffer], ids=["delivered", "written"])
@over(ALL)
def test_what_is_pending_when_it_is_shut_down_is_dropped(make: Make, kept: Any) -> None:
    """Also when the loop was left with its last batch."""
    kept = kept and kept()
    collector = make(lengths=7, batches=4, trajs_per_batch=2, replay_buffer=kept)
    got = 0
    for batch in collector:
        got = int(batch[MASK].sum()) if kept is None else kept.write_count
        if kept is None or collector.stats()["frames"] == collector.total_frames:
            break
    assert collector.stats()["pending_frames"]
    collector.shutdown()
    stats = collector.stats()
    assert stats["pending_frames"] == 0
    assert got + stats["dropped_frames"] >= stats["frames"]  # a worker may have collected more than was asked for


def test_an_episode_that_ends_in_frames_that_were_taken_is_given_up(make: Make) -> None:
    polled = iter(collector := make(lengths=4, frames_per_batch=3, total_frames=24, trajs_per_batch=1))
    first = next(polled)  # polls steps 0-2 and 3 of episode 0, then 0 and 1 of episode 1
    collector.rollout()  # takes the rest of episode 1, and the first of episode 2
    rest = [int(batch["observation"][0, 0, 1]) for batch in polled]
    assert int(first["observation"][0, 0, 1]) == 0
    assert rest == [3, 4, 5]


# -- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shutdown", "async_shutdown"])
@over(HERE, needs="keep_env_open env_object")
def test_shutdown_may_leave_the_env_open(make: Make, name: str) -> None:
    env = CountingEnv(**LONG)
    collector = make(env)
    collector.next()
    getattr(collector, name)(timeout=1.0, close_env=False)
    assert collector.closed
    assert not env.is_closed
    assert first_steps(make(env).next()) == [0]  # another collector may use it


@over(MIXED)
def test_shutdown_twice_and_in_the_middle_of_a_loop(make: Make) -> None:
    collector = make()
    seen = 0
    for _ in collector:
        seen += 1
        if seen == 2:
            collector.shutdown()
            collector.async_shutdown()
    assert seen == 2
    with pytest.raises(ClosedError):
        collector.next()


@pytest.mark.parametrize("raise_on_error", [True, False])
def test_an_env_that_cannot_be_closed(raise_on_error: bool) -> None:
    class Stuck(CountingEnv):
        def _close(self) -> None:
            raise OSError("stuck")

    collector = Collector(Stuck(), frames_per_batch=10)
    if raise_on_error:
        with pytest.raises(OSError, match="stuck"):
            collector.shutdown()
    else:
        collector.shutdown(raise_on_error=False)
    assert collector.closed
    collector.shutdown()


def test_a_forgotten_collector_leaves_the_users_env_open_and_closes_its_own() -> None:
    env = CountingEnv()
    collector = Collector(env, frames_per_batch=10)
    collector.next()
    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None
    assert not env.is_closed
    made: list[CountingGymEnv] = []

    def make() -> CountingGymEnv:
        made.append(CountingGymEnv())
        return made[-1]

    Collector(lambda: GymEnv(make), None, frames_per_batch=5).next()
    gc.collect()
    assert made[0].is_closed


@over(HERE)
def test_a_with_block_shuts_down_and_batches_outlive_their_collector(kind: Kind) -> None:
    with kind.build() as collector:
        batch = collector.next()
        kept = batch.clone()
    assert collector.closed
    assert kind.workers or collector.env.is_closed
    del collector
    gc.collect()
    assert (batch == kept).all()


@over(HERE)
def test_background_collection_needs_a_buffer_and_a_start(make: Make, kind: Kind) -> None:
    collector = make()
    assert not collector.is_running()
    with pytest.raises(RuntimeError, match=r"start\(\).*replay buffer"):
        collector.start()
    for other in (collector, make(replay_buffer=buffer())):
        with pytest.raises(RuntimeError, match="start"), other.pause():
            pass
    assert not collector.is_running()
    assert set(first_steps(collector.next())) == {0}


# -- the layout -----------------------------------------------------------------------------------------------------


@over(HERE)
def test_what_the_policy_keeps_to_itself_is_not_delivered(make: Make) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        td["action"] = td["observation"][..., :2]
        td["_secret"] = torch.ones(1)
        td["out", "_secret"] = torch.ones(1)
        td["_out", "secret"] = torch.ones(1)
        td["out", "open"] = torch.ones(1)
        return td

    batch = make(None, policy).next()
    assert {key for key in batch.keys(True, True) if "out" in key or "_" in str(key)[:1]} == {("out", "open")}
    assert "_secret" not in set(batch.keys())
    assert ("_out", "secret") not in set(batch.keys(True, True))


@over(HERE, needs="one_env")
def test_what_a_policy_writes_for_itself_comes_back_to_it(make: Make, kind: Kind) -> None:
    """As noise processes do it: under private names, absent at first."""

    def policy(td: Any) -> Any:
        count = td.get("_count", None)
        count = torch.zeros(*td.batch_size, 1) if count is None else count + 1
        return td.update({"_count": count, "action": torch.tensor([1, 0]), "seen": count.clone()})

    batch = make(lambda: CountingGymEnv(lengths=100), policy, steps=5, workers=min(1, kind.workers)).next()
    assert batch["seen"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert batch.get("_count", None) is None


# -- mistakes -------------------------------------------------------------------------------------------------------


def test_an_env_used_in_between_begins_anew_with_new_ids(make: Make) -> None:
    env = CountingEnv((2,), lengths=100)
    collector = make(env, frames_per_batch=6)
    first = collector.next()
    env.rollout(4)
    with pytest.warns(UserWarning, match="used elsewhere"):
        second = collector.next()
    assert_frames_belong(second)
    assert first_steps(second) == [0, 0]
    assert not ids_of([first]) & ids_of([second])


def test_two_collectors_on_one_env_do_not_mix_their_frames(make: Make) -> None:
    env = CountingEnv((2,), lengths=100)
    one, other = make(env, frames_per_batch=6), make(env, frames_per_batch=6)
    other.next()
    for collector in (one, other, one, other):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert_frames_belong(collector.next())
        assert ["used elsewhere" in str(warning.message) for warning in told] == [True]


def test_a_closed_env_is_refused(make: Make) -> None:
    env = GymEnv(CountingGymEnv())
    env.close()
    with pytest.raises(ClosedError):
        make(env)


@over(HERE, needs="one_env")
def test_a_policy_that_changes_its_kind_of_numbers_is_told(make: Make, kind: Kind) -> None:
    calls = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.tensor([1, 0]) if len(calls) == 1 else torch.tensor([0.2, 0.9])

    with pytest.raises(TypeError, match=r"'action' as torch\.float32, but torch\.int64 was expected") as caught:
        make(CountingGymEnv, policy, workers=min(1, kind.workers)).next()
    if hasattr(caught.value, "__notes__"):
        assert any("step 0 of a batch" in note for note in caught.value.__notes__)


def test_arguments_of_which_only_some_are_observations_are_refused(make: Make) -> None:
    env = GymEnv(CountingGymEnv(kind="dict"))  # count and inner/step
    with pytest.raises(PolicyError, match="cannot be matched"):
        make(env, lambda step, other: torch.tensor([1, 0]))


@pytest.mark.parametrize("given", [0.7, -1.0, 300.0])
def test_observations_that_the_dtype_has_not_are_refused(make: Make, given: float) -> None:
    class Odd(gym.Env[Any, Any]):
        observation_space, action_space = gs.Box(0, 255, (2,), np.uint8), gs.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros(2), {}  # float zeros are bytes too

        def step(self, action: Any) -> Any:
            return np.full(2, given), 0.0, False, False, {}

    with pytest.raises(TypeError, match="uint8 does not have"):
        make(Odd).next()


def test_policy_version_requests_are_equal() -> None:
    assert PolicyVersion() == PolicyVersion()


@over([ASYNC_HERE])
def test_how_many_batches_of_different_sizes_there_will_be_is_not_known(make: Make) -> None:
    with pytest.raises(TypeError):
        len(make(frames_per_batch=[6, 10], total_frames=64))
