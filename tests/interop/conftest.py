"""What holds for all tests beside TorchRL."""

import pytest
import torch


@pytest.fixture(autouse=True)
def validation_is_off(distributions_are_validated: None) -> None:
    """As TorchRL sets it when it is imported: some of its distributions fail otherwise."""
    torch.distributions.Distribution.set_default_validate_args(False)
