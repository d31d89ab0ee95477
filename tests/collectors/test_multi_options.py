"""Every other option and call of collectors with workers: what it does, and where."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn

from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector, progress
from swath.errors import EndlessError
from swath.keys import TRAJ_IDS
from swath.modules import ExplorationType, set_exploration_type
from swath.testing import CountingEnv, assert_frames_belong

KINDS = [MultiSyncCollector, MultiAsyncCollector]


def net(value: float = 0.0) -> nn.Module:
    linear = nn.Linear(3, 2)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.bias, value)
    return TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])


def env(lanes: int = 0, lengths: Any = 5) -> Callable[[], CountingEnv]:
    return lambda: CountingEnv((lanes,) if lanes else (), lengths=lengths)


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes collectors of two workers in this process, if not told otherwise."""
    made: list[Any] = []

    def build(kind: Any, policy: Any = None, **options: Any) -> Any:
        options = {"debug": True, "frames_per_batch": 20, **options}
        makers = options.pop("env", env())
        workers = options.pop("workers", 2)
        made.append(kind(makers if kind is AsyncCollector else [makers] * workers, policy, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


# -- how is acted and stepped ----------------------------------------------------------------------------------------


def random_batches(collector: Any, count: int) -> list[bool]:
    return [bool((collector.next()["action"] != 50.0).any()) for _ in range(count)]


@pytest.mark.parametrize("limit", [None, 0, -1, 30, 40, 41])
def test_init_random_frames(make: Any, limit: int | None) -> None:
    """Whole batches of all workers, until so many frames are collected."""
    collector = make(MultiSyncCollector, net(50.0), init_random_frames=limit)
    count = 0 if limit is None or limit <= 0 else -(-limit // 20)
    assert random_batches(collector, 5) == [number < count for number in range(5)]


def test_init_random_frames_of_async_workers(make: Any) -> None:
    collector = make(MultiAsyncCollector, net(50.0), init_random_frames=100, total_frames=400)
    is_random = [bool((batch["action"] != 50.0).any()) for batch in collector]
    assert sum(is_random) == 5
    assert len(is_random) == 20


def test_random_frames_are_those_of_the_action_space(make: Any) -> None:
    batch = make(MultiSyncCollector, net(50.0), init_random_frames=20, debug=False).next()
    assert (batch["action"].sum(-1) == 1).all()
    assert ((batch["action"] == 0) | (batch["action"] == 1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_reset_at_each_iter(make: Any, kind: Any) -> None:
    collector = make(kind, reset_at_each_iter=True, env=env(0, 100), total_frames=80)
    ids: list[int] = []
    for batch in collector:
        for row in batch.unbind(0) if kind is MultiSyncCollector else [batch]:
            assert row["observation"][0, 2] == 0
            assert_frames_belong(row)
            ids += row[TRAJ_IDS].unique().tolist()
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_max_frames_per_traj(make: Any, kind: Any) -> None:
    for batch in make(kind, max_frames_per_traj=3, env=env(2, 100), frames_per_batch=24, total_frames=96):
        parts = batch.unbind(0) if kind is MultiSyncCollector else [batch]
        for part in parts:
            assert_frames_belong(part)
            assert int(part["next", "step_count"].max()) == 3
            assert torch.equal(part["next", "truncated"], part["next", "step_count"] == 3)


@pytest.mark.parametrize("kind", KINDS)
def test_set_truncated(make: Any, kind: Any) -> None:
    for batch in make(kind, set_truncated=True, env=env(0, 100), total_frames=80):
        truncated = batch["next", "truncated"][..., 0]
        assert truncated[..., -1].all()
        assert not truncated[..., :-1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_compact_obs(make: Any, kind: Any) -> None:
    batch = make(kind, compact_obs=True).next()
    assert "observation" in batch
    assert ("next", "observation") not in batch.keys(True)


@pytest.mark.parametrize("kind", KINDS)
def test_without_ids(make: Any, kind: Any) -> None:
    batch = make(kind, track_traj_ids=False).next()
    assert "collector" not in batch
    assert_frames_belong(batch)


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
@pytest.mark.parametrize(
    "kind",
    [ExplorationType.MODE, ExplorationType.RANDOM, None],
)
def test_exploration_type(make: Any, kind: Any, debug: bool) -> None:
    """It counts in the workers too; None leaves it to the policy and to what holds around it, where it runs."""
    policy = TensorDictSequential(
        TensorDictModule(lambda x: x[..., :2] * 0 + torch.tensor([0.1, 0.2]), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=torch.distributions.OneHotCategorical,
            default_interaction_type=ExplorationType.MODE,
        ),
    )
    with set_exploration_type(ExplorationType.RANDOM):
        batch = make(MultiSyncCollector, policy, exploration_type=kind, debug=debug, frames_per_batch=100).next()
    is_greedy = bool((batch["action"] == torch.tensor([0, 1])).all())
    assert is_greedy == (kind is ExplorationType.MODE or (kind is None and not debug))


# -- where things run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_and_init_fn_run_in_the_workers(make: Any, kind: Any, tmp_path: Path) -> None:
    def note(what: str) -> None:
        (tmp_path / f"{what} {os.getpid()}").touch()

    collector = make(
        kind,
        debug=False,
        total_frames=80,
        init_fn=lambda: note("init"),
        pre_collect_hook=lambda: note("pre"),
        post_collect_hook=lambda batch: note("post"),
        postproc=lambda batch: (note("postproc"), batch)[1],
    )
    pids = collector.worker_pids
    assert len({*pids, os.getpid()}) == 3
    list(collector)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {f"{what} {pid}" for what in ("init", "pre", "post") for pid in pids} | {f"postproc {os.getpid()}"}


def test_a_hook_may_be_replaced(make: Any, tmp_path: Path) -> None:
    collector = make(MultiSyncCollector, post_collect_hook=lambda batch: (tmp_path / "first").touch(), debug=False)
    assert collector.post_collect_hook is not None
    collector.set_post_collect_hook(lambda batch: (tmp_path / f"second {os.getpid()}").touch())
    collector.next()
    assert {path.name for path in tmp_path.iterdir()} == {f"second {pid}" for pid in collector.worker_pids}


def test_what_a_hook_changes_is_delivered(make: Any) -> None:
    def hook(batch: TensorDictBase) -> None:
        batch["next", "reward"].fill_(7.0)

    assert (make(MultiSyncCollector, post_collect_hook=hook, debug=False).next()["next", "reward"] == 7).all()


def test_threads(make: Any) -> None:
    before = torch.get_num_threads()
    collector = make(MultiSyncCollector, ThreadCounter(), debug=False, num_sub_threads=1)
    assert (collector.next()["action"] == 1).all()
    assert torch.get_num_threads() == before, "the threads of this process are none of its business"
    collector.shutdown()
    more = make(MultiSyncCollector, ThreadCounter(), debug=False, num_sub_threads=2, num_threads=before + 1)
    assert (more.next()["action"] == 2).all()
    assert torch.get_num_threads() == before + 1
    more.shutdown()
    more.shutdown()
    assert torch.get_num_threads() == before


class ThreadCounter(nn.Module):
    """Acts by the number of torch's threads."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.full_like(observation[..., :2], float(torch.get_num_threads()))


def test_kwargs_for_each_env(make: Any) -> None:
    kwargs = [{"lengths": 3}, {"lengths": 4}]
    collector = make(MultiSyncCollector, create_env_kwargs=kwargs, env=CountingEnv, frames_per_batch=48)
    assert collector.get_distant_attr("env.lengths") == [3, 4]
    assert collector.next()["next", "done"].sum((1, 2)).tolist() == [8, 6]
    same = make(MultiSyncCollector, create_env_kwargs={"lengths": 3}, env=CountingEnv, debug=False)
    assert same.get_distant_attr("env.lengths") == [3, 3]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_ways_to_start_processes(make: Any, method: str) -> None:
    collector = make(MultiSyncCollector, net(1.0), debug=False, mp_start_method=method, workers=1)
    assert (collector.next()["action"] == 1).all()
    assert collector.worker_pids[0] != os.getpid()


# -- asking workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_reaching_into_the_workers(make: Any, debug: bool) -> None:
    collector = make(MultiSyncCollector, net(3.0), debug=debug, env=env(2))
    assert collector.getattr_policy("in_keys") == ["observation"]
    assert collector.getattr_policy("module.bias").tolist() == [3.0, 3.0]
    assert collector.getattr_env("batch_size") == torch.Size([2])
    assert collector.get_distant_attr("env.first_lane") == [0, 2]
    assert collector.cascade_execute("get_policy_version") == [None, None]
    assert [told["frames"] for told in collector.cascade_execute("stats")] == [0, 0]
    assert collector.map_fn("get_distant_attr", [("env.first_lane",), ("worker_idx",)]) == [0, 1]
    assert collector.map_fn("get_distant_attr", [(), ()], [{"path": "worker_idx"}] * 2) == [0, 1]
    assert collector.num_workers == 2
    assert collector.num_lanes == 4
    assert len(collector.worker_pids) == 2
    with pytest.raises(AttributeError, match="nothing"):
        collector.getattr_env("nothing")
    with pytest.raises(AttributeError, match="nothing"):
        collector.getattr_policy("nothing")
    with pytest.raises(AttributeError, match="nothing"):
        collector.cascade_execute("env.nothing")
    assert collector.next().shape == (2, 2, 5)


def test_errors_of_calls_name_the_worker(make: Any) -> None:
    collector = make(MultiSyncCollector, debug=False)
    with pytest.raises(AttributeError, match="nothing") as caught:
        collector.map_fn("get_distant_attr", [("worker_idx",), ("env.nothing",)])
    assert any("worker 1" in note for note in getattr(caught.value, "__notes__", []))
    assert collector.next().shape == (2, 10)


@pytest.mark.parametrize("chosen", [[1], 1, [False, True], torch.tensor([1]), torch.tensor([False, True])], ids=str)
def test_reset_of_some_workers(make: Any, chosen: Any) -> None:
    collector = make(MultiSyncCollector, env=env(0, 100))
    first = collector.next()
    collector.reset(chosen)
    batch = collector.next()
    assert batch["observation"][:, 0, 2].tolist() == [10, 0]
    ids = first[TRAJ_IDS][:, -1], batch[TRAJ_IDS][:, 0]
    assert (ids[0] == ids[1]).tolist() == [True, False]
    collector.reset(reset_idx=[True, False])
    assert collector.next()["observation"][:, 0, 2].tolist() == [0, 10]
    collector.reset()
    assert collector.next()["observation"][:, 0, 2].tolist() == [0, 0]
    collector.reset([])
    assert collector.next()["observation"][:, 0, 2].tolist() == [10, 10]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_stats(make: Any, kind: Any, debug: bool) -> None:
    collector = make(kind, debug=debug, env=env(2, 4), frames_per_batch=40, total_frames=160)
    for _ in collector:
        pass
    stats = collector.stats()
    assert stats["frames"] == stats["total_frames"] == 160
    assert stats["completed"]
    assert stats["episodes"] == 40
    assert stats["mean_return"] == 10
    assert stats["mean_length"] == 4
    assert stats["workers"] == 2
    assert stats["workers_alive"] == 0
    assert stats["worker_restarts"] == stats["lost_frames"] == stats["dropped_frames"] == 0
    assert stats["requested_frames_per_batch"] == 40
    assert all(isinstance(value, int | float | bool) for value in stats.values())
    each = collector.stats(workers="per_worker")
    assert {name.split("/")[0] for name in each} == {"worker_0", "worker_1"}
    assert each["worker_0/frames"] + each["worker_1/frames"] == 160
    both = collector.stats(workers="both")
    assert both == {**stats, **each}


def test_stats_while_workers_live(make: Any) -> None:
    collector = make(MultiAsyncCollector, debug=False)
    collector.next()
    stats = collector.stats()
    assert stats["workers_alive"] == 2
    assert stats["frames"] == 20
    assert stats["waiting_batches"] >= 0
    json.dumps(collector.stats("both"))


def test_a_progress_bar(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    passed = progress.Progress.passed

    def spy(self: Any, batch: Any) -> Any:
        shown.append(1)
        return passed(self, batch)

    monkeypatch.setattr(progress.Progress, "passed", spy)
    for kind in KINDS:
        shown.clear()
        assert len(list(make(kind, progress=True, total_frames=80))) == len(shown) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_traces_of_chosen_workers(make: Any, kind: Any, tmp_path: Path) -> None:
    collector = make(kind, debug=False, total_frames=200)
    path = str(tmp_path / "trace_{worker_idx}.json")
    collector.enable_profile(
        workers=[1], num_rollouts=2, warmup_rollouts=1, save_path=path, activities=("cpu",), with_stack=False
    )
    frames = sum(batch.numel() for batch in collector)
    assert frames == 200
    assert [file.name for file in tmp_path.iterdir()] == ["trace_1.json"]
    assert json.loads((tmp_path / "trace_1.json").read_text())["traceEvents"]


def test_traces_are_switched_off(make: Any, tmp_path: Path) -> None:
    collector = make(MultiSyncCollector, total_frames=100)
    collector.enable_profile(workers=[0, 1], save_path=str(tmp_path / "{worker_idx}.json"), activities=("cpu",))
    collector.disable_profile()
    list(collector)
    assert list(tmp_path.iterdir()) == []


# -- iterating -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_lengths(make: Any, kind: Any) -> None:
    assert len(make(kind, total_frames=90)) == 5
    with pytest.raises(EndlessError, match="endless"):
        len(make(kind))
    with pytest.raises(EndlessError, match="episodes"):
        len(make(kind, total_frames=90, trajs_per_batch=2))
    assert make(kind, total_frames=90)


@pytest.mark.parametrize("kind", [*KINDS, AsyncCollector])
def test_the_workers_end_with_the_last_frame(make: Any, kind: Any) -> None:
    collector = make(kind, debug=False, total_frames=40)
    pids = collector.worker_pids
    assert sum(batch.numel() for batch in collector) == 40
    assert collector.closed
    assert collector.next() is None
    assert list(collector) == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="shut down"):
        collector.update_policy_weights_(net())
    with pytest.raises(RuntimeError, match="shut down"):
        collector.set_seed(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_postproc_that_returns_nothing(make: Any, kind: Any) -> None:
    with pytest.raises(TypeError, match="returned None"):
        make(kind, postproc=lambda batch: None).next()


@pytest.mark.parametrize("kind", KINDS)
def test_iterator_gives_frames_whatever_trajs_per_batch_says(make: Any, kind: Any) -> None:
    collector = make(kind, trajs_per_batch=2, total_frames=100)
    batch = next(iter(collector.iterator()))
    assert batch.numel() == 20
    for episodes in collector:
        mask = episodes["collector", "mask"]
        assert mask.sum(1).tolist() == [5, 5]
        assert (episodes["observation"][:, 0, 2] == 0).all()


def test_a_worker_is_an_ordinary_collector(make: Any) -> None:
    collector = make(MultiSyncCollector, net(2.0))
    inner = collector._workers._crew.processes[0].session.collector
    assert type(inner) is Collector
    assert inner.worker_idx == 0


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_ordinary_tensors(make: Any, kind: Any) -> None:
    layer = nn.Linear(3, 1)
    with torch.inference_mode():
        collector = make(kind, net(1.0), debug=False)
        batch = collector.next()
    (layer(batch["observation"]) - batch["next", "reward"]).square().mean().backward()
    assert layer.weight.grad is not None
    for value in batch.values(True, True):
        assert type(value) is torch.Tensor
        assert value.is_contiguous()
        assert not value.is_inference()
        assert not value.requires_grad
    assert batch.device is None


@pytest.mark.parametrize("option", ["device", "storing_device"])
def test_a_storing_device(make: Any, option: str) -> None:
    for kind in KINDS:
        assert make(kind, **{option: "cpu"}).next().device == torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_episodes_in_inference_mode(make: Any, kind: Any) -> None:
    """Wherever the collector was made and asked, what it delivers can be trained on."""
    policy = net(1.0)
    with torch.inference_mode():
        collector = make(kind, policy, trajs_per_batch=2, debug=False)
        batch = next(iter(collector))
    collector.update_policy_weights_(net(2.0))
    assert not batch["observation"].is_inference()
    for _ in range(500):  # one worker may be much slower than the other, and still have an old batch to deliver
        batch = collector.next()
        if (batch["action"][batch["collector", "mask"]] == 2).all():
            break
    else:
        pytest.fail("The new weights have not arrived.")
