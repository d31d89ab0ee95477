"""Where experience is kept: replay buffers, their storages, samplers and writers."""

from swath.data.file_storage import LazyMemmapStorage
from swath.data.pacing import RateLimiter
from swath.data.prioritized import PrioritizedSampler
from swath.data.ray_buffer import RayReplayBuffer
from swath.data.replay_buffer import ReplayBuffer
from swath.data.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from swath.data.slices import SliceSampler, SliceSamplerWithoutReplacement
from swath.data.storages import ListStorage, Storage
from swath.data.tensor_storages import LazyTensorStorage, TensorStorage
from swath.data.tensordict_buffers import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from swath.data.writers import RoundRobinWriter, TensorDictRoundRobinWriter, Writer
from swath.errors import BufferGoneError, CheckpointError, NothingToSampleError, RateLimitError

__all__ = [
    "BufferGoneError",
    "CheckpointError",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "NothingToSampleError",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "RandomSampler",
    "RateLimitError",
    "RateLimiter",
    "RayReplayBuffer",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Writer",
]
