"""SumTree against a plain array."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swath.data.sumtree import HEAVIEST, SumTree

WEIGHTS = st.one_of(
    st.just(0.0),
    st.floats(1e-3, 1e3),
    st.sampled_from([5e-324, 1e-300, 1e-17, 1.0, 1e17, 1e200, HEAVIEST]),
)
SIZES = st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 5000, 33_000])


def changes(size: int) -> st.SearchStrategy[list[tuple[int, int, float]]]:
    place = st.one_of(st.integers(0, size - 1), st.just(0), st.just(size - 1))
    return st.lists(st.tuples(place, st.integers(1, size), WEIGHTS), max_size=12)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), size=SIZES)
def test_it_is_a_plain_array_with_sums(data: st.DataObject, size: int) -> None:
    tree, plain = SumTree(size), np.zeros(size)
    asks_early = data.draw(st.booleans())
    for place, count, weight in data.draw(changes(size)):
        if asks_early:
            assert tree.maximum == plain.max()
        if data.draw(st.booleans()):
            stop = min(size, place + count)
            step = data.draw(st.integers(stop - place, size))
            times = data.draw(st.integers(1, 1 + (size - stop) // step))
            tree.fill(place, stop, weight, step, times)
            for start in range(place, place + times * step, step):
                plain[start : start + stop - place] = weight
        else:
            index = np.array([place, (place + count) % size, place])  # the last one counts
            tree.set(index, np.array([1.0, 2.0, weight]))
            plain[index[1]] = 2.0
            plain[place] = weight
        assert np.array_equal(tree.get(np.arange(size)), plain)
        assert tree.total == pytest.approx(math.fsum(plain), rel=1e-12)
        assert tree.minimum == min(plain[plain > 0], default=math.inf)
        assert tree.maximum == plain.max()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), size=SIZES)
def test_what_is_found_has_weight_whatever_the_mass(data: st.DataObject, size: int) -> None:
    tree = SumTree(size)
    for place, count, weight in data.draw(changes(size)):
        tree.fill(place, min(size, place + count), weight)
    tree.set(np.array([data.draw(st.integers(0, size - 1))]), np.array([data.draw(WEIGHTS.filter(bool))]))
    running = np.cumsum(tree.get(np.arange(size)))
    shares = np.array(data.draw(st.lists(st.floats(0, 1), max_size=20)))
    edges = np.concatenate((running, np.nextafter(running, 0), np.nextafter(running, np.inf), shares * tree.total))
    found = tree.find(np.concatenate((edges, [0.0, tree.total, 2 * tree.total])))
    assert (tree.get(found) > 0).all()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 999), size=SIZES)
def test_it_finds_where_the_running_sum_exceeds_the_mass(seed: int, size: int) -> None:
    chance = np.random.default_rng(seed)
    weights = chance.integers(0, 4, size).astype(float)  # whole numbers: sums are exact
    weights[chance.integers(size)] = 1.0
    tree = SumTree(size)
    tree.load(weights)
    mass = chance.random(100) * tree.total
    edges = np.arange(tree.total)
    for each in (mass, edges):
        assert np.array_equal(tree.find(each), np.cumsum(weights).searchsorted(each, side="right"))


def test_a_mass_pushed_to_the_end_of_a_node_by_rounding_is_found_within_it() -> None:
    """The sum of both halves is rounded up, and then what is left of the mass is, to all that the right half has."""
    unit = 2.0**-52
    left, right = 1.5 * unit, 1 + 2 * unit
    mass = np.nextafter(left + right, 0)
    assert mass - left == right  # as if it were past the end
    tree = SumTree(4096)
    tree.set(np.arange(4), np.array([left, 0.0, right, 0.0]))
    assert tree.find(np.array([mass])).tolist() == [2]
    tree.set(np.arange(8), np.array([left, 0.0, 0.0, 0.0, right, 0.0, 0.0, 0.0]))
    assert tree.find(np.array([mass])).tolist() == [4]
    large = SumTree(16 * 1024)
    large.set(np.array([3, 9]), np.array([left, right]))
    assert large.find(np.array([mass])).tolist() == [9]


def test_nothing_adds_up_over_many_changes() -> None:
    tree, chance = SumTree(3000), np.random.default_rng(0)
    for _ in range(300):
        tree.set(chance.integers(0, 3000, 64), 10.0 ** chance.uniform(-12, 12, 64))
    tree.fill(0, 3000, 0.1)
    fresh = SumTree(3000)
    fresh.fill(0, 3000, 0.1)
    assert tree.total == fresh.total
    tree.fill(0, 3000, 0.0)
    assert tree.total == 0.0
    assert tree.minimum == math.inf


def test_finds_come_in_proportion() -> None:
    tree, chance = SumTree(2500), np.random.default_rng(1)
    weights = np.where(chance.random(2500) < 0.5, 0.0, chance.random(2500) + 0.5)
    tree.load(weights)
    draws = 500_000
    counts = np.bincount(tree.find(chance.random(draws) * tree.total), minlength=2500)
    expected = draws * weights / weights.sum()
    some = weights > 0
    assert counts[~some].sum() == 0
    freedom = some.sum() - 1
    chi_square = (((counts - expected) ** 2)[some] / expected[some]).sum()
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("weight", [-1e-300, -1.0, math.nan, math.inf, 1e300])
def test_weights_that_cannot_be_summed_are_refused(weight: float) -> None:
    tree = SumTree(10)
    tree.fill(0, 10, 1.0)
    with pytest.raises(ValueError, match="Weights must be from 0"):
        tree.set(np.array([1, 2]), np.array([1.0, weight]))
    with pytest.raises(ValueError, match="Weights must be from 0"):
        tree.fill(0, 2, weight)
    assert tree.total == 10.0


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda tree: tree.set(np.array([0, -1]), 1.0), IndexError, "from 0 to 9"),
        (lambda tree: tree.set(np.array([0, 10]), 1.0), IndexError, "from 0 to 9"),
        (lambda tree: tree.fill(-1, 3, 1.0), IndexError, "within 0 and 10"),
        (lambda tree: tree.fill(3, 2, 1.0), IndexError, "within 0 and 10"),
        (lambda tree: tree.fill(0, 11, 1.0), IndexError, "within 0 and 10"),
        (lambda tree: tree.fill(0, 3, 1.0, 4, 3), IndexError, "within 0 and 10"),
        (lambda tree: tree.fill(0, 3, 1.0, 2, 2), IndexError, "within 0 and 10"),
        (lambda tree: tree.load(np.ones(11)), ValueError, "room for 10 weights, got 11"),
        (lambda tree: tree.find(np.array([0.0])), ValueError, "All weights are zero"),
        (lambda tree: SumTree(0), ValueError, "capacity of at least 1"),
    ],
)
def test_what_a_tree_has_no_room_for_is_refused(
    wrong: Callable[[SumTree], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        wrong(SumTree(10))


def test_a_larger_tree_has_the_same_weights() -> None:
    tree = SumTree(5)
    tree.set(np.arange(5), np.arange(5.0))
    larger = tree.grown(40_000)
    assert larger.capacity == 40_000
    assert larger.get(np.arange(7)).tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert (larger.total, larger.minimum, larger.maximum) == (10, 1, 4)
    assert larger.find(np.array([0.5, 9.5])).tolist() == [1, 4]
