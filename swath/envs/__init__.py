"""What can be stepped: EnvBase, gymnasium envs, several envs as one, and adapters."""

from swath.envs.adapt import as_env
from swath.envs.async_pool import AsyncEnvPool
from swath.envs.base import EnvBase
from swath.envs.check import check_env
from swath.envs.envpool import EnvPoolEnv
from swath.envs.gym import GymEnv
from swath.envs.own_pace import OwnPaceEnv
from swath.envs.parallel import ParallelEnv
from swath.envs.rows import Leaf, Rows
from swath.envs.serial import SerialEnv

__all__ = [
    "AsyncEnvPool",
    "EnvBase",
    "EnvPoolEnv",
    "GymEnv",
    "Leaf",
    "OwnPaceEnv",
    "ParallelEnv",
    "Rows",
    "SerialEnv",
    "as_env",
    "check_env",
]
