"""Gymnasium's env of several processes, for tests that are about what it does and not about how it starts."""

from functools import partial

from gymnasium.vector import AsyncVectorEnv

# Importing TorchRL, as some tests do, makes "spawn" the start method of the whole process; each process of an env would
# then import torch again, for seconds. Where nobody has imported TorchRL, Linux forks (up to Python 3.13), as here.
ForkedVectorEnv = partial(AsyncVectorEnv, context="fork")
