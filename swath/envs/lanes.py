"""Stepping gymnasium envs through rows: separate envs one after the other, or one vector env.

NOTE [Final observations]: an episode's last transition must hold the observation in which it ended. Separate envs are
reset by the caller, after the step was recorded. A vector env resets by itself, in one of three ways:

- DISABLED: it does not; single lanes are reset with `reset_mask`.
- SAME_STEP: the step already returns the new episode's observation. The final one is taken from the infos, the new one
  is kept aside until the caller asks for the reset.
- NEXT_STEP: the next step resets the lane and ignores its action. Gymnasium's own Sync- and AsyncVectorEnv can be reset
  by mask before that happens. For others that step has no transition in this lane: it is marked idle in the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from swath.envs.rows import Rows
from swath.envs.spaces import ActionCodec, ObservationCodec
from swath.errors import UnsupportedEnvError, annotate
from swath.keys import MASK, REWARD, TERMINATED, TRUNCATED


class GymLanes:
    """Gymnasium envs, stepped one after the other."""

    idles = False

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        observations: ObservationCodec,
        actions: ActionCodec,
    ) -> None:
        """Take over `envs`, whose values are translated by the codecs."""
        self.envs = list(envs)
        self._observations = observations
        self._actions = actions
        self._steps = [env.step for env in self.envs]
        self._seeds: list[int | None] = [None] * len(self.envs)
        self._bound_action: Rows | None = None
        self._bound_out: Rows | None = None

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Reset the envs of `lanes`, with their seeds where new ones were set."""
        if out is not self._bound_out:
            self._bind_out(out)
        lane = -1
        try:
            for lane in lanes:
                seed, self._seeds[lane] = self._seeds[lane], None
                self._write(lane, self.envs[lane].reset(seed=seed)[0])
        except Exception as error:
            annotate(error, f"Raised in reset() of lane {lane}, {self.envs[lane]}.")
            raise

    def step_into(self, action: Rows, out: Rows) -> bool:
        """Step all envs; their results are copied at once, so envs may reuse their arrays."""
        if action is not self._bound_action:
            self._read = self._actions.lane_reader(action)
            self._bound_action = action
        if out is not self._bound_out:
            self._bind_out(out)
        write, reward, terminated, truncated = (
            self._write,
            self._reward,
            self._terminated,
            self._truncated,
        )
        finished = False
        lane = -1
        act: Any = None
        try:
            for lane, act in enumerate(self._read()):
                observation, gain, over, cut, _ = self._steps[lane](act)
                write(lane, observation)
                reward[lane] = gain
                terminated[lane] = over
                truncated[lane] = cut
                if over or cut:
                    finished = True
        except Exception as error:
            annotate(error, f"Raised in step({act!r}) of lane {lane}, {self.envs[lane]}.")
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
        self._reward = out.arrays[REWARD].reshape(-1)
        self._terminated = out.arrays[TERMINATED].reshape(-1)
        self._truncated = out.arrays[TRUNCATED].reshape(-1)
        self._bound_out = out


class VectorLanes:
    """A `gymnasium.vector.VectorEnv`; see NOTE [Final observations]."""

    def __init__(self, env: VectorEnv[Any, Any, Any], observations: ObservationCodec, actions: ActionCodec) -> None:
        """Take over `env`, whatever its autoreset mode."""
        self.env = env
        self._observations = observations
        self._actions = actions
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._mode = AutoresetMode(mode)
        self._resets_by_mask = self._mode is AutoresetMode.DISABLED or isinstance(
            env.unwrapped, SyncVectorEnv | AsyncVectorEnv
        )
        self.idles = self._mode is AutoresetMode.NEXT_STEP and not self._resets_by_mask
        self._seeds: list[int] | None = None
        self._fresh: dict[int, dict[Any, np.ndarray]] = {}
        """SAME_STEP: first observations of new episodes that the caller has not asked for yet."""
        self._pending = np.zeros(env.num_envs, dtype=bool)
        """NEXT_STEP without masks: lanes that the next step will reset."""
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
        observation, reward, terminated, truncated, infos = self.env.step(self._read())
        self._write_all(observation)
        self._reward[:] = reward
        self._terminated[:] = terminated
        self._truncated[:] = truncated
        finished = np.logical_or(terminated, truncated)
        if self.idles:
            np.logical_not(self._pending, out=out.arrays[MASK])
            self._pending = finished.copy()
        elif self._mode is AutoresetMode.SAME_STEP and finished.any():
            final = infos["final_obs"]
            for lane in np.flatnonzero(finished).tolist():
                self._fresh[lane] = {k: out.arrays[k][lane].copy() for k in self._observations.leaves}
                self._write(lane, _lane(final, lane))
        return bool(finished.any())

    def seed(self, seeds: list[int]) -> None:
        """Seed each lane at the next full reset."""
        self._seeds = list(seeds)
        self._fresh.clear()

    def close(self) -> None:
        """Close the vector env."""
        self.env.close()

    def _reset_all(self) -> None:
        seeds, self._seeds = self._seeds, None
        self._fresh.clear()
        self._pending[:] = False
        seed: Any = seeds
        if seeds is not None and not isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
            seed = seeds[0]  # custom vector envs are only bound to take one
        self._write_all(self.env.reset(seed=seed)[0])

    def _reset_by_mask(self, lanes: list[int]) -> None:
        if not self._resets_by_mask:
            raise UnsupportedEnvError(
                f"{self.env} resets lanes only by itself, so the episodes of lanes {lanes} cannot be ended early. "
                "Leave out max_frames_per_traj and partial resets, or use GymEnv(name, num_envs=...) or a "
                "gymnasium.vector.SyncVectorEnv instead."
            )
        mask = np.zeros(self.env.num_envs, dtype=bool)
        mask[lanes] = True
        observation, _ = self.env.reset(options={"reset_mask": mask})
        for lane in lanes:
            self._write(lane, _lane(observation, lane))

    def _bind_out(self, out: Rows) -> None:
        self._write_all = self._observations.batch_writer(out)
        self._write = self._observations.lane_writer(out)
        self._reward = out.arrays[REWARD].reshape(-1)
        self._terminated = out.arrays[TERMINATED].reshape(-1)
        self._truncated = out.arrays[TRUNCATED].reshape(-1)
        self._bound_out = out


def _lane(values: Any, lane: int) -> Any:
    """One lane's value from a nested value of all lanes."""
    if isinstance(values, dict):
        return {name: _lane(value, lane) for name, value in values.items() if not name.startswith("_")}
    if isinstance(values, tuple):
        return tuple(_lane(value, lane) for value in values)
    return values[lane]
