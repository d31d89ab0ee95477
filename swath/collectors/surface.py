"""BaseCollector: the public surface of all collectors, once.

A collector has a delivery, a delivery has a pool of workers, and a pool has a carrier: see `docs/design.md`. What is
asked of a collector is asked of its workers, one in this process or several elsewhere, in the same way.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from swath.collectors.config import DEVICES, CommonConfig, Transform
from swath.collectors.control import Control
from swath.collectors.delivery import Part
from swath.collectors.first_come import FirstCome
from swath.collectors.free_running import FreeRunning
from swath.collectors.joining import alone, each_part
from swath.collectors.pausing import Pause
from swath.collectors.progress import Progress
from swath.collectors.reflection import argument
from swath.collectors.worker import Call, EngineJob
from swath.data.ray_buffer import OwnBuffer
from swath.errors import ClosedError, EndlessError
from swath.rollout.slots import named_batch
from swath.runtime.columns import Columns

Self = TypeVar("Self", bound="BaseCollector")
NOTICE_S = 1.0
"""How long a question after the background waits for a death to be dealt with."""
EXIT_S = 2.0
"""How long the workers of all collectors may take to close their envs when the interpreter exits."""


class BaseCollector(Control, IterableDataset[Any]):
    """Iterating over a collector gives batches of experience.

    Use it in a `with` block, or call `shutdown()` at the end. `for`, `iter`/`next` and `.next()` all continue the same
    stream; leaving a loop early leaves the collector usable.
    """

    config_class: ClassVar[type[CommonConfig]] = CommonConfig
    """Its fields are the arguments of the constructor."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the fields of the config where the arguments of the class are asked for, and as attributes."""
        super().__init_subclass__(**kwargs)
        cls.__signature__ = inspect.signature(cls.config_class)  # type: ignore[attr-defined]
        for field in fields(cls.config_class):
            if not hasattr(cls, field.name):
                setattr(cls, field.name, argument(field.name))

    def __init__(self, config: CommonConfig) -> None:
        """Keep the checked `config`; a subclass makes the rest and then calls `_open`."""
        super().__init__(config)
        self._transform = Transform(bool(config.split_trajs), config.postproc).if_any()
        self._stream: Iterator[TensorDictBase | None] | None = None
        self._same: TensorDictBase | None = None
        self._storing: dict[int, torch.device | None] = {}
        self._moves = any(getattr(config, name) is not None for name in DEVICES)
        """Whether batches may have to be moved to another device."""
        self._owner, self._is_fork = os.getpid(), False
        self._closing = threading.RLock()
        self._consuming, self._taking = threading.RLock(), threading.RLock()
        """Held while a batch is made: threads that ask for one get theirs in turn."""
        self._is_reported = False
        """Whether a failure has reached the user."""

    def _open(self) -> None:
        self.closed = False
        _open_collectors.add(self)

    # -- iterating ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Batches until `total_frames` are delivered; after an error, everything is shut down.

        With a replay buffer, None after each batch that was written to it.
        """
        self._must_not_be_making()
        self._iterating = True
        by_frames = self.config.trajs_per_batch is None or self.config.replay_buffer is not None
        source = self.iterator() if by_frames else self._whole_episodes()
        try:
            with Progress(self) if self.config.progress else contextlib.nullcontext() as progress:
                # No name for the batch: while the consumer has it, nothing here may keep it from being let go.
                yield from source if progress is None else map(progress.passed, source)
        except GeneratorExit:  # the consumer has left the loop, and may come back
            raise
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Fixed-frame batches until the budget is spent, whatever `trajs_per_batch` says."""
        self._must_not_run()
        if self._sink is not None:
            return map(self._sink.take, self._parts())
        if self.config.replay_buffer is not None:
            return (None for _ in self._parts())
        is_plain = self._transform is None and not self.config.return_same_td
        # A loop would keep hold of the last batch.
        return map(self._assemble if is_plain else self._deliver, self._parts())

    def _parts(self) -> Iterator[list[Part]]:
        """The parts of each batch, until the budget is spent, which shuts down."""
        if self.closed and not self._delivery.budget.is_spent:
            self._must_be_open()
        while not self.closed:
            if self._free is not None or self._pool.failure is not None or self._is_fork:
                self._must_be_open()
                self._must_not_run()
            self._weights.at_batch("before")
            with self._consuming:
                parts = self._delivery.next()
            if parts is None:
                break
            yield parts
            del parts  # its claims to slots
            if not self.closed and self._weights.is_periodic:
                self._weights.at_batch("after")
        self._end()

    def _must_not_be_making(self) -> None:
        if self._consuming._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "A batch was asked for while this very thread makes one, as by a signal handler or a hook: let it set "
                "a flag, and look at that between two batches."
            )

    def _assemble(self, parts: list[Part]) -> TensorDictBase:
        """The batch of these parts, before any post-processing, where it is to lie."""
        batch = alone(parts[0], self._delivery.terms.layout.delivered)
        return self._stored(batch, parts[0].index) if self._moves else batch

    def _stored(self, batch: TensorDictBase, worker: int = 0) -> TensorDictBase:
        if worker not in self._storing:
            self._storing[worker] = self.config.devices_of(worker).storing
        device = self._storing[worker]
        return batch if device is None else batch.to(device, non_blocking=self.config.no_cuda_sync)

    def fake_tensordict(self) -> TensorDictBase:
        """Zeros with exactly the layout of a batch."""
        terms = self._delivery.terms
        return self._zeros((*terms.layout.batch_size, terms.steps[0]))

    def _zeros(self, batch_size: tuple[int, ...]) -> TensorDictBase:
        layout = self._delivery.terms.layout
        leaves = {key: layout.leaves[key] for key in layout.delivered}
        return self._stored(named_batch(Columns(leaves, batch_size).tensors, batch_size))

    def _deliver(self, parts: list[Part]) -> TensorDictBase:
        batch = self._assemble(parts)
        batch = batch if self._transform is None else self._transform(batch)
        if not self.config.return_same_td:
            return batch
        if self._same is None:
            self._same = batch.apply(torch.clone)
        elif self._same.shape == batch.shape:
            self._same.update_(batch)
        else:  # a shorter one, as the last may be
            return batch
        return self._same

    def _whole_episodes(self) -> Iterator[TensorDictBase]:
        """Batches of `trajs_per_batch` complete episodes, in the order in which they ended."""
        self._must_not_run()
        count, form = self.config.trajs_per_batch, self.config.traj_format or "padded"
        assert count is not None
        source = self._parts()
        while True:
            while taken := self._taken_episodes(count, form):  # also what an earlier loop has left
                yield taken.pop() if self._transform is None else self._transform(taken.pop())
            if next(map(self._cut, source), None) is None:
                break
        self._episodes.clear()

    def _taken_episodes(self, count: int, form: str) -> list[TensorDictBase]:
        """A batch of them, if there are enough."""
        with self._cutting:
            has_enough = self._episodes.ready >= count and not self.closed
            return [self._episodes.take(count, form)] if has_enough else []

    def _cut(self, parts: list[Part]) -> bool:
        """Cut the parts of a batch into episodes: frames are copied, so that the slot may be used for the next."""
        with self._cutting:
            for part, batch in zip(parts, each_part(parts, self._delivery.terms.layout.delivered), strict=True):
                receipt = part.collected
                stored = self._stored(batch, part.index)
                self._episodes.add(stored, source=part.index, begin=receipt.begin, running=receipt.running)
            waiting = {part.index for part in list(self._pool.finished)}
            for worker in set(range(self.num_workers)) - set(self._pool.indices) - waiting:  # it was dropped
                self._episodes.forget(worker)
        return True

    def _end(self) -> None:
        """All frames are collected: the workers are no longer needed."""
        self.raise_failure()
        if not self.closed:
            if self._sink is not None:
                self._sink.finish()
            elif self.config.replay_buffer is not None:
                self._ask(Call(EngineJob.finish_episodes))
            if not self._is_direct:
                with contextlib.suppress(Exception):  # of a worker that fails when it is no longer needed
                    self._last_state = self.state_dict()
            self.shutdown()

    def next(self) -> TensorDictBase | None:
        """The next batch, or None when there are no more (and always with a replay buffer)."""
        self._must_not_be_making()
        with self._taking:
            return self._take()

    def _take(self) -> TensorDictBase | None:
        if self._stream is None:
            self._stream = iter(self)
        try:
            return next(self._stream)
        except BaseException as error:  # nothing more comes of a stream that has raised
            self._stream = None
            if isinstance(error, StopIteration):
                return None
            raise

    def rollout(self) -> TensorDictBase:
        """One batch as it was collected, before any post-processing; also when `total_frames` are collected."""
        self._must_not_be_making()
        self._must_not_run()
        self._must_be_open()
        if self._sink is not None:
            self._sink.interrupt()
        elif self.config.replay_buffer is not None:
            self._ask(Call(EngineJob.break_off))  # these frames do not go there
        try:
            self._weights.at_batch("before")
            with self._consuming:
                parts = self._delivery.rollout()
            return self._assemble(parts)
        except BaseException:  # what was raised here may have nothing to do with workers elsewhere
            if self._pool.carrier.is_local or self._pool.failure is not None:
                self.shutdown(raise_on_error=False)
            raise

    def __len__(self) -> int:
        """Number of batches; endless collectors have none, and nobody knows ahead how many episodes there will be."""
        if self.config.total_frames < 0:
            raise EndlessError("An endless collector (total_frames=-1) has no length.")
        if self.config.trajs_per_batch is not None:
            raise EndlessError("How many batches of whole episodes there will be is not known: there is no length.")
        return -(-self.config.total_frames // self.requested_frames_per_batch)

    def __bool__(self) -> bool:
        """A collector is something, whatever its length."""
        return True

    @property
    def replay_buffer(self) -> Any:
        """The buffer that is written to, if there is one."""
        return self.config.replay_buffer

    # -- in the background -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in the background, until `total_frames` are collected or it is shut down.

        The policy that acts is a copy: what is trained meanwhile counts when `update_policy_weights_` publishes it.
        What goes wrong is raised by `sample()` of the buffer, `is_running()` and `async_shutdown()`.
        """
        if self.config.replay_buffer is None:
            raise RuntimeError(
                f"{type(self).__name__}.start() collects in the background into a replay buffer, but has none: iterate "
                "over the collector instead."
            )
        self._must_be_open()
        if self._free is not None:
            self._free.raise_failure()
            return
        self._iterating, self._stream = True, None
        before = self._delivery
        before.settle()  # what somebody has iterated over is in the buffer, and counts
        if self._pool.carrier.is_local:
            self._ask(Call(EngineJob.move_to_thread))
        slots = getattr(self.config, "slots_per_worker", 1)
        free = FirstCome(self._pool, before.terms, before.budget, slots_per_worker=slots)
        free.take_over(before)
        self._delivery, pool = free, self._pool
        self._roster.watch(pool, free)
        notice, sink = self._weights.notice_training, self._sink
        if sink is None:
            call = Call(EngineJob.finish_episodes)
            self._free = FreeRunning(free, repr(self), lambda: pool.ask(dict.fromkeys(pool.indices, call), ""), notice)
        else:
            self._free = FreeRunning(free, repr(self), sink.finish, notice, sink.take)
            sink.stopping = self._free.is_wanted
        if isinstance(self.config.replay_buffer, OwnBuffer):
            self.config.replay_buffer.attach(self)
        self._weights.free = self._free
        self._free.start()

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """A context in which background collection rests: nothing is written, and everything may be asked of it."""
        if self._free is None:
            raise RuntimeError("pause() is for a collector that runs in the background: start() it first.")
        return Pause(self._at_rest)

    def is_running(self) -> bool:
        """Whether it collects in the background; raises what went wrong there."""
        if self._free is None or self.closed:
            self.raise_failure()
            return False
        self._notice_deaths()
        is_alive = self._free.is_alive  # first: a thread that has ended since then has left its error
        self.raise_failure()
        if not is_alive and self._free.is_finished:
            self._end()
        return is_alive

    def _notice_deaths(self) -> None:
        """Let the thread that attends to workers deal with those that have just died."""
        if self._free is None:
            return
        deadline, carrier = time.monotonic() + NOTICE_S, self._pool.carrier
        while self._free is not None and self._free.is_alive and time.monotonic() < deadline:
            missing = len(carrier.workers) - len(carrier.alive())
            if self._free.is_here or missing <= len(self._pool.replacements):
                return
            time.sleep(0.005)

    def is_feeding(self) -> bool:
        """Whether more frames may come into the replay buffer. For the buffer; users ask `is_running`."""
        return self._free is not None and not self.closed and self._free.is_busy

    def raise_failure(self) -> None:
        """Raise what went wrong, if something did. The buffer asks too, whenever it is sampled."""
        if self._free is not None and self._free.error is not None:
            self._is_reported = True
            if not self._pool.carrier.is_local and not self._pool.is_closed:
                self._pool.shutdown(None)  # the buffer goes on to tell of the failure until the user shuts down
            self._free.raise_failure()
        if self._pool.failure is not None:
            self._is_reported = True
            if self._free is not None:
                self._free.mark_reported()
            raise self._pool.failure

    def _must_not_run(self) -> None:
        if self.is_feeding():
            raise RuntimeError(
                "This collector runs in the background: sample from its replay buffer, or use it inside `with "
                "collector.pause():`."
            )

    def _must_be_open(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError(f"This collector belongs to the process {self._owner}, of which this one is a fork.")
        if not self.closed:
            self._notice_deaths()
        self.raise_failure()
        if self.closed:
            raise ClosedError("This collector is shut down; make a new one.")

    # -- the end -----------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop and free everything, within `timeout` seconds whatever the workers do; see NOTE [Shutdown].

        May be called again, and after any error. `close_env=False` leaves an env of this process open.
        """
        if not close_env and not self._is_direct:
            raise RuntimeError("The envs of workers end with them: shutdown(close_env=False) cannot be.")
        if os.getpid() != self._owner:  # a forked child, which has no part in its parent's workers
            self.closed = True
            return
        if raise_on_error and not self.closed:
            self._notice_deaths()
        with self._closing:  # another thread may be at it: then it is over when that one is done
            was_open, self.closed, self._stream = not self.closed, True, None
            try:
                self._shut_down(timeout, close_env, was_open)
            except Exception:
                if raise_on_error:
                    raise
            free = self._free
            if free is not None and not free.is_here:
                if isinstance(self.config.replay_buffer, OwnBuffer):
                    self.config.replay_buffer.detach(self)
                if self._is_reported:
                    free.mark_reported()
                elif raise_on_error and not free.is_reported:
                    self._is_reported = True
                    free.raise_failure()
                free.complain()

    def _shut_down(self, timeout: float | None, close_env: bool, was_open: bool) -> None:
        """Stop threads and workers; again, if something was left to do."""
        raise NotImplementedError

    _is_direct = False
    """Whether env and policy are objects of this process, which the user may hold when the collector is gone."""

    @classmethod
    def adapt_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments as this class understands them, before they are checked."""
        return arguments

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down a collector that was started in the background; raises what went wrong there."""
        self.shutdown(timeout=timeout, close_env=close_env)
        if not self._is_reported:
            self.raise_failure()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse `copy`, `deepcopy` and `pickle`, which all begin here."""
        raise TypeError(
            f"{self!r} cannot be copied or pickled: its workers and memory are there once, and its copy would end "
            "them. Make another, and give it collector.state_dict() with load_state_dict()."
        )

    def __enter__(self: Self) -> Self:
        """Use the collector in a `with` block, at whose end it is shut down."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """Shut down; nothing that goes wrong then hides the error that ended the block."""
        self.shutdown(raise_on_error=kind is None)

    def __del__(self) -> None:
        """Free what a forgotten `shutdown` left; at the interpreter's end, others see to it."""
        if not getattr(self, "closed", True) and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.shutdown(close_env=not self._is_direct, raise_on_error=False)


_open_collectors: weakref.WeakSet[BaseCollector] = weakref.WeakSet()


def _begin_in_child() -> None:
    """Tell those of which this process has a copy by a fork: to ask for its number takes a while, in every batch."""
    for collector in list(_open_collectors):
        collector._is_fork = True


os.register_at_fork(after_in_child=_begin_in_child)


@atexit.register
def _shut_down_forgotten() -> None:
    """Before the interpreter is taken down: workers get the chance to close their envs."""
    deadline = time.monotonic() + EXIT_S
    for collector in list(_open_collectors):
        collector.shutdown(timeout=max(0.0, deadline - time.monotonic()), raise_on_error=False)
