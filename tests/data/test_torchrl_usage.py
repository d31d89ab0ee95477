"""What users of TorchRL do with buffers, beyond writing and sampling frames."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

# -- frames that are batches themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_batch_dimensions_of_frames_come_back(storage: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=storage(60), batch_size=4)
    buffer.extend(TensorDict({"o": torch.arange(250.0).view(10, 25)}, [10, 25]))
    batch = buffer.sample()
    assert batch.shape == (4, 25)
    assert batch["index"].shape == (4, 25)
    assert (batch["index"] == batch["index"][:, :1]).all()
    assert torch.equal(batch["o"], batch["index"] * 25 + torch.arange(25.0))
    if storage is not ListStorage:
        buffer.add(batch[0].exclude("index"))
        assert buffer[10].shape == (25,)


def test_batch_dimensions_of_nested_entries_come_back() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=2)
    agents = TensorDict({"o": torch.zeros(6, 3, 4)}, [6, 3])
    buffer.extend(TensorDict({"agents": agents, "t": torch.arange(6)}, [6]))
    batch = buffer.sample()
    assert (batch.shape, batch["agents"].shape) == ((2,), (2, 3))
    shared = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=2, shared=True)
    shared.extend(TensorDict({"agents": agents}, [6]))
    assert shared.sample()["agents"].shape == (2, 3)


def test_priorities_of_frames_that_are_batches_are_reduced() -> None:
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(10), batch_size=50)
    buffer.extend(TensorDict({"o": torch.zeros(3, 4)}, [3, 4]))
    batch = buffer.sample()
    batch["td_error"] = torch.where(batch["index"] == 1, 1.0, 0.0)
    buffer.update_tensordict_priority(batch)
    assert set(buffer.sample(200)["index"].flatten().tolist()) == {1}


def test_items_of_unequal_shapes_lie_beside_each_other() -> None:
    buffer = ReplayBuffer(storage=ListStorage(10), batch_size=4)
    buffer.extend([TensorDict({"a": torch.zeros(n)}, []) for n in (3, 4)])
    batch = buffer.sample(64)
    assert batch.shape == (64,)
    assert {batch[at]["a"].shape[0] for at in range(64)} == {3, 4}


# -- checkpoints beside other files ------------------------------------------------------------------------------------


def filled(**options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(40), batch_size=4, **options)
    buffer.extend(torch.arange(40))
    return buffer


def test_a_checkpoint_leaves_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "best.pt").write_text("weights")
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        filled().dumps(".")
    assert (tmp_path / "models" / "best.pt").read_text() == "weights"
    assert len(list(tmp_path.iterdir())) == 3  # the models, one file and one folder
    other = ReplayBuffer(storage=LazyTensorStorage(40), batch_size=4)
    other.loads(".")
    assert torch.equal(other[:], torch.arange(40))


def test_a_checkpoint_may_lie_in_the_scratch_directory(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path), batch_size=4)
    buffer.extend(torch.arange(8))
    buffer.dumps(tmp_path)
    buffer.extend(torch.arange(8, 10))
    assert sorted(buffer[:].tolist()) == list(range(2, 10))


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_what_was_drawn_ahead_is_part_of_the_state(sampler: Any) -> None:
    buffer = filled(prefetch=3, sampler=sampler(), generator=torch.Generator().manual_seed(1))
    buffer.sample()
    other = filled(sampler=sampler())
    other.load_state_dict(buffer.state_dict())
    for _ in range(6):
        assert torch.equal(other.sample(), buffer.sample())
    buffer.shutdown()


def test_an_epoch_that_is_drawn_ahead_has_no_frames_of_the_former() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SamplerWithoutReplacement(), batch_size=8, prefetch=2)
    for k in range(4):
        buffer.extend(torch.full((40,), k))
        assert torch.cat(list(buffer)).tolist() == [k] * 40
    buffer.shutdown()


# -- priorities --------------------------------------------------------------------------------------------------------


def test_priorities_that_are_written_count_in_lanes_too() -> None:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(20, ndim=2), batch_size=100
    )
    priority = torch.zeros(2, 5)
    priority[1, 3] = 1.0
    index = buffer.extend(TensorDict({"o": torch.arange(10).view(2, 5), "td_error": priority}, [2, 5]))
    assert set(buffer.sample()["o"].tolist()) == {8}
    buffer.update_priority(index, priority.flip(0))
    assert set(buffer.sample()["o"].tolist()) == {3}


def test_a_priority_that_is_added_counts() -> None:
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=lambda: LazyTensorStorage(20))
    for n in range(4):
        buffer.add(TensorDict({"o": torch.tensor(n), "td_error": torch.tensor(float(n == 2))}, []))
    assert set(buffer.sample(50)["o"].tolist()) == {2}


def test_a_batch_without_priorities_is_warned_of_where_there_are_some() -> None:
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(20), batch_size=4)
    buffer.extend(TensorDict({"o": torch.arange(4)}, [4]))
    for key in ("td_error", ("loss", "td")):
        buffer.priority_key = key
        with pytest.warns(UserWarning, match=re.escape(f"batch[{key!r}] = ...")):
            buffer.update_tensordict_priority(buffer.sample())
    with pytest.raises(KeyError, match="index"):
        buffer.update_tensordict_priority(TensorDict({"td_error": torch.ones(4)}, [4]))
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    plain.extend(TensorDict({"o": torch.arange(4)}, [4]))
    plain.update_tensordict_priority(plain.sample())


def test_priorities_of_half_precision_and_single_ones() -> None:
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(20))
    buffer.extend(torch.arange(8))
    buffer.update_priority(torch.arange(8), torch.tensor([0.0]))
    buffer.update_priority(torch.tensor([3, 4]), torch.ones(2, dtype=torch.bfloat16))
    assert set(buffer.sample(100).tolist()) == {3, 4}


# -- names and arguments -----------------------------------------------------------------------------------------------


def test_arguments_without_effect_are_accepted() -> None:
    with TemporaryDirectory() as scratch:
        directory = TemporaryDirectory(dir=scratch)
        storages = [
            LazyTensorStorage(10, compilable=True, shared_init=True, consolidated=False, device="auto"),
            LazyMemmapStorage(10, compilable=True, auto_cleanup=True, scratch_dir=directory),
            ListStorage(10, compilable=True),
        ]
        for storage in storages:
            writer = TensorDictRoundRobinWriter(compilable=True)
            buffer = ReplayBuffer(storage=storage, writer=writer, batch_size=2, compilable=True, delayed_init=False)
            buffer.extend(torch.arange(3))
            assert buffer.sample(include_info=True).shape == (2,)
    assert isinstance(writer, RoundRobinWriter)
    with pytest.raises(TypeError, match="Did you mean 'scratch_dir'"):
        LazyMemmapStorage(10, scratchdir="x")


def test_entries_by_nested_key_and_storages_by_index() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(TensorDict({"a": torch.arange(6), "b": {"c": torch.arange(6) * 2}}, [6]))
    assert buffer["a"].tolist() == list(range(6))
    assert buffer["b", "c"].tolist() == list(range(0, 12, 2))
    assert buffer.storage[: len(buffer)]["a"].tolist() == list(range(6))
    assert buffer.storage.get(2)["b", "c"].item() == 4
    assert buffer.storage.shape == (10,)
    assert buffer.sample(2).device == torch.device("cpu")


def test_the_count_of_what_was_written_may_survive_emptying() -> None:
    buffer = filled()
    buffer.empty(empty_write_count=False)
    assert (len(buffer), buffer.write_count) == (0, 40)
    buffer.extend(torch.arange(5))
    assert (len(buffer), buffer.write_count) == (5, 45)
    buffer.empty()
    assert (len(buffer), buffer.write_count) == (0, 0)


def test_slices_see_flags_that_were_changed_in_place() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=10), batch_size=10)
    done = torch.zeros(10, 1, dtype=torch.bool)
    done[4] = True
    buffer.extend(TensorDict({"o": torch.arange(10), "next": {"done": done}}, [10]))
    with pytest.raises(RuntimeError, match="as long as a slice"):
        buffer.sample()
    frame = buffer[4]
    frame["next", "done"] = torch.zeros(1, dtype=torch.bool)
    buffer[4] = frame
    assert buffer.sample()["o"].tolist() == list(range(10))
