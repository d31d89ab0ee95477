"""Policies: whatever the user gives becomes a plan over rows.

`PolicyRunner` finds out once what a policy reads and writes, and makes a plan: a list of stages that call the inner
modules directly. There is a new plan whenever the policy's structure, its hooks or the exploration type have changed
since the last slot. Only what cannot be understood gets a TensorDict.

NOTE [Recurrent state]: keys that a policy both reads and writes are its state, either under the same key or, as
recurrent modules do it, read as `key` and written as `("next", key)`. The loop carries them from step to step and sets
them to zero where an episode begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from swath.envs.base import EnvBase
from swath.envs.rows import Leaf, Rows
from swath.errors import PolicyError, annotate
from swath.keys import Key, as_path, is_private
from swath.modules.call_context import MAX_MULTIPLICATIONS, CallContext
from swath.modules.exploration import ExplorationType, acting_type
from swath.modules.plan import Composition, Planner
from swath.modules.probe import Probe
from swath.modules.random import RandomPolicy
from swath.modules.stages import EchoStage, Filled, RandomStage, RangeStage, Stage, StageName, in_turn

RUNS = ("run", "run_on")


def as_policy(policy: Any, env: EnvBase) -> Any:
    """`policy` as something that takes a TensorDict: modules and functions of tensors are wrapped.

    Raises:
        PolicyError: when the arguments of `policy` cannot be matched to the env's observations.
    """
    if policy is None:
        return RandomPolicy(env.actions)
    if isinstance(policy, TensorDictModuleBase | RandomPolicy):
        return policy
    if not callable(policy):
        raise PolicyError(f"policy must be a module, a callable or None, got {type(policy).__name__}: {policy!r}.")
    in_keys = _arguments(policy, env)
    if in_keys is None:
        return policy
    wrapped = TensorDictModule(policy, in_keys=in_keys, out_keys=env.action_keys)
    wrapped.names_results = True  # see `Probe`
    return wrapped


def _arguments(policy: Callable[..., Any], env: EnvBase) -> list[Key] | None:
    """The observation keys that `policy` takes, in order; None if it takes a TensorDict."""
    if getattr(policy, "in_keys", None) is not None and getattr(policy, "out_keys", None) is not None:
        return None  # it follows tensordict's convention without being its module
    function = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return list(env.observation_keys)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters) and not required:
        return list(env.observation_keys)
    if len(required) == 1 and _is_tensordict(required[0]):
        return None
    keys = list(env.observation_keys)
    last = [as_path(key)[-1] for key in keys]
    names = {name: key for name, key in zip(last, keys, strict=True) if last.count(name) == 1}
    if required and all(p.name in names for p in required):
        return [names[p.name] for p in required]
    if len(required) == len(keys) and not any(p.name in last for p in required):
        return keys  # in the env's order; with some names right, the others would be a guess
    arguments, observations = [p.name for p in required], ["/".join(as_path(key)) for key in keys]
    factory = "" if required else " If it makes a policy, pass it as policy_factory."
    raise PolicyError(
        f"The policy {policy!r} takes {len(arguments)} arguments ({', '.join(arguments) or 'none'}), which cannot be "
        f"matched to the env's observations ({', '.join(observations)}). Name its arguments like the observations, let "
        "it take one argument called 'tensordict', or wrap it: TensorDictModule(policy, in_keys=[...], "
        f"out_keys=['action']).{factory}"
    )


def _is_tensordict(parameter: inspect.Parameter) -> bool:
    kind = parameter.annotation
    if isinstance(kind, type) and issubclass(kind, TensorDictBase):
        return True
    return "TensorDict" in str(kind) or parameter.name in ("td", "tensordict")


class PolicyRunner:
    """A policy bound to the rows that it reads and the rows that it writes."""

    def __init__(
        self,
        policy: Any,
        env: EnvBase,
        present: Rows,
        *,
        device: torch.device | None = None,
        fast: bool = True,
        opaque: bool = False,
        compiled: bool | Mapping[str, Any] | None = None,
    ) -> None:
        """Find out what `policy` reads from `present` and what it writes, by calling it once.

        The call leaves no trace: random generators and the module's buffers are put back.

        Args:
            policy: what `as_policy` returned.
            env: the env that it acts in.
            present: rows of what the policy may see; entries that only it asks for are added.
            device: where the policy computes, as its TensorDicts will say; None is where the rows lie.
            fast: whether known modules may be run by their array forms.
            opaque: whether to call the policy as it is, without looking inside.
            compiled: whether to compile what has to be called, or arguments for `torch.compile`.
        """
        self.policy = policy
        probe = Probe(policy, env, present, device, opaque)
        self.state = probe.state
        """Pairs (read, written) of the keys that the loop carries; see NOTE [Recurrent state]."""
        leaves = {key: Leaf.of(value, len(present.batch_size)) for key, value in probe.written.items()}
        self.outputs = Rows(leaves, present.batch_size, probe.place)
        for key, value in probe.written.items():
            self.outputs.tensors[key].copy_(value)
        self.delivered = [key for key in probe.visible if not is_private(key)]
        """What the batch holds of the outputs."""
        self._planner = Planner(probe, present, self.outputs, device, fast, opaque, compiled)
        self._plan: list[Stage] = []
        self._composition: Composition | None = None
        self._planned_for: ExplorationType | None = None
        states = [read for read, _ in self.state]
        given = [key for key in self.outputs.tensors if key in present.tensors and key not in states]
        self._random: list[Stage] = [RandomStage(env.actions, self.outputs)]
        if given:
            self._random.append(EchoStage(present, self.outputs, given))
        self._seen = [present.leaf(key) for key in present.tensors]
        self._is_here = device is None or device.type == "cpu"
        self.is_undisturbed = False
        """Whether nothing but the policy runs torch in this thread between `begin` and `finish`,"""
        self.around_slot: CallContext | None = None
        """and what has to be entered then before it acts."""
        self.contexts: list[CallContext] = []
        """What is entered for each call: an interrupt may come before it is left."""
        self._is_bare = False
        """Whether nobody looks at the way to explore while the stages that were bound last act."""
        self._active: list[Stage] = []
        self._acting: list[Stage] = []
        self._recorded: list[Key] = []
        self._checks: list[Stage] = [RangeStage(env.actions, self.outputs)]
        """What is only done in the first slot in which the policy acts."""

    def exchange(self, policy: Any) -> None:
        """Act with `policy`, a copy of the present one with other weights, from the next slot on."""
        self.policy = policy
        self._composition = None

    def begin(
        self,
        steps: int,
        generator: torch.Generator | None,
        random: bool = False,
        kind: ExplorationType | None = None,
    ) -> list[Key]:
        """Make ready for `steps` steps (with `random` actions instead of the policy's).

        `kind` is the exploration type that counts here, if the caller knows that.
        Returns the keys of `outputs` that must be recorded at every step: the same list for as long as they are.
        """
        if random:
            for tensor in self.outputs.tensors.values():
                tensor.zero_()
            active = acting = self._random
        else:
            active = acting = self._current_plan(kind)
            if self._checks:
                acting, self._checks = [*active, *self._checks], []
        if acting is not self._acting:
            self._active, self._acting = active, acting
            self._bind(acting)
            self._finishes = [stage.finish for stage in active if type(stage).finish is not Stage.finish]
            late = {key for stage in active for key in stage.late}
            self._recorded = [key for key in self.outputs.tensors if key not in late]
        return self.start(steps, generator)

    def start(self, steps: int, generator: torch.Generator | None) -> list[Key]:
        """The same with the stages that acted last."""
        for stage in self._active:
            stage.begin(steps, generator)
        return self._recorded

    def goes_on(self, random: bool, kind: ExplorationType | None) -> bool:
        """Whether the stages that acted last do so again, and nobody looks at the way to explore while they do."""
        known = self._composition
        if random or not self._is_bare or self._acting is not self._plan or known is None:
            return False
        return (kind or acting_type()) is self._planned_for and not known.has_changed

    def _bind(self, acting: list[Stage]) -> None:
        """Find out what has to be around `acting`, and whether that may be around all steps of a slot."""
        called = [stage for stage in acting if stage.reason]
        self._is_bare = self.is_undisturbed and not any(stage.needs_conditions for stage in acting)
        infers = bool(called) and self.is_undisturbed and all(stage.infers for stage in called)
        one_thread = bool(called) and self._is_light
        around = CallContext(one_thread=one_thread, infers=infers)
        for stage in called:
            stage.threads = None if one_thread else stage.threads
        named = {name: [getattr(one, name) for one in acting] if infers else in_turn(acting, name) for name in RUNS}
        if not self.is_undisturbed:
            named = {name: around.of(runs) for name, runs in named.items()}
        self._runs, self._runs_on = named.values()
        contexts = [around, *(stage.threads.one_thread for stage in called if stage.threads is not None)]
        self.contexts = [context for context in contexts if context.is_any]
        self.around_slot = around if self.is_undisturbed and around.is_any else None

    def _current_plan(self, kind: ExplorationType | None = None) -> list[Stage]:
        """The stages for the policy as it is now."""
        kind, known = kind or acting_type(), self._composition
        if known is None or kind is not self._planned_for or known.has_changed:
            self._plan = self._planner.plan(self.policy)
            self._planned_for, self._composition = kind, Composition(self.policy, self._planner.readings)
        return self._plan

    @property
    def _is_light(self) -> bool:
        """Whether a step of the policy is too little for several threads, as far as can be known; not for sequences."""
        weights = [] if self._composition is None else self._composition.weights
        is_flat = all(weight.ndim <= 2 for weight in weights) and all(len(leaf.shape) <= 1 for leaf in self._seen)
        count = sum(weight.numel() for weight in weights) * self.outputs.lanes
        return is_flat and 0 < count <= MAX_MULTIPLICATIONS and self._is_here

    @property
    def has_acted(self) -> bool:
        """Whether there was a slot."""
        return bool(self._active)

    @property
    def stages(self) -> list[StageName]:
        """The names of the stages that acted last (at first, of those that will), with reasons where one is slow."""
        return [StageName(type(stage).__name__, stage.reason) for stage in self._active or self._current_plan()]

    def act(self, t: int) -> None:
        """Write what the policy does in step `t` into `outputs`."""
        try:
            for run in self._runs:
                run(t)
        except Exception as error:
            annotate(error, f"Raised by the policy in step {t} of a batch.")
            raise

    def act_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Write what the policy does for lane `lanes[i]`, in its step `times[i]`, into these rows of `outputs`.

        For a policy that treats each row by itself, this gives what `act` gives for all rows; see NOTE [Some lanes].
        """
        if len(lanes) == self.outputs.lanes and (times == times[0]).all():
            self.act(int(times[0]))
            return
        try:
            for run_on in self._runs_on:
                run_on(lanes, times)
        except Exception as error:
            annotate(error, f"Raised by the policy in steps {times.tolist()} of the lanes {lanes.tolist()} of a batch.")
            raise

    def finish(self, columns: Mapping[Key, Any], filled: Filled) -> None:
        """Fill in the columns `[N, T, ...]` that were left for the end of the slot: arrays, if they lie on the CPU.

        What is not `filled` is left alone.
        """
        for finish in self._finishes:
            finish(columns, filled)
