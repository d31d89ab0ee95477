"""Memory that several processes map.

NOTE [Unnamed memory]: a block is an open file that has no name: a memfd, or a file that was unlinked as it was made.
Whoever was handed the descriptor can map it, nobody else can find it, and the system frees it when the last process
that has it ends, however it ends. Nothing can be left behind. Descriptors travel through the channels of our own
workers, or through the sockets of `multiprocessing` to processes that it has started; a forked child simply has them.
Where the system refuses memfds, as the rules of some containers do, the file lies in /dev/shm.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import resource
import tempfile
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy as np

from swath.runtime.descriptors import Descriptor, is_packing

PAGE = mmap.PAGESIZE
LINE = 64
SHM = "/dev/shm"
"""Where files lie in memory."""
MFD_CLOEXEC = 1
"""As the system knows it."""


class Block(Descriptor):
    """A piece of memory behind a descriptor, which may be made larger once.

    Once the descriptor is released, the block can no longer be sent, or grow. Arrays over its memory stay valid.
    """

    is_private = False
    """Whether no other process can be given it."""
    _map: _Mapping | np.ndarray | None = None

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return os.fstat(self.fd).st_size

    def resize(self, size: int) -> None:
        """Make room for `size` bytes, zero at first. They take memory when they are written."""
        os.ftruncate(self.fd, size)

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> np.ndarray:
        """An array over the block's memory; it stays valid for as long as it is held."""
        if self.fd >= 0 and (self._map is None or self._map.size < self.size):
            self._map = _Mapping(self.fd, self.size)
        dtype, count = np.dtype(dtype), math.prod(shape)
        if count == 0 or self._map is None:
            return np.empty(shape, dtype)
        memory = np.asarray(self._map)  # which holds the mapping
        if offset < 0 or offset + count * dtype.itemsize > len(memory):
            raise ValueError(f"{count} of {dtype} from byte {offset} on do not lie within {len(memory)} bytes.")
        found: np.ndarray = memory[offset : offset + count * dtype.itemsize].view(dtype).reshape(shape)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return super().__reduce__() if is_packing() else (_rebuilt, (reduction.DupFd(self.fd),))


class _Mapping:
    """Memory of a file in this process, until the last array over it is gone.

    Python's own `mmap` keeps a copy of the descriptor for as long: one for each batch that somebody keeps.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._address = None
        if size:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            self._address = _libc.mmap(None, size, access, mmap.MAP_SHARED, fd, 0)
            if self._address == _FAILED:
                self._address, number = None, ctypes.get_errno()
                raise OSError(number, f"Could not map {size} bytes of shared memory: {os.strerror(number)}")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self._address or 0, False), "version": 3}

    def __del__(self) -> None:
        if self._address is not None:
            _libc.munmap(self._address, self.size)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class MemoryBlock(Block):
    """A block in memory."""

    _is_file = False

    def __init__(self, size: int = 0) -> None:
        try:
            fd = _memfd()
        except OSError as error:
            if error.errno == errno.EMFILE:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                what = f"This process may have {limit} files open, and has: no more memory can be shared. Allow more"
                raise OSError(errno.EMFILE, f"{what} (ulimit -n), or have fewer workers.") from error
            with tempfile.TemporaryFile(dir=SHM if os.path.isdir(SHM) else None) as file:
                fd, self._is_file = os.dup(file.fileno()), True
        super().__init__(fd)
        self.resize(size)

    def resize(self, size: int) -> None:
        """Make room for `size` bytes. A file takes it at once: to write where there is none would end the process."""
        super().resize(size)
        if self._is_file and size:
            try:
                os.posix_fallocate(self.fd, 0, size)
            except OSError as error:
                what = f"There is no room for {size} bytes of shared memory in {SHM} ({error.strerror})"
                raise OSError(error.errno, f"{what}: make it larger, in a container by --shm-size=.") from error


def _memfd() -> int:
    """A file in memory. Some interpreters were built where there was no such thing, and run where there is."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("swath", os.MFD_CLOEXEC)
    fd = _libc.memfd_create(b"swath", MFD_CLOEXEC) if hasattr(_libc, "memfd_create") else -1
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(fd)


class PrivateBlock(Block):
    """A block of this process alone, with no descriptor behind it: what threads share."""

    is_private = True

    def __init__(self, size: int) -> None:
        super().__init__(-1)
        memory = np.zeros(size + LINE, np.uint8)
        begin = -memory.ctypes.data % LINE
        self._map = memory[begin : begin + size]

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("Private memory cannot be sent to another process.")


class FileBlock(Block):
    """A block in a file: as large as the disk, and only as much in memory as is in use."""

    def __init__(self, directory: str | Path | None = None, name: str | None = None) -> None:
        """Make one in `directory`; with a `name`, which nothing must have, the file stays there; or it has none."""
        if name is None:
            handle, path = tempfile.mkstemp(prefix="swath-", dir=directory)
            os.unlink(path)
        else:
            path = str(Path(directory or ".") / name)
            # A new file, or none: one that is there may be another's, or a link to it.
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        super().__init__(handle)


def _rebuilt(handle: Any) -> Block:
    return Block(handle.detach())


def line_aligned(offset: int) -> int:
    """`offset` rounded up to the next line of the cache."""
    return -(-offset // LINE) * LINE


def page_aligned(offset: int) -> int:
    """`offset` rounded up to the next page."""
    return -(-offset // PAGE) * PAGE
