"""check_env: says what is wrong with an env, in sentences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase

from swath.envs.adapt import as_env
from swath.envs.base import FLAG, EnvBase, answers_of
from swath.envs.check_gym import GymChecker
from swath.envs.check_values import CannotGoOn, Findings, check_lengths, check_seed, is_sound, kind_of
from swath.envs.gym import GymEnv
from swath.envs.rows import Rows
from swath.envs.serial import SerialEnv
from swath.errors import EnvCheckError, EnvCheckWarning
from swath.keys import DONE, REWARD, TERMINATED, TRUNCATED, as_key

SEED_CURES = {
    True: "Draw random numbers from self.np_random, which super().reset(seed=seed) seeds, and set all state anew.",
    False: "Override _set_seed(seed) (or seed_lanes, with one seed per lane), draw all random numbers from what is "
    "seeded there, and set all state anew in a reset.",
}
"""What to do about a seed that is not heeded, by whether it is a gymnasium env."""
CALL_CURE = "A custom env gives either _reset and _step or reset_into and step_into; see swath.envs.EnvBase."


def check_env(env: Any, *, steps: int = 100, seed: int = 0) -> None:
    """Step `env` with random actions and list everything that is wrong with it.

    The env is seeded, reset and stepped, several times over: reset it before you use it for anything else. One that a
    factory made is closed.

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
    name = repr(subject) if isinstance(subject, EnvBase) else str(subject)
    findings = Findings()
    try:
        _check(subject, findings, steps, seed)
    except CannotGoOn:
        pass
    finally:
        if not is_made:
            subject.close()
    for doubt in findings.doubts.values():
        warnings.warn(f"{name}: {doubt}", EnvCheckWarning, stacklevel=2)
    if findings.problems:
        raise EnvCheckError(name, list(findings.problems.values())) from findings.cause


def _check(env: Any, findings: Findings, steps: int, seed: int) -> None:
    """Check what lies beneath first: whatever is wrong there would only show up again above."""
    beneath: list[Any] = [env] if isinstance(env, gym.Env | VectorEnv) else []
    if isinstance(env, GymEnv):
        beneath = [env.vector_env] if env.vector_env is not None else env.gym_envs or []
    elif isinstance(env, SerialEnv):
        for inner in env.envs:
            _check(inner, findings, steps, seed)
    said = [text for simulator in beneath for text in GymChecker(simulator, findings).run(steps, seed)]
    if not findings.problems:
        RowsChecker(as_env(env), findings).run(steps, seed, SEED_CURES[bool(beneath)])
    for text in said if not findings.problems else ():
        findings.doubt(kind_of(text), f"gymnasium's check_env says: {text}")


class RowsChecker:
    """Runs an EnvBase through episodes of random actions, on rows, as a collector does."""

    def __init__(self, env: EnvBase, findings: Findings) -> None:
        """Check `env`."""
        self.env, self.findings = env, findings
        self.out, self.action = env.new_out_rows(), Rows(env.actions.leaves, env.batch_size, env.rows_device)
        self.all = list(range(env.num_lanes))

    def run(self, steps: int, seed: int, seed_cure: str) -> None:
        """Make `steps` steps, twice: with the same seed they must be the same."""
        answers = answers_of(self.env)
        for source, ask in answers:
            self._check_answer(source, ask)
        one, other = (self._episodes(steps, seed, seed_cure) for _ in range(2))
        check_seed(self.findings, one, other, seed, seed_cure)
        if answers and self.env.num_lanes > 1 and not self.findings.problems:
            self._check_partial_reset(seed, seed_cure)

    def _begin(self, seed: int, cure: str) -> None:
        with self.findings.calling(f"set_seed({seed})", cure):
            self.env.set_seed(seed)
        with self.findings.calling("reset()", CALL_CURE):
            self.env.reset_into(self.all, self.out)

    def _step(self) -> bool:
        drawn = self.env.rand_action()
        for key in self.env.action_keys:
            self.action.tensors[key].copy_(drawn.get(key))
        with self.findings.calling("step()", CALL_CURE):
            return self.env.step_into(self.action, self.out)

    def _episodes(self, steps: int, seed: int, seed_cure: str) -> list[Any]:
        """Everything that happened, from a reset with `seed` on."""
        env, out, findings, ends = self.env, self.out, self.findings, []
        self._begin(seed, seed_cure)
        happened: list[Any] = [self._seen("reset()")]
        for _ in range(steps):
            finished = self._step()
            reward = out.tensors[REWARD].cpu().numpy()
            if not np.isfinite(reward).all():
                cure = "Look for a division by zero or a state that grows without end."
                findings.problem("finite", f"step() returned a reward that is not finite: {reward.tolist()}. {cure}")
            happened.append((self._seen("step()"), reward.copy()))
            ends.append((out.tensors[TERMINATED] | out.tensors[TRUNCATED]).flatten().tolist())
            lanes = np.flatnonzero(ends[-1]).tolist()
            if bool(finished) != bool(lanes):
                cure = "Return whether any lane finished: lanes are only reset if you do."
                fault = f"step_into returned {finished!r} although the flags say that the lanes {lanes} ended."
                findings.fatal("finished", f"{fault} {cure}")
            if lanes:
                with findings.calling("reset()", CALL_CURE):
                    env.reset_into(lanes, out)
                happened[-1] += (self._seen("reset()"),)
        for lane in self.all:
            check_lengths(findings, [ended[lane] for ended in ends])
        return happened

    def _seen(self, source: str) -> list[np.ndarray]:
        """A copy of all observations. Those that are held as they are must lie within their spaces."""
        for entry in self.env.observations.entries:
            if isinstance(entry.space, gs.Box | gs.MultiBinary):
                for value in self.out.flat(entry.key).cpu().numpy():
                    is_sound(self.findings, entry.space, value, repr(entry.key), source)
        return [self.out.flat(key).cpu().numpy().copy() for key in self.env.observation_keys]

    def _check_answer(self, source: str, ask: Callable[[], Any]) -> None:
        """Check what `_reset` or `_step` returns, before anything is converted."""
        with self.findings.calling(f"{source}()", CALL_CURE):
            answer = ask()
        if not isinstance(answer, TensorDictBase):
            cure = "Return TensorDict({...}, batch_size=self.batch_size)."
            self.findings.fatal(source, f"{source} returned {type(answer).__name__}, not a TensorDict. {cure}")
        wanted = {**self.env.out_leaves, DONE: FLAG}
        for key in map(as_key, answer.keys(True, True)):
            dtype = answer.get(key).dtype
            if key not in wanted:
                cure = "so that it is dropped. Add it to the space, or leave it out."
                self.findings.doubt(key, f"{source} returned {key!r}, which is not in the observation space, {cure}")
            elif dtype != wanted[key].dtype and key != REWARD:
                wrong = f"not as {wanted[key].dtype}: it would be converted in every step"
                cure = "Convert it, or correct the space's dtype."
                self.findings.problem(key, f"{source} returned {key!r} as {dtype}, {wrong}. {cure}")

    def _check_partial_reset(self, seed: int, cure: str) -> None:
        """Does resetting one lane leave the others alone? Only a doubt: lanes may share their random numbers."""

        def others_after(lanes: list[int]) -> list[np.ndarray]:
            self._begin(seed, cure)
            self._step()
            with self.findings.calling("A reset of lane 0 alone", CALL_CURE):
                if lanes:
                    self.env.reset_into(lanes, self.out)
            self._step()
            return [seen[1:] for seen in self._seen("step()")]

        if not data_equivalence(others_after([]), others_after([0]), exact=True):
            self.findings.doubt(
                "partial",
                "After a reset of lane 0 alone, the other lanes went on differently. _reset must leave those lanes "
                "alone that td['_reset'] does not mark; if they only share their random numbers, all is well.",
            )
