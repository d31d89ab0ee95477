"""TensorDicts of entries that are known to fit, and so need not be looked at again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.keys import Key, as_key, as_path, nest

_NOTHING = nullcontext()


def trainable() -> AbstractContextManager[Any]:
    """A context in which ordinary tensors are made: batches are trained on, in whichever mode they are asked for."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


_new = getattr(TensorDict, "_new_unsafe", TensorDict)
"""Makes a TensorDict without a look at its entries, which would take longer than all else where they are small."""

_IS_KNOWN = {name: type(value) for name, value in vars(_new({}, batch_size=torch.Size(()), device=None)).items()} == {
    "_device": type(None),
    "_tensordict": dict,
    "_batch_size": torch.Size,
    "_td_dim_names": type(None),
}
"""Whether all that a TensorDict has is known here: then it can be put together without a call for each."""


def peek(tensordict: TensorDictBase, key: Key) -> Any:
    """What is stored under `key`, or None."""
    if _IS_KNOWN and type(key) is str and type(tensordict) is TensorDict:
        return tensordict.__dict__["_tensordict"].get(key)
    return tensordict.get(key, None)


def put(tensordict: TensorDictBase, key: Key, value: Tensor) -> None:
    """Store `value`, which has the batch size."""
    if _IS_KNOWN and type(key) is str and type(tensordict) is TensorDict and not tensordict.is_locked:
        own = tensordict.__dict__
        if own["_device"] is None or own["_device"] == value.device:
            own["_tensordict"][key] = value
            return
    tensordict.set(key, value)


Cast: TypeAlias = Callable[[Sequence[Any], torch.Size], TensorDict]
"""Makes a TensorDict of its sources, and of a batch size."""


@lru_cache(maxsize=1024)
def mould(
    places: tuple[tuple[Key, int], ...],
    device: torch.device | None,
    names: tuple[str | None, ...] | None,
    make: Callable[[Any], Any] | None = None,
    inner: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (),
) -> Cast:
    """What makes TensorDicts of these keys.

    The entry of each key is what `make` makes of that which lies at its place among the sources. Without `make` it is
    what lies there, and there are no other sources. `inner` is as for `trusted`, and all is known to fit. The function
    is written out for these keys, as `dataclasses` writes constructors: a batch may be a single frame, for which to
    walk along the keys takes as long as to make the tensors.
    """
    taken = "".join(f"leaf_{place}, " for _, place in places)
    lines: list[str] = [f"{taken} = {'sources' if make is None else 'map(make, chosen(sources))'}"] if places else []
    own_names, more = None if names is None else list(names), dict(inner)

    def write(tree: Mapping[str, Any], path: tuple[str, ...]) -> str:
        """Write what makes a TensorDict of `tree`; by which name it is known there."""
        known = {
            name: write(place, (*path, name)) if isinstance(place, Mapping) else f"leaf_{place}"
            for name, place in tree.items()
        }
        made, entries = f"made_{len(lines)}", ", ".join(f"{name!r}: {how}" for name, how in known.items())
        size = f"torch.Size((*size, *{more[path]!r}))" if path in more else "size"
        if not _IS_KNOWN:
            lines.append(f"{made} = new({{{entries}}}, batch_size={size}, device=device, names={own_names!r})")
            return made
        kept = f"'_device': device, '_tensordict': {{{entries}}}, '_batch_size': {size}, '_td_dim_names': {own_names!r}"
        lines.append(f"{made} = make_empty(TensorDict); {made}.__dict__ = {{{kept}}}")
        return made

    whole = write(nest(places), ())
    indices = [place for _, place in places]
    chosen = itemgetter(*indices) if len(indices) > 1 else lambda sources: [sources[place] for place in indices]
    space: dict[str, Any] = {"TensorDict": TensorDict, "make_empty": object.__new__, "new": _new, "torch": torch}
    space |= {"make": make, "chosen": chosen, "device": device}
    exec("\n    ".join(["def cast(sources, size):", *lines, f"return {whole}"]), space)
    cast: Cast = space["cast"]
    return cast


class Form:
    """Makes TensorDicts that have most in common with another; as quick as exchanging entries of one that stays."""

    def __init__(self, common: TensorDict) -> None:
        """Have the entries of `common`, its batch size, device and names."""
        self._common, self._own = common, dict(vars(common)) if _IS_KNOWN else None

    def filled(self, entries: Mapping[Any, Any]) -> TensorDict:
        """One that has also these entries, which are not nested and known to fit."""
        if self._own is None:
            return self._common.copy().update(entries)
        made = TensorDict.__new__(TensorDict)
        own = made.__dict__
        own.update(self._own)
        own["_tensordict"] = {**self._own["_tensordict"], **entries}
        return made


def first_entries(tensordict: TensorDictBase) -> Mapping[str, Any]:
    """The entries of `tensordict`, to be read, without those inside of others; it takes its time for each question."""
    if _IS_KNOWN and type(tensordict) is TensorDict:
        own: Mapping[str, Any] = vars(tensordict)["_tensordict"]
        return own
    return dict(tensordict.items())


def leaves_of(tensordict: TensorDictBase) -> dict[Key, Tensor]:
    """All tensors in `tensordict`, in a tenth of the time that it takes to tell them itself."""
    leaves: dict[Key, Tensor] = {}
    for name, value in first_entries(tensordict).items():
        if isinstance(value, Tensor):
            leaves[name] = value
        elif type(value) is TensorDict:
            leaves.update({as_key((name, *as_path(key))): leaf for key, leaf in leaves_of(value).items()})
        else:
            return {as_key(key): leaf for key, leaf in tensordict.items(True, True)}
    return leaves


def trusted(
    entries: Mapping[Key, Any],
    batch_size: Sequence[int],
    device: torch.device | None,
    inner: Mapping[tuple[str, ...], tuple[int, ...]] | None = None,
    names: Sequence[str | None] | None = None,
) -> TensorDict:
    """A TensorDict of `entries`, which have the batch size and lie on the device, or anywhere if that is None.

    `inner` gives the paths of nested ones that have more batch dimensions, which come behind the others; `names` are
    those of the batch dimensions.
    """
    own_names, own_inner = None if names is None else tuple(names), tuple(inner.items()) if inner else ()
    return _cast(tuple(entries), device, own_names, own_inner)([*entries.values()], torch.Size(batch_size))


@lru_cache(maxsize=1024)
def _cast(keys: tuple[Key, ...], device: torch.device | None, names: Any, inner: Any) -> Cast:
    return mould(tuple((key, place) for place, key in enumerate(keys)), device, names, inner=inner)
