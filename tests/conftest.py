"""What holds for all tests."""

import signal

import pytest
import torch

# A shell that runs tests in the background has told them, and all that they start, to ignore Ctrl-C; some send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def distributions_are_validated() -> None:
    """Importing TorchRL, as some tests do, switches validation off for the whole process; others rely on it."""
    torch.distributions.Distribution.set_default_validate_args(True)
