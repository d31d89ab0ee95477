"""TrajectoryAssembler by itself: order, what is held, what is given up, and its saved state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from swath.rollout import TrajectoryAssembler, padded

IDS = ("collector", "traj_ids")


def batch_of(ids: list[list[int]], done: list[list[int]], first: int = 0) -> TensorDict:
    """Numbered frames."""
    shape = torch.tensor(ids).shape
    numbers = torch.arange(first, first + shape.numel()).view(shape)
    return TensorDict(
        {
            "number": numbers,
            "next": {"done": torch.tensor(done).bool().unsqueeze(-1)},
            "collector": {"traj_ids": torch.tensor(ids)},
        },
        batch_size=shape,
    )


@st.composite
def runs(draw: Any) -> list[TensorDict]:
    """Consecutive batches of several lanes, with idle places, numbered through."""
    lanes = draw(st.integers(1, 3))
    following, current, number = lanes, list(range(lanes)), 0
    made = []
    for _ in range(draw(st.integers(1, 5))):
        steps = draw(st.integers(1, 5))
        ids: list[list[int]] = [[] for _ in range(lanes)]
        done: list[list[int]] = [[] for _ in range(lanes)]
        for _ in range(steps):
            for lane in range(lanes):
                is_real, over = draw(st.integers(0, 9)) > 0, draw(st.booleans())
                ids[lane].append(current[lane] if is_real else -1)
                done[lane].append(int(is_real and over))
            for lane in range(lanes):
                if done[lane][-1]:
                    current[lane], following = following, following + 1
        made.append(batch_of(ids, done, number))
        number += lanes * steps
    return made


@settings(max_examples=100, deadline=None)
@given(runs())
def test_episodes_come_in_the_order_in_which_they_end(batches: list[TensorDict]) -> None:
    assembler = TrajectoryAssembler()
    open_, complete, seen = {}, [], 0
    for batch in batches:
        assembler.add(batch)
        rows = batch.reshape(-1, batch.shape[-1])
        for t in range(rows.shape[1]):
            ending = []
            for row in rows:
                name = int(row.get(IDS)[t])
                if name < 0:
                    continue
                seen += 1
                open_.setdefault(name, []).append(int(row.get("number")[t]))
                if row.get(("next", "done"))[t]:
                    ending.append(name)
            complete += [open_.pop(name) for name in sorted(ending)]
        assert assembler.ready == len(complete)
        assert assembler.pending_frames == seen
    found = [assembler.take(1, "cat").get("number").tolist() for _ in range(assembler.ready)]
    assert found == complete
    left = sum(map(len, open_.values()))
    assert assembler.pending_frames == left
    assembler.clear()
    assert (assembler.pending_frames, assembler.dropped) == (0, left)


def test_frames_are_copied_so_that_the_batch_may_be_overwritten() -> None:
    assembler = TrajectoryAssembler()
    batch = batch_of([[0, 0, 1]], [[0, 1, 0]])
    assembler.add(batch)
    batch.zero_()
    assert assembler.take(1, "cat").get("number").tolist() == [0, 1]


def test_given_up_episodes_are_counted() -> None:
    assembler = TrajectoryAssembler()
    assembler.add(batch_of([[0, 0, 2], [1, 1, 1]], [[0, 1, 0], [0, 0, 0]]))
    assembler.drop([1, 99])
    assert (assembler.ready, assembler.pending_frames, assembler.dropped) == (1, 3, 3)
    assembler.drop()
    assert (assembler.ready, assembler.pending_frames, assembler.dropped) == (1, 2, 4)
    assembler.clear()
    assert (assembler.ready, assembler.pending_frames, assembler.dropped) == (0, 0, 6)


def test_a_saved_assembler_goes_on_where_it_was(tmp_path: Any) -> None:
    assembler = TrajectoryAssembler()
    assembler.add(batch_of([[0, 0, 2], [1, 1, 1]], [[0, 1, 0], [0, 0, 0]]))
    torch.save(assembler.state_dict(), tmp_path / "state.pt")
    again = TrajectoryAssembler()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for one in (assembler, again):
        one.add(batch_of([[2, 2], [1, 3]], [[0, 1], [1, 1]], 6))
    assert again.ready == assembler.ready == 4
    for _ in range(4):
        first, second = assembler.take(1, "padded"), again.take(1, "padded")
        assert (first == second).all()
    assert again.pending_frames == assembler.pending_frames == 0


def test_a_batch_without_ids_is_refused() -> None:
    with pytest.raises(KeyError, match="track_traj_ids=True"):
        TrajectoryAssembler().add(batch_of([[0]], [[0]]).exclude("collector"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_padding_is_zero_with_the_id_minus_one_outside_the_mask(lengths: list[int]) -> None:
    episodes = [
        batch_of([[name] * length], [[1] * length], 7)[0].set("picture", torch.ones(length, 2, 2, dtype=torch.uint8))
        for name, length in enumerate(lengths)
    ]
    rows = padded(episodes)
    mask = rows.get(("collector", "mask"))
    assert rows.shape == mask.shape == (len(lengths), max(lengths))
    assert mask.sum(1).tolist() == lengths
    for row, episode, length in zip(rows, episodes, lengths, strict=True):
        assert (row[:length].exclude(("collector", "mask")) == episode).all()
        assert (row[length:].get(IDS) == -1).all()
        assert not row[length:].get("picture").any()
        assert not row[length:].get("number").any()
        assert row.get("picture").dtype == torch.uint8
