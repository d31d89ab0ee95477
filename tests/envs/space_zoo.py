"""Spaces of all kinds, an env that plays back samples of them, and slow encodings that are easy to believe."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs
from gymnasium.vector import SyncVectorEnv

from swath.envs import EnvBase, GymEnv

INTEGERS = ["int8", "int16", "int32", "int64"]
BOX_TYPES = ["float16", "float32", "float64", *INTEGERS, *(f"u{name}" for name in INTEGERS), "bool"]

SPACES: dict[str, gs.Space[Any]] = {
    **{f"Box {name}": gs.Box(0, 1 if name == "bool" else 100, (2, 3), np.dtype(name)) for name in BOX_TYPES},
    "Box of no dimension": gs.Box(-1, 1, (), np.float32),
    "Box without bounds": gs.Box(-np.inf, np.inf, (3,), np.float32),
    "Discrete": gs.Discrete(4),
    "Discrete from 3": gs.Discrete(5, start=3),
    "Discrete from -2": gs.Discrete(3, start=-2),
    "Discrete of one": gs.Discrete(1, start=7),
    "Discrete int32": gs.Discrete(3, dtype=np.int32),
    "MultiDiscrete": gs.MultiDiscrete([3, 2, 4]),
    "MultiDiscrete with starts": gs.MultiDiscrete([3, 2], start=[-1, 10]),
    "MultiDiscrete 2-D": gs.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, -3]]),
    "MultiDiscrete of ones": gs.MultiDiscrete([1, 1], start=[4, 5]),
    "MultiDiscrete int8": gs.MultiDiscrete([3, 2], dtype=np.int8),
    "MultiBinary": gs.MultiBinary(5),
    "MultiBinary 2-D": gs.MultiBinary((2, 3)),
    "Dict": gs.Dict({"position": gs.Box(-1, 1, (2,), np.float32), "mode": gs.Discrete(3)}),
    "Dict in Dict": gs.Dict(
        {"arm": gs.Dict({"joint": gs.Box(-1, 1, (2,), np.float64), "grip": gs.MultiBinary(2)}), "left": gs.Discrete(2)}
    ),
    "Tuple": gs.Tuple((gs.Discrete(3, start=1), gs.Box(0, 9, (2,), np.int32))),
    "Dict in Tuple": gs.Tuple((gs.Dict({"a": gs.Discrete(2), "b": gs.Box(0, 1, (1,), np.float32)}), gs.MultiBinary(2))),
    "Tuple in Dict": gs.Dict({"pair": gs.Tuple((gs.Discrete(2), gs.Discrete(3))), "rest": gs.Box(0, 1, (2,))}),
}


def leaves(space: gs.Space[Any], value: Any, root: str) -> dict[Any, tuple[gs.Space[Any], Any]]:
    """Key -> (space, value) of every leaf, written down by hand for each kind of nesting."""

    def walk(space: gs.Space[Any], value: Any, key: tuple[str, ...]) -> None:
        if isinstance(space, gs.Dict):
            for name in space.spaces:
                walk(space[name], value[name], (*key, name))
        elif isinstance(space, gs.Tuple):
            for index in range(len(space)):
                walk(space[index], value[index], (*(key or (root,)), str(index)))
        else:
            key = key or (root,)
            found[key[0] if len(key) == 1 else key] = (space, value)

    found: dict[Any, tuple[gs.Space[Any], Any]] = {}
    walk(space, value, ())
    return found


def slowly_encoded(space: gs.Space[Any], value: Any, *, one_hot: bool) -> Any:
    """The nested list that a leaf's value becomes."""
    if isinstance(space, gs.Discrete):
        index = int(value) - int(space.start)
        return [int(i == index) for i in range(int(space.n))] if one_hot else index
    if isinstance(space, gs.MultiDiscrete):
        indices = [int(value[at]) - int(space.start[at]) for at in np.ndindex(space.nvec.shape)]
        if not one_hot:
            return np.array(indices).reshape(space.nvec.shape).tolist()
        sizes = [int(space.nvec[at]) for at in np.ndindex(space.nvec.shape)]
        return [int(i == index) for index, size in zip(indices, sizes, strict=True) for i in range(size)]
    return np.asarray(value).tolist()


class PlaybackEnv(gym.Env[Any, Any]):
    """Gives samples of its observation space, and remembers them and all actions it was given."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        observation_space: gs.Space[Any] | None = None,
        action_space: gs.Space[Any] | None = None,
        length: int = 4,
        number: int = 0,
    ) -> None:
        self.observation_space = gs.Box(-1, 1, (1,)) if observation_space is None else observation_space
        self.action_space = gs.Discrete(2) if action_space is None else action_space
        self.length, self.number = length, number
        self.told: list[Any] = []
        self.acts: list[Any] = []
        self._count = 0

    def _tell(self) -> Any:
        self.observation_space.seed(len(self.told) + 1000 * self.number)
        self.told.append(self.observation_space.sample())
        return self.told[-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return self._tell(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.acts.append(action)
        self._count += 1
        return self._tell(), float(self._count), self._count == self.length, False, {}


LANES = 3


def one(*spaces: Any, **options: Any) -> tuple[EnvBase, list[PlaybackEnv]]:
    """One env with those observation and action spaces, and what it plays back from."""
    playback = PlaybackEnv(*spaces)
    return GymEnv(playback, **options), [playback]


def several(*spaces: Any, **options: Any) -> tuple[EnvBase, list[PlaybackEnv]]:
    """Some of them, in one GymEnv."""
    playbacks = [PlaybackEnv(*spaces, number=lane) for lane in range(LANES)]
    return GymEnv(iter(playbacks).__next__, num_envs=LANES, **options), playbacks


def vector(*spaces: Any, **options: Any) -> tuple[EnvBase, list[PlaybackEnv]]:
    """Some of them, in a vector env."""
    makers = [partial(PlaybackEnv, *spaces, number=lane) for lane in range(LANES)]
    inner = SyncVectorEnv(makers, autoreset_mode="Disabled")
    return GymEnv(inner, **options), list(inner.envs)  # type: ignore[arg-type]


class UnmergedGymEnv(GymEnv):
    """The same env, but for all that SerialEnv knows, one that it must not look into."""
