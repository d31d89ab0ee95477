"""RayReplayBuffer: a replay buffer that is an actor of a Ray cluster, for all who are given it.

NOTE [Buffer actor]: the actor holds one of our buffers. A call is a function of that buffer, on its way in a crate, as
is the answer: tensors lie in the object store, from where the storage copies what is written, and the caller what was
drawn. Who writes and who samples may have to wait for each other, and has threads of his own there.

The caller waits in short steps: it sees that the actor has ended, that Ray was shut down, and what has become of the
collectors that fill the buffer from its process. If it is not to wait for a rate limiter any more, it says so: `hurry`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.data.drawing import STALL_S
from swath.data.forms import Entries
from swath.data.pacing import LOOK_AGAIN_S, Feeder, Feeders
from swath.data.replay_buffer import ReplayBuffer
from swath.data.storages import refuse_misplaced
from swath.data.tensordict_buffers import INDEX
from swath.errors import BufferGoneError, ClosedError, NothingToSampleError
from swath.runtime.crates import Crate
from swath.runtime.faults import Failure
from swath.runtime.ray_joining import connect, imported_ray

GROUPS = {"write": 4, "sample": 4, "ask": 2}
"""The threads of an actor: one who waits there keeps only others who would wait for the same."""
LOOK_S = 0.2
"""How often one who waits for an answer looks at what else may have happened."""
OWN_OPTIONS = {
    **dict.fromkeys(("max_restarts", "max_task_retries"), "a buffer that was started again would be empty"),
    **dict.fromkeys(("max_concurrency", "concurrency_groups"), "the actor has the threads that it needs"),
}
"""Options of the actor that users cannot choose, and why."""

# -- in the actor ----------------------------------------------------------------------------------------------------


class RayStorage(NamedTuple):
    """The storage of a buffer elsewhere, as far as it can be seen here."""

    ndim: int
    max_size: int
    layout: Any


@dataclass(frozen=True)
class WriteCall:
    """Write columns."""

    entries: Entries
    shape: tuple[int, ...]
    options: dict[str, Any]

    def __call__(self, buffer: ReplayBuffer, stopping: Callable[[], bool]) -> Tensor:
        """Whatever storage the buffer has, and whatever is to be done before."""
        if buffer.takes_columns:
            return buffer.write(self.entries, self.shape, stopping=stopping, **self.options)
        data = TensorDict({}, self.shape)
        for key, entry in self.entries.items():
            data.set(key, entry)
        is_ours = self.options.keys() <= signature(buffer.extend).parameters.keys()
        return buffer.extend(data, **self.options if is_ours else {})


@dataclass(frozen=True)
class TakeCall:
    """Draw a batch."""

    size: int | None

    def __call__(self, buffer: ReplayBuffer, stopping: Callable[[], bool]) -> tuple[Any, dict[str, Any], bool]:
        """Batch, info, and whether it is the last of an epoch."""
        sampled = buffer.take(self.size, stopping)
        return sampled.batch, sampled.info, sampled.draw.ends_epoch


def _storage_of(buffer: ReplayBuffer) -> RayStorage:
    storage = buffer.storage
    return RayStorage(storage.ndim, storage.max_size, getattr(storage, "layout", None))


class BufferActor:
    """What becomes the actor; see NOTE [Buffer actor]."""

    def __init__(self) -> None:
        """Without a buffer: what goes wrong with that is told as any other error."""
        self._buffer: ReplayBuffer | None = None
        self._hurried: dict[str, bool] = {}
        """For each call that is under way, whether it is not to wait any more."""
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to what is lent

    def build(self, make: Crate) -> str | Failure:
        """Make the buffer, unless another driver has done so; where that is."""
        from swath.runtime.ray_calls import Spot

        try:
            made = make.open()() if self._buffer is None else self._buffer
            if not isinstance(made, ReplayBuffer):
                raise TypeError(f"replay_buffer_cls must make a swath.data.ReplayBuffer, got {made!r}.")
            self._buffer, spot = made, Spot.here()
            return f"pid {spot.pid} on {spot.address}"
        except Exception as error:
            return Failure.of(error)

    def ask(self, call: str, crate: Crate) -> Crate | Failure:
        """Do to the buffer what is asked for."""
        self._hurried[call] = False
        try:
            assert self._buffer is not None
            function = crate.open(borrows=self._buffer.takes_columns)
            if isinstance(function, WriteCall | TakeCall):
                return Crate.of(function(self._buffer, lambda: self._hurried[call]))
            return Crate.of(function(self._buffer))
        except Exception as error:
            return Failure.of(error)
        finally:
            del self._hurried[call]

    def hurry(self, call: str) -> None:
        """Who has asked does not wait any more."""
        if call in self._hurried:
            self._hurried[call] = True


# -- elsewhere -------------------------------------------------------------------------------------------------------


def _there(name: str, group: str = "ask") -> Any:
    """The method of that name, of the buffer in the actor."""

    @wraps(getattr(ReplayBuffer, name))
    def forward(self: RayReplayBuffer, *args: Any, **options: Any) -> Any:
        return self.ask(methodcaller(name, *args, **options), group)

    return forward


class RayReplayBuffer:
    """A replay buffer that lives in an actor of a Ray cluster, and is used as if it were here.

    It may be given to collectors and, pickled, to actors, tasks and other drivers of the cluster: all use the same
    buffer. It ends with `close()`, with the driver that has made it, or when nobody has it any more; to live on, it
    needs `remote_config={"name": ..., "namespace": ..., "lifetime": "detached"}`, and with `"get_if_exists": True`
    another driver that makes one of the same name gets the one that is there.

    Args:
        replay_buffer_cls: makes the buffer, in the actor: a class of buffers, or a function.
        ray_init_config: arguments for `ray.init`, as for `RayCollector`.
        remote_config: options of the actor: what Ray must have for it (`num_cpus`, 0 by default, `memory`,
            `resources`), and where it is placed (`scheduling_strategy`).
        start_timeout_s: how long Ray may take to start it.
        options: arguments of the buffer; see `ReplayBuffer`. They are sent to the actor.
    """

    takes_columns = True
    """Collectors hand over their columns; the actor knows what its buffer takes."""

    def __init__(
        self,
        *misplaced: NoReturn,
        replay_buffer_cls: Callable[..., ReplayBuffer] = ReplayBuffer,
        ray_init_config: dict[str, Any] | None = None,
        remote_config: dict[str, Any] | None = None,
        start_timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        refuse_misplaced(type(self).__name__, misplaced)
        wants = {"num_cpus": 0, **(remote_config or {})}
        if refused := sorted(wants.keys() & set(OWN_OPTIONS)):
            raise ValueError(f"remote_config cannot have {refused}: {OWN_OPTIONS[refused[0]]}.")
        make = Crate.of(partial(replay_buffer_cls, **options))
        connect(ray_init_config or {})
        from swath.runtime.ray_calls import first_answer

        kind = imported_ray().remote(concurrency_groups=GROUPS, max_restarts=0, max_task_retries=0)(BufferActor)
        self._use(kind.options(**wants).remote(), "not started yet")
        with self._reaching():
            answer = self._actor.build.remote(make)
            answer = first_answer(answer, wants, start_timeout_s, "replay buffer", "remote_config")
        self._where = _understood(answer)

    def _use(self, actor: Any, where: str) -> None:
        self._actor, self._where, self._is_closed = actor, where, False
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        self._sources: dict[Any, int] = {}
        self._feeders = Feeders()

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """A context in which the actor is called."""
        from swath.runtime.ray_calls import FAILURES, check_ray, said_of

        try:
            check_ray()
            if self._is_closed:  # the actor may answer for a moment more
                raise ClosedError("It was closed here")
            yield
        except TimeoutError:
            raise
        except FAILURES as error:
            raise BufferGoneError(
                f"The actor of a RayReplayBuffer ({self._where}) cannot be reached: {said_of(error)}. Was it closed, "
                "was Ray shut down, has its machine no memory left? If it has ended, what it held is lost; what was "
                "saved by dumps() can be loaded into a new one."
            ) from error

    def ask(
        self, function: Callable[..., Any], group: str = "ask", *, stopping: Callable[[], bool] | None = None
    ) -> Any:
        """What `function`, which is sent there, makes of the buffer.

        `group` says whose threads it takes there, see `GROUPS`; `stopping` is as for `ReplayBuffer.write`.
        """
        from swath.runtime.ray_calls import get, wait

        call, crate = f"{self._name} {next(self._numbers)}", Crate.of(function, is_lent=group == "write")
        with self._reaching():
            answer = self._actor.ask.options(concurrency_group=group).remote(call, crate)
        while True:
            with self._reaching():
                if wait([answer], timeout=LOOK_S)[0]:
                    crate = get(answer)
                    break
            if stopping is not None and stopping():
                with self._reaching():
                    self._actor.hurry.options(concurrency_group="ask").remote(call)
        return _understood(crate).open()

    # -- writing -----------------------------------------------------------------------------------------------

    add = _there("add", "write")

    def extend(self, data: Any, *, source: Any = None, seams: np.ndarray | None = None, **options: Any) -> Tensor:
        """Write a batch of frames; returns where they lie. See `ReplayBuffer.extend`."""
        told = {} if source is seams is None else {"source": self._known(source), "seams": seams}
        found: Tensor = self.ask(methodcaller("extend", data, **told, **options), "write")
        return found

    def write(
        self,
        entries: Entries,
        shape: Sequence[int],
        *,
        seams: np.ndarray | None = None,
        source: Any = None,
        stopping: Callable[[], bool] | None = None,
    ) -> Tensor:
        """Write tensors by key; see `ReplayBuffer.write`."""
        call = WriteCall(dict(entries), tuple(shape), {"seams": seams, "source": self._known(source)})
        found: Tensor = self.ask(call, "write", stopping=stopping)
        return found

    def _known(self, source: Any) -> tuple[str, int]:
        """A source of this process as the actor knows it."""
        return self._name, self._sources.setdefault(source, len(self._sources))

    # -- sampling ----------------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: Any = None) -> Any:
        """A batch of `batch_size` frames; see `ReplayBuffer.sample`."""
        batch, info, _ = self._take(batch_size)
        return (batch, info) if return_info else batch

    def _take(self, size: int | None = None) -> tuple[Any, dict[str, Any], bool]:
        deadline = time.monotonic() + STALL_S
        while True:
            self._feeders.raise_failure()
            is_fed = self._feeders.are_feeding()  # asked before: what is written until then is seen
            try:
                taken: tuple[Any, dict[str, Any], bool] = self.ask(TakeCall(size), "sample", stopping=self._is_unfed)
                return taken
            except NothingToSampleError:
                self._feeders.raise_failure()
                if not is_fed or time.monotonic() > deadline:
                    raise
            time.sleep(LOOK_AGAIN_S)

    def _is_unfed(self) -> bool:
        self._feeders.raise_failure()
        return self._feeders.have_ended()

    next = ReplayBuffer.next

    def __iter__(self) -> Iterator[Any]:
        """Batches: one epoch of them without replacement, without end otherwise."""
        is_last = False
        while not is_last:
            try:
                batch, _, is_last = self._take()
            except NothingToSampleError:
                if not len(self):
                    raise
                return
            yield batch

    update_priority = _there("update_priority")

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sample the frames of `data`, a batch of this buffer, by the priorities in it."""
        known = data.select(INDEX, self.ask(attrgetter("priority_key")), strict=False)  # the rest need not go there
        self.ask(methodcaller("update_tensordict_priority", known))

    set_sampler = _there("set_sampler")

    # -- contents ----------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int | None:
        """How many frames `sample()` draws."""
        found: int | None = self.ask(attrgetter("batch_size"))
        return found

    @property
    def storage(self) -> RayStorage:
        """What can be seen here of where frames lie, at this moment."""
        return RayStorage(*self.ask(_storage_of))

    def __len__(self) -> int:
        """How many frames can be sampled."""
        return int(self.ask(len))

    @property
    def write_count(self) -> int:
        """How many frames were ever written, since the buffer was last emptied."""
        return int(self.ask(attrgetter("write_count")))

    def __getitem__(self, index: Any) -> Any:
        """Copies of frames by where they lie; see `ReplayBuffer`."""
        return self.ask(itemgetter(index))

    __setitem__ = _there("__setitem__")
    empty, stats = _there("empty"), _there("stats")
    state_dict, load_state_dict = _there("state_dict"), _there("load_state_dict")

    def dumps(self, path: str | Path) -> None:
        """Save to the directory `path` of the machine where the actor runs."""
        self.ask(methodcaller("dumps", os.path.abspath(path)))

    def loads(self, path: str | Path) -> None:
        """Load what `dumps` has saved, from that machine."""
        self.ask(methodcaller("loads", os.path.abspath(path)))

    dump, load, save = dumps, loads, dumps

    # -- those who fill it, and the end ------------------------------------------------------------------------

    enrol = _there("enrol")

    def attach(self, feeder: Feeder) -> None:
        """Know of a feeder of this process: `sample` waits for it here, and raises its errors."""
        self._feeders.add(feeder)

    def detach(self, feeder: Feeder) -> None:
        """Forget a feeder."""
        self._feeders.remove(feeder)

    def close(self) -> None:
        """End the actor, for all who use it; what it holds is gone. May be called again."""
        from swath.runtime.ray_calls import kill

        with contextlib.suppress(BufferGoneError), self._reaching():
            kill(self._actor)
        self._is_closed = True

    shutdown = close

    def __enter__(self) -> RayReplayBuffer:
        """Itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a way to the same actor."""
        return _at_hand, (self._actor, self._where)

    def __repr__(self) -> str:
        """Where it is."""
        return f"RayReplayBuffer({self._where})"


def _understood(answer: Any) -> Any:
    """An answer of the actor, if it is none that tells of an error."""
    if isinstance(answer, Failure):
        raise answer.error("Raised by the buffer of a RayReplayBuffer, in its actor.")
    return answer


def _at_hand(actor: Any, where: str) -> RayReplayBuffer:
    made = RayReplayBuffer.__new__(RayReplayBuffer)
    made._use(actor, where)
    return made


OwnBuffer = ReplayBuffer | RayReplayBuffer
"""What collectors need not treat as a stranger."""
