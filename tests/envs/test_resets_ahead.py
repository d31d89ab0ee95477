"""A ParallelEnv whose user promises to reset finished lanes begins their next episodes ahead; nobody may notice."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces as gs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from swath.collectors import Collector
from swath.envs import EnvBase, GymEnv, ParallelEnv, Rows, SerialEnv
from swath.testing import CountingGymEnv, FaultyGymEnv

LENGTHS = [2, 5, 3]


@pytest.fixture(scope="module")
def made() -> Iterator[list[ParallelEnv]]:
    """Envs with three lanes, over three, two and one processes: starting them takes longer than all they do below."""
    envs = [ParallelEnv(3, lanes(), envs_per_worker=share) for share in (1, 2, 3)]
    yield envs
    for env in envs:
        env.close()


def lanes() -> list[Any]:
    return [partial(CountingGymEnv, lane, length) for lane, length in enumerate(LENGTHS)]


class ByRows:
    """What steps an env as a collector does, and counts its rounds."""

    def __init__(self, env: Any, restarts: bool = True) -> None:
        self.env = env
        self.action, self.out = Rows(env.actions.leaves, env.batch_size), env.new_out_rows()
        self.out.restarts = restarts
        env.reset_into(range(env.num_lanes), self.out)
        self.ended: list[int] = []
        """Lanes that have finished and were not reset yet."""

    def do(self, doing: str) -> None:
        match doing:
            case "step":
                if self.ended:
                    self.reset(self.ended)
                self.ended = self.step()
            case "seed" if not self.ended:  # else one more episode is begun than in a serial env: see below
                self.env.set_seed(3)
            case "surface":
                self.env.rand_step(self.env.reset())
                self.reset([0, 1, 2])
                self.ended = []
            case "reset 0" | "reset 1" | "reset all":
                chosen = [0, 1, 2] if doing == "reset all" else [int(doing[-1])]
                self.reset(chosen)
                self.ended = [lane for lane in self.ended if lane not in chosen]

    @property
    def rounds(self) -> int:
        number: int = self.env._workers.rounds.number
        return number

    def seen(self) -> list[list[float]]:
        seen: list[list[float]] = self.out.arrays["observation"].tolist()
        return seen

    def step(self) -> list[int]:
        """Step; the lanes that have finished."""
        finished = self.env.step_into(self.action, self.out)
        ended = (self.out.arrays["terminated"] | self.out.arrays["truncated"])[:, 0].nonzero()[0].tolist()
        assert finished == bool(ended)
        return list(ended)

    def reset(self, lanes: list[int]) -> None:
        self.env.reset_into(lanes, self.out)


def test_a_reset_that_was_made_ahead_costs_no_round(made: list[ParallelEnv]) -> None:
    for env in made:
        by_rows = ByRows(env)
        before = by_rows.rounds
        for _ in range(30):
            if ended := by_rows.step():
                final = by_rows.seen()
                assert all(final[lane][2] == LENGTHS[lane] for lane in ended), "not the observation in which it ended"
                by_rows.reset(ended)
                assert all(by_rows.seen()[lane][1:] == [final[lane][1] + 1, 0] for lane in ended)
        assert by_rows.rounds == before + 30


def test_without_a_promise_nothing_is_begun_ahead(made: list[ParallelEnv]) -> None:
    env = made[0]
    by_rows = ByRows(env, restarts=False)
    by_rows.step()
    assert by_rows.step() == [0]
    assert env.get_attr("gym_envs[0].unwrapped.count") == [2, 2, 2]
    before = by_rows.rounds
    by_rows.reset([0])
    assert by_rows.rounds == before + 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    which=st.integers(0, 2),
    doings=st.lists(st.sampled_from(["step", "reset 0", "reset 1", "reset all", "seed", "surface"]), max_size=25),
)
def test_it_is_what_a_serial_env_would_have_done(made: list[ParallelEnv], which: int, doings: list[str]) -> None:
    """Whatever comes between the end of an episode and the reset of its lane, which comes before the next step."""
    with SerialEnv(3, lanes()) as other:
        env = made[which]
        for one in (env, other):
            one.set_seed(7)
        pair = [ByRows(env), ByRows(other)]
        first = [by_rows.seen() for by_rows in pair]
        for doing in doings:
            for by_rows in pair:
                by_rows.do(doing)
            assert relative(pair[0].seen(), first[0]) == relative(pair[1].seen(), first[1])
            assert pair[0].ended == pair[1].ended


def relative(seen: list[list[float]], first: list[list[float]]) -> list[list[float]]:
    """With episodes counted from the first: envs that were used before are further on."""
    return [[lane, episode - began, count] for (lane, episode, count), (_, began, _) in zip(seen, first, strict=True)]


def test_lanes_that_are_stepped_on_all_the_same(made: list[ParallelEnv]) -> None:
    """A promise that is broken: the beginning is void, and the episode that was begun goes on."""
    by_rows = ByRows(made[0])
    episode = by_rows.seen()[0][1]
    by_rows.step()
    assert by_rows.step() == [0]
    by_rows.step()
    assert by_rows.seen()[0][1:] == [episode + 1, 1]
    by_rows.reset([0])
    assert by_rows.seen()[0][1:] == [episode + 2, 0]


def test_seeds_make_an_unused_beginning_void() -> None:
    with ParallelEnv(2, partial(GymEnv, "CartPole-v1")) as env, SerialEnv(2, partial(GymEnv, "CartPole-v1")) as other:
        firsts = []
        for one in (env, other):
            by_rows = ByRows(one)
            while not by_rows.step():
                continue
            one.set_seed(5)
            by_rows.reset([0, 1])
            firsts.append(by_rows.seen())
        assert firsts[0] == firsts[1]


def test_what_a_reset_raises_is_raised_when_it_is_asked_for() -> None:
    factories = [partial(CountingGymEnv, 0, 2), partial(FaultyGymEnv, "raise", 2, where="reset", lengths=2)]
    with ParallelEnv(2, factories) as env:
        by_rows = ByRows(env)
        by_rows.step()
        assert by_rows.step() == [0, 1], "the step itself went well"
        with pytest.raises(Exception, match="Raised in reset") as caught:
            by_rows.reset([0, 1])
        assert "env 1 of" in "".join(caught.value.__notes__)
        by_rows.reset([1])
        assert by_rows.step() == []


def test_what_went_wrong_in_one_lane_is_not_told_of_another() -> None:
    factories = [partial(FaultyGymEnv, "raise", 2, where="reset", lengths=2), partial(CountingGymEnv, 1, 9)]
    with ParallelEnv(2, factories, envs_per_worker=2) as env:
        by_rows = ByRows(env)
        by_rows.step()
        assert by_rows.step() == [0]
        by_rows.reset([1])
        assert by_rows.seen()[1] == [1, 1, 0]
        with pytest.raises(Exception, match="Raised in reset"):
            by_rows.reset([0])


def test_the_surface_begins_ahead_too(made: list[ParallelEnv]) -> None:
    for env in made:
        root = env.reset()
        before = env._workers.rounds.number
        for _ in range(20):
            stepped, root = env.step_and_maybe_reset(env.rand_action(root))
            ended = stepped["next", "done"].squeeze(-1)
            assert (stepped["next", "observation"][ended][:, 2] == torch.tensor(LENGTHS)[ended]).all()
            assert (root["observation"][ended][:, 2] == 0).all()
            assert (root["observation"][~ended] == stepped["next", "observation"][~ended]).all()
        assert env._workers.rounds.number == before + 20


class Drawing(EnvBase):
    """Three lanes and one generator: what a lane draws depends on how many others are reset with it."""

    def __init__(self) -> None:
        super().__init__(gs.Box(-1, 1, (1,)), gs.Box(-1, 1, (1,)), batch_size=(3,))
        self.generator = torch.Generator()
        self.count = torch.zeros(3, dtype=torch.int64)

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        marked = tensordict.get("_reset", torch.ones(3, 1, dtype=torch.bool)).view(-1)
        self.count[marked] = 0
        seen = tensordict.get("observation", torch.zeros(3, 1)).clone()
        seen[marked] = torch.rand(int(marked.sum()), 1, generator=self.generator)
        return TensorDict({"observation": seen}, [3])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        done = (self.count >= torch.tensor([2, 5, 9])).view(3, 1)
        seen = tensordict["observation"]
        return TensorDict({"observation": seen, "reward": torch.ones(3, 1), "terminated": done}, [3])

    def _set_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)


def test_lanes_that_share_a_generator_are_reset_together() -> None:
    """With a limit, some lanes end by themselves and others are cut off in the same step."""
    batches = []
    for kind in (ParallelEnv, SerialEnv):
        with Collector(kind(2, Drawing), frames_per_batch=120, max_frames_per_traj=4) as collector:
            collector.set_seed(1)
            batches.append(collector.next()["observation"].clone())
    assert torch.equal(*batches)


def test_a_collector_has_the_same_data_from_both() -> None:
    batches = []
    for kind in (ParallelEnv, SerialEnv):
        env = kind(3, [partial(GymEnv, "CartPole-v1")] * 3)
        collector = Collector(env, None, frames_per_batch=90, total_frames=270, max_frames_per_traj=15)
        collector.set_seed(11)
        batches.append(torch.stack(list(collector)))
        collector.shutdown()
    assert (batches[0] == batches[1]).all()
