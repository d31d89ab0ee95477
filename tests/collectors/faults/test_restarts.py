"""`on_worker_failure="restart"` and `"drop"`: collection goes on, and what is delivered is as right as ever."""

import contextlib
import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from children import is_gone
from common import LANE, STEP, assert_trajectories, buffer, ids_of, net, steps_of, until
from fault_tools import (
    advance,
    advance_until_it_raises,
    doing,
    end,
    exit_at_once,
    signal_itself,
    sleep_long,
    told,
    within,
)
from inside import WORKER_BITS, StallWarning, WorkerDiedError, has_named_a_stall, versions_of_workers
from kinds import ALL_FALLIBLE, FALLIBLE, SPREAD, STARTED, SYNC, Kind, Make, over
from tensordict import TensorDictBase

from swath.collectors import WorkerRestartedWarning
from swath.keys import TRAJ_IDS
from swath.testing import (
    CountingEnv,
    FaultyError,
    assert_frames_belong,
    assert_whole_episodes,
    assert_whole_in_a_row,
    counted,
)

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore::swath.collectors.WorkerRestartedWarning"),
]
PACE_S = 0.002
"""What others take for a step, so that they cannot have collected everything before the worker's 34th."""
ENDINGS: dict[str, Callable[[], Any]] = {
    "kill": signal_itself(signal.SIGKILL),
    "exit": exit_at_once(3),
    "raise": lambda: {}["missing"],
}


class Diary:
    """Checks the batches that come one after the other."""

    def __init__(self) -> None:
        self.batches: list[TensorDictBase] = []

    def add(self, batch: TensorDictBase) -> None:
        assert_frames_belong(batch)
        self.batches.append(batch.clone())

    def add_all(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            self.add(batch)

    @property
    def frames(self) -> int:
        return sum(batch.numel() for batch in self.batches)

    def has_any(self, lane: int) -> bool:
        return any((batch["observation"][..., LANE] == lane).any() for batch in self.batches)

    def rows(self, lane: int) -> TensorDictBase:
        """All frames of a lane, in order."""
        found = []
        for batch in self.batches:
            rows = batch.reshape(-1, batch.shape[-1])
            found += [row for row in rows if row["observation"][0, LANE] == lane]
        return torch.cat(found)

    def check(self, survivors: list[int], replaced: list[int]) -> None:
        """Survivors have lost no frame; those that were replaced have gone on with new episodes and new ids."""
        for lane in survivors:
            assert_frames_belong(self.rows(lane))
        for lane in replaced:
            rows = self.rows(lane)
            numbers, ids = counted(rows), rows.get(TRAJ_IDS).numpy()
            same = ids[1:] == ids[:-1]
            np.testing.assert_array_equal(numbers[1:][same], numbers[:-1][same] + np.array([0, 0, 1]))
            assert (numbers[1:][~same][:, STEP] == 0).all(), "an episode begins in its middle"
            assert len(np.unique(ids)) == 1 + (~same).sum(), "one id names two trajectories"
        ids = {lane: set(self.rows(lane).get(TRAJ_IDS).tolist()) for lane in (*survivors, *replaced)}
        assert sum(map(len, ids.values())) == len(set.union(*ids.values())), "lanes share ids"


@pytest.mark.parametrize("policy", ["restart", "drop"])
@pytest.mark.parametrize("ending", ENDINGS)
@over(ALL_FALLIBLE, needs="go_on_within")
def test_a_failure_while_collecting(make: Make, kind: Kind, ending: str, policy: str, tmp_path: Any) -> None:
    once = str(tmp_path / "done") if policy == "restart" else None
    envs = doing(ENDINGS[ending], once=once, at=34, lengths=7, others_pace_s=PACE_S)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collector = make(envs, on_worker_failure=policy, total_frames=400)
        diary = Diary()
        if kind.starts:
            until(lambda: not collector.is_running())
            assert_trajectories(collector.replay_buffer[:])
            assert collector.replay_buffer.write_count == 400
        else:
            diary.add_all(collector)
            assert diary.frames == 400
            diary.check([0], [1])
            workers = {number >> WORKER_BITS for number in ids_of(diary.batches)}
            assert workers == ({0, 1, 2} if policy == "restart" else {0, 1})
    (said,) = [str(warning.message) for warning in caught if warning.category is WorkerRestartedWarning]
    assert said.startswith("Worker 1 ")
    assert ("restarted (1 of 3)" if policy == "restart" else "dropped, 1 are left") in said
    stats = collector.stats()
    assert (stats["frames"], stats["worker_restarts"]) == (400, int(policy == "restart"))
    if "know_losses" not in kind.cannot or ending == "raise":
        assert stats["lost_frames"] == 33 % (10 if kind.joins else 20)  # the last step was not made


@over(SPREAD, needs="go_on_within")
def test_restart_again_and_again_from_outside(make: Make, kind: Kind) -> None:
    collector = make(workers=3, lengths=[3, 11, 30], frames_per_batch=30, on_worker_failure="restart", max_restarts=100)
    diary, killed, episodes = Diary(), set[int](), 0
    random = np.random.default_rng(0)
    for number in range(40):
        diary.add(collector.next())
        assert collector.stats()["episodes"] >= episodes, "episodes were forgotten"
        episodes = collector.stats()["episodes"]
        if number % 5 == 2:
            pid = collector.worker_pids[int(random.integers(1, 3))]
            if pid not in killed:  # otherwise its death is not known yet
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)

    def has_gone_on() -> bool:
        """Where a worker takes long to start, those that live may have made all batches."""
        diary.add(collector.next())
        return collector.stats()["worker_restarts"] == len(killed) and all(map(diary.has_any, range(3)))

    until(has_gone_on, 30)
    diary.check([0], [1, 2])
    assert collector.stats()["workers_alive"] == 3


@pytest.mark.parametrize("call", ["state_dict", "update_policy_weights_", "set_seed", "reset"])
@over(SPREAD, needs="go_on_within")
def test_restart_between_batches(make: Make, kind: Kind, call: str) -> None:
    collector = make(policy=net(), on_worker_failure="restart")
    diary = Diary()
    diary.add(collector.next())
    end(collector.worker_pids[1])
    with within(10):
        getattr(collector, call)(*([3] if call == "set_seed" else []))
    seen: set[float] = set()
    deadline = time.monotonic() + 20
    while len(seen) < 2 or not collector.stats()["worker_restarts"]:
        assert time.monotonic() < deadline
        batch = collector.next()
        assert_frames_belong(batch)
        seen |= set(batch["observation"][..., LANE].flatten().tolist())
    assert set(collector.state_dict()) >= {"worker0", "worker1"}


@over([SYNC])
def test_a_new_worker_acts_with_the_newest_weights(make: Make) -> None:
    policy = net()
    collector = make(policy=policy, on_worker_failure="restart")
    collector.next()
    with torch.no_grad():
        policy.module.weight.fill_(3.0)
    collector.update_policy_weights_()
    end(collector.worker_pids[1])
    collector.next()
    weights = collector.map_fn("policy.state_dict", [()] * 2)
    assert all((own["module.weight"] == 3.0).all() for own in weights)
    assert versions_of_workers(collector) == {1}


@pytest.mark.parametrize("extend_buffer", [True, False])
@over([STARTED])
def test_a_worker_killed_at_any_moment_while_it_writes(make: Make, extend_buffer: bool) -> None:
    collector = make(
        workers=2,
        lengths=[5, 30],
        replay_buffer=buffer(100_000, batch_size=16),
        on_worker_failure="restart",
        max_restarts=100,
        extend_buffer=extend_buffer,
        total_frames=4000,
        frames_per_batch=50,
    )
    restarts = 0
    while collector.is_running():
        victim = collector.worker_pids[restarts % 2]
        wanted = collector.replay_buffer.write_count + 200
        until(lambda wanted=wanted: collector.replay_buffer.write_count >= wanted or not collector.is_running())
        if collector.is_running() and restarts < 8:
            os.kill(victim, signal.SIGKILL)
            restarts += 1
            until(lambda n=restarts: not collector.is_running() or collector.stats()["worker_restarts"] == n)
    stats = collector.stats()
    written = collector.replay_buffer.write_count
    assert stats["frames"] == 4000
    assert stats["worker_restarts"] >= 3
    assert written == 4000
    frames = collector.replay_buffer[:]
    assert_trajectories(frames)


def killed_at(method: str, count: int, once: Any, *, after: bool = True) -> Callable[[], None]:
    """An `init_fn`: one worker is killed as soon as it has done `method` so many times, or is about to."""

    def init() -> None:
        owner, name = resolve_name(method.rpartition(".")[0]), method.rpartition(".")[2]
        original, calls = getattr(owner, name), itertools.count(1)

        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options) if after else None
            if next(calls) == count:
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(once, os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)
            return result if after else original(*args, **options)

        setattr(owner, name, call)

    return init


@over(SPREAD, needs="know_losses")
def test_a_batch_whose_receipt_was_never_sent_is_counted_as_lost(make: Make, kind: Kind, tmp_path: Any) -> None:
    """It is collected and told of, and its worker is killed before it has handed it over."""
    init = killed_at("swath.runtime.processes:ProcessLink.finish", 2, str(tmp_path / "once"), after=False)
    collector = make(init_fn=init, on_worker_failure="restart", frames_per_batch=20)
    while not collector.stats()["worker_restarts"]:
        assert collector.next().numel() == 20
    collector.set_seed(0)  # after which nothing is under way
    assert collector.stats()["lost_frames"] == (10 if kind.joins else 20)


@pytest.mark.parametrize(
    ("method", "after", "extend_buffer"),
    [
        ("swath.data.ledger:Ledger.reserve", True, True),
        ("swath.data.ledger:Ledger.commit", True, True),
        ("swath.data.ledger:Ledger.commit", True, False),
        ("swath.runtime.processes:ProcessLink.finish", False, True),
    ],
    ids=["before it is written", "before it is counted", "before it is counted, frame by frame", "before its receipt"],
)
@over(FALLIBLE, needs="write_there")
def test_a_buffer_gets_what_the_budget_says(
    make: Make, kind: Kind, tmp_path: Any, method: str, after: bool, extend_buffer: bool
) -> None:
    """Whenever a worker is killed: in the middle of a write, behind it, or behind its report."""
    collector = make(
        replay_buffer=buffer(batch_size=16),
        init_fn=killed_at(method, 7 if not extend_buffer else 2, str(tmp_path / "once"), after=after),
        on_worker_failure="restart",
        extend_buffer=extend_buffer,
        total_frames=400,
        frames_per_batch=20,
    )
    if kind.starts:
        until(lambda: not collector.is_running())
    else:
        list(collector)
    stats = collector.stats()
    assert (stats["frames"], stats["worker_restarts"]) == (400, 1)
    assert collector.replay_buffer.write_count == len(collector.replay_buffer) == 400
    assert_trajectories(collector.replay_buffer[:])


@pytest.mark.parametrize("moment", ["pause", "state_dict"])
@over([STARTED])
def test_restart_while_resting(make: Make, moment: str) -> None:
    collector = make(on_worker_failure="restart")
    advance(collector)
    if moment == "pause":
        with collector.pause():
            end(collector.worker_pids[1])
            before = collector.replay_buffer.write_count
            until(lambda: collector.is_running() and collector.stats()["worker_restarts"])
            collector.state_dict()
            assert collector.replay_buffer.write_count == before
    else:
        end(collector.worker_pids[1])
        assert "worker1" in collector.state_dict()
    written = collector.stats("per_worker")["worker_1/frames"]
    until(lambda: collector.is_running() and collector.stats("per_worker")["worker_1/frames"] > written)
    assert_trajectories(collector.replay_buffer[:])


@over([SYNC])
def test_a_worker_that_hangs_is_killed_by_the_user_and_replaced(make: Make, tmp_path: Any) -> None:
    envs = doing(sleep_long, once=str(tmp_path / "done"), at=15)
    collector = make(envs, on_worker_failure="restart", stall_warning_s=0.3)
    diary = Diary()
    diary.add(collector.next())
    pid = collector.worker_pids[1]

    def kill_when_it_was_named() -> None:
        until(lambda: has_named_a_stall(collector))
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_when_it_was_named)
    killer.start()
    with pytest.warns(StallWarning, match=f"pid {pid}"):
        diary.add(collector.next())
    killer.join()
    diary.add(collector.next())
    diary.check([0], [1])


@pytest.mark.parametrize(
    ("most", "deed", "error_type"),
    [(0, signal_itself(signal.SIGKILL), WorkerDiedError), (2, lambda: {}["missing"], KeyError)],
    ids=["0", "2"],
)
@over([SYNC])
def test_max_restarts(make: Make, most: int, deed: Any, error_type: type[Exception]) -> None:
    collector = make(doing(deed, at=25), on_worker_failure="restart", max_restarts=most)
    error = advance_until_it_raises(collector)
    assert type(error) is error_type
    assert not most or f"restarted {most} times" in told(error)
    assert collector.stats()["worker_restarts"] == most


@over([SYNC])
def test_a_worker_that_cannot_even_be_made_again(make: Make, tmp_path: Any) -> None:
    def make_env() -> CountingEnv:
        if (tmp_path / "broken").exists():
            raise FaultyError(0, 0)
        return CountingEnv()

    collector = make([make_env] * 2, on_worker_failure="restart", max_restarts=2)
    collector.next()
    (tmp_path / "broken").touch()
    end(collector.worker_pids[0])
    with within(15):
        error = advance_until_it_raises(collector)
    assert type(error) is FaultyError


@over(ALL_FALLIBLE)
def test_a_replacement_has_a_clock_of_its_own(make: Make, kind: Kind, tmp_path: Any) -> None:
    """One that is slow to be made has not stalled: `start_timeout_s` says how long that may take."""

    def make_env() -> CountingEnv:
        if (tmp_path / "slow").exists():
            time.sleep(2.5)
        return CountingEnv()

    collector = make([make_env] * 2, on_worker_failure="restart", max_restarts=1, stall_timeout_s=2.0)
    advance(collector)
    (tmp_path / "slow").touch()
    end(former := collector.worker_pids[0])
    until(lambda: advance(collector) is not None and collector.worker_pids[0] != former)
    if "report_steps" not in kind.cannot:
        until(lambda: advance(collector) is not None and steps_of(collector, 0))
    for _ in range(3):
        advance(collector)
    assert collector.stats()["worker_restarts"] == 1


@over([SYNC])
def test_a_restart_that_is_an_error_for_the_user_loses_nothing(make: Make) -> None:
    collector = make(on_worker_failure="restart")
    collector.rollout()
    end(collector.worker_pids[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(WorkerRestartedWarning):
            collector.rollout()
        for _ in range(3):
            with within(5):
                assert_frames_belong(collector.rollout())
    assert collector.stats()["worker_restarts"] == 1


# -- episodes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["padded", "cat"])
@over(SPREAD)
def test_the_open_episode_of_a_dead_worker_is_never_delivered_as_complete(make: Make, kind: Kind, form: str) -> None:
    lengths = [13, 29, 8]
    collector = make(
        workers=2,
        lengths=lengths,
        frames_per_batch=10,
        trajs_per_batch=2,
        traj_format=form,
        on_worker_failure="restart",
        max_restarts=50,
        **({} if kind.joins else {"slots_per_worker": 4}),
    )
    ids: list[int] = []
    for number in itertools.count():
        if number >= 40 and collector.stats()["worker_restarts"] >= 5:  # one that gets nowhere has to wait for its turn
            break
        batch = collector.next()
        check = assert_whole_episodes if form == "padded" else assert_whole_in_a_row
        check(batch, lambda lane, episode: lengths[episode % 3])
        ids += [name for name in batch.get(TRAJ_IDS).unique().tolist() if name >= 0]
        if number % 4 == 1:
            time.sleep(0.02)  # so that batches wait
            pid = collector.worker_pids[number % 2]
            if not is_gone(pid):  # otherwise nobody has noticed yet
                end(pid)
    assert len(ids) == len(set(ids))


@over([STARTED])
def test_only_whole_episodes_reach_the_buffer(make: Make) -> None:
    lengths = [13, 29, 8]
    collector = make(
        workers=2,
        lengths=lengths,
        trajs_per_batch=1,
        on_worker_failure="restart",
        max_restarts=50,
        total_frames=3000,
    )
    restarts = 0
    while collector.is_running():
        if restarts < 6 and collector.replay_buffer.write_count > 300 * restarts:
            os.kill(collector.worker_pids[restarts % 2], signal.SIGKILL)
            restarts += 1
    assert_trajectories(collector.replay_buffer[:])
    assert_whole_in_a_row(collector.replay_buffer[:], lambda lane, episode: lengths[episode % 3])


# -- dropping ------------------------------------------------------------------------------------------------------


@over(ALL_FALLIBLE, needs="drop")
def test_after_a_drop_everything_can_be_asked(make: Make, kind: Kind) -> None:
    collector = make(policy=net(), on_worker_failure="drop")
    advance(collector)
    end(collector.worker_pids[0])
    with within(5):
        state = collector.state_dict()
    assert "worker0" not in state
    collector.update_policy_weights_()
    collector.set_seed(0)
    assert collector.getattr_env("batch_size") == torch.Size([])
    assert collector.stats()["workers_alive"] == 1
    assert advance(collector) is not None


@over(ALL_FALLIBLE, needs="drop")
def test_the_last_worker_cannot_be_dropped(make: Make, kind: Kind) -> None:
    collector = make(on_worker_failure="drop")
    advance(collector)
    for pid in collector.worker_pids:
        os.kill(pid, signal.SIGKILL)
    error = advance_until_it_raises(collector)
    assert isinstance(error, WorkerDiedError)
    assert "No worker is left" in told(error)
