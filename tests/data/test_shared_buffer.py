"""One buffer, many processes, any of which may die at any instruction."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import platform
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffer_tools import WAIT_S, buffer_of, check, seeded
from buffer_tools import large_frames as frames
from children import FORK, child, hear
from tensordict import TensorDict

import swath.data.ledger
from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    NothingToSampleError,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
)
from swath.runtime import MemoryBlock

STRESS_S = 30.0 if os.environ.get("SWATH_LONG") else 5.0
KINDS = [LazyTensorStorage, LazyMemmapStorage]


def shared(kind: type[TensorStorage], size: int, **options: Any) -> ReplayBuffer:
    return buffer_of(kind, size, shared=True, **options)


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT_S)


def until(condition: Callable[[], Any], within_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        os.sched_yield()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def memfds() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:swath" in link for link in links)


def whole_rows(buffer: ReplayBuffer) -> int:
    """How many rows have the stamp that they should have, by looking at each."""
    ledger = buffer.storage.ledger
    positions = np.arange(ledger.first, ledger.head)
    return int((ledger.stamps[positions % ledger.capacity] == positions + 1).sum())


# -- what other processes do -----------------------------------------------------------------------------------------


def write_once(pipe: Any, buffer: ReplayBuffer, data: TensorDict) -> None:
    pipe.send("ready")
    pipe.recv()
    try:
        pipe.send(buffer.extend(data).tolist())
    except Exception as error:
        pipe.send(error)
    pipe.recv()


def answer(pipe: Any, buffer: ReplayBuffer) -> None:
    """Do with the buffer what we are told to."""
    does: dict[str, Callable[..., Any]] = {
        "extend": lambda numbers: buffer.extend(frames(numbers)).tolist(),
        "sample": lambda *size: check(buffer.sample(*size)),
        "state": lambda: (len(buffer), buffer.write_count, buffer.is_shared, buffer.stats()["lost"]),
        "all": lambda: check(buffer[:]),
        "set": lambda where, numbers: buffer.__setitem__(where, frames(numbers)),
        "empty": buffer.empty,
    }
    while True:
        name, *args = pipe.recv()
        try:
            pipe.send(does[name](*args))
        except Exception as error:
            pipe.send(error)


def ask(pipe: Any, *command: Any) -> Any:
    """What the process that does `answer` says."""
    pipe.send(command)
    return hear(pipe)


def put_half(pipe: Any, buffer: ReplayBuffer, rows: int, then: Callable[[Any], None]) -> None:
    """Write garbage to some columns of `rows` rows, do `then` in the middle of it, and make frames of them."""
    view = buffer.storage.view(buffer.storage.max_size)  # type: ignore[attr-defined]

    def put(where: slice, which: slice) -> None:
        view["n"][where] = -1
        view["body"][where] = -7
        then(pipe)
        for key, value in frames([5000] * (where.stop - where.start)).items(True, True):
            view[key][where] = value

    buffer.storage.write(rows, put, None, None)
    pipe.send("done")
    pipe.recv()


def wait_here(pipe: Any) -> None:
    pipe.send("in put")
    pipe.recv()


def stop_here(pipe: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail_in_put(pipe: Any, buffer: ReplayBuffer, rows: int, error: type[BaseException]) -> None:
    def fail(pipe: Any) -> None:
        raise error("in put")

    try:
        put_half(pipe, buffer, rows, fail)
    except BaseException as caught:
        pipe.send(type(caught).__name__)
    pipe.recv()


def hold_lock(pipe: Any, buffer: ReplayBuffer) -> None:
    with buffer.storage.ledger.lock:
        pipe.send("held")
        pipe.recv()


def die_while_reserving(pipe: Any, buffer: ReplayBuffer, after: int, rows: int) -> None:
    """Reserve, and be gone after so many stores to the ledger."""
    ledger = buffer.storage.ledger
    buffer.extend(frames([99]))  # have a place in the table

    class Mortal(np.ndarray):
        stores = 0

        def __setitem__(self, at: Any, value: Any) -> None:
            if Mortal.stores == after:
                pipe.send("gone")
                os.kill(os.getpid(), signal.SIGKILL)
            Mortal.stores += 1
            super().__setitem__(at, value)

    for name in ("numbers", "_begins", "_ends", "_since", "stamps"):
        setattr(ledger, name, getattr(ledger, name).view(Mortal))
    ledger.reserve(rows, buffer.storage.make_room)
    pipe.send("survived")
    pipe.recv()


def overwrite_half(pipe: Any, buffer: ReplayBuffer, rows: int) -> None:
    """Change frames in place, and be killed in the middle of it."""
    storage: Any = buffer.storage
    assert len(buffer)  # the memory is mapped

    class Slow(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: Any) -> Any:
            if key == "body":
                pipe.send("in the middle")
                pipe.recv()
            return super().__getitem__(key)

    storage._columns.tensors = Slow(storage._columns.tensors)
    buffer[:rows] = frames(range(900, 900 + rows))


# -- start methods ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_started_in_any_way_share_the_buffer(method: str) -> None:
    context = multiprocessing.get_context(method)
    buffer = shared(LazyTensorStorage, 8, generator=seeded())  # which travels along
    disk = shared(LazyMemmapStorage, 8)
    with child(answer, buffer, context=context) as (_, one), child(answer, disk, context=context) as (_, two):
        for pipe, ours in ((one, buffer), (two, disk)):
            assert ask(pipe, "state") == (0, 0, True, 0)
            assert ask(pipe, "extend", range(5)) == [0, 1, 2, 3, 4]  # lays the memory out, over there
            assert check(ours[:]) == [0, 1, 2, 3, 4]
            assert set(check(ours.sample(100))) == {0, 1, 2, 3, 4}
            assert ours.extend(frames(range(5, 10))).tolist() == [5, 6, 7, 0, 1]
            assert ask(pipe, "all") == [8, 9, 2, 3, 4, 5, 6, 7]
            assert set(ask(pipe, "sample", 50)) <= set(range(2, 10))
            assert ask(pipe, "state") == (8, 10, True, 0)
            ours.empty()
            assert isinstance(ask(pipe, "sample", 2), NothingToSampleError)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_sees_frames_as_soon_as_they_are_written(kind: type[TensorStorage]) -> None:
    buffer = shared(kind, 16)
    with child(answer, buffer) as (_, pipe):
        assert isinstance(ask(pipe, "sample", 4), NothingToSampleError)
        for n in range(40):
            buffer.extend(frames([n]))
            assert sorted(ask(pipe, "all")) == list(range(max(0, n - 15), n + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_change_and_empty_is_changed_and_empty_here(kind: type[TensorStorage]) -> None:
    buffer = shared(kind, 6)
    buffer.extend(frames(range(8)))
    with child(answer, buffer) as (_, pipe):
        assert ask(pipe, "set", slice(0, 2), [70, 71]) is None
        assert check(buffer[:]) == [70, 71, 2, 3, 4, 5]
        assert ask(pipe, "empty") is None
        assert (len(buffer), buffer.write_count) == (0, 0)
        with pytest.raises(NothingToSampleError):
            buffer.sample(1)
        assert buffer.extend(frames([1])).tolist() == [0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fits", [True, False])
def test_two_processes_may_race_to_be_the_first(kind: type[TensorStorage], fits: bool) -> None:
    """Whoever is first decides what the buffer holds."""
    other = frames([11, 12]) if fits else TensorDict({"other": torch.zeros(3, 2)}, [3])
    for _ in range(10 if fits else 5):
        buffer = shared(kind, 16)
        with (
            child(write_once, buffer, frames([1, 2, 3])) as (_, to_one),
            child(write_once, buffer, other) as (_, to_two),
        ):
            for pipe in (to_one, to_two):
                assert hear(pipe) == "ready"
            for pipe in (to_one, to_two):
                pipe.send("go")
            one, two = hear(to_one), hear(to_two)
            if not fits:
                assert [type(one), type(two)].count(KeyError) == 1
                assert (len(buffer), buffer.stats()["lost"]) == (3, 0)
                continue
            assert sorted([*one, *two]) == [0, 1, 2, 3, 4]
            held = check(buffer[:])
            assert ([held[at] for at in one], [held[at] for at in two]) == ([1, 2, 3], [11, 12])


def test_a_child_draws_ahead_for_itself() -> None:
    buffer = shared(LazyTensorStorage, 16, prefetch=2, batch_size=4)
    buffer.extend(frames(range(16)))
    buffer.sample()
    try:
        with child(answer, buffer) as (_, pipe):
            for _ in range(4):
                assert set(ask(pipe, "sample")) <= set(range(16))
    finally:
        buffer.shutdown()


def test_forking_while_a_thread_is_in_the_buffer() -> None:
    buffer = shared(LazyTensorStorage, 16)
    buffer.extend(frames(range(4)))
    with contextlib.ExitStack() as alive:
        with buffer.storage.ledger.writing, buffer._drawer.lock, buffer.storage.ledger.lock:
            _, pipe = alive.enter_context(child(answer, buffer))
        assert ask(pipe, "extend", [4]) == [4]
        assert set(ask(pipe, "sample", 3)) <= set(range(5))


# -- faults, one by one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_killed_between_reserve_and_commit(kind: type[TensorStorage]) -> None:
    buffer = shared(kind, 8)
    buffer.extend(frames(range(10)))
    with child(put_half, buffer, 3, wait_here) as (process, pipe):
        assert hear(pipe) == "in put"
        assert len(buffer) == 5
        assert buffer.write_count == 10
        assert set(check(buffer.sample(100))) == {5, 6, 7, 8, 9}
        assert sorted(check(buffer[:])) == [5, 6, 7, 8, 9]
        kill(process)
        assert set(check(buffer.sample(100))) == {5, 6, 7, 8, 9}
        # The ring comes round to its rows: nobody waits for the dead.
        begun = time.monotonic()
        buffer.extend(frames(range(20, 26)))
        assert time.monotonic() - begun < 10.0
    assert buffer.stats() == {"frames": 6, "written": 16, "sampled": 200, "lost": 3}
    assert set(check(buffer.sample(200))) == set(range(20, 26))
    buffer.extend(frames(range(26, 30)))
    assert buffer.stats() == {"frames": 8, "written": 20, "sampled": 400, "lost": 3}
    assert sorted(check(buffer[:])) == list(range(22, 30))


@pytest.mark.parametrize("kind", KINDS)
def test_the_dead_are_counted_by_readers_too(kind: type[TensorStorage], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swath.data.ledger, "SLOW_NS", 0)
    buffer = shared(kind, 8)
    buffer.extend(frames(range(10)))
    with child(put_half, buffer, 3, wait_here) as (process, pipe):
        assert hear(pipe) == "in put"
        kill(process)
    assert set(check(buffer.sample(100))) == {5, 6, 7, 8, 9}
    assert buffer.stats() == {"frames": 5, "written": 10, "sampled": 100, "lost": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_killed_with_the_lock(kind: type[TensorStorage]) -> None:
    buffer = shared(kind, 8)
    buffer.extend(frames(range(4)))
    with child(hold_lock, buffer) as (process, pipe):
        assert hear(pipe) == "held"
        os.kill(process.pid, signal.SIGKILL)
        assert buffer.extend(frames([4, 5])).tolist() == [4, 5]
    assert check(buffer[:]) == [0, 1, 2, 3, 4, 5]
    assert buffer.stats()["lost"] == 0


@pytest.mark.parametrize("after", range(9))
def test_a_writer_killed_at_each_store_of_reserving(after: int) -> None:
    """With holes that others left before, which must stay known as holes."""
    buffer = shared(LazyTensorStorage, 12)
    buffer.extend(frames(range(12)))
    for rows in (2, 2, 2):
        with child(put_half, buffer, rows, wait_here) as (process, pipe):
            assert hear(pipe) == "in put"
            kill(process)
    buffer.extend(frames(range(20, 26)))  # after six rows that hold nothing
    with child(die_while_reserving, buffer, after, 2) as (process, pipe):
        said = hear(pipe)
        if said == "gone":
            process.join(WAIT_S)
        for n in range(100, 103):
            for _ in range(20):
                assert set(check(buffer.sample(20))) <= {*range(20, 26), 99, 100, 101, 102}
            buffer.extend(frames([n]))
        with buffer.storage.ledger.at_rest() if said == "gone" else contextlib.nullcontext():
            assert len(buffer) == whole_rows(buffer)
    held = check(buffer[:])
    assert len(held) == len(buffer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_writer_is_never_read_and_awaited_when_its_rows_are_needed(
    kind: type[TensorStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swath.data.ledger, "SLOW_NS", 50_000_000)
    monkeypatch.setattr(swath.data.ledger, "PATIENCE_S", 0.3)
    buffer = shared(kind, 8)
    buffer.extend(frames(range(10)))
    with child(put_half, buffer, 3, stop_here) as (process, pipe):
        until(lambda: is_stopped(process.pid))
        begun, sampled = time.monotonic(), 200
        while time.monotonic() - begun < 0.3:  # also after it has become slow
            assert set(check(buffer.sample(20))) <= {5, 6, 7, 8, 9}
            sampled += 20
        buffer.extend(frames(range(20, 24)))
        assert set(check(buffer.sample(200))) == {9, 20, 21, 22, 23}
        with pytest.raises(TimeoutError, match=str(process.pid)):
            buffer.extend(frames(range(24, 30)))
        with pytest.raises(TimeoutError, match=str(process.pid)):
            buffer.state_dict()
        assert buffer.stats() == {"frames": 5, "written": 14, "sampled": sampled, "lost": 0}
        os.kill(process.pid, signal.SIGCONT)
        assert hear(pipe) == "done"
        assert set(check(buffer.sample(200))) <= {9, 20, 21, 22, 23, 5000}
        assert len(buffer) == 8
        buffer.extend(frames(range(24, 30)))
        assert sorted(check(buffer[:])) == list(range(22, 30))
        assert buffer.stats() == {"frames": 8, "written": 23, "sampled": sampled + 200, "lost": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_writers_go_on_when_a_stopped_one_goes_on(kind: type[TensorStorage]) -> None:
    buffer = shared(kind, 8)
    buffer.extend(frames(range(8)))
    with child(put_half, buffer, 3, stop_here) as (stopped, pipe), child(answer, buffer) as (_, other):
        until(lambda: is_stopped(stopped.pid))
        other.send(("extend", range(20, 28)))  # needs all rows
        assert not other.poll(0.2)
        os.kill(stopped.pid, signal.SIGCONT)
        assert hear(pipe) == "done"
        assert sorted(hear(other)) == list(range(8))
    assert sorted(check(buffer[:])) == list(range(20, 28))


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_without_replacement_does_not_contain_what_a_stopped_writer_writes(
    kind: type[TensorStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swath.data.ledger, "SLOW_NS", 0)
    buffer = shared(kind, 8, sampler=SamplerWithoutReplacement(), batch_size=2)
    buffer.extend(frames(range(10)))
    with child(put_half, buffer, 3, stop_here) as (process, _):
        until(lambda: is_stopped(process.pid))
        for _ in range(3):
            assert sorted(n for batch in buffer for n in check(batch)) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_in_the_middle_of_a_write_gives_the_rows_up(
    kind: type[TensorStorage], error: type[BaseException]
) -> None:
    buffer = shared(kind, 8)
    buffer.extend(frames(range(10)))
    with child(fail_in_put, buffer, 3, error) as (process, pipe):
        assert hear(pipe) == error.__name__
        assert buffer.stats() == {"frames": 5, "written": 10, "sampled": 0, "lost": 3}
        assert set(check(buffer.sample(100))) == {5, 6, 7, 8, 9}
        assert process.is_alive()
        buffer.extend(frames(range(20, 28)))  # nobody is waited for
    assert sorted(check(buffer[:])) == list(range(20, 28))
    assert buffer.stats() == {"frames": 8, "written": 18, "sampled": 100, "lost": 3}


def test_a_process_killed_while_it_changes_frames_in_place() -> None:
    buffer = shared(LazyTensorStorage, 8)
    buffer.extend(frames(range(8)))
    with child(overwrite_half, buffer, 3) as (process, pipe):
        assert hear(pipe) == "in the middle"
        kill(process)
    for _ in range(10):
        assert set(check(buffer.sample(50))) <= set(range(3, 8))
    assert len(buffer) == 5


def change_on(pipe: Any, buffer: ReplayBuffer) -> None:
    torch.set_num_threads(1)
    chance = random.Random(0)
    pipe.send("ready")
    while not pipe.poll():
        buffer[:] = frames(np.arange(16) + chance.randrange(2**40))


@pytest.mark.parametrize("kind", KINDS)
def test_frames_that_are_changed_in_place_are_never_seen_half_changed(kind: type[TensorStorage]) -> None:
    buffer = shared(kind, 16)
    buffer.extend(frames(range(16)))
    with child(change_on, buffer) as (_, pipe):
        assert hear(pipe) == "ready"
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            check(buffer.sample(16))


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_not_changed_in_place_while_somebody_writes_them(
    kind: type[TensorStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swath.data.ledger, "PATIENCE_S", 0.2)
    buffer = shared(kind, 8)
    buffer.extend(frames(range(10)))
    with child(put_half, buffer, 3, stop_here) as (process, pipe):
        until(lambda: is_stopped(process.pid))
        with pytest.raises(TimeoutError, match=str(process.pid)):
            buffer[:] = frames(range(30, 38))
        assert sorted(check(buffer[:])) == [5, 6, 7, 8, 9]
        os.kill(process.pid, signal.SIGCONT)
        assert hear(pipe) == "done"
        assert len(buffer) == whole_rows(buffer) == 8
        buffer[:] = frames(range(30, 38))
        assert check(buffer[:]) == list(range(30, 38))


def test_a_place_in_the_table_of_writers_is_used_again_but_there_are_only_so_many() -> None:
    """More writers than the table has room for may come and go; one too many at a time is told so."""
    buffer = shared(LazyTensorStorage, 8)
    buffer.extend(frames([0]))
    ledger = buffer.storage.ledger

    def written_by_another() -> Any:
        with child(write_once, buffer, frames([1])) as (_, pipe):
            assert hear(pipe) == "ready"
            pipe.send("go")
            return hear(pipe)

    for _ in range(6):
        assert len(written_by_another()) == 1
    assert int((ledger._pids != 0).sum()) == 2
    ledger._pids[:], ledger._births[:] = ledger._pids[0], ledger._births[0]
    assert "256" in str(written_by_another())
    buffer.extend(frames([1]))


# -- all at once -----------------------------------------------------------------------------------------------------

STOP, SAMPLES, COUNTS = 0, 1, 8
"""Places in a block of numbers: from `COUNTS` on, how many frames each writer has written for sure."""
LARGEST = 24
"""How many frames are written at a time, at most."""


def write_on(pipe: Any, buffer: ReplayBuffer, numbers: MemoryBlock, place: int) -> None:
    torch.set_num_threads(1)
    told = numbers.array((64,), np.int64)
    chance = random.Random(os.getpid())
    while not told[STOP]:
        count = chance.randint(1, LARGEST)
        n = chance.randrange(2**40)
        buffer.extend(frames(range(n, n + count)))
        told[COUNTS + place] += count


def sample_on(pipe: Any, buffer: ReplayBuffer, numbers: MemoryBlock) -> None:
    torch.set_num_threads(1)
    told = numbers.array((64,), np.int64)
    try:
        while not told[STOP]:
            check(buffer.sample(16))
            told[SAMPLES] += 1
        pipe.send(None)
    except BaseException as error:
        pipe.send(repr(error))


@contextlib.contextmanager
def three_that_write(buffer: ReplayBuffer) -> Iterator[tuple[MemoryBlock, np.ndarray]]:
    """Three processes that `write_on`, all of which have begun, until the context ends; they must end by themselves."""
    numbers = MemoryBlock(64 * 8)
    told = numbers.array((64,), np.int64)
    with contextlib.ExitStack() as alive:
        writers = [alive.enter_context(child(write_on, buffer, numbers, place))[0] for place in range(3)]
        until(lambda: told[COUNTS : COUNTS + 3].all())  # there is something to sample
        yield numbers, told
        told[STOP] = 1
        for writer in writers:
            writer.join(WAIT_S)
            assert writer.exitcode == 0


def kill_again_and_again(buffer: ReplayBuffer, numbers: MemoryBlock) -> int:
    """Start a writer, sample a few times, kill it, and so on; returns how often."""
    told, chance, kills = numbers.array((64,), np.int64), random.Random(1), 0
    deadline = time.monotonic() + STRESS_S
    while time.monotonic() < deadline:
        before = int(told[COUNTS + 3])
        with child(write_on, buffer, numbers, 3):
            until(lambda before=before: told[COUNTS + 3] > before)
            for _ in range(chance.randint(1, 6)):
                check(buffer.sample(chance.randint(1, 40)))
        kills += 1
        assert 0 <= len(buffer) <= 256
    return kills


def storm(kind: type[TensorStorage]) -> None:
    buffer = shared(kind, 256)
    with three_that_write(buffer) as (numbers, told), child(sample_on, buffer, numbers) as (reader, from_reader):
        kills = kill_again_and_again(buffer, numbers)
        told[STOP] = 1
        assert hear(from_reader) is None
        reader.join(WAIT_S)
        assert reader.exitcode == 0
    ledger = buffer.storage.ledger
    with ledger.at_rest():
        assert len(buffer) == whole_rows(buffer)
    assert len(check(buffer[:])) == len(buffer)
    counted, stats = int(told[COUNTS : COUNTS + 4].sum()), buffer.stats()
    print(f"\n{kills} writers killed, {told[SAMPLES]} samples, {stats}")
    assert stats["written"] + stats["lost"] == ledger.head
    assert counted <= stats["written"] <= counted + LARGEST * kills  # a victim may die before it counts
    assert 0 <= stats["lost"] <= LARGEST * kills
    assert stats["written"] > 10 * 256
    assert kills > 3
    assert told[SAMPLES] > 100
    buffer.extend(frames(range(300)))
    assert sorted(check(buffer[:])) == list(range(44, 300))
    assert len(buffer) == 256


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_write_and_read_and_one_is_killed_again_and_again(kind: type[TensorStorage]) -> None:
    gc.collect()
    fds, children = memfds(), len(FORK.active_children())
    storm(kind)
    gc.collect()
    assert len(FORK.active_children()) == children
    assert not [name for name in os.listdir("/dev/shm") if "swath" in name or f"_{os.getpid()}_" in name]
    assert memfds() == fds


def write_trajectories(pipe: Any, buffer: ReplayBuffer, place: int) -> None:
    torch.set_num_threads(1)
    chance, episode = random.Random(place), 0
    while True:
        episode += 1
        length = chance.randint(1, 30)
        n = np.arange(length) + 1_000_000 * place + 1000 * (episode % 900)
        data = frames(n)
        data["collector"] = TensorDict({"traj_ids": torch.full((length,), place * 10**6 + episode)}, [length])
        data["next", "done"] = torch.arange(length) == length - 1
        data["next", "truncated"] = torch.zeros(length, dtype=torch.bool)
        data["next", "terminated"] = data["next", "done"].clone()
        buffer.extend(data)


def test_slices_of_a_shared_buffer_are_whole_trajectories() -> None:
    buffer = shared(LazyTensorStorage, 600, sampler=SliceSampler(slice_len=5), batch_size=20)
    with child(write_trajectories, buffer, 1), child(write_trajectories, buffer, 2):
        until(lambda: buffer.write_count > 700)
        for _ in range(300):
            batch = buffer.sample()
            numbers = np.array(check(batch, flags=False)).reshape(4, 5)
            assert (np.diff(numbers, axis=1) == 1).all()
            ids = batch["collector", "traj_ids"].reshape(4, 5)
            assert (ids == ids[:, :1]).all()


def test_priorities_on_a_shared_buffer() -> None:
    buffer = shared(LazyTensorStorage, 128, sampler=PrioritizedSampler(128, 0.7, 0.5), batch_size=16)
    with three_that_write(buffer):
        until(lambda: buffer.write_count > 200)
        for _ in range(300):
            batch, info = buffer.sample(return_info=True)
            check(batch)
            buffer.update_priority(info["index"], torch.rand(16))
            assert (info["_weight"] > 0).all()
    assert set(check(buffer.sample(1000))) <= set(check(buffer[:]))


def test_a_checkpoint_can_be_made_while_others_write() -> None:
    buffer = shared(LazyTensorStorage, 256)
    with three_that_write(buffer):
        for _ in range(5):
            begun = time.monotonic()
            state = buffer.state_dict()
            assert time.monotonic() - begun < 20.0
            copy = buffer_of(size=256)
            copy.load_state_dict(state)
            assert len(check(copy[:])) == len(copy)


def sample_and_tell(pipe: Any, buffer: ReplayBuffer) -> None:
    while True:
        for _ in range(20):
            buffer.sample(5)
        pipe.send("sampled")
        pipe.recv()


def test_what_all_processes_sample_is_counted_also_of_those_that_are_gone() -> None:
    buffer = shared(LazyTensorStorage, 64)
    buffer.extend(frames(range(64)))
    for before in (0, 300):  # the later ones take the places of those before
        with child(sample_and_tell, buffer) as (_, pipe), child(sample_and_tell, buffer) as (_, other):
            assert (hear(pipe), hear(other)) == ("sampled", "sampled")
            assert buffer.stats()["sampled"] == before + 200
            with buffer.episodes():  # as while it is saved: others sample and are counted nevertheless
                pipe.send("again")
                assert hear(pipe) == "sampled"
            assert buffer.stats()["sampled"] == before + 300


def is_locked(lock: Any) -> bool:
    """Whether somebody has it: asked as another process would."""
    kind, arguments = lock.__reduce__()
    other = kind(*arguments)
    try:
        other.acquire(0.02)
    except TimeoutError:
        return True
    other.release()
    return False


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_frames_are_stamped_and_read_under_the_lock_where_order_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    buffer = shared(LazyTensorStorage, 32)
    buffer.extend(frames(range(32)))
    ledger, seen = buffer.storage.ledger, list[bool]()

    def looking(do: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (seen.append(is_locked(ledger.lock)), do(*args))[1]

    monkeypatch.setattr(buffer.storage, "read", looking(buffer.storage.read))
    check(buffer.sample(8))
    begin = ledger.reserve(4, lambda end: None)
    monkeypatch.setattr(ledger, "parts", looking(ledger.parts))
    ledger.commit(begin, 4)
    assert seen == [machine == "aarch64"] * 2
