"""Who may come to a trainer's meeting, and who does not disturb it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest
from children import until

from swath.collectors.distributed.meeting import REFUSED, WELCOME, Invitation, Meeting
from swath.errors import ClosedError
from swath.runtime import entrance
from swath.runtime.channel import Channel

SECRET = b"of this run"
SOON_S = 3.0
"""Less than `CHECK_S`."""


class Came:
    """A node as the meeting sees it."""

    def __init__(self) -> None:
        self.guests: list[tuple[Channel, str, int]] = []

    def __call__(self, channel: Channel, host: str, pid: int) -> None:
        self.guests.append((channel, host, pid))


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting("127.0.0.1", secret=SECRET)
    yield made
    made.close()


def arrive(invitation: Invitation, secret: bytes = SECRET) -> tuple[Connection, bytes]:
    """Do what a node does, and what it is told."""
    way = Client((invitation.address, invitation.port), authkey=secret)
    way.send_bytes(f"{invitation.index} {invitation.generation} 4711 host of many words".encode())
    return way, way.recv_bytes()


def test_a_node_comes(meeting: Meeting) -> None:
    node = Came()
    way, answer = arrive(meeting.expect(0, node))
    assert answer == WELCOME
    until(lambda: node.guests)
    channel, host, pid = node.guests[0]
    assert (host, pid) == ("host of many words", 4711)
    assert channel.address == "127.0.0.1"
    assert not channel.has_ended
    way.close()
    until(lambda: channel.has_ended)
    channel.close()


def test_only_the_last_of_an_index_is_let_in_and_once(meeting: Meeting) -> None:
    nodes = [Came(), Came()]
    former, last = [meeting.expect(3, node) for node in nodes]
    assert arrive(former)[1] == REFUSED
    assert arrive(last)[1] == WELCOME
    assert arrive(last)[1] == REFUSED
    unknown = Invitation(last.address, last.port, SECRET, 4)
    assert arrive(unknown)[1] == REFUSED
    until(lambda: nodes[1].guests)
    assert not nodes[0].guests
    nodes[1].guests[0][0].close()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def test_strangers_are_refused_and_do_not_disturb(meeting: Meeting, tmp_path: Path) -> None:
    node = Came()
    invitation = meeting.expect(0, node)
    place = (invitation.address, invitation.port)
    silent = [socket.create_connection(place) for _ in range(20)]
    for sent in (
        b"GET / HTTP/1.1\r\n\r\n" * 1000,
        pickle.dumps(Bomb(tmp_path / "bomb")),
        b"\0\0\0\5hello",
        b"\xff" * 12,
    ):
        silent.append(socket.create_connection(place))
        silent[-1].sendall(sent)
    with pytest.raises((multiprocessing.AuthenticationError, EOFError, ConnectionError)):
        arrive(invitation, b"of another run")
    assert not node.guests
    begun = time.monotonic()
    _, answer = arrive(invitation)
    assert answer == WELCOME
    assert time.monotonic() - begun < SOON_S
    assert not (tmp_path / "bomb").exists()
    until(lambda: node.guests)
    node.guests[0][0].close()
    for stranger in silent:
        stranger.close()


def test_a_crowd_of_silent_strangers_is_sent_away(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "CHECK_S", 0.3)
    node = Came()
    invitation = meeting.expect(0, node)
    crowd = [socket.create_connection((invitation.address, invitation.port)) for _ in range(entrance.STRANGERS + 10)]
    assert arrive(invitation)[1] == WELCOME
    for stranger in crowd:
        stranger.settimeout(SOON_S)
        assert len(stranger.recv(1000)) < 100  # the question that it has not answered
        assert stranger.recv(1000) == b""
        stranger.close()
    until(lambda: node.guests)
    node.guests[0][0].close()


def test_somebody_else_who_listens_is_found_out() -> None:
    with contextlib.closing(Meeting("127.0.0.1", secret=b"of another run")) as other:
        invitation = Invitation(other.address, other.port, SECRET, 0)
        with pytest.raises(ConnectionError, match=r"AuthenticationError|EOFError|ConnectionReset"):
            invitation.accept()
    with pytest.raises(ConnectionError, match=r"Node 0 on .* does not reach its trainer at 127.0.0.1:\d+ .*address="):
        invitation.accept()


def test_it_listens_at_one_address_until_it_is_closed(meeting: Meeting) -> None:
    with pytest.raises(OSError, match=f"127.0.0.1:{meeting.port}: Address already in use; see address= and tcp_port="):
        Meeting("127.0.0.1", meeting.port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port))
    meeting.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", meeting.port))
    with pytest.raises(ClosedError, match="shut down"):
        meeting.expect(0, Came())
    meeting.close()


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_it_never_listens_everywhere(address: str) -> None:
    with pytest.raises(ValueError, match="every address of this machine"):
        Meeting(address)
