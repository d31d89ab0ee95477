"""Locks, liveness and memory between processes, also when one of them dies."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from children import child, hear
from jobs import until

from swath.runtime import Block, FileBlock, MemoryBlock, ProcessLock, is_alive, own_birth
from swath.runtime.liveness import birth_of
from swath.runtime.memory import PAGE, page_aligned

WAIT_S = 30.0


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# -- locks -----------------------------------------------------------------------------------------------------------


def hold(pipe: Any, lock: ProcessLock) -> None:
    with lock:
        pipe.send("held")
        pipe.recv()
    pipe.send("released")
    pipe.recv()


def fork_then_hold(pipe: Any, lock: ProcessLock) -> None:
    """Hold the lock while a child of ours, made before, lives on."""
    with lock:  # it is ours from now on, not that of the process we come from
        pass
    grandchild = os.fork()
    if not grandchild:
        pipe.close()
        signal.pause()
        os._exit(0)
    lock.acquire()
    pipe.send(grandchild)
    signal.pause()


def fork_holding(pipe: Any, lock: ProcessLock) -> None:
    """Make a child while we hold the lock, then release it: the child must neither have it nor keep it."""
    with lock:
        grandchild = os.fork()
        if not grandchild:
            try:
                lock.acquire(timeout_s=0.2)
            except TimeoutError:
                pipe.send("refused")
            else:
                pipe.send("given to two")
            pipe.close()
            signal.pause()
            os._exit(0)
        pipe.send(grandchild)
        pipe.recv()
    pipe.send("released")
    signal.pause()


def add_up(pipe: Any, block: Block, lock: ProcessLock, times: int) -> None:
    number = block.array((1,), np.int64)
    pipe.send("ready")
    pipe.recv()
    for _ in range(times):
        with lock:
            number[0] = int(number[0]) + 1
    pipe.send("done")


def test_the_lock_of_a_killed_holder_is_free_though_its_children_live() -> None:
    lock = ProcessLock(MemoryBlock(8))
    with child(fork_then_hold, lock) as (process, pipe):
        grandchild = hear(pipe)
        try:
            os.kill(process.pid, signal.SIGKILL)
            until(lambda: not process.is_alive())  # not `join`: our grandchild has the pipe that it waits for
            lock.acquire(timeout_s=2.0)
            lock.release()
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_a_child_made_while_the_lock_is_held_does_not_have_it() -> None:
    lock = ProcessLock(MemoryBlock(8))
    with child(fork_holding, lock) as (_, pipe):
        said = {hear(pipe), hear(pipe)}
        (grandchild,) = (word for word in said if isinstance(word, int))
        try:
            assert "refused" in said
            pipe.send("go on")
            assert hear(pipe) == "released"
            lock.acquire(timeout_s=2.0)
            lock.release()
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_a_stopped_holder_ends_in_an_error_and_is_awaited_again() -> None:
    lock = ProcessLock(MemoryBlock(8))
    with child(hold, lock) as (process, pipe):
        assert hear(pipe) == "held"
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(TimeoutError, match="stopped"):
                lock.acquire(timeout_s=0.05)
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("let go")
        assert hear(pipe) == "released"
        lock.acquire(timeout_s=WAIT_S)
        lock.release()


def test_a_thread_may_take_it_again_and_others_wait() -> None:
    lock = ProcessLock(MemoryBlock(8))
    outcome: list[str] = []

    def other() -> None:
        try:
            lock.acquire(timeout_s=0.05)
        except TimeoutError as error:
            outcome.append(str(error))

    with lock, lock:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(WAIT_S)
        with lock:
            pass
    assert outcome
    assert "thread" in outcome[0]
    thread = threading.Thread(target=lambda: (lock.acquire(1.0), outcome.append("taken"), lock.release()))
    thread.start()
    thread.join(WAIT_S)
    assert outcome[1:] == ["taken"]


def test_nobody_is_in_it_at_the_same_time_as_another() -> None:
    block = MemoryBlock(8)
    lock, times = ProcessLock(block), 2000
    with child(add_up, block, lock, times) as (_, one), child(add_up, block, lock, times) as (_, two):
        for pipe in (one, two):
            assert hear(pipe) == "ready"
        for pipe in (one, two):
            pipe.send("go")
        number = block.array((1,), np.int64)
        for _ in range(times):
            with lock:
                number[0] = int(number[0]) + 1
        for pipe in (one, two):
            assert hear(pipe) == "done"
    assert number[0] == 3 * times


def test_locks_close_what_they_opened() -> None:
    block = MemoryBlock(8)
    before = open_descriptors()
    lock = ProcessLock(block)
    assert len(open_descriptors()) == len(before) + 1
    del lock
    assert open_descriptors() == before


def test_an_interrupt_while_waiting_leaves_the_lock_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    block = MemoryBlock(8)
    lock, other = ProcessLock(block), ProcessLock(block)

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with other:
        monkeypatch.setattr(time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
        monkeypatch.undo()
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: (lock.acquire(1.0), taken.append(True), lock.release()))
    thread.start()
    thread.join(WAIT_S)
    assert taken


# -- liveness --------------------------------------------------------------------------------------------------------


def pause(pipe: Any) -> None:
    pipe.send(own_birth())
    signal.pause()


def test_a_process_is_known_by_its_birth_until_it_is_dead() -> None:
    with child(pause) as (process, pipe):
        birth = hear(pipe)
        os.kill(process.pid, signal.SIGSTOP)  # a stopped one is alive
        assert is_alive(process.pid, birth)
        assert not any(is_alive(process.pid, other) for other in (birth - 1, birth + 1, 0))
        os.kill(process.pid, signal.SIGKILL)
        process.join(WAIT_S)
        assert not is_alive(process.pid, birth)
        assert birth_of(process.pid) is None


def test_a_zombie_is_dead() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(reading, 1)
        os._exit(0)
    try:
        birth = birth_of(pid)
        assert birth is not None
        assert is_alive(pid, birth)
        os.write(writing, b"x")
        # WNOWAIT: it has ended, but nobody has asked for its end yet.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert os.path.exists(f"/proc/{pid}")
        assert not is_alive(pid, birth)
    finally:
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def test_a_name_with_brackets_and_spaces_does_not_confuse() -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "open('/proc/self/comm','w').write(') Z 1 ('); print('x', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        birth = birth_of(process.pid)
        process.kill()
    assert birth is not None
    assert birth >= own_birth()


def test_there_is_no_process_of_that_id() -> None:
    assert birth_of(2**22 + 1) is None
    assert not is_alive(2**22 + 1, 0)


# -- memory ----------------------------------------------------------------------------------------------------------


def write_seven(pipe: Any, block: Block) -> None:
    block.array((4,), np.int64)[:] = 7
    pipe.send("written")
    pipe.recv()


def grow(pipe: Any, block: Block) -> None:
    block.resize(10 * PAGE)
    block.array((PAGE,), np.uint8, 9 * PAGE)[:] = 3
    pipe.send("grown")
    pipe.recv()


@pytest.fixture(params=["memory", "file", "named file"])
def block(request: pytest.FixtureRequest, tmp_path: Any) -> Block:
    if request.param == "memory":
        return MemoryBlock(64)
    made = FileBlock(tmp_path, None if request.param == "file" else "name")
    made.resize(64)
    return made


def test_another_process_sees_what_is_written(block: Block) -> None:
    array = block.array((4,), np.int64)
    assert not array.any()
    with child(write_seven, block) as (_, pipe):
        assert hear(pipe) == "written"
        assert (array == 7).all()


def test_a_block_grows_and_old_arrays_stay_valid(block: Block) -> None:
    old = block.array((8,), np.int64)
    old[:] = np.arange(8)
    with child(grow, block) as (_, pipe):
        assert hear(pipe) == "grown"
        assert block.size == 10 * PAGE
        new = block.array((10 * PAGE,), np.uint8)
        assert (new[9 * PAGE :] == 3).all()
        assert not new[64 : 9 * PAGE].any()
        new[:8] = 255
        assert old[0] == -1
        assert old[1] == 1


def test_arrays_outlive_their_block(block: Block) -> None:
    array = block.array((8,), np.int64)
    array[:] = 5
    del block
    assert (array == 5).all()


def test_arrays_lie_within_the_block(block: Block) -> None:
    assert block.array((0, 3), np.float32).shape == (0, 3)
    with pytest.raises(ValueError, match="do not lie within"):
        block.array((65,), np.uint8)


def test_a_pickled_block_is_the_same_memory(block: Block) -> None:
    array = block.array((8,), np.int64)
    copy = pickle.loads(pickle.dumps(block))
    copy.array((8,), np.int64)[3] = 42
    assert array[3] == 42
    assert copy.fd != block.fd


def test_a_pickled_lock_is_the_same_lock() -> None:
    block = MemoryBlock(64)
    lock = ProcessLock(block)

    def descriptors_of_block() -> int:
        found = []
        for fd in open_descriptors():
            with contextlib.suppress(OSError):
                found.append(os.fstat(int(fd)).st_ino)
        return found.count(os.fstat(block.fd).st_ino)

    copy, same = pickle.loads(pickle.dumps((lock, block)))
    until(lambda: descriptors_of_block() == 4)  # of either block and lock one: the block came once
    with lock, pytest.raises(TimeoutError):
        copy.acquire(timeout_s=0.02)
    with copy:
        pass
    assert same.size == block.size


def test_nothing_stays_open_and_nothing_is_left() -> None:
    before = open_descriptors()
    for _ in range(5):
        made = MemoryBlock(PAGE)
        made.array((PAGE,), np.uint8)[:] = 1
        del made
    assert open_descriptors() == before
    assert not [name for name in os.listdir("/dev/shm") if "swath" in name]


def test_a_file_without_a_name_is_nowhere(tmp_path: Any) -> None:
    made = FileBlock(tmp_path)
    made.resize(PAGE)
    made.array((PAGE,), np.uint8)[:] = 1
    assert not list(tmp_path.iterdir())


def test_a_file_with_a_name_is_ours_alone(tmp_path: Any) -> None:
    mask = os.umask(0)
    try:
        FileBlock(tmp_path, "frames")
    finally:
        os.umask(mask)
    assert (tmp_path / "frames").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("offset", "aligned"), [(0, 0), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_page_aligned(offset: int, aligned: int) -> None:
    assert page_aligned(offset) == aligned


def test_memory_without_memfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In /dev/shm there may be too little room: that is told before anything is written."""

    def refuse(*args: object) -> int:
        raise PermissionError(errno.EPERM, "refused")

    monkeypatch.setattr(os, "memfd_create", refuse)
    block = MemoryBlock(8)
    block.array((1,), "int64")[:] = 7
    assert Block(os.dup(block.fd)).array((1,), "int64") == 7
    assert os.readlink(f"/proc/self/fd/{block.fd}").startswith("/dev/shm/")
    with pytest.raises(OSError, match=r"no room for .* in /dev/shm"):
        MemoryBlock(1 << 50)


def test_no_descriptor_is_left_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(OSError, match="ulimit -n"):
        MemoryBlock(8)
