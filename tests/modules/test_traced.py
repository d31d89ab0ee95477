"""Networks with a forward of their own: quick where one call shows what all of them do, called where it does not."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import policy_zoo as zoo
import pytest
import torch
from gymnasium import spaces as gs
from tensordict.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F
from torch.nn.functional import relu

from swath.collectors import Collector
from swath.modules import as_policy

LOG_STD_MIN, LOG_STD_MAX = -5, 2
weight_of_all = 3.0


class Net(nn.Module):
    """What all of them have."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(zoo.SIZE, 8), nn.Linear(8, 8), nn.Linear(8, zoo.CHOICES)
        self.norm, self.act, self.drop = nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Dropout(0.5).eval()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(2))
        self.free = nn.Parameter(torch.rand(8))
        self.register_buffer("mean", torch.rand(zoo.SIZE))
        self.gain, self.is_deep, self.calls = 0.5, True, 0
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.relu(self.one(x)))


class Residual(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(relu(self.one(x)))
        return self.out(x + self.act(self.two(x)) * 0.5)


class Looping(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.one(x), 0.2)
        for i, block in enumerate(self.blocks):
            x = x - (i + 1) * block(x) if self.is_deep else x
        return self.out(1 - self.drop(x))


class Normalising(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / (self.mean.expand_as(x) + 1.0)
        return self.out(F.gelu(self.one(x)).clamp(-0.1, 0.3) + self.free)


class ByMethods(Net):
    def hidden(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return scale * doubled(self.one(x)).tanh()

    @property
    def half(self) -> float:
        return self.gain / 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.half * self.out(self.hidden(x))


def doubled(x: Tensor) -> Tensor:
    return torch.cat([x[..., :3], x[..., 3:]], dim=-1) * 2


class OfParameters(Net):
    """Computes with its parameters alone, as heads do whose scale does not depend on the observation."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x = x * self.free.exp().expand_as(x) + torch.ones_like(x) * F.softplus(self.free)
        return self.out(torch.where(x > 0, x, x.masked_fill(x < self.gain, -1.0)))


class Reshaping(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).unsqueeze(-1)
        return self.out(torch.zeros_like(x).squeeze(-1) + x[..., 0].contiguous())


class Nested(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, x: Tensor) -> Tensor:
        return -self.inner(x)


QUICK: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Net, Residual, Looping, Normalising, ByMethods, OfParameters, Reshaping, Nested)
}


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(self.two(torch.relu(self.one(x)))) * self.calls


class Keeping(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.out(torch.relu(self.one(x)))


class Drawing(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.one(x))) * (1 + random.random())


class DrawingMore(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.one(x))) + torch.rand(())


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.one(x))) if x[0, 0] > 0 else self.out(self.one(x))


class Shaped(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.one(x))) * len(x)


class OverLanes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.one(x))) - x.mean(0)[:3]


class Turned(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.one(x).transpose(0, 1).transpose(0, 1)) + x.unsqueeze(0)[0, :1, :3]


class Counted(Net):
    """Has a number in a tensor, which may be changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.one(x)) + x[..., : self.count]


class ByValue(Net):
    def forward(self, x: Tensor) -> Tensor:
        for weight in self.free:
            x = x * weight
        return self.out(self.one(x))


class OnItsInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.one(self.act(x)))


class Reaching(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.one(x)) * weight_of_all


class Watching(Net):
    def __init__(self) -> None:
        super().__init__()
        self.limits = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.one(x)) * self.limits[0]


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.one(x)))


class Differently(nn.Linear):
    """Looks like a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


def in_a_closure() -> nn.Module:
    factor = [2.0]

    class Closure(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.one(x)) * factor[0]

    return Closure()


CALLED: dict[str, Callable[[], nn.Module]] = {
    **{
        kind.__name__: kind
        for kind in (
            Counting,
            Keeping,
            Drawing,
            DrawingMore,
            Branching,
            Shaped,
            OverLanes,
            Turned,
            OnItsInput,
            Reaching,
        )
    },
    **{kind.__name__: kind for kind in (Watching, Dropping, Turned, Counted, ByValue)},
    "in a closure": in_a_closure,
    "too large": lambda: nn.Sequential(nn.Linear(zoo.SIZE, 1000), Differently(1000, 1000), nn.Linear(1000, 3)),
}


@pytest.mark.parametrize("lanes", [(), (1,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", QUICK)
def test_a_network_that_is_settled_is_run_on_arrays(name: str, lanes: tuple[int, ...]) -> None:
    env = zoo.WaveEnv(lengths=[4, 2, 3, 5, 1, 6][: max(1, torch.Size(lanes).numel())], batch_size=lanes)
    policy = as_policy(QUICK[name](), env)
    collector = zoo.begun(policy, env)
    assert zoo.stages_of(collector) == ("TracedStage",)
    zoo.assert_agrees(policy, collector.next())
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(-1.5)
        for one in policy.modules():
            if isinstance(one, Net):
                one.mean = one.mean * 2  # another tensor
    zoo.assert_agrees(policy, collector.next())


@pytest.mark.parametrize("name", CALLED)
def test_a_network_that_may_do_something_else_is_called(name: str) -> None:
    collector = zoo.begun(zoo.module(CALLED[name]()))
    assert zoo.stages_of(collector) == ("TorchStage",)
    calls = getattr(collector.policy.module, "calls", 0)
    collector.next()
    assert getattr(collector.policy.module, "calls", 0) - calls == (6 if name == "Counting" else 0)


class Converting(Net):
    """Takes numbers of any type, as simulators give them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.out(torch.tanh(self.one(x / 3.0)))


class ConvertingTo(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.one(x.to(torch.float32))))


class ConvertingByName(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.one(x.to(dtype=torch.float32))))


class ConvertingLate(Net):
    """Computes as whatever it is given at first."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.one((x + x / 3).float())))


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64, np.uint8, np.float32])
@pytest.mark.parametrize("kind", [Converting, ConvertingTo, ConvertingByName, ConvertingLate])
def test_observations_of_other_types_are_converted(kind: type[Net], dtype: Any, lanes: int, steps: int) -> None:
    space = gs.Box(0, 50, (zoo.SIZE,), dtype)
    env, net = zoo.WaveEnv(observation_space=space, lengths=[5, 3, 7][:lanes]), kind()
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    with Collector(env, policy, frames_per_batch=lanes * steps) as collector:
        for _ in range(4):
            batch = collector.next()
            assert batch["observation"].dtype == torch.as_tensor(np.zeros(1, dtype)).dtype
            with torch.no_grad():
                torch.testing.assert_close(batch["action"], net(batch["observation"]))
                net.one.weight.add_(0.5)
                net.out.bias.add_(0.5)
        is_known = kind is not ConvertingLate or dtype is np.float32
        assert collector.policy_stages == ["TracedStage" if is_known else "TorchStage"]


def test_a_layer_that_does_more_is_no_layer() -> None:
    policy = zoo.module(nn.Sequential(nn.Linear(zoo.SIZE, 8), Differently(8, zoo.CHOICES)))
    collector = zoo.begun(policy)
    assert zoo.stages_of(collector) == ("TracedStage",)
    zoo.assert_agrees(policy, collector.next())


def test_a_setting_that_is_changed_counts_from_the_next_batch_on() -> None:
    for net, name, value in ((ByMethods(), "gain", 3.0), (Looping(), "is_deep", False)):
        policy = zoo.module(net)
        collector = zoo.begun(policy)
        setattr(net, name, value)
        zoo.assert_agrees(policy, collector.next())
        assert zoo.stages_of(collector) == ("TracedStage",)


class Constant(Net):
    FACTOR = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.one(x))) * self.FACTOR


class Other(Constant):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.one(x)))


def tripled(self: Constant, x: Tensor) -> Tensor:
    return self.out(torch.tanh(self.one(x))) * 3.0


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize(
    "change",
    [
        lambda net, patch: setattr(net, "FACTOR", 5.0),
        lambda net, patch: patch.setattr(Constant, "FACTOR", 7.0),
        lambda net, patch: setattr(net, "__class__", Other),
        lambda net, patch: patch.setattr(Constant, "forward", tripled),
    ],
    ids=["its own", "of its class", "another class", "another forward"],
)
def test_what_a_class_gives_its_networks_may_change(change: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Constant()
    policy = zoo.module(net)
    collector = zoo.begun(policy, frames_per_batch=3 * steps)
    for _ in range(3):
        zoo.assert_agrees(policy, collector.next())
    assert zoo.stages_of(collector) == ("TracedStage",)
    change(net, monkeypatch)
    for _ in range(3):
        zoo.assert_agrees(policy, collector.next())
    assert zoo.stages_of(collector) == ("TracedStage",)


def test_hooks_inside_are_called() -> None:
    net, calls = Residual(), list[int]()
    net.two.register_forward_hook(lambda *args: calls.append(1))
    collector = zoo.begun(zoo.module(net))
    assert zoo.stages_of(collector) == ("TorchStage",)
    calls.clear()
    collector.next()
    assert len(calls) == 6


class Gaussian(nn.Module):
    """A head as of SAC: two results, one of which is kept between bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(zoo.SIZE, 8), nn.Linear(8, 2 * zoo.AXES)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc, log_std = self.head(F.relu(self.body(observation))).chunk(2, dim=-1)
        log_std = torch.tanh(log_std)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)
        return loc, log_std.exp()


class Critic(nn.Module):
    """A value without a dimension of its own, from two entries."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.mlp(1, inputs=zoo.SIZE + zoo.AXES)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.net(torch.cat([observation, action], 1)).squeeze(-1)


class Extracting(nn.Module):
    """Has the extractor inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.extract = zoo.mlp(2 * zoo.AXES), NormalParamExtractor()

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.extract(torch.tanh(self.net(observation)))


@pytest.mark.parametrize(
    "net", [Extracting, lambda: nn.Sequential(zoo.mlp(zoo.AXES), AddStateIndependentNormalScale(zoo.AXES))]
)
def test_modules_of_tensordict_inside(net: Any) -> None:
    policy = zoo.continuous(D.Normal, net())
    collector = zoo.begun(policy, zoo.WaveEnv(zoo.CONTINUOUS))
    assert zoo.stages_of(collector) == ("TracedStage", "NormalStage")
    extractor = list(policy[0].module.children())[1]
    extractor.scale_lb = 1.5
    zoo.assert_agrees(policy, collector.next())
    assert collector.next()["scale"].min() >= 1.5


class Masking(nn.Module):
    """Says which actions may be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.mlp(zoo.CHOICES)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.net(observation)
        allowed = observation[..., :3] < 0.9
        return torch.where(allowed, logits, -1e9), ~allowed


def test_flags_can_be_computed_too() -> None:
    policy = TensorDictModule(Masking(), in_keys=["observation"], out_keys=["action", "forbidden"])
    collector = zoo.begun(policy)
    assert zoo.stages_of(collector) == ("TracedStage",)
    batch = collector.next()
    zoo.assert_agrees(policy, batch)
    assert batch["forbidden"].dtype is torch.bool
    assert batch["forbidden"].any()


def test_several_results_and_several_inputs() -> None:
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(Gaussian(), ["observation"], ["loc", "scale"]), zoo.sampler(D.Normal, ["loc", "scale"])
    )
    critic = TensorDictModule(Critic(), in_keys=["observation", "action"], out_keys=["value"])
    policy = TensorDictSequential(actor, critic)
    collector = zoo.begun(policy, zoo.WaveEnv(zoo.CONTINUOUS))
    assert zoo.stages_of(collector) == ("TracedStage", "NormalStage", "TracedStage")
    batch = collector.next()
    assert batch["value"].shape == (3, 6)
    with torch.no_grad():
        flat = batch.reshape(-1)
        zoo.assert_same(flat["value"], critic.module(flat["observation"], flat["action"]))
    zoo.assert_agrees(actor, batch.exclude("value"))


def test_no_warnings_of_what_overflows(recwarn: pytest.WarningsRecorder) -> None:
    net = Gaussian()
    nn.init.constant_(net.head.bias, np.inf)
    zoo.collect(TensorDictModule(net, ["observation"], ["action", "x"]), zoo.WaveEnv(zoo.CONTINUOUS))
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]
