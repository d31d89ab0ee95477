"""ParallelEnv: what SerialEnv does, in other processes."""

import gc
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from gymnasium.vector import SyncVectorEnv
from space_zoo import SPACES, PlaybackEnv, UnmergedGymEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from swath.collectors import BaseCollector, Collector
from swath.envs import EnvBase, GymEnv, ParallelEnv, Rows, SerialEnv, check_env
from swath.envs.registry import Registered
from swath.errors import ClosedError, UnsupportedEnvError
from swath.keys import NEXT, RESET
from swath.seeding import lane_seed
from swath.testing import CollectorConformance, CountingEnv, CountingGymEnv, counting_envs
from swath.testing.checks import assert_follows, assert_frames_belong

pytestmark = pytest.mark.timeout(60)

Whole = Callable[..., EnvBase]
PARALLEL: dict[str, Whole] = {"one each": ParallelEnv, "two each": partial(ParallelEnv, envs_per_worker=2)}
WHOLES: dict[str, Whole] = {"serial": SerialEnv, **PARALLEL}
each_whole = pytest.mark.parametrize("whole", WHOLES.values(), ids=WHOLES)


@pytest.fixture
def close() -> Iterator[Callable[[EnvBase], EnvBase]]:
    """Closes, after the test, what it was called with."""
    made: list[EnvBase] = []

    def keep(env: EnvBase) -> EnvBase:
        made.append(env)
        return env

    yield keep
    for env in made:
        env.close()


Close = Callable[[EnvBase], EnvBase]


# -- the contract ------------------------------------------------------------------------------------------------------


class TestCollectorOnAParallelEnv(CollectorConformance):
    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        if lanes == 0:
            return Collector(GymEnv(CountingGymEnv(lengths=lengths)), None, **options)
        return Collector(ParallelEnv(lanes, counting_envs(lanes, lengths=lengths)), None, **options)


# -- the same data as SerialEnv ----------------------------------------------------------------------------------------


def lanes_of_three(first: int, kind: str) -> EnvBase:
    lanes = itertools.count(first)
    return GymEnv(lambda: CountingGymEnv(next(lanes), lengths=[[3, 1], [4], [2]] * 4, kind=kind), num_envs=3)


ENVS: dict[str, Any] = {
    "CartPole": lambda: GymEnv("CartPole-v1"),
    "Pendulum": lambda: GymEnv("Pendulum-v1", max_episode_steps=9),
    "Taxi": lambda: GymEnv("Taxi-v4", max_episode_steps=7, categorical_action_encoding=True),
    "not looked into": lambda: UnmergedGymEnv("CartPole-v1"),
    "lanes": lambda: GymEnv("CartPole-v1", num_envs=2),
    "a vector env": lambda: GymEnv(SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)),
    "gymnasium's own": lambda: gym.make("Acrobot-v1", max_episode_steps=11),
    "one each": counting_envs(4, lengths=[[3], [4], [1], [6]]),
    "a dict": counting_envs(4, kind="dict", lengths=[2, 5]),
    "pixels": counting_envs(4, kind="pixels", truncate=True),
    "lanes of pixels": [partial(lanes_of_three, 3 * index, "pixels") for index in range(4)],
    "custom": lambda: CountingEnv((2, 3), lengths=[3, 4]),
    "nested": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
}


@pytest.mark.parametrize("name", ENVS)
def test_the_same_seed_gives_the_same_data_wherever_envs_run(name: str, close: Close) -> None:
    def run(whole: Whole) -> Any:
        env = close(whole(4, ENVS[name]))
        following = env.set_seed(11)
        first = env.rollout(30, break_when_any_done=False)
        env.set_seed(5, static_seed=True)
        second = env.rollout(12, break_when_any_done=False)
        assert following == lane_seed(11, env.num_lanes)
        return torch.cat([first, second], -1), env.fake_tensordict(), env.state_dict(), env.out_leaves

    expected, fake, state, leaves = run(SerialEnv)
    for whole in PARALLEL.values():
        found, other_fake, other_state, other_leaves = run(whole)
        assert (found == expected).all()
        assert found.batch_size == expected.batch_size
        assert (fake == other_fake).all()
        assert state == other_state == {"seed": 5}
        assert leaves == other_leaves


@pytest.mark.parametrize("name", ["Dict in Dict", "Tuple in Dict", "MultiDiscrete with starts", "Box uint64"])
@pytest.mark.parametrize("which", ["observation_space", "action_space"])
def test_spaces_of_all_kinds_travel(name: str, which: str, close: Close) -> None:
    def run(whole: Whole) -> Any:
        env = close(whole(2, lambda: GymEnv(partial(PlaybackEnv, **{which: SPACES[name]}))))
        assert getattr(env, which) == SPACES[name]
        env.set_seed(0)
        return env.rollout(4)

    assert (run(SerialEnv) == run(ParallelEnv)).all()


def test_the_last_process_may_have_fewer(close: Close) -> None:
    env = close(ParallelEnv(5, counting_envs(5), envs_per_worker=2))
    assert env.reset()["observation"][:, 0].tolist() == [0, 1, 2, 3, 4]
    td = env.rollout(7, break_when_any_done=False)
    assert td["observation"][:, :, 2].tolist() == [[0, 1, 2, 3, 4, 0, 1]] * 5


@pytest.mark.parametrize("whole", [*WHOLES.values(), lambda count, _: GymEnv("CartPole-v1", num_envs=count)])
def test_lanes_are_seeded_by_their_global_index(whole: Whole, close: Close) -> None:
    env = close(whole(3, lambda: GymEnv("CartPole-v1")))
    env.first_lane = 2
    env.set_seed(9)
    other = GymEnv("CartPole-v1", num_envs=5)
    other.set_seed(9)
    assert torch.equal(env.reset()["observation"], other.reset()["observation"][2:])


@each_whole
@pytest.mark.parametrize("inner", [GymEnv, UnmergedGymEnv])
def test_partial_resets(whole: Whole, inner: type[GymEnv], close: Close) -> None:
    env = close(whole(3, [partial(inner, make) for make in counting_envs(3)]))
    for marked in itertools.product([False, True], repeat=3):
        root = env.reset()
        episode = int(root["observation"][0, 1])
        td = env.rand_step(root).get(NEXT)
        td = env.reset(td.set(RESET, torch.tensor(marked).view(3, 1)))
        expected = [[lane, episode + mark, 1 - mark] for lane, mark in enumerate(marked)]
        assert td["observation"].tolist() == expected
        env.reset(TensorDict({RESET: torch.tensor([[not mark] for mark in marked])}))


@each_whole
@pytest.mark.parametrize("inner", [GymEnv, UnmergedGymEnv])
def test_rows_may_change(whole: Whole, inner: type[GymEnv], close: Close) -> None:
    """Those that the workers know, and those that somebody has made himself: of a surface and a loop, or of two."""
    env = close(whole(2, [partial(inner, make) for make in counting_envs(2)]))
    own, other, foreign = env.new_out_rows(), env.new_out_rows(), Rows(env.out_leaves, env.batch_size)
    actions = [Rows(env.actions.leaves, env.batch_size) for _ in range(2)]
    env.reset_into(range(2), own)
    used = (foreign, own, foreign, other, own)
    for number, out in enumerate(used):
        env.step_into(actions[number % 2], out)
        assert out.arrays["observation"][:, 2].tolist() == [number + 1] * 2
        assert out.arrays["reward"][:, 0].tolist() == [number + 1] * 2
    assert foreign.arrays["observation"][:, 2].tolist() == [3, 3]
    env.reset_into([1], foreign)
    assert foreign.arrays["observation"].tolist() == [[0, 0, 3], [1, 1, 0]]
    assert own.arrays["observation"][:, 2].tolist() == [5, 5]


def test_rows_that_nobody_holds_are_forgotten_by_the_workers(close: Close) -> None:
    env = close(ParallelEnv(2, counting_envs(2)))
    action = Rows(env.actions.leaves, env.batch_size)
    for _ in range(4):
        env.reset_into(range(2), env.new_out_rows())
    kept = env.new_out_rows()
    env.reset_into([0, 1], kept)
    env.step_into(action, kept)
    assert len(env._known) == 1
    assert kept.arrays["observation"].tolist() == [[0, 4, 1], [1, 4, 1]]


def acts_of(env: EnvBase) -> list[Any]:
    """The actions that each PlaybackEnv has been given."""
    if isinstance(env, ParallelEnv):
        return env.get_attr("gym_envs[0].unwrapped.acts")
    return [inner.gym_envs[0].unwrapped.acts for inner in env.envs]  # type: ignore[attr-defined]


@each_whole
def test_actions_may_change_their_encoding(whole: Whole, close: Close) -> None:
    """One-hot vectors, scores and indices, in turn."""
    env = close(whole(2, lambda: GymEnv(partial(PlaybackEnv, action_space=gs.Discrete(3, start=10), length=100))))
    root = env.reset()
    for action in (
        torch.eye(3, dtype=torch.int64)[[0, 1]],
        torch.tensor([[0.1, 0.2, 0.7], [0.9, 0.05, 0.05]]),
        torch.tensor([1, 2]),
        torch.eye(3, dtype=torch.int64)[[2, 2]],
    ):
        env.step(root.set("action", action))
    assert acts_of(env) == [[10, 12, 11, 12], [11, 10, 12, 12]]


@pytest.mark.parametrize("whole", PARALLEL.values(), ids=PARALLEL)
def test_an_env_may_keep_its_actions(whole: Whole, close: Close) -> None:
    """They are read from shared memory, which the next step overwrites."""
    env = close(whole(2, lambda: GymEnv(partial(PlaybackEnv, action_space=gs.Box(-1, 1, (2,)), length=100))))
    td = env.rollout(10)
    for lane, acts in enumerate(acts_of(env)):
        np.testing.assert_array_equal(np.stack(acts), td["action"][lane].numpy())


# -- collecting --------------------------------------------------------------------------------------------------------


def test_the_founding_example(close: Close) -> None:
    env = close(ParallelEnv(4, lambda: GymEnv("CartPole-v1")))
    policy = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
    collector = Collector(env, policy, frames_per_batch=200, total_frames=1000)
    assert [batch.shape for batch in collector] == [(4, 50)] * 5
    collector.shutdown()
    assert env.is_closed


def test_the_rows_of_a_collector_are_shared_memory(close: Close) -> None:
    env = close(ParallelEnv(2, counting_envs(2)))
    collector = Collector(env, None, frames_per_batch=20)
    next(iter(collector))
    assert env._mirror is None
    collector.shutdown()


@each_whole
@pytest.mark.parametrize("kind", ["vector", "dict", "pixels"])
def test_episodes_are_cut_off(whole: Whole, kind: str, close: Close) -> None:
    env = close(whole(4, counting_envs(4, kind=kind, lengths=[3, 9, 20])))
    before = None
    for batch in Collector(env, None, frames_per_batch=40, total_frames=200, max_frames_per_traj=6):
        assert_frames_belong(batch)
        if before is not None:
            assert_follows(before, batch)
        before = batch


def test_a_collector_and_the_surface_may_use_it_in_turn(close: Close) -> None:
    env = close(ParallelEnv(2, counting_envs(2, lengths=100)))
    collector = Collector(env, None, frames_per_batch=8)
    first = collector.next()
    assert env.reset()["observation"][:, 1:].tolist() == [[1, 0], [1, 0]]
    assert_frames_belong(first)
    again = collector.next()
    assert_frames_belong(again)
    collector.shutdown()


def test_several_parallel_envs_at_once(close: Close) -> None:
    envs = [close(ParallelEnv(2, counting_envs(2))) for _ in range(3)]
    for _ in range(5):
        for env in envs:
            env.rollout(3)
    assert [env.reset()["observation"][0, 1].item() for env in envs] == [5, 5, 5]


def test_check_env_finds_nothing(close: Close) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(close(ParallelEnv(3, lambda: GymEnv("CartPole-v1"), envs_per_worker=2)))


# -- what is sent ------------------------------------------------------------------------------------------------------


@each_whole
@pytest.mark.parametrize(
    ("given", "kwargs", "lanes"),
    [
        (CountingGymEnv, {"lane": 3}, [3, 3]),
        (CountingGymEnv, [{"lane": 3}, {"lane": 7}], [3, 7]),
        ([CountingGymEnv(lane=4), partial(CountingGymEnv, lane=5)], None, [4, 5]),
        ([partial(GymEnv, make) for make in counting_envs(2)], None, [0, 1]),
    ],
    ids=["kwargs for all", "kwargs for each", "an instance and a factory", "a factory for each"],
)
def test_kwargs_and_instances(whole: Whole, given: Any, kwargs: Any, lanes: list[int], close: Close) -> None:
    env = close(whole(2, given, create_env_kwargs=kwargs))
    assert env.reset()["observation"][:, 0].tolist() == lanes


def test_envs_registered_here_are_known_there(close: Close) -> None:
    class Local(CountingGymEnv):
        """Known only by value."""

    gym.register("swath-tests/Local-v0", entry_point=Local, kwargs={"lane": 8})
    gym.register("swath-tests/Lambda-v0", entry_point=lambda lane: Local(lane), kwargs={"lane": 9})
    gym.register("swath-tests/Short-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=3)
    gym.register("swath-tests/Unpicklable-v0", entry_point=lambda: threading.Lock)
    gym.registry["swath-tests/Unpicklable-v0"].kwargs["lock"] = threading.Lock()
    try:
        names = ["swath-tests/Local-v0", "swath-tests/Lambda-v0"]
        env = close(ParallelEnv(2, [partial(GymEnv, name) for name in names]))
        assert env.reset()["observation"][:, 0].tolist() == [8, 9]
        env = close(ParallelEnv(2, lambda: GymEnv("swath-tests/Short-v0")))
        assert env.rollout(10).shape == (2, 3)
    finally:
        for name in ("Local", "Lambda", "Short", "Unpicklable"):
            del gym.registry[f"swath-tests/{name}-v0"]


def test_what_is_registered_travels_and_takes_the_place_of_what_is_there() -> None:
    gym.register("swath-tests/Mine-v0", entry_point=CountingGymEnv)
    try:
        registered = Registered.here()
        spec = gym.registry.pop("swath-tests/Mine-v0")
        count = len(gym.registry)
        registered.adopt()
        assert gym.registry["swath-tests/Mine-v0"] == spec
        assert len(gym.registry) == count + 1
    finally:
        gym.registry.pop("swath-tests/Mine-v0", None)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_other_start_methods(method: str, close: Close) -> None:
    env = close(ParallelEnv(2, lambda: GymEnv("CartPole-v1"), mp_start_method=method, envs_per_worker=2))
    assert env.rollout(5, break_when_any_done=False).shape == (2, 5)


def test_in_each_other(close: Close) -> None:
    """A worker may have workers of its own."""
    env = close(ParallelEnv(2, lambda: ParallelEnv(2, CountingGymEnv), envs_per_worker=2))
    assert env.batch_size == (2, 2)
    assert (
        env.rollout(7, break_when_any_done=False)["observation"][..., 2].eq(torch.tensor([0.0, 1, 2, 3, 4, 0, 1])).all()
    )


def test_workers_draw_different_numbers(close: Close) -> None:
    """Unseeded envs must not be copies of each other, although their processes are."""
    env = close(ParallelEnv(4, lambda: GymEnv("CartPole-v1")))
    assert len(env.reset()["observation"].unique(dim=0)) == 4


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_attributes_and_calls(close: Close) -> None:
    env = close(ParallelEnv(3, counting_envs(3), envs_per_worker=2))
    assert env.get_attr("gym_envs[0].lane") == [0, 1, 2]
    env.rollout(3)
    assert env.get_attr("gym_envs[0].count") == [3, 3, 3]
    assert env.call("gym_envs[0].__eq__", 5) == [NotImplemented] * 3
    assert env.call("gym_envs[0].reset", seed=3)[1][0].tolist() == [1, 1, 0]
    with pytest.raises(AttributeError, match="nothing") as caught:
        env.get_attr("nothing")
    if sys.version_info >= (3, 11):
        assert "env 0 of ParallelEnv(3" in "\n".join(caught.value.__notes__)


class Locked(CountingGymEnv):
    """Has something that cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_what_cannot_be_sent_back_is_named(close: Close) -> None:
    env = close(ParallelEnv(2, Locked))
    with pytest.raises(RuntimeError, match="lock"):
        env.get_attr("gym_envs[0].lock")
    assert env.get_attr("gym_envs[0].lane") == [0, 0]


def test_its_workers_have_the_threads_that_were_asked_for(close: Close) -> None:
    class Threads(CountingGymEnv):
        def told(self) -> int:
            import torch

            return torch.get_num_threads()

    before = torch.get_num_threads()
    env = close(ParallelEnv(2, Threads, num_sub_threads=2))
    assert env.call("gym_envs[0].told") == [2, 2]
    try:
        close(ParallelEnv(1, CountingGymEnv, num_threads=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


# -- arguments ---------------------------------------------------------------------------------------------------------


@each_whole
@pytest.mark.parametrize(
    ("others", "what"),
    [
        (lambda: GymEnv("Pendulum-v1"), "observations"),
        (lambda: GymEnv("CartPole-v1", num_envs=2), "batch_size"),
        (lambda: GymEnv("CartPole-v1", categorical_action_encoding=True), "actions"),
    ],
)
def test_envs_of_different_layouts_are_refused(whole: Whole, others: Any, what: str) -> None:
    name = "SerialEnv" if whole is SerialEnv else "ParallelEnv"
    with pytest.raises(ValueError, match=f"{name} needs .* env 1 .* differs from env 0 .* in its {what}"):
        whole(2, [lambda: GymEnv("CartPole-v1"), others])


@each_whole
def test_envs_with_other_bounds_are_stepped_with_their_own_actions(whole: Whole, close: Close) -> None:
    """Discrete spaces of one size but another start: one layout, but not one codec."""
    factories = [partial(GymEnv, partial(PlaybackEnv, action_space=gs.Discrete(3, start=start))) for start in (0, 10)]
    env = close(whole(2, factories))
    env.step(env.reset().set("action", torch.eye(3, dtype=torch.int64)[[1, 2]]))
    assert acts_of(env) == [[1], [12]]


def test_the_same_env_twice_in_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="same env was given twice"):
        ParallelEnv(2, [CountingGymEnv()] * 2, envs_per_worker=2)


class ElsewhereEnv(CountingEnv):
    """Says that its rows lie on another device."""

    @property
    def rows_device(self) -> torch.device:
        return torch.device("meta")


def test_rows_on_another_device_are_refused() -> None:
    with pytest.raises(UnsupportedEnvError, match=r"env 0 .* works on meta"):
        ParallelEnv(2, ElsewhereEnv)


@each_whole
def test_wrong_arguments_are_refused(whole: Whole) -> None:
    for count in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="num_workers must be a positive whole number"):
            whole(count, CountingGymEnv)
    with pytest.raises(ValueError, match="create_env_fn has 1 elements for num_workers=2"):
        whole(2, [CountingGymEnv])
    with pytest.raises(ValueError, match="create_env_kwargs has 3 elements"):
        whole(2, CountingGymEnv, create_env_kwargs=[{}, {}, {}])
    with pytest.raises(RuntimeError, match="create_env_kwargs"):
        whole(1, CountingGymEnv(), create_env_kwargs={"lane": 1})


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    gc.collect()  # what is left of other tests
    before = set(os.listdir("/proc/self/fd"))
    for count in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="envs_per_worker must be a positive whole number"):
            ParallelEnv(2, CountingGymEnv, envs_per_worker=count)
        with pytest.raises(ValueError, match="num_threads must be"):
            ParallelEnv(2, CountingGymEnv, num_threads=count)
    with pytest.raises(ValueError, match="shutdown_timeout must be a number of seconds"):
        ParallelEnv(2, CountingGymEnv, shutdown_timeout=-1)
    with pytest.raises(ValueError, match="start method must be one of"):
        ParallelEnv(2, CountingGymEnv, mp_start_method="thread")
    for name in ("pin_memory", "allow_step_when_done"):
        with pytest.raises(ValueError, match=f"does not support `{name}"):
            ParallelEnv(2, CountingGymEnv, **{name: True})
    with pytest.raises(TypeError, match=r"unknown argument: env_per_worker=2\. Did you mean 'envs_per_worker'"):
        ParallelEnv(2, CountingGymEnv, env_per_worker=2)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_names_that_tune_other_implementations_do_nothing(close: Close) -> None:
    options = dict.fromkeys(("share_individual_td", "shared_memory", "memmap", "policy_proof", "non_blocking"))
    options |= dict.fromkeys(("use_buffers", "metadata_from_workers", "consolidate", "daemon", "auto_wrap_envs"))
    assert close(ParallelEnv(1, CountingGymEnv, **options)).reset().shape == (1,)


def test_one_env_alone_may_stay_here() -> None:
    env = ParallelEnv(1, CountingGymEnv, create_env_kwargs={"lane": 3}, serial_for_single=True, shutdown_timeout=2.0)
    assert type(env) is SerialEnv
    assert env.reset()["observation"].tolist() == [[3, 0, 0]]


def test_two_envs_do_not_stay_here(close: Close) -> None:
    env = close(ParallelEnv(2, CountingGymEnv, serial_for_single=True))
    assert type(env) is ParallelEnv
    assert repr(env) == "ParallelEnv(2, GymEnv(CountingGymEnv, batch_size=[]))"
    assert env.device is None


def test_a_device_may_be_given(close: Close) -> None:
    env = close(ParallelEnv(2, CountingGymEnv, device="cpu"))
    assert env.device == env.reset().device == torch.device("cpu")
    assert close(ParallelEnv(2, lambda: GymEnv("CartPole-v1", device="cpu"))).device == torch.device("cpu")


# -- closing -----------------------------------------------------------------------------------------------------------


class Telling(CountingGymEnv):
    """Leaves a file when it is closed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def close(self) -> None:
        with open(self.path, "a") as file:
            file.write("closed\n")


def test_closing_closes_the_envs_and_leaves_nothing(tmp_path: Any) -> None:
    ParallelEnv(1, CountingGymEnv).close()  # starts the server, which stays
    before = set(os.listdir("/proc/self/fd"))
    env = ParallelEnv(3, partial(Telling, str(tmp_path / "told")), envs_per_worker=2)
    pids = env.worker_pids
    td = env.rand_action(env.reset())
    rows, action = env.new_out_rows(), Rows(env.actions.leaves, env.batch_size)
    env.close()
    env.close()
    assert (tmp_path / "told").read_text().count("closed") == 3
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    calls = (env.reset, lambda: env.step(td), env.rand_step, lambda: env.get_attr("name"), env.new_out_rows)
    for call in (*calls, lambda: env.set_seed(3), partial(env.step_into, action, rows)):
        with pytest.raises(ClosedError, match="is closed"):
            call()
    with pytest.raises(ClosedError, match="closed already"):
        env.close(raise_if_closed=True)
    assert rows.arrays["observation"].shape == (3, 3)  # what was handed out stays
    del rows, call
    assert set(os.listdir("/proc/self/fd")) == before


def test_one_that_is_forgotten_is_closed() -> None:
    env = ParallelEnv(2, CountingGymEnv)
    pids = env.worker_pids
    env.rollout(2)
    del env
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.torchrl
def test_torchrl_envs(close: Close) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer_envs = pytest.importorskip("torchrl.envs")

        def make() -> Any:
            from torchrl.envs import GymEnv as PeerGymEnv

            return PeerGymEnv("Pendulum-v1")

        assert issubclass(peer_envs.GymEnv, peer_envs.EnvBase)
        env = close(ParallelEnv(2, make))
        td = env.rollout(5)
        other = close(SerialEnv(2, make)).rollout(5)
    assert td.shape == (2, 5)
    assert set(td.keys(True, True)) == set(other.keys(True, True))
    assert torch.equal(td["observation"][:, 1:], td[NEXT, "observation"][:, :-1])
