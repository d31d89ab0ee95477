"""Engine: the object that makes experience. Every collector has one, here or in its workers.

It knows its env, its policy and the replay buffer that it may write to; it has no budget, no thread, no process and no
delivery, and resumes exactly where the last slot ended.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from swath.data.episodes import Episodes
from swath.data.ray_buffer import OwnBuffer
from swath.entries import trainable
from swath.envs import EnvBase, OwnPaceEnv, as_env
from swath.errors import ClosedError, suggestion
from swath.keys import POLICY_ID, STEP_COUNT
from swath.modules import PolicyClientModule, RandomPolicy, as_policy
from swath.modules.stages import StageName
from swath.rollout.as_ready import AsReadyLoop
from swath.rollout.buffer_writer import BufferWriter
from swath.rollout.engine_settings import EngineSettings
from swath.rollout.loop import Interruptor, Receipt, RolloutLoop
from swath.rollout.randomness import Randomness
from swath.rollout.slots import Arena, Slot
from swath.runtime.columns import Columns
from swath.runtime.paths import follow


class Engine:
    """Runs a policy in an env: into slots, or into a replay buffer.

    Attributes:
        env: what is stepped.
        policy: what acts.
        given_policy: what it was given; `policy` may be a copy of it.
        version: the number of the weights that it acts with.
        leaves: shape and dtype of every column of a slot.
        delivered: the keys of a batch, in order.
        batch_size: of a batch, without time.
        unit: the smallest number of frames that can be collected at a time.
    """

    def __init__(self, env: EnvBase, policy: Any, settings: EngineSettings) -> None:
        """Reset the env and find out what batches look like. `policy` is anything that `as_policy` understands."""
        env.must_be_open()
        self.env, self.settings = env, settings
        self._check_env()
        env.introduce_to(policy)
        self.given_policy = policy if settings.opaque_policy and policy is not None else as_policy(policy, env)
        self.policy = self._placed(self.given_policy)
        with trainable():
            called = self._as_called(self.policy)
            self._loop: RolloutLoop = (
                AsReadyLoop(env, called, settings)
                if isinstance(env, OwnPaceEnv)
                else RolloutLoop(env, called, settings)
            )
        self.leaves, self.delivered = self._loop.leaves, self._loop.delivered
        self.batch_size, self.unit = self._loop.batch_size, self._loop.unit
        self._writer = None if settings.replay_buffer is None else self._new_writer(settings.replay_buffer)
        self._arena = Arena(self._private, self.batch_size)
        """Slots of our own, for what is written to the buffer."""
        self._episodes = Episodes()
        self._is_fresh = True
        """Whether all lanes are where a reset has left them."""
        self._paused_at: float | None = None
        self._is_in_thread = False
        self.is_closed = False
        self.is_stepping = False
        """Whether a batch is half made: whoever asks something then is a signal handler."""

    @classmethod
    def make(
        cls,
        create_env_fn: Any,
        policy: Any,
        settings: EngineSettings,
        *,
        policy_factory: Callable[[], Any] | None = None,
        create_env_kwargs: dict[str, Any] | None = None,
        worker: int | None = None,
        check: Callable[[EnvBase], None] | None = None,
    ) -> Engine:
        """An engine from an env or a factory of one; as a `worker` among others, lanes are numbered over all of them.

        `check` may refuse the env.
        If that fails, an env that was made for it is closed; one that was given may be used again.
        """
        env = as_env(create_env_fn, create_env_kwargs)
        try:
            if check is not None:
                check(env)
            if worker is not None:
                env.first_lane = worker * env.num_lanes
            return cls(env, policy if policy_factory is None else policy_factory(), settings)
        except BaseException:
            if callable(create_env_fn) and create_env_fn is not env:
                env.close()
            raise

    def _check_env(self) -> None:
        env, settings = self.env, self.settings
        if settings.max_frames_per_traj is not None and STEP_COUNT in env.observation_keys:
            raise ValueError(
                f"max_frames_per_traj={settings.max_frames_per_traj} counts steps in {STEP_COUNT!r}, but the env "
                "writes an entry of that name already. Let one of them go."
            )
        if settings.set_truncated and not env.has_truncated:
            raise RuntimeError(f"set_truncated=True needs a 'truncated' entry, which {env!r} has not.")

    def _placed(self, policy: Any) -> Any:
        """The user's policy, or a copy of it where it lies on another device."""
        device = self.settings.policy_device
        if device is not None and isinstance(policy, nn.Module):
            places = {tensor.device for tensor in (*policy.parameters(), *policy.buffers())}
            if places and places != {device}:
                return copy.deepcopy(policy).to(device)
        return policy

    def _as_called(self, policy: Any) -> Any:
        """The policy as the loop calls it: recorded as a CUDA graph, if so asked."""
        if graph := self.settings.cudagraph_policy:
            from tensordict.nn import CudaGraphModule

            policy = CudaGraphModule(policy, **(graph if isinstance(graph, Mapping) else {}))
        return policy

    def _new_writer(self, buffer: Any) -> BufferWriter:
        writer = BufferWriter(buffer, self.batch_size)
        if self.settings.whole_episodes and not writer.is_flat:
            raise ValueError(
                "trajs_per_batch writes whole episodes one after the other, for which a storage with lanes (ndim above "
                "1) has no place: use ndim=1."
            )
        return writer

    def _private(self, steps: int) -> Columns:
        return Columns(self.leaves, (math.prod(self.batch_size), steps), device=self.env.rows_device)

    # -- collecting --------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of the weights that it acts with."""
        return self._loop.version

    @version.setter
    def version(self, version: int) -> None:
        self._loop.version = version

    def collect(self, slot: Slot, *, random: bool = False) -> Receipt:
        """Fill `slot`, and call the hooks."""
        receipt = self._fill(slot, random)
        if (hook := self.settings.post_collect_hook) is not None:
            hook(slot.batch(self.delivered, receipt.steps))
        self._paused_at = perf_counter()
        return receipt

    def collect_elsewhere(self, slot: Slot, *, random: bool = False) -> Receipt:
        """The same by way of a slot of our own: for an env that cannot write to the slot's memory, or a hook.

        What a hook keeps of a batch would be overwritten, if it lay in memory that another hands out.
        """
        private = self._arena.acquire(slot.steps)
        receipt = self.collect(private, random=random)
        for key, tensor in slot.tensors.items():
            tensor.copy_(private.tensors[key])
        return receipt

    def _fill(self, slot: Slot, random: bool, begins: bool = True) -> Receipt:
        """Fill a slot; `begins` says whether a batch begins with it."""
        if self.is_closed:
            raise ClosedError("This collector is shut down; make a new one.")
        loop, settings = self._loop, self.settings
        if self._paused_at is not None:
            loop.stats.timings.waiting += perf_counter() - self._paused_at
            self._paused_at = None
        try:
            if begins and settings.pre_collect_hook is not None:
                settings.pre_collect_hook()
            if self.env.stepped_by is not loop.lanes:
                cause = "was used elsewhere meanwhile, or a reset of it was interrupted"
                warnings.warn(f"{self.env!r} {cause}: all episodes begin anew.", stacklevel=3)
                self.reset()
            if begins and settings.reset_at_each_iter and not self._is_fresh:
                self.reset()
            self._is_fresh, self.is_stepping = False, True
            if torch.is_inference_mode_enabled():
                with trainable():
                    return loop.collect(slot, random=random)
            return loop.collect(slot, random=random)
        except StopIteration as error:  # which would be taken for the end of the batches
            raise RuntimeError(
                f"{self.env!r}, its policy or a hook has raised {error!r}, which Python takes for the end of a loop. "
                "To end an episode, return terminated=True or truncated=True from step(). "
                f"{' '.join(getattr(error, '__notes__', ()))}"
            ) from error
        finally:
            self.is_stepping = False

    def write(self, steps: int) -> Receipt:
        """Collect `steps` steps into the replay buffer; less if it is interrupted."""
        writer, settings = self._writer, self.settings
        if writer is None:
            raise RuntimeError("This collector has no replay buffer to fill; give it one in the constructor.")
        receipts: list[Receipt] = []
        for count in [steps] if settings.extend_buffer else [1] * steps:
            receipts.append(self._write_once(writer, count, begins=not receipts))
            if self._loop.was_stopped:
                break
        self._paused_at = perf_counter()
        return receipts[0] if len(receipts) == 1 else Receipt.over(receipts)

    def _write_once(self, writer: BufferWriter, steps: int, begins: bool) -> Receipt:
        settings, slot = self.settings, self._arena.acquire(steps)
        random = bool(settings.init_random_frames) and writer.frames_written < settings.init_random_frames
        receipt = self._fill(slot, random, begins)
        is_changed = settings.transform is not None or settings.post_collect_hook is not None
        if writer.takes_columns and not settings.whole_episodes and not is_changed:
            writer.write_slot(slot, self.delivered, receipt.steps)  # the data's only copy
            return receipt
        batch = slot.batch(self.delivered, receipt.steps)
        if settings.post_collect_hook is not None:
            settings.post_collect_hook(batch)
        if not settings.whole_episodes:
            writer.write_batch(batch if settings.transform is None else settings.transform(batch))
            return receipt
        self._episodes.add(batch, begin=receipt.begin, running=receipt.running)
        del batch  # its frames are copied: the slot may be used for the next
        at_a_time = settings.trajs_per_write or max(self._episodes.ready, 1)
        while self._episodes.ready >= at_a_time:
            self._write_episodes(writer, at_a_time)
        return receipt

    def _write_episodes(self, writer: BufferWriter, count: int) -> None:
        lengths = self._episodes.lengths(count)
        episodes = self._episodes.take(count, "cat")
        transform = self.settings.transform
        writer.write_episodes(episodes if transform is None else transform(episodes), lengths)

    def finish_episodes(self) -> None:
        """All frames are collected: complete episodes that wait are written, the rest is given up and counted."""
        if self._writer is not None and self._episodes.ready and not self.is_closed:
            self._write_episodes(self._writer, self._episodes.ready)
        self._episodes.clear()

    def break_off(self) -> None:
        """What is collected next does not go to the buffer: what is written after it does not continue what was."""
        if self._writer is not None:
            self._writer.interrupt()

    @property
    def frames(self) -> int:
        """How many were ever collected."""
        return self._loop.stats.frames

    def watch(self, interruptor: Interruptor | None, may_wait: Callable[[], bool] | None) -> None:
        """Ask `interruptor` after every step, and `may_wait` while the replay buffer makes us wait."""
        self._loop.settings = replace(self._loop.settings, interruptor=interruptor)
        if self._writer is not None:
            self._writer.stopping = may_wait

    def move_to_thread(self) -> None:
        """From now on leave alone what belongs to the whole process: another thread trains beside."""
        self.own_policy()
        self._loop.move_to_background()
        self._is_in_thread = True

    # -- control -----------------------------------------------------------------------------------------------

    def set_hook(self, name: str, hook: Any) -> None:
        """Replace `pre_collect_hook` or `post_collect_hook`."""
        self.settings = replace(self.settings, **{name: hook})

    def reset(self, lanes: Sequence[int] | None = None) -> None:
        """Begin new episodes with new ids: in all lanes, or in some."""
        chosen = list(range(self.env.num_lanes)) if lanes is None else list(lanes)
        if chosen:
            with self._loop.randomness.applied():
                self._loop.lanes.restart(chosen)
            self.break_off()
            self._is_fresh = self._is_fresh or lanes is None

    def set_seed(self, seed: int, static_seed: bool = False, worker: int = 0) -> int:
        """Seed every lane and the policy's noise, and begin new episodes: what comes next depends on `seed` alone."""
        self._loop.randomness.seed(seed, worker)
        with self._loop.randomness.applied():  # an env may seed torch's own generator, and draw from it
            following = self.env.set_seed(seed, static_seed)
        self._episodes.clear()
        ids = self._loop.lanes.ids
        before = (ids.count, ids.current.copy())
        self.reset()
        if not self._loop.stats.frames:  # no frame has an id yet, so none needs a new one
            ids.count, ids.current = before
        return following

    def renumber(self, number: int) -> None:
        """Number trajectories as worker `number`, from the first on."""
        self._loop.lanes.ids.renumber(number)

    def stats(self) -> dict[str, float]:
        """Frames, episodes, recent returns and lengths, and where the time went."""
        return {
            **self._loop.stats.summary(),
            "policy_version": self.version,
            "pending_frames": self._episodes.pending_frames,
            "dropped_frames": self._episodes.dropped,
        }

    def pace(self, reset: bool = False) -> dict[str, float]:
        """For how many lanes the policy has acted at a time, where envs step at their own pace."""
        return self._loop.pace(reset) if isinstance(self._loop, AsReadyLoop) else {}

    @property
    def policy_stages(self) -> list[StageName]:
        """How the policy ran in the last batch; before the first, how it will run."""
        return self._loop.policy_stages

    # -- weights -----------------------------------------------------------------------------------------------

    def get_model(self, model_id: str) -> Any:
        """The model of that name: "policy", or a path from the engine."""
        return self.policy if model_id == POLICY_ID else follow(self, model_id)

    def find_model(self, model_id: str) -> nn.Module:
        """The same, if it has weights."""
        try:
            model = self.get_model(model_id)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise KeyError(
                f"There is no model {model_id!r} in this collector; 'policy' is its policy, others are found by their "
                f"path, as in 'env.envs[0].module'.{suggestion(model_id, ['policy', 'env'])}"
            ) from error
        if not has_weights(model):
            raise RuntimeError(f"{model_id!r} is {type(model).__name__}, which has no weights to update.")
        return model  # type: ignore[no-any-return]

    def model_to_load(self, model_id: str) -> nn.Module:
        """The model that takes weights from elsewhere: they must not end up in a policy that the user is training."""
        if model_id == POLICY_ID and self.settings.shares_policy:
            self.own_policy()
        return self.find_model(model_id)

    def own_policy(self) -> None:
        """Act with a copy of the policy that was given, if it is that very object."""
        if self.policy is self.given_policy and isinstance(self.policy, nn.Module):
            own = copy.deepcopy(self.policy)
            self._loop.policy.exchange(self._as_called(own))
            self.policy = own  # last: if this is interrupted, it is done again

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, ids, random stream and unfinished episodes. Simulators cannot be saved."""
        state: dict[str, Any] = {
            "env_state_dict": self.env.state_dict(),
            "traj_pool": self._loop.lanes.ids.count,
            "policy_version": self.version,
            "randomness": self._loop.randomness.state_dict(),
            "unwritten": self._episodes.state_dict(),
            "ended": self._loop.stats.state_dict(),
        }
        if isinstance(self.policy, nn.Module):
            weights = self.policy.state_dict()
            if self._is_in_thread:  # which goes on changing them
                weights = {name: w.clone() if isinstance(w, torch.Tensor) else w for name, w in weights.items()}
            state["policy_state_dict"] = weights
        return state

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Raise what would keep `state` from being loaded; nothing is changed."""
        for name in ("env_state_dict", "traj_pool"):
            if name not in state:
                raise KeyError(f"This is no state of an engine: it has no {name!r}.")
        Randomness(self.settings.policy_device).load_state_dict(state.get("randomness"))
        if "unwritten" in state:
            Episodes().load_state_dict(state["unwritten"])
        if isinstance(self.policy, nn.Module):  # only it knows what fits: what is refused may have been loaded in part
            own = {name: copy.deepcopy(weight) for name, weight in self.policy.state_dict().items()}
            try:
                self._load_weights(state, strict)
            finally:
                self.policy.load_state_dict(own)
        else:
            self._load_weights(state, strict)

    def _load_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        weights = state.get("policy_state_dict")
        if weights is not None:
            if not isinstance(self.policy, nn.Module):
                raise ValueError("The state holds weights, but this collector's policy has none.")
            self.policy.load_state_dict(weights, strict=strict)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Go on with the saved weights and streams, in new episodes with new ids."""
        self._load_weights(state, strict)
        self.version = state.get("policy_version", 0)
        self._loop.randomness.load_state_dict(state.get("randomness"))
        with self._loop.randomness.applied():
            self.env.load_state_dict(state["env_state_dict"])
        self.reset()
        self._loop.lanes.ids.restore(state["traj_pool"])
        self._loop.stats.load_state_dict(state.get("ended", {}))
        if "unwritten" in state:
            self._episodes.load_state_dict(state["unwritten"])
            self._episodes.drop()  # their episodes cannot be gone on with

    def close(self) -> None:
        """Close the env."""
        self.is_closed = True
        self.env.close()


def has_weights(model: Any) -> bool:
    """Whether `model` is a module that can be given weights: no function, and no wrapper of one."""
    if isinstance(model, TensorDictModule) and not isinstance(model.module, nn.Module):
        return False
    return isinstance(model, nn.Module) and not isinstance(model, RandomPolicy | PolicyClientModule)


def writer_number(replay_buffer: Any, worker: int | None) -> int:
    """What tells an engine's trajectories from those of others; a buffer has a number for each that writes to it."""
    if worker is None and isinstance(replay_buffer, OwnBuffer):
        return replay_buffer.enrol()
    return worker or 0
