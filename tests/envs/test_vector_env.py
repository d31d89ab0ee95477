"""Vector envs: whatever they do at the end of an episode, the batch says what really happened."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from forked_envs import ForkedVectorEnv
from gymnasium import spaces as gs
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDictBase

from swath.collectors import Collector
from swath.envs import EnvBase, GymEnv, check_env
from swath.errors import EnvCheckError, UnsupportedEnvError
from swath.keys import MASK, NEXT, RESET
from swath.seeding import lane_seeds
from swath.testing import CountingGymEnv, CountingVectorEnv, assert_frames_belong, counting_envs

LANES, STEPS, SEED = 3, 40, 21
VECTORS = pytest.mark.parametrize(
    "vector", [pytest.param(SyncVectorEnv, id="SyncVectorEnv"), pytest.param(ForkedVectorEnv, id="AsyncVectorEnv")]
)


class Parts(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole's four numbers as a Dict with a Tuple and a Discrete inside."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1", max_episode_steps=15))
        self.observation_space = gs.Dict(
            {
                "cart": gs.Box(-np.inf, np.inf, (2,), np.float32),
                "pole": gs.Tuple((gs.Box(-np.inf, np.inf, (1,), np.float32), gs.Discrete(2, start=1))),
            }
        )

    def observation(self, observation: Any) -> Any:
        return {"cart": observation[:2], "pole": (observation[2:3], np.int64(1 + (observation[3] > 0)))}


def plain() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1", max_episode_steps=15)


def actions() -> torch.Tensor:
    return torch.randint(2, (STEPS, LANES), generator=torch.Generator().manual_seed(3))


def rolled_out(env: EnvBase, acts: torch.Tensor) -> TensorDictBase:
    steps = iter(acts)

    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.nn.functional.one_hot(next(steps), 2))

    return env.rollout(len(acts), policy, break_when_any_done=False)


def flat(observation: Any) -> dict[Any, list[Any]]:
    """An observation as entries of a TensorDict."""
    if not isinstance(observation, dict):
        return {"observation": observation.tolist()}
    side = [0, 0]
    side[int(observation["pole"][1]) - 1] = 1
    return {"cart": observation["cart"].tolist(), ("pole", "0"): observation["pole"][0].tolist(), ("pole", "1"): side}


def assert_is_what_separate_envs_do(td: TensorDictBase, make: Any, acts: torch.Tensor) -> None:
    """The same seeds and actions in envs stepped by hand, and reset by hand."""
    ends = 0
    for lane, seed in enumerate(lane_seeds(SEED, LANES)):
        env = make()
        seen, _ = env.reset(seed=seed)
        for step, act in enumerate(acts[:, lane].tolist()):
            frame = td[lane, step]
            for key, value in flat(seen).items():
                assert frame.get(key).tolist() == value, (lane, step)
            seen, reward, terminated, truncated, _ = env.step(act)
            for key, value in flat(seen).items():
                assert frame.get(NEXT).get(key).tolist() == value, (lane, step)
            told = [frame[NEXT, name].item() for name in ("reward", "terminated", "truncated", "done")]
            assert told == [reward, terminated, truncated, terminated or truncated]
            if terminated or truncated:
                ends += 1
                seen, _ = env.reset()
    assert ends > LANES


@pytest.mark.parametrize("make", [plain, Parts])
@pytest.mark.parametrize("mode", list(AutoresetMode))
@VECTORS
def test_final_observations_are_true_in_every_mode(vector: Any, mode: AutoresetMode, make: Any) -> None:
    with GymEnv(vector([make] * LANES, autoreset_mode=mode)) as env:
        env.set_seed(SEED)
        td = rolled_out(env, actions())
        assert td.get((NEXT, "collector"), None) is None
    assert_is_what_separate_envs_do(td, make, actions())


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_an_async_env_without_shared_memory(mode: AutoresetMode) -> None:
    with GymEnv(ForkedVectorEnv([plain] * LANES, autoreset_mode=mode, shared_memory=False)) as env:
        env.set_seed(SEED)
        td = rolled_out(env, actions())
    assert_is_what_separate_envs_do(td, plain, actions())


def test_an_async_env_without_shared_memory_idles_in_next_step_mode() -> None:
    """Its workers would reset a lane a second time that was reset by mask, and the step would be no transition."""
    envs = counting_envs(2, lengths=[[2], [3]])
    with GymEnv(ForkedVectorEnv(envs, autoreset_mode=AutoresetMode.NEXT_STEP, shared_memory=False)) as env:
        td = rolled_out(env, torch.zeros(8, 2, dtype=torch.int64))
    assert td[NEXT, "collector", "mask"].tolist() == [
        [True, True, False, True, True, False, True, True],
        [True, True, True, False, True, True, True, False],
    ]
    assert td["observation"][0, :, 2].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_an_async_env_without_shared_memory_idles_also_after_a_full_reset() -> None:
    envs = counting_envs(2, lengths=[[2], [9]])
    with GymEnv(ForkedVectorEnv(envs, autoreset_mode=AutoresetMode.NEXT_STEP, shared_memory=False)) as env:
        env.rollout(2)
        td = rolled_out(env, torch.zeros(3, 2, dtype=torch.int64))
    assert td[NEXT, "collector", "mask"].tolist() == [[False, True, True], [True, True, True]]
    assert td[NEXT, "observation"][:, :, 2].tolist() == [[0, 1, 2], [1, 2, 3]]


@pytest.fixture
def entry_point() -> Iterator[VectorEnv[Any, Any, Any]]:
    env = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point", max_episode_steps=12)
    yield env
    env.close()


def test_a_vector_env_that_resets_only_by_itself_tells_idle_lanes(entry_point: Any) -> None:
    acts = torch.randint(2, (60, 4), generator=torch.Generator().manual_seed(0))
    env = GymEnv(entry_point)
    env.set_seed(SEED)
    td = rolled_out(env, acts)
    reference = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point", max_episode_steps=12)
    seen, _ = reference.reset(seed=SEED)
    idle = np.zeros(4, dtype=bool)
    idle_steps = 0
    for step, act in enumerate(acts.numpy()):
        np.testing.assert_array_equal(td["observation"][:, step].numpy(), seen)
        np.testing.assert_array_equal(td[NEXT, "collector", "mask"][:, step].numpy(), ~idle)
        idle_steps += int(idle.sum())
        seen, reward, terminated, truncated, _ = reference.step(act)
        np.testing.assert_array_equal(td[NEXT, "observation"][:, step].numpy(), seen)
        np.testing.assert_array_equal(td[NEXT, "reward"][:, step, 0].numpy(), reward)
        idle = terminated | truncated
        np.testing.assert_array_equal(td[NEXT, "done"][:, step, 0].numpy(), idle)
        if idle.all():  # then all lanes are reset at once, and none idles
            seen, _ = reference.reset()
            idle = np.zeros(4, dtype=bool)
    assert idle_steps > 4


def test_lanes_that_cannot_be_reset_alone_say_so() -> None:
    env = GymEnv(CountingVectorEnv(3))
    td = env.rand_step(env.reset()).get(NEXT)
    with pytest.raises(UnsupportedEnvError, match=r"lanes \[1\] cannot be ended early.*num_envs"):
        env.reset(td.set(RESET, torch.tensor([[False], [True], [False]])))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_single_lanes_can_be_reset(mode: AutoresetMode) -> None:
    env = GymEnv(SyncVectorEnv(counting_envs(3, lengths=9), autoreset_mode=mode))
    td = env.rand_step(env.rand_step(env.reset()).get(NEXT).clone()).get(NEXT)
    td = env.reset(td.set(RESET, torch.tensor([[False], [True], [False]])))
    assert td["observation"].tolist() == [[0, 0, 2], [1, 1, 0], [2, 0, 2]]
    td = env.rand_step(td).get(NEXT)
    assert td["observation"].tolist() == [[0, 0, 3], [1, 1, 1], [2, 0, 3]]


@pytest.mark.parametrize("mode", list(AutoresetMode))
@VECTORS
def test_a_lanes_seed_counts_from_its_next_reset(vector: Any, mode: AutoresetMode) -> None:
    with GymEnv(vector([plain] * LANES, autoreset_mode=mode)) as env:
        td = env.rand_step(env.reset()).get(NEXT)
        env.set_seed(SEED)
        td = env.reset(td.set(RESET, torch.tensor([[False], [False], [True]])))
        alone = td["observation"][2]
        together = env.reset()["observation"][:2]
        env.set_seed(SEED)
        expected = env.reset()["observation"]
    assert torch.equal(alone, expected[2])
    assert torch.equal(together, expected[:2])


def test_a_seed_counts_also_where_an_episode_has_begun_by_itself() -> None:
    env = GymEnv(SyncVectorEnv([plain] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    env.set_seed(SEED)
    first = env.reset()["observation"]
    td = env.rollout(50)
    assert td[NEXT, "done"].any()
    env.set_seed(SEED)
    assert torch.equal(env.reset()["observation"], first)


def test_beginnings_that_nobody_asked_for_are_forgotten() -> None:
    """In SAME_STEP mode, a caller that steps on without a reset is inside the new episode."""
    env = GymEnv(SyncVectorEnv(counting_envs(2, lengths=[[2], [9]]), autoreset_mode=AutoresetMode.SAME_STEP))
    td = env.reset()
    for _ in range(3):
        td = env.rand_step(td).get(NEXT).clone()
    assert td["observation"].tolist() == [[0, 1, 1], [1, 0, 3]]
    td = env.reset(td.set(RESET, torch.tensor([[True], [False]])))
    assert td["observation"].tolist() == [[0, 2, 0], [1, 0, 3]]


def test_same_step_without_final_observations_is_refused() -> None:
    class Forgetful(CountingVectorEnv):
        metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    env = GymEnv(Forgetful(2, lengths=2))
    with pytest.raises(KeyError, match="no 'final_obs'"):
        env.rollout(3)


def test_wrapped_vector_envs() -> None:
    inner = SyncVectorEnv([plain] * LANES)
    env = GymEnv(gym.wrappers.vector.DtypeObservation(inner, np.float64))
    env.set_seed(SEED)
    td = rolled_out(env, actions())
    assert td["observation"].dtype == torch.float64
    assert_is_what_separate_envs_do(td, plain, actions())


def test_the_mode_is_next_step_where_none_is_told() -> None:
    class Silent(CountingVectorEnv):
        metadata: dict[str, Any] = {}  # noqa: RUF012

    td = GymEnv(Silent(2, lengths=[[1], [4]])).rollout(4, break_when_any_done=False)
    assert td[NEXT, "collector", "mask"].tolist() == [[True, False, True, False], [True] * 4]


def test_the_error_of_a_vector_env_names_it() -> None:
    class Broken(CountingGymEnv):
        def step(self, action: Any) -> Any:
            raise RuntimeError("out of order")

    env = GymEnv(SyncVectorEnv([Broken, Broken]))
    with pytest.raises(RuntimeError, match="out of order") as caught:
        env.rand_step(env.reset())
    notes = getattr(caught.value, "__notes__", ["SyncVectorEnv"])
    assert any("SyncVectorEnv" in note for note in notes)


class Pool(CountingVectorEnv):
    """A vector env as EnvPool 1.2 has them: spaces of one env everywhere, a spec without an id, and a gymnasium.Env."""

    def __init__(self, num_envs: int, *, batch_size: int | None = None, **options: Any) -> None:
        super().__init__(num_envs, **options)
        self.observation_space, self.action_space = self.single_observation_space, self.single_action_space
        self.spec: Any = SimpleNamespace(config=SimpleNamespace(num_envs=num_envs), reward_threshold=475.0)
        self._answers = batch_size or num_envs

    def __repr__(self) -> str:
        return f"Pool(num_envs={self.num_envs})"

    def step(self, actions: Any) -> Any:
        assert np.shape(actions) == (self.num_envs,)
        *answer, infos = super().step(actions)
        return (*(part[: self._answers] for part in answer), infos)


def test_a_spec_need_not_have_an_id() -> None:
    env = GymEnv(Pool(3, lengths=4))
    assert repr(env) == "GymEnv(Pool, batch_size=[3])"
    with Collector(env, frames_per_batch=60, total_frames=60) as collector:
        batch = collector.next()
    assert batch.shape == (3, 20)
    for lane in batch:
        assert_frames_belong(lane[lane[MASK]])
    with pytest.raises(EnvCheckError, match=r"(?s)found 1 problem .*seed is not heeded"):  # as EnvPool's is not
        check_env(lambda: Pool(3, lengths=4))


def test_answers_for_some_of_the_envs_are_refused_by_their_number() -> None:
    with (
        Collector(Pool(4, batch_size=2), frames_per_batch=40) as collector,
        pytest.raises(ValueError, match=r"vector env of 4 envs gave 'observation' of shape \(2, 3\), but \(4, 3\)"),
    ):
        collector.next()
