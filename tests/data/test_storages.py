"""Where frames lie: in memory, in files, in lists."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffer_tools import buffer_of, check, frames
from children import importing_env
from tensordict import TensorDict

from swath.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, Storage, TensorStorage
from swath.data.storage_layout import dtype_named, name_of
from swath.runtime.columns import array_of, tensor_of

COLUMNS = [LazyTensorStorage, LazyMemmapStorage]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextlib.contextmanager
def umask(mask: int) -> Any:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file_in_a_directory_is_ours_alone(tmp_path: Path) -> None:
    with umask(0):
        buffer = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "deep" / "scratch"))
        buffer.extend(frames([1, 2, 3]))
    assert mode_of(tmp_path / "deep" / "scratch") == 0o700
    (file,) = (tmp_path / "deep" / "scratch").iterdir()
    assert mode_of(file) == 0o600
    assert file.stat().st_size >= 100 * 9


def test_a_file_that_others_could_read_is_made_ours(tmp_path: Path) -> None:
    (tmp_path / "frames.bin").touch()
    (tmp_path / "frames.bin").chmod(0o644)
    ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True)).extend(frames([1]))
    assert mode_of(tmp_path / "frames.bin") == 0o600


def test_a_file_stays_after_us_and_is_kept_unless_one_says_otherwise(tmp_path: Path) -> None:
    ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=str(tmp_path))).extend(frames([1, 2, 3]))
    before = (tmp_path / "frames.bin").read_bytes()
    with pytest.raises(RuntimeError, match="existsok"):
        LazyMemmapStorage(10, scratch_dir=tmp_path)
    assert (tmp_path / "frames.bin").read_bytes() == before
    again = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True))
    assert len(again) == 0
    again.extend(frames([7]))
    assert check(again[:]) == [7]


def test_nothing_is_left_without_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    buffer = ReplayBuffer(storage=LazyMemmapStorage(1000))
    buffer.extend(frames(range(50)))
    assert check(buffer[:]) == list(range(50))
    assert not list(tmp_path.iterdir())
    buffer.share()
    del buffer
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert set(os.listdir("/proc/self/fd")) <= before


def test_nothing_is_left_by_a_process_that_is_killed(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, tempfile, torch
        from swath.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
        tempfile.tempdir = sys.argv[1]
        for storage in (LazyMemmapStorage(1000), LazyTensorStorage(1000)):
            buffer = ReplayBuffer(storage=storage, shared=True)
            buffer.extend(torch.ones(500, 100))
        print("ready", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    shm = set(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b"ready\n"
    assert not list(tmp_path.iterdir())
    assert not {name for name in os.listdir("/dev/shm") if "swath" in name} - shm


def test_a_file_takes_room_only_for_what_is_written(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(1_000_000, scratch_dir=tmp_path))
    buffer.extend(torch.ones(10, 1000))
    told = (tmp_path / "frames.bin").stat()
    assert told.st_size > 4_000_000_000
    assert told.st_blocks * 512 < 1_000_000


FULL = """
    import gc, itertools, os, sys, torch
    from pathlib import Path
    from swath.data import LazyMemmapStorage, ReplayBuffer

    def tried(call):
        try:
            call()
        except OSError as error:
            print(error)
            return False
        return True

    def run(disk, shared, lanes):
        data = lambda n: {"x": torch.full((lanes, 7, 100), n), "y": torch.full((lanes, 7), n)}
        (disk / "other").write_bytes(bytes(2**19))
        buffer = ReplayBuffer(storage=LazyMemmapStorage(10**6, scratch_dir=disk, ndim=2, existsok=True), shared=shared)
        written = 0
        while tried(lambda: buffer.extend(data(written))):
            written += 1
        assert written > 10, written
        assert (len(buffer), buffer.write_count) == (written * 7 * lanes,) * 2
        for key in ("x", "y"):
            assert buffer[:][key].unique().tolist() == list(range(written))
            assert set(buffer.sample(999)[key].unique().tolist()) <= set(range(written))
        (disk / "other").unlink()
        buffer.extend(data(-1))  # now there is room
        buffer.empty()
        buffer.extend(data(-2))
        assert len(buffer) == 7 * lanes
        saved = buffer.state_dict()
        storage = LazyMemmapStorage(10**6, scratch_dir=disk / "twin", ndim=2, existsok=True)
        twin = ReplayBuffer(storage=storage, shared=shared)
        (disk / "more").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        for write in (lambda: twin.load_state_dict(saved), lambda: twin.extend(data(0))):
            assert not tried(write)
            assert not storage.is_ready
        assert not tried(lambda: buffer.dumps(disk / "deep" / "saved"))
        assert not (disk / "deep").exists()
        (disk / "more").unlink()
        twin.load_state_dict(saved)
        assert len(twin) == 7 * lanes

    for shared, lanes in itertools.product((False, True), (1, 3)):
        run(Path(sys.argv[1]), shared, lanes)
        for file in Path(sys.argv[1]).rglob("frames.bin"):
            file.unlink()
        gc.collect()
"""


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """The disk is one of 2 MB that only the program sees. Who writes to mapped memory there is killed otherwise."""
    mounted = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=2m none {tmp_path} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here, or not by us")
    program = [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path)]
    done = subprocess.run([*mounted, *program], capture_output=True, text=True, env=importing_env())
    assert done.returncode == 0, done.stderr or done.returncode
    told = done.stdout.splitlines()
    names = ["frames.bin", "twin/frames.bin", "twin/frames.bin", "deep/saved/replay_buffer_"]
    for line, name in zip(told, names * 4, strict=True):
        assert f"{tmp_path}/{name}" in line
        assert ("scratch_dir" if "frames" in name else "Not saved") in line


def test_a_full_disk_is_told_of_files_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, at: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    buffer = ReplayBuffer(storage=LazyMemmapStorage(100))
    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(OSError, match=f"{tempfile.gettempdir()}.*without a name") as found:
        buffer.extend(frames(range(10)))
    assert found.value.errno == errno.ENOSPC
    assert (len(buffer), buffer.storage.is_ready) == (0, False)
    monkeypatch.undo()
    buffer.extend(frames(range(10)))
    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(OSError, match="scratch_dir"):
        buffer.extend(frames(range(10, 20)))
    assert (check(buffer[:]), buffer.write_count, buffer.stats()["lost"]) == (list(range(10)), 10, 0)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_where_blocks_cannot_be_taken_ahead_files_are_used_as_they_are(
    number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(fd: int, at: int, count: int) -> None:
        raise OSError(number, "unknown here")

    if number is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", unknown)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100))
    for start in range(0, 130, 10):
        buffer.extend(frames(range(start, start + 10)))
    assert sorted(check(buffer[:])) == list(range(30, 130))


def test_blocks_are_taken_seldom_and_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, count: taken.append((at, at + count)))
    storage = LazyMemmapStorage(3000, scratch_dir=tmp_path)
    buffer = ReplayBuffer(storage=storage)
    for start in range(0, 4000, 10):
        buffer.extend(frames(range(start, start + 10)))
    assert len(taken) < 20 * (len(storage.view()) + 2)  # seldom: 20 times, not 400
    taken.sort()
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(taken))  # once
    assert sum(stop - start for start, stop in taken) >= 3000 * sum(t[0].nbytes for t in storage.view().values())


# -- what somebody else has planted ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "dangling", "hard"])
@pytest.mark.parametrize("existsok", [False, True])
def test_planted_links_are_not_followed(existsok: bool, kind: str, tmp_path: Path) -> None:
    victim, scratch = tmp_path / "victim", tmp_path / "scratch"
    scratch.mkdir()
    if kind != "dangling":
        victim.write_text("precious")
        victim.chmod(0o644)
    (os.link if kind == "hard" else os.symlink)(victim, scratch / "frames.bin")
    if existsok:
        buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=scratch, existsok=True))
        buffer.extend(frames([1, 2]))
        assert not (scratch / "frames.bin").is_symlink()
        assert check(buffer[:]) == [1, 2]
    else:
        with pytest.raises(RuntimeError, match="existsok"):
            LazyMemmapStorage(10, scratch_dir=scratch)
    if kind == "dangling":
        assert not victim.exists()
    else:
        assert (victim.read_text(), mode_of(victim)) == ("precious", 0o644)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of other users")
def test_a_directory_behind_the_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    LazyMemmapStorage(10, scratch_dir=tmp_path / "link")  # one of our own
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    with pytest.raises(PermissionError, match=r"Another user.*link"):
        LazyMemmapStorage(10, scratch_dir=tmp_path / "link", existsok=True)


def test_a_file_that_is_replaced_stays_with_those_who_use_it(tmp_path: Path) -> None:
    """It was cut off under them, and they were killed at the next frame that they read."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    buffer.extend(frames([1, 2, 3]))
    other = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True))
    other.extend(frames([7]))
    assert (tmp_path / "frames.bin").stat().st_nlink == 1
    assert os.fstat(buffer.storage._data.fd).st_size > 0
    assert (check(buffer[:]), check(other[:])) == ([1, 2, 3], [7])


def test_files_are_for_the_cpu() -> None:
    with pytest.raises(ValueError, match="device"):
        LazyMemmapStorage(10, device="cuda:0")


# -- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COLUMNS)
def test_nothing_is_laid_out_before_the_first_write(kind: type[TensorStorage]) -> None:
    storage = kind(10)
    assert not storage.is_ready
    assert len(storage) == 0
    assert not storage.is_shared
    buffer = ReplayBuffer(storage=storage)
    assert (len(buffer), buffer.write_count) == (0, 0)
    buffer.extend(frames([1, 2, 3]))
    assert storage.is_ready
    assert repr(storage) == f"{kind.__name__}(3 of 10 frames, device='cpu')"
    assert storage.entry(("next", "done"), np.arange(10)).shape[0] == 10
    assert storage.shape == (10,)
    assert storage.entry("n", np.zeros((2, 3), np.int64)).shape == (2, 3)
    with pytest.raises(KeyError, match="flag"):
        storage.entry("flag", np.arange(1))


def test_names_of_types() -> None:
    for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.int64):
        assert dtype_named(name_of(dtype)) is dtype
        values = torch.ones(3).to(dtype)
        assert tensor_of(array_of(values), dtype).dtype == dtype
        assert torch.equal(tensor_of(array_of(values), dtype), values)
    for wrong in ("load", "nn", "__builtins__", "float31", ""):
        with pytest.raises(ValueError, match="type"):
            dtype_named(wrong)


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("shared", [False, True])
def test_columns_of_all_sizes_do_not_touch_each_other(kind: type[TensorStorage], shared: bool) -> None:
    buffer = buffer_of(kind, 7, shared=shared)
    entries = {
        f"{name}{width}": torch.randn(7, width).mul(100).to(dtype)
        for name, dtype in (("u", torch.uint8), ("f", torch.float64), ("h", torch.bfloat16), ("b", torch.bool))
        for width in (1, 3, 5)
    }
    buffer.extend(TensorDict(entries, [7]))
    for key, value in entries.items():
        assert torch.equal(buffer[:][key], value), key


# -- sharing one storage, pickling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*COLUMNS, ListStorage])
def test_another_buffer_may_stand_on_a_filled_storage(kind: type[Storage]) -> None:
    storage = kind(4)
    one = ReplayBuffer(storage=storage)
    one.extend(frames([1, 2, 3]))
    two = ReplayBuffer(storage=storage)
    assert (len(two), two.write_count) == (3, 3)
    assert check(two[:]) == [1, 2, 3]
    two.extend(frames([4, 5]))
    assert check(one[:]) == [5, 2, 3, 4]
    assert set(one.sample(100)["n"].tolist()) == {2, 3, 4, 5}


@pytest.mark.parametrize("kind", COLUMNS)
def test_sharing_a_filled_storage_keeps_everything(kind: type[TensorStorage]) -> None:
    storage = kind(5)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(frames(range(7)))
    seams = storage.seams.copy()
    buffer.share()
    buffer.share()
    assert storage.is_shared
    assert check(buffer[:]) == [5, 6, 2, 3, 4]
    assert (len(buffer), buffer.write_count) == (5, 7)
    assert np.array_equal(storage.seams, seams)
    assert buffer.extend(frames([7, 8])).tolist() == [2, 3]
    assert check(buffer[:]) == [5, 6, 7, 8, 4]
    assert set(buffer.sample(100)["n"].tolist()) == {4, 5, 6, 7, 8}


def test_what_cannot_be_shared_says_so() -> None:
    with pytest.raises(TypeError, match="LazyTensorStorage"):
        buffer_of(ListStorage, shared=True)
    with pytest.raises(TypeError, match="LazyTensorStorage"):
        buffer_of(ListStorage).share()
    with pytest.raises(ValueError, match="cpu"):
        LazyTensorStorage(4, device="meta").share()


@pytest.mark.parametrize("filled", [False, True])
def test_private_memory_is_copied_when_pickled(filled: bool) -> None:
    storage = LazyTensorStorage(4)
    buffer = ReplayBuffer(storage=storage)
    if filled:
        buffer.extend(frames(range(6)))
    twin = ReplayBuffer(storage=pickle.loads(pickle.dumps(storage)))
    assert len(twin) == len(buffer)
    twin.extend(frames([50]))
    assert 50 in check(twin[:])
    assert not filled or 50 not in check(buffer[:])


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("filled", [False, True])
def test_shared_memory_is_the_same_when_pickled(kind: type[TensorStorage], filled: bool) -> None:
    buffer = buffer_of(kind, 4, shared=True, batch_size=3)
    if filled:
        buffer.extend(frames(range(6)))
    twin = pickle.loads(pickle.dumps(buffer))
    assert twin.is_shared
    assert len(twin) == len(buffer)
    twin.extend(frames([50]))
    assert 50 in check(buffer[:])
    buffer.extend(frames([60]))
    assert 60 in check(twin[:])
    assert twin.write_count == buffer.write_count == (8 if filled else 2)
    twin.empty()
    assert len(buffer) == 0


def test_a_private_file_is_shared_by_pickling_it() -> None:
    buffer = buffer_of(LazyMemmapStorage, 4)
    buffer.extend(frames(range(6)))
    twin = pickle.loads(pickle.dumps(buffer))
    twin.extend(frames([50]))
    assert buffer.is_shared
    assert check(buffer[:]) == check(twin[:]) == [4, 5, 50, 3]


@pytest.mark.parametrize("kind", COLUMNS)
def test_entries_and_views_show_memory(kind: type[TensorStorage]) -> None:
    storage = kind(12, ndim=2)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(TensorDict({"x": torch.arange(6).view(3, 2)}, [3, 2]))
    assert storage.view()["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert storage.entry("x", np.arange(12)).tolist() == [0, 1, 0, 0, 2, 3, 0, 0, 4, 5, 0, 0]
    assert storage.view()["x"].data_ptr() == storage.view(4)["x"].data_ptr()


def test_a_list_moves_tensors_if_it_has_a_device() -> None:
    buffer = ReplayBuffer(storage=ListStorage(4, device="meta"), collate_fn=list)
    buffer.extend([torch.ones(2), torch.ones(2), "word"])
    assert buffer[0].device.type == "meta"
    assert buffer[2] == "word"


def test_a_list_shows_entries_of_its_items() -> None:
    storage = ListStorage(4)
    ReplayBuffer(storage=storage).extend([{"x": 1.0}, {"x": 2.0}])
    assert storage.entry("x", np.array([[1, 0], [0, 3]])).tolist() == [[2.0, 1.0], [1.0, 1.0]]


def test_first_frames_after_others_are_seams() -> None:
    storage = LazyTensorStorage(12)
    buffer = ReplayBuffer(storage=storage)
    x = torch.arange(3)
    buffer.write({"x": x}, [3], source="one")
    buffer.write({"x": x}, [3], source="one")
    buffer.write({"x": x}, [3], source="two")
    buffer.write({"x": x}, [3], source="one", seams=np.array([[False, True, False]]))
    assert np.flatnonzero(storage.seams).tolist() == [0, 6, 9, 10]
