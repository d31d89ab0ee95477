"""Policies act for any of the lanes: what they do does not depend on which lanes act together, and when."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import policy_zoo as zoo
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from swath.envs.rows import Rows
from swath.keys import IS_INIT, Key
from swath.modules import ExplorationType, PolicyRunner, as_policy, set_exploration_type

LANES, STEPS = 6, 7
Schedule = list[tuple[np.ndarray, np.ndarray]]


def padding(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What lies behind the last step of a lane."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -7, dtype=dtype)


def is_untouched(tensor: Tensor, before: Tensor) -> bool:
    return torch.equal(tensor.nan_to_num(-1), before.nan_to_num(-1))


def all_together() -> Schedule:
    return [(np.arange(LANES), np.full(LANES, t)) for t in range(STEPS)]


def shuffled(steps: np.ndarray, seed: int) -> Schedule:
    """Any lanes that are not at their end, in any order, until all are."""

    def groups() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        chance, at = np.random.default_rng(seed), np.zeros(LANES, np.int64)
        while (waiting := np.flatnonzero(at < steps)).size:
            lanes = chance.permutation(waiting)[: chance.integers(1, waiting.size + 1)]
            yield lanes, at[lanes].copy()
            at[lanes] += 1

    return list(groups())


class Play:
    """A policy, and what each lane sees at each time; carries the policy's state as the loop does."""

    def __init__(self, policy: Any, env: zoo.WaveEnv, fast: bool = True, opaque: bool = False) -> None:
        rows, self.present = env.new_out_rows(), Rows({}, env.batch_size)
        for key in env.observation_keys:
            self.present.add(key, rows.tensors[key])
        self.runner = PolicyRunner(as_policy(policy, env), env, self.present, fast=fast, opaque=opaque)
        chance = torch.Generator().manual_seed(3)
        self.seen = {
            key: torch.randn(LANES, STEPS, *env.new_out_rows().leaf(key).shape, generator=chance)
            for key in env.observation_keys
        }
        self.begins = torch.rand(LANES, STEPS, generator=chance) < 0.3
        self.begins[:, 0] = True

    def columns(self, schedule: Schedule, steps: int | np.ndarray = STEPS, random: bool = False) -> dict[Key, Tensor]:
        """What the policy has written for each lane and time, `[N, T, ...]`."""
        runner, outputs = self.runner, self.runner.outputs
        leaves = {key: outputs.leaf(key) for key in outputs.tensors}
        columns = {key: padding((LANES, STEPS, *leaf.shape), leaf.dtype) for key, leaf in leaves.items()}
        with torch.no_grad():
            recorded = runner.begin(STEPS, torch.Generator().manual_seed(5), random)
            for lanes, times in schedule:
                self._look(lanes, times, columns)
                before = {key: outputs.flat(key).clone() for key in outputs.tensors}
                runner.act_on(lanes, times)
                others = np.setdiff1d(np.arange(LANES), lanes)
                for key in outputs.tensors:
                    assert is_untouched(outputs.flat(key)[others], before[key][others]), key
                for key in recorded:
                    columns[key][lanes, times] = outputs.flat(key)[lanes]
            seen = {key: self.seen[key] for key in self.seen if key not in columns}
            valid = (slice(None), slice(steps)) if isinstance(steps, int) else np.arange(STEPS) < steps[:, None]
            runner.finish({key: column.numpy() for key, column in {**seen, **columns}.items()}, valid)
        return columns

    def _look(self, lanes: np.ndarray, times: np.ndarray, columns: dict[Key, Tensor]) -> None:
        """Show the lanes what they see at these times, and nothing of value to the others."""
        begins = self.begins[lanes, times]
        for key, seen in self.seen.items():
            self.present.flat(key).fill_(1e6)
            self.present.flat(key)[lanes] = seen[lanes, times].to(self.present.tensors[key].dtype)
        if IS_INIT in self.present.tensors:
            self.present.flat(IS_INIT)[lanes] = begins[:, None]
        for read, written in self.runner.state:
            state = columns[written][lanes, np.maximum(times - 1, 0)].clone()
            state[begins] = 0
            self.present.flat(read)[lanes] = state


def assert_any_grouping_gives_the_same(play: Play, tolerance: float = 1e-5, random: bool = False) -> None:
    wanted = play.columns(all_together(), random=random)
    assert all(not tensor.isnan().any() for tensor in wanted.values() if tensor.is_floating_point())
    for seed in range(3):
        steps = np.random.default_rng(seed).integers(1, STEPS + 1, LANES)
        found = play.columns(shuffled(steps, seed), steps, random)
        for lane, n in enumerate(steps):
            for key, column in found.items():
                zoo.assert_same(column[lane, :n], wanted[key][lane, :n], tolerance, key)
                assert is_untouched(column[lane, n:], padding(tuple(column[lane, n:].shape), column.dtype)), key


@pytest.mark.parametrize("case", zoo.ZOO.values(), ids=zoo.ZOO.keys())
def test_every_policy(case: zoo.Case) -> None:
    draws_by_itself = case in zoo.STOCHASTIC.values() and case.stages[-1] in ("DistributionStage", "TensorDictStage")
    with set_exploration_type(ExplorationType.DETERMINISTIC if draws_by_itself else ExplorationType.RANDOM):
        play = Play(case.make(), case.env(lengths=[1] * LANES))
        assert_any_grouping_gives_the_same(play, case.tolerance)
        only_drawn = "DistributionStage"  # what is not drawn is left to the module
        assert tuple(s for s in play.runner.stages) == tuple(
            "TensorDictStage" if s == only_drawn else s for s in case.stages
        )


@pytest.mark.parametrize("name", ["categorical of doubles", "categorical with probs"])
def test_a_distribution_that_is_not_known(name: str) -> None:
    case = zoo.STOCHASTIC[name]
    play = Play(case.make(), case.env(lengths=[1] * LANES))
    found = play.columns(shuffled(np.full(LANES, STEPS), 0))
    assert play.runner.stages[-1] == "DistributionStage"
    param = "probs" if "probs" in found else "logits"
    wanted = torch.distributions.Categorical(**{param: found[param]}).log_prob(found["action"])
    zoo.assert_same(found["action_log_prob"], wanted)
    assert len(found["action"].unique()) > 1


@pytest.mark.parametrize("way", ["slow", "trusted"])
@pytest.mark.parametrize("case", zoo.DETERMINISTIC.values(), ids=zoo.DETERMINISTIC.keys())
def test_policies_that_are_called_as_they_are(case: zoo.Case, way: str) -> None:
    play = Play(case.make(), case.env(lengths=[1] * LANES), fast=way == "trusted", opaque=way == "trusted")
    assert_any_grouping_gives_the_same(play, case.tolerance)
    assert set(play.runner.stages) <= {"TorchStage", "DistributionStage", "TensorDictStage"}


@pytest.mark.parametrize("name", ["categorical", "one-hot of tensordict", "normal", "tanh-normal between tensors"])
def test_the_most_likely_action(name: str) -> None:
    case = zoo.STOCHASTIC[name]
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert_any_grouping_gives_the_same(Play(case.make(), case.env(lengths=[1] * LANES)), case.tolerance)


@pytest.mark.parametrize("way", zoo.WAYS)
@pytest.mark.parametrize("convention", ["same", "next"])
@pytest.mark.parametrize("name", zoo.RECURRENT)
def test_recurrent_policies(name: str, convention: str, way: str) -> None:
    draws_by_itself = name == "sampling GRU" and way != "fast"
    with set_exploration_type(ExplorationType.MODE if draws_by_itself else ExplorationType.RANDOM):
        env = zoo.WaveEnv(lengths=[1] * LANES)
        play = Play(zoo.RECURRENT[name](convention), env, fast=way != "slow", opaque=way == "trusted")
        assert play.runner.state
        assert_any_grouping_gives_the_same(play)


@pytest.mark.parametrize("name", ["categorical", "tanh-normal", "own forward", "module of a TensorDict"])
def test_lanes_in_two_dimensions(name: str) -> None:
    case = zoo.ZOO[name]
    with set_exploration_type(ExplorationType.RANDOM):
        play = Play(case.make(), case.env(lengths=[1] * LANES, batch_size=(2, 3)))
        assert_any_grouping_gives_the_same(play, case.tolerance)


@pytest.mark.parametrize("name", ["categorical", "normal", "composite"])
def test_random_actions(name: str) -> None:
    """Drawn by RandomPolicy, and instead of a policy's own."""
    case = zoo.STOCHASTIC[name]
    for policy, random in ((None, False), (case.make(), True)):
        play = Play(policy, case.env(lengths=[1] * LANES))
        assert_any_grouping_gives_the_same(play, random=random)
        assert play.runner.stages[0] == "RandomStage"


def test_an_observation_that_is_written_over_is_echoed_while_actions_are_random() -> None:
    policy = TensorDictSequential(
        TensorDictModule(lambda x: x * 10, in_keys=["observation"], out_keys=["observation"]),
        zoo.module(zoo.mlp(zoo.CHOICES)),
    )
    for random in (False, True):
        play = Play(policy, zoo.WaveEnv(lengths=[1] * LANES))
        assert_any_grouping_gives_the_same(play, random=random)
        zoo.assert_same(
            play.columns(all_together(), random=random)["observation"], play.seen["observation"] * 10 ** (not random)
        )


@pytest.mark.parametrize("hidden", [300, 256])
def test_a_wide_network(hidden: int) -> None:
    """Its products are done in blocks of outputs."""
    net = nn.Sequential(
        zoo.mlp(hidden, nn.ReLU()), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, zoo.CHOICES)
    )
    with set_exploration_type(ExplorationType.RANDOM):
        play = Play(zoo.discrete(net=net), zoo.WaveEnv(lengths=[1] * LANES))
        assert_any_grouping_gives_the_same(play)
        assert play.runner.stages[0] == "MLPStage"


class Remembering(TensorDictModuleBase):
    """Keeps, under a private key, how often it was called in each lane, as noise processes do."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "_calls"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        calls = tensordict.get("_calls", None)
        tensordict["_calls"] = torch.full((*tensordict.batch_size, 1), 100.0) if calls is None else calls + 1
        return tensordict.set("action", tensordict["observation"][..., : zoo.CHOICES] * 0 + tensordict["_calls"])


def test_what_a_policy_keeps_to_itself_belongs_to_a_lane() -> None:
    def calls(schedule: Schedule, steps: int | np.ndarray) -> Tensor:
        return Play(Remembering(), zoo.WaveEnv(lengths=[1] * LANES)).columns(schedule, steps)["action"][..., 0]

    wanted = 100.0 + torch.arange(STEPS).expand(LANES, STEPS)
    assert torch.equal(calls(all_together(), STEPS), wanted)
    steps = np.array([7, 3, 5, 7, 1, 6])
    for lane, found in enumerate(calls(shuffled(steps, 0), steps)):
        assert torch.equal(found[: steps[lane]], wanted[lane, : steps[lane]])


def test_what_a_policy_keeps_to_itself_outlives_the_slot() -> None:
    play = Play(Remembering(), zoo.WaveEnv(lengths=[1] * LANES))
    play.columns(shuffled(np.full(LANES, STEPS), 1))
    play.columns(all_together())
    found = play.columns(shuffled(np.full(LANES, STEPS), 2))["action"][..., 0]
    assert torch.equal(found, 100.0 + 2 * STEPS + torch.arange(STEPS).expand(LANES, STEPS))


def test_a_part_that_changes_in_place_what_others_wrote() -> None:
    play = Play(zoo.noisy(), zoo.WaveEnv(lengths=[1] * LANES))
    assert_any_grouping_gives_the_same(play)
    assert play.runner.stages == ["MLPStage", "MLPStage", "TensorDictStage"]
    assert (play.columns(shuffled(np.full(LANES, STEPS), 0))["action"] > 900).all()


def test_parameters_that_no_distribution_can_have_are_found_in_valid_steps_alone() -> None:
    """`Play` leaves NaN behind the last step of each lane."""
    play = Play(zoo.discrete(), zoo.WaveEnv(lengths=[1] * LANES))
    steps = np.array([7, 3, 5, 7, 1, 6])
    with set_exploration_type(ExplorationType.RANDOM):
        play.columns(shuffled(steps, 0), steps)
        play.seen["observation"][1, 3:] = float("nan")
        play.columns(shuffled(steps, 0), steps)
        play.seen["observation"][1, 2] = float("nan")
        with pytest.raises(ValueError, match="'logits'"):
            play.columns(shuffled(steps, 0), steps)


def test_an_error_names_lanes_and_steps() -> None:
    def fail(observation: Tensor) -> Tensor:
        if len(observation) == 2:
            raise RuntimeError("no")
        return observation[..., : zoo.CHOICES]

    play = Play(fail, zoo.WaveEnv(lengths=[1] * LANES))
    play.runner.begin(STEPS, None)
    with pytest.raises(RuntimeError) as caught:
        play.runner.act_on(np.array([4, 1]), np.array([0, 3]))
    notes = getattr(caught.value, "__notes__", None)
    assert notes is None or "steps [0, 3] of the lanes [4, 1]" in notes[-1]
