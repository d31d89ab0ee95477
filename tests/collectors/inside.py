"""The one file of these tests that looks behind the public surface: where a thing lies may change, here alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tensordict import TensorDictBase

from swath.collectors import free_running, progress
from swath.collectors.arguments import SYNONYMS
from swath.errors import RemoteTraceback, StallWarning, WorkerDiedError, WorkerError
from swath.keys import TRAJ_IDS, WORKER_BITS
from swath.runtime import process
from swath.runtime.paths import follow

OLD_NAMES = SYNONYMS
"""Arguments of older versions, and what they are called now."""
SWITCH_S = free_running.SWITCH_S
"""How often threads take turns while a collector runs in the background."""
__all__ = [
    "OLD_NAMES",
    "SWITCH_S",
    "WORKER_BITS",
    "RemoteTraceback",
    "StallWarning",
    "WorkerDiedError",
    "WorkerError",
    "follow",
]

PATIENCE = "swath.data.drawing.PATIENCE_S"
"""How long `sample()` waits for slices that do not come."""


# -- ids -----------------------------------------------------------------------------------------------------------


def worker_of(batch: TensorDictBase) -> int:
    """The number of the worker that has collected a batch, which its ids tell."""
    (number,) = (batch.get(TRAJ_IDS) >> WORKER_BITS).unique().tolist()
    return int(number)


# -- workers -------------------------------------------------------------------------------------------------------


def forbid_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a worker that is started fails the test."""
    monkeypatch.setattr("swath.runtime.pool.Pool.start", lambda self: pytest.fail("a worker is started"))


def take_in_news(collector: Any) -> None:
    """Let the collector see what its workers have sent, without asking for a batch."""
    collector._pool.attend(0.01)


def cut_off(collector: Any, worker: int) -> None:
    """End a worker at once, without a word to it."""
    collector._pool.carrier.kill(worker)


def has_named_a_stall(collector: Any) -> bool:
    return bool(collector._pool._stalled)


def open_questions(collector: Any) -> int:
    """How many questions and answers are kept for whoever asked."""
    return len(collector._pool._asked) + len(collector._pool._answers)


def send_to_worker(collector: Any, worker: int, message: Any, timeout_s: float) -> None:
    collector._pool.carrier._processes[worker].channel.send(message, timeout_s=timeout_s)


def server_of_workers() -> Any:
    """The process from which workers are forked, as a `Popen`."""
    return process._servers["forkserver"]._popen


def server_pids() -> set[int]:
    return {server._popen.pid for server in process._servers.values()}


# -- memory --------------------------------------------------------------------------------------------------------


def _arenas(collector: Any) -> list[Any]:
    return list(collector._delivery._arenas.values())


def slots_allocated(collector: Any) -> list[int]:
    """How many slots were ever allocated, by worker or for all."""
    return [arena.allocated for arena in _arenas(collector)]


def count_in_between(collector: Any, key: object, do: Callable[[], Any]) -> None:
    """Let the collector have one more arena, which does something whenever its slots are counted."""

    class Counted:
        @property
        def allocated(self) -> int:
            do()
            return 0

    collector._delivery._arenas[key] = Counted()


def slots_held(collector: Any) -> int:
    """How many slots there are now."""
    return sum(len(arena) for arena in _arenas(collector))


def slots_known_to_workers(collector: Any) -> int:
    """The most slots that any worker has memory of."""
    return max(len(known) for known in collector._pool.carrier._known.values())


def slots_of(collector: Any) -> list[Any]:
    """The slots; each tells `is_free`."""
    return [slot for arena in _arenas(collector) for slot in (*arena._in_use, *arena._free)]


def newest_slot(collector: Any) -> dict[Any, Any]:
    """The columns of the slot that was delivered last."""
    (arena,) = _arenas(collector)
    return arena._in_use[-1].tensors


# -- the collector in this process ---------------------------------------------------------------------------------


def exchange_policy(collector: Any, policy: Any) -> None:
    """Let the collector act with a copy of its own, as `policy_device` does where there is another device."""
    collector.engine.policy = policy
    collector.engine._loop.policy.exchange(policy)


def recent_episodes(collector: Any) -> tuple[list[int], list[float]]:
    """Lengths and returns of the last episodes."""
    stats = collector.engine._loop.stats
    return list(stats.lengths), list(stats.returns)


def versions_of_workers(collector: Any) -> set[int]:
    return set(collector.get_distant_attr("engine.version"))


def resting(collector: Any, timeout_s: float) -> AbstractContextManager[Any]:
    """`pause()` that waits no longer than so."""
    return collector._free.resting(timeout_s)


def steps_made(env: Any) -> int:
    """How many steps a counting env with one lane has made in its episode."""
    return int(env._count)


# -- bars ----------------------------------------------------------------------------------------------------------


@contextmanager
def tqdm_replaced(make: Callable[[Any], Callable[..., Any]]) -> Iterator[Any]:
    """Bars are made by `make(tqdm)`."""
    with pytest.MonkeyPatch.context() as patch:
        made = make(progress.tqdm)
        patch.setattr(progress, "tqdm", made)
        yield made
