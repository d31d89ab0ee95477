"""Looking into a collector by name: attributes, calls, models, the worker's index."""

from typing import Any

import pytest
import torch
from common import net
from inside import follow
from kinds import HERE, MIXED, SYNC, SYNC_HERE, Kind, Make, over

from swath.envs import GymEnv, SerialEnv
from swath.testing import counting_envs


def serial_env() -> SerialEnv:
    return SerialEnv(2, [lambda make=make: GymEnv(make) for make in counting_envs(2)])


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


@over(MIXED, needs="one_env")
def test_answers_are_the_object_itself_or_one_for_each_worker(make: Make, kind: Kind) -> None:
    """As in TorchRL; `getattr_env` and `getattr_policy` ask the first worker, whose env and policy act."""
    collector = make(serial_env, net(3.0), lanes=2)
    count = max(1, kind.workers)
    wanted: Any = [2] * count if kind.workers else 2
    assert collector.get_distant_attr("env.num_lanes") == wanted
    assert collector.cascade_execute("getattr_env", "num_lanes") == wanted
    assert collector.map_fn("getattr_env", [("num_lanes",)] * count) == [2] * count
    assert collector.getattr_env("num_lanes") == 2
    assert collector.getattr_env("envs[0].batch_size") == torch.Size([])
    assert collector.getattr_policy("module.bias").tolist() == [3.0, 3.0]
    assert collector.getattr_policy("in_keys") == ["observation"]
    for ask in (collector.getattr_env, collector.getattr_policy):
        with pytest.raises(AttributeError, match="nothing"):
            ask("nothing")
    assert collector.next() is not None


def test_attributes_of_a_collector_are_the_objects_themselves(make: Make) -> None:
    policy = net()
    collector = make(serial_env, policy, lanes=2, frames_per_batch=10)
    assert collector.get_distant_attr("env.batch_size") == torch.Size([2])
    assert isinstance(collector.get_distant_attr("env.envs[1]"), GymEnv)
    assert collector.get_distant_attr("config.frames_per_batch") == 10
    assert collector.getattr_policy("module.bias") is policy.module.bias
    assert collector.get_model("policy") is policy
    assert collector.get_model("policy.module") is policy.module
    with pytest.raises(AttributeError):
        collector.get_model("critic")


def test_calls_of_a_collector(make: Make) -> None:
    collector = make(serial_env, lanes=2)
    assert collector.cascade_execute("getattr_env", "num_lanes") == 2
    assert collector.cascade_execute("env.set_seed", 3, static_seed=True) == 3
    assert collector.cascade_execute("env.num_lanes") == 2
    with pytest.raises(ValueError, match=r"'env.num_lanes' is 2, which cannot be called"):
        collector.cascade_execute("env.num_lanes", 5)
    assert collector.map_fn("getattr_env", [("num_lanes",), ("is_closed",)]) == [2, False]
    assert collector.map_fn("env.set_seed", [(1,), (2,)], [{"static_seed": True}] * 2) == [1, 2]
    assert collector.map_fn("stats", []) == []
    with pytest.raises(ValueError, match="same length, got 2 and 1"):
        collector.map_fn("env.set_seed", [(1,), (2,)], [{}])
    with pytest.raises(AttributeError, match=r"'env.num_lanes' is 2, which cannot be called"):
        collector.map_fn("env.num_lanes", [()])


@over([SYNC_HERE, SYNC])
def test_each_worker_answers(make: Make) -> None:
    collector = make(None, net(3.0), lanes=2)
    assert collector.get_distant_attr("env.first_lane") == [0, 2]
    assert [told["frames"] for told in collector.cascade_execute("stats")] == [0, 0]
    assert collector.map_fn("get_distant_attr", [("env.first_lane",), ("worker_idx",)]) == [0, 1]
    assert collector.map_fn("get_distant_attr", [(), ()], [{"path": "worker_idx"}] * 2) == [0, 1]
    assert collector.num_workers == 2
    assert collector.num_lanes == 4
    assert len(collector.worker_pids) == 2
    with pytest.raises(AttributeError, match="nothing"):
        collector.cascade_execute("env.nothing")
    assert collector.next().shape == (2, 2, 10)


@over([SYNC])
def test_errors_of_calls_name_the_worker(make: Make) -> None:
    collector = make()
    with pytest.raises(AttributeError, match="nothing") as caught:
        collector.map_fn("get_distant_attr", [("worker_idx",), ("env.nothing",)])
    assert any("worker 1" in note for note in getattr(caught.value, "__notes__", []))
    assert collector.next().shape == (2, 10)


# -- index and name -------------------------------------------------------------------------------------------------


def test_worker_idx(make: Make) -> None:
    collector = make()
    with pytest.raises(RuntimeError, match="no worker_idx"):
        collector.worker_idx  # noqa: B018
    collector.worker_idx = 5
    assert collector.worker_idx == 5


@over(HERE)
def test_repr_tells_what_it_is(make: Make, kind: Kind) -> None:
    text = repr(make(serial_env, net(), lanes=2, frames_per_batch=12))
    env = "2 workers" if kind.workers else "SerialEnv"
    for word in (kind.of.__name__, env, "TensorDictModule", "frames_per_batch=12", "total_frames=-1"):
        assert word in text
