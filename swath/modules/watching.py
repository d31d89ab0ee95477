"""Watching a call: all that torch is asked for within, whoever asks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAX_HELD = 134_217_728
"""Bytes of all that is computed in a call that is made twice."""
COMPUTING = set(
    """
    addmm addbmm baddbmm bmm linear matmul mm mv
    conv1d conv2d conv3d convolution _convolution mkldnn_convolution
    adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d
    max_pool1d max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
    batch_norm native_batch_norm _native_batch_norm_legit_no_training _batch_norm_no_update
    group_norm native_group_norm layer_norm native_layer_norm rms_norm softmax _softmax log_softmax _log_softmax
    amax amin argmax argmin linalg_vector_norm logsumexp max mean min sum
    alias cat chunk clone concat concatenate contiguous copy_ detach expand expand_as flatten gather movedim narrow
    permute repeat reshape select slice split split_with_sizes squeeze stack t transpose unbind unflatten unsqueeze
    _unsafe_view view view_as
    _to_copy constant_pad_nd embedding lift_fresh pad to type_as
    arange full full_like new_full new_ones new_zeros ones ones_like zeros zeros_like
    """.split()  # noqa: SIM905 - a list of strings would take three times the room
)
"""What networks are made of, by its name in torch, beside what is done element by element."""
SUMMING = {"linalg_vector_norm", "logsumexp", "mean", "sum"}
"""What several threads do in another order if it comes to one number, which may be the same by chance."""


class Made(TorchDispatchMode):
    """Notes all tensors that are made inside."""

    def __init__(self) -> None:
        """Nothing is noted yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[Tensor]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler to tell it so, which takes a worker longer than all its start."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and note what it returns."""
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, tuple | list) else (result,)
        given = [*args, *(kwargs or {}).values()]  # which is returned by what writes in place
        made = [one for one in found if isinstance(one, Tensor) and not any(one is other for other in given)]
        self._made += map(weakref.ref, made)
        return result

    @property
    def are_gone(self) -> bool:
        """Whether none of them is alive."""
        return all(one() is None for one in self._made)


class Watched(Made):
    """A context that holds all that is computed inside, and notes whether a call does more than that."""

    def __init__(self) -> None:
        """Nothing is computed yet."""
        super().__init__()
        self.may_be_repeated = True
        """Whether the call did nothing but what is known, and wrote to nothing but what was made inside."""
        self._is_over = False
        self._computed: list[Tensor] = []
        self._memory: set[int] = set()
        """That of tensors that were made inside, which are held, so that no other has the same."""
        self._left = MAX_HELD

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and look at what it does."""
        kwargs = kwargs or {}
        if self._is_over or not self.may_be_repeated:
            return func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not (all(map(_is_plain, given)) and _computes(func, args, kwargs)):
            self._refuse()
            return func(*args, **kwargs)
        memory = set(map(_memory_of, given))
        is_inside = not func._schema.is_mutable or memory <= self._memory  # whichever of them is written to
        result = func(*args, **kwargs)
        made = tree_leaves(result)
        is_one = func._schema.name.rpartition(":")[2] in SUMMING and any(one.numel() == 1 for one in made)
        if is_inside and all(map(_is_plain, made)) and not is_one:
            self._computed += made
            self._memory |= set(map(_memory_of, made)) - memory
            self._left -= sum(one.numel() * one.itemsize for one in made)
            if self._left >= 0:
                return result
        self._refuse()
        return result

    def _refuse(self) -> None:
        self.may_be_repeated = False
        self._computed, self._memory = [], set()

    def is_same_as(self, other: Watched) -> bool:
        """Whether the same was computed, bit by bit."""
        ours, theirs = self._computed, other._computed
        return other.may_be_repeated and len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))

    def end(self) -> None:
        """Hold nothing any more, also if an interrupt has come before this context was left."""
        self._is_over = True
        self._computed, self._memory = [], set()


def _is_plain(one: Any) -> bool:
    """Whether it is a tensor on the CPU of which all numbers lie in one memory."""
    return type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided and one.is_cpu and not one.is_nested


def _computes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `func` does the same in each call, and nothing else."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    if given.get("running_mean") is not None and given.get("training"):  # what it counts is not in the schema
        return False
    return name in COMPUTING or torch.Tag.pointwise in func.tags


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
