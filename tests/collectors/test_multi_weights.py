"""Weights of workers: where they come from, to whom they go, that they are whole, and that nobody waits for anybody."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from swath.collectors import AsyncCollector, MultiAsyncCollector, MultiCollector, MultiSyncCollector, PolicyVersion
from swath.testing import CountingEnv

ONES = torch.tensor([1.0, 1.0])
WAIT_S = 60.0


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


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes sync collectors of two workers in this process, if not told otherwise."""
    made: list[MultiCollector] = []

    def build(policy: Any, kind: Any = MultiSyncCollector, **options: Any) -> Any:
        options = {"debug": True, "frames_per_batch": 10, **options}
        makers = options.pop("env", CountingEnv)
        made.append(kind(makers if kind is AsyncCollector else [makers] * options.pop("workers", 2), policy, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


def acts(collector: Any) -> list[float]:
    """The action of each worker in the next batch; all of a worker's are the same."""
    actions = collector.next()["action"]
    assert (actions == actions[:, :1, :1]).all()
    return [float(action) for action in actions[:, 0, 0]]


# -- call forms ------------------------------------------------------------------------------------------------------

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
def test_every_source_in_every_form(make: Any, form: str, source: str) -> None:
    own = net(1.0)
    collector = make(own)
    assert acts(collector) == [1.0, 1.0]
    FORMS[form](collector, SOURCES[source](5.0))
    assert acts(collector) == [5.0, 5.0]
    assert acts(collector) == [5.0, 5.0]
    assert (own.module.bias == 1.0).all(), "weights ended up in the policy that the user is training"
    assert collector.policy_version == collector.get_policy_version() == collector.stats()["policy_version"] == 1


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_every_form_in_processes(make: Any, kind: Any) -> None:
    own = net(1.0)
    collector = make(own, kind, debug=False)
    for number, form in enumerate(FORMS, start=2):
        FORMS[form](collector, net(float(number)))
        until_acts(collector, float(number))
    set_to(own, 9.0)
    collector.update_policy_weights_()
    until_acts(collector, 9.0)
    assert collector.policy_version == 6


def until_acts(collector: Any, value: float) -> None:
    """What is under way may be older; all that is made with the newest weights is made with `value`."""
    seen = 0
    for _ in range(500):
        batch = collector.next()
        version = batch.get("policy_version", None)
        if version is not None and int(version.min()) < collector.policy_version:
            continue
        assert (batch["action"] == value).all()
        seen += 1
        if seen == 3:
            return
    raise AssertionError("the newest weights have not been acted with")


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_weights_for_some_workers(make: Any, debug: bool) -> None:
    collector = make(net(1.0), workers=3, frames_per_batch=12, debug=debug, track_policy_version=True)
    collector.update_policy_weights_(net(2.0), worker_ids=1)
    assert acts(collector) == [1.0, 2.0, 1.0]
    collector.update_policy_weights_(net(3.0), worker_ids=[0, 2])
    batch = collector.next()
    assert batch["action"][:, 0, 0].tolist() == [3.0, 2.0, 3.0]
    assert batch["policy_version"].reshape(3, -1)[:, 0].tolist() == [2, 1, 2]
    collector.update_policy_weights_({0: net(4.0), 2: net(5.0).state_dict()})
    assert acts(collector) == [4.0, 2.0, 5.0]
    collector.update_policy_weights_({0: net(6.0), 1: net(7.0)}, worker_ids=[1])
    assert acts(collector) == [4.0, 7.0, 5.0]
    collector.update_policy_weights_({"module.bias": 8 * ONES}, worker_ids=[2])
    assert acts(collector) == [4.0, 7.0, 8.0]
    collector.update_policy_weights_()
    assert acts(collector) == [1.0, 1.0, 1.0]
    assert collector.policy_version == 6


@pytest.mark.parametrize("worker_ids", [2, [0, 5], -1])
def test_workers_that_are_not_there(make: Any, worker_ids: Any) -> None:
    collector = make(net(1.0))
    with pytest.raises(ValueError, match=r"worker_ids=.* there are 2 workers"):
        collector.update_policy_weights_(net(2.0), worker_ids=worker_ids)
    assert collector.policy_version == 0
    assert acts(collector) == [1.0, 1.0]


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_another_model(make: Any, debug: bool) -> None:
    collector = make(net(1.0), env=EnvWithAModel, debug=debug)
    assert (collector.next()["next", "reward"] == 3).all()
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 4.0)
    nn.init.constant_(model.bias, 5.0)
    collector.update_policy_weights_(weights_dict={"env.models[0]": model, "policy": net(2.0)})
    batch = collector.next()
    assert (batch["next", "reward"] == 9).all()
    assert (batch["action"] == 2).all()
    collector.update_policy_weights_({"bias": torch.zeros(1)}, model_id="env.models[0]", worker_ids=1)
    assert collector.next()["next", "reward"][:, 0, 0].tolist() == [9.0, 4.0]
    assert collector.policy_version == 2


def test_a_part_of_another_models_weights(make: Any) -> None:
    """Nothing of it was published before: the rest stays as the workers have it."""
    collector = make(net(1.0), env=EnvWithAModel)
    collector.update_policy_weights_({"bias": torch.tensor([10.0])}, model_id="env.models[0]")
    assert (collector.next()["next", "reward"] == 12).all()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda c: c.update_policy_weights_(net(), weights=net()), ValueError, "one source"),
        (lambda c: c.update_policy_weights_(net(), policy=net()), ValueError, "one source"),
        (lambda c: c.update_policy_weights_(weights=net(), policy=net()), ValueError, "one source"),
        (lambda c: c.update_policy_weights_(weights_dict={"policy": net()}, model_id="policy"), ValueError, "model_id"),
        (lambda c: c.update_policy_weights_(net(), weights_dict={"policy": net()}), ValueError, "one source"),
        (lambda c: c.update_policy_weights_(net(), model_id="x"), KeyError, "'x'"),
        (lambda c: c.update_policy_weights_(model_id="env.models[0]"), ValueError, "env.models"),
        (lambda c: c.update_policy_weights_(weights_dict={"env.batch_size": net()}), RuntimeError, "no weights"),
        (lambda c: c.update_policy_weights_({"module.bia": ONES}), KeyError, "Did you mean 'module.bias'"),
        (
            lambda c: c.update_policy_weights_({"module.bias": torch.ones(3)}),
            ValueError,
            r"'module.bias' has shape \(2,\)",
        ),
        (lambda c: c.update_policy_weights_({"module.bias": 3.0}), TypeError, "must be a tensor"),
        (lambda c: c.update_policy_weights_(nn.Linear(4, 2)), ValueError, "weight"),
        (lambda c: c.update_policy_weights_(5), TypeError, "got int"),
        (lambda c: c.update_policy_weights_({0: net(), 1: nn.Linear(4, 2)}), ValueError, "weight"),
    ],
)
def test_what_is_refused_changes_nothing(make: Any, kind: Any, call: Any, error: Any, word: str) -> None:
    collector = make(net(1.0), kind)
    with pytest.raises(error, match=word):
        call(collector)
    for _ in range(3):
        assert (collector.next()["action"] == 1).all()
    assert collector.policy_version == 0


def test_the_old_name_of_the_argument(make: Any) -> None:
    collector = make(net(1.0))
    with pytest.warns(DeprecationWarning, match="policy_weights is an old name"):
        collector.update_policy_weights_(policy_weights=net(2.0))
    assert acts(collector) == [2.0, 2.0]


@pytest.mark.parametrize("policy", [None, lambda observation: observation[..., :2]], ids=["random", "function"])
def test_a_policy_without_weights_has_none_to_update(make: Any, policy: Any) -> None:
    collector = make(policy)
    with pytest.raises(RuntimeError, match="no weights"):
        collector.update_policy_weights_()
    collector.next()
    collector.increment_version()
    assert collector.policy_version == 1
    assert collector.next() is not None


# -- what goes along -------------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    """Normalises by running moments: a buffer, and a count that only the module understands."""

    mean: Tensor

    def __init__(self, mean: float = 0.0, count: int = 0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.count = count
        self.layer = nn.Linear(3, 2)
        set_to(self.layer, 0.0)

    def forward(self, observation: Tensor) -> Tensor:
        return self.layer(observation) + self.mean + 100.0 * self.count

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "history": list(range(self.count * 300))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert len(state["history"]) == self.count * 300


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_buffers_and_extra_state_go_along_and_may_grow(make: Any, debug: bool) -> None:
    own = Normalised(1.0, 0)
    collector = make(own, debug=debug)
    assert acts(collector) == [1.0, 1.0]
    for count in (1, 5, 50):
        own.mean.fill_(2.0)
        own.count = count
        assert acts(collector)[0] != 2.0 + 100 * count, "not before it is published"
        collector.update_policy_weights_()
        assert acts(collector) == [2.0 + 100 * count] * 2
    collector.update_policy_weights_({"mean": torch.tensor(3.0)})
    assert acts(collector) == [5003.0] * 2
    collector.update_policy_weights_(Normalised(4.0, 2), worker_ids=1)
    assert acts(collector) == [5003.0, 204.0]


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_training_in_place_does_not_leak_to_workers(make: Any, kind: Any) -> None:
    for debug in (True, False):
        own = net(1.0)
        collector = make(own, kind, debug=debug)
        for number in range(8):
            set_to(own, 50.0 + number)
            assert (collector.next()["action"] == 1).all()
        assert not own.module.bias.is_shared(), "the trainer's own tensors were moved to shared memory"
        collector.update_policy_weights_()
        set_to(own, 99.0)
        until_acts(collector, 57.0)


def test_workers_do_not_share_a_policy_in_this_process(make: Any) -> None:
    collector = make(net(1.0), debug=True)
    collector.update_policy_weights_(net(2.0), worker_ids=0)
    assert acts(collector) == [2.0, 1.0]


def test_an_optimiser_goes_on(make: Any) -> None:
    own = net(1.0)
    collector = make(own, debug=False)
    optimiser = torch.optim.SGD(own.parameters(), lr=0.5)
    batch = collector.next()
    own(batch)["action"].mean().backward()
    optimiser.step()
    collector.update_policy_weights_()
    assert torch.allclose(collector.next()["action"], own(collector.next())["action"].detach(), atol=5.0)
    assert own.module.bias.is_leaf


def test_incrementing_the_version_changes_no_weights(make: Any) -> None:
    own = net(1.0)
    collector = make(own, track_policy_version=True)
    collector.update_policy_weights_(net(2.0), worker_ids=1)
    set_to(own, 50.0)
    collector.increment_version()
    batch = collector.next()
    assert batch["action"][:, 0, 0].tolist() == [1.0, 2.0]
    assert (batch["policy_version"] == 2).all()


# -- kinds of policies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_a_plain_module(make: Any, kind: Any, debug: bool) -> None:
    own = nn.Linear(3, 2)
    set_to(own, 1.0)
    collector = make(own, kind, debug=debug)
    assert (collector.next()["action"] == 1).all()
    set_to(own, 2.0)
    collector.update_policy_weights_()
    until_acts(collector, 2.0)
    collector.update_policy_weights_({"bias": 3 * ONES})
    until_acts(collector, 3.0)


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
@pytest.mark.parametrize("wraps", [True, False], ids=["wrapped", "plain"])
def test_a_lazy_policy_gets_its_shapes_from_the_first_worker(make: Any, debug: bool, wraps: bool) -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    policy: Any = TensorDictModule(lazy, in_keys=["observation"], out_keys=["action"]) if wraps else lazy
    collector = make(policy, debug=debug)
    assert [tuple(p.shape) for p in policy.parameters()] == [(4, 3), (4,), (2, 4), (2,)]
    batch = collector.next()
    with torch.no_grad():
        assert torch.allclose(lazy(batch["observation"]), batch["action"], atol=1e-6), "workers act with other weights"
        lazy[2].bias.fill_(100.0)
    collector.update_policy_weights_()
    assert (collector.next()["action"] > 50).all()
    next(policy.parameters()).sum().backward()


def test_a_sequence_of_modules(make: Any) -> None:
    first = TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["hidden"])
    second = TensorDictModule(nn.Linear(4, 2), in_keys=["hidden"], out_keys=["action"])
    set_to(second.module, 1.0)
    policy = TensorDictSequential(first, second)
    collector = make(policy)
    assert acts(collector) == [1.0, 1.0]
    set_to(second.module, 2.0)
    collector.update_policy_weights_(policy)
    assert acts(collector) == [2.0, 2.0]
    collector.update_policy_weights_({"module.1.module.bias": 3 * ONES})
    assert acts(collector) == [3.0, 3.0]


def test_tied_weights(make: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 2)
            self.two = self.one
            set_to(self.one, 1.0)

        def forward(self, observation: Tensor) -> Tensor:
            return self.one(observation) + self.two(observation)

    own = Tied()
    collector = make(own, debug=False)
    assert acts(collector) == [2.0, 2.0]
    set_to(own.two, 3.0)
    collector.update_policy_weights_()
    assert acts(collector) == [6.0, 6.0]


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_a_policy_factory_for_all(make: Any, debug: bool) -> None:
    """Called in each worker, never here; all act with the weights of the first."""
    here = os.getpid()

    def factory() -> nn.Module:
        assert debug or os.getpid() != here
        return TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])

    collector = make(None, policy_factory=factory, debug=debug)
    weights = [collector.cascade_execute("policy.state_dict")[index]["module.weight"] for index in (0, 1)]
    assert torch.equal(weights[0], weights[1])
    collector.update_policy_weights_(net(3.0))
    assert acts(collector) == [3.0, 3.0]
    with pytest.raises(RuntimeError, match=r"give them, as in update_policy_weights_\(policy\)"):
        collector.update_policy_weights_()


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_a_policy_factory_for_each(make: Any, debug: bool) -> None:
    collector = make(None, policy_factory=[lambda: net(1.0), lambda: net(2.0)], debug=debug)
    assert acts(collector) == [1.0, 2.0]
    collector.update_policy_weights_({"module.weight": torch.zeros(2, 3)})
    assert acts(collector) == [1.0, 2.0], "a part leaves the rest, which differs"
    collector.update_policy_weights_(net(5.0), worker_ids=0)
    assert acts(collector) == [5.0, 2.0]
    collector.update_policy_weights_(net(6.0))
    assert acts(collector) == [6.0, 6.0]


def test_a_policy_and_a_factory_with_schemes(make: Any) -> None:
    """As in the peer: the policy is then only where weights come from."""
    own = net(7.0)
    collector = make(own, policy_factory=net, weight_sync_schemes={})
    assert acts(collector) == [7.0, 7.0]
    set_to(own, 8.0)
    collector.update_policy_weights_()
    assert acts(collector) == [8.0, 8.0]


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_update_at_each_batch(make: Any, kind: Any) -> None:
    own = net(0.0)
    collector = make(own, kind, update_at_each_batch=True, workers=1)
    seen = []
    for number in range(1, 6):
        batch = collector.next()
        seen.append(float(batch["action"].reshape(-1)[0]))
        set_to(own, float(number))
    if kind is MultiSyncCollector:
        assert seen == [0, 1, 2, 3, 4]
        assert collector.policy_version == 5
    else:
        assert seen == sorted(seen)
        assert seen[-1] >= 1
        assert collector.policy_version == 4


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_the_version_in_the_frames_is_the_one_that_acted(make: Any, kind: Any) -> None:
    collector = make(net(0.0), kind, debug=False, track_policy_version=PolicyVersion())
    for number in range(1, 15):
        batch = collector.next()
        assert (batch["action"] == batch["policy_version"].reshape(*batch.shape, 1)).all()
        assert torch.equal(batch["policy_version"], batch["next", "policy_version"])
        assert batch["policy_version"].dtype == torch.int64
        collector.update_policy_weights_(net(float(number)))


def test_async_frames_carry_their_version_unless_told_not_to(make: Any) -> None:
    assert "policy_version" in make(net(), MultiAsyncCollector).next()
    assert "policy_version" not in make(net(), MultiAsyncCollector, track_policy_version=False).next()
    assert "policy_version" not in make(net(), MultiSyncCollector).next()


# -- torn weights ----------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two parameters that must be equal, far apart in memory, and both in the action."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(()))
        self.between = nn.Parameter(torch.zeros(4096))
        self.second = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor) -> Tensor:
        return torch.stack([self.first, self.second]).expand(*observation.shape[:-1], 2)


@pytest.mark.parametrize("kind", [MultiAsyncCollector, MultiSyncCollector])
def test_no_frame_is_made_by_half_of_an_update(make: Any, kind: Any) -> None:
    """The founding document's line: 10,000 updates while workers collect, and no action mixes two of them."""
    updates = 10_000 if kind is MultiAsyncCollector else 1000
    policy = Pair()
    collector = make(policy, kind, debug=False, frames_per_batch=8, track_policy_version=PolicyVersion())
    version = torch.zeros(())
    frames, seen = 0, set()
    with torch.no_grad():
        for number in range(1, updates + 1):
            policy.first.fill_(number)
            policy.second.fill_(number)
            collector.update_policy_weights_()
            if number % (20 if kind is MultiAsyncCollector else 5) == 0:
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


def test_weights_arrive_whole_while_workers_run_free() -> None:
    from swath.data import LazyTensorStorage, ReplayBuffer

    policy = Pair()
    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000), shared=True)
    collector = MultiAsyncCollector(
        [CountingEnv] * 2, policy, frames_per_batch=10, replay_buffer=buffer, total_frames=4000
    )
    collector.start()
    number, deadline = 0, time.monotonic() + WAIT_S
    with torch.no_grad():
        while collector.is_running():
            assert time.monotonic() < deadline
            number += 1
            policy.first.fill_(number)
            policy.second.fill_(number)
            collector.update_policy_weights_()
    data = buffer[:]
    collector.async_shutdown()
    assert len(data) == 4000
    assert torch.equal(data["action"][:, 0], data["action"][:, 1])
    assert torch.equal(data["action"][:, 0].long(), data["policy_version"].reshape(-1))
    assert len(data["policy_version"].unique()) > 5


# -- nobody waits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_publishing_does_not_wait_for_a_stopped_worker(make: Any, kind: Any) -> None:
    policy = net(0.0)
    collector = make(policy, kind, debug=False)
    collector.next()
    pid = collector.worker_pids[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        for number in range(500):
            set_to(policy, float(number + 1))
            collector.update_policy_weights_()
        assert time.monotonic() - begin < 10.0, "it has waited"
    finally:
        os.kill(pid, signal.SIGCONT)
    until_acts(collector, 500.0)
