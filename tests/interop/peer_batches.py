"""The peer's batches, made in a program of its own: what its processes leave behind ends with that."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn


def make_env() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.testing import mocking_classes

    return mocking_classes.CountingEnv(max_steps=5, batch_size=[3])


def layout(batch: TensorDictBase) -> dict[Any, Any]:
    """Shapes and dtypes."""
    return {key: (tuple(value.shape), value.dtype) for key, value in batch.items(True, True)}


def make_policy() -> nn.Module:
    return TensorDictModule(lambda observation: torch.ones_like(observation), ["observation"], ["action"])


def main(kind: str, workers: int, frames: int, path: str) -> None:
    multiprocessing.set_start_method("fork")  # first: the peer would choose "spawn", and import torch in every process
    from torchrl import collectors

    collector = getattr(collectors, kind)(
        [make_env] * workers, make_policy(), frames_per_batch=frames, total_frames=2 * frames
    )
    batches = [batch.clone() for batch in collector]
    torch.save([(batch.to_dict(), batch.shape, batch.names) for batch in batches], path)
    collector.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
