"""How weights get from a trainer to its workers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from torch import nn

from swath.errors import DoesNotFitError
from swath.runtime import undisturbed
from swath.runtime.carrier import Carrier, Topic
from swath.runtime.snapshots import SnapshotContents, Snapshots, SnapshotStore, Values
from swath.weights.sources import WeightLayout, load_weights

PATIENCE_S = 1.0
"""How long a worker looks for all of a publication, when it has got half of one."""


class Publisher:
    """The trainer's side: one store per model for all workers, and one more for a worker that is given something else.

    Versions are counted over all models and workers. Of the store for all and its own, a worker takes what is newer,
    and its own of what is of the same version.
    """

    def __init__(self, carrier: Carrier) -> None:
        self.version = 0
        self._carrier = carrier
        self._layouts: dict[str, WeightLayout] = {}
        self._stores: dict[Topic, SnapshotStore] = {}

    def knows(self, model_id: str) -> bool:
        """Whether there is a store for this model."""
        return model_id in self._layouts

    def add(self, model_id: str, layout: WeightLayout, workers: Iterable[int]) -> None:
        """Make a store for a model, and let the workers take from it: all of that, or nothing."""
        with undisturbed:
            store = self._stores[model_id, None] = self._open(layout.contents)
            for worker in workers:
                self._carrier.subscribe(worker, (model_id, None), store)
            self._layouts[model_id] = layout

    def _open(self, contents: SnapshotContents) -> SnapshotStore:
        store = self._carrier.open_snapshots(contents)
        store.release(self.version)  # there is nothing in it to be taken
        return store

    def layout(self, model_id: str) -> WeightLayout:
        """What the model's weights look like."""
        return self._layouts[model_id]

    def release(self) -> None:
        """All of the present version is published: let workers take it."""
        for store in list(self._stores.values()):
            store.release(self.version)

    def publish(self, model_id: str, weights: Mapping[str, Any], workers: Iterable[int]) -> None:
        """Publish weights (by the layout's names) under the present version, for all workers; see `release`."""
        before = self._stores[model_id, None].version
        if not self.layout(model_id).is_all(weights):
            for (name, worker), own in list(self._stores.items()):
                if name == model_id and worker is not None and own.version > before:
                    self.publish_to(worker, model_id, weights)  # it keeps what it has of its own
        self._publish((model_id, None), weights, workers)

    def publish_to(self, worker: int, model_id: str, weights: Mapping[str, Any]) -> None:
        """Publish weights under the present version, for one worker; see `release`."""
        own, shared = self._stores.get((model_id, worker)), self._stores[model_id, None]
        if shared.version > (-1 if own is None else own.version):
            weights = {**shared.snapshot(), **weights}
        if own is None:
            own = self._stores[model_id, worker] = self._open(self.layout(model_id).contents)
            self._carrier.subscribe(worker, (model_id, worker), own)
        self._publish((model_id, worker), weights, [worker])

    def _publish(self, topic: Topic, weights: Mapping[str, Any], workers: Iterable[int]) -> None:
        store = self._stores[topic]
        try:
            store.publish(weights, self.version, releases=False)
        except DoesNotFitError as error:
            larger = replace(store.contents, extra_room=2 * max(error.needed, store.contents.extra_room))
            before = {} if store.version < 0 else store.snapshot()
            store = self._stores[topic] = self._open(larger)
            store.publish({**before, **weights}, self.version, releases=False)
            for worker in workers:
                self._carrier.subscribe(worker, topic, store)

    def reset(self, model_id: str, weights: Mapping[str, Any], version: int, workers: Iterable[int]) -> None:
        """Begin anew with `weights`, at a version that may be older than what workers hold."""
        self.version = version
        self._stores = {topic: store for topic, store in self._stores.items() if topic[0] != model_id}
        store = self._stores[model_id, None] = self._open(self.layout(model_id).contents)
        store.publish(weights, version, releases=False)
        self.release()
        for worker in workers:
            for topic in ((model_id, None), (model_id, worker)):
                self._carrier.subscribe(worker, topic, store)

    def resubscribe(self, worker: int) -> None:
        """Let a new worker take what the one before it took."""
        for (model_id, only_for), store in self._stores.items():
            if only_for in (None, worker):
                self._carrier.subscribe(worker, (model_id, only_for), store)


class Subscriber:
    """A worker's side."""

    def __init__(self) -> None:
        self.version = 0
        """The newest version that was adopted."""
        self._stores: dict[Topic, Snapshots] = {}
        self._held: dict[str, int] = {}

    def subscribe(self, topic: Topic, snapshots: Snapshots) -> None:
        """Look at a store from now on, and take what it has, be it older than what is held."""
        self._stores[topic] = snapshots
        self._held.pop(topic[0], None)

    @property
    def is_behind(self) -> bool:
        """Whether there is something newer than what the models hold."""
        return bool(self._stores) and bool(self._due())

    def adopt(self, find: Callable[[str], nn.Module]) -> bool:
        """Load what is newer than what the models hold; whether there was anything."""
        return self.take(lambda model_id, weights: load_weights(find(model_id), weights))

    def take(self, load: Callable[[str, Values], object]) -> bool:
        """Let `load` copy what is newer than what it has got, again if it changes meanwhile; whether anything was."""
        due, torn, has_changed = self._due(), dict[str, Snapshots](), False
        patient_until = math.inf
        while due or torn:
            for model_id, (store, version) in due.items():
                self._held.pop(model_id, None)
                torn[model_id] = store
                if not store.adopt_version(partial(load, model_id), version):
                    break
                del torn[model_id]
                self._held[model_id], has_changed = version, True
            if not torn:
                break
            # Who is late begins with what is newest by now. There may be nothing, if all has changed during the look,
            # too: that is no reason to leave with half of the weights, nor to wait for ever for what belongs to them.
            due, patient_until = self._due(), min(patient_until, monotonic() + PATIENCE_S)
            if not due:
                os.sched_yield()  # to whoever publishes: that takes microseconds
            if monotonic() > patient_until:
                due = {name: (store, store.newest_of(store.released)) for name, store in torn.items()} | due
        if has_changed:
            self.version = max(self._held.values())
        return has_changed

    def _due(self) -> dict[str, tuple[Snapshots, int]]:
        """What to take of each model that has got something else: the newest that is released in all stores."""
        released = min((store.released for store in self._stores.values()), default=-1)
        found: dict[str, tuple[Snapshots, int]] = {}
        for (model_id, worker), store in self._stores.items():
            version = store.newest_of(released)
            if version > found.get(model_id, (store, -1))[1] - (worker is not None):
                found[model_id] = (store, version)
        return {name: pair for name, pair in found.items() if pair[1] not in (-1, self._held.get(name))}
