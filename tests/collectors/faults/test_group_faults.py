"""Nodes fail as processes do, and are told of, restarted, dropped and ended in the same way."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import test_restarts
import test_shutdown_of_workers
import test_worker_deaths
import test_worker_errors
from fault_tools import within
from kinds import joined
from node_kinds import GROUPS

from swath.collectors.distributed import groups
from swath.collectors.distributed.groups import GroupWire, MeetingStore
from swath.collectors.distributed.wire import NODE, TRAINER
from swath.errors import ChannelClosedError
from swath.runtime.channel import Channel

pytestmark = test_restarts.pytestmark

CANNOT = {
    "test_a_worker_killed_at_any_moment_while_it_writes": "the trainer writes what nodes have sent",
    "test_a_buffer_gets_what_the_budget_says": "the same",
    "test_a_batch_whose_receipt_was_never_sent_is_counted_as_lost": "a batch and its receipt are one parcel",
}
"""Tests of processes, and why they are not for nodes."""
for module in (test_restarts, test_shutdown_of_workers, test_worker_deaths, test_worker_errors):
    globals().update(joined(module, GROUPS, CANNOT))


@pytest.mark.parametrize("rank", [TRAINER, NODE])
def test_one_that_ends_while_the_group_is_formed_is_noticed(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """It has told where it listens, and never comes: at once, and not when gloo has waited for it."""
    ours, end = Channel.pair()
    theirs, get = Channel(end), MeetingStore.get
    channel, others = (ours, theirs) if rank == TRAINER else (theirs, ours)

    def get_or_end(store: MeetingStore, key: str) -> bytes:
        if store.channel is others:
            raise RuntimeError("killed")
        return get(store, key)

    monkeypatch.setattr(MeetingStore, "get", get_or_end)
    monkeypatch.setattr(groups, "FORM_S", 3.0)
    with ThreadPoolExecutor(1) as other, within(2):
        making = other.submit(GroupWire, others, 1 - rank, "gloo", 3600.0)
        with pytest.raises(ChannelClosedError):
            GroupWire(channel, rank, "gloo", 3600.0)
        assert isinstance(making.exception(10), ChannelClosedError)
