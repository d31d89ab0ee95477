"""Collectors over sockets: the same classes with another carrier, and the tests of processes that they join."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

from kinds import ASYNC, STARTED, SYNC, over
from socket_carrier import SocketCarrier

from swath.collectors import MultiAsyncCollector, MultiSyncCollector
from swath.collectors.multi_config import MultiConfig
from swath.collectors.worker import FIELDS
from swath.runtime.carrier import Carrier


class SocketSync(MultiSyncCollector):
    def make_carrier(self, config: MultiConfig) -> Carrier:
        return SocketCarrier(config.workers, FIELDS)


class SocketAsync(MultiAsyncCollector):
    def make_carrier(self, config: MultiConfig) -> Carrier:
        return SocketCarrier(config.workers, FIELDS)


SOCKET_SYNC = replace(SYNC, name="sync, sockets", of=SocketSync)
SOCKET_ASYNC = replace(ASYNC, name="async, sockets", of=SocketAsync)
SOCKET_STARTED = replace(STARTED, name="start, sockets", of=SocketAsync)
TWINS = {SYNC.name: SOCKET_SYNC, ASYNC.name: SOCKET_ASYNC, STARTED.name: SOCKET_STARTED}
"""By the name of the kind whose tests it joins."""


def joined(module: ModuleType, cannot: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """The tests of `module` that run over worker processes, for the kinds over sockets.

    `cannot` names those that are about processes themselves, each with the reason.
    """
    found = {}
    for name, test in vars(module).items():
        marks = getattr(test, "pytestmark", []) if name.startswith("test_") and name not in cannot else []
        others = [mark for mark in marks if mark.args[:1] != ("kind",)]
        twins = [
            TWINS[kind.name] for mark in marks if mark not in others for kind in mark.args[1] if kind.name in TWINS
        ]
        if twins:
            copy = FunctionType(test.__code__, test.__globals__, name, test.__defaults__, test.__closure__)
            copy.__dict__.update(test.__dict__, pytestmark=[*others, over(twins).mark])
            found[name] = copy
    return found
