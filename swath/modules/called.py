"""Stages that call what has to be called: modules and functions, distributions, and whatever takes a TensorDict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
from torch import Tensor, distributions

from swath.entries import Form, first_entries, trusted
from swath.envs.rows import Rows, copier
from swath.errors import PolicyError
from swath.keys import FLAGS, Key, as_key, as_path, is_private, nest
from swath.modules.exploration import as_explored
from swath.modules.stages import Filled, Stage
from swath.runtime.columns import writable


class TorchStage(Stage):
    """A module called directly on tensors: what a TensorDictModule holds, without the TensorDict around it.

    It is given copies, see `Lent`.
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
        self._outputs = outputs
        self._keys = tuple(as_key(key) for key in part.out_keys)
        self._writers = self._writers_to(outputs)
        self._device = device
        self._lent = Lent(inputs, device)

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Find out once how modules are called here."""
        call = as_explored(self._call)
        self._explored = call if self.threads is None else self.threads.around(call)
        self._lent.begin(self)

    def run(self, t: int) -> None:
        """Call the module and keep its results."""
        lent = self._lent
        for copy, row in lent.refilled:
            copy[...] = row
        self._run(lent.tensors or [copy() for copy in lent.copiers], self._writers)

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


CHOICES = (distributions.Bernoulli, distributions.Categorical, distributions.OneHotCategorical)
"""Distributions that cannot be drawn from if their parameters cannot be. (Of NaN, others make NaN, for the env.)"""


class DistributionStage(Stage):
    """Draws from a distribution that is not known: put together and asked as its module does, without the rest.

    One of `CHOICES` that may be `late` is only looked at when the slot is complete, for all steps at once: whether its
    parameters can be, and how likely the samples were. Of a single step, the distribution that was drawn from tells.
    """

    def __init__(
        self, part: ProbabilisticTensorDictModule, params: Mapping[str, tuple[Key, Tensor]], outputs: Rows, late: bool
    ) -> None:
        """Give `params`, by name their keys and rows, to the distribution of `part`; samples go to `outputs`."""
        self._part, self._outputs = part, outputs
        self._params = {name: row for name, (_, row) in params.items()}
        self._param_keys = {name: key for name, (key, _) in params.items()}
        self._keys = [as_key(key) for key in part.out_keys]  # the sample, and how likely it was
        self._is_late = late and part.distribution_class in CHOICES
        if self._is_late:
            self.late = tuple(self._keys[1:])
        self._writers = [outputs.writer(key, "The policy") for key in self._drawn_keys]

    @property
    def _drawn_keys(self) -> list[Key]:
        return self._keys[:1] if self._is_late else self._keys

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Take the settings as they are now."""
        kwargs = self._part.distribution_kwargs
        self._settings = {} if kwargs is None else dict(kwargs.items())
        self._is_single, self._scores = self._is_late and steps == 1, tuple[Tensor, ...]()
        is_checked = self._is_single or not self._is_late
        self._unchecked = self._settings if is_checked else {"validate_args": False, **self._settings}

    def run(self, t: int) -> None:
        """Draw."""
        drawn = self._drawn(self._params, with_scores=self._is_single)
        for write, result in zip(self._writers, drawn, strict=False):
            write(result)
        self._scores = drawn[1:]

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Draw for some lanes."""
        dims = len(self._outputs.batch_size)
        some = _gather(self._outputs, self._drawn_keys, lanes)
        params = {name: row.flatten(0, dims - 1)[lanes] for name, row in self._params.items()}
        for key, drawn in zip(self._drawn_keys, self._drawn(params), strict=True):
            some.put(key, drawn, "The policy")
        _scatter(some, self._outputs, lanes)

    def finish(self, columns: Mapping[Key, Any], filled: Filled) -> None:
        """Check the parameters and compute the log-probabilities of the samples, of all steps."""
        if self._is_single and self._scores:
            for key, score in zip(self.late, self._scores, strict=True):
                column = columns[key][:, 0]
                column[...] = (
                    score.view(column.shape) if isinstance(column, Tensor) else score.numpy().reshape(column.shape)
                )
        elif self._is_late:
            params = {name: _as_tensor(columns[key][filled]) for name, key in self._param_keys.items()}
            distribution = self._part.distribution_class(**params, **self._settings)
            for key in self.late:
                score = distribution.log_prob(_as_tensor(columns[self._keys[0]][filled]))
                columns[key][filled] = score if isinstance(columns[key], Tensor) else score.numpy()

    def _drawn(self, params: Mapping[str, Tensor], with_scores: bool = False) -> tuple[Tensor, ...]:
        try:
            distribution = self._part.distribution_class(**params, **self._unchecked)
            drawn = distribution.rsample() if distribution.has_rsample else distribution.sample()
        except Exception:
            self._part.distribution_class(**params, **self._settings)  # says what is wrong with the parameters
            raise
        if len(self._writers if not with_scores else self._keys) == 1:
            return (drawn,)
        return drawn, distribution.log_prob(drawn)


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
        self._rows = {key: present.tensors[key] for key in self._read if key not in FLAGS}
        self._lent = Lent(self._rows.values(), None)
        self._written = written
        self._outputs = outputs
        self._keys = tuple(out_keys)
        self._writers = self._writers_to(outputs)
        self._private = [key for key in self._keys if is_private(key)]
        self._kept: dict[Key, Tensor] = {}
        """What the policy wrote for itself in its last call: it may look for it in the next, as noise processes do."""
        self._has_kept = np.zeros(outputs.lanes, bool)
        self._device = device
        self._is_here = device is None or all(tensor.device == device for tensor in present.tensors.values())
        self._form: Form | None = None
        """What all requests have in common, if they differ in entries that are not nested."""
        self._is_flat = self._is_here and all(isinstance(key, str) for key in (*self._rows, *written))

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Find out once how modules are called here."""
        self._explored = as_explored(self._call)
        self._flags.look()
        if not self._private:  # what it keeps for itself may be what it was given
            self._lent.begin(self)
        self._inputs = dict(zip(self._rows, self._lent.tensors, strict=False))

    def run(self, t: int) -> None:
        """Call the policy and keep what it promised."""
        lent = self._lent
        for copy, row in lent.refilled:
            copy[...] = row
        inputs = self._inputs or dict(zip(self._rows, [copy() for copy in lent.copiers], strict=True))
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
        answer = self._explored(request)
        if type(answer) is not TensorDict:  # which takes its time to say that it is one
            answer = checked_answer(answer)
        found = first_entries(answer)
        for key, write in writers:
            value = found.get(key) if type(key) is str else answer.get(key, None)
            if value is None:
                raise PolicyError(
                    f"The policy wrote {'/'.join(as_path(key))!r} in its first call, but not in this one."
                )
            write(value)
        return answer


class Lent:
    """Rows, which are written over in the next step, in a form in which they can be given to what is called.

    Whoever may keep what it is given gets copies of its own each time. To whom keeps nothing, see NOTE [Keeping
    nothing], the same copies are given again, written over, so that it may also change them. Who changes nothing either
    gets the rows themselves.
    """

    def __init__(self, rows: Iterable[Tensor], device: torch.device | None) -> None:
        """Lend `rows`, on `device` if that is another than theirs."""
        self._rows = [row.detach() for row in rows]
        self._is_here = device is None and all(row.is_cpu for row in self._rows)
        self.copiers = [copier(row) if device is None else partial(row.to, device) for row in self._rows]
        """What makes copies, for as long as there are no `tensors`."""
        self.tensors: tuple[Tensor, ...] = ()
        self.refilled: list[tuple[np.ndarray, np.ndarray]] = []
        """Arrays of those, and what is written into them before each call."""

    def begin(self, stage: Stage) -> None:
        """Be lent to what `stage` calls."""
        if self.tensors:
            return
        if stage.only_reads:
            self.tensors = tuple(self._rows)
        elif stage.infers and self._is_here:
            self.tensors = tuple(row.clone() for row in self._rows)
            self.refilled = [(copy.numpy(), row.numpy()) for copy, row in zip(self.tensors, self._rows, strict=True)]


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


def _as_tensor(values: Any) -> Tensor:
    """Part of a column, which is an array if it lies on the CPU."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


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
