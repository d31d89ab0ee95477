"""Collector: experience from envs in this process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swath.collectors.arguments import takes
from swath.collectors.config import CollectorConfig
from swath.collectors.delivery import Part, Terms
from swath.collectors.direct import Direct
from swath.collectors.reflection import Reflection
from swath.collectors.roster import Roster
from swath.collectors.surface import BaseCollector
from swath.collectors.weights_control import InPlaceWeights
from swath.collectors.worker import FIELDS, BatchLayout, Call, EngineJob
from swath.envs import EnvBase, OwnPaceEnv
from swath.modules.stages import StageName
from swath.rollout.budget import FrameBudget
from swath.rollout.engine import Engine, writer_number
from swath.runtime.local import LocalCarrier
from swath.runtime.pool import Pool
from swath.runtime.supervision import Supervision
from swath.weights import Publisher


class Collector(Reflection, BaseCollector):
    """Runs a policy in an env, in this process, and delivers batches `[*env.batch_size, T]`.

    See `CollectorConfig` for the arguments.
    """

    config_class = CollectorConfig
    config: CollectorConfig

    @takes(CollectorConfig)
    def __init__(self, config: CollectorConfig) -> None:
        """Make env and policy, and reset the env."""
        self._set_up(config)

    def _set_up(self, config: CollectorConfig) -> None:
        BaseCollector.__init__(self, config)
        worker = config.worker_idx
        number = writer_number(config.replay_buffer, worker)
        self.engine = Engine.make(
            self._env_source(),
            config.policy,
            replace(config.engine_settings(0, shares_policy=config.policy_factory is None), worker=number),
            policy_factory=config.policy_factory,
            create_env_kwargs=self._env_kwargs,
            check=_check_single if config.track_policy_version is True else None,
        )
        rows, unit = math.prod(self.engine.batch_size), self.engine.unit
        self._steps = -(-config.frames_per_batch // unit) * unit // rows
        self._roster = Roster(config, lambda: None, self.engine)
        carrier = LocalCarrier(1, FIELDS)
        self._pool: Pool[Part] = Pool(carrier, 1, self._roster, Supervision(), repr(self))
        self._pool.start()
        layout = self._pool.started[0]
        assert isinstance(layout, BatchLayout)
        publisher = self._roster.publisher = Publisher(carrier)
        terms = Terms.of(config, layout, {0: self._steps}, publisher)
        self._delivery = Direct(self._pool, terms, FrameBudget(config.total_frames, rows, unit))
        self._roster.watch(self._pool, self._delivery)
        self._weights = InPlaceWeights(self._pool, publisher, self.engine, worker or 0)
        self._owes_closing = False
        """Whether the env was to be closed when its thread had not ended."""
        self._open()
        for name, asked in (("frames_per_batch", config.frames_per_batch), ("total_frames", config.total_frames)):
            if asked > 0 and asked % unit:
                rounded = -(-asked // unit) * unit
                warnings.warn(f"{name}={asked} is rounded up to {rounded}, whole steps of {unit} lanes.", stacklevel=3)

    def _env_source(self) -> Any:
        """The env, or a function that makes it."""
        return _only_one(self.config.create_env_fn)

    @property
    def _env_kwargs(self) -> dict[str, Any] | None:
        return self.config.create_env_kwargs

    @property
    def env(self) -> EnvBase:
        """What is stepped."""
        return self.engine.env

    @property
    def policy(self) -> Any:
        """What acts: the policy that was given, or a copy of it."""
        return self.engine.policy

    @property
    def frames_per_batch(self) -> int:
        """Steps in a batch: every lane makes so many."""
        return self._steps

    @property
    def policy_stages(self) -> list[StageName]:
        """How the policy ran in the last batch, or will run in the first: by which stages.

        `MLPStage` and sampling stages are quick. Those that call a module are slower, and are shown with the reason.
        """
        return self.engine.policy_stages

    def get_model(self, model_id: str) -> Any:
        """The model of that name: "policy", or a path from the collector."""
        return self.engine.get_model(model_id)

    _state_keys = ("env_state_dict", "frames", "iter", "traj_pool")

    def _worker_states(self) -> dict[str, Any]:
        return self.engine.state_dict() if self.closed else self._first(Call(EngineJob.state_dict), "state")

    def _saved_states(self, state: dict[str, Any]) -> dict[int, dict[str, Any]]:
        return {0: state}

    _is_direct = True

    def _shut_down(self, timeout: float | None, close_env: bool, was_open: bool) -> None:
        has_ended = self._free is None or self._free.stop(timeout)
        if was_open:
            self.engine.is_closed, self._owes_closing = True, close_env
        if has_ended and self._owes_closing:  # otherwise it is still being stepped: perhaps the next time
            self._owes_closing = False
            self._pool.shutdown(timeout)

    def __repr__(self) -> str:
        frames = self.frames_per_batch * math.prod(self.engine.batch_size)
        return (
            f"{type(self).__name__}({self.env!r}, policy={type(self.policy).__name__}, frames_per_batch={frames}, "
            f"total_frames={self.config.total_frames})"
        )


def _check_single(env: EnvBase) -> None:
    if env.batch_size and not isinstance(env, OwnPaceEnv):
        raise RuntimeError(
            "track_policy_version=True is for a single env; for one with the batch size "
            f"{list(env.batch_size)} pass track_policy_version=PolicyVersion() from swath.collectors."
        )


def _only_one(create_env_fn: Any) -> Any:
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        if not create_env_fn:
            raise ValueError("create_env_fn is an empty list of 0 envs: give it an env, or one SerialEnv of several.")
        if len(create_env_fn) != 1:
            raise ValueError(
                f"Collector runs one env (of any number of lanes), got a list of {len(create_env_fn)}. Use "
                "SerialEnv(n, factories) for several lanes in this process, or MultiCollector for several processes."
            )
        return create_env_fn[0]
    return create_env_fn
