"""What holds for all tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def distributions_are_validated() -> None:
    """Importing TorchRL, as some tests do, switches validation off for the whole process; others rely on it."""
    torch.distributions.Distribution.set_default_validate_args(True)
