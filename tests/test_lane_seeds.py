"""Seeds belong to lanes, wherever they run."""

from __future__ import annotations

import pytest

from swath.seeding import lane_seed, lane_seeds, next_seed, policy_seed


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31])
def test_lane_0_has_the_seed_itself(seed: int) -> None:
    assert lane_seed(seed, 0) == seed
    assert lane_seeds(seed, 1) == [seed]


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_the_same_lanes_have_the_same_seeds_however_they_are_spread(workers: int) -> None:
    size = 8 // workers
    spread = [seed for worker in range(workers) for seed in lane_seeds(7, size, worker * size)]
    assert spread == lane_seeds(7, 8)


def test_seeds_of_lanes_differ() -> None:
    many = [seed for start in range(20) for seed in lane_seeds(start, 200)]
    assert len(set(many)) == len(many)
    assert all(0 <= seed < 2**32 for seed in many)


def test_static_seeds_are_all_alike() -> None:
    assert lane_seeds(7, 3, first=5, static=True) == [7, 7, 7]
    assert next_seed(7, 3, static=True) == 7


@pytest.mark.parametrize("lanes", [0, 1, 5])
def test_the_next_seed_is_none_of_the_lanes(lanes: int) -> None:
    assert next_seed(7, lanes) not in lane_seeds(7, max(1, lanes))


def test_the_policys_seed_is_nobodys() -> None:
    policies = [policy_seed(7, worker) for worker in range(50)]
    assert len(set(policies)) == 50
    assert not set(policies) & set(lane_seeds(7, 200))


def test_seeds_are_plain_and_stay_as_they_are() -> None:
    """Saved runs are repeated with these numbers."""
    assert all(type(seed) is int for seed in (*lane_seeds(3, 4), policy_seed(3), next_seed(3, 2)))
    assert (lane_seed(0, 1), policy_seed(0)) == (673228719, 4088532484)
