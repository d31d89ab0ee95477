"""What `update_policy_weights_` does, in every collector."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from swath.collectors.delivery import Part
from swath.collectors.free_running import FreeRunning
from swath.collectors.worker import Call, EngineJob
from swath.keys import POLICY_ID
from swath.rollout.engine import Engine
from swath.runtime import undisturbed
from swath.runtime.pool import Pool
from swath.weights import Publisher, WeightLayout, flat_weights, for_worker, layers_of, load_weights

Each = dict[int, dict[str, Any]]
"""States, or weights, of each worker."""
SEVERAL = 3
"""After so many batches between which the policy has changed it is being trained."""


class WeightsControl:
    """Publishes weights to the workers of a collector, under the next version."""

    def __init__(
        self,
        pool: Pool[Part],
        publisher: Publisher,
        given_policy: Any,
        workers: int,
        update_when: str = "",
        interval: int | None = None,
    ) -> None:
        """Publish to the workers of `pool`, of which there are so many at first.

        By default weights come from `given_policy`, the user's. With an `interval` they are published by themselves,
        `update_when`, "before" or "after", every so many batches.
        """
        self._pool, self._publisher, self._given, self.workers = pool, publisher, given_policy, workers
        self._publishing = threading.RLock()
        self._when, self._interval, self._batches = update_when, interval, 0
        self.is_periodic = interval is not None
        """Whether weights are published by themselves."""
        self.free: FreeRunning | None = None
        """The thread in which the collector runs, once it is started."""
        self._is_published = interval is not None or not isinstance(given_policy, nn.Module)
        """Whether somebody sees to it that workers get new weights, or there are none."""
        self._changes, self._last_change = -1, -1
        self._watched: list[nn.Parameter] | None = None

    @property
    def version(self) -> int:
        """How often weights were updated."""
        return self._publisher.version

    def at_batch(self, when: str) -> None:
        """Publish the policy's weights, if that is due "before" or "after" this batch."""
        if when == "before" and not self._is_published and self._acts_with_copy:
            self.notice_training()
        if self._interval is None or self._when != when:
            return
        self._batches += 1
        if self._batches % self._interval == 0:
            self.update({POLICY_ID: None})

    @contextlib.contextmanager
    def _publication(self) -> Iterator[None]:
        """The next version: one thread after the other publishes what belongs to it, and all of it at once."""
        if self._publishing._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "Weights were to be published while this very thread publishes some, as by a signal handler: let it "
                "set a flag, and look at that between two updates."
            )
        with self._publishing, undisturbed:
            self._publisher.version += 1
            yield
            self._publisher.release()

    @property
    def _acts_with_copy(self) -> bool:
        """Whether what is trained here is seen by nobody who acts."""
        return True

    def notice_training(self) -> None:
        """Warn once if the policy is being trained, over several batches, and none of it is published."""
        if self._is_published or not self._acts_with_copy:
            return
        if self._watched is None:  # found once: to walk through a policy takes longer than all else here
            self._watched = [weight for weight in self._given.parameters() if not weight.is_inference()]
        change = sum([weight._version for weight in self._watched])
        if change != self._last_change:  # torch counts what is done to a tensor in place, as by an optimizer
            self._last_change, self._changes = change, self._changes + 1
        if self._changes >= SEVERAL:
            self._is_published = True
            warnings.warn(
                f"{self._pool.name}: the policy is being trained, but nothing of it was published: batches are "
                "collected by a copy of it that has the weights of the beginning. Call "
                "collector.update_policy_weights_() after each training step (or pass update_at_each_batch=True, where "
                "there is that argument); if that is what you want, call it once. This is said only once.",
                stacklevel=2,
            )

    def update(self, requested: Mapping[str, Any], chosen: Sequence[int] | None = None) -> None:
        """Publish `{model id: source}`, to all workers or some: all of it or, if something does not fit, nothing."""
        everyone, self._is_published = self._pool.indices, True
        if chosen is None and all(for_worker({m: source}, -1) for m, source in requested.items()):
            ready = {model_id: self._named(model_id, source) for model_id, source in requested.items()}
            with self._publication():
                for model_id, weights in ready.items():
                    self._publisher.publish(model_id, weights, everyone)
            return
        chosen = everyone if chosen is None else chosen
        if unknown := [index for index in chosen if index not in range(self.workers)]:
            raise ValueError(f"worker_ids={unknown} do not exist: there are {self.workers} workers.")
        each: Each = {
            index: {m: self._named(m, source) for m, source in for_worker(requested, index).items()} for index in chosen
        }
        with self._publication():
            for index, models in each.items():
                for model_id, weights in models.items():
                    self._publisher.publish_to(index, model_id, weights)

    def _named(self, model_id: str, source: Any) -> dict[str, Any]:
        """Weights by the names that the workers' model has for them."""
        if not self._publisher.knows(model_id):
            self._open(model_id)
        if source is None:
            if self._given is None:
                raise RuntimeError(
                    "Workers have made the policy themselves, so that there is none here to take weights from: give "
                    "them, as in update_policy_weights_(policy)."
                )
            if not isinstance(self._given, nn.Module):
                raise RuntimeError(
                    f"The policy is {type(self._given).__name__}, no module, so that it has no weights that "
                    "could be published: workers keep the copy that they were sent. Give a torch.nn.Module."
                )
            source = self._given
        return self._publisher.layout(model_id).named(flat_weights(source))

    def _open(self, model_id: str) -> None:
        """Make a store for a model that only the workers have."""
        first = self._pool.indices[0]
        layout = self._pool.ask({first: Call(EngineJob.layout_of, (model_id,))}, repr(model_id))[first]
        assert isinstance(layout, WeightLayout)
        self._add(model_id, layout)
        # From now on they look there, too: or they would take the rest of the first publication without it.
        self._pool.ask(dict.fromkeys(self._pool.indices, Call(EngineJob.adopt)), repr(model_id))

    def _add(self, model_id: str, layout: WeightLayout) -> None:
        with self._publishing:
            if not self._publisher.knows(model_id):  # another thread may have been first
                self._publisher.add(model_id, layout, self._pool.indices)

    def increment(self) -> None:
        """Publish the weights that workers have under the next version."""
        self._is_published = True
        with self._publication():
            if self._publisher.knows(POLICY_ID):
                self._publisher.publish(POLICY_ID, {}, self._pool.indices)

    @property
    def _layout(self) -> WeightLayout | None:
        """Of the workers' policy, if it has weights."""
        return self._publisher.layout(POLICY_ID) if self._publisher.knows(POLICY_ID) else None

    def publish_first(self, layout: WeightLayout | None, may_differ: bool) -> None:
        """Version 0: all workers act with the same weights, also where each has made its own policy."""
        if layout is None:
            return
        self._publisher.add(POLICY_ID, layout, self._pool.indices)
        given = self._given
        if isinstance(given, nn.Module) and not any(map(is_lazy, (*given.parameters(), *given.buffers()))):
            weights = flat_weights(given)
        elif may_differ:
            return
        else:
            state: Any = self._pool.ask({0: Call(EngineJob.state_dict)}, "policy")[0]
            weights = state["policy_state_dict"]
            self._restore(weights, layout)  # it was lazy until a worker has called it
        self._publisher.publish(POLICY_ID, layout.named(weights), self._pool.indices)
        self._publisher.release()

    def _restore(self, weights: Mapping[str, Any], layout: WeightLayout, strict: bool = True) -> None:
        """Load weights of the workers' policy into the user's, if there is one."""
        if isinstance(self._given, nn.Module):
            layer, prefix = list(layers_of(self._given))[-1], layout.prefixes[-1]
            layer.load_state_dict({name.removeprefix(prefix): w for name, w in weights.items()}, strict=strict)

    def loaded(self, states: Each, version: int) -> None:
        """Workers have loaded a state: publish its weights, so that workers to come get them too.

        The user's policy takes them as well: otherwise the next update would undo the load.
        """
        weights = {i: state["policy_state_dict"] for i, state in states.items() if "policy_state_dict" in state}
        if weights and self._layout is not None:
            self._restore(weights[min(weights)], self._layout, strict=False)
        if not weights or not self._publisher.knows(POLICY_ID):
            self._publisher.version = version
            return
        first = weights[min(weights)]
        tensors = self._publisher.layout(POLICY_ID).tensors
        self._publisher.reset(POLICY_ID, first, version, self._pool.indices)
        for index, own in weights.items():
            if any(not torch.equal(own[name], first[name]) for name in tensors if name in first):
                self._publisher.publish_to(index, POLICY_ID, own)
        self._publisher.release()


class InPlaceWeights(WeightsControl):
    """The same for an engine in this process, which may act with the very tensors that the user trains."""

    def __init__(self, pool: Pool[Part], publisher: Publisher, engine: Engine, worker: int) -> None:
        super().__init__(pool, publisher, engine.given_policy, 1)
        self._engine, self._worker = engine, worker

    def update(self, requested: Mapping[str, Any], chosen: Sequence[int] | None = None) -> None:
        """Update the engine, if it is meant."""
        self._is_published = True
        mine = for_worker(requested, self._worker)
        if not mine or (chosen is not None and self._worker not in chosen):
            return
        engine = self._engine
        for model_id in mine:
            engine.find_model(model_id)  # which raises if there is none
        others = {}
        for model_id, source in mine.items():
            is_own = model_id == POLICY_ID and (
                source is None or any(source is layer for layer in layers_of(engine.given_policy))
            )
            if is_own and engine.policy is engine.given_policy:
                continue  # trained in place
            others[model_id] = self._named(model_id, None if is_own else source)
        with self._publication():
            for model_id, weights in others.items():
                if self._pool.indices:
                    self._publisher.publish(model_id, weights, self._pool.indices)
                else:  # it is shut down: nothing acts any more, but the policy may be looked at
                    load_weights(engine.model_to_load(model_id), weights)
        self._take_now()

    @property
    def _acts_with_copy(self) -> bool:
        return self._engine.policy is not self._engine.given_policy

    @property
    def _layout(self) -> WeightLayout | None:
        policy = self._engine.policy
        return WeightLayout.of(policy) if self._acts_with_copy and isinstance(policy, nn.Module) else None

    def _take_now(self) -> None:
        if self.free is None or not self.free.is_busy:  # otherwise they are adopted between two batches
            self._pool.ask(dict.fromkeys(self._pool.indices, Call(EngineJob.adopt)), "new weights")
            with self._publishing:  # or another thread could have published meanwhile, and the version went back
                self._engine.version = self._publisher.version

    def _open(self, model_id: str) -> None:
        """Make a store; the engine may be busy, and need not be asked."""
        self._add(model_id, WeightLayout.of(self._engine.find_model(model_id)))

    def increment(self) -> None:
        """Count one version up."""
        self._is_published = True
        with self._publication():
            self._engine.version = self._publisher.version

    def loaded(self, states: Each, version: int) -> None:
        """The engine has loaded weights into its policy: what was published before is older."""
        super().loaded(states, version)
        self._engine.version = version
