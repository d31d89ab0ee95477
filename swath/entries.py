"""TensorDicts of entries that are known to fit, and so need not be looked at again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from swath.keys import Key

_new = getattr(TensorDict, "_new_unsafe", TensorDict)
"""Makes a TensorDict without a look at its entries, which would take longer than all else where they are small."""


def trusted(
    entries: Mapping[Key, Any],
    batch_size: Sequence[int],
    device: torch.device | None,
    inner: Mapping[tuple[str, ...], tuple[int, ...]] | None = None,
    path: tuple[str, ...] = (),
) -> TensorDict:
    """A TensorDict of `entries`, which have the batch size and lie on the device, or anywhere if that is None.

    `inner` gives the paths of nested ones that have more batch dimensions, which come behind the others.
    """
    source: dict[str, Any] = {}
    rooms: dict[str, dict[Key, Any]] = {}
    for key, entry in entries.items():
        if isinstance(key, str):
            source[key] = entry
        else:
            rooms.setdefault(key[0], {})[key[1] if len(key) == 2 else key[1:]] = entry
    for name, room in rooms.items():
        source[name] = trusted(room, batch_size, device, inner, (*path, name))
    size = torch.Size((*batch_size, *inner.get(path, ())) if inner else batch_size)
    made: TensorDict = _new(source, batch_size=size, device=device)
    return made
