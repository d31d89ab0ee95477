"""Randomness: a stream of one's own, once seeded, that leaves torch's generator alone."""

import pytest
import torch

from swath.rollout.randomness import Randomness


def drawn(randomness: Randomness) -> list[float]:
    with randomness.applied():
        ahead = torch.rand(2, generator=randomness.generator)
        return [*ahead.tolist(), *torch.rand(2).tolist()]


def test_unseeded_it_is_torchs_own() -> None:
    randomness = Randomness()
    assert randomness.generator is None
    torch.manual_seed(1)
    first = drawn(randomness)
    torch.manual_seed(1)
    assert [*torch.rand(2).tolist(), *torch.rand(2).tolist()] == first
    assert randomness.state_dict() is None


def test_seeded_the_stream_goes_on_whatever_happens_outside() -> None:
    one, two = Randomness(), Randomness()
    one.seed(3)
    two.seed(3)
    seen: set[float] = set()
    for _ in range(3):
        before = torch.get_rng_state()
        first = drawn(one)
        assert not seen & set(first), "the same numbers twice"
        seen |= set(first)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(5)
        assert drawn(two) == first
    other, worker = Randomness(), Randomness()
    other.seed(4)
    worker.seed(3, worker=1)
    begin = Randomness()
    begin.seed(3)
    assert len({tuple(drawn(each)) for each in (other, worker, begin)}) == 3


def test_noise_drawn_ahead_and_noise_drawn_by_policies_are_apart() -> None:
    randomness = Randomness()
    randomness.seed(0)
    ahead_1, ahead_2, own_1, own_2 = drawn(randomness)
    assert len({ahead_1, ahead_2, own_1, own_2}) == 4


def test_an_error_inside_puts_torchs_generator_back() -> None:
    randomness = Randomness()
    randomness.seed(0)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), randomness.applied():
        raise ZeroDivisionError(torch.rand(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_saved_stream_goes_on_where_it_was() -> None:
    randomness = Randomness()
    randomness.seed(5)
    drawn(randomness)
    state = randomness.state_dict()
    expected = [drawn(randomness), drawn(randomness)]
    again = Randomness()
    again.load_state_dict(state)  # type: ignore[arg-type]
    assert [drawn(again), drawn(again)] == expected
    third = Randomness()
    third.load_state_dict(state)  # type: ignore[arg-type]
    assert [drawn(third), drawn(third)] == expected, "going on has changed the saved state"


def test_seeding_again_begins_anew() -> None:
    randomness = Randomness()
    randomness.seed(5)
    first = drawn(randomness)
    drawn(randomness)
    randomness.seed(5)
    assert drawn(randomness) == first
