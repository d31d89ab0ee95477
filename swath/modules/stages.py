"""The stages of a plan: what is done in each step, on rows, in order.

A stage is bound to rows once. `begin` is called before each slot and may draw or fetch what all its steps need, `run`
is called every step, and `finish` may compute, for the whole slot at once, what no step needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from swath.envs.rows import Rows
from swath.envs.spaces import ActionCodec
from swath.errors import PolicyError
from swath.keys import Key, as_key, as_path, is_private, nest
from swath.modules.exploration import told_to_modules


class Stage(Protocol):
    """One part of a policy."""

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Make ready for `steps` steps."""

    def run(self, t: int) -> None:
        """Do the work of step `t`."""

    def finish(self, columns: Mapping[Key, Tensor], steps: int) -> None:
        """Fill the stage's late entries, given all columns `[N, T, ...]` of which `steps` steps are valid."""


class Plain:
    """A stage with nothing to do before or after the steps."""

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Nothing to make ready."""

    def finish(self, columns: Mapping[Key, Tensor], steps: int) -> None:
        """Nothing is late."""


class RandomStage(Plain):
    """Actions drawn from the action space for a whole slot at once."""

    def __init__(self, codec: ActionCodec, outputs: Rows) -> None:
        """Draw into the action entries of `outputs`, encoded as these are."""
        self._codec = codec
        self._outputs = outputs
        self._leaves = {key: outputs.leaf(key) for key in codec.leaves}
        self._drawn: list[tuple[Tensor, Tensor]] = []

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the actions of all steps."""
        drawn = self._codec.draw(self._leaves, steps, self._outputs.lanes, generator)
        self._drawn = [
            (self._outputs.tensors[k], v.view(steps, *self._outputs.tensors[k].shape)) for k, v in drawn.items()
        ]

    def run(self, t: int) -> None:
        """Take the actions of step `t`."""
        for target, drawn in self._drawn:
            target.copy_(drawn[t])


class EchoStage(Plain):
    """What is present, as it is: for observations that a policy writes over, when it does not act."""

    def __init__(self, present: Rows, outputs: Rows, keys: Sequence[Key]) -> None:
        """Copy `keys`, as far as the policy leaves them their shape."""
        pairs = [(outputs.tensors[key], present.tensors[key]) for key in keys]
        self._pairs = [(target, source) for target, source in pairs if target.shape == source.shape]

    def run(self, t: int) -> None:
        """Copy."""
        for target, source in self._pairs:
            target.copy_(source)


class TorchStage(Plain):
    """A module called directly on tensors: what a TensorDictModule holds, without the TensorDict around it.

    It is given copies: rows are written over in the next step, but a module may keep what it is given, or change it.
    """

    def __init__(
        self,
        part: TensorDictModule,
        inputs: Sequence[Tensor],
        outputs: Rows,
        device: torch.device | None,
    ) -> None:
        """Call what `part` holds with `inputs`; its results, one per key, go to `outputs`."""
        self._call = part.module if part.method is None else getattr(part.module, part.method)
        self._names, self._options = part._kwargs, part.method_kwargs
        self._inputs = tuple(inputs)
        self._outputs = outputs
        self._keys = tuple(as_key(key) for key in part.out_keys)
        self._device = device

    def run(self, t: int) -> None:
        """Call the module and keep its results."""
        device = self._device
        inputs = [x.clone() if device is None else x.to(device) for x in self._inputs]
        with told_to_modules():
            if self._names is None:
                results = self._call(*inputs, **self._options)
            else:
                results = self._call(**dict(zip(self._names, inputs, strict=True)), **self._options)
        if isinstance(results, Mapping | TensorDictBase):
            results = tuple(results[key] for key in self._keys)
        elif not isinstance(results, tuple):
            results = (results,)
        if len(results) != len(self._keys):
            raise PolicyError(f"The policy returned {len(results)} results for its out_keys {list(self._keys)}.")
        for key, result in zip(self._keys, results, strict=True):
            if key != "_":
                if not isinstance(result, Tensor):
                    raise PolicyError(f"The policy returned {type(result).__name__} for {key!r}; it must be a tensor.")
                self._outputs.put(key, result, "The policy")


class TensorDictStage(Plain):
    """Whatever takes a TensorDict and returns one. The general way, and the slow one."""

    def __init__(
        self,
        call: Any,
        present: Mapping[Key, Tensor],
        made: Mapping[Key, Tensor],
        outputs: Rows,
        out_keys: Sequence[Key],
        device: torch.device | None,
    ) -> None:
        """Call `call` with a TensorDict; entries `out_keys` of its answer go to `outputs`.

        The TensorDict holds copies of what is `present`, for the reason given at `TorchStage`, and what earlier stages
        have `made`, as it is: a part that changes that in place means it.
        """
        self._call = call
        self._present = {key: tensor for key, tensor in present.items() if key not in made}
        self._made = made
        self._outputs = outputs
        self._keys = tuple(out_keys)
        self._private = [key for key in self._keys if is_private(key)]
        self._kept: dict[Key, Tensor] = {}
        """What the policy wrote for itself in its last call: it may look for it in the next, as noise processes do."""
        self._device = device

    def run(self, t: int) -> None:
        """Call the policy and keep what it promised."""
        inputs = {key: tensor.clone() for key, tensor in self._present.items()}
        inputs.update(self._made)
        inputs.update(self._kept)
        answer = ask(self._call, TensorDict(nest(inputs), self._outputs.batch_size, device=self._device))
        for key in self._keys:
            value = answer.get(key, None)
            if value is None:
                raise PolicyError(
                    f"The policy wrote {'/'.join(as_path(key))!r} in its first call, but not in this one."
                )
            self._outputs.put(key, value, "The policy")
        if self._private:
            self._kept = {key: answer.get(key) for key in self._private}


def ask(call: Any, request: TensorDictBase) -> TensorDictBase:
    """The answer of a policy that takes a TensorDict."""
    with told_to_modules():
        answer = call(request)
    if not isinstance(answer, TensorDictBase):
        raise PolicyError(
            f"The policy was called with a TensorDict and returned {type(answer).__name__}; it must return the "
            "TensorDict with the action in it."
        )
    return answer
