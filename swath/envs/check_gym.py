"""`check_env` for gymnasium's envs: what gymnasium's own checkers say, and what they do not look at."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs
from gymnasium.utils import env_checker, passive_env_checker
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from swath.envs.check_values import Findings, check_lengths, check_observation, kind_of, said
from swath.envs.gym_lanes import RESET_CURE, lane_of
from swath.envs.spaces import ActionCodec, ObservationCodec, must_not_clash
from swath.errors import UnsupportedSpaceError

STEP_CURE = "step() must accept every action of action_space, in every state but after the end of an episode."


class GymChecker:
    """Runs a gymnasium env through gymnasium's check, and asks gymnasium about every step of some episodes.

    So too a vector env, for which gymnasium has no check: lane by lane its answers must be those of an env.
    """

    def __init__(self, env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any], findings: Findings) -> None:
        """Look at the spaces of `env`, and at how it resets its lanes."""
        self.env, self.findings = env, findings
        self._is_vector = isinstance(env, VectorEnv)
        self._lanes = range(env.num_envs if isinstance(env, VectorEnv) else 1)
        names = [f"{'single_' if self._is_vector else ''}{kind}_space" for kind in ("observation", "action")]
        spaces: list[gs.Space[Any]] = []
        for name in names:
            space = getattr(env, name, None)
            if not isinstance(space, gs.Space):
                cure = f"Set self.{name} in __init__, for instance to a Box."
                findings.fatal(name, f"{name} is {space!r}, not a gymnasium space. {cure}")
            spaces.append(space)
        self.space = spaces[0]
        # EnvPool's `action_space` is that of one env.
        self._actions = batch_space(spaces[1], len(self._lanes)) if self._is_vector else spaces[1]
        try:
            must_not_clash(ObservationCodec(self.space).leaves, ActionCodec(spaces[1]).leaves)
        except UnsupportedSpaceError as error:
            findings.fatal("space", str(error))
        if self._is_vector and "autoreset_mode" not in env.metadata:
            cure = "Write down which of gymnasium.vector.AutoresetMode it is, or final observations may be wrong."
            findings.doubt("mode", f"metadata has no 'autoreset_mode', so that NEXT_STEP is taken for granted. {cure}")
        default = AutoresetMode.NEXT_STEP if self._is_vector else AutoresetMode.DISABLED
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", default))

    def run(self, steps: int, seed: int) -> list[str]:
        """Make `steps` steps. Returns what gymnasium's check says, which ends with the first thing that it minds.

        Our own steps find what is a fault for swath, and say more about it; what they do not meet is only doubtful.
        """
        options = {"skip_render_check": True, "skip_close_check": True}
        warned, raised = ([], []) if self._is_vector else said(env_checker.check_env, self.env, **options)
        findings, last, ended = self.findings, self._reset(seed=seed), np.zeros(len(self._lanes), dtype=bool)
        ends: list[bool] = []
        self._actions.seed(seed)
        for _ in range(steps):
            act = self._actions.sample()
            given, kept = deepcopy(act), deepcopy(last)
            with findings.calling(f"step({act!r})", STEP_CURE):
                answer = self.env.step(given)
            if not data_equivalence(act, given, exact=True):
                cure = "swath gives each env a copy, other libraries may not: work on a copy."
                findings.doubt("action", f"step({act!r}) changed the action it was given. {cure}")
            if not findings.problems and not data_equivalence(last, kept, exact=True):
                fault = "the observation that was returned before: the env returns the same array every time"
                cure = "but a vector env in SAME_STEP mode loses final observations. Return a copy."
                findings.doubt("alias", f"step() changed {fault}. swath copies it at once, {cure}")
            before, ended = ended, self._checked_ends(answer)
            ends.append(bool(ended[0]))
            last = answer[0]
            self._check_mode(before, answer[1], ended, answer[-1])
            if self._mode is AutoresetMode.DISABLED and ended.any():
                last = self._reset(**({"options": {"reset_mask": ended}} if self._is_vector else {"seed": None}))
        if not self._is_vector:
            check_lengths(findings, ends)
        return [*warned, *raised]

    def _reset(self, **options: Any) -> Any:
        findings, env = self.findings, self.env
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
        with findings.calling(f"reset({shown})", RESET_CURE):
            try:
                answer = env.reset(**deepcopy(options))
            except TypeError as error:
                if "seed" not in str(error) or self._is_vector:
                    raise
                findings.problem("seed", f"reset(seed={options['seed']}) raised TypeError: {error}. {RESET_CURE}")
                answer = env.reset()
        is_pair = isinstance(answer, tuple) and len(answer) == 2
        observation = answer[0] if is_pair else answer
        for lane in self._lanes:
            own = self._lane(observation, lane, "reset()")
            given = (own, answer[1]) if is_pair else own
            answered = SimpleNamespace(reset=lambda given=given, **kwargs: given, observation_space=self.space)
            self._take_over(own, *said(passive_env_checker.env_reset_passive_checker, answered), "reset()")
        return observation

    def _checked_ends(self, answer: Any) -> np.ndarray:
        """Check what `step` has answered, lane by lane. Returns which have ended."""
        is_whole, ends = isinstance(answer, tuple) and len(answer) in (4, 5), []
        for lane in self._lanes:
            own = (*(self._lane(part, lane, "step()") for part in answer[:-1]), answer[-1]) if is_whole else answer
            answered = SimpleNamespace(step=lambda _, own=own: own, observation_space=self.space)
            warned, raised = said(passive_env_checker.env_step_passive_checker, answered, None)
            if not is_whole:
                self.findings.fatal("step", raised[0])
            reward = np.asarray(own[1])
            if reward.ndim == 0 and reward.dtype.kind in "fiub":  # an array of one number will do
                warned = [text for text in warned if "must be a float" not in text]
            self._take_over(own[0], warned, raised, "step()")
            ends.append(any(np.any(flag) for flag in own[2:-1] if flag is not None))
        return np.array(ends)

    def _take_over(self, observation: Any, warned: list[str], raised: list[str], source: str) -> None:
        """Note what gymnasium says about an answer, and look at the observation ourselves."""
        about = [text for text in warned if text.startswith("The obs returned by")]
        for text in (*(text for text in warned if text not in about), *raised):
            self.findings.problem(kind_of(text), text)
        check_observation(self.findings, self.space, observation, source, about)

    def _lane(self, values: Any, lane: int, source: str) -> Any:
        try:
            return lane_of(values, lane) if self._is_vector else values
        except (IndexError, TypeError, KeyError) as error:
            cure = f"Give every array the leading dimension num_envs={len(self._lanes)}."
            self.findings.fatal("lanes", f"{source} returned values without a lane {lane} ({error}). {cure}")

    def _check_mode(self, before: np.ndarray, reward: Any, ended: np.ndarray, infos: Any) -> None:
        """Does the env do at the end of an episode what its autoreset mode says?"""
        if self._mode is AutoresetMode.NEXT_STEP and before.any():
            if ended[before].any() or np.asarray(reward)[before].any():
                fault = "The env says NEXT_STEP, but in the step after an end it gave a reward or another end."
                cure = "That step must only reset the lane: reward 0, no flag, and the new episode's observation."
                self.findings.problem("next step", f"{fault} {cure}")
        elif self._mode is AutoresetMode.SAME_STEP and ended.any():
            if not isinstance(infos, dict) or "final_obs" not in infos:
                fault = "The env says SAME_STEP, but its infos have no 'final_obs' when an episode ends"
                self.findings.fatal("final", f"{fault}, so that the final observation is lost. Return it there.")
            for lane in np.flatnonzero(ended).tolist():
                final = self._lane(infos["final_obs"], lane, "step(), in 'final_obs',")
                check_observation(self.findings, self.space, final, "step(), in 'final_obs',", [])
