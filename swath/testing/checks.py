"""Checks of what counting envs have left in a batch: every frame where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from tensordict import TensorDictBase

from swath.keys import DONE, MASK, NEXT, OBSERVATION, REWARD, TERMINATED, TRAJ_IDS, TRUNCATED, after

LANE, EPISODE, STEP = 0, 1, 2


def assert_frames_belong(batch: TensorDictBase, *, compact: bool = False) -> None:
    """Every frame of a batch `[..., T]` of counting envs is right in itself and follows from the one before it."""
    rows = batch.reshape(-1, batch.shape[-1]) if batch.ndim > 1 else batch.unsqueeze(0)
    root = rows.get(OBSERVATION).numpy()
    reward = rows.get(after(REWARD)).numpy()[..., 0]
    flags = {name: rows.get(after(name)).numpy()[..., 0] for name in (DONE, TERMINATED, TRUNCATED)}
    done = flags[DONE]
    np.testing.assert_array_equal(done, flags[TERMINATED] | flags[TRUNCATED])
    for name in (DONE, TERMINATED, TRUNCATED):
        assert not rows.get(name).any(), f"the root says {name}"
    np.testing.assert_array_equal(reward, root[..., STEP] + 1)
    assert (root[..., LANE] == root[:, :1, LANE]).all(), "a frame lies in another lane's row"
    if not compact:
        following = rows.get(after(OBSERVATION)).numpy()
        np.testing.assert_array_equal(following[..., STEP], root[..., STEP] + 1)
        np.testing.assert_array_equal(following[..., :STEP], root[..., :STEP])
    inside = ~done[:, :-1]
    gone_on, begun = root[:, 1:][inside], root[:, 1:][~inside]
    np.testing.assert_array_equal(gone_on[:, STEP], root[:, :-1][inside][:, STEP] + 1)
    np.testing.assert_array_equal(gone_on[:, EPISODE], root[:, :-1][inside][:, EPISODE])
    assert (begun[:, STEP] == 0).all(), "an episode does not begin at step 0"
    np.testing.assert_array_equal(begun[:, EPISODE], root[:, :-1][~inside][:, EPISODE] + 1)
    ids = rows.get(TRAJ_IDS, None)
    if ids is not None:
        assert_ids_fit(ids.numpy(), done)


def assert_ids_fit(ids: np.ndarray, done: np.ndarray) -> None:
    """Ids `[N, T]` change exactly behind last frames, and no id names two trajectories."""
    np.testing.assert_array_equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    runs = [ids[row][np.r_[True, done[row, :-1]]] for row in range(len(ids))]
    names = np.concatenate(runs)
    assert len(np.unique(names)) == len(names), "one id names two trajectories"


def assert_follows(before: TensorDictBase, behind: TensorDictBase) -> None:
    """The second batch goes on exactly where the first ended, lane by lane, ids included."""
    last, first = before[..., -1], behind[..., 0]
    done = last.get(after(DONE)).reshape(-1).numpy()
    expected = last.get(after(OBSERVATION)).reshape(-1, 3).numpy()
    found = first.get(OBSERVATION).reshape(-1, 3).numpy()
    np.testing.assert_array_equal(found[~done], expected[~done])
    assert (found[done][:, STEP] == 0).all()
    np.testing.assert_array_equal(found[done][:, EPISODE], expected[done][:, EPISODE] + 1)
    if last.get(TRAJ_IDS, None) is not None:
        same = last.get(TRAJ_IDS).reshape(-1).numpy() == first.get(TRAJ_IDS).reshape(-1).numpy()
        np.testing.assert_array_equal(same, ~done)


def assert_whole_episodes(batch: TensorDictBase, length: Callable[[int, int], int]) -> list[tuple[int, int]]:
    """Every row of a padded batch is one whole episode of `length(lane, episode)` steps; returns (lane, episode)."""
    found = []
    mask = batch.get(MASK).numpy()
    for row in range(batch.shape[0]):
        count = int(mask[row].sum())
        assert mask[row, :count].all(), "the mask has holes"
        episode = batch[row, :count]
        found.append(_assert_whole(episode, length))
        padding = batch[row, count:]
        assert (padding.get(TRAJ_IDS) == -1).all()
        assert not padding.get(OBSERVATION).any()
    return found


def assert_whole_in_a_row(batch: TensorDictBase, length: Callable[[int, int], int]) -> list[tuple[int, int]]:
    """A "cat" batch is whole episodes, one after the other; returns (lane, episode) of each."""
    ends = np.flatnonzero(batch.get(after(DONE)).numpy()[:, 0])
    assert len(ends) and ends[-1] == batch.shape[0] - 1
    begins: Iterable[int] = np.r_[0, ends[:-1] + 1]
    return [_assert_whole(batch[b : e + 1], length) for b, e in zip(begins, ends, strict=True)]


def _assert_whole(episode: TensorDictBase, length: Callable[[int, int], int]) -> tuple[int, int]:
    numbers = episode.get(OBSERVATION).numpy()
    lane, name = int(numbers[0, LANE]), int(numbers[0, EPISODE])
    wanted = length(lane, name)
    assert len(numbers) == wanted, f"episode {name} of lane {lane} has {len(numbers)} frames instead of {wanted}"
    np.testing.assert_array_equal(numbers[:, STEP], np.arange(wanted))
    assert (numbers[:, EPISODE] == name).all()
    assert (numbers[:, LANE] == lane).all()
    done = episode.get((NEXT, DONE)).numpy()[:, 0]
    assert done[-1] and not done[:-1].any()
    assert len(np.unique(episode.get(TRAJ_IDS).numpy())) == 1
    return lane, name
