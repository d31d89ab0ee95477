"""What a node runs that is more than one engine: a collector of several processes.

NOTE [Inner collectors]: with `collector_class="sync"` or `"async"`, a worker of the trainer is itself a
`MultiSyncCollector` or `MultiAsyncCollector`. For the trainer's pool it is a worker like any other. The inner collector
has no budget: with each order its delivery is given the terms (how many steps, at random or not), and what its workers
have made is copied to the order's place. What one worker makes is a stream of steps without a gap. An order takes so
many steps of every stream (sync), or of one that has as many (async). What it does not take is kept for the next: the
rest of a batch at the end of the trainer's budget, or what some workers made more than others before an interrupt came.

While workers are waited for, the trainer sees their steps, and its interrupts reach them. One that hangs is dealt with
by the inner collector's own supervision, for which the trainer's time-outs are the defaults. What the inner collector
raises ends the node, and the trainer deals with that as with any failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swath.collectors.distributed.streams import Stream
from swath.collectors.first_come import FirstCome
from swath.collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.collectors.multi_config import MultiConfig
from swath.collectors.worker import FIELDS, BatchLayout, Call, Collect, EngineJob, EngineTask
from swath.errors import annotate
from swath.keys import MASK, TRAJ_IDS, WORKER_BITS
from swath.rollout.loop import Receipt
from swath.runtime.carrier import EVERYTHING, Link, Ordered, Topic
from swath.runtime.columns import Columns
from swath.runtime.processes import ProcessCarrier
from swath.runtime.snapshots import Snapshots, Values
from swath.seeding import lane_seed
from swath.weights import Subscriber

INNER_BITS = 8
"""The number of an inner worker is (node's number << 8 | counter); each that is started or restarted has its own."""
LOOK_S = 0.05
"""How often the trainer is told of steps, and asked for interrupts."""
STOP_S = 2.0
"""How long inner workers may take to close their envs: less than the trainer gives the node."""


class WatchedCarrier(ProcessCarrier):
    """Carries between a node and its workers; whenever these are waited for, the trainer watches them."""

    ticket: int | None = None
    """The trainer's order that is being done."""

    def attach(self, link: Link, tickets: Mapping[int, int], steps_per_beat: int) -> None:
        """Let the trainer see a beat for so many steps. `tickets` tell what each worker was last given."""
        self._link, self._tickets, self._steps_per_beat = link, tickets, steps_per_beat
        self._seen, self._made, self._beaten = dict.fromkeys(tickets, 0), 0, 0

    def wait(self, timeout_s: float) -> bool:
        """Wait, but not for long."""
        self.look()
        return super().wait(min(timeout_s, LOOK_S))

    def look(self) -> None:
        """Show the trainer what was done since the last time, and interrupt the workers if it wants that."""
        if self.ticket is None:
            return
        for index in self.workers:
            steps, before = int(self.report(index)["steps"]), self._seen[index]
            self._made += steps - before if steps >= before else steps  # a new worker counts from the beginning
            self._seen[index] = steps
        while self._beaten < self._made // self._steps_per_beat:
            self._beaten += 1
            self._link.beat(self.ticket)
        if self.is_interrupted:
            for index, last in self._tickets.items():
                self.interrupt(index, last)

    @property
    def is_interrupted(self) -> bool:
        """Whether the trainer's order is to end."""
        return self.ticket is not None and self._link.is_interrupted(self.ticket)


@dataclass(frozen=True)
class InnerConfig(MultiConfig):
    """What an inner collector is given, beside what others can be.

    Attributes:
        first_worker: the index of its first worker among those of all nodes.
        whole_episodes: whether the trainer puts episodes together.
    """

    _: KW_ONLY
    first_worker: int = 0
    whole_episodes: bool = False

    def task_of(self, task: EngineTask) -> EngineTask:
        """A worker among those of all nodes; one that replaces another gets seeds that no lane of them has."""
        seed = task.seed
        if seed is not None and not seed[1]:
            seed = (lane_seed(seed[0], 2**WORKER_BITS + task.number), False)
        return replace(task, index=self.first_worker + task.index, seed=seed)


class InnerCollector(MultiCollector):
    """A node's collector and its job: it does what the trainer orders, and its public methods answer questions."""

    config_class = InnerConfig
    config: InnerConfig
    process_carrier = WatchedCarrier
    _begin = 0
    """How many steps the trainer has got."""

    @cached_property
    def _streams(self) -> dict[int, Stream]:
        return {index: Stream() for index in range(self.num_workers)}

    @cached_property
    def _first_number(self) -> int:
        return self.config.worker_idx or 0

    @property
    def _carrier(self) -> WatchedCarrier:
        assert isinstance(self._pool.carrier, WatchedCarrier)
        return self._pool.carrier

    @property
    def _left(self) -> int:
        """Frames that lie in the streams."""
        return sum(stream.steps for stream in self._streams.values()) * self._delivery.terms.lanes

    def _warn_of_rounding(self) -> None:
        """The trainer says how many frames there are."""

    def __repr__(self) -> str:
        workers = self.config.workers
        return f"node {self.config.first_worker // workers} ({workers} inner workers)"

    # -- what a session asks for -------------------------------------------------------------------------------

    def attach(self, link: Link) -> None:
        """Let the trainer watch the workers from now on."""
        self._link, self._subscriber = link, Subscriber()
        self._carrier.attach(link, self._pool.last_ticket, self.num_workers if self.config.sync else 1)
        self._report()

    def describe(self) -> BatchLayout:
        """What batches of the node look like: `[workers, *env.batch_size]` without time if it is sync."""
        layout, workers = self._delivery.terms.layout, self.num_workers
        size = (workers, *layout.batch_size) if self.config.sync else layout.batch_size
        first, *others = layout.env_size or (1,)
        lanes, env = (workers * first, *others), f"{workers} x {layout.env}"
        return replace(layout, batch_size=size, env_size=lanes, device=None, env=env)

    def work(self, order: Ordered, has_questions: Callable[[], bool]) -> Receipt:
        """Collect. An error ends the workers, too: nothing more is asked of this node, which may live on."""
        if not isinstance(order.request, Collect) or order.place is None:
            raise TypeError(f"A node with inner workers cannot do {order.request!r}.")
        self._carrier.ticket = order.ticket
        try:
            self._adopt()
            receipt = self._collect(self._link.memory(order.place), order.request.random)
            self._carrier.look()
        except BaseException as error:
            annotate(error, f"It has ended {self!r}.")
            self.stop()
            raise
        finally:
            self._carrier.ticket = None
        self._report()
        return receipt

    def answer(self, request: object) -> object:
        """Answer as a collector, or by the word of the first worker where all are asked the same."""
        assert isinstance(request, Call)
        self._adopt()
        if hasattr(type(self), request.method.__name__):
            return request.of(self)
        return next(iter(self._ask(request).values()))

    def idle(self) -> None:
        """Nothing is done meanwhile."""

    def subscribe(self, topic: Topic, snapshots: Snapshots) -> None:
        """Take weights from there."""
        self._subscriber.subscribe(topic, snapshots)

    def stop(self) -> None:
        """End the workers."""
        self.shutdown(STOP_S, raise_on_error=False)

    def _adopt(self) -> None:
        """Publish the trainer's newest weights to the workers, under the trainer's version."""
        taken: dict[str, Values] = {}

        def take(model_id: str, weights: Values) -> None:
            taken[model_id] = {name: w.clone() if isinstance(w, Tensor) else w for name, w in weights.items()}

        if not self._subscriber.take(take):
            return
        publisher, workers, version = self._roster.publisher, self._pool.indices, self._subscriber.version
        assert publisher is not None
        is_newer = version > publisher.version
        for model_id, weights in taken.items():
            if not publisher.knows(model_id):
                publisher.add(model_id, self._first(Call(EngineJob.layout_of, (model_id,)), model_id), workers)
            if is_newer:
                publisher.version = version
                publisher.publish(model_id, weights, workers)
            else:  # of a state that was loaded: workers may hold newer ones
                publisher.reset(model_id, weights, version, workers)
        publisher.release()

    def _report(self) -> None:
        """Tell the trainer how the workers are doing. Frames that it would lose with this node are pending."""
        found, delivery = self.stats(), self._delivery
        under_way = sum(self._carrier.unreported_steps(index) for index in self._pool.indices)
        found["pending_frames"] += self._left + delivery.undelivered_frames + under_way * delivery.terms.lanes
        self._link.report({name: float(found.get(name, 0.0)) for name in FIELDS})

    # -- orders ------------------------------------------------------------------------------------------------

    def _collect(self, memory: Columns, random: bool) -> Receipt:
        """Fill `memory` `[rows, T]`, or a part of it if the trainer or an interruptor ends that early."""
        chosen = self._gather(memory.shape[1], random)
        if self._roster.next_number > self._first_number + 2**INNER_BITS:
            raise RuntimeError(f"Workers of {self!r} were restarted so often that no number is left for their ids.")
        streams = [self._streams[index] for index in chosen]
        steps, version = min(memory.shape[1], *(one.steps for one in streams)), min(one.version for one in streams)
        follows_ids, running = self.config.whole_episodes and TRAJ_IDS in memory.tensors, None
        if follows_ids:
            others = [one for i, one in self._streams.items() if i in self._pool.indices and i not in chosen]
            each = [*(one.go_on() for one in streams), *(one.running for one in others)]
            running = np.array(sorted(set[int]().union(*each)), np.int64)
        lanes = memory.shape[0] // len(chosen)
        for place, stream in enumerate(streams):
            stream.pour(steps, memory.part(place * lanes, (place + 1) * lanes).tensors, follows_ids)
        frames = int(memory.tensors[MASK][:, :steps].sum()) if MASK in memory.tensors else memory.shape[0] * steps
        begin, self._begin = self._begin, self._begin + steps
        return Receipt(steps, frames, version, begin, running)

    def _gather(self, wanted: int, random: bool) -> list[int]:
        """Have steps made until there are as many as are `wanted`, or it is to end; whose they are."""
        while not (chosen := self._holders(wanted)):
            delivery, held = self._delivery, {i: stream.steps for i, stream in self._streams.items()}
            missing = {index: max(0, wanted - steps) if self.config.sync else wanted for index, steps in held.items()}
            delivery.terms = replace(delivery.terms, steps=missing, init_random_frames=EVERYTHING if random else 0)
            if isinstance(delivery, FirstCome):  # only the trainer knows for how long at random: none is made ahead
                delivery.max_staleness = 0 if random else self.config.max_staleness
            for part in delivery.next() or ():
                self._streams[part.index].parts.append(part)
            may_end = self.config.interruptor is not None or self._carrier.is_interrupted
            if may_end and (chosen := self._holders(1)):
                break
        return chosen

    def _holders(self, steps: int) -> list[int]:
        """The workers whose streams an order of so many steps is taken from, as soon as they have enough."""
        if self.config.sync:
            return list(self._streams) if all(one.steps >= steps for one in self._streams.values()) else []
        longest = max(self._streams, key=lambda index: self._streams[index].steps)
        return [longest] if self._streams[longest].steps >= steps else []

    # -- questions that mean more here than for an engine ------------------------------------------------------

    def reset(self, index: Any = None, **chosen: Any) -> None:
        """Begin new episodes, in all lanes or in these: those of the workers one after the other."""
        if index is not None:
            mask = torch.zeros(math.prod(self.describe().env_size), dtype=torch.bool, device="cpu")
            mask[list(index)] = True
            index = None if mask.all() else mask
        super().reset(index, **chosen)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed lanes by their number among those of all nodes. What the trainer has not got is given up."""
        following = super().set_seed(seed, static_seed)
        self._give_up()
        return following

    def state_dict(self) -> dict[str, Any]:
        """The same, with weights where those of an engine are."""
        state = super().state_dict()
        state["undelivered_frames"] += self._left
        first = state[f"worker{self._pool.indices[0]}"]
        return {**state, **{name: first[name] for name in ("policy_state_dict",) if name in first}}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, number: int | None = None) -> None:
        """Go on from a saved state; with ids of another number of the node, if one is given."""
        self._first_number = self._first_number if number is None else first_number(number)
        super().load_state_dict({**state_dict, "traj_pool": self._first_number}, strict)
        self._give_up()

    def _give_up(self) -> None:
        self._delivery.discard(self._left)
        for stream in self._streams.values():
            stream.parts.clear()
            stream.taken = 0

    def set_hook(self, name: str, hook: Any) -> None:
        """Replace a hook, in every worker and those to come."""
        self._set_hook(name, hook)


class InnerSync(InnerCollector, MultiSyncCollector):
    """A batch of the node has steps of all its workers: `[workers, *env.batch_size, T]`."""


class InnerAsync(InnerCollector, MultiAsyncCollector):
    """A batch of the node has steps of one worker, while the others go on: `[*env.batch_size, T]`."""


def first_number(node: int) -> int:
    """The number of the first worker of the node that has the number `node`."""
    if node >> (63 - WORKER_BITS - INNER_BITS):
        raise RuntimeError(f"Node {node} does not fit into trajectory ids: too many nodes, or too large a worker_idx.")
    return node << INNER_BITS
