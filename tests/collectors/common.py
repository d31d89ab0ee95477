"""What the tests of collectors have in common: policies, buffers, waiting, and the frames of each lane."""

from __future__ import annotations

import io
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn

from swath.data import LazyTensorStorage, ReplayBuffer
from swath.keys import TRAJ_IDS
from swath.testing import counted

WAIT_S = 30.0
"""How long a test waits for what must come, on a loaded machine."""
ONES = torch.tensor([1.0, 1.0])
LANE, EPISODE, STEP = 0, 1, 2
"""The numbers in the observation of a counting env."""


def net(value: float = 0.0) -> TensorDictModule:
    """A policy whose every action is `value`."""
    linear = nn.Linear(3, 2)
    set_to(linear, value)
    return TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])


def set_to(linear: Any, value: float) -> None:
    """Change the weights of such a policy."""
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.fill_(value)


def actor(**options: Any) -> ProbabilisticTensorDictSequential:
    """A policy that draws its actions, and tells how likely they were."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.OneHotCategorical,
            return_log_prob=True,
            **options,
        ),
    )


class Pair(nn.Module):
    """Acts by two parameters that should be equal and are far apart in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))
        self.between = nn.Parameter(torch.zeros(4096))
        self.second = nn.Parameter(torch.zeros(1))

    def forward(self, observation: Tensor) -> Tensor:
        return torch.cat([self.first, self.second]).expand(*observation.shape[:-1], 2)

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.first.fill_(value)
            self.second.fill_(value)


def buffer(size: int = 20_000, ndim: int = 1, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), **options)


def sizes_written(kept: ReplayBuffer, monkeypatch: Any) -> list[int]:
    """How many steps are written at a time, from now on."""
    sizes, original = list[int](), kept.write

    def write(entries: Any, shape: Any, **options: Any) -> Any:
        sizes.append(shape[-1])
        return original(entries, shape, **options)

    monkeypatch.setattr(kept, "write", write)
    return sizes


def until(condition: Callable[[], Any], seconds: float = WAIT_S) -> None:
    """Wait until `condition` holds; fails if that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for has not come"
        time.sleep(0.001)


def bounded(call: Callable[[], Any], seconds: float = 10.0) -> Any:
    """What `call` returns or raises in another thread; fails if that takes too long."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"it has not come back within {seconds} s"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def saved(state: Any) -> Any:
    """A state as it comes back from a file that may hold nothing but data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def rows(batch: TensorDictBase) -> TensorDictBase:
    """A batch as `[lanes, T]`, whatever its shape."""
    return batch.reshape(-1, batch.shape[-1])


def by_lane(batches: Iterable[Any]) -> dict[int, TensorDictBase]:
    """The frames `[T]` of each lane of counting envs, one batch after the other, whichever lanes a batch is of."""
    found: dict[int, list[TensorDictBase]] = defaultdict(list)
    for batch in batches:
        for row in rows(batch):
            found[int(row["observation"][0, LANE])].append(row)
    return {lane: torch.cat(found[lane]) for lane in sorted(found)}


def assert_same(first: TensorDictBase, second: TensorDictBase, *, but_ids: bool = False) -> None:
    """Two batches have the same entries, bit by bit."""
    assert first.shape == second.shape
    assert keys(first) == keys(second)
    for key, value in first.items(True, True):
        if not (but_ids and key == TRAJ_IDS):
            torch.testing.assert_close(value, second.get(key), rtol=0, atol=0, msg=f"{key} differs")


def assert_trajectories(frames: TensorDictBase) -> None:
    """In whatever order they lie: those of each id are consecutive steps of one episode, from its beginning on."""
    numbers, ids = counted(frames).reshape(-1, 3), frames.get(TRAJ_IDS).numpy().reshape(-1)
    for name in np.unique(ids):
        own = numbers[ids == name]
        assert len(np.unique(own[:, :STEP], axis=0)) == 1, "one id names two episodes"
        np.testing.assert_array_equal(own[:, STEP], np.arange(len(own)), "a trajectory has a hole")


def layout(batch: TensorDictBase) -> dict[Any, Any]:
    """All of a batch but its values."""
    entries = {key: (batch.get(key).shape, batch.get(key).dtype) for key in batch.keys(True, True)}
    return {"batch": batch.shape, "names": batch.names, "device": batch.device, **entries}


def first_steps(batch: Any) -> list[int]:
    """At which step of its episode each lane of a batch begins."""
    return [int(step) for step in rows(batch)["observation"][:, 0, STEP]]


def ids_of(batches: Iterable[Any]) -> set[int]:
    """The ids of all trajectories."""
    return {int(number) for batch in batches for number in batch[TRAJ_IDS].unique() if number >= 0}


def steps_of(collector: Any, worker: int) -> int:
    """How many steps a worker has made, those of the batch under way included."""
    return int(collector.stats("per_worker")[f"worker_{worker}/steps"])


def keys(batch: TensorDictBase) -> set[Any]:
    return set(batch.keys(True, True))


class StopAfter:
    """An interruptor that ends every batch after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.asked = steps, 0

    def collection_stopped(self) -> bool:
        self.asked += 1
        return self.asked % self.steps == 0
