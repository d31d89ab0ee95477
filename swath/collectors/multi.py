"""MultiCollector: collectors in processes of their own, and what is common to their two kinds of delivery."""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import sys
import threading
import time
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from swath.collectors.board import SharedBudget
from swath.collectors.messages import Ready, RunFree, Task
from swath.collectors.multi_config import MultiConfig, factories
from swath.collectors.remote import RemoteControl
from swath.collectors.workers import LOOK_S, Workers
from swath.data import ReplayBuffer
from swath.envs import EnvBase
from swath.envs.registry import Registered
from swath.errors import ClosedError
from swath.keys import DONE, NEXT, TRAJ_IDS
from swath.rollout import FrameBudget
from swath.seeding import lane_seed
from swath.weights import POLICY_ID, Layout, Publisher, flat_weights, layers_of

Made = TypeVar("Made", bound="MultiCollector")
EXIT_S = 2.0
"""How long the workers of all collectors may take to close their envs when the interpreter exits."""
LOOK_AGAIN_S = 0.1
"""How often a buffer that is being sampled looks whether the workers are well."""


class MultiCollector(RemoteControl):
    """Runs a policy in envs, in several processes; `sync` chooses how their batches are delivered.

    `MultiCollector(..., sync=True)` makes a `MultiSyncCollector`, `sync=False` a `MultiAsyncCollector`. Env factories
    and policy are sent to the workers by value: no `if __name__ == "__main__"` is needed.

    Args:
        create_env_fn: a list with a factory for each worker, or one for all, with `num_workers`.
        policy: what acts; None acts at random. Workers act with copies: `update_policy_weights_` publishes new weights.
        options: everything else by name; see `MultiConfig` and `CollectorConfig` for what there is.
    """

    config_class: ClassVar[type[MultiConfig]] = MultiConfig
    config: MultiConfig
    is_sync: ClassVar[bool]

    def __new__(cls: type[Made], *args: Any, **options: Any) -> Made:
        """The kind of collector that `sync` asks for."""
        if cls is not MultiCollector:
            return super().__new__(cls)
        if not isinstance(options.get("sync"), bool):
            raise TypeError(
                "MultiCollector needs sync=True (all workers contribute to each batch) or sync=False (first come, "
                f"first served), got sync={options.get('sync')!r}."
            )
        from swath.collectors.multi_async import MultiAsyncCollector
        from swath.collectors.multi_sync import MultiSyncCollector

        kind: Any = MultiSyncCollector if options["sync"] else MultiAsyncCollector
        made: Made = kind.__new__(kind)
        return made

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        """Check the arguments, start the workers, and wait until each has made its env and policy."""
        self.closed = True
        name = type(self).__name__
        if not any(options.get("sync") is choice for choice in (self.is_sync, None)):
            raise TypeError(
                f"{name} is sync={self.is_sync}, got sync={options['sync']!r}; use MultiCollector to choose."
            )
        self._makers = factories(create_env_fn, options.get("num_workers"), name)
        given = {**options, "sync": self.is_sync, "num_workers": len(self._makers)}
        config = MultiConfig.from_arguments(name, given)
        self._check_makers(policy, config)
        super().__init__(config)
        self.closed = True  # until there is something to shut down
        self._post_hook, self._pre_hook = None, None  # workers call them, where the rollouts are
        self._worker_pre_hook, self._worker_hook = config.pre_collect_hook, config.post_collect_hook
        self._last_state: dict[str, Any] | None = None
        """When all frames were collected."""
        self._endings: list[int | None] = []
        """Numbers of workers whose open episodes end with what was delivered last."""
        self._given_policy = policy
        self._share_buffer()
        self._numbers: dict[int, int] = {}
        self._next_number = config.worker_idx or 0
        self._seed: tuple[int, bool] | None = None
        self._sent_policy = _portable(policy)
        self._registered = Registered.here()
        self._owner = os.getpid()
        self._closing = threading.RLock()
        # Weakly: a collector that everybody has forgotten must be freed, and its workers with it.
        self._workers = Workers(
            config, weakref.WeakMethod(self._task), weakref.WeakMethod(self._lose_episodes), repr(self)
        )
        self._publisher = Publisher(self._workers.tell)
        self._batches = 0
        self._threads: int | None = None
        self._shared_budget: SharedBudget | None = None
        self._looked_at = 0.0
        self._is_reported = False
        self.closed = False
        try:
            self._workers.hire_all()
            self._begin()
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise
        if config.num_threads is not None:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(config.num_threads)
        _open.add(self)

    def _check_makers(self, policy: Any, config: MultiConfig) -> None:
        if policy is not None and config.policy_factory is not None and config.weight_sync_schemes is None:
            raise TypeError("Give either policy or policy_factory, not both.")
        for index, maker in enumerate(self._makers):
            if isinstance(maker, EnvBase) or not callable(maker):
                raise TypeError(
                    "Workers make their envs themselves: create_env_fn must hold functions that return an env, but "
                    f"that of worker {index} is {type(maker).__name__}: {maker!r}. Write lambda: GymEnv('CartPole-v1')."
                )

    def _share_buffer(self) -> None:
        buffer = self.config.replay_buffer
        if buffer is None:
            return
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(
                f"Workers can only write to a buffer that they share: use swath.data.ReplayBuffer(shared=True), got "
                f"{type(buffer).__name__}."
            )
        if not buffer.is_shared:
            buffer.share()

    def _task(self, index: int, replaces: bool) -> Task:
        """What a worker is made for."""
        config, buffer = self.config, self.config.replay_buffer
        if isinstance(buffer, ReplayBuffer):
            self._numbers[index] = buffer.enrol()
        else:
            self._numbers[index] = self._next_number
            self._next_number += 1
        return Task(
            index=index,
            number=self._numbers[index],
            create_env_fn=self._makers[index],
            policy=self._policy_to_send(),
            config=replace(
                config.for_worker(index), pre_collect_hook=self._worker_pre_hook, post_collect_hook=self._worker_hook
            ),
            init_fn=config.init_fn,
            registered=self._registered,
            board=self._workers.board,
            stores=self._publisher.introduce(index) if replaces else [],
            seed=self._seed_of_replacement() if replaces else None,
        )

    def _policy_to_send(self) -> Any:
        if self.config.policy_factory is not None:
            return None
        is_local = self.config.debug and isinstance(self._sent_policy, nn.Module)
        return copy.deepcopy(self._sent_policy) if is_local else self._sent_policy  # others are copied on their way

    def _seed_of_replacement(self) -> tuple[int, bool] | None:
        """New seeds, by lane, that follow from the one that was set but repeat none of its episodes."""
        if self._seed is None or self._seed[1]:
            return self._seed
        return lane_seed(self._seed[0], self.num_lanes + 1 + self._workers.restarts), False

    def _begin(self) -> None:
        """What follows from what the workers have said of themselves."""
        first = self._layout = self._workers.ready[0]
        for index, ready in self._workers.ready.items():
            _must_agree(first, ready, index)
        frames, lanes = self.config.frames_per_batch, self._workers.lanes[0]
        self._steps = {i: -(-self.config.frames_of(i) // lanes) for i in self._workers.indices}
        asked = [self.config.frames_of(i) for i in self._workers.indices]
        if any(count % lanes for count in asked) or (self.is_sync and isinstance(frames, int) and sum(asked) != frames):
            warnings.warn(
                f"frames_per_batch={frames} is rounded up to {self.requested_frames_per_batch}, whole steps of {lanes} "
                "lanes of each worker.",
                stacklevel=4,
            )
        self._budget = FrameBudget(self.config.total_frames, self._unit)
        if self.config.total_frames > 0 and self.config.total_frames % self._unit:
            warnings.warn(
                f"total_frames={self.config.total_frames} is rounded up to whole steps of {self._unit} lanes.",
                stacklevel=4,
            )
        self._publish_first()

    def _publish_first(self) -> None:
        """Version 0: all workers act with the same weights, also where each has made its own policy."""
        layout = self._layout.policy
        if layout is None:
            return
        self._publisher.add(POLICY_ID, layout, self._workers.indices)
        given = self._given_policy
        if isinstance(given, nn.Module) and not any(map(is_lazy, (*given.parameters(), *given.buffers()))):
            weights = flat_weights(given)
        elif isinstance(self.config.policy_factory, list | tuple):
            return  # they may be meant to differ
        else:
            weights = self._workers.ask("policy.state_dict", workers=[0])[0]
            if isinstance(given, nn.Module):  # it was lazy until a worker has called it
                _fill_lazy(given, layout, weights)
        self._publisher.publish(POLICY_ID, layout.named(weights), self._workers.indices)

    # -- what there is -----------------------------------------------------------------------------------------

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers."""
        return self._workers.pids

    @property
    def replay_buffer(self) -> Any:
        """The buffer that is written to, if there is one."""
        return self.config.replay_buffer

    @property
    @abstractmethod
    def _unit(self) -> int:
        """The smallest number of frames that can be collected at a time."""

    def frames_per_batch_worker(self, worker_idx: int = 0) -> int:
        """How many frames a worker contributes to a batch."""
        return self._steps[worker_idx] * self._workers.lanes[worker_idx]

    # -- collecting --------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Fixed-frame batches until the budget is spent, which ends the workers."""
        self._must_not_run()
        if self.config.replay_buffer is not None:
            return self._fills()
        return map(self._finished, map(self._taken, self._raw_batches()))  # a loop would keep hold of the last batch

    def _delivered(self) -> Iterator[TensorDictBase | None]:
        self._must_not_run()
        return self.iterator() if self.config.replay_buffer is not None else super()._delivered()

    def _taken(self, batch: TensorDictBase) -> TensorDictBase:
        """A batch that goes to the user by frames: episodes that are put together must do without those in it."""
        if self.config.trajs_per_batch is not None:
            ids = batch.get(TRAJ_IDS)
            ended = set(ids[batch.get((NEXT, DONE)).squeeze(-1)].tolist())
            self._assembler.tear(ids.unique().tolist(), set(ids.flatten().tolist()) - ended)
        return batch

    def _end(self) -> None:
        """All frames are collected: the workers are no longer needed."""
        self._raise_again()
        if not self.closed:
            with contextlib.suppress(Exception):  # of a worker that fails when nobody needs it any more
                self._last_state = self.state_dict()
            self.shutdown()

    @abstractmethod
    def _fills(self) -> Iterator[None]:
        """Batches into the replay buffer, one at a time."""

    def _is_random(self, frames: int) -> bool:
        """Whether a batch is to be random when so many frames were collected before."""
        limit = self.config.init_random_frames
        return limit is not None and frames < limit

    def _stored(self, batch: TensorDictBase, worker: int = 0) -> TensorDictBase:
        device = self.config.storing(worker)
        return batch if device is None else batch.to(device, non_blocking=self.config.no_cuda_sync)

    def _must_be_open(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError(f"This collector belongs to the process {self._owner}, of which this one is a fork.")
        if self._workers.failure is not None:
            raise self._workers.failure
        if self.closed:
            raise ClosedError("This collector is shut down; make a new one.")

    def rollout(self) -> TensorDictBase:
        """One batch as it was collected, before any post-processing."""
        self._must_not_run()
        self._must_be_open()
        batch = next(self._raw_batches(), None)
        if batch is None:
            raise ClosedError("All frames are collected; make a new collector.")
        return self._taken(batch)

    # -- in the background -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let the workers collect into the replay buffer on their own, until `total_frames` are collected.

        What goes wrong is raised by `sample()` of the buffer, `is_running()` and `async_shutdown()`.
        """
        buffer = self.config.replay_buffer
        if buffer is None:
            return super().start()
        self._must_be_open()
        if self.config.debug:
            raise RuntimeError("debug=True runs workers in this process, where they cannot collect in the background.")
        if self._workers.free is not None:
            return
        self._iterating, self._stream = True, None
        self._count_written()
        left = -1 if self._budget.is_endless else max(0, self.config.total_frames - self._budget.spent)
        self._shared_budget = SharedBudget(left, self.num_workers)
        buffer.attach(self)
        self._workers.run_free(RunFree(self._shared_budget))

    def _count_written(self) -> None:
        """Wait for what is under way since somebody has iterated; it is in the buffer, and counts."""
        while any(self._workers.outstanding(index) for index in self._workers.indices):
            self._workers.attend(LOOK_S)
        self._budget.spend(self._undelivered_frames)
        self._batches += len(self._workers.done)
        self._workers.done.clear()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A context in which background collection rests: nothing is written."""
        if self._workers.free is None:
            raise RuntimeError("pause() is for a collector that runs in the background: start() it first.")
        with self._at_rest():
            yield

    @contextlib.contextmanager
    def _at_rest(self) -> Iterator[None]:
        """A context in which no worker collects on its own."""
        if self._workers.free is None or self.closed:
            yield
            return
        self._must_be_open()
        try:
            self._workers.rest()
            yield
        finally:
            if not self.closed and self._workers.failure is None:
                self._workers.go_on()

    def is_running(self) -> bool:
        """Whether workers collect in the background; raises what went wrong there."""
        if self._workers.free is None or self.closed:
            self._raise_again()
            return False
        self._attend()
        return not self._is_spent()

    def _is_spent(self) -> bool:
        return self._workers.spent >= set(self._workers.indices)

    def is_feeding(self) -> bool:
        """Whether more frames may come into the replay buffer. For the buffer; users ask `is_running`."""
        return self._workers.free is not None and not self.closed and not self._is_spent()

    def raise_failure(self) -> None:
        """Raise what went wrong in a worker. For the buffer, which asks whenever it is sampled."""
        self._raise_again()
        now = time.monotonic()
        if not self.closed and now - self._looked_at > LOOK_AGAIN_S:
            self._attend()
            self._looked_at = now

    def _attend(self) -> None:
        """See to what has come from the workers, without waiting."""
        try:
            self._workers.attend(0.0)
        except BaseException as error:
            self._is_reported = True
            self.shutdown(raise_on_error=False)
            raise error

    def _raise_again(self) -> None:
        if self._workers.failure is not None:
            self._is_reported = True
            raise self._workers.failure

    def _must_not_run(self) -> None:
        if self._workers.free is not None and not self.closed and not self._is_spent():
            raise RuntimeError("This collector runs in the background: sample from its replay buffer.")

    # -- the end -----------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the workers, within `timeout` seconds whatever they do; see NOTE [Shutdown]."""
        if not close_env:
            raise RuntimeError("The envs of worker processes end with them: shutdown(close_env=False) cannot be.")
        if os.getpid() != self._owner:  # a forked child, which has no part in its parent's workers
            self.closed = True
            return
        with self._closing:  # another thread may be at it: then it is over when that one is done
            if not self.closed:
                self.closed = True
                self._shut_down(timeout, raise_on_error)

    def _shut_down(self, timeout: float | None, raise_on_error: bool) -> None:
        self._stream = None
        failure: BaseException | None = None
        if self._workers.free is not None and raise_on_error and self._workers.failure is None:
            try:
                self._workers.attend(0.0)  # a worker may have failed that nobody has asked for
            except Exception as error:
                failure = error
        self._workers.shutdown(timeout)
        if isinstance(self.config.replay_buffer, ReplayBuffer) and self._workers.free is not None:
            self.config.replay_buffer.detach(self)
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None
        if failure is not None and not self._is_reported:
            self._is_reported = True
            raise failure

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down a collector that was started in the background; raises what went wrong there."""
        unreported = self._workers.failure is not None and not self._is_reported
        self.shutdown(timeout, close_env)
        if unreported:
            self._raise_again()

    def __del__(self) -> None:
        """End the workers of a collector that everybody has forgotten; at the interpreter's end, others see to it."""
        if not getattr(self, "closed", True) and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.shutdown(raise_on_error=False)

    def __repr__(self) -> str:
        """Workers and size of the batches."""
        return (
            f"{type(self).__name__}({len(self._makers)} workers, policy={type(self._given_policy).__name__}, "
            f"frames_per_batch={self.config.frames_per_batch}, total_frames={self.config.total_frames})"
        )


def _portable(policy: Any) -> Any:
    """The policy as it is sent to workers: from an accelerator's memory it goes by way of the CPU's."""
    if isinstance(policy, nn.Module):
        tensors = (*policy.parameters(), *policy.buffers())
        if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors):
            return copy.deepcopy(policy).to("cpu")
    return policy


def _fill_lazy(policy: nn.Module, layout: Layout, weights: dict[str, Any]) -> None:
    """Give a lazy policy the shapes and weights that a worker's copy got in its first call."""
    for layer, prefix in zip(reversed(list(layers_of(policy))), reversed(layout.prefixes), strict=False):
        layer.load_state_dict({name.removeprefix(prefix): w for name, w in weights.items()})
        return


def _must_agree(first: Ready, ready: Ready, index: int) -> None:
    for what, wanted, given in (
        ("batch_size", first.batch_size, ready.batch_size),
        ("entries", first.leaves, ready.leaves),
    ):
        if wanted != given:
            raise ValueError(
                f"All workers must produce batches of one layout, but worker {index} ({ready.env}) differs from "
                f"worker 0 ({first.env}) in its {what}: {given} instead of {wanted}."
            )


_open: weakref.WeakSet[MultiCollector] = weakref.WeakSet()


@atexit.register
def _shut_down_forgotten() -> None:
    """Before the interpreter is taken down: workers get the chance to close their envs."""
    deadline = time.monotonic() + EXIT_S
    for collector in list(_open):
        collector.shutdown(timeout=max(0.0, deadline - time.monotonic()), raise_on_error=False)
