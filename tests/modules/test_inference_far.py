"""Clients on other machines: what goes between them and the server is the same if it stays on this one."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from dataclasses import replace

import pytest
import torch
from children import until
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch import nn

from swath.collectors.distributed import DistributedCollector
from swath.errors import ClosedError
from swath.modules import InferenceServer
from swath.modules.exploration import acting_type
from swath.modules.inference_client import InferenceClient
from swath.modules.inference_far import FarDoor, FarEnd
from swath.testing import CountingEnv

pytestmark = pytest.mark.timeout(60)


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if bool((observation < 0).any()):
            raise LookupError("there is no such observation")
        return observation * self.factor


def policy() -> TensorDictModule:
    return TensorDictModule(Doubles(), in_keys=["observation"], out_keys=["action"])


def far(server: InferenceServer) -> InferenceClient:
    """A client as another machine has it."""
    client = pickle.loads(pickle.dumps(server.client(address="127.0.0.1")))
    assert isinstance(client, InferenceClient)
    return client


def asked(*values: float) -> TensorDictBase:
    return TensorDict({"observation": torch.tensor(values), "more": torch.zeros(len(values), 2)}, [len(values)])


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_it_is_asked_as_any_other(backend: str) -> None:
    with InferenceServer(policy(), backend=backend) as server:
        client = far(server)
        assert client.in_keys == ["observation"]
        answer = client(asked(1.0, 2.0))
        assert answer["action"].tolist() == [2.0, 4.0]
        assert "more" in answer
        futures = [client.submit(asked(float(number))) for number in range(5)]
        assert [future.result(10)["action"].item() for future in futures] == [0.0, 2.0, 4.0, 6.0, 8.0]
        server.update_policy_weights_(weights={"module.factor": torch.tensor(3.0)})
        assert client(asked(1.0))["action"].item() == 3.0
        assert client(asked(1.0))["policy_version"].item() == 1
        with pytest.raises(LookupError, match="no such observation"):
            client(asked(-1.0))
        found: list[float] = []
        other = pickle.loads(pickle.dumps(client))  # from there to another process there
        threads = [threading.Thread(target=lambda: found.append(other(asked(1.0))["action"].item())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert found == [3.0] * 3


def test_how_to_explore_goes_along_and_waiting_has_an_end() -> None:
    go_on, kinds = threading.Event(), []

    def act(data: TensorDictBase) -> TensorDictBase:
        kinds.append(acting_type())
        go_on.wait(20)
        return data.set("action", data["observation"])

    with InferenceServer(act) as server:
        client = far(server)
        with set_interaction_type(InteractionType.MODE):
            future = client.submit(asked(1.0))
        with pytest.raises(TimeoutError, match=r"not answered within 0.1 s"):
            future.result(0.1)
        go_on.set()
        assert future.result(10)["action"].item() == 1.0
        assert kinds[0] == InteractionType.MODE


def test_the_end_of_the_server_is_told() -> None:
    server = InferenceServer(policy(), backend="process").start()
    client = far(server)
    client(asked(1.0))
    os.kill(server.health()["pid"], signal.SIGKILL)
    with pytest.raises(ClosedError, match=r"has died.*SIGKILL"):
        client(asked(1.0))
    server.shutdown()
    server = InferenceServer(policy()).start()
    client, late = far(server), far(server)
    client(asked(1.0))
    end = pickle.loads(pickle.dumps(late)).__reduce__()[1][0]
    server.shutdown()
    with pytest.raises(ClosedError, match="was shut down"):
        client(asked(1.0))
    with pytest.raises(ClosedError, match=rf"cannot be reached at 127.0.0.1:{end.port} .*shut down or has ended"):
        late(asked(1.0))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((end.address, end.port))
    with pytest.raises(ClosedError):
        pickle.dumps(server.client(address="127.0.0.1"))


def test_who_does_not_know_the_secret_is_turned_away() -> None:
    with InferenceServer(policy()) as server:
        end = far(server).__reduce__()[1][0]
        assert isinstance(end, FarEnd)
        assert end.secret.hex() not in repr(end)
        assert repr(end.secret) not in repr(end)
        stranger = FarDoor(replace(end, secret=b"of another run"))
        with pytest.raises(ClosedError, match="AuthenticationError"):
            stranger.submit(asked(1.0), None, None, False)
        with socket.create_connection((end.address, end.port)) as silent:
            silent.sendall(pickle.dumps(FarEnd("", 0, b"")) * 10)
            assert far(server)(asked(1.0))["action"].item() == 2.0
        with pytest.raises(ValueError, match="every address of this machine"):
            pickle.dumps(server.client(address="0.0.0.0"))
    assert not [thread for thread in threading.enumerate() if thread.name == "swath entrance"]


class Forward(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 1.0]).expand(*observation.shape[:-1], 2)


@pytest.mark.parametrize("inner", [{}, {"collector_class": "sync", "num_workers_per_collector": 2}])
def test_nodes_and_their_processes_are_clients(inner: dict[str, object]) -> None:
    acts = TensorDictModule(Forward(), in_keys=["observation"], out_keys=["action"])
    with InferenceServer(acts) as server:
        with DistributedCollector(
            [CountingEnv], server.client(), frames_per_batch=10, total_frames=20, launcher="mp", **inner
        ) as collector:
            batches = list(collector)
        assert all(bool((batch["action"][..., 1] == 1).all()) for batch in batches)
        assert sum(batch.numel() for batch in batches) == 20
        assert server.stats()["requests"] >= 20 // 2
        until(lambda: not [thread for thread in threading.enumerate() if thread.name == "swath far client"])
