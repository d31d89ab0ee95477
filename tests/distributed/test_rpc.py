"""RPCCollector: what is its own beside what all collectors must keep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from children import is_gone
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributed import rpc

from swath.collectors.distributed import RPCCollector
from swath.collectors.distributed.rpc_wire import RpcWire, deliver
from swath.errors import ChannelClosedError, WorkerRestartedWarning
from swath.keys import TRAJ_IDS
from swath.runtime.channel import Channel
from swath.testing import CountingEnv

WAIT_S = 30.0
Make = Callable[..., Any]


def until(condition: Callable[[], Any], seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for has not come"
        time.sleep(0.002)


def constant(value: float) -> TensorDictModule:
    """A policy whose every action is `value`."""
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.fill_(value)
    return TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def build(policy: Any = None, *, nodes: int = 2, **options: Any) -> Any:
        envs = [lambda: CountingEnv(lengths=5)] * nodes
        made.append(RPCCollector(envs, policy, **{"frames_per_batch": 20, "launcher": "mp", **options}))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown(raise_on_error=False)
    assert not rpc.api._is_current_rpc_agent_set()


def ids_of(batches: list[Any]) -> list[set[int]]:
    """The ids of each row of batches [nodes, T]."""
    return [{int(number) for batch in batches for number in batch[row][TRAJ_IDS].unique()} for row in range(2)]


# -- collecting ----------------------------------------------------------------------------------------------------


def test_sync_batches_have_a_part_of_every_node(make: Make) -> None:
    batches = list(make(sync=True, total_frames=100, cat_results="stack"))
    assert [batch.shape for batch in batches] == [(2, 10)] * 5
    first, second = ids_of(batches)
    assert first
    assert second
    assert not first & second


def test_async_batches_are_of_one_node_each(make: Make) -> None:
    batches = list(make(total_frames=200))
    assert sum(batch.numel() for batch in batches) == 200
    owners: dict[int, set[int]] = {}
    for batch in batches:
        steps = batch["observation"][:, 2]
        assert ((steps[1:] == steps[:-1] + 1) | (steps[1:] == 0)).all()
        for number in batch[TRAJ_IDS].unique().tolist():
            owners.setdefault(number, set()).add(int(batch["observation"][0, 0]))
    assert all(len(lanes) == 1 for lanes in owners.values())


@pytest.mark.parametrize("sync", [True, False])
def test_collection_without_end(make: Make, sync: bool) -> None:
    collector = make(sync=sync)
    assert sum(batch.numel() for _, batch in zip(range(30), collector, strict=False)) == 600


@pytest.mark.parametrize("sync", [True, False])
def test_no_frame_beyond_the_budget(make: Make, sync: bool) -> None:
    assert sum(batch.numel() for batch in make(sync=sync, total_frames=110)) == 110


def test_weights_come_with_their_version(make: Make) -> None:
    policy = constant(1.0)
    collector = make(policy, sync=True, track_policy_version=True)
    batch = collector.next()
    assert (batch["action"] == 1.0).all()
    with torch.no_grad():
        policy.module.bias.fill_(2.0)
    collector.update_policy_weights_()
    later = collector.next()
    assert (later["action"] == 2.0).all()
    assert (later["policy_version"] == batch["policy_version"].max() + 1).all()


def test_a_large_batch_arrives_as_it_was(make: Make) -> None:
    steps = 20_000  # of some 60 bytes
    batch = make(nodes=1, sync=True, frames_per_batch=steps).next()
    assert (batch["observation"].reshape(-1, 3)[:, 2] == torch.arange(steps) % 5).all()


# -- nodes that end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_another_takes_the_place_of_a_node_that_was_killed(make: Make, sync: bool) -> None:
    collector = make(sync=sync, on_worker_failure="restart")
    collector.next()
    for _ in range(2):
        before = collector.worker_pids
        os.kill(before[1], signal.SIGKILL)
        with pytest.warns(WorkerRestartedWarning, match="Worker 1 .*is restarted"):
            until(lambda: collector.next() is not None and collector.worker_pids[1] != before[1])  # noqa: B023
        assert collector.worker_pids[0] == before[0]
    assert collector.next().numel() == 20


def test_the_others_go_on_without_a_node_that_is_dropped(make: Make) -> None:
    collector = make(on_worker_failure="drop")
    collector.next()
    os.kill(collector.worker_pids[0], signal.SIGKILL)
    with pytest.warns(WorkerRestartedWarning, match="Worker 0 .*is dropped"):
        until(lambda: collector.next() is not None and len(collector.worker_pids) == 1)
    assert collector.next().numel() == 20


def test_a_node_that_is_silent_is_given_up(make: Make) -> None:
    collector = make(sync=True, on_worker_failure="restart", node_timeout_s=1.5)
    collector.next()
    stopped = collector.worker_pids[1]
    os.kill(stopped, signal.SIGSTOP)
    with pytest.warns(WorkerRestartedWarning, match="node_timeout_s=1.5"):
        until(lambda: collector.next() is not None and collector.worker_pids[1] != stopped)
    until(lambda: is_gone(stopped))


# -- several at once -----------------------------------------------------------------------------------------------


def test_collectors_one_after_the_other(make: Make) -> None:
    for _ in range(3):
        collector = make(sync=True, total_frames=40)
        assert sum(batch.numel() for batch in collector) == 40
        collector.shutdown()
        assert not rpc.api._is_current_rpc_agent_set()


def test_collectors_at_the_same_time(make: Make) -> None:
    first, second = make(constant(1.0), sync=True), make(constant(2.0))
    for _ in range(5):
        assert (first.next()["action"] == 1.0).all()
        assert (second.next()["action"] == 2.0).all()
    first.shutdown()
    third = make(constant(3.0))
    for _ in range(5):
        assert (second.next()["action"] == 2.0).all()
        assert (third.next()["action"] == 3.0).all()


def test_shutting_down_twice(make: Make) -> None:
    collector = make()
    collector.next()
    pids = collector.worker_pids
    collector.shutdown()
    collector.shutdown()
    until(lambda: all(is_gone(pid) for pid in pids), 2)


def test_other_rpc_can_be_used_afterwards_but_not_beside(make: Make, tmp_path: Path) -> None:
    make(total_frames=20).shutdown()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("other", rank=0, world_size=1, rpc_backend_options=options)
    try:
        with pytest.raises(RuntimeError, match=r"one RPC agent per process.*init_rpc"):
            make()
    finally:
        rpc.shutdown()
    assert make(total_frames=20).next().numel() == 20


# -- arguments -----------------------------------------------------------------------------------------------------


def test_options_of_torch(make: Make) -> None:
    collector = make(sync=True, tensorpipe_options={"num_worker_threads": 3})
    assert collector.next().numel() == 20
    with pytest.raises(RuntimeError, match=r"num_worker_threads.*give both collectors the same"):
        make()
    with pytest.raises(ValueError, match=r"tensorpipe_options=.*threads"):
        make(tensorpipe_options={"threads": 3})


def test_arguments_without_effect(make: Make) -> None:
    with pytest.warns(UserWarning, match="visible_devices"):
        make(visible_devices=["cpu", "cpu"], backend="gloo", tcp_port=10003)


def test_a_fork_of_the_trainer_cannot_be_a_node(make: Make) -> None:
    with pytest.raises(ValueError, match="fork"):
        make(mp_start_method="fork")


# -- programs ------------------------------------------------------------------------------------------------------


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from swath.collectors.distributed import RPCCollector
from swath.testing import CountingEnv
collector = RPCCollector([CountingEnv] * 2, None, frames_per_batch=20, launcher="mp")
print(*collector.worker_pids, flush=True)
"""


def program(text: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A program with a collector, and its nodes."""
    code = PROGRAM.format(path=sys.path) + textwrap.dedent(text)
    command = [sys.executable, "-c", code]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert started.stdout is not None
    return started, [int(pid) for pid in started.stdout.readline().split()]


def test_nodes_end_when_their_trainer_is_killed() -> None:
    trainer, nodes = program("for batch in collector: pass")
    assert len(nodes) == 2
    trainer.kill()
    trainer.communicate()
    until(lambda: all(is_gone(pid) for pid in nodes), 10)


def test_ctrl_c() -> None:
    trainer, nodes = program("""
        try:
            for number, batch in enumerate(collector):
                if number == 3:
                    print("collecting", flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            collector.shutdown()
    """)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "collecting\n"
    os.killpg(trainer.pid, signal.SIGINT)
    said, errors = trainer.communicate(timeout=WAIT_S)
    assert (said, errors, trainer.returncode) == ("interrupted\n", "", 0)
    assert all(is_gone(pid) for pid in nodes)


def test_a_program_that_forgets_to_shut_down() -> None:
    trainer, nodes = program("next(iter(collector))")
    said, errors = trainer.communicate(timeout=WAIT_S)
    assert (said, errors, trainer.returncode) == ("", "", 0)
    until(lambda: all(is_gone(pid) for pid in nodes), 5)


# -- wires ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def wires() -> Iterator[tuple[RpcWire, RpcWire]]:
    """Both ends of a wire, here."""
    channel, end = Channel.pair()
    ends: list[Any] = [None, None]

    def meet(index: int, own: Channel) -> None:
        ends[index] = RpcWire(own, "127.0.0.1", {}, 5.0)

    threads = [threading.Thread(target=meet, args=pair) for pair in enumerate((channel, Channel(end)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    yield ends[0], ends[1]
    for one in ends:
        one.close()
    assert not rpc.api._is_current_rpc_agent_set()


def listening() -> set[str]:
    """At which addresses this process listens, as the system writes them."""
    own, found = set(), set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the list itself
            own.add(os.readlink(fd))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1].partition(":")[0])
    return found


def test_parcels_and_bodies_come_in_order(wires: tuple[RpcWire, RpcWire]) -> None:
    one, other = wires
    for number in range(20):
        one.send(b"%d" % number, torch.full((1000,), number, dtype=torch.uint8))
        other.send(b"back")
    for number in range(20):
        assert other.receive() == b"%d" % number
        space = torch.zeros(1000, dtype=torch.uint8)
        other.fetch(space)
        assert (space == number).all()
        assert one.receive() == b"back"


def test_only_the_loopback_device_can_be_called(wires: tuple[RpcWire, RpcWire]) -> None:
    assert listening() == {"0100007F"}


def test_a_call_without_the_secret_brings_nothing(wires: tuple[RpcWire, RpcWire]) -> None:
    assert not deliver("a guess", b"anything", None)
    wires[0].send(b"known")
    assert wires[1].receive() == b"known"


@pytest.mark.parametrize("closed", [0, 1], ids=["here", "there"])
def test_closing_tells_those_who_wait(wires: tuple[RpcWire, RpcWire], closed: int) -> None:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            wires[0].receive()
        except ChannelClosedError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wires[closed].close()
    thread.join(5)
    assert len(raised) == 1
    with pytest.raises(ChannelClosedError):
        wires[0].send(b"late")
