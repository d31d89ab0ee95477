"""The rollout loop: every collector calls it, wherever it runs.

All lanes step together here; `swath.rollout.as_ready` has the same loop for envs that step at their own pace.

NOTE [Giving way]: a thread of Python that computes without a pause lets others wait for 5 ms each time that they need
the interpreter, which a trainer does with each call of torch. So a loop in the background rests for a moment once in a
while, long enough for another thread to wake up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict.nn import InteractionType

from swath.envs.base import FLAG, EnvBase
from swath.envs.rows import Leaf, Rows
from swath.keys import (
    DONE,
    FLAGS,
    IS_INIT,
    MASK,
    PADDING_ID,
    POLICY_VERSION,
    REWARD,
    STEP_COUNT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    after,
    is_private,
)
from swath.modules.policy import PolicyRunner
from swath.modules.stages import Filled, StageName
from swath.rollout.conditions import Conditions
from swath.rollout.lanes import Lanes
from swath.rollout.nan_watch import Looks, NanWatch
from swath.rollout.randomness import Randomness
from swath.rollout.record import Copy, Layout, copies_of, joined
from swath.rollout.slots import Slot
from swath.rollout.stats import RolloutStats

EVERY = slice(None)
WHILE_S, MOMENT_S = 1e-3, 1e-5
"""For how long a thread in the background steps, and how long it lets others go first then; see NOTE [Giving way]."""
NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, NEXT_REWARD = map(after, (DONE, TERMINATED, TRUNCATED, REWARD))


class Interruptor(Protocol):
    """Something that can end a rollout before its slot is full."""

    def collection_stopped(self) -> bool:
        """Whether to stop after the current step."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What a loop needs to know beside its env and policy."""

    max_frames_per_traj: int | None = None
    exploration: InteractionType | None = InteractionType.RANDOM
    track_traj_ids: bool = True
    track_version: bool = False
    compact_obs: bool = False
    set_truncated: bool = False
    worker: int = 0
    policy_device: torch.device | None = None
    interruptor: Interruptor | None = None
    fast_policy: bool = True
    opaque_policy: bool = False
    compile_policy: bool | Mapping[str, Any] | None = None
    min_ready: int = 1
    """Envs at their own pace: for how many to wait before the policy acts,"""
    max_ready: int | None = None
    """for how many it acts at most,"""
    ready_timeout_s: float = 0.0
    """and how long to wait after the first is ready;"""
    stack_envs: bool = False
    """whether each makes the same number of steps, however fast it is."""


class Receipt(NamedTuple):
    """What a slot holds."""

    steps: int
    frames: int
    version: int
    begin: int
    """How many steps were made before: a slot that does not begin where another ended does not continue it."""
    running: np.ndarray | None = None
    """The ids of the trajectories that ran when it began, where they need not all have frames in it."""
    total: int | None = None
    """How many frames were ever collected, with these, where that is known."""

    @staticmethod
    def over(receipts: Sequence[Receipt]) -> Receipt:
        """Of slots that continue each other."""
        steps, frames = sum(one.steps for one in receipts), sum(one.frames for one in receipts)
        return Receipt(steps, frames, receipts[-1].version, receipts[0].begin, total=receipts[-1].total)


class Bound(NamedTuple):
    """What a loop remembers of a slot that it fills."""

    loop: RolloutLoop
    acted: list[Key]
    before: list[Copy]
    """What is copied in a step before the policy acts,"""
    behind: list[Copy]
    """behind,"""
    layouts: list[Layout]
    """and what is laid out when the slot is complete."""
    clears: list[Callable[[], Any]]
    looks: tuple[Looks, Looks]
    """What finds NaN; and the same where an episode may have begun."""
    ids: np.ndarray | None
    """Of trajectories and, below, what they were rewarded: by time and row, and by row and time."""
    rewards: np.ndarray | None


class RolloutLoop:
    """Fills slots with steps of all lanes, resuming exactly where the last slot ended."""

    def __init__(self, env: EnvBase, policy: Any, settings: LoopSettings) -> None:
        """Reset the env and find out what `policy` (see `as_policy`) reads and writes, and so the layout of a slot."""
        self.env = env
        self.settings = settings
        self.batch_size: tuple[int, ...] = tuple(env.batch_size)
        """Of the batches, without time."""
        self.unit = env.num_lanes
        """The smallest number of frames that can be collected at a time."""
        self.version = 0
        """The version of the weights that the policy acts with."""
        self._acting = 0
        """The version that the present slot is made with: another thread may count one up meanwhile."""
        self.steps = 0
        """How many steps were ever made."""
        self.stats = RolloutStats()
        self.was_stopped = False
        """Whether the interruptor has ended the last slot."""
        self.randomness = Randomness(settings.policy_device)
        self._conditions = Conditions(settings.exploration)
        self.lanes = Lanes(env, limit=settings.max_frames_per_traj, worker=settings.worker)
        with self._conditions.exploring:
            self.policy = PolicyRunner(
                policy,
                env,
                self.lanes.present,
                device=settings.policy_device,
                fast=settings.fast_policy,
                opaque=settings.opaque_policy,
                compiled=settings.compile_policy,
            )
        self.policy.is_undisturbed = not env.runs_torch
        self.lanes.attach(self.policy.state, self.policy.outputs)
        self.leaves = self._leaves()
        """Shape and dtype of every column, in the order in which they are delivered."""
        self._nan_watch = NanWatch(env, self.leaves, self._told, self._seen)
        self._gives_way, self._gave_way_at = False, 0.0
        self._may_be_cut_off = settings.set_truncated or self._idles
        """Whether a batch has to be looked through also where no episode has ended,"""
        self._derived: list[Callable[[Slot], None]] = []
        """and what is written in any case."""
        if self.lanes.limit is not None:
            self._derived.append(self._count_steps)
        if settings.track_version:
            self._derived.append(self._stamp)

    def move_to_background(self) -> None:
        """Leave alone what belongs to the whole process, and give way to its other threads; see NOTE [Giving way]."""
        self._gives_way = True
        self._conditions.move_to_background()
        self.randomness.stand_alone()

    def collect(self, slot: Slot, *, random: bool = False) -> Receipt:
        """Fill `slot` with consecutive steps of every lane; with `random` actions if so asked."""
        try:
            return self._collect(slot, random)
        finally:
            for context in self.policy.contexts:  # which an interrupt may have come before
                context.__exit__()
            self._conditions.__exit__()

    def _collect(self, slot: Slot, random: bool) -> Receipt:
        begun, policy, kind = perf_counter(), self.policy, self.settings.exploration
        self._acting, self.was_stopped = self.version, False
        # Where nobody looks at the way to explore or draws from torch's own generator, neither is set: it takes longer
        # than to switch gradients off, which parts of an env may rely on. An interruptor may be a user's own code.
        if self.settings.interruptor is None and policy.goes_on(random, kind):
            had_grad = torch.is_grad_enabled()
            try:
                torch._C._set_grad_enabled(False)
                return self._fill(slot, policy.start(slot.steps, self.randomness.generator), begun)
            finally:
                torch._C._set_grad_enabled(had_grad)
        with self.randomness.applied(), self._conditions:
            acted = policy.begin(slot.steps, self.randomness.generator, random, kind)
            if policy.around_slot is not None:
                self._conditions.enter(policy.around_slot)
            return self._fill(slot, acted, begun)

    def _fill(self, slot: Slot, acted: list[Key], begun: float) -> Receipt:
        """Make the steps; `acted` is recorded of what the policy writes, and the clock said `begun` at first."""
        policy, env, lanes = self.policy, self.env, self.lanes
        interruptor = self.settings.interruptor
        steps, in_policy, in_env, has_ended = 0, 0.0, 0.0, False
        has_begun, lanes.have_begun = lanes.have_begun, True  # also if this comes to nothing
        bound = self._bound(slot, acted)
        before, behind = bound.before, bound.behind
        for t in range(slot.steps):
            for target, row in before:  # what the policy sees
                target[t] = row
            seen_at = perf_counter()
            policy.act(t)
            acted_at = perf_counter()
            finished = env.step_into(policy.outputs, lanes.out)
            stepped_at = perf_counter()
            if lanes.limit is not None:
                finished = lanes.cut() or finished
            for target, row in behind:  # what it did, and what really happened
                target[t] = row
            in_policy += acted_at - seen_at
            in_env += stepped_at - acted_at
            if finished or lanes.has_memory:  # carry on what is carried, begin anew what has ended
                in_env += lanes.go_on(finished)
                has_ended = has_ended or finished
            steps = t + 1
            if self._gives_way and stepped_at - self._gave_way_at > WHILE_S:
                sleep(MOMENT_S)
                self._gave_way_at = perf_counter()
            if interruptor is not None and interruptor.collection_stopped():
                self.was_stopped = True
                break
        for layout in bound.layouts:
            layout.finish(steps)
        receipt = self._complete(slot, steps, has_ended, has_begun or has_ended)
        self.stats.timings.add(in_env, in_policy, perf_counter() - begun)
        return receipt

    @property
    def policy_stages(self) -> list[StageName]:
        """How the policy ran in the last slot; before the first, how it will run."""
        with torch.no_grad(), nullcontext() if self.policy.has_acted else self._conditions.exploring:
            return self.policy.stages

    # -- the layout --------------------------------------------------------------------------------------------

    def _leaves(self) -> dict[Key, Leaf]:
        lanes, outputs, settings = self.lanes, self.policy.outputs, self.settings
        observations = self.env.observation_keys
        reads = [read for read, written in self.policy.state if written != read]
        extras = [key for key in (STEP_COUNT, IS_INIT) if key in lanes.present.tensors]
        self._seen: list[Key] = [key for key in (*observations, *extras, *reads) if key not in outputs.tensors]
        self._told: list[Key] = [*(() if settings.compact_obs else observations), REWARD, TERMINATED, TRUNCATED]
        self._idles = MASK in lanes.out.tensors
        leaves = {key: lanes.present.leaf(key) for key in self._seen}
        leaves.update({key: outputs.leaf(key) for key in outputs.tensors})
        leaves.update(dict.fromkeys(FLAGS, FLAG))
        leaves.update({after(key): lanes.out.leaf(key) for key in self._told})
        leaves[after(DONE)] = FLAG
        if lanes.limit is not None:
            leaves[after(STEP_COUNT)] = leaves[STEP_COUNT]
        if settings.track_version:
            leaves[after(POLICY_VERSION)] = leaves.setdefault(POLICY_VERSION, Leaf((), torch.int64))
        if settings.track_traj_ids:
            leaves[TRAJ_IDS] = Leaf((), torch.int64)
        if self._idles:
            leaves[MASK] = Leaf((), torch.bool)
        hidden = set(outputs.tensors) - set(self.policy.delivered)
        self.delivered = [key for key in leaves if key not in hidden and not is_private(key)]
        """The keys of a batch; what the policy keeps to itself and names that begin with "_" are left out."""
        return leaves

    def _bound(self, slot: Slot, acted: list[Key]) -> Bound:
        """How `slot` is filled, where `acted` is to be recorded of what the policy writes; remembered with the slot."""
        bound = slot.bound
        if bound is None or bound.loop is not self or bound.acted is not acted:
            present, outputs, out = self.lanes.present, self.policy.outputs, self.lanes.out
            pieces = [out.piece, outputs.piece]
            seen = [self._pair(slot, key, present, key) for key in self._seen]
            done = [self._pair(slot, key, outputs, key) for key in acted]
            told = [self._pair(slot, after(key), out, key) for key in self._told]
            told += [self._pair(slot, MASK, out, MASK)] if self._idles else []
            before, first = copies_of(seen, slot.steps, pieces, slot.memory.piece)
            behind, second = copies_of([*done, *told], slot.steps, pieces, slot.memory.piece)
            is_here = isinstance(slot.columns[NEXT_REWARD], np.ndarray)  # else it has to be fetched each time
            rewards = self._rewards(slot, slot.steps) if is_here else None
            ids = slot.columns[TRAJ_IDS].T if is_here and self.settings.track_traj_ids else None
            clears, looks = _clears(slot), self._nan_watch.looks(slot, slot.steps)
            slot.bound = bound = Bound(self, acted, before, behind, [*first, *second], clears, looks, ids, rewards)
        return bound  # type: ignore[no-any-return]

    def _pair(self, slot: Slot, name: Key, rows: Rows, key: Key) -> tuple[Any, Any]:
        """The column `name`, and the rows that are copied there."""
        column = slot.columns[name]
        return column, rows.arrays[key] if isinstance(column, np.ndarray) else rows.flat(key)

    # -- once per slot -----------------------------------------------------------------------------------------

    def _complete(self, slot: Slot, steps: int, has_ended: bool = True, has_begun: bool = True) -> Receipt:
        """Write what follows from the steps: log-probs, done, ids, counts, versions; count and check.

        `has_ended` and `has_begun` tell whether an episode may have.
        """
        bound, lanes, stats = slot.bound, self.lanes, self.stats
        self.policy.finish(slot.columns, self._acted(steps))
        for clear in _clears(slot) if bound is None else bound.clears:
            clear()
        if bound is not None and steps == slot.steps:
            rewards, looks = bound.rewards, bound.looks[has_begun]
        else:
            rewards, looks = None, self._nan_watch.looks(slot, steps)[has_begun]
        if rewards is None:
            rewards = self._rewards(slot, steps)
        frames = slot.lanes * steps
        if has_ended := has_ended or self._may_be_cut_off:  # not so in most small batches
            if steps == slot.steps == 1 and bound and bound.ids is not None and not self._may_be_cut_off:
                self._mark_ends_of_step(slot.columns, bound.ids, rewards)
            else:
                frames = self._mark_ends(slot, steps, rewards)
        else:
            if bound is not None and bound.ids is not None:
                bound.ids[...] = lanes.ids.current
            elif self.settings.track_traj_ids:
                slot.put(TRAJ_IDS, lanes.ids.current[:, None], steps)
            lanes.meter.go_on(rewards)
        for derive in self._derived:
            derive(slot)
        stats.frames += frames
        stats.batches += 1
        lanes.have_begun = has_ended  # perhaps in the last step
        for look in looks:
            found = look()
            if found != found:
                self._nan_watch.warn(slot, steps, self._by_lane)
                break
        begun = self.steps
        self.steps = begun + steps
        return Receipt(steps, frames, self._acting, begun, None, stats.frames)

    def _mark_ends_of_step(self, columns: Mapping[Key, Any], ids: np.ndarray, rewards: np.ndarray) -> None:
        """Do as `_mark_ends` does, in fewer steps, for a slot of one step: nothing lies behind an end there."""
        over = np.logical_or(columns[NEXT_TERMINATED], columns[NEXT_TRUNCATED], out=columns[NEXT_DONE])
        lanes = over.nonzero()[0].tolist()
        ids[...] = self.lanes.ids.current
        self.lanes.ids.renew(lanes)
        self.lanes.meter.go_on(rewards)
        self.lanes.meter.end(lanes, self.stats)

    def _mark_ends(self, slot: Slot, steps: int, rewards: np.ndarray) -> int:
        """Write where episodes have ended, and the ids on either side; count these, and the frames."""
        columns, real, stats, frames = slot.columns, self._real(slot, steps), self.stats, slot.lanes * steps
        columns[NEXT_DONE][...] = columns[NEXT_TERMINATED] | columns[NEXT_TRUNCATED]
        ended = self._by_lane(slot.array(NEXT_DONE)[:, :steps, 0]).copy()
        if self.settings.track_traj_ids:
            ids = np.empty(ended.shape, np.int64)
            self.lanes.ids.assign(self._cut_off(ended, real), ids)
            if real is not None:
                ids[~real] = PADDING_ID
            slot.put(TRAJ_IDS, self._in_slot(ids), steps)
        if self.settings.set_truncated:
            last = self._last(steps)
            columns[NEXT_TRUNCATED][last] |= ~columns[NEXT_TERMINATED][last]
            columns[NEXT_DONE][last] = True
        if real is not None:
            stats.idle_frames += frames
            frames = int(real.sum())
            stats.idle_frames -= frames
        self.lanes.meter.measure(self._by_lane(rewards), ended, real, stats, self._broken())
        return frames

    # A slot's rows are lanes here, and all of them have made the same steps. A loop in which that is not so lays its
    # slots out in another way, which these tell of.

    def _acted(self, steps: int) -> Filled:
        """Which of the first `steps` steps the policy has made since `begin`: all, or a mask of the slot."""
        return EVERY, slice(steps)

    def _by_lane(self, values: np.ndarray) -> np.ndarray:
        """What lies in the first steps of a slot, by lane and time `[N, T]`."""
        return values

    def _in_slot(self, values: np.ndarray) -> np.ndarray:
        """The reverse of `_by_lane`."""
        return values

    def _real(self, slot: Slot, steps: int) -> np.ndarray | None:
        """Which places `[N, T]` are frames; None if all are."""
        return slot.array(MASK)[:, :steps] if self._idles else None

    def _broken(self) -> np.ndarray | None:
        """After which frames `[N, T]` the env has lost what it was doing, and begun anew."""
        return None

    def _last(self, steps: int) -> tuple[Any, Any]:
        """Where the last frame of each lane lies."""
        return EVERY, steps - 1

    def _count_steps(self, slot: Slot) -> None:
        """Write how old episodes are after each step."""
        slot.columns[after(STEP_COUNT)][:] = slot.columns[STEP_COUNT] + 1

    def _stamp(self, slot: Slot) -> None:
        """Write down which version has acted."""
        tensors = slot.tensors
        if POLICY_VERSION not in self.policy.outputs.tensors:  # else it is said by an inference server's client
            tensors[POLICY_VERSION].fill_(self._acting)
        tensors[after(POLICY_VERSION)].copy_(tensors[POLICY_VERSION])

    def _cut_off(self, ended: np.ndarray, real: np.ndarray | None) -> np.ndarray:
        """Where trajectories end for whoever reads the batch: with `set_truncated`, at the last step of it too."""
        broken = self._broken()
        cut = ended if broken is None else ended | broken
        if not self.settings.set_truncated:
            return cut
        cut = cut.copy()
        if real is None:
            cut[:, -1] = True
        else:  # a lane may have ended before the others; one that is idle has no episode to cut off
            has_any = real.any(1)
            last = real.shape[1] - 1 - real[:, ::-1].argmax(1)
            cut[has_any, last[has_any]] = True
        return cut

    def _rewards(self, slot: Slot, steps: int) -> np.ndarray:
        """The rewards of the first steps, by row and time."""
        return slot.array(NEXT_REWARD)[:, :steps, 0]


def _clears(slot: Slot) -> list[Callable[[], Any]]:
    """What sets flags to False that are never true, or only where an episode has ended.

    A lane that has ended is restarted at once, so that no root is ever done.
    """
    flags = [slot.columns[key] for key in (*FLAGS, NEXT_DONE)]
    if slot.memory.piece is not None:
        flags = joined(flags, slot.memory.piece)
    return [partial(flag.fill if isinstance(flag, np.ndarray) else flag.fill_, False) for flag in flags]
