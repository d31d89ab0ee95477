"""Wrong arguments are refused by name, with the value and a cure, before anything is made."""

import dataclasses
import inspect
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import Collector, CollectorConfig, PolicyVersion
from swath.collectors.config import ELSEWHERE, SYNONYMS
from swath.data import ReplayBuffer
from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.modules import ExplorationType
from swath.testing import CountingEnv, CountingGymEnv

FIELDS = [field.name for field in dataclasses.fields(CollectorConfig)]


class Factory:
    """Makes an env and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, **kwargs: Any) -> EnvBase:
        self.calls += 1
        return CountingEnv(**kwargs)


def net() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])


def refuse(kind: type[Exception], words: list[str], **options: Any) -> None:
    """Making a collector raises `kind` with `words` in its message, and the env was never made."""
    factory = Factory()
    policy = options.pop("policy", None)
    options = {"frames_per_batch": 10, **options}
    with pytest.raises(kind) as caught:
        Collector(factory, policy, **options)
    assert factory.calls == 0
    for word in words:
        assert word in str(caught.value)


# -- rejections that users of the founding documents expect ---------------------------------------------------------

EXPECTED = [
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
    ({"sync": True}, ValueError, ["sync=True", "MultiCollector"]),
    ({"sync": "yes"}, TypeError, ["sync", "'yes'"]),
    ({"num_collectors": 0}, ValueError, ["num_collectors=0"]),
    ({"num_collectors": 2}, ValueError, ["num_collectors=2", "MultiCollector"]),
    ({"num_collectors": 2, "backend": "direct"}, ValueError, ["num_collectors=2"]),
    ({"num_collectors": True}, TypeError, ["num_collectors", "True"]),
    ({"num_collectors": 1.5}, TypeError, ["num_collectors", "1.5"]),
    ({"backend": "ray"}, ValueError, ["backend='ray'", "direct"]),
    ({"backend": "submitit"}, ValueError, ["backend='submitit'"]),
    ({"backend_options": {"sync": True}}, ValueError, ["backend_options", "{'sync': True}"]),
    ({"replay_buffer": object()}, TypeError, ["replay_buffer must be a ReplayBuffer"]),
    ({"replay_buffer": ReplayBuffer(), "return_same_td": True}, TypeError, ["return_same_td=True", "replay_buffer"]),
    ({"replay_buffer": ReplayBuffer(), "use_buffers": True}, TypeError, ["use_buffers=True", "replay_buffer"]),
    (
        {"replay_buffer": ReplayBuffer(), "extend_buffer": False, "postproc": lambda batch: batch},
        TypeError,
        ["extend_buffer=False", "postproc"],
    ),
    (
        {"replay_buffer": ReplayBuffer(), "extend_buffer": False, "split_trajs": True},
        TypeError,
        ["extend_buffer=False", "split_trajs"],
    ),
    (
        {"replay_buffer": ReplayBuffer(), "extend_buffer": False, "trajs_per_batch": 2},
        TypeError,
        ["extend_buffer=False", "trajs_per_batch"],
    ),
    ({"trajs_per_write": 2}, ValueError, ["trajs_per_write=2", "replay_buffer", "trajs_per_batch"]),
    ({"trajs_per_write": 2, "trajs_per_batch": 2}, ValueError, ["trajs_per_write=2", "replay_buffer"]),
    ({"trajs_per_write": 2, "replay_buffer": ReplayBuffer()}, ValueError, ["trajs_per_write=2", "trajs_per_batch"]),
]


@pytest.mark.parametrize(("options", "kind", "words"), EXPECTED, ids=[", ".join(o) for o, *_ in EXPECTED])
def test_what_cannot_be_is_refused(options: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    refuse(kind, words, **options)


@pytest.mark.parametrize("option", [{"sync": True}, {"num_collectors": 1}, {"backend": "direct"}])
def test_a_subclass_cannot_become_another_collector(option: dict[str, Any]) -> None:
    class Mine(Collector):
        pass

    ((name, value),) = option.items()
    with pytest.raises(TypeError, match=f"Mine .*{name}={value!r}"):
        Mine(Factory(), frames_per_batch=10, **option)


@pytest.mark.parametrize("options", [{}, {"backend": "direct"}, {"num_collectors": 1}, {"backend_options": {}}])
def test_this_process_may_be_asked_for_by_name(options: dict[str, Any]) -> None:
    with Collector(Factory(), frames_per_batch=10, **options) as collector:
        assert collector.next().shape == (10,)


def test_only_two_arguments_go_by_position() -> None:
    with pytest.raises(TypeError, match="positional"):
        Collector(Factory(), None, 10)  # type: ignore[misc]


@pytest.mark.parametrize("count", [0, 2])
def test_a_list_must_hold_one_env(count: int) -> None:
    factory = Factory()
    with pytest.raises(ValueError, match=rf"list of {count}.*SerialEnv"):
        Collector([factory] * count, frames_per_batch=10)
    assert factory.calls == 0


@pytest.mark.parametrize("given", ["CartPole-v1", 5, None, TensorDict({}, [])])
def test_what_is_no_env_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)[Ee]nvironment.*GymEnv\('CartPole-v1'\)"):
        Collector(given, frames_per_batch=10)


def test_a_factory_of_no_env_is_refused() -> None:
    with pytest.raises(TypeError, match="got int"):
        Collector(lambda: 5, frames_per_batch=10)


@pytest.mark.parametrize("policy", [5, "greedy", {"action": 1}])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match=f"policy must be .* got {type(policy).__name__}"):
        Collector(CountingEnv(), policy, frames_per_batch=10)


def test_create_env_kwargs_need_a_factory() -> None:
    with pytest.raises(RuntimeError, match=r"create_env_kwargs=\{'batch_size': \(2,\)\}.*factory"):
        Collector(CountingEnv(), frames_per_batch=10, create_env_kwargs={"batch_size": (2,)})


def test_an_env_that_counts_steps_itself_has_no_room_for_max_frames_per_traj() -> None:
    class Stepper(gym.Env[Any, Any]):
        observation_space = gym.spaces.Dict({"step_count": gym.spaces.Box(0, 9, (1,))})
        action_space = gym.spaces.Discrete(2)

        def reset(self, **kwargs: Any) -> Any:
            return {"step_count": np.zeros(1, np.float32)}, {}

    with pytest.raises(ValueError, match=r"max_frames_per_traj=5.*'step_count'"):
        Collector(GymEnv(Stepper()), frames_per_batch=10, max_frames_per_traj=5)
    with Collector(GymEnv(Stepper()), frames_per_batch=10, max_frames_per_traj=0):
        pass  # switched off


def test_set_truncated_needs_the_entry() -> None:
    env = CountingEnv()
    env.has_truncated = False
    with pytest.raises(RuntimeError, match=r"set_truncated=True.*'truncated'"):
        Collector(env, frames_per_batch=10, set_truncated=True)


def test_versions_of_a_batched_env_need_the_instance() -> None:
    with pytest.raises(RuntimeError, match=r"track_policy_version=True.*\[2\].*PolicyVersion\(\)"):
        Collector(CountingEnv((2,)), frames_per_batch=10, track_policy_version=True)


def test_an_env_of_the_user_is_left_open_when_the_collector_cannot_be_made() -> None:
    env = CountingEnv((2,))
    with pytest.raises(RuntimeError):
        Collector(env, frames_per_batch=10, track_policy_version=True)
    assert not env.is_closed


def test_an_env_from_a_factory_is_closed_when_the_collector_cannot_be_made() -> None:
    made: list[EnvBase] = []

    def factory() -> EnvBase:
        made.append(CountingEnv((2,)))
        return made[-1]

    with pytest.raises(RuntimeError):
        Collector(factory, frames_per_batch=10, track_policy_version=True)
    assert made[0].is_closed


# -- wrong kinds and values of every field --------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {
    "frames_per_batch": [None, "10", 10.0, True, [10]],
    "total_frames": ["100", 1e6, False],
    "policy_factory": [5, "factory"],
    "device": [],
    "storing_device": [],
    "policy_device": [],
    "env_device": [],
    "create_env_kwargs": [5, [("batch_size", 2)], "batch_size=2"],
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
    "track_policy_version": [None, 1, "int", PolicyVersion],
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


def test_every_field_has_a_wrong_kind() -> None:
    assert list(WRONG) == FIELDS


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_kind_is_refused(name: str, value: Any) -> None:
    refuse(TypeError, [f"{name} must be", repr(value)], **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frames_per_batch", 0),
        ("frames_per_batch", -5),
        ("total_frames", 0),
        ("trajs_per_batch", 0),
        ("trajs_per_write", 0),
        ("trajs_per_write", -1),
        ("worker_idx", -1),
        ("worker_idx", 2**23),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: int) -> None:
    refuse(ValueError, [name, str(value)], **{name: value})


@pytest.mark.parametrize("name", ["device", "storing_device", "policy_device", "env_device"])
@pytest.mark.parametrize("value", ["gpu", ["cpu", "cpu"], 2.5])
def test_what_is_no_device_is_refused(name: str, value: Any) -> None:
    refuse(ValueError, [f"{name}={value!r}"], **{name: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize("name", ["device", "storing_device", "policy_device", "env_device"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    refuse(ValueError, [f"{name}='cuda'", "not available", "'cpu'"], **{name: "cuda"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize("value", [True, {"warmup": 2}])
def test_cudagraph_policy_needs_cuda(value: Any) -> None:
    refuse(RuntimeError, [f"cudagraph_policy={value!r}", "CUDA"], cudagraph_policy=value)


def test_a_float_is_refused_with_the_whole_number_to_write() -> None:
    refuse(TypeError, ["total_frames", "1000000.0", "Write 1000000."], total_frames=1e6)


def test_the_name_of_an_exploration_type_is_refused_with_the_type_to_write() -> None:
    refuse(TypeError, ["exploration_type", "'mode'", "ExplorationType.MODE"], exploration_type="mode")


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("frame_per_batch", "frames_per_batch"),
        ("total_frame", "total_frames"),
        ("max_frames_per_trajectory", "max_frames_per_traj"),
        ("split_trajectories", "split_trajs"),
        ("policyy", "policy"),
        ("explorationtype", "exploration_type"),
        ("traj_per_batch", "trajs_per_batch"),
        ("replaybuffer", "replay_buffer"),
        ("extends_buffer", "extend_buffer"),
        ("traj_per_write", "trajs_per_write"),
    ],
)
def test_an_unknown_argument_is_told_the_nearest_name(wrong: str, right: str) -> None:
    refuse(TypeError, [f"{wrong}=3", f"Did you mean {right!r}?"], **{wrong: 3})


def test_all_unknown_arguments_are_told() -> None:
    refuse(TypeError, ["total_frame=3. Did you mean 'total_frames'?", "zzz='a'."], total_frame=3, zzz="a")


def test_frames_per_batch_is_needed() -> None:
    factory = Factory()
    with pytest.raises(TypeError, match="Collector needs the argument 'frames_per_batch'"):
        Collector(factory)
    assert factory.calls == 0


@pytest.mark.parametrize(
    ("old", "given", "kept"),
    [
        ("devices", "cpu", "cpu"),
        ("devices", ["cpu"], "cpu"),
        ("passing_devices", ["cpu"], "cpu"),
        ("passing_devices", torch.device("cpu"), torch.device("cpu")),
        ("exploration_mode", "mode", ExplorationType.MODE),
        ("exploration_mode", "Random", ExplorationType.RANDOM),
        ("exploration_mode", ExplorationType.MEAN, ExplorationType.MEAN),
    ],
)
def test_an_old_name_works_and_warns_its_caller(old: str, given: Any, kept: Any) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is an old name; use {SYNONYMS[old]}") as caught:
        collector = Collector(CountingEnv(), frames_per_batch=10, **{old: given})
    assert caught[0].filename == __file__
    assert getattr(collector.config, SYNONYMS[old]) == kept
    assert collector.next().shape == (10,)
    collector.shutdown()


def test_old_and_new_name_exclude_each_other() -> None:
    refuse(TypeError, ["devices='cpu'", "policy_device='cpu'"], devices="cpu", policy_device="cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_unknown_exploration_mode_is_told_the_nearest() -> None:
    refuse(ValueError, ["exploration_mode='randm'", "Did you mean 'random'?"], exploration_mode="randm")


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
"""Of all fields that are not None by default."""


def test_defaults() -> None:
    config = CollectorConfig(frames_per_batch=10)
    given = {name: getattr(config, name) for name in FIELDS if name != "frames_per_batch"}
    assert {name: value for name, value in given.items() if value is not None} == DEFAULTS


def test_the_signature_shows_all_arguments() -> None:
    parameters = inspect.signature(Collector).parameters
    assert list(parameters) == ["create_env_fn", "policy", *FIELDS]
    assert parameters["policy"].default is None
    assert parameters["frames_per_batch"].default is inspect.Parameter.empty
    assert all(parameters[name].default == value for name, value in DEFAULTS.items())
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in FIELDS)


def test_every_field_is_described() -> None:
    described = inspect.getdoc(CollectorConfig) or ""
    assert [name for name in FIELDS if f"    {name}: " not in described] == []


def test_a_config_cannot_be_changed() -> None:
    config = CollectorConfig(frames_per_batch=10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.frames_per_batch = 5  # type: ignore[misc]


def test_numbers_of_numpy_are_whole_numbers_too() -> None:
    config = CollectorConfig(frames_per_batch=np.int64(10), total_frames=np.int32(100))  # type: ignore[arg-type]
    assert type(config.frames_per_batch) is int
    assert type(config.total_frames) is int


def test_the_caller_keeps_its_arguments() -> None:
    options: dict[str, Any] = {"frames_per_batch": 10, "create_env_kwargs": {"batch_size": (2,)}, "num_collectors": 1}
    before = {**options, "create_env_kwargs": dict(options["create_env_kwargs"])}
    Collector(Factory(), None, **options).shutdown()
    assert options == before


def test_good_arguments_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = SerialEnv(2, lambda: GymEnv(CountingGymEnv()))
        Collector(env, None, frames_per_batch=10, total_frames=20, trajs_per_batch=2).shutdown()


def test_a_subclass_may_have_arguments_of_its_own() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(CollectorConfig):
        flavour: str = "plain"

    class Mine(Collector):
        config_class = Config

    with Mine(CountingEnv(), frames_per_batch=10, flavour="sweet") as collector:
        assert collector.config == Config(frames_per_batch=10, flavour="sweet")
    assert list(inspect.signature(Mine).parameters)[-1] == "flavour"
    with pytest.raises(TypeError, match=r"Mine got an unknown argument: flavor='x'. Did you mean 'flavour'\?"):
        Mine(CountingEnv(), frames_per_batch=10, flavor="x")


def test_elsewhere_is_no_field() -> None:
    assert not set(ELSEWHERE) & set(FIELDS)
