"""Threads that serve the batch of their own request: see NOTE [Leading] of the inference loop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from inference_tools import WAIT_S, Doubling, ask, is_answered, until
from tensordict.nn import TensorDictModule
from torch import nn

from swath.modules import InferenceServer
from swath.modules.inference_doors import LocalRequest
from swath.modules.inference_forward import Forward
from swath.modules.inference_loop import InferenceLoop

pytestmark = pytest.mark.timeout(100)


def linear(factor: float = 2.0) -> TensorDictModule:
    """Multiplies by a number, as a network so small that it runs without a call of a module."""
    net = nn.Linear(2, 2, bias=False)
    nn.init.eye_(net.weight)
    with torch.no_grad():
        net.weight.mul_(factor)
    return TensorDictModule(net, in_keys=["question"], out_keys=["answer"])


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    """Of a small network, which has run often enough for whatever number of rows comes."""
    with InferenceServer(linear()) as server:
        client = server.client()
        for size in ((16,), (16,), ()):
            assert is_answered(client(ask(1, *size)))
        yield server


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that have run forwards."""
    found: list[threading.Thread] = []
    run = Forward.run

    def noted(forward: Forward, *args: Any) -> Any:
        found.append(threading.current_thread())
        return run(forward, *args)

    monkeypatch.setattr(Forward, "run", noted)
    return found


def in_threads(work: Callable[[int], None], count: int = 8) -> None:
    """Call `work` with numbers, in threads of their own, all of which must come to an end."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def test_whoever_asks_alone_runs_a_small_network(server: InferenceServer, runners: list[threading.Thread]) -> None:
    client = server.client()
    until(lambda: is_answered(client(ask(5))) and runners[-1] is threading.current_thread())


def test_a_module_runs_in_the_thread_of_the_server_only(runners: list[threading.Thread]) -> None:
    with InferenceServer(Doubling()) as server:
        client = server.client()
        in_threads(lambda first: [client(ask(first + number)) for number in range(20)])  # type: ignore[arg-type]
    assert len({thread.ident for thread in runners}) == 1
    assert runners[0] is not threading.current_thread()


def test_a_request_that_is_not_small_is_left_to_the_server(
    server: InferenceServer, runners: list[threading.Thread]
) -> None:
    """More rows than there is room for are run by the module before they are planned for."""
    client = server.client()
    assert is_answered(client(ask(3, 100)))
    assert threading.current_thread() not in runners
    until(lambda: is_answered(client(ask(3, 100))) and runners[-1] is threading.current_thread())


def test_all_that_ask_at_the_same_time_are_answered(server: InferenceServer) -> None:
    client = server.client()
    server.stats(reset=True)

    def work(first: int) -> None:
        for number in range(300):
            assert is_answered(client(ask(1000 * first + number), timeout=WAIT_S))

    in_threads(work)
    assert server.stats()["requests"] == 2400


def test_nobody_is_forgotten_where_threads_serve_each_other(
    server: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some give up at any moment, some ask without waiting, and the policy changes: everybody is answered."""
    monkeypatch.setattr("swath.modules.inference_loop.LOOK_S", 1000.0)  # nobody looks by himself
    client = server.client()

    def work(first: int) -> None:
        futures = []
        for number in range(1000 * first, 1000 * first + 200):
            with contextlib.suppress(TimeoutError):
                if number % 5 == 1:
                    client(ask(number), timeout=0.00005 * (number % 7))
                elif number % 5 == 2:
                    futures.append(client.submit(ask(number, *([3] if number % 2 else []))))
                elif number % 50 == 3:
                    server.update_model(lambda policy: None)
                else:
                    assert is_answered(client(ask(number)))
        assert all(is_answered(future.result(WAIT_S)) for future in futures)

    in_threads(work)


def test_weights_change_between_batches(server: InferenceServer) -> None:
    """Each answer tells the version that it was made with, and that tells the factor."""
    client, is_over = server.client(), threading.Event()

    def work(number: int) -> None:
        if not number:
            for version in range(1, 60):
                server.update_policy_weights_(linear(float(version)))
            is_over.set()
        while not is_over.is_set():
            answer = client(ask(7))
            version = int(answer["policy_version"])
            assert is_answered(answer, float(version) if version else 2.0)

    in_threads(work, 5)
    assert server.policy_version == 59


def test_an_interrupt_of_whoever_leads_costs_others_nothing(
    server: InferenceServer, runners: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, rung = server.client(), []
    run, ring = Forward.run, InferenceLoop.ring

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(Forward, "run", run)
        raise KeyboardInterrupt

    until(lambda: is_answered(client(ask(1))) and runners[-1] is threading.current_thread())  # the server sleeps
    with monkeypatch.context() as deaf:
        deaf.setattr(InferenceLoop, "ring", lambda loop: rung.append(loop))  # so that the server leaves both to us
        future = client.submit(ask(4))
        monkeypatch.setattr(Forward, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client(ask(5))
        assert not future.done()
    assert len(rung) >= 2  # the server was called when we had gone
    ring(rung[-1])
    assert is_answered(future.result(WAIT_S))
    assert is_answered(client(ask(6)))


def test_an_error_of_a_small_network_goes_to_those_who_asked(
    server: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client()

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(Forward, "run", fails)
        with pytest.raises(ZeroDivisionError, match="no answer"):
            client(ask(1))
    assert is_answered(client(ask(2)))
    assert server.stats()["errors"] == 1


def test_a_request_that_nobody_waits_for_holds_up_nobody(
    server: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread was interrupted before it began to wait, and so would have let the batch be served by nobody."""
    monkeypatch.setattr("swath.modules.inference_loop.LOOK_S", 0.05)
    client, is_held, may_go = server.client(), threading.Event(), threading.Event()
    holding = threading.Thread(target=server.update_model, args=(lambda _: (is_held.set(), may_go.wait(WAIT_S)),))
    holding.start()
    assert is_held.wait(WAIT_S)
    futures = [client.submit(ask(number)) for number in range(8)]
    may_go.set()
    holding.join(WAIT_S)
    assert all(is_answered(future.result(WAIT_S)) for future in futures)  # from now on, eight are expected

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as torn:
        torn.setattr(LocalRequest, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client(ask(1))
    assert is_answered(client(ask(2), timeout=WAIT_S / 3))
