"""Collectors whose workers are nodes, and the tests of collectors with processes that they join."""

from __future__ import annotations

from dataclasses import replace

from kinds import ASYNC, STARTED, SYNC

from swath.collectors.distributed import DistributedCollector

GROUP_SYNC = replace(SYNC, name="sync, group", of=DistributedCollector, options={"launcher": "mp", "sync": True})
GROUP_ASYNC = replace(ASYNC, name="async, group", of=DistributedCollector, options={"launcher": "mp"})
GROUP_STARTED = replace(STARTED, name="start, group", of=DistributedCollector, options={"launcher": "mp"})
GROUPS = {SYNC.name: GROUP_SYNC, ASYNC.name: GROUP_ASYNC}
"""By the name of the kind whose tests it joins."""
