"""`update_policy_weights_`: where weights may come from, where they go, and what is refused."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from swath.collectors import Collector
from swath.testing import CountingEnv

ONES = torch.tensor([1.0, 1.0])


def net(value: float = 0.0) -> TensorDictModule:
    """A policy whose every action is `value`."""
    linear = nn.Linear(3, 2)
    set_to(linear, value)
    return TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])


def set_to(linear: Any, value: float) -> None:
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.fill_(value)


class EnvWithAModel(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.models = [nn.Linear(2, 2)]


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Collector] = []

    def build(policy: Any, **options: Any) -> Collector:
        made.append(Collector(options.pop("env", None) or CountingEnv(), policy, frames_per_batch=10, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


def acts_with(collector: Collector, value: float) -> bool:
    batch = collector.next()
    assert batch is not None
    return bool((batch["action"] == value).all())


# -- call forms -----------------------------------------------------------------------------------------------------

SOURCES = {
    "module": net,
    "state dict": lambda value: net(value).state_dict(),
    "plain dict": lambda value: {"module.weight": torch.zeros(2, 3), "module.bias": value * ONES},
    "dict by tuples": lambda value: {("module", "weight"): torch.zeros(2, 3), ("module", "bias"): value * ONES},
    "nested dict": lambda value: {"module": {"weight": torch.zeros(2, 3), "bias": value * ONES}},
    "TensorDict": lambda value: TensorDict.from_module(net(value)),
    "TensorDict data": lambda value: TensorDict.from_module(net(value)).data,
    "flat TensorDict": lambda value: TensorDict(net(value).state_dict(), []),
    "by worker": lambda value: {0: net(value).state_dict(), 1: net(-1.0).state_dict()},
    "modules by worker": lambda value: {0: net(value)},
}
FORMS = {
    "positional": lambda collector, source: collector.update_policy_weights_(source),
    "weights": lambda collector, source: collector.update_policy_weights_(weights=source),
    "policy": lambda collector, source: collector.update_policy_weights_(policy=source),
    "weights_dict": lambda collector, source: collector.update_policy_weights_(weights_dict={"policy": source}),
    "model_id": lambda collector, source: collector.update_policy_weights_(source, model_id="policy"),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("form", FORMS)
def test_every_source_in_every_form(make: Any, form: str, source: str) -> None:
    own = net(1.0)
    collector = make(own)
    assert acts_with(collector, 1.0)
    FORMS[form](collector, SOURCES[source](5.0))
    assert acts_with(collector, 5.0)
    assert acts_with(collector, 5.0)
    assert (own.module.bias == 1.0).all(), "weights ended up in the policy that the user is training"
    assert collector.stats()["policy_version"] == 1


def test_without_arguments_weights_come_from_the_given_policy(make: Any) -> None:
    own = net(1.0)
    collector = make(own)
    set_to(own, 2.0)
    collector.update_policy_weights_()
    assert acts_with(collector, 2.0)
    assert collector.policy is own


@pytest.mark.parametrize("form", ["positional", "policy"])
def test_the_given_policy_itself_is_no_other_source(make: Any, form: str) -> None:
    own = net(1.0)
    collector = make(own)
    set_to(own, 2.0)
    FORMS[form](collector, own)
    assert acts_with(collector, 2.0)
    assert collector.policy is own


def test_without_arguments_after_explicit_weights(make: Any) -> None:
    own = net(1.0)
    collector = make(own)
    collector.update_policy_weights_(net(5.0))
    set_to(own, 2.0)
    assert acts_with(collector, 5.0), "training must not change what acts until it is told"
    collector.update_policy_weights_()
    assert acts_with(collector, 2.0)
    set_to(own, 3.0)
    assert acts_with(collector, 2.0)
    collector.update_policy_weights_(own)
    assert acts_with(collector, 3.0)


def test_the_source_may_change_afterwards(make: Any) -> None:
    collector = make(net(1.0))
    source = net(5.0)
    weights = source.state_dict()
    collector.update_policy_weights_(weights)
    set_to(source, 6.0)
    assert acts_with(collector, 5.0)


def test_training_goes_on_after_explicit_weights(make: Any) -> None:
    """The user's parameters are still leaves of their own, which an optimiser can step."""
    own = net(1.0)
    collector = make(own)
    optimiser = torch.optim.SGD(own.parameters(), lr=1.0)
    collector.update_policy_weights_(net(5.0))
    batch = collector.next()
    own(batch)["action"].sum().backward()
    optimiser.step()
    assert (own.module.bias == -9.0).all()
    assert acts_with(collector, 5.0)


def test_partial_weights_leave_the_rest(make: Any) -> None:
    collector = make(net(1.0))
    collector.update_policy_weights_({"module.bias": 4 * ONES})
    assert acts_with(collector, 4.0)
    weight = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    collector.update_policy_weights_({"module.weight": weight})
    batch = collector.next()
    assert torch.equal(batch["action"], batch["observation"][:, 2:].expand(-1, 2) + 4)


def test_other_dtypes_are_converted(make: Any) -> None:
    collector = make(net(1.0))
    collector.update_policy_weights_({"module.bias": torch.tensor([3, 3])})
    assert acts_with(collector, 3.0)
    assert collector.policy.module.bias.dtype == torch.float32


def test_buffers_go_along(make: Any) -> None:
    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self, scale: float) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(scale))

        def forward(self, observation: Tensor) -> Tensor:
            return torch.ones_like(observation[..., :2]) * self.scale

    collector = make(Scaled(1.0))
    collector.update_policy_weights_(Scaled(3.0))
    assert acts_with(collector, 3.0)


def test_what_a_module_saves_beside_its_weights_goes_along(make: Any) -> None:
    class Remembering(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, observation: Tensor) -> Tensor:
            return torch.full_like(observation[..., :2], self.value)

        def get_extra_state(self) -> dict[str, float]:
            return {"value": self.value}

        def set_extra_state(self, state: dict[str, float]) -> None:
            self.value = state["value"]

    own = Remembering(1.0)
    collector = make(own)
    collector.update_policy_weights_(Remembering(7.0))
    assert acts_with(collector, 7.0)
    assert own.value == 1.0


@pytest.mark.parametrize("wrapped", [True, False], ids=["names of the wrapper", "names of the module"])
def test_a_policy_given_as_a_plain_module_keeps_its_names(make: Any, wrapped: bool) -> None:
    own = net(1.0).module
    collector = make(own)
    collector.update_policy_weights_((net(5.0) if wrapped else net(5.0).module).state_dict())
    assert acts_with(collector, 5.0)
    assert (own.bias == 1.0).all()
    collector.update_policy_weights_(own)
    assert acts_with(collector, 1.0)


def test_a_plain_module_itself_is_no_other_source(make: Any) -> None:
    own = net(1.0).module
    collector = make(own)
    collector.update_policy_weights_(own)
    assert collector.policy.module is own


def test_a_compiled_policy_takes_weights_by_the_names_of_the_module(make: Any) -> None:
    own = net(1.0)
    collector = make(torch.compile(own, backend="eager"))
    assert acts_with(collector, 1.0)
    collector.update_policy_weights_(net(5.0))
    assert acts_with(collector, 5.0)
    collector.update_policy_weights_(torch.compile(net(6.0), backend="eager"))
    assert acts_with(collector, 6.0)
    assert (own.module.bias == 1.0).all()


def test_a_sequence_of_modules(make: Any) -> None:
    def sequence(value: float) -> TensorDictSequential:
        first = TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["hidden"])
        second = TensorDictModule(nn.Linear(4, 2), in_keys=["hidden"], out_keys=["action"])
        set_to(first.module, 1.0)
        set_to(second.module, value)
        return TensorDictSequential(first, second)

    collector = make(sequence(1.0))
    collector.update_policy_weights_(sequence(5.0))
    assert acts_with(collector, 5.0)
    assert (collector.next()["hidden"] == 1.0).all()


@pytest.mark.parametrize("policy_kind", ["recurrent"])
def test_explicit_weights_leave_running_episodes_alone(make: Any, policy_kind: str) -> None:
    """Recurrent state is carried on, and no lane is at a beginning, when weights change in the middle of an episode."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, observation: Tensor, is_init: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
            return observation[..., :2], count + 1

    keys_in, keys_out = ["observation", "is_init", "count"], ["action", ("next", "count")]
    collector = make(TensorDictModule(Counter(), in_keys=keys_in, out_keys=keys_out), env=CountingEnv(lengths=1000))
    counts, begins = [], []
    for _ in range(3):
        batch = collector.next()
        counts.extend(batch["count"][:, 0].tolist())
        begins.extend(batch["is_init"][:, 0].tolist())
        collector.update_policy_weights_({"module.unused": torch.ones(1)})
    assert counts == list(range(30))
    assert begins == [True] + [False] * 29


def test_a_policy_from_a_factory_is_the_collectors_own(make: Any) -> None:
    """Nobody else trains it, so weights go straight into it and stay."""
    collector = make(None, policy_factory=lambda: net(1.0))
    own = collector.policy
    collector.update_policy_weights_(net(5.0))
    assert collector.policy is own
    assert acts_with(collector, 5.0)
    collector.update_policy_weights_()
    assert acts_with(collector, 5.0)
    with pytest.raises(ValueError, match="shape"):
        collector.update_policy_weights_({"module.weight": torch.ones(2, 3), "module.bias": torch.ones(3)})
    assert acts_with(collector, 5.0)
    assert collector.stats()["policy_version"] == 2


def test_lazy_layers_are_made_real_first(make: Any) -> None:
    lazy = TensorDictModule(nn.LazyLinear(2), in_keys=["observation"], out_keys=["action"])
    collector = make(lazy)
    collector.update_policy_weights_(net(5.0))
    assert acts_with(collector, 5.0)
    set_to(lazy.module, 2.0)
    collector.update_policy_weights_()
    assert acts_with(collector, 2.0)


def test_a_copy_on_another_device_is_what_acts_from_the_start(make: Any) -> None:
    """As with a policy that the collector had to copy elsewhere: the copy changes only when told."""
    own = net(1.0)
    collector = make(own)
    collector.policy = copy.deepcopy(own)  # what `policy_device` does where there is another device
    collector._loop.policy.exchange(collector.policy)
    set_to(own, 2.0)
    assert acts_with(collector, 1.0)
    collector.update_policy_weights_()
    assert acts_with(collector, 2.0)


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        (True, {"weights": net()}),
        (True, {"policy": net()}),
        (False, {"weights": net(), "policy": net()}),
        (True, {"weights_dict": {"policy": net()}}),
        (False, {"weights": net(), "weights_dict": {"policy": net()}}),
        (False, {"policy": net(), "weights_dict": {"policy": net()}}),
        (False, {"weights_dict": {"policy": net()}, "model_id": "policy"}),
    ],
)
def test_two_sources_are_refused(make: Any, positional: bool, named: dict[str, Any]) -> None:
    collector = make(net(1.0))
    with pytest.raises(ValueError, match="|".join(named)):
        collector.update_policy_weights_(*([net()] if positional else []), **named)
    assert acts_with(collector, 1.0)
    assert collector.stats()["policy_version"] == 0


BAD = [
    ({"module.bias": torch.ones(3)}, ValueError, r"'module.bias' has shape \(2,\), got \(3,\)"),
    ({"module.bias": 9 * ONES, "module.weight": torch.ones(3, 2)}, ValueError, r"'module.weight' has shape \(2, 3\)"),
    ({"module.bias": 9 * ONES, "module.weigt": torch.ones(2, 3)}, KeyError, r"weigt.*Did you mean 'module.weight'"),
    ({"module.bias": [9.0, 9.0]}, TypeError, r"'module.bias' must be a tensor, got list"),
    (nn.Linear(4, 2), ValueError, r"'weight' has shape \(2, 3\), got \(2, 4\)"),
    ("weights", TypeError, "got str: 'weights'"),
    (5, TypeError, "got int: 5"),
]


@pytest.mark.parametrize(("source", "kind", "words"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_does_not_fit_changes_nothing(make: Any, source: Any, kind: type[Exception], words: str) -> None:
    own = net(1.0)
    collector = make(own)
    with pytest.raises(kind, match=words):
        collector.update_policy_weights_(source)
    assert collector.policy is own
    assert acts_with(collector, 1.0)
    assert collector.stats()["policy_version"] == 0
    collector.update_policy_weights_(net(5.0))  # and the next one is not spoilt
    assert acts_with(collector, 5.0)
    with pytest.raises(kind):
        collector.update_policy_weights_(source)
    assert acts_with(collector, 5.0)


def test_an_unknown_model_is_refused(make: Any) -> None:
    collector = make(net(1.0))
    for name in ("x", "policyy", "env.models[0]", "env[0]", "policy.", "env.envs[7].model"):
        with pytest.raises(KeyError, match="There is no model"):
            collector.update_policy_weights_(net(5.0).state_dict(), model_id=name)
        with pytest.raises(KeyError, match="There is no model"):
            collector.update_policy_weights_(weights_dict={"policy": net(5.0), name: net(5.0)})
    with pytest.raises(KeyError, match="Did you mean 'policy'"):
        collector.update_policy_weights_(net(5.0), model_id="policyy")
    assert acts_with(collector, 1.0)


@pytest.mark.parametrize("arguments", [(), (net(),)])
def test_a_random_policy_has_no_weights(make: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match="'policy' is RandomPolicy, which has no weights"):
        make(None).update_policy_weights_(*arguments)


def test_a_function_has_no_weights(make: Any) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", ONES)

    with pytest.raises(RuntimeError, match="function, which has no weights"):
        make(policy).update_policy_weights_()


def test_what_is_no_model_has_no_weights(make: Any) -> None:
    with pytest.raises(RuntimeError, match=r"'env.batch_size' is Size, which has no weights"):
        make(net()).update_policy_weights_({"a": ONES}, model_id="env.batch_size")


def test_another_model_needs_its_weights(make: Any) -> None:
    with pytest.raises(ValueError, match=r"model_id='env.models\[0\]'.* needs the weights"):
        make(net(), env=EnvWithAModel()).update_policy_weights_(model_id="env.models[0]")


# -- other models, workers, versions, old names ----------------------------------------------------------------------


def test_other_models_by_their_path(make: Any) -> None:
    env = EnvWithAModel()
    collector = make(net(1.0), env=env)
    weights = {"weight": torch.zeros(2, 2), "bias": 3 * ONES}
    collector.update_policy_weights_(weights, model_id="env.models[0]")
    assert (env.models[0].bias == 3).all()
    assert acts_with(collector, 1.0)
    collector.update_policy_weights_(weights_dict={"policy": net(5.0), "env.models[0]": {"bias": 4 * ONES}})
    assert (env.models[0].bias == 4).all()
    assert acts_with(collector, 5.0)


def test_one_bad_model_among_several_changes_none(make: Any) -> None:
    env = EnvWithAModel()
    before = env.models[0].bias.clone()
    collector = make(net(1.0), env=env)
    good = {"bias": 9 * ONES}
    with pytest.raises(ValueError, match="shape"):
        collector.update_policy_weights_(weights_dict={"env.models[0]": good, "policy": nn.Linear(1, 1)})
    assert torch.equal(env.models[0].bias, before)
    assert acts_with(collector, 1.0)


@pytest.mark.parametrize(
    ("worker", "worker_ids", "taken"),
    [(None, 0, True), (None, [0], True), (None, 1, False), (2, 2, True), (2, [0, 2], True), (2, [0, 1], False)],
)
def test_worker_ids_choose(make: Any, worker: int | None, worker_ids: Any, taken: bool) -> None:
    collector = make(net(1.0), worker_idx=worker)
    collector.update_policy_weights_(net(5.0), worker_ids=worker_ids)
    assert acts_with(collector, 5.0 if taken else 1.0)
    assert collector.stats()["policy_version"] == int(taken)


def test_weights_for_other_workers_are_none_of_ours(make: Any) -> None:
    own = net(1.0)
    collector = make(own, worker_idx=2)
    collector.update_policy_weights_({2: net(5.0)})
    collector.update_policy_weights_({0: net(6.0), 1: net(7.0)})
    assert acts_with(collector, 5.0)
    assert collector.stats()["policy_version"] == 1


def test_versions_count_every_update(make: Any) -> None:
    own = net(1.0)
    collector = make(own, track_policy_version=True)
    for version, arguments in enumerate([(), (own,), (net(5.0),), (net(6.0).state_dict(),), ()], start=1):
        collector.update_policy_weights_(*arguments)
        assert collector.policy_version == version
    assert collector.next()["policy_version"].unique().tolist() == [5]


def test_the_old_name_warns_its_caller_and_works(make: Any) -> None:
    collector = make(net(1.0))
    with pytest.warns(DeprecationWarning, match="policy_weights is an old name; use weights") as caught:
        collector.update_policy_weights_(policy_weights=net(5.0).state_dict())
    assert caught[0].filename == __file__
    assert acts_with(collector, 5.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_and_new_name_exclude_each_other(make: Any) -> None:
    with pytest.raises(ValueError, match="old name of weights"):
        make(net(1.0)).update_policy_weights_(weights=net(), policy_weights=net())


def test_weights_from_a_checkpoint_on_disk(make: Any, tmp_path: Any) -> None:
    torch.save(net(5.0).state_dict(), tmp_path / "policy.pt")
    collector = make(net(1.0))
    collector.update_policy_weights_(torch.load(tmp_path / "policy.pt", weights_only=True))
    assert acts_with(collector, 5.0)
