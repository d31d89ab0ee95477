"""A collector's worker: an engine that does what its collector asks for, in this process or in another."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from swath.collectors.profile import ProfileConfig, ProfilingHook
from swath.collectors.reflection import Reflection
from swath.data.write_notes import WriteNotes
from swath.envs.registry import Registered
from swath.keys import Key
from swath.modules.stages import StageName
from swath.rollout.engine import Engine, has_weights
from swath.rollout.engine_settings import EngineSettings
from swath.rollout.loop import Interruptor, Receipt
from swath.rollout.slots import FEW, Slot
from swath.runtime import undisturbed
from swath.runtime.carrier import EVERYTHING, Link, NotNowError, Ordered, Topic
from swath.runtime.columns import Columns, Leaf
from swath.runtime.local import LocalLink
from swath.runtime.snapshots import Snapshots
from swath.seeding import policy_seed
from swath.weights import Subscriber, WeightLayout

FIELDS = (
    "frames",
    "batches",
    "episodes",
    "idle_frames",
    "pending_frames",
    "dropped_frames",
    "lost_frames",
    "worker_restarts",
    "policy_version",
    "mean_return",
    "mean_length",
    "time/env",
    "time/policy",
    "time/bookkeeping",
    "time/waiting",
)
"""What a worker reports."""

DISTURBING = ("reset", "set_seed", "load_state_dict", "break_off", "finish_episodes", "move_to_thread")
"""What cannot be asked for while a batch is half made."""

# -- orders and questions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collect:
    """Fill the place of the order."""

    random: bool = False


@dataclass(frozen=True)
class Fill:
    """Collect so many steps into the replay buffer, in batches of `batch` steps."""

    steps: int
    batch: int


@dataclass(frozen=True)
class Call:
    """A question: what this method of the job returns."""

    method: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def of(self, job: object) -> object:
        """What the method of that name of `job` returns, which need not be an `EngineJob`."""
        return getattr(job, self.method.__name__)(*self.args, **self.kwargs)


# -- the worker ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchLayout:
    """What a worker's batches look like: all that its collector must know of its env and policy."""

    leaves: dict[Key, Leaf]
    delivered: list[Key]
    batch_size: tuple[int, ...]
    env_size: tuple[int, ...]
    """The batch size of the env: its lanes, whether batches tell them apart by a dimension or not."""
    device: torch.device | None
    env: str
    policy: WeightLayout | None
    """Of the policy, if it has weights."""


@dataclass(frozen=True)
class EngineTask:
    """What a worker is started for."""

    index: int
    number: int
    """Part of the ids of its trajectories, which no other worker has or had."""
    settings: EngineSettings
    create_env_fn: Any
    create_env_kwargs: dict[str, Any] | None = None
    policy: Any = None
    policy_factory: Callable[[], Any] | None = None
    init_fn: Callable[[], Any] | None = None
    registered: Registered | None = None
    """Envs that only the parent may know."""
    seed: tuple[int, bool] | None = None
    notes: WriteNotes | None = None
    """Where to note what is written to the replay buffer; see NOTE [Settled with the write]."""

    def begin(self, link: Link) -> EngineJob:
        """Make the engine, in the worker."""
        if self.registered is not None:
            self.registered.adopt()
        if self.init_fn is not None:
            self.init_fn()
        engine = Engine.make(
            self.create_env_fn,
            self.policy,
            replace(self.settings, worker=self.number),
            policy_factory=self.policy_factory,
            create_env_kwargs=self.create_env_kwargs,
            worker=self.index,
        )
        if self.notes is not None and not link.is_local:  # who dies there cannot be replaced
            self.notes.keep(self.index, engine.settings.replay_buffer.storage.ledger, lambda: engine.frames)
        job = EngineJob(engine, self.index, link)
        if self.seed is not None:
            job.set_seed(*self.seed)
        return job


@dataclass(frozen=True)
class LocalTask:
    """The same for an engine that exists already, in this process."""

    engine: Engine
    index: int

    def begin(self, link: Link) -> EngineJob:
        """Take the engine."""
        return EngineJob(self.engine, self.index, link)


class EngineJob(Reflection):
    """An engine at work. What users name by a path (`env.batch_size`, `policy.module`) begins here."""

    def __init__(self, engine: Engine, worker_idx: int, link: Link) -> None:
        """Run `engine`, and let the pool see how it is doing through `link`."""
        self.engine, self.worker_idx = engine, worker_idx
        self.env, self.replay_buffer = engine.env, engine.settings.replay_buffer
        self._link, self._is_local = link, link.is_local
        self._weights = Subscriber()
        self._profiler: ProfilingHook | None = None
        self._watch = StepWatch(link, engine.settings.interruptor)
        self._slots: dict[Columns, Slot] = {}
        self._is_on_cpu = (engine.env.rows_device or torch.device("cpu")).type == "cpu"
        self._may_write = link.is_local or self._is_on_cpu
        """Whether the env can write to the memory of a place."""
        if not link.is_local:  # nobody can interrupt, or watch, what runs in the same thread
            engine.watch(self._watch, self._watch.is_wanted)
        self._report()

    # -- what users may name -----------------------------------------------------------------------------------

    @property
    def policy(self) -> Any:
        """What acts."""
        return self.engine.policy

    @property
    def policy_version(self) -> int:
        """The number of the weights that it acts with."""
        return self.engine.version

    def get_policy_version(self) -> int:
        """The same as `policy_version`."""
        return self.policy_version

    def stats(self) -> dict[str, float]:
        """Frames, episodes, recent returns, and where the time went."""
        return self.engine.stats()

    def reset(self, lanes: tuple[int, ...] | None = None) -> None:
        """Begin new episodes, in all lanes or in these."""
        self.engine.reset(lanes)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed every lane and the policy's noise, and begin new episodes."""
        if not self._link.is_local:  # envs may draw from the generators of Python and numpy, which are the worker's own
            own = policy_seed(seed, self.worker_idx)
            random.seed(own)
            np.random.seed(own % 2**32)
        return self.engine.set_seed(seed, static_seed, self.worker_idx)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on elsewhere."""
        return self.engine.state_dict()

    def tell_stages(self) -> list[StageName]:
        """How the policy runs."""
        return self.engine.policy_stages

    # -- what the collector asks for, beside these -------------------------------------------------------------

    def load_state_dict(self, state: dict[str, Any], strict: bool = True, number: int | None = None) -> None:
        """Go on from a saved state; with ids of another number, if one is given."""
        self.engine.load_state_dict(state, strict)
        if number is not None:
            self.engine.renumber(number)
        self._report()

    def check_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Raise what would keep a state from being loaded; nothing is changed."""
        self.engine.check_state_dict(state, strict)

    def layout_of(self, model_id: str) -> WeightLayout:
        """What the weights of a model look like."""
        return WeightLayout.of(self.engine.find_model(model_id))

    def set_hook(self, name: str, hook: Any) -> None:
        """Replace `pre_collect_hook` or `post_collect_hook`."""
        self.engine.set_hook(name, hook)

    def profile(self, config: ProfileConfig | None) -> None:
        """Trace the first rollouts; None ends that."""
        if self._profiler is not None:
            self._profiler.stop()
            self.engine.set_hook("post_collect_hook", self._profiler.inner)
            self._profiler = None
        if config is not None:
            self._profiler = ProfilingHook(config, self.worker_idx, self.engine.settings.post_collect_hook)
            self.engine.set_hook("post_collect_hook", self._profiler)

    def break_off(self) -> None:
        """What is collected next is not written to the replay buffer."""
        self.engine.break_off()

    def finish_episodes(self) -> None:
        """All frames are collected."""
        self.engine.finish_episodes()
        self._report()

    def move_to_thread(self) -> None:
        """From now on, run in a thread beside the trainer."""
        self.engine.move_to_thread()
        self.engine.watch(self._watch, self._watch.is_wanted)

    # -- what a session asks for -------------------------------------------------------------------------------

    def describe(self) -> BatchLayout:
        """What batches look like."""
        policy = self.policy
        return BatchLayout(
            leaves=self.engine.leaves,
            delivered=self.engine.delivered,
            batch_size=self.engine.batch_size,
            env_size=tuple(self.env.batch_size),
            device=self.env.rows_device,
            env=repr(self.env),
            policy=WeightLayout.of(policy) if has_weights(policy) else None,
        )

    def work(self, order: Ordered, has_questions: Callable[[], bool]) -> Receipt:
        """Collect."""
        watch = self._watch
        watch.ticket, watch.has_questions = order.ticket, has_questions
        request = order.request
        if isinstance(request, Collect):
            receipt = self._collect(order, request.random)
        elif isinstance(request, Fill):
            receipt = self._fill(request.steps, request.batch)
        else:
            raise TypeError(f"A worker cannot understand {request!r}.")
        if not self._is_local:  # there, numbers are computed when they are looked at
            self._report()
        return receipt

    def _collect(self, order: Ordered, random: bool) -> Receipt:
        place, hook = order.place, self.engine.settings.post_collect_hook
        assert place is not None
        if self._weights.is_behind:
            self.adopt()
        memory = self._link.memory(place)
        if (slot := self._slots.get(memory)) is None:
            if len(self._slots) > 2 * FEW:  # most of it is memory that is no longer used
                self._slots.clear()
            slot = Slot.over(memory, self.engine.batch_size)
            if self._is_on_cpu:  # elsewhere none is used twice
                self._slots[memory] = slot
        # A hook may keep what it sees.
        if self._may_write and (hook is None or (self._is_local and memory is place.memory)):
            return self.engine.collect(slot, random=random)
        return self.engine.collect_elsewhere(slot, random=random)

    def _fill(self, steps: int, batch: int) -> Receipt:
        receipts: list[Receipt] = []
        while steps:
            self.adopt()
            wanted = min(steps, batch)
            receipts.append(self.engine.write(wanted))
            steps -= receipts[-1].steps
            if not steps or self._watch.is_wanted() or receipts[-1].steps < wanted:
                break
            if not self._link.is_local:
                self._report()
        return receipts[0] if len(receipts) == 1 else Receipt.over(receipts)

    def answer(self, request: object) -> object:
        """Call the method that is asked for."""
        assert isinstance(request, Call)
        if self.engine.is_stepping and request.method.__name__ in DISTURBING:
            raise NotNowError("this very thread makes a batch")
        self.adopt()
        return request.of(self)

    def _report(self) -> None:
        if isinstance(self._link, LocalLink):
            self._link.report(self.engine.stats)
        else:
            self._link.report(self.stats())

    def adopt(self) -> None:
        """Act with the newest weights from now on."""
        if not self.engine.is_stepping and self._weights.is_behind:
            with undisturbed:  # an interrupt between weights and version would leave the one with another
                if self._weights.adopt(self.engine.model_to_load):
                    self.engine.version = max(self.engine.version, self._weights.version)  # it never goes back

    def idle(self) -> None:
        """Nothing is done meanwhile."""

    def subscribe(self, topic: Topic, snapshots: Snapshots) -> None:
        """Take weights from there."""
        self._weights.subscribe(topic, snapshots)

    def stop(self) -> None:
        """Close the env."""
        self.profile(None)
        self.engine.close()


class StepWatch:
    """Asked after every step whether to go on, which shows the pool that the worker lives."""

    def __init__(self, link: Link, users: Interruptor | None) -> None:
        """Ask the pool, and the interruptor that the user may have given."""
        self.ticket = EVERYTHING
        """The order that is being done."""
        self.has_questions: Callable[[], bool] = bool
        self._beat, self._link, self._users = link.beat, link, users

    def collection_stopped(self) -> bool:
        """Whether the batch should end here."""
        if self._beat(self.ticket):
            return True
        return self._users is not None and bool(self._users.collection_stopped())

    def is_wanted(self) -> bool:
        """Whether the worker is wanted elsewhere: asked while it waits for the replay buffer."""
        return self._link.is_interrupted(self.ticket) or self.has_questions()
