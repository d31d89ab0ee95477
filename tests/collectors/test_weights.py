"""`update_policy_weights_`: where weights may come from, to whom they go, that they are whole, and what is refused."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import ONES, WAIT_S, Pair, buffer, net, rows, set_to, until
from inside import exchange_policy
from kinds import ALL, ASYNC, ASYNC_HERE, HERE, MIXED, SINGLE, SPREAD, STARTED, SYNC, SYNC_HERE, Kind, Make, over
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from swath.collectors import PolicyVersion
from swath.testing import CountingEnv

AT_ONCE = (SINGLE, SYNC_HERE, SYNC)


class EnvWithAModel(CountingEnv):
    """Its reward is what its model says."""

    def __init__(self) -> None:
        super().__init__()
        self.models = [nn.Linear(1, 1)]
        nn.init.constant_(self.models[0].weight, 2.0)
        nn.init.constant_(self.models[0].bias, 1.0)

    def _step(self, tensordict: Any) -> Any:
        answer = super()._step(tensordict)
        with torch.no_grad():
            answer["reward"] = self.models[0](torch.ones(1))
        return answer


def acts(collector: Any) -> set[float]:
    """What each worker does in the next batch; all actions of a worker are the same."""
    return {*acts_by_worker(collector)}


def acts_by_worker(collector: Any) -> list[float]:
    actions = rows(collector.next())["action"]
    assert (actions == actions[:, :1, :1]).all()
    return [float(action) for action in actions[:, 0, 0]]


def until_acts(collector: Any, value: float) -> None:
    """What is under way may be older; all that is made with the newest weights is made with `value`."""
    seen = 0
    newest = collector.stats()["policy_version"]
    for _ in range(500):
        batch = collector.next()
        version = batch.get("policy_version", None)
        if version is not None and int(version.min()) < newest:
            continue
        assert (batch["action"] == value).all()
        seen += 1
        if seen == 3:
            return
    raise AssertionError("the newest weights have not been acted with")


# -- call forms -----------------------------------------------------------------------------------------------------

SOURCES = {
    "module": net,
    "state dict": lambda value: net(value).state_dict(),
    "names of the inner module": lambda value: net(value).module.state_dict(),
    "inner module": lambda value: net(value).module,
    "plain dict": lambda value: {"module.weight": torch.zeros(2, 3), "module.bias": value * ONES},
    "dict by tuples": lambda value: {("module", "weight"): torch.zeros(2, 3), ("module", "bias"): value * ONES},
    "nested dict": lambda value: {"module": {"weight": torch.zeros(2, 3), "bias": value * ONES}},
    "TensorDict": lambda value: TensorDict.from_module(net(value)),
    "TensorDict data": lambda value: TensorDict.from_module(net(value)).data,
    "flat TensorDict": lambda value: TensorDict(net(value).state_dict(), []),
    "by worker": lambda value: {0: net(value).state_dict(), 1: net(value)},
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
@over([SINGLE, SYNC_HERE])
def test_every_source_in_every_form(make: Make, form: str, source: str) -> None:
    own = net(1.0)
    collector = make(None, own)
    assert acts(collector) == {1.0}
    FORMS[form](collector, SOURCES[source](5.0))
    assert acts(collector) == {5.0}
    assert acts(collector) == {5.0}
    assert (own.module.bias == 1.0).all(), "weights ended up in the policy that the user is training"
    assert collector.stats()["policy_version"] == 1


@over(MIXED)
def test_every_form_and_none(make: Make) -> None:
    own = net(1.0)
    collector = make(None, own)
    for number, form in enumerate(FORMS, start=2):
        FORMS[form](collector, net(float(number)))
        until_acts(collector, float(number))
    set_to(own.module, 9.0)
    collector.update_policy_weights_()
    until_acts(collector, 9.0)
    assert collector.stats()["policy_version"] == 6


@pytest.mark.parametrize("form", [None, "positional", "policy"])
@pytest.mark.parametrize("wraps", [True, False], ids=["TensorDictModule", "nn.Module"])
def test_the_given_policy_itself_is_no_other_source(make: Make, form: str | None, wraps: bool) -> None:
    own = net(1.0)
    given = own if wraps else own.module
    collector = make(None, given)
    set_to(own.module, 2.0)
    collector.update_policy_weights_() if form is None else FORMS[form](collector, given)
    assert acts(collector) == {2.0}
    assert (collector.policy if wraps else collector.policy.module) is given


@over(ALL)
def test_training_in_place_does_not_leak_until_it_is_published(make: Make, kind: Kind) -> None:
    own = net(1.0)
    collector = make(None, own)
    if not kind.workers:
        collector.update_policy_weights_(net(1.0))  # until then, the policy that was given is the one that acts
    for number in range(8):
        set_to(own.module, 50.0 + number)
        assert (collector.next()["action"] == 1).all()
    assert not own.module.bias.is_shared(), "the trainer's own tensors were moved to shared memory"
    collector.update_policy_weights_(own.state_dict())
    set_to(own.module, 99.0)
    until_acts(collector, 57.0)


@over(AT_ONCE)
def test_an_optimiser_goes_on_after_explicit_weights(make: Make) -> None:
    """The user's parameters are still leaves of their own, which an optimiser can step."""
    own = net(1.0)
    collector = make(None, own)
    optimiser = torch.optim.SGD(own.parameters(), lr=1.0)
    collector.update_policy_weights_(net(5.0))
    batch = rows(collector.next())
    own(batch)["action"].sum().backward()
    optimiser.step()
    assert own.module.bias.is_leaf
    assert (own.module.bias == 1.0 - batch.numel()).all()
    assert acts(collector) == {5.0}


@over(AT_ONCE)
def test_partial_weights_leave_the_rest_and_are_converted(make: Make) -> None:
    collector = make(None, net(1.0))
    collector.update_policy_weights_({"module.bias": torch.tensor([4, 4])})
    assert acts(collector) == {4.0}
    weight = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    collector.update_policy_weights_({"module.weight": weight})
    batch = collector.next()
    assert batch["action"].dtype == torch.float32
    assert torch.equal(batch["action"], batch["observation"][..., 2:].expand(*batch.shape, 2) + 4)


class Normalised(nn.Module):
    """Normalises by running moments: buffers, one of them not saved, and a count that only the module understands."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: float = 0.0, count: int = 0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.count = count
        self.layer = nn.Linear(3, 2)
        set_to(self.layer, 0.0)

    def forward(self, observation: Tensor) -> Tensor:
        return (self.layer(observation) + self.mean + 100.0 * self.count) * self.scale

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "history": list(range(self.count * 300))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert len(state["history"]) == self.count * 300


@over(AT_ONCE)
def test_buffers_and_extra_state_go_along_and_may_grow(make: Make, kind: Kind) -> None:
    own = Normalised(1.0, 0)
    collector = make(None, own)
    assert acts(collector) == {1.0}
    for count in (1, 5, 50):
        collector.update_policy_weights_(Normalised(2.0, count))
        assert acts(collector) == {2.0 + 100 * count}
    assert (own.mean, own.count) == (1.0, 0)
    own.mean.fill_(7.0)
    own.scale.fill_(2.0)
    assert acts(collector) == {5002.0}, "not before it is published"
    collector.update_policy_weights_()
    assert acts(collector) == {14.0}
    collector.update_policy_weights_({"mean": torch.tensor(3.0)})
    assert acts(collector) == {6.0}
    if "choose_workers" not in kind.cannot:
        collector.update_policy_weights_(Normalised(4.0, 2), worker_ids=1)
        assert acts_by_worker(collector)[0] == 6.0
        assert acts_by_worker(collector)[1] >= 204.0


# -- kinds of policies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [True, False], ids=["names of the wrapper", "names of the module"])
@over(MIXED)
def test_a_policy_given_as_a_plain_module_keeps_its_names(make: Make, wrapped: bool) -> None:
    own = net(1.0).module
    collector = make(None, own)
    assert (collector.next()["action"] == 1).all()
    collector.update_policy_weights_((net(5.0) if wrapped else net(5.0).module).state_dict())
    until_acts(collector, 5.0)
    assert (own.bias == 1.0).all()
    collector.update_policy_weights_({"bias": 3 * ONES})
    until_acts(collector, 3.0)
    set_to(own, 2.0)
    collector.update_policy_weights_()
    until_acts(collector, 2.0)


def test_a_compiled_policy_takes_weights_by_the_names_of_the_module(make: Make) -> None:
    own = net(1.0)
    collector = make(None, torch.compile(own, backend="eager"))
    assert acts(collector) == {1.0}
    collector.update_policy_weights_(net(5.0))
    assert acts(collector) == {5.0}
    collector.update_policy_weights_(torch.compile(net(6.0), backend="eager"))
    assert acts(collector) == {6.0}
    assert (own.module.bias == 1.0).all()


@over([SINGLE, SYNC_HERE])
def test_a_sequence_of_modules(make: Make) -> None:
    def sequence(value: float) -> TensorDictSequential:
        first = TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["hidden"])
        second = TensorDictModule(nn.Linear(4, 2), in_keys=["hidden"], out_keys=["action"])
        set_to(first.module, 1.0)
        set_to(second.module, value)
        return TensorDictSequential(first, second)

    collector = make(None, sequence(1.0))
    collector.update_policy_weights_(sequence(5.0))
    assert acts(collector) == {5.0}
    assert (collector.next()["hidden"] == 1.0).all()
    collector.update_policy_weights_({"module.1.module.bias": 3 * ONES})
    assert acts(collector) == {3.0}


@over(AT_ONCE)
def test_tied_weights(make: Make) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 2)
            self.two = self.one
            set_to(self.one, 1.0)

        def forward(self, observation: Tensor) -> Tensor:
            return self.one(observation) + self.two(observation)

    own = Tied()
    collector = make(None, own)
    assert acts(collector) == {2.0}
    set_to(own.two, 3.0)
    collector.update_policy_weights_()
    assert acts(collector) == {6.0}


@pytest.mark.parametrize("wraps", [True, False], ids=["wrapped", "plain"])
@over(AT_ONCE)
def test_a_lazy_policy_gets_its_shapes_from_the_first_worker(make: Make, wraps: bool) -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    policy: Any = TensorDictModule(lazy, in_keys=["observation"], out_keys=["action"]) if wraps else lazy
    collector = make(None, policy)
    assert [tuple(p.shape) for p in policy.parameters()] == [(4, 3), (4,), (2, 4), (2,)]
    batch = collector.next()
    with torch.no_grad():
        assert torch.allclose(lazy(batch["observation"]), batch["action"], atol=1e-6), "it acts with other weights"
        lazy[2].bias.fill_(100.0)
    collector.update_policy_weights_()
    assert (collector.next()["action"] > 50).all()
    next(policy.parameters()).sum().backward()
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    nn.init.constant_(other[2].bias, -100.0)
    collector.update_policy_weights_(other)
    assert (collector.next()["action"] < -50).all()


@over([SINGLE, SYNC_HERE])
def test_explicit_weights_leave_running_episodes_alone(make: Make) -> None:
    """Recurrent state is carried on, and no lane is at a beginning, when weights change in the middle of an episode."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, observation: Tensor, is_init: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
            return observation[..., :2], count + 1

    keys_in, keys_out = ["observation", "is_init", "count"], ["action", ("next", "count")]
    collector = make(None, TensorDictModule(Counter(), in_keys=keys_in, out_keys=keys_out), lengths=1000)
    counts, begins = [], []
    for _ in range(3):
        batch = rows(collector.next())[0]
        counts.extend(batch["count"][:, 0].tolist())
        begins.extend(batch["is_init"][:, 0].tolist())
        collector.update_policy_weights_({"module.unused": torch.ones(1)})
    assert counts == list(range(30))
    assert begins == [True] + [False] * 29


def test_a_policy_from_a_factory_is_the_collectors_own(make: Make) -> None:
    """Nobody else trains it, so weights go straight into it and stay."""
    collector = make(policy_factory=lambda: net(1.0))
    own = collector.policy
    collector.update_policy_weights_(net(5.0))
    assert collector.policy is own
    assert acts(collector) == {5.0}
    collector.update_policy_weights_()
    assert acts(collector) == {5.0}
    with pytest.raises(ValueError, match="shape"):
        collector.update_policy_weights_({"module.weight": torch.ones(2, 3), "module.bias": torch.ones(3)})
    assert acts(collector) == {5.0}
    assert collector.stats()["policy_version"] == 2


@over([SYNC_HERE, SYNC])
def test_a_policy_factory_for_all_workers(make: Make, kind: Kind) -> None:
    """Called in each worker, never here; all act with the weights of the first."""
    here = os.getpid()

    def factory() -> nn.Module:
        assert "share_objects" not in kind.cannot or os.getpid() != here
        return TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])

    collector = make(policy_factory=factory)
    weights = [collector.cascade_execute("policy.state_dict")[index]["module.weight"] for index in (0, 1)]
    assert torch.equal(weights[0], weights[1])
    collector.update_policy_weights_(net(3.0))
    assert acts(collector) == {3.0}
    with pytest.raises(RuntimeError, match=r"give them, as in update_policy_weights_\(policy\)"):
        collector.update_policy_weights_()


@over([SYNC_HERE, SYNC])
def test_a_policy_factory_for_each_worker(make: Make) -> None:
    collector = make(policy_factory=[lambda: net(1.0), lambda: net(2.0)])
    assert acts_by_worker(collector) == [1.0, 2.0]
    collector.update_policy_weights_({"module.weight": torch.zeros(2, 3)})
    assert acts_by_worker(collector) == [1.0, 2.0], "a part leaves the rest, which differs"
    collector.update_policy_weights_(net(5.0), worker_ids=0)
    assert acts_by_worker(collector) == [5.0, 2.0]
    collector.update_policy_weights_(net(6.0))
    assert acts_by_worker(collector) == [6.0, 6.0]


@pytest.mark.filterwarnings("ignore:weight_sync_schemes")
@over([SYNC_HERE])
def test_a_policy_and_a_factory_with_schemes(make: Make) -> None:
    """As in TorchRL: the policy is then only where weights come from."""
    own = net(7.0)
    collector = make(None, own, policy_factory=net, weight_sync_schemes={})
    assert acts(collector) == {7.0}
    set_to(own.module, 8.0)
    collector.update_policy_weights_()
    assert acts(collector) == {8.0}


def test_a_copy_on_another_device_is_what_acts_from_the_start(make: Make) -> None:
    """As with a policy that the collector had to copy elsewhere: the copy changes only when told."""
    own = net(1.0)
    collector = make(None, own)
    exchange_policy(collector, copy.deepcopy(own))
    set_to(own.module, 2.0)
    assert acts(collector) == {1.0}
    collector.update_policy_weights_()
    assert acts(collector) == {2.0}


# -- refusals -------------------------------------------------------------------------------------------------------

BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda c: c.update_policy_weights_(net(), weights=net()), ValueError, "one source"),
    (lambda c: c.update_policy_weights_(net(), policy=net()), ValueError, "one source"),
    (lambda c: c.update_policy_weights_(weights=net(), policy=net()), ValueError, "one source"),
    (lambda c: c.update_policy_weights_(net(), weights_dict={"policy": net()}), ValueError, "one source"),
    (lambda c: c.update_policy_weights_(weights=net(), weights_dict={"policy": net()}), ValueError, "weights_dict"),
    (lambda c: c.update_policy_weights_(policy=net(), weights_dict={"policy": net()}), ValueError, "weights_dict"),
    (lambda c: c.update_policy_weights_(weights_dict={"policy": net()}, model_id="policy"), ValueError, "model_id"),
    (lambda c: c.update_policy_weights_(net(), model_id="x"), KeyError, "'x'"),
    (lambda c: c.update_policy_weights_(net(), model_id="policyy"), KeyError, "Did you mean 'policy'"),
    (lambda c: c.update_policy_weights_(weights_dict={"env.models[0]": nn.Linear(1, 1)}), KeyError, "no model"),
    (lambda c: c.update_policy_weights_(weights_dict={"policy": net(), "env[0]": net()}), KeyError, "no model"),
    (lambda c: c.update_policy_weights_(net().state_dict(), model_id="policy."), KeyError, "There is no model"),
    (lambda c: c.update_policy_weights_(net(), model_id="env.envs[7].model"), KeyError, "There is no model"),
    (lambda c: c.update_policy_weights_(model_id="env.models[0]"), (ValueError, KeyError), "env.models"),
    (lambda c: c.update_policy_weights_(weights_dict={"env.batch_size": net()}), RuntimeError, "is Size.* no weights"),
    (lambda c: c.update_policy_weights_({"module.bia": ONES}), KeyError, "Did you mean 'module.bias'"),
    (
        lambda c: c.update_policy_weights_({"module.bias": torch.ones(3)}),
        ValueError,
        r"'module.bias' has shape \(2,\), got \(3,\)",
    ),
    (
        lambda c: c.update_policy_weights_({"module.bias": 9 * ONES, "module.weight": torch.ones(3, 2)}),
        ValueError,
        r"'module.weight' has shape \(2, 3\)",
    ),
    (
        lambda c: c.update_policy_weights_({"module.bias": 9 * ONES, "module.weigt": torch.ones(2, 3)}),
        KeyError,
        "weigt.*Did you mean 'module.weight'",
    ),
    (lambda c: c.update_policy_weights_({"module.bias": [9.0, 9.0]}), TypeError, "must be a tensor, got list"),
    (lambda c: c.update_policy_weights_(nn.Linear(4, 2)), ValueError, r"weight' has shape \(2, 3\), got \(2, 4\)"),
    (lambda c: c.update_policy_weights_("weights"), TypeError, "got str: 'weights'"),
    (lambda c: c.update_policy_weights_(5), TypeError, "got int: 5"),
    (lambda c: c.update_policy_weights_({0: nn.Linear(4, 2), 1: net()}), ValueError, "weight"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
@over(HERE)
def test_what_is_refused_changes_nothing(make: Make, number: int) -> None:
    call, error, words = BAD[number]
    collector = make(None, net(1.0))
    with pytest.raises(error, match=words):
        call(collector)
    for _ in range(3):
        assert (collector.next()["action"] == 1).all()
    assert collector.stats()["policy_version"] == 0
    collector.update_policy_weights_(net(5.0))  # and the next one is not spoilt
    until_acts(collector, 5.0)
    with pytest.raises(error):
        call(collector)
    until_acts(collector, 5.0)


@pytest.mark.parametrize(
    "policy",
    [None, lambda td: td.set("action", td["observation"][..., :2]), lambda observation: observation[..., :2]],
    ids=["random", "function of a TensorDict", "function of tensors"],
)
@over(HERE)
def test_a_policy_without_weights_has_none_to_update(make: Make, policy: Any) -> None:
    collector = make(None, policy)
    for source in ((), (net(),)):
        with pytest.raises(RuntimeError, match="no weights"):
            collector.update_policy_weights_(*source)
    collector.next()
    collector.increment_version()
    assert collector.stats()["policy_version"] == 1
    assert collector.next() is not None


@over([SINGLE, SYNC_HERE])
def test_the_old_name_warns_and_works(make: Make) -> None:
    collector = make(None, net(1.0))
    with pytest.warns(DeprecationWarning, match="policy_weights is an old name; use weights") as caught:
        collector.update_policy_weights_(policy_weights=net(5.0).state_dict())
    assert caught[0].filename == __file__
    assert acts(collector) == {5.0}
    with (
        pytest.warns(DeprecationWarning, match="old name"),
        pytest.raises(ValueError, match="old name of weights"),
    ):
        collector.update_policy_weights_(weights=net(), policy_weights=net())


# -- other models, workers, versions ---------------------------------------------------------------------------------


@over(AT_ONCE)
def test_other_models_by_their_path(make: Make, kind: Kind) -> None:
    collector = make(EnvWithAModel, net(1.0))
    collector.update_policy_weights_({"bias": torch.tensor([10.0])}, model_id="env.models[0]")
    assert (collector.next()["next", "reward"] == 12).all(), "a part leaves the rest as it is"
    with pytest.raises(ValueError, match="shape"):
        collector.update_policy_weights_(
            weights_dict={"env.models[0]": {"bias": torch.zeros(1)}, "policy": nn.Linear(1, 1)}
        )
    batch = collector.next()
    assert (batch["next", "reward"] == 12).all(), "one bad model among several changes none"
    assert (batch["action"] == 1).all()
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 4.0)
    nn.init.constant_(model.bias, 5.0)
    collector.update_policy_weights_(weights_dict={"env.models[0]": model, "policy": net(2.0)})
    batch = collector.next()
    assert (batch["next", "reward"] == 9).all()
    assert (batch["action"] == 2).all()
    if "choose_workers" not in kind.cannot:
        collector.update_policy_weights_({"bias": torch.zeros(1)}, model_id="env.models[0]", worker_ids=1)
        assert collector.next()["next", "reward"][:, 0, 0].tolist() == [9.0, 4.0]
    with pytest.raises(ValueError, match=r"model_id='env.models\[0\]'.* needs the weights"):
        collector.update_policy_weights_(model_id="env.models[0]")


@over([SYNC_HERE, SYNC])
def test_weights_for_some_workers(make: Make) -> None:
    collector = make(None, net(1.0), workers=3, track_policy_version=True)
    collector.update_policy_weights_(net(2.0), worker_ids=1)
    assert acts_by_worker(collector) == [1.0, 2.0, 1.0]
    collector.update_policy_weights_(net(3.0), worker_ids=[0, 2])
    batch = collector.next()
    assert batch["action"][:, 0, 0].tolist() == [3.0, 2.0, 3.0]
    assert batch["policy_version"].reshape(3, -1)[:, 0].tolist() == [2, 1, 2]
    collector.update_policy_weights_({0: net(4.0), 2: net(5.0).state_dict()})
    assert acts_by_worker(collector) == [4.0, 2.0, 5.0]
    collector.update_policy_weights_({0: net(6.0), 1: net(7.0)}, worker_ids=[1])
    assert acts_by_worker(collector) == [4.0, 7.0, 5.0]
    collector.update_policy_weights_({"module.bias": 8 * ONES}, worker_ids=[2])
    assert acts_by_worker(collector) == [4.0, 7.0, 8.0]
    collector.increment_version()
    assert acts_by_worker(collector) == [4.0, 7.0, 8.0], "a version counts, and changes nothing"
    collector.update_policy_weights_()
    assert acts_by_worker(collector) == [1.0, 1.0, 1.0]
    assert collector.stats()["policy_version"] == 7


@pytest.mark.parametrize("worker_ids", [2, [0, 5], -1])
@over([SYNC_HERE])
def test_workers_that_are_not_there(make: Make, worker_ids: Any) -> None:
    collector = make(None, net(1.0))
    with pytest.raises(ValueError, match=r"worker_ids=.* there are 2 workers"):
        collector.update_policy_weights_(net(2.0), worker_ids=worker_ids)
    assert collector.stats()["policy_version"] == 0
    assert acts(collector) == {1.0}


@pytest.mark.parametrize(
    ("worker", "worker_ids", "taken"),
    [(None, 0, True), (None, [0], True), (None, 1, False), (2, 2, True), (2, [0, 2], True), (2, [0, 1], False)],
)
def test_a_collector_takes_what_is_for_its_worker_idx(
    make: Make, worker: int | None, worker_ids: Any, taken: bool
) -> None:
    collector = make(None, net(1.0), worker_idx=worker)
    collector.update_policy_weights_(net(5.0), worker_ids=worker_ids)
    assert acts(collector) == {5.0 if taken else 1.0}
    assert collector.stats()["policy_version"] == int(taken)
    own = worker or 0
    collector.update_policy_weights_({own: net(6.0)})
    collector.update_policy_weights_({own + 1: net(7.0), own + 2: net(8.0)})
    assert acts(collector) == {6.0}
    assert collector.stats()["policy_version"] == int(taken) + 1


@over(ALL)
def test_the_version_in_the_frames_is_the_one_that_acted(make: Make) -> None:
    collector = make(None, net(0.0), track_policy_version=PolicyVersion())
    for number in range(1, 15):
        batch = collector.next()
        assert (batch["action"] == batch["policy_version"].reshape(*batch.shape, 1)).all()
        assert torch.equal(batch["policy_version"], batch["next", "policy_version"])
        assert batch["policy_version"].dtype == torch.int64
        collector.update_policy_weights_(net(float(number)))


@over([SYNC_HERE, ASYNC_HERE])
def test_update_at_each_batch(make: Make, kind: Kind) -> None:
    own = net(0.0)
    collector = make(None, own, update_at_each_batch=True, workers=1)
    seen = []
    for number in range(1, 6):
        batch = collector.next()
        seen.append(float(batch["action"].reshape(-1)[0]))
        set_to(own.module, float(number))
    if kind.joins:
        assert seen == [0, 1, 2, 3, 4]
        assert collector.policy_version == 5
    else:
        assert seen == sorted(seen)
        assert seen[-1] >= 1
        assert collector.policy_version == 4


# -- torn weights ---------------------------------------------------------------------------------------------------


@over(SPREAD)
def test_no_frame_is_made_by_half_of_an_update(make: Make, kind: Kind) -> None:
    """10,000 updates while workers collect, and no action mixes two of them."""
    updates, often = (1000, 5) if kind.joins else (10_000, 20)
    policy = Pair()
    collector = make(None, policy, steps=4, track_policy_version=PolicyVersion())
    frames, seen = 0, set()
    for number in range(1, updates + 1):
        policy.set(number)
        collector.update_policy_weights_()
        if number % often == 0:
            batch = collector.next()
            action, version = batch["action"], batch["policy_version"].reshape(*batch.shape, 1)
            assert (action[..., :1] == action[..., 1:]).all(), "torn"
            assert (action == version).all(), "the frames tell another version than acted"
            assert int(version.max()) <= number
            frames += batch.numel()
            seen.update(version.unique().tolist())
    assert collector.policy_version == updates
    assert len(seen) > 50
    assert frames == collector.stats()["frames"]


@over([ASYNC])
def test_weights_arrive_whole_while_workers_run_free(make: Make) -> None:
    policy, kept = Pair(), buffer()
    collector = make(None, policy, replay_buffer=kept)
    collector.start()
    number, deadline = 0, time.monotonic() + WAIT_S
    while len(kept) < 4000:
        assert time.monotonic() < deadline
        number += 1
        policy.set(number)
        collector.update_policy_weights_()
    until(lambda: bool((kept[:]["policy_version"][-20:] == number).all()))  # a worker may be long at its last batch
    collector.async_shutdown()
    data = kept[:]
    assert torch.equal(data["action"][:, 0], data["action"][:, 1])
    assert torch.equal(data["action"][:, 0].long(), data["policy_version"].reshape(-1))
    assert len(data["policy_version"].unique()) > 5


@over(SPREAD)
def test_publishing_does_not_wait_for_a_stopped_worker(make: Make) -> None:
    policy = net(0.0)
    collector = make(None, policy)
    collector.next()
    pid = collector.worker_pids[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        for number in range(500):
            set_to(policy.module, float(number + 1))
            collector.update_policy_weights_()
        assert time.monotonic() - begin < 10.0, "it has waited"
    finally:
        os.kill(pid, signal.SIGCONT)
    until_acts(collector, 500.0)


# -- training that nobody publishes ----------------------------------------------------------------------------------


def train(policy: Any) -> None:
    with torch.no_grad():
        policy.module.bias.add_(1.0)


def told_between(collector: Any, between: Callable[[], Any], batches: int = 8) -> list[str]:
    """What is warned of while batches are collected, and something is done between each two."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(batches):
            collector.next()
            between()
    return [str(one.message) for one in caught if "published" in str(one.message)]


def told_beside(collector: Any, meanwhile: Callable[[], Any]) -> list[str]:
    """The same of a collector that was started: until something is said, and a while after."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        until(lambda: meanwhile() or caught)
        frames = collector.stats()["frames"]
        until(lambda: meanwhile() or collector.stats()["frames"] > frames + 5000)
    return [str(one.message) for one in caught if "published" in str(one.message)]


@over((SYNC_HERE, ASYNC_HERE, *SPREAD, STARTED))
def test_training_that_is_never_published_is_told_once(make: Make, kind: Kind) -> None:
    policy = net()
    told = (told_beside if kind.starts else told_between)(make(None, policy), lambda: train(policy))
    assert len(told) == 1
    assert "collector.update_policy_weights_()" in told[0]


@over((SYNC_HERE, SINGLE))
def test_nothing_is_told_where_nothing_is_wrong(make: Make, kind: Kind) -> None:
    policy = net()
    assert not told_between(make(None, policy), lambda: None), "it is not trained"
    collector = make(None, policy)
    assert not told_between(collector, lambda: (train(policy), collector.update_policy_weights_()))
    if kind.workers:
        assert not told_between(make(None, policy, update_at_each_batch=True), lambda: train(policy))
        assert not told_between(make(None, policy_factory=net), lambda: train(policy))
    else:
        assert not told_between(make(None, policy), lambda: train(policy)), "the very policy acts"


def test_a_collector_that_was_started_acts_with_a_copy(make: Make, kind: Kind) -> None:
    policy = net()
    collector = make(None, policy, replay_buffer=buffer(batch_size=16))
    collector.start()
    assert len(told_beside(collector, lambda: train(policy))) == 1
