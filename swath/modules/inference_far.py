"""Clients on other machines than their server's.

NOTE [Far clients]: they have nothing in common with the server's machine but the network. A process that sends a client
to another machine has an entrance (NOTE [Entrance]), and lets a thread for each connection pass requests on to the door
that it has itself, as if its own threads had asked: so whatever the server does about batches, errors and its end is
done for them too. Requests and answers go as bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import Tensor

from swath.errors import ChannelClosedError, ClosedError
from swath.keys import Key
from swath.modules.inference_doors import DIED, Door, Entries, SentRequest, Waiting
from swath.modules.inference_forward import entries_of
from swath.modules.inference_wire import Goodbye, Refused
from swath.runtime.channel import Channel
from swath.runtime.columns import array_of, tensor_of
from swath.runtime.entrance import Entrance, entered
from swath.runtime.faults import Failure

KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 6}
"""When a machine that says nothing is asked whether it is there, how often, and how many times: for two minutes."""


SentEntries = list[tuple[Key, torch.dtype, np.ndarray]]
"""Entries on their way."""


@dataclass(frozen=True)
class FarAsk:
    """A request."""

    number: int
    entries: SentEntries
    batch_size: tuple[int, ...]
    kind: InteractionType | None


@dataclass(frozen=True)
class FarAnswer:
    """What the policy has written."""

    number: int
    entries: SentEntries


def _packed(entries: Iterable[tuple[Key, Tensor]]) -> SentEntries:
    return [(key, value.dtype, array_of(value.cpu())) for key, value in entries]


def _unpacked(sent: SentEntries) -> Entries:
    return [(key, tensor_of(array, dtype)) for key, dtype, array in sent]


def _kept_alive(end: socket.socket) -> Channel:
    for option, value in KEEPALIVE.items():
        end.setsockopt(socket.IPPROTO_TCP, option, value)
    return Channel(end)


# -- on the other machine --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FarEnd:
    """A client on its way: where to connect to, and the secret."""

    address: str
    port: int
    secret: bytes = field(repr=False)

    def connect(self) -> Channel:
        """A new connection."""
        try:
            with entered(self.address, self.port, self.secret) as (end, _):
                pass
        except Exception as error:
            raise ClosedError(
                f"The InferenceServer cannot be reached at {self.address}:{self.port} ({error!r}): it was shut down or "
                "has ended, or a firewall is between."
            ) from error
        return _kept_alive(end)


class FarRequest(SentRequest):
    """One that is under way to another machine."""

    def __init__(self, connection: FarConnection) -> None:
        """Not answered yet."""
        self.answer: SentEntries | Failure | ClosedError | None = None
        self._connection = connection

    def wait(self, timeout_s: float | None) -> bool:
        """Wait; whether it is over."""
        return self._connection.wait(self, timeout_s)

    def _outcome(self) -> Entries | Failure | ClosedError:
        assert self.answer is not None
        return self.answer if isinstance(self.answer, Failure | ClosedError) else _unpacked(self.answer)


class FarConnection:
    """Requests of one thread go through it; any thread may wait for their answers."""

    def __init__(self, channel: Channel) -> None:
        """Own `channel`."""
        self._channel, self._turn = channel, threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, FarRequest] = {}
        self._closed: ClosedError | None = None

    def submit(self, entries: dict[Key, Tensor], size: Sequence[int], kind: InteractionType | None) -> FarRequest:
        """Send a request."""
        if self._closed is not None:
            raise ClosedError(*self._closed.args)
        number, request = next(self._numbers), FarRequest(self)
        self._waiting[number] = request
        try:
            self._channel.send(FarAsk(number, _packed(entries.items()), tuple(size), kind))
        except (ChannelClosedError, OSError):
            with self._turn:
                self._hear_rest()
        return request

    def wait(self, request: FarRequest, timeout_s: float | None) -> bool:
        """Wait until `request` is over; whether it is. Whoever has the turn reads what comes, for all."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while request.answer is None:
            left = None if deadline is None else max(0.0, deadline - monotonic())
            if not self._turn.acquire(timeout=-1 if left is None else left):
                return request.answer is not None
            try:
                if request.answer is None:
                    self._hear(self._channel.receive(left))
            except TimeoutError:
                return False
            except (ChannelClosedError, OSError):
                self._end(DIED)
            finally:
                self._turn.release()
        return True

    def _hear(self, message: object) -> None:
        match message:
            case FarAnswer(number=number, entries=entries):
                self._waiting.pop(number).answer = entries
            case Refused(number=number, failure=failure):
                self._waiting.pop(number).answer = failure
            case Goodbye(reason=reason):
                self._end(reason)

    def _hear_rest(self) -> None:
        """The other side takes nothing any more: it may have said why."""
        with contextlib.suppress(ChannelClosedError, OSError):
            for message in self._channel.receive_all():
                self._hear(message)
        self._end(DIED)

    def _end(self, reason: str) -> None:
        self._closed = self._closed or ClosedError(reason)
        while self._waiting:
            self._waiting.popitem()[1].answer = self._closed
        self._channel.close()


class FarDoor:
    """To a server on another machine. Each thread has a connection of its own."""

    def __init__(self, end: FarEnd) -> None:
        """Connect to `end`, when there is something to ask."""
        self._end, self._pid = end, os.getpid()
        self._of_thread = threading.local()

    def submit(self, tensordict: TensorDictBase, keys: Sequence[Key] | None, kind: Any, keep: bool) -> FarRequest:
        """Ask through the connection of this thread."""
        if self._pid != os.getpid():  # a fork has none of them
            self._pid, self._of_thread = os.getpid(), threading.local()
        connection: FarConnection | None = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = self._of_thread.connection = FarConnection(self._end.connect())
        return connection.submit(entries_of(tensordict, keys), tensordict.batch_size, kind)

    def travelling_end(self) -> FarEnd:
        """Whoever has it connects as we do."""
        return self._end


# -- on the server's machine -----------------------------------------------------------------------------------------


class Reach:
    """Where clients on other machines reach a server, by way of this process: see NOTE [Far clients]."""

    def __init__(self, door: Door) -> None:
        """Pass what they ask for on to `door`. Nothing listens before the first is sent."""
        self._door = door
        self._turn, self._is_closed = threading.Lock(), False
        self._entrances: dict[str, Entrance] = {}
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()

    def end(self, address: str) -> FarEnd:
        """What a client needs that reaches this machine at `address`."""
        with self._turn:
            if self._is_closed:
                raise ClosedError("The InferenceServer was shut down.")
            if address not in self._entrances:
                self._entrances[address] = Entrance(address, admit=lambda way: self._begin)
            entrance = self._entrances[address]
        return FarEnd(entrance.address, entrance.port, entrance.secret)

    def close(self) -> None:
        """Listen no more, and tell those who are connected. May be called again."""
        with self._turn:
            self._is_closed = True
            for entrance in self._entrances.values():
                entrance.close()
            for channel in list(self._channels):
                self._part(channel, "The InferenceServer was shut down.")

    def _begin(self, end: socket.socket) -> None:
        channel = _kept_alive(end)
        with self._turn:
            if self._is_closed:
                return self._part(channel, "The InferenceServer was shut down.")
            self._channels.add(channel)
        threading.Thread(target=self._pass_on, args=(channel,), daemon=True, name="swath far client").start()
        return None

    @staticmethod
    def _part(channel: Channel, reason: str) -> None:
        with contextlib.suppress(ChannelClosedError, TimeoutError, OSError):
            channel.send(Goodbye(reason), timeout_s=0.0)
        channel.end()

    def _pass_on(self, channel: Channel) -> None:
        """What the thread of a connection does: all that was asked goes on before the first is waited for."""
        try:
            while True:
                asked: list[FarAsk] = [channel.receive(), *channel.receive_all()]
                for ask, waiting in [(ask, self._submit(ask)) for ask in asked]:
                    channel.send(_answer(ask.number, waiting))
        except ClosedError as error:
            self._part(channel, str(error))
        except (ChannelClosedError, TimeoutError, OSError):
            pass  # the client has ended, or takes nothing
        finally:
            channel.close()

    def _submit(self, ask: FarAsk) -> Waiting | Failure:
        try:
            data = TensorDict({}, ask.batch_size)
            for key, value in _unpacked(ask.entries):
                data.set(key, value)
            return self._door.submit(data, None, ask.kind, True)
        except ClosedError:
            raise
        except Exception as error:
            return Failure.of(error)


def _answer(number: int, waiting: Waiting | Failure) -> FarAnswer | Refused:
    """What becomes of a request."""
    if isinstance(waiting, Failure):
        return Refused(number, waiting)
    try:
        return FarAnswer(number, _packed(waiting.entries(None)))
    except ClosedError:
        raise
    except Exception as error:
        return Refused(number, Failure.of(error))
