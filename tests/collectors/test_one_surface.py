"""The same call means the same in one process and in many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from common import actor, buffer, first_steps, ids_of, keys, layout, net, rows
from kinds import ALL, ASYNC_HERE, EVERY, HERE, SINGLE, SYNC, SYNC_HERE, Kind, Make, over
from tensordict import TensorDictBase

from swath.collectors import PolicyVersion
from swath.envs import SerialEnv
from swath.keys import TRAJ_IDS
from swath.testing import CountingEnv


@pytest.mark.parametrize(
    "index",
    [[1, 2], torch.tensor([1, 2]), torch.tensor([False, True, True, False]), [False, True, True, False]],
    ids=["list", "tensor", "mask", "list of flags"],
)
@over([SINGLE, SYNC_HERE])
def test_reset_addresses_lanes_over_all_workers(make: Make, kind: Kind, index: Any) -> None:
    """Of two workers with two lanes each, lane 1 is the second of the first, and lane 2 the first of the next."""
    collector = make(lanes=4 // max(1, kind.workers), lengths=1000)
    first = rows(collector.next())
    collector.reset(index)
    batch = rows(collector.next())
    assert first_steps(batch) == [10, 0, 0, 10]
    went_on = first[TRAJ_IDS][:, -1] == batch[TRAJ_IDS][:, 0]
    assert went_on.tolist() == [True, False, False, True]
    assert not ids_of([batch[1:3]]) & ids_of([first])
    collector.reset([])
    assert first_steps(collector.next()) == [20, 10, 10, 20]
    collector.reset()
    assert first_steps(collector.next()) == [0, 0, 0, 0]


@over([SYNC_HERE, SYNC])
def test_reset_of_workers_begins_anew_in_all_their_lanes(make: Make) -> None:
    """Without lanes, a worker is one; `reset_idx` is the name that TorchRL has for workers."""
    collector = make(lanes=2, lengths=1000)
    for number, worker in enumerate((1, [1]), start=1):
        collector.next()
        collector.reset(worker=worker)
        assert first_steps(collector.next()) == [20 * number - 10, 20 * number - 10, 0, 0]
    collector.reset(worker=[0, 1])
    assert first_steps(collector.next()) == [0, 0, 0, 0]
    one_lane = make(lengths=1000, workers=3)
    one_lane.next()
    one_lane.reset(1)
    assert first_steps(one_lane.next()) == [10, 0, 10]
    one_lane.reset(reset_idx=[True, False, False])
    assert first_steps(one_lane.next()) == [0, 10, 20]


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
        with pytest.raises((ValueError, IndexError), match=str(lanes) if "index" in arguments else "worker"):
            collector.reset(**arguments)
    assert set(first_steps(collector.next())) == {0}
    if not kind.workers and not kind.many_envs:
        with pytest.raises(RuntimeError, match="no batch dimension"):
            make().reset([0])


@over(EVERY)
def test_the_stages_tell_how_a_policy_runs_and_what_is_slow(make: Make) -> None:
    collector = make(None, actor())
    for _ in range(2):  # before the first batch, and behind it
        assert collector.policy_stages == ["MLPStage", "CategoricalStage"]
        assert repr(collector.policy_stages) == "['MLPStage', 'CategoricalStage']"
        collector.next()
    told = make(None, lambda td: td.set("action", td["observation"][..., :2])).policy_stages
    assert told == ["TensorDictStage"]
    assert "function is called as a whole: it is none of tensordict's modules" in repr(told)


@pytest.mark.parametrize("tracked", [None, False, PolicyVersion()], ids=["default", "off", "on"])
@over(HERE)
def test_the_version_is_a_number_whether_frames_carry_it_or_not(make: Make, tracked: Any) -> None:
    own = net()
    collector = make(None, own, **({} if tracked is None else {"track_policy_version": tracked}))
    for version, arguments in enumerate([(), (own,), (net(5.0),), (net(6.0).state_dict(),), ()], start=1):
        collector.update_policy_weights_(*arguments)
        assert collector.policy_version == collector.get_policy_version() == version
        assert collector.stats()["policy_version"] == version
    collector.increment_version()
    assert collector.policy_version == 6


@over([kind for kind in EVERY if "keep_env_open" in kind.cannot])
def test_envs_of_workers_cannot_be_kept_open(make: Make) -> None:
    collector = make()
    with pytest.raises(RuntimeError, match="close_env=False"):
        collector.shutdown(close_env=False)
    assert collector.next() is not None, "it is none the worse for it"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"env": lambda: SerialEnv(2, CountingEnv), "lanes": 2},
        {"max_frames_per_traj": 3, "track_policy_version": PolicyVersion()},
        {"track_traj_ids": False, "compact_obs": True, "storing_device": "cpu"},
    ],
    ids=", ".join,
)
@over(EVERY)
def test_fake_tensordict_is_zeros_with_the_layout_of_a_batch(make: Make, options: dict[str, Any]) -> None:
    collector = make(policy=actor(), **options)
    fake = collector.fake_tensordict()
    assert layout(fake) == layout(collector.next())
    assert all(not fake.get(key).any() for key in fake.keys(True, True))


@pytest.mark.parametrize(("how", "shape"), [("stack", (2, 3, 10)), (0, (6, 10)), (-1, (3, 20))])
@over([SYNC_HERE])
def test_fake_tensordict_is_joined_as_batches_are(make: Make, how: Any, shape: tuple[int, ...]) -> None:
    collector = make(lanes=3, cat_results=how)
    assert collector.fake_tensordict().shape == shape
    assert layout(collector.fake_tensordict()) == layout(collector.next())


@over(EVERY)
def test_stats_have_the_same_keys(make: Make, kind: Kind) -> None:
    collector = make(batches=4)
    first = set(collector.stats())
    list(collector)
    counts = ["frames", "batches", "episodes", "total_frames", "completed", "requested_frames_per_batch"]
    workers = ["policy_version", "pending_frames", "dropped_frames", "lost_frames", "workers", "workers_alive"]
    times = ["worker_restarts", "time/env", "time/policy", "time/bookkeeping"]
    assert {*counts, *workers, *times} <= first
    with SYNC_HERE.build(batches=4) as other:
        common = set(other.stats())
    own = {name for name in first ^ common if "lag" not in name and not name.startswith("server/")}
    assert own <= {"waiting_batches"}
    assert ("policy_lag" in collector.stats()) == (not kind.joins)


@pytest.mark.parametrize("writes", [False, True], ids=["delivered", "written"])
@over(ALL)
def test_hooks_and_post_processing_run_where_they_should_and_in_order(
    make: Make, kind: Kind, writes: bool, tmp_path: Path
) -> None:
    """Hooks where the rollout is made, on the batch as it was collected; post-processing there only if it is written.

    What was collected is split and post-processed after `post_collect_hook`, and then written.
    """
    calls, kept = tmp_path / "calls", buffer() if writes else None

    def note(call: str) -> None:
        with calls.open("a") as file:
            file.write(f"{os.getpid()} {call}\n")

    def hook(batch: TensorDictBase) -> None:
        note(f"post {tuple(batch.shape)}")
        assert "seen" not in keys(batch)
        assert kind.workers or kept is None or kept.write_count == 10 * (calls.read_text().count("post ") - 1)

    collector = make(
        batches=2,
        split_trajs=True,
        postproc=lambda batch: (note("postproc"), batch.set("seen", torch.ones(*batch.shape, 1)))[1],
        pre_collect_hook=lambda: note("pre"),
        post_collect_hook=hook,
        replay_buffer=kept,
        **({"init_fn": lambda: note("init")} if kind.workers else {}),
    )
    here = str(os.getpid())
    pids = {str(pid) for pid in collector.worker_pids} if "share_objects" in kind.cannot else {here}
    list(collector)
    noted = [line.split(maxsplit=1) for line in calls.read_text().splitlines()]
    assert {pid for pid, call in noted if call == "postproc"} == (pids if writes else {here})
    for pid in pids:
        own = [call for who, call in noted if who == pid]
        hooks = [call for call in own if call not in ("init", "postproc")]
        assert hooks == ["pre", "post (10,)"] * (len(hooks) // 2)
        assert hooks
        assert ("init" in own) == (kind.workers > 0)
        if not kind.workers or (writes and pid != here):
            assert own[own.count("init") :] == ["pre", "post (10,)", "postproc"] * (len(hooks) // 2)
    assert kept is None or (kept[:]["seen"] == 1).all()
