"""Lanes: what every lane is in the middle of, between one step and the next."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch

from swath.envs.base import FLAG, EnvBase
from swath.envs.rows import Index, Leaf, Rows, rows_of
from swath.errors import UnsupportedEnvError
from swath.keys import FLAGS, IS_INIT, MASK, STEP_COUNT, TERMINATED, TRUNCATED, Key
from swath.rollout.stats import EpisodeMeter
from swath.rollout.trajectory_ids import TrajectoryIds


class Lanes:
    """Observations, ages, recurrent state, ids and running returns of all lanes.

    `present` is what the policy sees and `out` what the env writes. Both hold the observations, in the same memory:
    once the env has stepped, the present is what it wrote.
    """

    def __init__(self, env: EnvBase, *, limit: int | None = None, worker: int = 0) -> None:
        """Begin the first episodes. `limit` is the length at which an episode is cut off."""
        self.env = env
        self.count = env.num_lanes
        self.limit = limit
        self.out = env.new_out_rows()
        self.out.restarts = True
        if limit is not None and MASK in self.out.tensors:
            raise UnsupportedEnvError(
                f"max_frames_per_traj={limit} cannot be kept to: {env!r} resets its lanes only by itself, so that no "
                "episode can be ended early. Use GymEnv(name, num_envs=...) or a gymnasium.vector.SyncVectorEnv."
            )
        self.present = Rows({}, env.batch_size)
        for key in env.observation_keys:
            self.present.add(key, self.out.tensors[key])
        for key, tensor in Rows(dict.fromkeys(FLAGS, FLAG), env.batch_size, env.rows_device).tensors.items():
            self.present.add(key, tensor)
        if limit is not None:
            ages = Rows({STEP_COUNT: Leaf((1,), torch.int64)}, env.batch_size)
            self.present.add(STEP_COUNT, ages.tensors[STEP_COUNT])
            self._ages = ages.arrays[STEP_COUNT].reshape(-1)
        arrays = self.out.arrays
        self._flags = (arrays[TERMINATED][:, 0], arrays[TRUNCATED][:, 0]) if TERMINATED in arrays else None
        """The flags of all lanes where they can be read quickly: on the CPU."""
        self.ids = TrajectoryIds(self.count, worker)
        self.meter = EpisodeMeter(self.count)
        self.has_memory = False
        """Whether anything is carried from step to step beside what the env writes."""
        self.have_begun = False
        """Whether some episode has begun that no complete slot has the first observation of."""
        self._spare = 0
        """In so many steps, and perhaps in more, no episode reaches the limit: a step need not look at all of them."""
        self._carried: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_init: torch.Tensor | None = None
        """What the policy reads to know where episodes begin."""
        self._begin(range(self.count))

    def attach(self, state: list[tuple[Key, Key]], outputs: Rows) -> None:
        """Carry the policy's recurrent `state`: pairs of what it reads from the present and writes to `outputs`."""
        self._carried = [(self.present.tensors[read], outputs.tensors[written]) for read, written in state]
        if IS_INIT not in self.env.observation_keys:  # else the env says that itself
            self._is_init = self.present.tensors.get(IS_INIT)
        self.has_memory = bool(state) or self._is_init is not None or MASK in self.out.tensors
        self._set_init(range(self.count))

    def cut(self) -> bool:
        """Grow older by one step, and truncate the episodes that reach the limit. Return whether there are any."""
        if self._spare > 0:
            self._spare -= 1  # first: an interrupt may come between
            self._ages += 1
            return False
        over = self.at_limit
        assert over is not None
        assert self.limit is not None
        self._ages += 1
        self._spare = self.limit - 1 - int(self._ages.max())
        if not over.any():
            return False
        truncated = self.out.tensors[TRUNCATED]
        truncated |= torch.from_numpy(over).view(truncated.shape).to(truncated.device)
        return True

    @property
    def at_limit(self) -> np.ndarray | None:
        """Which lanes reach the limit with their next step; None if there is none."""
        return None if self.limit is None else self._ages + 1 >= self.limit

    def pass_by(self, rows: Index) -> None:
        """Some lanes have stepped: grow older, and truncate what reaches the limit. See `cut`."""
        if (over := self.at_limit) is not None:
            self._ages[rows] += 1
            self._spare = 0
            self.out.arrays[TRUNCATED][rows, 0] |= over[rows]

    def go_on(self, finished: bool) -> float:
        """Carry on what goes from step to step, and begin a new episode where one has ended.

        Returns the seconds that the env took for its resets.
        """
        for read, written in self._carried:
            read.copy_(written)
        if self._is_init is not None:
            self._is_init.fill_(False)
        begun = perf_counter()
        if finished:
            self._begin(self._ended())
        took = perf_counter() - begun
        if MASK in self.out.arrays:
            self._wake()
        return took

    def go_on_with(self, lanes: np.ndarray) -> None:
        """The same for some lanes, which have stepped."""
        rows = rows_of(lanes)
        for read, written in self._carried:
            read.view(self.count, -1)[rows] = written.view(self.count, -1)[rows]
        if self._is_init is not None:
            self._is_init.view(self.count, -1)[rows] = False
        assert self._flags is not None
        over = self._flags[0][rows] | self._flags[1][rows]
        if over.any():
            self._begin(lanes[over].tolist())

    def _ended(self) -> list[int]:
        if self._flags is None:
            ended = (self.out.tensors[TERMINATED] | self.out.tensors[TRUNCATED]).reshape(-1).cpu().numpy()
        else:
            ended = np.logical_or(*self._flags)
        lanes: list[int] = ended.nonzero()[0].tolist()
        return lanes

    def _wake(self) -> None:
        """A lane that was idle has only now begun its episode: what the policy did meanwhile does not count."""
        idle = np.flatnonzero(~self.out.arrays[MASK]).tolist()
        if idle:
            self._set_init(idle)

    def restart(self, lanes: Sequence[int]) -> None:
        """Cut off the episodes of `lanes` and begin new ones, with new ids."""
        self.env.stepped_by = None  # if this is interrupted, all begin anew: nobody knows which have
        self.env.reset_into(lanes, self.out)
        self.have_restarted(lanes, lanes)

    def have_restarted(self, lanes: Sequence[int], forgotten: Sequence[int]) -> None:
        """The env has begun new episodes in `lanes`. Of the old ones in `forgotten`, nothing is left to be counted."""
        self.ids.renew(forgotten)
        self.meter.forget(list(forgotten))
        self._have_begun(lanes)

    def _begin(self, lanes: Sequence[int]) -> None:
        self.env.reset_into(lanes, self.out)
        self._have_begun(lanes)

    def _have_begun(self, lanes: Sequence[int]) -> None:
        if self.limit is not None:
            self._ages[list(lanes)] = 0
        self._set_init(lanes)
        self.have_begun = True
        self.env.stepped_by = self  # last, see `restart`

    def _set_init(self, lanes: Sequence[int]) -> None:
        """Zero the recurrent state of `lanes` and mark them as beginning."""
        index = list(lanes)
        for read, _ in self._carried:
            read.view(self.count, -1)[index] = 0
        if self._is_init is not None:
            self._is_init.view(self.count, -1)[index] = True
