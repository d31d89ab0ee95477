"""Nodes that are collectors of several processes: what they deliver is what as many plain workers would."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from children import is_gone
from common import (
    LANE,
    STEP,
    assert_same,
    assert_trajectories,
    bounded,
    buffer,
    by_lane,
    ids_of,
    net,
    rows,
    saved,
    set_to,
    steps_of,
    until,
)
from inside import cut_off
from nodes import AsyncNodes, SyncNodes, counting

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.collectors.distributed.inner import INNER_BITS, InnerConfig, first_number
from swath.collectors.distributed.inside import Inside
from swath.collectors.worker import EngineTask
from swath.envs import GymEnv
from swath.errors import StallWarning, WorkerDiedError, WorkerRestartedWarning
from swath.keys import MASK, TRAJ_IDS, WORKER_BITS
from swath.rollout.engine_settings import EngineSettings
from swath.seeding import lane_seeds
from swath.testing import (
    CollectorConformance,
    CountingEnv,
    FaultyError,
    FaultyGymEnv,
    assert_frames_belong,
    assert_whole_in_a_row,
)

LENGTHS = [3, 9, 1, 4]
BOTH = pytest.mark.parametrize("inner", ["sync", "async"])
EACH = pytest.mark.parametrize(
    ("outer", "inner"), [(outer, inner) for outer in (SyncNodes, AsyncNodes) for inner in ("sync", "async")]
)
CROSSED = pytest.mark.parametrize(("outer", "inner"), [(SyncNodes, "async"), (AsyncNodes, "sync")])


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes collectors of two nodes of two workers, each with two lanes, that are shut down after the test."""
    made: list[Any] = []

    def build(outer: Any, inner: str, env: Any = None, policy: Any = None, *, nodes: int = 2, **options: Any) -> Any:
        own = {"frames_per_batch": 80, "num_workers_per_collector": 2, **options}
        envs = [counting(lengths=LENGTHS) if env is None else env] * nodes
        made.append(outer(envs, policy, collector_class=inner, **own))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown(raise_on_error=False)


def pids_of(collector: Any) -> list[int]:
    """Of all inner workers, node by node."""
    return list(itertools.chain(*collector.get_distant_attr("env.pid")))


def assert_streams(batches: list[Any], lanes: int = 8, are_all: bool = True) -> None:
    """Each lane goes on from batch to batch without a gap, from its beginning on, and no id is of two lanes."""
    found = by_lane(batches)
    assert set(found) == set(range(lanes)) if are_all else set(found) <= set(range(lanes))
    for frames in found.values():
        assert_frames_belong(frames)
        assert frames["observation"][0, STEP] == 0
    ids = [set(frames[TRAJ_IDS].tolist()) for frames in found.values()]
    assert len(set().union(*ids)) == sum(map(len, ids))


# -- frames --------------------------------------------------------------------------------------------------------


@EACH
def test_every_frame_is_where_it_belongs(make: Any, outer: Any, inner: str) -> None:
    """Also when the budget ends within a batch; nothing is left then."""
    collector = make(outer, inner, total_frames=840)
    pids = pids_of(collector)
    batches = list(collector)
    assert all(map(is_gone, pids))
    rows_of_a_node = (2, 2) if inner == "sync" else (2,)
    assert batches[0].shape[:-1] == ((2, *rows_of_a_node) if outer is SyncNodes else rows_of_a_node)
    assert sum(batch.numel() for batch in batches) == collector.stats()["frames"] == 840
    assert_streams(batches, are_all=batches[0].shape[:-1] == (2, 2, 2))


@CROSSED
def test_what_a_short_batch_leaves_is_delivered_next(make: Any, outer: Any, inner: str) -> None:
    collector = make(outer, inner, total_frames=120, num_workers_per_collector=1)
    batches = []
    while collector.stats()["frames"] < 120:
        batches.append(collector.next())
    assert sum(batch.numel() for batch in batches) == 120
    assert_streams([*batches, *(collector.rollout() for _ in range(6))], lanes=4, are_all=False)


class Uneven(CountingEnv):
    """The later a lane, the longer its step takes."""

    def _step(self, tensordict: Any) -> Any:
        time.sleep(0.0005 * (1 + 2 * self.first_lane))
        return super()._step(tensordict)


@BOTH
def test_steps_beyond_an_interrupt_are_delivered_next(make: Any, inner: str) -> None:
    """Workers stop at different steps when the trainer has enough, and none of what they have made is lost."""
    collector = make(SyncNodes, inner, lambda: Uneven((2,), lengths=LENGTHS), preemptive_threshold=0.5)
    batches = [collector.next() for _ in range(8)]
    assert any(not batch[MASK].all() for batch in batches)
    found: dict[int, list[Any]] = {}
    for batch in batches:
        for row in rows(batch):
            if row[MASK].any():
                found.setdefault(int(row["observation"][0, LANE]), []).append(row[row[MASK]])
    assert_streams([torch.cat(lane)[None] for lane in found.values()], are_all=inner == "sync")


class Stop:
    """Ends a worker's batches after steps that are not the same for all."""

    def __init__(self) -> None:
        self.asked = 0

    def collection_stopped(self) -> bool:
        self.asked += 1
        return self.asked % (3 + os.getpid() % 5) == 0


@CROSSED
def test_interruptor(make: Any, outer: Any, inner: str) -> None:
    collector = make(outer, inner, interruptor=Stop(), total_frames=400)
    batches = [rows(batch) for batch in collector]
    assert all(batch.shape[-1] <= 40 for batch in batches)
    if outer is SyncNodes:
        batches = [row[row[MASK]][None] for batch in batches for row in batch]
    else:
        assert any(batch.shape[-1] < 20 for batch in batches)
    assert_streams(batches, are_all=False)


@CROSSED
def test_whole_episodes(make: Any, outer: Any, inner: str) -> None:
    collector = make(outer, inner, total_frames=800, trajs_per_batch=3, traj_format="cat")
    found = []
    for number, batch in enumerate(collector):
        found += assert_whole_in_a_row(batch, lambda lane, episode: LENGTHS[episode % 4])
        if number == 9:
            collector.reset([1, 6])
    assert len(found) == len(set(found))
    stats = collector.stats()
    delivered = sum(LENGTHS[episode % 4] for _, episode in found)
    assert delivered + stats["dropped_frames"] == stats["frames"] == 800
    for lane in {lane for lane, _ in found}:
        mine = [episode for where, episode in found if where == lane]
        assert mine == sorted(mine)
        missing = sorted(set(range(mine[-1])) - set(mine))
        assert len(missing) <= 1 if lane in (1, 6) else not missing


@CROSSED
def test_init_random_frames(make: Any, outer: Any, inner: str) -> None:
    """As many batches as the trainer says, although workers collect ahead."""
    is_random = []
    for batch in make(outer, inner, None, net(50.0), init_random_frames=200, total_frames=800):
        is_random.append(bool((batch["action"] != 50.0).any()))
        assert not is_random[-1] or (batch["action"].sum(-1) == 1).all()
    assert sum(is_random) == 3


@BOTH
def test_reset_of_lanes(make: Any, inner: str) -> None:
    """Lanes are counted over all nodes and their workers; also where an env has more dimensions."""
    options = {"max_staleness": 0} if inner == "async" else {}
    env = lambda: CountingEnv((1, 2), lengths=100)  # noqa: E731
    collector = make(SyncNodes, inner, env, frames_per_batch=40, collector_kwargs=options)
    seen = [collector.next() for _ in range(4)]
    collector.reset([1, 2])
    seen += [collector.next() for _ in range(4)]
    begun = {lane: int(frames["observation"][:, 1].max()) for lane, frames in by_lane(seen).items()}
    assert begun == {lane: int(lane in (2, 3, 4, 5)) for lane in range(8)}


# -- ids and seeds -------------------------------------------------------------------------------------------------


def test_numbers_of_nodes_are_limited() -> None:
    assert first_number(2**15 - 1) < 2**23
    with pytest.raises(RuntimeError, match="too many nodes"):
        first_number(2**15)


def collected(collector: Any, bits: int) -> dict[tuple[int, int], Any]:
    """The first frames of each worker's lanes, which are known by their ids."""
    assert collector.set_seed(7) != 7
    found: dict[tuple[int, int], list[Any]] = {}
    for _ in range(12):
        for place, row in enumerate(rows(collector.next())):
            number = int(row[TRAJ_IDS][0]) >> WORKER_BITS
            worker = 2 * (number >> bits) + (number & 2**bits - 1) if bits else number
            found.setdefault((worker, place % 2), []).append(row.exclude(TRAJ_IDS))
    return {lane: torch.cat(frames)[:40] for lane, frames in found.items()}


@BOTH
def test_seeds_are_those_of_as_many_plain_workers(make: Any, inner: str) -> None:
    """Envs and the noise of policies; also when something was collected before."""
    env = lambda: GymEnv("CartPole-v1", num_envs=2)  # noqa: E731
    policy = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))  # which draws from torch's generator
    options = {"exploration_type": None, "track_policy_version": False}
    plain = MultiSyncCollector([env] * 4, policy, frames_per_batch=80, debug=True, **options)
    own = make(SyncNodes, inner, env, policy, **options)
    own.next()
    wanted, found = collected(plain, 0), collected(own, INNER_BITS)
    assert inner == "async" or len(found) == 8
    for lane, frames in found.items():
        assert_same(frames, wanted[lane])
    assert plain.set_seed(3) == own.set_seed(3)
    plain.shutdown()


def test_a_worker_that_replaces_another_repeats_no_seed() -> None:
    config = InnerConfig([counting()] * 2, frames_per_batch=1, first_worker=4)
    task = EngineTask(index=1, number=700, settings=EngineSettings(), create_env_fn=counting(), seed=(7, False))
    replaced = config.task_of(task)
    assert isinstance(replaced, EngineTask)
    assert replaced.index == 5
    assert replaced.seed is not None
    assert not set(lane_seeds(replaced.seed[0], 100)) & set(lane_seeds(7, 1000))
    assert config.task_of(replace(task, seed=(7, True))).seed == (7, True)


# -- weights and state ---------------------------------------------------------------------------------------------


@CROSSED
def test_frames_tell_the_version_that_made_them(make: Any, outer: Any, inner: str) -> None:
    policy = net(0.0)
    collector = make(outer, inner, None, policy, track_policy_version=True)
    for version in itertools.count(1):
        batch = collector.next()
        assert (batch["action"] == batch["policy_version"][..., None]).all()
        if batch["policy_version"].min() > 1:
            break
        set_to(policy.module, float(version))
        collector.update_policy_weights_()
        assert collector.stats()["policy_version"] == version


def test_weights_for_one_node(make: Any) -> None:
    """At first all have the same, wherever policies were made."""
    collector = make(SyncNodes, "sync", policy_factory=lambda: net(float(torch.rand(()))), track_policy_version=True)
    (first,) = collector.next()["action"].unique()
    collector.update_policy_weights_(net(2.0), worker_ids=[1])
    batch = collector.next()
    assert (batch["action"][0] == first).all()
    assert (batch["action"][1] == 2.0).all()
    assert (batch["policy_version"][1] == 1).all()


@CROSSED
def test_state_goes_on_elsewhere(make: Any, outer: Any, inner: str) -> None:
    """With its weights, versions and counters, and with new ids; also to versions that are older."""
    first = make(outer, inner, None, net(0.0), total_frames=800, track_policy_version=True)
    before = [first.next()]
    first.update_policy_weights_(net(1.0))
    before.append(first.next())
    state = saved(first.state_dict())
    second = make(outer, inner, None, net(7.0), total_frames=800, track_policy_version=True)
    for _ in range(4):
        second.update_policy_weights_(net(8.0))
    before.append(second.next())
    second.load_state_dict(state)
    after = list(second)
    assert sum(batch.numel() for batch in after) == 800 - sum(batch.numel() for batch in before[:2])
    for batch in after:
        assert (batch["action"] == 1.0).all()
        assert (batch["policy_version"] == 1).all()
        assert_frames_belong(rows(batch)[:2])
    assert not ids_of(before) & ids_of(after)


# -- questions -----------------------------------------------------------------------------------------------------


def test_questions_are_asked_of_every_worker(make: Any, tmp_path: Path) -> None:
    collector = make(SyncNodes, "sync", None, net(3.0))
    assert collector.get_distant_attr("worker_idx") == [[0, 1], [2, 3]]
    assert collector.get_distant_attr("env.batch_size") == [[(2,)] * 2] * 2
    assert collector.cascade_execute("get_policy_version") == [[0, 0]] * 2
    assert collector.getattr_policy("in_keys") == ["observation"]
    collector.set_post_collect_hook(lambda batch: (tmp_path / str(os.getpid())).write_text(str(batch.shape[-1])))
    numbers = (collector.next()[TRAJ_IDS] >> WORKER_BITS)[:, :, 0, 0]
    assert numbers.tolist() == [[0, 1], [1 << INNER_BITS, (1 << INNER_BITS) + 1]]
    notes = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert notes == {str(pid): "10" for pid in pids_of(collector)}
    collector.update_policy_weights_(weights_dict={"policy.module": nn_state(4.0)})
    assert (collector.next()["action"] == 4.0).all()


def nn_state(value: float) -> dict[str, Any]:
    return dict(net(value).module.state_dict())


@BOTH
def test_steps_are_seen_while_they_are_made(make: Any, inner: str, tmp_path: Path) -> None:
    """By the trainer, before the batch is there."""
    gate = tmp_path / "gate"

    class Waits(CountingEnv):
        made = 0

        def _step(self, tensordict: Any) -> Any:
            self.made += 1
            while self.made == 6 and not gate.exists():
                time.sleep(0.001)
            return super()._step(tensordict)

    collector = make(SyncNodes, inner, lambda: Waits((2,), lengths=LENGTHS), nodes=1)
    thread = threading.Thread(target=collector.next)
    thread.start()
    wanted = 5 if inner == "sync" else 10
    until(lambda: steps_of(collector, 0) == wanted)
    gate.touch()
    thread.join(30.0)
    assert not thread.is_alive()


# -- faults --------------------------------------------------------------------------------------------------------


@BOTH
def test_a_dead_worker_ends_its_node(make: Any, inner: str) -> None:
    collector = make(SyncNodes, inner)
    collector.next()
    pids = pids_of(collector)
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=f"Worker 1 .pid {pids[3]}. was killed by SIGKILL") as caught:
        bounded(lambda: deque(collector, maxlen=0))  # the other worker may be quick to make some more
    inner_note, outer_note = caught.value.__notes__
    assert "node 1 (2 inner workers)" in inner_note
    assert "in worker 1 " in outer_note
    assert "SyncNodes" in outer_note
    until(lambda: all(map(is_gone, pids)))


@pytest.mark.filterwarnings("ignore::swath.errors.WorkerRestartedWarning")
def test_a_node_is_restarted_with_all_its_workers(make: Any) -> None:
    collector = make(AsyncNodes, "sync", on_worker_failure="restart", total_frames=1600)
    collector.set_seed(3)
    before = [collector.next()]
    pids = pids_of(collector)
    os.kill(pids[0], signal.SIGKILL)
    after = list(collector)
    assert sum(batch.numel() for batch in (*before, *after)) == 1600
    assert collector.stats()["worker_restarts"] == 1
    for batch in after:
        assert_frames_belong(rows(batch)[:2])
    assert {1, 2} <= {number >> WORKER_BITS >> INNER_BITS for number in ids_of(after)} <= {0, 1, 2}
    assert all(map(is_gone, pids))


@CROSSED
def test_an_inner_worker_is_restarted(make: Any, outer: Any, inner: str) -> None:
    """The others do not notice, ids are new, and what was lost is counted."""
    options = {"collector_kwargs": {"on_worker_failure": "restart"}, "total_frames": 1600}
    collector = make(outer, inner, **options)
    collector.set_seed(3)
    before = [collector.next() for _ in range(4)]
    pids = pids_of(collector)
    os.kill(pids[2], signal.SIGKILL)
    until(lambda: is_gone(pids[2]))
    with pytest.warns(WorkerRestartedWarning, match="Worker 0 of node 1 .2 inner workers. is restarted"):
        after = list(collector)
    batches = [*before, *after]
    assert sum(batch.numel() for batch in batches) == 1600
    assert collector.stats()["worker_restarts"] == 1
    for lane, frames in by_lane(batches).items():
        if lane not in (4, 5):
            assert_frames_belong(frames)
    numbers = {number >> WORKER_BITS for number in ids_of(batches)}
    assert ({257, 258} if inner == "sync" else {257}) <= numbers <= {0, 1, 256, 257, 258}


def test_an_inner_worker_is_dropped(make: Any) -> None:
    collector = make(AsyncNodes, "async", nodes=1, collector_kwargs={"on_worker_failure": "drop"}, total_frames=800)
    before = [collector.next() for _ in range(2)]
    os.kill(pids_of(collector)[0], signal.SIGKILL)
    with pytest.warns(WorkerRestartedWarning, match="Worker 0 of node 0 .* is dropped"):
        after = list(collector)
    assert sum(batch.numel() for batch in (*before, *after)) == 800
    assert int(after[-1]["observation"][0, 0, LANE]) == 2


def test_an_error_of_an_env_keeps_its_type(make: Any) -> None:
    env = lambda: GymEnv(FaultyGymEnv("raise", at=7))  # noqa: E731
    collector = make(SyncNodes, "sync", env)
    with pytest.raises(FaultyError, match="fails at step 7") as caught:
        collector.next()
    assert any("of node" in note for note in caught.value.__notes__)
    assert any("SyncNodes" in note for note in caught.value.__notes__)


def test_a_worker_that_hangs_is_killed_within_its_node(make: Any) -> None:
    """By the trainer's limits, if the node has none of its own."""
    env = lambda: GymEnv(FaultyGymEnv("hang", at=7))  # noqa: E731
    collector = make(SyncNodes, "async", env, nodes=1, stall_warning_s=1.0, stall_timeout_s=3.0)
    with (
        pytest.warns(StallWarning, match="of node 0"),
        pytest.raises(WorkerDiedError, match="stall_timeout_s=3"),
    ):
        bounded(collector.next)


# -- processes and arguments ---------------------------------------------------------------------------------------


def test_a_node_that_is_cut_off_ends_its_workers(make: Any) -> None:
    collector = make(AsyncNodes, "sync", on_worker_failure="drop")
    collector.next()
    pids = pids_of(collector)
    cut_off(collector, 1)
    with pytest.warns(WorkerRestartedWarning, match="Worker 1 of AsyncNodes.* is dropped"):
        bounded(lambda: [collector.next() for _ in range(8)])
    until(lambda: all(map(is_gone, pids[2:])))
    assert not any(map(is_gone, pids[:2]))


def test_a_node_that_is_a_process(make: Any) -> None:
    """Its workers die with it."""
    collector = make(SyncNodes, "sync", nodes=1, sockets=False)
    assert_streams([collector.next() for _ in range(3)], lanes=4)
    pids = pids_of(collector)
    assert len({*pids, *collector.worker_pids}) == 3
    os.kill(collector.worker_pids[0], signal.SIGKILL)
    until(lambda: all(map(is_gone, pids)))


def test_nodes_in_this_process(make: Any) -> None:
    collector = make(AsyncNodes, "sync", sockets=False, debug=True, total_frames=800)
    pids = pids_of(collector)
    assert_streams(list(collector))
    assert all(map(is_gone, pids))


class TestConformance(CollectorConformance):
    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> Any:
        """One node with one worker, which begin a batch when it is asked for."""
        env = counting(lanes, lengths)
        prompt = {"max_staleness": 0, "collector_kwargs": {"max_staleness": 0}}
        return AsyncNodes([env], None, collector_class=MultiAsyncCollector, **prompt, **options)


def test_a_single_engine_takes_arguments_too() -> None:
    options = {"max_frames_per_traj": 2, "exploration_type": None}
    env = counting(1, 100)
    with SyncNodes([env], collector_class=Collector, collector_kwargs=options, frames_per_batch=6) as collector:
        assert collector.next()["step_count"].flatten().tolist() == [0, 1] * 3


REFUSED = {
    "unknown": (("ray",), ValueError, "collector_class must be one of single, .*'ray'"),
    "single": (("single", 2), RuntimeError, "num_workers_per_collector=2 needs"),
    "many": (("sync", 257), ValueError, "above 256"),
    "trainer's": (("sync", 2, {"total_frames": 5}), ValueError, "has 'total_frames'"),
    "engine": (("single", 1, {"slots_per_worker": 5}), ValueError, "has 'slots_per_worker'"),
    "drop": (("sync", 2, {"on_worker_failure": "drop"}), ValueError, "rows of all workers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    arguments, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        Inside(*arguments)


def test_replay_buffers_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="cannot write to a replay buffer"):
        make(AsyncNodes, "sync", replay_buffer=buffer())


@pytest.mark.parametrize("inner", ["sync", "async"])
def test_one_node_fills_the_buffer_frame_by_frame(inner: str) -> None:
    kept = buffer()
    collector = DistributedCollector(
        [CountingEnv],
        frames_per_batch=40,
        total_frames=72,
        sync=True,
        launcher="mp",
        collector_class=inner,
        num_workers_per_collector=2,
        replay_buffer=kept,
    )
    assert list(collector) == [None, None]
    assert kept[:]["observation"].shape == (72, 3)
    assert_trajectories(kept[:])
