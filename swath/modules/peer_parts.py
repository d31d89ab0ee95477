"""Stages for parts of TorchRL that take a TensorDict: recurrent networks, greedy choice by value, exploration noise.

They are known by name, so that TorchRL is not imported for it, and only as far as they are plain: without masks, with
the ordinary kinds of specs. Noise is drawn for a whole slot at once; how much there is (epsilon, sigma) is read when
the slot begins, as weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType
from torch import Tensor, nn

from swath.keys import IS_INIT, Key, as_key
from swath.modules.parts import name_of
from swath.modules.stages import Stage
from swath.modules.traced import trace


class RowsStage(Stage):
    """Arithmetic on the rows of some entries, and on noise that belongs to a lane and a time index."""

    needs_conditions = False

    def __init__(self, part: Any, rows: list[np.ndarray]) -> None:
        """Do what `part` does to `rows`; which they are is the business of each kind."""
        self._part = part
        self._rows = rows
        self._noise: list[np.ndarray] = []  # [T, N, ...]
        self._drawn = torch.empty(0, device="cpu")
        """What the noise is made of."""
        self._spec: Any = None
        """That of the action, as it was found in the part's, which is slow to look into."""
        self._specs: Any = None

    def _draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for what is drawn; where slots are alike, the same again."""
        if self._drawn.shape != shape:
            with torch.inference_mode(False):  # it may be written to in another mode than now
                self._drawn = torch.empty(shape, dtype=dtype, device="cpu")
        return self._drawn

    @property
    def _space(self) -> Any:
        """That of the action."""
        specs = self._part.spec
        if specs is not self._specs:
            self._specs, self._spec = specs, specs[self._part.action_key]
        return self._spec.space

    def run(self, t: int) -> None:
        """Work on all lanes."""
        self._work(self._rows, [noise[t] for noise in self._noise])

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Work on some lanes."""
        some = [row[lanes] for row in self._rows]
        self._work(some, [noise[times, lanes] for noise in self._noise])
        for row, result in zip(self._rows, some, strict=True):
            row[lanes] = result

    def run_first(self, count: int, t: int) -> None:
        """Work on the first lanes."""
        self._work([row[:count] for row in self._rows], [noise[t, :count] for noise in self._noise])

    def _work(self, rows: list[np.ndarray], noise: list[np.ndarray]) -> None:
        raise NotImplementedError


class ValueChoiceStage(RowsStage):
    """The action of the largest value, and that value."""

    def _work(self, rows: list[np.ndarray], noise: list[np.ndarray]) -> None:
        values, action, chosen = rows
        if action.ndim == 1:
            values.argmax(1, action)
            values.max(1, chosen, keepdims=True)
        else:  # TorchRL takes all of the largest, and adds them up
            np.equal(values, values.max(1, keepdims=True), action)
            np.sum(action * values, 1, keepdims=True, out=chosen)


class EpsilonGreedyStage(RowsStage):
    """Now and then another action, any of them."""

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw when, and which: one number says both, as those below epsilon are as random as all."""
        (action,) = self._rows
        epsilon, space = float(self._part.eps), self._draw((steps, len(action)), torch.float64)
        drawn = (space.uniform_() if generator is None else space.uniform_(generator=generator)).numpy()
        self._noise = []
        if (drawn.item() if drawn.size == 1 else drawn.min(initial=1.0)) >= epsilon:  # as in most small slots
            return
        when, choices = drawn < epsilon, int(self._space.n)
        which = np.where(when, drawn / (epsilon or 1.0), 0.0) * choices
        others = which.astype(np.int64)
        if action.ndim == 1:
            self._noise = [when, others]
        else:
            self._noise = [when[..., None], np.eye(choices, dtype=action.dtype)[others]]

    def _work(self, rows: list[np.ndarray], noise: list[np.ndarray]) -> None:
        if noise:
            when, others = noise
            np.copyto(rows[0], others, where=when)


class GaussianNoiseStage(RowsStage):
    """Normal noise on the action, which is then kept within its bounds."""

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the noise, and look up the bounds."""
        (action,) = self._rows
        drawn = self._draw((steps, *action.shape), torch.float32).normal_(generator=generator).numpy()
        std, mean, sigma = (one.numpy() for one in (self._part.std, self._part.mean, self._part.sigma))
        self._noise = [(drawn * std + mean) * sigma]
        space = self._space
        self._low, self._high = space.low.numpy(), space.high.numpy()

    def _work(self, rows: list[np.ndarray], noise: list[np.ndarray]) -> None:
        (action,) = rows
        np.add(action, noise[0], action)
        np.maximum(action, self._low, action)
        np.minimum(action, self._high, action)


class ProjectionStage(RowsStage):
    """Keeps entries within their bounds, as parts do that were made with safe=True."""

    def __init__(self, part: Any, keys: list[Key], rows: list[np.ndarray]) -> None:
        """Do so for `keys` of the part's spec."""
        super().__init__(part, rows)
        self._keys = keys

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Look up the bounds."""
        spaces = [self._part.spec[key].space for key in self._keys]
        self._bounds = [(space.low.numpy(), space.high.numpy()) for space in spaces]

    def _work(self, rows: list[np.ndarray], noise: list[np.ndarray]) -> None:
        for row, bounds in zip(rows, self._bounds, strict=True):
            np.clip(row, *bounds, out=row)


class OneStep(nn.Module):
    """One time step of an nn.LSTM or nn.GRU whose states `[N, layers, hidden]` come lane by lane."""

    def __init__(self, network: nn.RNNBase) -> None:
        """Step `network`, which has the lanes as its first dimension."""
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """The features and the states after."""
        before = tuple(state.transpose(0, 1).contiguous() for state in states)  # [layers, N, hidden]
        features, after = self.network(x.unsqueeze(1), before if len(before) > 1 else before[0])
        after = after if isinstance(after, tuple) else (after,)
        return features.squeeze(1), *(state.transpose(0, 1) for state in after)


class RecurrentStage(Stage):
    """One step of an nn.LSTM or nn.GRU; where an episode begins, from zero."""

    def __init__(self, network: nn.RNNBase, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        """Inputs are `[N, in]`, the states `[N, layers, hidden]` and `is_init`; outputs the features and the states."""
        x, *self._states, begins = inputs
        self._begins = begins[:, 0]
        self._fresh = [state.copy() for state in self._states]
        """The states to start from."""
        self._step = OneStep(network)
        self._given, self._outputs = [x, *self._fresh], outputs
        self._quick = trace(self._step, self._given, outputs, is_flat=True)
        self.needs_conditions = self._quick is None

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Fetch the parameters."""
        if self._quick is not None:
            self._quick.begin(steps, generator)

    def run(self, t: int) -> None:
        """Step all lanes."""
        has_begun = self._begins.any()
        for fresh, state in zip(self._fresh, self._states, strict=True):
            np.copyto(fresh, state)
            if has_begun:
                fresh[self._begins] = 0.0
        if self._quick is not None:
            self._quick.run(t)
        else:
            self._call(slice(None))

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Step some lanes."""
        for fresh, state in zip(self._fresh, self._states, strict=True):
            fresh[lanes] = state[lanes]
            fresh[self._begins] = 0.0
        if self._quick is not None:
            self._quick.run_on(lanes, times)
        else:
            self._call(lanes)

    def _call(self, lanes: slice | np.ndarray) -> None:
        """Let torch do it, as it does a large network in less time."""
        results = self._step(*(torch.from_numpy(row[lanes]) for row in self._given))
        for row, result in zip(self._outputs, results, strict=True):
            row[lanes] = result.numpy()


class IdleStage(Stage):
    """Nothing: exploration where nobody explores."""

    needs_conditions = False

    def run(self, t: int) -> None:
        """Leave everything as it is."""

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Leave everything as it is."""


def peer_stage(
    part: Any, reads: Mapping[Key, np.ndarray], writes: Mapping[Key, np.ndarray], exploration: InteractionType | None
) -> Stage | None:
    """A stage that does what `part` of TorchRL does; None if it is not one of these, or not a plain one."""
    make = PEER_PARTS.get(name_of(type(part)))
    return None if make is None else make(part, reads, writes, exploration)


Arrays = Mapping[Key, np.ndarray]


def _value_choice(part: Any, reads: Arrays, writes: Arrays, exploration: InteractionType | None) -> Stage | None:
    source, targets = as_key(part.in_keys[0]), [as_key(key) for key in part.out_keys]
    if part.action_space not in ("one_hot", "categorical") or part.action_mask_key is not None or source not in reads:
        return None
    if len(targets) != 3 or targets[1] != source or any(key not in writes for key in targets):
        return None
    values, action, chosen = reads[source], writes[targets[0]], writes[targets[2]]
    shape = values.shape if part.action_space == "one_hot" else values.shape[:1]
    fits = values.ndim == 2 and action.shape == shape and chosen.shape == (len(values), 1)
    is_plain = values is writes[source] and values.dtype == chosen.dtype == np.float32 and action.dtype == np.int64
    return ValueChoiceStage(part, [values, action, chosen]) if fits and is_plain else None


def _epsilon_greedy(part: Any, reads: Arrays, writes: Arrays, exploration: InteractionType | None) -> Stage | None:
    if exploration not in (InteractionType.RANDOM, None):
        return IdleStage()
    action, kind = writes.get(as_key(part.action_key)), _kind_of_spec(part)
    if action is None or action.dtype != np.int64 or part.action_mask_key is not None or part.eps.device.type != "cpu":
        return None
    spec = None if kind is None else part.spec[part.action_key]
    if kind not in ("Categorical", "OneHot") or spec is None or getattr(spec, "mask", None) is not None:
        return None
    is_choice = action.ndim == 1 if kind == "Categorical" else action.shape[1:] == (int(spec.space.n),)
    return EpsilonGreedyStage(part, [action]) if is_choice and int(spec.space.n) > 0 else None


def _gaussian_noise(part: Any, reads: Arrays, writes: Arrays, exploration: InteractionType | None) -> Stage | None:
    if exploration not in (InteractionType.RANDOM, None):
        return IdleStage()
    action = writes.get(as_key(part.action_key))
    if action is None or action.dtype != np.float32 or part.sigma.device.type != "cpu":
        return None
    if _kind_of_spec(part) not in BOUNDED:
        return None
    return GaussianNoiseStage(part, [action]) if _has_shared_bounds(part.spec[part.action_key].space, action) else None


def is_kept_safe(part: Any) -> bool:
    """Whether TorchRL has hooked to `part`, with safe=True, what keeps its results to its spec, and nobody else has."""
    hooks = [] if part._forward_pre_hooks else list(part._forward_hooks.values())
    return bool(hooks) and all(name_of(hook) == SAFE for hook in hooks)


def projection_stage(part: Any, writes: Arrays) -> Stage | None:
    """A stage that does what this hook does, behind the part's own; None if it has to be called."""
    if not is_kept_safe(part) or part.spec is None:
        return None
    specs = {as_key(key): part.spec[key] for key in part.spec.keys(True, True)}
    specs = {key: spec for key, spec in specs.items() if spec is not None}
    if any(_kind_of(spec) not in BOUNDED or key not in writes for key, spec in specs.items()):
        return None
    rows = [writes[key] for key in specs]
    for row, spec in zip(rows, specs.values(), strict=True):
        if row.dtype.kind != "f" or not _has_shared_bounds(spec.space, row):
            return None
    return ProjectionStage(part, list(specs), rows)


def _recurrent(part: Any, reads: Arrays, writes: Arrays, exploration: InteractionType | None) -> Stage | None:
    network = part.lstm if hasattr(part, "lstm") else part.gru
    read, written = ([as_key(key) for key in keys] for keys in (part.in_keys, part.out_keys))
    if type(network) not in (nn.LSTM, nn.GRU) or not network.batch_first or network.bidirectional:
        return None  # TorchRL has such classes of its own too
    if part.recurrent_mode or read[-1] != IS_INIT or any(key not in reads for key in read):
        return None
    inputs, outputs = [reads[key] for key in read], [writes[key] for key in written if key in writes]
    is_plain = all(row.dtype == np.float32 for row in (*inputs[:-1], *outputs)) and inputs[0].ndim == 2
    is_plain = is_plain and inputs[-1].shape == (len(inputs[0]), 1)
    return RecurrentStage(network, inputs, outputs) if is_plain and len(outputs) == len(inputs) - 1 else None


def _has_shared_bounds(space: Any, row: np.ndarray) -> bool:
    """Whether the bounds lie here, and are the same for all lanes."""
    ends = (space.low, space.high)
    return all(end.device.type == "cpu" and tuple(end.shape) in (row.shape[1:], ()) for end in ends)


def _kind_of_spec(part: Any) -> str | None:
    """The name of the class of the action's spec."""
    return None if part.spec is None else _kind_of(part.spec[part.action_key])


def _kind_of(spec: Any) -> str | None:
    module, name = name_of(type(spec))
    return name if module == "torchrl.data.tensor_specs" else None


SAFE = ("torchrl.modules.tensordict_module.common", "_forward_hook_safe_action")
BOUNDED = ("Bounded", "BoundedContinuous")


PEER_PARTS: dict[tuple[str | None, str | None], Callable[..., Stage | None]] = {
    ("torchrl.modules.tensordict_module.actors", "QValueModule"): _value_choice,
    ("torchrl.modules.tensordict_module.exploration", "EGreedyModule"): _epsilon_greedy,
    ("torchrl.modules.tensordict_module.exploration", "AdditiveGaussianModule"): _gaussian_noise,
    ("torchrl.modules.tensordict_module.rnn", "LSTMModule"): _recurrent,
    ("torchrl.modules.tensordict_module.rnn", "GRUModule"): _recurrent,
}
