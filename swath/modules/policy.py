"""Policies: whatever the user gives becomes a plan over rows.

`PolicyRunner` finds out once what a policy reads and writes, and makes a plan: a list of stages that call the inner
modules directly. The plan is made anew whenever the policy's structure, its hooks or the exploration type have changed
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
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from swath.envs.base import EnvBase
from swath.envs.rows import Rows
from swath.errors import PolicyError
from swath.keys import Key, as_key, as_path, is_private
from swath.modules.mlp import mlp_stage
from swath.modules.probe import Probe, parts_of
from swath.modules.random import RandomPolicy
from swath.modules.sampling import sampling_stage
from swath.modules.stages import RandomStage, Stage, TensorDictStage, TorchStage


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
    return TensorDictModule(policy, in_keys=in_keys, out_keys=env.action_keys)


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
    names = {as_path(key)[-1]: key for key in env.observation_keys}
    if required and all(p.name in names for p in required):
        return [names[p.name] for p in required]
    if len(required) == len(names):
        return list(names.values())
    raise PolicyError(
        f"The policy {policy!r} takes {len(required)} arguments ({', '.join(p.name for p in required) or 'none'}), which "
        f"cannot be matched to the env's observations ({', '.join(names)}). Name its arguments like the observations, "
        "let it take one argument called 'tensordict', or wrap it: TensorDictModule(policy, in_keys=[...], "
        "out_keys=['action'])."
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
    ) -> None:
        """Find out what `policy` reads from `present` and what it writes, by calling it once.

        The call leaves no trace: random generators and the module's buffers are put back.

        Args:
            policy: what `as_policy` returned.
            env: the env that it acts in.
            present: rows of what the policy may see; entries that only it asks for are added.
            device: where the policy computes, if not where the rows lie.
            fast: whether known modules may be run by their array forms.
            opaque: whether to call the policy as it is, without looking inside.
        """
        self.policy = policy
        self.outputs = Rows({}, present.batch_size)
        self._env = env
        self._present = present
        self._device = device
        self._fast = fast
        self._opaque = opaque
        probe = Probe(policy, env, present, device)
        self.state = probe.state
        """Pairs (read, written) of the keys that the loop carries; see NOTE [Recurrent state]."""
        for key, value in probe.written.items():
            self.outputs.add(key, value)
        self.delivered = [key for key in probe.delivered if not is_private(key)]
        """What the batch holds of the outputs."""
        self._random = RandomStage(env.actions, self.outputs)
        self._signature: Any = None
        self._stages: list[Stage] = []
        self._active: list[Stage] = []
        self._late: set[Key] = set()

    def begin(self, steps: int, generator: torch.Generator | None, random: bool = False) -> list[Key]:
        """Make ready for `steps` steps (with `random` actions instead of the policy's).

        Returns the keys of `outputs` that must be recorded at every step.
        """
        if random:
            for tensor in self.outputs.tensors.values():
                tensor.zero_()
            self._active = [self._random]
        else:
            signature = self._read_signature()
            if signature != self._signature:
                self._make_plan()
                self._signature = signature
            self._active = self._stages
        for stage in self._active:
            stage.begin(steps, generator)
        self._runs = [stage.run for stage in self._active]
        return [key for key in self.outputs.tensors if random or key not in self._late]

    def act(self, t: int) -> None:
        """Write what the policy does in step `t` into `outputs`."""
        for run in self._runs:
            run(t)

    def finish(self, columns: Mapping[Key, Tensor], steps: int) -> None:
        """Fill in the columns that were left for the end of the slot."""
        for stage in self._active:
            stage.finish(columns, steps)

    def _read_signature(self) -> tuple[Any, ...]:
        """What a plan depends on. Weights are not part of it: stages fetch them for every slot."""
        if not isinstance(self.policy, nn.Module):
            return (interaction_type(), False)
        modules = list(self.policy.modules())
        altered = torch.is_autocast_enabled("cpu") or _has_global_hooks() or any(map(_is_altered, modules))
        shapes = tuple(parameter.shape for parameter in self.policy.parameters())
        return (interaction_type(), altered, tuple(map(id, modules)), shapes)

    def _make_plan(self) -> None:
        self._late = set()
        parts = None if self._opaque or self._read_signature()[1] else parts_of(self.policy)
        inputs = self._present.tensors
        if isinstance(self.policy, RandomPolicy):
            self._stages = [self._random]
        elif parts is None:
            written = [key for key in self.outputs.tensors if key in self.delivered or is_private(key)]
            self._stages = [TensorDictStage(self.policy, inputs, self.outputs, written, self._device)]
        else:
            known, arrays = dict(inputs), dict(self._present.arrays)
            self._stages = []
            for part in parts:
                self._stages.append(self._stage(part, known, arrays))
                for key in map(as_key, part.out_keys):
                    known[key], arrays[key] = self.outputs.tensors[key], self.outputs.arrays[key]

    def _stage(self, part: Any, known: Mapping[Key, Tensor], arrays: Mapping[Key, np.ndarray]) -> Stage:
        """The quickest stage that does what `part` does, given what is known before it."""
        in_keys, out_keys = [as_key(k) for k in part.in_keys], [as_key(k) for k in part.out_keys]
        fast = self._fast and self._device is None
        if fast and type(part) is ProbabilisticTensorDictModule:
            made = sampling_stage(part, arrays, self.outputs.arrays, interaction_type())
            if made is not None:
                stage: Stage
                stage, late = made
                self._late.update(late)
                return stage
        if type(part) is TensorDictModule and not part._kwargs and "_" not in out_keys:
            if fast and len(in_keys) == 1 and in_keys[0] in arrays and isinstance(part.module, nn.Module):
                quick = mlp_stage(part.module, arrays[in_keys[0]], self.outputs, out_keys)
                if quick is not None:
                    return quick
            return TorchStage(part.module, [known[k] for k in in_keys], self.outputs, out_keys, self._device)
        return TensorDictStage(part, known, self.outputs, out_keys, self._device)


def _has_global_hooks() -> bool:
    return bool(nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks)


def _is_altered(module: nn.Module) -> bool:
    """Whether calling `module` does more than its class says: hooks, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in module.__dict__
