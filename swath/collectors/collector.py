"""Collector: experience from envs in this process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from swath.collectors.background import Background
from swath.collectors.base import BaseCollector
from swath.collectors.buffer_writer import BufferWriter
from swath.collectors.config import CollectorConfig, PolicyVersion, refuse_elsewhere
from swath.collectors.utils import split_trajectories
from swath.data import ReplayBuffer
from swath.envs import EnvBase, as_env
from swath.errors import ClosedError, suggestion
from swath.keys import STEP_COUNT, TRAJ_IDS, nest
from swath.modules import RandomPolicy, as_policy
from swath.rollout import FrameBudget, LoopSettings, Receipt, RolloutLoop, Slot
from swath.rollout.devices import as_device
from swath.runtime import compiler
from swath.runtime.paths import follow
from swath.seeding import checked_seed
from swath.weights import POLICY_ID, Layout, WeightsMail, fitted, for_worker, layers_of, load_weights


class Collector(BaseCollector):
    """Runs a policy in an env, in this process, and delivers batches `[*env.batch_size, T]`.

    Args:
        create_env_fn: an env, or a function that returns one.
        policy: what acts; None acts at random.
        options: everything else by name; see `CollectorConfig` for what there is.
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        """Check the arguments, make env and policy, and reset the env."""
        if type(self) is not Collector:
            refuse_elsewhere(type(self).__name__, options)
        config = self.config_class.from_arguments(type(self).__name__, options)
        self._begin(config, create_env_fn, policy)

    @classmethod
    def of(cls, config: CollectorConfig, create_env_fn: Any, policy: Any = None) -> Collector:
        """A collector from a config that is checked already."""
        collector = cls.__new__(cls)
        collector._begin(config, create_env_fn, policy)
        return collector

    def _begin(self, config: CollectorConfig, create_env_fn: Any, policy: Any) -> None:
        if policy is not None and config.policy_factory is not None:
            raise TypeError("Give either policy or policy_factory, not both.")
        super().__init__(config)
        self.closed = True  # until there is something to shut down
        self._devices = config.devices
        _check_machine(config)
        source = _only_one(create_env_fn)
        self.env = as_env(source, config.create_env_kwargs)
        try:
            self._check_env(self.env)
            given = config.policy_factory() if config.policy_factory is not None else policy
            self.env.introduce_to(given)
            trusted = config.trust_policy and given is not None
            self._prepare_policy(given if trusted else as_policy(given, self.env))
            with torch.inference_mode(False):  # rows and batches must be ordinary tensors
                self._loop = RolloutLoop(self.env, _dressed(self.policy, config), self._settings())
            self._writer = None if config.replay_buffer is None else self._new_writer(config.replay_buffer)
        except BaseException:
            if callable(source) and source is not self.env:  # an env that was given may be used again
                self.env.close()
            raise
        self.closed = False
        lanes = self.env.num_lanes
        self.frames_per_batch = -(-config.frames_per_batch // lanes)
        """Steps in a batch: every lane makes so many."""
        if config.frames_per_batch % lanes:
            warnings.warn(
                f"frames_per_batch={config.frames_per_batch} is rounded up to {self.requested_frames_per_batch}, whole "
                f"steps of {lanes} lanes.",
                stacklevel=3,
            )
        if config.total_frames > 0 and config.total_frames % lanes:
            warnings.warn(
                f"total_frames={config.total_frames} is rounded up to whole steps of {lanes} lanes.", stacklevel=3
            )
        self._budget = FrameBudget(config.total_frames, lanes)
        self._background: Background | None = None
        self._owes_closing = False
        """Whether the env was to be closed when its thread had not ended."""
        self._mail = WeightsMail()
        self._batches = 0
        self._is_fresh = True
        """Whether all lanes are where a reset has left them."""
        self._delivered_at: float | None = None

    def _new_writer(self, buffer: Any) -> BufferWriter:
        writer = BufferWriter(buffer, self.env.batch_size)
        if self.config.trajs_per_batch is not None and not writer.is_flat:
            raise ValueError(
                f"trajs_per_batch={self.config.trajs_per_batch} writes whole episodes one after the other, for which a "
                "storage with lanes (ndim above 1) has no place: use ndim=1."
            )
        return writer

    def _check_env(self, env: EnvBase) -> None:
        env.must_be_open()
        config = self.config
        if config.max_frames_per_traj and config.max_frames_per_traj > 0 and STEP_COUNT in env.observation_keys:
            raise ValueError(
                f"max_frames_per_traj={config.max_frames_per_traj} counts steps in {STEP_COUNT!r}, but the env writes "
                "an entry of that name already. Let one of them go."
            )
        if config.set_truncated and not env.has_truncated:
            raise RuntimeError(f"set_truncated=True needs a 'truncated' entry, which {env!r} has not.")
        if config.track_policy_version is True and env.batch_size:
            raise RuntimeError(
                "track_policy_version=True is for a single env; for one with the batch size "
                f"{list(env.batch_size)} pass track_policy_version=PolicyVersion() from swath.collectors."
            )

    def _prepare_policy(self, policy: Any) -> None:
        """Keep the user's policy, and act with a copy of it where it lies on another device."""
        self._given_policy = policy
        self.policy = policy
        device = self._devices.policy
        if device is not None and isinstance(policy, nn.Module):
            places = {tensor.device for tensor in (*policy.parameters(), *policy.buffers())}
            if places and places != {device}:
                self.policy = copy.deepcopy(policy).to(device)

    def _settings(self) -> LoopSettings:
        config = self.config
        limit = config.max_frames_per_traj
        return LoopSettings(
            max_frames_per_traj=limit if limit is not None and limit > 0 else None,
            exploration=config.exploration_type,
            track_traj_ids=config.track_traj_ids,
            track_version=isinstance(config.track_policy_version, PolicyVersion) or config.track_policy_version,
            compact_obs=config.compact_obs,
            set_truncated=config.set_truncated,
            worker=self._number(),
            policy_device=self._devices.policy,
            interruptor=config.interruptor,
            fast_policy=config.fast_policy,
            opaque_policy=bool(config.trust_policy),
        )

    def _number(self) -> int:
        """What tells this collector's trajectories from those of others; a buffer has a number for each who writes."""
        config = self.config
        if config.worker_idx is None and isinstance(config.replay_buffer, ReplayBuffer):
            return config.replay_buffer.enrol()
        return config.worker_idx or 0

    # -- collecting --------------------------------------------------------------------------------------------

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames in a batch: whole steps of all lanes."""
        return self.frames_per_batch * self.env.num_lanes

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Fixed-frame batches until the budget is spent, which closes the env."""
        self._must_not_run()
        if self._writer is not None:
            return self._fills()
        return map(self._finished, map(self._taken, self._raw_batches()))  # a loop would keep hold of the last batch

    def _delivered(self) -> Iterator[TensorDictBase | None]:
        return self.iterator() if self._writer is not None else super()._delivered()

    def _raw_batches(self) -> Iterator[TensorDictBase]:
        while not self._budget.is_spent and not self.closed:
            yield self._collect()
        self.shutdown()

    def rollout(self) -> TensorDictBase:
        """One batch as it was collected, before any post-processing; also when `total_frames` are collected."""
        self._must_not_run()
        if self._writer is not None:
            self._writer.interrupt()  # these frames do not go there
        return self._taken(self._collect())

    def _taken(self, batch: TensorDictBase) -> TensorDictBase:
        """A batch that goes to the user by frames: episodes that are put together must do without those in it."""
        if self.config.trajs_per_batch is not None:
            self._assembler.tear(batch.get(TRAJ_IDS).unique().tolist(), self._loop.lanes.ids.current.tolist())
        return batch

    def _collect(self) -> TensorDictBase:
        """One batch over the memory of a slot."""
        with torch.inference_mode(False):  # batches are trained on, wherever they were asked for
            batch = self._lent(*self._roll_out(self.frames_per_batch))
        self._delivered_at = perf_counter()
        return batch

    def collect_into(self, slot: Slot, random: bool) -> Receipt:
        """Fill a slot of somebody else's memory; for those who carry a collector into another process."""
        with torch.inference_mode(False):
            receipt = self._roll_out(slot.steps, into=slot, random=random)[1]
            if self._post_hook is not None:
                self._post_hook(self._lent(slot, receipt))
        self._delivered_at = perf_counter()
        return receipt

    def _roll_out(
        self, steps: int, begins: bool = True, into: Slot | None = None, random: bool | None = None
    ) -> tuple[Slot, Receipt]:
        """Fill a slot with `steps` steps, or with what the budget leaves of them; whether a batch `begins` with it."""
        if self.closed:
            raise ClosedError("This collector is shut down; make a new one.")
        self._adopt_weights()
        if self._delivered_at is not None:
            self._loop.stats.timings.waiting += perf_counter() - self._delivered_at
            self._delivered_at = None
        if begins and self._pre_hook is not None:
            self._pre_hook()
        if self.env.stepped_by is not self._loop.lanes:
            warnings.warn(f"{self.env!r} was used by somebody else: all episodes begin anew.", stacklevel=3)
            self._restart(None)
        if begins and self.config.reset_at_each_iter and not self._is_fresh:
            self._restart(None)
        slot = self._loop.arena.acquire(self._budget.steps(steps) or steps) if into is None else into
        self._is_fresh = False
        try:
            receipt = self._loop.collect(slot, random=self._acts_at_random() if random is None else random)
        except BaseException:  # some lanes have made the step and others not: nothing can go on from here
            self.shutdown(raise_on_error=False)
            raise
        self._budget.spend(receipt.frames)
        self._batches += begins
        return slot, receipt

    def _acts_at_random(self) -> bool:
        if not self.config.init_random_frames:
            return False
        frames = self._budget.spent if self._writer is None else self._writer.frames_written
        return frames < self.config.init_random_frames

    def _lent(self, slot: Slot, receipt: Receipt) -> TensorDictBase:
        batch_size = (*self.env.batch_size, receipt.steps)
        batch: TensorDictBase = TensorDict(
            nest(slot.lend(self._loop.delivered, receipt.steps)),
            batch_size=batch_size,
            names=[*(None,) * len(self.env.batch_size), "time"],
        )
        device = self._devices.storing
        return batch if device is None else batch.to(device, non_blocking=self.config.no_cuda_sync)

    # -- into a replay buffer ----------------------------------------------------------------------------------

    def _fills(self) -> Iterator[None]:
        while not self._budget.is_spent and not self.closed:
            self.fill()
            yield None
        self._end()

    def fill(self, steps: int | None = None) -> bool:
        """Collect one batch (of `steps` steps) into the replay buffer; whether there is more to collect."""
        if self._writer is None:
            raise RuntimeError("This collector has no replay buffer to fill; give it one in the constructor.")
        self._must_not_run()
        if self._budget.is_spent:
            self._end()
            return False
        steps = self.frames_per_batch if steps is None else steps
        with torch.inference_mode(False):
            if self.config.extend_buffer:
                self._write_once(self._writer, steps)
            else:
                for step in range(self._budget.steps(steps)):
                    self._write_once(self._writer, 1, begins=step == 0)
                    if self._loop.was_stopped:
                        break
        self._delivered_at = perf_counter()
        if self._budget.is_spent and self._background is not None:
            self._end()
        return not self._budget.is_spent and not self.closed

    def _write_once(self, writer: BufferWriter, steps: int, begins: bool = True) -> None:
        config = self.config
        slot, receipt = self._roll_out(steps, begins)
        changes = config.postproc is not None or self._post_hook is not None or config.split_trajs
        if writer.takes_columns and config.trajs_per_batch is None and not changes:
            writer.write_slot(slot, self._loop.delivered, receipt.steps)  # the data's only copy
            return
        batch = self._lent(slot, receipt)
        if config.trajs_per_batch is None:
            batch = split_trajectories(batch) if config.split_trajs else batch
            writer.write_batch(self._deliver(batch))
            return
        self._assembler.add(batch)
        del batch  # its frames are copied: the slot may be used for the next
        at_a_time = config.trajs_per_write or max(self._assembler.ready, 1)
        while self._assembler.ready >= at_a_time:
            self._write_episodes(writer, at_a_time)

    def _write_episodes(self, writer: BufferWriter, count: int) -> None:
        lengths = self._assembler.lengths(count)
        writer.write_episodes(self._deliver(self._assembler.take(count, "cat")), lengths)

    def finish_episodes(self) -> None:
        """All frames are collected: what is left of episodes is complete enough to write, or given up and counted."""
        if self._writer is not None and self._assembler.ready and not self.closed:
            self._write_episodes(self._writer, self._assembler.ready)
        self._assembler.clear()

    def _end(self) -> None:
        self.finish_episodes()
        self.shutdown()

    # -- in the background -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in a thread, until `total_frames` are collected or it is shut down.

        From now on the collector acts with a copy of the policy: what is trained meanwhile counts when
        `update_policy_weights_` publishes it. What goes wrong is raised by `sample()` of the buffer, `is_running()` and
        `async_shutdown()`.
        """
        if self._writer is None:
            return super().start()
        if self.closed:
            raise ClosedError("This collector is shut down; make a new one.")
        if self._background is not None:
            self._background.raise_failure()
            return
        self._iterating, self._stream = True, None
        if self.policy is self._given_policy and isinstance(self.policy, nn.Module):
            self.policy = copy.deepcopy(self.policy)
            self._loop.policy.exchange(_dressed(self.policy, self.config))
        self._background = Background(self, repr(self), self.config.interruptor)
        self._loop.move_to_background(self._background)
        self._writer.stopping = self._background.wants_attention
        if isinstance(self.config.replay_buffer, ReplayBuffer):
            self.config.replay_buffer.attach(self)
        self._background.start()

    def pause(self) -> AbstractContextManager[Any]:
        """A context in which background collection rests: nothing is written, and everything may be asked of it."""
        if self._writer is None:
            return super().pause()  # type: ignore[no-any-return]
        return self._at_rest()

    def _at_rest(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._background is None else self._background.resting()

    def _runs_for_others(self) -> bool:
        """Whether it collects in a thread that is not the caller's, and does not rest for the caller."""
        background = self._background
        if background is None or not background.is_alive:
            return False
        return not (background.is_here or background.rests_for_caller)

    def _must_not_run(self) -> None:
        if self._runs_for_others():
            raise RuntimeError(
                "This collector runs in the background: sample from its replay buffer, or use it inside `with "
                "collector.pause():`."
            )

    def is_running(self) -> bool:
        """Whether it collects in the background; raises what went wrong there."""
        if self._background is None:
            return False
        is_alive = self._background.is_alive  # first: one that has ended since then has told its error
        self._background.raise_failure()
        return is_alive

    def is_feeding(self) -> bool:
        """Whether more frames may come into the replay buffer. For the buffer; users ask `is_running`."""
        return self._runs_for_others()

    def raise_failure(self) -> None:
        """Raise what went wrong in the background. For the buffer."""
        if self._background is not None:
            self._background.raise_failure()

    # -- control -----------------------------------------------------------------------------------------------

    def reset(self, index: Any = None) -> None:
        """Begin new episodes with new ids: in all lanes, or in those of `index` (indices or a mask)."""
        if self.closed:
            raise ClosedError("This collector is shut down; make a new one.")
        chosen = torch.arange(self.env.num_lanes)
        if index is not None:
            if not self.env.batch_size:
                raise RuntimeError("reset(index) chooses among lanes, but this env has no batch dimension.")
            picked = torch.as_tensor(index)
            chosen = chosen.view(self.env.batch_size)[picked if picked.numel() else picked.long()].unique()
        with self._at_rest():
            self._restart(None if index is None else chosen.tolist())

    def _restart(self, chosen: list[int] | None) -> None:
        """Begin new episodes in all lanes, or in the `chosen` ones."""
        lanes = list(range(self.env.num_lanes)) if chosen is None else chosen
        if lanes:
            cut_off = self._loop.lanes.ids.current[lanes].tolist()
            with self._loop.randomness.applied():
                self._loop.lanes.restart(lanes)
            self._assembler.drop(cut_off)
            if self._writer is not None:
                self._writer.interrupt()
            self._is_fresh = self._is_fresh or chosen is None

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed every lane and the policy's noise, and begin new episodes: the next batch depends on `seed` alone."""
        seed = checked_seed(seed)
        with self._at_rest():
            return self._seeded(seed, static_seed)

    def _seeded(self, seed: int, static_seed: bool) -> int:
        self._loop.randomness.seed(seed, self._worker_idx or 0)
        with self._loop.randomness.applied():  # an env may seed torch's own generator, and draw from it
            following = self.env.set_seed(seed, static_seed)
        self._assembler.clear()
        fresh = self._loop.lanes.ids
        before = (fresh.count, fresh.current.copy())
        self._restart(None)
        if not self._loop.stats.frames:  # no frame has an id yet, so none needs a new one
            fresh.count, fresh.current = before
        return following

    # -- weights -----------------------------------------------------------------------------------------------

    def _update_weights(self, requested: dict[str, Any], worker_ids: Sequence[int] | None) -> None:
        worker = self._worker_idx or 0
        mine = for_worker(requested, worker)
        if not mine or (worker_ids is not None and worker not in worker_ids):
            return
        acting, ready = self.policy, []
        for model_id, source in mine.items():
            model = self._find_model(model_id)
            if model_id == POLICY_ID:
                if source is None or any(source is layer for layer in layers_of(self._given_policy)):
                    source = self._given_policy
                if source is model:
                    continue  # trained in place: the collector acts with these very tensors
                if model is self._given_policy and self.config.policy_factory is None and self._background is None:
                    # Weights from elsewhere must not end up in the policy that the user is training.
                    model = acting = copy.deepcopy(model)
            ready.append(fitted(model, source))
        if self._background is not None and self._background.is_alive:
            self._mail.send(ready)
            return
        self._adopt_weights()
        for target, weights in ready:  # all of them fit
            load_weights(target, weights)
        if acting is not self.policy:
            self.policy = acting
            self._loop.policy.exchange(_dressed(acting, self.config))
        self._loop.version += 1

    def _adopt_weights(self) -> None:
        """Act with what was published since the last batch."""
        for ready in self._mail.fetch():
            for target, weights in ready:
                load_weights(target, weights)
            self._loop.version += 1

    def _find_model(self, model_id: str) -> Any:
        try:
            model = self.get_model(model_id)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise KeyError(
                f"There is no model {model_id!r} in this collector; 'policy' is its policy, others are found by their "
                f"path, as in 'env.envs[0].module'.{suggestion(model_id, ['policy', 'env'])}"
            ) from error
        if not isinstance(model, nn.Module) or isinstance(model, RandomPolicy):
            raise RuntimeError(f"{model_id!r} is {type(model).__name__}, which has no weights to update.")
        return model

    def weight_layout(self, model_id: str) -> Layout:
        """What the weights of a model look like; for those who publish them from another process."""
        return Layout.of(self._find_model(model_id))

    def get_model(self, model_id: str) -> Any:
        """The model of that name: "policy", or a path from the collector."""
        return self.policy if model_id == POLICY_ID else follow(self, model_id)

    @property
    def policy_stages(self) -> list[str]:
        """How the policy ran in the last batch: `MLPStage` and sampling stages are quick, `TensorDictStage` is slow."""
        return self._loop.policy.stages

    @property
    def policy_version(self) -> int | None:
        """How often the weights were updated; None unless versions are tracked."""
        return self._loop.version if self.config.track_policy_version else None

    def get_policy_version(self) -> int | None:
        """The same as `policy_version`."""
        return self.policy_version

    def increment_version(self) -> None:
        """Count one version up, for weights that were changed in place."""
        self._loop.version += 1

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, counters, ids, random stream and unfinished episodes: plain tensors, numbers and dicts.

        Simulators cannot be saved: a restored collector begins new episodes.
        """
        with self._at_rest():
            return self._state()

    def _state(self) -> dict[str, Any]:
        self._adopt_weights()
        state: dict[str, Any] = {
            "env_state_dict": self.env.state_dict(),
            "frames": self._budget.spent,
            "iter": self._batches,
            "traj_pool": self._loop.lanes.ids.count,
            "policy_version": self._loop.version,
            "randomness": self._loop.randomness.state_dict(),
            "trajectories": self._assembler.state_dict(),
        }
        if isinstance(self.policy, nn.Module):
            weights = self.policy.state_dict()
            if self._background is not None:  # which goes on changing them
                weights = {name: w.clone() if isinstance(w, torch.Tensor) else w for name, w in weights.items()}
            state["policy_state_dict"] = weights
        return state

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on with the saved counters and weights, in new episodes with new ids."""
        if self.closed:
            raise ClosedError("This collector is shut down; load the state into a new one.")
        missing = [key for key in ("env_state_dict", "frames", "iter", "traj_pool") if key not in state_dict]
        if missing:
            raise KeyError(f"This is no state of a collector: it has no {', '.join(missing)}.")
        with self._at_rest():
            self._load(state_dict, strict)

    def _load(self, state_dict: dict[str, Any], strict: bool) -> None:
        self._adopt_weights()
        weights = state_dict.get("policy_state_dict")
        if weights is not None:
            if not isinstance(self.policy, nn.Module):
                raise ValueError("The state holds weights, but this collector's policy has none.")
            self.policy.load_state_dict(weights, strict=strict)
        self._budget.spent = state_dict["frames"]
        self._batches = state_dict["iter"]
        self._loop.version = state_dict.get("policy_version", 0)
        self._loop.randomness.load_state_dict(state_dict.get("randomness"))
        with self._loop.randomness.applied():
            self.env.load_state_dict(state_dict["env_state_dict"])
        self._restart(None)
        self._loop.lanes.ids.restore(state_dict["traj_pool"])
        if "trajectories" in state_dict:
            self._assembler.load_state_dict(state_dict["trajectories"])
            self._assembler.drop()  # their episodes cannot be gone on with

    def stats(self) -> dict[str, Any]:
        """Frames, episodes, recent returns and lengths, and where the time went, as a flat dict of numbers."""
        total = self.config.total_frames
        return {
            **self._loop.stats.summary(),
            "frames": self._budget.spent,
            "batches": self._batches,
            "total_frames": total,
            "completed": self._budget.is_spent,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": self._loop.version,
            "pending_frames": self._assembler.pending_frames,
            "dropped_frames": self._assembler.dropped,
            "slots_allocated": self._loop.arena.allocated,
        }

    def fake_tensordict(self) -> TensorDict:
        """Zeros with exactly the layout of a batch."""
        shape = (*self.env.batch_size, self.frames_per_batch)
        leaves = self._loop.arena.leaves
        zeros = {key: torch.zeros(*shape, *leaves[key].shape, dtype=leaves[key].dtype) for key in self._loop.delivered}
        return TensorDict(
            nest(zeros),
            batch_size=shape,
            names=[*(None,) * len(self.env.batch_size), "time"],
            device=self._devices.storing,
        )

    def getattr_policy(self, name: str) -> Any:
        """An attribute of the policy, by path."""
        return follow(self.policy, name)

    @property
    def replay_buffer(self) -> Any:
        """The buffer that is written to, if there is one."""
        return self.config.replay_buffer

    def getattr_rb(self, name: str) -> Any:
        """An attribute of the replay buffer, by path."""
        return follow(self.config.replay_buffer, name)

    def getattr_env(self, name: str) -> Any:
        """An attribute of the env, by path."""
        return follow(self.env, name)

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop collecting and close the env, unless told to leave it open."""
        if not self._stop_background(timeout):
            self._owes_closing, close_env = close_env, False  # it is still being stepped
        elif self._owes_closing:
            self._owes_closing = False
            self.env.close()
        if self.closed:
            self._raise_unreported(raise_on_error)
            return
        self.closed = True
        self._stream = None
        self.disable_profile()
        if close_env:
            try:
                self.env.close()
            except Exception:
                if raise_on_error:
                    raise

        self._raise_unreported(raise_on_error)

    def _stop_background(self, timeout: float | None) -> bool:
        """End the thread, if there is one; whether it has ended."""
        return self._background is None or self._background.stop(timeout)

    def _raise_unreported(self, raise_on_error: bool) -> None:
        """What went wrong in the background and has reached nobody yet; the buffer need not know of it any more."""
        background, buffer = self._background, self.config.replay_buffer
        if background is None or background.is_here:
            return
        if isinstance(buffer, ReplayBuffer):
            buffer.detach(self)
        if raise_on_error and not background.is_reported:
            background.raise_failure()
        background.complain()

    def __repr__(self) -> str:
        """Env, policy and size of the batches."""
        return (
            f"{type(self).__name__}({self.env!r}, policy={type(self.policy).__name__}, "
            f"frames_per_batch={self.requested_frames_per_batch}, total_frames={self.config.total_frames})"
        )


def _check_machine(config: CollectorConfig) -> None:
    """Refuse what this machine has not, before anything is made."""
    if torch.cuda.is_available():
        return
    for name in ("device", "storing_device", "policy_device", "env_device"):
        device = as_device(name, getattr(config, name))
        if device is not None and device.type == "cuda":
            raise ValueError(f"{name}={getattr(config, name)!r} needs CUDA, which is not available here; use 'cpu'.")
    if config.cudagraph_policy:
        raise RuntimeError(
            f"cudagraph_policy={config.cudagraph_policy!r} needs CUDA, which is not available here; leave it out."
        )


def _dressed(policy: Any, config: CollectorConfig) -> Any:
    """The policy as the loop calls it: compiled or recorded as a CUDA graph, if so asked."""
    if config.compile_policy:
        compiler.make_ready()
        policy = torch.compile(policy, **(config.compile_policy if isinstance(config.compile_policy, dict) else {}))
    if config.cudagraph_policy:
        from tensordict.nn import CudaGraphModule

        options = config.cudagraph_policy if isinstance(config.cudagraph_policy, dict) else {}
        policy = CudaGraphModule(policy, **options)
    return policy


def _only_one(create_env_fn: Any) -> Any:
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        if len(create_env_fn) != 1:
            raise ValueError(
                f"Collector runs one env (of any number of lanes), got a list of {len(create_env_fn)}. Use "
                "SerialEnv(n, factories) for several lanes in this process, or MultiCollector for several processes."
            )
        return create_env_fn[0]
    return create_env_fn
