"""Collectors whose workers are nodes, and the tests of collectors with processes that they join."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kinds import ASYNC, STARTED, SYNC, Kind

from swath.collectors import BaseCollector
from swath.collectors.distributed import DistributedCollector

NODES = {
    "know_losses": "a node that is killed takes along what it has done since its last sign of life",
    "write_there": "the trainer writes what nodes have sent to its own buffer",
}


def twins(name: str, of: type[BaseCollector], **options: Any) -> dict[str, Kind]:
    """Kinds of a class whose workers are nodes, by the names of those with processes whose tests they join."""
    own = {
        kind.name: replace(
            kind,
            name=f"{kind.name}, {name}",
            of=of,
            options={**options, "sync": kind is SYNC},
            cannot={**kind.cannot, **NODES},
        )
        for kind in (SYNC, ASYNC, STARTED)
    }
    return own


GROUPS = twins("group", DistributedCollector, launcher="mp")
