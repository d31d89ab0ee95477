"""TorchRL's policies in our collector: as quick as ours, and with the same actions and log-probs as they give."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from torch import distributions as D
from torch import nn

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv
from swath.modules import ExplorationType
from swath.modules.peer_parts import EpsilonGreedyStage

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer = pytest.importorskip("torchrl.modules")
    specs = pytest.importorskip("torchrl.data")

pytestmark = pytest.mark.filterwarnings("ignore")

LANES, STEPS = 4, 25


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def begun(policy: Any, name: str = "CartPole-v1", encoded: bool = True, **options: Any) -> Any:
    """A collector, and its first batch."""
    env = SerialEnv(LANES, lambda: GymEnv(name, categorical_action_encoding=encoded))
    collector = Collector(env, policy, frames_per_batch=LANES * STEPS, **options)
    return collector, collector.next()


def replayed(policy: Any, batch: TensorDictBase, kind: Any = InteractionType.DETERMINISTIC) -> TensorDictBase:
    with torch.no_grad(), set_interaction_type(kind):
        return policy(batch.select("observation").clone())


def assert_same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=tolerance, atol=tolerance)


def mlp(inputs: int, outputs: int) -> Any:
    return peer.MLP(in_features=inputs, out_features=outputs, num_cells=[16, 16], activation_class=nn.ReLU)


def actor(family: Any, **options: Any) -> Any:
    return peer.ProbabilisticActor(
        peer.SafeModule(mlp(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=family,
        return_log_prob=True,
        **options,
    )


def continuous(family: Any, kwargs: Any = None) -> Any:
    net = nn.Sequential(mlp(3, 2), NormalParamExtractor())
    return peer.ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=family,
        distribution_kwargs=kwargs,
        return_log_prob=True,
        spec=specs.Bounded(-2.0, 2.0, (1,)),
    )


ACTORS: dict[str, tuple[Callable[[], Any], str, bool, str]] = {
    "categorical": (lambda: actor(D.Categorical), "CartPole-v1", True, "CategoricalStage"),
    "one-hot": (lambda: actor(peer.OneHotCategorical), "CartPole-v1", False, "CategoricalStage"),
    "independent normal": (lambda: continuous(peer.IndependentNormal), "Pendulum-v1", True, "NormalStage"),
    "independent normal, tanh_loc": (
        lambda: continuous(peer.IndependentNormal, {"tanh_loc": False}), "Pendulum-v1", True, "NormalStage"
    ),
    "squashed": (
        lambda: continuous(peer.TanhNormal, {"low": -2.0, "high": 2.0, "tanh_loc": False}),
        "Pendulum-v1", True, "NormalStage",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
@pytest.mark.parametrize("name", ACTORS)
def test_probabilistic_actors(name: str, kind: ExplorationType) -> None:
    make, env, encoded, stage = ACTORS[name]
    policy = make()
    collector, batch = begun(policy, env, encoded, exploration_type=kind)
    assert collector.policy_stages == ["MLPStage", stage]
    told = replayed(policy, batch)
    for key in ("logits", "loc", "scale"):
        if key in set(batch.keys()):
            assert_same(batch[key], told[key])
    if kind is ExplorationType.DETERMINISTIC:
        assert_same(batch["action"], told["action"])
    else:
        assert batch["action"].float().std() > 0
        tolerance = 1e-3 if name == "squashed" else 1e-5
        assert_same(batch["action_log_prob"], policy.get_dist(batch).log_prob(batch["action"]), tolerance)


def test_what_else_a_distribution_is_given_keeps_the_module_in_charge() -> None:
    policy = continuous(peer.TanhNormal, {"low": -2.0, "high": 2.0, "tanh_loc": True})
    collector, batch = begun(policy, "Pendulum-v1")
    assert collector.policy_stages == ["MLPStage", "DistributionStage"]
    assert_same(batch["action_log_prob"], policy.get_dist(batch).log_prob(batch["action"]), 1e-3)


def test_truncated_normal() -> None:
    kwargs = {"low": -2.0, "high": torch.tensor([1.0])}
    policy = continuous(peer.TruncatedNormal, kwargs)
    collector, _ = begun(policy, "Pendulum-v1")
    policy[0].module[0][-1].bias.data.fill_(0.7)  # so that both ends count
    batches = torch.cat([collector.next().clone() for _ in range(12)])
    assert collector.policy_stages == ["MLPStage", "TruncatedStage"]
    dist = policy.get_dist(batches)
    assert_same(batches["action_log_prob"], dist.log_prob(batches["action"]))
    assert batches["action"].min() >= -2.0
    assert batches["action"].max() <= 1.0
    shares = dist.base_dist.cdf(batches["action"]).flatten().sort().values  # uniform, if they are drawn from it
    assert (shares - torch.linspace(0, 1, len(shares))).abs().max() < 1.95 / len(shares) ** 0.5
    policy[-1].distribution_kwargs["low"] = 0.5
    assert collector.next()["action"].min() >= 0.5
    collector, batch = begun(policy, "Pendulum-v1", exploration_type=ExplorationType.DETERMINISTIC)
    assert_same(batch["action"], replayed(policy, batch)["action"])


def test_delta() -> None:
    net = peer.SafeModule(mlp(3, 1), in_keys=["observation"], out_keys=["param"])
    policy = peer.ProbabilisticActor(net, in_keys=["param"], distribution_class=peer.Delta)
    collector, batch = begun(policy, "Pendulum-v1")
    assert collector.policy_stages == ["MLPStage", "DeltaStage"]
    assert_same(batch["action"], replayed(policy, batch)["action"])


def masked() -> Any:
    def logits_and_mask(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = observation[..., :3] * 2
        return logits, logits != logits.min(-1, keepdim=True).values

    return peer.ProbabilisticActor(
        TensorDictModule(logits_and_mask, in_keys=["observation"], out_keys=["logits", "mask"]),
        in_keys={"logits": "logits", "mask": "mask"},
        distribution_class=peer.MaskedCategorical,
        return_log_prob=True,
    )


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_masked_categorical(kind: ExplorationType) -> None:
    policy = masked()
    collector, batch = begun(policy, "Acrobot-v1", exploration_type=kind)
    assert collector.policy_stages == ["TorchStage", "CategoricalStage"]
    assert batch["mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
    wanted = torch.stack([policy.get_dist(step).log_prob(step["action"]) for step in batch.unbind(1)], 1)
    assert_same(batch["action_log_prob"], wanted)
    assert (batch["action"] == replayed(policy, batch)["action"]).all() == (kind is ExplorationType.DETERMINISTIC)


def test_actor_value_operator() -> None:
    common = TensorDictModule(mlp(4, 8), in_keys=["observation"], out_keys=["hidden"])
    head = peer.ProbabilisticActor(
        TensorDictModule(mlp(8, 2), in_keys=["hidden"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=D.Categorical,
        return_log_prob=True,
    )
    policy = peer.ActorValueOperator(common, head, peer.ValueOperator(mlp(8, 1), in_keys=["hidden"]))
    collector, batch = begun(policy)
    assert collector.policy_stages == ["MLPStage", "MLPStage", "CategoricalStage", "MLPStage"]
    told = replayed(policy, batch)
    for key in ("hidden", "logits", "state_value"):
        assert_same(batch[key], told[key])
    assert_same(batch["action_log_prob"], D.Categorical(logits=batch["logits"]).log_prob(batch["action"]))


@pytest.mark.parametrize("options", [{}, {"fast_policy": False}])
def test_results_that_are_kept_to_their_spec(options: Any) -> None:
    """Which is a hook of TorchRL's; log-probs are of what was sampled before."""
    space = specs.Bounded(-0.3, 0.4, (1,))
    actor = peer.Actor(mlp(3, 1), in_keys=["observation"], spec=space, safe=True)
    collector, batch = begun(actor, "Pendulum-v1", **options)
    assert_same(batch["action"], replayed(actor, batch)["action"])
    assert options or collector.policy_stages == ["MLPStage", "ProjectionStage"]
    net = nn.Sequential(mlp(3, 2), NormalParamExtractor())
    drawing = peer.ProbabilisticActor(
        peer.SafeModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=peer.IndependentNormal,
        return_log_prob=True,
        spec=space,
        safe=True,
    )
    collector, batch = begun(drawing, "Pendulum-v1", **options)
    assert options or collector.policy_stages == ["MLPStage", "NormalStage", "ProjectionStage"]
    assert (batch["action"].min(), batch["action"].max()) == (torch.tensor(-0.3), torch.tensor(0.4))
    wanted = drawing.get_dist(batch).log_prob(batch["action"])
    is_inside = ((batch["action"] > -0.3) & (batch["action"] < 0.4)).squeeze(-1)
    assert_same(batch["action_log_prob"][is_inside], wanted[is_inside])
    assert (batch["action_log_prob"] - wanted)[~is_inside].abs().min() > 1e-6
    seen = list[int]()
    handle = drawing[-1].register_forward_hook(lambda *args: seen.append(1))
    collector.next()
    assert len(seen) == STEPS
    handle.remove()


def test_a_value_of_observation_and_action() -> None:
    """TorchRL's MLP joins what it is given."""
    value = peer.ValueOperator(mlp(4, 1), in_keys=["observation", "action"])
    policy = peer.SafeSequential(continuous(peer.IndependentNormal), value)
    collector, batch = begun(policy, "Pendulum-v1")
    assert collector.policy_stages == ["MLPStage", "NormalStage", "TracedStage"]
    with torch.no_grad():
        assert_same(batch["state_action_value"], value.module(batch["observation"], batch["action"]))


class Pixels(nn.Module):
    """A convolution in front, of which nothing is known."""

    def __init__(self) -> None:
        super().__init__()
        self.net = peer.ConvNet(in_features=1, num_cells=[4], kernel_sizes=[2])

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation.unflatten(-1, (1, 2, 2)))


def test_a_convolution_takes_only_itself_off_the_fast_path() -> None:
    policy = peer.SafeSequential(
        peer.SafeModule(Pixels(), in_keys=["observation"], out_keys=["features"]),
        peer.SafeModule(mlp(4, 2), in_keys=["features"], out_keys=["logits"]),
        actor(D.Categorical)[-1],
    )
    collector, batch = begun(policy)
    assert collector.policy_stages == ["TorchStage", "MLPStage", "CategoricalStage"]
    assert_same(batch["logits"], replayed(policy, batch)["logits"])


def q_actor(encoded: bool) -> Any:
    space = specs.Categorical(2) if encoded else specs.OneHot(2)
    return peer.QValueActor(mlp(4, 2), in_keys=["observation"], spec=space)


@pytest.mark.parametrize("encoded", [True, False])
def test_q_value_actor(encoded: bool) -> None:
    policy = q_actor(encoded)
    collector, batch = begun(policy, encoded=encoded)
    assert collector.policy_stages == ["MLPStage", "ValueChoiceStage"]
    told = replayed(policy, batch)
    for key in ("action", "action_value", "chosen_action_value"):
        assert_same(batch[key], told[key])


@pytest.mark.parametrize("encoded", [True, False])
def test_epsilon_greedy(encoded: bool) -> None:
    space = specs.Categorical(2) if encoded else specs.OneHot(2)
    noise = peer.EGreedyModule(space, eps_init=1.0, eps_end=0.0, annealing_num_steps=4)
    policy = TensorDictSequential(q_actor(encoded), noise)
    collector, batch = begun(policy, encoded=encoded)
    assert collector.policy_stages == ["MLPStage", "ValueChoiceStage", "EpsilonGreedyStage"]

    def share_of_others(batch: Any) -> float:
        greedy = batch["action_value"].argmax(-1)
        action = batch["action"] if encoded else batch["action"].argmax(-1)
        assert encoded or (batch["action"].sum(-1) == 1).all()
        return float((action != greedy).float().mean())

    assert 0.3 < share_of_others(batch) < 0.7
    noise.step(2)
    batches = [collector.next() for _ in range(4)]
    assert 0.15 < np.mean([share_of_others(one) for one in batches]) < 0.35
    noise.step(2)
    assert share_of_others(collector.next()) == 0
    told = replayed(policy, batch)  # what is not explored is as it was
    assert_same(batch["chosen_action_value"], told["chosen_action_value"])


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize("epsilon", [0.05, 0.6, 1.0])
def test_random_actions_are_as_frequent_as_they_should_be(encoded: bool, epsilon: float) -> None:
    """Each action in its share of the steps, and none depends on the one before."""
    space, count, steps = specs.Categorical(5) if encoded else specs.OneHot(5), 40, 2000
    action = np.zeros((count,) if encoded else (count, 5), np.int64)
    stage = EpsilonGreedyStage(peer.EGreedyModule(space, eps_init=epsilon, eps_end=epsilon), [action])
    stage.begin(steps, torch.Generator().manual_seed(0))
    seen = np.empty((steps, count), np.int64)
    for t in range(steps):
        action[...] = 0
        if not encoded:
            action[:, 0] = 1
        stage.run(t)
        assert encoded or (action.sum(1) == 1).all()
        seen[t] = action if encoded else action.argmax(1)
    expected = np.full(5, epsilon / 5) + np.array([1 - epsilon, 0, 0, 0, 0])
    for share in (np.bincount(seen.ravel(), minlength=5), np.bincount(seen[1:][seen[:-1] == 1].ravel(), minlength=5)):
        spread = np.sqrt(expected * (1 - expected) * share.sum())
        assert (abs(share - expected * share.sum()) < 5 * spread).all()


@pytest.mark.parametrize("steps", [1, 20])
def test_new_bounds_of_noisy_actions_count(steps: int) -> None:
    policy = noisy_actor(3.0)
    with Collector(GymEnv("Pendulum-v1"), policy, frames_per_batch=steps) as collector:
        assert abs(torch.cat([collector.next()["action"] for _ in range(20)])).max() > 0.25
        policy[-1].spec = specs.Composite(action=specs.Bounded(-0.25, 0.25, (1,)))
        assert abs(torch.cat([collector.next()["action"] for _ in range(20)])).max() == 0.25


@pytest.mark.parametrize("part", ["greedy", "gaussian"])
def test_nobody_explores_when_it_is_not_asked_for(part: str) -> None:
    if part == "greedy":
        policy, env = TensorDictSequential(q_actor(True), peer.EGreedyModule(specs.Categorical(2))), "CartPole-v1"
    else:
        policy, env = noisy_actor(1.0), "Pendulum-v1"
    collector, batch = begun(policy, env, exploration_type=ExplorationType.DETERMINISTIC)
    assert collector.policy_stages[-1] == "IdleStage"
    assert_same(batch["action"], replayed(policy, batch)["action"])


def noisy_actor(sigma: float) -> Any:
    space = specs.Bounded(-0.5, 1.5, (1,))
    actor = peer.Actor(nn.Sequential(mlp(3, 1), nn.Tanh()), in_keys=["observation"], spec=space)
    return TensorDictSequential(actor, peer.AdditiveGaussianModule(space, sigma_init=sigma, sigma_end=0.0))


@pytest.mark.parametrize("sigma", [0.1, 3.0])
def test_additive_gaussian(sigma: float) -> None:
    policy = noisy_actor(sigma)
    collector, batch = begun(policy, "Pendulum-v1")
    assert collector.policy_stages == ["MLPStage", "GaussianNoiseStage"]
    assert batch["action"].min() >= -0.5
    assert batch["action"].max() <= 1.5
    with torch.no_grad():
        means = copy.deepcopy(policy)[0].module(batch["observation"])
    if sigma < 1:
        noise = (batch["action"] - means)[(batch["action"] > -0.5) & (batch["action"] < 1.5)]
        assert noise.std() == pytest.approx(sigma, rel=0.3)
        assert abs(float(noise.mean())) < 0.04
    else:
        assert (batch["action"] == -0.5).any()
        assert (batch["action"] == 1.5).any()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["LSTMModule", "GRUModule"])
def test_recurrent_modules(kind: str, layers: int) -> None:
    memory = getattr(peer, kind)(4, 8, num_layers=layers, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(8, 2), in_keys=["features"], out_keys=["logits"])
    policy = TensorDictSequential(memory, head, actor(D.Categorical)[-1])
    collector, first = begun(policy, encoded=True)
    assert collector.policy_stages == ["RecurrentStage", "MLPStage", "CategoricalStage"]
    for batch in (first, collector.next()):
        states = [key for key in memory.in_keys[1:] if key != "is_init"]
        for t in range(STEPS):
            step = batch.select("observation", "is_init", *states)[:, t].clone()
            with torch.no_grad():
                told = policy(step)
            for key in ("features", "logits", *(("next", state) for state in states)):
                assert_same(batch[key][:, t], told[key])
            if t:
                begun_anew = batch["is_init"][:, t, 0]
                for state in states:
                    assert not batch[state][:, t][begun_anew].any()
                    assert_same(batch[state][:, t][~begun_anew], batch["next", state][:, t - 1][~begun_anew])
        assert_same(batch["action_log_prob"], D.Categorical(logits=batch["logits"]).log_prob(batch["action"]))
    assert first["is_init"][:, 1:].any()


def test_torchrl_is_not_imported_for_others() -> None:
    import subprocess
    import sys

    program = (
        "import sys, torch; from torch import nn; from swath.collectors import Collector; "
        "from swath.envs import GymEnv; "
        "Collector(GymEnv('CartPole-v1'), nn.Linear(4, 2), frames_per_batch=4).next(); "
        "assert not any(name.startswith('torchrl') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def wide_lstm() -> Any:
    """Too much for arrays: it is called."""
    memory = peer.LSTMModule(input_size=4, hidden_size=1500, in_key="observation", out_key="seen")
    return TensorDictSequential(memory, TensorDictModule(nn.Linear(1500, 2), ["seen"], ["action"]))


def truncated_by_a_parameter() -> Any:
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    ends = {"low": torch.tensor([-2.0]), "high": nn.Parameter(torch.tensor([2.0]))}
    return peer.ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=peer.TruncatedNormal,
        distribution_kwargs=ends,
        return_log_prob=True,
    )


@pytest.mark.parametrize(("make", "name"), [(wide_lstm, "CartPole-v1"), (truncated_by_a_parameter, "Pendulum-v1")])
@pytest.mark.parametrize("steps", [1, 3])
def test_no_batch_has_gradients(make: Callable[[], Any], name: str, steps: int) -> None:
    """Nor one of those after the second, from which on a plan is only taken up again."""
    collector = Collector(GymEnv(name), make(), frames_per_batch=steps)
    for _ in range(4):
        assert not any(value.requires_grad for value in collector.next().values(True, True))
    collector.shutdown()
