"""Nodes fail as processes do, and are told of, restarted, dropped and ended in the same way."""

import test_restarts
import test_shutdown_of_workers
import test_worker_deaths
import test_worker_errors
from kinds import joined
from node_kinds import GROUPS

pytestmark = test_restarts.pytestmark

CANNOT = {"test_a_worker_killed_at_any_moment_while_it_writes": "the trainer writes what nodes have sent"}
"""Tests of processes, and why they are not for nodes."""
for module in (test_restarts, test_shutdown_of_workers, test_worker_deaths, test_worker_errors):
    globals().update(joined(module, GROUPS, CANNOT))
