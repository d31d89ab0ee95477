"""A collector's worker: an ordinary `Collector` in a process of its own, which does what messages say.

NOTE [Two planes]: work (collect, fill, run free) and control (calls, weights, rest) come through the same channel, but
wait in two queues. Whenever nothing is being collected, control comes first: it is answered after the batch that is
being collected, not after all that wait, and it never costs a batch.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn

from swath.collectors.board import STOP_ALL, Attention
from swath.collectors.collector import Collector
from swath.collectors.messages import (
    Answer,
    Call,
    Collect,
    Collected,
    Failed,
    Fill,
    GoOn,
    Ready,
    Rest,
    RunFree,
    Spent,
    Task,
)
from swath.collectors.shared_arena import WorkerSlots
from swath.envs import EnvBase, as_env
from swath.modules import RandomPolicy
from swath.runtime import ChannelClosedError, Failure, Goodbye
from swath.seeding import policy_seed
from swath.weights import Layout, Subscriber, TakeFrom


@dataclass(frozen=True)
class CollectorWorker:
    """Runs in the worker process; `begin` alone for those who hand it messages themselves."""

    task: Task

    def __call__(self, channel: Any) -> None:
        """Work until told to end."""
        session = self.begin(channel)
        while session.step():
            pass
        session.end()

    def begin(self, channel: Any) -> Session:
        """Make the collector and say what its batches look like."""
        return Session(self.task, channel)


class Session:
    """A worker at work."""

    def __init__(self, task: Task, channel: Any) -> None:
        """Make the collector."""
        self._task, self._channel = task, channel
        self._control: deque[Any] = deque()
        self._work: deque[Any] = deque()
        self._free: RunFree | None = None
        self._is_resting = False
        self._weights = Subscriber()
        self._attention = Attention(task.board, task.index, channel.take_in, task.config.interruptor)
        try:
            self.collector = self._made(task)
        except BaseException as error:
            self._fail(error, "being made")
        loop = self.collector._loop
        self._slots = WorkerSlots(loop.arena.leaves, tuple(self.collector.env.batch_size))
        self._is_on_cpu = (self.collector.env.rows_device or torch.device("cpu")).type == "cpu"
        policy = self.collector.policy
        has_weights = isinstance(policy, nn.Module) and not isinstance(policy, RandomPolicy)
        channel.send(
            Ready(
                leaves=loop.arena.leaves,
                delivered=loop.delivered,
                batch_size=tuple(self.collector.env.batch_size),
                env=repr(self.collector.env),
                policy=Layout.of(policy) if has_weights else None,
            )
        )

    def _made(self, task: Task) -> Collector:
        task.registered.adopt()
        if task.init_fn is not None:
            task.init_fn()
        config = replace(task.config, interruptor=self._attention, worker_idx=task.index)
        collector = Collector.of(config, self._make_env, task.policy)
        collector._loop.lanes.ids.renumber(task.number)
        if collector._writer is not None:
            collector._writer.stopping = self._should_not_wait
        for store in task.stores:
            self._weights.take_from(store)
        self._attention.write({})
        if task.seed is not None:
            _seed_globals(task.seed[0], task.index)
            collector.set_seed(*task.seed)
        return collector

    def _make_env(self, **kwargs: Any) -> EnvBase:
        """The worker's env, which knows its place among the lanes of all workers before it is reset."""
        env = as_env(self._task.create_env_fn, kwargs)
        env.first_lane = self._task.index * env.num_lanes
        return env

    def _should_not_wait(self) -> bool:
        """Whether to write at once what waits for its turn in the replay buffer."""
        return self._attention.is_wanted or self._channel.has_news()

    # -- what is done next -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do the next thing; whether there is more to come."""
        message = self._next()
        match message:
            case Goodbye():
                return False
            case Collect() | Fill():
                self._attempt(message)
            case RunFree():
                self._free = message
            case GoOn():
                self._is_resting = False
            case TakeFrom():
                self._weights.take_from(message)
            case Rest(number=number):
                self._is_resting = True
                self._channel.send(Answer(number))
            case Call():
                self._answer(message)
            case None:
                self._attempt(None)
            case _:
                raise TypeError(f"A worker cannot understand {message!r}.")
        return True

    def _next(self) -> Any:
        """The next message: control first; None to run on freely."""
        try:
            return self._received()
        except ChannelClosedError:
            raise
        except Exception as error:  # what the parent can import, a worker may not
            self._fail(error, "reading a message")

    def _received(self) -> Any:
        self._sort(self._channel.receive_all() if self._channel.has_news() else [])
        while True:
            if self._control:
                return self._control.popleft()
            if not self._is_resting:
                if self._work:
                    return self._work.popleft()
                if self._free is not None:
                    return None
            self._sort([self._channel.receive()])

    def _sort(self, messages: list[Any]) -> None:
        for message in messages:
            (self._work if isinstance(message, Collect | Fill) else self._control).append(message)

    @property
    def has_work(self) -> bool:
        """Whether there is something to do."""
        return bool(self._control or self._work or self._channel.has_news())

    def end(self) -> None:
        """Close the env."""
        self.collector.shutdown(raise_on_error=False)

    # -- work --------------------------------------------------------------------------------------------------

    def _attempt(self, work: Collect | Fill | None) -> None:
        """Do work; a collector that has failed in it cannot go on."""
        try:
            self._adopt()
            match work:
                case Collect():
                    self._collect(work)
                case Fill():
                    self._fill(work)
                case None:
                    self._run_free()
        except BaseException as error:
            self._fail(error, "collecting")

    def _adopt(self) -> None:
        self._weights.adopt(self.collector._find_model)
        self.collector._loop.version = self._weights.version

    def _collect(self, work: Collect) -> None:
        self._attention.ticket = work.ticket
        self._slots.forget(work.forget)
        slot = self._slots.slot(work.memory)
        if self._is_on_cpu:
            receipt = self.collector.collect_into(slot, work.random)
        else:  # the env's rows lie on a device, which writes to its own memory
            private = self.collector._loop.arena.acquire(slot.steps)
            receipt = self.collector.collect_into(private, work.random)
            for key, tensor in slot.tensors.items():
                tensor.copy_(private.tensors[key])
        self._report()
        self._channel.send(Collected(work.ticket, receipt.steps, receipt.frames, receipt.version))

    def _fill(self, work: Fill) -> None:
        self._attention.ticket = work.ticket
        frames = self._filled(work.steps)
        steps = frames // self.collector.env.num_lanes
        self._channel.send(Collected(work.ticket, steps, frames, self._weights.version))

    def _filled(self, steps: int) -> int:
        before = self.collector._budget.spent
        self.collector.fill(steps)
        self._report()
        return self.collector._budget.spent - before

    def _run_free(self) -> None:
        assert self._free is not None
        self._attention.ticket = STOP_ALL
        budget, collector = self._free.budget, self.collector
        steps = budget.claim(self._task.index, collector.frames_per_batch, collector.env.num_lanes)
        if steps:
            budget.settle(self._task.index, self._filled(steps))
            return
        collector.finish_episodes()
        self._report()
        self._free = None
        self._channel.send(Spent())

    def _report(self) -> None:
        self._attention.write(self.collector.stats())

    # -- control -----------------------------------------------------------------------------------------------

    def _answer(self, call: Call) -> None:
        if call.clears:
            self._forget_work()
        try:
            self._adopt()
            if call.path == "set_seed" and not self._is_local:
                _seed_globals(call.args[0], self._task.index)
            value = self.collector.cascade_execute(call.path, *call.args, **(call.kwargs or {}))
            self._channel.send(Answer(call.number, cloudpickle.dumps(value), ticket=self._attention.ticket))
        except Exception as error:
            self._channel.send(Answer(call.number, failure=Failure.of(error)))

    def _forget_work(self) -> None:
        """Do nothing of what waits; but memory that it tells of is told of once only, and used for other work later."""
        for work in self._work:
            if isinstance(work, Collect):
                self._slots.forget(work.forget)
                self._slots.slot(work.memory)
        self._work.clear()

    @property
    def _is_local(self) -> bool:
        """Whether this runs in the parent's own process, where errors need no carrying."""
        return bool(getattr(self._channel, "is_local", False))

    def _fail(self, error: BaseException, doing: str) -> None:
        if self._is_local or isinstance(error, ChannelClosedError):
            raise error
        self._channel.send(Failed(Failure.of(error), doing))
        raise SystemExit(1) from error


def _seed_globals(seed: int, worker: int) -> None:
    """Envs may draw from the generators of Python and numpy, which are the worker's own."""
    own = policy_seed(seed, worker)
    random.seed(own)
    np.random.seed(own % 2**32)
