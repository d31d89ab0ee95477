"""EnvPool's asynchronous envs in the place of an AsyncEnvPool: a fake that counts, and the real one if it is there."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from common import buffer, until
from fake_envpool import FakeEnvPool
from test_as_ready import by_env

from swath.collectors import AsyncBatchedCollector, BaseCollector, Collector
from swath.envs import EnvPoolEnv, GymEnv
from swath.envs.rows import Rows
from swath.errors import StallWarning, UnsupportedEnvError
from swath.testing import CollectorConformance, CountingEnv, assert_frames_belong
from swath.testing.checks import EPISODE, LANE, STEP, counted

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pools() -> Iterator[list[FakeEnvPool]]:
    """Those of a test, whose threads end with it."""
    made: list[FakeEnvPool] = []
    yield made
    for pool in made:
        pool.close()


class TestConformance(CollectorConformance):
    """What all collectors do, with answers for one env at a time: the suite asks for stacked batches."""

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        env = EnvPoolEnv(FakeEnvPool(max(1, lanes), 1, lengths=lengths, most_s=0.0002))
        return AsyncBatchedCollector(env, None, stack_envs=lanes > 0, **options)


@pytest.mark.parametrize(("envs", "at_a_time"), [(8, 3), (6, 2), (5, 4), (3, 1)])
@pytest.mark.parametrize("kind", ["vector", "dict"])
@pytest.mark.parametrize("limit", [None, 4])
def test_each_env_has_its_frames_in_order(
    pools: list[FakeEnvPool], envs: int, at_a_time: int, kind: str, limit: int | None
) -> None:
    lengths = [[1, 3], [2], [9, 1], [4], [7], [3], [5], [6]][:envs]

    def make() -> FakeEnvPool:
        pools.append(FakeEnvPool(envs, at_a_time, lengths=lengths, kind=kind))
        return pools[-1]

    with AsyncBatchedCollector(
        make, None, frames_per_batch=47, total_frames=470, max_frames_per_traj=limit
    ) as collector:
        assert collector.stats()["workers_alive"] == 1
        found = by_env(collector)
    assert pools[0].was_closed
    assert sum(map(len, found.values())) == 470
    assert sorted(found) == list(range(envs))
    for env, frames in found.items():
        assert_frames_belong(frames)
        numbers, after = counted(frames), counted(frames["next"])
        assert (numbers[:, LANE] == env).all()
        whole = np.array([lengths[env][episode % len(lengths[env])] for episode in numbers[:, EPISODE]])
        over = after[:, STEP] == whole
        cut = np.zeros_like(over) if limit is None else after[:, STEP] == limit
        assert (frames["next", "terminated"][:, 0].numpy() == over).all()
        assert (frames["next", "truncated"][:, 0].numpy() == cut).all()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_it_may_be_made_already(pools: list[FakeEnvPool], is_wrapped: bool) -> None:
    pools.append(FakeEnvPool(4, 2))
    env = EnvPoolEnv(pools[0], categorical_action_encoding=True) if is_wrapped else pools[0]
    with AsyncBatchedCollector(env, None, frames_per_batch=20, total_frames=20) as collector:
        batch = collector.next()
        assert batch is not None
        assert batch["action"].shape == ((20,) if is_wrapped else (20, 2))
    for frames in by_env([batch]).values():
        assert_frames_belong(frames)


def test_frames_are_few_and_actions_for_few(pools: list[FakeEnvPool]) -> None:
    """The rest of an answer is kept for the next batch, and for the policy's next call."""
    pools.append(FakeEnvPool(8, 4, lengths=3))
    with AsyncBatchedCollector(
        pools[0], None, frames_per_batch=1, total_frames=60, max_batch_size=3, min_batch_size=2
    ) as collector:
        found = by_env(collector)
        assert collector.server_stats()["avg_batch_size"] <= 3
    for frames in found.values():
        assert_frames_belong(frames)


@pytest.mark.parametrize("at_a_time", [1, 3])
def test_reset_begins_everywhere_with_steps_under_way(pools: list[FakeEnvPool], at_a_time: int) -> None:
    pools.append(FakeEnvPool(8, at_a_time, lengths=1000, most_s=0.002))
    with AsyncBatchedCollector(pools[0], None, frames_per_batch=30) as collector:
        for _ in range(5):
            before = collector.next()
            collector.reset()
            batch = collector.next()
            assert before is not None
            assert batch is not None
            for frames in by_env([batch]).values():
                assert_frames_belong(frames)
                assert counted(frames)[0, STEP] == 0
            assert not set(before["collector", "traj_ids"].tolist()) & set(batch["collector", "traj_ids"].tolist())


REFUSALS: dict[str, tuple[Callable[[FakeEnvPool], Any], str]] = {
    "GymEnv": (lambda pool: GymEnv(pool), r"own pace: collect with AsyncBatchedCollector\(lambda: envpool"),
    "Collector": (lambda pool: Collector(pool, None, frames_per_batch=10), "collect with AsyncBatchedCollector"),
    "list": (lambda pool: collected([lambda: pool]), "collect with AsyncBatchedCollector"),
    "stacked": (
        lambda pool: collected(pool, stack_envs=True),
        "stack_envs=True waits for the last env .* batch_size=1",
    ),
    "restart": (lambda pool: collected(pool, on_worker_failure="restart"), "cannot be replaced"),
    "processes": (lambda pool: collected(lambda: pool, backend="multiprocessing"), "leave out .* backend"),
    "step": (lambda pool: rolled_out(EnvPoolEnv(pool)), "not all together.* without a batch_size"),
    "some": (lambda pool: one_reset(EnvPoolEnv(pool)), r"Envs \[1\] .* cannot be reset without the others"),
}


def collected(env: Any, **options: Any) -> Any:
    with AsyncBatchedCollector(env, None, frames_per_batch=10, **options) as collector:
        return collector.next()


def many(collector: Any, count: int = 1000) -> Any:
    for _ in range(count):
        batch = collector.next()
    return batch


def rolled_out(env: EnvPoolEnv) -> None:
    with env:
        env.rollout(3)


def one_reset(env: EnvPoolEnv) -> None:
    with env:
        env.reset(env.reset().set("_reset", torch.tensor([[False], [True], [False], [False]])))


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_cannot_do_is_said(pools: list[FakeEnvPool], name: str) -> None:
    do, said = REFUSALS[name]
    pools.append(FakeEnvPool(4, 2))
    with pytest.raises((UnsupportedEnvError, ValueError), match=said):
        do(pools[0])


def test_what_is_no_asynchronous_pool_is_refused(pools: list[FakeEnvPool]) -> None:
    pools += [FakeEnvPool(4, 4), FakeEnvPool(4, 2, players=2)]
    with pytest.raises(UnsupportedEnvError, match="no EnvPool with a batch_size below its num_envs"):
        EnvPoolEnv(pools[0])
    with pytest.raises(UnsupportedEnvError, match="several players"):
        EnvPoolEnv(pools[1])
    for env in (pools[0], CountingEnv()):
        with pytest.raises(TypeError, match="steps many envs"):
            collected(env)
        with pytest.raises(TypeError, match=r"steps many envs.* is one function, and has made"):
            collected(lambda env=env: env)


def test_seeds_are_said_to_have_no_effect(pools: list[FakeEnvPool]) -> None:
    pools.append(FakeEnvPool(4, 2))
    with (
        AsyncBatchedCollector(pools[0], None, frames_per_batch=10) as collector,
        pytest.warns(UserWarning, match=r"takes no seeds: .* pass seed=\d+ to envpool.make_gymnasium"),
    ):
        collector.set_seed(3)


def test_one_that_hangs_is_named_and_ended(pools: list[FakeEnvPool]) -> None:
    pools.append(FakeEnvPool(3, 2))
    with AsyncBatchedCollector(
        pools[0], None, frames_per_batch=10, stall_warning_s=0.1, stall_timeout_s=0.4
    ) as collector:
        collector.next()
        pools[0].stuck = {0: threading.Event(), 2: threading.Event()}
        began = time.monotonic()
        with (
            pytest.warns(StallWarning, match=r"Envs \[.*2\] of EnvPoolEnv\(FakeEnvPool.* have not come back"),
            pytest.raises(TimeoutError, match=r"(0|2).* have not come back .* stall_timeout_s=0.4. .* make a new one"),
        ):
            many(collector)
        assert collector.closed
        assert time.monotonic() - began < 20


def test_others_go_on_beside_one_that_hangs(pools: list[FakeEnvPool]) -> None:
    pools.append(FakeEnvPool(4, 2))
    with AsyncBatchedCollector(pools[0], None, frames_per_batch=50, stall_warning_s=0.1) as collector:
        collector.next()
        pools[0].stuck = {1: threading.Event()}
        with pytest.warns(StallWarning, match=r"Envs \[1\] of"):
            batch = many(collector, 60)
        assert batch is not None
        assert 1 not in batch["env_index"]
        pools[0].stuck.pop(1).set()
        until(lambda: 1 in collector.next()["env_index"])


def test_time_in_which_nobody_waits_does_not_count(pools: list[FakeEnvPool]) -> None:
    """An answer that is not full when a batch is stays open for as long as the batch is used."""
    pools.append(FakeEnvPool(5, 4))
    with (
        warnings.catch_warnings(),
        AsyncBatchedCollector(
            pools[0], None, frames_per_batch=13, total_frames=65, stall_warning_s=0.2, stall_timeout_s=0.3
        ) as collector,
    ):
        warnings.simplefilter("error")
        for _ in collector:
            time.sleep(0.4)


def test_what_it_raises_reaches_the_caller(pools: list[FakeEnvPool]) -> None:
    pools.append(FakeEnvPool(4, 2))
    with AsyncBatchedCollector(pools[0], None, frames_per_batch=10) as collector:
        collector.next()
        pools[0].send(np.zeros(4, np.int64), pools[0].all_env_ids)  # somebody else
        with pytest.raises((AssertionError, RuntimeError), match=r"ordered twice|not all of which were ordered by us"):
            many(collector)


def test_it_can_be_shut_down_with_steps_under_way(pools: list[FakeEnvPool]) -> None:
    pools.append(FakeEnvPool(8, 3, most_s=0.05))
    before, memory = set(threading.enumerate()), buffer(batch_size=4)
    collector = AsyncBatchedCollector(pools[0], None, frames_per_batch=10, replay_buffer=memory)
    collector.start()
    until(lambda: len(memory) >= 20)
    collector.async_shutdown()
    collector.shutdown()
    assert pools[0].was_closed
    until(lambda: set(threading.enumerate()) <= before)


def test_ctrl_c_is_heard_while_nothing_comes(pools: list[FakeEnvPool]) -> None:
    pools.append(FakeEnvPool(3, 2))
    env = EnvPoolEnv(pools[0], shutdown_timeout=0.3)
    with AsyncBatchedCollector(env, None, frames_per_batch=10) as collector:
        collector.next()
        pools[0].stuck = {each: threading.Event() for each in range(3)}
        timer = threading.Timer(0.3, _thread.interrupt_main)
        timer.start()
        with (
            pytest.warns(StallWarning, match=r"have not come back within shutdown_timeout=0.3 s"),
            pytest.raises(KeyboardInterrupt),
        ):
            collector.next()
        timer.join()


class DisturbedError(Exception):
    """Raised by a signal handler."""


def test_a_signal_at_any_time_leaves_nothing_half_done(pools: list[FakeEnvPool]) -> None:
    """No env is ordered twice, which the fake would say, and none is waited for that was not ordered."""

    def disturb(number: int, frame: Any) -> None:
        raise DisturbedError

    pools.append(FakeEnvPool(6, 4, most_s=0.0002))
    before = signal.signal(signal.SIGALRM, disturb)
    try:
        with EnvPoolEnv(pools[0], stall_timeout_s=30) as env:
            env.reset()
            action = Rows(env.actions.leaves, env.batch_size)
            for turn in range(2000 if os.environ.get("SWATH_LONG") else 100):
                with contextlib.suppress(DisturbedError):
                    signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.00007 * (turn % 100))
                    while True:
                        env.begin_steps(env.idle_envs, action)
                        env.take_ready(1, 3, 0.0)
            signal.signal(signal.SIGALRM, lambda number, frame: None)
            env.reset()
            received = pools[0].received
            for _ in range(20):
                env.begin_steps(env.idle_envs, action)
                assert env.take_ready(1, 3, 0.0)[0]
            assert pools[0].received > received
    finally:
        with contextlib.suppress(DisturbedError):  # of a turn that has ended with another error
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_env_that_steps_from_a_beginning_that_nobody_took_is_not_begun_twice(pools: list[FakeEnvPool]) -> None:
    pools.append(FakeEnvPool(4, 2, lengths=1, most_s=0.0002))
    with EnvPoolEnv(pools[0], stall_timeout_s=5) as env:
        action = Rows(env.actions.leaves, env.batch_size)
        for _ in range(30):
            env.reset()
            env.begin_steps([0, 1], action)
            assert sorted(env.take_ready(2, 2, 5.0)[0]) == [0, 1], "they have ended, and begun anew"
            env.begin_steps([0], action)


@pytest.mark.parametrize(("at_a_time", "limit"), [(4, None), (5, 20), (1, 20)])
def test_the_real_one(at_a_time: int, limit: int | None) -> None:
    """Every frame is what CartPole does with that observation and action."""
    envpool = pytest.importorskip("envpool", reason="EnvPool is not installed")

    def make() -> Any:
        return envpool.make_gymnasium("CartPole-v1", num_envs=16, batch_size=at_a_time, num_threads=2, seed=5)

    with AsyncBatchedCollector(
        make, None, frames_per_batch=500, total_frames=5000, max_frames_per_traj=limit
    ) as collector:
        found = by_env(collector)
    assert sorted(found) == list(range(16))
    assert sum(map(len, found.values())) == 5000
    cartpole = GymEnv("CartPole-v1").gym_envs[0].unwrapped  # type: ignore[index]
    for frames in found.values():
        seen, then = frames["observation"].numpy(), frames["next", "observation"].numpy()
        done, ids = frames["next", "done"][:, 0].numpy(), frames["collector", "traj_ids"].numpy()
        assert done.any()
        assert (seen[1:][~done[:-1]] == then[:-1][~done[:-1]]).all()
        assert (abs(seen[1:][done[:-1]]) <= 0.05).all(), "an episode begins anew"
        assert ((ids[1:] != ids[:-1]) == done[:-1]).all()
        for row in range(len(frames)):
            cartpole.reset()
            cartpole.state = tuple(seen[row].astype(np.float64))
            wanted, reward, terminated, *_ = cartpole.step(int(frames["action"][row].argmax()))
            np.testing.assert_allclose(then[row], wanted, rtol=1e-4, atol=1e-5)
            assert reward == frames["next", "reward"][row, 0]
            assert terminated == frames["next", "terminated"][row, 0]
        if limit is not None:
            assert frames["step_count"].max() < limit


def test_the_real_one_may_have_one_env_only() -> None:
    """Then it is not asynchronous, and answers as if it were."""
    envpool = pytest.importorskip("envpool", reason="EnvPool is not installed")
    env = EnvPoolEnv(envpool.make_gymnasium("CartPole-v1", num_envs=1))
    with AsyncBatchedCollector(env, None, frames_per_batch=100, total_frames=300) as collector:
        found = by_env(collector)[0]
    done = found["next", "done"][:, 0]
    assert torch.equal(found["observation"][1:][~done[:-1]], found["next", "observation"][:-1][~done[:-1]])
