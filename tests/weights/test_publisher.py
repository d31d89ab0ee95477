"""Publisher and subscribers: what each worker holds after weights were published to all, or to some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swath.runtime.carrier import Topic
from swath.runtime.snapshots import SnapshotContents, Snapshots
from swath.weights import Publisher, Subscriber, WeightLayout


class Plane:
    """The weights plane of a carrier: what is subscribed to is at hand."""

    def __init__(self, subscribers: list[Subscriber]) -> None:
        self.subscribers = subscribers
        self.opened = 0

    def open_snapshots(self, contents: SnapshotContents) -> Snapshots:
        self.opened += 1
        return Snapshots(contents)

    def subscribe(self, index: int, topic: Topic, snapshots: Any) -> None:
        self.subscribers[index].subscribe(topic, snapshots)


class Workers:
    """Subscribers with a model each, which adopt when they are asked what they hold."""

    def __init__(self, count: int = 2) -> None:
        self.models = [nn.Linear(1, 1) for _ in range(count)]
        for model in self.models:
            nn.init.constant_(model.weight, -5.0)
            nn.init.constant_(model.bias, -6.0)
        self.subscribers = [Subscriber() for _ in range(count)]
        self.publisher = Publisher(Plane(self.subscribers))
        self.publisher.add("policy", WeightLayout.of(self.models[0]), range(count))

    def to_all(self, **weights: float) -> None:
        self.publisher.version += 1
        self.publisher.publish("policy", _tensors(weights), range(len(self.models)))
        self.publisher.release()

    def to_one(self, worker: int, **weights: float) -> None:
        self.publisher.version += 1
        self.publisher.publish_to(worker, "policy", _tensors(weights))
        self.publisher.release()

    def held(self, worker: int) -> tuple[int, float, float]:
        """Version, weight and bias."""
        model = self.models[worker]
        self.subscribers[worker].adopt(lambda name: model)
        return self.subscribers[worker].version, model.weight.item(), model.bias.item()


def _tensors(weights: dict[str, float]) -> dict[str, Any]:
    return {name: torch.full((1, 1) if name == "weight" else (1,), value) for name, value in weights.items()}


@pytest.fixture
def workers() -> Workers:
    return Workers()


A, B = {"weight": 1.0, "bias": 2.0}, {"weight": 7.0, "bias": 8.0}
STORIES: dict[str, tuple[list[tuple[int | None, dict[str, float]]], list[tuple[int, float, float]]]] = {
    "nothing is adopted before something is published": ([], [(0, -5, -6), (0, -5, -6)]),
    "to all": ([(None, A)], [(1, 1, 2), (1, 1, 2)]),
    "the first weights may be a part": ([(None, {"weight": 1.0}), (1, {"bias": 3.0})], [(1, 1, -6), (2, 1, 3)]),
    "to one": ([(None, A), (1, B)], [(1, 1, 2), (2, 7, 8)]),
    "to all after to one": ([(1, B), (None, A)], [(2, 1, 2), (2, 1, 2)]),
    "a part to one leaves what all were given since": (
        [(1, B), (None, A), (1, {"bias": 9.0})],
        [(2, 1, 2), (3, 1, 9)],
    ),
    "a part to all leaves what one was given": ([(None, A), (1, B), (None, {"bias": 3.0})], [(3, 1, 3), (3, 7, 3)]),
    "a part to all after all took the place of what one was given": (
        [(1, B), (None, A), (None, {"bias": 3.0})],
        [(3, 1, 3), (3, 1, 3)],
    ),
}
"""What is published, to all or to one, and what each worker holds then."""


@pytest.mark.parametrize("story", STORIES)
def test_what_workers_hold(workers: Workers, story: str) -> None:
    published, held = STORIES[story]
    for worker, weights in published:
        workers.to_all(**weights) if worker is None else workers.to_one(worker, **weights)
    assert [workers.held(0), workers.held(1)] == held


def test_beginning_anew_at_an_older_version(workers: Workers) -> None:
    for _ in range(5):
        workers.to_all(weight=1, bias=2)
    workers.to_one(1, weight=7, bias=8)
    assert workers.held(0)[0] == 5
    workers.publisher.reset("policy", _tensors({"weight": 3, "bias": 4}), 2, range(2))
    assert workers.held(0) == workers.held(1) == (2, 3, 4)
    workers.publisher.publish_to(1, "policy", _tensors({"weight": 9, "bias": 9}))
    assert workers.held(1) == (2, 9, 9), "what is one's own comes first in the same version"
    assert workers.held(0) == (2, 3, 4)


def test_a_new_worker_in_the_place_of_another(workers: Workers) -> None:
    workers.to_all(weight=1, bias=2)
    workers.to_one(1, weight=7, bias=8)
    for index, wanted in ((0, (1, 1.0, 2.0)), (1, (2, 7.0, 8.0))):
        workers.subscribers[index], workers.models[index] = Subscriber(), nn.Linear(1, 1)
        workers.publisher.resubscribe(index)
        assert workers.held(index) == wanted


def test_a_publisher_knows_its_models(workers: Workers) -> None:
    assert workers.publisher.knows("policy")
    assert not workers.publisher.knows("critic")


class Remembering(nn.Module):
    """A module with extra state, and one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.weight = nn.Parameter(torch.zeros(1))

    def get_extra_state(self) -> list[int]:
        return self.seen

    def set_extra_state(self, state: list[int]) -> None:
        self.seen = list(state)


def test_extra_state_that_grows() -> None:
    model, subscriber = Remembering(), Subscriber()
    plane = Plane([subscriber])
    publisher = Publisher(plane)
    publisher.add("policy", WeightLayout.of(model), [0])
    for version in range(1, 200):
        publisher.version = version
        publisher.publish("policy", {"_extra_state": list(range(version * 50))}, [0])
        publisher.release()
        subscriber.adopt(lambda name: model)
        assert model.seen == list(range(version * 50))
        assert subscriber.version == version
    assert plane.opened < 12, "a new store for each version"


@pytest.mark.parametrize("published", [{"weight": torch.ones(1)}, {}])
def test_extra_state_that_outgrows_its_store_leaves_the_rest_as_it_was(published: dict[str, Any]) -> None:
    """Also what was never published, which is left to the worker."""
    model, subscriber = Remembering(), Subscriber()
    nn.init.constant_(model.weight, -5.0)
    publisher = Publisher(Plane([subscriber]))
    publisher.add("policy", WeightLayout.of(model), [0])
    publisher.publish("policy", published, [0])
    publisher.version = 1
    publisher.publish("policy", {"_extra_state": list(range(10_000))}, [0])
    subscriber.adopt(lambda name: model)
    assert (subscriber.version, len(model.seen)) == (1, 10_000)
    assert model.weight.item() == (1.0 if published else -5.0)


def test_what_is_published_together_is_taken_together() -> None:
    subscriber, models = Subscriber(), {name: nn.Linear(1, 1) for name in ("policy", "reward")}
    publisher = Publisher(Plane([subscriber]))
    for name, model in models.items():
        publisher.add(name, WeightLayout.of(model), [0])

    def held() -> tuple[int, list[float]]:
        subscriber.adopt(models.__getitem__)
        return subscriber.version, [model.weight.item() for model in models.values()]

    def publish(name: str, value: float) -> None:
        publisher.publish(name, _tensors({"weight": value, "bias": value}), [0])

    for version in range(1, 6):
        publisher.version = version
        publish("policy", version)
        assert held()[0] == version - 1, "half of it was taken"
        publish("reward", version)
        assert held()[0] == version - 1
        publisher.release()
        assert held() == (version, [version, version])
    publisher.version = 6
    publish("reward", 7.0)
    publisher.release()
    assert held() == (6, [5.0, 7.0]), "one model alone"


def test_versions_that_overtake_a_worker_are_taken_together_too() -> None:
    """While it takes the first of two models, all copies of the second are written anew."""
    subscriber, taken = Subscriber(), dict[str, float]()
    publisher = Publisher(Plane([subscriber]))
    for name in ("policy", "reward"):
        publisher.add(name, WeightLayout.of(nn.Linear(1, 1)), [0])

    def publish() -> None:
        publisher.version += 1
        for name in ("policy", "reward"):
            publisher.publish(name, _tensors(dict.fromkeys(("weight", "bias"), float(publisher.version))), [0])
        publisher.release()

    def load(name: str, weights: Any) -> None:
        taken[name] = weights["weight"].item()
        if name == "policy" and publisher.version < 20:
            for _ in range(4):
                publish()

    publish()
    assert subscriber.take(load)
    assert taken == {"policy": publisher.version, "reward": publisher.version}
    assert subscriber.version == publisher.version


def test_a_worker_that_is_overtaken_while_it_looks_does_not_keep_half_of_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was newest is overwritten while it is taken; and what was released then, before the worker has found it."""
    workers, newest_of, looks = Workers(1), Snapshots.newest_of, list[int]()

    def publish_often() -> None:
        for _ in range(4):
            version = float(workers.publisher.version + 1)
            workers.to_all(weight=version, bias=version)

    def look(store: Snapshots, released: int) -> int:
        looks.append(released)
        if len(looks) == 2:
            publish_often()
        return newest_of(store, released)

    def load(name: str, weights: Any) -> None:
        weight = weights["weight"].item()
        if len(looks) == 1:
            publish_often()
        taken[:] = [weight, weights["bias"].item()]

    taken = list[float]()
    workers.to_all(weight=1.0, bias=1.0)
    monkeypatch.setattr(Snapshots, "newest_of", look)
    assert workers.subscribers[0].take(load)
    assert taken == [9.0, 9.0]
    assert workers.subscribers[0].version == 9
    assert len(looks) >= 3, "it was never overtaken while it looked"


def test_half_of_a_model_is_not_kept_because_another_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies of one are overwritten while it is taken, and again between two looks; of the other, none."""
    subscriber, newest_of, looks = Subscriber(), Snapshots.newest_of, list[int]()
    publisher = Publisher(Plane([subscriber]))
    for name in ("policy", "reward"):
        publisher.add(name, WeightLayout.of(nn.Linear(1, 1)), [0])

    def publish(*names: str) -> None:
        publisher.version += 1
        for name in names:
            publisher.publish(name, _tensors(dict.fromkeys(("weight", "bias"), float(publisher.version))), [0])
        publisher.release()

    def look(store: Snapshots, released: int) -> int:
        looks.append(released)
        if len(looks) == 3:  # for the second time, before the first model
            for _ in range(4):
                publish("policy")
        return newest_of(store, released)

    def load(name: str, weights: Any) -> None:
        weight = weights["weight"].item()
        for _ in range(4 if len(looks) == 2 else 0):
            publish("policy")
        taken[name] = (weight, weights["bias"].item())

    taken = dict[str, tuple[float, float]]()
    publish("policy", "reward")
    monkeypatch.setattr(Snapshots, "newest_of", look)
    assert subscriber.take(load)
    assert taken == {"policy": (9.0, 9.0), "reward": (1.0, 1.0)}


def test_a_worker_does_not_wait_for_ever_for_a_store_that_nobody_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the stores was replaced by a larger one, which the worker has not heard of yet."""
    monkeypatch.setattr("swath.weights.publisher.PATIENCE_S", 0.05)
    workers, taken = Workers(1), list[float]()
    workers.to_all(weight=1.0, bias=1.0)
    left = Snapshots(WeightLayout.of(nn.Linear(1, 1)).contents)
    left.release(1)
    workers.subscribers[0].subscribe(("reward", None), left)

    def load(name: str, weights: Any) -> None:
        weight = weights["weight"].item()
        for version in range(2, 6) if not taken else ():
            workers.to_all(weight=float(version), bias=float(version))
        taken[:] = [weight, weights["bias"].item()]

    assert workers.subscribers[0].take(load)
    assert taken == [5.0, 5.0]
