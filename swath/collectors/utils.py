"""What users of `torchrl.collectors.utils` look for under that name."""

from swath.rollout.split import split_trajectories

__all__ = ["split_trajectories"]
