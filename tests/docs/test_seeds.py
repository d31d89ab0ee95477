"""What the founding documents show runs with `swath` in place of their package.

The blocks below are theirs in our own words: same calls, arguments, numbers and shapes. What they leave open
(`my_policy`, `should_update`, ...) is given by the test. A block whose classes are still to come is listed as such and
skipped until they are there; then it runs.
"""

import importlib
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

import swath.collectors
from swath.collectors import SyncDataCollector
from swath.envs import GymEnv

MODULES = ("swath.collectors", "swath.collectors.utils", "swath.collectors.distributed", "swath.data", "swath.envs")


def needs(name: str) -> Any:
    """`name` wherever it is, or the test is skipped as not yet due."""
    for path in MODULES:
        try:
            return getattr(importlib.import_module(path), name)
        except (ImportError, AttributeError):
            continue
    return pytest.skip(f"not yet: {name} comes with a later version")


def run(block: str, **given: Any) -> dict[str, Any]:
    """Execute a block with the names that it leaves open; returns all names it has defined."""
    names = {"__name__": "__seed__", **given}
    exec(compile(textwrap.dedent(block), "<founding document>", "exec"), names)
    return names


def pendulum_policy() -> nn.Module:
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def cartpole_policy() -> nn.Module:
    """Two logits, written straight into `action`."""
    layers = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    return TensorDictModule(layers, in_keys=["observation"], out_keys=["action"])


# -- the package page: a batched env ---------------------------------------------------------------------------------

BATCHED = """
from swath.collectors import SyncDataCollector
from swath.envs import GymEnv, {batched}

def make_env():
    return GymEnv("Pendulum-v1")

env = {batched}(4, make_env)

collector = SyncDataCollector(
    env,
    policy=my_policy,
    frames_per_batch=200,
    total_frames=10000,
)

for data in collector:
    seen(data)
    if should_update:
        collector.update_policy_weights_()

collector.shutdown()
"""


# ParallelEnv, which the page uses, comes with a later version: SerialEnv is its twin in this process.
@pytest.mark.parametrize("batched", ["SerialEnv", "ParallelEnv"])
def test_four_envs_and_200_frames_are_4_by_50(batched: str) -> None:
    needs(batched)
    batches: list[TensorDictBase] = []
    names = run(BATCHED.format(batched=batched), my_policy=pendulum_policy(), should_update=True, seen=batches.append)
    assert [batch.shape for batch in batches] == [(4, 50)] * 50
    assert names["collector"].stats()["policy_version"] == 50


# -- the single-node page: trajectories ------------------------------------------------------------------------------

TRAJECTORIES = """
from swath.collectors import Collector
from swath.envs import GymEnv

collector = Collector(
    GymEnv("CartPole-v1"),
    policy=my_policy,
    frames_per_batch=200,
    total_frames=10000,
    trajs_per_batch=4,
)

for batch in collector:
    valid = batch[("collector", "mask")]
    loss = compute_loss(batch, valid)
    collector.update_policy_weights_()
"""


def test_four_complete_trajectories_with_a_mask() -> None:
    policy = cartpole_policy()
    count = 0

    def compute_loss(batch: TensorDictBase, valid: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        lengths = valid.sum(-1)
        assert batch.shape == valid.shape == (4, int(lengths.max()))
        assert valid.dtype == torch.bool
        for row, length in enumerate(lengths.tolist()):
            done = batch["next", "done"][row, :, 0]
            assert done[length - 1]
            assert not done[: length - 1].any()
            assert not batch["observation"][row, length:].any()
        loss = policy(batch.clone())["action"][valid].square().mean()
        loss.backward()
        return loss

    names = run(TRAJECTORIES, my_policy=policy, compute_loss=compute_loss)
    assert count > 1
    assert names["collector"].stats()["policy_version"] == count


@pytest.mark.parametrize("frames_per_batch", [50, 1000])
def test_frames_per_batch_is_only_how_often_the_env_is_polled(frames_per_batch: int) -> None:
    block = TRAJECTORIES.replace("frames_per_batch=200", f"frames_per_batch={frames_per_batch}")
    rows: list[int] = []
    run(block, my_policy=cartpole_policy(), compute_loss=lambda batch, valid: rows.append(batch.shape[0]))
    assert set(rows) == {4}


LOGITS = """
from swath.collectors import Collector
from swath.envs import GymEnv
from tensordict.nn import TensorDictModule
import torch.nn as nn

policy = TensorDictModule(
    nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)),
    in_keys=["observation"],
    out_keys=["action"],
)
collector = Collector(lambda: GymEnv("CartPole-v1"), policy, frames_per_batch=200, total_frames=10000)
for data in collector:
    seen(data)
collector.shutdown()
"""


def test_two_logits_in_action_are_taken_by_their_argmax() -> None:
    batches: list[TensorDictBase] = []
    run(LOGITS, seen=batches.append)
    assert [batch.shape for batch in batches] == [(200,)] * 50
    batch = batches[0]
    assert batch["action"].shape == (200, 2)
    assert batch["action"].is_floating_point()
    # The larger logit pushes the cart: its velocity rises with the second action and falls with the first.
    pushed = (batch["next", "observation"] - batch["observation"])[:, 1] > 0
    assert torch.equal(pushed, batch["action"].argmax(-1).bool())


# -- the oldest page: names of arguments -----------------------------------------------------------------------------

OLDEST = """
from swath.collectors import SyncDataCollector
from swath.collectors.utils import split_trajectories
from swath.envs import GymEnv

collector = SyncDataCollector(
    GymEnv("CartPole-v1"),
    my_policy,
    total_frames=400,
    max_frames_per_traj=20,
    frames_per_batch=100,
    init_random_frames=100,
    reset_at_each_iter=True,
    split_trajs=True,
    devices="cpu",
    passing_devices="cpu",
    exploration_mode="random",
    reset_when_done=True,
)
for data in collector:
    seen(data)
"""


def test_the_oldest_names_of_arguments() -> None:
    batches: list[TensorDictBase] = []
    with pytest.warns(DeprecationWarning, match="old name"):
        run(OLDEST, my_policy=cartpole_policy(), seen=batches.append)
    assert len(batches) == 4
    for batch in batches:
        mask = batch["collector", "mask"]
        assert int(mask.sum()) == 100
        assert int(mask.sum(-1).max()) <= 20
        assert batch["step_count"][0, 0, 0] == 0
        assert batch.device == torch.device("cpu")
    assert (batches[0]["action"].sum(-1)[batches[0]["collector", "mask"]] == 1).all()  # random: one-hot


def test_envs_are_reset_when_done_and_after_a_number_of_steps() -> None:
    with SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=200, max_frames_per_traj=15) as collector:
        data = collector.next()
    ended = data["next", "terminated"] | data["next", "truncated"]
    assert torch.equal(ended, data["next", "done"])
    assert data["next", "truncated"].any()
    following = data["step_count"][1:, 0]
    assert torch.equal(following == 0, data["next", "done"][:-1, 0])


SPLIT = """
from swath.collectors.utils import split_trajectories
split = split_trajectories(data)
"""


def test_split_trajectories_is_where_it_was() -> None:
    with SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=200) as collector:
        data = collector.next()
    split = run(SPLIT, data=data)["split"]
    assert int(split["collector", "mask"].sum()) == 200
    bare = data.exclude("collector")  # without ids, "done" tells, and the mask lies at the root
    split = run(SPLIT, data=bare)["split"]
    assert int(split["mask"].sum()) == 200


# -- names -----------------------------------------------------------------------------------------------------------

LEGACY = {
    "DataCollectorBase": "BaseCollector",
    "SyncDataCollector": "Collector",
    "aSyncDataCollector": "AsyncCollector",
    "_MultiDataCollector": "MultiCollector",
    "MultiSyncDataCollector": "MultiSyncCollector",
    "MultiaSyncDataCollector": "MultiAsyncCollector",
    "DistributedDataCollector": "DistributedCollector",
    "RPCDataCollector": "RPCCollector",
    "DistributedSyncDataCollector": "DistributedSyncCollector",
}


@pytest.mark.parametrize(("old", "new"), LEGACY.items())
def test_legacy_names(old: str, new: str) -> None:
    assert needs(new) is needs(old)


def test_names_of_what_is_there_now() -> None:
    """So that nothing is skipped above by mistake."""
    there = [old for old, new in LEGACY.items() if hasattr(swath.collectors, new)]
    assert there == list(LEGACY)[:6]
    assert all(hasattr(swath.collectors, old) for old in there)
    assert issubclass(swath.collectors.Collector, torch.utils.data.IterableDataset)


@pytest.mark.parametrize(
    "name",
    [*LEGACY.values(), "AsyncBatchedCollector", "RayCollector", "submitit_delayed_launcher", "split_trajectories"],
)
def test_all_names_of_the_pages(name: str) -> None:
    assert callable(needs(name))


# -- several processes, and what comes later -------------------------------------------------------------------------

MULTI = """
from swath.collectors import MultiCollector
from swath.envs import GymEnv

def make_env():
    return GymEnv("CartPole-v1")

for sync in (True, False):
    collector = MultiCollector(
        create_env_fn=[make_env] * 4,
        policy=my_policy,
        frames_per_batch=1000,
        total_frames=4000,
        sync=sync,
    )
    for data in collector:
        seen(sync, data)
    collector.shutdown()
"""

ASYNC_BATCHED = """
from swath.collectors import AsyncBatchedCollector
from swath.envs import GymEnv

collector = AsyncBatchedCollector(
    create_env_fn=[lambda: GymEnv("CartPole-v1")] * 8,
    policy=my_policy,
    frames_per_batch=200,
    total_frames=10000,
    max_batch_size=8,
)
for data in collector:
    seen(data)
collector.shutdown()
"""

STARTED = """
from swath.collectors import Collector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymEnv

rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
collector = Collector(GymEnv("CartPole-v1"), my_policy, frames_per_batch=100, total_frames=-1, replay_buffer=rb)
collector.start()
while len(rb) < 200:
    pass
for _ in range(10):
    seen(rb.sample())
collector.async_shutdown()
"""

SLICES = """
from swath.collectors import MultiCollector
from swath.data import LazyTensorStorage, ReplayBuffer, SliceSampler
from swath.envs import GymEnv

rb = ReplayBuffer(
    storage=LazyTensorStorage(100_000),
    sampler=SliceSampler(slice_len=8, end_key=("next", "done")),
    batch_size=256,
    shared=True,
)
collector = MultiCollector(
    [lambda: GymEnv("CartPole-v1")] * 4,
    my_policy,
    replay_buffer=rb,
    frames_per_batch=200,
    total_frames=-1,
    trajs_per_batch=8,
    sync=False,
)
collector.start()
while len(rb) < 2000:
    pass
for _ in range(10):
    seen(rb.sample())
collector.async_shutdown()
"""


SCRIPT = """
print("begins")
import torch
from torch import nn
from tensordict.nn import TensorDictModule

layers = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
my_policy = TensorDictModule(layers, in_keys=["observation"], out_keys=["action"])
frames = {{True: 0, False: 0}}

def seen(sync, data):
    frames[sync] += data.numel()
{multi}
print(frames)

def seen(data):
    check_slices([data], 8)
    print("slices")
{check}
{slices}
print("ends")
"""


def test_blocks_with_processes_are_plain_scripts(tmp_path: Path) -> None:
    """Without `if __name__ == "__main__"`: workers neither import nor run the script again."""
    needs("MultiCollector")
    script, check = tmp_path / "script.py", inspect.getsource(check_slices).replace("TensorDictBase", "object")
    script.write_text(SCRIPT.format(multi=MULTI, slices=SLICES, check=check))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["begins", "{True: 4000, False: 4000}", *["slices"] * 10, "ends"]
    assert "Traceback" not in done.stderr


ONE_ASYNC = """
from swath.collectors import aSyncDataCollector
from swath.envs import GymEnv

collector = aSyncDataCollector(
    lambda: GymEnv("CartPole-v1"),
    my_policy,
    frames_per_batch=200,
    total_frames=1000,
)
for data in collector:
    seen(data)
    collector.update_policy_weights_()
collector.shutdown()
"""


def test_the_oldest_name_of_the_async_collector() -> None:
    needs("aSyncDataCollector")
    batches: list[TensorDictBase] = []
    run(ONE_ASYNC, my_policy=cartpole_policy(), seen=batches.append)
    assert [batch.shape for batch in batches] == [(200,)] * 5


def test_async_batched_collector() -> None:
    needs("AsyncBatchedCollector")
    frames: list[int] = []
    run(ASYNC_BATCHED, my_policy=cartpole_policy(), seen=lambda data: frames.append(data.numel()))
    assert frames == [200] * 50


def test_a_collector_that_fills_a_buffer_in_the_background() -> None:
    needs("ReplayBuffer")
    samples: list[TensorDictBase] = []
    run(STARTED, my_policy=cartpole_policy(), seen=samples.append)
    assert [sample.shape for sample in samples] == [(32,)] * 10


ONE_PROCESS_SLICES = """
from swath.collectors import Collector
from swath.data import LazyTensorStorage, ReplayBuffer, SliceSampler
from swath.envs import GymEnv

rb = ReplayBuffer(
    storage=LazyTensorStorage(100_000),
    sampler=SliceSampler(slice_len=32, end_key=("next", "done")),
    batch_size=256,
    shared=True,
)
collector = Collector(
    GymEnv("CartPole-v1"),
    my_policy,
    replay_buffer=rb,
    frames_per_batch=200,
    total_frames=-1,
    trajs_per_batch=8,
)
collector.start()
for step in range(train_steps):
    batch = rb.sample()
    seen(batch)
collector.async_shutdown()
"""


def test_the_tip_for_trajectory_based_training_in_one_process() -> None:
    # A policy that balances for a while: the document's own waits until there is an episode of 32 steps.
    def balance(observation: torch.Tensor) -> torch.Tensor:
        right = (observation[..., 2] + observation[..., 3] > 0).long()
        return nn.functional.one_hot(right, 2)

    samples: list[TensorDictBase] = []
    run(ONE_PROCESS_SLICES, my_policy=balance, train_steps=20, seen=samples.append)
    assert len(samples) == 20
    check_slices(samples, 32)


def check_slices(samples: list[TensorDictBase], length: int) -> None:
    for sample in samples:
        assert sample.shape == (256,)
        ids = sample["collector", "traj_ids"].view(-1, length)
        assert (ids == ids[:, :1]).all()
        slices = sample.view(-1, length)
        assert torch.equal(slices["next", "observation"][:, :-1], slices["observation"][:, 1:])
