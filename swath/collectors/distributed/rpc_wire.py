"""RPC of torch: a parcel is a call, and its body a tensor of that call, which TensorPipe moves by itself.

NOTE [RPC agents]: torch has one agent per process, which all wires of a process share: it is made for the first of them
and ended with the last. `rpc.init_rpc` makes groups in which everybody knows everybody: who joins calls every member,
and waits for those that have died. Here each process makes its agent by itself, and the two ends of a channel tell each
other where they can be called. So there is no store, a node can come at any time, and its death concerns nobody else.
Numbers are what others are called by here alone. They are not used again as long as the agent lives, as torch keeps the
broken connection to somebody who has died by the number.

Torch unpickles a call before anybody can look at it: whoever can connect to an agent can run code as its user. So it
listens at one address: on one machine at that of the loopback device, which other users of the machine reach. What is
ours to check is checked: a parcel stays bytes until its sender has shown the secret that was told through the channel.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import pickle
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed import autograd, rpc
from torch.futures import Future

from swath.collectors.distributed.wire import TRAINER
from swath.errors import ChannelClosedError
from swath.runtime.channel import Channel

Options: TypeAlias = Mapping[str, Any]
OPTIONS: Options = {"num_worker_threads": 2, "_transports": ["uv"], "_channels": ["cma", "basic"]}
"""TCP, and memory that is read from another process on the same machine. Not TensorPipe's shared memory, which keeps a
core busy as long as the agent lives, nor channels that listen at more ports."""
LOOPBACK = "127.0.0.1"
MEET_S = 60.0
"""How long two sides that are connected may take to tell who they are."""
PARTING_S = 0.05
"""How long an agent stays when nobody needs it any more: torch complains of answers that are still on their way."""
INTERFACE = "TP_SOCKET_IFNAME"
"""The variable of the environment that tells TensorPipe where to listen."""
SIOCGIFADDR = 0x8915


def check_rpc(options: Options) -> None:
    """Refuse what torch's RPC cannot do, in this process and now."""
    if not rpc.is_available():
        raise RuntimeError("This torch was built without RPC: use DistributedCollector, or a torch that has it.")
    try:
        rpc.TensorPipeRpcBackendOptions(**{**OPTIONS, **options})
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"tensorpipe_options={options!r} cannot be used: {error}") from error
    with _entering:
        if _agent is None and rpc.api._is_current_rpc_agent_set():
            raise RuntimeError(
                "torch has one RPC agent per process, and this process has made one with rpc.init_rpc: call "
                "rpc.shutdown() before an RPCCollector is made, or use DistributedCollector."
            )
        if _agent is not None and _agent.options != options:
            raise RuntimeError(
                "torch has one RPC agent per process, and that of an RPCCollector that is open was made with "
                f"tensorpipe_options={_agent.options!r}: give both collectors the same, or shut that one down first."
            )


def interface_of(address: str) -> str:
    """The network interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise ValueError(f"{address!r} is not an IPv4 address of this machine.")


class RpcAgent:
    """What this process is to others, and those whom it can call; see NOTE [RPC agents]."""

    def __init__(self, address: str, options: Options) -> None:
        """Listen at `address` alone."""
        self.address, self.options, self.users = address, options, 0
        self.name = f"swath_{secrets.token_hex(8)}"
        self._store, self._numbers, self._calling = dist.HashStore(), itertools.count(1), threading.Lock()
        os.putenv(INTERFACE, interface_of(address))
        try:
            with suppress(RuntimeError):  # it has been done before
                autograd._init(0)  # no call is made without it
            all_options = rpc.TensorPipeRpcBackendOptions(**{**OPTIONS, **options})
            self._agent = rpc.TensorPipeAgent(self._store, self.name, 0, None, all_options, {}, [])
            rpc.api._init_rpc_states(self._agent)
            self._agent.join()  # from now on it does not complain when others leave
        finally:
            if (before := os.environ.get(INTERFACE)) is None:
                os.unsetenv(INTERFACE)
            else:
                os.putenv(INTERFACE, before)
        self.url = self._store.get(f"addrs/{self.name}").decode()
        if self.url.startswith("uv:") and not self.url.startswith(f"uv://{address}:"):
            self.shutdown()
            raise RuntimeError(
                f"torch's RPC listens at {self.url}, not at {address}: it has chosen its address before, which it does "
                "once in the life of a process. Use one address for all that use RPC in this process."
            )

    def meet(self, name: str, url: str) -> rpc.WorkerInfo:
        """Let somebody be called."""
        other = rpc.WorkerInfo(name, next(self._numbers))
        with self._calling:  # calls read what is written here, and torch has a lock for groups that never change alone
            self._store.set(f"addrs/{name}", url)
            self._agent._update_group_membership(other, [], {}, True)
        return other

    def call(self, other: rpc.WorkerInfo, message: tuple[str, bytes, Tensor | None], timeout_s: float) -> Future[bool]:
        """Deliver a message."""
        with self._calling:
            return rpc.rpc_async(other, deliver, message, timeout=timeout_s)  # type: ignore[no-any-return]

    def shutdown(self) -> None:
        """End, with all calls."""
        time.sleep(PARTING_S)
        with self._calling:
            rpc.shutdown(graceful=False)
            del self._agent


_agent: RpcAgent | None = None
_entering = threading.RLock()


def enter(address: str, options: Options) -> RpcAgent:
    """The agent of this process, which is made if there is none. Who has entered leaves."""
    global _agent
    with _entering:
        check_rpc(options)
        _agent = _agent or RpcAgent(address, options)
        if _agent.address != address:
            raise RuntimeError(f"The one RPC agent of this process listens at {_agent.address}, not at {address}.")
        _agent.users += 1
        return _agent


def leave(*, at_exit: bool = False) -> None:
    """The last who leaves ends the agent, as does the end of the program: it must not call Python afterwards."""
    global _agent
    with _entering:
        if _agent is not None:
            _agent.users -= 1
            if at_exit or not _agent.users:
                _agent.shutdown()
                _agent = None


def _forget_in_child() -> None:
    """A forked child has the agent without its threads: it cannot be ended, but another can be made."""
    global _agent, _entering
    if _agent is not None:
        _inherited.append(_agent)
        rpc.api._reset_current_rpc_agent()
    _agent, _entering = None, threading.RLock()
    _wires.clear()


_inherited: list[RpcAgent] = []
os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(leave, at_exit=True)


@dataclass(frozen=True)
class Introduction:
    """What the two ends of a channel tell each other: where to call, and what to show there."""

    name: str
    url: str
    secret: str = field(repr=False)


def deliver(secret: str, parcel: bytes, body: Tensor | None) -> bool:
    """Called from the other end of a wire: take a parcel. Whether the wire is open."""
    wire = _wires.get(secret)
    if wire is not None:
        wire.take(parcel, body)
    return wire is not None


_wires: dict[str, RpcWire] = {}
"""Those that are open, by what has to be shown."""


class RpcWire:
    """Calls to the other end of a channel. The channel itself tells when that has ended."""

    def __init__(self, channel: Channel, rank: int, options: Options, timeout_s: float) -> None:
        """Find the other end, which does the same; be called where the channel has reached us.

        No call takes longer than `timeout_s`, or twice that for a trainer, who says himself when a node is silent.
        """
        self._channel, self._secret = channel, secrets.token_hex(16)
        self._timeout_s = 2 * timeout_s if rank == TRAINER else timeout_s
        self._turn, self._closing = threading.Lock(), threading.Lock()
        self._inbox: queue.SimpleQueue[tuple[bytes, Tensor | None] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Future[bool] | None] = queue.SimpleQueue()
        self._body: Tensor | None = None
        try:
            self._agent = enter(channel.address or LOOPBACK, options)
        except (RuntimeError, ValueError) as error:
            raise ChannelClosedError(str(error)) from error
        _wires[self._secret] = self
        try:
            channel.send(Introduction(self._agent.name, self._agent.url, self._secret))
            while not isinstance(told := channel.receive(MEET_S), Introduction):
                self.take(pickle.dumps(told), None)
            self._other, self._shown = self._agent.meet(told.name, told.url), told.secret
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, daemon=True, name="swath wire").start()

    def _watch(self) -> None:
        """Take what a process tells by itself, and notice its end."""
        try:
            with suppress(OSError):
                while True:
                    self.take(pickle.dumps(self._channel.receive()), None)
        finally:
            self.close()

    def take(self, parcel: bytes, body: Tensor | None) -> None:
        """Keep what has come for whoever receives."""
        self._inbox.put((parcel, body))

    def send(self, parcel: bytes, body: Tensor | None = None, number: int = 0) -> None:  # noqa: D102 - see `Wire`
        with self._turn:  # one call after the other: they come in order
            if self._secret not in _wires:
                raise ChannelClosedError("This end of the wire is closed.")
            try:
                call = self._agent.call(self._other, (self._shown, parcel, body), self._timeout_s)
                call.add_done_callback(self._answers.put)
                answer = self._answers.get()
                if answer is not None and answer.value():
                    return
                problem = "it is closed"
            except Exception as error:  # of torch, here or there
                problem = str(error)
        self.close()
        raise ChannelClosedError(f"The other end of the wire takes no calls: {problem}.")

    def receive(self) -> bytes:  # noqa: D102 - see `Wire`
        came = self._inbox.get()
        if came is None:
            self._inbox.put(None)
            raise ChannelClosedError("The wire is closed.")
        parcel, self._body = came
        return parcel

    def expect(self, number: int, space: Tensor) -> None:  # noqa: D102 - see `Wire`
        pass

    def fetch(self, space: Tensor, number: int = 0) -> None:  # noqa: D102 - see `Wire`
        assert self._body is not None
        space.copy_(self._body)
        self._body = None

    def close(self) -> None:  # noqa: D102 - see `Wire`
        with self._closing:  # who comes second returns when it is done
            if _wires.pop(self._secret, None) is not None:
                self._inbox.put(None)
                self._answers.put(None)
                self._channel.end()
                leave()
