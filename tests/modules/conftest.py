"""What all tests of policies share."""

from collections.abc import Iterator

import policy_zoo as zoo
import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The networks are tiny: more threads only wait for each other, and for other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def several_threads() -> Iterator[None]:
    """For tests of how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(zoo.THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[True, False], ids=["", "no torch in the env"])
def beside_any_env(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an env that runs no torch, policies that run none either act without torch's switches being set."""
    monkeypatch.setattr(zoo.WaveEnv, "runs_torch", request.param)
