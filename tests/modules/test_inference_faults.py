"""InferenceServer when servers and clients die, hang or are stopped: nobody waits for ever, nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import is_gone
from inference_tools import (
    WAIT_S,
    Doubling,
    ask,
    ask_and_stop,
    ask_forever,
    factor_policy,
    is_answered,
    open_descriptors,
    until,
    within,
)
from tensordict import TensorDict

from swath.collectors import MultiSyncCollector
from swath.envs import GymEnv
from swath.errors import ClosedError, WorkerDiedError
from swath.modules import InferenceServer
from swath.testing import CountingGymEnv

pytestmark = pytest.mark.timeout(100)
BOTH = pytest.mark.parametrize("backend", ["thread", "process"])


@pytest.fixture(scope="module")
def children() -> Any:
    """A way to start processes that have imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["swath.modules", "inference_tools"])
    return context


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[InferenceServer]:
    """A server of the test's backend."""
    backend = request.node.callspec.params.get("backend", "process")
    with InferenceServer(factor_policy(), backend=backend) as server:
        yield server


@BOTH
def test_a_client_that_is_killed_is_forgotten(server: InferenceServer, children: Any, backend: str) -> None:
    client, told = server.client(), children.Queue()
    assert is_answered(client(ask(1)))
    others = server.stats()["remote_clients"]
    process = children.Process(target=ask_forever, args=(client, told))
    process.start()
    what, pid = told.get(timeout=60)
    assert what == "pid"
    assert server.stats()["remote_clients"] == others + 1
    os.kill(pid, signal.SIGKILL)
    process.join(WAIT_S)
    until(lambda: server.stats()["remote_clients"] == others)
    assert is_answered(client(ask(2)))


@BOTH
def test_a_client_that_is_stopped_holds_up_nobody(server: InferenceServer, children: Any, backend: str) -> None:
    client, (hears, tells) = server.client(), children.Pipe(duplex=False)
    process = children.Process(target=ask_and_stop, args=(client, tells))
    process.start()
    assert hears.poll(60)
    pid = hears.recv()
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    try:
        with within(20):
            for number in range(200):
                assert is_answered(client(ask(number)))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert hears.poll(60)
    assert hears.recv() is True
    process.join(WAIT_S)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_server_that_is_killed_unblocks_everybody(children: Any, how: signal.Signals) -> None:
    with InferenceServer(factor_policy(), backend="process", min_batch_size=8, timeout=0.002) as server:
        client, told = server.client(), children.Queue()
        process = children.Process(target=ask_forever, args=(client, told))
        process.start()
        assert told.get(timeout=60)[0] == "pid"
        errors: list[BaseException] = []

        def run() -> None:
            try:
                while True:
                    client(ask(1))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        pid = server.health()["pid"]
        with within(5):
            os.kill(pid, how)
            for thread in threads:
                thread.join(WAIT_S)
            kind, text = told.get(timeout=60)
        assert len(errors) == 3
        for error in errors:
            assert isinstance(error, ClosedError)
            assert how.name in str(error)
        assert kind == "ClosedError"
        assert "was killed" in text
        assert not server.is_alive
        with pytest.raises(WorkerDiedError, match=how.name):
            server.stats()
        with pytest.raises(ClosedError):
            client(ask(1))
        process.join(WAIT_S)


def test_requests_under_way_are_refused_when_the_server_is_killed() -> None:
    with InferenceServer(factor_policy(), backend="process", min_batch_size=8, timeout=600.0) as server:
        futures = [server.client().submit(ask(number)) for number in range(3)]
        with within(5):
            os.kill(server.health()["pid"], signal.SIGKILL)
            for future in futures:
                with pytest.raises(ClosedError, match="SIGKILL"):
                    future.result(WAIT_S)


def test_requests_under_way_are_refused_when_the_server_is_shut_down() -> None:
    with InferenceServer(factor_policy(), backend="process", min_batch_size=8, timeout=600.0) as server:
        futures = [server.client().submit(ask(number)) for number in range(3)]
        server.stats()
    for future in futures:
        with pytest.raises(ClosedError, match="was shut down"):
            future.result(WAIT_S)


def test_a_thread_that_dies_tells_everybody() -> None:
    policy = Doubling()

    def deadly(tensordict: Any) -> Any:
        policy(tensordict)
        raise SystemExit(3)

    with InferenceServer(deadly) as server:
        client = server.client()
        policy.open.clear()
        futures = [client.submit(ask(0))]
        assert policy.entered.wait(WAIT_S)
        futures += [client.submit(ask(number)) for number in range(3)]
        policy.open.set()
        for future in futures:
            with pytest.raises(RuntimeError, match="SystemExit"):
                future.result(WAIT_S)
        until(lambda: not server.is_alive)
        with pytest.raises(ClosedError, match="has died of SystemExit"):
            client(ask(1))
        with pytest.raises(ClosedError):
            server.update_model(lambda policy: None)


def test_a_stopped_server_can_be_shut_down() -> None:
    server = InferenceServer(factor_policy(), backend="process").start()
    pid = server.health()["pid"]
    client = server.client()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        client(ask(1), timeout=0.1)
    with within(10):
        server.shutdown()
    until(lambda: is_gone(pid))
    with pytest.raises(ClosedError):
        client(ask(1))


def test_a_policy_that_cannot_be_made_is_told() -> None:
    def fail() -> Any:
        raise KeyError("no such model")

    server = InferenceServer(policy_factory=fail, backend="process")
    with pytest.raises(KeyError, match="no such model"):
        server.start()
    assert not server.is_alive
    with pytest.raises(ClosedError):
        server.client()


def test_a_policy_that_takes_too_long_to_be_made_is_given_up() -> None:
    def dawdle() -> Any:
        import time

        time.sleep(600)

    server = InferenceServer(policy_factory=dawdle, backend="process", startup_timeout=0.5)
    with within(20), pytest.raises(TimeoutError, match="start_timeout_s"):
        server.start()


def test_a_fork_is_told_to_get_a_client_of_its_own() -> None:
    with InferenceServer(factor_policy()) as server:
        client = server.client()
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                client(ask(1))
            except RuntimeError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        assert b"inherited by a fork" in os.read(read, 1000)
        os.close(read)
        assert is_answered(client(ask(1)))


def policy_for_counting(td: TensorDict) -> TensorDict:
    action = torch.zeros(*td.batch_size, 2, dtype=torch.int64)
    action[..., 0] = 1
    return td.set("action", action)


def several(collector: Any, batches: int) -> None:
    for _ in range(batches):
        collector.next()


def test_a_collector_restarts_a_worker_with_a_client_of_its_own() -> None:
    """Each worker that is started gets one more connection; those of the dead are forgotten."""
    with InferenceServer(policy_for_counting, backend="process") as server:
        collector = MultiSyncCollector(
            [lambda: GymEnv(CountingGymEnv(0)), lambda: GymEnv(CountingGymEnv(1))],
            server.client(),
            frames_per_batch=20,
            total_frames=-1,
            on_worker_failure="restart",
        )
        with collector:
            collector.next()
            before = server.stats()["remote_clients"]
            os.kill(collector.worker_pids[0], signal.SIGKILL)
            with pytest.warns(UserWarning, match="restarted"):
                several(collector, 3)
            until(lambda: server.stats()["remote_clients"] == before)


def test_workers_learn_that_the_server_is_gone() -> None:
    with (
        InferenceServer(policy_for_counting, backend="process") as server,
        MultiSyncCollector(
            [lambda: GymEnv(CountingGymEnv(0))] * 2, server.client(), frames_per_batch=20, total_frames=-1
        ) as collector,
    ):
        collector.next()
        with within(10):
            os.kill(server.health()["pid"], signal.SIGKILL)
            with pytest.raises(ClosedError, match="was killed"):
                several(collector, 100)
        collector.shutdown(raise_on_error=False)


@BOTH
def test_nothing_is_left_behind(children: Any, backend: str) -> None:
    def cycle() -> None:
        with InferenceServer(factor_policy(), backend=backend) as server:
            client, told = server.client(), children.Queue()
            process = children.Process(target=ask_forever, args=(client, told))
            process.start()
            assert told.get(timeout=60)[0] == "pid"
            threads = [threading.Thread(target=lambda: client(ask(1))) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            pid = server.health()["pid"]
        assert told.get(timeout=60)[0] == "ClosedError"
        process.join(WAIT_S)
        process.close()
        told.close()
        told.join_thread()
        assert backend == "thread" or is_gone(pid)

    cycle()  # what is made once stays: the servers that start processes
    gc.collect()
    names, before, threads = set(os.listdir("/dev/shm")), open_descriptors(), threading.active_count()
    for _ in range(3):
        cycle()
    # Threads that were told to end may hold some of the garbage until they do.
    until(lambda: gc.collect() >= 0 and open_descriptors() <= before and threading.active_count() <= threads)
    assert {name for name in set(os.listdir("/dev/shm")) - names if "swath" in name or "torch" in name} == set()


@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"])
def test_a_program_that_forgets_its_server_ends(backend: str, ending: str) -> None:
    code = f"""
        import atexit, os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from inference_tools import *
        from swath.modules import InferenceServer
        atexit.register(lambda: asking.join(5))  # after the server: a thread in torch would crash at the very end
        server = InferenceServer(factor_policy(), backend={backend!r}).start()
        client = server.client()
        asking = threading.Thread(target=lambda: [client(ask(1)) for _ in range(10**9)], daemon=True)
        asking.start()
        client(ask(1))
        print(server.health()["pid"], flush=True)
        {ending}
    """
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, errors = program.communicate(timeout=60)
    assert out, errors
    pid = int(out)
    until(lambda: is_gone(pid), 10)
    assert "Fatal" not in errors
    if ending == "pass":
        assert program.returncode == 0, errors
