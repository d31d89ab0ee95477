"""Hooks, forwards that only one module has, and autocast: the modules are then called as they are, and only then."""

from collections.abc import Callable
from typing import Any

import policy_zoo as zoo
import pytest
import torch
from torch import Tensor, nn

from swath.collectors import Collector


class Counter:
    """A hook that counts its calls, and lets be what it sees, or puts something in its place."""

    def __init__(self, change: Callable[..., Any] | None = None) -> None:
        self.calls, self.change = 0, change

    def __call__(self, *seen: Any) -> Any:
        self.calls += 1
        return None if self.change is None else self.change(*seen)


def double_the_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def halve_the_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] / 2,)


HOOKED: dict[str, Callable[[Any], nn.Module]] = {
    "the policy": lambda policy: policy,
    "a part": lambda policy: policy[0],
    "the network": lambda policy: policy[0].module,
    "a layer": lambda policy: policy[0].module[0],
    "the sampler": lambda policy: policy[1],
}


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_are_called_once_per_step(name: str, kind: str) -> None:
    policy = zoo.discrete()
    collector = zoo.begun(policy)
    counter = Counter()
    handle = getattr(HOOKED[name](policy), kind)(counter)
    batch = collector.next()
    assert counter.calls == 6
    # A hook inside a part sees no more than the part: it alone has to be called.
    inside = name in ("the network", "a layer")
    assert zoo.stages_of(collector) == (("TorchStage", "CategoricalStage") if inside else zoo.SLOW)
    handle.remove()
    zoo.assert_agrees(policy, batch)
    zoo.assert_agrees(policy, collector.next())
    assert counter.calls == 6
    assert zoo.stages_of(collector) == zoo.FAST


def test_hooks_may_change_what_passes() -> None:
    policy = zoo.discrete()
    collector = zoo.begun(policy)
    zoo.layers_of(policy).register_forward_hook(double_the_output)
    zoo.assert_agrees(policy, collector.next())
    zoo.layers_of(policy)[0].register_forward_pre_hook(halve_the_input)
    zoo.assert_agrees(policy, collector.next())


def test_hooks_that_are_there_from_the_beginning_are_called_in_the_probe_too() -> None:
    policy, counter = zoo.discrete(), Counter()
    handles = [where(policy).register_forward_hook(counter) for where in HOOKED.values()]
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    assert counter.calls == len(handles)
    batch = collector.next()
    assert counter.calls == 7 * len(handles)
    zoo.assert_agrees(policy, batch)
    for handle in handles:
        handle.remove()
    zoo.assert_agrees(policy, collector.next())
    assert zoo.stages_of(collector) == zoo.FAST


def test_a_hook_on_the_whole_may_add_an_entry() -> None:
    policy = zoo.discrete()
    policy.register_forward_hook(lambda module, args, out: out.set("value", out["logits"].sum(-1, keepdim=True)))
    batch = zoo.collect(policy)
    zoo.assert_same(batch["value"], batch["logits"].sum(-1, keepdim=True))


def test_global_hooks_are_called() -> None:
    collector = Collector(zoo.WaveEnv(), zoo.discrete(), frames_per_batch=18)
    counter = Counter()
    with nn.modules.module.register_module_forward_hook(counter):
        collector.next()
    assert zoo.stages_of(collector) == zoo.SLOW
    assert counter.calls > 0
    collector.next()
    assert zoo.stages_of(collector) == zoo.FAST


@pytest.mark.parametrize("where", [zoo.layers_of, lambda policy: zoo.layers_of(policy)[1]], ids=["network", "layer"])
def test_a_forward_that_only_one_module_has(where: Callable[[Any], nn.Module]) -> None:
    policy = zoo.discrete()
    collector = zoo.begun(policy)
    changed, forward = where(policy), where(policy).forward
    changed.forward = lambda x: forward(x) + 1  # type: ignore[method-assign]
    zoo.assert_agrees(policy, collector.next())
    del changed.forward
    zoo.assert_agrees(policy, collector.next())


@pytest.mark.parametrize("is_made_inside", [True, False])
@pytest.mark.parametrize(
    "make", [zoo.discrete, lambda: zoo.discrete(net=nn.Sequential(zoo.mlp(zoo.CHOICES), nn.Softsign()))]
)
def test_autocast(make: Callable[[], Any], is_made_inside: bool) -> None:
    policy = make()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_made_inside):
        collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    with torch.autocast("cpu", torch.bfloat16):
        batch = collector.next()
        wanted = zoo.replay(policy, batch)["logits"]
    assert wanted.dtype is torch.bfloat16
    assert batch["logits"].dtype is torch.float32  # numpy, which batches are made with, has no bfloat16
    assert torch.equal(batch["logits"], wanted.float())
    zoo.assert_agrees(policy, collector.next())
