"""What a worker process of a ParallelEnv does: see NOTE [Parallel envs]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from swath.envs.adapt import as_env
from swath.envs.ahead import Beginnings
from swath.envs.base import EnvBase, make_all
from swath.envs.layout import Layout
from swath.envs.registry import Registered
from swath.envs.rows import Leaf, Rows
from swath.envs.serial import SerialEnv
from swath.envs.shared_rows import SharedRows
from swath.errors import annotate
from swath.keys import RESET, Key
from swath.runtime import Channel, Failure, Goodbye, Member, follow

STEP, STEP_AND_BEGIN, BEGIN = range(3)
"""What a round is for; the first of its orders. The second is the number of the rows to write into."""
GOING_ON, FINISHED, FAILED = range(3)
"""The outcomes of a round; the largest counts."""
MARKS: dict[Key, Leaf] = {RESET: Leaf((), torch.bool)}
"""What lies beside the actions: which lanes a round shall reset."""


@dataclass(frozen=True)
class TakeActions:
    """Read actions, and which lanes to reset, from these rows."""

    rows: SharedRows


@dataclass(frozen=True)
class TakeOut:
    """Write into these rows when a round says `number`; forget all others but those of `kept`."""

    number: int
    rows: SharedRows
    beginnings: SharedRows
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Seed:
    """Seed all lanes of this worker."""

    seeds: list[int]


@dataclass(frozen=True)
class Get:
    """Give what is at `path`, of each env."""

    path: str


@dataclass(frozen=True)
class Call:
    """Call what is at `path`, of each env, and give the results."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """Something was raised, in one of the envs if `env` says which: counted from the worker's first."""

    failure: Failure
    env: int | None = None


@dataclass(frozen=True)
class EnvWorker:
    """What is sent to a worker: it makes its envs, tells their layouts, and steps them until it is told to end.

    Its envs are numbered from `first`.
    """

    first: int
    factories: list[Callable[..., Any]]
    kwargs: list[dict[str, Any]]
    registered: Registered
    member: Member

    def __call__(self, channel: Channel) -> None:
        """Be the worker."""
        self.registered.adopt()
        makers = [
            partial(_named, self.first + index, factory, kwargs)
            for index, (factory, kwargs) in enumerate(zip(self.factories, self.kwargs, strict=True))
        ]
        try:
            envs = make_all(makers)
            layouts = [Layout.of(env) for env in envs]
        except Exception as error:
            channel.send(Failed(Failure.of(error)))
            channel.receive()  # to end before we are told would be a death
            return
        _answer(channel, layouts)
        try:
            _serve(envs, self.first, self.member, channel)
        finally:
            for env in envs:
                env.close()


def _named(index: int, factory: Callable[..., Any], kwargs: dict[str, Any]) -> EnvBase:
    try:
        return as_env(factory, kwargs)
    except Exception as error:
        annotate(error, f"Raised by the factory of env {index}.")
        raise


def _answer(channel: Channel, value: Any) -> None:
    try:
        channel.send(value, by_value=True)
    except RuntimeError as error:  # it cannot be pickled
        channel.send(Failed(Failure.of(error)))


def _serve(envs: list[EnvBase], first: int, member: Member, channel: Channel) -> None:
    stepper: Stepper | Failed | None = None
    member.attend(channel.fileno())
    while True:
        if member.wait():
            assert isinstance(stepper, Stepper), "a round began before the rows were told"
            outcome = stepper.take_part(member.orders[0], member.orders[1])
            if outcome == FAILED:
                channel.send(stepper.failed)
            member.finish(outcome)
            continue
        for message in channel.receive_all():
            if isinstance(message, Goodbye):
                return
            if stepper is None:  # not before: now the parent has found that all layouts agree
                stepper = _stepper(envs, first)
            _answer(channel, stepper if isinstance(stepper, Failed) else stepper.obey(message))


def _stepper(envs: list[EnvBase], first: int) -> Stepper | Failed:
    try:
        return Stepper(envs, first)
    except Exception as error:  # perhaps it is the same env twice
        return Failed(Failure.of(error))


class Share(SerialEnv):
    """The envs of one worker. They are numbered by the parent, who tells where an error was raised."""

    failed: int | None = None
    """The env that has raised last."""

    def _name(self, error: Exception, index: int) -> None:
        self.failed = index


class Stepper:
    """Steps a worker's envs on their part of the rows."""

    def __init__(self, envs: list[EnvBase], first: int) -> None:
        """Make one env of them."""
        self._env = Share(len(envs), envs)
        self._lanes_are_apart = envs[0].num_lanes == 1 or self._env.is_merged
        self._start = first * envs[0].num_lanes
        self._stop = self._start + self._env.num_lanes
        self._outs: dict[int, Rows] = {}
        self._beginnings: dict[int, Beginnings] = {}
        self._failed_ahead: tuple[Failed, np.ndarray] | None = None
        """What went wrong in a reset that nobody has asked for yet, and the lanes that were to be reset."""
        self.failed: Failed | None = None
        """What went wrong last."""

    def take_part(self, what: int, rows: int) -> int:
        """Do our part of a round; the outcome."""
        try:
            if what != BEGIN:
                return self._step(rows, ahead=what == STEP_AND_BEGIN)
            self.failed = self._taken_failure()
            if self.failed is None:
                self._reset(rows)
        except Exception as error:
            self.failed = Failed(Failure.of(error), self._env.failed)
        return GOING_ON if self.failed is None else FAILED

    def _step(self, rows: int, ahead: bool) -> int:
        """Step, and begin new episodes where old ones have ended if that is wanted: see NOTE [Resets ahead]."""
        self._drop_beginnings()
        if not self._env.step_into(self._action, self._outs[rows]):
            return GOING_ON
        if ahead and self._lanes_are_apart:
            try:
                self._beginnings[rows].make(self._env)
            except Exception as error:
                failed = Failed(Failure.of(error), self._env.failed)
                self._failed_ahead = (failed, self._beginnings[rows].ended())
        return FINISHED

    def _taken_failure(self) -> Failed | None:
        """What was kept of a reset ahead, if it concerns a lane that shall be reset now."""
        if self._failed_ahead is None or not self._marks[self._failed_ahead[1]].any():
            return None
        failed, self._failed_ahead = self._failed_ahead[0], None
        return failed

    def _reset(self, rows: int) -> None:
        """Reset the lanes that are marked, unless they were reset ahead, with whatever rows."""
        lanes: Sequence[int] = np.flatnonzero(self._marks).tolist()
        for beginnings in self._beginnings.values():
            lanes = beginnings.hand_out(lanes, self._outs[rows])
        self._env.reset_into(lanes, self._outs[rows])

    def _drop_beginnings(self) -> None:
        self._failed_ahead = None
        for beginnings in self._beginnings.values():
            beginnings.drop()

    def obey(self, request: Any) -> Any:
        """Do what was asked, and return what was asked for."""
        self._env.failed = None
        try:
            return self._obey(request)
        except Exception as error:
            return Failed(Failure.of(error), self._env.failed)

    def _obey(self, request: Any) -> Any:
        match request:
            case TakeActions(rows):
                self._action = self._part(rows)
                self._marks = self._action.arrays[RESET]
            case TakeOut(number, rows, beginnings, kept):
                self._outs = {key: out for key, out in self._outs.items() if key in kept}
                self._beginnings = {key: known for key, known in self._beginnings.items() if key in kept}
                self._outs[number] = self._part(rows)
                self._beginnings[number] = Beginnings(self._part(beginnings), self._outs[number])
            case Seed(seeds):
                self._env._set_seeds(seeds)
                self._drop_beginnings()
            case Get(path):
                return self._each(lambda env: follow(env, path))
            case Call(path, args, kwargs):
                return self._each(lambda env: follow(env, path)(*args, **kwargs))
            case _:
                raise TypeError(f"A worker of a ParallelEnv was sent {request!r}.")
        return None

    def _part(self, rows: SharedRows) -> Rows:
        return rows.rows().part(self._start, self._stop, tuple(self._env.batch_size))

    def _each(self, ask: Callable[[EnvBase], Any]) -> list[Any]:
        found = []
        for index, env in enumerate(self._env.envs):
            self._env.failed = index
            found.append(ask(env))
        return found
