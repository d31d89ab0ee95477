"""Seeds belong to lanes: the same seed gives the same batches, bit by bit, however lanes are spread. And ids."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from common import assert_same, buffer, ids_of, rows
from gymnasium import spaces as gs
from inside import WORKER_BITS, worker_of
from kinds import ALL, ASYNC, ASYNC_HERE, HERE, MIXED, SINGLE, SYNC, SYNC_HERE, Kind, Make, over
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from swath.collectors import Collector
from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.keys import TRAJ_IDS
from swath.modules import TanhNormal
from swath.seeding import lane_seed, next_seed


def mlp(inputs: int, outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def categorical() -> Any:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(mlp(4, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


class Scale(nn.Module):
    def forward(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc, scale = both.chunk(2, -1)
        return loc, scale.exp()


def tanh_normal() -> Any:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(mlp(3, 2), Scale()), in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"], out_keys=["action"], distribution_class=TanhNormal, return_log_prob=True
        ),
    )


def opaque() -> Callable[[TensorDictBase], TensorDictBase]:
    """A function of a TensorDict that draws from torch's own generator."""
    net = mlp(4, 2)

    def policy(td: TensorDictBase) -> TensorDictBase:
        choice = Categorical(logits=net(td.get("observation"))).sample()
        return td.set("action", nn.functional.one_hot(choice, 2))

    return policy


def noisy() -> Any:
    """Draws from torch's own generator inside a module."""

    class Noise(nn.Module):
        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            return logits + torch.randn_like(logits)

    return TensorDictSequential(
        TensorDictModule(mlp(4, 2), in_keys=["observation"], out_keys=["logits"]),
        TensorDictModule(Noise(), in_keys=["logits"], out_keys=["action"]),
    )


class Noisy(gymnasium.Env[Any, Any]):
    """Observations, rewards and episode lengths come from the env's own generator."""

    def __init__(self) -> None:
        self.observation_space = gs.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gs.Box(-1.0, 1.0, (1,), np.float32)

    def _observed(self) -> Any:
        return self.np_random.standard_normal(3).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        reward = float(action[0]) + float(self.np_random.standard_normal())
        return self._observed(), reward, bool(self.np_random.random() < 0.1), False, {}


def noisy_lanes(count: int) -> Callable[[], Any]:
    return lambda: SerialEnv(count, lambda: GymEnv(Noisy()))


def policy(observation: torch.Tensor) -> torch.Tensor:
    """The same for an observation in whichever batch it is."""
    return torch.tanh(observation[..., :1])


POLICIES: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "random": (lambda: None, "CartPole-v1", {}),
    "random box": (lambda: None, "Pendulum-v1", {}),
    "categorical, fast": (categorical, "CartPole-v1", {}),
    "categorical, module by module": (categorical, "CartPole-v1", {"fast_policy": False}),
    "categorical, trusted": (categorical, "CartPole-v1", {"trust_policy": True}),
    "tanh-normal": (tanh_normal, "Pendulum-v1", {}),
    "a function of a TensorDict": (opaque, "CartPole-v1", {}),
    "a module that draws": (noisy, "CartPole-v1", {}),
    "random at first": (categorical, "CartPole-v1", {"init_random_frames": 30}),
}
ENVS: dict[str, Callable[[str], Any]] = {
    "one env": lambda name: GymEnv(name, categorical_action_encoding="Pole" in name),
    "SerialEnv": lambda name: SerialEnv(3, lambda: GymEnv(name, categorical_action_encoding="Pole" in name)),
    "num_envs": lambda name: GymEnv(name, num_envs=3, categorical_action_encoding="Pole" in name),
    "SyncVectorEnv": lambda name: GymEnv(
        gymnasium.make_vec(name, num_envs=3, vectorization_mode="sync"), categorical_action_encoding="Pole" in name
    ),
    "vector entry point": lambda name: GymEnv(
        gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"),
        categorical_action_encoding=True,
    ),
}


def seeded(policy: str, env: str, warm: int = 0, **options: Any) -> Collector:
    """A collector of one of the policies and envs, that has collected `warm` batches already."""
    build, name, more = POLICIES[policy]
    if policy in ("a function of a TensorDict", "a module that draws"):
        made = GymEnv(name) if env == "one env" else SerialEnv(3, lambda: GymEnv(name))
    else:
        made = ENVS[env](name)
    collector = Collector(made, build(), **{"frames_per_batch": 24, **more, **options})
    for _ in range(warm):
        collector.next()
    return collector


@pytest.mark.parametrize("warm", [0, 3], ids=["at the start", "in the middle"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("env", ["one env", "SerialEnv"])
def test_seeded_collectors_agree_in_every_bit(policy: str, env: str, warm: int) -> None:
    """Whatever they have collected before, and whatever the trainer draws; in the middle, ids go on."""
    both = warm if policy == "random at first" else 0
    first, second = seeded(policy, env, both), seeded(policy, env, warm)
    first.set_seed(5)
    torch.rand(7)  # what the trainer draws
    second.set_seed(5)
    drawn = set()
    for _ in range(4):
        one = first.next()
        torch.rand(3)
        assert_same(one, second.next(), but_ids=warm > 0)
        drawn.add(str(one.get("action").tolist()))
    assert len(drawn) == 4, "every batch must have random numbers of its own"


@pytest.mark.parametrize("env", sorted(set(ENVS) - {"one env", "SerialEnv"}))
def test_every_other_kind_of_env_is_seeded(env: str) -> None:
    first, second = seeded("categorical, fast", env), seeded("categorical, fast", env, warm=1)
    first.set_seed(9)
    second.set_seed(9)
    for _ in range(5):
        assert_same(first.next(), second.next(), but_ids=True)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_another_seed_gives_other_batches_and_global_generators_are_left_alone(policy: str) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    collectors = [seeded(policy, "SerialEnv") for _ in range(2)]
    for seed, collector in enumerate(collectors):
        collector.set_seed(seed)
    before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, two = (collector.next() for collector in collectors)
    assert not torch.equal(one["observation"], two["observation"])
    assert not torch.equal(one["action"], two["action"])
    collectors[0].set_seed(6)
    for _ in range(2):
        collectors[0].next()
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == legacy).all()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_without_set_seed_the_global_generator_decides(policy: str) -> None:
    def actions(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        collector = seeded(policy, "one env")
        collector.env.set_seed(1)
        collector.reset()
        torch.manual_seed(seed)
        batches = [collector.next() for _ in range(3)]
        return torch.cat([batch.get("action") for batch in batches if batch is not None])

    assert torch.equal(actions(1), actions(1))
    assert not torch.equal(actions(1), actions(2))


@pytest.mark.parametrize(("warm", "again"), [(0, False), (2, False), (2, True)], ids=["start", "middle", "reset"])
def test_the_first_observation_after_set_seed_is_the_envs(warm: int, again: bool) -> None:
    collector = seeded("random", "one env", warm, reset_at_each_iter=again)
    collector.set_seed(11)
    batch: Any = collector.next()
    expected, _ = gymnasium.make("CartPole-v1").reset(seed=11)
    np.testing.assert_array_equal(batch.get("observation")[0].numpy(), expected)


@over([SINGLE, SYNC])
def test_lanes_are_seeded_by_their_index(make: Make, kind: Kind) -> None:
    own = 8 // max(1, kind.workers)
    collector = make(lambda: SerialEnv(own, lambda: GymEnv("CartPole-v1")), lanes=own)
    collector.set_seed(21)
    batch = rows(collector.next())
    for lane in range(8):
        env = gymnasium.make("CartPole-v1")
        observation, _ = env.reset(seed=lane_seed(21, lane))
        for frame in batch[lane]:
            np.testing.assert_array_equal(frame.get("observation").numpy(), observation)
            observation, reward, terminated, truncated, _ = env.step(int(frame.get("action").argmax()))
            np.testing.assert_array_equal(frame.get(("next", "observation")).numpy(), observation)
            assert float(frame.get(("next", "reward"))) == reward
            if terminated or truncated:
                observation, _ = env.reset()


@over(HERE, needs="join")
def test_static_seed_gives_every_lane_the_same(make: Make) -> None:
    collector = make(noisy_lanes(2), policy, lanes=2)
    assert collector.set_seed(5, static_seed=True) == 5
    batch = rows(collector.next())
    assert (batch["observation"] == batch["observation"][:1]).all()
    assert collector.set_seed(5) != 5
    batch = rows(collector.next())
    assert len(batch["observation"][:, 0, 0].unique()) == len(batch)


@over(HERE)
def test_the_returned_seed_is_one_that_no_lane_has(make: Make, kind: Kind) -> None:
    own = 4 // max(1, kind.workers)
    collector = make(noisy_lanes(own), policy, lanes=own)
    following = collector.set_seed(4)
    assert following == next_seed(4, 4), "it depends on how lanes are spread"
    assert following not in [lane_seed(4, lane) for lane in range(4)]
    assert collector.set_seed(4) == following


def test_episodes_from_before_set_seed_are_not_delivered_after_it() -> None:
    def run(warm: int) -> list[Any]:
        collector = seeded("random", "SerialEnv", warm, trajs_per_batch=4, traj_format="cat")
        collector.set_seed(2)
        return [collector.next() for _ in range(3)]

    for one, two in zip(run(0), run(2), strict=True):
        assert_same(one, two, but_ids=True)


class Drawing(EnvBase):
    """Draws from torch's own generator in reset and step, and seeds it, as many envs written for TorchRL do."""

    def __init__(self, seeds_itself: bool) -> None:
        super().__init__(gs.Box(-np.inf, np.inf, (2,), np.float32), gs.Discrete(2), batch_size=(2,))
        self.seeds_itself = seeds_itself

    def _set_seed(self, seed: int) -> None:
        if self.seeds_itself:
            torch.manual_seed(seed)

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict({"observation": torch.rand(2, 2)}, batch_size=[2])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        ended = torch.rand(2, 1) < 0.2
        return TensorDict(
            {"observation": torch.rand(2, 2), "reward": torch.rand(2, 1), "terminated": ended}, batch_size=[2]
        )


@pytest.mark.parametrize("seeds_itself", [True, False])
def test_envs_that_draw_from_torchs_own_generator_are_repeatable_too(seeds_itself: bool) -> None:
    def run(warm: int, drawn: int) -> list[Any]:
        collector = Collector(Drawing(seeds_itself), None, frames_per_batch=10)
        for _ in range(warm):
            collector.next()
        torch.rand(drawn)
        before = torch.get_rng_state()
        collector.set_seed(8)
        batches = [collector.next() for _ in range(3)]
        assert torch.equal(torch.get_rng_state(), before), "the trainer's generator was disturbed"
        return batches

    for one, two in zip(run(0, 1), run(2, 5), strict=True):
        assert_same(one, two, but_ids=True)


# -- workers --------------------------------------------------------------------------------------------------------


def collected(collector: Any, seed: int, count: int = 3) -> TensorDictBase:
    """Batches one after the other as `[lanes, T]`, without what tells workers apart."""
    collector.set_seed(seed)
    batches = [rows(collector.next()) for _ in range(count)]
    return torch.cat(batches, 1).exclude("collector", "policy_version", ("next", "policy_version"))


def test_the_same_episodes_in_1x8_2x4_and_8x1() -> None:
    wholes = []
    for kind, workers in ((SINGLE, 0), (SYNC, 2), (SYNC, 8)):
        own = 8 // max(1, workers)
        with kind.build(noisy_lanes(own), policy, lanes=own, workers=workers) as collector:
            wholes.append(collected(collector, 7))
    assert wholes[0]["next", "done"].any(), "episodes must end for this to tell anything"
    for whole in wholes[1:]:
        assert_same(whole, wholes[0])


@over([ASYNC])
def test_async_workers_have_the_same_episodes(make: Make) -> None:
    with SINGLE.build(noisy_lanes(4), policy, lanes=4) as single:
        whole = collected(single, 7, 4)
    collector = make(noisy_lanes(2), policy, lanes=2)
    collector.set_seed(7)
    parts: dict[int, list[TensorDictBase]] = {0: [], 1: []}
    while min(len(own) for own in parts.values()) < 4:
        batch = collector.next()
        parts[worker_of(batch)].append(batch)
    for index, own in parts.items():
        found = torch.cat(own[:4], 1).exclude("collector", "policy_version", ("next", "policy_version"))
        assert_same(found, whole[2 * index : 2 * index + 2])


@pytest.mark.parametrize("acts", [tanh_normal, lambda: None], ids=["stochastic", "random"])
def test_this_process_and_others_agree_and_repeat_bit_by_bit(acts: Any) -> None:
    torch.manual_seed(0)
    own, runs = acts(), []
    for seed, kind in ((3, SYNC_HERE), (3, SYNC_HERE), (3, SYNC), (3, SYNC), (4, SYNC)):
        with kind.build(noisy_lanes(2), own, lanes=2) as collector:
            runs.append(collected(collector, seed))
        torch.rand(7)  # what happens here in between has no part in it
    for run in runs[1:4]:
        assert_same(run, runs[0])
    assert not torch.equal(runs[0]["action"], runs[4]["action"])
    assert not torch.equal(runs[0]["observation"], runs[4]["observation"])


@over(ALL)
def test_seeding_in_the_middle(make: Make, kind: Kind) -> None:
    """The next batches depend on the seed alone: what was under way is given up, and counted."""
    collector = make(noisy_lanes(2), policy, lanes=2, workers=min(1, kind.workers), steps=5)
    first = collected(collector, 11)
    for _ in range(3):
        collector.next()
    before = collector.stats()["dropped_frames"]
    assert_same(collected(collector, 11), first)
    assert 0 <= collector.stats()["dropped_frames"] - before <= 10 * kind.ahead
    assert collector.stats()["dropped_frames"] % 10 == 0


@over([ASYNC])
def test_seeding_in_the_middle_with_many_async_workers(make: Make) -> None:
    collector = make(noisy_lanes(1), policy, workers=3, steps=5)

    def firsts() -> list[torch.Tensor]:
        """The first batch of each worker."""
        collector.set_seed(11)
        found: dict[int, torch.Tensor] = {}
        while len(found) < 3:
            batch = collector.next()
            found.setdefault(worker_of(batch), batch["observation"].clone())
        return [found[number] for number in sorted(found)]

    first = firsts()
    collector.next()
    assert all(map(torch.equal, first, firsts()))


@over([ASYNC_HERE, ASYNC])
def test_work_that_is_given_up_tells_of_its_memory_all_the_same(make: Make) -> None:
    """A worker that was seeded before it had begun with its second slot did not know it when it came round again."""
    collector = make(slots_per_worker=4)
    for seed in range(12):
        collector.next()
        collector.set_seed(seed)
    for _ in range(12):
        collector.next()


@over([SYNC_HERE, SYNC])
def test_without_a_seed_workers_differ(make: Make) -> None:
    class Still(Noisy):
        """Always the same, so that only the policy's noise differs."""

        def _observed(self) -> Any:
            return np.ones(3, np.float32)

    batch = make(Noisy, policy, workers=3).next()
    assert len(batch["observation"][:, 0, 0].unique()) == 3
    for acts in (None, tanh_normal()):
        assert len(make(Still, acts, workers=3).next()["action"][:, 0, 0].unique()) == 3


@over([SYNC_HERE, SYNC])
def test_workers_leave_the_random_numbers_of_this_process_alone(make: Make) -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    collector = make(noisy_lanes(2), lanes=2)
    collector.set_seed(3)
    collector.next()
    assert torch.equal(torch.rand(3), wanted)


class DrawsAnywhere(Noisy):
    """Draws from every generator that there is."""

    def _observed(self) -> Any:
        return np.array([np.random.rand(), random.random(), float(torch.rand(()))], np.float32)


@over([SYNC])
def test_a_seed_decides_all_that_workers_draw(make: Make) -> None:
    drawn = []
    for _ in range(2):
        collector = make(DrawsAnywhere)
        collector.set_seed(3)
        drawn.append(collector.next()["observation"].clone())
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0][0], drawn[0][1])


# -- ids ------------------------------------------------------------------------------------------------------------


@over(MIXED)
def test_ids_name_one_trajectory_each(make: Make) -> None:
    names: dict[int, tuple[float, float]] = {}
    for batch in make(lanes=2, lengths=[3, 2], batches=10):
        for frame in batch.reshape(-1):
            name = tuple(frame["observation"][:2].tolist())
            assert names.setdefault(int(frame[TRAJ_IDS]), name) == name
    assert len(set(names.values())) == len(names)


@over(HERE)
def test_a_restored_collector_uses_no_id_again(make: Make, kind: Kind) -> None:
    seen: set[int] = set()
    state = None
    for _ in range(3):
        collector = make(lengths=3, worker_idx=1)
        if state is not None:
            collector.load_state_dict(state)
        found = ids_of([collector.next() for _ in range(4)])
        assert not found & seen
        seen |= found
        state = collector.state_dict()
        workers = {number >> WORKER_BITS for number in ids_of([collector.next() for _ in range(2)])}
        assert min(workers) >= 1
        assert max(workers) <= (10 if kind.workers else 1)


def test_collectors_that_write_to_one_buffer_share_no_ids() -> None:
    kept = buffer(shared=True)
    for kind in (ASYNC, ASYNC, SINGLE):
        options = {"track_policy_version": True} if kind is SINGLE else {}
        list(kind.build(lengths=4, replay_buffer=kept, frames_per_batch=20, total_frames=80, **options))
    data = kept[:]
    assert len(data) == 240
    names: dict[int, list[float]] = {}
    for number, step in zip(data[TRAJ_IDS].tolist(), data["observation"][:, 2].tolist(), strict=True):
        names.setdefault(number, []).append(step)
    for steps in names.values():
        assert steps == list(range(len(steps))), "one id names two trajectories"
    assert len({number >> WORKER_BITS for number in names}) == 5


@over([SYNC])
def test_ids_after_a_buffer_and_its_collector_were_restored(make: Make, tmp_path: Any) -> None:
    first = buffer(shared=True)
    collector = make(lengths=4, steps=12, replay_buffer=first)
    for _ in range(4):
        collector.next()
    state = collector.state_dict()
    first.dumps(tmp_path / "buffer")
    before = set(first[:][TRAJ_IDS].tolist())
    collector.shutdown()
    second = buffer(shared=True)
    second.loads(tmp_path / "buffer")
    collector = make(lengths=4, steps=12, replay_buffer=second)
    collector.load_state_dict(state)
    for _ in range(4):
        collector.next()
    data = second[:]
    assert len(data) == 192
    assert not set(data[TRAJ_IDS][96:].tolist()) & before
