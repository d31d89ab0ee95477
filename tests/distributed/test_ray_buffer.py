"""RayReplayBuffer: a replay buffer that is an actor, on a real cluster of two nodes."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from children import importing_env, is_gone, until
from ray_cluster import RayCluster, why_no_ray
from tensordict import TensorDict

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import RayCollector
from swath.data import (
    BufferGoneError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NothingToSampleError,
    PrioritizedSampler,
    RateLimiter,
    RayReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from swath.testing import CountingEnv, assert_frames_belong

ray = pytest.importorskip("ray", reason=why_no_ray())
pytestmark = pytest.mark.timeout(120)

Make = Callable[..., RayReplayBuffer]


@pytest.fixture
def make(driver: RayCluster) -> Iterator[Make]:
    """Makes buffers; when they are closed, their actors are gone."""
    with contextlib.ExitStack() as stack:

        def build(**options: Any) -> RayReplayBuffer:
            return stack.enter_context(RayReplayBuffer(**{"storage": LazyTensorStorage(1000), **options}))

        yield build


def frames(count: int, first: int = 0) -> TensorDict:
    return TensorDict({"value": torch.arange(first, first + count), ("next", "x"): torch.ones(count, 3)}, [count])


def test_it_works_as_a_buffer_does(make: Make, tmp_path: Path) -> None:
    buffer = make(
        replay_buffer_cls=TensorDictReplayBuffer,
        sampler=PrioritizedSampler(1000, 1.0, 1.0),
        batch_size=6,
        priority_key="error",
    )
    with pytest.raises(NothingToSampleError, match="empty buffer"):
        buffer.sample()
    assert buffer.extend(frames(10)).tolist() == list(range(10))
    assert buffer.add(frames(1, 10)[0]) == 10
    assert (len(buffer), buffer.write_count, buffer.batch_size) == (11, 11, 6)
    batch, info = buffer.sample(return_info=True)
    assert torch.equal(batch["value"], batch["index"])
    assert torch.equal(info["index"], batch["index"])
    batch["value"].zero_()  # it is ours
    buffer.update_priority(torch.arange(11), torch.zeros(11))
    buffer.update_tensordict_priority(TensorDict({"index": torch.tensor([3]), "error": torch.tensor([1e9])}, [1]))
    assert buffer.sample(4)["value"].tolist() == [3] * 4
    buffer[3] = frames(1, 33)[0]
    assert buffer[3]["value"] == 33
    assert buffer.stats() == {"frames": 11, "written": 11, "sampled": 10, "lost": 0}
    state = buffer.state_dict()
    buffer.dumps(tmp_path / "saved")
    buffer.empty()
    assert len(buffer) == 0
    buffer.loads(tmp_path / "saved")
    assert buffer["value"].tolist() == [0, 1, 2, 33, *range(4, 11)]
    buffer.empty()
    buffer.load_state_dict(state)
    assert len(buffer) == 11
    with pytest.raises(ValueError, match="batch_size") as caught:
        buffer.sample(-1)
    assert "RayReplayBuffer, in its actor" in "".join(caught.value.__notes__)
    collector = MultiSyncCollector(CountingEnv, num_workers=1, frames_per_batch=10, replay_buffer=buffer)
    with collector, pytest.raises((ValueError, KeyError), match="value"):  # which the buffer's frames have
        list(collector)


def test_whatever_a_buffer_can_hold(make: Make) -> None:
    """Also what has no columns, and an epoch of it; made by a function."""
    storage = lambda: ReplayBuffer(storage=ListStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)  # noqa: E731
    buffer = RayReplayBuffer(replay_buffer_cls=storage)
    buffer.extend([torch.full((2,), index, dtype=torch.bfloat16) for index in range(4)])
    rows = [row for batch in buffer for row in batch[:, 0].tolist()]
    assert sorted(rows) == [0, 1, 2, 3]
    buffer[0] += 1  # no memory of the object store, which cannot be written
    pid = ray.get(ray.remote(num_cpus=0)(lambda other: other.extend([torch.zeros(2)]) and os.getpid()).remote(buffer))
    assert pid != os.getpid()
    assert len(buffer) == 5
    buffer.close()
    buffer.close()
    with pytest.raises(BufferGoneError, match="It was closed here"):
        len(buffer)


def assert_whole(buffer: RayReplayBuffer, written: int) -> None:
    """All frames are there once, and each belongs to its trajectory."""
    held = buffer[:]
    ids = held["collector", "traj_ids"]
    assert (len(buffer), buffer.write_count) == (written, written)
    for one in ids.unique().tolist():
        assert_frames_belong(held[ids == one])


def test_collectors_share_it(make: Make) -> None:
    """Of nodes, of processes and of this process; their trajectories do not mix."""
    buffer = make(batch_size=8)
    collectors: list[tuple[Any, dict[str, Any]]] = [
        (RayCollector, {"num_collectors": 2, "sync": True}),
        (MultiSyncCollector, {"num_workers": 1, "trajs_per_batch": 2}),
        (MultiSyncCollector, {"num_workers": 2, "debug": True}),
        (Collector, {}),
    ]
    seen: set[int] = set()
    for kind, options in collectors:
        before = buffer.write_count
        with kind(CountingEnv, frames_per_batch=20, total_frames=50, replay_buffer=buffer, **options) as collector:
            assert set(collector) == {None}
            assert collector.stats()["frames"] == 50
        assert buffer.write_count == before + 50 or options.get("trajs_per_batch")
        new = set(buffer["collector", "traj_ids"][before:].tolist())
        assert new
        assert not new & seen
        seen |= new
    assert_whole(buffer, buffer.write_count)


def test_collection_in_the_background_keeps_pace(make: Make) -> None:
    buffer = make(batch_size=10, rate_limiter=RateLimiter(1.0, tolerance=40, timeout_s=80))
    collector = RayCollector(CountingEnv, frames_per_batch=10, total_frames=200, replay_buffer=buffer)
    collector.start()
    drawn = 0
    while collector.is_running():
        drawn += buffer.sample().numel()
        assert drawn >= buffer.write_count - 60
        if drawn == 50:
            with collector.pause():
                resting = buffer.write_count
                assert resting < 200
                assert buffer.write_count == resting
    begun = time.monotonic()
    for _ in range(20):
        buffer.sample()  # more than the limiter would let pass: nobody writes any more
    collector.async_shutdown()
    assert_whole(buffer, 200)
    late = MultiAsyncCollector(CountingEnv, num_workers=1, frames_per_batch=10, replay_buffer=buffer)  # endless
    late.start()
    until(lambda: buffer.write_count > 200)
    late.async_shutdown()  # while the limiter makes it wait
    assert time.monotonic() - begun < 60, "nobody has waited for the limiter"


def killed(buffer: RayReplayBuffer) -> None:
    pid = int(repr(buffer).partition("pid ")[2].partition(" ")[0])
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_gone(pid))


def test_its_death_is_told_at_once(make: Make) -> None:
    words = r"The actor of a RayReplayBuffer \(pid \d+ on 127\.0\.0\.\d+\) cannot be reached: its worker process"
    buffer = make(batch_size=8)
    with (
        Collector(CountingEnv, frames_per_batch=10, replay_buffer=buffer) as collector,
        RayCollector(CountingEnv, frames_per_batch=10, replay_buffer=buffer) as nodes,
    ):
        batches = iter(collector)
        assert next(batches) is None
        nodes.start()
        buffer.sample()
        killed(buffer)
        begun = time.monotonic()
        with pytest.raises(BufferGoneError, match=words):
            next(batches)
        with pytest.raises(BufferGoneError, match=words):
            until(lambda: not nodes.is_running())
        with pytest.raises(BufferGoneError, match=words):
            buffer.sample()
    assert time.monotonic() - begun < 30


def test_what_cannot_be_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"\['max_restarts'\]: a buffer that was started again would be empty"):
        make(remote_config={"max_restarts": 1})
    with pytest.raises(RuntimeError, match="stays on its machine: give a function"):
        make(storage=LazyMemmapStorage(10))
    with pytest.raises(ValueError, match="batch_size"):
        make(batch_size=0, storage=lambda: LazyMemmapStorage(10))


OTHER = """
import pickle, ray, sys
ray.init(sys.argv[1], log_to_driver=False)
import torch
from swath.data import RayReplayBuffer
with open(sys.argv[2], "rb") as file:
    pickle.load(file).extend(torch.zeros(3))
named = RayReplayBuffer(remote_config={"name": "shared", "namespace": "swath", "get_if_exists": True})
named.extend(torch.zeros(4))
print(len(named))
"""


def test_another_driver_uses_the_same(make: Make, driver: RayCluster, tmp_path: Path) -> None:
    """By its pickled self, and by its name."""
    buffer = make(remote_config={"name": "shared", "namespace": "swath", "lifetime": "detached"})
    buffer.extend(torch.zeros(2))
    (tmp_path / "buffer").write_bytes(pickle.dumps(buffer))
    command = [sys.executable, "-c", OTHER, driver.address, str(tmp_path / "buffer")]
    done = subprocess.run(command, env=importing_env(), capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["9"], done.stderr
    assert len(buffer) == 9


def test_ray_is_shut_down_meanwhile(make: Make) -> None:
    """The last test: others need Ray."""
    buffer = make(batch_size=4, rate_limiter=RateLimiter(1.0, min_size_to_sample=100))
    buffer.extend(frames(10))
    waiting = ThreadPoolExecutor(1).submit(buffer.sample)
    until(lambda: buffer.ask(attrgetter("storage.ledger.wanted")) == 4)
    ray.shutdown()
    with pytest.raises(BufferGoneError, match=r"cannot be reached: .*Ray shut down"):
        waiting.result(30)  # which must end; on a busy machine Ray takes its time
    with pytest.raises(BufferGoneError, match="Ray was shut down"):
        len(buffer)
    assert not ray.is_initialized()
