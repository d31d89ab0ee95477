"""The same call means the same in one process and in many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from common import actor, buffer, first_steps, keys, layout, net, rows
from kinds import ALL, ASYNC_HERE, EVERY, FREE, HERE, SINGLE, SPREAD, SYNC, SYNC_HERE, Kind, Make, over
from tensordict import TensorDictBase
from torch import nn

from swath.collectors import PolicyVersion
from swath.testing import CountingGymEnv

# -- resets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [[1, 2], torch.tensor([1, 2]), torch.tensor([False, True, True, False]), [False, True, True, False]],
    ids=["list", "tensor", "mask", "list of flags"],
)
@over([SINGLE, SYNC_HERE, SYNC])
def test_reset_addresses_lanes_over_all_workers(make: Make, kind: Kind, index: Any) -> None:
    """Of two workers with two lanes each, lane 1 is the second of the first, and lane 2 the first of the next."""
    collector = make(lanes=4 // max(1, kind.workers), lengths=1000)
    first = rows(collector.next())
    collector.reset(index)
    batch = rows(collector.next())
    assert first_steps(batch) == [10, 0, 0, 10]
    went_on = first["collector", "traj_ids"][:, -1] == batch["collector", "traj_ids"][:, 0]
    assert went_on.tolist() == [True, False, False, True]


@pytest.mark.parametrize("worker", [1, [1]], ids=str)
@over([SYNC_HERE, SYNC])
def test_reset_of_workers_begins_anew_in_all_their_lanes(make: Make, worker: Any) -> None:
    collector = make(lanes=2, lengths=1000)
    collector.next()
    collector.reset(worker=worker)
    assert first_steps(collector.next()) == [10, 10, 0, 0]
    collector.reset(worker=[0, 1])
    assert first_steps(collector.next()) == [0, 0, 0, 0]


@over([ASYNC_HERE])
def test_reset_of_a_lane_of_async_workers(make: Make) -> None:
    collector = make(lanes=2, lengths=1000)
    collector.reset([3])
    begins: dict[int, list[int]] = {}
    for _ in range(12):
        for row in rows(collector.next()):
            begins.setdefault(int(row["observation"][0, 0]), []).append(int(row["observation"][:, 1].max()))
    assert {lane: max(episodes) for lane, episodes in begins.items()} == {0: 0, 1: 0, 2: 0, 3: 1}


@over(HERE)
def test_reset_of_what_is_not_there_is_refused(make: Make, kind: Kind) -> None:
    collector = make(lanes=2)
    lanes = 2 * max(1, kind.workers)
    for arguments in ({"index": [lanes]}, {"index": [True] * (lanes + 1)}, {"worker": max(1, kind.workers)}):
        with pytest.raises((ValueError, IndexError)):
            collector.reset(**arguments)
    assert set(first_steps(collector.next())) == {0}


# -- versions -------------------------------------------------------------------------------------------------------


@over(ALL)
def test_the_version_is_a_number_whether_frames_carry_it_or_not(make: Make) -> None:
    for options in ({}, {"track_policy_version": False}, {"track_policy_version": PolicyVersion()}):
        collector = make(None, net(), **options)
        for version in range(3):
            assert collector.policy_version == collector.get_policy_version() == version
            assert collector.stats()["policy_version"] == version
            collector.update_policy_weights_()
        collector.increment_version()
        assert collector.policy_version == 4


@over(HERE)
def test_frames_carry_the_version_only_where_that_is_asked_for(make: Make) -> None:
    assert "policy_version" not in keys(make(None, net(), track_policy_version=False).next())
    assert "policy_version" in keys(make(None, net(), track_policy_version=PolicyVersion()).next())


# -- background -----------------------------------------------------------------------------------------------------


@over(FREE)
def test_pause_before_start_is_refused(make: Make) -> None:
    collector = make(replay_buffer=buffer())
    with pytest.raises(RuntimeError, match="start"), collector.pause():
        pass
    with pytest.raises(RuntimeError, match="start"), make().pause():
        pass


# -- the end --------------------------------------------------------------------------------------------------------


@over([kind for kind in EVERY if "keep_env_open" in kind.cannot])
def test_envs_of_workers_cannot_be_kept_open(make: Make) -> None:
    collector = make()
    with pytest.raises(RuntimeError, match="close_env=False"):
        collector.shutdown(close_env=False)
    assert collector.next() is not None, "it is none the worse for it"


# -- the layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lanes": 2},
        {"max_frames_per_traj": 3, "track_policy_version": PolicyVersion()},
        {"track_traj_ids": False, "compact_obs": True},
        {"storing_device": "cpu"},
    ],
    ids=str,
)
@over(EVERY)
def test_fake_tensordict_is_zeros_with_the_layout_of_a_batch(make: Make, options: dict[str, Any]) -> None:
    collector = make(None, actor(), **options)
    fake = collector.fake_tensordict()
    assert layout(fake) == layout(collector.next())
    assert all(not fake.get(key).any() for key in fake.keys(True, True))


@pytest.mark.parametrize(("how", "shape"), [("stack", (2, 3, 10)), (0, (6, 10)), (-1, (3, 20))])
@over([SYNC_HERE])
def test_fake_tensordict_is_joined_as_batches_are(make: Make, how: Any, shape: tuple[int, ...]) -> None:
    collector = make(lanes=3, cat_results=how)
    assert collector.fake_tensordict().shape == shape
    assert layout(collector.fake_tensordict()) == layout(collector.next())


# -- numbers --------------------------------------------------------------------------------------------------------


@over(EVERY)
def test_stats_have_the_same_keys(make: Make, kind: Kind) -> None:
    collector = make(batches=4)
    first = set(collector.stats())
    list(collector)
    wanted = {
        "frames",
        "batches",
        "episodes",
        "total_frames",
        "completed",
        "requested_frames_per_batch",
        "policy_version",
        "pending_frames",
        "dropped_frames",
        "lost_frames",
        "workers",
        "workers_alive",
        "worker_restarts",
        "time/env",
        "time/policy",
        "time/bookkeeping",
    }
    assert wanted <= first
    with SYNC_HERE.build(batches=4) as other:
        common = set(other.stats())
    assert {name for name in first ^ common if "lag" not in name and name != "waiting_batches"} == set()
    assert ("policy_lag" in collector.stats()) == (not kind.joins)


def test_a_collector_without_workers_counts_as_one(make: Make) -> None:
    collector = make(batches=4)
    stats = collector.stats()
    assert (stats["workers"], stats["workers_alive"], stats["worker_restarts"]) == (1, 1, 0)
    list(collector)
    assert collector.stats()["lost_frames"] == 0
    assert collector.stats()["workers_alive"] == 0


@over(HERE)
def test_stats_of_each_worker(make: Make, kind: Kind) -> None:
    collector = make(batches=4)
    list(collector)
    each = collector.stats(workers="per_worker")
    assert {name.partition("/")[0] for name in each} == {f"worker_{n}" for n in range(max(1, kind.workers))}
    assert collector.stats(workers="both") == {**collector.stats(), **each}


# -- attributes -----------------------------------------------------------------------------------------------------


@over(ALL)
def test_answers_are_the_object_itself_or_one_for_each_worker(make: Make, kind: Kind) -> None:
    """As in TorchRL."""
    collector = make(lengths=7)
    wanted: Any = [7] * kind.workers if kind.workers else 7
    assert collector.get_distant_attr("env.lengths") == wanted
    assert collector.cascade_execute("getattr_env", "lengths") == wanted
    assert collector.getattr_env("lengths") == 7, "of the first worker"
    assert collector.map_fn("getattr_env", [("lengths",)] * max(1, kind.workers)) == [7] * max(1, kind.workers)


# -- hooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [False, True], ids=["delivered", "written"])
@over(ALL)
def test_post_collect_hook_gets_the_batch_as_it_was_collected(
    make: Make, kind: Kind, writes: bool, tmp_path: Path
) -> None:
    """Where the rollout was made, after `pre_collect_hook`, before it is split, post-processed, or written."""
    calls = tmp_path / "calls"

    def note(call: str) -> None:
        with calls.open("a") as file:
            file.write(f"{call}\n")

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        note("postproc")
        return batch.set("seen", torch.ones(*batch.shape, 1))

    collector = make(
        batches=2,
        split_trajs=True,
        postproc=postproc,
        pre_collect_hook=lambda: note(f"pre {os.getpid()}"),
        post_collect_hook=lambda batch: note(f"post {os.getpid()} {tuple(batch.shape)} {'seen' in keys(batch)}"),
        replay_buffer=buffer() if writes else None,
    )
    pids = {str(pid) for pid in collector.worker_pids} if kind in SPREAD else {str(os.getpid())}
    list(collector)
    noted = [line.split(maxsplit=2) for line in calls.read_text().splitlines()]
    hooks = [line for line in noted if line[0] != "postproc"]
    assert {line[1] for line in hooks} == pids
    assert {line[2] for line in hooks if line[0] == "post"} == {"(10,) False"}
    for pid in pids:
        own = [line[0] for line in hooks if line[1] == pid]
        assert own == ["pre", "post"] * (len(own) // 2)
    assert len(noted) > len(hooks)


def test_hooks_and_post_processing_come_in_order(make: Make) -> None:
    calls: list[Any] = []
    kept = buffer()
    collector = make(
        replay_buffer=kept,
        batches=2,
        pre_collect_hook=lambda: calls.append("pre"),
        postproc=lambda batch: calls.append("postproc") or batch,
        post_collect_hook=lambda batch: calls.append(("post", kept.write_count)),
    )
    list(collector)
    assert calls == ["pre", ("post", 0), "postproc", "pre", ("post", 10), "postproc"]


# -- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, "int", PolicyVersion])
@over([SINGLE, SYNC_HERE, ASYNC_HERE])
def test_a_wrong_kind_of_track_policy_version_is_refused(make: Make, value: Any) -> None:
    with pytest.raises(TypeError, match="track_policy_version must be"):
        make(track_policy_version=value)


@pytest.mark.parametrize("value", ["gpu", 2.5])
@over([SINGLE, SYNC_HERE, ASYNC_HERE])
def test_what_is_no_storing_device_is_refused(make: Make, value: Any) -> None:
    with pytest.raises(ValueError, match="storing_device"):
        make(storing_device=value)


@over(HERE)
def test_a_function_of_tensors_has_no_weights(make: Make) -> None:
    collector = make(None, lambda observation: observation[..., :2])
    for source in ((), (net(),)):
        with pytest.raises(RuntimeError, match="no weights"):
            collector.update_policy_weights_(*source)


@over(HERE)
def test_a_collector_may_be_made_in_inference_mode(make: Make) -> None:
    with torch.inference_mode():
        collector = make(CountingGymEnv, net(1.0))
        inside = collector.next()
    layer = nn.Linear(3, 1)
    for batch in (inside, collector.next()):
        layer(batch["observation"]).sum().backward()
        assert not batch["observation"].is_inference()
