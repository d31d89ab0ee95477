"""What a policy reads and writes, found out by calling it once without leaving a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn

from swath.envs.base import EnvBase
from swath.envs.rows import Rows
from swath.errors import PolicyError, annotate, suggestion
from swath.keys import FLAGS, IS_INIT, Key, after, as_key, as_path, nest
from swath.modules.stages import ask

SEQUENCES = (TensorDictSequential, ProbabilisticTensorDictSequential)


def parts_of(policy: Any) -> list[Any] | None:
    """The modules of a sequence in order, `[policy]` for a single known module, None for anything else."""
    if type(policy) in SEQUENCES:
        parts: list[Any] = []
        for module in policy.module:
            inner = parts_of(module)
            parts.extend([module] if inner is None else inner)
        return parts if all(isinstance(part, TensorDictModuleBase) for part in parts) else None
    return [policy] if type(policy) in (TensorDictModule, ProbabilisticTensorDictModule) else None


class Probe:
    """The result of one call: what is written, which of it is delivered, which keys are recurrent state."""

    def __init__(self, policy: Any, env: EnvBase, present: Rows, device: torch.device | None) -> None:
        """Call `policy` with `present`, to which the entries are added that only the policy asks for."""
        self._policy = policy
        self._env = env
        self._present = present
        self._device = device
        self.state = self._find_state()
        missing = [read for read, _ in self.state if read not in present.tensors]
        self.written = self._settle(missing) if missing else self._call()
        declared = [as_key(key) for key in getattr(policy, "out_keys", None) or ()]
        self.delivered = [key for key in declared if key in self.written] or list(self.written)
        self._must_act()

    def _find_state(self) -> list[tuple[Key, Key]]:
        """Pairs (read, written); flags and `is_init` are added to the present, anything else unknown is an error."""
        in_keys = [as_key(key) for key in getattr(self._policy, "in_keys", None) or ()]
        out_keys = {as_key(key) for key in getattr(self._policy, "out_keys", None) or ()}
        known = self._present.tensors
        pairs: list[tuple[Key, Key]] = []
        for key in in_keys:
            if key in known and key in self._env.observation_keys:
                continue
            if after(key) in out_keys or key in out_keys:
                pairs.append((key, after(key) if after(key) in out_keys else key))
            elif key in (IS_INIT, *FLAGS):
                self._present.add(key, self._zeros((1,), torch.bool))
            elif key not in known:
                names = ["/".join(as_path(k)) for k in known]
                raise PolicyError(
                    f"The policy reads {'/'.join(as_path(key))!r}, but the env {self._env!r} offers only "
                    f"{', '.join(names)}.{suggestion('/'.join(as_path(key)), names)} Correct the policy's in_keys; a key "
                    "that it both reads and writes is taken for recurrent state."
                )
        return pairs

    def _settle(self, missing: list[Key]) -> dict[Key, Tensor]:
        """Find shapes for state entries with which the policy runs and which it gives back."""
        failure: Exception | None = None
        writes = dict(self.state)
        for shapes in self._candidates(missing):
            for _ in range(3):  # a first guess may run and tell the right shapes by what it writes
                for key, shape in shapes.items():
                    self._present.add(key, self._zeros(shape, torch.get_default_dtype()))
                try:
                    written = self._call()
                except Exception as error:  # a wrong guess may fail in any way the policy likes
                    failure = error
                    break
                dims = len(self._present.batch_size)
                given = {key: tuple(written[writes[key]].shape[dims:]) for key in missing}
                if given == shapes:
                    for key in missing:
                        self._present.add(key, torch.zeros_like(written[writes[key]]))
                    return written
                shapes = given
        raise PolicyError(
            f"The shape of the policy's recurrent state {missing} could not be found out. Set it on the policy: "
            f"policy.state_shapes = {{{missing[0]!r}: (hidden_size,)}}."
        ) from failure

    def _candidates(self, missing: list[Key]) -> Iterator[dict[Key, tuple[int, ...]]]:
        """Guesses: what the policy says itself, then the sizes of its recurrent and linear layers."""
        told = getattr(self._policy, "state_shapes", None)
        if told is not None:
            yield {key: tuple(told[key]) for key in missing}
            return
        modules = list(self._policy.modules()) if isinstance(self._policy, nn.Module) else []
        guesses: dict[tuple[int, ...], None] = {}
        for module in modules:
            if isinstance(module, nn.RNNCellBase):
                guesses[(module.hidden_size,)] = None
            elif isinstance(module, nn.RNNBase):
                guesses[(module.num_layers, module.hidden_size)] = None
                guesses[(module.hidden_size,)] = None
        for module in modules:
            if isinstance(module, nn.Linear):
                guesses[(module.out_features,)] = None
        for guess in [*guesses, (1,)]:
            yield dict.fromkeys(missing, guess)

    def _call(self) -> dict[Key, Tensor]:
        """Copies of all that the policy writes, on the rows' device."""
        inputs = {key: tensor.clone() for key, tensor in self._present.tensors.items()}
        parts = parts_of(self._policy)
        call = self._policy if parts is None else _in_order(parts)
        with torch.no_grad(), without_trace(self._policy):
            try:
                answer = ask(call, nest(inputs), self._present.batch_size, self._device)
            except Exception as error:
                seen = {"/".join(as_path(k)): tuple(v.shape) for k, v in inputs.items()}
                annotate(
                    error,
                    f"Raised by the policy's first call, with the first observation of {self._env!r}: {seen}.",
                )
                raise
        declared = {as_key(key) for key in getattr(self._policy, "out_keys", None) or ()}
        device = next(iter(self._present.tensors.values())).device
        written: dict[Key, Tensor] = {}
        for raw, value in answer.items(True, True):
            key = as_key(raw)
            unchanged = key in inputs and value is inputs[key]
            if isinstance(value, Tensor) and key != "_" and (key in declared or not unchanged):
                shape = self._present.batch_size
                if tuple(value.shape[: len(shape)]) != shape:
                    raise PolicyError(
                        f"The policy wrote {key!r} of shape {tuple(value.shape)}, which does not begin with the env's "
                        f"batch size {shape}."
                    )
                written[key] = value.detach().clone(memory_format=torch.contiguous_format).to(device)
        return written

    def _must_act(self) -> None:
        for key in self._env.action_keys:
            if key not in self.written:
                names = ["/".join(as_path(k)) for k in self.written]
                raise PolicyError(
                    f"The policy wrote {', '.join(names) or 'nothing'}, but not {key!r}, which the env {self._env!r} "
                    f"needs.{suggestion(str(key), names)} Give it out_keys=[{key!r}]."
                )

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        device = next(iter(self._present.tensors.values())).device
        return torch.zeros(*self._present.batch_size, *shape, dtype=dtype, device=device)


def _in_order(parts: list[Any]) -> Any:
    def call(tensordict: TensorDictBase) -> TensorDictBase:
        for part in parts:
            answer = part(tensordict)
            if answer is not tensordict:
                tensordict.update(answer)
        return tensordict

    return call


@contextmanager
def without_trace(policy: Any) -> Iterator[None]:
    """Put random generators and the policy's buffers back as they were."""
    buffers: Mapping[str, Tensor] = {}
    if isinstance(policy, nn.Module):
        buffers = {n: b.clone() for n, b in policy.named_buffers() if not nn.parameter.is_lazy(b)}
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for name, buffer in policy.named_buffers() if buffers else ():
                if name in buffers:
                    buffer.copy_(buffers[name])
