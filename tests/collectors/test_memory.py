"""Collecting takes no more memory the longer it goes on."""

from __future__ import annotations

import gc
import os
import resource
import tracemalloc
from typing import Any

import psutil
import pytest
import torch
from common import StopAfter, net
from inside import count_in_between, newest_slot, slots_allocated, slots_held, slots_known_to_workers
from kinds import ASYNC_HERE, SINGLE, SPREAD, SYNC, SYNC_HERE, Kind, Make, over

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv
from swath.testing import CountingEnv, CountingGymEnv, counting_envs

BATCHES = 2_000


def collector_of(lanes: int, **options: Any) -> Collector:
    env: Any = GymEnv(CountingGymEnv(lengths=[3, 7]))
    if lanes:
        env = SerialEnv(lanes, [lambda make=make: GymEnv(make) for make in counting_envs(lanes, lengths=[3, 7])])
    return Collector(env, net(), frames_per_batch=4 * max(1, lanes), **options)


def test_memory_is_flat_over_batches_let_go_at_once() -> None:
    collector = collector_of(2)
    stream = iter(collector)
    for _ in range(100):  # warm up: caches, deques of recent episodes
        next(stream)
    gc.collect()
    resident = psutil.Process().memory_info().rss
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    pointers = set()
    for _ in range(BATCHES):
        batch = next(stream)
        pointers.add(batch.get("observation").data_ptr())
        del batch
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert collector.stats()["slots_allocated"] == 1, "a batch that is let go costs no allocation"
    assert len(pointers) == 1
    assert grown < 50_000, f"{grown} bytes of Python objects are left"
    assert psutil.Process().memory_info().rss - resident < 20e6
    collector.shutdown()


def test_a_for_loop_needs_two_slots() -> None:
    """Its variable holds the last batch while the next is collected; that it is trained on holds it no longer."""
    collector = collector_of(2, total_frames=300 * 8)
    layer = torch.nn.Linear(3, 1)
    pointers = set()
    for batch in collector:
        pointers.add(batch.get("observation").data_ptr())
        loss = (layer(batch.get("observation")) - batch.get(("next", "reward"))).square().mean()
        loss.backward()
        del loss
    assert collector.stats()["slots_allocated"] == 2
    assert len(pointers) == 2


@pytest.mark.parametrize("option", [{"trajs_per_batch": 3, "traj_format": "padded"}, {"split_trajs": True}])
def test_copies_of_frames_leave_one_slot_in_use(option: dict[str, Any]) -> None:
    collector = collector_of(2, total_frames=200 * 8, **option)
    kept = list(collector)
    assert len(kept) > 100
    assert collector.stats()["slots_allocated"] == 1


@over([SINGLE, SYNC])
def test_slots_that_a_consumer_once_held_are_given_back(make: Make, kind: Kind) -> None:
    """Here, and in the workers."""
    collector = make(steps=4)
    kept = [collector.next() for _ in range(30)]
    assert collector.stats()["slots_allocated"] == slots_held(collector) == 30
    kept.clear()
    for _ in range(30):
        collector.next()
    assert collector.stats()["slots_allocated"] == 30
    assert slots_held(collector) <= 3
    if kind.workers:
        assert len(collector.get_distant_attr("env.batch_size")) == 2  # the workers still answer
        assert slots_known_to_workers(collector) <= 6


def test_a_shorter_last_batch_does_not_cost_the_others_their_slot() -> None:
    collector = collector_of(2, total_frames=8 * 20 + 4)
    sizes = [batch.shape[-1] for batch in collector]
    assert sizes == [4] * 20 + [2]
    assert collector.stats()["slots_allocated"] <= 3


def test_interrupted_batches_do_not_add_slots() -> None:
    collector = collector_of(2, interruptor=StopAfter(3))
    for _ in range(200):
        collector.next()
    assert collector.stats()["slots_allocated"] == 1


def test_episodes_waiting_to_end_are_the_only_frames_held() -> None:
    collector = Collector(
        CountingEnv((2,), lengths=[50, 3]), frames_per_batch=8, total_frames=4_000, trajs_per_batch=1, traj_format="cat"
    )
    most = max(collector.stats()["pending_frames"] for _ in collector)
    assert most <= 2 * (50 + 4)


@pytest.mark.parametrize(
    ("kind", "how", "lanes"),
    [
        *((SYNC_HERE, how, lanes) for how, lanes in (("stack", 0), ("stack", 2), (0, 2), (0, 0), (-1, 0))),
        *((SYNC, how, 0) for how in ("stack", 0, -1)),
    ],
    ids=str,
)
def test_a_sync_batch_is_the_memory_that_workers_wrote_to(make: Make, how: Any, lanes: int) -> None:
    collector = make(lanes=lanes, frames_per_batch=16, cat_results=how)
    batch = collector.next()
    columns = newest_slot(collector)
    for key, value in batch.items(True, True):
        assert value.data_ptr() == columns[key].data_ptr()
        assert value.is_contiguous()


@over([SYNC_HERE, ASYNC_HERE])
def test_slots_of_workers_are_used_again(make: Make, kind: Kind) -> None:
    collector = make(steps=4)
    for _ in range(20):
        collector.next()
    allocated, held = slots_allocated(collector), slots_held(collector)
    for _ in range(150):
        collector.next()
    assert slots_allocated(collector) == allocated
    assert slots_held(collector) == held
    assert max(allocated) <= (2 if kind.joins else 4)


@over(SPREAD)
def test_thousands_of_batches_may_be_kept(make: Make) -> None:
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 120, most))
    try:
        kept = list(make(None, net(), steps=1, batches=600))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    assert len(kept) == 600
    assert len({batch["observation"].data_ptr() for batch in kept}) == 600


def test_slots_are_counted_while_another_thread_needs_the_first_of_another_kind() -> None:
    with Collector(CountingEnv(()), frames_per_batch=4) as collector:
        collector.next()
        count_in_between(collector, "first", lambda: count_in_between(collector, "second", int))
        assert collector.stats()["slots_allocated"] == 1
