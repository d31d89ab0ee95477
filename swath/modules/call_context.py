"""Call contexts: what holds around calls of a policy, and not around its env.

NOTE [torch's threads]: torch spreads also small products over all cores. That gains nothing where one takes some
microseconds; and where another process keeps a core busy, each of them waits until the scheduler lets the helper run,
which takes milliseconds. `torch.set_num_threads` holds for the whole process, which is not ours to limit. But OpenMP
keeps the number of threads for each thread by itself, and MKL does so if it is asked: it can be one for as long as a
call takes, and nobody else notices.

NOTE [Around a slot]: to change the number of threads, and torch's mode, before and behind each call takes longer than
all else that is around it. Where it is known that no env runs torch in this thread, they are changed once for a slot.
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
_InferenceMode: Any = getattr(torch._C, "_InferenceMode", torch.inference_mode)
"""What `torch.inference_mode` enters: without the Python around it, a third of its time."""


@cache
def _numbers() -> Numbers | None:
    """What tells OpenMP's number for this thread, what sets it, and what sets MKL's and tells what that was."""
    try:
        library = CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        get, set_ = library.omp_get_max_threads, library.omp_set_num_threads
    except (OSError, AttributeError):  # torch was built in another way
        return None
    return get, set_, getattr(library, "MKL_Set_Num_Threads_Local", int)


class CallContext:
    """A context with one thread for torch, or in its inference mode, or both; it may be entered again once it was left.

    What is interrupted in the middle of entering is undone.
    """

    def __init__(self, *, one_thread: bool, infers: bool) -> None:
        """`infers` is only for what keeps no tensor; see NOTE [Keeping nothing]."""
        numbers = _numbers() if one_thread and torch.get_num_threads() > 1 else None
        self._numbers, self._infers = numbers, infers
        self.is_any = infers or numbers is not None
        """Whether it makes a difference."""
        self._before: int | None = None
        self._mkl_before = 0  # for MKL, that is what holds for the process
        self._mode: Any = None

    def __enter__(self) -> None:
        try:
            if self._numbers is not None:
                get, set_, set_mkl = self._numbers
                is_left, before = self._before is None, get()  # else leaving has not come to it
                self._before = before if is_left else self._before
                set_(1)
                mkl_before = set_mkl(1)
                self._mkl_before = mkl_before if is_left else self._mkl_before
            if self._infers:
                mode = _InferenceMode(True)
                self._mode = mode
                mode.__enter__()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, *exc: object) -> None:
        mode, self._mode = self._mode, None
        try:
            if mode is not None:
                mode.__exit__(None, None, None)
        finally:
            if self._before is not None and self._numbers is not None:
                _, set_, set_mkl = self._numbers
                set_(self._before)
                set_mkl(self._mkl_before)
                self._before, self._mkl_before = None, 0

    def of(self, calls: Sequence[Callable[..., object]]) -> list[Callable[..., object]]:
        """What makes all `calls` in turn in this context; these themselves, if that makes no difference."""
        if not self.is_any:
            return list(calls)

        def called(*given: Any) -> None:
            with self:
                for call in calls:
                    call(*given)

        return [called]
