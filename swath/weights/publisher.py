"""How weights get from a trainer to its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from swath.errors import DoesNotFitError
from swath.runtime.carrier import Carrier, Topic
from swath.runtime.snapshots import Snapshots, SnapshotStore, Values
from swath.weights.sources import WeightLayout, load_weights


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
        """Make a store for a model, and let the workers take from it."""
        self._layouts[model_id] = layout
        self._stores[model_id, None] = self._carrier.open_snapshots(layout.contents)
        for worker in workers:
            self._carrier.subscribe(worker, (model_id, None), self._stores[model_id, None])

    def layout(self, model_id: str) -> WeightLayout:
        """What the model's weights look like."""
        return self._layouts[model_id]

    def publish(self, model_id: str, weights: Mapping[str, Any], workers: Iterable[int]) -> None:
        """Publish weights (by the layout's names) under the present version, for all workers."""
        before = self._stores[model_id, None].version
        if not self.layout(model_id).is_all(weights):
            for (name, worker), own in list(self._stores.items()):
                if name == model_id and worker is not None and own.version > before:
                    self.publish_to(worker, model_id, weights)  # it keeps what it has of its own
        self._publish((model_id, None), weights, workers)

    def publish_to(self, worker: int, model_id: str, weights: Mapping[str, Any]) -> None:
        """Publish weights under the present version, for one worker."""
        own, shared = self._stores.get((model_id, worker)), self._stores[model_id, None]
        if shared.version > (-1 if own is None else own.version):
            weights = {**shared.snapshot(), **weights}
        if own is None:
            own = self._stores[model_id, worker] = self._carrier.open_snapshots(self.layout(model_id).contents)
            self._carrier.subscribe(worker, (model_id, worker), own)
        self._publish((model_id, worker), weights, [worker])

    def _publish(self, topic: Topic, weights: Mapping[str, Any], workers: Iterable[int]) -> None:
        store = self._stores[topic]
        try:
            store.publish(weights, self.version)
        except DoesNotFitError as error:
            larger = replace(store.contents, extra_room=2 * max(error.needed, store.contents.extra_room))
            before = {} if store.version < 0 else store.snapshot()
            store = self._stores[topic] = self._carrier.open_snapshots(larger)
            store.publish({**before, **weights}, self.version)
            for worker in workers:
                self._carrier.subscribe(worker, topic, store)

    def reset(self, model_id: str, weights: Mapping[str, Any], version: int, workers: Iterable[int]) -> None:
        """Begin anew with `weights`, at a version that may be older than what workers hold."""
        self.version = version
        self._stores = {topic: store for topic, store in self._stores.items() if topic[0] != model_id}
        store = self._stores[model_id, None] = self._carrier.open_snapshots(self.layout(model_id).contents)
        store.publish(weights, version)
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

    def adopt(self, find: Callable[[str], nn.Module]) -> bool:
        """Load what is newer than what the models hold; whether there was anything."""
        return self.take(lambda model_id, weights: load_weights(find(model_id), weights))

    def take(self, load: Callable[[str, Values], object]) -> bool:
        """Let `load` copy what is newer than what it has got, again if it changes meanwhile; whether anything was."""
        changed = False
        for model_id in dict.fromkeys(name for name, _ in self._stores):
            stores = [(worker is not None, store) for (name, worker), store in self._stores.items() if name == model_id]
            _, newest = max(stores, key=lambda pair: (pair[1].version, pair[0]))
            if newest.version > self._held.get(model_id, -1):
                self._held[model_id] = newest.adopt(partial(load, model_id))
                self.version, changed = max(self._held.values()), True
        return changed
