"""Clients of an inference server: they stand where a policy stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase

from swath.entries import put
from swath.keys import Key, as_key
from swath.modules.exploration import acting_type
from swath.modules.inference_doors import Door, RemoteDoor, Waiting
from swath.modules.inference_far import FarDoor, FarEnd, FarRequest, Reach
from swath.modules.inference_wire import PolicySignature, TravellingEnd
from swath.runtime.entrance import way_back


class InferenceFuture:
    """An answer that will come."""

    def __init__(self, tensordict: TensorDictBase, waiting: Waiting | FarRequest) -> None:
        """Of the request that `tensordict` is."""
        self._tensordict, self._waiting = tensordict, waiting
        self._is_merged = False

    def done(self) -> bool:
        """Whether `result` takes no time."""
        return self._is_merged or self._waiting.is_done()

    def wait(self) -> None:
        """Wait for it, whether it is an answer or an error."""
        self._waiting.wait(None)

    def result(self, timeout: float | None = None) -> TensorDictBase:
        """The TensorDict that was submitted, with what the policy has written; TimeoutError if that takes longer.

        After a TimeoutError it can be asked again.
        """
        if not self._is_merged:
            for key, value in self._waiting.entries(timeout):
                put(self._tensordict, key, value)
            self._is_merged = True
        return self._tensordict


class InferenceClient:
    """Asks an `InferenceServer`; made by its `client()`.

    It is called as a policy is, with a TensorDict of any batch size, and writes into it what the server's policy
    writes; so it can be given to a collector as its policy. It may be used by any thread, and pickled into other
    processes: there it is one more client.

    Attributes:
        in_keys: what the policy reads, if it says so: only this is sent.
        out_keys: what the policy writes, if it says so.
    """

    def __init__(
        self, door: Door | FarDoor, signature: PolicySignature, reach: Reach | None = None, address: str | None = None
    ) -> None:
        """Ask through `door`. Copies on other machines come through `reach`; with an `address`, all copies do."""
        self._door, self._signature = door, signature
        self._reach, self._address = reach, address
        self._keys = signature.in_keys

    @property
    def in_keys(self) -> list[Key] | None:
        """What the policy reads; None if it does not say."""
        return None if self._signature.in_keys is None else list(self._signature.in_keys)

    @property
    def out_keys(self) -> list[Key] | None:
        """What the policy writes; None if it does not say."""
        return None if self._signature.out_keys is None else list(self._signature.out_keys)

    @property
    def state_guesses(self) -> list[tuple[int, ...]]:
        """Shapes that a recurrent state of the policy may have, for those who have to make a first one."""
        return list(self._signature.state_guesses)

    def __call__(self, tensordict: TensorDictBase, timeout: float | None = None) -> TensorDictBase:
        """Write into `tensordict` what the policy writes; TimeoutError if that takes longer, and no answer then."""
        waiting = self._door.submit(tensordict, self._keys, acting_type(), False)
        try:
            entries = waiting.entries(timeout)
        except BaseException:
            waiting.is_abandoned = True
            raise
        for key, value in entries:
            put(tensordict, key, value)
        return tensordict

    def submit(self, tensordict: TensorDictBase, interaction_type: InteractionType | None = None) -> InferenceFuture:
        """Ask without waiting."""
        waiting = self._door.submit(tensordict, self._keys, interaction_type or acting_type(), True)
        return InferenceFuture(tensordict, waiting)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the end of a new connection, or to another machine as what is needed to make one."""
        address = self._address or way_back()
        if not address or isinstance(self._door, FarDoor):
            return _unpickled, (self._door.travelling_end(), self._signature)
        self._reach = self._reach or Reach(self._door)
        return _unpickled, (self._reach.end(address), self._signature)

    def __copy__(self) -> InferenceClient:
        """A client is only a way to the server."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> InferenceClient:
        """A client is only a way to the server."""
        return self

    def __repr__(self) -> str:
        """What the policy reads and writes."""
        return f"InferenceClient(in_keys={self.in_keys}, out_keys={self.out_keys})"


def _unpickled(end: TravellingEnd | FarEnd, signature: PolicySignature) -> InferenceClient:
    return InferenceClient(FarDoor(end) if isinstance(end, FarEnd) else RemoteDoor(end.end), signature)


class PolicyClientModule(TensorDictModuleBase):
    """A client as a module, for those who want one where a policy stands.

    Args:
        client: of an `InferenceServer`.
        in_keys: what it is said to read; by default what the server's policy says.
        out_keys: what it is said to write; likewise.
        max_inflight: how many requests of `submit` may be under way; more of them wait.
        interaction_type: how the policy explores; by default as in the context of the call.
    """

    def __init__(
        self,
        client: InferenceClient,
        *,
        in_keys: Sequence[Any] | None = None,
        out_keys: Sequence[Any] | None = None,
        max_inflight: int | None = None,
        interaction_type: InteractionType | None = None,
    ) -> None:
        """Ask `client`."""
        super().__init__()
        if max_inflight is not None and (isinstance(max_inflight, bool) or max_inflight < 1):
            raise ValueError(f"max_inflight must be a positive whole number or None, got {max_inflight!r}.")
        self.client = client
        self.max_inflight, self.interaction_type = max_inflight, interaction_type
        given = {"in_keys": in_keys, "out_keys": out_keys}
        for name, keys in given.items():
            keys = getattr(client, name) if keys is None else keys
            if keys is None:
                raise ValueError(f"The server's policy does not say its {name}: give them to PolicyClientModule.")
            setattr(self, name, [as_key(key) for key in keys])
        self._inflight: list[InferenceFuture] = []

    @property
    def state_guesses(self) -> list[tuple[int, ...]]:
        """Shapes that a recurrent state of the policy may have."""
        return self.client.state_guesses

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write what the server's policy writes."""
        if self.interaction_type is None:
            return self.client(tensordict)
        return self.client.submit(tensordict, self.interaction_type).result()

    def submit(self, tensordict: TensorDictBase) -> InferenceFuture:
        """Ask without waiting, unless `max_inflight` requests are under way: then for the first of them."""
        if self.max_inflight is not None:
            self._inflight = [future for future in self._inflight if not future.done()]
            while len(self._inflight) >= self.max_inflight:
                self._inflight.pop(0).wait()
        future = self.client.submit(tensordict, self.interaction_type)
        if self.max_inflight is not None:
            self._inflight.append(future)
        return future

    def __getstate__(self) -> dict[str, Any]:
        """Without what is under way here."""
        return {**self.__dict__, "_inflight": []}
