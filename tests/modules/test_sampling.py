"""Actions are drawn as the policy's distribution says, from torch's random numbers."""

import math
from typing import Any

import numpy as np
import policy_zoo as zoo
import pytest
import torch
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, set_interaction_type
from torch import Tensor, nn
from torch import distributions as D

from swath.collectors import Collector
from swath.modules import TanhNormal
from swath.modules.families import sampling_stage

LANES, STEPS = 40, 60
CHI_SQUARE = {2: 13.8}
"""Degrees of freedom, and what is exceeded once in a thousand times."""


def own_samples(policy: Any, batch: Any, key: str) -> Tensor:
    """As many actions, drawn by the module itself."""
    with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
        return policy(batch.select("observation").clone())[key]


def chosen(actions: Tensor) -> np.ndarray:
    """Which of the discrete actions, of indices or one-hot vectors."""
    indices = actions.argmax(-1) if actions.ndim == 3 else actions
    return np.bincount(indices.reshape(-1).numpy(), minlength=zoo.CHOICES)


def assert_same_distribution(found: Tensor, wanted: Tensor) -> None:
    """The two-sample test of Kolmogorov and Smirnov, wrong once in a thousand times."""
    one, other = np.sort(found.numpy().reshape(-1)), np.sort(wanted.numpy().reshape(-1))
    everywhere = np.concatenate([one, other])
    shares = [np.searchsorted(a, everywhere, side="right") / len(a) for a in (one, other)]
    assert np.abs(shares[0] - shares[1]).max() < 1.95 * math.sqrt(2 / len(one))


@pytest.mark.parametrize("name", [name for name, case in zoo.STOCHASTIC.items() if case.actions is not zoo.CONTINUOUS])
def test_discrete_actions_are_drawn_with_the_modules_probabilities(name: str) -> None:
    case = zoo.STOCHASTIC[name]
    policy, key = case.make(), "turn" if case.actions is zoo.MIXED else "action"
    if case.actions is zoo.DISCRETE:
        policy[0].module.apply(lambda m: m.weight.data.mul_(2) if isinstance(m, nn.Linear) else None)
    batch = zoo.collect(policy, case.env(lengths=[20] * LANES, still=True), STEPS)
    counts, own = chosen(batch[key]), chosen(own_samples(policy, batch, key))
    expected = (counts + own) / 2
    statistic = ((counts - expected) ** 2 / expected + (own - expected) ** 2 / expected).sum()
    assert statistic < CHI_SQUARE[zoo.CHOICES - 1]
    assert (counts > 0).all()


@pytest.mark.parametrize(("lanes", "steps"), [(1, 1), (20, 10), (200, 60)])
def test_choices_are_drawn_with_their_probabilities_however_many_at_once(lanes: int, steps: int) -> None:
    torch.manual_seed(0)
    sampler = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=D.Categorical)
    logits = np.full((lanes, zoo.CHOICES), [0.5, -3.0, 1.0], np.float32)
    action, counts = np.zeros(lanes, np.int64), np.zeros(zoo.CHOICES)
    stage = sampling_stage(sampler, {"logits": logits}, {"action": action}, InteractionType.RANDOM, late=True)
    assert stage is not None
    for _ in range(max(1, 6000 // (lanes * steps))):
        stage.begin(steps, None)
        for t in range(steps):
            stage.run(t)
            counts += np.bincount(action, minlength=zoo.CHOICES)
    expected = torch.from_numpy(logits[0]).softmax(-1).numpy() * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE[zoo.CHOICES - 1]


@pytest.mark.parametrize("name", [name for name, case in zoo.STOCHASTIC.items() if case.actions is not zoo.DISCRETE])
def test_continuous_actions_are_drawn_from_the_modules_distribution(name: str) -> None:
    case = zoo.STOCHASTIC[name]
    policy, key = case.make(), "push" if case.actions is zoo.MIXED else "action"
    batch = zoo.collect(policy, case.env(lengths=[20] * LANES, still=True), STEPS)
    own = own_samples(policy, batch, key)
    for axis in range(zoo.AXES):
        assert_same_distribution(batch[key][..., axis], own[..., axis])


@pytest.mark.parametrize("name", ["categorical", "normal"])
def test_draws_are_independent_over_lanes_steps_and_batches(name: str) -> None:
    case = zoo.STOCHASTIC[name]
    collector = Collector(case.env(lengths=[20] * LANES, still=True), case.make(), frames_per_batch=LANES * STEPS)
    first, second = (collector.next()["action"].double().reshape(LANES, STEPS, -1)[..., 0] for _ in range(2))
    spread = first.std()
    first, second = (first - first.mean()) / spread, (second - second.mean()) / spread
    pairs = [(first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first, second)]
    for one, other in pairs:
        assert abs((one * other).mean()) < 4 / math.sqrt(one.numel())


# -- seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.STOCHASTIC)
def test_the_noise_depends_on_torchs_seed(name: str) -> None:
    case = zoo.STOCHASTIC[name]
    policy = case.make()
    keys = [key for part in zoo.samplers_of(policy) for key in part.dist_sample_keys]

    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        return zoo.collect(policy, case.env()).select(*keys)

    assert (run(1) == run(1)).all()
    assert not (run(1) == run(2)).all()


# -- unusual parameters ---------------------------------------------------------------------------------------------


class Logits(nn.Module):
    """Writes what it is told, whatever it sees."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = torch.tensor(values)

    def forward(self, observation: Tensor) -> Tensor:
        return self.values.expand(*observation.shape[:-1], zoo.CHOICES)


@pytest.mark.parametrize("family", [D.Categorical, D.OneHotCategorical])
@pytest.mark.parametrize("kind", [InteractionType.RANDOM, InteractionType.MODE])
def test_masked_actions_are_never_chosen(family: Any, kind: InteractionType) -> None:
    policy = zoo.discrete(family, Logits(0.5, -math.inf, -0.5))
    env = zoo.WaveEnv(lengths=[50] * LANES)
    collector = Collector(env, policy, frames_per_batch=LANES * STEPS, exploration_type=kind)
    batch = collector.next()
    assert zoo.stages_of(collector) == ("TorchStage", "CategoricalStage")
    counts = chosen(batch["action"])
    assert counts[1] == 0
    assert counts[0] > 0
    assert batch["action_log_prob"].isfinite().all()


BAD_LOGITS = [(math.nan, 0.0, 0.0), (0.0, math.inf, 0.0), (-math.inf,) * 3]


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 4), (16, 1), (60, 50)], ids=str)
@pytest.mark.parametrize("choices", [2, 5, 40])
@pytest.mark.parametrize("is_masked", [False, True])
def test_log_probs_are_the_same_however_many_are_computed(shape: Any, choices: int, is_masked: bool) -> None:
    """By whichever way: one by one, a few at once, or many."""
    lanes, steps = shape
    sampler = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=D.Categorical, return_log_prob=True
    )
    rows = {"logits": np.zeros((lanes, choices), np.float32)}
    written = {"action": np.zeros(lanes, np.int64), "action_log_prob": np.zeros(lanes, np.float32)}
    stage = sampling_stage(sampler, rows, written, InteractionType.RANDOM, late=True)
    assert stage is not None
    logits = torch.randn(lanes, steps, choices) * 5
    if is_masked:
        logits[..., 1] = -math.inf
    action = logits.argmin(-1) if not is_masked else torch.zeros(lanes, steps, dtype=torch.int64)
    columns = {"logits": logits.numpy(), "action": action.numpy(), "action_log_prob": np.zeros(shape, np.float32)}
    stage.finish(columns, (slice(None), slice(steps)))
    wanted = D.Categorical(logits=logits).log_prob(action)
    assert torch.allclose(torch.from_numpy(columns["action_log_prob"]), wanted, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 4), (60, 50)], ids=str)
@pytest.mark.parametrize(
    ("family", "kwargs"),
    [
        (D.Normal, {}),
        (TanhNormal, {}),
        (TanhNormal, {"low": -0.5, "high": 3.0}),
        (TanhNormal, {"low": torch.tensor([-0.3, -2.0]), "high": torch.tensor([0.1, 2.0])}),
    ],
)
def test_log_densities_are_the_same_however_many_are_computed(shape: Any, family: Any, kwargs: Any) -> None:
    lanes, steps = shape
    sampler = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=family, distribution_kwargs=kwargs, return_log_prob=True
    )
    rows = {name: np.ones((lanes, 2), np.float32) for name in ("loc", "scale")}
    written = {"action": np.ones((lanes, 2), np.float32)}
    stage = sampling_stage(sampler, rows, written, InteractionType.RANDOM, late=True)
    assert stage is not None
    stage.begin(steps, None)
    loc, scale = torch.randn(lanes, steps, 2) * 2, torch.rand(lanes, steps, 2) + 0.1
    distribution = family(loc, scale, **kwargs)
    action = distribution.sample()
    wanted = distribution.log_prob(action)
    given = {"loc": loc, "scale": scale, "action": action, "action_log_prob": torch.zeros_like(wanted)}
    columns = {key: value.numpy() for key, value in given.items()}
    stage.finish(columns, (slice(None), slice(steps)))
    assert torch.allclose(given["action_log_prob"], wanted, rtol=1e-3, atol=1e-3)


def test_the_ends_of_an_interval_may_change_between_batches() -> None:
    case, kwargs, ends = zoo.STOCHASTIC["tanh-normal"], {"low": -1.0, "high": 1.0}, list[float]()
    policy = zoo.continuous(distribution_kwargs=kwargs)
    kwargs = policy[-1].distribution_kwargs
    collector = Collector(case.env(lengths=[20] * LANES), policy, frames_per_batch=LANES * STEPS)
    for low, high in ((-1.0, 1.0), (-9.0, 9.0), (torch.tensor(-3.0), torch.tensor(3.0)), (-1.0, 1.0), (-9, 9)):
        kwargs["low"], kwargs["high"] = low, high  # in place, of which nobody is told
        ends.append(float(collector.next()["action"].abs().max()))
    assert ends[0] <= 1.0 < ends[2] <= 3.0 < ends[1] <= 9.0
    assert ends[3] <= 1.0
    assert 3.0 < ends[4] <= 9.0


@pytest.mark.parametrize("values", BAD_LOGITS, ids=["nan", "inf", "all masked"])
@pytest.mark.parametrize("options", [{}, {"fast_policy": False}], ids=["fast", "slow"])
@pytest.mark.parametrize("return_log_prob", [True, False])
def test_logits_without_probabilities_are_refused(values: Any, options: Any, return_log_prob: bool) -> None:
    policy = zoo.discrete(net=Logits(0.0, 0.0, 0.0), return_log_prob=return_log_prob)
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=18, **options)
    policy[0].module.values = torch.tensor(values)
    with pytest.raises(ValueError, match=r"logits|Expected parameter"):
        collector.next()


def test_a_diverged_policy_is_told_which_parameters_are_wrong() -> None:
    policy = zoo.discrete()
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    policy[0].module[0].weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match=r"'logits'.*NaN"):
        collector.next()


@pytest.mark.parametrize("family", [D.Normal, TanhNormal])
@pytest.mark.parametrize(
    ("loc", "scale", "key"), [(math.nan, 1.0, "loc"), (0.0, math.nan, "scale"), (0.0, -1.0, "scale")]
)
def test_a_normal_with_wrong_parameters_is_refused(family: Any, loc: float, scale: float, key: str) -> None:
    values = [0.0, 1.0]
    policy = zoo.continuous(family, lambda x: tuple(torch.full_like(x[..., : zoo.AXES], value) for value in values))
    collector = Collector(zoo.WaveEnv(zoo.CONTINUOUS), policy, frames_per_batch=18)
    values[:] = [loc, scale]
    with pytest.raises(ValueError, match=f"'{key}'"):
        collector.next()


def test_a_distribution_that_can_only_be_sampled() -> None:
    """Its default, a deterministic value, is not asked for either when the policy is tried out."""

    def family(loc: Tensor, scale: Tensor) -> D.Distribution:
        return D.TransformedDistribution(D.Normal(loc, scale), [D.TanhTransform()])

    policy = zoo.continuous(family, default_interaction_type=InteractionType.DETERMINISTIC)
    batch = zoo.collect(policy, zoo.WaveEnv(zoo.CONTINUOUS))
    assert (batch["action"].abs() < 1).all()


# -- exact log-probs ------------------------------------------------------------------------------------------------


def test_log_probs_of_a_squashed_normal_are_those_that_a_loss_computes_later() -> None:
    """Also where it saturates: a ratio of an unchanged policy must be one."""
    policy = zoo.continuous(
        net=lambda x: (torch.full_like(x[..., : zoo.AXES], 8.0), torch.full_like(x[..., : zoo.AXES], 2.0))
    )
    batch = zoo.collect(policy, zoo.WaveEnv(zoo.CONTINUOUS))
    assert (batch["action"] > 0.99999).any()
    assert (batch["action"] < 1.0).all()
    zoo.assert_same(batch["action_log_prob"], policy.get_dist(batch).log_prob(batch["action"]))


def test_a_scalar_action_of_a_single_lane() -> None:
    batch = zoo.collect(zoo.discrete(), zoo.WaveEnv(lengths=[4], batch_size=()))
    assert batch["action"].shape == (6,)
    assert batch["action_log_prob"].shape == (6,)
