"""AsyncEnvPool: each env at its own pace."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from swath.envs import AsyncEnvPool, EnvBase, GymEnv, SerialEnv
from swath.errors import ClosedError, StallWarning, WorkerDiedError, WorkerRestartedWarning
from swath.testing import CountingEnv, CountingGymEnv, EnvConformance, FaultyError, FaultyGymEnv, counting_envs

pytestmark = pytest.mark.timeout(60)

Make = Callable[..., AsyncEnvPool]
THREADS: Make = AsyncEnvPool
PROCESSES: Make = partial(AsyncEnvPool, backend="multiprocessing")
TOGETHER: Make = partial(AsyncEnvPool, backend="multiprocessing", envs_per_worker=3)
POOLS = {"threads": THREADS, "processes": PROCESSES, "together": TOGETHER}
LANE, EPISODE, STEP = range(3)


@pytest.fixture(params=POOLS.values(), ids=POOLS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes pools, and closes them after the test."""
    made: list[AsyncEnvPool] = []

    def build(*args: Any, **options: Any) -> AsyncEnvPool:
        made.append(request.param(*args, **options))
        return made[-1]

    yield build
    for pool in made:
        pool.close()


class TestThreads(EnvConformance):
    def make_env(self) -> EnvBase:
        return THREADS([lambda: GymEnv("Pendulum-v1", max_episode_steps=7)] * 3)


class TestProcesses(EnvConformance):
    def make_env(self) -> EnvBase:
        return PROCESSES([lambda: GymEnv("Pendulum-v1", max_episode_steps=7)] * 3)


class TestLanesWithinEnvs(EnvConformance):
    def make_env(self) -> EnvBase:
        return TOGETHER([lambda: GymEnv("CartPole-v1", num_envs=2)] * 3)


class TestDictObservationsAtTheirOwnPace(EnvConformance):
    counts_episodes = True

    def make_env(self) -> EnvBase:
        return THREADS([lambda: CountingEnv((2,), kind="dict")] * 2)


class GatedEnv(CountingGymEnv):
    """Steps only when its gate, a file, exists."""

    def __init__(self, gate: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.gate = gate

    def step(self, action: Any) -> Any:
        while self.gate is not None and not os.path.exists(self.gate):
            time.sleep(0.001)
        return super().step(action)


def gated(gate: Any, count: int = 3) -> list[Callable[[], Any]]:
    """Counting envs, of which the last waits for its gate."""
    return [lambda lane=lane: GatedEnv(gate if lane == count - 1 else None, lane=lane) for lane in range(count)]


def stepped(pool: AsyncEnvPool, rounds: int, least: int = 1) -> Counter[int]:
    """Send each env that is ready on its way again, so many times; how often each was served.

    It goes on until `least` so many of them were: a process may have to wait for a processor.
    """
    served: Counter[int] = Counter()
    while rounds > 0 or len(served) < least:
        rounds -= 1
        td = pool.recv()
        envs = td["env_index"].tolist()
        served.update(envs)
        pool.send(torch.tensor([[1, 0]] * len(envs)), envs)
    return served


def test_send_and_recv_follow_each_env(make: Make) -> None:
    """Whatever the order: each env's observations go on where they were, and episodes end and begin."""
    pool = make(counting_envs(4, lengths=[3, 1, 5]))
    pool.async_reset()
    seen = dict(_each(pool.recv(4)))
    assert all(bool(td["is_init"]) for td in seen.values())
    arrived = seen
    for _ in range(60):
        pool.send(torch.tensor([[1, 0]] * len(arrived)), list(arrived))
        arrived = dict(_each(pool.recv()))
        for env, td in arrived.items():
            before, answer = seen[env]["observation"], td["next"]
            assert answer["observation"].tolist() == [env, before[EPISODE], before[STEP] + 1]
            if answer["done"]:
                assert td["observation"].tolist() == [env, before[EPISODE] + 1, 0]
            else:
                assert td["observation"].equal(answer["observation"])
            assert bool(td["is_init"]) == bool(answer["done"])
        seen = {**seen, **arrived}
    assert min(int(td["observation"][EPISODE]) for td in seen.values()) > 1


def _each(td: Any) -> list[tuple[int, Any]]:
    return list(zip(td["env_index"].tolist(), td.unbind(0), strict=True))


def test_one_that_is_slow_holds_up_nobody(make: Make, tmp_path: Any) -> None:
    gate = tmp_path / "open"
    pool = make(gated(gate))
    pool.async_reset()
    pool.send(torch.tensor([[1, 0]] * 3), pool.recv(3)["env_index"])
    served = stepped(pool, 50, least=2)
    assert set(served) == {0, 1}
    assert sum(served.values()) >= 50
    gate.touch()
    while 2 not in stepped(pool, 1):
        pass


def test_nobody_is_served_twice_while_another_waits(make: Make) -> None:
    """Four envs that are equally fast: when all are ready, all are served before any is served again."""
    pool = make(counting_envs(4, lengths=1000))
    pool.async_reset()
    pool.send(torch.tensor([[1, 0]] * 4), pool.recv(4)["env_index"])
    order: list[int] = []
    for _ in range(40):
        td = pool.recv(4, timeout=10.0)  # all are ready: which come first does not matter
        order += td["env_index"].tolist()
        pool.send(torch.tensor([[1, 0]] * 4), td["env_index"])
    assert all(sorted(order[first : first + 4]) == [0, 1, 2, 3] for first in range(0, 160, 4))
    waiting = [int(env) for _ in range(4) for env in pool.recv(1, 1)["env_index"]]
    assert sorted(waiting) == [0, 1, 2, 3]  # one at a time, and none came twice


def test_least_most_and_in_time(make: Make, tmp_path: Any) -> None:
    gate = tmp_path / "open"
    pool = make(gated(gate))
    pool.async_reset()
    assert pool.recv(3, 3)["env_index"].shape == (3,)
    pool.send(torch.tensor([[1, 0]] * 3))
    with pytest.raises(TimeoutError, match="results are kept"):
        pool.recv(3, timeout=0.2)
    assert pool.recv(1, 1)["env_index"].shape == (1,)
    assert pool.recv(1)["env_index"].shape == (1,)
    with pytest.raises(RuntimeError, match="were asked for"):
        pool.recv(2)
    gate.touch()
    assert pool.recv(1, timeout=10.0)["env_index"].tolist() == [2]
    for least, most, timeout in ((0, None, None), (2, 1, None), (1, None, -1.0)):
        with pytest.raises(ValueError, match="cannot be asked for"):
            pool.recv(least, most, timeout)


def test_the_tensordict_calls(make: Make) -> None:
    pool = make(counting_envs(3, lengths=[2, 1, 1]))
    pool.async_reset_send(env_index=[2, 0])
    first = pool.async_reset_recv(2)
    assert first["env_index"].tolist() == [0, 2]
    pool.async_reset_send(env_index=1)
    assert pool.async_reset_recv(env_index=1)["observation"].tolist() == [[1, 0, 0]]
    first["action"] = torch.tensor([[1, 0], [0, 1]])
    first["mine"] = torch.tensor([7, 8])
    pool.async_step_send(first)
    with pytest.raises(RuntimeError, match="have not been received"):
        pool.async_step_send(first)
    after = pool.async_step_recv(2)
    assert after["mine"].tolist() == [7, 8]
    assert after["action"].tolist() == [[1, 0], [0, 1]]
    assert after["next", "observation"].tolist() == [[0, 0, 1], [2, 0, 1]]
    root = after["next"].select("observation").set("env_index", after["env_index"]).set("action", after["action"])
    pool.async_step_and_maybe_reset_send(root)
    done, begun = pool.async_step_and_maybe_reset_recv(2)
    assert done["next", "observation"].tolist() == [[0, 0, 2], [2, 0, 2]]
    assert done["next", "done"].all()
    assert begun["observation"].tolist() == [[0, 1, 0], [2, 1, 0]]
    assert begun["env_index"].tolist() == [0, 2]
    assert not begun["done"].any()


def test_the_same_as_serial_when_all_step_together(make: Make) -> None:
    makers = [lambda: GymEnv("CartPole-v1")] * 3
    pool, serial = make(makers), SerialEnv(3, makers)
    for env in (pool, serial):
        env.set_seed(3)
    together = [env.rollout(30, break_when_any_done=False) for env in (pool, serial)]
    assert (together[0] == together[1]).all()


def test_seeds_belong_to_lanes(make: Make) -> None:
    firsts = []
    for seed in (1, 1, 2):
        pool = make([lambda: GymEnv("CartPole-v1")] * 3)
        pool.set_seed(seed)
        firsts.append(pool.reset()["observation"])
    assert firsts[0].equal(firsts[1])
    assert not firsts[0].equal(firsts[2])
    assert len(firsts[0].unique(dim=0)) == 3


def test_what_envs_have_can_be_asked_for_while_others_step(make: Make) -> None:
    pool = make(counting_envs(4, lengths=9))
    pool.async_reset()
    assert pool.get_attr("gym_envs[0].lane") == [0, 1, 2, 3]
    assert pool.recv(4)["is_init"].all()  # nothing was lost
    with pytest.raises(AttributeError, match="nothing") as caught:
        pool.get_attr("nothing")
    assert "env 0" in str(caught.value.__notes__)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def faulty(fault: str, count: int = 3, **options: Any) -> list[Callable[[], Any]]:
    """Counting envs, of which the second goes wrong."""
    makers: list[Callable[[], Any]] = [lambda lane=lane: CountingGymEnv(lane=lane, lengths=9) for lane in range(count)]
    makers[1] = lambda: FaultyGymEnv(fault, lane=1, **{"at": 3, "lengths": 9, **options})
    return makers


def until_raised(pool: AsyncEnvPool) -> BaseException:
    """Go on until something is raised."""
    pool.async_reset()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        stepped(pool, 1000)
    return caught.value


def test_an_env_that_raises_is_named_and_the_others_go_on(make: Make) -> None:
    pool = make(faulty("raise"))
    error = until_raised(pool)
    assert isinstance(error, FaultyError)
    assert "env 1 of" in str(error.__notes__)
    assert set(stepped(pool, 20, least=2)) == {0, 2}
    pool.async_reset_send(env_index=1)  # it can be used again
    assert pool.async_reset_recv(env_index=1)["env_index"].tolist() == [1]


@pytest.mark.parametrize(("fault", "how"), [("kill", "SIGKILL"), ("exit", "exit code 3")])
def test_an_env_whose_process_dies_is_named(fault: str, how: str) -> None:
    pool = PROCESSES(faulty(fault))
    error = until_raised(pool)
    assert isinstance(error, WorkerDiedError)
    assert how in str(error)
    assert "env 1 of" in str(error)
    assert pool.worker_pids == []
    with pytest.raises(ClosedError):
        pool.recv()


@pytest.mark.parametrize("fault", ["raise", "kill"])
@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_restart(fault: str, backend: str) -> None:
    """The env that has failed begins anew, the others go on as if nothing had happened."""
    if (fault, backend) == ("kill", "threading"):
        fault = "shape"  # a thread cannot be killed alone
    # Its successor fails in the same way: the third time is once too often.
    with AsyncEnvPool(faulty(fault), backend=backend, on_worker_failure="restart", max_restarts=2) as pool:
        pool.async_reset()
        steps: dict[int, int] = {}
        begun: Counter[int] = Counter()

        def go_on() -> None:
            while True:
                for env, td in _each(pool.recv()):
                    if td["is_init"] and not td["next", "done"]:
                        begun[env] += 1
                    else:
                        assert td["next", "observation"][STEP] == steps[env] + 1
                    steps[env] = int(td["observation"][STEP])
                    pool.send(torch.tensor([[1, 0]]), [env])

        with pytest.warns(WorkerRestartedWarning, match="Worker 1"), pytest.raises(Exception) as caught:  # noqa: PT011
            go_on()
        assert "restarted 2 times" in str(caught.value.__notes__)
        assert begun == {0: 1, 1: 3, 2: 1}
        assert pool.lost_steps == 2
        assert pool.restarts == 2


def test_drop(make: Make) -> None:
    pool = make(faulty("raise", count=9), on_worker_failure="drop")
    pool.async_reset()

    def go_on() -> None:
        while pool.workers_alive == pool.num_workers:
            stepped(pool, 5)

    with pytest.warns(WorkerRestartedWarning, match="dropped"):
        go_on()
    late = stepped(pool, 300)
    assert 1 not in late
    assert len(late) >= 6
    with pytest.raises(RuntimeError, match="dropped"):
        pool.send(torch.tensor([[1, 0]]), [1])


def test_an_env_that_hangs_is_named(make: Make, tmp_path: Any) -> None:
    gate = tmp_path / "open"
    pool = make(gated(gate), stall_warning_s=0.3)
    pool.async_reset()
    pool.send(torch.tensor([[1, 0]] * 3), pool.recv(3)["env_index"])
    pool.recv(2)
    threading.Timer(1.0, gate.touch).start()
    with pytest.warns(StallWarning, match="stepping env 2 of"):
        pool.recv()


def test_an_env_that_hangs_is_replaced(tmp_path: Any) -> None:
    gate = tmp_path / "open"
    options = {"on_worker_failure": "restart", "stall_timeout_s": 0.5}
    with pytest.raises(ValueError, match="multiprocessing"):
        THREADS(gated(gate), **options)
    with PROCESSES(gated(gate), **options) as pool:
        pool.async_reset()
        pool.send(torch.tensor([[1, 0]] * 3), pool.recv(3)["env_index"])
        pool.recv(2)
        with pytest.warns(WorkerRestartedWarning, match="Worker 2"):
            assert pool.recv()["env_index"].tolist() == [2]


def test_closing_does_not_wait_for_an_env_that_hangs(make: Make, tmp_path: Any) -> None:
    gate = tmp_path / "open"
    pool = make(gated(gate), shutdown_timeout=0.5)
    pool.async_reset()
    pool.send(torch.tensor([[1, 0]] * 3), pool.recv(3)["env_index"])
    begun = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - begun < 5
    gate.touch()
    with pytest.raises(ClosedError):
        pool.recv()


def test_closing_closes_the_envs(make: Make, tmp_path: Any) -> None:
    class Closing(CountingGymEnv):
        def close(self) -> None:
            (tmp_path / str(self.lane)).touch()

    pool = make([lambda lane=lane: Closing(lane=lane) for lane in range(4)])
    pids = [pid for pid in pool.worker_pids if pid != os.getpid()]
    pool.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_interrupt_loses_no_result(make: Make, tmp_path: Any) -> None:
    gate = tmp_path / "open"
    pool = make(gated(gate))
    pool.async_reset()
    pool.send(torch.tensor([[1, 0]] * 3), pool.recv(3)["env_index"])
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.recv(3)
    gate.touch()
    assert pool.recv(3, timeout=10.0)["next", "observation"][:, STEP].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "ray"}, "threading"),
        ({"envs_per_worker": 0}, "envs_per_worker"),
        ({"on_worker_failure": "ignore"}, "drop"),
        ({"create_env_kwargs": [{}]}, "create_env_kwargs has 1"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AsyncEnvPool(counting_envs(2), **options)


def test_envs_must_be_alike_and_their_own() -> None:
    with pytest.raises(ValueError, match="env 1"):
        AsyncEnvPool([lambda: GymEnv("CartPole-v1"), lambda: GymEnv("Pendulum-v1")])
    shared = CountingGymEnv()
    with pytest.raises(ValueError, match="twice"):
        AsyncEnvPool([lambda: shared] * 2)
    with pytest.raises(ZeroDivisionError) as caught:
        AsyncEnvPool([lambda: 1 / 0])
    assert "env 0" in str(caught.value.__notes__)


def test_wrong_sends(make: Make) -> None:
    pool = make(counting_envs(3))
    pool.async_reset()
    pool.recv(3)
    for envs, text in (([0, 0], "each once"), ([3], "0 to 2")):
        with pytest.raises(ValueError, match=text):
            pool.send(torch.tensor([[1, 0]] * len(envs)), envs)
    with pytest.raises(ValueError, match="action"):
        pool.send(torch.tensor([[1, 0]]), [0, 1])
    with pytest.raises(KeyError, match="action"):
        pool.async_step_send(pool.reset(), [0, 1, 2])
