"""Looking into a collector by name: attributes, calls, models, hooks, the worker's index."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import BaseCollector, Collector, DataCollectorBase, SyncDataCollector
from swath.envs import GymEnv, SerialEnv
from swath.runtime.paths import follow
from swath.testing import CountingGymEnv, counting_envs


@pytest.fixture
def policy() -> TensorDictModule:
    return TensorDictModule(nn.Sequential(nn.Linear(3, 2)), in_keys=["observation"], out_keys=["action"])


@pytest.fixture
def collector(policy: TensorDictModule) -> Iterator[Collector]:
    factories: list[Any] = [lambda make=make: GymEnv(make) for make in counting_envs(2)]
    with Collector(SerialEnv(2, factories), policy, frames_per_batch=10) as collector:
        yield collector


# -- paths ----------------------------------------------------------------------------------------------------------


class Room:
    name = "room"

    def __init__(self) -> None:
        self.shelf = [{"book": self, "a.b": 1}, {"book": 2}]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("name", "room"),
        ("shelf[1]['book']", 2),
        ('shelf[-1]["book"]', 2),
        ("shelf[0]['book'].shelf[1]['book']", 2),
        ("shelf[0]['a.b']", 1),
        (".name", "room"),
    ],
)
def test_paths_are_followed(path: str, found: Any) -> None:
    assert follow(Room(), path) == found


def test_an_empty_path_is_the_thing_itself() -> None:
    room = Room()
    assert follow(room, "") is room


@pytest.mark.parametrize("path", ["shelf[", "shelf[x]", "name.", "na me", "shelf[0", "__import__('os')"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises((ValueError, AttributeError), match=r"cannot be read at position|no attribute"):
        follow(Room(), path)


@pytest.mark.parametrize(("path", "kind"), [("window", AttributeError), ("shelf[9]", IndexError)])
def test_what_is_not_there_raises_as_usual(path: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        follow(Room(), path)


# -- attributes and calls -------------------------------------------------------------------------------------------


def test_get_distant_attr(collector: Collector) -> None:
    assert collector.get_distant_attr("env.batch_size") == torch.Size([2])
    assert isinstance(collector.get_distant_attr("env.envs[1]"), GymEnv)
    assert collector.get_distant_attr("config.frames_per_batch") == 10


def test_getattr_env_and_policy(collector: Collector, policy: TensorDictModule) -> None:
    assert collector.getattr_env("num_lanes") == 2
    assert collector.getattr_env("envs[0].batch_size") == torch.Size([])
    assert collector.getattr_policy("module[0].bias") is policy.module[0].bias
    assert collector.getattr_policy("in_keys") == ["observation"]
    for ask in (collector.getattr_env, collector.getattr_policy):
        with pytest.raises(AttributeError):
            ask("nothing")


def test_get_model(collector: Collector, policy: TensorDictModule) -> None:
    assert collector.get_model("policy") is policy
    assert collector.get_model("policy.module[0]") is policy.module[0]
    with pytest.raises(AttributeError):
        collector.get_model("critic")


def test_cascade_execute(collector: Collector) -> None:
    assert collector.cascade_execute("getattr_env", "num_lanes") == 2
    assert collector.cascade_execute("env.set_seed", 3, static_seed=True) == 3
    assert collector.cascade_execute("env.num_lanes") == 2
    with pytest.raises(ValueError, match=r"'env.num_lanes' is 2, which cannot be called"):
        collector.cascade_execute("env.num_lanes", 5)


def test_map_fn(collector: Collector) -> None:
    assert collector.map_fn("getattr_env", [("num_lanes",), ("is_closed",)]) == [2, False]
    assert collector.map_fn("env.set_seed", [(1,), (2,)], [{"static_seed": True}] * 2) == [1, 2]
    assert collector.map_fn("stats", []) == []
    with pytest.raises(ValueError, match="same length, got 2 and 1"):
        collector.map_fn("env.set_seed", [(1,), (2,)], [{}])
    with pytest.raises(AttributeError, match=r"'env.num_lanes' is 2, which cannot be called"):
        collector.map_fn("env.num_lanes", [()])


# -- index and hooks ------------------------------------------------------------------------------------------------


def test_worker_idx(collector: Collector) -> None:
    with pytest.raises(RuntimeError, match="no worker_idx"):
        collector.worker_idx  # noqa: B018
    collector.worker_idx = 5
    assert collector.worker_idx == 5


def test_hooks() -> None:
    calls: list[str] = []

    def before() -> None:
        calls.append("before")

    def behind(batch: Any) -> None:
        calls.append("behind")

    with Collector(
        CountingGymEnv(), frames_per_batch=5, pre_collect_hook=before, post_collect_hook=behind
    ) as collector:
        assert collector.pre_collect_hook is before
        assert collector.post_collect_hook is behind
        collector.next()
        collector.set_post_collect_hook(lambda batch: calls.append("other"))
        collector.next()
        collector.set_post_collect_hook(None)
        collector.next()
        collector.rollout()  # raw, without what comes behind
    assert calls == ["before", "behind", "before", "other", "before", "before"]


def test_hooks_are_none_by_default(collector: Collector) -> None:
    assert collector.pre_collect_hook is None
    assert collector.post_collect_hook is None


def test_repr_tells_what_it_is(collector: Collector) -> None:
    text = repr(collector)
    for word in ("Collector", "SerialEnv", "TensorDictModule", "frames_per_batch=10", "total_frames=-1"):
        assert word in text


def test_legacy_names() -> None:
    assert SyncDataCollector is Collector
    assert DataCollectorBase is BaseCollector
    assert issubclass(Collector, torch.utils.data.IterableDataset)
