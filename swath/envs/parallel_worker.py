"""What a worker process of a ParallelEnv does: see NOTE [Parallel envs]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from swath.envs.adapt import as_env
from swath.envs.base import EnvBase
from swath.envs.eager_reset import EagerResets
from swath.envs.env_layout import EnvLayout, make_all
from swath.envs.registry import Registered
from swath.envs.rows import Leaf, Rows
from swath.envs.serial import SerialEnv
from swath.errors import annotate
from swath.keys import RESET, Key
from swath.runtime import Failure, Member, follow
from swath.runtime.carrier import Link, Ordered, Topic
from swath.runtime.columns import Columns
from swath.runtime.processes import ProcessLink
from swath.runtime.snapshots import Snapshots

STEP, STEP_AND_BEGIN, BEGIN, STEP_AND_CUT = range(4)
"""What a round is for; the first of its orders. The second is the number of the rows to write into.

After a step, lanes that have finished may begin anew at once; so may those that are marked, whose episodes are cut off.
"""
GOING_ON, FINISHED, FAILED = range(3)
"""The outcomes of a round; the largest counts."""
MARKS: dict[Key, Leaf] = {RESET: Leaf((), torch.bool)}
"""What lies beside the actions: which lanes a round shall reset."""


@dataclass(frozen=True)
class TakeActions:
    """Read actions, and which lanes to reset, from these rows."""

    rows: Columns


@dataclass(frozen=True)
class TakeOut:
    """Write into these rows when a round says `number`; forget all others but those of `kept`."""

    number: int
    rows: Columns
    eager: Columns
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
class CallEach:
    """Call what is at `path`, of each env, and give the results."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class GetFailure:
    """Give what went wrong in the last round."""


@dataclass(frozen=True)
class EnvFailure:
    """Something was raised, in one of the envs if `env` says which: counted from the worker's first."""

    failure: Failure
    env: int | None = None


@dataclass(frozen=True)
class EnvTask:
    """What is sent to a worker: it makes its envs, gives their layouts, and steps them until it is stopped.

    Its envs are numbered from `first`.
    """

    first: int
    factories: list[Callable[..., Any]]
    kwargs: list[dict[str, Any]]
    registered: Registered
    member: Member

    def begin(self, link: Link) -> EnvJob:
        """Make the envs, in the worker."""
        assert isinstance(link, ProcessLink)  # rounds are among processes of one machine
        self.registered.adopt()
        self.member.attend(link.fileno())
        return EnvJob(make_envs(self.first, self.factories, self.kwargs), self.first, self.member)


def make_envs(first: int, factories: Sequence[Callable[..., Any]], kwargs: Sequence[dict[str, Any]]) -> list[EnvBase]:
    """The envs of a worker, which are numbered from `first`."""
    pairs = enumerate(zip(factories, kwargs, strict=True), first)
    return make_all([partial(_made_as, index, factory, given) for index, (factory, given) in pairs])


def _made_as(index: int, factory: Callable[..., Any], kwargs: dict[str, Any]) -> EnvBase:
    try:
        return as_env(factory, kwargs)
    except Exception as error:
        annotate(error, f"Raised by the factory of env {index}.")
        raise


class EnvJob:
    """Takes part in rounds, and answers questions between them."""

    def __init__(self, envs: list[EnvBase], first: int, member: Member) -> None:
        """Step `envs`."""
        self._envs, self._first, self._member = envs, first, member
        self._stepper: Stepper | None = None

    def describe(self) -> list[EnvLayout]:
        """What the envs look like."""
        return [EnvLayout.of(env) for env in self._envs]

    def idle(self) -> None:
        """Take part in rounds until a message comes."""
        while self._member.wait():
            assert self._stepper is not None, "a round began before there were rows"
            self._member.finish(self._stepper.take_part(self._member.orders[0], self._member.orders[1]))

    def answer(self, request: object) -> object:
        """Answer a question of the ParallelEnv; what an env raises is an answer, too."""
        if self._stepper is None:  # not before: now the parent has found that all layouts agree
            try:
                self._stepper = Stepper(self._envs, self._first)
            except Exception as error:  # perhaps it is the same env twice
                return EnvFailure(Failure.of(error))
        return self._stepper.obey(request)

    def work(self, order: Ordered, has_questions: Callable[[], bool]) -> object:
        """Not used: work is done in rounds."""
        raise TypeError(f"A worker of a ParallelEnv cannot understand {order!r}.")

    def subscribe(self, topic: Topic, snapshots: Snapshots) -> None:
        """Not used: envs have no weights."""

    def stop(self) -> None:
        """Close the envs."""
        for env in self._envs:
            env.close()


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
        self._first = first
        self._outs: dict[int, Rows] = {}
        self._eager: dict[int, EagerResets] = {}
        self._failed_eager: tuple[EnvFailure, np.ndarray] | None = None
        """What went wrong in an eager reset that was not asked for yet, and the lanes that were to be reset."""
        self.failed: EnvFailure | None = None
        """What went wrong last."""

    def take_part(self, what: int, rows: int) -> int:
        """Do our part of a round; the outcome."""
        try:
            if what != BEGIN:
                return self._step(rows, what)
            self.failed = self._taken_failure()
            if self.failed is None:
                self._reset(rows)
        except Exception as error:
            self.failed = EnvFailure(Failure.of(error), self._env.failed)
        return GOING_ON if self.failed is None else FAILED

    def _step(self, rows: int, what: int) -> int:
        """Step, and begin new episodes where old ones have ended if that is wanted: see NOTE [Eager resets]."""
        self._drop_eager()
        has_finished = self._env.step_into(self._action, self._outs[rows])
        if not has_finished and what != STEP_AND_CUT:
            return GOING_ON
        if what != STEP and self._lanes_are_apart:
            ended = self._eager[rows].ended()
            if what == STEP_AND_CUT:
                ended = np.union1d(ended, np.flatnonzero(self._marks))
            try:
                self._eager[rows].make(self._env, ended)
            except Exception as error:
                self._failed_eager = (EnvFailure(Failure.of(error), self._env.failed), ended)
        return FINISHED

    def _taken_failure(self) -> EnvFailure | None:
        """What an eager reset has raised, if it concerns a lane that shall be reset now."""
        if self._failed_eager is None or not self._marks[self._failed_eager[1]].any():
            return None
        failed, self._failed_eager = self._failed_eager[0], None
        return failed

    def _reset(self, rows: int) -> None:
        """Reset the lanes that are marked, unless they were reset eagerly, with whatever rows."""
        lanes: Sequence[int] = np.flatnonzero(self._marks).tolist()
        for eager in self._eager.values():
            lanes = eager.hand_out(lanes, self._outs[rows])
        self._env.reset_into(lanes, self._outs[rows])

    def _drop_eager(self) -> None:
        self._failed_eager = None
        for eager in self._eager.values():
            eager.drop()

    def obey(self, request: Any) -> Any:
        """Do what was asked, and return what was asked for; or what was raised."""
        self._env.failed = None
        try:
            match request:
                case TakeActions(rows):
                    self._action = self._part(rows)
                    self._marks = self._action.arrays[RESET]
                case TakeOut(number, rows, eager, kept):
                    self._outs = {key: out for key, out in self._outs.items() if key in kept}
                    self._eager = {key: known for key, known in self._eager.items() if key in kept}
                    self._outs[number] = self._part(rows)
                    self._eager[number] = EagerResets(self._part(eager), self._outs[number])
                case Seed(seeds):
                    self._env.seed_lanes(seeds)
                    self._drop_eager()
                case GetFailure():
                    return self.failed
                case Get(path):
                    return self._each(lambda env: follow(env, path))
                case CallEach(path, args, kwargs):
                    return self._each(lambda env: follow(env, path)(*args, **kwargs))
                case _:
                    raise TypeError(f"A worker of a ParallelEnv was sent {request!r}.")
        except Exception as error:
            return EnvFailure(Failure.of(error), self._env.failed)
        return None

    def _part(self, columns: Columns) -> Rows:
        return Rows.over(columns.part(self._first, self._first + len(self._env.envs)))

    def _each(self, ask: Callable[[EnvBase], Any]) -> list[Any]:
        found = []
        for index, env in enumerate(self._env.envs):
            self._env.failed = index
            found.append(ask(env))
        return found
