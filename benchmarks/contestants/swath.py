"""swath's Collector, used as its README shows it: no setting is tuned for the benchmark."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import policies
from benchmarks.batch import Run
from benchmarks.contestants._tensordict import run_collector
from benchmarks.workloads import Workload
from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv
from swath.modules import TanhNormal


def build(workload: Workload) -> Run:
    torch.manual_seed(0)
    net = workload.make_net()
    actor = policies.actor(net, workload.action_high, TanhNormal)
    make = partial(GymEnv, workload.env_id, categorical_action_encoding=True)
    env = make() if workload.num_envs == 1 else SerialEnv(workload.num_envs, make)
    collector = Collector(env, actor, frames_per_batch=workload.frames_per_batch, total_frames=-1)
    return run_collector(iter(collector), net, collector.shutdown)
