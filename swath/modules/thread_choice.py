"""ThreadChoice: whether a large network is called with all of torch's threads, or with one.

Where the cores have nothing else to do, a large network is quicker with all threads. Where another process or the
trainer keeps one of them busy, each call waits for the scheduler, as NOTE [torch's threads] tells, and takes ten times
as long as with one. Nobody knows beforehand, and it changes while a program runs: so both are tried now and then.

The same seed has to give the same actions, whoever else is at work. So there is only a choice where one thread and all
of them give the same, bit by bit, in all that is computed on the way. To find that out the first calls are made twice;
but only if they do nothing but what networks are made of (see `Watched`), which for the same shapes is done in the same
order whatever the numbers are, and if they write to nothing that outlives them. All others are called as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from swath.modules.call_context import CallContext
from swath.modules.watching import Watched

TRIALS = 4
"""In so many calls another number of threads is tried,"""
TRIAL_SHARE = 0.01
"""which takes about that part of the time."""
WEIGHT = 0.125
"""Of the last call in what a call is expected to take."""
MOST_FORMS = 8
"""For so many shapes there is a choice: each is tried by itself, and envs at their own pace may bring any number."""
COMPARED = 8
"""So many calls are made twice, and have to give the same."""


class Quicker:
    """Which of two ways is the quicker one, by what they took."""

    def __init__(self) -> None:
        """Both are tried at first."""
        self.way = 0
        """That which is to be taken next."""
        self._best = 1
        self._expected = [math.inf, math.inf]
        """Seconds of a call."""
        self._tried, self._took = 0, 0.0
        """Calls and seconds of a trial."""
        self._left = 0.0
        """After how many seconds the other way is tried again."""

    def took(self, seconds: float) -> None:
        """A call has taken so long, in the way that was to be taken."""
        way, expected = self.way, self._expected
        if way == self._best:
            expected[way] += WEIGHT * (seconds - expected[way])
            self._left -= seconds
        else:
            self._tried, self._took = self._tried + 1, self._took + seconds
            if self._tried < TRIALS and self._took <= TRIALS * expected[self._best]:  # else it has lost already
                return
            expected[way] = self._took / self._tried
            self.way = self._best = int(expected[1] < expected[0])
            other = expected[1 - self._best]
            self._left = 0.0 if other == math.inf else self._tried * other / TRIAL_SHARE
        if self._left <= 0.0:
            self.way, self._tried, self._took = 1 - self._best, 0, 0.0


class ThreadChoice:
    """Calls of a network, each with the number of threads that is the quickest at present."""

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        """For a network of these `modules` that keeps nothing of its calls and counts nothing."""
        self.one_thread = CallContext(one_thread=True, infers=False)
        self._modules = list(modules)
        self._known: dict[tuple[Any, ...], Quicker | int | None] = {}
        """How to call, by torch's number of threads, which modules train, and the shapes of what is given.

        None is as ever; a number tells how many calls have given the same so far.
        """

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What does as `call`, which calls the network."""
        return partial(self._called, call) if self.one_thread.is_any else call

    def _called(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        tensors = [one for one in (*given, *named.values()) if isinstance(one, Tensor)]
        trains = tuple([module.training for module in self._modules])
        form = (torch.get_num_threads(), trains, *[one.shape for one in tensors])
        quicker = self._known.get(form, 0)
        if isinstance(quicker, int):
            may_be_tried = (form in self._known or len(self._known) < MOST_FORMS) and any(map(_has_variety, tensors))
            return self._called_twice(form, call, *given, **named) if may_be_tried else call(*given, **named)
        if quicker is None:
            return call(*given, **named)
        begun = perf_counter()
        if quicker.way:
            with self.one_thread:
                results = call(*given, **named)
        else:
            results = call(*given, **named)
        quicker.took(perf_counter() - begun)
        return results

    def _called_twice(self, form: tuple[Any, ...], call: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        """Call, and call again with one thread if nobody notices, to find out whether there is a choice."""
        first, second, alike = Watched(), Watched(), self._known.get(form, 0)
        assert isinstance(alike, int)
        try:
            with first:
                results = call(*given, **named)
            self._known[form] = None
            if first.may_be_repeated:
                with suppress(Exception):  # as where there is no memory for a second one
                    with self.one_thread, second:
                        call(*given, **named)
                    if first.is_same_as(second):
                        self._known[form] = Quicker() if alike + 1 == COMPARED else alike + 1
        finally:
            first.end()
            second.end()
        return results


def _has_variety(given: Tensor) -> bool:
    """Whether not all its numbers are the same: what is computed of these may be the same in whatever order."""
    return given.numel() > 1 and bool((given != given.reshape(-1)[0]).any())
