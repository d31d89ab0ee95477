"""A storage in a file.

NOTE [A full disk]: a file is as large as the storage from the first write on, but has blocks on the disk only for what
was written. Memory that is mapped from it looks the same in both cases, and whoever writes to a page for which the disk
has no block left is killed by SIGBUS. The blocks of rows are therefore taken before the rows are, under the ledger's
lock and only once, where an error can be raised and nothing has happened yet: a little ahead, so that this is seldom.
A copying file system may still need others when they are overwritten; nothing can be done about that from here.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swath.data.tensor_storages import ARGUMENTS, WITHOUT_EFFECT, TensorStorage
from swath.errors import check_foreign_arguments
from swath.runtime import Block, FileBlock

FRAMES_FILE = "frames.bin"
AHEAD = 2**26
"""How many bytes of blocks are taken at most before they are needed."""
UNKNOWN = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""What a file system says that cannot take blocks ahead."""


class LazyMemmapStorage(TensorStorage):
    """In a file, laid out when the first frames are written: for more frames than memory holds.

    Args:
        max_size: how many frames there is room for.
        scratch_dir: where the file lies. Without one it has no name, and is gone when nobody has it open any more;
            in a directory that is given it stays.
        device: "cpu".
        ndim: as for `LazyTensorStorage`.
        existsok: whether a new file may take the place of one that is there already.
        options: `compilable`, `shared_init` and `auto_cleanup` of TorchRL change nothing.
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: Any = None,
        device: Any = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        **options: Any,
    ) -> None:
        check_foreign_arguments("LazyMemmapStorage", options, ignored=WITHOUT_EFFECT, known=ARGUMENTS)
        super().__init__(max_size, device=device, ndim=ndim)
        if self.device.type != "cpu":
            raise ValueError(f"A file is mapped into the memory of the CPU, got device={str(self.device)!r}.")
        self.scratch_dir = (
            None
            if scratch_dir is None
            else Path(scratch_dir.name if isinstance(scratch_dir, TemporaryDirectory) else scratch_dir)
        )
        self._data: Block
        if self.scratch_dir is None:
            self._file = f"{tempfile.gettempdir()}/(a file without a name)"
            self._data = FileBlock()
        else:
            self._file = str(self.scratch_dir / FRAMES_FILE)
            self._data = _new_file(self.scratch_dir, existsok)

    def make_room(self, rows: int) -> None:
        """Take the blocks of the first `rows` rows, or raise OSError; see NOTE [A full disk]."""
        ledger, layout = self.ledger, self.layout
        if rows <= ledger.room or layout is None:
            return
        width = sum(size for _, size in layout.pieces(ledger.layout, 0, 1))
        upto = min(rows + min(ledger.room, AHEAD // width), layout.rows)
        if 2 * (upto - ledger.room) * width > _free(self._data.fd):
            upto = rows
        self._take(self._data.size, layout.pieces(ledger.layout, ledger.room, upto))
        ledger.room = upto

    def _take(self, size: int, pieces: Iterable[tuple[int, int]]) -> None:
        pieces = [(at, count) for at, count in pieces if count]
        try:
            super()._take(size, pieces)
            for at, count in pieces if hasattr(os, "posix_fallocate") else ():
                os.posix_fallocate(self._data.fd, at, count)
        except OSError as error:
            if error.errno in UNKNOWN:
                return
            needed, free = sum(count for _, count in pieces), _free(self._data.fd)
            if not self.ledger.layout:
                self._data.resize(0)
            raise OSError(
                error.errno,
                f"No room for more frames: {error.strerror}. They take {needed:,} bytes, and {free:,} are free. "
                "Nothing was written. Make room, or give LazyMemmapStorage a scratch_dir on a larger disk or a smaller "
                "max_size. The file",
                self._file,
            ) from None


def _new_file(directory: Path, replaces: bool) -> FileBlock:
    """A new file in `directory`. What has its name there loses it; what a link of that name leads to is not touched."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.is_symlink() and directory.lstat().st_uid not in (0, os.geteuid()):
        told = "Another user has made this link, and decides where it leads to; give the directory itself"
        raise PermissionError(errno.EPERM, told, str(directory))
    if replaces:
        (directory / FRAMES_FILE).unlink(missing_ok=True)
    try:
        return FileBlock(directory, FRAMES_FILE)
    except FileExistsError:
        raise RuntimeError(f"{directory} holds frames already; give another directory, or existsok=True.") from None


def _free(fd: int) -> int:
    """How many bytes are free on the disk of a file."""
    disk = os.fstatvfs(fd)
    return disk.f_bavail * disk.f_frsize
