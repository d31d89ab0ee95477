"""Publisher and subscribers: what each worker holds after weights were published to all, or to some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swath.weights import Layout, Publisher, Subscriber


class Workers:
    """Subscribers with a model each, which adopt when they are asked what they hold."""

    def __init__(self, count: int = 2) -> None:
        self.models = [nn.Linear(1, 1) for _ in range(count)]
        for model in self.models:
            nn.init.constant_(model.weight, -5.0)
            nn.init.constant_(model.bias, -6.0)
        self.subscribers = [Subscriber() for _ in range(count)]
        self.publisher = Publisher(lambda worker, news: self.subscribers[worker].take_from(news))
        self.publisher.add("policy", Layout.of(self.models[0]), range(count))

    def to_all(self, **weights: float) -> None:
        self.publisher.version += 1
        self.publisher.publish("policy", _tensors(weights), range(len(self.models)))

    def to_one(self, worker: int, **weights: float) -> None:
        self.publisher.version += 1
        self.publisher.publish_to(worker, "policy", _tensors(weights))

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


def test_nothing_is_adopted_before_something_is_published(workers: Workers) -> None:
    assert workers.held(0) == (0, -5.0, -6.0)


def test_to_all(workers: Workers) -> None:
    workers.to_all(weight=1, bias=2)
    assert workers.held(0) == workers.held(1) == (1, 1, 2)


def test_the_first_weights_may_be_a_part(workers: Workers) -> None:
    workers.to_all(weight=1)
    assert workers.held(0) == (1, 1, -6)
    workers.to_one(1, bias=3)
    assert workers.held(1) == (2, 1, 3)
    assert workers.held(0) == (1, 1, -6)


def test_to_one(workers: Workers) -> None:
    workers.to_all(weight=1, bias=2)
    workers.to_one(1, weight=7, bias=8)
    assert workers.held(0) == (1, 1, 2)
    assert workers.held(1) == (2, 7, 8)


def test_to_all_after_to_one(workers: Workers) -> None:
    workers.to_one(1, weight=7, bias=8)
    workers.to_all(weight=1, bias=2)
    assert workers.held(0) == workers.held(1) == (2, 1, 2)


def test_a_part_to_one_leaves_what_all_were_given_since(workers: Workers) -> None:
    workers.to_one(1, weight=7, bias=8)
    workers.to_all(weight=1, bias=2)
    workers.to_one(1, bias=9)
    assert workers.held(1) == (3, 1, 9)
    assert workers.held(0) == (2, 1, 2)


def test_a_part_to_all_leaves_what_one_was_given(workers: Workers) -> None:
    workers.to_all(weight=1, bias=2)
    workers.to_one(1, weight=7, bias=8)
    workers.to_all(bias=3)
    assert workers.held(0) == (3, 1, 3)
    assert workers.held(1) == (3, 7, 3)


def test_a_part_to_all_after_all_took_the_place_of_what_one_was_given(workers: Workers) -> None:
    workers.to_one(1, weight=7, bias=8)
    workers.to_all(weight=1, bias=2)
    workers.to_all(bias=3)
    assert workers.held(0) == workers.held(1) == (3, 1, 3)


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
        subscriber = Subscriber()
        for news in workers.publisher.introduce(index):
            subscriber.take_from(news)
        workers.subscribers[index], workers.models[index] = subscriber, nn.Linear(1, 1)
        assert workers.held(index) == wanted


def test_extra_state_that_grows() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def get_extra_state(self) -> list[int]:
            return self.seen

        def set_extra_state(self, state: list[int]) -> None:
            self.seen = list(state)

    model, subscriber = Remembering(), Subscriber()
    told: list[Any] = []
    publisher = Publisher(lambda worker, news: (told.append(news), subscriber.take_from(news))[1])
    publisher.add("policy", Layout.of(model), [0])
    for version in range(1, 200):
        publisher.version = version
        publisher.publish("policy", {"_extra_state": list(range(version * 50))}, [0])
        subscriber.adopt(lambda name: model)
        assert model.seen == list(range(version * 50))
        assert subscriber.version == version
    assert len(told) < 12, "a new store for each version"
