"""Calling a policy without leaving a trace of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def without_trace(policy: Any) -> Iterator[None]:
    """Put random generators and the policy's buffers back as they were."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        # Of devices that nobody has used there is nothing to put back.
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices))
        for module in policy.modules() if isinstance(policy, nn.Module) else ():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if nn.parameter.is_lazy(buffer):
                    stack.callback(_begin_anew, module)
                else:
                    stack.callback(_put_back, module, name, buffer, buffer.clone())
            for value in vars(module).values():
                if isinstance(value, torch.Generator):  # as probabilistic modules keep that are given one
                    stack.callback(value.set_state, value.get_state())
        yield


def _put_back(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    """Buffers may be written to in place, or replaced by others."""
    with torch.no_grad():
        buffer.copy_(value)
    module._buffers[name] = buffer


def _begin_anew(module: nn.Module) -> None:
    """A lazy module gets its buffers in its first call, and at once puts into them what it sees."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        module.reset_running_stats()
