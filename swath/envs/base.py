"""EnvBase: one lane or many, stepped through rows, with a TensorDict surface on top."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium import spaces as gs
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.entries import trusted
from swath.envs.answers import CPU, Resets, Steps
from swath.envs.foreign import NotOfTorchRL
from swath.envs.rows import Leaf, Rows
from swath.envs.spaces import ActionCodec, ObservationCodec, must_not_clash
from swath.errors import ClosedError, UnsupportedEnvError, wrong_shape
from swath.keys import DONE, FLAGS, NEXT, RESET, REWARD, TERMINATED, TRUNCATED, Key, nest
from swath.seeding import checked_seed, lane_seed, lane_seeds, next_seed, policy_seed

Policy = Callable[[TensorDictBase], TensorDictBase]

FLAG = Leaf((1,), torch.bool)
SURFACE = object()
"""Stands for the callers of an env's own `reset` and `step`."""


Env = TypeVar("Env", bound="EnvBase")


class EnvBase(NotOfTorchRL):
    """An environment of `batch_size` lanes.

    A subclass sets its spaces through `__init__` and gives either of two pairs:

    - `_reset(td)` and `_step(td)`, which take and return TensorDicts: the simple way. `_reset` returns the first
      observations; where only some lanes are to begin anew, `td["_reset"]` marks them. `_step` finds observations and
      actions in `td`, and returns the next observations, `reward`, and `terminated` / `truncated` (or `done` alone).
      Both may keep what they were given; what they return is copied at once. Or
    - `reset_into(lanes, out)` and `step_into(action, out)`, which work on rows: the fast way.

    Whichever it is, a finished lane is never reset by the env itself: what a step returns is the true final
    observation, and the caller resets the lane when it has recorded it.
    """

    _owns_simulators = True

    def __init__(
        self,
        observation_space: gs.Space[Any],
        action_space: gs.Space[Any],
        *,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
        categorical_action_encoding: bool = False,
    ) -> None:
        """Fix what one lane looks like (`observation_space`, `action_space`) and how many there are."""
        self.observation_space = observation_space
        self.action_space = action_space
        self.batch_size = torch.Size(batch_size)
        self.device = None if device is None else torch.device(device)
        self.num_lanes = math.prod(self.batch_size)
        self.observations = ObservationCodec(observation_space, categorical_action_encoding)
        self.actions = ActionCodec(action_space, categorical_action_encoding)
        must_not_clash(self.observations.leaves, self.actions.leaves)
        self.reward_leaf = Leaf((1,), torch.float32)
        self.has_truncated = True
        """Whether episodes can be cut off; an adapter may have an env that knows no such thing."""
        self.is_closed = False
        self.stepped_by: object = None
        """Who has stepped or reset the env last: a collector must not go on from where another caller has left it."""
        self.first_lane = 0
        """Global index of lane 0: seeds belong to lanes, wherever they run."""
        self._seed: int | None = None
        self._generator: torch.Generator | None = None
        self._action_rows: Rows | None = None
        self._out_rows: Rows | None = None
        self._bound_resets: Resets | None = None
        self._bound_steps: Steps | None = None
        """For the rows that were stepped with last."""

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made when it is needed: it is bound to the memory of this very env."""
        made = ("_action_rows", "_out_rows", "_bound_resets", "_bound_steps")
        return {**vars(self), **dict.fromkeys(made)}

    # -- what there is -----------------------------------------------------------------------------------------

    @property
    def observation_keys(self) -> list[Key]:
        """The keys of all observations."""
        return list(self.observations.leaves)

    @property
    def action_keys(self) -> list[Key]:
        """The keys of all actions."""
        return list(self.actions.leaves)

    @property
    def action_key(self) -> Key:
        """The key of the action; the first, where there are several."""
        return self.action_keys[0]

    @property
    def reward_key(self) -> Key:
        """The key of the reward."""
        return REWARD

    @property
    def done_keys(self) -> list[Key]:
        """The keys of the flags that tell how a lane ended."""
        return list(FLAGS)

    @property
    def out_leaves(self) -> dict[Key, Leaf]:
        """What a step writes: observations, reward, terminated and truncated."""
        return {**self.observations.leaves, REWARD: self.reward_leaf, TERMINATED: FLAG, TRUNCATED: FLAG}

    @property
    def rows_device(self) -> torch.device | None:
        """Where the rows lie that this env steps on; `device` is only what the surface hands out."""
        return self.device

    @property
    def simulators(self) -> list[Any]:
        """The objects that really run, whatever is wrapped around them: no two envs may share one."""
        return [self]

    @property
    def runs_torch(self) -> bool:
        """Whether a step may run torch, for whatever it likes, in the thread that asks for it."""
        return True

    def introduce_to(self, policy: Any) -> None:
        """Tell `policy` what it waits to hear about the env that it will act in. None of ours does."""

    # -- the array path ----------------------------------------------------------------------------------------

    def new_out_rows(self) -> Rows:
        """Rows for `reset_into` and `step_into` to write into, where the env does so with the least effort."""
        return Rows(self.out_leaves, self.batch_size, self.rows_device)

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Begin a new episode in each of `lanes` and write its first observation into `out`."""
        resets = self._bound_resets
        if resets is None or resets.out is not out:
            resets = self._bound_resets = Resets(self, out)
        resets.make(self._reset, lanes)

    def step_into(self, action: Rows, out: Rows) -> bool:
        """Step every lane with `action`; write what happened into `out`. Return whether any lane finished."""
        steps = self._bound_steps
        if steps is None or steps.action is not action or steps.out is not out:
            steps = self._bound_steps = Steps(self, action, out)
        return steps.make(self._step)

    @property
    def can_step_lanes(self) -> bool:
        """Whether `step_lanes_into` works here: whether each lane can be stepped without the others."""
        return self.num_lanes == 1

    def step_lanes_into(self, lanes: Sequence[int], action: Rows, out: Rows) -> bool:
        """Step only `lanes`, each given once, with their rows of `action`; write only their rows of `out`.

        Returns whether any of them finished.
        """
        if not self.can_step_lanes:
            raise UnsupportedEnvError(
                f"{self!r} steps all its lanes at once, so that lanes {list(lanes)} cannot be stepped alone. Use "
                "separate envs: GymEnv(name, num_envs=...), or a SerialEnv of envs with one lane each."
            )
        return bool(lanes) and self.step_into(action, out)

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError(f"{type(self).__name__} has neither _reset nor reset_into.")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError(f"{type(self).__name__} has neither _step nor step_into.")

    def seed_lanes(self, seeds: list[int]) -> None:
        """Seed each lane with its own number, in effect from its next reset. Random actions are not seeded."""
        self._set_seed(seeds[0])

    def _set_seed(self, seed: int) -> None:
        """Seed the env with one number; for subclasses that have no lanes of their own."""

    # -- the surface -------------------------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDict:
        """Begin new episodes: in all lanes, or in those that `tensordict["_reset"]` marks."""
        self.must_be_open()
        self.stepped_by = SURFACE
        out = self._out()
        lanes = list(range(self.num_lanes))
        mask = None if tensordict is None else tensordict.get(RESET, None)
        if tensordict is not None and mask is not None:
            if mask.shape not in (self.batch_size, (*self.batch_size, 1)):
                raise wrong_shape(RESET, (*self.batch_size, 1), mask.shape, "The TensorDict given to reset")
            lanes = mask.reshape(-1).nonzero().view(-1).tolist()
            for key in self.observation_keys:
                if (kept := tensordict.get(key, None)) is not None:
                    out.put(key, kept, "The TensorDict given to reset")
        if lanes:
            self.reset_into(lanes, out)
        return self._td({**{k: out.copy(k) for k in self.observation_keys}, **self._no_flags()})

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step with the actions in `tensordict`; what happened is written to `tensordict["next"]`."""
        self.must_be_open()
        self.stepped_by = SURFACE
        out = self._out()
        action = self._take_actions(tensordict)
        for key in self.observation_keys:
            if (seen := tensordict.get(key, None)) is not None:
                out.put(key, seen, "The TensorDict given to step")
        self.step_into(action, out)
        answer = {key: out.copy(key) for key in self.out_leaves}
        answer[DONE] = answer[TERMINATED] | answer[TRUNCATED]
        tensordict.set(NEXT, self._td(answer))
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDict]:
        """Step, and give also what the next step begins from: finished lanes are reset there."""
        out = self._out()
        out.restarts = True
        try:
            stepped = self.step(tensordict)
        finally:
            out.restarts = False
        return stepped, self._root_after(stepped)

    def _root_after(self, stepped: TensorDictBase) -> TensorDict:
        after = stepped.get(NEXT)
        root = self._td({k: after.get(k) for k in self.observation_keys} | self._no_flags())
        if bool(after.get(DONE).any()):
            root = self.reset(root.set(RESET, after.get(DONE)))
        return root

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """`tensordict` (or a new one) with random actions."""
        drawn = self.actions.draw(self.actions.leaves, 1, self.num_lanes, self._generator)
        target = self._td({}) if tensordict is None else tensordict
        for key, value in drawn.items():
            target.set(key, value[0].view((*self.batch_size, *value.shape[2:])).to(self.device or "cpu"))
        return target

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Step with random actions."""
        return self.step(self.rand_action(tensordict))

    def rollout(
        self,
        max_steps: int,
        policy: Policy | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        tensordict: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """At most `max_steps` steps from a reset, as `[*batch_size, T]`.

        Args:
            max_steps: the most steps to make.
            policy: takes and returns a TensorDict; without one, actions are random.
            auto_reset: begin with a reset (of the lanes that `tensordict["_reset"]` marks, if it does); otherwise go on
                from `tensordict`, in which only finished lanes are reset.
            break_when_any_done: end with the first finished lane; otherwise finished lanes are reset and go on.
            tensordict: what to begin from.
        """
        if max_steps < 1:
            raise ValueError(f"rollout(max_steps={max_steps}) has no step to return; max_steps must be at least 1.")
        if not auto_reset:
            if tensordict is None:
                raise ValueError(
                    "rollout(auto_reset=False) needs the tensordict to begin from: pass tensordict=env.reset()."
                )
            ended = tensordict.get(DONE, self._zeros(FLAG))
            tensordict = tensordict.clone(recurse=False).set(RESET, ended)
        root: TensorDictBase = self.reset(tensordict)
        steps: list[TensorDictBase] = []
        with torch.no_grad():
            for _ in range(max_steps):
                if steps:
                    root = self._root_after(steps[-1])
                acted = self.rand_action(root) if policy is None else policy(root)
                steps.append(self.step(acted).clone(recurse=False))
                if break_when_any_done and bool(steps[-1].get((NEXT, DONE)).any()):
                    break
        stacked: TensorDictBase = TensorDict.stack(steps, len(self.batch_size))
        stacked.names = [*(None,) * len(self.batch_size), "time"]
        return stacked

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all lanes, each with its own number derived from `seed` (the same with `static_seed`).

        In effect from the next reset. Returns a seed for the next env: one that no lane here has.
        """
        seed = checked_seed(seed)
        self._seed = seed
        self._generator = torch.Generator().manual_seed(policy_seed(seed, self.first_lane))
        self.seed_lanes(lane_seeds(seed, self.num_lanes, self.first_lane, static_seed))
        return next_seed(seed, self.first_lane + self.num_lanes, static_seed)

    def fake_tensordict(self) -> TensorDict:
        """Zeros with the layout of one step."""
        action = {k: self._zeros(leaf) for k, leaf in self.actions.leaves.items()}
        root = {k: self._zeros(leaf) for k, leaf in self.observations.leaves.items()} | self._no_flags()
        answer = {k: self._zeros(leaf) for k, leaf in self.out_leaves.items()} | {DONE: self._zeros(FLAG)}
        return self._td({**root, **action, NEXT: self._td(answer)})

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Free what the env holds. Closing twice is harmless unless `raise_if_closed`."""
        if self.is_closed:
            if raise_if_closed:
                raise ClosedError(f"{self!r} is closed already.")
            return
        self.is_closed = True
        self._close()

    def _close(self) -> None:
        """Free what a subclass holds; called once."""

    def __del__(self) -> None:
        """Close an env that is no longer referenced, unless its simulators were given by the user."""
        if self._owns_simulators and not getattr(self, "is_closed", True):
            with contextlib.suppress(Exception):
                self.close()

    def state_dict(self) -> dict[str, Any]:
        """What can be saved of the env: its seed. Simulators do not offer more."""
        return {"seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Seed the lanes anew, with seeds that follow from the saved one but repeat none of its episodes."""
        if state.get("seed") is not None:
            self.set_seed(lane_seed(state["seed"], self.first_lane + self.num_lanes + 1))

    def __enter__(self: Env) -> Env:
        """Use the env in a `with` block, at whose end it is closed."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the env."""
        self.close()

    def __repr__(self) -> str:
        """Name, lanes and spaces."""
        return (
            f"{type(self).__name__}(batch_size={list(self.batch_size)}, observation_space={self.observation_space}, "
            f"action_space={self.action_space})"
        )

    # -- helpers -----------------------------------------------------------------------------------------------

    def must_be_open(self) -> None:
        """Raise if the env is closed."""
        if self.is_closed:
            raise ClosedError(f"{self!r} is closed; make a new one.")

    def _out(self) -> Rows:
        if self._out_rows is None:
            self._out_rows = self.new_out_rows()
        return self._out_rows

    def _take_actions(self, tensordict: TensorDictBase) -> Rows:
        """The actions in `tensordict` as rows; new rows only when their shape or dtype changes."""
        given: dict[Key, Tensor] = {}
        for key in self.action_keys:
            value = tensordict.get(key, None)
            if value is None:
                raise KeyError(
                    f"step() found no {key!r} in the TensorDict, only {sorted(map(str, tensordict.keys()))}. "
                    "Call the policy or env.rand_action(td) before env.step(td)."
                )
            given[key] = value
        leaves = {key: Leaf.of(value, len(self.batch_size)) for key, value in given.items()}
        rows = self._action_rows
        if rows is None or any(rows.leaf(key) != leaf for key, leaf in leaves.items()):
            rows = self._action_rows = Rows(leaves, self.batch_size, self.rows_device)
        for key, value in given.items():
            rows.put(key, value, "The TensorDict given to step")
        return rows

    def _zeros(self, leaf: Leaf) -> Tensor:
        return torch.zeros((*self.batch_size, *leaf.shape), dtype=leaf.dtype, device=self.device or CPU)

    def _no_flags(self) -> dict[Key, Tensor]:
        if self.device is not None and self.device != CPU:
            return {key: self._zeros(FLAG) for key in FLAGS}
        return {key: torch.from_numpy(np.zeros((*self.batch_size, *FLAG.shape), bool)) for key in FLAGS}

    def _td(self, entries: dict[Key, Any]) -> TensorDict:
        """A TensorDict of `entries`, all of which come from rows."""
        if self.device is None or self.device == (self.rows_device or CPU):
            return trusted(entries, self.batch_size, self.device)
        return TensorDict(nest(entries), batch_size=self.batch_size, device=self.device)


def answers_of(env: EnvBase) -> list[tuple[str, Callable[[], Any]]]:
    """Functions that give what `_reset` and `_step` of `env` return, before anything is converted; none on rows."""
    if type(env)._step is EnvBase._step:
        return []
    return [
        ("_reset", lambda: env._reset(TensorDict({}, batch_size=env.batch_size))),
        ("_step", lambda: env._step(env.rand_action(env.reset()).exclude(*FLAGS))),
    ]
