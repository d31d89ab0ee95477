"""ParallelEnv when envs fail, workers die, and its own process ends in whichever way."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from children import is_gone
from space_zoo import UnmergedGymEnv

from swath.collectors import Collector
from swath.envs import EnvBase, GymEnv, ParallelEnv, Rows
from swath.errors import ClosedError, NotANumberWarning, RemoteTraceback, ShapeError, StallWarning, WorkerDiedError
from swath.testing import CountingEnv, CountingGymEnv, FaultyError, FaultyGymEnv

pytestmark = pytest.mark.timeout(60)

needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")


def faulty(which: int, count: int = 4, **options: Any) -> list[Any]:
    """Factories of counting envs, one of which fails."""
    return [
        partial(FaultyGymEnv, lane=i, **options) if i == which else partial(CountingGymEnv, i) for i in range(count)
    ]


def all_gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not all(map(is_gone, pids)):
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.02)
    return True


@contextmanager
def later(seconds: float, do: Callable[[], Any]) -> Iterator[None]:
    timer = threading.Timer(seconds, do)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@pytest.fixture(autouse=True, scope="module")
def server_is_there() -> None:
    """Starting it takes seconds, which are not to be counted below."""
    ParallelEnv(1, CountingGymEnv).close()


# -- exceptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_worker", [1, 2])
@pytest.mark.parametrize("inner", [GymEnv, UnmergedGymEnv])
@pytest.mark.parametrize("where", ["step", "reset"])
def test_an_error_of_an_env_arrives_as_it_was_raised(where: str, inner: Any, per_worker: int) -> None:
    factories = [partial(inner, make) for make in faulty(3, where=where, at=2)]
    with ParallelEnv(4, factories, envs_per_worker=per_worker) as env:
        with pytest.raises(FaultyError, match="lane 3 fails at step 2") as caught:
            env.rollout(8, break_when_any_done=False)
        assert (caught.value.lane, caught.value.step) == (3, 2)
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "_is_due" in caught.value.__cause__.text
        if sys.version_info >= (3, 11):
            notes = "\n".join(caught.value.__notes__)
            worker = 3 // per_worker
            assert f"Raised in worker {worker} (pid {env.worker_pids[worker]}), in env 3 of ParallelEnv(4" in notes
            assert "SerialEnv" not in notes
        assert env.rollout(2)["observation"][:, 0, 2].tolist() == [0] * 4  # all goes on


@pytest.mark.parametrize("per_worker", [1, 3])
def test_an_error_of_a_factory_arrives_and_ends_the_others(per_worker: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    begun = time.monotonic()
    with pytest.raises(FaultyError) as caught:
        ParallelEnv(4, faulty(2, where="init", at=1), envs_per_worker=per_worker)
    assert time.monotonic() - begun < 2
    if sys.version_info >= (3, 11):
        assert "Raised by the factory of env 2." in caught.value.__notes__
    del caught
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_an_error_of_a_factory_does_not_wait_for_the_others() -> None:
    begun = time.monotonic()
    with pytest.raises(FaultyError):
        ParallelEnv(2, [partial(FaultyGymEnv, "hang", 1, "init"), partial(FaultyGymEnv, "raise", 1, "init")])
    assert time.monotonic() - begun < 2


@needs_notes
def test_all_who_failed_are_named() -> None:
    with ParallelEnv(3, partial(FaultyGymEnv, at=1)) as env:
        with pytest.raises(FaultyError) as caught:
            env.rollout(3)
        notes = "\n".join(caught.value.__notes__)
        assert "in env 0 of" in notes
        assert "Workers [1, 2]" in notes
        assert env.rollout(3).shape == (3, 3)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [("shape", ShapeError, r"'observation' of shape \(4,\)"), ("dtype", TypeError, "dtype <U6")],
)
def test_wrong_observations(fault: str, error: type[Exception], text: str) -> None:
    with ParallelEnv(2, faulty(1, 2, fault=fault)) as env, pytest.raises(error, match=text):
        env.rollout(5)


def test_a_wrong_action_is_told_by_the_workers() -> None:
    with ParallelEnv(2, CountingGymEnv) as env:
        root = env.reset()
        with pytest.raises(ShapeError, match="'action'"):
            env.step(root.clone().set("action", torch.zeros(2, 7)))
        env.step(env.rand_action(root))


def test_nan_is_warned_of_with_its_lane() -> None:
    with ParallelEnv(3, faulty(2, 3, fault="nan")) as env:
        collector = Collector(env, None, frames_per_batch=30, total_frames=60)
        with pytest.warns(NotANumberWarning, match=r"lane 2 \(ParallelEnv\(3"):
            next(iter(collector))
        collector.shutdown()


class Warning_(CountingGymEnv):  # noqa: N801
    """Warns in the worker, with one of the library's categories."""

    def step(self, action: Any) -> Any:
        warnings.warn("this is not a number", NotANumberWarning, stacklevel=1)
        return super().step(action)


def test_the_library_s_warnings_reach_the_parent() -> None:
    def run() -> None:
        with ParallelEnv(2, Warning_) as env:
            env.rollout(3)
            env.get_attr("name")  # they are heard when there is something to hear

    with pytest.warns(NotANumberWarning, match=r"Worker \d: this is not a number"):
        run()


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="lock"):
        ParallelEnv(2, lambda: (lock, CountingGymEnv())[1])
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_no_env_is_an_error_in_words() -> None:
    with pytest.raises(TypeError, match="Expected an environment or a function"):
        ParallelEnv(2, lambda: 3)


# -- deaths ------------------------------------------------------------------------------------------------------------


class Segfaulting(FaultyGymEnv):
    """Breaks as compiled code does."""

    def _is_due(self, where: str) -> bool:
        if super()._is_due(where):
            os.kill(os.getpid(), signal.SIGSEGV)
        return False


DEATHS: list[Any] = [
    (partial(FaultyGymEnv, fault="kill"), r"killed by SIGKILL \(signal 9\)"),
    (partial(FaultyGymEnv, fault="exit"), "exit code 3"),
    (partial(Segfaulting, fault="nan"), r"killed by SIGSEGV \(signal 11\)"),
]


@pytest.mark.parametrize("per_worker", [1, 2])
@pytest.mark.parametrize(("make", "text"), DEATHS, ids=["kill", "exit", "segv"])
def test_a_death_is_an_error_that_names_it(make: Any, text: str, per_worker: int) -> None:
    factories = [partial(CountingGymEnv, i) for i in range(3)] + [make]
    env = ParallelEnv(4, factories, envs_per_worker=per_worker)
    mine, worker = env.worker_pids, 3 // per_worker
    which = "env 3" if per_worker == 1 else "envs 2 to 3"
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError, match=f"{text}.* while stepping {which} of ParallelEnv\\(4") as caught:
        env.rollout(8)
    assert time.monotonic() - begun < 2
    assert (caught.value.index, caught.value.pid) == (worker, mine[worker])
    assert all(map(is_gone, mine))
    assert env.is_closed
    for call in (env.reset, env.rand_step, lambda: env.get_attr("name")):
        with pytest.raises(ClosedError, match="is closed"):
            call()
    env.close()


@pytest.mark.parametrize("where", ["reset", "init"])
def test_a_death_elsewhere(where: str) -> None:
    with pytest.raises(WorkerDiedError, match="env 1 of ParallelEnv"):
        ParallelEnv(2, faulty(1, 2, fault="exit", where=where, at=1)).reset()


def test_a_death_while_nobody_waits_is_told_by_the_next_call() -> None:
    for call in (lambda env: env.rand_step(), lambda env: env.set_seed(3), lambda env: env.get_attr("name")):
        env = ParallelEnv(2, CountingGymEnv)
        env.reset()
        os.kill(env.worker_pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="Worker 1"):
            call(env)
        assert env.is_closed


def test_a_death_in_a_collector() -> None:
    env = ParallelEnv(4, faulty(2, fault="kill", at=30))
    collector = Collector(env, None, frames_per_batch=20)
    with pytest.raises(WorkerDiedError, match="env 2"):
        for _ in collector:
            pass
    collector.shutdown()


@pytest.mark.parametrize("other", [0, 2])
def test_the_death_of_one_does_not_wait_for_another_that_hangs(other: int) -> None:
    factories: list[Any] = [partial(CountingGymEnv, i) for i in range(3)]
    factories[1] = partial(FaultyGymEnv, fault="kill")
    factories[other] = partial(FaultyGymEnv, fault="hang")
    env = ParallelEnv(3, factories)
    mine = env.worker_pids
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError, match="Worker 1"):
        env.rollout(5)
    assert time.monotonic() - begun < 2
    assert all(map(is_gone, mine))


# -- those that take long ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*making env:swath.errors.StallWarning")
def test_a_stalled_worker_is_named_once_and_waited_for() -> None:
    factories = [CountingGymEnv, partial(FaultyGymEnv, fault="hang", seconds=0.6, at=2)]
    with ParallelEnv(2, factories, stall_warning_s=0.1) as env:
        with pytest.warns(StallWarning, match=r"Worker 1 .* for 0.\d s: stepping env 1 ") as caught:
            td = env.rollout(3)
        assert td["observation"][1, :, 2].tolist() == [0, 1, 2]
        assert len([one for one in caught if one.category is StallWarning]) == 1


@pytest.mark.filterwarnings("ignore:.*making env:swath.errors.StallWarning")
def test_a_stopped_worker_goes_on() -> None:
    with ParallelEnv(2, CountingGymEnv, stall_warning_s=0.5) as env:
        env.reset()
        stopped = env.worker_pids[0]
        os.kill(stopped, signal.SIGSTOP)
        with later(2.0, lambda: os.kill(stopped, signal.SIGCONT)), pytest.warns(StallWarning, match="it is stopped"):
            td = env.rollout(5)
        assert td["observation"][0, :, 2].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("state", ["hangs", "stopped"])
def test_closing_takes_no_longer_than_it_may(state: str) -> None:
    env = ParallelEnv(2, partial(FaultyGymEnv, fault="hang", at=2), shutdown_timeout=1.0)
    mine = env.worker_pids
    action, out = Rows(env.actions.leaves, env.batch_size), env.new_out_rows()
    env.reset_into([0, 1], out)
    env.step_into(action, out)
    if state == "stopped":
        os.kill(mine[0], signal.SIGSTOP)
    else:
        with interrupted_after(0.3), pytest.raises(KeyboardInterrupt):
            env.step_into(action, out)
    begun = time.monotonic()
    env.close()
    assert time.monotonic() - begun < 2
    assert all(map(is_gone, mine))


def test_closing_it_in_another_thread_ends_a_step() -> None:
    env = ParallelEnv(2, partial(FaultyGymEnv, fault="hang", at=2), shutdown_timeout=1.0)
    root = env.step(env.rand_action(env.reset()))
    with later(0.3, env.close), pytest.raises(ClosedError, match="closed while it was stepping"):
        env.step(root)


def test_several_threads_wait_for_their_turn() -> None:
    """As when something is asked of an env from which a collector collects in the background."""
    with ParallelEnv(2, partial(CountingGymEnv, lengths=10**9)) as env:
        rows = [(Rows(env.actions.leaves, env.batch_size), env.new_out_rows()) for _ in range(3)]
        env.reset_into([0, 1], rows[0][1])
        raised = []

        def use(action: Rows, out: Rows) -> None:
            try:
                for _ in range(100):
                    env.step_into(action, out)
                    assert len(env.get_attr("gym_envs[0].count")) == 2
            except BaseException as error:
                raised.append(error)

        threads = [threading.Thread(target=use, args=pair) for pair in rows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert raised == []
        assert env.get_attr("gym_envs[0].count") == [300, 300]


AGAIN_S = 1.0


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """As by Ctrl-C, and again if nothing comes of it: Python drops what is raised while an object is being deleted."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_was_interrupted_ends_before_anything_new_begins() -> None:
    factories = [partial(CountingGymEnv, 0, 100), partial(FaultyGymEnv, "hang", 2, seconds=1.0, lengths=100)]
    with ParallelEnv(2, factories) as env:
        action, out = Rows(env.actions.leaves, env.batch_size), env.new_out_rows()
        env.reset_into([0, 1], out)
        env.step_into(action, out)
        with interrupted_after(0.2), pytest.raises(KeyboardInterrupt):
            env.step_into(action, out)
        env.step_into(action, out)
        assert out.arrays["observation"][:, 2].tolist() == [3, 3]


def test_an_interrupted_failure_is_not_the_answer_to_the_next_question() -> None:
    class Late(FaultyGymEnv):
        def _is_due(self, where: str) -> bool:
            if where == "step" and self.calls["step"] + 1 == self.at:
                time.sleep(0.6)
            return super()._is_due(where)

    with ParallelEnv(2, [CountingGymEnv, partial(Late, "raise", 2)]) as env:
        root = env.rand_action(env.reset())
        env.step(root)
        with interrupted_after(0.2), pytest.raises(KeyboardInterrupt):
            env.step(root)
        assert env.get_attr("gym_envs[0].count") == [2, 2]
        env.step(root)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_leave_it_usable() -> None:
    """They fall wherever they fall; nothing may hang, and no frame may be in the wrong place."""
    with ParallelEnv(2, partial(CountingGymEnv, lengths=10**9)) as env:
        for number in range(100):
            with interrupted_after(0.001 + 0.0002 * number), pytest.raises(KeyboardInterrupt):
                go_on(env, number)
            td = env.step(env.rand_action(env.reset()))
            assert td["next", "observation"][:, 2].tolist() == [1, 1]
            assert env.get_attr("gym_envs[0].count") == [1, 1]


class Raised(BaseException):
    """By a handler of the user's."""


def go_on(env: EnvBase, seed: int, alarm_s: float | None = None) -> None:
    """For ever, in all the ways there are; until an alarm, which comes again and again, or one that is set already."""
    if alarm_s is not None:
        signal.setitimer(signal.ITIMER_REAL, alarm_s, AGAIN_S)
    while True:
        env.set_seed(seed)
        env.step(env.rand_action(env.reset()))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_handlers_that_raise_leave_it_usable_or_closed() -> None:
    def handler(*_: object) -> None:
        raise Raised

    before = signal.signal(signal.SIGALRM, handler)
    env = ParallelEnv(2, partial(CountingGymEnv, lengths=10**9))
    try:
        for number in range(40):
            with pytest.raises(Raised):
                go_on(env, number, 0.002 + 0.0002 * number)
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                assert env.step(env.rand_action(env.reset()))["next", "observation"][:, 2].tolist() == [1, 1]
            except ClosedError:
                env.close()
                env = ParallelEnv(2, partial(CountingGymEnv, lengths=10**9))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        env.close()


# -- the process that has made it --------------------------------------------------------------------------------------


def run_script(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    """Start a script, in a process group of its own."""
    script = tmp_path / "script.py"
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def told(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


HANGING = """
import time
from swath.envs import ParallelEnv
from swath.testing import CountingGymEnv

class Hanging(CountingGymEnv):
    def step(self, action):
        time.sleep(3600)

env = ParallelEnv(2, [CountingGymEnv, Hanging])
print(*env.worker_pids, flush=True)
env.rand_step(env.reset())
"""


def test_nothing_is_left_when_the_parent_is_killed_in_a_long_step(tmp_path: Path) -> None:
    process = run_script(tmp_path, HANGING)
    workers = told(process)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    assert all_gone(workers, 5.0)


def test_ctrl_c_ends_a_script(tmp_path: Path) -> None:
    process = run_script(tmp_path, HANGING)
    workers = told(process)
    threading.Event().wait(0.3)
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - begun < 6  # 3 s are promised; on a busy machine Python itself takes some to end
    assert all_gone(workers, 1.0)
    assert errors.count("Traceback") == 1
    assert "KeyboardInterrupt" in errors


def test_a_script_without_a_guard_that_forgets_to_close(tmp_path: Path) -> None:
    process = run_script(
        tmp_path,
        """
import gymnasium as gym
from swath.envs import GymEnv, ParallelEnv
from swath.testing import CountingGymEnv

print("begun", flush=True)

class Mine(CountingGymEnv):
    pass

gym.register("Mine-v0", entry_point=Mine)
env = ParallelEnv(2, lambda: GymEnv("Mine-v0"))
env.rollout(3)
print(*env.worker_pids, flush=True)
""",
    )
    output, errors = process.communicate(timeout=50)
    first, second = output.splitlines()
    assert first == "begun"
    assert errors == ""
    assert process.returncode == 0
    assert all_gone([int(word) for word in second.split()], 1.0)


def test_a_forked_child_leaves_its_parent_s_workers_alone() -> None:
    with ParallelEnv(2, CountingGymEnv) as env:
        env.reset()
        child = os.fork()
        if not child:
            code = 1
            try:
                env.reset()
            except ClosedError as error:
                code = 0 if "belongs to the process" in str(error) else 2
            env.close()
            del env
            gc.collect()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert env.rollout(3).shape == (2, 3)


def test_nothing_grows_when_they_come_and_go() -> None:
    def state() -> tuple[int, int, int]:
        gc.collect()
        mine = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(Path(mine).read_text().split())

    def cycle(number: int) -> EnvBase:
        env = ParallelEnv(2, CountingEnv, envs_per_worker=1 + number % 2)
        env.rollout(2)
        env.close()
        return env

    cycle(0), cycle(1)
    before = state()
    last = [cycle(number) for number in range(20)]
    assert all(env.is_closed for env in last)
    assert state() == before
