"""`split_trajectories`: one row per trajectory, padded and masked."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from swath.collectors import Collector
from swath.collectors.utils import split_trajectories
from swath.testing import CountingEnv

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


def rollout(ids: Any, key: Any = IDS) -> TensorDictBase:
    """A batch with these ids, whose observations number the frames from 1."""
    ids = torch.tensor(ids)
    last = torch.ones_like(ids, dtype=torch.bool)
    last[..., :-1] = ids[..., 1:] != ids[..., :-1]
    entries = {
        "observation": torch.arange(1, ids.numel() + 1).view(*ids.shape, 1).float(),
        "next": {"done": last.unsqueeze(-1), "reward": torch.ones(*ids.shape, 1)},
    }
    batch = TensorDict(entries, batch_size=ids.shape)
    return batch if key is None else batch.set(key, ids)


def frames(batch: TensorDictBase) -> list[list[float]]:
    return batch["observation"].squeeze(-1).tolist()


def test_rows_are_trajectories_in_order() -> None:
    split = split_trajectories(rollout([3, 3, 7, 7, 7, 9]))
    assert frames(split) == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
    assert split[MASK].tolist() == [[True, True, False], [True] * 3, [True, False, False]]
    assert split[IDS].tolist() == [[3, 3, -1], [7, 7, 7], [9, -1, -1]]
    assert split["next", "done"].squeeze(-1).tolist() == [
        [False, True, False],
        [False, False, True],
        [True, False, False],
    ]


def test_lanes_are_split_row_by_row() -> None:
    split = split_trajectories(rollout([[0, 0, 2, 2], [1, 1, 1, 3]]))
    assert frames(split) == [[1, 2, 0], [3, 4, 0], [5, 6, 7], [8, 0, 0]]


def test_more_batch_dimensions() -> None:
    split = split_trajectories(rollout([[[0, 0], [1, 2]], [[3, 3], [4, 4]]]))
    assert frames(split) == [[1, 2], [3, 0], [4, 0], [5, 6], [7, 8]]


def test_full_rows_need_no_padding() -> None:
    split = split_trajectories(rollout([[0, 0], [1, 1]]))
    assert split.shape == (2, 2)
    assert split[MASK].all()
    assert split_trajectories(rollout([5, 5, 5])).shape == (1, 3)


def test_the_batch_itself_stays_as_it_is() -> None:
    batch = rollout([0, 0, 1])
    before = batch.clone()
    split = split_trajectories(batch)
    split["observation"].zero_()
    assert (batch == before).all()
    assert MASK not in set(batch.keys(True, True))


def test_types_and_the_name_of_time_are_kept() -> None:
    batch = rollout([0, 0, 1])
    batch.names = ["time"]
    split = split_trajectories(batch)
    assert split.names == [None, "time"]
    assert split["next", "done"].dtype == torch.bool
    assert split[IDS].dtype == torch.int64


def test_frames_without_an_id_are_left_out() -> None:
    assert frames(split_trajectories(rollout([0, 0, -1, 1]))) == [[1, 2], [4, 0]]


def test_an_id_that_comes_again_is_another_row() -> None:
    """As when batches are put behind each other; the peer fails here."""
    assert frames(split_trajectories(rollout([0, 0, 1, 0]))) == [[1, 2], [3, 0], [4, 0]]


def test_without_ids_the_ends_decide() -> None:
    split = split_trajectories(rollout([[0, 0, 1], [2, 3, 3]], key=None))
    assert frames(split) == [[1, 2], [3, 0], [4, 0], [5, 6]]
    assert split["traj_ids"].tolist() == [[0, 0], [1, -1], [2, -1], [3, 3]]
    assert split["mask"].tolist() == [[True, True], [True, False], [True, False], [True, True]]


def test_done_key() -> None:
    batch = rollout([0, 0, 1], key=None)
    batch["next", "over"] = batch["next"].pop("done")
    assert frames(split_trajectories(batch, done_key="over")) == [[1, 2], [3, 0]]


def test_trajectory_key_with_the_mask_beside_it() -> None:
    split = split_trajectories(rollout([0, 0, 1], key=("info", "episode")), trajectory_key=("info", "episode"))
    assert split["info", "episode"].tolist() == [[0, 0], [1, -1]]
    assert split["info", "mask"].tolist() == [[True, True], [True, False]]


def test_ids_may_have_a_last_dimension_of_one() -> None:
    batch = rollout([[0, 0, 1], [2, 2, 2]], key=None)
    batch["episode"] = torch.tensor([[0, 0, 1], [2, 2, 2]]).unsqueeze(-1)
    split = split_trajectories(batch, trajectory_key="episode")
    assert split["episode"].squeeze(-1).tolist() == [[0, 0, -1], [1, -1, -1], [2, 2, 2]]


def test_nothing_but_padding_is_no_trajectory() -> None:
    assert split_trajectories(rollout([-1, -1])).shape == (0, 0)


def test_prefix() -> None:
    split = split_trajectories(rollout([0, 0, 1], key=("mine", "traj_ids")), prefix="mine")
    assert split["mine", "mask"].tolist() == [[True, True], [True, False]]


def test_as_nested() -> None:
    split = split_trajectories(rollout([3, 3, 7, 7, 7, 9]), as_nested=True)
    assert split.batch_size == (3,)
    assert [row.shape[0] for row in split["observation"].unbind()] == [2, 3, 1]
    assert [row[:, 0].tolist() for row in split["observation"].unbind()] == [[1, 2], [3, 4, 5], [6]]
    assert MASK not in set(split.keys(True, True))
    both = split["observation"] + split["next", "reward"]
    assert [row[:, 0].tolist() for row in both.unbind()] == [[2, 3], [4, 5, 6], [7]]


def test_a_batch_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match="time dimension"):
        split_trajectories(TensorDict({"a": torch.ones(())}, []))


def test_neither_ids_nor_ends_is_refused() -> None:
    batch = TensorDict({"observation": torch.ones(3, 1)}, [3])
    with pytest.raises(KeyError, match=r"\('next', 'done'\).*observation"):
        split_trajectories(batch)


def test_batches_of_a_collector() -> None:
    with Collector(CountingEnv((2,), lengths=[[3], [4]]), frames_per_batch=20) as collector:
        split = split_trajectories(collector.next())
    assert split.shape == (7, 4)
    assert split[MASK].sum(-1).tolist() == [3, 3, 3, 1, 4, 4, 2]
    assert split["observation"][split[MASK]].shape == (20, 3)


def test_a_flat_batch_of_several_lanes_is_split_where_lanes_meet() -> None:
    """Flattened lanes end in the middle of episodes; their ids still tell them apart."""
    with Collector(CountingEnv((2,), lengths=100), frames_per_batch=6) as collector:
        batch = collector.next()
    assert split_trajectories(batch.reshape(-1)).shape == (2, 3)
