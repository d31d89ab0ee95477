"""Functions and classes that put a distribution together: what they build, found out by calling them.

Users write `lambda loc, scale: Independent(Normal(loc, scale), 1)`, or a class whose `__init__` says such a thing. Both
may do anything; but if the code has no branch and no loop, reaches for nothing but torch's distributions and for values
that it finds outside, and what it builds holds the very tensors that it was given, then it does so in all calls. The
values from outside (keyword arguments, closures, globals) are looked up anew for each slot, as weights are.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch import distributions as D

from swath.modules.parts import NOT_CALLED
from swath.modules.settled import KNOWN_STEPS, is_setting

HOME = "torch.distributions"
ATTRIBUTES = {"distributions", "transforms", "__init__", "unsqueeze", "tensor", *D.__all__, *D.transforms.__all__}
IDLE = {"arg_constraints", "support", "num_params", "has_rsample", "expand"}
STATISTICS = {"mean", "mode", "median", "deterministic_sample", "variance", "stddev", "entropy"}
"""What a class may have of its own beside its `__init__`: nobody asks for it who draws a sample."""


def is_formula(build: Any, is_closed: bool = False) -> bool:
    """Whether `build` is a function or class that only puts a distribution together, always in the same way.

    If it `is_closed`, there is nothing outside that it looks at.
    """
    if isinstance(build, FunctionType):
        return _is_straight(build, is_closed=is_closed)
    return isinstance(build, type) and issubclass(build, D.Distribution) and _is_assembled(build, is_closed)


def _is_assembled(kind: Any, is_closed: bool) -> bool:
    """Whether a class is one of torch's, but for how it is put together."""
    own = [one for one in kind.__mro__ if not one.__module__.startswith((HOME, "builtins", "typing"))]
    if not own or any(set(vars(one)) - NOT_CALLED - IDLE - STATISTICS for one in own):
        return False
    makers = [vars(one)["__init__"] for one in own if "__init__" in vars(one)]
    return all(isinstance(maker, FunctionType) and _is_straight(maker, True, is_closed) for maker in makers)


def builds_independent_normals(build: Any) -> bool:
    """Whether `build(loc=, scale=)` is an Independent(Normal(loc, scale), 1), whatever there is outside."""
    if not isinstance(build, FunctionType) or not is_formula(build, is_closed=True):
        return False
    return recipe_of(build, {"loc": (3,), "scale": (3,)}, {}) == Recipe(("loc", "scale"), (3,), 1, ())


def _is_straight(function: FunctionType, is_init: bool = False, is_closed: bool = False) -> bool:
    """Whether all of its code is always run, from top to bottom, and is known; if it `is_closed`, without values."""
    code, jumps = function.__code__, {*dis.hasjrel, *dis.hasjabs}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    try:
        outside = {name: cell.cell_contents for name, cell in cells if name != "__class__"}
    except ValueError:  # a cell that is still empty
        return False
    steps = list(dis.get_instructions(code))
    stored = {step.argval for step in steps if step.opname == "STORE_ATTR"} if is_init else set()
    for step in steps:
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found = function.__globals__.get(step.argval, getattr(builtins, step.argval, None))
            is_known = _is_known(found, is_closed) or (is_init and found is super)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR"):
            is_known = step.argval in ATTRIBUTES - {"__init__"} | stored | ({"__init__"} if is_init else set())
        else:
            is_known = step.opname.startswith(KNOWN_STEPS) and step.opcode not in jumps
        if not is_known:
            return False
    is_flat = not any(isinstance(constant, CodeType) for constant in code.co_consts)
    return is_flat and all(_is_known(value, is_closed) for value in (*outside.values(), *(function.__defaults__ or ())))


def is_value(value: Any) -> bool:
    """Whether such a function may be given it: it does nothing by itself."""
    return _is_known(value, is_closed=False) or isinstance(value, D.Transform | list)


def _is_known(value: Any, is_closed: bool) -> bool:
    """Whether it is one of torch's distributions, the way to them, or a plain value."""
    if any(value is one for one in (torch, D, D.transforms)):
        return True
    if isinstance(value, type):
        return value.__module__.startswith(HOME)
    return value is None or (not is_closed and (is_setting(value) or type(value) is Tensor))


# -- what is built ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How to draw from what was built: a normal variable, perhaps one of several, and what is done to it."""

    names: tuple[str, ...]
    """The parameters that are its location, its scale and, of a mixture, the logits."""
    shape: tuple[int, ...]
    """Of a sample, without lanes."""
    event_dims: int
    changes: tuple[tuple[Any, Any] | None, ...]
    """In order: a shift and a factor, or None for tanh."""


Shapes = Mapping[str, tuple[int, ...]]


def recipe_of(
    build: Callable[..., Any], shapes: Shapes, given: Mapping[str, Any], before: Recipe | None = None
) -> Recipe | None:
    """What `build` builds from parameters of such `shapes` (without lanes), and `given`; None if it is not known.

    It may be known from `before`.
    """
    one = _built(build, shapes, given, (2, 3), 0.3)
    if one is None or one == before:
        return one
    # Nothing of it may depend on the parameters, nor on how many dimensions there are of lanes.
    return one if one == _built(build, shapes, given, (6,), 0.7) else None


def _built(
    build: Callable[..., Any], shapes: Shapes, given: Mapping[str, Any], lanes: tuple[int, ...], start: float
) -> Recipe | None:
    params = {}
    for place, (name, shape) in enumerate(shapes.items()):
        numbers = torch.arange(math.prod((*lanes, *shape)), device="cpu") * (0.01 * (place + 1))
        params[name] = (numbers + start + place).view(*lanes, *shape)
    before = {name: value.clone() for name, value in params.items()}
    try:
        built = inner = build(**params, **given)
        changes, inner = _unwrapped(built)
    except Exception:  # it may fail in any way it likes: then it is not known
        return None
    names: list[str | None] = []
    if isinstance(inner, D.MixtureSameFamily) and type(inner.mixture_distribution) is D.Categorical:
        logits = inner.mixture_distribution.logits
        names = [name for name, value in params.items() if _is_close(logits, value.log_softmax(-1))]
        inner = inner.component_distribution
        inner = inner.base_dist if type(inner) is D.Independent else inner
    if not isinstance(inner, D.Normal) or any(not torch.equal(params[name], before[name]) for name in params):
        return None
    names = [_name_of(inner.loc, params), _name_of(inner.scale, params), *names]
    found = tuple(name for name in names if name is not None)
    if len(found) != len(names) or set(found) != set(params) or len(found) != len(params):
        return None
    shape = tuple(built.batch_shape + built.event_shape)
    return Recipe(found, shape[len(lanes) :], len(built.event_shape), tuple(changes))


def _unwrapped(built: Any) -> tuple[list[tuple[Any, Any] | None], Any]:
    """What is done to samples of the distribution inside, and that."""
    changes: list[tuple[Any, Any] | None] = []
    while isinstance(built, D.TransformedDistribution | D.Independent):
        if isinstance(built, D.TransformedDistribution):
            changes = [*map(_change, built.transforms), *changes]
        built = built.base_dist
    return changes, built


def _change(transform: Any) -> tuple[Any, Any] | None:
    if type(transform) is D.TanhTransform:
        return None
    if type(transform) is not D.AffineTransform or transform.event_dim:
        raise TypeError(transform)
    shift, factor = (end.tolist() if isinstance(end, Tensor) else end for end in (transform.loc, transform.scale))
    return shift, factor


def _name_of(found: Tensor, params: Mapping[str, Tensor]) -> str | None:
    """Which parameter it is; distributions make views of what they get."""
    return next(
        (name for name, p in params.items() if (p.data_ptr(), p.numel()) == (found.data_ptr(), found.numel())), None
    )


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other)
