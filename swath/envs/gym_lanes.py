"""Stepping gymnasium envs through rows: separate envs one after the other, or one vector env.

NOTE [Final observations]: an episode's last transition must hold the observation in which it ended. Separate envs are
reset by the caller, after the step was recorded. A vector env resets by itself, in one of three ways:

- DISABLED: it does not; single lanes are reset with `reset_mask`.
- SAME_STEP: the step already returns the new episode's observation. The final one is taken from the infos, the new one
  is kept aside until the caller asks for the reset.
- NEXT_STEP: the next step resets the lane and ignores its action. Gymnasium's own Sync- and AsyncVectorEnv can be reset
  by mask before that happens. For others that step has no transition in this lane: it is marked idle in the mask.

An env that always returns the same array must not be put into a SAME_STEP vector env: its reset overwrites the final
observation before gymnasium hands it out. Everywhere else results are copied before the env is called again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from swath.envs.gym_steps import way_into
from swath.envs.rows import Rows
from swath.envs.spaces import ActionCodec, ObservationCodec
from swath.errors import UnsupportedEnvError, annotate, wrong_shape
from swath.keys import MASK, REWARD, TERMINATED, TRUNCATED, Key

HAPPENED = (REWARD, TERMINATED, TRUNCATED)
HINT = "swath.envs.check_env(env) tells what is wrong with a custom env."
RESET_CURE = "Declare reset(self, *, seed=None, options=None), and begin it with super().reset(seed=seed)."
STEP_FORM = (
    "step() must return five values: return observation, reward, terminated, truncated, info. An env of the old gym, "
    "which returns four, works as gymnasium.make('GymV21Environment-v0', env=env), with pip install shimmy[gym-v21]."
)
RESET_FORM = "reset() must return two values: return observation, info."


class GymLanes:
    """Gymnasium envs, stepped one after the other."""

    idles = False
    """Whether a lane may be without a transition in a step, which the entry `("collector", "mask")` says."""

    def __init__(self, envs: Sequence[gym.Env[Any, Any]], observations: ObservationCodec, actions: ActionCodec) -> None:
        """Take over `envs`, whose values are translated by the codecs."""
        self.envs = list(envs)
        self._observations = observations
        self._actions = actions
        self._ways: list[tuple[Any, Any]] = [(env, None) for env in self.envs]
        """What is stepped in each lane, and the TimeLimit that counts its steps; see NOTE [Past wrappers]."""
        self._seeds: list[int | None] = [None] * len(self.envs)
        self.failed = 0
        """The lane whose env has raised last."""
        self._views: list[memoryview] | None = None
        """The rows that observations are written to as they are, for as long as these fit."""
        self._bound_action: Rows | None = None
        self._bound_out: Rows | None = None

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Reset the envs of `lanes`, with their seeds where new ones were set."""
        if out is not self._bound_out:
            self._bind_out(out)
        lane = -1
        answer: Any = (None, None)
        try:
            for lane in lanes:
                seed, self._seeds[lane] = self._seeds[lane], None
                answer = self.envs[lane].reset(seed=seed)
                self._write(lane, answer[0])
                self._ways[lane] = way_into(self.envs[lane])
        except Exception as error:
            self.failed = lane
            annotate(error, f"Raised in reset() of lane {lane}, {self.envs[lane]}. {_reset_hint(error, answer)}")
            raise

    def step_into(self, action: Rows, out: Rows, lanes: Sequence[int] | None = None) -> bool:
        """Step all envs, or those of `lanes`; their results are copied at once, so envs may reuse their arrays."""
        if action is not self._bound_action:
            self._read = self._actions.lane_reader(action)
            self._bound_action = action
        if out is not self._bound_out:
            self._bind_out(out)
        write, reward, ways = self._write, self._reward, self._ways
        terminated, truncated = self._terminated, self._truncated
        views = self._views
        finished = False
        lane = -1
        act: Any = None
        try:
            acts = self._read(lanes)
            for lane, act in enumerate(acts) if lanes is None else zip(lanes, acts, strict=True):
                inside, limit = ways[lane]
                observation, gain, over, cut, _ = inside.step(act)
                if limit is not None:
                    limit._elapsed_steps += 1
                    if limit._elapsed_steps >= limit._max_episode_steps:
                        cut = True
                if views is not None:
                    try:
                        views[lane][:] = observation  # what `write` would do, without a call for each lane
                    except (BufferError, TypeError, ValueError):  # it has to be converted, as those that follow
                        views = self._views = None
                if views is None:
                    write(lane, observation)
                try:
                    reward[lane] = gain
                except (TypeError, ValueError):  # no number: perhaps an array of one
                    reward[lane] = _number(gain, lane)
                terminated[lane] = over
                truncated[lane] = cut
                if over or cut:
                    finished = True
        except Exception as error:
            self.failed = lane
            annotate(error, f"Raised in step({act!r}) of lane {lane}, {self.envs[lane]}. {_step_hint(error)}")
            raise
        return finished

    def seed(self, seeds: list[int]) -> None:
        """Seed each env at its next reset."""
        self._seeds = list(seeds)

    def close(self) -> None:
        """Close all envs."""
        for env in self.envs:
            env.close()

    def _bind_out(self, out: Rows) -> None:
        self._write = self._observations.lane_writer(out)
        self._views = self._observations.views(out)
        self._reward, self._terminated, self._truncated = (_numbers(out.arrays[key]) for key in HAPPENED)
        self._bound_out = out


class VectorLanes:
    """A `gymnasium.vector.VectorEnv`; see NOTE [Final observations]."""

    def __init__(self, env: VectorEnv[Any, Any, Any], observations: ObservationCodec, actions: ActionCodec) -> None:
        """Take over `env`, whatever its autoreset mode."""
        self.env = env
        self._observations = observations
        self._actions = actions
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        inner = env.unwrapped
        self._is_gymnasiums = isinstance(inner, SyncVectorEnv | AsyncVectorEnv)
        self._resets_again = isinstance(inner, AsyncVectorEnv) and not inner.shared_memory
        """Without shared memory, gymnasium's workers do not notice that a lane was reset before they did it."""
        self.idles = self._mode is AutoresetMode.NEXT_STEP and (self._resets_again or not self._is_gymnasiums)
        self._resets_by_mask = not self.idles and (self._is_gymnasiums or self._mode is AutoresetMode.DISABLED)
        self._seeds: list[int | None] = [None] * env.num_envs
        self._fresh: dict[int, dict[Key, np.ndarray]] = {}
        """SAME_STEP: first observations of new episodes that the caller has not asked for yet."""
        self._pending = np.zeros(env.num_envs, dtype=bool)
        """Where lanes idle: those that the next step will reset."""
        self._bound_action: Rows | None = None
        self._bound_out: Rows | None = None

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Begin new episodes in `lanes`, or hand out those that the env has begun by itself."""
        if out is not self._bound_out:
            self._bind_out(out)
        if len(lanes) == self.env.num_envs and not self._fresh:
            self._reset_all()
            return
        forced = []
        for lane in lanes:
            if (fresh := self._fresh.pop(lane, None)) is not None:
                for key, value in fresh.items():
                    out.arrays[key][lane] = value
            elif not self._pending[lane]:
                forced.append(lane)
        if forced:
            self._reset_by_mask(forced)

    def step_into(self, action: Rows, out: Rows) -> bool:
        """Step all lanes."""
        if action is not self._bound_action:
            self._read = self._actions.batch_reader(action)
            self._bound_action = action
        if out is not self._bound_out:
            self._bind_out(out)
        self._fresh.clear()  # a caller that steps on has gone past those beginnings
        acts = self._read()
        try:
            observation, reward, terminated, truncated, infos = self.env.step(acts)
            self._write_all(observation)
            self._reward[:] = reward
            self._terminated[:] = terminated
            self._truncated[:] = truncated
        except Exception as error:
            annotate(error, f"Raised in step({acts!r}) of the vector env {self.env}. {_step_hint(error)}")
            raise
        finished = np.logical_or(terminated, truncated)
        if self.idles:
            np.logical_not(self._pending, out=out.arrays[MASK])
            self._pending = finished
        elif self._mode is AutoresetMode.SAME_STEP and finished.any():
            self._set_beginnings_aside(np.flatnonzero(finished).tolist(), infos, out)
        return bool(finished.any())

    def seed(self, seeds: list[int]) -> None:
        """Seed each lane at its next reset."""
        self._seeds = list(seeds)
        self._fresh.clear()

    def close(self) -> None:
        """Close the vector env."""
        self.env.close()

    def _set_beginnings_aside(self, lanes: list[int], infos: dict[str, Any], out: Rows) -> None:
        if "final_obs" not in infos:
            raise KeyError(
                f"{self.env} ended the episodes of lanes {lanes} in SAME_STEP autoreset mode, but its infos (with "
                f"{sorted(infos)}) have no 'final_obs', so the final observations are lost. Return them there, or use "
                "another autoreset mode."
            )
        for lane in lanes:
            self._fresh[lane] = {key: out.arrays[key][lane].copy() for key in self._observations.leaves}
            self._write(lane, lane_of(infos["final_obs"], lane))

    def _reset_all(self) -> None:
        seeds: Any = self._seeds if self._is_gymnasiums else self._seeds[0]  # others are only bound to take one seed
        self._seeds = [None] * self.env.num_envs
        if not self._resets_again:
            self._pending[:] = False
        self._write_all(self.env.reset(seed=seeds)[0])

    def _reset_by_mask(self, lanes: list[int]) -> None:
        if not self._resets_by_mask:
            raise UnsupportedEnvError(
                f"{self.env} resets lanes only by itself, so the episodes of lanes {lanes} cannot be ended early. "
                "Leave out max_frames_per_traj and partial resets, or use GymEnv(name, num_envs=...) or a "
                "gymnasium.vector.SyncVectorEnv instead."
            )
        mask = np.zeros(self.env.num_envs, dtype=bool)
        mask[lanes] = True
        seeds: Any = None
        if self._is_gymnasiums:
            seeds = [seed if chosen else None for seed, chosen in zip(self._seeds, mask, strict=True)]
            self._seeds = [None if chosen else seed for seed, chosen in zip(self._seeds, mask, strict=True)]
        observation, _ = self.env.reset(seed=seeds, options={"reset_mask": mask})
        for lane in lanes:
            self._write(lane, lane_of(observation, lane))

    def _bind_out(self, out: Rows) -> None:
        self._write_all = self._observations.batch_writer(out)
        self._write = self._observations.lane_writer(out)
        self._reward, self._terminated, self._truncated = (out.arrays[key].reshape(-1) for key in HAPPENED)
        self._bound_out = out


def lane_of(values: Any, lane: int) -> Any:
    """One lane's value from a nested value of all lanes."""
    if isinstance(values, dict):
        return {name: lane_of(value, lane) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(lane_of(value, lane) for value in values)
    return values[lane]


def _step_hint(error: Exception) -> str:
    """What to do about an error of `step`."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    unpacks = last is not None and last.tb_frame.f_globals["__name__"].partition(".")[0] in ("swath", "gymnasium")
    return STEP_FORM if unpacks and "unpack (expected 5" in str(error) else HINT


def _reset_hint(error: Exception, answer: Any) -> str:
    """What to do about an error of `reset`, which has given `answer`."""
    if isinstance(error, TypeError) and "'seed'" in str(error):
        return RESET_CURE
    return HINT if isinstance(answer, tuple) and len(answer) == 2 else RESET_FORM


def _numbers(array: np.ndarray) -> Any:
    """`array`, to be written one by one: a memoryview does that in half the time, where it knows the dtype."""
    flat = array.reshape(-1)
    return memoryview(flat) if flat.dtype.char in "?fd" else flat  # type: ignore[arg-type]


def _number(reward: Any, lane: int) -> Any:
    """The one number in `reward`."""
    values = np.asarray(reward)
    if values.dtype.kind not in "fiub":
        raise TypeError(f"The env of lane {lane} gave the reward {reward!r}, which is no number.")
    if values.size != 1:
        raise wrong_shape(REWARD, (), values.shape, f"The env of lane {lane}")
    return values.reshape(())
