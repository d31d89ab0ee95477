"""Hooks, forwards that only one module has, and autocast: the modules are then called as they are, and only then."""

from collections.abc import Callable
from typing import Any

import policy_zoo as zoo
import pytest
import torch
from torch import Tensor, nn

from swath.collectors import Collector
from swath.errors import PolicyError

pytestmark = pytest.mark.usefixtures("beside_any_env")


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
    # A hook inside a part sees no more than the part: it alone has to be called. One behind the whole changes no part.
    expected = zoo.SLOW
    if name in ("the network", "a layer"):
        expected = ("TorchStage", "CategoricalStage")
    elif (name, kind) == ("the policy", "register_forward_hook"):
        expected = (*zoo.FAST, "TensorDictStage")
    assert zoo.stages_of(collector) == expected
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


def test_a_hook_on_the_whole_sees_what_it_would_see_if_the_policy_were_called() -> None:
    policy, seen = zoo.discrete(), []
    collector = zoo.begun(policy)
    policy.register_forward_hook(lambda module, args, answer: seen.append((module, args, answer)))
    batch = collector.next()
    assert "TensorDictStage" in zoo.stages_of(collector)
    assert len(seen) == 6
    called = policy(batch[:, 0].select("observation", "done", "terminated", "truncated"))
    seen.pop()
    for t, (module, args, answer) in enumerate(seen):  # what it has kept stays as it was
        assert module is policy
        assert len(args) == 1
        assert set(answer.keys()) == set(called.keys()) == set(args[0].keys())
        assert answer.batch_size == called.batch_size
        for key, value in answer.items():
            assert value.equal(batch[key][:, t]), (t, key)


def test_what_a_hook_on_the_whole_changes_counts() -> None:
    policy = zoo.discrete()
    collector = zoo.begun(policy)
    in_place = policy.register_forward_hook(lambda module, args, answer: answer.fill_("action", 1))
    batch = collector.next()
    assert batch["action"].eq(1).all()
    in_place.remove()

    def another(module: nn.Module, args: Any, kwargs: dict[str, Any], answer: Any) -> Any:
        assert kwargs == {}
        return answer.clone().set("action", torch.zeros_like(answer["action"]))

    def seen_behind(module: nn.Module, args: Any, answer: Any) -> None:
        assert answer["action"].eq(0).all()
        answer.set("action_log_prob", torch.full_like(answer["action_log_prob"], 3.0))

    policy.register_forward_hook(another, with_kwargs=True)
    policy.register_forward_hook(seen_behind)
    batch = collector.next()
    assert zoo.stages_of(collector) == (*zoo.FAST, "TensorDictStage")
    assert batch["action"].eq(0).all()
    assert batch["action_log_prob"].eq(3.0).all()


def test_a_hook_on_the_whole_that_returns_something_else_is_told_of() -> None:
    policy = zoo.discrete()
    collector = zoo.begun(policy)
    policy.register_forward_hook(lambda module, args, answer: answer["action"])
    with pytest.raises(PolicyError, match="returned Tensor"):
        collector.next()


def test_a_hook_that_is_called_whatever_happens_is_left_to_torch() -> None:
    policy, counter = zoo.discrete(), Counter()
    collector = zoo.begun(policy)
    policy.register_forward_hook(counter, always_call=True)
    collector.next()
    assert zoo.stages_of(collector) == zoo.SLOW
    assert counter.calls == 6


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
