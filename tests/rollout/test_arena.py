"""Arena and slots against a plain account of who holds what."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swath.envs.rows import Leaf
from swath.rollout import Arena, Slot
from swath.rollout.arena import LOOKS, SPARE_SLOTS

LEAVES = {
    "vector": Leaf((3,), torch.float32),
    "scalar": Leaf((), torch.int64),
    ("next", "flag"): Leaf((1,), torch.bool),
    "pixels": Leaf((2, 2), torch.uint8),
}


def fill(slot: Slot, number: int) -> None:
    for column in slot.columns.values():
        column[:] = number % 2 if column.dtype == np.bool_ else number % 200


def is_as_written(slot: Slot, kept: torch.Tensor, number: int) -> bool:
    written = number % 2 if kept.dtype == torch.bool else number
    return not slot.is_free and bool((kept == written).all())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), batch_size=st.lists(st.integers(1, 3), max_size=2).map(tuple))
def test_no_slot_is_handed_out_that_anybody_holds(data: Any, batch_size: tuple[int, ...]) -> None:
    arena = Arena(LEAVES, batch_size)
    held: list[tuple[Slot, torch.Tensor, int]] = []
    for number in range(data.draw(st.integers(1, 15))):
        steps = data.draw(st.integers(1, 2))
        slot = arena.acquire(steps)
        assert slot.steps == steps
        assert slot.is_free
        assert len(arena) <= max(LOOKS, len(held)) + SPARE_SLOTS + 1, "memory is kept that nobody needs"
        assert all(slot is not other for other, *_ in held), "the slot belongs to the consumer"
        fill(slot, number)
        lent = slot.lend(LEAVES, steps)
        for key, leaf in LEAVES.items():
            assert lent[key].shape == (*batch_size, steps, *leaf.shape)
            assert lent[key].dtype == leaf.dtype
            assert lent[key].is_contiguous()
        key = data.draw(st.sampled_from(list(LEAVES)))
        held.append((slot, lent[key], number))
        del lent
        while held and data.draw(st.booleans()):
            held.pop(data.draw(st.integers(0, len(held) - 1)))
        assert all(is_as_written(*one) for one in held)


def test_one_slot_is_enough_for_a_consumer_that_lets_go() -> None:
    arena = Arena(LEAVES, (2,))
    for _ in range(20):
        arena.acquire(4).lend(LEAVES, 4)
    assert arena.allocated == 1


@pytest.mark.parametrize("window", [1, 2, 5, 30])
def test_a_consumer_that_holds_the_last_few_costs_no_allocation(window: int) -> None:
    arena = Arena(LEAVES, (2,))
    held: deque[Any] = deque(maxlen=window)
    for _ in range(3 * window):
        held.append(arena.acquire(4).lend(LEAVES, 4))
    allocated = arena.allocated
    assert window <= allocated <= window + LOOKS
    for _ in range(10 * window):
        held.append(arena.acquire(4).lend(LEAVES, 4))
    assert arena.allocated == allocated


def test_what_is_let_go_all_at_once_is_given_back() -> None:
    arena = Arena(LEAVES, (2,))
    held = [arena.acquire(4).lend(LEAVES, 4) for _ in range(50)]
    assert len(arena) == 50
    held.clear()
    for _ in range(50 // LOOKS + 1):
        arena.acquire(4).lend(LEAVES, 4)
    assert len(arena) <= SPARE_SLOTS + 1
    assert arena.allocated == 50


def test_many_kept_batches_do_not_make_the_next_one_slower() -> None:
    looks = 0

    class Counted(Slot):
        @property
        def is_free(self) -> bool:
            nonlocal looks
            looks += 1
            return super().is_free

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swath.rollout.arena.Slot", Counted)
        arena = Arena(LEAVES, (2,))
        held = [arena.acquire(4).lend(LEAVES, 4) for _ in range(300)]
    assert len(held) == arena.allocated == 300
    assert looks <= 300 * LOOKS


def test_lent_tensors_lie_over_the_slots_memory_and_part_of_a_slot_is_copied() -> None:
    slot = Arena(LEAVES, (2,)).acquire(4)
    fill(slot, 3)
    whole = slot.lend(["vector"], 4)["vector"]
    assert whole.data_ptr() == slot.tensors["vector"].data_ptr()
    part = slot.lend(["vector"], 3)["vector"]
    assert part.is_contiguous()
    assert part.data_ptr() != slot.tensors["vector"].data_ptr()
    assert part.shape == (2, 3, 3)
    del whole
    assert slot.is_free, "a copy does not hold the slot"
    single = Arena(LEAVES, ()).acquire(4).lend(["vector"], 3)["vector"]
    assert single.shape == (3, 3)
    assert single.is_contiguous()


def test_entries_that_are_not_asked_for_are_not_lent() -> None:
    slot = Arena(LEAVES, (2,)).acquire(4)
    assert list(slot.lend(["scalar"], 4)) == ["scalar"]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_rows_are_laid_out_lane_by_lane(shape: tuple[int, ...]) -> None:
    slot = Arena({"n": Leaf((), torch.int64)}, shape).acquire(5)
    slot.columns["n"][:] = np.arange(slot.lanes)[:, None] * 5 + np.arange(5)
    assert slot.lend(["n"], 5)["n"].tolist() == np.arange(slot.lanes * 5).reshape(*shape, 5).tolist()


def test_a_slot_may_lie_in_memory_of_others() -> None:
    memory = {"n": torch.zeros(2, 3, 4, dtype=torch.int64)}  # three slots of two lanes and four steps
    slot = Slot({key: tensor[:, 1] for key, tensor in memory.items()}, (2,))
    slot.columns["n"][:, 2] = 7
    assert memory["n"][:, 1].tolist() == [[0, 0, 7, 0]] * 2
    assert slot.lend(["n"], 4)["n"].tolist() == [[0, 0, 7, 0]] * 2
    assert not memory["n"][:, 0].any()
