"""What only shows when collectors live long, or are used in odd ways: each was a defect once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from common import buffer, net, steps_of, until
from fault_tools import DeedEnv
from inside import open_questions, send_to_worker
from kinds import ASYNC, SINGLE, SPREAD, STARTED, SYNC, Make, over
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import WorkerRestartedWarning
from swath.testing import CountingGymEnv


def kill(collector: Any, worker: int) -> None:
    os.kill(collector.worker_pids[worker], signal.SIGKILL)


def explode() -> None:
    if os.environ.get("SWATH_TEST_PARENT"):
        raise ModuleNotFoundError("No module named 'simulator'")


class Unreadable:
    """Can be pickled by a worker, and not be read by the parent."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return explode, ()


class Odd(CountingGymEnv):
    """An env with an attribute that only its own process can have."""

    unreadable = Unreadable()


@over([ASYNC])
def test_an_answer_that_cannot_be_read_concerns_only_who_asked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = make([Odd] * 2)
    collector.next()
    monkeypatch.setenv("SWATH_TEST_PARENT", "1")
    for _ in range(5):
        with pytest.raises(ModuleNotFoundError, match="simulator"):
            collector.getattr_env("gym_envs[0].unreadable")
        for _ in range(4):
            collector.next()


@over([ASYNC])
def test_a_large_message_need_not_wait_for_the_end_of_a_batch(make: Make) -> None:
    layers = nn.Sequential(nn.Linear(3, 1200), nn.Linear(1200, 1200), nn.Linear(1200, 2))
    policy = TensorDictModule(layers, in_keys=["observation"], out_keys=["action"])
    collector = make([lambda: DeedEnv(lambda: None, pace_s=0.05)], policy, frames_per_batch=60)
    state = collector.state_dict()
    batches = iter(collector)
    waiting = threading.Thread(target=lambda: next(batches))
    waiting.start()
    until(lambda: steps_of(collector, 0) > 2)
    begun = time.monotonic()
    send_to_worker(collector, 0, ("a large message that is not understood", bytes(20_000_000)), timeout_s=20)
    assert time.monotonic() - begun < 2.5  # a batch takes at least 3 s
    waiting.join()
    assert state["frames"] == 0
    kill(collector, 0)


@pytest.mark.filterwarnings("ignore::swath.collectors.WorkerRestartedWarning")
@pytest.mark.parametrize("on_failure", ["restart", "drop"])
@over([STARTED])
def test_what_a_dead_worker_had_claimed_is_collected_by_others(make: Make, on_failure: str) -> None:
    envs = [CountingGymEnv, lambda: DeedEnv(lambda: None, pace_s=0.02)]
    collector = make(envs, frames_per_batch=100, total_frames=200, on_worker_failure=on_failure)
    until(lambda: collector.stats("per_worker")["worker_0/frames"] >= 100)  # the quick one has its share
    kill(collector, 1)
    until(lambda: not collector.is_running())
    assert collector.replay_buffer.write_count == collector.stats()["frames"] == 200


@pytest.mark.filterwarnings("ignore::swath.collectors.WorkerRestartedWarning")
@over(SPREAD, needs="run_there")
def test_assigned_hooks_are_called_in_the_workers_and_in_those_that_take_their_place(
    make: Make, tmp_path: Path
) -> None:
    collector = make(on_worker_failure="restart")
    collector.pre_collect_hook = lambda: (tmp_path / f"pre {os.getpid()}").touch()
    collector.post_collect_hook = lambda batch: (tmp_path / f"post {os.getpid()}").touch()
    before = collector.worker_pids

    def called(pids: list[int]) -> bool:
        collector.next()
        names = {path.name for path in tmp_path.iterdir()}
        return names >= {f"{when} {pid}" for when in ("pre", "post") for pid in pids}

    until(lambda: called(before))
    kill(collector, 1)
    until(lambda: called(collector.worker_pids) and collector.worker_pids != before)
    assert len({*before, *collector.worker_pids}) == 3


@over([SYNC])
def test_an_unanswerable_question_is_not_asked_again_of_a_new_worker(make: Make) -> None:
    lock = threading.Lock()
    collector = make(None, net(), on_worker_failure="restart")
    with pytest.raises(RuntimeError, match="lock"):
        collector.set_post_collect_hook(lambda batch: lock.acquire())
    kill(collector, 1)
    with pytest.warns(WorkerRestartedWarning):
        collector.next()
    assert open_questions(collector) == 0


def test_a_buffer_that_holds_no_versions_takes_frames_of_all_collectors() -> None:
    kept = buffer()
    for kind in (SINGLE, ASYNC):
        list(kind.build(None, net(), batches=2, replay_buffer=kept))
    assert kept.write_count == 40


@pytest.mark.filterwarnings("ignore::swath.collectors.WorkerRestartedWarning")
@over([SYNC])
def test_a_collector_goes_on_without_a_worker_that_was_dropped(make: Make) -> None:
    policy = net()
    collector = make(None, policy, workers=3, frames_per_batch=12, on_worker_failure="drop")
    collector.next()
    kill(collector, 1)
    assert collector.next().shape == (2, 4)
    collector.update_policy_weights_(policy, worker_ids=[0, 1])
    assert collector.num_lanes == 2
    assert collector.requested_frames_per_batch == 8
    whole = make(None, net(), workers=3, frames_per_batch=12)
    whole.load_state_dict(collector.state_dict())
    assert whole.next().shape == (3, 4)
