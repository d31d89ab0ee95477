"""What keeps no tensor is called in inference mode, and nothing else is: what a policy keeps can be trained with."""

from collections.abc import Callable
from typing import Any

import policy_zoo as zoo
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch import distributions as D

from swath.modules.keeping import Reading
from swath.modules.watching import Made

ALL: list[Tensor] = []
LAYER = nn.Linear(zoo.CHOICES, zoo.CHOICES)
LATER: Any = None
Modes = Callable[..., set[bool]]


@pytest.fixture
def modes_of(monkeypatch: pytest.MonkeyPatch) -> Modes:
    """In which modes the layers of a policy are called, in one batch of a collector."""
    modes: set[bool] = set()
    forward = nn.Linear.forward

    def watched(self: nn.Linear, given: Tensor) -> Tensor:
        modes.add(torch.is_inference_mode_enabled())
        return forward(self, given)

    def collected(collector: Any) -> set[bool]:
        with monkeypatch.context() as patch:
            patch.setattr(nn.Linear, "forward", watched)
            modes.clear()
            batch = collector.next()
        assert not any(value.is_inference() for value in batch.values(True, True))
        return set(modes)

    return collected


class Net(nn.Module):
    """A network to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.kept, self.calls = zoo.mlp(zoo.CHOICES), list[Tensor](), 0

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation).sin()

    @property
    def found(self) -> list[Tensor]:
        return self.kept


class InList(Net):
    def forward(self, observation: Tensor) -> Tensor:
        self.kept.append(result := self.net(observation))
        return result


class FromTheTenthCallOn(Net):
    def forward(self, observation: Tensor) -> Tensor:
        self.calls += 1
        result = self.net(observation)
        if self.calls >= 10:
            self.kept.append(result)
        return result


class InAttribute(Net):
    def forward(self, observation: Tensor) -> Tensor:
        self.last = self.net(observation)
        return self.last

    @property
    def found(self) -> list[Tensor]:
        return [self.last]


class InAttributeByName(InAttribute):
    def forward(self, observation: Tensor) -> Tensor:
        setattr(self, "la" + "st", self.net(observation))
        return self.last


class InBuffer(InAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def forward(self, observation: Tensor) -> Tensor:
        self._buffers["last"] = self.net(observation)
        return self.last


class InParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.holder = nn.ParameterDict()

    def forward(self, observation: Tensor) -> Tensor:
        self.holder["last"] = self.net(observation)
        return self.holder["last"]

    @property
    def found(self) -> list[Tensor]:
        return [self.holder["last"]]


class Counted(InAttribute):
    """What looks like counting, but what is added is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = 0

    def forward(self, observation: Tensor) -> Tensor:
        result = self.net(observation)
        self.last += result
        return result


class InGlobal(Net):
    def forward(self, observation: Tensor) -> Tensor:
        remember(result := self.net(observation))
        return result

    @property
    def found(self) -> list[Tensor]:
        return ALL


def remember(value: Tensor) -> None:
    ALL.append(value)


class InDefault(InGlobal):
    def forward(self, observation: Tensor, kept: list[Tensor] = ALL) -> Tensor:
        kept.append(result := self.net(observation))
        return result


class InMemory(InGlobal):
    """An object that does it for the network, in what is a class of its own."""

    class Memory(list[Tensor]):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.memory = InMemory.Memory()

    def forward(self, observation: Tensor) -> Tensor:
        result = self.net(observation)
        self.memory += [result]
        return result

    @property
    def found(self) -> list[Tensor]:
        return self.memory


class WithGradients(Net):
    def forward(self, observation: Tensor) -> Tensor:
        with torch.enable_grad():
            x = self.net(observation).detach().requires_grad_()
            (slope,) = torch.autograd.grad(x.square().sum(), x)
        return slope


class Decorated(Net):
    @torch.enable_grad()
    def forward(self, observation: Tensor) -> Tensor:
        result = self.net(observation)
        assert result.requires_grad
        return result


class Converted(Net):
    """Of a module, the method makes other weights."""

    def forward(self, observation: Tensor) -> Tensor:
        return self.net.to(observation.dtype)(observation)


def closure() -> Net:
    net, kept = Net(), list[Tensor]()
    inner = net.net.forward

    def forward(observation: Tensor) -> Tensor:
        kept.append(result := inner(observation))
        return result

    net.forward, net.kept = forward, kept  # type: ignore[method-assign]
    return net


def hooked() -> Net:
    net = Net()
    kept = net.kept
    net.net[0].register_forward_hook(lambda module, args, result: kept.append(result))
    return net


class ConvertedLayers(Net):
    """The second layer has other parameters after a call in which that makes a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(zoo.CHOICES, zoo.CHOICES)])

    def forward(self, observation: Tensor) -> Tensor:
        result = self.net(observation)
        return self.layers[0].to(result.dtype)(result)


def of_kind(layer: nn.Module, like: Tensor) -> nn.Module:
    return layer.to(like.dtype)


class ConvertedElsewhere(ConvertedLayers):
    """The same by a function that is given a layer."""

    def forward(self, observation: Tensor) -> Tensor:
        result = self.net(observation)
        return of_kind(self.layers[0], result)(result)


def of_kind_by_name(layer: nn.Module, like: Tensor) -> nn.Module:
    layer = layer.to(like.dtype)
    return layer


class ConvertedAndNamed(ConvertedLayers):
    """The same, by a name that was the layer's before."""

    def forward(self, observation: Tensor) -> Tensor:
        result = self.net(observation)
        return of_kind_by_name(self.layers[0], result)(result)


class ConvertedInside(ConvertedLayers):
    """The same by a function whose argument has the name of what the other is given."""

    def forward(self, observation: Tensor) -> Tensor:
        result = self.net(observation.float())
        (layer,) = [(lambda observation: observation.float())(layer) for layer in self.layers]
        return layer(result)


class ConvertedByDefault(ConvertedLayers):
    """The same of a layer that is there by default."""

    def forward(self, observation: Tensor, layer: nn.Module = LAYER) -> Tensor:
        return layer.to(observation.dtype)(self.net(observation))


class ConvertedPerhaps(ConvertedLayers):
    """One of two things."""

    def forward(self, observation: Tensor) -> Tensor:
        result = self.net(observation)
        either = self.layers[0] if len(result) else observation.float()
        return either.to(result.dtype)(result)


class ConvertedByName(ConvertedLayers):
    """The same by the name of what it was given."""

    def forward(self, observation: Tensor) -> Tensor:
        result = self.net(observation.float())
        observation = self.layers[0]
        return observation.to(result.dtype)(result)


KEEPERS: list[Callable[[], Net]] = [
    *(InList, FromTheTenthCallOn, InAttribute, InAttributeByName, InBuffer, InParameters, Counted, InGlobal, InDefault),
    *(InMemory, WithGradients, Decorated, Converted, ConvertedLayers, ConvertedElsewhere, ConvertedByName),
    *(ConvertedAndNamed, ConvertedInside, ConvertedByDefault, ConvertedPerhaps, closure, hooked),
]


@pytest.mark.parametrize("way", [{}, {"fast_policy": False}, {"trust_policy": True}], ids=str)
@pytest.mark.parametrize("make", KEEPERS)
def test_what_may_keep_a_tensor_is_not_called_in_inference_mode(
    make: Callable[[], Net], way: dict[str, Any], modes_of: Modes
) -> None:
    ALL.clear()
    net = make()
    collector = zoo.begun(zoo.module(net), **way)
    assert modes_of(collector) == {False}
    modes_of(collector)
    kept = net.found
    if not isinstance(net, WithGradients | Decorated | Converted | ConvertedLayers):
        assert kept
    assert not any(one.is_inference() for one in (*kept, *net.parameters(), *net.buffers()))
    for last in kept[-1:]:
        (nn.Parameter(torch.ones(())) * last.detach()).square().sum().backward()


class Doubling(TensorDictModule):
    """Keeps it where tensordict calls it, not in a forward."""

    kept: list[Tensor] = []  # noqa: RUF012

    def _call_module(self, tensors: Any, **kwargs: Any) -> Any:
        self.kept.append(result := super()._call_module(tensors, **kwargs))
        return result


def test_methods_that_a_library_calls_are_read_too(modes_of: Modes) -> None:
    collector = zoo.begun(Doubling(zoo.mlp(zoo.CHOICES), ["observation"], ["action"]))
    assert modes_of(collector) == {False}
    assert not any(one.is_inference() for one in Doubling.kept)


# -- what keeps nothing ----------------------------------------------------------------------------------------------


class Counting(Net):
    def forward(self, observation: Tensor) -> Tensor:
        self.calls += 1
        return self.net(observation) * 2.0


class Sampling(Net):
    """In the manner of CleanRL."""

    @torch.no_grad()
    def forward(self, observation: Tensor) -> Tensor:
        chosen = D.Categorical(logits=self.scores(observation))
        action = chosen.sample()
        return nn.functional.one_hot(action, zoo.CHOICES) + 0 * chosen.log_prob(action).unsqueeze(-1)

    def scores(self, observation: Tensor) -> Tensor:
        parts = [self.net(part) for part in observation.unbind(0)]
        return (torch.stack(parts) * 2).float()


class Converting(Net):
    """Converts what it is given, as networks for images do."""

    def forward(self, observation: Tensor) -> Tensor:
        halved = observation.to(torch.float32) / 2
        observation = observation.float()
        return self.net(halved.float() + observation.to(dtype=torch.float32) / 2)


class Normalising(Net):
    """Writes to a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(zoo.SIZE))

    def forward(self, observation: Tensor) -> Tensor:
        self.mean.lerp_(observation.mean(0), 0.5)
        return self.net(observation - self.mean)


class OnTensorDict:
    """Takes a TensorDict, and is no module."""

    def __init__(self) -> None:
        self.net = zoo.mlp(zoo.CHOICES)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["scores"] = self.net(tensordict["observation"])
        return tensordict.set("action", doubled(tensordict["scores"]))


def doubled(value: Tensor) -> Tensor:
    return value * 2


def watched() -> Any:
    net = Net()
    net.register_forward_hook(lambda module, args, result: doubled(result))
    return zoo.module(net)


HARMLESS: list[Callable[[], Any]] = [
    *(lambda: zoo.module(Counting()), lambda: zoo.module(Sampling()), lambda: zoo.module(Normalising())),
    lambda: zoo.module(Converting()),
    *(OnTensorDict, watched, lambda: zoo.discrete(lambda logits: D.Categorical(logits=logits * 2))),
]


@pytest.mark.parametrize("make", HARMLESS)
def test_what_keeps_nothing_is_called_in_inference_mode(make: Callable[[], Any], modes_of: Modes) -> None:
    policy = make()
    collector = zoo.begun(policy, fast_policy=False)
    assert modes_of(collector) == {True}
    assert modes_of(collector) == {True}
    held = [*policy.parameters(), *policy.buffers()] if isinstance(policy, nn.Module) else []
    assert not any(one.is_inference() for one in held)


def test_buffers_are_written_to_in_inference_mode_as_elsewhere() -> None:
    nets = Normalising(), Normalising()
    nets[1].load_state_dict(nets[0].state_dict())
    nets[1].kept_out = {}  # type: ignore[assignment]
    nets[1].register_forward_pre_hook(lambda module, args: module.kept_out.update(last=None))
    read, called = (zoo.begun(zoo.module(net)).next() for net in nets)
    assert Reading(nets[0]).keeps_nothing
    assert not Reading(nets[1]).keeps_nothing
    zoo.assert_same(read["action"], called["action"])
    zoo.assert_same(nets[0].mean, nets[1].mean)


# -- what changes ----------------------------------------------------------------------------------------------------


class Optional(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, observation: Tensor) -> Tensor:
        self.calls += 1
        result = self.net(observation)
        for kept in (self.kept, LATER):
            if kept is not None:
                kept.append(result)
        return result


def keep_in_attribute(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net.kept = []


def keep_in_global(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LATER", [])


def hook_on(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net.net[0].register_forward_hook(lambda module, args, result: ALL.append(result))


def count_tensors(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net.calls = torch.zeros(())


def exchange_the_forward(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optional, "forward", keeping_all)


def exchange_the_code(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As reloading a file does."""
    monkeypatch.setattr(Optional.forward, "__code__", keeping_all.__code__)


def keeping_all(self: Any, observation: Tensor) -> Tensor:
    ALL.append(result := self.net(observation))
    return result


@pytest.mark.parametrize("is_module", [True, False], ids=["a module", "a function"])
@pytest.mark.parametrize(
    "change",
    [keep_in_attribute, keep_in_global, hook_on, count_tensors, exchange_the_forward, exchange_the_code],
)
def test_what_begins_to_keep_tensors_is_noticed(
    change: Any, is_module: bool, modes_of: Modes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ALL.clear()
    net = Optional()
    collector = zoo.begun(zoo.module(net) if is_module else lambda td: td.set("action", net(td["observation"])))
    assert modes_of(collector) == {True}
    change(net, monkeypatch)
    assert modes_of(collector) == {False}
    assert not any(one.is_inference() for one in (*ALL, *(net.kept or ()), *(LATER or ())))


def test_counting_makes_no_new_plan() -> None:
    net = Counting()
    collector = zoo.begun(zoo.module(net))
    collector.next()
    reading = Reading(net)
    assert reading.keeps_nothing
    collector.next()
    assert not reading.has_changed
    net.calls = torch.zeros(())  # type: ignore[assignment]
    assert reading.has_changed


class Annealed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.5

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation) * self.eps + observation.sum(-1, keepdim=True).sin()


def test_what_is_annealed_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, read = Annealed(), list[Any]()
    collector = zoo.begun(zoo.module(net), fast_policy=False)
    collector.next()
    monkeypatch.setattr(Reading, "_keeps_none", lambda self, function: read.append(function) or False)
    for _ in range(3):
        net.eps *= 0.5
        collector.next()
    assert not read


def test_a_variable_without_a_value_is_the_policys_own_error() -> None:
    net, bias = Net(), torch.ones(())

    def policy(observation: Tensor) -> Tensor:
        return net.net(observation) + bias

    def forget() -> None:
        nonlocal bias
        del bias

    collector = zoo.begun(policy)
    collector.next()
    forget()
    with pytest.raises(NameError, match="bias"):
        collector.next()


def test_the_first_call_is_watched() -> None:
    with Made() as made:
        kept = [torch.ones(2) * 3]
    assert not made.are_gone
    kept.clear()
    assert made.are_gone


@zoo.each_way
def test_inference_mode_changes_no_number(way: dict[str, Any]) -> None:
    policy = zoo.discrete(net=Counting())
    zoo.assert_agrees(policy, zoo.collect(policy, **way))


@pytest.mark.parametrize("way", [{"fast_policy": False}, {"trust_policy": True}], ids=str)
@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.ReLU(), nn.Identity()], ids=repr)
def test_a_network_that_gets_no_copy_changes_no_observation(first: nn.Module, way: dict[str, Any]) -> None:
    collector = zoo.begun(zoo.module(nn.Sequential(first, zoo.mlp(zoo.CHOICES))), **way)
    wanted = zoo.begun(zoo.module(nn.Sequential(nn.Identity(), zoo.mlp(zoo.CHOICES)))).next()
    batch = collector.next()
    zoo.assert_same(batch["observation"], wanted["observation"])
    assert (batch["observation"] < 0).any()


@pytest.mark.parametrize("trusted", [False, True])
def test_entries_that_are_the_observation_itself_are_kept_as_they_were(trusted: bool) -> None:
    alias = zoo.module(nn.Identity(), "_same")
    policy = TensorDictSequential(alias, zoo.module(zoo.mlp(zoo.CHOICES), source="_same"))
    batch = zoo.begun(policy, trust_policy=trusted).next()
    wanted = policy[1].module(batch["observation"])
    zoo.assert_same(batch["action"], wanted.detach())


def test_a_layer_that_is_given_to_a_forward_is_not_taken_for_data() -> None:
    class Head(nn.Module):
        def forward(self, observation: Tensor, layer: nn.Module) -> Tensor:
            return layer.to(observation.dtype)(observation)

    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.layer = Head(), nn.Linear(zoo.SIZE, zoo.CHOICES)

        def forward(self, observation: Tensor) -> Tensor:
            return self.head(observation, self.layer).argmax(-1)

    assert not Reading(Giving()).keeps_nothing
    assert Reading(nn.Sequential(Converting(), nn.Tanh())).keeps_nothing, "torch gives it a tensor"
