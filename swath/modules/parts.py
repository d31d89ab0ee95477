"""The parts of a policy: the modules of a tensordict sequence, and what each of them writes.

NOTE [Parts]: a sequence may be run part by part only if that is what calling it does. Most of this is found out by
watching it being called once: each part must have been called, in order and in the ordinary way, and nothing may have
been written that no part declares. What cannot be seen in one call is read from the sequence itself.

NOTE [Relatives]: a class that takes over all that a call goes through from one of tensordict's classes acts as that
class, whatever else it brings along: so do most of TorchRL's modules, and many of users. Where a class has a forward of
its own, it may do anything, unless it is one that was read: these are known by name, so that TorchRL is never imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from inspect import getattr_static
from operator import is_
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn

from swath.keys import Key, as_key, as_path

SEQUENCES = (ProbabilisticTensorDictSequential, TensorDictSequential)
KNOWN = (ProbabilisticTensorDictModule, TensorDictModule)
"""Parts that read and write what they declare, and nothing else."""

NOT_CALLED = {
    *("__init__", "__new__", "__doc__", "__module__", "__repr__", "__annotations__", "__annotate__", "__orig_bases__"),
    *("__annotate_func__", "__annotations_cache__", "__parameters__", "__firstlineno__", "__static_attributes__"),
    *("__abstractmethods__", "_abc_impl", "__dict__", "__weakref__", "extra_repr", "to", "reset_parameters_recursive"),
}
"""What a relative may have of its own: no call goes through it."""

PEER_SAMPLER = ("torchrl.modules.tensordict_module.probabilistic", "SafeProbabilisticModule")
"""Its forward only computes a log-probability from the value before it was squashed: the same but for rounding."""


def name_of(kind: Any) -> tuple[str | None, str | None]:
    """Where a class comes from, and what it is called there."""
    return getattr(kind, "__module__", None), getattr(kind, "__qualname__", None)


def acts_as(module: Any) -> type | None:
    """The class of tensordict that `module` acts as; see NOTE [Relatives]."""
    kind: Any = type(module)
    return _relative_of(kind)


@lru_cache(maxsize=256)
def _relative_of(kind: Any) -> type | None:
    known = next((known for known in (*SEQUENCES, *KNOWN) if issubclass(kind, known)), None)
    if known is None:
        return None
    allowed = NOT_CALLED | {"forward"} if name_of(kind) == PEER_SAMPLER else NOT_CALLED
    names = [name for name in dir(known) if name not in allowed]
    return known if all(getattr_static(kind, name) is getattr_static(known, name) for name in names) else None


def parts_of(policy: Any) -> list[Any] | None:
    """The modules of a sequence in order, `[policy]` for a single known module, None for anything else."""
    kind = acts_as(policy)
    if kind in KNOWN:
        return [policy]
    if kind is None:
        return None
    modules = _modules_of(policy)
    if kind is ProbabilisticTensorDictSequential and not policy.return_composite:
        # It calls the modules that it was given first: it keeps all but the last a second time.
        kept = policy.det_part
        if kept is not None and not are_same(_modules_of(kept), modules[:-1]):
            return None
    parts: list[Any] = []
    for module in modules:
        inner = parts_of(module)
        if inner is None and acts_as(module) in SEQUENCES:
            return None
        parts.extend([module] if inner is None else inner)
    return parts


def _modules_of(sequence: Any) -> list[Any]:
    held = sequence.module
    return list(held.values() if isinstance(held, nn.ModuleDict) else held)


def are_same(some: list[Any], others: list[Any]) -> bool:
    """Whether both hold the same objects, in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


@dataclass(frozen=True)
class Writes:
    """What one part writes: the keys that it declares, and the tensors in them."""

    declared: tuple[Key, ...]
    leaves: tuple[Key, ...]

    @property
    def are_tensors(self) -> bool:
        """Whether each key holds one tensor; it may hold a TensorDict."""
        return self.leaves == tuple(key for key in self.declared if key != "_")


def declared_by(part: Any) -> tuple[Key, ...]:
    """The keys that `part` says it writes."""
    return tuple(as_key(key) for key in part.out_keys)


def overlap(some: Any, others: Any) -> bool:
    """Whether any key of `some` is one of `others`, or holds it, or lies in it."""
    paths = [as_path(key) for key in others]
    return any(path[: len(p)] == p[: len(path)] for path in map(as_path, some) for p in paths)


def is_left_alone(now: Any, before: Any) -> bool:
    """Whether an entry is what it was: the same tensor, or, as parts leave it that reshape all, a view of all of it."""
    if now is before or not (isinstance(now, Tensor) and isinstance(before, Tensor)):
        return now is before
    if (now.shape, now.dtype, now.stride()) != (before.shape, before.dtype, before.stride()):
        return False
    return now.device == before.device and now.data_ptr() == before.data_ptr()


class Watch:
    """Sees what the parts of a policy do while it is called as a whole; see NOTE [Parts]."""

    def __init__(self, policy: Any) -> None:
        """Look at the parts of `policy`; a policy without parts is not watched."""
        self._parts = parts_of(policy)
        self._called: list[Any] = []
        self._writes: list[Writes] = []
        self._is_ordinary = True
        self.written: dict[Key, Tensor] = {}
        """The tensors that the parts wrote."""

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Watch the calls inside."""
        handles = [
            # Before the user's hooks, which may take away what the part has written.
            part.register_forward_hook(self._see, prepend=True, with_kwargs=True)
            for part in dict.fromkeys(self._parts or ())
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, part: Any, args: Any, kwargs: dict[str, Any], answer: TensorDictBase) -> None:
        leaves: dict[Key, Any] = {}
        for key in declared_by(part):
            value = answer.get(key, None)
            if isinstance(value, TensorDictBase):
                leaves.update({as_key((key, inner)): leaf for inner, leaf in value.items(True, True)})
            elif value is not None:
                leaves[key] = value
        for key, leaf in leaves.items():
            can_be_held = isinstance(leaf, Tensor) and leaf.dtype is not torch.bfloat16  # which numpy does not have
            before = self.written.get(key, leaf)
            self._is_ordinary &= can_be_held and (leaf.shape, leaf.dtype) == (before.shape, before.dtype)
        for key in self.written.keys() - leaves.keys():  # what others wrote before, and this part does not declare
            self._is_ordinary &= is_left_alone(answer.get(key, None), self.written[key])
        # A sequence whose earlier parts write the sample tells its last one not to draw another.
        self._is_ordinary &= bool(kwargs.get("_requires_sample", True))
        self._called.append(part)
        self._writes.append(Writes(declared_by(part), tuple(leaves)))
        self.written.update(leaves)

    def conclude(self, visible: dict[Key, Tensor]) -> list[Writes] | None:
        """What each part writes; None if the policy, which left `visible` behind, has to be called as a whole."""
        if self._parts is None or not self._is_ordinary or not are_same(self._called, self._parts):
            return None
        return self._writes if set(visible) <= set(self.written) else None
