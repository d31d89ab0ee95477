"""What goes wrong in a worker without ending it: errors of env, policy and hooks, wrong values, warnings, output."""

import errno
import os
import re
import threading
import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from children import is_gone
from common import buffer, net, until
from fault_tools import advance, advance_until_it_raises, build, doing, told, within
from inside import RemoteTraceback, WorkerDiedError, WorkerError
from kinds import ALL_FALLIBLE, ASYNC, SPREAD, STARTED, SYNC, Kind, Make, over
from tensordict import TensorDictBase

import swath
from swath.errors import NotANumberWarning, ShapeError
from swath.testing import CountingGymEnv, FaultyError, FaultyGymEnv, assert_frames_belong

pytestmark = pytest.mark.timeout(60)


def faulty(fault: str, worker: int = 1, **options: Any) -> list[Any]:
    """Two env factories, of which one makes an env with a fault."""
    options.setdefault("lengths", 1000)
    options.setdefault("at", 25)
    factories: list[Any] = [lambda: CountingGymEnv(0, options["lengths"])] * 2
    factories[worker] = lambda: FaultyGymEnv(fault, lane=worker, **options)
    return factories


def assert_is_remote(error: BaseException, worker: int | None = 1) -> None:
    """It comes from that worker, or from any."""
    assert isinstance(error.__cause__, RemoteTraceback)
    assert f"worker {'' if worker is None else worker}" in told(error)
    assert "Traceback (most recent call last)" in str(error.__cause__)


@pytest.mark.parametrize("where", ["step", "reset"])
@over(ALL_FALLIBLE)
def test_an_error_of_the_env_keeps_type_message_and_traceback(make: Make, kind: Kind, where: str) -> None:
    collector = make(faulty("raise", where=where, lengths=5, at=4))
    pids = collector.worker_pids
    error = advance_until_it_raises(collector)
    assert type(error) is FaultyError
    assert (error.lane, error.step) == (1, 4)
    assert "as it was told" in str(error)
    assert_is_remote(error)
    assert "raise FaultyError" in str(error.__cause__)
    assert f"pid {pids[1]}" in told(error)
    until(lambda: all(map(is_gone, pids)), 5)  # nobody needs the others any more


@over(ALL_FALLIBLE)
def test_an_error_is_there_as_soon_as_it_is_raised(make: Make, kind: Kind, tmp_path: Any) -> None:
    def fail() -> None:
        (tmp_path / "now").write_text(repr(time.time()))
        raise FaultyError(1, 2)

    collector = make(doing(fail))
    error = advance_until_it_raises(collector)
    assert time.time() - float((tmp_path / "now").read_text()) < 2
    assert isinstance(error, FaultyError)


@pytest.mark.parametrize("where", ["env", "factory", "init_fn"])
@over(ALL_FALLIBLE, needs="run_there")
def test_an_error_while_a_worker_is_made(kind: Kind, where: str) -> None:
    envs = {"env": faulty("raise", where="init", at=1), "factory": [CountingGymEnv, lambda: 1 / 0]}.get(where)
    options = {"init_fn": lambda: 1 / 0} if where == "init_fn" else {}
    with within(10), pytest.raises(FaultyError if where == "env" else ZeroDivisionError) as caught:
        build(kind, envs, **options)
    assert_is_remote(caught.value, None if where == "init_fn" else 1)
    assert "being made" in told(caught.value)


@pytest.mark.parametrize("death", ["kill", "exit"])
def test_a_death_while_the_env_is_made(death: str) -> None:
    with within(10), pytest.raises(WorkerDiedError, match=r"Worker 1 .* while it was being made"):
        build(SYNC, faulty(death, where="init", at=1))


class FailingPolicy:
    """Fails in its n-th call."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, frame: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        if self.calls > self.at:
            raise FaultyError(7, self.calls)
        return frame.set("action", torch.zeros(frame.shape, dtype=torch.int64))


ELSEWHERE: dict[str, tuple[dict[str, Any], type[BaseException], str]] = {
    "policy": ({"policy": FailingPolicy(30)}, FaultyError, "FailingPolicy|__call__"),
    "pre_collect_hook": ({"pre_collect_hook": lambda: {}["missing"]}, KeyError, "missing"),
    "post_collect_hook": ({"post_collect_hook": lambda batch: {}["missing"]}, KeyError, "missing"),
    "shape": ({"envs": faulty("shape", at=15)}, ShapeError, r"(?s)observation.*\(4,\).*\(3,\)"),
    "dtype": ({"envs": faulty("dtype", at=15)}, (ValueError, TypeError), "observation"),
}
"""Options, the error, and what it says, of its cause too."""


@pytest.mark.parametrize("where", ELSEWHERE)
@over([SYNC, STARTED])
def test_an_error_of_something_else(make: Make, kind: Kind, where: str) -> None:
    options, error_type, words = ELSEWHERE[where]
    error = advance_until_it_raises(make(**options))
    assert isinstance(error, error_type)
    assert re.search(words, told(error))
    assert_is_remote(error, None if "envs" not in options else 1)


@over([ASYNC])
def test_an_error_of_a_call_leaves_the_workers_at_work(make: Make) -> None:
    collector = make()
    with pytest.raises(AttributeError) as caught:
        collector.get_distant_attr("env.nothing_of_that_name")
    assert_is_remote(caught.value, 0)
    assert_frames_belong(collector.next())
    assert collector.stats()["workers_alive"] == 2


# -- odd exceptions ------------------------------------------------------------------------------------------------


class OddError(Exception):
    """Its constructor takes something else than its arguments."""

    def __init__(self, *, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code, self.where = code, where


class SlottedError(Exception):
    """Keeps what it says where nobody looks."""

    __slots__ = ("_said",)

    def __init__(self, said: str) -> None:
        self._said = said

    def __str__(self) -> str:
        return self._said


class StubbornError(Exception):
    """Cannot be pickled, whatever one tries."""

    def __init__(self, what: str) -> None:
        super().__init__(what, threading.Lock())


class MuteError(Exception):
    """Cannot even say what it is about."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def holding_a_lock() -> Exception:
    error = ValueError("with a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


ODD: dict[str, tuple[Any, type[BaseException], str]] = {
    "constructor": (lambda: OddError(code=5, where="here"), OddError, "5 at here"),
    "slots": (lambda: SlottedError("said"), SlottedError, "said"),
    "unpicklable": (lambda: StubbornError("what"), WorkerError, "StubbornError: ('what'"),
    "attribute": (holding_a_lock, ValueError, "with a lock"),
    "mute": (lambda: MuteError("x"), MuteError, ""),
    "unicode": (lambda: UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"), UnicodeDecodeError, "can't decode byte 0xff"),
    "os": (lambda: FileNotFoundError(errno.ENOENT, "No such file", "/x"), FileNotFoundError, "'/x'"),
    "exit": (lambda: SystemExit("enough"), WorkerError, "SystemExit: enough"),
    "interrupt": (lambda: KeyboardInterrupt(), WorkerError, "KeyboardInterrupt"),
    "axis": (lambda: np.exceptions.AxisError(3, 2), np.exceptions.AxisError, "axis 3 is out of bounds"),
    "gone": (lambda: WorkerDiedError("Worker", 4, 5, -9), WorkerDiedError, "Worker 4 (pid 5) was killed by SIGKILL"),
}


@pytest.mark.parametrize("name", ODD)
@over([SYNC])
def test_odd_exceptions(make: Make, name: str) -> None:
    factory, kind, text = ODD[name]

    def fail() -> None:
        raise factory()

    collector = make(doing(fail, at=15))
    error = advance_until_it_raises(collector)
    assert isinstance(error, kind), repr(error)
    if name != "mute":
        assert text in str(error)
        assert_is_remote(error)
    if name == "constructor":
        assert (error.code, error.where) == (5, "here")  # type: ignore[attr-defined]


# -- wrong values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nan", "nan_reward"])
@over(ALL_FALLIBLE, needs="run_there")
def test_nan_is_warned_of_once(make: Make, kind: Kind, fault: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collector = make(faulty(fault, at=5))
        deadline = time.monotonic() + 20
        while not caught:
            assert time.monotonic() < deadline
            advance(collector)
        for _ in range(5):
            advance(collector)
    assert [w.category for w in caught] == [NotANumberWarning]
    assert "Worker 1" in str(caught[0].message)
    assert ("reward" if fault == "nan_reward" else "observation") in str(caught[0].message)


@over(SPREAD, needs="run_there")
def test_a_warning_that_is_an_error_loses_no_batch(make: Make, kind: Kind) -> None:
    collector = make(faulty("nan_reward", at=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NotANumberWarning):
            deque(iter(collector.rollout, None), maxlen=0)
        for _ in range(4):
            with within(5):
                collector.rollout()


# -- what cannot be sent -------------------------------------------------------------------------------------------


class Config:
    def __init__(self) -> None:
        self.size, self.handle = 3, threading.Lock()


def locked(part: str) -> tuple[Kind, dict[str, Any]]:
    """A kind, and options of which one holds a lock."""
    if part == "factory":
        settings = Config()
        return SYNC, {"envs": [lambda: (settings, CountingGymEnv())[1]] * 2}
    if part == "policy":
        policy = net()
        policy.module.handle = threading.Lock()  # type: ignore[union-attr, assignment]
        return ASYNC, {"policy": policy}
    lock = threading.Lock()
    return SYNC, {"post_collect_hook": lambda batch: lock.acquire()}


@pytest.mark.parametrize(
    ("part", "words"),
    [("factory", r"(?s)settings\.handle is lock.*inside the factory"), ("policy", "policy.*handle"), ("hook", "lock")],
)
def test_what_cannot_be_pickled_is_named_and_starts_nothing(part: str, words: str) -> None:
    kind, options = locked(part)
    with within(5), pytest.raises(RuntimeError, match=words):
        build(kind, **options)


# -- warnings, output and channels of workers ----------------------------------------------------------------------


@pytest.mark.parametrize("is_quiet", [True, False])
@over([SYNC])
def test_warnings_of_others_are_kept_quiet_unless_asked_for(
    make: Make, is_quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_quiet:
        monkeypatch.setattr(swath, "filter_warnings_subprocess", False)
    collector = make(doing(lambda: warnings.warn("chatter 0", UserWarning, stacklevel=1), at=5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deque(islice(collector, 3), maxlen=0)
    said = [str(warning.message) for warning in caught]
    assert not said if is_quiet else re.match(r"Worker 1: chatter 0 .*test_worker_errors.py", said[0])


@over([STARTED])
def test_more_warnings_than_the_channel_holds_do_no_harm(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come faster than they are taken in; what was begun must not tear the messages that follow."""
    monkeypatch.setattr(swath, "filter_warnings_subprocess", False)

    def flood() -> None:
        for number in range(4000):
            warnings.warn(f"{number:08d}" * 40, UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collector = make(doing(flood, at=5), total_frames=400)
        until(lambda: collector.stats()["frames"] >= 400)
        until(lambda: not collector.is_running())
    assert len(caught) > 100
    for warning in caught:
        assert str(warning.message).startswith("Worker 1: "), "a message is torn"
    assert collector.replay_buffer.write_count == 400


@over([SYNC])
def test_workers_that_print_a_lot(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    def shout() -> None:
        for _ in range(2000):
            print("x" * 99)

    collector = make(doing(shout, at=5))
    for _ in range(3):
        assert_frames_belong(collector.next())
    collector.shutdown()
    assert capfd.readouterr().out.count("x" * 99) == 2000


def close_sockets() -> None:
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.close(int(fd))
        except OSError:
            continue


@over(ALL_FALLIBLE)
def test_a_worker_that_closes_its_channel(make: Make, kind: Kind) -> None:
    collector = make(doing(close_sockets))
    with within(10):
        error = advance_until_it_raises(collector)
    assert isinstance(error, WorkerDiedError)
    assert error.index == 1


@over([SYNC])
def test_a_child_of_a_worker_that_outlives_it_keeps_nobody_waiting(make: Make) -> None:
    """It has the worker's descriptors, and holds them open."""

    def fork_and_die() -> None:
        if os.fork():
            os._exit(5)
        time.sleep(8)
        os._exit(0)

    collector = make(doing(fork_and_die))
    with within(4):
        error = advance_until_it_raises(collector)
    assert isinstance(error, WorkerDiedError)
    assert error.exitcode == 5


# -- several threads -----------------------------------------------------------------------------------------------


@over([STARTED])
def test_several_threads_sample_while_one_looks_after_the_workers(make: Make) -> None:
    collector = make(replay_buffer=buffer(batch_size=16, prefetch=2))
    with ThreadPoolExecutor(3) as threads:
        sampling = [threads.submit(lambda: [collector.replay_buffer.sample() for _ in range(150)]) for _ in range(3)]
        while not all(thread.done() for thread in sampling):
            assert collector.is_running()
            collector.state_dict()
    assert [len(thread.result()) for thread in sampling] == [150] * 3


@over([ASYNC])
def test_weights_are_updated_from_another_thread(make: Make) -> None:
    collector, is_over = make(policy=net()), threading.Event()

    def update() -> int:
        while not is_over.is_set():
            collector.update_policy_weights_()
        return int(collector.policy_version)

    with ThreadPoolExecutor(1) as threads:
        updating = threads.submit(update)
        for _ in range(60):
            collector.next()
        is_over.set()
        assert updating.result(10) > 0
