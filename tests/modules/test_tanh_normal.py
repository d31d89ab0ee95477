"""TanhNormal is the distribution that it says it is."""

import pytest
import torch
from torch import Tensor
from torch import distributions as D

from swath.modules import TanhNormal


def truth(loc: Tensor, scale: Tensor, low: float, high: float) -> D.Distribution:
    """The same, put together from torch's transforms."""
    middle, half = (high + low) / 2, (high - low) / 2
    squashed = D.TransformedDistribution(D.Normal(loc, scale), [D.TanhTransform(), D.AffineTransform(middle, half)])
    return D.Independent(squashed, 1)


@pytest.fixture
def params() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64) + 0.2


@pytest.mark.parametrize("ends", [(-1.0, 1.0), (-2.0, 0.5), (3.0, 10.0)], ids=str)
def test_log_probs_are_those_of_the_transformed_normal(
    params: tuple[Tensor, Tensor], ends: tuple[float, float]
) -> None:
    dist = TanhNormal(*params, *ends)
    wanted = truth(*params, *ends)
    value = wanted.sample((100,))
    torch.testing.assert_close(dist.log_prob(value), wanted.log_prob(value))
    assert dist.log_prob(value).shape == (100, 5)
    assert (dist.batch_shape, dist.event_shape) == ((5,), (3,))


def test_a_sample_knows_its_own_log_prob(params: tuple[Tensor, Tensor]) -> None:
    dist = TanhNormal(*params)
    value = dist.sample((50,))
    torch.testing.assert_close(dist.log_prob(value), truth(*params, -1.0, 1.0).log_prob(value))


@pytest.mark.parametrize("loc", [0.0, 4.0, 8.0, 30.0])
def test_a_recorded_action_has_the_log_prob_that_was_recorded(loc: float) -> None:
    dist = TanhNormal(torch.full((100, 2), loc), torch.ones(100, 2), -2.0, 3.0)
    action = dist.sample()
    assert (action < 3.0).all()
    recorded = dist.log_prob(action)
    assert torch.equal(TanhNormal(dist.loc, dist.scale, -2.0, 3.0).log_prob(action.clone()), recorded)


def test_gradients_of_saturated_samples_are_finite_and_not_lost() -> None:
    loc = torch.full((50, 1), 9.0, requires_grad=True)
    dist = TanhNormal(loc, torch.ones(50, 1))
    dist.log_prob(dist.rsample()).sum().backward()
    assert loc.grad is not None
    # log p = const - log(1 - tanh(u)^2), which grows by two for each unit of u
    torch.testing.assert_close(loc.grad, torch.full((50, 1), 2.0), atol=1e-4, rtol=0)


def test_values_at_the_ends_have_finite_log_probs() -> None:
    dist = TanhNormal(torch.zeros(1, 2), torch.ones(1, 2), -2.0, 3.0)
    assert dist.log_prob(torch.tensor([[-2.0, 3.0]])).isfinite().all()


@pytest.mark.parametrize("statistic", ["mode", "median", "deterministic_sample"])
def test_what_stands_for_its_middle(params: tuple[Tensor, Tensor], statistic: str) -> None:
    low, high = torch.tensor([-2.0, 0.0, 1.0]).double(), torch.tensor([2.0, 1.0, 4.0]).double()
    dist = TanhNormal(*params, low, high)
    wanted = params[0].tanh() * (high - low) / 2 + (high + low) / 2
    torch.testing.assert_close(getattr(dist, statistic), wanted)


def test_the_mean_is_left_to_estimates(params: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(NotImplementedError, match="no closed form"):
        _ = TanhNormal(*params).mean


def test_gradients_flow_through_samples() -> None:
    loc, scale = torch.zeros(4, 2, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    dist = TanhNormal(loc, scale)
    value = dist.rsample()
    (value.sum() + dist.log_prob(value).sum()).backward()
    assert loc.grad is not None
    assert scale.grad is not None
    assert loc.grad.abs().sum() > 0


@pytest.mark.parametrize("ends", [(1.0, 1.0), (2.0, -2.0), (torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]))])
def test_an_empty_interval_is_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="low < high"):
        TanhNormal(torch.zeros(2), torch.ones(2), *ends)


def test_a_scale_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="scale"):
        TanhNormal(torch.zeros(2), -torch.ones(2))


def test_samples_lie_inside_the_interval(params: tuple[Tensor, Tensor]) -> None:
    value = TanhNormal(*params, -0.5, 2.0).sample((1000,))
    assert (value >= -0.5).all()
    assert (value <= 2.0).all()
