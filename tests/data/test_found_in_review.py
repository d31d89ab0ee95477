"""Mistakes that were found by reading and trying, each with the test that shows it is gone."""

import contextlib
import copy
import itertools
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from buffer_tools import buffer_of, together
from buffer_tools import frames as numbered
from tensordict import TensorDict, TensorDictBase

from swath.collectors import Collector
from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
)
from swath.data.stored_episodes import episodes_in
from swath.testing import CountingEnv


def frames(start: int, stop: int) -> TensorDict:
    """Frames of one episode that does not end."""
    return numbered(range(start, stop), episode=10**9)


def slow_write(buffer: ReplayBuffer, start: int, stop: int, held: threading.Event, go: threading.Event) -> None:
    """Write frames with a pause between the copy and its being told."""
    storage: Any = buffer.storage
    write_entries = storage.write_entries

    def slowly(*args: Any) -> Any:
        commit = storage.ledger.commit

        def late(begin: int, count: int) -> None:
            held.set()
            assert go.wait(30)
            storage.ledger._since[storage.ledger._slot] -= 10**9  # as if that had taken a second
            commit(begin, count)

        storage.ledger.commit = late
        try:
            return write_entries(*args)
        finally:
            del storage.ledger.commit

    storage.write_entries = slowly
    try:
        buffer.extend(frames(start, stop))
    finally:
        del storage.write_entries


@pytest.mark.parametrize("sampler", [lambda: PrioritizedSampler(256, 1.0, 1.0), lambda: SliceSampler(slice_len=1)])
def test_frames_of_a_very_slow_writer_are_sampled_in_the_end(sampler: Any) -> None:
    buffer = buffer_of(size=256, sampler=sampler(), batch_size=4000)
    buffer.extend(frames(0, 64))
    held, go = threading.Event(), threading.Event()
    writer = threading.Thread(target=slow_write, args=(buffer, 64, 128, held, go))
    writer.start()
    assert held.wait(30)
    ledger = buffer.storage.ledger
    ledger._since[ledger._slot] -= 10**9
    assert set(buffer.sample()["n"].tolist()) == set(range(64))
    go.set()
    writer.join(30)
    assert set(buffer.sample()["n"].tolist()) == set(range(128))
    buffer.extend(frames(128, 192))
    assert set(buffer.sample()["n"].tolist()) == set(range(192))


def test_frames_that_were_changed_keep_a_priority() -> None:
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(16), batch_size=500)
    buffer.extend(frames(0, 16))
    index = buffer.sample()["index"].unique()
    with buffer.storage.ledger.hiding(index[:8].numpy()):
        buffer.sample()
        buffer.update_priority(index, torch.ones(len(index)))
    assert set(buffer.sample()["n"].tolist()) == set(range(16))


# -- the rate limiter -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "batch", "steps"),
    [(lambda: SliceSampler(slice_len=64), 64, 20), (lambda: SamplerWithoutReplacement(drop_last=True), 64, 1)],
)
def test_writers_do_not_wait_for_a_sampler_that_cannot_draw(sampler: Any, batch: int, steps: int) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(2000),
        sampler=sampler(),
        batch_size=batch,
        rate_limiter=RateLimiter(samples_per_insert=16, timeout_s=20),
    )
    with Collector(CountingEnv(lengths=100), frames_per_batch=steps, replay_buffer=buffer) as collector:
        collector.start()
        for _ in range(3):
            assert buffer.sample().shape == (batch,)


def test_sampling_goes_on_without_limit_after_a_shutdown() -> None:
    limiter = RateLimiter(samples_per_insert=1, timeout_s=5)
    buffer = buffer_of(size=100, batch_size=32, rate_limiter=limiter)
    collector = Collector(CountingEnv(lengths=5), frames_per_batch=10, replay_buffer=buffer)
    collector.start()
    buffer.sample()
    collector.async_shutdown()
    for _ in range(50):
        buffer.sample()


def test_many_who_sample_hold_the_ratio_together() -> None:
    limiter = RateLimiter(samples_per_insert=1, tolerance=64, timeout_s=1)
    buffer = buffer_of(size=1000, batch_size=32, rate_limiter=limiter)
    buffer.extend(frames(0, 400))

    def sample() -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                buffer.sample()

    together(*[sample] * 6)
    assert 400 <= buffer.stats()["sampled"] <= 400 + 64


# -- drawing ahead ----------------------------------------------------------------------------------------------------


def test_a_hook_that_samples_ahead_does_not_wait_for_itself() -> None:
    buffer = buffer_of(size=100, batch_size=4, prefetch=2)
    collector = Collector(
        CountingEnv(lengths=5), frames_per_batch=10, replay_buffer=buffer, post_collect_hook=lambda _: buffer.sample()
    )
    collector.start()

    def wait() -> None:
        deadline = time.monotonic() + 20
        while collector.is_running():
            assert time.monotonic() < deadline

    with pytest.raises(RuntimeError, match="empty"):
        wait()
    buffer.shutdown()


def test_what_was_drawn_ahead_is_delivered_after_an_error_or_a_shutdown() -> None:
    calls = []

    def moody(batch: Any) -> Any:
        calls.append(0)
        if len(calls) % 7 == 3:
            raise OSError("not now")
        return batch

    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=10, prefetch=3, transform=moody
    )
    buffer.extend(torch.arange(100))
    seen: list[int] = []
    failures = 0
    for at in range(40):
        try:
            seen.extend(buffer.sample().tolist())
        except OSError:
            failures += 1
        if at == 3:
            buffer.shutdown()
        if len(seen) >= 100 - 10 * failures:
            break
    assert len(set(seen)) == len(seen)
    assert failures > 0
    assert len(buffer.state_dict()["ahead"]) <= 8  # it does not grow with the errors
    buffer.shutdown()


def test_a_restored_epoch_has_all_its_batches_and_other_sizes_are_heeded() -> None:
    def made(**options: Any) -> ReplayBuffer:
        return buffer_of(size=100, sampler=SamplerWithoutReplacement(), batch_size=10, **options)

    buffer, other, another = made(prefetch=8), made(), made()
    buffer.extend(torch.arange(100))
    stream = iter(buffer)
    seen = [*next(stream).tolist(), *next(stream).tolist()]
    other.load_state_dict(buffer.state_dict())
    assert sorted([*seen, *torch.cat(list(other)).tolist()]) == list(range(100))
    another.load_state_dict(buffer.state_dict())
    assert another.sample(7).shape[0] <= 7
    buffer.shutdown()


def test_a_program_ends_beside_draws_that_wait() -> None:
    code = """
import torch
from swath.data import LazyTensorStorage, RateLimiter, ReplayBuffer
buffer = ReplayBuffer(
    storage=LazyTensorStorage(100), batch_size=32, prefetch=3, rate_limiter=RateLimiter(samples_per_insert=1)
)
buffer.extend(torch.arange(40))
buffer.sample()
"""
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stderr == ""
    assert time.monotonic() - begun < 40


# -- several collectors, lanes and lists ------------------------------------------------------------------------------


def test_episodes_of_two_collectors_are_told_apart() -> None:
    buffer = buffer_of(size=1000)
    collectors = []
    for first in (0, 100):
        env = CountingEnv(lengths=7)
        env.first_lane = first
        collectors.append(Collector(env, frames_per_batch=10, replay_buffer=buffer))
    for turn in (0, 1, 1, 0, 0, 1, 0, 1):
        collectors[turn].next()

    def read(index: Any) -> TensorDictBase:
        return buffer[torch.from_numpy(index)]

    episodes = list(episodes_in(buffer.storage.contents(), read))
    assert len(episodes) == 10
    for episode in episodes:
        assert torch.equal(episode["next", "observation"][:-1], episode["observation"][1:])
    for collector in collectors:
        collector.shutdown()


class Through:
    """A transform that changes nothing, both ways."""

    def __call__(self, batch: Any) -> Any:
        return batch

    def inv(self, data: Any) -> Any:
        return data


@pytest.mark.parametrize("options", [{"transform": Through()}, {"storage": ListStorage(1000)}], ids=["inv", "list"])
def test_slices_never_cross_lanes_where_columns_are_not_taken(options: dict[str, Any]) -> None:
    buffer = ReplayBuffer(**{"storage": LazyTensorStorage(1000), **options}, sampler=SliceSampler(slice_len=4))
    env = CountingEnv((3,), 50)
    list(Collector(env, frames_per_batch=30, total_frames=300, replay_buffer=buffer, track_traj_ids=False))
    slices = buffer.sample(400).view(100, 4)
    assert torch.equal(slices["next", "observation"][:, :-1], slices["observation"][:, 1:])


def test_lists_save_their_seams_and_let_go() -> None:
    buffer = buffer_of(ListStorage, 100, sampler=SliceSampler(slice_len=3))
    for source in range(5):
        buffer.extend(frames(10 * source, 10 * source + 4), source=source)
    other = buffer_of(ListStorage, 100, sampler=SliceSampler(slice_len=3))
    state = buffer.state_dict()
    buffer[0]["n"].fill_(77)
    other.load_state_dict(state)
    slices = other.sample(300)["n"].view(-1, 3)
    assert (slices.diff() == 1).all()
    buffer.empty()
    assert not buffer.storage.items  # type: ignore[attr-defined]


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_a_copy_that_is_made_while_others_write(kind: Any) -> None:
    buffer = buffer_of(kind, 64, batch_size=64)
    buffer.extend(frames(0, 64))
    over = threading.Event()

    def write() -> None:
        for start in itertools.count(64, 16):
            if over.is_set():
                return
            buffer.extend(frames(start, start + 16))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            if kind is LazyTensorStorage:
                twin = copy.deepcopy(buffer)
                twin.state_dict()
            else:
                twin = buffer
                buffer.storage.__getstate__()  # as when it is handed to a process
            there = twin[:]
            assert len(set(there["n"].tolist())) == len(there)
    finally:
        over.set()
        writer.join(30)


def test_a_saved_state_does_not_change_with_the_thread() -> None:
    policy = torch.nn.Linear(3, 2)
    buffer = buffer_of(size=100, batch_size=2)
    with Collector(CountingEnv(lengths=5), policy, frames_per_batch=5, replay_buffer=buffer) as collector:
        collector.start()
        saved = collector.state_dict()["policy_state_dict"]
        before = {name: weight.clone() for name, weight in saved.items()}
        torch.nn.init.constant_(policy.weight, 3.0)
        collector.update_policy_weights_()
        with collector.pause():
            collector.rollout()  # acts with what was published
            assert all(
                (weight == 3.0).all() for name, weight in collector.policy.named_parameters() if "weight" in name
            )
        assert all(torch.equal(saved[name], weight) for name, weight in before.items())
