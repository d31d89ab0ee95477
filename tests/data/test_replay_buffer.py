"""ReplayBuffer in one thread: what goes in comes out."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from buffer_tools import buffer_of, check, frames, lose, seeded, together
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass

from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NothingToSampleError,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from swath.errors import ShapeError

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]
COLUMNS = [LazyTensorStorage, LazyMemmapStorage]


@tensorclass
class Step:
    obs: torch.Tensor
    done: torch.Tensor


# -- writing and reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORAGES)
def test_what_was_written_is_a_copy_and_so_is_what_is_read(kind: type[Storage]) -> None:
    buffer = buffer_of(kind)
    given_frames = frames(range(4)).clone()
    buffer.extend(given_frames)
    if kind is not ListStorage:  # a list keeps the very objects
        given_frames.zero_()
    batch = buffer[:]
    batch["n"] += 100
    buffer.sample(50)["n"].add_(100)
    assert check(buffer[:]) == [0, 1, 2, 3]


def test_gradients_and_inference_are_left_behind() -> None:
    buffer = buffer_of()
    with torch.inference_mode():
        buffer.extend(TensorDict({"x": torch.ones(4)}, [4]))
    buffer.extend(TensorDict({"x": torch.ones(3, requires_grad=True) * 2}, [3]))
    buffer[0:2] = TensorDict({"x": torch.zeros(2, requires_grad=True)}, [2])
    assert not buffer.sample(20)["x"].requires_grad
    assert buffer[:]["x"].tolist() == [0, 0, 1, 1, 2, 2, 2]
    buffer.load_state_dict(buffer.state_dict())


def test_frames_that_lie_apart_in_memory() -> None:
    buffer = buffer_of()
    strided = torch.arange(24).view(2, 12).T[::3]  # [4, 2], no stride is one
    half = torch.arange(8.0).view(2, 4).bfloat16().T
    buffer.extend(TensorDict({"a": strided, "half": half, "same": torch.ones(1).expand(4)}, [4]))
    assert buffer[:]["a"].tolist() == strided.tolist()
    assert torch.equal(buffer[:]["half"], half)


def test_the_first_write_may_be_wider_and_later_ones_are_cast() -> None:
    buffer = buffer_of()
    buffer.extend(TensorDict({"x": torch.zeros(2, dtype=torch.float32)}, [2]))
    buffer.extend(TensorDict({"x": torch.full((2,), 1 / 3, dtype=torch.float64)}, [2]))
    assert buffer[:]["x"].dtype == torch.float32
    assert buffer[3]["x"] == torch.tensor(1 / 3, dtype=torch.float32)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", COLUMNS)
def test_every_type_of_numbers(kind: type[Storage], dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0], [1, 1]]).to(dtype)
    buffer = buffer_of(kind, 3)
    buffer.extend(TensorDict({"x": values}, [5]))
    held = buffer[:]["x"]
    assert held.dtype == dtype
    expected = values[[3, 4, 2]]
    assert held.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()
    assert buffer.sample(4)["x"].shape == (4, 2)


def test_entries_of_no_size_and_of_many_dimensions() -> None:
    buffer = buffer_of()
    buffer.extend(TensorDict({"none": torch.zeros(4, 0), "many": torch.arange(4 * 24).view(4, 1, 2, 3, 4)}, [4]))
    batch = buffer.sample(3)
    assert batch["none"].shape == (3, 0)
    assert batch["many"].shape == (3, 1, 2, 3, 4)


# -- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize(
    ("batches", "one", "expected"),
    [
        ([torch.arange(6.0).view(3, 2)], torch.tensor([9.0, 9.0]), [[0, 1], [2, 3], [4, 5], [9, 9]]),
        ([[torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]], [5.0, 6.0], [[1, 2], [3, 4], [5, 6]]),
        ([np.arange(3.0), [3.0, 4.0], [np.float64(5.0), np.float64(6.0)]], 7.0, list(range(8))),
    ],
    ids=["tensors", "lists of tensors", "arrays and numbers"],
)
def test_bare_tensors(kind: type[Storage], batches: list[Any], one: Any, expected: list[Any]) -> None:
    buffer = buffer_of(kind)
    for batch in batches:
        buffer.extend(batch)
    buffer.add(one)
    assert buffer[:].tolist() == expected
    assert buffer.sample(5).shape == (5, *np.shape(expected)[1:])


def test_lists_of_frames_are_stacked() -> None:
    buffer = buffer_of()
    buffer.extend([frames([n])[0] for n in range(4)])
    assert check(buffer[:]) == [0, 1, 2, 3]
    tuples = buffer_of(batch_size=3)
    tuples.extend([(torch.full((4,), float(n)), torch.tensor(n)) for n in range(10)])
    assert len(tuples) == 10
    first, second = tuples.sample()
    assert first.shape == (3, 4)
    assert torch.equal(first[:, 0], second.float())
    dicts = buffer_of(batch_size=3)
    dicts.extend([{"o": torch.zeros(4), 30: torch.tensor(1.0)} for _ in range(10)])
    assert {name: value.shape for name, value in dicts.sample().items()} == {"o": (3, 4), 30: (3,)}


def test_dicts_and_tuples_of_tensors() -> None:
    buffer = buffer_of()
    data = {"a": torch.arange(3), "b": (torch.ones(3, 2), [torch.zeros(3), np.arange(3)])}
    buffer.extend(data)
    buffer.add({"a": 7, "b": (torch.zeros(2), [1.0, 5])})
    batch = buffer[:]
    assert isinstance(batch, dict)
    assert isinstance(batch["b"], tuple)
    assert isinstance(batch["b"][1], list)
    assert batch["a"].tolist() == [0, 1, 2, 7]
    assert batch["b"][1][1].tolist() == [0, 1, 2, 5]
    assert buffer.sample(5)["b"][0].shape == (5, 2)
    with pytest.raises(ValueError, match="nested"):
        buffer.extend({"a": torch.arange(3)})


@pytest.mark.parametrize("kind", STORAGES)
def test_a_tensorclass_stays_one(kind: type[Storage]) -> None:
    buffer = buffer_of(kind)
    buffer.extend(Step(obs=torch.arange(6.0).view(3, 2), done=torch.zeros(3, 1).bool(), batch_size=[3]))
    buffer.add(Step(obs=torch.tensor([8.0, 9.0]), done=torch.ones(1).bool(), batch_size=[]))
    batch = buffer.sample(6)
    assert isinstance(batch, Step)
    assert batch.batch_size == (6,)
    assert buffer[3].obs.tolist() == [8.0, 9.0]
    assert buffer[:].done.reshape(-1).tolist() == [False, False, False, True]


def test_a_list_keeps_any_objects() -> None:
    buffer = ReplayBuffer(storage=ListStorage(4), collate_fn=list)
    things: list[Any] = ["word", {1, 2}, None, 3.5, lambda: 1]
    assert buffer.extend(things).tolist() == [0, 1, 2, 3, 0]
    assert buffer[0] is things[4]
    assert buffer[1] is things[1]
    assert all(any(got is thing for thing in things) for got in buffer.sample(20))


def test_a_list_collates_what_can_be_stacked() -> None:
    buffer = ReplayBuffer(storage=ListStorage(4))
    buffer.extend([{"a": torch.ones(2), "b": (1, 2.0)}, {"a": torch.zeros(2), "b": (3, 4.0)}])
    batch = buffer.sample(6)
    assert batch["a"].shape == (6, 2)
    assert batch["b"][0].shape == (6,)


# -- several dimensions ----------------------------------------------------------------------------------------------


def lanes_of(lanes: int, start: int, stop: int) -> TensorDict:
    """`[lanes, time]`: the frame of lane l at time t has the number 1000 * l + t."""
    n = torch.arange(lanes)[:, None] * 1000 + torch.arange(start, stop)
    return frames(n.reshape(-1).tolist()).reshape(lanes, stop - start)


def test_two_dimensions_share_the_room() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    where = buffer.extend(lanes_of(3, 0, 2))
    assert where.tolist() == [[row, lane] for row in range(2) for lane in range(3)]
    assert (len(buffer), buffer.write_count) == (6, 6)
    buffer.extend(lanes_of(3, 2, 5))
    assert (len(buffer), buffer.write_count) == (12, 15)
    held = buffer[:]
    assert held.batch_size == (3, 4)
    check(held)
    assert held["n"].tolist() == [[1000 * lane + t for t in (4, 1, 2, 3)] for lane in range(3)]
    batch, info = buffer.sample(64, return_info=True)
    check(batch)
    rows, lanes = info["index"]
    assert torch.equal(buffer[lanes, rows]["n"], batch["n"])


def test_time_may_be_the_first_dimension() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=0)
    for t in range(0, 6, 2):
        buffer.extend(lanes_of(3, t, t + 2).transpose(0, 1))
    held = buffer[:]
    assert held.batch_size == (4, 3)
    assert held["n"].tolist() == [[1000 * lane + t for lane in range(3)] for t in (4, 5, 2, 3)]
    assert check(buffer[0]) == [4, 1004, 2004]
    buffer.add(lanes_of(3, 6, 7)[:, 0])
    assert buffer[2]["n"].tolist() == [6, 1006, 2006]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_three_dimensions(dim: int) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(24, ndim=3), dim_extend=dim)
    for start in (0, 3):
        data = lanes_of(6, start, start + 3).reshape(2, 3, 3)
        buffer.extend(data.permute(*[[2, 0, 1], [0, 2, 1], [0, 1, 2]][dim]))
    held = buffer[:]
    check(held)
    by_lane = held["n"].movedim(dim, -1).reshape(6, 4)
    assert by_lane.tolist() == [[1000 * lane + t for t in (4, 5, 2, 3)] for lane in range(6)]
    assert len(buffer) == 24
    batch, info = buffer.sample(50, return_info=True)
    rows, one, two = info["index"]
    assert torch.equal(held["n"].movedim(dim, -1)[one, two, rows], batch["n"])


def test_lanes_cannot_change_and_need_room() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    buffer.extend(lanes_of(3, 0, 2))
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        buffer.extend(lanes_of(2, 0, 2))
    with pytest.raises(ValueError, match="room"):
        ReplayBuffer(storage=LazyTensorStorage(2, ndim=2)).extend(lanes_of(3, 0, 2))
    with pytest.raises(ValueError, match="ndim=2"):
        buffer.extend(frames(range(3)))
    assert len(buffer) == 6
    with pytest.raises(ValueError, match="at least one lane"):
        ReplayBuffer(storage=LazyTensorStorage(12, ndim=2)).extend(TensorDict({"x": torch.zeros(0, 3)}, [0, 3]))


# -- indexing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORAGES)
def test_indexing(kind: type[Storage]) -> None:
    buffer = buffer_of(kind)
    buffer.extend(frames(range(6)))
    assert buffer[2]["n"].item() == 2
    assert buffer[2].batch_size == ()
    assert buffer[-1]["n"].item() == 5
    assert check(buffer[1:4]) == [1, 2, 3]
    assert check(buffer[::2]) == [0, 2, 4]
    assert check(buffer[[5, 0, 5]]) == [5, 0, 5]
    assert check(buffer[torch.tensor([4, 1])]) == [4, 1]
    assert check(buffer[np.array([4, 1])]) == [4, 1]
    assert check(buffer[torch.tensor([True, False, False, False, False, True])]) == [0, 5]
    assert buffer["n"].tolist() == [0, 1, 2, 3, 4, 5]
    for beyond in (6, -7, [0, 6]):
        with pytest.raises(IndexError):
            buffer[beyond]


@pytest.mark.parametrize("kind", COLUMNS)
def test_an_empty_buffer_has_no_frames_to_index(kind: type[Storage]) -> None:
    buffer = buffer_of(kind)
    with pytest.raises(IndexError, match="empty"):
        buffer[0]
    with pytest.raises(IndexError, match="empty"):
        buffer[0] = frames([1])[0]


@pytest.mark.parametrize("kind", COLUMNS)
def test_frames_can_be_changed_where_they_lie(kind: type[Storage]) -> None:
    buffer = buffer_of(kind, 5)
    buffer.extend(frames(range(7)))
    buffer[1] = frames([50])[0]
    buffer[2:4] = frames([60, 61])
    buffer[torch.tensor([0])] = frames([70])
    assert check(buffer[:]) == [70, 50, 60, 61, 4]
    assert (len(buffer), buffer.write_count) == (5, 7)
    assert set(check(buffer.sample(100))) == {70, 50, 60, 61, 4}


def test_frames_of_lanes_can_be_changed() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    buffer.extend(lanes_of(2, 0, 3))
    buffer[1] = frames([5, 6, 7])
    buffer[0, 2] = frames([9])[0]
    assert buffer[:]["n"].tolist() == [[0, 1, 9], [5, 6, 7]]
    check(buffer[:])


def test_frames_that_do_not_fit_cannot_replace_others() -> None:
    buffer = buffer_of()
    buffer.extend(frames(range(4)))
    with pytest.raises(KeyError, match="odd"):
        buffer[0] = frames([1])[0].exclude("odd")
    with pytest.raises(ValueError, match="pixels"):
        buffer[0] = frames([1])[0].set("pixels", torch.zeros(3, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="3"):
        buffer[0:3] = frames([8, 9])
    assert check(buffer[:]) == [0, 1, 2, 3]
    buffer[0:3] = frames([8])  # one for all
    assert check(buffer[:]) == [8, 8, 8, 3]


def test_items_of_a_list_can_be_changed_in_place() -> None:
    buffer = ReplayBuffer(storage=ListStorage(3))
    buffer.extend(["a", "b", "c"])
    buffer[0] = "d"
    buffer[1:] = ["e", "f"]
    assert [buffer[at] for at in range(3)] == ["d", "e", "f"]
    assert set(buffer.sample(50)) == {"d", "e", "f"}
    with pytest.raises(ValueError, match="1 items were given for 2"):
        buffer[1:] = ["g"]


# -- what does not fit -----------------------------------------------------------------------------------------------


TWO = {"a": torch.arange(3), "b": torch.arange(3)}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize(
    ("first", "wrong", "error", "words"),
    [
        (frames(range(4)), frames([1]).exclude("odd"), KeyError, "odd"),
        (frames(range(4)), frames([1]).set("strange", torch.zeros(1)), KeyError, "strange"),
        (
            frames(range(4)),
            frames([1]).set("pixels", torch.zeros(1, 4, 2, dtype=torch.uint8)),
            ShapeError,
            r"pixels.*\(4, 2\).*\(3, 2\)",
        ),
        (
            frames(range(4)),
            frames([1]).set(("next", "deep", "x"), torch.zeros(1, 2, dtype=torch.float64)),
            ShapeError,
            r"next.*deep.*x",
        ),
        (frames(range(4)), frames([1]).set("n", torch.zeros(1)), TypeError, r"'n'.*float32.*int64"),
        (frames(range(4)), torch.zeros(3), TypeError, "TensorDict"),
        *((first, TWO | {"b": torch.arange(n)}, ValueError, r"'b'") for first in (TWO, None) for n in (1, 2, 5)),
        (None, TensorDict({}, [3]), ValueError, "nothing to write"),
        (None, TensorDict({"x": torch.tensor(1.0)}, []), ValueError, r"'x'.*ndim=1"),
        (None, TensorDict({"a": torch.ones(2), "name": ["x", "y"]}, [2]), TypeError, "ListStorage"),
        (None, "word", TypeError, "ListStorage"),
    ],
)
def test_data_that_do_not_fit_are_refused_by_name(
    kind: type[Storage], first: Any, wrong: Any, error: type[Exception], words: str
) -> None:
    buffer = buffer_of(kind)
    if first is not None:
        buffer.extend(first)
    before = (buffer.stats(), None if first is None else repr(buffer[:]))
    with pytest.raises(error, match=words):
        buffer.add(wrong) if wrong == "word" else buffer.extend(wrong)
    assert (buffer.stats(), None if first is None else repr(buffer[:])) == before


# -- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_an_empty_buffer_cannot_be_sampled(kind: type[Storage], sampler: type[Sampler]) -> None:
    buffer = buffer_of(kind, sampler=sampler(), batch_size=2)
    for _ in range(2):
        with pytest.raises(NothingToSampleError, match="empty"):
            buffer.sample()
    with pytest.raises(NothingToSampleError, match="empty"):
        next(iter(buffer))
    buffer.extend(frames(range(3)))
    assert len(check(buffer.sample())) == 2


def test_samples_tell_their_index() -> None:
    buffer = buffer_of()
    buffer.extend(frames(range(15)))
    batch, info = buffer.sample(64, return_info=True)
    assert torch.equal(buffer[:]["n"][info["index"]], batch["n"])
    assert info["index"].dtype == torch.int64


def test_batch_size_rules() -> None:
    buffer = buffer_of()
    buffer.extend(frames(range(4)))
    with pytest.raises(RuntimeError, match="batch_size"):
        buffer.sample()
    for wrong in (0, -1, 2.5, True, "4"):
        with pytest.raises(ValueError, match="batch_size"):
            buffer.sample(wrong)
    with pytest.raises(RuntimeError, match="batch_size"):
        next(iter(buffer))
    sized = buffer_of(batch_size=3)
    sized.extend(frames(range(4)))
    assert sized.sample().batch_size == (3,)
    assert sized.sample(7).batch_size == (7,)
    assert sized.sample(np.int64(2)).batch_size == (2,)
    assert sized.next().batch_size == (3,)
    assert sized.batch_size == 3


def test_iteration_is_endless_with_replacement() -> None:
    endless = buffer_of(batch_size=4)
    endless.extend(frames(range(10)))
    numbers = [n for _, batch in zip(range(50), endless, strict=False) for n in check(batch)]
    assert len(numbers) == 200


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_no_frame_is_missing_in_any_of_many_epochs_drawn_ahead(prefetch: int) -> None:
    buffer = buffer_of(batch_size=4, sampler=SamplerWithoutReplacement(), prefetch=prefetch)
    buffer.extend(frames(range(10)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        for _ in range(500 if prefetch == 5 else 3):
            assert sorted(n for batch in buffer for n in batch["n"].tolist()) == list(range(10))
        for batch in buffer:
            check(batch)
    finally:
        sys.setswitchinterval(interval)
        buffer.shutdown()


def test_batches_drawn_ahead_are_those_that_would_be_drawn_anyway() -> None:
    drawn = []
    for prefetch in (None, 3):
        buffer = buffer_of(batch_size=4, generator=seeded(5), prefetch=prefetch)
        buffer.extend(frames(range(10)))
        drawn.append([check(buffer.sample()) for _ in range(6)])
        buffer.shutdown()
        buffer.shutdown()
    assert drawn[0] == drawn[1]


def test_neither_errors_nor_what_is_emptied_are_drawn_ahead() -> None:
    buffer = buffer_of(batch_size=4, prefetch=3)
    try:
        with pytest.raises(NothingToSampleError):
            buffer.sample()
        buffer.extend(frames(range(10)))
        for _ in range(5):
            check(buffer.sample())
        buffer.empty()
        with pytest.raises(NothingToSampleError):
            buffer.sample()
        buffer.extend(frames(range(100, 103)))
        for _ in range(5):
            assert min(check(buffer.sample())) >= 100
    finally:
        buffer.shutdown()


def test_threads_are_gone_after_shutdown() -> None:
    before = threading.active_count()
    buffer = buffer_of(batch_size=4, prefetch=3)
    buffer.extend(frames(range(10)))
    buffer.sample()
    assert threading.active_count() > before
    buffer.shutdown()
    assert threading.active_count() == before
    check(buffer.sample())
    buffer.shutdown()


def test_a_generator_decides_what_is_drawn() -> None:
    def drawn(seed: int) -> list[int]:
        buffer = buffer_of(generator=seeded(seed))
        buffer.extend(frames(range(10)))
        return check(buffer.sample(20))

    before = torch.get_rng_state()
    first = drawn(3)
    assert torch.equal(torch.get_rng_state(), before), "torch's own is not touched"
    torch.rand(4)
    assert drawn(3) == first
    assert drawn(4) != first


def test_set_rng_and_set_sampler() -> None:
    buffer = buffer_of()
    buffer.extend(frames(range(10)))
    buffer.set_rng(seeded(1))
    one = check(buffer.sample(10))
    buffer.set_rng(seeded(1))
    assert check(buffer.sample(10)) == one
    buffer.set_sampler(SamplerWithoutReplacement(shuffle=False))
    assert check(buffer.sample(10)) == list(range(10))
    with pytest.raises(TypeError, match="sampler"):
        buffer.set_sampler(3)  # type: ignore[arg-type]


# -- transforms, collate ---------------------------------------------------------------------------------------------


class Shift:
    """Frames are stored shifted, and delivered as they were."""

    def __call__(self, data: TensorDict) -> TensorDict:
        return data.set("x", data["x"] - 100)

    def inv(self, data: TensorDict) -> TensorDict:
        return data.clone().set("x", data["x"] + 100)


class Double:
    def __call__(self, data: TensorDict) -> TensorDict:
        return data.set("x", data["x"] * 2)

    def inv(self, data: TensorDict) -> TensorDict:
        return data.clone().set("x", data["x"] / 2)


def test_transforms_are_called_in_order_and_backwards_when_writing() -> None:
    buffer = buffer_of(transform=Shift())
    buffer.append_transform(Double())
    buffer.extend(TensorDict({"x": torch.tensor([2.0, 4.0])}, [2]))
    assert buffer.storage[:]["x"].tolist() == [101.0, 102.0]  # halved first, then shifted
    assert buffer[:]["x"].tolist() == [2.0, 4.0]
    buffer.add(TensorDict({"x": torch.tensor(6.0)}, []))
    assert buffer.storage[2]["x"].item() == 103.0
    buffer[2] = TensorDict({"x": torch.tensor(6.0)}, [])
    assert buffer.storage[2]["x"].item() == 103.0
    assert set(buffer.sample(50)["x"].tolist()) == {2.0, 4.0, 6.0}


def test_transforms_can_be_turned_round() -> None:
    buffer = buffer_of()
    buffer.append_transform(Double(), invert=True)
    buffer.extend(TensorDict({"x": torch.ones(3)}, [3]))
    assert buffer.storage[:]["x"].tolist() == [2.0] * 3
    assert buffer[:]["x"].tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="10 is no place"):
        buffer.insert_transform(10, Double())


def test_transforms_of_all_kinds() -> None:
    buffer = buffer_of(transform_factory=lambda: lambda batch: batch["n"])
    buffer.insert_transform(0, lambda batch: batch.set("n", batch["n"] * 10))
    buffer.extend(frames(range(3)))
    assert set(buffer.sample(50).tolist()) == {0, 10, 20}
    assert len(buffer.transform) == 2
    with pytest.raises(TypeError, match="transform"):
        buffer_of(transform=abs, transform_factory=lambda: abs)


def test_collate_makes_the_batch() -> None:
    items = ReplayBuffer(storage=ListStorage(5), collate_fn=lambda items: ("batch", sorted(items)))
    items.extend([3, 1, 2])
    name, numbers = items.sample(8)
    assert name == "batch"
    assert len(numbers) == 8
    assert items[:] == ("batch", [1, 2, 3])
    columns = buffer_of(collate_fn=lambda batch: batch["n"].sum())
    columns.extend(frames([2, 2]))
    assert columns.sample(3).item() == 6


def test_pinning_is_only_for_machines_with_a_gpu() -> None:
    buffer = buffer_of(pin_memory=True)
    buffer.extend(frames(range(3)))
    assert buffer.sample(2)["n"].is_pinned() == torch.cuda.is_available()


# -- the whole -------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    buffer = ReplayBuffer()
    assert isinstance(buffer.storage, ListStorage)
    assert buffer.storage.max_size == 1000
    assert isinstance(buffer.sampler, RandomSampler)
    assert isinstance(buffer.writer, RoundRobinWriter)
    assert len(buffer) == 0
    assert not buffer.is_shared


def test_parts_may_be_made_by_functions() -> None:
    buffer = ReplayBuffer(
        storage=lambda: LazyTensorStorage(5), sampler=SamplerWithoutReplacement, writer=TensorDictRoundRobinWriter
    )
    buffer.extend(frames(range(7)))
    assert sorted(check(buffer.sample(5))) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("storage", (10, lambda: 10), TypeError),
        ("sampler", ("random",), TypeError),
        ("writer", (object(),), TypeError),
        ("prefetch", (-1, 1.5, "two"), ValueError),
        ("dim_extend", (-1, 1, 2), ValueError),
        ("batch_size", (0, -1, 2.5, True, "4"), ValueError),
    ],
)
def test_wrong_arguments_are_refused_by_name(name: str, wrong: tuple[Any, ...], error: type[Exception]) -> None:
    for value in wrong:
        with pytest.raises(error, match=name):
            ReplayBuffer(**{"storage": LazyTensorStorage(10), name: value})


def test_wrong_sizes_are_refused_by_name() -> None:
    for wrong in (0, -3, 2.0, True, "many"):
        with pytest.raises(ValueError, match="max_size"):
            LazyTensorStorage(wrong)
        with pytest.raises(ValueError, match="ndim"):
            LazyTensorStorage(5, ndim=wrong)


def test_it_tells_what_it_is() -> None:
    buffer = buffer_of(batch_size=7)
    buffer.extend(frames(range(4)))
    for word in ("ReplayBuffer", "4 of 10", "RandomSampler", "7"):
        assert word in repr(buffer)


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_is_another_buffer_and_draws_the_same(kind: type[Storage], how: str) -> None:
    buffer = buffer_of(kind, batch_size=5, generator=seeded(3))
    buffer.extend(frames(range(13)))
    twin = pickle.loads(pickle.dumps(buffer)) if how == "pickle" else copy.deepcopy(buffer)
    assert check(twin.sample()) == check(buffer.sample())
    twin.extend(frames(range(100, 104)))
    assert check(twin[:])[3:7] == [100, 101, 102, 103]
    assert max(check(buffer[:])) == 12
    buffer.extend(frames([55]))
    assert 55 not in check(twin[:])


# -- any sequence of writes ------------------------------------------------------------------------------------------


class Model:
    """What a ring should do, by the book."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: deque[int] = deque(maxlen=capacity)
        self.next = self.written = 0
        self.at: dict[int, int] = {}

    def extend(self, count: int) -> tuple[list[int], list[int]]:
        """The numbers that are written now, and where."""
        numbers = list(range(self.next, self.next + count))
        where = [(self.written + i) % self.capacity for i in range(count)]
        self.held.extend(numbers)
        self.at.update(zip(where, numbers, strict=True))
        self.next += count
        self.written += count
        return numbers, where

    def empty(self) -> None:
        self.held.clear()
        self.at.clear()
        self.written = 0


happenings = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 30)),
        st.tuples(st.just("extend"), st.integers(0, 5)),
        st.tuples(st.just("add"), st.just(1)),
        st.tuples(st.just("empty"), st.just(0)),
        st.tuples(st.just("sample"), st.integers(1, 9)),
        st.tuples(st.just("fail"), st.integers(1, 9)),
    ),
    max_size=20,
)


def play(buffer: ReplayBuffer, capacity: int, story: list[tuple[str, int]], lanes: int = 1) -> None:
    model = Model(capacity)
    for what, count in story:
        if what == "empty":
            buffer.empty()
            model.empty()
        elif what == "share":
            assert buffer.share() is buffer
            assert buffer.is_shared
        elif what == "sample":
            if not model.held:
                with pytest.raises(NothingToSampleError):
                    buffer.sample(count)
            else:
                drawn = check(buffer.sample(count))
                assert {n % 1000 for n in drawn} <= set(model.held)
                assert len(drawn) == count
        elif what == "fail":
            if model.held:  # a write that is refused changes nothing
                with pytest.raises(KeyError):
                    buffer.extend(lanes_of(lanes, 0, count).exclude("odd") if lanes > 1 else frames([1]).exclude("odd"))
        elif lanes > 1:
            numbers, where = model.extend(count)
            got = buffer.extend(lanes_of(lanes, numbers[0] if numbers else 0, numbers[-1] + 1 if numbers else 0))
            assert got.reshape(-1, 2).tolist() == [[row, lane] for row in where for lane in range(lanes)]
        else:
            numbers, where = model.extend(count)
            got = [buffer.add(frames(numbers)[0])] if what == "add" else buffer.extend(frames(numbers)).tolist()
            assert got == where
            assert all(isinstance(at, int) for at in got)
        assert len(buffer) == len(model.held) * lanes
        assert buffer.write_count == model.written * lanes
        assert buffer.stats()["lost"] == 0
        if model.held:
            held = buffer[:]
            check(held)
            by_row = held["n"].reshape(lanes, -1)
            for lane in range(lanes):
                expected = [1000 * lane + model.at[row] for row in sorted(model.at)]
                assert by_row[lane].tolist() == expected


PLACES: dict[str, Callable[[int], ReplayBuffer]] = {
    "columns": lambda size: buffer_of(size=size),
    "file": lambda size: buffer_of(LazyMemmapStorage, size),
    "list": lambda size: buffer_of(ListStorage, size),
    "shared": lambda size: buffer_of(size=size, shared=True),
}


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=40, deadline=None)
@given(capacity=st.integers(1, 20), story=happenings)
@example(capacity=4, story=[("extend", 0), ("extend", 4), ("extend", 4), ("extend", 3), ("extend", 11), ("add", 1)])
def test_any_story(place: str, capacity: int, story: list[tuple[str, int]]) -> None:
    """Where frames go, around the end, also of batches that are empty, or as large as all there is, or larger."""
    if place == "list":  # which takes anything
        story = [(what, count) for what, count in story if what != "fail"]
    play(PLACES[place](capacity), capacity, story)


@settings(max_examples=30, deadline=None)
@given(capacity=st.integers(1, 12), lanes=st.integers(2, 4), story=happenings)
@example(capacity=2, lanes=3, story=[("extend", 9)])
def test_any_story_of_lanes(capacity: int, lanes: int, story: list[tuple[str, int]]) -> None:
    story = [("extend" if what == "add" else what, count) for what, count in story]
    play(ReplayBuffer(storage=LazyTensorStorage(capacity * lanes + lanes - 1, ndim=2)), capacity, story, lanes)


@settings(max_examples=20, deadline=None)
@given(capacity=st.integers(1, 12), story=happenings, share_at=st.integers(0, 10))
def test_sharing_in_the_middle_changes_nothing(capacity: int, story: list[tuple[str, int]], share_at: int) -> None:
    play(buffer_of(size=capacity), capacity, [*story[:share_at], ("share", 0), *story[share_at:]])


def test_a_failed_copy_loses_its_rows_and_nothing_else() -> None:
    buffer = buffer_of(size=8)
    buffer.extend(frames(range(10)))
    lose(buffer, 3)
    assert buffer.stats() == {"frames": 5, "written": 10, "sampled": 0, "lost": 3}
    assert sorted(check(buffer[:])) == [5, 6, 7, 8, 9]
    assert set(check(buffer.sample(200))) == {5, 6, 7, 8, 9}
    with pytest.raises(IndexError, match="4"):
        buffer[4]  # a frame that is not there
    buffer.extend(frames(range(20, 26)))
    assert set(check(buffer.sample(200))) == {20, 21, 22, 23, 24, 25}
    assert len(buffer) == 6  # one of the three places is still unused
    buffer.extend(frames(range(26, 30)))
    assert sorted(check(buffer[:])) == list(range(22, 30))
    assert buffer.stats() == {"frames": 8, "written": 20, "sampled": 400, "lost": 3}
    assert buffer.storage.contents().whole


def test_an_interrupt_after_the_copy_loses_no_more_than_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even then may half of a write be read, or the next one wait for it."""
    buffer = buffer_of(size=8)
    buffer.extend(frames(range(8)))
    ledger = buffer.storage.ledger

    def interrupted(begin: int, rows: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.extend(frames([100, 101, 102]))
    monkeypatch.undo()
    buffer.extend(frames([200, 201]))
    assert set(check(buffer.sample(200))) == {5, 6, 7, 200, 201}
    assert buffer.stats() == {"frames": 5, "written": 10, "sampled": 200, "lost": 3}


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_sampled_is_counted_without_a_rate_limiter(shared: bool, prefetch: int | None) -> None:
    buffer = buffer_of(size=8, batch_size=4, shared=shared, prefetch=prefetch, sampler=SamplerWithoutReplacement())
    buffer.extend(frames(range(6)))
    for expected in (4, 6, 10):  # the second batch has what is left of the epoch
        buffer.sample()
        assert buffer.stats()["sampled"] == expected
    for twin in (copy.deepcopy(buffer) if not shared else buffer, buffer.share()):
        assert twin.stats()["sampled"] == 10
    twin = buffer_of(size=8, sampler=SamplerWithoutReplacement())
    twin.load_state_dict(buffer.state_dict())
    assert twin.stats()["sampled"] == 10
    together(*[lambda: [twin.sample(1) for _ in range(200)]] * 4)
    assert twin.stats()["sampled"] == 810
    twin.empty()
    assert twin.stats()["sampled"] == 0
    buffer.shutdown()


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, PrioritizedReplayBuffer])
def test_a_size_in_the_place_of_a_storage_is_answered_with_the_line_to_write(kind: type[ReplayBuffer]) -> None:
    options = {"alpha": 1.0, "beta": 1.0} if kind is PrioritizedReplayBuffer else {}
    line = re.escape("storage=LazyTensorStorage(1000)")
    with pytest.raises(TypeError, match=rf"Write {kind.__name__}\({line}\)"):
        kind(1000, **options)
    with pytest.raises(TypeError, match=f"storage must .* got 1000. Write {line}"):
        kind(storage=1000, **options)
    with pytest.raises(TypeError, match=r"by name.*storage=\.\.\."):
        kind(LazyTensorStorage(10), **options)
