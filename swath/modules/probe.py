"""What a policy reads and writes, found out by calling it once without leaving a trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor, nn

from swath.envs.base import EnvBase
from swath.envs.rows import Rows
from swath.errors import PolicyError, RowCountError, annotate, suggestion
from swath.keys import IS_INIT, Key, after, as_key, as_path, nest
from swath.modules.called import ask
from swath.modules.exploration import acting_type
from swath.modules.keeping import Reading
from swath.modules.parts import Watch, Writes, is_left_alone, overlap
from swath.modules.watching import Made
from swath.modules.without_trace import without_trace

DTYPES = "(Where dtypes are at odds, gymnasium.wrappers.DtypeObservation or policy.double() help.)"


class Probe:
    """The result of one call: what is written, which of it can be seen, which keys are recurrent state."""

    written: dict[Key, Tensor]
    """Everything that the policy writes, as copies on the rows' device."""
    visible: list[Key]
    """The keys that are left in the TensorDict; a sequence may hide what only its parts need."""
    writes: list[Writes] | None
    """What each part writes; None if the policy has to be called as a whole. See NOTE [Parts]."""

    def __init__(
        self, policy: Any, env: EnvBase, present: Rows, device: torch.device | None, opaque: bool = False
    ) -> None:
        """Call `policy` with `present`, to which the entries are added that only the policy asks for."""
        self._policy = policy
        self._env = env
        self._present = present
        self._device = device
        self._opaque = opaque
        reading = Reading(policy)
        self._made = Made() if reading.keeps_nothing and not reading.is_librarys else None
        self.state = self._find_state()
        missing = [read for read, _ in self.state if read not in present.tensors]
        if missing:
            self._settle(missing)
        else:
            self._call()
        self._must_act()
        self.may_keep = self._made is None or not self._made.are_gone
        """Whether a tensor of the call may be kept somewhere: unless all of them are gone by now."""

    def _find_state(self) -> list[tuple[Key, Key]]:
        """Pairs (read, written); `is_init` is added to the present, anything else unknown is an error."""
        out_keys = set(_keys_of(self._policy, "out_keys"))
        known = self._present.tensors
        pairs: list[tuple[Key, Key]] = []
        for key in _keys_of(self._policy, "in_keys"):
            if key in self._env.observation_keys:
                continue
            if after(key) in out_keys or key in out_keys:
                pairs.append((key, after(key) if after(key) in out_keys else key))
            elif key == IS_INIT:
                self._present.add(key, self._zeros((1,), torch.bool))
            elif not overlap([key], [*known, *out_keys]) and not getattr(self._policy, "partial_tolerant", False):
                # What holds others that it writes, as the parameters of a composite distribution do, comes from it.
                names = [_name(k) for k in known]
                raise PolicyError(
                    f"The policy reads {_name(key)!r}, but the env {self._env!r} offers only {', '.join(names)}."
                    f"{suggestion(_name(key), names)} Correct the policy's in_keys; a key that it both reads and "
                    "writes is taken for recurrent state."
                )
        return pairs

    # -- recurrent state ---------------------------------------------------------------------------------------

    def _settle(self, missing: list[Key]) -> None:
        """Find shapes for state entries with which the policy runs and which it gives back."""
        failure: Exception | None = None
        written_as = dict(self.state)
        dtype = _floating_type(self._policy)
        for shapes in self._candidates(missing):
            for _ in range(3):  # a first guess may run and tell the right shapes by what it writes
                for key, shape in shapes.items():
                    self._present.add(key, self._zeros(shape, dtype))
                try:
                    self._call()
                except Exception as error:  # a wrong guess may fail in any way the policy likes
                    failure = error
                    break
                dims = len(self._present.batch_size)
                given = {key: tuple(self.written[written_as[key]].shape[dims:]) for key in missing}
                if given == shapes:
                    for key in missing:
                        self._present.add(key, torch.zeros_like(self.written[written_as[key]]))
                    return
                shapes = given
        raise PolicyError(
            f"The shape of the policy's recurrent state {missing} could not be found out. Set it on the policy: "
            f"policy.state_shapes = {{{missing[0]!r}: (hidden_size,)}}."
        ) from failure

    def _candidates(self, missing: list[Key]) -> Iterator[dict[Key, tuple[int, ...]]]:
        """Guesses: what the policy says itself, then the sizes of its recurrent and linear layers."""
        given = getattr(self._policy, "state_shapes", None)
        if given is not None:
            if absent := [key for key in missing if key not in given]:
                raise PolicyError(f"policy.state_shapes has {list(given)}, but not the recurrent state {absent}.")
            yield {key: tuple(given[key]) for key in missing}
            return
        for guess in [*guessed_shapes(self._policy), (1,)]:
            yield dict.fromkeys(missing, guess)

    # -- the call ----------------------------------------------------------------------------------------------

    def _call(self) -> None:
        """Call the policy as a whole, and see what it writes."""
        inputs = {key: tensor.clone() for key, tensor in self._present.tensors.items()}
        request = TensorDict(nest(inputs), batch_size=self._present.batch_size, device=self._device)
        before = _leaves(request)
        watch = Watch(None if self._opaque else self._policy)
        # Every distribution can be sampled; many have nothing to offer for tensordict's default, a deterministic value.
        kind = acting_type() or InteractionType.RANDOM
        with (
            torch.no_grad(),
            set_interaction_type(kind),
            without_trace(self._policy),
            watch.looking(),
            self._made or nullcontext(),
        ):
            try:
                answer = ask(self._policy, request)
            except Exception as error:
                if self._names_more():
                    return self._call()
                if isinstance(error, RuntimeError) and "batch dimension mismatch" in str(error):
                    raise self._row_count(str(error)) from error
                seen = ", ".join(f"{_name(k)} {v.dtype} {list(v.shape)}" for k, v in inputs.items())
                annotate(error, f"Raised by the policy's first call, in {self._env!r}, with {seen}. {DTYPES}")
                raise
        declared = set(_keys_of(self._policy, "out_keys"))
        visible = {k: v for k, v in _leaves(answer).items() if k in declared or not is_left_alone(v, before.get(k))}
        self.writes = watch.conclude(visible)
        self.visible = list(visible)
        self.written = {key: self._held(key, value) for key, value in visible.items()}
        if self.writes is not None:
            hidden = {key: value for key, value in watch.written.items() if key not in visible}
            self.written |= {key: self._held(key, value) for key, value in hidden.items()}

    def _held(self, key: Key, value: Tensor) -> Tensor:
        """A copy of `value` as rows can hold it."""
        lanes = self._present.batch_size
        if tuple(value.shape[: len(lanes)]) != lanes:
            raise PolicyError(
                f"The policy wrote {_name(key)!r} of shape {tuple(value.shape)}, which does not begin with the env's "
                f"batch size {lanes}."
            )
        if value.dtype is torch.bfloat16:  # numpy has no such type
            value = value.float()
        return value.detach().to(self.place).clone(memory_format=torch.contiguous_format)

    def _row_count(self, said: str) -> RowCountError:
        """The error for an answer that has not a row for each lane, of which tensordict has `said` what it knows."""
        found, lanes = re.search(r"value\.shape=torch\.Size\((\[.*?\])\)", said), list(self._present.batch_size)
        shape = f" of shape {found[1]}" if found else ""
        return RowCountError(
            f"The policy's answer{shape} has not a row for each lane of {self._env!r}: "
            f"its shape must begin with {lanes}, as that of what it reads does. Begin it with observation.shape[:-1], "
            "or compute it from the observation."
        )

    def _names_more(self) -> bool:
        """Whether a plain policy returns more than the action; the others are called output1, output2 and so on."""
        if not getattr(self._policy, "names_results", False):
            return False
        self._policy.names_results = False
        inputs = [self._present.tensors[key].clone().to(self._device) for key in _keys_of(self._policy, "in_keys")]
        try:
            results = self._policy.module(*inputs)
        except Exception:
            return False
        named = len(self._policy.out_keys)
        if not isinstance(results, tuple) or len(results) <= named:
            return False
        self._policy.out_keys = [*self._policy.out_keys, *(f"output{i + 1}" for i in range(len(results) - named))]
        return True

    def _must_act(self) -> None:
        names = [_name(key) for key in self.visible]
        for key in self._env.action_keys:
            if key not in self.visible:
                raise PolicyError(
                    f"The policy wrote {', '.join(names) or 'nothing'}, but not {_name(key)!r}, which the env "
                    f"{self._env!r} needs.{suggestion(_name(key), names)} Give it out_keys=[{key!r}]."
                )

    @property
    def place(self) -> torch.device:
        """Where the rows lie."""
        return next(iter(self._present.tensors.values())).device

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*self._present.batch_size, *shape, dtype=dtype, device=self.place)


def guessed_shapes(policy: Any) -> list[tuple[int, ...]]:
    """Shapes that the state of `policy` may have: the sizes of its recurrent and linear layers.

    What stands for a policy elsewhere, as the client of an InferenceServer, says them itself.
    """
    if (guesses := getattr(policy, "state_guesses", None)) is not None:
        return list(guesses)
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    found: dict[tuple[int, ...], None] = {}
    for module in modules:
        if isinstance(module, nn.RNNCellBase):
            found[(module.hidden_size,)] = None
        elif isinstance(module, nn.RNNBase):
            found[(module.num_layers, module.hidden_size)] = None
            found[(module.hidden_size,)] = None
    for module in modules:
        if isinstance(module, nn.Linear):
            found[(module.out_features,)] = None
    return list(found)


def _keys_of(policy: Any, attribute: str) -> list[Key]:
    keys = getattr(policy, attribute, None) or ()
    return [keys] if isinstance(keys, str) else [as_key(key) for key in keys]


def _leaves(tensordict: TensorDictBase) -> dict[Key, Tensor]:
    leaves = {as_key(key): value for key, value in tensordict.items(True, True)}
    return {key: value for key, value in leaves.items() if isinstance(value, Tensor)}


def _name(key: Key) -> str:
    return "/".join(as_path(key))


def _floating_type(policy: Any) -> torch.dtype:
    """The type in which `policy` computes, as far as its parameters tell."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else ()
    floating = (parameter.dtype for parameter in parameters if parameter.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())
