"""Arena and slots against a plain account of who holds what."""

import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swath.rollout.slots import FEW, LOOKS, SPARE_SLOTS, Arena, Slot
from swath.runtime.columns import Columns, Leaf

LEAVES = {
    "vector": Leaf((3,), torch.float32),
    "scalar": Leaf((), torch.int64),
    ("next", "flag"): Leaf((1,), torch.bool),
    "pixels": Leaf((2, 2), torch.uint8),
}


def arena_of(
    batch_size: tuple[int, ...], leaves: Mapping[Any, Leaf] = LEAVES, memory: Callable[..., Columns] = Columns
) -> Arena:
    return Arena(lambda steps: memory(leaves, (math.prod(batch_size), steps)), batch_size)


def fill(slot: Slot, number: int) -> None:
    for column in slot.columns.values():
        column[:] = number % 2 if column.dtype == np.bool_ else number % 200


def is_as_written(slot: Slot, kept: torch.Tensor, number: int) -> bool:
    written = number % 2 if kept.dtype == torch.bool else number
    return not slot.is_free and bool((kept == written).all())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), batch_size=st.lists(st.integers(1, 3), max_size=2).map(tuple))
def test_no_slot_is_handed_out_that_anybody_holds(data: Any, batch_size: tuple[int, ...]) -> None:
    arena = arena_of(batch_size)
    held: list[tuple[Slot, torch.Tensor, int]] = []
    for number in range(data.draw(st.integers(1, 15))):
        steps = data.draw(st.integers(1, 2))
        slot = arena.acquire(steps)
        assert slot.steps == steps
        assert slot.is_free
        assert len(arena) <= max(LOOKS, len(held)) + SPARE_SLOTS + 1, "memory is kept that nobody needs"
        assert all(slot is not other for other, *_ in held), "the slot belongs to the consumer"
        fill(slot, number)
        handed_out = slot.hand_out(LEAVES, steps)
        for key, leaf in LEAVES.items():
            assert handed_out[key].shape == (*batch_size, steps, *leaf.shape)
            assert handed_out[key].dtype == leaf.dtype
            assert handed_out[key].is_contiguous()
        key = data.draw(st.sampled_from(list(LEAVES)))
        held.append((slot, handed_out[key], number))
        del handed_out
        while held and data.draw(st.booleans()):
            held.pop(data.draw(st.integers(0, len(held) - 1)))
        assert all(is_as_written(*one) for one in held)


def test_one_slot_is_enough_for_a_consumer_that_lets_go() -> None:
    arena = arena_of((2,))
    for _ in range(20):
        arena.acquire(4).hand_out(LEAVES, 4)
    assert arena.allocated == 1


@pytest.mark.parametrize("window", [1, 2, 5, 30])
def test_a_consumer_that_holds_the_last_few_costs_no_allocation(window: int) -> None:
    arena = arena_of((2,))
    held: deque[Any] = deque(maxlen=window)
    for _ in range(3 * window):
        held.append(arena.acquire(4).hand_out(LEAVES, 4))
    allocated = arena.allocated
    assert window <= allocated <= window + LOOKS
    for _ in range(10 * window):
        held.append(arena.acquire(4).hand_out(LEAVES, 4))
    assert arena.allocated == allocated


def test_what_is_let_go_all_at_once_is_given_back() -> None:
    arena = arena_of((2,))
    held = [arena.acquire(4).hand_out(LEAVES, 4) for _ in range(50)]
    assert len(arena) == 50
    held.clear()
    for _ in range(50 // LOOKS + 1):
        arena.acquire(4).hand_out(LEAVES, 4)
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
        patch.setattr("swath.rollout.slots.Slot", Counted)
        arena = arena_of((2,))
        held = [arena.acquire(4).hand_out(LEAVES, 4) for _ in range(300)]
    assert len(held) == arena.allocated == 300
    assert looks <= 300 * LOOKS


@pytest.mark.parametrize("steps", [1, 40])
def test_who_keeps_a_little_of_many_batches_keeps_no_more_of_them(steps: int) -> None:
    leaves = {"pixels": Leaf((100, 100), torch.uint8), "reward": Leaf((1,), torch.float32)}
    arena, kept, pixels = arena_of((2,), leaves), list[torch.Tensor](), list[Any]()
    for number in range(5 * FEW):
        slot = arena.acquire(steps)
        fill(slot, number)
        kept.append(slot.batch(list(leaves), steps)["reward"])
        pixels.append(weakref.ref(slot.columns["pixels"]))
        del slot
    assert sum(one() is not None for one in pixels) <= FEW + LOOKS
    assert all(bool((one == number).all()) for number, one in enumerate(kept))


def test_who_keeps_most_of_many_batches_gets_their_slots_back() -> None:
    leaves = {"pixels": Leaf((100, 100), torch.uint8), "reward": Leaf((1,), torch.float32)}
    arena, kept = arena_of((2,), leaves), deque[torch.Tensor](maxlen=2 * FEW)
    for _ in range(10 * FEW):
        kept.append(arena.acquire(3).batch(list(leaves), 3)["pixels"])
    assert arena.allocated <= 3 * FEW


def test_tensors_lie_over_the_slots_memory_and_part_of_a_slot_is_copied() -> None:
    slot = arena_of((2,)).acquire(4)
    fill(slot, 3)
    whole = slot.hand_out(["vector"], 4)["vector"]
    assert whole.data_ptr() == slot.tensors["vector"].data_ptr()
    part = slot.hand_out(["vector"], 3)["vector"]
    assert part.is_contiguous()
    assert part.data_ptr() != slot.tensors["vector"].data_ptr()
    assert part.shape == (2, 3, 3)
    del whole
    assert slot.is_free, "a copy does not hold the slot"
    single = arena_of(()).acquire(4).hand_out(["vector"], 3)["vector"]
    assert single.shape == (3, 3)
    assert single.is_contiguous()


KEPT: dict[str, Callable[[torch.Tensor], object]] = {
    "view": lambda tensor: tensor.reshape(-1)[1:],
    "array": lambda tensor: tensor.numpy(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "gradient": lambda tensor: tensor.requires_grad_(),
    "packed": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
}


@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("steps", [1, 4])
def test_whatever_is_kept_of_a_batch_keeps_its_slot(what: str, steps: int) -> None:
    arena = arena_of((2,))
    slot = arena.acquire(steps)
    kept = KEPT[what](slot.batch(list(LEAVES), steps)["vector"])
    assert not slot.is_free
    assert arena.acquire(steps) is not slot
    del kept
    assert slot.is_free
    assert arena.acquire(steps) is slot


def test_entries_of_a_batch_may_be_changed_beside_gradients_of_others() -> None:
    batch = arena_of((2,), {key: Leaf((), torch.float32) for key in "ab"}).acquire(1).batch(["a", "b"], 1)
    loss = batch["a"].requires_grad_().exp().sum()
    batch["b"].add_(1)
    loss.backward()
    assert batch["a"].grad.tolist() == [[1.0], [1.0]]


def test_the_next_batch_is_new_where_one_was_moved_to_shared_memory() -> None:
    arena = arena_of((2,))
    for number in range(1, 4):
        slot = arena.acquire(1)
        fill(slot, number)
        batch = slot.batch(list(LEAVES), 1)
        assert batch["scalar"].tolist() == [[number]] * 2
        batch.share_memory_()
        assert batch["scalar"].tolist() == [[number]] * 2
        del batch


def test_entries_that_are_not_asked_for_are_not_handed_out() -> None:
    slot = arena_of((2,)).acquire(4)
    assert list(slot.hand_out(["scalar"], 4)) == ["scalar"]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_rows_are_laid_out_lane_by_lane(shape: tuple[int, ...]) -> None:
    slot = arena_of(shape, {"n": Leaf((), torch.int64)}).acquire(5)
    slot.columns["n"][:] = np.arange(slot.lanes)[:, None] * 5 + np.arange(5)
    assert slot.hand_out(["n"], 5)["n"].tolist() == np.arange(slot.lanes * 5).reshape(*shape, 5).tolist()


def test_a_slot_may_lie_in_a_part_of_the_memory_of_others() -> None:
    memory = Columns({"n": Leaf((), torch.int64)}, (6, 4))  # three slots of two lanes and four steps
    slot = Slot(memory.part(2, 4), (2,))
    slot.columns["n"][:, 2] = 7
    assert memory.tensors["n"].tolist() == [*[[0] * 4] * 2, *[[0, 0, 7, 0]] * 2, *[[0] * 4] * 2]
    assert slot.hand_out(["n"], 4)["n"].tolist() == [[0, 0, 7, 0]] * 2


def test_the_slot_over_a_piece_of_memory_is_always_the_same() -> None:
    memory = Columns(LEAVES, (2, 4))
    slot = Slot.over(memory, (2,))
    assert Slot.over(memory, (2,)) is slot
    assert Slot.over(memory.part(0, 1), (1,)) is not slot


def test_a_claimed_slot_is_not_free() -> None:
    arena = arena_of((2,))
    slot = arena.acquire(4)
    claim = slot.claim
    assert not slot.is_free
    assert arena.acquire(4) is not slot
    handed_out = slot.hand_out(LEAVES, 4)
    del claim
    assert not slot.is_free, "what was handed out counts too"
    del handed_out
    assert slot.is_free


def test_a_batch_names_its_time() -> None:
    batch = arena_of((3, 2)).acquire(4).batch(LEAVES, 3)
    assert batch.shape == (3, 2, 3)
    assert batch.names == [None, None, "time"]
    assert set(batch.keys(True, True)) == set(LEAVES)


def test_many_kept_batches_keep_no_descriptors() -> None:
    arena = arena_of((2,), memory=Columns.shared)
    before, held = len(os.listdir("/proc/self/fd")), []
    for number in range(5 * FEW):
        slot = arena.acquire(4)
        fill(slot, number)
        held.append(slot.hand_out(["scalar"], 4)["scalar"])
        arena.delivered(slot)
        assert len(os.listdir("/proc/self/fd")) <= before + FEW + 1
    assert [int(kept[0, 0]) for kept in held] == [number % 200 for number in range(5 * FEW)]
    held.clear()
    for _ in range(5 * FEW):
        assert not arena.acquire(4).is_retired, "one whose descriptor is closed is not used again"
