"""BaseCollector: what all collectors share."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any, ClassVar, TypeVar

from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from swath.collectors.config import CollectorConfig, Hook, check_kind
from swath.collectors.profile import ProfileConfig, ProfilingHook
from swath.collectors.progress import Progress
from swath.collectors.utils import split_trajectories
from swath.errors import EndlessError
from swath.rollout.trajectories import TrajectoryAssembler
from swath.runtime.paths import follow
from swath.weights import requested_weights, warn_of_old_name

Self = TypeVar("Self", bound="BaseCollector")


class BaseCollector(IterableDataset[Any], ABC):
    """Iterating over a collector gives batches of experience.

    Use it in a `with` block, or call `shutdown()` at the end. `for`, `iter`/`next` and `.next()` all continue the same
    stream; leaving a loop early leaves the collector usable.
    """

    config_class: ClassVar[type[CollectorConfig]] = CollectorConfig

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the config's fields as arguments, where they are documented once for all collectors."""
        super().__init_subclass__(**kwargs)
        if "__signature__" not in cls.__dict__:
            cls.__signature__ = _signature(cls.config_class)  # type: ignore[attr-defined]

    def __init__(self, config: CollectorConfig) -> None:
        """Keep the checked `config`."""
        self.config = config
        self.closed = False
        self._assembler = TrajectoryAssembler()
        self._iterating = False
        self._stream: Iterator[TensorDictBase | None] | None = None
        self._worker_idx = config.worker_idx
        self._pre_hook = config.pre_collect_hook
        self._post_hook: Hook | None = config.post_collect_hook
        self._profile: ProfilingHook | None = None
        self._same: TensorDictBase | None = None

    # -- iterating ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Batches until `total_frames` are delivered; after an error, everything is shut down.

        With a replay buffer, None after each batch that was written to it.
        """
        self._iterating = True
        source = self._delivered()
        try:
            with Progress(self) if self.config.progress else contextlib.nullcontext() as progress:
                # No name for the batch: while the consumer has it, nothing here may keep it from being let go.
                yield from source if progress is None else map(progress.passed, source)
        except GeneratorExit:  # the consumer has left the loop, and may come back
            raise
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise

    def _delivered(self) -> Iterator[TensorDictBase | None]:
        """What iterating gives."""
        return self.iterator() if self.config.trajs_per_batch is None else self._episodes()

    @abstractmethod
    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Fixed-frame batches, whatever `trajs_per_batch` says."""

    def _episodes(self) -> Iterator[TensorDictBase]:
        """Batches of `trajs_per_batch` complete episodes, in the order in which they ended."""
        count, form = self.config.trajs_per_batch, self.config.traj_format or "padded"
        assert count is not None
        batches = self._raw_batches()
        while True:
            while self._assembler.ready >= count and not self.closed:  # also what an earlier loop has left
                yield self._deliver(self._assembler.take(count, form))
            batch = next(batches, None)
            if batch is None:
                break
            self._assembler.add(batch)
            del batch  # its frames are copied: the slot may be used for the next
        self._assembler.clear()

    @abstractmethod
    def _raw_batches(self) -> Iterator[TensorDictBase]:
        """Fixed-frame batches before any post-processing."""

    def _finished(self, batch: TensorDictBase) -> TensorDictBase:
        if self.config.split_trajs:
            batch = split_trajectories(batch)
        batch = self._deliver(batch)
        return self._same_td(batch) if self.config.return_same_td else batch

    def _same_td(self, batch: TensorDictBase) -> TensorDictBase:
        """`batch` in the one TensorDict that is delivered every time; a shorter one, as the last may be, as it is."""
        if self._same is None:
            self._same = batch.clone()
        elif self._same.shape == batch.shape:
            self._same.update_(batch)
        else:
            return batch
        return self._same

    def _deliver(self, batch: TensorDictBase) -> TensorDictBase:
        """Post-process a batch and call the hook."""
        try:
            if self.config.postproc is not None:
                batch = self.config.postproc(batch)
                if batch is None:
                    raise TypeError(f"postproc={self.config.postproc!r} returned None; it must return the batch.")
            if self._post_hook is not None:
                self._post_hook(batch)
        except StopIteration as error:  # which would be taken for the end of the batches
            raise RuntimeError("A postproc or hook has raised StopIteration.") from error
        return batch

    def next(self) -> TensorDictBase | None:
        """The next batch, or None when there are no more (and always with a replay buffer)."""
        if self._stream is None:
            self._stream = iter(self)
        try:
            return next(self._stream)
        except BaseException as error:  # nothing more comes of a stream that has raised
            self._stream = None
            if isinstance(error, StopIteration):
                return None
            raise

    def __len__(self) -> int:
        """Number of batches; endless collectors have none, and nobody knows ahead how many episodes there will be."""
        if self.config.total_frames < 0:
            raise EndlessError("An endless collector (total_frames=-1) has no length.")
        if self.config.trajs_per_batch is not None:
            raise EndlessError("How many batches of whole episodes there will be is not known: there is no length.")
        return -(-self.config.total_frames // self.requested_frames_per_batch)

    def __bool__(self) -> bool:
        """A collector is something, whatever its length."""
        return True

    @property
    @abstractmethod
    def requested_frames_per_batch(self) -> int:
        """Frames in a batch: `frames_per_batch` rounded up to whole steps of all lanes."""

    # -- life --------------------------------------------------------------------------------------------------

    @abstractmethod
    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop and free everything. May be called again, and after any error."""

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down a collector that was started in the background; others are simply shut down."""
        self.shutdown(timeout=timeout, close_env=close_env)

    def start(self) -> None:
        """Collect in the background; needs a replay buffer to write to."""
        raise RuntimeError(
            f"{type(self).__name__}.start() collects in the background into a replay buffer, but has none: iterate "
            "over the collector instead."
        )

    def pause(self) -> Any:
        """A context in which background collection rests."""
        raise NotImplementedError(f"{type(self).__name__} does not collect in the background.")

    def is_running(self) -> bool:
        """Whether it collects in the background."""
        return False

    def __enter__(self: Self) -> Self:
        """Use the collector in a `with` block, at whose end it is shut down."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """Shut down; nothing that goes wrong then hides the error that ended the block."""
        self.shutdown(raise_on_error=kind is None)

    def __del__(self) -> None:
        """Free what a forgotten `shutdown` left. An env closes itself when nobody holds it, as the user still may."""
        if not getattr(self, "closed", True):
            with contextlib.suppress(Exception):
                self.shutdown(close_env=False, raise_on_error=False)

    # -- state -------------------------------------------------------------------------------------------------

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed envs and policy noise and begin new episodes; returns a seed that is still unused."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on elsewhere."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on from a saved state."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Cheap numbers about what happened so far."""

    @property
    def worker_idx(self) -> int:
        """The index of this worker among others. Ids are numbered with the one that the constructor was given."""
        if self._worker_idx is None:
            raise RuntimeError("This collector has no worker_idx; give it one in the constructor or set it.")
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, index: int) -> None:
        self._worker_idx = index

    # -- weights -----------------------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        /,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: dict[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Act with new weights from the next batch on, and count one version up.

        Without arguments they come from the policy that the collector was given. Otherwise they are a module, a
        TensorDict, a (state) dict, or a dict of these by worker index; `model_id` or `weights_dict` name other models.
        """
        if policy_weights is not None:
            warn_of_old_name()
            if weights is not None:
                raise ValueError("policy_weights is the old name of weights: give one of them.")
            weights = policy_weights
        requested = requested_weights(policy_or_weights, weights, policy, model_id, weights_dict)
        self._update_weights(requested, [worker_ids] if isinstance(worker_ids, int) else worker_ids)

    @abstractmethod
    def _update_weights(self, requested: dict[str, Any], worker_ids: Sequence[int] | None) -> None:
        """Apply weights by model id; a source of None is the collector's own policy."""

    # -- hooks and reflection ----------------------------------------------------------------------------------

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """Called before every rollout; may be replaced."""
        return self._pre_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        self.set_pre_collect_hook(hook)

    @property
    def post_collect_hook(self) -> Hook | None:
        """Called with every batch before it is delivered; may be replaced."""
        return self._post_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Hook | None) -> None:
        self.set_post_collect_hook(hook)

    def set_pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        """Replace the hook that is called before every rollout."""
        check_kind("pre_collect_hook", hook, "Callable | None")
        self._pre_hook = hook

    def set_post_collect_hook(self, hook: Hook | None) -> None:
        """Replace the hook that is called with every batch."""
        check_kind("post_collect_hook", hook, "Hook | None")
        self._post_hook = hook

    def get_distant_attr(self, path: str) -> Any:
        """The object at `path`, such as `env.batch_size` or `env.envs[0]`."""
        return follow(self, path)

    def cascade_execute(self, path: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method at `path`; a plain attribute is returned as it is."""
        found = follow(self, path)
        if callable(found):
            return found(*args, **kwargs)
        if args or kwargs:
            raise ValueError(f"{path!r} is {found!r}, which cannot be called with arguments.")
        return found

    def map_fn(
        self,
        name: str,
        list_of_args: Sequence[Sequence[Any]],
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> list[Any]:
        """Call the method at `name` once for each set of arguments."""
        kwargs = [{}] * len(list_of_args) if list_of_kwargs is None else list_of_kwargs
        if len(list_of_args) != len(kwargs):
            raise ValueError(
                f"list_of_args and list_of_kwargs must have the same length, got {len(list_of_args)} and {len(kwargs)}."
            )
        method = follow(self, name)
        if not callable(method):
            raise AttributeError(f"{name!r} is {method!r}, which cannot be called.")
        return [method(*args, **kw) for args, kw in zip(list_of_args, kwargs, strict=True)]

    def enable_profile(self, **options: Any) -> None:
        """Trace the first rollouts with torch's profiler; see `ProfileConfig` for the options."""
        if self._iterating:
            raise RuntimeError("Cannot enable profiling after iteration has begun: call it before the first batch.")
        config = ProfileConfig(**options)
        self.disable_profile()
        self._profile = ProfilingHook(config, self._worker_idx or 0, self._post_hook)
        self._post_hook = self._profile

    def disable_profile(self) -> None:
        """Stop tracing and put the previous hook back."""
        if self._profile is not None:
            self._profile.stop()
            self._post_hook = self._profile.inner
            self._profile = None

    @property
    def profile_config(self) -> ProfileConfig | None:
        """How the collector is being profiled, if it is."""
        return None if self._profile is None else self._profile.config


def _signature(config_class: type[CollectorConfig]) -> inspect.Signature:
    def keyword(name: str, default: Any) -> inspect.Parameter:
        given = inspect.Parameter.empty if default is MISSING else default
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=given)

    both = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter("create_env_fn", both),
        inspect.Parameter("policy", both, default=None),
    ]
    return inspect.Signature(parameters + [keyword(field.name, field.default) for field in fields(config_class)])
