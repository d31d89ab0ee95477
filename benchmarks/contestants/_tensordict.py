"""What the collectors that deliver TensorDicts share: reading the agreed content out of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tensordict import TensorDictBase
from torch import nn

from benchmarks.batch import Batch, Run

_KEYS: dict[str, str | tuple[str, str]] = {
    "observation": "observation",
    "action": "action",
    "next_observation": ("next", "observation"),
    "reward": ("next", "reward"),
    "terminated": ("next", "terminated"),
    "truncated": ("next", "truncated"),
}


def run_collector(batches: Iterator[TensorDictBase], net: nn.Module, close: Callable[[], None]) -> Run:
    """A `Run` over an endless iterator of batches."""
    last: list[TensorDictBase] = []

    def collect() -> int:
        # let the previous batch go first, as a training loop does when it takes the next one
        last.clear()
        last.append(next(batches))
        return int(last[0].numel())

    return Run(collect, lambda: _content(last[0]), net, close)


def _content(data: TensorDictBase) -> Batch:
    if data.ndim == 1:
        data = data.unsqueeze(0)  # a single env is delivered as [time]
    elif data.ndim > 2:
        data = data.flatten(0, -2)  # several workers as [workers, envs, time]
    # absent keys are left out: the check then names them
    where = {**_KEYS, "log_prob": "action_log_prob"}
    if "sample_log_prob" in data.keys():  # noqa: SIM118 (iterating a TensorDict is not over keys)
        where["log_prob"] = "sample_log_prob"
    found = {name: data.get(key, None) for name, key in where.items()}
    return {name: value for name, value in found.items() if value is not None}
