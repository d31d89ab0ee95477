"""`split_trajectories` puts every trajectory into a row of its own, and the rows give all frames back."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from swath.collectors import Collector
from swath.collectors.utils import split_trajectories
from swath.testing import CountingEnv

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


@st.composite
def shapes(draw: Any) -> tuple[int, ...]:
    """`[T]`, `[N, T]` or `[A, B, T]`."""
    return (*draw(st.lists(st.integers(1, 3), max_size=2)), draw(st.integers(1, 8)))


@st.composite
def batches(draw: Any) -> TensorDict:
    """Numbered frames, in runs of ids; negative ids are no frames."""
    shape = draw(shapes())
    rows, steps = int(np.prod(shape[:-1])), shape[-1]
    ids = [draw(st.lists(st.integers(-1, 3), min_size=steps, max_size=steps)) for _ in range(rows)]
    return numbered(torch.tensor(ids).view(shape))


def numbered(ids: torch.Tensor) -> TensorDict:
    """A batch in which every frame has a number, and an entry of each kind."""
    shape, number = ids.shape, torch.arange(1, ids.numel() + 1)
    return TensorDict(
        {
            "number": number.view(shape),
            "pixels": (number % 200 + 1).to(torch.uint8).view(*shape, 1, 1).expand(*shape, 2, 2).clone(),
            "flag": torch.ones(*shape, 1, dtype=torch.bool),
            "next": {"done": torch.zeros(*shape, 1, dtype=torch.bool), "deep": {"half": number.view(*shape, 1) / 2}},
            "collector": {"traj_ids": ids},
        },
        batch_size=shape,
        names=[*(None,) * (len(shape) - 1), "time"],
    )


def runs_of(ids: np.ndarray) -> list[list[int]]:
    """The numbers of the frames of each run of a non-negative id, found one frame at a time."""
    runs: list[list[int]] = []
    rows = ids.reshape(-1, ids.shape[-1])
    for r, row in enumerate(rows):
        before = None
        for t, name in enumerate(row):
            if name != before and name >= 0:
                runs.append([])
            if name >= 0:
                runs[-1].append(r * len(row) + t + 1)
            before = name
    return runs


def numbers_in(split: TensorDictBase, mask: Any = MASK) -> list[list[int]]:
    return [row.get("number")[row.get(mask)].tolist() for row in split]


@settings(max_examples=150, deadline=None)
@given(batches())
@example(numbered(torch.full((2, 3), -1)))
@example(numbered(torch.tensor([[7, 7, 8], [7, 9, 9]])))
def test_every_run_of_an_id_is_a_row_and_no_frame_is_lost(batch: TensorDict) -> None:
    before = batch.clone()
    runs = runs_of(batch.get(IDS).numpy())
    split = split_trajectories(batch)
    assert split.shape == (len(runs), max(map(len, runs), default=0))
    assert split.names == [None, "time"]
    assert numbers_in(split) == runs
    mask = split.get(MASK)
    frames = before.reshape(-1)[[number - 1 for run in runs for number in run]]
    given_back = split[mask].exclude(MASK)
    assert set(given_back.keys(True, True)) == set(frames.keys(True, True))
    assert all(torch.equal(given_back.get(key), frames.get(key)) for key in frames.keys(True, True))
    for key, value in split.exclude(MASK).items(True, True):
        assert value.dtype == batch.get(key).dtype
        assert value.shape == (*split.shape, *batch.get(key).shape[batch.ndim :])
        outside = value[~mask]
        assert (outside == -1).all() if key == IDS else not outside.any()
    assert (batch == before).all(), "the batch itself was changed"
    assert set(batch.keys(True, True)) == set(before.keys(True, True))


@settings(max_examples=60, deadline=None)
@given(batches())
def test_nested_tensors_hold_the_same_rows(batch: TensorDict) -> None:
    runs = runs_of(batch.get(IDS).numpy())
    nested = split_trajectories(batch, as_nested=True)
    assert nested.shape == (len(runs),)
    if runs:
        assert [piece.tolist() for piece in nested.get("number").unbind(0)] == runs
        both = nested.get(("next", "deep", "half")) + nested.get(("next", "deep", "half"))  # over the same offsets
        assert [piece[:, 0].tolist() for piece in both.unbind(0)] == runs
        assert nested.get(MASK, None) is None


@settings(max_examples=80, deadline=None)
@given(shapes(), st.randoms(use_true_random=False))
def test_without_ids_done_tells_trajectories_apart(shape: tuple[int, ...], random: Any) -> None:
    ended = torch.tensor([random.random() < 0.4 for _ in range(int(np.prod(shape)))]).view(shape)
    batch = numbered(torch.zeros(shape, dtype=torch.int64)).exclude("collector")
    batch.set(("next", "done"), ended.unsqueeze(-1))
    expected: list[list[int]] = []
    number = 0
    for row in ended.view(-1, shape[-1]).tolist():
        expected.append([])
        for t, over in enumerate(row):
            number += 1
            expected[-1].append(number)
            if over and t < len(row) - 1:
                expected.append([])
    split = split_trajectories(batch)
    assert numbers_in(split, "mask") == expected
    ids = split.get("traj_ids")
    assert [int(row[0]) for row in ids] == list(range(len(expected)))
    assert (ids[~split.get("mask")] == -1).all()


def test_gradients_go_through() -> None:
    values = torch.arange(6.0, requires_grad=True)
    ids = torch.tensor([0, 0, 1, 1, 1, 2])
    split = split_trajectories(TensorDict({"value": values * 2, ("collector", "traj_ids"): ids}, [6]))
    split["value"][1].sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 0, 2, 2, 2, 0]


def test_done_key_names_another_end() -> None:
    batch = numbered(torch.zeros(6, dtype=torch.int64)).exclude("collector")
    batch.set(("next", "agent", "over"), torch.tensor([0, 1, 0, 0, 1, 0]).bool().unsqueeze(-1))
    split = split_trajectories(batch, done_key=("agent", "over"))
    assert numbers_in(split, "mask") == [[1, 2], [3, 4, 5], [6]]


def test_prefix_and_trajectory_key_say_where_the_ids_are() -> None:
    ids = torch.tensor([4, 4, 9, 9, 9])
    bare = numbered(ids).exclude("collector")
    for place, options in (
        (("mine",), {"prefix": "mine"}),
        (("a", "b"), {"trajectory_key": ("a", "b", "episode")}),
        ((), {}),
    ):
        key = options.get("trajectory_key", (*place, "traj_ids"))
        split = split_trajectories(bare.clone().set(key, ids), **options)
        assert numbers_in(split, (*place, "mask")) == [[1, 2], [3, 4, 5]]
    split = split_trajectories(bare, prefix="mine")  # ids by "done" are written there too
    assert split.get(("mine", "traj_ids")).tolist() == [[0, 0, 0, 0, 0]]
    assert split.get(("mine", "mask")).all()


def test_ids_may_have_a_last_dimension_of_one() -> None:
    ids = torch.tensor([[0, 0, 1], [2, 2, 2]])
    split = split_trajectories(numbered(ids).set("episode", ids.unsqueeze(-1)), trajectory_key="episode")
    assert split.get("episode").squeeze(-1).tolist() == [[0, 0, -1], [1, -1, -1], [2, 2, 2]]


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (TensorDict({}, batch_size=[]), ValueError, "time dimension"),
        (TensorDict({"a": torch.zeros(3)}, batch_size=[3]), KeyError, "neither trajectory ids nor"),
    ],
    ids=["scalar", "neither ids nor done"],
)
def test_what_cannot_be_split_is_said_clearly(batch: TensorDict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        split_trajectories(batch)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=4, max_size=4),
    steps=st.integers(1, 12),
)
def test_a_split_batch_of_a_collector_gives_the_batch_back(lengths: list[list[int]], steps: int) -> None:
    def collector(split: bool) -> Collector:
        return Collector(
            CountingEnv((2, 2), lengths=lengths), frames_per_batch=4 * steps, total_frames=8 * steps, split_trajs=split
        )

    for whole, split in zip(collector(False), collector(True), strict=True):
        rows = split[split.get(MASK)].exclude(MASK, "action")
        frames = whole.reshape(-1).exclude("action")
        assert set(rows.keys(True, True)) == set(frames.keys(True, True))
        assert all(torch.equal(rows.get(key), frames.get(key)) for key in frames.keys(True, True))
        for row in split:
            assert len(row.get(IDS)[row.get(MASK)].unique()) == 1
        # Flattened lanes end in the middle of episodes; their ids still tell them apart.
        assert (split_trajectories(whole.reshape(-1)) == split_trajectories(whole)).all()


def test_splitting_costs_no_call_per_trajectory() -> None:
    """Linear in the frames: what is done per trajectory is done inside of a few array operations."""

    def calls(trajectories: int) -> int:
        batch = numbered(torch.arange(trajectories).repeat_interleave(4))
        count = 0

        def see(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(see)
        try:
            split_trajectories(batch)
        finally:
            sys.setprofile(None)
        return count

    calls(3)  # whatever is set up once
    assert calls(4_000) == calls(40)
