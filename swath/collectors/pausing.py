"""What `pause()` gives: a context, which does nothing unless it is entered; and who cannot wait for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from swath.data import ReplayBuffer
from swath.runtime.carrier import NotNowError


def must_not_hold(buffer: Any) -> None:
    """Refuse to wait for those who write to `buffer` if this very thread keeps them from it, as a handler may find."""
    if isinstance(buffer, ReplayBuffer) and buffer.storage.ledger.is_held:
        raise NotNowError("this very thread saves or changes the replay buffer that it writes to")


class Pause(AbstractContextManager[None]):
    """A context in which a collector rests; one that nobody enters says so when it is let go."""

    _was_entered = True  # one that was interrupted while it was made has nothing to say

    def __init__(self, rest: Callable[[], AbstractContextManager[None]]) -> None:
        """Rest in the context that `rest` gives."""
        self._rest = rest
        self._inside: list[AbstractContextManager[None]] = []
        self._was_entered = False

    def __enter__(self) -> None:
        """Wait until it rests."""
        self._was_entered = True
        rest = self._rest()
        rest.__enter__()
        self._inside.append(rest)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Go on."""
        return self._inside.pop().__exit__(kind, error, traceback)

    def __del__(self) -> None:
        """Nobody else can know that the `with` is missing."""
        if not self._was_entered:
            warnings.warn(
                "pause() was called, but nothing rests: it is a context. Write `with collector.pause():` and inside "
                "what is to be done meanwhile.",
                stacklevel=2,
            )
