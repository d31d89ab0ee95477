"""Plans: which stages do what a policy does, and the quickest of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, TensorDictModule
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from swath.envs.rows import Rows
from swath.keys import Key, as_key, is_private
from swath.modules.called import DistributionStage, TensorDictStage, TorchStage
from swath.modules.composite import composite_stage
from swath.modules.exploration import acting_type
from swath.modules.families import draws_once, params_of, sampling_stage
from swath.modules.keeping import Reading, has_numbers_alone, is_librarys
from swath.modules.mlp import mlp_stage
from swath.modules.parts import Writes, acts_as, are_same, declared_by, overlap, parts_of
from swath.modules.peer_parts import is_kept_safe, peer_stage, projection_stage
from swath.modules.probe import Probe
from swath.modules.random import RandomPolicy
from swath.modules.settled import is_setting
from swath.modules.stages import RandomStage, Stage
from swath.modules.thread_choice import ThreadChoice
from swath.modules.traced import traced_stage
from swath.runtime import compiler


class Planner:
    """Makes plans for a policy that was probed."""

    def __init__(
        self,
        probe: Probe,
        present: Rows,
        outputs: Rows,
        device: torch.device | None,
        fast: bool,
        opaque: bool,
        compiled: bool | Mapping[str, Any] | None = None,
    ) -> None:
        """Plans read from `present` and write to `outputs`; for the rest see `PolicyRunner`."""
        self._visible = probe.visible
        self._writes = probe.writes
        self._is_opaque = opaque
        self._carried = [written for _, written in probe.state]
        self._present = present
        self._outputs = outputs
        self._device = device
        """What TensorDicts for the policy name as their device."""
        self._away = None if device == probe.place else device
        self._fast = fast and self._away is None
        self._compiled = compiled
        self._may_keep = probe.may_keep
        self._calls_hooks = False
        """Whether the policy's own hooks are called behind its parts."""
        self._readings: dict[int, tuple[Any, Reading]] = {}
        """What the last plan calls, by its id, which no other takes meanwhile, and what was read of it,"""
        self._former = self._readings
        """and of the plan before."""
        self._choices: list[tuple[list[Any], list[Any], ThreadChoice]] = []
        """For large networks of the last plan, by what they are made of and what is set on it,"""
        self._former_choices = self._choices
        """and of the plan before."""

    def plan(self, policy: Any) -> list[Stage]:
        """The stages for `policy` as it is now, in the order in which they run."""
        if type(policy) is RandomPolicy and not is_altered(policy.modules()):
            return [RandomStage(policy.codec, self._outputs)]
        parts = self._parts(policy)
        self._former, self._readings = self._readings, {}
        self._former_choices, self._choices = self._choices, []
        if isinstance(parts, str):
            call = self._as_called(policy)
            whole = TensorDictStage(call, self._present, (), self._outputs, self._visible, self._device)
            self._read(policy, whole)
            whole.reason = f"{type(policy).__name__} is called as a whole: {parts}"
            return [whole]
        stages, written = list[Stage](), list[Key]()
        for index, (part, writes) in enumerate(parts):
            stages.append(self._stage(part, writes, written, parts[index + 1 :]))
            if (projection := self._projection(part)) is not None:
                stages.append(projection)
            written = [*written, *writes.leaves]
        return [*stages, self._hook_stage(policy)] if self._calls_hooks else stages

    def _parts(self, policy: Any) -> list[tuple[Any, Writes]] | str:
        """The parts to run one by one with what they write; or why the policy has to be called as a whole."""
        if self._is_opaque:
            return "trust_policy=True"
        parts = parts_of(policy)
        if parts is None:
            return "it is none of tensordict's modules, or has a forward of its own"
        if self._writes is None:
            return "its first call was no plain sequence of its parts, or wrote what none of them declares"
        inside = {module for part in parts for module in _inside(part)}
        inside |= {part for part in parts if self._projection(part) is not None}
        self._calls_hooks = policy not in inside and self._has_final_hooks(policy)
        if self._calls_hooks:
            inside.add(policy)
        if is_altered(module for module in policy.modules() if module not in inside):
            # What is hooked to a part sees the TensorDict, and may do anything to it.
            return "it or a part of it has hooks or a forward of its own, or autocast is on"
        if [declared_by(part) for part in parts] != [writes.declared for writes in self._writes]:
            return "its parts are not those of its first call"
        if acting_type() is None and sum(isinstance(p, ProbabilisticTensorDictModule) for p in parts) > 1:
            return "of several samplers, the sequence decides whose default counts"
        return list(zip(parts, self._writes, strict=True))

    def _has_final_hooks(self, policy: nn.Module) -> bool:
        """Whether `policy` itself has hooks, and these see it after all parts, with what they have written."""
        if policy._forward_pre_hooks or policy._forward_hooks_always_called or "forward" in vars(policy):
            return False
        if any(type(hook).__module__.startswith("tensordict.") for hook in policy._forward_hooks.values()):
            return False  # it takes away what out_keys do not name
        written = {key for writes in self._writes or () for key in writes.leaves}
        return bool(policy._forward_hooks) and written == set(self._visible) and not any(map(is_private, written))

    def _hook_stage(self, policy: nn.Module) -> Stage:
        """What calls the hooks of `policy` with a TensorDict such as they would be given, and takes what they change.

        It holds copies of all, as a hook may well keep what it sees.
        """
        seen = Rows({}, self._present.batch_size)
        for key, tensor in {**self._present.tensors, **self._outputs.tensors}.items():
            seen.add(key, tensor)
        stage = TensorDictStage(partial(call_hooks, policy), seen, (), self._outputs, self._visible, self._device)
        stage.reason = f"{type(policy).__name__} has hooks, which are called with a TensorDict"
        self._read(policy, stage)
        return stage

    def _projection(self, part: Any) -> Stage | None:
        """What keeps the results of `part` to its spec, if TorchRL was asked for that."""
        return projection_stage(part, self._outputs.arrays) if self._fast and isinstance(part, nn.Module) else None

    def _stage(self, part: Any, writes: Writes, written: list[Key], later: Sequence[tuple[Any, Writes]]) -> Stage:
        """The quickest stage that does what `part` does, after others have `written`, and before the `later`."""
        outputs = self._outputs
        known = {**self._present.tensors, **{key: outputs.tensors[key] for key in written}}
        arrays = {**self._present.arrays, **{key: outputs.arrays[key] for key in written if key in outputs.arrays}}
        in_keys = [as_key(key) for key in part.in_keys]
        if acts_as(part) is ProbabilisticTensorDictModule and self._fast:
            late = self._may_finish_late(part, later)
            for stage_of in (sampling_stage, composite_stage):
                sampling: Stage | None = stage_of(part, arrays, self._outputs.arrays, acting_type(), late)
                if sampling is not None:
                    return sampling
        if self._fast and not is_altered(_inside(part)):
            peers = peer_stage(part, arrays, self._outputs.arrays, acting_type())
            if peers is not None:
                return peers
        if acts_as(part) is TensorDictModule and writes.are_tensors and all(key in known for key in in_keys):
            quick = self._quick(part, in_keys, arrays)
            if quick is not None:
                return quick
            held = part.module if part.method is None else getattr(part.module, part.method)
            call = self._as_called(held)
            torch_stage = TorchStage(part, call, [known[key] for key in in_keys], self._outputs, self._away)
            reading = self._read(held, torch_stage)
            if torch_stage.infers and self._away is None and reading is not None and reading.may_be_repeated:
                torch_stage.threads = self._choice([part.module, part.method, *_inside(part), *reading.modules])
            torch_stage.reason = self._why(part, "it is no small network of known layers and arithmetic")
            return torch_stage
        is_sampler = acts_as(part) is ProbabilisticTensorDictModule
        stage: Stage
        if is_sampler and writes.are_tensors and self._draws_plainly(part) and all(key in known for key in in_keys):
            params = {name: (key, known[key]) for name, key in params_of(part).items()}
            late = has_numbers_alone(part) and self._may_finish_late(part, later)
            stage = DistributionStage(part, params, self._outputs, late)
        else:
            call = self._as_called(part)
            stage = TensorDictStage(call, self._present, written, self._outputs, writes.leaves, self._device)
        refused = "its distribution, or how it is drawn from, is not known" if is_sampler else "it takes a TensorDict"
        stage.reason = self._why(part, refused)
        self._read(part, stage)
        return stage

    def _draws_plainly(self, part: ProbabilisticTensorDictModule) -> bool:
        """Whether `part` draws one sample from its distribution, where the rows lie, and does nothing else."""
        is_random = (acting_type() or part.default_interaction_type) is InteractionType.RANDOM
        return is_random and self._away is None and not self._compiled and draws_once(part)

    def _as_called(self, what: Callable[..., Any]) -> Callable[..., Any]:
        """A module or function that has to be called: compiled, if so asked. What is known would lose by it."""
        if not self._compiled:
            return what
        compiler.make_ready()
        options = self._compiled if isinstance(self._compiled, Mapping) else {}
        return torch.compile(what, **options)

    def _choice(self, network: list[Any]) -> ThreadChoice | None:
        """What chooses the number of threads for a `network` of these objects: the former, if it does the same.

        None if it is compiled, as then what watches a call would be compiled with it.
        """
        modules = [one for one in network if isinstance(one, nn.Module)]
        if any(vars(one).get("_compiled_call_impl") is not None for one in modules):
            return None
        settings = [own.get(name) for one in modules for own, name in _settings_of(one)]
        weights = [weight for one in modules for weight in one._parameters.values() if weight is not None]
        made = [*network, *(one for one in settings if not is_setting(one))]
        how = [*((one.shape, one.dtype) for one in weights), *(one for one in settings if is_setting(one))]
        how = [one for one in how if type(one) is not float]
        known = [choice for was, so, choice in self._former_choices if are_same(was, made) and so == how]
        choice = known[0] if known else ThreadChoice(list(dict.fromkeys(modules)))
        self._choices.append((made, how, choice))
        return choice

    def _read(self, what: Any, stage: Stage) -> Reading | None:
        """Find out whether what `stage` calls keeps no tensor and asks for no gradients; see NOTE [Keeping nothing]."""
        if self._compiled or has_global_extras():
            return None
        _, former = self._former.get(id(what), (None, None))
        reading = former if former is not None and former.is_current else Reading(what)
        self._readings[id(what)] = what, reading
        stage.infers = reading.keeps_nothing and (reading.is_librarys or not self._may_keep)
        stage.only_reads = stage.infers and reading.only_reads and self._away is None
        return reading

    @property
    def readings(self) -> list[Reading]:
        """What was read of what the last plan calls."""
        return [reading for _, reading in self._readings.values()]

    def _why(self, part: Any, refused: str) -> str:
        """Why `part` is called, if it was not `refused` for a reason that all parts share."""
        held = getattr(part, "module", part)
        name = getattr(held, "__name__", type(held).__name__)
        if not self._fast:
            return f"{name} is called: fast_policy=False, or it lies on another device"
        return f"{name} is called: {'it has hooks inside' if is_altered(_inside(part)) else refused}"

    def _quick(self, part: TensorDictModule, in_keys: list[Key], arrays: dict[Key, np.ndarray]) -> Stage | None:
        """The array form of a small network."""
        module = part.module
        ordinary = part.method is None and not part.method_kwargs and part._kwargs is None
        if not self._fast or not ordinary or not isinstance(module, nn.Module) or is_altered(module.modules()):
            return None
        sources, out_keys = [arrays[key] for key in in_keys if key in arrays], declared_by(part)
        if not sources or len(sources) != len(in_keys):
            return None
        stack = mlp_stage(module, sources[0], self._outputs, out_keys) if len(sources) == 1 else None
        return stack or traced_stage(module, sources, self._outputs, out_keys)

    def _may_finish_late(self, part: ProbabilisticTensorDictModule, later: Sequence[tuple[Any, Writes]]) -> bool:
        """Whether, when the slot is complete, its columns still hold what `part` used, and nobody has missed the rest.

        Sampling stages may then check their parameters and compute log-probabilities for all steps at once.
        """
        if is_kept_safe(part) or self._calls_hooks:
            return False  # its action may be changed behind it, and its log-probability seen
        used: list[Key] = [as_key(key) for key in part.in_keys]
        if part.return_log_prob:
            used.extend(declared_by(part))
            log_probs = [as_key(key) for key in part.log_prob_keys]
            if overlap(log_probs, self._carried):
                return False
            for reader, _ in later:
                if acts_as(reader) is None or overlap(log_probs, [as_key(key) for key in reader.in_keys]):
                    return False
        return not any(overlap(used, writes.leaves) for _, writes in later)


class Composition:
    """What a policy is made of, as far as plans depend on it, and where its weights lie; not their values.

    Looked at once per slot, and so in microseconds, most of which would go into fetching what nobody has used since the
    last slot: so little is looked at. Modules are not walked again, since one that is new, or gone, is noticed by
    whoever has it. torch counts the hooks that were ever made. What else modules hold is compared in one go, without a
    line of Python for each: what is the same is equal, as lists have it, before anybody asks for its value.
    """

    def __init__(self, policy: Any, readings: Sequence[Reading] = ()) -> None:
        """Remember what `policy` is made of now, and what was read of it."""
        modules = tuple(policy.modules()) if isinstance(policy, nn.Module) else ()
        modules = tuple(dict.fromkeys([*modules, *chain.from_iterable(one.modules for one in readings)]))
        modules = tuple(one for one in modules if not isinstance(one, torch.jit.ScriptModule))  # these are called
        self._readings = [one for one in readings if not one.is_librarys]
        counted = [(id(space), name) for one in readings for space, name in one.counted]
        self._attributes = [vars(module) for module in modules]
        samplers = [module for module in modules if isinstance(module, ProbabilisticTensorDictModule)]
        given = [module.distribution_kwargs for module in samplers if module.distribution_kwargs is not None]
        self._given = [own for own in given if not isinstance(own, dict) or own]
        full = [(own, name) for own in self._attributes for name in ("_modules", "_parameters") if own[name]]
        self._full = [own[name] for own, name in full]
        self._filled = list(map(dict, self._full))
        """Where modules and weights are kept, and which they are,"""
        self._series = [own[name] for own, name in full if name == "_modules" and len(own[name]) > 1]
        self._order = list(chain.from_iterable(self._series))  # as they run
        open_ = [vars(module) for module in modules if isinstance(module, CONTAINERS) or not _is_torchs(module)]
        inner = [own[name] for own in open_ for name in ("_modules", "_parameters")]
        inner += [own[name] for own in self._attributes for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._empty: list[Any] = [own for own in (*inner, *given) if isinstance(own, dict) and not own]
        """and where some may come that makes a difference."""
        self._users = [module for module in modules if _is_users(type(module))]
        self._sizes = [len(vars(module)) for module in self._users]
        """Modules with code of their own, and how many attributes they have: one more may hide one of their class,"""
        self._kinds = list(map(type, self._users))
        classes = [kind for own in self._kinds for kind in own.__mro__ if _is_users(kind)]
        pairs = [(vars(kind), name) for kind in dict.fromkeys(classes) for name in vars(kind) if _is_read(kind, name)]
        self._spaces, self._class_names = [space for space, _ in pairs], [name for _, name in pairs]
        self._class_values = list(map(MappingProxyType.get, self._spaces, self._class_names))
        """which may have others in their place, too."""
        self._switched = [module for module in modules if hasattr(type(module), "recurrent_mode")]
        """TorchRL's modules, which a context may switch over."""
        settings = [pair for module in modules for pair in _settings_of(module)]
        settings = [(own, name) for own, name in settings if (id(own), name) not in counted]
        held = [*full, *settings, *((own, "forward") for own in self._attributes)]
        self._held_by, self._names = [own for own, _ in held], [name for _, name in held]
        weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
        self._lazy = [weight for weight in weights if nn.parameter.is_lazy(weight)]
        self.weights = [weight for weight in weights if not nn.parameter.is_lazy(weight)]
        """All that there are of modules that were found."""
        self._memory = [weight.detach() for weight in self.weights]  # which no other weight can get meanwhile
        self._has_autocast = _is_autocast()
        self._held = list(map(dict.get, self._held_by, self._names))
        """Settings, and what keeps modules and weights; they stay alive here, so that no other takes their id."""
        self._hooks, self._added = RemovableHandle.next_id, self._additions()
        self._has_additions = bool(self._added)
        self._has_rare, self._rare = bool(self._given or self._lazy or self._switched), self._look_at_the_rare()

    def _additions(self) -> list[Any]:
        """Hooks."""
        hooks = [nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks]
        hooks += [own[name] for own in self._attributes for name in ("_forward_hooks", "_forward_pre_hooks")]
        return list(chain.from_iterable(map(dict.values, hooks)))

    def _look_at_the_rare(self) -> list[Any]:
        return [
            [[(name, value if isinstance(value, bool) else 0) for name, value in own.items()] for own in self._given],
            [nn.parameter.is_lazy(weight) for weight in self._lazy],
            [module.recurrent_mode for module in self._switched],
        ]

    @property
    def _has_other_code(self) -> bool:
        """Whether modules with code of their own have become others, or something of their classes has."""
        if not all(map(is_, map(type, self._users), self._kinds)):
            return True
        if list(map(len, map(vars, self._users))) != self._sizes:
            return True
        found = map(MappingProxyType.get, self._spaces, self._class_names)
        return not all(map(is_, found, self._class_values))

    @property
    def has_changed(self) -> bool:
        """Whether it is made of something else by now."""
        try:
            if self._full != self._filled or list(chain.from_iterable(self._series)) != self._order or any(self._empty):
                return True
            if list(map(dict.get, self._held_by, self._names)) != self._held:
                return True
        except Exception:  # something else that cannot be compared: what is not the same is asked for its value
            return True
        if self._users and self._has_other_code:
            return True
        if self._has_additions or RemovableHandle.next_id != self._hooks:  # which may also go
            hooks = RemovableHandle.next_id
            if not are_same(self._additions(), self._added):
                return True
            self._hooks = hooks
        if self._has_rare and self._look_at_the_rare() != self._rare:
            return True
        if self._readings and any([reading.has_changed for reading in self._readings]):
            return True
        # Weights may lie elsewhere by now, or be seen there in another way: transposed or in part, for instance.
        is_in_place = all(map(Tensor.is_set_to, self.weights, self._memory))
        return not is_in_place or _is_autocast() != self._has_autocast


_is_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", None) or partial(
    torch.is_autocast_enabled, "cpu"
)
"""Whether results may have another type, on some device: to name the device takes longer than all else."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules of torch that do what those do that they hold."""
TORCH_SETTINGS = ("negative_slope", "beta", "threshold", "alpha", "eps", "approximate", "p")
"""What may be set on torch's modules."""
SAMPLER_SETTINGS = ("distribution_class", "distribution_kwargs", "default_interaction_type", "return_log_prob")


def _settings_of(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """What may be set on a module at any time, and changes what it does: where that is kept, and its names there."""
    if isinstance(module, ProbabilisticTensorDictModule):
        return [(vars(module), name) for name in SAMPLER_SETTINGS]
    if isinstance(module, TensorDictModule):
        names = ("module", "method") if "module" in vars(module) else ("method",)  # modules are kept elsewhere
        return [(vars(module), name) for name in names]
    if isinstance(module, nn.RNNBase):
        return [(vars(module), name) for name in ("training", "dropout")]
    if _is_torchs(module):
        found = [(vars(module), name) for name in TORCH_SETTINGS if name in vars(module)]
        return [*found, (vars(module), "training")] if type(module) is nn.Dropout else found
    own = vars(module)  # at which a forward of its own may look
    return [(own, name) for name, value in own.items() if is_setting(value)]


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _is_users(kind: type) -> bool:
    """Whether a class is none that comes with a library, and so stays as it is."""
    return not is_librarys(kind) and not kind.__module__.startswith(("torchrl.", "swath."))


def _is_read(kind: type, name: str) -> bool:
    """Whether a traced forward may depend on what a class of the user's has under a name."""
    value = vars(kind)[name]
    return isinstance(value, FunctionType | property) or (name.isupper() and is_setting(value))


def _inside(part: Any) -> list[nn.Module]:
    """What `part` is made of, without itself."""
    return [module for module in part.modules() if module is not part] if isinstance(part, nn.Module) else []


def is_altered(modules: Iterable[nn.Module]) -> bool:
    """Whether calling a policy does more than its `modules` say: hooks, a forward of their own, or autocast."""
    return has_global_extras() or any(map(_has_extras, modules))


def has_global_extras() -> bool:
    """Whether calling any module does more than it says."""
    hooks = nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks
    return bool(hooks) or torch.is_autocast_enabled("cpu")


def call_hooks(module: nn.Module, tensordict: TensorDictBase) -> Any:
    """What becomes of `tensordict`, the answer of `module`, once its hooks have seen it."""
    answer: Any = tensordict
    for number, hook in list(module._forward_hooks.items()):
        named: list[Any] = [{}] if number in module._forward_hooks_with_kwargs else []
        changed = hook(module, (tensordict,), *named, answer)
        answer = answer if changed is None else changed
    return answer


def _has_extras(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in module.__dict__
