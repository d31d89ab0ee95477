"""Nodes fail as processes do, and are told of, restarted, dropped and ended in the same way."""

import test_restarts
import test_shutdown_of_workers
import test_worker_deaths
import test_worker_errors
from kinds import joined
from node_kinds import GROUPS

pytestmark = test_restarts.pytestmark

CANNOT = {
    "test_a_worker_killed_at_any_moment_while_it_writes": "the trainer writes what nodes have sent",
    "test_a_buffer_gets_what_the_budget_says": "the same",
    "test_a_batch_whose_receipt_was_never_sent_is_counted_as_lost": "a batch and its receipt are one parcel",
}
"""Tests of processes, and why they are not for nodes."""
for module in (test_restarts, test_shutdown_of_workers, test_worker_deaths, test_worker_errors):
    globals().update(joined(module, GROUPS, CANNOT))
