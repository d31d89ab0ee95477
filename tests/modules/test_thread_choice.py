"""Large networks are called with one thread or all, whichever is quicker, where that changes no result."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_zoo import CHOICES, SIZE, THREADS, VECTOR, WaveEnv, mlp
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from swath.collectors import Collector
from swath.modules import call_context, thread_choice, watching
from swath.modules.thread_choice import COMPARED, MOST_FORMS, TRIALS, Quicker, ThreadChoice
from swath.modules.watching import Watched

LANES = 64
pytestmark = [
    pytest.mark.skipif(call_context._numbers() is None, reason="torch was built without OpenMP"),
    pytest.mark.usefixtures("several_threads"),
]
seconds = st.floats(1e-5, 1e-1)


# -- which is quicker --------------------------------------------------------------------------------------------------


def ways(quicker: Quicker, costs: list[float], calls: int) -> list[int]:
    """Those that are taken where each takes so long."""
    taken = []
    for _ in range(calls):
        taken.append(quicker.way)
        quicker.took(costs[quicker.way])
    return taken


@given(seconds, seconds)
def test_the_slower_way_takes_little_of_the_time(one: float, other: float) -> None:
    quicker, costs = Quicker(), [one, other]
    ways(quicker, costs, 2 * TRIALS + 1)
    taken = ways(quicker, costs, 20_000)
    slower = sum(max(costs) - min(costs) for way in taken if costs[way] > min(costs))
    assert slower <= 0.02 * sum(costs[way] for way in taken) + TRIALS * max(costs)


@given(seconds, seconds, seconds)
def test_what_has_become_slower_is_left_and_taken_again_later(one: float, other: float, more: float) -> None:
    """Another process keeps a core busy for a while: all threads take longer then, and one as long as before."""
    free, busy = [one, one + other], [one + 2 * other + more, one + other]
    quicker = Quicker()
    ways(quicker, free, 100)
    assert quicker.way == 0 or TRIALS * one < other
    spent = 0.0
    while quicker._best == 0:
        spent += busy[quicker.way]
        quicker.took(busy[quicker.way])
    assert spent <= 2 * TRIALS * (sum(free) + sum(busy)) / thread_choice.TRIAL_SHARE
    while quicker._best == 1:
        quicker.took(free[quicker.way])


# -- the number of threads ---------------------------------------------------------------------------------------------


def seen_by(slow: Callable[[], bool], result: Callable[[], Any], calls: int = 60) -> list[int]:
    """How many threads each call has that takes a while if it is `slow`, and returns something."""
    seen = list[int]()

    def call(given: Tensor) -> Any:
        seen.append(torch.get_num_threads())
        if slow():
            time.sleep(0.002)
        return result()

    called = ThreadChoice().around(call)
    for _ in range(calls):
        called(torch.arange(2.0))
        assert torch.get_num_threads() == THREADS
    return seen


def test_one_thread_is_taken_where_several_are_slow() -> None:
    seen = seen_by(lambda: torch.get_num_threads() > 1, lambda: torch.ones(2))
    assert seen[: 2 * COMPARED] == [THREADS, 1] * COMPARED, "both were compared"
    assert seen[-1] == 1
    assert seen.count(THREADS) <= COMPARED + 2 * TRIALS


def test_all_are_taken_where_one_is_slow() -> None:
    seen = seen_by(lambda: torch.get_num_threads() == 1, lambda: (torch.ones(2), torch.arange(2.0)))
    assert seen[-1] == THREADS
    assert seen.count(1) <= COMPARED + 2 * TRIALS


@pytest.mark.parametrize(
    "result",
    [
        lambda: torch.full((2,), 1.0 + 1e-7 * torch.get_num_threads()),
        lambda: (torch.ones(2), torch.full((2,), float(torch.get_num_threads()))),
        lambda: torch.full((2,), 1.0 + 1e-7 * torch.get_num_threads()) > 0,
        lambda: torch.full((2,), torch.nan),
    ],
)
def test_all_are_taken_where_results_are_not_the_same(result: Callable[[], Any]) -> None:
    seen = seen_by(lambda: torch.get_num_threads() > 1, result, calls=20)
    assert seen == [THREADS, 1, *[THREADS] * 19]


def test_shapes_are_compared_one_by_one() -> None:
    seen = list[int]()

    def call(given: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return given + (torch.get_num_threads() if len(given) == 2 else 0)

    called = ThreadChoice().around(call)
    for size in (3, 2, 2, 2, 3):
        called(torch.arange(float(size)))
    assert seen == [THREADS, 1, THREADS, 1, THREADS, THREADS, THREADS, 1]


# -- policies ----------------------------------------------------------------------------------------------------------


SUM = torch.zeros(())


class Large(nn.Module):
    """Too large for one thread, and to be run as arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(mlp(600), nn.Tanh(), nn.Linear(600, 600), nn.ReLU(inplace=True))
        self.out, self.drop = nn.Linear(600, CHOICES), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(2))
        self.rate = nn.Parameter(torch.ones(()), requires_grad=False)
        self.plain, self.calls, self.room = torch.zeros(()), 0, torch.zeros(LANES, CHOICES)

    def forward(self, observation: Tensor) -> Tensor:
        observation = observation.float()
        hidden = self.net(observation / 2)
        hidden[:, 0].mul_(2)
        return self.out(hidden).argmax(-1)


class ByMethod(Large):
    def act(self, observation: Tensor) -> Tensor:
        return self.forward(observation)


class Counting(Large):
    def forward(self, observation: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(observation)


class Drawing(Large):
    def forward(self, observation: Tensor) -> Tensor:
        return self.out(self.drop(self.net(observation))).argmax(-1)


class ToBuffer(Large):
    def forward(self, observation: Tensor) -> Tensor:
        self.seen[0].add_(1)
        return super().forward(observation)


class ToParameter(Large):
    def forward(self, observation: Tensor) -> Tensor:
        self.rate.mul_(0.9)
        return super().forward(observation)


class ToPlain(Large):
    def forward(self, observation: Tensor) -> Tensor:
        self.plain.add_(1)
        return super().forward(observation)


class ToGlobal(Large):
    def forward(self, observation: Tensor) -> Tensor:
        SUM.add_(1)
        return super().forward(observation)


class ToInput(Large):
    def forward(self, observation: Tensor) -> Tensor:
        return super().forward(observation.mul_(2))


class IntoRoom(Large):
    def forward(self, observation: Tensor) -> Tensor:
        torch.mm(self.net(observation), self.out.weight.T, out=self.room)
        return self.room.argmax(-1)


class Printing(Large):
    def forward(self, observation: Tensor) -> Tensor:
        print("called")
        return super().forward(observation)


class RunningMean(Large):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(1))

    def forward(self, observation: Tensor) -> Tensor:
        nn.functional.instance_norm(observation[:, None, :2], self.seen[:1], self.spread, use_input_stats=True)
        return super().forward(observation)


class Sparse(Large):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(LANES).to_sparse(), persistent=False)

    def forward(self, observation: Tensor) -> Tensor:
        return super().forward(torch.mm(self.graph, observation))


class Padded(Large):
    """In eval mode, torch's encoder makes nested tensors where something is padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 512, batch_first=True)
        self.encoder, self.first = nn.TransformerEncoder(layer, 1), nn.Linear(1, 8)
        self.eval()

    def forward(self, observation: Tensor) -> Tensor:
        seen = self.encoder(self.first(observation[..., None]), src_key_padding_mask=observation < -5)
        return super().forward(seen.flatten(1)[:, :SIZE])


class Trimming(Large):
    """What is computed depends on what is seen."""

    def forward(self, observation: Tensor) -> Tensor:
        longest = 1 + int((observation[:, 0] > 0).sum())
        return super().forward(observation + self.net(observation[:longest]).sum(0)[:SIZE])


class Masking(Large):
    def forward(self, observation: Tensor) -> Tensor:
        return super().forward(observation + self.net(observation[observation[:, 0] > 0]).sum(0)[:SIZE])


class Summing(Large):
    """One number, for which threads share the work; it may be the same by chance."""

    def forward(self, observation: Tensor) -> Tensor:
        return super().forward(observation + self.net(observation).sum())


def batches(net: nn.Module, steps: int = 60) -> list[Any]:
    torch.manual_seed(2)
    env = WaveEnv(observation_space=VECTOR, lengths=[7] * LANES)
    options = {"method": "act"} if isinstance(net, ByMethod) else {}
    policy = TensorDictModule(net, ["observation"], ["action"], **options)
    with Collector(env, policy, frames_per_batch=20 * LANES, total_frames=steps * LANES) as collector:
        collector.set_seed(1)
        return list(collector)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], list[int]]:
    """Lets calls take ways in turn, whatever is quicker, and tells which were taken."""

    def take(ways: list[int]) -> list[int]:
        found = list[int]()

        def took(quicker: Quicker, seconds: float) -> None:
            found.append(quicker.way)
            quicker.way = ways[len(found) % len(ways)]

        monkeypatch.setattr(Quicker, "took", took)
        return found

    return take


@pytest.mark.parametrize("kind", [Large, ByMethod])
@pytest.mark.parametrize("ways", [[0], [1], [0, 1, 1]], ids=str)
def test_what_is_chosen_changes_nothing(kind: type[nn.Module], ways: list[int], taken: Any) -> None:
    torch.manual_seed(0)
    net, found = kind(), taken(ways)
    chosen = batches(net)
    assert len(found) == 60 - COMPARED, "all but the first calls"
    assert set(found) >= set(ways)
    torch.set_num_threads(1)
    expected = batches(net)
    assert len(found) == 60 - COMPARED
    assert all((one == other).all() for one, other in zip(chosen, expected, strict=True))


@pytest.mark.parametrize(
    "kind",
    [
        *(Counting, Drawing, ToBuffer, ToParameter, ToPlain, ToGlobal, ToInput, IntoRoom),
        *(Printing, RunningMean, Sparse, Padded, Trimming, Masking, Summing),
    ],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_what_does_more_than_to_compute_is_not_tried(
    kind: type[nn.Module], taken: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    net, alone, found = kind(), kind(), taken([1])
    alone.load_state_dict(net.state_dict())
    SUM.zero_()
    chosen, added = batches(net), SUM.item()
    assert not found
    assert capsys.readouterr().out.count("called") in (0, 61), "once when it is probed, and once for each step"
    torch.set_num_threads(1)
    expected = batches(alone)
    assert all((one == other).all() for one, other in zip(chosen, expected, strict=True))
    assert SUM.item() == 2 * added
    assert (net.calls, net.plain) == (alone.calls, alone.plain)
    for name, value in net.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name])


def test_another_plan_for_the_same_network_knows_the_choice(taken: Any) -> None:
    class Annealed(Large):
        heat = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.heat = 2.0

        def forward(self, observation: Tensor) -> Tensor:
            return super().forward(observation * self.heat)

    net, found = Annealed(), taken([0])
    env = WaveEnv(observation_space=VECTOR, lengths=[7] * LANES)
    policy = TensorDictModule(net, ["observation"], ["action"])
    with Collector(env, policy, frames_per_batch=LANES, total_frames=(COMPARED + 2) * LANES) as collector:
        for _ in collector:
            net.heat *= 0.9
    assert len(found) == 2


def test_two_functions_of_the_same_shapes_are_compared_one_by_one(taken: Any) -> None:
    net = nn.Sequential(Large().net, nn.Linear(600, CHOICES))
    one, other = (lambda observation: net(observation).argmax(-1)), (lambda observation: net(observation).argmin(-1))
    env, found = WaveEnv(observation_space=VECTOR, lengths=[7] * LANES), taken([0])
    parts = [TensorDictModule(act, ["observation"], [key]) for act, key in ((one, "action"), (other, "again"))]
    steps = COMPARED + 1
    with Collector(
        env, TensorDictSequential(*parts), frames_per_batch=steps * LANES, total_frames=steps * LANES
    ) as collector:
        list(collector)
    assert len(found) == 2


@pytest.mark.parametrize(("change", "more"), [("pools", 2), ("train", 0)])
def test_a_network_that_does_something_else_is_compared_anew(change: str, more: int, taken: Any) -> None:
    """One that trains counts the mean of what it sees: it is not called twice."""

    class Normed(Large):
        def __init__(self) -> None:
            super().__init__()
            self.pools, self.norm = False, nn.BatchNorm1d(SIZE)
            self.eval()

        def forward(self, observation: Tensor) -> Tensor:
            observation = self.norm(observation)
            return super().forward(observation - observation.amax(0) if self.pools else observation)

    net, found, steps = Normed(), taken([0]), COMPARED + 2
    env = WaveEnv(observation_space=VECTOR, lengths=[7] * LANES)
    policy = TensorDictModule(net, ["observation"], ["action"])
    with Collector(env, policy, frames_per_batch=steps * LANES, total_frames=2 * steps * LANES) as collector:
        for _ in collector:
            assert len(found) in (2, 2 + more)
            net.norm.train() if change == "train" else setattr(net, "pools", True)
    assert len(found) == 2 + more


def test_networks_that_were_replaced_are_let_go() -> None:
    policy, alive = TensorDictModule(Large(), ["observation"], ["action"]), list[weakref.ref[nn.Module]]()
    env = WaveEnv(observation_space=VECTOR, lengths=[7] * LANES)
    with Collector(env, policy, frames_per_batch=LANES, total_frames=9 * LANES) as collector:
        for _ in collector:
            alive.append(weakref.ref(policy.module))
            policy.module = Large()
        gc.collect()
        assert sum(net() is not None for net in alive) <= 2, "of the last plan, and of the one before"


def test_what_fails_when_it_is_made_a_second_time_is_called_as_ever() -> None:
    def result() -> Tensor:
        if torch.get_num_threads() == 1:
            raise MemoryError
        return torch.ones(2)

    assert seen_by(lambda: False, result, calls=4) == [THREADS, 1, *[THREADS] * 3]


def test_a_network_that_makes_much_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_HELD", 1_000)
    assert seen_by(lambda: False, lambda: torch.ones(300), calls=4) == [THREADS] * 4


def test_data_that_are_all_the_same_tell_nothing() -> None:
    seen, called = list[int](), ThreadChoice().around(lambda given: seen.append(torch.get_num_threads()) or given * 2)
    for _ in range(3):
        called(torch.zeros(8))
    assert seen == [THREADS] * 3
    called(torch.arange(8.0))
    assert seen[3:] == [THREADS, 1]


def test_there_is_a_choice_for_few_shapes() -> None:
    seen, called = list[int](), ThreadChoice().around(lambda given: seen.append(torch.get_num_threads()) or given * 2)
    for size in range(2, 100):
        called(torch.arange(float(size)))
    assert seen.count(1) == MOST_FORMS


def test_one_that_an_interrupt_leaves_behind_holds_nothing() -> None:
    watched = Watched()
    with watched:
        torch.ones(2)
        watched.end()
        torch.ones(3)
        assert not watched._computed


def test_an_interrupt_within_a_call_leaves_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    exit_ = call_context.CallContext.__exit__
    interrupts = iter([None] * COMPARED + [KeyboardInterrupt()])

    def interrupted(self: Any, *exc: Any) -> None:
        if self._numbers is not None and self._before is not None and (error := next(interrupts, None)) is not None:
            raise error
        exit_(self, *exc)

    monkeypatch.setattr(Quicker, "took", lambda quicker, _: setattr(quicker, "way", 1))
    monkeypatch.setattr(call_context.CallContext, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        batches(Large())
    assert torch.get_num_threads() == THREADS
