"""The engine: loop, lanes, arena and slots, trajectories, stats and the frame budget. It knows no process."""

from swath.rollout.arena import Arena, Slot
from swath.rollout.budget import FrameBudget
from swath.rollout.lanes import Lanes
from swath.rollout.loop import Interruptor, LoopSettings, Receipt, RolloutLoop
from swath.rollout.stats import RolloutStats
from swath.rollout.trajectories import PADDING_ID, TrajectoryAssembler, TrajectoryIds, padded

__all__ = [
    "PADDING_ID",
    "Arena",
    "FrameBudget",
    "Interruptor",
    "Lanes",
    "LoopSettings",
    "Receipt",
    "RolloutLoop",
    "RolloutStats",
    "Slot",
    "TrajectoryAssembler",
    "TrajectoryIds",
    "padded",
]
