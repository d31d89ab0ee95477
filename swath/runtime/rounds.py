"""Rounds: the same work done by several processes at once, over and over, with few wake-ups.

NOTE [Rounds]: whoever leads begins a round, the members that it calls do their part, and the last one to finish wakes
the leader. There is one round at a time. Waking a process costs more than the work that small envs have for it, so:

- What a round is about lies in shared memory, as do the numbers that tell who was called and who has finished. Nothing
  is sent.
- A round for all is begun by one call of the system, whatever the number of members: they all wait for the same event,
  the gong. An event stays raised until it is lowered, and it must not be lowered before everybody has seen it. So there
  are two: the leader lowers the one of the round before last while everybody waits for the other. A round for some
  raises the bell of each of them.
- Members count down on a shared event: before a round it is raised to one less than the number of those who are called,
  and each takes one away when it has finished. Who finds nothing left was the last, and only it wakes the leader. The
  system sees to it that each takes another one, and that the last sees, and shows, what the others had written.

Whoever wakes another first writes the number and then raises the event, always. Whoever waits looks at the number,
lowers the event, looks again, and only then goes to sleep. No order of these can leave one asleep who was called; the
worst is to be woken for nothing. Those who sleep wait for the channels and the ends of other processes as well.

An interrupt (Ctrl-C) may come while a round is begun. Up to one assignment nobody has been told anything, from there
on all can be told again: `mend` does what is due.

Being woken on a core that has gone idle can take longer than a round. So the leader looks at the number for a while
before it goes to sleep, and the members too if there is a core for each process. Between two looks they offer their
core to others (`sched_yield`): looking without that was measured to make rounds up to ten times as long. Members that
have no core of their own go to sleep at once: cores do not become idle then, and whoever offers his core has to wait
until it is his turn again, while one that is woken comes first. (Measured on two cores, frames per second with 2, 4 and
8 processes: 28k, 30k and 30k if all sleep at once, 34k, 32k and 33k if the leader looks for 100 us first, 16k, 31k and
33k if it looks for 300 us.) But whoever was the last to finish looks for a while in any case: it keeps one core from
going idle while the leader does something else. (2 processes, in turns on the same machine: 16k to 26k frames per
second without, 28k to 45k with; 8 processes gain little.) And as a number seen in memory, without a call of the system,
only tells that everything written before is there too if the machine keeps the order of writes, on others all of them
sleep.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from swath.runtime.descriptors import Descriptor
from swath.runtime.memory import Block, MemoryBlock
from swath.runtime.ordering import keeps_order

SPIN_S = 100e-6
"""How long to look before going to sleep: longer than a wake-up takes, so short that nobody misses the core."""
SPIN_LAST_S = 400e-6
"""The same for the last one to finish a round, while the others sleep and the leader may be busy elsewhere."""
KEEPS_ORDER = keeps_order()
LINE = 8
"""Words in a line of the cache; processes that write to different lines do not disturb each other."""
ORDERS = 4
"""How many numbers the leader can leave for the members."""
CALLED, FINISHED, OUTCOME = range(3)
"""The words of each member: the last round that it was called to, the last that it has finished, and how."""
LAST, RUNG = 0, 1
"""Words that all share: the last round that everybody has finished, and whether the last one was begun by the gong."""


class Event(Descriptor):
    """A counter of the system (eventfd) that one process raises and another waits for."""

    def __init__(self, *, by_ones: bool = False) -> None:
        """Begin at zero; `by_ones` if each `lower` shall take away one instead of all."""
        super().__init__(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | (os.EFD_SEMAPHORE if by_ones else 0)))

    def lift(self, by: int = 1) -> None:
        """Add to the counter: whoever waits is woken."""
        os.eventfd_write(self.fd, by)

    def lower(self) -> bool:
        """Take away; whether there was anything."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True


Events = tuple[Event, Event, tuple[Event, Event], Event]
"""What a member is given: home, left, the two gongs and its bell."""


def _words(block: Block) -> memoryview:
    return memoryview(block.array((block.size // 8,), np.int64))  # type: ignore[arg-type]


def _of(member: int) -> int:
    """Where the words of `member` begin: behind those of all, and those of the leader."""
    return LINE * (2 + member)


class Rounds:
    """The leader's side; see NOTE [Rounds]."""

    def __init__(self, members: int) -> None:
        self._spins = KEEPS_ORDER
        self._members_spin = KEEPS_ORDER and members < len(os.sched_getaffinity(0))
        block = MemoryBlock(8 * _of(members))
        self._block: Block | None = block
        self._words = _words(block)
        self._home, self._left, self._gongs = Event(), Event(by_ones=True), (Event(), Event())
        self._bells = [Event() for _ in range(members)]
        self._all = range(members)
        self.called: Sequence[int] = ()
        """The members of the round that was begun last."""
        self._gong = 0
        self._begun: tuple[int, Sequence[int], bool, int] | None = None
        """While a round is begun: its number, whom it calls, and how."""
        self.number = 0
        """The round that was begun last."""
        self.orders = self._words[LINE : LINE + ORDERS]
        """Numbers for the members to read in a round."""

    def member(self, index: int) -> Member:
        """What the member `index` needs; it is sent to another process."""
        assert self._block is not None, "there are no rounds any more"
        events = (self._home, self._left, self._gongs, self._bells[index])
        return Member(index, self._block, events, self._members_spin)

    def fileno(self) -> int:
        """For `poll`: readable when a round has ended."""
        return self._home.fd

    def begin(self, members: Sequence[int] | None = None) -> None:
        """Call `members`, or all. What they need to know must lie in its place already."""
        called = self._all if members is None else members
        self._words[RUNG] = members is None
        if len(called) > 1:
            self._left.lift(len(called) - 1)
        if members is None:
            self._gongs[self._gong].lower()  # everybody waits for the other
        self._begun = (self.number + 1, called, members is None, self._gong ^ 1)
        self._call()

    def _call(self) -> None:
        """Tell those who are called. To tell them again does no harm."""
        assert self._begun is not None
        number, called, is_for_all, gong = self._begun
        self.number, self.called = number, called
        words = self._words
        for member in called:
            words[LINE * (2 + member)] = number
        if is_for_all:
            self._gong = gong
            self._gongs[gong].lift()
        else:
            for member in called:
                self._bells[member].lift()
        self._begun = None

    def mend(self) -> None:
        """After an interrupt, wherever it came: a round has begun in full, or not at all."""
        if self._begun is not None:
            self._call()
        elif self.is_over():
            while self._left.lower():
                continue

    def is_over(self) -> bool:
        """Whether everybody has finished."""
        return bool(self._words[LAST] == self.number)

    def spin(self) -> bool:
        """Look for a while, if that pays; whether everybody has finished."""
        words, number = self._words, self.number
        if self._spins:
            until = perf_counter() + SPIN_S
            while words[LAST] != number and perf_counter() < until:
                os.sched_yield()
        return bool(words[LAST] == number)

    def lower(self) -> None:
        """Before going to sleep, and after: take notice of having been woken."""
        self._home.lower()

    def outcomes(self) -> list[int]:
        """What each of those that were called has told of its part of the round that is over, in order."""
        words = self._words
        return [words[LINE * (2 + member) + OUTCOME] for member in self.called]

    def late(self) -> list[int]:
        """Those that have not finished."""
        return [member for member in self.called if self._words[_of(member) + FINISHED] != self.number]

    def close(self) -> None:
        """Close all events, and let the memory go. May be called again; there are no rounds any more."""
        for event in (self._home, self._left, *self._gongs, *self._bells):
            event.release()
        self._words = self.orders = memoryview(b"")
        self._block = None


class Member:
    """A member's side; see NOTE [Rounds]."""

    def __init__(self, index: int, block: Block, events: Events, spins: bool) -> None:
        self.index, self._block, self._spins = index, block, spins
        self._home, self._left, self._gongs, self._bell = events

    def attend(self, other: int) -> None:
        """Be ready to wait, for a round or for something to read from the descriptor `other`."""
        self._words, self._base = _words(self._block), _of(self.index)
        self.orders = self._words[LINE : LINE + ORDERS]
        self._other, self._polls = other, []
        for gong in reversed(self._gongs):  # in the order in which they are used
            poll = select.poll()
            for fd in (gong.fd, self._bell.fd, other):
                poll.register(fd, select.POLLIN)
            self._polls.append(poll)
        self._gong = 0
        self._number = 0
        self._spin_s = 0.0
        """How long to look before going to sleep, this time."""

    def wait(self) -> bool:
        """Wait; whether a round has begun. If not, there is something to read."""
        words, called, done = self._words, self._base + CALLED, self._number
        if self._spin_s:
            until = perf_counter() + self._spin_s
            while words[called] == done and perf_counter() < until:
                os.sched_yield()
        while words[called] == done:
            woken_by = [fd for fd, _ in self._polls[self._gong].poll()]
            if self._other in woken_by:
                return False
            if self._bell.fd in woken_by:  # perhaps for a round that we had seen before it was raised
                self._bell.lower()
        self._number = words[called]
        if words[RUNG]:
            self._gong ^= 1
        else:
            self._bell.lower()
        return True

    def finish(self, outcome: int) -> None:
        """Tell that our part of the round is done."""
        words, base = self._words, self._base
        words[base + OUTCOME] = outcome
        words[base + FINISHED] = self._number
        is_last = not self._left.lower()
        if is_last:
            words[LAST] = self._number
            self._home.lift()
        self._spin_s = SPIN_LAST_S if is_last and KEEPS_ORDER else SPIN_S if self._spins else 0.0
