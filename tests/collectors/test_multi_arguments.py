"""Arguments of collectors with workers: what is refused, by name and before any process starts, and what is not."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import (
    AsyncCollector,
    Collector,
    CollectorConfig,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    PolicyVersion,
)
from swath.collectors.multi_config import MultiConfig
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.modules import ExplorationType
from swath.testing import CountingEnv

FIELDS = [field.name for field in dataclasses.fields(MultiConfig)]
OWN = [name for name in FIELDS if name not in {field.name for field in dataclasses.fields(CollectorConfig)}]
KINDS = [MultiSyncCollector, MultiAsyncCollector]


def net() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What is refused here is refused before a worker is made; tests that need one run it in this process."""
    if "here" not in request.fixturenames:
        monkeypatch.setattr("swath.collectors.workers.Workers.hire_all", lambda self: pytest.fail("a worker is made"))


@pytest.fixture
def here() -> dict[str, Any]:
    return {"frames_per_batch": 10, "debug": True}


def refuse(kind: type[Exception], words: list[str], of: Any = MultiSyncCollector, **options: Any) -> None:
    options = {"create_env_fn": [CountingEnv] * 2, "frames_per_batch": 10, **options}
    with pytest.raises(kind) as caught:
        of(options.pop("create_env_fn"), options.pop("policy", None), **options)
    for word in words:
        assert word in str(caught.value)


REFUSED = [
    ({"policy": net(), "policy_factory": net}, TypeError, ["policy", "policy_factory"]),
    ({"unknown_kw": 1}, TypeError, ["unknown_kw=1"]),
    ({"num_worker": 1}, TypeError, ["num_worker=1", "Did you mean 'num_workers'?"]),
    ({"cat_result": 0}, TypeError, ["cat_result=0", "Did you mean 'cat_results'?"]),
    ({"split_trajs": True, "track_traj_ids": False}, ValueError, ["split_trajs=True", "track_traj_ids=False"]),
    ({"reset_when_done": False}, ValueError, ["reset_when_done=False"]),
    ({"traj_format": "cat"}, ValueError, ["traj_format='cat'", "trajs_per_batch"]),
    ({"traj_format": "x"}, ValueError, ["traj_format", "'x'"]),
    ({"trajs_per_batch": 2, "track_traj_ids": False}, KeyError, ["trajs_per_batch=2", "track_traj_ids=False"]),
    ({"trajs_per_batch": 2, "split_trajs": True}, ValueError, ["split_trajs=True", "trajs_per_batch=2"]),
    ({"return_same_td": True, "split_trajs": True}, ValueError, ["return_same_td=True", "split_trajs"]),
    ({"total_frames": 0}, ValueError, ["total_frames=0"]),
    ({"frames_per_batch": 0}, ValueError, ["frames_per_batch", "0"]),
    ({"frames_per_batch": 10.0}, TypeError, ["frames_per_batch", "10.0"]),
    ({"frames_per_batch": [10]}, ValueError, ["frames_per_batch has 1 elements for 2 workers"]),
    ({"frames_per_batch": [5, "5"]}, TypeError, ["frames_per_batch", "'5'"]),
    ({"frames_per_batch": [5, 0]}, ValueError, ["frames_per_batch", "0"]),
    ({"create_env_kwargs": [{}]}, ValueError, ["create_env_kwargs has 1 elements for 2 workers"]),
    ({"create_env_kwargs": 5}, TypeError, ["create_env_kwargs", "5"]),
    ({"policy_factory": [net]}, ValueError, ["policy_factory has 1 elements for 2 workers"]),
    ({"policy_factory": [net, 5]}, TypeError, ["policy_factory", "5"]),
    *(
        ({name: ["cpu"] * 3}, RuntimeError, [f"{name} has 3 elements for 2 workers"])
        for name in ("device", "storing_device", "policy_device", "env_device")
    ),
    ({"device": ["cpu", "gpu"]}, ValueError, ["device", "gpu"]),
    ({"weight_updater": 1, "weight_sync_schemes": {}}, TypeError, ["weight_updater", "weight_sync_schemes"]),
    ({"preemptive_threshold": 1.5}, ValueError, ["preemptive_threshold", "1.5"]),
    ({"preemptive_threshold": -0.1}, ValueError, ["preemptive_threshold", "-0.1"]),
    ({"cat_results": "foo"}, ValueError, ["cat_results", "'foo'", "stack"]),
    ({"cat_results": "stak"}, ValueError, ["Did you mean 'stack'?"]),
    ({"cat_results": True}, TypeError, ["cat_results", "True"]),
    ({"cat_results": 1.5}, TypeError, ["cat_results", "1.5"]),
    ({"num_threads": 0}, ValueError, ["num_threads", "0"]),
    ({"num_sub_threads": 0}, ValueError, ["num_sub_threads", "0"]),
    ({"slots_per_worker": 0}, ValueError, ["slots_per_worker", "0"]),
    ({"max_staleness": -1}, ValueError, ["max_staleness", "-1"]),
    ({"max_restarts": -1}, ValueError, ["max_restarts", "-1"]),
    ({"on_worker_failure": "restrat"}, ValueError, ["on_worker_failure", "Did you mean 'restart'?"]),
    ({"mp_start_method": "thread"}, ValueError, ["mp_start_method", "'thread'", "forkserver"]),
    ({"num_collectors": 3}, ValueError, ["num_collectors=3", "2 workers"]),
    ({"backend": "ray"}, ValueError, ["backend='ray'", "process"]),
    ({"replay_buffer": object()}, TypeError, ["replay_buffer must be a ReplayBuffer"]),
    ({"replay_buffer": ReplayBuffer(), "return_same_td": True}, TypeError, ["return_same_td=True", "replay_buffer"]),
    ({"replay_buffer": ReplayBuffer(), "use_buffers": True}, TypeError, ["use_buffers=True", "replay_buffer"]),
    (
        {"replay_buffer": ReplayBuffer(), "extend_buffer": False, "postproc": lambda batch: batch},
        TypeError,
        ["extend_buffer=False", "postproc"],
    ),
    ({"trajs_per_write": 2}, ValueError, ["trajs_per_write=2", "replay_buffer"]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("options", "error", "words"), REFUSED, ids=[", ".join(o) for o, *_ in REFUSED])
def test_what_cannot_be_is_refused(kind: Any, options: dict[str, Any], error: Any, words: list[str]) -> None:
    refuse(error, words, kind, **options)


WRONG: dict[str, list[Any]] = {
    "num_workers": [],  # a list of factories tells how many there are
    "sync": ["yes", 1],
    "cat_results": [1.5, True, ["stack"]],
    "preemptive_threshold": ["half", True],
    "update_at_each_batch": [None, 1],
    "init_fn": [5, "init"],
    "num_threads": [1.5, "2", True],
    "num_sub_threads": [None, 1.5, True],
    "mp_start_method": [5, True],
    "slots_per_worker": [None, 2.0, True],
    "max_staleness": [1.5, "1", True],
    "on_worker_failure": [None, 5, True],
    "max_restarts": [None, 2.5, True],
    "stall_warning_s": [None, "15", True],
    "stall_timeout_s": ["15", True],
    "start_timeout_s": [None, "15", True],
    "debug": [None, 1],
    "collector_class": [],
    "weight_updater": [],
    "weight_sync_schemes": [],
    "weight_recv_schemes": [],
}


def test_every_argument_of_its_own_has_a_wrong_kind() -> None:
    assert list(WRONG) == OWN


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_kind_is_refused(name: str, value: Any) -> None:
    refuse(TypeError, [name, repr(value)], **{name: value})


def test_an_async_batch_is_of_one_worker() -> None:
    refuse(ValueError, ["cat_results=0"], MultiAsyncCollector, cat_results=0)
    refuse(ValueError, ["cat_results=-1"], MultiAsyncCollector, cat_results=-1)


@pytest.mark.parametrize("given", [{}, {"sync": None}, {"sync": "yes"}, {"sync": 1}])
def test_multi_collector_must_be_told_which(given: dict[str, Any]) -> None:
    refuse(TypeError, ["sync=True", "sync=False"], MultiCollector, **given)


def test_a_kind_cannot_become_the_other() -> None:
    refuse(TypeError, ["MultiSyncCollector is sync=True", "sync=False"], MultiSyncCollector, sync=False)
    refuse(TypeError, ["MultiAsyncCollector is sync=False", "sync=True"], MultiAsyncCollector, sync=True)


def test_frames_per_batch_is_needed() -> None:
    with pytest.raises(TypeError, match="MultiSyncCollector needs the argument 'frames_per_batch'"):
        MultiSyncCollector([CountingEnv])


def test_only_two_arguments_go_by_position() -> None:
    with pytest.raises(TypeError, match="positional"):
        MultiSyncCollector([CountingEnv], None, 10)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"create_env_fn": []}, ValueError, ["empty list"]),
        ({"create_env_fn": CountingEnv}, ValueError, ["num_workers=4", "[make_env] * 4"]),
        ({"create_env_fn": CountingEnv, "num_workers": 0}, ValueError, ["num_workers", "0"]),
        ({"create_env_fn": CountingEnv, "num_workers": 1.5}, TypeError, ["num_workers", "1.5"]),
        ({"create_env_fn": CountingEnv, "num_workers": True}, TypeError, ["num_workers", "True"]),
        ({"create_env_fn": "CartPole-v1", "num_workers": 2}, TypeError, ["CartPole-v1", "lambda"]),
        ({"create_env_fn": [CountingEnv, 5]}, TypeError, ["worker 1", "int", "lambda"]),
    ],
)
def test_env_factories(given: dict[str, Any], error: Any, words: list[str]) -> None:
    refuse(error, words, **given)


def test_an_env_that_is_made_already_is_refused() -> None:
    refuse(TypeError, ["worker 1", "CountingEnv", "lambda"], create_env_fn=[CountingEnv, CountingEnv()])


def test_async_collector_has_one_worker() -> None:
    refuse(ValueError, ["one worker", "2 factories"], AsyncCollector)
    refuse(ValueError, ["one worker", "num_workers=2"], AsyncCollector, create_env_fn=CountingEnv, num_workers=2)


def test_another_kind_of_buffer_is_refused() -> None:
    class Mine:
        def extend(self, data: Any) -> None:
            pass

        def sample(self) -> None:
            pass

    refuse(TypeError, ["ReplayBuffer(shared=True)", "Mine"], replay_buffer=Mine())


# -- what only shows with a worker -----------------------------------------------------------------------------------


def test_calls_that_are_refused(here: dict[str, Any]) -> None:
    with MultiSyncCollector([CountingEnv] * 2, net(), **here) as collector:
        with pytest.raises(RuntimeError, match="replay buffer"):
            collector.start()
        with pytest.raises(RuntimeError, match="start"), collector.pause():
            pass
        with pytest.raises(RuntimeError, match="close_env=False"):
            collector.shutdown(close_env=False)
        with pytest.raises(ValueError, match=r"stats\(workers=.*'x'"):
            collector.stats(workers="x")
        with pytest.raises(NotImplementedError, match="fake_tensordict"):
            collector.fake_tensordict()
        with pytest.raises(ValueError, match="2 workers, got 1"):
            collector.map_fn("set_seed", [(1,)])
        with pytest.raises(ValueError, match="2 workers"):
            collector.map_fn("set_seed", [(1,), (2,)], [{}])
        with pytest.raises(ValueError, match="cannot be called with arguments"):
            collector.cascade_execute("env.batch_size", 3)
        with pytest.raises(ValueError, match="num_rollouts"):
            collector.enable_profile(num_rollouts=1, warmup_rollouts=1)
        collector.next()
        with pytest.raises(RuntimeError, match="before the first batch"):
            collector.enable_profile()
        with pytest.raises(ValueError, match="3 choices for 2 workers"):
            collector.reset([True, False, True])
        with pytest.raises(ValueError, match="no worker 2"):
            collector.reset([2])
        with pytest.raises((TypeError, ValueError), match="seed"):
            collector.set_seed("one")  # type: ignore[arg-type]
        assert collector.next().shape == (2, 5), "it is none the worse for it"


@pytest.mark.parametrize("name", ["env.nothing", "nothing"])
def test_unknown_attributes(here: dict[str, Any], name: str) -> None:
    with (
        MultiSyncCollector([CountingEnv] * 2, net(), **here) as collector,
        pytest.raises(AttributeError, match="nothing"),
    ):
        collector.get_distant_attr(name)


@pytest.mark.usefixtures("here")
def test_what_cannot_be_pickled_is_told_with_the_culprit() -> None:
    lock = threading.Lock()
    with pytest.raises(RuntimeError, match="lock"):
        MultiSyncCollector([lambda: (lock, CountingEnv())[1]] * 2, None, frames_per_batch=10)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_while_a_worker_is_made_keeps_its_type(kind: Any) -> None:
    def broken() -> CountingEnv:
        raise ZeroDivisionError("no env today")

    with pytest.raises(ZeroDivisionError, match="no env today") as caught:
        kind([CountingEnv, broken], None, frames_per_batch=10)
    assert "worker 1" in "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (lambda: CountingEnv((2,)), lambda: CountingEnv((3,)), "batch_size"),
        (CountingEnv, lambda: CountingEnv(kind="dict"), "entries"),
    ],
    ids=["lanes", "entries"],
)
def test_workers_must_agree_on_the_layout(first: Any, second: Any, word: str, here: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"worker 1 .* differs from worker 0 .* {word}"):
        MultiSyncCollector([first, second], None, **here)


def test_tensors_with_gradients_may_be_given(here: dict[str, Any]) -> None:
    """The peer refuses them; here they are sent by value."""
    weight = torch.ones(2, requires_grad=True)

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return observation[..., :2] * 0 + weight.detach()

    with MultiSyncCollector([CountingEnv], policy, frames_per_batch=4) as collector:
        assert (collector.next()["action"] == 1).all()


# -- what is accepted ------------------------------------------------------------------------------------------------


def test_sync_chooses_the_class(here: dict[str, Any]) -> None:
    for is_sync, kind in ((True, MultiSyncCollector), (False, MultiAsyncCollector)):
        with MultiCollector([CountingEnv] * 2, sync=is_sync, **here) as collector:
            assert type(collector) is kind
            assert isinstance(collector, MultiCollector)
            assert not isinstance(collector, Collector)
            collector.next()


def test_a_subclass_stays_what_it_is(here: dict[str, Any]) -> None:
    class Mine(MultiSyncCollector):
        pass

    with Mine([CountingEnv] * 2, **here) as collector:
        assert type(collector) is Mine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"num_collectors": 2},
        {"backend": "process"},
        {"use_buffers": False},
        {"use_buffers": True},
        {"collector_class": Collector},
        {"weight_updater": lambda: None},
        {"weight_sync_schemes": {}},
        {"weight_recv_schemes": {}},
        {"total_frames": None},
        {"num_workers": 2},
        {"device": "cpu"},
        {"storing_device": ["cpu", "cpu"]},
        {"policy_device": torch.device("cpu")},
        {"env_device": ["cpu", torch.device("cpu")]},
        {"create_env_kwargs": {"lengths": 3}},
        {"create_env_kwargs": [{"lengths": 3}, {"lengths": 4}]},
        {"frames_per_batch": (5, 5)},
        {"max_staleness": 0},
        {"max_staleness": 3},
        {"preemptive_threshold": 1.0},
        {"no_cuda_sync": True},
        {"trust_policy": True},
        {"fast_policy": False},
        {"cat_results": "stack"},
        {"mp_start_method": "spawn"},
        {"stall_warning_s": 1, "start_timeout_s": 60, "max_restarts": 0},
        {"worker_idx": 3},
        {"track_policy_version": True},
        {"track_policy_version": PolicyVersion()},
        {"track_policy_version": False},
    ],
    ids=", ".join,
)
def test_what_may_be_said(here: dict[str, Any], kind: Any, options: dict[str, Any]) -> None:
    with kind([CountingEnv] * 2, net(), **{**here, **options}) as collector:
        assert collector.next().get("observation").shape[-1] == 3
        assert collector.num_workers == 2


def test_worker_idx_is_where_the_numbers_of_workers_begin(here: dict[str, Any]) -> None:
    with MultiSyncCollector([CountingEnv] * 2, **here, worker_idx=3) as collector:
        assert (collector.next().get(("collector", "traj_ids"))[:, 0] >> 40).tolist() == [3, 4]
        assert collector.worker_idx == 3


def test_a_factory_for_all_workers(here: dict[str, Any]) -> None:
    with MultiSyncCollector(CountingEnv, num_workers=3, **here) as collector:
        assert collector.num_workers == 3
        assert collector.next().shape == (3, 4)


@pytest.mark.parametrize(
    ("old", "new", "given", "kept"),
    [
        ("devices", "policy_device", ["cpu", "cpu"], ["cpu", "cpu"]),
        ("devices", "policy_device", ["cpu"], "cpu"),
        ("devices", "policy_device", "cpu", "cpu"),
        ("passing_devices", "storing_device", ["cpu", "cpu"], ["cpu", "cpu"]),
        ("exploration_mode", "exploration_type", "mode", ExplorationType.MODE),
    ],
)
def test_old_names(here: dict[str, Any], old: str, new: str, given: Any, kept: Any) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is an old name; use {new}") as caught:
        collector = MultiSyncCollector([CountingEnv] * 2, net(), **here, **{old: given})
    assert getattr(collector.config, new) == kept
    assert collector.next().shape == (2, 5)
    assert caught[0].filename == __file__
    collector.shutdown()


def test_old_names_of_classes() -> None:
    import swath.collectors as place

    for old, new in {
        "aSyncDataCollector": "AsyncCollector",
        "_MultiDataCollector": "MultiCollector",
        "MultiSyncDataCollector": "MultiSyncCollector",
        "MultiaSyncDataCollector": "MultiAsyncCollector",
    }.items():
        assert getattr(place, old) is getattr(place, new)


def test_the_signature_shows_all_arguments() -> None:
    for kind in (MultiCollector, MultiSyncCollector, MultiAsyncCollector, AsyncCollector):
        parameters = inspect.signature(kind).parameters
        assert list(parameters) == ["create_env_fn", "policy", *FIELDS]
        assert parameters["num_sub_threads"].default == 1
        assert parameters["on_worker_failure"].default == "raise"


def test_every_argument_is_described() -> None:
    described = (inspect.getdoc(MultiConfig) or "") + (inspect.getdoc(CollectorConfig) or "")
    assert [name for name in FIELDS if f"    {name}: " not in described] == []


def test_good_arguments_do_not_warn(here: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MultiSyncCollector([CountingEnv] * 2, None, **here, total_frames=20).shutdown()
        MultiAsyncCollector([CountingEnv] * 2, None, **here, total_frames=20).shutdown()


def test_debug_cannot_collect_in_the_background(here: dict[str, Any]) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), shared=True)
    with (
        MultiAsyncCollector([CountingEnv] * 2, None, **here, replay_buffer=buffer) as collector,
        pytest.raises(RuntimeError, match="debug=True"),
    ):
        collector.start()


def test_a_worker_that_takes_too_long_to_begin_is_named(tmp_path: Path, here: dict[str, Any]) -> None:
    def forever() -> CountingEnv:
        threading.Event().wait(60)
        return CountingEnv()

    with pytest.raises(TimeoutError, match=r"Workers \[(0, )?1\] .* start_timeout_s"):
        MultiSyncCollector([CountingEnv, forever], None, frames_per_batch=10, start_timeout_s=1.0)
