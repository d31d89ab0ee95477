"""The kinds of collectors that our tests run over, and what each of them cannot do, with the reason.

A test is written once: `@over(HERE)` runs it for every kind that collects in this process, `@over(ALL, needs="...")`
for every kind that has that ability. A new class joins all of them by one `Kind` below. `test_kinds.py` looks whether
the table is true: a kind has every ability that it is not denied here, and has none that it is denied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import pytest
from common import buffer

from swath.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from swath.testing import CountingEnv

Make = Callable[..., Any]
"""The fixture `make`: `Kind.build` of the kind at hand."""


@dataclass(frozen=True)
class Kind:
    """A class of collectors in one of its forms."""

    name: str
    of: type[BaseCollector]
    joins: bool = True
    """Whether a batch has the rows of all lanes, in order; otherwise it is of one worker, whichever was first."""
    workers: int = 0
    """How many it has if a test does not say; 0: env and policy are the collector's own."""
    ahead: int = 0
    """How many batches of a worker may be collected already while another is delivered."""
    starts: bool = False
    """Whether it is started, and writes to a buffer without anybody who iterates."""
    options: Mapping[str, Any] = field(default_factory=dict)
    many_envs: int = 0
    """How many envs it has if a test does not say, where its lanes are envs of their own."""
    cannot: Mapping[str, str] = field(default_factory=dict)
    """Abilities that it lacks, with the reason; they are described in `test_kinds.py`."""

    def __str__(self) -> str:
        return self.name

    def build(
        self,
        env: Any = None,
        policy: Any = None,
        *,
        lanes: int = 0,
        lengths: Any = 5,
        workers: int | None = None,
        steps: int = 10,
        batches: int | None = None,
        **options: Any,
    ) -> Any:
        """A collector, of which every batch has `steps` steps and every worker `lanes` lanes of counting envs.

        `env` is another factory for every worker (or an env, where that can be), or a list with one for each; `lanes`
        then says how many lanes it has. `batches` says how many there are in all.
        """
        options = {**self.options, **options}
        if self.many_envs:
            options.setdefault("stack_envs", max(lanes, self.many_envs) > 1 or lanes > 0)
            own = counting(0, lengths) if env is None else env
            count = self.many_envs if env is not None else lanes or self.many_envs
            env = own if isinstance(own, list) else [own] * count
        env = counting(lanes, lengths) if env is None else env
        workers = self.workers if workers is None else workers
        workers = len(env) if isinstance(env, list) and self.workers else workers
        if "frames_per_batch" not in options:
            options["frames_per_batch"] = steps * max(1, lanes) * (max(1, workers) if self.joins else 1)
        if batches is not None:
            options["total_frames"] = batches * options["frames_per_batch"]
        if self.workers and not issubclass(self.of, AsyncCollector) and not isinstance(env, list):
            env = [env] * workers
        if self.starts:
            options.setdefault("replay_buffer", buffer(batch_size=16))
        collector: Any = self.of(env, policy, **options)
        if self.starts:
            collector.start()
        return collector

    def make(self, lanes: int, lengths: Any, **options: Any) -> Any:
        """A collector whose batches are `[lanes, T]`, or `[T]` without lanes, and each goes on where the last ended.

        Where batches are joined there is a worker for each lane; otherwise there is one worker.
        """
        if self.workers and self.joins:
            options = options if lanes else {"cat_results": -1, **options}
            return self.build(lengths=lengths, workers=max(1, lanes), **options)
        return self.build(lanes=lanes, lengths=lengths, workers=min(1, self.workers), **options)


def counting(lanes: int = 0, lengths: Any = 5, **options: Any) -> Callable[[], CountingEnv]:
    """A factory of counting envs."""
    return lambda: CountingEnv((lanes,) if lanes else (), lengths=lengths, **options)


WORKERS = {
    "keep_env_open": "the envs of workers end with them",
    "env_object": "workers make their envs themselves",
    "single_answer": "each worker answers for itself",
    "own_policy": "workers act with copies of the policy",
    "any_buffer": "workers write to a buffer that they share",
}
PROCESSES = {**WORKERS, "share_objects": "what is given is copied into other processes"}
ONE = {"choose_workers": "there is one, whatever it is called"}
FIRST_COME = {
    "newest_weights": "a batch may have been collected before weights were published",
    "join": "a batch is of the worker that was first",
}

SINGLE = Kind("single", Collector, cannot=ONE)
SYNC_HERE = Kind("sync, debug", MultiSyncCollector, workers=2, options={"debug": True}, cannot=WORKERS)
ASYNC_HERE = Kind(
    "async, debug",
    MultiAsyncCollector,
    joins=False,
    workers=2,
    ahead=2,
    options={"debug": True},
    cannot={**WORKERS, **FIRST_COME},
)
SYNC = Kind("sync", MultiSyncCollector, workers=2, cannot=PROCESSES)
ASYNC = Kind("async", MultiAsyncCollector, joins=False, workers=2, ahead=2, cannot={**PROCESSES, **FIRST_COME})
ONE_ASYNC = Kind(
    "one async",
    AsyncCollector,
    joins=False,
    workers=1,
    ahead=2,
    cannot={**PROCESSES, **FIRST_COME, **ONE},
)
PROMPT = Kind(
    "prompt async, debug",
    MultiAsyncCollector,
    joins=False,
    workers=1,
    options={"debug": True, "max_staleness": 0},
    cannot={**WORKERS, **ONE, "join": FIRST_COME["join"]},
)
"""A batch is begun when it is asked for."""

AS_READY = Kind(
    "as ready",
    AsyncBatchedCollector,
    many_envs=1,
    cannot={
        **ONE,
        "env_object": "there are many envs, which are made where they run",
        "one_env": "its lanes are envs of their own",
    },
)
"""Envs at their own pace, in threads."""

AS_READY_SPREAD = Kind(
    "as ready, processes",
    AsyncBatchedCollector,
    many_envs=1,
    options={"env_backend": "multiprocessing"},
    cannot=AS_READY.cannot,
)

AS_READY_PAIR = Kind(
    "as ready, two",
    AsyncBatchedCollector,
    many_envs=2,
    options={"env_backend": "multiprocessing"},
    cannot={
        **AS_READY.cannot,
        "go_on_within": "a lane whose worker is replaced begins anew in the middle of a batch",
        "drop": "a stacked batch has steps of every env",
        "report_steps": "its workers only step envs: what was collected is known here",
        "state_ends": "its state is here, and can be asked for when the workers have ended",
        "run_there": "policy and hooks run in this process, and workers are told apart by their envs",
        "told_at_once": "a death is noticed when something of its env is waited for",
    },
)
"""For tests of faults: two envs, each in a process of its own."""

STARTED = Kind("start", MultiAsyncCollector, joins=False, workers=2, starts=True)
"""Workers that run free, for tests of faults."""

HERE = (SINGLE, SYNC_HERE, ASYNC_HERE, AS_READY)
"""Cheap: all in this process."""
SPREAD = (SYNC, ASYNC)
"""Two worker processes each."""
FREE = (SINGLE, AS_READY, *SPREAD)
"""Those that can be started to collect in the background."""
FALLIBLE = (*SPREAD, STARTED)
"""Those whose workers can die: every scenario of faults is for each of them, if it does not say otherwise."""
ALL_FALLIBLE = (*FALLIBLE, AS_READY_PAIR)
"""Also those whose workers only step envs."""
ALL = (*HERE, *SPREAD)
MIXED = (SINGLE, SYNC_HERE, ASYNC, AS_READY)
"""Each class, each delivery and each carrier once: for what no pair of them could do otherwise than another."""
EVERY = (*HERE, SYNC, ONE_ASYNC, PROMPT, AS_READY_SPREAD)
"""One of each: for the contract that all must keep."""


def over(kinds: Sequence[Kind], needs: str = "") -> pytest.MarkDecorator:
    """Run a test for those of `kinds` that have the abilities that it needs."""
    chosen = [kind for kind in kinds if not set(needs.split()) & set(kind.cannot)]
    assert chosen, f"none of these kinds can {needs}"
    return pytest.mark.parametrize("kind", chosen, ids=str)


def joined(module: ModuleType, twins: Mapping[str, Kind], cannot: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """The tests of `module` that run over kinds that are named in `twins`, for those twins instead.

    `cannot` names tests that are not for them, each with the reason.
    """
    found = {}
    for name, test in vars(module).items():
        marks = getattr(test, "pytestmark", []) if name.startswith("test_") and name not in cannot else []
        others = [mark for mark in marks if mark.args[:1] != ("kind",)]
        own = [twins[kind.name] for mark in marks if mark not in others for kind in mark.args[1] if kind.name in twins]
        if own:
            copy = FunctionType(test.__code__, test.__globals__, name, test.__defaults__, test.__closure__)
            copy.__dict__.update(test.__dict__, pytestmark=[*others, over(own).mark])
            found[name] = copy
    return found
