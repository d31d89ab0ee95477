"""The other direction: versioned snapshots of weights, and how they travel."""

from swath.weights.mail import WeightsMail
from swath.weights.publisher import Publisher, Subscriber, TakeFrom
from swath.weights.sources import (
    POLICY_ID,
    Layout,
    fitted,
    flat_weights,
    for_worker,
    layers_of,
    load_weights,
    requested_weights,
    warn_of_old_name,
)
from swath.weights.store import WeightStore

__all__ = [
    "POLICY_ID",
    "Layout",
    "Publisher",
    "Subscriber",
    "TakeFrom",
    "WeightStore",
    "WeightsMail",
    "fitted",
    "flat_weights",
    "for_worker",
    "layers_of",
    "load_weights",
    "requested_weights",
    "warn_of_old_name",
]
