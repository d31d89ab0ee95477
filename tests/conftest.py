"""What holds for all tests."""

import gc
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from tensordict.nn import set_interaction_type

from swath.runtime import process

pytest_plugins = ["pytester"]

# Workers are forked from a server: what tests send to thousands of them is imported there, once.
process.PRELOADED += ("swath.collectors.distributed", "swath.testing", "psutil", "pytest")

# The same cases each time; `--hypothesis-profile explore` looks for others. To explain a failure hypothesis traces all
# lines, which takes longer than a test may.
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
hypothesis.settings.register_profile("explore", phases=PHASES)
hypothesis.settings.register_profile("same", phases=PHASES, derandomize=True)
hypothesis.settings.load_profile("same")

# A shell that runs tests in the background has told them, and all that they start, to ignore Ctrl-C; some send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers of pytest-xdist that find other names give up: an address in a name differs in each process."""
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"Give ids to the parameters of {named[0]}: an address is no name.")
    gc.freeze()  # what is here by now is no garbage, and many tests look for some: half a second, each time


@pytest.fixture(autouse=True)
def distributions_are_validated() -> None:
    """Importing TorchRL, as some tests do, switches validation off for the whole process; others rely on it."""
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.fixture(autouse=True)
def exploration_is_not_chosen() -> Iterator[None]:
    """Threads that stand for workers of other machines set it for the whole process, and may leave it so."""
    with set_interaction_type(None):
        yield
