"""Collectors over sockets: the same classes with another carrier."""

from __future__ import annotations

from dataclasses import replace

from kinds import ASYNC, SYNC
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
