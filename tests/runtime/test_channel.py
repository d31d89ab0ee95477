"""Channels: messages come in order and whole, whatever happens to the other side."""

import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from swath.errors import ChannelClosedError
from swath.runtime import Channel, Event, MemoryBlock
from swath.runtime.channel import HEADER, MOST_FDS, pack

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    pair = ours, Channel(theirs)
    yield pair
    for end in pair:
        end.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fill(end: Channel, size: int = 50_000) -> int:
    """Send until nothing more can be sent; how many messages that took."""
    for number in range(1000):
        try:
            end.send((number, b"x" * size), timeout_s=0.0)
        except TimeoutError:
            return number
    raise AssertionError("there is no end to it")


def test_messages_come_in_order_and_whole(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    sent = [0, "text", {"a": [1, 2]}, b"x" * 100_000, None]
    for message in sent:
        ours.send(message)
    got: list[Any] = []
    while len(got) < len(sent):
        got += theirs.receive_all()
    assert got == sent
    assert not theirs.has_news()


def test_receive_waits_no_longer_than_told(ends: tuple[Channel, Channel]) -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        ends[1].receive(timeout_s=0.1)
    assert 0.09 < time.monotonic() - begun < 2
    ends[0].send(5)
    assert ends[1].receive(timeout_s=1) == 5


def test_messages_larger_than_the_socket_holds(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    big = np.random.default_rng(0).bytes(5_000_000)
    thread = threading.Thread(target=ours.send, args=(big,))
    thread.start()
    assert theirs.receive(timeout_s=20) == big
    thread.join()


def test_what_was_sent_before_the_end_still_comes(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    for number in range(10):
        ours.send(number)
    ours.close()
    got: list[int] = []
    while len(got) < 10:
        got += theirs.receive_all()
    with pytest.raises(ChannelClosedError):
        theirs.receive_all()
    assert got == list(range(10))
    with pytest.raises(ChannelClosedError):
        theirs.receive(timeout_s=1)


def test_half_a_message_is_no_message(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    data = pickle.dumps("whole")
    ours.send("first")
    os.write(ours.fileno(), HEADER.pack(len(data), 0) + data[:3])
    assert theirs.receive(timeout_s=1) == "first"
    with pytest.raises(TimeoutError):
        theirs.receive(timeout_s=0.05)
    ours.close()
    with pytest.raises(ChannelClosedError):
        theirs.receive(timeout_s=1)


def test_sending_to_an_end_that_is_closed(ends: tuple[Channel, Channel]) -> None:
    ends[1].close()
    with pytest.raises(ChannelClosedError):
        ends[0].send(1)
    ends[0].close()
    with pytest.raises(ChannelClosedError):
        ends[0].send(1)
    ends[0].close()


def test_sending_to_one_who_does_not_listen_has_an_end(ends: tuple[Channel, Channel]) -> None:
    ours, _ = ends
    fill(ours)
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="stopped, or stuck"):
        ours.send(1, timeout_s=0.2)
    assert 0.19 < time.monotonic() - begun < 2


@pytest.mark.parametrize("size", [10, 5_000, 50_000, 1_000_000])
def test_a_message_that_could_not_be_sent_in_time_tears_no_other(ends: tuple[Channel, Channel], size: int) -> None:
    ours, theirs = ends
    whole = fill(ours, size)
    got: list[Any] = []
    thread = threading.Thread(target=ours.send, args=("last",))
    thread.start()
    while not got or got[-1] != "last":
        got.append(theirs.receive(timeout_s=10))
    thread.join()
    numbers = [number for number, _ in got[:-1]]
    assert numbers in (list(range(whole)), list(range(whole + 1)))  # that one was on its way, or was not
    assert all(body == b"x" * size for _, body in got[:-1])


def test_descriptors_travel(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    block, event = MemoryBlock(64), Event()
    ours.send(("this", block, event))
    _, other, bell = theirs.receive(timeout_s=1)
    other.array((8,), np.int64)[3] = 7
    assert block.array((8,), np.int64)[3] == 7
    bell.lift()
    assert event.lower()


def test_descriptors_that_nobody_takes_are_closed(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    before = descriptors()
    for _ in range(5):
        ours.send(MemoryBlock(64))
        theirs.receive(timeout_s=1)
    ours.send(MemoryBlock(64))
    theirs.take_in()  # it has come, and nobody reads it
    theirs.close()
    assert descriptors() == before - 1


def test_too_many_descriptors_are_refused() -> None:
    with pytest.raises(ValueError, match=str(MOST_FDS)):
        pack([MemoryBlock(8) for _ in range(MOST_FDS + 1)])


def test_events_travel_in_no_other_way() -> None:
    with pytest.raises(TypeError, match="Channel"):
        pickle.dumps(Event())


def test_what_the_dead_have_sent_comes_though_a_child_of_theirs_lives(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    copy = os.dup(ours.fileno())  # what a fork of them would have
    ours.send("a")
    ours.send(b"x" * 100_000)
    ours.close()
    try:
        assert theirs.receive_rest() == ["a", b"x" * 100_000]
        assert theirs.receive_rest() == []
    finally:
        os.close(copy)


def test_a_fork_has_no_part_in_it(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    pid = os.fork()
    if not pid:
        os._exit(0 if ours.fileno() == theirs.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ours.send(1)
    assert theirs.receive(timeout_s=1) == 1


def test_it_has_no_name_and_is_not_inherited(ends: tuple[Channel, Channel]) -> None:
    for end in ends:
        assert not os.get_inheritable(end.fileno())
        with socket.socket(fileno=os.dup(end.fileno())) as same:
            assert same.family == socket.AF_UNIX
            assert same.getsockname() in ("", b"")
