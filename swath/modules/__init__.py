"""What acts: policies and their plans, exploration, random policies, distributions."""

from swath.modules.exploration import ExplorationType, exploration_type, set_exploration_type
from swath.modules.inference_client import InferenceClient, InferenceFuture, PolicyClientModule
from swath.modules.inference_server import InferenceServer
from swath.modules.policy import PolicyRunner, as_policy
from swath.modules.random import RandomPolicy
from swath.modules.tanh_normal import TanhNormal

__all__ = [
    "ExplorationType",
    "InferenceClient",
    "InferenceFuture",
    "InferenceServer",
    "PolicyClientModule",
    "PolicyRunner",
    "RandomPolicy",
    "TanhNormal",
    "as_policy",
    "exploration_type",
    "set_exploration_type",
]
