"""PrioritizedSampler: chances, weights, and what it notices of writes that nobody tells it of."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from buffer_tools import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import Ring, operations, play, rings

from swath.data.contents import Contents
from swath.data.prioritized import PrioritizedSampler
from swath.errors import NothingToSampleError


def sampler_for(ring: Ring, alpha: float = 1.0, beta: float = 1.0, **options: Any) -> PrioritizedSampler:
    return PrioritizedSampler(ring.lanes * ring.capacity, alpha, beta, **options)


def filled(rows: int = 10, capacity: int = 10, lanes: int = 1) -> Ring:
    ring = Ring(lanes, capacity)
    ring.write(rows)
    return ring


def weights(sampler: PrioritizedSampler) -> list[float]:
    return list(sampler.state_dict()["weights"].tolist())


class Model:
    """Weights by lane and position in a dict, looked up one by one."""

    def __init__(self, ring: Ring, sampler: PrioritizedSampler) -> None:
        self.ring, self.sampler = ring, sampler
        self.known: dict[tuple[int, int], float] = {}
        self.highest = 1.0
        self.end = 0

    def look(self) -> None:
        weight = (self.highest + self.sampler.eps) ** self.sampler.alpha
        if self.sampler.max_priority_within_buffer and self.known:
            weight = max(self.known.values())
        ring = self.ring
        for lane in range(ring.lanes):
            self.known |= {(lane, position): weight for position in range(self.end, ring.end)}
        self.known = {place: weight for place, weight in self.known.items() if ring.there(place[1])}
        self.end = ring.end

    def weights(self) -> np.ndarray:
        weights = np.zeros(self.ring.lanes * self.ring.capacity)
        for (lane, position), weight in self.known.items():
            weights[lane * self.ring.capacity + position % self.ring.capacity] = weight
        return weights


@settings(max_examples=200, deadline=None)
@given(
    ring=rings(),
    happenings=operations(),
    alpha=st.sampled_from([0.5, 1.0]),
    within=st.booleans(),
    small=st.booleans(),
    data=st.data(),
)
def test_weights_are_those_of_a_plain_table(
    ring: Ring, happenings: list[tuple[str, int, int]], alpha: float, within: bool, small: bool, data: st.DataObject
) -> None:
    room = 1 if small else ring.lanes * ring.capacity
    sampler = PrioritizedSampler(room, alpha, 1.0, max_priority_within_buffer=within)
    model = Model(ring, sampler)
    given_once = False
    for _ in play(ring, happenings):
        model.look()
        contents = ring.contents(whole=ring.is_whole)
        if not model.known:
            with pytest.raises(NothingToSampleError):
                sampler.draw(contents, 4, seeded())
            continue
        drawn = sampler.draw(contents, 4, seeded())
        weights = model.weights()
        assert sampler.state_dict()["weights"].numpy() == pytest.approx(weights)
        assert contents.holds(drawn.index).all()
        assert drawn.info["_weight"] == pytest.approx(weights[weights > 0].min() / weights[drawn.index], rel=1e-5)
        if data.draw(st.booleans()):
            priority = np.array(data.draw(st.lists(st.floats(0.1, 10), min_size=4, max_size=4)))
            sampler.update_priority(contents, drawn.index, priority)
            for index, each in zip(drawn.index, priority, strict=True):
                place = int(index) // ring.capacity, int(contents.positions(index))
                model.known[place] = (each + sampler.eps) ** alpha
            model.highest = max(model.highest if given_once else 0.0, *priority)
            given_once = True


def test_frames_come_in_proportion_to_their_priorities() -> None:
    ring = filled(300, 200)
    sampler = sampler_for(ring, alpha=0.7)
    priority = np.random.default_rng(0).random(200) * 3 + 0.1
    sampler.update_priority(ring.contents(), np.arange(200), priority)
    draws, generator = 200_000, seeded()
    counts = np.zeros(200)
    for _ in range(20):
        counts += np.bincount(sampler.draw(ring.contents(), draws // 20, generator).index, minlength=200)
    expected = draws * priority**0.7 / (priority**0.7).sum()
    assert abs(((counts - expected) ** 2 / expected).sum() - 199) < 5 * math.sqrt(2 * 199)


def test_importance_weights_undo_the_bias() -> None:
    """With beta = 1 a weighted mean over draws is the plain mean over the buffer."""
    ring = filled(100, 100)
    sampler = sampler_for(ring, alpha=1.0, beta=1.0)
    values, priority = np.arange(100.0), np.linspace(0.5, 5, 100)
    sampler.update_priority(ring.contents(), np.arange(100), priority)
    drawn = sampler.draw(ring.contents(), 200_000, seeded())
    weight = drawn.info["_weight"]
    assert (weight * values[drawn.index]).sum() / weight.sum() == pytest.approx(values.mean(), rel=0.02)
    assert values[drawn.index].mean() > 60  # it was biased


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_follow_the_formula(beta: float) -> None:
    ring = filled(4, 10)
    sampler = sampler_for(ring, alpha=0.6, beta=0.9)
    sampler.beta = beta
    priority = np.array([1.0, 2.0, 0.5, 4.0])
    sampler.update_priority(ring.contents(), np.arange(4), priority)
    chance = priority**0.6 / (priority**0.6).sum()
    by_hand = (4 * chance) ** -beta
    drawn = sampler.draw(ring.contents(), 50, seeded())
    assert list(drawn.info) == ["_weight", "priority_weight"]  # the same under both names
    assert drawn.info["_weight"].dtype == np.float32
    assert drawn.info["_weight"] == pytest.approx((by_hand / by_hand.max())[drawn.index], rel=1e-5)
    assert not drawn.overrides


def test_a_frame_of_priority_zero_is_drawn_if_there_is_no_other() -> None:
    ring = filled(3, 10)
    sampler = sampler_for(ring)
    sampler.update_priority(ring.contents(), np.arange(3), np.zeros(3))
    assert set(sampler.draw(ring.contents(), 100, seeded()).index) == {0, 1, 2}


@pytest.mark.parametrize(
    ("alpha", "within", "highest", "expected"),
    [
        (1.0, False, 7.0, [1, 2, 1, 7, 7, 0]),
        (1.0, True, 2.0, [1, 2, 1, 2, 2, 0]),
        (0.5, True, 2.0, [1, 2**0.5, 1, 2**0.5, 2**0.5, 0]),
        (0.0, False, 7.0, [1, 1, 1, 1, 1, 0]),  # all weigh the same, and it is known all the same
        (0.0, True, 7.0, [1, 1, 1, 1, 1, 0]),
    ],
)
def test_new_frames_have_the_highest_priority(
    alpha: float, within: bool, highest: float, expected: list[float]
) -> None:
    """Ever seen, or of those in the buffer."""
    ring = filled(3, 6)
    sampler = sampler_for(ring, alpha, eps=0.0, max_priority_within_buffer=within)
    assert sampler.default_priority == 1.0
    sampler.update_priority(ring.contents(), np.array([0, 1]), np.array([7.0, 2.0]))
    sampler.update_priority(ring.contents(), np.array([0]), np.array([1.0]))
    assert sampler.default_priority == pytest.approx(highest)
    ring.write(2)
    sampler.draw(ring.contents(), 1, seeded())
    assert weights(sampler) == pytest.approx(expected)


def test_frames_that_vanish_during_a_draw_are_replaced() -> None:
    ring = filled(10, 10)
    sampler = sampler_for(ring)
    sampler.draw(ring.contents(), 1, seeded())
    ring.reserve(8, told=False)
    drawn = sampler.draw(ring.contents(), 50, seeded())
    assert set(drawn.index) == {8, 9}
    assert (drawn.info["_weight"] == 1).all()
    ring.reserve(10, told=False)
    with pytest.raises(NothingToSampleError):
        sampler.draw(ring.contents(), 50, seeded())


@pytest.mark.parametrize(
    ("reduction", "expected"), [("max", [4.0, 9.0]), ("min", [1.0, 7.0]), ("median", [2.0, 8.0]), ("mean", [2.5, 8.0])]
)
def test_several_priorities_of_a_frame_become_one(reduction: str, expected: list[float]) -> None:
    ring = filled(2, 2)
    sampler = sampler_for(ring, eps=0.0, reduction=reduction)
    values = np.array([[1.0, 4.0, 2.0], [7.0, 9.0, 8.0]]) + ([[0.0, 0.0, 0.5], [0, 0, 0]] if reduction == "mean" else 0)
    sampler.update_priority(ring.contents(), np.arange(2), values[:, :, None])
    assert weights(sampler) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("index", "priority", "expected"),
    [
        *(
            ([0, 2], single, [3, 1, 3, 1])
            for single in (3, 3.0, np.int64(3), [3], [3.0], [[3.0]], torch.tensor([3]), torch.tensor(3.0))
        ),
        ([0, 1, 2, 3], [True, False, True, False], [1, 0, 1, 0]),
        ([0, 1], False, [0, 0, 1, 1]),
        ([1, 1, 1], [8.0, 9.0, 2.0], [1, 2, 1, 1]),  # the last one counts
        ([], [], [1, 1, 1, 1]),
        *(
            (index, np.arange(1.0, 1 + math.prod(shape)).reshape(shape), expected)
            for index in ([3, 2, 1, 0], [[3, 2], [1, 0]])
            for shape, expected in (
                ((2, 2), [4, 3, 2, 1]),
                ((4,), [4, 3, 2, 1]),
                ((4, 1), [4, 3, 2, 1]),
                ((2, 2, 1), [4, 3, 2, 1]),
                ((2, 2, 3), [12, 9, 6, 3]),
                ((4, 3), [12, 9, 6, 3]),
            )
        ),
    ],
)
def test_priorities_are_for_frames_or_for_all(index: list[Any], priority: Any, expected: list[float]) -> None:
    """Both may have several dimensions."""
    ring = filled(4, 4)
    sampler = sampler_for(ring, eps=0.0)
    sampler.update_priority(ring.contents(), np.array(index, np.int64), priority)
    assert weights(sampler) == expected


@pytest.mark.parametrize(
    ("index", "priority", "error", "words"),
    [
        *(
            ([0, 1], wrong, ValueError, "finite numbers of at least 0")
            for wrong in ([1.0, -1e-9], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, 1.0])
        ),
        ([0, 1], [1.0, 1.0, 1.0], RuntimeError, r"shape \(3,\) for 2 frames"),
        ([0, -1], [1.0, 1.0], IndexError, "frames from 0 to 5"),
        ([0, 6], [1.0, 1.0], IndexError, "frames from 0 to 5"),
    ],
)
def test_priorities_that_are_none_are_refused(
    index: list[int], priority: list[float], error: type[Exception], words: str
) -> None:
    ring = filled(3, 3, lanes=2)
    sampler = PrioritizedSampler(100, 1.0, 1.0)
    with pytest.raises(error, match=words):
        sampler.update_priority(ring.contents(), np.array(index), np.array(priority))
    assert weights(sampler) == pytest.approx([1] * 6)


def test_frames_that_are_not_there_keep_no_chance() -> None:
    ring = filled(3, 10)
    sampler = sampler_for(ring)
    sampler.update_priority(ring.contents(), np.array([0, 5]), np.array([1.0, 1e9]))
    assert sampler.state_dict()["weights"][5] == 0
    assert 5 not in sampler.draw(ring.contents(), 100, seeded()).index


def test_too_small_a_sampler_grows() -> None:
    ring = filled(3, 10, lanes=2)
    sampler = PrioritizedSampler(4, 1.0, 1.0, eps=0.0)
    assert set(sampler.draw(ring.contents(), 100, seeded()).index) == {0, 1, 2, 10, 11, 12}
    sampler.update_priority(ring.contents(), np.array([0, 12]), np.array([2.0, 5.0]))
    assert weights(sampler) == [2, 1, 1, *[0] * 7, 1, 1, 5, *[0] * 7]
    sampler.empty()
    assert set(sampler.draw(ring.contents(), 100, seeded()).index) == {0, 1, 2, 10, 11, 12}


def test_priorities_are_kept_when_a_sampler_grows() -> None:
    small, ring = filled(4, 4), filled(4, 3000)
    sampler = PrioritizedSampler(1, 1.0, 1.0, eps=0.0)
    sampler.update_priority(small.contents(), np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]))
    ring.write(1)
    sampler.draw(ring.contents(), 1, seeded())
    assert sampler.state_dict()["weights"][:6].tolist() == [1, 2, 3, 4, 4, 0]
    assert len(sampler.state_dict()["weights"]) == 3000


@pytest.mark.parametrize("options", [{"device": None}, {"device": "cpu"}, {"device": torch.device("cpu")}])
def test_arguments_that_make_no_difference_are_taken(options: dict[str, Any]) -> None:
    PrioritizedSampler(10, 1.0, 1.0, **options, max_pending=None)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device": "cuda"}, TypeError, "does not support `device='cuda'`"),
        ({"device": torch.device("cuda", 1)}, TypeError, "does not support `device=device"),
        ({"max_pending": 3}, TypeError, "does not support `max_pending=3`"),
        ({"colour": None}, TypeError, "got an unknown argument: colour=None"),
        ({"alpha": -1}, ValueError, "`alpha` must be a number of at least 0"),
        ({"beta": -0.1}, ValueError, "`beta` must be a number of at least 0"),
        ({"beta": math.nan}, ValueError, "`beta` must be a number of at least 0"),
        ({"eps": -1}, ValueError, "`eps` must be a number of at least 0"),
        ({"reduction": "sum"}, ValueError, "`reduction` must be one of 'max', 'min', 'median', 'mean', got 'sum'"),
        ({"dtype": torch.float16}, NotImplementedError, r"got torch\.float16"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PrioritizedSampler(**{"max_capacity": 10, "alpha": 0.5, "beta": 0.5, **options})


def test_weights_have_the_dtype_asked_for() -> None:
    ring = filled(3, 10)
    drawn = sampler_for(ring, dtype=torch.float64).draw(ring.contents(), 4, seeded())
    assert drawn.info["_weight"].dtype == np.float64


def test_alpha_can_be_changed() -> None:
    ring = filled(3, 10)
    sampler = sampler_for(ring, alpha=0.5, eps=0.0)
    sampler.update_priority(ring.contents(), np.arange(3), np.array([1.0, 4.0, 9.0]))
    sampler.alpha = 1.0
    assert sampler.state_dict()["weights"][:4].tolist() == pytest.approx([1, 4, 9, 0])
    sampler.alpha = 0.0
    assert sampler.state_dict()["weights"][:4].tolist() == [1, 1, 1, 0]
    assert sampler.default_priority == 9.0


def test_emptying_forgets_all() -> None:
    ring = filled(5, 10)
    sampler = sampler_for(ring)
    sampler.update_priority(ring.contents(), np.arange(5), np.full(5, 8.0))
    sampler.empty()
    assert sampler.default_priority == 1.0
    ring = filled(2, 10)
    assert set(sampler.draw(ring.contents(), 100, seeded()).index) == {0, 1}


def test_a_buffer_that_begins_again_is_noticed() -> None:
    sampler, before = sampler_for(filled(5, 10)), filled(5, 10)
    sampler.update_priority(before.contents(), np.arange(5), np.full(5, 8.0))
    assert set(sampler.draw(filled(2, 10).contents(), 100, seeded()).index) == {0, 1}
    assert weights(sampler) == pytest.approx([1] * 2 + [0] * 8)


@pytest.mark.parametrize("lanes", [1, 8, 50_000])
def test_a_first_look_takes_no_memory_beside_the_tree(lanes: int) -> None:
    """A million frames are looked at piece by piece, whether they lie in one lane or in many short ones."""
    rows = 800_000 // lanes
    stamps, seams = np.arange(1, rows + 1), np.zeros(rows * lanes, bool)
    contents = Contents(lanes, rows, 0, rows, stamps, seams, {}.__getitem__)
    sampler = PrioritizedSampler(rows * lanes, 0.5, 0.5)
    tracemalloc.start()
    try:
        sampler.draw(contents, 16, seeded())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3e6  # one number for each frame would be twice as much
    assert sampler.state_dict()["weights"].min() > 0


def test_many_rows_of_several_lanes_are_new_at_once() -> None:
    ring = Ring(3, 300)
    sampler = sampler_for(ring, eps=0.0)
    ring.write(200)
    sampler.update_priority(ring.contents(), np.array([0, 350, 799]), np.array([2.0, 3.0, 4.0]))
    expected = np.zeros((3, 300))
    expected[:, :200] = 1
    expected[0, 0], expected[1, 50], expected[2, 199] = 2, 3, 4
    assert np.array_equal(sampler.state_dict()["weights"].reshape(3, 300), expected)
    ring.write(140)
    sampler.draw(ring.contents(), 1, seeded())
    expected[:, 200:] = expected[:, :40] = 4
    assert np.array_equal(sampler.state_dict()["weights"].reshape(3, 300), expected)


@pytest.mark.parametrize("room", [50, 3])
def test_a_loaded_sampler_draws_the_same(room: int) -> None:
    """Also one that was made for fewer frames, which then grows."""
    ring = filled(17, 10, lanes=2)
    sampler = sampler_for(ring, alpha=0.6, beta=0.4)
    sampler.update_priority(ring.contents(), np.arange(20), np.arange(20.0))
    state = sampler.state_dict()
    other = PrioritizedSampler(room, 0.1, 0.1)
    other.load_state_dict(state)
    sampler.update_priority(ring.contents(), np.arange(20), np.ones(20))  # what was saved is a copy
    sampler.load_state_dict(state)
    ring.write(3)
    first, second = (each.draw(ring.contents(), 64, seeded(5)) for each in (sampler, other))
    assert np.array_equal(first.index, second.index)
    assert np.array_equal(first.info["_weight"], second.info["_weight"])
    assert (other.alpha, other.beta, other.default_priority) == (0.6, 0.4, 19.0)
