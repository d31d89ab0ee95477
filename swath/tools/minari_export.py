"""Episodes as Minari datasets (https://minari.farama.org): files that other libraries read.

Minari holds gymnasium's own values: integers for discrete values, dicts and tuples as the spaces have
them, and one observation more than there are steps. So entries are read back here into the env's own values.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase
from torch import Tensor

from swath.data.stored_episodes import flags_of
from swath.envs import EnvBase, GymEnv
from swath.errors import ClosedError, ShapeError, UnsupportedEnvError, UnsupportedSpaceError, suggestion
from swath.keys import ACTION, OBSERVATION, PIXELS, REWARD, Key, after, as_key, as_path, nest

WRITE_BYTES = 64 * 2**20
"""Episodes that are larger than this together are written, however few they are."""

ONLY_VECTOR = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")
"""What `gymnasium.make_vec` adds to the arguments in a spec, and `gymnasium.make` does not know."""


def write_minari(
    episodes: Iterable[TensorDictBase],
    dataset_id: str,
    env: Any = None,
    *,
    observation_space: gs.Space[Any] | None = None,
    action_space: gs.Space[Any] | None = None,
    track: Iterable[Any] | None = None,
    episodes_per_write: int = 100,
    **metadata: Any,
) -> Any:
    """Write complete episodes as a new Minari dataset, and return that `minari.MinariDataset`.

    Only a few episodes are held at a time, so `episodes` may be a generator, a collector with `trajs_per_batch=1` and
    `traj_format="cat"`, or what `ReplayBuffer.episodes` gives. If it fails midway, what was written until then stays on
    disk as a dataset.

    Args:
        episodes: one TensorDict `[T]` each, of which only the last frame is terminated or truncated.
        dataset_id: its name and version, as in "cartpole/random-v0". `MINARI_DATASETS_PATH` says where it lies.
        env: where the episodes come from: an env of swath or gymnasium. Tells the spaces, and how gymnasium makes it.
        observation_space: of one lane; needed without `env`, and for an env of TorchRL.
        action_space: likewise.
        track: keys of further entries, such as "action_log_prob": they become Minari's `infos`, one value per step.
            With HDF5 only, which is Minari's usual format.
        episodes_per_write: how many episodes are written at once.
        metadata: for `minari.create_dataset_from_buffers`: `author`, `algorithm_name`, `description`, `data_format`...
            Images are stored as they are, unless `jpeg_encoding=True`.
    """
    writer = MinariWriter(
        dataset_id,
        env,
        observation_space=observation_space,
        action_space=action_space,
        track=track,
        episodes_per_write=episodes_per_write,
        **metadata,
    )
    for episode in episodes:
        writer.add(episode)
    if not writer.episodes:
        raise ValueError(f"There was no episode to write, so that there is no dataset {dataset_id!r}.")
    return writer.close()


class MinariWriter:
    """Writes complete episodes as a new Minari dataset, some at a time. The arguments are those of `write_minari`.

    Whatever can be wrong with them is found at once. The dataset appears with the first write; `close` makes the last.
    """

    def __init__(
        self,
        dataset_id: str,
        env: Any = None,
        *,
        observation_space: gs.Space[Any] | None = None,
        action_space: gs.Space[Any] | None = None,
        track: Iterable[Any] | None = None,
        episodes_per_write: int = 100,
        **metadata: Any,
    ) -> None:
        if episodes_per_write < 1:
            raise ValueError(f"episodes_per_write must be at least 1, got {episodes_per_write}.")
        self._minari = _import_minari(metadata.get("data_format"))
        self._observed, self._acted = _spaces_of(env, observation_space, action_space)
        self._tracked = [as_key(key) for key in ([track] if isinstance(track, str) else track or ())]
        if self._tracked and metadata.get("data_format") not in (None, "hdf5"):
            raise ValueError(
                f"track={self._tracked} needs data_format='hdf5', got {metadata['data_format']!r}: other formats hold "
                "one info per observation, and these entries have one per step."
            )
        self._create = _creation(self._minari, dataset_id, env, self._observed, self._acted, metadata)
        self._per_write = episodes_per_write
        self._waiting: list[Any] = []
        self._waiting_bytes = 0
        self.closed = False
        self.dataset: Any = None
        """The `minari.MinariDataset`, as soon as there is one."""
        self.episodes = 0
        """Episodes that were added."""
        self.frames = 0
        """Their frames."""

    def add(self, episode: TensorDictBase) -> None:
        """Take in one complete episode `[T]`. Nothing of it is kept: its entries are copied."""
        if self.closed:
            raise ClosedError("This dataset is finished; Minari's own update_dataset_from_buffer can add to it.")
        self._waiting.append(self._converted(episode))
        self._waiting_bytes += sum(leaf.numel() * leaf.element_size() for leaf in episode.values(True, True))
        self.episodes += 1
        self.frames += len(episode)
        if len(self._waiting) >= self._per_write or self._waiting_bytes >= WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write all episodes that wait."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        if self.dataset is None:
            self.dataset = self._create(waiting)
        else:
            self.dataset.update_dataset_from_buffer(waiting)

    def close(self) -> Any:
        """Write what is left, and return the dataset: None if there was no episode. May be called again."""
        self.flush()
        self.closed = True
        return self.dataset

    def _converted(self, episode: TensorDictBase) -> Any:
        """`episode` as Minari wants it."""
        terminated, truncated = _checked_flags(episode)
        root = OBSERVATION if episode.get(OBSERVATION, None) is not None else PIXELS

        def seen(key: Key) -> np.ndarray:  # [T + 1, ...]
            return np.concatenate([_array(episode, key), _array(episode, after(key))[-1:]])

        return self._minari.data_collector.EpisodeBuffer(
            observations=_values(self._observed, seen, root),
            actions=_values(self._acted, lambda key: _array(episode, key), ACTION),
            rewards=_rewards(episode),
            terminations=terminated,
            truncations=truncated,
            infos=nest((key, _array(episode, key).copy()) for key in self._tracked),
        )


# -- reading entries back ------------------------------------------------------------------------------------------


def _values(space: gs.Space[Any], read: Callable[[Key], np.ndarray], root: str, path: tuple[str, ...] = ()) -> Any:
    """The env's own values, nested as `space` is, with an array of all steps in each place.

    The entries are named as envs name them: a Dict's names are keys of their own, anything else lies under `root`.
    """
    if isinstance(space, gs.Dict):
        return {str(name): _values(child, read, root, (*path, str(name))) for name, child in space.spaces.items()}
    if isinstance(space, gs.Tuple):
        inside = path or (root,)
        return tuple(_values(child, read, root, (*inside, str(i))) for i, child in enumerate(space.spaces))
    key = as_key(path or root)
    return _decoded(space, read(key), key)


def _decoded(space: gs.Space[Any], array: np.ndarray, key: Key) -> np.ndarray:
    """Gymnasium's values of an entry `[T, ...]`, in memory of their own.

    Discrete values may be indices, one-hot vectors or scores, of which the largest counts.
    """
    shape, integral = array.shape[1:], array.dtype.kind in "iub"
    if isinstance(space, gs.Discrete):
        if shape == (int(space.n),):
            return np.asarray(array.argmax(1) + int(space.start), space.dtype)
        if integral and shape in ((), (1,)):
            return np.asarray(array.reshape(-1).astype(np.int64) + int(space.start), space.dtype)
    elif isinstance(space, gs.MultiDiscrete):
        if shape == (int(space.nvec.sum()),):
            blocks = np.split(array, np.cumsum(space.nvec.reshape(-1))[:-1], 1)
            picked = np.stack([block.argmax(1) for block in blocks], 1).reshape(-1, *space.nvec.shape)
            return np.asarray(picked + space.start, space.dtype)
        if integral and shape == space.nvec.shape:
            return np.asarray(array.astype(np.int64) + space.start, space.dtype)
    elif not isinstance(space, gs.Box | gs.MultiBinary):
        raise UnsupportedSpaceError(f"{key!r} is of {space}, for which swath has no tensors.")
    elif shape == tuple(space.shape):
        return np.asarray(array.astype(space.dtype))
    raise ShapeError(
        f"{key!r} has the shape {shape} in each frame, which is no value of {space}. If the env's spaces do not tell "
        "what the frames hold, as with an env of TorchRL, pass observation_space= and action_space=."
    )


def _array(frames: TensorDictBase, key: Key) -> np.ndarray:
    value: Tensor | None = frames.get(key, None)
    if value is None:
        known = [str(as_key(known)) for known in frames.keys(True, True)]
        cause = " compact_obs=True leaves it out." if as_path(key)[0] == "next" else ""
        raise KeyError(
            f"An episode has no {key!r}, which the dataset needs, only {known}.{cause}{suggestion(str(key), known)}"
        )
    return np.asarray(value.detach().cpu().numpy())


def _rewards(episode: TensorDictBase) -> np.ndarray:
    rewards = _array(episode, after(REWARD))
    if rewards.size != len(episode):
        raise ShapeError(f"Minari holds one reward per step, but an episode has them of shape {rewards.shape[1:]}.")
    return rewards.reshape(-1).copy()


def _checked_flags(episode: TensorDictBase) -> tuple[np.ndarray, np.ndarray]:
    """terminated and truncated `[T]`, of an episode that ends with its last frame and not before."""
    if episode.ndim != 1 or not len(episode):
        raise ValueError(
            f"An episode must be a TensorDict of shape [T], got {list(episode.shape)}. episodes_of(frames) cuts frames "
            "into episodes, and MinariRecorder takes batches as they are."
        )
    terminated, truncated = flags_of(episode)
    ends = np.flatnonzero(terminated | truncated)
    if not len(ends) or ends[0] != len(episode) - 1:
        found = f"it ends at step {ends[0] + 1}" if len(ends) else "it does not end"
        raise ValueError(
            f"An episode of {len(episode)} frames must end with its last one, but {found}. episodes_of(frames) cuts "
            "frames into episodes."
        )
    return terminated, truncated


# -- the dataset ---------------------------------------------------------------------------------------------------


def _import_minari(data_format: str | None) -> Any:
    try:
        minari = importlib.import_module("minari")
        importlib.import_module("minari.data_collector")
        importlib.import_module("PIL")  # which Minari needs for any format, but does not bring
        if data_format in (None, "hdf5"):
            importlib.import_module("h5py")
    except ImportError as error:
        raise ImportError(
            f'Minari datasets need {error.name}: pip install "swath[minari]" (with Python 3.11 or newer).'
        ) from error
    return minari


def _creation(
    minari: Any,
    dataset_id: str,
    env: Any,
    observed: gs.Space[Any],
    acted: gs.Space[Any],
    metadata: dict[str, Any],
) -> Callable[[list[Any]], Any]:
    """A function that makes the dataset from its first episodes; what can be wrong is found before it is called."""
    _check_id(dataset_id)
    spec = _lasting(_spec_of(env))
    arguments: dict[str, Any] = {
        "observation_space": observed,
        "action_space": acted,
        "env": None if spec is None else _Described(spec, observed, acted),
        "jpeg_encoding": False,
        **metadata,
    }
    create = minari.create_dataset_from_buffers
    inspect.signature(create).bind(dataset_id, [], **arguments)  # raises TypeError for names that Minari does not know
    return lambda episodes: create(dataset_id, episodes, **arguments)


def _check_id(dataset_id: str) -> None:
    places = importlib.import_module("minari.storage.datasets_root_dir")
    names = importlib.import_module("minari.dataset.minari_dataset")
    try:
        names.parse_dataset_id(dataset_id)
    except (TypeError, ValueError) as error:  # a TypeError where there is no version
        raise ValueError(f"dataset_id must be like 'cartpole/random-v0', got {dataset_id!r}.") from error
    place = places.get_dataset_path(dataset_id)
    if place.exists():
        raise FileExistsError(
            f"There is a dataset {dataset_id!r} already, in {place}. Choose another version, or remove that one with "
            f"minari.delete_dataset({dataset_id!r})."
        )


class _Described(gym.Env[Any, Any]):
    """Tells Minari of an env, without making one: Minari would, given a spec alone."""

    def __init__(self, spec: EnvSpec, observation_space: gs.Space[Any], action_space: gs.Space[Any]) -> None:
        self.spec, self.observation_space, self.action_space = spec, observation_space, action_space


# -- the env -------------------------------------------------------------------------------------------------------


@runtime_checkable
class _OfEnvs(Protocol):
    """Several envs in one: swath's `SerialEnv`, and gymnasium's `SyncVectorEnv`."""

    envs: Sequence[Any]


def _spaces_of(
    env: Any, observation_space: gs.Space[Any] | None, action_space: gs.Space[Any] | None
) -> tuple[gs.Space[Any], gs.Space[Any]]:
    """The spaces of one lane: those that are given, and the env's own otherwise."""
    if isinstance(env, VectorEnv):
        own: tuple[Any, Any] = (env.single_observation_space, env.single_action_space)
    elif isinstance(env, gym.Env | EnvBase):
        own = (env.observation_space, env.action_space)
    elif env is None:
        own = (None, None)
    else:
        raise UnsupportedEnvError(
            f"Expected an env of swath or gymnasium, which has an observation_space and an action_space, got "
            f"{type(env).__name__}: {env!r}. Give env=None and both spaces instead."
        )
    observed = own[0] if observation_space is None else observation_space
    acted = own[1] if action_space is None else action_space
    if observed is None or acted is None:
        raise ValueError("Without an env, a dataset needs both observation_space= and action_space=.")
    return observed, acted


def _spec_of(env: Any) -> EnvSpec | None:
    """How gymnasium makes the env of one lane, with its wrappers; None where it was made in another way."""
    if isinstance(env, gym.Env):
        return env.spec
    if isinstance(env, _OfEnvs):
        return _spec_of(env.envs[0])
    if isinstance(env, VectorEnv):
        return _single(env.spec)
    if isinstance(env, GymEnv):
        return _spec_of(env.gym_envs[0] if env.gym_envs else env.vector_env)
    return None


def _single(spec: EnvSpec | None) -> EnvSpec | None:
    """A spec of `gymnasium.make_vec` as `gymnasium.make` takes it; one with wrappers of its own cannot be that."""
    if spec is None or spec.kwargs.get("wrappers"):
        return None
    single = copy.deepcopy(spec)
    single.kwargs = {name: value for name, value in spec.kwargs.items() if name not in ONLY_VECTOR}
    single.max_episode_steps = single.kwargs.pop("max_episode_steps", spec.max_episode_steps)
    return single


def _lasting(spec: EnvSpec | None) -> EnvSpec | None:
    """`spec` if it can be written to a file."""
    try:
        if spec is not None:
            spec.to_json()
    except (TypeError, ValueError) as error:
        warnings.warn(
            f"How to make {spec.id if spec else None!r} cannot be written to a file ({error}), so that the dataset's "
            "recover_environment() will not work.",
            stacklevel=5,
        )
        return None
    return spec
