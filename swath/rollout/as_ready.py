"""The rollout loop for envs at their own pace: the policy acts for whatever is ready, while the others step.

NOTE [As ready]: a frame is begun when the policy acts, and complete when its env has stepped. What the policy saw and
did is kept by lane until then; complete frames go to the slot one after the other. A slot is full when it has as many
as it has places, whichever lanes have made them, and is put into the order of lanes then, so that the frames of each
lane, and so of each episode, lie behind each other in the order of time. Envs that are still stepping go on doing so
while the batch is used: their frames will be in the next. Envs that are ready then wait for it, so that they act with
the newest weights.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

import numpy as np
import torch

from swath.envs import OwnPaceEnv
from swath.envs.rows import Leaf, Rows, rows_of
from swath.errors import UnsupportedEnvError
from swath.keys import ENV_INDEX, POLICY_VERSION, Key, after
from swath.modules.stages import Filled
from swath.rollout.loop import LoopSettings, Receipt, RolloutLoop
from swath.rollout.slots import Slot

DRAWN_STEPS = 64
"""For how many steps of every lane the policy draws its noise at a time."""
RECENT_CALLS = 1024


class AsReadyLoop(RolloutLoop):
    """Fills slots `[1, frames]`, or `[N, T]` if each env shall make the same number of steps; see NOTE [As ready]."""

    env: OwnPaceEnv

    def __init__(self, env: OwnPaceEnv, policy: Any, settings: LoopSettings) -> None:
        """See `RolloutLoop`."""
        if settings.stack_envs and env.at_a_time > 1:
            raise UnsupportedEnvError(
                f"stack_envs=True waits for the last env alone, but {env!r} answers for {env.at_a_time} at a time. "
                "Leave it out, or make the EnvPool with batch_size=1."
            )
        super().__init__(env, policy, settings)
        self.policy.is_undisturbed = False  # there may be a new plan in the middle of a slot
        if not settings.stack_envs:
            self.batch_size, self.unit = (), env.lanes_per_env
        before = {key: leaf for key, leaf in self.leaves.items() if key in self._before}
        self._begun = Rows(before, env.batch_size)
        """What was seen and done in each lane's last action."""
        self._begun_here = np.zeros(env.num_lanes, bool)
        """Whether that was in this slot: then what the policy leaves for the end is still to be filled in."""
        self._times = np.zeros(env.num_lanes, np.int64)
        """How much of what was drawn each lane has used."""
        self._calls: deque[tuple[int, float]] = deque(maxlen=RECENT_CALLS)
        """For how many lanes the policy has acted, and how long that took."""
        self._batches = self._requests = 0

    def _leaves(self) -> dict[Key, Leaf]:
        leaves = super()._leaves()
        leaves[ENV_INDEX] = Leaf((), torch.int64)
        self.delivered.append(ENV_INDEX)
        self._before: list[Key] = [*self._seen, *self.policy.outputs.tensors]
        self._stamps = self.settings.track_version and POLICY_VERSION not in self._before
        if self._stamps:
            self._before.append(POLICY_VERSION)
        return leaves

    def _collect(self, slot: Slot, random: bool) -> Receipt:
        """Fill `slot` with complete frames; with `random` actions if so asked."""
        began = perf_counter()
        env, lanes, interruptor = self.env, self.lanes, self.settings.interruptor
        self._is_random, self.was_stopped, self._acting = random, False, self.version
        in_env, self._in_policy, filled = 0.0, 0.0, 0
        frames, flat = slot.lanes * slot.steps, _flat(slot)
        most = slot.steps if self.settings.stack_envs else frames
        made = [0] * env.num_envs
        """How many steps of each env the slot has."""
        lane_of, is_new = np.empty(frames, np.int64), np.empty(frames, bool)
        pairs = [(flat[key], self._begun.arrays[key]) for key in self._before]
        pairs += [(flat[after(key)], lanes.out.arrays[key]) for key in self._told]
        with self.randomness.applied(), self._conditions:
            running = lanes.ids.current.copy()
            self._draw()
            self._begun_here[:] = False
            self._breaks: list[tuple[int, int]] = []
            """Last frames of lanes, counted in the slot, after which they have begun anew."""
            ready = env.idle_envs
            while filled < frames:
                if ready:
                    self._act(ready)
                asked_at = perf_counter()
                stepped, restarted = self._take_ready((frames - filled) // env.lanes_per_env)
                in_env += perf_counter() - asked_at
                if restarted:
                    self._begin_anew(env.lanes_of(restarted), np.repeat(made, env.lanes_per_env))
                if stepped:
                    those = env.lanes_of(stepped)
                    rows, end = rows_of(those), filled + len(those)
                    lanes.pass_by(rows)
                    for column, row in pairs:
                        column[filled:end] = row[rows]
                    lane_of[filled:end], is_new[filled:end] = those, self._begun_here[rows]
                    filled = end
                    for one in stepped:
                        made[one] += 1
                    lanes.go_on_with(those)
                ready = [one for one in stepped + restarted if made[one] < most]
                if interruptor is not None and not self.was_stopped and interruptor.collection_stopped():
                    self.was_stopped = True
                    if not self.settings.stack_envs:
                        break
                    most = max(made)  # the others make up for it
                    frames = most * lanes.count
            steps = self._put_in_order(slot, lane_of[:filled], is_new[:filled])
            steps, frames, version, begin, _, total = self._complete(slot, steps)
            receipt = Receipt(steps, frames, version, begin, running, total)
            self._finish_begun()
        self.stats.timings.add(in_env, self._in_policy, perf_counter() - began)
        return receipt

    def _begin_anew(self, lanes: np.ndarray, made: np.ndarray) -> None:
        """Lanes have lost what they were doing: what they have in this slot, `made` of each, is not continued."""
        self._breaks += [(lane, made[lane] - 1) for lane in lanes.tolist() if made[lane]]
        self.lanes.have_restarted(lanes.tolist(), [lane for lane in lanes.tolist() if not made[lane]])

    def _take_ready(self, places: int) -> tuple[list[int], list[int]]:
        settings = self.settings
        most = min(places, settings.max_ready or places)
        return self.env.take_ready(min(settings.min_ready, most), most, settings.ready_timeout_s)

    def _draw(self) -> None:
        """Let the policy make ready for steps of every lane."""
        kind = self.settings.exploration
        self._recorded = self.policy.begin(DRAWN_STEPS, self.randomness.generator, self._is_random, kind)
        self._times[:] = 0

    def _act(self, envs: list[int]) -> None:
        """Act for `envs`, keep what was seen and done, and let them step."""
        acted_at = perf_counter()
        lanes, begun, outputs = self.env.lanes_of(envs), self._begun.arrays, self.policy.outputs
        rows, present = rows_of(lanes), self.lanes.present.arrays
        for key in self._seen:
            begun[key][rows] = present[key][rows]
        if self._times[rows].max() >= DRAWN_STEPS:
            self._draw()
        self.policy.act_on(lanes, self._times[rows].copy())
        self._times[rows] += 1
        for key in self._recorded:
            begun[key][rows] = outputs.arrays[key][rows]
        if self._stamps:
            begun[POLICY_VERSION][rows] = self._acting
        self._begun_here[rows] = True
        took = perf_counter() - acted_at
        self._in_policy += took
        self._calls.append((len(lanes), took))
        self._batches += 1
        self._requests += len(lanes)
        self.env.begin_steps(envs, outputs, self.lanes.at_limit)

    def _finish_begun(self) -> None:
        """Fill in what the policy leaves for the end, for frames that another slot will have."""
        columns = {
            key: array.reshape(1, self.lanes.count, *self._begun.leaf(key).shape)
            for key, array in self._begun.arrays.items()
        }
        self.policy.finish(columns, self._begun_here[None])

    def pace(self, reset: bool = False) -> dict[str, float]:
        """For how many lanes the policy has acted at a time, and how long that took; means over the last calls."""
        calls = list(self._calls)
        sizes, times = np.array(calls).reshape(-1, 2).T
        found: dict[str, float] = {"requests": self._requests, "batches": self._batches}
        if calls:
            most = min(self.settings.max_ready or self.lanes.count, self.lanes.count)
            p50, p95 = (1e3 * np.percentile(times, (50, 95))).tolist()
            found |= {"avg_batch_size": float(sizes.mean()), "batch_fill": float(sizes.mean() / most)}
            found |= {"p50_forward_ms": p50, "p95_forward_ms": p95}
        if reset:
            self._calls.clear()
            self._batches = self._requests = 0
        return found

    # -- the layout of a slot ----------------------------------------------------------------------------------

    def _put_in_order(self, slot: Slot, lane_of: np.ndarray, is_new: np.ndarray) -> int:
        """Sort the frames, which lie in the order in which they were completed, by lane; how many steps there are."""
        order, flat = np.argsort(lane_of, kind="stable"), _flat(slot)
        counts = np.bincount(lane_of, minlength=self.lanes.count)
        self._rows, steps = slot.lanes, len(order) // slot.lanes
        for key in (*self._before, *map(after, self._told)):
            column = slot.columns[key]
            column[:, :steps] = flat[key][order].reshape(slot.lanes, steps, *column.shape[2:])
        slot.columns[ENV_INDEX][:, :steps] = (lane_of[order] // self.env.lanes_per_env).reshape(slot.lanes, steps)
        self._new = np.zeros((slot.lanes, slot.steps), bool)
        self._new[:, :steps] = is_new[order].reshape(slot.lanes, steps)
        self._places = np.arange(max(1, counts.max())) < counts[:, None]  # [N, T]
        self._ends = np.cumsum(counts)[counts > 0] - 1
        return steps

    def _acted(self, steps: int) -> Filled:
        return self._new

    def _by_lane(self, values: np.ndarray) -> np.ndarray:
        laid_out = np.zeros(self._places.shape, values.dtype)
        laid_out[self._places] = values.reshape(-1)
        return laid_out

    def _in_slot(self, values: np.ndarray) -> np.ndarray:
        return values[self._places].reshape(self._rows, -1)

    def _real(self, slot: Slot, steps: int) -> np.ndarray | None:
        return self._places

    def _broken(self) -> np.ndarray | None:
        if not self._breaks:
            return None
        broken = np.zeros(self._places.shape, bool)
        broken[tuple(np.array(self._breaks).T)] = True
        return broken

    def _last(self, steps: int) -> tuple[Any, Any]:
        return super()._last(steps) if self.settings.stack_envs else (0, self._ends)

    def _stamp(self, slot: Slot) -> None:
        tensors = slot.tensors
        tensors[after(POLICY_VERSION)].copy_(tensors[POLICY_VERSION])


def _flat(slot: Slot) -> dict[Key, Any]:
    """The columns of a slot, frame after frame."""
    frames = slot.lanes * slot.steps
    return {key: column.reshape(frames, *column.shape[2:]) for key, column in slot.columns.items()}
