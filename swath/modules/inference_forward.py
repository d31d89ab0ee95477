"""One forward for many requests: their rows are put together, the policy is called once, the answers taken apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, TensorDictModule
from torch import Tensor, nn

from swath.entries import peek, trusted
from swath.envs.base import EnvBase
from swath.envs.rows import Rows
from swath.errors import RowCountError
from swath.keys import Key, as_key
from swath.modules.called import ask
from swath.modules.exploration import ExploringHere
from swath.modules.mlp import MLPStage, flatten
from swath.modules.parts import parts_of
from swath.modules.plan import Composition, Planner
from swath.modules.probe import Probe
from swath.modules.sampling import SamplingStage
from swath.modules.stages import Stage
from swath.runtime.columns import Columns, Leaf, array_of, tensor_of

AHEAD = 64
"""For how many forwards noise is drawn at a time, where it is drawn ahead."""
ONE_STEP = (slice(None), slice(1))
VERSION = Leaf((), torch.int64)

Leaves = tuple[tuple[Key, Leaf], ...]
"""Entries in order: key, and shape and dtype of one row."""


class RequestLayout:
    """What a request looks like: its entries, and its batch size, which may be anything, also `()`.

    Attributes:
        leaves: its entries.
        batch_size: of its TensorDict.
        rows: how many rows it has in a forward.
        forward: that of the last request that looked like this, in a server that has seen one.
    """

    __slots__ = ("batch_size", "forward", "leaves", "rows")

    def __init__(self, leaves: Leaves, batch_size: tuple[int, ...]) -> None:
        """Of no forward yet."""
        self.leaves, self.batch_size = leaves, batch_size
        self.rows = math.prod(batch_size)
        self.forward: Forward | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Forwards are of one server."""
        return RequestLayout, (self.leaves, self.batch_size)


def entries_of(tensordict: TensorDictBase, keys: Sequence[Key] | None) -> dict[Key, Tensor]:
    """The tensors that a request is made of: those under `keys` that are there, or all."""
    if keys is None:
        return {as_key(key): v for key, v in tensordict.items(True, True) if isinstance(v, Tensor)}
    found: dict[Key, Tensor] = {}
    for key in keys:
        value = peek(tensordict, key)
        if isinstance(value, Tensor):
            found[key] = value
        elif isinstance(value, TensorDictBase):
            found.update({as_key((key, name)): inner for name, inner in entries_of(value, None).items()})
    return found


def look_of(entries: dict[Key, Tensor], batch_size: torch.Size) -> tuple[Any, ...]:
    """What tells requests of different layouts apart, quickly."""
    look: list[Any] = [batch_size]
    for key, value in entries.items():
        look += key, value.shape, value.dtype
    return tuple(look)


def layout_of(entries: dict[Key, Tensor], batch_size: torch.Size) -> RequestLayout:
    """The layout of a request."""
    dims = len(batch_size)
    return RequestLayout(tuple((key, Leaf.of(value, dims)) for key, value in entries.items()), tuple(batch_size))


def tensors_of(entries: dict[Key, Tensor], layout: RequestLayout) -> list[Tensor]:
    """The entries as plain tensors `[rows, ...]` here; for a batch size of `()`, of one row without its dimension."""
    tensors = [
        value
        if type(value) is Tensor and value.is_cpu and not value.requires_grad and value.layout is torch.strided
        else tensor_of(array_of(value.detach().cpu()), value.dtype)
        for value in entries.values()
    ]
    if len(layout.batch_size) > 1:
        return [t.reshape(layout.rows, *leaf.shape) for t, (_, leaf) in zip(tensors, layout.leaves, strict=True)]
    return tensors


def arrays_of(entries: dict[Key, Tensor], layout: RequestLayout) -> list[np.ndarray]:
    """The same as arrays."""
    return [array_of(tensor) for tensor in tensors_of(entries, layout)]


class Rowed(Protocol):
    """A request, as a forward sees it."""

    tensors: list[Tensor]
    layout: RequestLayout


class Outputs(NamedTuple):
    """What a forward has written, for the rows of all its requests one after the other."""

    leaves: Leaves
    """The very same object for as long as forwards write the same."""
    arrays: list[np.ndarray]
    """Of these alone: nobody writes to them again."""


class Forward:
    """A policy for requests of the same entries and the same exploration type.

    Small networks and known distributions run as stages on rows, as they do in a collector; whatever else the policy
    is, it is called with a TensorDict `[rows]`.
    """

    def __init__(
        self,
        policy: Any,
        leaves: Leaves,
        kind: InteractionType | None,
        device: torch.device | None,
        version_key: Key | None,
        generator: torch.Generator | None,
    ) -> None:
        """Call `policy`, which lies on `device`, with rows of `leaves`; noise that is drawn ahead is of `generator`."""
        self._policy, self.kind, self._device, self._generator = policy, kind, device, generator
        self._leaves, self._version_key = dict(leaves), version_key
        self._out_keys = {as_key(key) for key in getattr(policy, "out_keys", None) or ()}
        self._capacity = 0
        self._columns = Columns(self._leaves, (0,))
        self._places: dict[int, list[Tensor]] = {}
        """Of the columns, as many rows as a forward has had."""
        self._outputs = Rows({})
        self._stages: list[Stage] | None = None
        self._visible: list[Key] = []
        self._may_plan = _is_small(policy) and (device is None or device.type == "cpu")
        self._composition: Composition | None = None
        self._time = AHEAD
        self._described: Leaves = ()

    def renew(self) -> None:
        """The policy has other weights, or was changed in another way: fetch anew what was taken from it."""
        self._time = AHEAD
        if self._composition is not None and self._composition.has_changed:
            self._stages, self._composition, self._may_plan = None, None, _is_small(self._policy)

    @property
    def is_quick(self) -> bool:
        """Whether it runs as stages: in less time than it takes to wake a thread, and without a call of a module."""
        return self._stages is not None

    def is_quick_for(self, requests: Sequence[Rowed]) -> bool:
        """Whether it does for so many rows."""
        return self._stages is not None and sum([request.layout.rows for request in requests]) <= self._capacity

    def run(self, requests: Sequence[Rowed], version: int) -> Outputs:
        """Call the policy once, with the rows of all `requests`."""
        count = sum([request.layout.rows for request in requests])
        if count > self._capacity:
            self._make_room(count)
        self._put_together(requests, count)
        if self._stages is not None:
            arrays = self._run_stages(self._stages, count)
        else:
            with nullcontext() if self.kind is None else ExploringHere(self.kind):
                written = self._run_module(count)
                if self._may_plan:
                    self._plan()
            arrays = [array for array, _ in written.values()]
            self._describe({key: Leaf(array.shape[1:], dtype) for key, (array, dtype) in written.items()})
        if self._version_key is not None:
            versions = np.empty(count, np.int64)
            versions.fill(version)
            arrays.append(versions)
        return Outputs(self._described, arrays)

    def _put_together(self, requests: Sequence[Rowed], count: int) -> None:
        """The rows of all requests, one after the other."""
        places = self._places.get(count)
        if places is None:
            places = self._places[count] = [tensor[:count] for tensor in self._columns.tensors.values()]
        have_rows = [request.layout.batch_size != () for request in requests]
        for place, tensors in zip(places, zip(*[request.tensors for request in requests], strict=True), strict=True):
            if True not in have_rows:
                torch.stack(tensors, out=place)
            else:
                torch.cat([t if has else t[None] for t, has in zip(tensors, have_rows, strict=True)], out=place)

    def _make_room(self, count: int) -> None:
        self._capacity = 1 << (count - 1).bit_length()
        self._columns = Columns(self._leaves, (self._capacity,))
        self._places.clear()
        self._stages = None

    def _describe(self, leaves: dict[Key, Leaf]) -> None:
        if self._version_key is not None:
            leaves[self._version_key] = VERSION
        described = tuple(leaves.items())
        if described != self._described:
            self._described = described

    # -- the general way ---------------------------------------------------------------------------------------

    def _run_module(self, count: int) -> dict[Key, tuple[np.ndarray, torch.dtype]]:
        inputs = {key: tensor[:count].clone().to(self._device) for key, tensor in self._columns.tensors.items()}
        answer = ask(self._policy, trusted(inputs, (count,), self._device))
        written: dict[Key, tuple[np.ndarray, torch.dtype]] = {}
        for name, value in answer.items(True, True):
            key = as_key(name)
            if not isinstance(value, Tensor) or (value is inputs.get(key) and key not in self._out_keys):
                continue
            if not value.ndim or len(value) != count:
                raise RowCountError(
                    f"The policy was asked for {count} rows and wrote {key!r} of shape {tuple(value.shape)}: its "
                    "answer must have a row for each row of the request, in the same order."
                )
            written[key] = array_of(value.detach().to("cpu", copy=True)), value.dtype
        return written

    # -- stages ------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Find out whether stages can do what the policy does."""
        inputs, self._outputs = Rows.over(self._columns), Rows({}, (self._capacity,))
        probe = Probe(self._policy, cast(EnvBase, _Asking(self._leaves)), inputs, None)
        for key, value in probe.written.items():
            self._outputs.add(key, value)
        stages = Planner(probe, inputs, self._outputs, None, True, False).plan(self._policy)
        if all(isinstance(stage, MLPStage | SamplingStage) for stage in stages):
            self._stages, self._visible, self._time = stages, probe.visible, AHEAD
            self._describe({key: self._outputs.leaf(key) for key in self._visible})
            self._composition = Composition(self._policy)
        else:
            self._may_plan = False

    def _run_stages(self, stages: list[Stage], count: int) -> list[np.ndarray]:
        if self._time == AHEAD:
            self._time = 0
            for stage in stages:
                stage.begin(AHEAD, self._generator)
        for stage in stages:
            stage.run_first(count, self._time)
        self._time += 1
        for stage in stages:
            if isinstance(stage, SamplingStage):
                columns = {key: array[:count, None] for key, array in self._outputs.arrays.items()}
                stage.finish(columns, ONE_STEP)
        arrays = self._outputs.arrays
        return [arrays[key][:count].copy() for key in self._visible]


class _Asking:
    """What a `Probe` must know of an env, where there is none: all that is sent may be read, nothing must be done."""

    def __init__(self, leaves: dict[Key, Leaf]) -> None:
        self.observation_keys = list(leaves)
        self.action_keys: list[Key] = []

    def __repr__(self) -> str:
        return "the requests of an InferenceServer"


def _is_small(policy: Any) -> bool:
    """Whether `policy` is made of linear layers, activations and distributions only: nobody counts its calls."""
    parts = parts_of(policy)
    return parts is not None and all(
        isinstance(part, ProbabilisticTensorDictModule)
        or (isinstance(part, TensorDictModule) and isinstance(part.module, nn.Module) and flatten(part.module))
        for part in parts
    )
