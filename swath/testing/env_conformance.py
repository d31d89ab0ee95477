"""The conformance suite for envs: subclass it in a test file, say how the env is made, and its contract is tested.

class TestMyEnv(EnvConformance):
    def make_env(self):
        return MyEnv()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from swath.envs import EnvBase, Rows
from swath.errors import UnsupportedEnvError
from swath.keys import DONE, FLAGS, NEXT, RESET, REWARD, TERMINATED, TRUNCATED, Key


class EnvConformance:
    """What every env must do."""

    def make_env(self) -> EnvBase:
        """A new env; every call must give one that behaves the same when it is seeded the same."""
        raise NotImplementedError

    @pytest.fixture
    def env(self) -> Any:
        """An env that is closed after the test."""
        env = self.make_env()
        yield env
        env.close()

    def test_reset_gives_all_observations_and_no_flag(self, env: EnvBase) -> None:
        """Reset fits the spaces."""
        td = env.reset()
        assert td.batch_size == env.batch_size
        for key, leaf in env.observations.leaves.items():
            assert td.get(key).shape == (*env.batch_size, *leaf.shape)
            assert td.get(key).dtype == leaf.dtype
        for flag in FLAGS:
            assert td.get(flag).shape == (*env.batch_size, 1)
            assert not td.get(flag).any()

    def test_step_writes_next(self, env: EnvBase) -> None:
        """A step leaves the root alone and writes what happened."""
        td = env.rand_action(env.reset())
        before = td.clone()
        assert env.step(td) is td
        assert (td.exclude(NEXT) == before).all()
        answer = td.get(NEXT)
        assert answer.get(REWARD).shape == (*env.batch_size, *env.reward_leaf.shape)
        for key, leaf in env.observations.leaves.items():
            assert answer.get(key).shape == (*env.batch_size, *leaf.shape)
            assert answer.get(key).dtype == leaf.dtype
        for flag in FLAGS:
            assert answer.get(flag).dtype == torch.bool

    def test_step_returns_tensors_of_their_own(self, env: EnvBase) -> None:
        """What a step returned does not change with the next."""
        first = env.step(env.rand_action(env.reset()))
        kept = first.clone()
        env.step(env.rand_action(env.reset()))
        assert (first == kept).all()

    def test_same_seed_same_episodes(self, env: EnvBase) -> None:
        """Seeding decides what happens."""

        def run(seed: int) -> TensorDictBase:
            env.set_seed(seed)
            return env.rollout(20, break_when_any_done=False)

        first, again = run(3), run(3)
        assert (first.select(*env.action_keys) == again.select(*env.action_keys)).all()
        if not self.counts_episodes:
            assert (first == again).all()

    counts_episodes = False
    """Whether observations hold a count of episodes, which seeding does not take back."""

    def test_partial_reset_touches_only_the_lanes_asked_for(self, env: EnvBase) -> None:
        """The other lanes go on."""
        if env.num_lanes < 2:
            pytest.skip("one lane")
        td = env.step(env.rand_action(env.reset())).get(NEXT).clone()
        chosen = torch.zeros(env.num_lanes, 1, dtype=torch.bool, device="cpu")
        chosen[0] = True
        td.set(RESET, chosen.view(*env.batch_size, 1))
        after_reset = env.reset(td)
        for key in env.observation_keys:
            kept = after_reset.get(key).reshape(env.num_lanes, -1)[1:]
            assert (kept == td.get(key).reshape(env.num_lanes, -1)[1:]).all()

    def test_rollout_follows_on(self, env: EnvBase) -> None:
        """Inside an episode, what happened is what is seen next."""
        td = env.rollout(30, break_when_any_done=False)
        time = len(env.batch_size)
        going_on = ~td.get((NEXT, DONE)).narrow(time, 0, td.shape[time] - 1).squeeze(-1)
        for key in env.observation_keys:
            seen = td.get(key).narrow(time, 1, td.shape[time] - 1)[going_on]
            happened = td.get((NEXT, *([key] if isinstance(key, str) else key)))
            assert (happened.narrow(time, 0, td.shape[time] - 1)[going_on] == seen).all()

    def test_rows_and_surface_agree(self, env: EnvBase) -> None:
        """`step_into` does what `step` does."""
        if env.rows_device is not None and env.rows_device.type != "cpu":
            pytest.skip("rows on another device")
        env.set_seed(5)
        out = Rows(env.out_leaves, env.batch_size, env.rows_device)
        env.reset_into(range(env.num_lanes), out)
        action = Rows(env.actions.leaves, env.batch_size, env.rows_device)
        finished = env.step_into(action, out)
        ended = out.tensors["terminated"] | out.tensors["truncated"]
        assert finished == bool(ended.any())

    def test_single_lanes_step_as_in_lockstep(self, env: EnvBase) -> None:
        """`step_lanes_into` does in each lane what `step_into` does in all, and touches no other; or it refuses."""
        if env.rows_device is not None and env.rows_device.type != "cpu":
            pytest.skip("rows on another device")
        if not env.can_step_lanes:
            out, action = env.new_out_rows(), Rows(env.actions.leaves, env.batch_size)
            env.reset_into(range(env.num_lanes), out)
            with pytest.raises(UnsupportedEnvError, match="all its lanes at once"):
                env.step_lanes_into([0], action, out)
            return
        steps, everyone, generator = 12, list(range(env.num_lanes)), torch.Generator().manual_seed(0)
        drawn = env.actions.draw(env.actions.leaves, steps, env.num_lanes, generator)
        behind, turns = everyone * steps, list[list[int]]([[]])
        while behind:
            chosen = torch.randperm(len(behind), generator=generator, device="cpu")[:3].tolist()
            turns.append(list({behind[place] for place in chosen}))
            for lane in turns[-1]:
                behind.remove(lane)
        with contextlib.closing(self.make_env()) as other:
            together = _recorded(other, drawn, [everyone] * steps, lambda lanes, *rows: other.step_into(*rows))
        assert _recorded(env, drawn, turns, env.step_lanes_into) == together

    def test_close_twice(self, env: EnvBase) -> None:
        """Closing is idempotent, and a closed env says so."""
        env.reset()
        env.close()
        env.close()
        assert env.is_closed
        with pytest.raises(RuntimeError, match="closed"):
            env.reset()


def _recorded(
    env: EnvBase, drawn: dict[Key, torch.Tensor], turns: list[list[int]], step: Callable[[list[int], Rows, Rows], bool]
) -> list[list[Any]]:
    """What was written by lane, in its steps and resets, if lanes take turns with their own next actions of `drawn`."""
    out, action = env.new_out_rows(), Rows(env.actions.leaves, env.batch_size)
    records: list[list[Any]] = [[] for _ in range(env.num_lanes)]
    steps = [0] * env.num_lanes

    def record(lanes: list[int], write: Callable[[list[int]], Any]) -> Any:
        before, result = rows(), write(lanes)
        for lane, (was, now) in enumerate(zip(before, rows(), strict=True)):
            if lane in lanes:
                records[lane].append(now)
            else:
                assert now == was, f"lane {lane} was touched"
        return result

    def rows() -> list[Any]:
        return [{key: array[lane].tolist() for key, array in out.arrays.items()} for lane in range(env.num_lanes)]

    env.set_seed(7)
    record(list(range(env.num_lanes)), lambda lanes: env.reset_into(lanes, out))
    for lanes in turns:
        for key, values in drawn.items():
            action.arrays[key].fill(0)  # for lanes that are not to be stepped
            for lane in lanes:
                action.arrays[key][lane] = values[steps[lane], lane].numpy()
        finished = record(lanes, lambda lanes: step(lanes, action, out))
        over = [lane for lane in lanes if out.arrays[TERMINATED][lane] or out.arrays[TRUNCATED][lane]]
        assert finished == bool(over)
        if over:
            record(over, lambda lanes: env.reset_into(lanes, out))
        for lane in lanes:
            steps[lane] += 1
    return records
