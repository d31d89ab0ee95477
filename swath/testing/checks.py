"""Checks of what counting envs have left in a batch: every frame where it belongs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.keys import (
    DONE,
    FLAGS,
    IS_INIT,
    MASK,
    NEXT,
    OBSERVATION,
    REWARD,
    STEP_COUNT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    after,
)

LANE, EPISODE, STEP = 0, 1, 2
ONE_STEP = np.array([0, 0, 1])

Names = list[tuple[int, int]]
"""(lane, episode) of each episode found."""


def counted(seen: TensorDictBase) -> np.ndarray:
    """The numbers `[..., 3]` (lane, episode, step) in observations of counting envs, of whichever kind they are."""
    count = seen.get("count", None)
    if count is not None:
        numbers = count.numpy().astype(np.int64)
        np.testing.assert_array_equal(seen.get(("inner", "step")).numpy()[..., 0], numbers[..., STEP])
        return np.asarray(numbers)
    observation = seen.get(OBSERVATION).numpy()
    if observation.shape[-1] == 3:
        return np.asarray(observation.astype(np.int64))
    numbers = observation[..., :1, :1, :]
    np.testing.assert_array_equal(observation, np.broadcast_to(numbers, observation.shape))
    assert not numbers[..., 3].any(), "the fourth channel of a picture is not empty"
    return np.asarray(numbers[..., 0, 0, :3].astype(np.int64))


def assert_frames_belong(batch: TensorDictBase, *, compact: bool = False) -> None:
    """Every frame of a batch `[..., T]` of counting envs is right in itself and follows from the one before it.

    Rows are lanes in order. Places that the mask leaves out are no frames; they lie right behind the end of an episode.
    """
    rows = batch.reshape(-1, batch.shape[-1]) if batch.ndim > 1 else batch.unsqueeze(0)
    root = counted(rows)  # [N, T, 3]
    flags = {name: rows.get(after(name)).numpy()[..., 0] for name in FLAGS}
    done, mask = flags[DONE], rows.get(MASK, None)
    real = np.ones(done.shape, dtype=bool) if mask is None else mask.numpy()
    for name in FLAGS:
        assert not rows.get(name).any(), f"the root says {name}"
    np.testing.assert_array_equal(done[real], (flags[TERMINATED] | flags[TRUNCATED])[real])
    np.testing.assert_array_equal(rows.get(after(REWARD)).numpy()[real][:, 0], root[real][:, STEP] + 1)
    assert (root[..., LANE] == root[:1, :1, LANE] + np.arange(len(root))[:, None]).all(), "a frame is in another's row"
    if not compact:
        np.testing.assert_array_equal(counted(rows.get(NEXT))[real], root[real] + ONE_STEP)
    if rows.get(STEP_COUNT, None) is not None:
        np.testing.assert_array_equal(rows.get(STEP_COUNT).numpy()[real][:, 0], root[real][:, STEP])
        np.testing.assert_array_equal(rows.get(after(STEP_COUNT)).numpy()[real][:, 0], root[real][:, STEP] + 1)
    if rows.get(IS_INIT, None) is not None:
        np.testing.assert_array_equal(rows.get(IS_INIT).numpy()[real][:, 0], root[real][:, STEP] == 0)
    assert (real[:, 1:] | (real & done)[:, :-1]).all(), "a place without a frame is not behind the end of an episode"
    for lane in range(len(root)):
        _assert_goes_on(root[lane][real[lane]], done[lane][real[lane]])
    ids = rows.get(TRAJ_IDS, None)
    if ids is not None:
        assert_ids_fit(ids.numpy(), done, real)


def _assert_goes_on(numbers: np.ndarray, done: np.ndarray) -> None:
    """Consecutive frames of one lane: the next step, or the first step of the next episode."""
    ended = done[:-1]
    np.testing.assert_array_equal(numbers[1:, STEP], np.where(ended, 0, numbers[:-1, STEP] + 1))
    np.testing.assert_array_equal(numbers[1:, EPISODE], numbers[:-1, EPISODE] + ended)


def assert_ids_fit(ids: np.ndarray, done: np.ndarray, real: np.ndarray | None = None) -> None:
    """Ids `[N, T]` change exactly behind last frames, no id names two trajectories, and what is no frame has -1."""
    real = np.ones(done.shape, dtype=bool) if real is None else real
    assert (ids[~real] == -1).all(), "a place without a frame has an id"
    assert (ids[real] >= 0).all(), "a frame has no id"
    names: list[int] = []
    for lane in range(len(ids)):
        own, ended = ids[lane][real[lane]], done[lane][real[lane]]
        np.testing.assert_array_equal(own[1:] != own[:-1], ended[:-1])
        names.extend(own[np.r_[True, ended[:-1]]] if len(own) else ())
    assert len(np.unique(names)) == len(names), "one id names two trajectories"


def assert_follows(before: TensorDictBase, behind: TensorDictBase, *, compact: bool = False) -> None:
    """The second batch goes on exactly where the first ended, lane by lane, ids included."""
    assert_frames_belong(torch.cat([before, behind], before.ndim - 1), compact=compact)


def assert_whole_episodes(batch: TensorDictBase, length: Callable[[int, int], int], *, compact: bool = False) -> Names:
    """Every row of a padded batch is one whole episode of `length(lane, episode)` steps; returns (lane, episode)."""
    found = []
    mask = batch.get(MASK).numpy()
    assert mask.any(0).all(), "the padding is longer than the longest episode"
    for row in range(batch.shape[0]):
        count = int(mask[row].sum())
        assert mask[row, :count].all(), "the mask has holes"
        found.append(_assert_whole(batch[row, :count], length, compact))
        padding = batch[row, count:]
        assert (padding.get(TRAJ_IDS) == -1).all(), "padding has an id"
        for key, value in padding.exclude(TRAJ_IDS).items(True, True):
            assert not value.any(), f"the padding of {key} is not zero"
    _assert_named_apart([batch[row, :1] for row in range(batch.shape[0])])
    return found


def assert_whole_in_a_row(batch: TensorDictBase, length: Callable[[int, int], int], *, compact: bool = False) -> Names:
    """A "cat" batch is whole episodes, one after the other; returns (lane, episode) of each."""
    ends = np.flatnonzero(batch.get(after(DONE)).numpy()[:, 0])
    assert len(ends), "no episode ends"
    assert ends[-1] == batch.shape[0] - 1, "the last episode has no end"
    begins = np.r_[0, ends[:-1] + 1]
    _assert_named_apart([batch[begin : begin + 1] for begin in begins])
    return [_assert_whole(batch[b : e + 1], length, compact) for b, e in zip(begins, ends, strict=True)]


def _assert_named_apart(firsts: list[TensorDictBase]) -> None:
    ids = torch.cat([first.get(TRAJ_IDS) for first in firsts])
    assert len(ids.unique()) == len(ids), "one id names two trajectories"


def _assert_whole(episode: TensorDictBase, length: Callable[[int, int], int], compact: bool) -> tuple[int, int]:
    assert_frames_belong(episode, compact=compact)
    numbers = counted(episode)
    lane, name = int(numbers[0, LANE]), int(numbers[0, EPISODE])
    wanted = length(lane, name)
    assert len(numbers) == wanted, f"episode {name} of lane {lane} has {len(numbers)} frames instead of {wanted}"
    np.testing.assert_array_equal(numbers[:, STEP], np.arange(wanted))
    done = episode.get((NEXT, DONE)).numpy()[:, 0]
    assert done[-1], f"episode {name} of lane {lane} has no end"
    assert not done[:-1].any(), f"episode {name} of lane {lane} ends before its last frame"
    return lane, name
