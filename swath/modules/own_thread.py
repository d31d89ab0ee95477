"""Calls whose arithmetic stays in the thread that makes them.

NOTE [torch's threads]: torch spreads also small products over all cores. That gains nothing where one takes some
microseconds; and where another process keeps a core busy, each of them waits until the scheduler lets the helper run,
which takes milliseconds. `torch.set_num_threads` holds for the whole process, which is not ours to limit. But OpenMP
keeps the number of threads for each thread by itself, and MKL does so if it is asked: it can be one for as long as a
call takes, and nobody else notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL
from functools import cache
from pathlib import Path
from typing import Any

import torch

MAX_MULTIPLICATIONS = 262_144
"""Per call, over all lanes: more may be quicker with all of torch's threads, while these have nothing else to do."""

Numbers = tuple[Callable[[], int], Callable[[int], object], Callable[[int], int]]


@cache
def _numbers() -> Numbers | None:
    """What tells OpenMP's number for this thread, what sets it, and what sets MKL's and tells what that was."""
    try:
        library = CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        get, set_ = library.omp_get_max_threads, library.omp_set_num_threads
    except (OSError, AttributeError):  # torch was built in another way
        return None
    return get, set_, getattr(library, "MKL_Set_Num_Threads_Local", int)


def in_own_thread(calls: Sequence[Callable[..., object]]) -> list[Callable[..., object]]:
    """What makes all `calls` in turn, for which torch uses this thread alone; if that cannot be, these themselves."""
    numbers = _numbers()
    if numbers is None or torch.get_num_threads() == 1:
        return list(calls)
    get, set_, set_mkl = numbers

    def called(*given: Any) -> None:
        before, mkl_before = get(), 0  # for MKL, that is what holds for the process
        try:
            set_(1)
            mkl_before = set_mkl(1)
            for call in calls:
                call(*given)
        finally:
            set_(before)
            set_mkl(mkl_before)

    return [called]
