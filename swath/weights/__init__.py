"""The other direction: numbered snapshots of weights, and how they travel."""

from swath.weights.publisher import Publisher, Subscriber
from swath.weights.sources import WeightLayout, flat_weights, for_worker, layers_of, load_weights, requested_weights

__all__ = [
    "Publisher",
    "Subscriber",
    "WeightLayout",
    "flat_weights",
    "for_worker",
    "layers_of",
    "load_weights",
    "requested_weights",
]
