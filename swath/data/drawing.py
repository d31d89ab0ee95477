"""Drawing: batches that are whole although others write, and the waiting for frames that are still to come."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from swath.data.contents import Contents
from swath.data.pacing import POLL_S, Pace, RateLimiter
from swath.data.samplers import Draw, Sampler
from swath.data.storages import Storage
from swath.errors import NothingToSampleError

HOPEFUL_TRIES = 3
"""How often a batch is drawn again because frames were overwritten, before writers have to wait."""
PATIENCE_S = 60.0
"""How long a draw waits for a batch while frames come of which none can be made."""
STALL_WARNING_S = 15.0
STALL_S = 600.0
"""How long it waits for a feeder that should fill the buffer and does not."""


class Drawer:
    """Draws frames of a storage and copies them.

    Args:
        storage: where the frames lie.
        sampler: chooses them. It may be exchanged while `lock` is held.
        limiter: holds writing and sampling in proportion.
        generator: where random numbers come from; torch's own if None.
        batch_size: the usual one; draws that were made ahead and not delivered are of this size.
        collate: makes a batch of what the storage reads.

    Attributes:
        lock: held by the thread that draws.
        pace: who waits for whom.
    """

    def __init__(
        self,
        storage: Storage,
        sampler: Sampler,
        limiter: RateLimiter | None,
        generator: torch.Generator | None,
        batch_size: int | None,
        collate: Callable[[Any], Any] | None,
    ) -> None:
        self.sampler, self.generator = sampler, generator
        self._storage, self._limiter, self._batch_size, self._collate = storage, limiter, batch_size, collate
        self._next: deque[Draw] = deque()
        """Draws that were made and not delivered, here or in the buffer whose state was loaded: they come first."""

    def start(self) -> None:
        """Make what belongs to this process."""
        self.lock = threading.RLock()
        self.pace = Pace(self._storage, self._limiter)
        self._undelivered: list[Draw] = []
        """What was drawn ahead and not yet delivered."""

    def draw(self, size: int, is_ahead: bool = False, stopping: Callable[[], bool] | None = None) -> tuple[Draw, Any]:
        """Draw and copy; while the buffer is being filled, wait until it can be done.

        `stopping` is asked while waiting for the rate limiter; if it says so, frames are drawn at once.
        """
        ledger, pace, quiet, warned = self._storage.ledger, self.pace, -1, False
        begun: tuple[float, int] | None = None
        while True:
            pace.await_sample(size, stopping)
            try:
                with self.lock:
                    draw, data = self._draw_whole(size)
                    if is_ahead:
                        self._undelivered.append(draw)
                pace.drew(size, len(draw.index))
                if not is_ahead:
                    pace.delivered(len(draw.index))
                return draw, data
            except NothingToSampleError as error:
                pace.drew(size, 0)
                now = -1 if ledger.is_busy else ledger.head
                if now != quiet and now >= 0:  # writers may just have been at all there is: look once more
                    quiet = now
                    continue
                written = self._storage.write_count
                begun = begun or (time.monotonic(), written)
                waited = time.monotonic() - begun[0]
                if now >= 0 and not pace.feeders.are_feeding():
                    pace.feeders.raise_failure()
                    raise
                if pace.is_closed or waited > (PATIENCE_S if written > begun[1] else STALL_S):
                    raise
                if waited > STALL_WARNING_S and not warned:
                    warned = True
                    warnings.warn(f"sample() has waited {waited:.0f} s for frames: {error}", stacklevel=2)
            pace.feeders.raise_failure()
            pace.wait()

    def _draw_whole(self, size: int) -> tuple[Draw, Any]:
        """Draw and copy; again, if frames were overwritten meanwhile. See NOTE [Writing and reading at once]."""
        tries = HOPEFUL_TRIES if self.sampler.can_repeat and self._storage.ledger.is_ordered else 0
        with contextlib.suppress(NothingToSampleError):  # all there is may just be changed: look again under the lock
            for _ in range(tries):
                draw, data, is_good = self._try(size)
                if is_good:
                    return draw, data
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with self._storage.ledger.lock:  # no process reserves rows: what is there stays
                draw, data, is_good = self._try(size)
            if is_good:
                return draw, data
            time.sleep(POLL_S)
        raise TimeoutError(
            f"No whole batch could be read for {PATIENCE_S:.0f} s: writers are stopped, or far too slow."
        )

    def _try(self, size: int) -> tuple[Draw, Any, bool]:
        if not self._storage.is_ready:
            raise NothingToSampleError("Cannot sample from an empty buffer: nothing has been written to it yet.")
        contents = self._storage.contents()
        draw = self._choose(contents, size)
        data = self._storage.read(draw.index, draw.overrides, self._collate)
        ledger = self._storage.ledger
        untouched = contents.whole and ledger.head == contents.end
        is_good = ledger.edits == contents.edits and (untouched or bool(contents.holds(draw.index).all()))
        return draw, data, is_good

    def _choose(self, contents: Contents, size: int) -> Draw:
        while self._next and size == self._batch_size:
            saved = self._next.popleft()
            if contents.holds(saved.index).all():
                return saved
        draw = self.sampler.draw(contents, size, self.generator)
        return replace(draw, ends_epoch=True) if self.sampler.ran_out else draw

    def deliver(self, draw: Draw) -> None:
        """`draw`, which was made ahead, goes to the user now."""
        with self.lock:
            self._undelivered = [each for each in self._undelivered if each is not draw]
        self.pace.delivered(len(draw.index))

    def put_back(self) -> None:
        """What was drawn ahead will not be delivered from there: it comes with the next draws."""
        with self.lock:
            self._next.extend(self._undelivered)
            self._undelivered.clear()

    def reset(self) -> None:
        """Forget all draws that were not delivered."""
        self._undelivered.clear()
        self._next.clear()

    def state_dict(self) -> dict[str, Any]:
        """Sampler, random state, and all draws that were made and not delivered."""
        return {
            "sampler_kind": type(self.sampler).__name__,
            "sampler": self.sampler.state_dict(),
            "random": torch.get_rng_state() if self.generator is None else self.generator.get_state(),
            "ahead": [draw.state_dict() for draw in (*self._undelivered, *self._next)],
        }

    @contextlib.contextmanager
    def loading(self, state: Mapping[str, Any]) -> Iterator[None]:
        """A context for what else is loaded, after which we draw what would have been drawn there.

        The generator is then one of our own. If the context ends with an error, all is as it was.
        """
        generator = torch.Generator("cpu").set_state(state["random"])
        ahead = [Draw.restored(draw) for draw in state.get("ahead", ())]
        before = self.sampler.state_dict()
        try:
            self.sampler.load_state_dict(state["sampler"])
            yield
        except BaseException:
            self.sampler.load_state_dict(before)
            raise
        self.generator = generator
        self._next.extend(ahead)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: lock, pace, batches drawn ahead."""
        own = ("lock", "pace", "_undelivered")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        if self.generator is not None:  # as bytes: neither it nor a tensor gets to processes that are being spawned
            state["generator"] = (str(self.generator.device), self.generator.get_state().numpy())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.generator is not None:
            device, random = state["generator"]
            self.generator = torch.Generator(device)
            self.generator.set_state(torch.from_numpy(random))
