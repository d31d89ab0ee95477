"""check_env: tells what is wrong with an env, in sentences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from gymnasium.vector import VectorEnv
from tensordict import TensorDict, TensorDictBase

from swath.envs.adapt import as_env
from swath.envs.base import EnvBase
from swath.envs.check_gym import GymChecker, VectorChecker, differ_where
from swath.envs.check_values import CannotGoOn, EpisodeLengths, Findings, limits
from swath.envs.gym import GymEnv
from swath.envs.rows import Rows
from swath.envs.serial import SerialEnv
from swath.errors import EnvCheckError, EnvCheckWarning
from swath.keys import FLAGS, NEXT, RESET, REWARD, TERMINATED, TRUNCATED, Key, as_key

SEED_CURE = (
    "Override _set_seed(seed) (or _set_seeds, with one seed per lane), draw all random numbers from what is seeded "
    "there, and set all state anew in a reset."
)
CALL_CURE = "A custom env gives either _reset and _step or reset_into and step_into; see swath.envs.EnvBase."


def check_env(env: Any, *, steps: int = 100, seed: int = 0) -> None:
    """Step `env` with random actions and tell everything that is wrong with it.

    The env is seeded, reset and stepped, twice over: reset it before you use it for anything else. One that a factory
    made is closed.

    Args:
        env: an EnvBase, a gymnasium env or vector env, or a factory of one of these.
        steps: how many steps to make in each run.
        seed: with which seed to begin.

    Raises:
        EnvCheckError: listing all problems found, each with what to do about it. What is only doubtful is warned of.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    is_made = isinstance(env, EnvBase | gym.Env | VectorEnv) or not callable(env)
    subject = env if is_made else env()
    findings = Findings()
    try:
        _check(subject, findings, steps, seed)
    except CannotGoOn:
        pass
    finally:
        if not is_made:
            subject.close()
    for doubt in findings.doubts.values():
        warnings.warn(f"{_name(subject)}: {doubt}", EnvCheckWarning, stacklevel=2)
    if findings.problems:
        raise EnvCheckError(_name(subject), list(findings.problems.values())) from findings.cause


def _check(env: Any, findings: Findings, steps: int, seed: int) -> None:
    """Check what lies beneath first: whatever is wrong there would only show up again above."""
    if isinstance(env, gym.Env):
        GymChecker(env, findings).run(steps, seed)
    elif isinstance(env, VectorEnv):
        VectorChecker(env, findings).run(steps, seed)
    elif isinstance(env, GymEnv):
        for single in env.gym_envs or ():
            GymChecker(single, findings).run(steps, seed)
        if env.vector_env is not None:
            VectorChecker(env.vector_env, findings).run(steps, seed)
    elif isinstance(env, SerialEnv):
        for inner in env.envs:
            _check(inner, findings, steps, seed)
    if not findings.problems:
        SurfaceChecker(as_env(env), findings).run(steps, seed)


class SurfaceChecker:
    """Runs an EnvBase through its two ways of stepping: TensorDicts and rows."""

    def __init__(self, env: EnvBase, findings: Findings) -> None:
        """Check `env`."""
        self.env = env
        self.findings = findings

    def run(self, steps: int, seed: int) -> None:
        """Make `steps` steps on the surface, twice, and again on rows."""
        if type(self.env)._step is not EnvBase._step:
            self._check_answers()
        differ_where(self._episodes(steps, seed), self._episodes(steps, seed), seed, self.findings, SEED_CURE)
        self._check_rows(steps)
        custom = type(self.env)._reset is not EnvBase._reset
        if custom and self.env.num_lanes > 1 and not self.findings.problems:
            self._check_partial_reset(seed)

    # -- what _reset and _step return, before anything is converted ----------------------------------------------

    def _check_answers(self) -> None:
        env, shape = self.env, self.env.batch_size
        with self.findings.calling("_reset()", CALL_CURE):
            begun = env._reset(TensorDict({}, batch_size=shape))
        self._check_entries(begun, "_reset", ())
        with self.findings.calling("reset()", CALL_CURE):
            given = env.rand_action(env.reset())
        with self.findings.calling("_step()", CALL_CURE):
            answer = env._step(given.exclude(*FLAGS))
        self._check_entries(answer, "_step", (REWARD, *FLAGS))

    def _check_entries(self, answer: Any, source: str, extras: tuple[str, ...]) -> None:
        if not isinstance(answer, TensorDictBase):
            self.findings.fatal(
                source,
                f"{source} returned {type(answer).__name__}, not a TensorDict. Return TensorDict({{...}}, "
                "batch_size=self.batch_size).",
            )
        wanted = self.env.out_leaves
        for key in map(as_key, answer.keys(True, True)):
            dtype = answer.get(key).dtype
            if key not in wanted and key not in FLAGS:
                self.findings.doubt(
                    key,
                    f"{source} returned {key!r}, which is not in the observation space, so that it is dropped. Add it "
                    "to the space, or leave it out.",
                )
            elif key in extras and key in FLAGS and dtype != torch.bool:
                self.findings.problem(
                    key, f"{source} returned {key!r} as {dtype}, not as torch.bool. Return the result of a comparison."
                )
            elif key in self.env.observation_keys and dtype != wanted[key].dtype:
                self.findings.problem(
                    key,
                    f"{source} returned {key!r} as {dtype}, but its space says {wanted[key].dtype}, to which it would "
                    "be converted in every step. Convert it yourself, or correct the space's dtype.",
                )

    # -- the surface ---------------------------------------------------------------------------------------------

    def _episodes(self, steps: int, seed: int) -> list[Any]:
        env, findings = self.env, self.findings
        lengths = [EpisodeLengths() for _ in range(env.num_lanes)]
        with findings.calling(f"set_seed({seed})", SEED_CURE):
            env.set_seed(seed)
        with findings.calling("reset()", CALL_CURE):
            root: TensorDictBase = env.reset()
        self._check_values(root, "reset()")
        told: list[Any] = [self._numbers(root)]
        for _ in range(steps):
            with findings.calling("step()", CALL_CURE):
                stepped, root = env.step_and_maybe_reset(env.rand_action(root))
            after = stepped.get(NEXT)
            self._check_values(after, "step()")
            reward = after.get(REWARD)
            if not bool(reward.isfinite().all()):
                findings.problem(
                    "finite",
                    f"step() returned a reward that is not finite: {reward.flatten().tolist()}. Look for a division by "
                    "zero or a state that grows without end.",
                )
            told.append((self._numbers(after), reward.cpu().numpy(), self._numbers(root)))
            ends = after.get(TERMINATED) | after.get(TRUNCATED)
            for lane, ended in enumerate(ends.flatten().tolist()):
                lengths[lane].step(ended)
        for episodes in lengths:
            episodes.judge(findings)
        return told

    def _numbers(self, td: TensorDictBase) -> dict[Key, np.ndarray]:
        return {key: td.get(key).cpu().numpy() for key in self.env.observation_keys}

    def _check_values(self, td: TensorDictBase, source: str) -> None:
        """Are the encoded observations within the limits of their spaces?"""
        for entry in self.env.observations.entries:
            key, space = entry.key, entry.space
            value = td.get(key).cpu().numpy()
            if value.dtype.kind == "f" and np.isnan(value).any():
                self.findings.problem(
                    (key, "nan"),
                    f"{source} returned NaN in {key!r}. Look for a division by zero, a root or logarithm of something "
                    "negative, or a state that grows without end.",
                )
                continue
            if isinstance(space, gs.Discrete | gs.MultiDiscrete):
                continue  # held as indices or one-hot vectors, which are written by swath itself
            low, high = limits(space)
            if ((value < low) | (value > high)).any():
                self.findings.problem(
                    (key, "outside"),
                    f"{source} returned {key!r} outside of its space {space}: its values go from "
                    f"{value.min():g} to {value.max():g}. Widen the bounds of the space, or clip them.",
                )

    # -- the rows ------------------------------------------------------------------------------------------------

    def _check_rows(self, steps: int) -> None:
        """Does `step_into` say rightly whether a lane has finished?"""
        env = self.env
        out = Rows(env.out_leaves, env.batch_size, env.rows_device)
        action = Rows(env.actions.leaves, env.batch_size, env.rows_device)
        with self.findings.calling("reset_into()", CALL_CURE):
            env.reset_into(range(env.num_lanes), out)
        for _ in range(steps):
            for key in env.action_keys:
                action.tensors[key].copy_(env.rand_action().get(key))
            with self.findings.calling("step_into()", CALL_CURE):
                finished = env.step_into(action, out)
            ended = (out.tensors[TERMINATED] | out.tensors[TRUNCATED]).flatten()
            lanes = ended.nonzero().flatten().tolist()
            if bool(finished) != bool(lanes):
                self.findings.fatal(
                    "finished",
                    f"step_into returned {finished!r} although the flags say that the lanes {lanes} ended. Return "
                    "whether any lane finished: lanes are only reset if you do.",
                )
            if lanes:
                with self.findings.calling("reset_into()", CALL_CURE):
                    env.reset_into(lanes, out)

    def _check_partial_reset(self, seed: int) -> None:
        """Does resetting one lane leave the others alone? Only a doubt: lanes may share their random numbers."""
        env = self.env

        def others_after(prepare: Callable[[TensorDictBase], TensorDictBase]) -> list[Any]:
            env.set_seed(seed)
            root = prepare(env.step(env.rand_action(env.reset())).get(NEXT).clone())
            after = env.step(env.rand_action(root)).get(NEXT)
            return [after.get(key).reshape(env.num_lanes, -1)[1:].cpu().numpy() for key in env.observation_keys]

        def reset_first(td: TensorDictBase) -> TensorDictBase:
            mask = torch.zeros(env.num_lanes, dtype=torch.bool)
            mask[0] = True
            return env.reset(td.set(RESET, mask.view(*env.batch_size, 1)))

        with self.findings.calling("A reset of lane 0 alone", CALL_CURE):
            alone, disturbed = others_after(lambda td: td), others_after(reset_first)
        if not all(map(np.array_equal, alone, disturbed)):
            self.findings.doubt(
                "partial",
                "After a reset of lane 0 alone, the other lanes went on differently. _reset must leave those lanes "
                "alone that td['_reset'] does not mark; if they only share their random numbers, all is well.",
            )


def _name(env: Any) -> str:
    return repr(env) if isinstance(env, EnvBase) else str(env)
