"""How weights get from a trainer to its workers on the same machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from swath.weights.sources import Layout, load_weights
from swath.weights.store import DoesNotFitError, WeightStore


@dataclass(frozen=True)
class TakeFrom:
    """Tells a worker of a store to take a model's weights from."""

    model_id: str
    store: WeightStore
    is_own: bool
    """Whether it is for this worker alone."""


class Publisher:
    """The trainer's side: one store per model for all workers, and one more for a worker that is told something else.

    Versions are counted over all models and workers. Of the store for all and its own, a worker takes what is newer,
    and its own of what is of the same version.
    """

    def __init__(self, tell: Callable[[int, TakeFrom], None]) -> None:
        """`tell` sends a worker the news of a store."""
        self.version = 0
        self._tell = tell
        self._shared: dict[str, WeightStore] = {}
        self._own: dict[tuple[str, int], WeightStore] = {}

    def knows(self, model_id: str) -> bool:
        """Whether there is a store for this model."""
        return model_id in self._shared

    def add(self, model_id: str, layout: Layout, workers: Iterable[int]) -> None:
        """Make a store for a model, and tell the workers of it."""
        self._shared[model_id] = WeightStore(layout)
        for worker in workers:
            self._tell(worker, TakeFrom(model_id, self._shared[model_id], is_own=False))

    def layout(self, model_id: str) -> Layout:
        """What the model's weights look like."""
        return self._shared[model_id].layout

    def publish(self, model_id: str, weights: Mapping[str, Any], workers: Iterable[int]) -> None:
        """Publish weights (by the layout's names) under the present version, for all workers."""
        before = self._shared[model_id].version
        for (name, worker), own in list(self._own.items()):
            if name == model_id and own.version > before and not self.layout(model_id).is_all(weights):
                self.publish_to(worker, model_id, weights)  # it keeps what it has of its own
        self._shared[model_id] = self._published(
            self._shared[model_id],
            weights,
            lambda store: [self._tell(worker, TakeFrom(model_id, store, is_own=False)) for worker in workers],
        )

    def publish_to(self, worker: int, model_id: str, weights: Mapping[str, Any]) -> None:
        """Publish weights under the present version, for one worker."""

        def tell(store: WeightStore) -> None:
            self._tell(worker, TakeFrom(model_id, store, is_own=True))

        own, shared = self._own.get((model_id, worker)), self._shared[model_id]
        if shared.version > (-1 if own is None else own.version):
            weights = {**shared.snapshot(), **weights}
        if own is None:
            own = WeightStore(self.layout(model_id))
            tell(own)
        self._own[model_id, worker] = self._published(own, weights, tell)

    def _published(
        self, store: WeightStore, weights: Mapping[str, Any], tell: Callable[[WeightStore], Any]
    ) -> WeightStore:
        try:
            store.publish(weights, self.version)
        except DoesNotFitError as error:
            store = store.larger(error.needed)
            store.publish(weights, self.version)
            tell(store)
        return store

    def reset(self, model_id: str, weights: Mapping[str, Any], version: int, workers: Iterable[int]) -> None:
        """Begin anew with `weights`, at a version that may be older than what workers hold."""
        self.version = version
        self._own = {(name, worker): store for (name, worker), store in self._own.items() if name != model_id}
        store = self._shared[model_id] = WeightStore(self.layout(model_id))
        store.publish(weights, version)
        for worker in workers:
            for is_own in (False, True):
                self._tell(worker, TakeFrom(model_id, store, is_own=is_own))

    def introduce(self, worker: int) -> list[TakeFrom]:
        """What a new worker must be told."""
        stores = [TakeFrom(model_id, store, is_own=False) for model_id, store in self._shared.items()]
        own = [TakeFrom(name, store, is_own=True) for (name, index), store in self._own.items() if index == worker]
        return stores + own

    def newest(self, model_id: str) -> dict[str, Any]:
        """A copy of what all workers were given last."""
        return self._shared[model_id].snapshot()


class Subscriber:
    """A worker's side."""

    def __init__(self) -> None:
        """Know of no store yet."""
        self.version = 0
        """The newest version that was adopted."""
        self._stores: dict[tuple[str, bool], WeightStore] = {}
        self._held: dict[str, int] = {}

    def take_from(self, news: TakeFrom) -> None:
        """Look at a store from now on, and take what it has, be it older than what is held."""
        self._stores[news.model_id, news.is_own] = news.store
        self._held.pop(news.model_id, None)

    def adopt(self, find: Callable[[str], nn.Module]) -> None:
        """Load what is newer than what the models hold."""
        for model_id in {name for name, _ in self._stores}:
            stores = [(is_own, store) for (name, is_own), store in self._stores.items() if name == model_id]
            _, newest = max(stores, key=lambda pair: (pair[1].version, pair[0]))
            if newest.version > self._held.get(model_id, -1):
                self._held[model_id] = newest.adopt(partial(load_weights, find(model_id)))
                self.version = max(self._held.values())
