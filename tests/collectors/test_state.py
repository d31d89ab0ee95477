"""The state of a collector: to be had at any moment, and gone on with elsewhere."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from common import actor, buffer, first_steps, ids_of, net, rows, saved, until
from inside import take_in_news
from kinds import ALL, AS_READY, ASYNC, ASYNC_HERE, HERE, MIXED, SINGLE, SYNC, SYNC_HERE, Kind, Make, over
from torch import nn

from swath.collectors import PolicyVersion
from swath.errors import WorkerRestartedWarning
from swath.keys import MASK
from swath.testing import CountingGymEnv

TRACKED = {"track_policy_version": PolicyVersion()}


@over(ALL)
def test_a_new_collector_goes_on_with_counters_and_weights(make: Make, kind: Kind) -> None:
    first = make(None, net(1.0), batches=10)
    for _ in range(3):
        first.next()
    first.update_policy_weights_(net(2.0))
    first.update_policy_weights_(net(3.0))  # not those of the policy that it was given
    state = saved(first.state_dict())
    frames = first.requested_frames_per_batch
    assert state["frames"] == 3 * frames
    assert state["iter"] == 3
    assert state["policy_version"] == 2
    assert not kind.workers or {"worker0", "worker1", "traj_pool", "undelivered_frames"} <= set(state)
    second = make(None, net(0.0), batches=10, **TRACKED)
    second.load_state_dict(state)
    assert second.policy_version == 2
    assert (second.stats()["frames"], second.stats()["batches"]) == (3 * frames, 3)
    batches = list(second)
    assert sum(batch.numel() for batch in batches) == 7 * frames
    assert (second.stats()["frames"], second.stats()["batches"]) == (10 * frames, 10)
    for batch in batches:
        assert (batch["action"] == 3.0).all()
        assert (batch["policy_version"] == 2).all()


@over(ALL)
def test_episodes_and_their_returns_are_counted_on(make: Make) -> None:
    first, second = make(batches=10), make(batches=10)
    for _ in range(3):
        first.next()
    state = saved(first.state_dict())
    counted = [one["ended"] for one in (state, *(state.get(f"worker{i}", {}) for i in range(2))) if "ended" in one]
    episodes = sum(one["episodes"] for one in counted)  # workers that go on have more by now
    assert 4 <= episodes <= first.stats()["episodes"]
    second.load_state_dict(state)
    assert (second.stats()["episodes"], second.stats()["mean_return"]) == (episodes, 15.0)
    list(second)
    assert second.stats()["episodes"] > episodes
    assert second.stats()["mean_length"] == 5.0


@over([SYNC])
def test_episodes_of_a_worker_that_was_dropped_are_counted_once(make: Make) -> None:
    class Dies(CountingGymEnv):
        def step(self, action: Any) -> Any:
            if self.lane and self.episode == 3:
                os._exit(3)
            return super().step(action)

    first = make([lambda: Dies(0), lambda: Dies(1)], on_worker_failure="drop", batches=10)
    with pytest.warns(WorkerRestartedWarning):
        assert [first.next().shape[0] for _ in range(3)] == [2, 1, 1]
    assert first.stats()["workers_alive"] == 1
    assert first.stats()["episodes"] == 6 + 2
    second = make()
    second.load_state_dict(saved(first.state_dict()))
    assert second.stats()["episodes"] == first.stats()["episodes"]


@over(HERE)
def test_weights_after_a_load(make: Make) -> None:
    first = make(None, net(1.0))
    for _ in range(5):
        first.update_policy_weights_(net(5.0))
    second = make(None, net(2.0), **TRACKED)
    for _ in range(9):
        second.update_policy_weights_(net(9.0))
    second.next()
    second.load_state_dict(first.state_dict())
    assert second.policy_version == 5
    batch = second.next()
    assert (batch["action"] == 5.0).all()
    assert (batch["policy_version"] == 5).all(), "an older version may be gone back to"
    second.update_policy_weights_(net(6.0))
    for _ in range(5):
        batch = second.next()
    assert (batch["action"] == 6.0).all()
    assert (batch["policy_version"] == 6).all()


@over(ALL)
def test_the_trainers_policy_is_restored_too(make: Make) -> None:
    """Otherwise the next update would undo the load."""
    first = make(None, net(1.0))
    first.update_policy_weights_(net(3.0))
    policy = net(0.0)
    second = make(None, policy)
    second.load_state_dict(saved(first.state_dict()))
    assert policy.module.bias.tolist() == [3.0, 3.0]
    second.update_policy_weights_()
    for _ in range(4):
        assert (second.next()["action"] == 3.0).all()


@over([SINGLE, AS_READY])
def test_the_trainers_policy_is_restored_where_a_copy_acts(make: Make, kind: Kind) -> None:
    first, policy = make(None, net(3.0)), net(0.0)
    second = make(None, policy, replay_buffer=buffer())
    second.start()
    second.load_state_dict(saved(first.state_dict()))
    assert policy.module.bias.tolist() == [3.0, 3.0]


@over([SYNC_HERE])
def test_workers_with_weights_of_their_own(make: Make) -> None:
    first = make(None, net(1.0))
    first.update_policy_weights_(net(2.0), worker_ids=1)
    second = make(None, net(0.0))
    second.load_state_dict(saved(first.state_dict()))
    for _ in range(2):
        assert second.next()["action"][:, 0, 0].tolist() == [1.0, 2.0]


@over([SINGLE, SYNC])
def test_a_random_policy_has_a_state_too(make: Make) -> None:
    first, second = make(batches=4), make(batches=4)
    first.set_seed(np.int64(3))  # saved as a plain number
    first.next()
    second.load_state_dict(saved(first.state_dict()))
    assert len(list(second)) == 3


@over([ASYNC_HERE, ASYNC])
def test_what_is_not_delivered_is_counted(make: Make, kind: Kind) -> None:
    first = make(batches=24, slots_per_worker=3)
    delivered = sum(first.next().numel() for _ in range(4))
    if kind is not ASYNC_HERE:
        until(lambda: take_in_news(first) or first.stats()["waiting_batches"])
    state = first.state_dict()
    assert state["frames"] == delivered == 40
    assert state["undelivered_frames"] == 10 * first.stats()["waiting_batches"]
    assert state["undelivered_frames"] or kind is ASYNC_HERE
    assert sum(batch.numel() for batch in first) == 200, "asking has cost nothing"
    second = make(batches=24)
    second.load_state_dict(state)
    assert second.stats()["dropped_frames"] == state["undelivered_frames"]
    assert sum(batch.numel() for batch in second) == 200


@pytest.mark.parametrize("env", [None, CountingGymEnv], ids=["custom", "gymnasium"])
@over(HERE)
def test_loading_gives_up_what_was_under_way(make: Make, env: Any) -> None:
    first = make(env, steps=3)
    for _ in range(3):
        first.next()
    state = saved(first.state_dict())
    for _ in range(3):
        first.next()
    first.load_state_dict(state)
    assert first.stats()["frames"] == state["frames"]
    assert set(first_steps(first.next())) == {0}


@over(HERE)
def test_unfinished_episodes_are_saved_and_given_up(make: Make) -> None:
    options = {"frames_per_batch": 8, "trajs_per_batch": 3, "total_frames": 160}
    first, got = make(**options), 0
    for number, batch in enumerate(first):
        got += int(batch[MASK].sum())
        if number == 2:
            break
    state = saved(first.state_dict())
    second = make(**options)
    second.load_state_dict(state)
    for batch in second:
        assert batch[MASK].sum(1).tolist() == [5, 5, 5]
        got += int(batch[MASK].sum())
    stats = second.stats()
    assert stats["frames"] == 160
    assert got + stats["dropped_frames"] - state.get("undelivered_frames", 0) == 160


def test_whole_episodes_are_kept_and_unfinished_ones_counted_as_dropped(make: Make) -> None:
    options = {"frames_per_batch": 23, "total_frames": 46, "trajs_per_batch": 2}
    first, second = make(**options), make(**options)
    delivered = first.next()  # of four whole episodes and three frames
    second.load_state_dict(saved(first.state_dict()))
    assert second.stats()["dropped_frames"] == 3
    rest = list(second)
    assert rest[0]["observation"][:, 0, 1].tolist() == [2, 3]  # were waiting in the saved state
    assert len(ids_of([delivered, *rest])) == 8
    assert second.stats()["frames"] == 46
    assert second.stats()["dropped_frames"] == 46 - 8 * 5


@over(HERE)
def test_random_frames_are_not_begun_again(make: Make) -> None:
    options = {"init_random_frames": 10, "batches": 4}
    first, second = make(None, actor(), **options), make(None, actor(), **options)
    assert (first.next()["logits"] == 0).all()
    second.load_state_dict(saved(first.state_dict()))
    assert (second.next()["logits"] != 0).any()


def test_the_random_stream_goes_on(make: Make) -> None:
    first = make(None, actor(), steps=200)
    first.set_seed(3)
    first.next()
    state = saved(first.state_dict())
    batches = []
    for _ in range(2):
        torch.manual_seed(0)  # none of the collector's business any more
        torch.rand(7)
        other = make(None, actor(), steps=200)
        other.load_state_dict(state)
        batches.append(other.next())
    assert (batches[0] == batches[1]).all()
    noise = make(None, actor(), steps=200)
    noise.set_seed(3)
    assert not torch.equal(noise.next()["action"], batches[0]["action"]), "the stream began anew"


@over(MIXED)
def test_iterating_with_a_buffer(make: Make) -> None:
    """What is in the buffer counts, also what workers have written ahead of the consumer."""
    first = make(replay_buffer=buffer(), batches=10)
    for _ in range(4):
        first.next()
    state = saved(first.state_dict())
    assert 4 * first.requested_frames_per_batch <= state["frames"] <= len(first.replay_buffer)
    second = make(replay_buffer=buffer(), batches=10)
    second.load_state_dict(state)
    left = first.total_frames - state["frames"]
    assert len(list(second)) == -(-left // first.requested_frames_per_batch)
    assert len(second.replay_buffer) == left


@over(MIXED)
def test_the_state_can_be_had_when_all_is_collected(make: Make) -> None:
    first = make(None, net(), batches=4)
    list(first)
    state = first.state_dict()
    assert state["frames"] == first.stats()["frames"] == first.config.total_frames
    second = make(None, net(), batches=8)
    second.load_state_dict(state)
    assert len(list(second)) == 4


@over(HERE)
def test_a_closed_collector_cannot_go_on(make: Make, kind: Kind) -> None:
    """Nor do workers that were shut down before the end have a state; that of a collector by itself can be read."""
    ended, closed = make(None, net(), batches=2), make(None, net())
    list(ended)
    closed.next()
    closed.shutdown()
    for collector in (ended, closed):
        with pytest.raises(RuntimeError, match="shut down"):
            collector.load_state_dict(ended.state_dict())
        with pytest.raises(RuntimeError, match="shut down"):
            collector.reset()
    if kind.workers:
        with pytest.raises(RuntimeError, match="shut down"):
            closed.state_dict()
    else:
        assert closed.stats()["frames"] == closed.state_dict()["frames"] == 10


@over([SYNC_HERE, ASYNC_HERE])
def test_states_of_both_deliveries_are_exchangeable(make: Make, kind: Kind) -> None:
    first = make(None, net(4.0), frames_per_batch=12, total_frames=48)
    ids = ids_of([first.next()])
    other = ASYNC_HERE if kind is SYNC_HERE else SYNC_HERE
    with other.build(None, net(0.0), frames_per_batch=12, total_frames=48) as second:
        second.load_state_dict(first.state_dict())
        batches = list(second)
    assert sum(batch.numel() for batch in batches) == 36
    assert all((batch["action"] == 4).all() for batch in batches)
    assert not ids & ids_of(batches)


# -- states that do not fit ------------------------------------------------------------------------------------------


@over(HERE)
def test_a_state_of_something_else_is_refused(make: Make) -> None:
    collector = make()
    for state in ({}, {"frames": 10}):
        with pytest.raises(KeyError, match=r"no state of a collector.*no .*iter"):
            collector.load_state_dict(state)
    assert collector.stats()["frames"] == 0
    assert rows(collector.next()).shape[1] == 10


@over([SYNC_HERE])
def test_a_state_of_another_number_of_workers_is_refused(make: Make) -> None:
    two, three = make(), make(workers=3)
    with pytest.raises(KeyError, match="3 workers: it has 2"):
        three.load_state_dict(two.state_dict())
    with pytest.raises(KeyError, match="2 workers: it has 3"):
        two.load_state_dict(three.state_dict())
    assert two.next().shape == (2, 10)


@over(HERE)
def test_weights_of_another_policy_are_refused_unless_not_strict(make: Make) -> None:
    state: Any = make(None, nn.Linear(3, 2, bias=False)).state_dict()
    with pytest.raises(RuntimeError, match="bias"):
        make(None, nn.Linear(3, 2)).load_state_dict(state)
    make(None, nn.Linear(3, 2)).load_state_dict(state, strict=False)


def without_bias(state: dict[str, Any]) -> None:
    del state["policy_state_dict"]["module.bias"]


def other_shape(state: dict[str, Any]) -> None:
    state["policy_state_dict"]["module.bias"] = torch.zeros(5)


def other_stream(state: dict[str, Any]) -> None:
    state["randomness"] = {"noise": torch.zeros(3, dtype=torch.uint8), "cpu": None, "cuda": None}


@pytest.mark.parametrize("spoil", [without_bias, other_shape, other_stream, lambda state: state.pop("traj_pool")])
@over(ALL)
def test_a_state_that_is_refused_changes_nothing(make: Make, kind: Kind, spoil: Any) -> None:
    """Neither in the worker that refuses it, nor in those whose part of it is good, nor here."""
    state = saved(make(None, net(7.0)).state_dict())
    collector = make(None, policy := net(1.0))
    collector.next()
    spoil(state["worker1"] if kind.workers else state)
    before = collector.stats()
    with pytest.raises((RuntimeError, KeyError)):
        collector.load_state_dict(state)
    assert policy.module.bias.tolist() == [1.0, 1.0]
    assert collector.stats()["frames"] == before["frames"]
    for _ in range(4):
        assert (collector.next()["action"] == 1.0).all()
    collector.reset()
    for _ in range(4):
        assert (collector.next()["action"] == 1.0).all()


def test_weights_of_a_state_and_policies_without(make: Make) -> None:
    """A state without weights can be loaded by any policy, but one with weights by none that has none."""
    without = make(None, lambda td: td.set("action", td["observation"][..., :2]))
    collector = make(None, actor())
    with pytest.raises(ValueError, match=r"weights.*none"):
        without.load_state_dict(collector.state_dict())
    state = without.state_dict()
    assert "policy_state_dict" not in state
    collector.load_state_dict(state)
    assert collector.next().shape == (10,)
