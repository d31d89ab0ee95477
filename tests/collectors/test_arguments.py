"""Wrong arguments are refused by name, with the value and a cure, before anything is made; good ones are taken."""

from __future__ import annotations

import dataclasses
import inspect
import re
import threading
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from common import buffer, net
from inside import OLD_NAMES, forbid_workers
from kinds import ASYNC, ASYNC_HERE, HERE, SINGLE, SYNC, SYNC_HERE, Kind, Make, over
from tensordict import TensorDict

from swath.collectors import (
    AsyncCollector,
    Collector,
    CollectorConfig,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    PolicyVersion,
)
from swath.data import ReplayBuffer
from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.modules import ExplorationType
from swath.testing import CountingEnv, CountingGymEnv

ANY = (SINGLE, SYNC, ASYNC)


def arguments(of: Any) -> list[str]:
    """The names of all that can be said by keyword only."""
    return [name for name, one in inspect.signature(of).parameters.items() if one.kind is one.KEYWORD_ONLY]


class Factory:
    """Makes an env and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, **kwargs: Any) -> EnvBase:
        self.calls += 1
        return CountingEnv(**kwargs)


@pytest.fixture
def refuse(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Making a collector raises, with `words` in the message, and before an env is made or a worker started."""
    forbid_workers(monkeypatch)

    def refuse(error: type[Exception], words: list[str], of: Any = kind.of, **options: Any) -> None:
        factory = Factory()
        options = {"frames_per_batch": 10, **options}
        env = options.pop("create_env_fn", [factory] * 2 if kind.workers else factory)
        with pytest.raises(error) as caught:
            of(env, options.pop("policy", None), **options)
        assert factory.calls == 0
        for word in words:
            assert word in str(caught.value)

    return refuse


# -- what is refused ------------------------------------------------------------------------------------------------

BUFFERED = {"replay_buffer": ReplayBuffer()}
UNCUT = {**BUFFERED, "extend_buffer": False}
REFUSED: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"policy": net(), "policy_factory": net}, TypeError, ["policy", "policy_factory"]),
    ({"unknown_kw": 1}, TypeError, ["unknown_kw=1"]),
    ({"split_trajs": True, "track_traj_ids": False}, ValueError, ["split_trajs=True", "track_traj_ids=False"]),
    ({"reset_when_done": False}, ValueError, ["reset_when_done=False", "max_frames_per_traj"]),
    ({"traj_format": "cat"}, ValueError, ["traj_format='cat'", "trajs_per_batch"]),
    ({"traj_format": "x"}, ValueError, ["traj_format", "'x'", "'padded'", "'cat'"]),
    ({"trajs_per_batch": 2, "traj_format": "pad"}, ValueError, ["'pad'", "Did you mean 'padded'?"]),
    ({"trajs_per_batch": 2, "track_traj_ids": False}, KeyError, ["trajs_per_batch=2", "track_traj_ids=False"]),
    ({"trajs_per_batch": 2, "split_trajs": True}, ValueError, ["split_trajs=True", "trajs_per_batch=2"]),
    ({"return_same_td": True, "split_trajs": True}, ValueError, ["return_same_td=True", "split_trajs"]),
    ({"return_same_td": True, "trajs_per_batch": 2}, ValueError, ["return_same_td=True", "trajs_per_batch"]),
    ({"backend": "submitit"}, ValueError, ["backend='submitit'"]),
    ({"replay_buffer": object()}, TypeError, ["replay_buffer must be a ReplayBuffer"]),
    ({**BUFFERED, "return_same_td": True}, TypeError, ["return_same_td=True", "replay_buffer"]),
    ({**BUFFERED, "use_buffers": True}, TypeError, ["use_buffers=True", "replay_buffer"]),
    ({**UNCUT, "postproc": lambda batch: batch}, TypeError, ["extend_buffer=False", "postproc"]),
    ({**UNCUT, "split_trajs": True}, TypeError, ["extend_buffer=False", "split_trajs"]),
    ({**UNCUT, "trajs_per_batch": 2}, TypeError, ["extend_buffer=False", "trajs_per_batch"]),
    ({**UNCUT, "set_truncated": True}, TypeError, ["extend_buffer=False", "set_truncated"]),
    ({"trajs_per_write": 2}, ValueError, ["trajs_per_write=2", "replay_buffer", "trajs_per_batch"]),
    ({"trajs_per_write": 2, "trajs_per_batch": 2}, ValueError, ["trajs_per_write=2", "replay_buffer"]),
    ({"trajs_per_write": 2, **BUFFERED}, ValueError, ["trajs_per_write=2", "trajs_per_batch"]),
    ({"frames_per_batch": 0}, ValueError, ["frames_per_batch", "0"]),
    ({"frames_per_batch": -5}, ValueError, ["frames_per_batch", "-5"]),
    ({"total_frames": 0}, ValueError, ["total_frames", "0"]),
    ({"total_frames": -5}, ValueError, ["total_frames must be at least 1", "-1 for no end", "-5"]),
    ({"max_frames_per_traj": -3}, ValueError, ["max_frames_per_traj must be at least 1", "0 for no limit", "-3"]),
    ({"total_frames": 1e6}, TypeError, ["total_frames", "1000000.0", "Write 1000000."]),
    ({"trajs_per_batch": 0}, ValueError, ["trajs_per_batch", "0"]),
    ({"trajs_per_write": 0}, ValueError, ["trajs_per_write", "0"]),
    ({"trajs_per_write": -1}, ValueError, ["trajs_per_write", "-1"]),
    ({"exploration_type": "mode"}, TypeError, ["exploration_type", "'mode'", "ExplorationType.MODE"]),
    ({"total_frame": 3, "zzz": "a"}, TypeError, ["total_frame=3. Did you mean 'total_frames'?", "zzz='a'."]),
    ({"devices": "cpu", "policy_device": "cpu"}, TypeError, ["devices='cpu'", "policy_device='cpu'"]),
]
OF_ONE: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"sync": True}, ValueError, ["sync=True", "MultiCollector"]),
    ({"sync": "yes"}, TypeError, ["sync", "'yes'"]),
    ({"num_collectors": 0}, ValueError, ["num_collectors=0"]),
    ({"num_collectors": 2}, ValueError, ["num_collectors=2", "MultiCollector"]),
    ({"num_collectors": 2, "backend": "direct"}, ValueError, ["num_collectors=2"]),
    ({"num_collectors": True}, TypeError, ["num_collectors", "True"]),
    ({"num_collectors": 1.5}, TypeError, ["num_collectors", "1.5"]),
    ({"backend": "ray"}, ValueError, ["backend='ray'", "direct"]),
    ({"backend_options": {"sync": True}}, ValueError, ["backend_options", "{'sync': True}"]),
    ({"worker_idx": -1}, ValueError, ["worker_idx", "-1"]),
    ({"worker_idx": 2**23}, ValueError, ["worker_idx", str(2**23)]),
]
OF_MANY: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"num_worker": 1}, TypeError, ["num_worker=1", "Did you mean 'num_workers'?"]),
    ({"cat_result": 0}, TypeError, ["cat_result=0", "Did you mean 'cat_results'?"]),
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
    ({"num_threads": 0}, ValueError, ["num_threads", "0"]),
    ({"num_sub_threads": 0}, ValueError, ["num_sub_threads", "0"]),
    ({"slots_per_worker": 0}, ValueError, ["slots_per_worker", "0"]),
    ({"max_staleness": -1}, ValueError, ["max_staleness", "-1"]),
    ({"max_restarts": -1}, ValueError, ["max_restarts", "-1"]),
    ({"on_worker_failure": "restrat"}, ValueError, ["on_worker_failure", "Did you mean 'restart'?"]),
    ({"mp_start_method": "thread"}, ValueError, ["mp_start_method", "'thread'", "forkserver"]),
    ({"num_collectors": 3}, ValueError, ["num_collectors=3", "2 workers"]),
    ({"backend": "ray"}, ValueError, ["backend='ray'", "process"]),
    ({"create_env_fn": []}, ValueError, ["empty list"]),
    ({"create_env_fn": CountingEnv, "num_workers": 0}, ValueError, ["num_workers", "0"]),
    ({"create_env_fn": CountingEnv, "num_workers": 1.5}, TypeError, ["num_workers", "1.5"]),
    ({"create_env_fn": CountingEnv, "num_workers": True}, TypeError, ["num_workers", "True"]),
    ({"create_env_fn": "CartPole-v1", "num_workers": 2}, TypeError, ["CartPole-v1", "lambda"]),
    ({"create_env_fn": [CountingEnv, 5]}, TypeError, ["worker 1", "int", "lambda"]),
    (
        {"create_env_fn": [CountingEnv, CountingEnv()]},
        TypeError,
        ["worker 1", "functions that return an env", "lambda"],
    ),
]
CASES = [
    *((kind, *case) for case in REFUSED for kind in ANY),
    *((SINGLE, *case) for case in OF_ONE),
    *((kind, *case) for case in OF_MANY for kind in (SYNC, ASYNC)),
    (SYNC, {"create_env_fn": CountingEnv}, ValueError, ["num_workers=4", "[make_env] * 4"]),
    (SYNC, {"sync": False}, TypeError, ["MultiSyncCollector is sync=True", "sync=False"]),
    (ASYNC, {"sync": True}, TypeError, ["MultiAsyncCollector is sync=False", "sync=True"]),
    (ASYNC, {"cat_results": 0}, ValueError, ["cat_results=0"]),
    (ASYNC, {"cat_results": -1}, ValueError, ["cat_results=-1"]),
]


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"), CASES, ids=[f"{kind}-{', '.join(options)}" for kind, options, *_ in CASES]
)
def test_what_cannot_be_is_refused(refuse: Any, options: dict[str, Any], error: Any, words: list[str]) -> None:
    refuse(error, words, **options)


WRONG: dict[str, list[Any]] = {
    "frames_per_batch": [None, "10", 10.0, True],
    "total_frames": ["100", 1e6, False],
    "policy_factory": [5, "factory"],
    "device": [],
    "storing_device": [],
    "policy_device": [],
    "env_device": [],
    "create_env_kwargs": [5, "batch_size=2"],
    "max_frames_per_traj": ["5", 5.0, True],
    "init_random_frames": ["5", 2.5, True],
    "reset_at_each_iter": [None, 1, "yes"],
    "postproc": [5, "identity"],
    "split_trajs": [1, "yes"],
    "track_traj_ids": [None, 1, "no"],
    "exploration_type": ["random", "mode", 1, ExplorationType],
    "reset_when_done": [None, 1],
    "set_truncated": [None, 1],
    "interruptor": [5, object(), lambda: True],
    "return_same_td": [None, 1],
    "auto_register_policy_transforms": [1, "yes"],
    "use_buffers": [1, "yes"],
    "trust_policy": [1, "yes"],
    "compile_policy": [1, "inductor"],
    "cudagraph_policy": [1, "yes"],
    "no_cuda_sync": [None, 1],
    "track_policy_version": [1, "int", PolicyVersion],
    "trajs_per_batch": ["2", 2.0, True],
    "traj_format": [5, True],
    "compact_obs": [None, 1],
    "pre_collect_hook": [5, "hook"],
    "post_collect_hook": [5, "hook"],
    "worker_idx": ["0", 1.0, True],
    "replay_buffer": [5, "buffer", [], ReplayBuffer.sample],
    "extend_buffer": [None, 1, "yes"],
    "trajs_per_write": ["2", 2.0, True],
    "progress": [None, 1],
    "fast_policy": [None, 0],
}
WRONG_OF_MANY: dict[str, list[Any]] = {
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
    "num_collectors": ["2", 2.0, True],
    "collector_class": [],
    "weight_updater": [],
    "weight_sync_schemes": [],
    "weight_recv_schemes": [],
}
WRONG_OF_ONE: dict[str, list[Any]] = {
    "frames_per_batch": [[10]],
    "create_env_kwargs": [[("batch_size", 2)]],
    "track_policy_version": [None],
}
"""What is right where there are several workers, or stands for what such a collector does by itself."""


def test_every_argument_has_a_wrong_kind() -> None:
    assert set(WRONG) == set(arguments(Collector))
    assert {**WRONG, **WRONG_OF_MANY}.keys() == set(arguments(MultiSyncCollector))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((kind, name, value) for name, values in WRONG.items() for value in values for kind in (SINGLE, SYNC)),
        *((SINGLE, name, value) for name, values in WRONG_OF_ONE.items() for value in values),
        *((SYNC, name, value) for name, values in WRONG_OF_MANY.items() for value in values),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)),
)
def test_a_wrong_kind_is_refused(refuse: Any, name: str, value: Any) -> None:
    refuse(TypeError, [name, repr(value)], **{name: value})


DEVICES = ["device", "storing_device", "policy_device", "env_device"]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    ("kind", "value"), [*((kind, value) for kind in ANY for value in ("gpu", 2.5)), (SINGLE, ["cpu", "cpu"])], ids=str
)
def test_what_is_no_device_is_refused(refuse: Any, name: str, value: Any) -> None:
    refuse(ValueError, [f"{name}={value!r}"], **{name: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize("name", DEVICES)
def test_a_device_that_is_not_there_is_refused(refuse: Any, name: str) -> None:
    refuse(ValueError, [f"{name}='cuda'", "not available", "'cpu'"], **{name: "cuda"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize("value", [True, {"warmup": 2}])
def test_cudagraph_policy_needs_cuda(refuse: Any, value: Any) -> None:
    refuse(RuntimeError, [f"cudagraph_policy={value!r}", "CUDA"], cudagraph_policy=value)


@pytest.mark.parametrize("given", [{}, {"sync": None}, {"sync": "yes"}, {"sync": 1}], ids=str)
@over([SYNC])
def test_multi_collector_must_be_told_which(refuse: Any, given: dict[str, Any]) -> None:
    refuse(TypeError, ["sync=True", "sync=False"], MultiCollector, **given)


@over([SYNC])
def test_async_collector_has_one_worker(refuse: Any) -> None:
    refuse(ValueError, ["one worker", "2 factories"], AsyncCollector)
    refuse(ValueError, ["one worker", "num_workers=2"], AsyncCollector, create_env_fn=CountingEnv, num_workers=2)


@over([SYNC])
def test_another_kind_of_buffer_is_refused_where_there_are_workers(refuse: Any) -> None:
    class Mine:
        def extend(self, data: Any) -> None:
            pass

        def sample(self) -> None:
            pass

    refuse(TypeError, ["ReplayBuffer(shared=True)", "Mine"], replay_buffer=Mine())


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        (SINGLE, "frame_per_batch", "frames_per_batch"),
        (SYNC, "frame_per_batch", "frames_per_batch"),
        (SINGLE, "max_frames_per_trajectory", "max_frames_per_traj"),
        (SINGLE, "policyy", "policy"),
        (SINGLE, "explorationtype", "exploration_type"),
    ],
    ids=str,
)
def test_an_unknown_argument_is_told_the_nearest_name(refuse: Any, wrong: str, right: str) -> None:
    refuse(TypeError, [f"{wrong}=3", f"Did you mean {right!r}?"], **{wrong: 3})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_unknown_exploration_mode_is_told_the_nearest(refuse: Any) -> None:
    refuse(ValueError, ["exploration_mode='randm'", "Did you mean 'random'?"], exploration_mode="randm")


@over(ANY)
def test_frames_per_batch_is_needed(kind: Kind) -> None:
    factory = Factory()
    with pytest.raises(TypeError, match=f"{kind.of.__name__} needs the argument 'frames_per_batch'"):
        kind.of([factory] if kind.workers else factory)
    assert factory.calls == 0


@over(ANY)
def test_only_two_arguments_go_by_position(kind: Kind) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind.of([CountingEnv], None, 10)  # type: ignore[call-arg]


@pytest.mark.parametrize("option", [{"sync": True}, {"num_collectors": 2}, {"backend": "process"}], ids=str)
def test_a_subclass_cannot_become_another_collector(option: dict[str, Any]) -> None:
    class Mine(Collector):
        pass

    ((name, value),) = option.items()
    with pytest.raises(TypeError, match=f"Mine .*{name}={value!r}"):
        Mine(Factory(), frames_per_batch=10, **option)


# -- envs and policies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 2])
def test_a_list_must_hold_one_env_where_there_are_no_workers(count: int) -> None:
    factory = Factory()
    with pytest.raises(ValueError, match=rf"list of {count}.*SerialEnv"):
        Collector([factory] * count, frames_per_batch=10)
    assert factory.calls == 0


@pytest.mark.parametrize("given", ["CartPole-v1", 5, None, TensorDict({}, [])])
def test_what_is_no_env_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)[Ee]nvironment.*GymEnv\('CartPole-v1'\)"):
        Collector(given, frames_per_batch=10)


@over(HERE)
def test_a_factory_of_no_env_is_refused(make: Make) -> None:
    with pytest.raises(TypeError, match="got int"):
        make(lambda: 5)


@pytest.mark.parametrize("policy", [5, "greedy", {"action": 1}])
@over(HERE)
def test_what_is_no_policy_is_refused(make: Make, policy: Any) -> None:
    with pytest.raises(TypeError, match=f"policy must be .* got {type(policy).__name__}"):
        make(None, policy)


def test_create_env_kwargs_need_a_factory(make: Make) -> None:
    with pytest.raises(RuntimeError, match=r"create_env_kwargs=\{'batch_size': \(2,\)\}.*factory"):
        make(CountingEnv(), create_env_kwargs={"batch_size": (2,)})


@over(HERE)
def test_an_env_that_counts_steps_itself_has_no_room_for_max_frames_per_traj(make: Make) -> None:
    class Stepper(gym.Env[Any, Any]):
        observation_space = gym.spaces.Dict({"step_count": gym.spaces.Box(0, 9, (1,))})
        action_space = gym.spaces.Discrete(2)

        def reset(self, **kwargs: Any) -> Any:
            return {"step_count": np.zeros(1, np.float32)}, {}

    with pytest.raises(ValueError, match=r"max_frames_per_traj=5.*'step_count'"):
        make(Stepper, max_frames_per_traj=5)
    make(Stepper, max_frames_per_traj=0)  # switched off


@pytest.mark.parametrize("name", ["step_count", "is_init"])
@over(HERE)
def test_what_an_env_gives_under_a_name_of_ours_is_delivered_as_it_is(make: Make, name: str) -> None:
    class Countdown(gym.Env[Any, Any]):
        observation_space = gym.spaces.Dict({name: gym.spaces.Box(0, 99, (1,))})
        action_space = gym.spaces.Discrete(2)
        left = 0

        def reset(self, **kwargs: Any) -> Any:
            self.left = 4
            return {name: np.full(1, 4, np.float32)}, {}

        def step(self, action: Any) -> Any:
            self.left -= 1
            return {name: np.full(1, self.left, np.float32)}, 0.0, not self.left, False, {}

    batch = make(Countdown, steps=6, workers=1).next()
    assert batch[name].flatten().tolist() == [4, 3, 2, 1, 4, 3]
    assert batch["next", name].flatten().tolist() == [3, 2, 1, 0, 3, 2]


@pytest.mark.parametrize("wrap", [lambda make: make, lambda make: lambda: SerialEnv(2, make)], ids=["env", "SerialEnv"])
@over(HERE)
def test_set_truncated_needs_the_entry(make: Make, wrap: Any) -> None:
    def without() -> CountingEnv:
        env = CountingEnv()
        env.has_truncated = False
        return env

    with pytest.raises(RuntimeError, match=r"set_truncated=True.*'truncated'"):
        make(wrap(without), set_truncated=True)


def test_versions_of_a_batched_env_need_the_instance(make: Make) -> None:
    with pytest.raises(RuntimeError, match=r"track_policy_version=True.*\[2\].*PolicyVersion\(\)"):
        make(lanes=2, track_policy_version=True)


def test_an_env_of_the_user_is_left_open_when_the_collector_cannot_be_made() -> None:
    env = CountingEnv((2,))
    with pytest.raises(RuntimeError):
        Collector(env, frames_per_batch=10, track_policy_version=True)
    assert not env.is_closed


@pytest.mark.parametrize("options", [{"track_policy_version": True}, {"replay_buffer": buffer(ndim=3)}], ids=", ".join)
def test_an_env_from_a_factory_is_closed_when_the_collector_cannot_be_made(options: dict[str, Any]) -> None:
    made: list[EnvBase] = []

    def factory() -> EnvBase:
        made.append(CountingEnv((2,)))
        return made[-1]

    with pytest.raises((RuntimeError, ValueError)):
        Collector(factory, frames_per_batch=10, **options)
    assert made[0].is_closed


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (lambda: CountingEnv((2,)), lambda: CountingEnv((3,)), "batch_size"),
        (CountingEnv, lambda: CountingEnv(kind="dict"), "entries"),
    ],
    ids=["lanes", "entries"],
)
@over([SYNC_HERE, ASYNC_HERE])
def test_workers_must_agree_on_the_layout(make: Make, first: Any, second: Any, word: str) -> None:
    with pytest.raises(ValueError, match=rf"worker 1 .* differs from worker 0 .* {word}"):
        make([first, second])


@over([SYNC])
def test_tensors_with_gradients_may_be_given(make: Make) -> None:
    """TorchRL refuses them; here they are sent by value."""
    weight = torch.ones(2, requires_grad=True)

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return observation[..., :2] * 0 + weight.detach()

    assert (make(None, policy, workers=1).next()["action"] == 1).all()


@over([SYNC_HERE])
@pytest.mark.parametrize("dim", [-3, 2])
def test_a_dimension_that_batches_have_not_is_refused(make: Make, dim: int) -> None:
    with pytest.raises(ValueError, match=f"cat_results={dim}"):
        make(None, net(), cat_results=dim)


@over([SYNC])
def test_a_worker_that_takes_too_long_to_begin_is_named(make: Make) -> None:
    def forever() -> CountingEnv:
        threading.Event().wait(60)
        return CountingEnv()

    with pytest.raises(TimeoutError, match=r"Worker [01] .* start_timeout_s"):
        make([CountingEnv, forever], start_timeout_s=0.6)


# -- calls ----------------------------------------------------------------------------------------------------------


@over([SYNC_HERE, ASYNC_HERE])
def test_calls_that_are_refused_leave_it_none_the_worse(make: Make) -> None:
    collector = make(None, net())
    with pytest.raises(ValueError, match=r"stats\(workers=.*'x'"):
        collector.stats(workers="x")
    with pytest.raises(ValueError, match="2 workers, got 1"):
        collector.map_fn("set_seed", [(1,)])
    with pytest.raises(ValueError, match="2 workers"):
        collector.map_fn("set_seed", [(1,), (2,)], [{}])
    with pytest.raises(ValueError, match="cannot be called with arguments"):
        collector.cascade_execute("env.batch_size", 3)
    with pytest.raises(AttributeError, match="nothing"):
        collector.get_distant_attr("nothing")
    collector.next()
    with pytest.raises((TypeError, ValueError), match="seed"):
        collector.set_seed("one")
    assert collector.next().shape[-1] == 10


@over(HERE)
@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (None, TypeError), (1.5, TypeError), (True, TypeError)])
def test_seeds_that_are_none_are_refused_by_name(make: Make, seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="seed must"):
        make().set_seed(seed)


# -- what is accepted -----------------------------------------------------------------------------------------------

SAID: list[dict[str, Any]] = [
    {"use_buffers": False},
    {"use_buffers": True},
    {"total_frames": None},
    {"device": "cpu"},
    {"policy_device": torch.device("cpu")},
    {"create_env_kwargs": {"lengths": 3}},
    {"no_cuda_sync": True},
    {"trust_policy": True},
    {"fast_policy": False},
    {"worker_idx": 3},
    {"track_policy_version": True},
    {"track_policy_version": PolicyVersion()},
    {"track_policy_version": False},
]
SAID_OF_MANY: list[dict[str, Any]] = [
    {"num_collectors": 2},
    {"backend": "process"},
    {"num_workers": 2},
    {"storing_device": ["cpu", "cpu"]},
    {"env_device": ["cpu", torch.device("cpu")]},
    {"create_env_kwargs": [{"lengths": 3}, {"lengths": 4}]},
    {"frames_per_batch": (5, 5)},
    {"max_staleness": 0},
    {"max_staleness": 3},
    {"preemptive_threshold": 1.0},
    {"cat_results": "stack"},
    {"mp_start_method": "spawn"},
    {"stall_warning_s": 1, "start_timeout_s": 60, "max_restarts": 0},
]
MAY = [
    *((kind, options) for kind in HERE for options in SAID),
    *((SINGLE, options) for options in ({"backend": "direct"}, {"num_collectors": 1}, {"backend_options": {}})),
    *((kind, options) for kind in (SYNC_HERE, ASYNC_HERE) for options in SAID_OF_MANY),
]


@pytest.mark.parametrize(("kind", "options"), MAY, ids=[f"{kind}-{', '.join(options)}" for kind, options in MAY])
def test_what_may_be_said(make: Make, kind: Kind, options: dict[str, Any]) -> None:
    collector = make(CountingEnv, net(), **options)
    assert collector.next().get("observation").shape[-1] == 3
    assert not kind.workers or collector.num_workers == 2


@pytest.mark.parametrize("name", ["collector_class", "weight_sync_schemes", "weight_updater", "weight_recv_schemes"])
@over([SYNC_HERE, ASYNC_HERE])
def test_arguments_without_effect_say_so(make: Make, name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name}=.*no effect"):
        assert make(None, net(), **{name: object}).next() is not None


def test_sync_chooses_the_class() -> None:
    for is_sync, of in ((True, MultiSyncCollector), (False, MultiAsyncCollector)):
        with MultiCollector([CountingEnv] * 2, sync=is_sync, frames_per_batch=10, debug=True) as collector:
            assert type(collector) is of
            assert isinstance(collector, MultiCollector)
            assert not isinstance(collector, Collector)
            collector.next()


@over(HERE)
def test_a_subclass_stays_what_it_is(kind: Kind) -> None:
    mine = type("Mine", (kind.of,), {})
    with dataclasses.replace(kind, of=mine).build() as collector:
        assert type(collector) is mine


@over([SYNC_HERE, ASYNC_HERE])
def test_a_factory_for_all_workers(kind: Kind) -> None:
    with kind.of(CountingEnv, num_workers=3, frames_per_batch=12, debug=True) as collector:
        assert collector.num_workers == 3
        assert collector.next().shape == ((3, 4) if kind.joins else (12,))


@pytest.mark.parametrize(
    ("kind", "old", "given", "kept"),
    [
        (SINGLE, "devices", "cpu", "cpu"),
        (SINGLE, "devices", ["cpu"], "cpu"),
        (SINGLE, "passing_devices", ["cpu"], "cpu"),
        (SINGLE, "passing_devices", torch.device("cpu"), torch.device("cpu")),
        (SINGLE, "exploration_mode", "mode", ExplorationType.MODE),
        (SINGLE, "exploration_mode", "Random", ExplorationType.RANDOM),
        (SINGLE, "exploration_mode", ExplorationType.MEAN, ExplorationType.MEAN),
        (SYNC_HERE, "devices", ["cpu", "cpu"], ["cpu", "cpu"]),
        (SYNC_HERE, "devices", ["cpu"], "cpu"),
        (SYNC_HERE, "devices", "cpu", "cpu"),
        (ASYNC_HERE, "passing_devices", ["cpu", "cpu"], ["cpu", "cpu"]),
        (ASYNC_HERE, "exploration_mode", "mode", ExplorationType.MODE),
    ],
    ids=str,
)
def test_an_old_name_works_and_warns_its_caller(kind: Kind, old: str, given: Any, kept: Any) -> None:
    env: Any = [CountingEnv] * 2 if kind.workers else CountingEnv
    with pytest.warns(DeprecationWarning, match=f"{old} is an old name; use {OLD_NAMES[old]}") as caught:
        collector = kind.of(env, net(), frames_per_batch=10, **kind.options, **{old: given})
    assert caught[0].filename == __file__
    assert getattr(collector.config, OLD_NAMES[old]) == kept
    assert collector.next() is not None
    collector.shutdown()


# -- what there is --------------------------------------------------------------------------------------------------

DEFAULTS = {
    "total_frames": -1,
    "reset_at_each_iter": False,
    "track_traj_ids": True,
    "exploration_type": ExplorationType.RANDOM,
    "reset_when_done": True,
    "set_truncated": False,
    "return_same_td": False,
    "no_cuda_sync": False,
    "track_policy_version": False,
    "compact_obs": False,
    "extend_buffer": True,
    "progress": False,
    "fast_policy": True,
}
"""Of all arguments that are not None by default."""


def test_defaults() -> None:
    config = CollectorConfig(Factory(), frames_per_batch=10)
    given = {name: getattr(config, name) for name in arguments(Collector) if name != "frames_per_batch"}
    assert {name: value for name, value in given.items() if value is not None} == DEFAULTS


def test_defaults_of_many_workers() -> None:
    """As those of one, but that async batches carry their version unless they are told not to."""
    defaults = {**DEFAULTS, "num_sub_threads": 1, "on_worker_failure": "raise"}
    del defaults["track_policy_version"]
    parameters = inspect.signature(MultiSyncCollector).parameters
    assert {name: parameters[name].default for name in defaults} == defaults


def test_a_config_cannot_be_changed() -> None:
    config = CollectorConfig(Factory(), frames_per_batch=10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.frames_per_batch = 5  # type: ignore[misc]


def test_numbers_of_numpy_are_whole_numbers_too() -> None:
    config = CollectorConfig(Factory(), frames_per_batch=np.int64(10), total_frames=np.int32(100))  # type: ignore[arg-type]
    assert type(config.frames_per_batch) is int
    assert type(config.total_frames) is int


@over(HERE)
def test_the_caller_keeps_its_arguments(kind: Kind) -> None:
    options: dict[str, Any] = {"frames_per_batch": 10, "create_env_kwargs": {"batch_size": (2,)}, **kind.options}
    before = {**options, "create_env_kwargs": dict(options["create_env_kwargs"])}
    kind.of([CountingEnv], None, **options).shutdown()
    assert options == before


@over(HERE)
def test_good_arguments_do_not_warn(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"trajs_per_batch": 2}, {"replay_buffer": buffer()}):
            list(make(lambda: SerialEnv(2, lambda: GymEnv(CountingGymEnv())), lanes=2, batches=2, **options))


def test_a_subclass_may_have_arguments_of_its_own() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(CollectorConfig):
        flavour: str = "plain"

    class Mine(Collector):
        config_class = Config

    env = CountingEnv()
    with Mine(env, frames_per_batch=10, flavour="sweet") as collector:
        assert collector.config == Config(env, frames_per_batch=10, flavour="sweet")
    assert list(inspect.signature(Mine).parameters)[-1] == "flavour"
    with pytest.raises(TypeError, match=r"Mine got an unknown argument: flavor='x'. Did you mean 'flavour'\?"):
        Mine(CountingEnv(), frames_per_batch=10, flavor="x")
