"""The stages of a plan: what is done in each step, on rows, in order.

A stage is bound to rows once. `begin` is called before each slot and may draw or fetch what all its steps need, `run`
is called every step, and `finish` may compute, for the whole slot at once, what no step needs.

NOTE [Some lanes]: lanes need not act together. `run_on` does for some of them what `run` does for all: it reads and
writes their rows alone, each lane at a time index of its own. What is drawn for a slot belongs to a lane and a time
index, so the same seed gives the same actions however the lanes were grouped. Only modules that draw by themselves, in
the order in which they are called, cannot keep that promise, nor those whose rows depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
from torch import Tensor

from swath.entries import Form, first_entries, inferring, trusted
from swath.envs.rows import LARGE, Rows
from swath.envs.spaces import ActionCodec
from swath.errors import PolicyError
from swath.keys import FLAGS, Key, as_key, as_path, is_private, nest
from swath.modules.exploration import as_explored
from swath.runtime.columns import writable

Filled = tuple[slice, slice] | np.ndarray
"""Which steps `[N, T]` of a slot are valid, as an index for its columns: all lanes up to one step, or a mask."""


class StageName(str):
    """The name of a stage, which is shown with the reason where a module has to be called."""

    reason: str
    """Which module it is, and why it is not run by arithmetic on rows; empty for what is quick."""

    def __new__(cls, name: str, reason: str = "") -> StageName:
        """The name, and the reason."""
        told = super().__new__(cls, name)
        told.reason = reason
        return told

    def __repr__(self) -> str:
        """The name as it is, and the reason behind it."""
        return f"{super().__repr__()} ({self.reason})" if self.reason else super().__repr__()


class Stage:
    """One part of a policy. Most have nothing to do before or after the steps, and nothing that is late."""

    late: tuple[Key, ...] = ()
    """Keys that no step writes: their columns are filled when the slot is complete."""

    reason = ""
    """Why a module is called where arithmetic on rows would be quicker; empty for stages that are quick."""

    only_reads = False
    """Whether what it calls leaves alone what it is given, and does not keep it, so that it need not get copies."""

    infers = False
    """Whether it runs in inference mode: torch is quicker there, but no tensor of this can be trained with later."""

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Make ready for `steps` steps."""

    def run(self, t: int) -> None:
        """Do the work of step `t`, for all lanes."""
        raise NotImplementedError

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Do the work of step `times[i]` for lane `lanes[i]`, for all `i`; see NOTE [Some lanes]."""
        raise NotImplementedError

    def run_first(self, count: int, t: int) -> None:
        """Do the work of step `t` for the first `count` lanes."""
        self.run_on(np.arange(count), np.full(count, t))

    def finish(self, columns: Mapping[Key, Any], filled: Filled) -> None:
        """Fill the stage's late entries, given all columns `[N, T, ...]`, where they are valid: arrays, on the CPU."""


def in_turn(stages: Iterable[Stage], name: str = "run") -> list[Callable[..., object]]:
    """What runs `stages` one after the other; inference mode is entered once for all that follow each other there."""
    runs: list[Callable[..., object]] = []
    for infers, some in groupby(stages, attrgetter("infers")):
        own = [getattr(stage, name) for stage in some]
        runs += [inferring(own)] if infers else own
    return runs


class RandomStage(Stage):
    """Actions drawn from the action space for a whole slot at once."""

    def __init__(self, codec: ActionCodec, outputs: Rows) -> None:
        """Draw into the action entries of `outputs`, encoded as these are."""
        self._codec = codec
        self._outputs = outputs
        self._leaves = {key: outputs.leaf(key) for key in codec.leaves}
        self._drawn: list[tuple[Any, Any]] = []

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the actions of all steps."""
        drawn = self._codec.draw(self._leaves, steps, self._outputs.lanes, generator)
        arrays, flat = self._outputs.arrays, self._outputs.flat
        self._drawn = [  # [N, ...], [T, N, ...]
            (arrays[key], values.numpy())
            if key in arrays
            else (writable(flat(key)), writable(values.to(flat(key).device)))
            for key, values in drawn.items()
        ]

    def run(self, t: int) -> None:
        """Take the actions of step `t`."""
        for target, drawn in self._drawn:
            target[...] = drawn[t]

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Take the actions of some lanes."""
        for target, drawn in self._drawn:
            target[lanes] = drawn[times, lanes]


class RangeStage(Stage):
    """Refuses integers that name no action. For the first slot: whoever numbers them wrongly does so from the start."""

    def __init__(self, codec: ActionCodec, outputs: Rows) -> None:
        """Look at the action entries of `outputs`."""
        limits = codec.index_limits({key: outputs.leaf(key) for key in codec.leaves})
        self._codec, self._all = codec, np.arange(outputs.lanes)
        self._limits = [(key, outputs.flat(key), limit.to(outputs.flat(key).device)) for key, limit in limits.items()]

    def run(self, t: int) -> None:
        """Look at all lanes."""
        self.run_on(self._all, self._all)

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Look at some lanes."""
        for key, rows, limit in self._limits:
            outside = ((rows[lanes] < 0) | (rows[lanes] >= limit)).reshape(len(lanes), -1).any(1)
            if bool(outside.any()):
                lane = int(lanes[int(outside.nonzero()[0])])
                raise ValueError(
                    f"The policy gave {key!r} = {rows[lane].tolist()} in lane {lane}, which is not in the env's action "
                    f"space {self._codec.space}: actions are numbered from 0, up to {(limit - 1).tolist()}."
                )


class EchoStage(Stage):
    """What is present, as it is: for observations that a policy writes over, when it does not act."""

    def __init__(self, present: Rows, outputs: Rows, keys: Sequence[Key]) -> None:
        """Copy `keys`, as far as the policy leaves them their shape."""
        pairs = [(outputs.flat(key), present.flat(key)) for key in keys]
        self._pairs = [(target, source) for target, source in pairs if target.shape == source.shape]

    def run(self, t: int) -> None:
        """Copy."""
        for target, source in self._pairs:
            target.copy_(source)

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Copy some lanes."""
        for target, source in self._pairs:
            writable(target)[lanes] = writable(source[lanes])


class TorchStage(Stage):
    """A module called directly on tensors: what a TensorDictModule holds, without the TensorDict around it.

    It is given copies: rows are written over in the next step, but a module may keep what it is given, or change it,
    unless its code says otherwise.
    """

    def __init__(
        self,
        part: TensorDictModule,
        call: Callable[..., Any],
        inputs: Sequence[Tensor],
        outputs: Rows,
        device: torch.device | None,
    ) -> None:
        """Call what `part` holds (`call`) with `inputs`; its results, one per key, go to `outputs`."""
        self._call = call
        self._names, self._options = part._kwargs, part.method_kwargs
        self._inputs = tuple(inputs)
        self._copiers = [copier(x) if device is None else partial(x.to, device) for x in inputs]
        self._outputs = outputs
        self._keys = tuple(as_key(key) for key in part.out_keys)
        self._writers = self._writers_to(outputs)
        self._device = device

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Find out once how modules are called here."""
        self._explored = as_explored(self._call)

    def run(self, t: int) -> None:
        """Call the module and keep its results."""
        inputs = self._inputs if self.only_reads else [copy() for copy in self._copiers]
        self._run(inputs, self._writers)

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Call the module with the rows of some lanes."""
        dims = len(self._outputs.batch_size)
        some = _gather(self._outputs, [key for key in self._keys if key != "_"], lanes)
        self._run([x.flatten(0, dims - 1)[lanes].to(self._device) for x in self._inputs], self._writers_to(some))
        _scatter(some, self._outputs, lanes)

    def _writers_to(self, outputs: Rows) -> list[tuple[Key, Callable[[Tensor], None] | None]]:
        return [(key, None if key == "_" else outputs.writer(key, "The policy")) for key in self._keys]

    def _run(self, inputs: Sequence[Tensor], writers: list[tuple[Key, Callable[[Tensor], None] | None]]) -> None:
        if self._names is None:
            results = self._explored(*inputs, **self._options)
        else:
            results = self._explored(**dict(zip(self._names, inputs, strict=True)), **self._options)
        if type(results) is Tensor:
            results = (results,)
        elif not isinstance(results, tuple):
            is_named = isinstance(results, Mapping | TensorDictBase)
            results = tuple(results[key] for key in self._keys) if is_named else (results,)
        if len(results) != len(self._keys):
            raise PolicyError(f"The policy returned {len(results)} results for its out_keys {list(self._keys)}.")
        for (key, write), result in zip(writers, results, strict=False):
            if write is not None:
                if not isinstance(result, Tensor):
                    raise PolicyError(f"The policy returned {type(result).__name__} for {key!r}; it must be a tensor.")
                write(result)


class DistributionStage(Stage):
    """Draws from a distribution that is not known: put together and asked as its module does, without the rest."""

    def __init__(self, part: ProbabilisticTensorDictModule, params: Mapping[str, Tensor], outputs: Rows) -> None:
        """Give the rows `params`, by name, to the distribution of `part`; what is drawn goes to `outputs`."""
        self._part, self._params, self._outputs = part, params, outputs
        self._keys = [as_key(key) for key in part.out_keys]  # the sample, and how likely it was
        self._writers = [outputs.writer(key, "The policy") for key in self._keys]

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Take the settings as they are now."""
        kwargs = self._part.distribution_kwargs
        self._settings = {} if kwargs is None else dict(kwargs.items())

    def run(self, t: int) -> None:
        """Draw."""
        for write, drawn in zip(self._writers, self._drawn(self._params), strict=True):
            write(drawn)

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Draw for some lanes."""
        dims = len(self._outputs.batch_size)
        some = _gather(self._outputs, self._keys, lanes)
        params = {name: row.flatten(0, dims - 1)[lanes] for name, row in self._params.items()}
        for key, drawn in zip(self._keys, self._drawn(params), strict=True):
            some.put(key, drawn, "The policy")
        _scatter(some, self._outputs, lanes)

    def _drawn(self, params: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        distribution = self._part.distribution_class(**params, **self._settings)
        drawn = distribution.rsample() if distribution.has_rsample else distribution.sample()
        return (drawn,) if len(self._keys) == 1 else (drawn, distribution.log_prob(drawn))


class TensorDictStage(Stage):
    """Whatever takes a TensorDict and returns one. The general way, and the slow one."""

    def __init__(
        self,
        call: Callable[[TensorDictBase], object],
        present: Rows,
        written: Collection[Key],
        outputs: Rows,
        out_keys: Sequence[Key],
        device: torch.device | None,
    ) -> None:
        """Call `call` with a TensorDict; entries `out_keys` of its answer go to `outputs`.

        The TensorDict holds copies of what is `present`, for the reason given at `TorchStage`, and what earlier stages
        have `written`, as it is: a part that changes that in place means it.
        """
        self._call = call
        self._present = present
        self._read = [key for key in present.tensors if key not in written]
        self._flags = Lasting({key: present.tensors[key] for key in self._read if key in FLAGS})
        self._copiers = {key: copier(present.tensors[key]) for key in self._read if key not in FLAGS}
        self._written = written
        self._outputs = outputs
        self._keys = tuple(out_keys)
        self._writers = self._writers_to(outputs)
        self._given = {key: present.tensors[key] for key in self._copiers}
        self._private = [key for key in self._keys if is_private(key)]
        self._kept: dict[Key, Tensor] = {}
        """What the policy wrote for itself in its last call: it may look for it in the next, as noise processes do."""
        self._has_kept = np.zeros(outputs.lanes, bool)
        self._device = device
        self._is_here = device is None or all(tensor.device == device for tensor in present.tensors.values())
        self._form: Form | None = None
        """What all requests have in common, if they differ in entries that are not nested."""
        self._is_flat = self._is_here and all(isinstance(key, str) for key in (*self._copiers, *written))

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Find out once how modules are called here."""
        self._explored = as_explored(self._call)
        self._flags.look()

    def run(self, t: int) -> None:
        """Call the policy and keep what it promised."""
        reads = self.only_reads and not self._private  # what it keeps for itself may be what it was given
        inputs = self._given if reads else {key: copy() for key, copy in self._copiers.items()}
        if self._kept or not self._is_flat:
            request = self._request({**self._flags.get(), **inputs}, self._kept, self._outputs)
        else:
            if self._form is None or self._flags.have_changed:
                self._form = Form(self._request(self._flags.get(), {}, self._outputs))
            request = self._form.filled(inputs)
        answer = self._ask(request, self._writers)
        if self._private:
            self._kept = {key: answer.get(key) for key in self._private}
            self._has_kept[:] = True

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Call the policy with the rows of some lanes; apart with those of which it has kept nothing yet."""
        has_kept = self._has_kept[lanes]
        for group in (lanes[has_kept], lanes[~has_kept]):
            if group.size:
                self._run_on(group)

    def _run_on(self, lanes: np.ndarray) -> None:
        size, dims = self._outputs.batch_size, len(self._outputs.batch_size)
        inputs = {key: self._present.flat(key)[lanes] for key in self._read}
        kept = {key: value.flatten(0, dims - 1) for key, value in self._kept.items()}
        given = {key: value[lanes] for key, value in kept.items()} if self._has_kept[lanes[0]] else {}
        some = _gather(self._outputs, dict.fromkeys([*self._written, *self._keys]), lanes)
        answer = self._ask(self._request(inputs, given, some), self._writers_to(some))
        _scatter(some, self._outputs, lanes)
        for key in self._private:
            value = answer.get(key)
            whole = kept[key].clone() if key in kept else value.new_zeros(self._outputs.lanes, *value.shape[1:])
            whole[lanes] = value
            self._kept[key] = whole.view(*size, *value.shape[1:])
            self._has_kept[lanes] = True

    def _request(self, inputs: Mapping[Key, Tensor], kept: Mapping[Key, Tensor], outputs: Rows) -> TensorDict:
        entries = {**inputs, **{key: outputs.tensors[key] for key in self._written}, **kept}
        if self._is_here:
            return trusted(entries, outputs.batch_size, self._device)
        return TensorDict(nest(entries), outputs.batch_size, device=self._device)

    def _writers_to(self, outputs: Rows) -> list[tuple[Key, Callable[[Tensor], None]]]:
        return [(key, outputs.writer(key, "The policy")) for key in self._keys]

    def _ask(self, request: TensorDict, writers: list[tuple[Key, Callable[[Tensor], None]]]) -> TensorDictBase:
        answer = checked_answer(self._explored(request))
        found = first_entries(answer)
        for key, write in writers:
            value = found.get(key) if type(key) is str else answer.get(key, None)
            if value is None:
                raise PolicyError(
                    f"The policy wrote {'/'.join(as_path(key))!r} in its first call, but not in this one."
                )
            write(value)
        return answer


def copier(tensor: Tensor) -> Callable[[], Tensor]:
    """What makes a copy of `tensor`, which stays where it is; by way of numpy where it is large, see `LARGE`."""
    if tensor.device.type != "cpu" or tensor.numel() < LARGE:
        return tensor.detach().clone
    array = tensor.detach().numpy()
    return lambda: torch.from_numpy(array.copy())


class Lasting:
    """Copies of flags that are given again until somebody has changed them, which nobody does (on the CPU)."""

    def __init__(self, originals: Mapping[Key, Tensor]) -> None:
        """Copy `originals`, which only change between slots, when they are asked for."""
        self._originals = originals
        self._is_here = all(original.device.type == "cpu" for original in originals.values())
        self._arrays = [original.numpy() for original in originals.values()] if self._is_here else []
        self._given: dict[Key, Tensor] = {}
        self._memory = np.zeros(0, bool)
        """That of all copies."""
        self._before = None if originals else b""
        """What was in it; None if new ones have to be made."""

    def look(self) -> None:
        """Look at the originals."""
        if b"".join(map(np.ndarray.tobytes, self._arrays)) != self._before:
            self._before = None

    @property
    def have_changed(self) -> bool:
        """Whether new copies have to be made."""
        return self._memory.tobytes() != self._before

    def get(self) -> Mapping[Key, Tensor]:
        """The copies."""
        if self._originals and self.have_changed:
            memory = torch.stack(list(self._originals.values()))
            self._given = {key: memory[place] for place, key in enumerate(self._originals)}
            if self._is_here:
                self._memory = memory.numpy()
                self._before = self._memory.tobytes()
        return self._given


def _gather(rows: Rows, keys: Iterable[Key], lanes: np.ndarray) -> Rows:
    """A copy of what `rows` hold for some lanes."""
    some = Rows({}, (len(lanes),))
    for key in keys:
        some.add(key, rows.flat(key)[lanes])
    return some


def _scatter(some: Rows, rows: Rows, lanes: np.ndarray) -> None:
    """Write what was gathered back to where it came from."""
    for key, value in some.tensors.items():
        writable(rows.flat(key))[lanes] = writable(value)


def ask(call: Callable[[TensorDictBase], object], request: TensorDictBase) -> TensorDictBase:
    """The answer of a policy that takes a TensorDict."""
    return checked_answer(as_explored(call)(request))


def checked_answer(answer: object) -> TensorDictBase:
    """The answer, if it is one."""
    if not isinstance(answer, TensorDictBase):
        raise PolicyError(
            f"The policy was called with a TensorDict and returned {type(answer).__name__}; it must return the "
            "TensorDict with the action in it."
        )
    return answer
