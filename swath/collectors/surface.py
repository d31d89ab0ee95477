"""BaseCollector: the public surface of all collectors, once.

A collector has a delivery, a delivery has a pool of workers, and a pool has a carrier: see `docs/design.md`. What is
asked of a collector is asked of its workers, one in this process or several elsewhere, in the same way.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from swath.collectors.config import DEVICES, CommonConfig, Transform
from swath.collectors.delivery import Part
from swath.collectors.joining import alone, each_part
from swath.collectors.lifecycle import Lifecycle
from swath.collectors.progress import Progress
from swath.collectors.reflection import argument
from swath.collectors.worker import Call, EngineJob
from swath.errors import EndlessError
from swath.rollout.slots import named_batch
from swath.runtime.columns import Columns


class BaseCollector(Lifecycle, IterableDataset[Any]):
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
        self._same: TensorDictBase | None = None
        self._storing: dict[int, torch.device | None] = {}
        self._moves = any(getattr(config, name) is not None for name in DEVICES)
        """Whether batches may have to be moved to another device."""
        self._consuming, self._taking = threading.RLock(), threading.RLock()
        """Held while a batch is made: threads that ask for one get theirs in turn."""

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

    def next(self) -> TensorDictBase | None:
        """The next batch, or None when there are no more (and always with a replay buffer)."""
        self._must_not_be_making()
        with self._taking:
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

    @classmethod
    def adapt_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments as this class understands them, before they are checked."""
        return arguments
