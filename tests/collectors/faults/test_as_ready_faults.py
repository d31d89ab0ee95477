"""What goes wrong with envs at their own pace. What they have in common with other workers is in the other files."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from children import is_gone
from common import EPISODE, STEP, until
from fault_tools import DEATHS, DeedEnv, Program, doing, exit_at_once, signal_itself, within
from inside import WorkerDiedError
from kinds import AS_READY_PAIR, Make, over
from tensordict import TensorDictBase

from swath.errors import ClosedError, StallWarning, WorkerRestartedWarning
from swath.testing import FaultyError

pytestmark = pytest.mark.timeout(60)
DENSE: dict[str, Any] = {"stack_envs": False}
PACE_S = 0.002


def fail() -> None:
    raise FaultyError(1, 34)


ENDINGS = {"kill": signal_itself(signal.SIGKILL), "exit": exit_at_once(), "raise": fail}


def frames_of(batches: list[TensorDictBase]) -> dict[int, TensorDictBase]:
    """By env."""
    found: dict[int, list[TensorDictBase]] = defaultdict(list)
    for batch in batches:
        for env in batch["env_index"].unique().tolist():
            found[env].append(batch[batch["env_index"] == env])
    return {env: torch.cat(frames) for env, frames in found.items()}


def assert_pieces_are_right(frames: TensorDictBase) -> int:
    """An id names one piece of one episode, which begins at its beginning; how many pieces there are."""
    ids, seen = frames["collector", "traj_ids"].numpy(), frames["observation"].numpy()
    same = ids[1:] == ids[:-1]
    np.testing.assert_array_equal(seen[1:][same], seen[:-1][same] + np.array([0, 0, 1]))
    assert (seen[1:][~same][:, STEP] == 0).all(), "an episode begins in its middle"
    assert len(np.unique(ids)) == 1 + (~same).sum(), "one id names two trajectories"
    done = frames["next", "done"].numpy()[:-1, 0]
    assert not (done & same).any(), "an episode goes on after its end"
    return int((~same & ~done).sum())


@pytest.mark.parametrize(
    ("ending", "backend"), [*((ending, "multiprocessing") for ending in ENDINGS), ("raise", "threading")]
)
@over([AS_READY_PAIR])
def test_restart(make: Make, ending: str, backend: str, tmp_path: Any) -> None:
    envs = doing(ENDINGS[ending], once=str(tmp_path / "done"), at=34, lengths=7, others_pace_s=PACE_S)
    options = {"on_worker_failure": "restart", "env_backend": backend, "total_frames": 400}
    collector = make(envs, **DENSE, **options)
    with pytest.warns(WorkerRestartedWarning, match="Worker 1"):
        made = frames_of(list(collector))
    assert sum(map(len, made.values())) == 400
    assert assert_pieces_are_right(made[0]) == 0
    assert assert_pieces_are_right(made[1]) == 1, "the episode that its worker has left"
    stats = collector.stats()
    assert (stats["worker_restarts"], stats["lost_frames"]) == (1, 1)
    assert stats["mean_length"] == 7.0, "an episode that was lost was counted"


@pytest.mark.parametrize("ending", ENDINGS)
@over([AS_READY_PAIR])
def test_drop(make: Make, ending: str) -> None:
    envs = doing(ENDINGS[ending], at=34, lengths=7, others_pace_s=PACE_S)
    collector = make(envs, on_worker_failure="drop", total_frames=400, **DENSE)
    with pytest.warns(WorkerRestartedWarning, match="dropped, 1 are left"):
        made = frames_of(list(collector))
    assert sum(map(len, made.values())) == 400
    assert len(made[1]) == 33
    assert assert_pieces_are_right(made[0]) == 0


@pytest.mark.parametrize("death", DEATHS)
@over([AS_READY_PAIR])
def test_a_death_is_told_within_2_s(make: Make, death: str) -> None:
    deed, how = DEATHS[death]
    collector = make(doing(deed, at=15))
    pids = collector.worker_pids
    with within(2), pytest.raises(WorkerDiedError) as caught:
        for _ in collector:
            pass
    assert how in str(caught.value)
    assert "while stepping env 1 of" in str(caught.value)
    until(lambda: all(map(is_gone, pids)), 5)
    with pytest.raises((ClosedError, WorkerDiedError)):
        collector.rollout()


@over([AS_READY_PAIR])
def test_whole_episodes_after_a_restart(make: Make, tmp_path: Any) -> None:
    """What a worker has left behind is in no episode, and counted."""
    envs = doing(ENDINGS["kill"], once=str(tmp_path / "done"), at=34, lengths=7)
    options = {"on_worker_failure": "restart", "total_frames": 400, "trajs_per_batch": 3, "traj_format": "cat"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkerRestartedWarning)
        collector = make(envs, **DENSE, **options)
        batches = list(collector)
    for batch in batches:
        for episode in batch.split(7):
            assert episode["observation"][:, STEP].tolist() == list(range(7))
            assert len(episode["collector", "traj_ids"].unique()) == 1
    stats = collector.stats()
    assert 21 * len(batches) + stats["dropped_frames"] == 400


@over([AS_READY_PAIR])
def test_an_env_that_hangs_is_named_and_the_others_go_on(make: Make) -> None:
    released = threading.Event()
    envs = [lambda: DeedEnv(lambda: None, pace_s=PACE_S), lambda: DeedEnv(lambda: released.wait(30), at=5, lane=1)]
    collector = make(envs, env_backend="threading", stall_warning_s=0.3, **DENSE)
    with pytest.warns(StallWarning, match="stepping env 1 of"):
        seen = _collect_until_named(collector)
    assert len(frames_of(seen)[1]) == 4
    assert len(frames_of(seen)[0]) > 20
    released.set()
    until(lambda: 1 in frames_of([collector.next()]))


def _collect_until_named(collector: Any) -> list[TensorDictBase]:
    seen = []
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        seen.append(collector.next())
    return seen


@pytest.mark.parametrize("backend", ["multiprocessing", "threading"])
@over([AS_READY_PAIR])
def test_shutdown_while_another_thread_waits_for_an_env_that_hangs(make: Make, backend: str) -> None:
    released = threading.Event()
    deed = time.sleep if backend == "multiprocessing" else released.wait
    collector = make([lambda: DeedEnv(lambda: deed(30), at=5)], env_backend=backend, frames_per_batch=50, **DENSE)
    outcome: list[Any] = []

    def wait() -> None:
        try:
            outcome.append(collector.next())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.5)
    with within(6):
        collector.shutdown(timeout=1.0)
        collector.shutdown()
    released.set()
    thread.join(5)
    assert not thread.is_alive(), "the other thread waits for ever"
    assert isinstance(outcome[0], ClosedError)


@over([AS_READY_PAIR])
def test_an_error_of_the_policy_keeps_its_type_and_ends_everything(make: Make) -> None:
    calls = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        calls.append(1)
        if len(calls) == 9:
            raise FaultyError(7, 31)
        return td.set("action", torch.tensor([1, 0]).expand(*td.shape, 2))

    collector = make(None, policy)
    pids = collector.worker_pids
    with pytest.raises(FaultyError) as caught:
        for _ in collector:
            pass
    assert "policy" in str(caught.value.__notes__)
    until(lambda: all(map(is_gone, pids)), 5)


@over([AS_READY_PAIR])
def test_ctrl_c_ends_everything(make: Make) -> None:
    collector = make(doing(lambda: None, pace_s=0.01), frames_per_batch=1000)
    pids = collector.worker_pids
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    until(lambda: all(map(is_gone, pids)), 5)


PROGRAM = """
    from swath.collectors import AsyncBatchedCollector
    envs, options = doing(lambda: None, pace_s=0.001), dict(env_backend="multiprocessing", envs_per_worker={per})
    collector = AsyncBatchedCollector(envs, None, frames_per_batch=20, **options)
    print(*collector.worker_pids, flush=True)
    for _ in collector:
        pass
"""


@pytest.mark.parametrize("per", [1, 2])
def test_workers_end_with_a_program_that_is_killed(per: int) -> None:
    with Program(PROGRAM.format(per=per)) as program:
        pids = [int(word) for word in program.says().split()]
        time.sleep(0.3)
        program.popen.kill()
        until(lambda: all(map(is_gone, pids)), 10)


@over([AS_READY_PAIR])
def test_a_free_running_collector_tells_of_a_death(make: Make) -> None:
    from common import buffer

    rb = buffer(batch_size=8)
    collector = make(doing(DEATHS["SIGKILL"][0], at=200), replay_buffer=rb, **DENSE)
    collector.start()
    with pytest.raises(WorkerDiedError):
        until(lambda: not collector.is_running())
    seen = rb[:]["observation"]
    assert len(seen)
    assert (seen[:, EPISODE] >= 0).all()
    with pytest.raises(WorkerDiedError):
        rb.sample()
    collector.shutdown(raise_on_error=False)


@over([AS_READY_PAIR])
@pytest.mark.parametrize("call", ["reset", "set_seed"])
def test_what_was_dropped_is_not_reset(make: Make, call: str) -> None:
    collector = make(on_worker_failure="drop", total_frames=-1, **DENSE)
    collector.next()
    pid = collector.worker_pids[0]
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_gone(pid))
    begin: Any = partial(collector.set_seed, 3) if call == "set_seed" else collector.reset
    with pytest.warns(WorkerRestartedWarning, match="dropped, 1 are left"):
        _ = begin(), collector.next()  # the first needs nothing of a worker that has begun anew ahead
    begin()
    assert set(collector.next()["env_index"].tolist()) == {1}
