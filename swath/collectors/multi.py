"""Collectors with workers: in processes of their own or, with `debug=True`, in this one."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn

from swath.collectors.arguments import fixed, takes
from swath.collectors.buffer_sink import BufferSink
from swath.collectors.delivery import Barrier, Delivery, Part, Terms
from swath.collectors.first_come import FirstCome
from swath.collectors.joining import STACK, joined, named
from swath.collectors.multi_config import MultiConfig
from swath.collectors.roster import Roster
from swath.collectors.surface import BaseCollector
from swath.collectors.weights_control import WeightsControl
from swath.collectors.worker import FIELDS, BatchLayout, Call, EngineJob
from swath.data import ReplayBuffer
from swath.envs.env_layout import difference
from swath.errors import EndlessError
from swath.modules.stages import StageName
from swath.rollout.budget import FrameBudget
from swath.runtime.carrier import Carrier
from swath.runtime.local import LocalCarrier
from swath.runtime.pool import Pool
from swath.runtime.processes import ProcessCarrier
from swath.weights import Publisher

Kind = TypeVar("Kind", bound="MultiCollector")


class MultiCollector(BaseCollector):
    """Runs a policy in envs, in several processes; `sync` chooses how their batches are delivered.

    `MultiCollector(..., sync=True)` makes a `MultiSyncCollector`, `sync=False` a `MultiAsyncCollector`. Env factories
    and policy are sent to the workers by value: no `if __name__ == "__main__"` is needed. Workers act with copies of
    the policy: `update_policy_weights_` publishes new weights.

    See `MultiConfig` for the arguments.
    """

    config_class = MultiConfig
    config: MultiConfig
    process_carrier: ClassVar[type[ProcessCarrier]] = ProcessCarrier

    def __new__(cls: type[Kind], *args: Any, sync: bool | None = None, **options: Any) -> Kind:
        """The kind of collector that `sync` asks for."""
        if cls is not MultiCollector:
            return super().__new__(cls)
        if not isinstance(sync, bool):
            raise TypeError(
                "MultiCollector needs sync=True (all workers contribute to each batch) or sync=False (first come, "
                f"first served), got sync={sync!r}."
            )
        kind: Any = MultiSyncCollector if sync else MultiAsyncCollector
        made: Kind = kind.__new__(kind)
        return made

    @takes(MultiConfig)
    def __init__(self, config: MultiConfig) -> None:
        """Start the workers, and wait until each has made its env and policy."""
        self._set_up(config)

    def _set_up(self, config: MultiConfig) -> None:
        BaseCollector.__init__(self, config)
        self._share_buffer()
        self._threads: int | None = None
        self._roster = Roster(config, self._policy_to_send(config.policy))
        carrier = self.make_carrier(config)
        self._pool: Pool[Part] = Pool(carrier, config.workers, self._roster, config.supervision, repr(self))
        publisher = self._roster.publisher = Publisher(carrier)
        when = "before" if config.sync else "after"
        self._weights = WeightsControl(
            self._pool, publisher, config.policy, config.workers, when, config.publish_interval
        )
        self._open()
        try:
            self._pool.start()
            terms = self._terms(publisher)
            self._delivery = self._new_delivery(terms)
            self._roster.watch(self._pool, self._delivery)
            if config.replay_buffer is not None and not config.workers_write:
                self._sink = BufferSink(config, terms, self._episodes)
            self._weights.publish_first(terms.layout.policy, isinstance(config.policy_factory, list | tuple))
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise
        self._warn_of_rounding()
        if config.num_threads is not None:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(config.num_threads)

    def make_carrier(self, config: MultiConfig) -> Carrier:
        """What carries commands, batches and weights: a subclass may have workers elsewhere."""
        if config.debug:
            return LocalCarrier(config.workers, FIELDS)
        import swath

        return self.process_carrier(
            config.workers,
            FIELDS,
            method=config.mp_start_method or "forkserver",
            threads=config.num_sub_threads,
            warns=not swath.filter_warnings_subprocess,
            start_s=config.start_timeout_s,
        )

    def _share_buffer(self) -> None:
        buffer = self.config.replay_buffer
        if not self.config.workers_write:
            return
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(
                f"Workers can only write to a buffer that they share: use swath.data.ReplayBuffer(shared=True), got "
                f"{type(buffer).__name__}."
            )
        if not buffer.is_shared:
            buffer.share()

    def _policy_to_send(self, policy: Any) -> Callable[[], Any]:
        """The policy as it is sent to workers: from an accelerator's memory it goes by way of the CPU's."""
        if self.config.policy_factory is not None:
            return lambda: None
        if isinstance(policy, nn.Module):
            tensors = (*policy.parameters(), *policy.buffers())
            if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors):
                policy = copy.deepcopy(policy).to("cpu")
            if self.config.debug:  # others are copied on their way
                return lambda: copy.deepcopy(policy)
        return lambda: policy

    def _terms(self, publisher: Publisher) -> Terms:
        """What follows from what the workers have said of themselves."""
        config, first = self.config, self._pool.started[0]
        assert isinstance(first, BatchLayout)
        for index in self._pool.started:
            self._check_layout(index, first)
        lanes = math.prod(first.batch_size)
        steps = {index: -(-config.frames_of(index) // lanes) for index in range(config.workers)}
        return Terms.of(config, first, steps, publisher)

    def _check_layout(self, index: int, first: BatchLayout) -> None:
        """Refuse a worker whose batches do not look like those of the first."""
        layout = self._pool.started[index]
        assert isinstance(layout, BatchLayout)
        both = (("batch_size", first.batch_size, layout.batch_size), ("entries", first.leaves, layout.leaves))
        for what, wanted, given in both:
            if wanted != given:
                raise ValueError(
                    f"All workers must produce batches of one layout, but worker {index} ({layout.env}) differs "
                    f"from worker 0 ({first.env}) in its {what}: {difference(given, wanted)}."
                )

    def _new_delivery(self, terms: Terms) -> Delivery:
        raise NotImplementedError

    def _warn_of_rounding(self) -> None:
        config, lanes = self.config, self._delivery.terms.lanes
        asked = [config.frames_of(index) for index in range(config.workers)]
        frames = config.frames_per_batch
        is_split = config.sync and isinstance(frames, int) and sum(asked) != frames
        if any(count % lanes for count in asked) or is_split:
            warnings.warn(
                f"frames_per_batch={frames} is rounded up to {self.requested_frames_per_batch}, whole steps of {lanes} "
                "lanes of each worker.",
                stacklevel=4,
            )
        unit = self._delivery.budget.lanes
        if config.total_frames > 0 and config.total_frames % unit:
            warnings.warn(
                f"total_frames={config.total_frames} is rounded up to whole steps of {unit} lanes.", stacklevel=4
            )

    def _shut_down(self, timeout: float | None, close_env: bool, was_open: bool) -> None:
        if not was_open:
            return
        free = self._free
        if free is not None:
            free.ask_to_stop()
        self._pool.shutdown(timeout)
        if free is not None:
            free.stop(timeout)
            self._pool.shutdown(timeout)  # also what it has started meanwhile
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None

    def __repr__(self) -> str:
        config = self.config
        return (
            f"{type(self).__name__}({config.workers} workers, policy={type(config.policy).__name__}, "
            f"frames_per_batch={config.frames_per_batch}, total_frames={config.total_frames})"
        )

    @property
    def policy_stages(self) -> list[StageName]:
        """How the policy ran in the last batch, or will run in the first: by which stages, in worker 0.

        `MLPStage` and sampling stages are quick. Those that call a module are slower, and are shown with the reason.
        """
        return self._first(Call(EngineJob.tell_stages), "policy_stages")  # type: ignore[no-any-return]


class MultiSyncCollector(MultiCollector):
    """Delivers one batch of all workers at a time: `[workers, *env.batch_size, T]`, rows in the workers' order.

    Workers write straight into the batch. They wait while the consumer has it, so that with `update_policy_weights_`
    in between every frame of a batch is made by the newest weights.
    """

    @classmethod
    def adapt_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """It is sync."""
        return fixed(cls.__name__, "sync", True, arguments)

    def _new_delivery(self, terms: Terms) -> Delivery:
        config, shape, steps = self.config, terms.layout.batch_size, set(terms.steps.values())
        time, how = len(shape), config.cat_results
        if isinstance(how, int) and not -time - 1 <= how <= time:
            raise ValueError(f"cat_results={how} is no dimension of batches {[*shape, 'T']}.")
        if len(steps) > 1 and isinstance(how, int) and how not in (-1, time):
            raise ValueError(
                f"cat_results={how} puts lanes of all workers beside each other, but frames_per_batch="
                f"{config.frames_per_batch} gives them {sorted(steps)} steps: use -1."
            )
        unit = terms.lanes * (config.workers if len(steps) == 1 else 1)
        budget = FrameBudget(config.total_frames, unit)
        return Barrier(self._pool, terms, budget, joins=True, preemptive_threshold=config.preemptive_threshold)

    def _assemble(self, parts: list[Part]) -> TensorDictBase:
        config = self.config
        how = STACK if config.cat_results is None else config.cat_results
        if how == STACK and config.split_trajs and len({part.steps for part in parts}) > 1:
            how = -1  # a ragged stack has no rows to take episodes from
        marks_gaps = config.preemptive_threshold not in (None, 1.0) or config.interruptor is not None
        return self._stored(joined(parts, self._delivery.terms.layout.delivered, how, marks_gaps=marks_gaps))

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames in a batch, over all workers: whole steps of all lanes."""
        return sum(self.frames_per_batch_worker(index) for index in self._pool.indices or range(self.num_workers))

    def fake_tensordict(self) -> TensorDictBase:
        """Zeros with exactly the layout of a batch."""
        terms, how = self._delivery.terms, self.config.cat_results
        parts = [self._zeros((*terms.layout.batch_size, terms.steps[index])) for index in self._pool.indices]
        if how in (None, STACK):
            return named(torch.stack(parts, 0))
        return named(torch.cat(parts, int(how)))


class MultiAsyncCollector(MultiCollector):
    """Delivers the batch of whichever worker is ready first: `[*env.batch_size, T]`.

    Workers go on collecting meanwhile, with the newest weights at the beginning of each of their batches: the frames
    tell which, in `policy_version`.
    """

    @classmethod
    def adapt_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """It is not sync."""
        return fixed(cls.__name__, "sync", False, arguments)

    def _new_delivery(self, terms: Terms) -> Delivery:
        config = self.config
        return FirstCome(
            self._pool,
            terms,
            FrameBudget(config.total_frames, terms.lanes),
            slots_per_worker=config.slots_per_worker,
            max_staleness=config.max_staleness,
        )

    def __len__(self) -> int:
        """Number of batches, where all workers contribute the same number of frames."""
        if len(set(self._delivery.terms.steps.values())) > 1:
            raise EndlessError("Workers contribute batches of different sizes: how many there will be is not known.")
        return super().__len__()


class AsyncCollector(MultiAsyncCollector):
    """One worker process that collects ahead while the consumer is busy. `create_env_fn` is one factory."""

    @classmethod
    def adapt_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """It has one worker."""
        makers = arguments.get("create_env_fn")
        if isinstance(makers, list | tuple) and len(makers) != 1:
            raise ValueError(f"AsyncCollector has one worker, got {len(makers)} factories: use MultiAsyncCollector.")
        if arguments.get("num_workers", 1) not in (1, None):
            raise ValueError(f"AsyncCollector has one worker, got num_workers={arguments['num_workers']}.")
        return super().adapt_arguments({**arguments, "num_workers": 1})
