"""InferenceServer: requests share forwards, each answer belongs to its request, weights change between batches."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from inference_tools import (
    WAIT_S,
    Doubling,
    ask,
    ask_many,
    factor_policy,
    is_answered,
    mlp_policy,
    within,
)
from policy_zoo import DISCRETE, WaveEnv, discrete, gru_policy, lstm_policy
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import Collector, MultiSyncCollector
from swath.errors import ClosedError, RowCountError
from swath.modules import (
    ExplorationType,
    InferenceServer,
    PolicyClientModule,
    RandomPolicy,
    set_exploration_type,
)

pytestmark = pytest.mark.timeout(100)

Serve = Callable[..., InferenceServer]
BOTH = pytest.mark.parametrize("backend", ["thread", "process"])


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes servers that are started, and shut down after the test."""
    made: list[InferenceServer] = []

    def start(*args: Any, **options: Any) -> InferenceServer:
        made.append(InferenceServer(*args, **options).start())
        return made[-1]

    yield start
    for server in made:
        server.shutdown()


@pytest.fixture(scope="module")
def children() -> Any:
    """A way to start processes that have imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["swath.modules", "inference_tools"])
    return context


# -- batches ---------------------------------------------------------------------------------------------------------


def test_requests_that_wait_share_a_forward(serve: Serve) -> None:
    policy = Doubling()
    client = serve(policy).client()
    with policy.held_up(client):
        futures = [client.submit(ask(number)) for number in range(5)]
        assert not any(future.done() for future in futures)
    assert all(is_answered(future.result(WAIT_S)) for future in futures)
    assert policy.rows == [1, 5]
    assert all(future.done() for future in futures)


def test_no_more_than_the_largest_batch(serve: Serve) -> None:
    policy = Doubling()
    client = serve(policy, max_batch_size=3).client()
    with policy.held_up(client):
        futures = [client.submit(ask(number)) for number in range(7)]
    assert all(is_answered(future.result(WAIT_S)) for future in futures)
    assert policy.rows == [1, 3, 3, 1]


def test_a_smallest_batch_is_waited_for(serve: Serve) -> None:
    policy = Doubling()
    client = serve(policy, min_batch_size=4, timeout=3600.0).client()
    futures = [client.submit(ask(number)) for number in range(3)]
    with pytest.raises(TimeoutError):
        futures[0].result(0.1)
    assert policy.rows == []
    futures.append(client.submit(ask(3)))
    assert all(is_answered(future.result(WAIT_S)) for future in futures)
    assert policy.rows == [4]


def test_a_smallest_batch_is_not_waited_for_longer_than_the_timeout(serve: Serve) -> None:
    policy = Doubling()
    client = serve(policy, min_batch_size=4, timeout=0.05).client()
    assert is_answered(client(ask(1), timeout=WAIT_S))
    assert policy.rows == [1]


def test_requests_may_have_any_batch_size(serve: Serve) -> None:
    policy = Doubling()
    client = serve(policy).client()
    with policy.held_up(client):
        futures = [client.submit(ask(n, *size)) for n, size in enumerate([(), (3,), (2, 2), (0,), (1,)])]
    for future in futures:
        answer = future.result(WAIT_S)
        assert is_answered(answer)
        assert answer["policy_version"].shape == answer.batch_size
    assert policy.rows == [1, 9]


def test_requests_of_different_entries_have_forwards_of_their_own(serve: Serve) -> None:
    rows = []

    def policy(tensordict: Any) -> Any:
        rows.append((sorted(tensordict.keys()), len(tensordict)))
        return tensordict.set("answer", torch.zeros(len(tensordict)))

    held = Doubling()

    def either(tensordict: Any) -> Any:
        return held(tensordict) if "question" in tensordict else policy(tensordict)

    client = serve(either).client()
    with held.held_up(client):
        futures = [client.submit(TensorDict({name: torch.zeros(2)}, [])) for name in ("a", "b", "a")]
        futures.append(client.submit(TensorDict({"a": torch.zeros(3)}, [])))
    for future in futures:
        assert future.result(WAIT_S)["answer"].shape == ()
    assert rows == [(["a"], 2), (["b"], 1), (["a"], 1)]


@BOTH
def test_requests_explore_as_their_clients_do(serve: Serve, backend: str) -> None:
    def policy(tensordict: Any) -> Any:
        from swath.modules import ExplorationType, exploration_type

        kind = [None, *ExplorationType].index(exploration_type())
        return tensordict.set("kind", torch.full((len(tensordict),), kind))

    client = serve(policy, backend=backend, min_batch_size=3, timeout=0.2).client()
    futures, kinds = [], (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, None)
    for kind in kinds:
        with set_exploration_type(kind):
            futures.append(client.submit(ask(1)))
    seen = [[None, *ExplorationType][int(future.result(WAIT_S)["kind"])] for future in futures]
    assert seen == list(kinds)


@BOTH
def test_each_answer_belongs_to_its_request(serve: Serve, children: Any, backend: str) -> None:
    """Two processes of two threads each, and threads here, on the first of which the server may be itself."""
    server = serve(factor_policy(), backend=backend)
    client, results = server.client(), children.Queue()
    processes = [children.Process(target=ask_many, args=(client, 1000 * i, 60, results)) for i in range(2)]
    for process in processes:
        process.start()
    wrong: list[int] = []

    def run(start: int) -> None:
        wrong.extend(n for n in range(start, start + 60) if not is_answered(client(ask(n, *((n % 3,) * (n % 2))))))

    threads = [threading.Thread(target=run, args=(100_000 * i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    assert [results.get(timeout=60) for _ in processes] == [(120, 120)] * 2
    for worker in (*threads, *processes):
        worker.join(WAIT_S)
    assert wrong == []
    stats = server.stats()
    assert stats["requests"] == 6 * 60 + 2 * 120
    assert stats["avg_batch_size"] > 1


def test_a_client_goes_to_a_spawned_process(serve: Serve) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    client = serve(Doubling()).client()
    process = context.Process(target=ask_many, args=(PolicyClientModule(client).client, 0, 3, results))
    process.start()
    assert results.get(timeout=60) == (6, 6)
    process.join(WAIT_S)


@BOTH
def test_answers_are_never_overwritten(serve: Serve, backend: str) -> None:
    client = serve(factor_policy(), backend=backend).client()
    kept = [client(ask(number)) for number in range(20)]
    assert all(is_answered(answer) for answer in kept)
    kept[3]["answer"].zero_()
    assert all(is_answered(answer) for index, answer in enumerate(kept) if index != 3)


@BOTH
def test_what_is_submitted_may_be_changed_at_once(serve: Serve, backend: str) -> None:
    client = serve(factor_policy(), backend=backend).client()
    for number in range(1, 4):
        td = ask(number)
        future = client.submit(td)
        td["question"].zero_()
        assert (future.result(WAIT_S)["answer"] == 2 * number).all()


# -- what the policy does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_small_networks_give_what_the_module_gives(serve: Serve, kind: Any) -> None:
    policy = discrete()
    client = serve(policy).client()
    with set_exploration_type(kind):
        for rows in (1, 3, 2, 9):
            td = TensorDict({"observation": torch.randn(rows, 4)}, [rows])
            answer = client(td.clone())
            dist = policy.get_dist(td.clone())
            assert torch.allclose(answer["action_log_prob"], dist.log_prob(answer["action"]), atol=1e-5)
            if kind is ExplorationType.DETERMINISTIC:
                assert torch.equal(answer["action"], policy(td.clone())["action"])


def test_samples_are_not_all_the_same(serve: Serve) -> None:
    client = serve(discrete()).client()
    with set_exploration_type(ExplorationType.RANDOM):
        drawn = {client(TensorDict({"observation": torch.zeros(4)}, []))["action"].item() for _ in range(200)}
    assert len(drawn) == 3


def test_nested_entries_and_other_types(serve: Serve) -> None:
    def policy(tensordict: Any) -> Any:
        value = tensordict["deep", "in"]
        return tensordict.set(("deep", "out"), value + 1).set("flag", value[..., 0] > 0)

    client = serve(policy).client()
    for dtype in (torch.bfloat16, torch.int64, torch.float64):
        td = TensorDict({"deep": {"in": torch.ones(2, 3, dtype=dtype)}}, [2])
        answer = client(td)
        assert torch.equal(answer["deep", "out"], torch.full((2, 3), 2, dtype=dtype))
        assert answer["flag"].dtype is torch.bool


def test_gradients_stay_here(serve: Serve) -> None:
    client = serve(factor_policy()).client()
    td = TensorDict({"question": torch.ones(2, requires_grad=True)}, [])
    assert not client(td)["answer"].requires_grad


@BOTH
def test_an_error_goes_to_those_who_asked_and_the_server_lives_on(serve: Serve, backend: str) -> None:
    def policy(tensordict: Any) -> Any:
        if (tensordict["question"] < 0).any():
            raise ZeroDivisionError("a negative question")
        return tensordict.set("answer", 2 * tensordict["question"])

    server = serve(policy, backend=backend)
    client = server.client()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a negative question") as caught:
            client(ask(-1))
        assert "InferenceServer" in "".join(getattr(caught.value, "__notes__", ["InferenceServer"]))
        assert "policy" in str(caught.value.__cause__)
        assert is_answered(client(ask(1)))
    assert server.stats()["errors"] == 2


def test_an_error_goes_to_all_of_its_forward_and_nobody_else(serve: Serve) -> None:
    policy = Doubling()
    client = serve(policy, max_batch_size=2).client()
    with policy.held_up(client):
        futures = [client.submit(ask(number)) for number in (1, -1, 2, 3)]
    for future in futures[:2]:
        with pytest.raises(ZeroDivisionError):
            future.result(WAIT_S)
    assert all(is_answered(future.result(WAIT_S)) for future in futures[2:])


@pytest.mark.parametrize("wrong", [lambda v: v[:1], lambda v: torch.cat([v, v]), lambda v: v.sum()])
def test_a_wrong_number_of_rows_is_an_error(serve: Serve, wrong: Any) -> None:
    client = serve(lambda td: TensorDict({"answer": wrong(td["question"])}, [])).client()
    with pytest.raises(RowCountError, match="asked for 2 rows"):
        client(ask(1, 2))
    with pytest.raises(RuntimeError, match="rows"):
        client(ask(1, 3))


# -- weights ---------------------------------------------------------------------------------------------------------


@BOTH
def test_weights_come_in_every_form(serve: Serve, backend: str) -> None:
    policy = factor_policy(2.0)
    server = serve(policy, backend=backend, policy_version=5)
    client = server.client()
    assert client(ask(1))["policy_version"] == 5
    with torch.no_grad():
        for weight in policy.parameters():
            weight.fill_(3.0)
    assert is_answered(client(ask(1)), 2.0)  # it is trained; nothing was published yet
    server.update_policy_weights_()
    assert is_answered(client(ask(1)), 3.0)
    sources = [factor_policy(4.0), factor_policy(5.0).state_dict(), TensorDict.from_module(factor_policy(6.0))]
    for factor, source in enumerate(sources, 4):
        server.update_policy_weights_(source)
        answer = client(ask(1))
        assert is_answered(answer, factor)
        assert answer["policy_version"] == server.policy_version == factor + 3
    server.update_model_weights(weights=factor_policy(9.0).module)
    assert is_answered(client(ask(1)), 9.0)
    with pytest.raises(KeyError, match="three"):
        server.update_policy_weights_({"three": torch.ones(())})
    with pytest.raises(ValueError, match="shape"):
        server.update_policy_weights_({"one": torch.ones(7)})
    assert server.stats()["weight_updates"] == 5
    assert server.policy_version == 10


@BOTH
def test_the_policy_can_be_changed_by_a_function(serve: Serve, backend: str) -> None:
    server = serve(factor_policy(), backend=backend)
    client = server.client()

    def double(policy: Any) -> float:
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(2)
        return float(weight)

    assert is_answered(client(ask(1)))
    assert server.update_model(double) == 4.0
    assert is_answered(client(ask(1)), 4.0)
    assert server.update_model(double, mark_weight_update=False) == 8.0
    assert client(ask(1))["policy_version"] == 1
    with pytest.raises(AttributeError):
        server.update_model(lambda policy: policy.nothing)
    assert server.policy_version == 1


def test_networks_that_run_as_stages_take_new_weights_and_layers(serve: Serve) -> None:
    policy = mlp_policy()
    server = serve(policy)
    client = server.client()
    td = TensorDict({"observation": torch.randn(3, 4)}, [3])
    for _ in range(3):
        assert torch.allclose(client(td.clone())["action"], policy(td.clone())["action"], atol=1e-6)
        with torch.no_grad():
            policy.module[0].weight.mul_(-2)
        server.update_policy_weights_()
    policy.module[1] = nn.ReLU()

    def replace(served: Any) -> None:
        served.module[1] = nn.ReLU()

    server.update_model(replace)
    for _ in range(3):
        assert torch.allclose(client(td.clone())["action"], policy(td.clone())["action"], atol=1e-6)


@BOTH
def test_no_answer_is_made_of_two_versions(serve: Serve, backend: str) -> None:
    server = serve(factor_policy(0.0), backend=backend)
    client = server.client()
    seen: list[TensorDict] = []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            seen.append(client(ask(1, 3)))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(1, 31):
        server.update_policy_weights_(factor_policy(float(version)))
    is_over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert len({int(answer["policy_version"][0]) for answer in seen}) > 3
    for answer in seen:
        version = answer["policy_version"].float()[:, None].expand(3, 2)
        assert torch.equal(answer["answer"], version)
        assert torch.equal(answer["again"], version)


# -- life ------------------------------------------------------------------------------------------------------------


@BOTH
def test_the_life_of_a_server(backend: str) -> None:
    server = InferenceServer(factor_policy(), backend=backend)
    assert not server.is_alive
    with pytest.raises(ClosedError, match="not started"):
        server.client()(ask(1))
    with server as entered:
        assert entered is server
        assert server.is_alive
        with pytest.raises(RuntimeError, match="started already"):
            server.start()
        first, second = server.clients(2)
        assert is_answered(first(ask(1)))
        assert is_answered(second(ask(2)))
        assert server.health()["process_alive"]
    assert not server.is_alive
    server.shutdown()
    with pytest.raises(ClosedError, match="shut down"):
        first(ask(1))
    with pytest.raises(ClosedError):
        server.update_policy_weights_(factor_policy())
    with pytest.raises(RuntimeError):
        server.start()


def test_a_process_can_make_its_policy_itself(serve: Serve) -> None:
    server = serve(policy_factory=lambda: factor_policy(7.0), backend="process")
    assert is_answered(server.client()(ask(1)), 7.0)
    with pytest.raises(ValueError, match="factory"):
        server.update_policy_weights_()


def test_requests_that_wait_are_refused_at_shutdown_at_once() -> None:
    policy = Doubling()
    server = InferenceServer(policy).start()
    client = server.client()
    policy.open.clear()
    first = client.submit(ask(1))
    assert policy.entered.wait(WAIT_S)
    waiting = [client.submit(ask(number)) for number in range(3)]
    ending = threading.Thread(target=server.shutdown)
    ending.start()
    for future in waiting:
        with pytest.raises(ClosedError, match="was shut down"):
            future.result(WAIT_S)
    policy.open.set()
    ending.join(WAIT_S)
    assert is_answered(first.result(WAIT_S))  # it was being served


@BOTH
def test_a_late_answer_is_dropped(serve: Serve, backend: str) -> None:
    client = serve(factor_policy(), backend=backend, min_batch_size=2, timeout=0.3).client()
    for number in range(1, 4):
        td = ask(number)
        with pytest.raises(TimeoutError):
            client(td, timeout=0.01)
        assert "answer" not in td
        assert is_answered(client(ask(100 + number)))


@BOTH
def test_a_future_can_be_asked_again(serve: Serve, backend: str) -> None:
    future = serve(factor_policy(), backend=backend, min_batch_size=2, timeout=0.3).client().submit(ask(4))
    with pytest.raises(TimeoutError):
        future.result(0.01)
    assert is_answered(future.result(WAIT_S))
    assert future.result() is future.result()


def test_nobody_is_forgotten_where_threads_wake_each_other(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some give up at any moment, some ask without waiting: whoever waits behind them is woken all the same."""
    monkeypatch.setattr("swath.modules.inference_loop.LOOK_S", 1000.0)  # nobody looks by himself
    client = serve(factor_policy()).client()
    wrong: list[int] = []

    def run(first: int) -> None:
        futures = []
        for number in range(first, first + 100):
            with contextlib.suppress(TimeoutError):
                if number % 4 == 1:
                    client(ask(number), timeout=0.0005 * (number % 7))
                elif number % 4 == 2:
                    futures.append(client.submit(ask(number)))
                elif not is_answered(client(ask(number))):
                    wrong.append(number)
        wrong.extend(0 for future in futures if not is_answered(future.result(WAIT_S)))

    threads = [threading.Thread(target=run, args=(1000 * i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_stats(serve: Serve) -> None:
    policy = Doubling()
    server = serve(policy, max_batch_size=8)
    client = server.client()
    with policy.held_up(client):
        futures = [client.submit(ask(number)) for number in range(3)]
    for future in futures:
        future.result(WAIT_S)
    stats = server.stats(reset=True)
    assert (stats["requests"], stats["batches"], stats["avg_batch_size"], stats["batch_fill"]) == (4, 2, 2.0, 0.25)
    for name in ("requests_per_s", "batches_per_s", "p50_queue_ms", "p95_queue_ms", "p50_forward_ms", "p95_forward_ms"):
        assert stats[name] > 0
    assert server.stats()["requests"] == 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "neither"),
        ({"policy": Doubling(), "policy_factory": Doubling}, ValueError, "both"),
        ({"policy": Doubling(), "backend": "ray"}, ValueError, "backend"),
        ({"policy": Doubling(), "max_batch_size": 0}, ValueError, "max_batch_size"),
        ({"policy": Doubling(), "min_batch_size": True}, ValueError, "min_batch_size"),
        ({"policy": Doubling(), "min_batch_size": 9, "max_batch_size": 8}, ValueError, "above"),
        ({"policy": Doubling(), "timeout": -1}, ValueError, "timeout"),
        ({"policy": Doubling(), "timeouts": 1}, TypeError, "unknown argument"),
        ({"policy": Doubling(), "collate_fn": torch.stack}, ValueError, "row by row"),
        ({"policy": Doubling(), "model": Doubling()}, TypeError, "both policy and model"),
        ({"policy": 3}, TypeError, "callable"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        InferenceServer(**options)


def test_the_names_of_torchrl_are_understood(serve: Serve) -> None:
    server = serve(
        model=factor_policy(),
        service_backend="thread",
        policy_device="cpu",
        stats_window_size=3,
        transport="auto",
        num_clients=2,
        collect_stats=True,
        policy_version_key="version",
    )
    assert server.client()(ask(1))["version"] == 0


# -- in the place of a policy ----------------------------------------------------------------------------------------


def test_a_client_as_a_module(serve: Serve) -> None:
    client = serve(factor_policy()).client()
    module = PolicyClientModule(client, max_inflight=2)
    assert (module.in_keys, module.out_keys) == (["question"], ["answer", "again"])
    assert copy.deepcopy(module).client is client
    futures = [module.submit(ask(number)) for number in range(5)]
    assert all(is_answered(future.result(WAIT_S)) for future in futures)
    assert is_answered(module(ask(3)))
    with pytest.raises(ValueError, match="max_inflight"):
        PolicyClientModule(client, max_inflight=0)
    other = pickle.loads(pickle.dumps(PolicyClientModule(client, in_keys=["question"], out_keys=["answer"])))
    assert is_answered(other(ask(5)))
    assert is_answered(other(ask(6)))


def test_a_module_must_know_its_keys(serve: Serve) -> None:
    client = serve(lambda td: td.set("answer", td["question"])).client()
    with pytest.raises(ValueError, match="in_keys"):
        PolicyClientModule(client)


def test_a_module_explores_as_it_was_told(serve: Serve) -> None:
    policy = Doubling()
    module = PolicyClientModule(serve(policy).client(), interaction_type=ExplorationType.MODE)
    module(ask(1))
    assert policy.types == [ExplorationType.MODE]


def make_env() -> WaveEnv:
    return WaveEnv(DISCRETE, lengths=(5, 3))


def collected(collector: Any) -> list[Any]:
    with collector:
        collector.set_seed(0)
        return [batch.clone() for batch in collector]


POLICIES = {"gru": gru_policy, "lstm": lstm_policy}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_a_recurrent_policy_through_a_collector(serve: Serve, name: str, wrapped: bool) -> None:
    policy = POLICIES[name]("same" if wrapped else "next")
    client: Any = serve(policy).client()
    client = PolicyClientModule(client) if wrapped else client
    options = {"frames_per_batch": 24, "total_frames": 72}
    here = collected(Collector(make_env, policy, **options))
    there = collected(Collector(make_env, client, **options))
    assert_same_batches(here, there)


@BOTH
def test_workers_share_one_recurrent_policy(serve: Serve, backend: str) -> None:
    policy = gru_policy("next")
    server = serve(policy, backend=backend)
    options = {"frames_per_batch": 24, "total_frames": 48, "track_policy_version": True}
    here = collected(MultiSyncCollector([make_env] * 2, policy, **options))
    there = collected(MultiSyncCollector([make_env] * 2, server.client(), **options))
    assert_same_batches(here, there)
    assert server.stats()["requests"] > 0


def assert_same_batches(here: list[Any], there: list[Any]) -> None:
    assert len(here) == len(there) > 0
    for one, other in zip(here, there, strict=True):
        assert set(one.keys(True, True)) <= set(other.keys(True, True))
        for key in one.keys(True, True):
            assert torch.allclose(one[key], other[key], atol=1e-5), key


def test_the_version_of_the_server_is_in_the_batch(serve: Serve) -> None:
    policy = gru_policy("next")
    server = serve(policy)
    for track in (False, True):
        env = WaveEnv(DISCRETE, lengths=(5,), batch_size=())
        with Collector(
            env, server.client(), frames_per_batch=8, total_frames=-1, track_policy_version=track
        ) as collector:
            for batch in collector:
                before = server.policy_version
                assert (batch["policy_version"] == before).all()
                if track:
                    assert (batch["next", "policy_version"] == before).all()
                server.update_policy_weights_()
                assert (collector.next()["policy_version"] == before + 1).all()
                break


def test_a_collector_says_that_its_client_has_no_weights(serve: Serve) -> None:
    client = serve(gru_policy("next")).client()
    for policy in (client, PolicyClientModule(client)):
        with (
            Collector(make_env, policy, frames_per_batch=8, total_frames=8) as collector,
            pytest.raises(RuntimeError, match="no weights"),
        ):
            collector.update_policy_weights_()


def test_a_server_of_random_actions(serve: Serve) -> None:
    client = serve(RandomPolicy(make_env().action_space)).client()
    with Collector(make_env, client, frames_per_batch=8, total_frames=8) as collector:
        assert (next(iter(collector))["action"].sum(-1) == 1).all()


def test_a_policy_that_is_slow_to_end_does_not_hold_up_the_shutdown() -> None:
    policy = Doubling()
    server = InferenceServer(policy).start()
    policy.open.clear()
    future = server.client().submit(ask(1))
    assert policy.entered.wait(WAIT_S)
    with within(5):
        server.shutdown(timeout=0.2)
    with pytest.raises(ClosedError):
        future.result(1.0)
    policy.open.set()


def test_a_plain_module_is_refused_in_words(serve: Serve) -> None:
    client = serve(TensorDictModule(lambda q: (q, q), in_keys=["question"], out_keys=["answer", "again"])).client()
    assert is_answered(client(ask(1)), 1.0)
    other = serve(lambda td: td["question"]).client()
    with pytest.raises(TypeError, match="must return the TensorDict"):
        other(ask(1))


def test_answers_fit_the_tensordict_that_asked(serve: Serve) -> None:
    """Whatever kind it is of, it gets what `set` would have given it."""
    client = serve(Doubling()).client()
    elsewhere = TensorDict({"question": torch.ones(2)}, [], device="cpu")
    assert is_answered(client(elsewhere))
    assert elsewhere["answer"].device == elsewhere.device
    locked = ask(2).lock_()
    with pytest.raises(RuntimeError, match="lock"):
        client(locked)
    assert "answer" not in locked
    assert is_answered(client(locked.unlock_()))
    lazy = lazy_stack([ask(3), ask(4)])
    assert is_answered(client(lazy))
    assert lazy["answer"].shape == (2, 2)
    named = TensorDict({"question": torch.ones(3, 2)}, [3], names=["time"])
    assert is_answered(client(named))
    assert named.names == ["time"]
    many = [client.submit(ask(number)) for number in range(40)]
    assert all(is_answered(future.result(WAIT_S)) for future in many)


def test_rows_of_every_shape_are_put_together(serve: Serve) -> None:
    """Many requests of one row each, and of several, in one forward."""
    rows: list[int] = []

    def echo(tensordict: TensorDictBase) -> TensorDictBase:
        rows.append(len(tensordict))
        for key in ("number", "vector", "image", "nothing"):
            tensordict.set(f"{key}_again", tensordict[key].clone())
        return tensordict

    def made(number: int, *size: int) -> TensorDict:
        shapes = {"number": (), "vector": (3,), "image": (2, 3), "nothing": (2, 0)}
        return TensorDict({key: torch.full((*size, *shape), float(number)) for key, shape in shapes.items()}, size)

    server = serve(echo)
    client, is_held, may_go = server.client(), threading.Event(), threading.Event()
    for sizes in ([()] * 12, [()] * 5, [(), (2,), (1,), (2, 3), *[()] * 9]):
        is_held.clear()
        may_go.clear()
        holding = threading.Thread(target=server.update_model, args=(lambda _: (is_held.set(), may_go.wait(WAIT_S)),))
        holding.start()
        assert is_held.wait(WAIT_S)
        futures = [client.submit(made(number, *size)) for number, size in enumerate(sizes)]
        may_go.set()
        holding.join(WAIT_S)
        for number, (future, size) in enumerate(zip(futures, sizes, strict=True)):
            answer = future.result(WAIT_S)
            for key, value in made(number, *size).items():
                assert torch.equal(answer[f"{key}_again"], value)
    assert max(rows) >= 12
