"""What an engine needs to know beside its env and policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from swath.rollout.loop import LoopSettings

Hook = Callable[[TensorDictBase], Any]


@dataclass(frozen=True, kw_only=True)
class EngineSettings(LoopSettings):
    """What an engine needs to know beside its env and policy.

    What has the name of an argument of collectors means the same. Beside these:

    Attributes:
        shares_policy: whether the policy that is given is trained elsewhere in this process: weights that come from
            elsewhere are then taken by a copy of it.
        whole_episodes: write complete episodes only.
        transform: what is done to a batch before it is written.
    """

    reset_at_each_iter: bool = False
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Hook | None = None
    cudagraph_policy: bool | Mapping[str, Any] | None = None
    shares_policy: bool = False
    replay_buffer: Any = None
    extend_buffer: bool = True
    init_random_frames: int = 0
    whole_episodes: bool = False
    trajs_per_write: int | None = None
    transform: Callable[[TensorDictBase], TensorDictBase] | None = None
