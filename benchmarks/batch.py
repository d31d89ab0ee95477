"""What a contestant must deliver, and the check that it did.

A benchmark is only worth reading if everybody does the same work: each batch holds observation,
action, log-prob, next observation (the true final one at the end of an episode), reward, terminated
and truncated. `check` looks at two consecutive batches before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, distributions, nn

from benchmarks.workloads import Workload

Batch = Mapping[str, Tensor]
KEYS = (
    "observation", "action", "log_prob", "next_observation", "reward", "terminated", "truncated",
)  # fmt: skip


@dataclass
class Run:
    """A contestant ready to go: call it to collect one batch; it returns the number of frames."""

    collect: Callable[[], int]
    last_batch: Callable[[], Batch] | None = None
    """The batch just collected, `[envs, time, ...]`; None for one that stores nothing."""
    net: nn.Module | None = None
    close: Callable[[], None] = lambda: None

    def __call__(self) -> int:
        return self.collect()


def check(run: Run, workload: Workload, joined: bool = True) -> None:
    """Collect two batches and raise `ValueError` where their content is not what was agreed.

    `joined`: the second begins where the first ended. Where workers deliver by themselves, it need not.
    """
    if run.last_batch is None or run.net is None:
        return
    first = _collect(run, workload)
    second = _collect(run, workload)
    if joined:
        first = {key: torch.cat([first[key], second[key]], 1) for key in KEYS}
    for batch in (first,) if joined else (first, second):
        _check_order(batch)
        _check_log_probs(batch, workload, run.net)


def _collect(run: Run, workload: Workload) -> dict[str, Tensor]:
    """One batch, copied (a loop may use its buffers again); flags without trailing dimension."""
    frames = run()
    if run.last_batch is None:
        raise ValueError("nothing was stored")
    batch = {key: value.clone() for key, value in run.last_batch().items()}
    lead = (workload.num_envs, workload.steps)
    if missing := set(KEYS) - set(batch):
        raise ValueError(f"the batch lacks {sorted(missing)}")
    if frames != workload.frames_per_batch:
        raise ValueError(f"{frames} frames in a batch instead of {workload.frames_per_batch}")
    for key in ("log_prob", "reward", "terminated", "truncated"):
        batch[key] = batch[key].reshape(lead)
    for key in ("observation", "next_observation"):
        if tuple(batch[key].shape[:2]) != lead:
            raise ValueError(f"{key} is {tuple(batch[key].shape)}, expected {lead} first")
        if not torch.isfinite(batch[key].float()).all():
            raise ValueError(f"{key} is not finite")
    return batch


def _check_order(batch: Batch) -> None:
    """Inside an episode `next` is the following observation; at its end it must not be."""
    following, came_next = batch["observation"][:, 1:], batch["next_observation"][:, :-1]
    same = (following == came_next).flatten(2).all(-1)
    done = (batch["terminated"] | batch["truncated"])[:, :-1]
    if not same[~done].all():
        raise ValueError("next observation and following observation differ inside an episode")
    # two pixel episodes in a pool of 64 may meet by chance, so a few matches are allowed
    if done.any() and same[done].float().mean() > 0.5:
        raise ValueError("the final observation is lost: `next` holds the one after the reset")


def _check_log_probs(batch: Batch, workload: Workload, net: nn.Module) -> None:
    """The log-probs are those of the actions under the network that acted."""
    with torch.no_grad():
        params = net(batch["observation"].flatten(0, 1))
    if workload.action_high is None:
        action = batch["action"].reshape(-1)
        expected = distributions.Categorical(logits=params).log_prob(action)
    else:
        from tensordict.nn import NormalParamExtractor

        squash = [
            distributions.TanhTransform(cache_size=1),
            distributions.AffineTransform(0.0, workload.action_high),
        ]
        normal = distributions.Normal(*NormalParamExtractor()(params))
        # an action at the very edge has no finite inverse in float32; step back a hair
        edge = 0.99995 * workload.action_high
        action = batch["action"].reshape(params.shape[0], -1).clamp(-edge, edge)
        expected = distributions.TransformedDistribution(normal, squash).log_prob(action).sum(-1)
    close = torch.isclose(expected, batch["log_prob"].reshape(-1), rtol=1e-3, atol=1e-2)
    # beyond three sigma or so float32 loses the digits that the inverse of tanh would need
    if close.float().mean() < 0.99:
        raise ValueError("the log-probs are not those of the actions taken")
