"""`check_env` for gymnasium's envs: do they keep to gymnasium's protocol, and accept what swath gives them?"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from gymnasium.vector import AutoresetMode, VectorEnv

from swath.envs.check_values import EpisodeLengths, Findings, check_value, first_difference, same
from swath.envs.lanes import lane_of
from swath.envs.rows import Rows
from swath.envs.spaces import ActionCodec, ObservationCodec, must_not_clash
from swath.errors import UnsupportedSpaceError

RESET_CURE = "Declare reset(self, *, seed=None, options=None), and begin it with super().reset(seed=seed)."
STEP_CURE = "step() must accept every action of action_space, in every state but after the end of an episode."
SEED_CURE = "Draw random numbers from self.np_random, which super().reset(seed=seed) seeds, and set all state anew."


class GymChecker:
    """Runs one gymnasium env through episodes of random actions."""

    def __init__(self, env: gym.Env[Any, Any], findings: Findings) -> None:
        """Look at the spaces of `env`."""
        self.env = env
        self.findings = findings
        self.space, action_space = _spaces(env, ("observation_space", "action_space"), findings)
        self._actions = ActionCodec(action_space)

    def run(self, steps: int, seed: int) -> None:
        """Make `steps` steps, twice: with the same seed they must be the same."""
        acts = [lanes[0] for lanes in _random_acts(self._actions, steps, 1, seed, self._actions.lane_reader)]
        differ_where(self._episodes(acts, seed), self._episodes(acts, seed), seed, self.findings, SEED_CURE)

    def _episodes(self, acts: list[Any], seed: int) -> list[Any]:
        """Everything that happened, from a reset with `seed` on."""
        findings, lengths = self.findings, EpisodeLengths()
        last = self._reset(seed)
        told = [deepcopy(last)]
        for act in acts:
            given, kept = deepcopy(act), deepcopy(last)
            with findings.calling(f"step({act!r})", STEP_CURE):
                answer = self.env.step(given)
            if not same(act, given):
                findings.doubt(
                    "action",
                    f"step({act!r}) changed the action it was given. swath gives each env a copy, other libraries may "
                    "not: work on a copy.",
                )
            if not same(last, kept):
                findings.doubt(
                    "alias",
                    "step() changed the observation that was returned before: the env returns the same array every "
                    "time. swath copies it at once, but a vector env in SAME_STEP mode loses final observations. "
                    "Return a copy.",
                )
            last, reward, terminated, truncated = self._taken_apart(answer)
            told.append(deepcopy((last, reward, terminated, truncated)))
            lengths.step(terminated or truncated)
            if terminated or truncated:
                last = self._reset(None)
                told[-1] += (deepcopy(last),)
        lengths.judge(findings)
        return told

    def _reset(self, seed: int | None) -> Any:
        findings = self.findings
        with findings.calling(f"reset(seed={seed})", RESET_CURE):
            try:
                answer = self.env.reset(seed=seed)
            except TypeError as error:
                if "seed" not in str(error):
                    raise
                findings.problem("seed", f"reset(seed={seed}) raised TypeError: {error}. {RESET_CURE}")
                answer = self.env.reset()
        if self._is_pair(answer):
            observation, info = answer
            _check_info(findings, info, "reset()")
        else:
            findings.problem(
                "reset", f"reset() returned {type(answer).__name__}, not the pair (observation, info). Return both."
            )
            observation = answer
        check_value(findings, self.space, observation, "observation", "reset()")
        return observation

    def _is_pair(self, answer: Any) -> bool:
        if not isinstance(answer, tuple) or len(answer) != 2:
            return False
        return not isinstance(self.space, gs.Tuple) or isinstance(answer[0], tuple) or isinstance(answer[1], dict)

    def _taken_apart(self, answer: Any) -> tuple[Any, Any, bool, bool]:
        findings = self.findings
        if isinstance(answer, tuple) and len(answer) == 4:
            findings.problem(
                "step",
                "step() returned four values, as gym did before version 0.26. Return five: (observation, reward, "
                "terminated, truncated, info), where truncated tells of time limits.",
            )
            observation, reward, terminated, info = answer
            truncated = False
        elif isinstance(answer, tuple) and len(answer) == 5:
            observation, reward, terminated, truncated, info = answer
        else:
            findings.fatal(
                "step",
                f"step() returned {type(answer).__name__} instead of the five values (observation, reward, terminated, "
                "truncated, info). Return all of them.",
            )
        check_value(findings, self.space, observation, "observation", "step()")
        _check_reward(findings, reward)
        _check_info(findings, info, "step()")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                findings.problem(
                    name,
                    f"step() returned {name} as {type(flag).__name__} ({flag!r}), not as bool. Return bool({name}).",
                )
        return observation, reward, _truth(terminated), _truth(truncated)


class VectorChecker:
    """Runs a vector env through episodes of random actions."""

    def __init__(self, env: VectorEnv[Any, Any, Any], findings: Findings) -> None:
        """Look at the spaces and the autoreset mode of `env`."""
        self.env = env
        self.findings = findings
        names = ("single_observation_space", "single_action_space")
        self.space, action_space = _spaces(env, names, findings)
        self._actions = ActionCodec(action_space)
        if "autoreset_mode" not in env.metadata:
            findings.doubt(
                "mode",
                "metadata has no 'autoreset_mode', so that NEXT_STEP is taken for granted. Write down which of "
                "gymnasium.vector.AutoresetMode it is, or final observations may be wrong.",
            )
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))

    def run(self, steps: int, seed: int) -> None:
        """Make `steps` steps of all lanes, twice: with the same seed they must be the same."""
        acts = _random_acts(self._actions, steps, self.env.num_envs, seed, self._actions.batch_reader)
        differ_where(self._episodes(acts, seed), self._episodes(acts, seed), seed, self.findings, SEED_CURE)

    def _episodes(self, acts: list[Any], seed: int) -> list[Any]:
        told = [deepcopy(self._reset(seed=seed))]
        ended = np.zeros(self.env.num_envs, dtype=bool)
        for act in acts:
            with self.findings.calling(f"step({act!r})", STEP_CURE):
                answer = self.env.step(deepcopy(act))
            if not isinstance(answer, tuple) or len(answer) != 5:
                self.findings.fatal(
                    "step", "step() must return (observations, rewards, terminated, truncated, infos). Return all five."
                )
            observation, reward, terminated, truncated, infos = answer
            told.append(deepcopy((observation, reward, terminated, truncated)))
            self._check_lanes(observation, "step()")
            self._check_numbers(reward, terminated, truncated)
            before, ended = ended, np.logical_or(terminated, truncated)
            self._check_mode(before, reward, ended, infos)
            if self._mode is AutoresetMode.DISABLED and ended.any():
                told[-1] += (deepcopy(self._reset(options={"reset_mask": ended})),)
        return told

    def _reset(self, **options: Any) -> Any:
        with self.findings.calling(f"reset({options})", RESET_CURE):
            answer = self.env.reset(**deepcopy(options))
        if not isinstance(answer, tuple) or len(answer) != 2:
            self.findings.fatal("reset", "reset() must return the pair (observations, infos). Return both.")
        self._check_lanes(answer[0], "reset()")
        return answer[0]

    def _check_lanes(self, observation: Any, source: str) -> None:
        for lane in range(self.env.num_envs):
            try:
                value = lane_of(observation, lane)
            except (IndexError, TypeError, KeyError) as error:
                self.findings.fatal(
                    "lanes",
                    f"{source} returned observations without a lane {lane} ({error}). Give every array of the "
                    f"observations the leading dimension num_envs={self.env.num_envs}.",
                )
            check_value(self.findings, self.space, value, "observation", source)

    def _check_numbers(self, reward: Any, terminated: Any, truncated: Any) -> None:
        shape = (self.env.num_envs,)
        for name, value, kinds in (
            ("reward", reward, "fiu"),
            ("terminated", terminated, "b"),
            ("truncated", truncated, "b"),
        ):
            array = np.asarray(value)
            if array.shape != shape or array.dtype.kind not in kinds:
                self.findings.fatal(
                    name,
                    f"step() returned {name} of shape {array.shape} and dtype {array.dtype}. Return one "
                    f"{'bool' if kinds == 'b' else 'number'} for each env: shape {shape}.",
                )
        for value in np.asarray(reward):
            _check_reward(self.findings, value)

    def _check_mode(self, before: np.ndarray, reward: Any, ended: np.ndarray, infos: Any) -> None:
        """Does the env do at the end of an episode what its autoreset mode says?"""
        if self._mode is AutoresetMode.NEXT_STEP and before.any():
            if ended[before].any() or np.asarray(reward)[before].any():
                self.findings.problem(
                    "next step",
                    "The env says NEXT_STEP, but in the step after an end it gave a reward or another end. That step "
                    "must only reset the lane: reward 0, no flag, and the new episode's observation.",
                )
        elif self._mode is AutoresetMode.SAME_STEP and ended.any():
            if not isinstance(infos, dict) or "final_obs" not in infos:
                self.findings.fatal(
                    "final",
                    "The env says SAME_STEP, but its infos have no 'final_obs' when an episode ends, so that the final "
                    "observation is lost. Return it there.",
                )
            for lane in np.flatnonzero(ended).tolist():
                value = lane_of(infos["final_obs"], lane)
                check_value(self.findings, self.space, value, "final_obs", "step()")


def _random_acts(
    codec: ActionCodec, steps: int, lanes: int, seed: int, reader: Callable[[Rows], Callable[[], Any]]
) -> list[Any]:
    """Random actions for `steps` steps, exactly as a collector would give them to the env."""
    drawn = codec.draw(codec.leaves, steps, lanes, torch.Generator().manual_seed(seed))
    rows = Rows(codec.leaves, (lanes,))
    read = reader(rows)
    acts = []
    for step in range(steps):
        for key, values in drawn.items():
            rows.tensors[key].copy_(values[step])
        acts.append(read())
    return acts


def differ_where(one: list[Any], other: list[Any], seed: int, findings: Findings, cure: str) -> None:
    """Note if two runs with one seed are not the same."""
    step = first_difference(one, other)
    if step == 0:
        findings.problem(
            "seeds", f"Two resets with seed {seed} gave different observations: the seed is not heeded. {cure}"
        )
    elif step is not None:
        findings.problem("seeds", f"Two runs with seed {seed} and the same actions differ from step {step} on. {cure}")


def _spaces(env: Any, names: tuple[str, str], findings: Findings) -> tuple[gs.Space[Any], gs.Space[Any]]:
    found = []
    for name in names:
        space = getattr(env, name, None)
        if not isinstance(space, gs.Space):
            findings.fatal(
                name, f"{name} is {space!r}, not a gymnasium space. Set self.{name} in __init__, for instance to a Box."
            )
        found.append(space)
    try:
        must_not_clash(ObservationCodec(found[0]).leaves, ActionCodec(found[1]).leaves)
    except UnsupportedSpaceError as error:
        findings.fatal("space", str(error))
    return found[0], found[1]


def _check_info(findings: Findings, info: Any, source: str) -> None:
    if not isinstance(info, dict):
        findings.problem(
            "info", f"{source} returned info as {type(info).__name__}, not as dict. Return {{}} if there is none."
        )


def _check_reward(findings: Findings, reward: Any) -> None:
    if not isinstance(reward, int | float | np.number) and not (isinstance(reward, np.ndarray) and reward.shape == ()):
        shape = f" of shape {reward.shape}" if isinstance(reward, np.ndarray) else f" ({reward!r})"
        findings.problem(
            "reward",
            f"step() returned the reward as {type(reward).__name__}{shape}, not as a number. Return float(reward).",
        )
    elif not np.isfinite(reward):
        findings.problem(
            "finite",
            f"step() returned the reward {reward}. Look for a division by zero or a state that grows without end.",
        )


def _truth(flag: Any) -> bool:
    return bool(np.any(flag)) if flag is not None else False
