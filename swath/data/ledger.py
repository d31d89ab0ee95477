"""Ledger: which rows of a ring hold what, while some write and others read.

NOTE [Writing and reading at once]: a writer first *reserves* rows, under the lock: it notes in the table of writers
which positions it is going to write, moves the head, and takes the stamps off these rows. Then it copies its data,
without any lock, and *commits*: it stamps each row with its position and clears its note. A reader copies what it wants
without any lock and looks afterwards: if the head has moved, at the stamps, and rows whose stamp is not the expected
one are being written or were overwritten, and are drawn again. A reader that is overtaken again and again takes the
lock, and then nobody reserves. Frames that are changed where they lie are without stamps meanwhile, and counted:
readers whose count has changed draw again.

No frame is ever seen half written, because a row has no stamp from before its first byte changes until after its last
one has. A writer may be killed at any instruction. The lock is taken back by the system (NOTE [Locks that outlive
nobody]); rows that it had reserved have no stamp, so nobody reads them, and the next process that meets its note in
the table, and finds the writer gone, counts them as lost. A writer that is stopped, not dead, keeps its rows: others
write on until the ring comes round to them, and then wait for it, with a deadline. Readers rely on stores being seen in
order, as x86 keeps them (`swath.runtime.ordering`). Between processes of other machines the lock does the same: there,
writers stamp their rows under it, and readers copy under it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from swath.data.contents import EMPTY
from swath.runtime import is_alive, own_birth, undisturbed
from swath.runtime.ordering import keeps_order
from swath.runtime.supervision import Patience

WRITERS = 256
"""How many processes can write at the same time."""
NOBODY = 0
HEAD, ORIGIN, LOST, HOLES, SAMPLED, WANTED, STARVED, ENROLLED, LAYOUT, EDITS, FORMER, ROOM = range(12)
COUNTERS = 16
SIZE = COUNTERS + 6 * WRITERS
"""How many 64-bit numbers a ledger needs."""
BEGINS, ENDS, SINCE = (COUNTERS + row * WRITERS for row in (2, 3, 4))
"""Where rows of the table of writers begin."""
SLOW_NS = 500_000_000
"""A writer that takes longer than this may be dead, and is no longer waited for by readers."""
PATIENCE_S = 60.0
PAUSE_S = 1e-3


class _Counter:
    """A number of the ledger, which all processes that share it see."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, ledger: Ledger, owner: type[Ledger] | None = None) -> int:
        return ledger.cells[self._place]

    def __set__(self, ledger: Ledger, value: int) -> None:
        ledger.cells[self._place] = value


class Ledger:
    """The counters of one ring, the table of its writers, and the stamps of its rows."""

    head = _Counter(HEAD)
    """The position of the next row to be reserved."""
    origin = _Counter(ORIGIN)
    """The position of the first row since the ring was last emptied."""
    holes = _Counter(HOLES)
    """How many rows that should hold something do not, because a writer died."""
    sampled = _Counter(SAMPLED)
    """How many frames were ever sampled, as far as a rate limiter counts them; see `delivered`."""
    wanted = _Counter(WANTED)
    """How many frames a sampler last waited for at once."""
    is_starved = _Counter(STARVED)
    """Whether a sampler could not draw because there are not the right frames, however many there are."""
    layout = _Counter(LAYOUT)
    """How many bytes describe what the shared memory holds; none as long as it has no layout."""
    room = _Counter(ROOM)
    """How many rows, from the first on, have their blocks on the disk; see NOTE [A full disk]."""
    edits = _Counter(EDITS)
    """How often frames were changed where they lie."""

    def __init__(self, numbers: np.ndarray | None = None, lock: AbstractContextManager[Any] | None = None) -> None:
        """Keep count in `numbers` `[SIZE]` under `lock`; by default, for the threads of this process."""
        self.numbers = np.zeros(SIZE, np.int64) if numbers is None else numbers
        self.cells = self.numbers.data
        """The same, for one at a time: numpy takes twice as long."""
        self._is_local = lock is None
        self.is_ordered = lock is None or keeps_order()
        """Whether a stamp that is seen without the lock tells that its row is there."""
        self.lock: AbstractContextManager[Any] = threading.RLock() if lock is None else lock
        """Under it, nobody reserves rows."""
        self.writing = threading.RLock()
        """Held by the one thread of this process that writes: all its threads note what they write in one place."""
        self._counting = threading.Lock()
        self.on_reserve: Callable[[int, int], None] | None = None
        """Told of every write of this process before it begins: its first position, and how many rows."""
        self._slot: int | None = None
        self._slot_owner = 0
        self.capacity = 0
        self.lanes = 1
        self.stamps = np.empty(0, np.int64)
        # The table of writers: who each is, which positions it is writing (none if both are equal), and since when. The
        # last is what it has sampled, which stays when another takes its place.
        table = self.numbers[COUNTERS:].reshape(6, WRITERS)
        self._pids, self._births, self._begins, self._ends, self._since, self._samples = table

    def renew_lock(self) -> None:
        """In a forked child: a lock that another thread held when the process was forked would stay held for ever."""
        self.writing, self._counting = threading.RLock(), threading.Lock()
        if self._is_local:
            self.lock = threading.RLock()

    @property
    def is_held(self) -> bool:
        """Whether this very thread keeps others from writing: then it must not wait for them."""
        locks: tuple[Any, ...] = (self.writing, self.lock)
        return any(lock._is_owned() for lock in locks)

    def attach(self, stamps: np.ndarray, lanes: int) -> None:
        """Keep the stamps of rows in `stamps` `[capacity]`; each row has a frame of each of `lanes`."""
        self.stamps, self.capacity, self.lanes = stamps, len(stamps), lanes

    # -- counters ----------------------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The oldest position that may hold something."""
        return max(self.origin, self.head - self.capacity)

    @property
    def written(self) -> int:
        """How many frames were ever written since the ring was last emptied."""
        here = self.head - self.origin - int(self.numbers[LOST]) - self._in_flight()
        return int(self.numbers[FORMER]) + here * self.lanes

    @property
    def lost(self) -> int:
        """How many frames a writer had begun to write when it died."""
        return int(self.numbers[LOST]) * self.lanes

    @property
    def held(self) -> int:
        """How many frames can be read."""
        if not self.capacity:
            return 0
        holes = self.holes + self._in_flight()
        return max(self.head - self.first - holes, 0) * self.lanes

    def _in_flight(self) -> int:
        return int(np.maximum(self._ends - self._begins, 0).sum())

    def count_samples(self, frames: int) -> None:
        """Count `frames` that were sampled."""
        with self.lock:
            self.sampled += frames

    def note_samples(self, frames: int) -> None:
        """The same where nobody is held to the count: in this process's place, without the lock that savers hold."""
        slot = self._slot
        if slot is None or self._slot_owner != os.getpid():
            with self.lock:
                slot = self._own_slot()
        with self._counting:
            self._samples[slot] += frames

    @property
    def delivered(self) -> int:
        """How many frames were ever sampled, whichever way they were counted."""
        return self.sampled + int(self._samples.sum())

    def enrol(self) -> int:
        """A number for one who is going to write, which nobody else has."""
        with self.lock:
            self.numbers[ENROLLED] += 1
            return int(self.numbers[ENROLLED]) - 1

    # -- writing -----------------------------------------------------------------------------------------------

    def reserve(self, rows: int, make_room: Callable[[int], None], skipped: int = 0) -> int:
        """Take the next `rows` rows (at most all), after `skipped` positions that nobody will write.

        Returns the position of the first. Waits for a writer that is busy with one of them; a dead one is not waited
        for. Nothing is taken if `make_room`, for all rows up to its argument, raises.
        """
        patience: Patience | None = None
        while True:
            with self.lock:
                slot = self._own_slot()
                if self.cells[BEGINS + slot] != self.cells[ENDS + slot]:
                    self._write_off(slot)  # a write of ours was interrupted just before or after the copy
                begin = self.head + skipped
                ahead = None if self._is_local else self._in_the_way(begin, rows)
                if ahead is None:
                    make_room(min(begin % self.capacity + rows, self.capacity))
                    self._take(slot, begin, rows)
                    if self.on_reserve is not None:
                        self.on_reserve(begin, rows)
                    return begin
            patience = patience or Patience()
            _wait_for(ahead, patience)

    def _take(self, slot: int, begin: int, rows: int) -> None:
        """Note, then move the head, then take the stamps off: who is killed in between is found with what it took."""
        if not self._is_local:
            vain = self._ends > self.head  # killed before they moved the head: what they noted is taken by us
            self._begins[vain] = self._ends[vain]
        cells = self.cells
        cells[SINCE + slot] = time.monotonic_ns()
        cells[BEGINS + slot] = cells[ENDS + slot] = begin
        cells[ENDS + slot] = cells[HEAD] = begin + rows
        if self.holes:  # those that are now overwritten are no holes any more
            former = np.arange(begin, begin + rows) - self.capacity
            missing = self.stamps[former % self.capacity] != former + 1
            self.holes = max(0, self.holes - int((missing & (former >= self.origin)).sum()))
        if rows == 1:  # as with a frame at a time
            self.stamps[begin % self.capacity] = EMPTY
            return
        for part in self.parts(begin, rows):
            self.stamps[part] = EMPTY

    def commit(self, begin: int, rows: int) -> None:
        """The `rows` rows from `begin` on are whole: let them be read."""
        if self.is_ordered:
            self._stamp(begin, rows)
        else:
            with self.lock:
                self._stamp(begin, rows)
        slot = self._slot
        assert slot is not None
        is_late = time.monotonic_ns() - self.cells[SINCE + slot] > SLOW_NS
        self.cells[BEGINS + slot] = self.cells[ENDS + slot]
        if is_late:  # readers have gone past these rows, and must look at them again
            with self.lock:
                self.edits += 1

    def _stamp(self, begin: int, rows: int) -> None:
        position = begin + 1
        if rows == 1:
            self.stamps[begin % self.capacity] = position
            return
        for part in self.parts(begin, rows):
            count = part.stop - part.start
            self.stamps[part] = np.arange(position, position + count)
            position += count

    def give_up(self) -> None:
        """What was reserved could not be written: leave it without stamps, and count it."""
        with self.lock:
            self._write_off(self._own_slot())

    def unfinished(self, begin: int, rows: int) -> int:
        """How many frames of a write that was reserved there were never whole."""
        positions = np.arange(begin, begin + rows)
        return int((self.stamps[positions % self.capacity] <= positions).sum()) * self.lanes

    def parts(self, begin: int, rows: int) -> list[slice]:
        """Where the positions from `begin` on lie: one piece of the ring, or two."""
        start = begin % self.capacity
        stop = start + rows
        if stop <= self.capacity:
            return [slice(start, stop)]
        return [slice(start, self.capacity), slice(0, stop - self.capacity)]

    def _own_slot(self) -> int:
        """This process's place in the table of writers; taken at its first write, from nobody or from a dead one."""
        if self._slot is not None and self._slot_owner == os.getpid():
            return self._slot
        pid, birth = os.getpid(), own_birth()
        for slot in range(WRITERS):
            if self._pids[slot] == NOBODY or self._is_dead(slot):
                self._write_off(slot)
                self._births[slot], self._pids[slot] = birth, pid
                self._slot, self._slot_owner = slot, pid
                return slot
        raise RuntimeError(f"{WRITERS} processes write to this replay buffer already; it has room for no more.")

    def _write_off(self, slot: int) -> None:
        """Count what a writer left unfinished, and clear its note."""
        if not self.capacity:  # this process has not looked at the rows yet: one that has will see to it
            return
        positions = np.arange(self._begins[slot], min(int(self._ends[slot]), self.head))
        if len(positions):
            unfinished = int((self.stamps[positions % self.capacity] != positions + 1).sum())
            self.numbers[LOST] += unfinished
            self.holes = self._count_holes(slot)
        self._begins[slot] = self._ends[slot]

    def _count_holes(self, dead: int) -> int:
        """How many rows hold nothing and will not, by looking at each; `dead` is not going to write any more."""
        busy = [slot for slot in self._busy() if slot != dead]
        notes = [(self._begins[slot], self._ends[slot]) for slot in busy]  # before the stamps: they may just be set
        positions = np.arange(self.first, self.head)
        missing = self.stamps[positions % self.capacity] != positions + 1
        for begin, end in notes:
            missing[(positions >= begin) & (positions < end)] = False
        return int(missing.sum())

    def _busy(self) -> np.ndarray:
        """The places of those who are writing now."""
        return np.flatnonzero(self._ends > self._begins)

    def is_still_at(self, head: int) -> bool:
        """Whether nobody has reserved anything since the head was there and all was whole."""
        numbers = self.numbers
        return bool(numbers[HEAD] == head and not numbers[HOLES] and not self.is_busy)

    @property
    def is_busy(self) -> bool:
        """Whether anybody is writing now, however slowly."""
        if self._is_local:  # one process has one place in the table
            return bool(self._ends[0] > self._begins[0])
        return bool((self._ends > self._begins).any())

    def _is_dead(self, slot: int) -> bool:
        return not is_alive(int(self._pids[slot]), int(self._births[slot]))

    def _in_the_way(self, begin: int, rows: int) -> int | None:
        """A process that is still writing a row which the positions from `begin` on need; dead ones are written off."""
        now = time.monotonic_ns()
        for slot in self._busy():
            overlaps = begin + rows > self._begins[slot] + self.capacity
            if (overlaps or now - self._since[slot] > SLOW_NS) and self._is_dead(slot):
                self._write_off(slot)
            elif overlaps:
                return int(self._pids[slot])
        return None

    # -- reading -----------------------------------------------------------------------------------------------

    def settled(self) -> int:
        """The position below which nothing is being written any more, but by those who are far too slow."""
        head = self.head  # before the notes: a writer that has moved it further has noted it first
        busy = self._busy()
        if not len(busy):
            return head
        late = time.monotonic_ns() - self._since[busy] > SLOW_NS
        if late.any():
            with self.lock:
                self._in_the_way(self.head, 0)  # counts what dead writers left unfinished
        return min(head, *map(int, self._begins[busy[~late]]), head)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """A context in which nobody writes: those who had begun have finished, or are dead."""
        patience = Patience()
        while True:
            with self.lock:
                ahead = self._in_the_way(self.head + 1, self.capacity)  # any writer that lives is busy with some row
                if ahead is None:
                    with undisturbed:  # or an interrupt on the way in or out would leave the lock to a traceback
                        yield
                    return
            _wait_for(ahead, patience)

    @contextlib.contextmanager
    def hiding(self, rows: np.ndarray) -> Iterator[None]:
        """A context in which nobody reads `rows`: they are changed. A process that dies in it leaves them as holes."""
        rows = np.unique(rows)
        with self.at_rest():  # a writer that finishes meanwhile would have its stamps taken off again
            stamps = self.stamps[rows]
            count = int((stamps != EMPTY).sum())
            self.holes += count
            self.edits += 1
            self.stamps[rows] = EMPTY
            yield
            self.edits += 1  # for those who have read meanwhile
            self.stamps[rows] = stamps
            self.holes -= count
            self.edits += 1  # for those who have seen holes

    def clear(self, keep_count: bool = False) -> None:
        """Forget all rows, and how many were written unless that is to be kept. Only while nobody writes."""
        self.numbers[FORMER] = self.written if keep_count else 0
        self.stamps[: min(self.head - self.origin, self.capacity)] = EMPTY  # others have none, and need no memory
        # Row 0 comes next, and the head has moved in any case: that is how others notice.
        head = (self.head // self.capacity + 1) * self.capacity if self.capacity else 0
        self.numbers[[ORIGIN, HEAD]] = head
        self.numbers[[LOST, HOLES, STARVED]] = 0
        if not keep_count:
            self.sampled = self._samples[:] = 0

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """The counters. Only while nobody writes."""
        return {name: int(self.numbers[at]) for name, at in _SAVED.items()} | {"sampled": self.delivered}

    @staticmethod
    def checked_state(state: Mapping[str, Any]) -> dict[str, int]:
        """The counters of a saved state, or ValueError."""
        counters = {name: state.get(name) for name in _SAVED}
        if not all(type(value) is int and 0 <= value < 2**63 for value in counters.values()):
            raise ValueError(f"{dict(state)} are no saved counters.")
        return {**state}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with saved counters. Only while nobody writes."""
        for name, at in _SAVED.items():
            self.numbers[at] = state[name]
        self._samples[:] = 0
        self.is_starved = False
        self.edits += 1

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy for another buffer, in one process, to which nobody writes. What is shared travels as its memory."""
        numbers = self.numbers.copy()
        numbers[COUNTERS:], numbers[SAMPLED] = 0, self.delivered
        return _copied, (numbers, self.stamps.copy(), self.lanes)


def _wait_for(process: int, patience: Patience) -> None:
    """Give `process`, which is writing, a moment to finish."""
    if patience.waited_s() > PATIENCE_S:
        raise TimeoutError(
            f"Process {process} has been writing to the replay buffer for {PATIENCE_S:.0f} s, and its rows are "
            "needed: it is stopped, or the buffer is too small for what is written at a time."
        )
    time.sleep(PAUSE_S)


def _copied(numbers: np.ndarray, stamps: np.ndarray, lanes: int) -> Ledger:
    ledger = Ledger(numbers)
    ledger.attach(stamps, lanes)
    return ledger


_SAVED = {
    "head": HEAD,
    "origin": ORIGIN,
    "lost": LOST,
    "holes": HOLES,
    "sampled": SAMPLED,
    "former": FORMER,
    "enrolled": ENROLLED,
}
