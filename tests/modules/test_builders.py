"""Distributions that functions and classes of users put together: known where they can be nothing else."""

import random
from collections.abc import Callable
from typing import Any

import policy_zoo as zoo
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributions as D

from swath.modules.builders import Recipe, is_formula, recipe_of

BOUND, AXES = 2.0, {"loc": (2,), "scale": (2,)}
amount = [2.0]


class Assembled(D.Independent):
    """Says how it is made, and what its mean is, which nobody asks for who draws."""

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        self.limits = (-1.0, 1.0)
        super().__init__(D.Normal(loc, scale, validate_args=validate_args), 1)

    @property
    def mean(self) -> Tensor:
        return self.base_dist.mean * 2


class Clamped(D.Normal):
    """Draws in a way of its own."""

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return super().rsample(sample_shape).clamp(-1, 1)


def squashed(loc: Tensor, scale: Tensor) -> D.Distribution:
    base = torch.distributions.Independent(torch.distributions.Normal(loc, scale), 1)
    return D.TransformedDistribution(base, [D.TanhTransform(), D.AffineTransform(BOUND / 2, BOUND)])


def branching(loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.Normal(loc, scale) if BOUND > 1 else D.Normal(scale, loc)


def drawing(loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.TransformedDistribution(D.Normal(loc, scale), [D.AffineTransform(random.random(), 1.0)])


def printing(loc: Tensor, scale: Tensor) -> D.Distribution:
    print("here")
    return D.Normal(loc, scale)


def in_an_element(loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.TransformedDistribution(D.Normal(loc, scale), [D.AffineTransform(amount[0], 1.0)])


def by_default(loc: Tensor, scale: Tensor, draw: Callable[[], float] = random.random) -> D.Distribution:
    return D.TransformedDistribution(D.Normal(loc, scale), [D.AffineTransform(draw(), 1.0)])


def of_a_lane(loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.TransformedDistribution(D.Normal(loc, scale), [D.AffineTransform(loc[0], 1.0)])


def over_lanes(loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.Independent(D.Normal(loc.unsqueeze(0), scale.unsqueeze(0)), 1)


def test_what_is_known_of_them() -> None:
    wanted = {
        Assembled: Recipe(("loc", "scale"), (2,), 1, ()),
        squashed: Recipe(("loc", "scale"), (2,), 1, (None, (1.0, 2.0))),
        zoo.moved: Recipe(("loc", "scale"), (2,), 0, ((0.5, [2.0, 0.5]),)),
    }
    for build, recipe in wanted.items():
        assert is_formula(build)
        assert recipe_of(build, AXES, {}) == recipe


@pytest.mark.parametrize("build", [branching, drawing, printing, in_an_element, by_default, Clamped, D.Normal, 3])
def test_code_that_may_do_something_else(build: Any) -> None:
    assert not is_formula(build)


@pytest.mark.parametrize("build", [of_a_lane, over_lanes, lambda loc, scale: D.Normal(scale, loc + 1)])
def test_what_is_built_from_something_else(build: Any) -> None:
    assert recipe_of(build, AXES, {}) is None
    policy = zoo.continuous(build) if build is not over_lanes else zoo.continuous(of_a_lane)
    assert zoo.stages_after(policy, zoo.WaveEnv(zoo.CONTINUOUS))[-1] == "DistributionStage"


@settings(max_examples=40, deadline=None)
@given(
    ends=st.lists(st.none() | st.tuples(st.floats(-2, 2), st.floats(0.25, 3)), max_size=3),
    dims=st.integers(0, 1),
    lanes=st.integers(1, 4),
)
def test_samples_and_log_probs_are_those_of_what_is_built(ends: list[Any], dims: int, lanes: int) -> None:
    changes = [D.TanhTransform() if end is None else D.AffineTransform(*end) for end in ends]

    def build(loc: Tensor, scale: Tensor, changes: Any, dims: int) -> D.Distribution:
        return D.TransformedDistribution(D.Independent(D.Normal(loc, scale), dims), changes)

    policy = zoo.continuous(build, distribution_kwargs={"changes": changes, "dims": dims})
    env = zoo.WaveEnv(zoo.CONTINUOUS, lengths=[3] * lanes)
    collector = zoo.begun(policy, env, frames_per_batch=8 * lanes)
    assert zoo.stages_of(collector)[-1] == "BuiltStage"
    batch = collector.next()
    built = D.TransformedDistribution(D.Independent(D.Normal(batch["loc"], batch["scale"]), dims), changes)
    zoo.assert_same(batch["action_log_prob"], built.log_prob(batch["action"]))
    u = batch["action"]
    for change in reversed(changes):
        u = change.inv(u)
    assert ((u - batch["loc"]) / batch["scale"]).isfinite().all()


# -- changes ---------------------------------------------------------------------------------------------------------


def test_values_from_outside_may_change_between_batches() -> None:
    """Keyword arguments in place, and what a closure holds, of which nobody is told."""
    held = torch.tensor(1.0)
    policies: list[tuple[Any, Callable[[Any, float], Any]]] = [
        (
            zoo.continuous(zoo.Stretched, distribution_kwargs={"bound": 1.0}),
            lambda policy, bound: policy[-1].distribution_kwargs.__setitem__("bound", bound),
        ),
        (
            zoo.continuous(
                lambda loc, scale: D.TransformedDistribution(
                    D.Normal(loc, scale), [D.TanhTransform(), D.AffineTransform(0.0, held)]
                )
            ),
            lambda policy, bound: held.fill_(bound),
        ),
    ]
    for policy, change in policies:
        collector = zoo.begun(policy, zoo.WaveEnv(zoo.CONTINUOUS, lengths=[5] * 60), frames_per_batch=600)
        for bound in (1.0, 9.0, 2.0):
            change(policy, bound)
            largest = float(collector.next()["action"].abs().max())
            assert bound / 2 < largest <= bound
        assert zoo.stages_of(collector)[-1] == "BuiltStage"


def test_something_else_may_be_built_from_the_next_batch_on() -> None:
    policy = zoo.continuous(
        lambda loc, scale, change: D.TransformedDistribution(D.Normal(loc, scale), [change]),
        distribution_kwargs={"change": D.TanhTransform()},
    )
    collector = zoo.begun(policy, zoo.WaveEnv(zoo.CONTINUOUS))
    policy[-1].distribution_kwargs["change"] = D.SigmoidTransform()
    batch = collector.next()
    assert (batch["action"] > 0).all()
    wanted = D.TransformedDistribution(D.Normal(batch["loc"], batch["scale"]), [D.SigmoidTransform()])
    zoo.assert_same(batch["action_log_prob"], wanted.log_prob(batch["action"]), 1e-4)


def test_a_mixture_with_wrong_parameters_is_refused() -> None:
    policy = zoo.mixture()
    collector = zoo.begun(policy, zoo.WaveEnv(zoo.CONTINUOUS))
    policy[0].module.net[-1].bias.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="Expected parameter"):
        collector.next()


def test_hooks_on_the_sampler_are_called() -> None:
    policy, calls = zoo.continuous(zoo.moved), list[int]()
    collector = zoo.begun(policy, zoo.WaveEnv(zoo.CONTINUOUS))
    policy[-1].register_forward_hook(lambda *args: calls.append(1))
    collector.next()
    assert len(calls) == 6
    assert zoo.stages_of(collector) == zoo.SLOW
