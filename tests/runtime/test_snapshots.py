"""Snapshots: whole ones with numbers, for readers in other processes, whatever the writer does."""

from __future__ import annotations

import multiprocessing
import platform
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from swath.errors import DoesNotFitError
from swath.runtime import ProcessLock, ordering
from swath.runtime.columns import Leaf
from swath.runtime.snapshots import COPIES, EXTRA_ROOM, SnapshotContents, Snapshots

FORK = multiprocessing.get_context("fork")
WAIT_S = 30.0

TENSORS = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(5, dtype=torch.float64),
    "half": torch.randn(7).half(),
    "bfloat16": torch.randn(2, 3).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "int8": torch.arange(-3, 4, dtype=torch.int8),
    "int64": torch.arange(5) * 2**40,
    "uint8": torch.arange(9, dtype=torch.uint8).view(3, 3),
    "complex": torch.randn(4, dtype=torch.complex64),
    "no dimensions": torch.tensor(3.5),
    "a counter": torch.tensor(12),
    "empty": torch.empty(0, 3),
    "empty too": torch.empty(2, 0, dtype=torch.int32),
}


def store_of(tensors: dict[str, Tensor], *extras: str, room: int = EXTRA_ROOM, private: bool = False) -> Snapshots:
    leaves = {name: Leaf.of(tensor, 0) for name, tensor in tensors.items()}
    return Snapshots(SnapshotContents(leaves, extras, room), private=private)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first
    )


@pytest.mark.parametrize("private", [False, True])
def test_all_kinds_of_tensors(private: bool) -> None:
    store = store_of(TENSORS, private=private)
    assert store.version == -1
    store.publish(TENSORS, 0)
    assert store.version == 0
    assert same(store.snapshot(), TENSORS)


def test_a_model_without_weights() -> None:
    store = store_of({})
    store.publish({}, 4)
    assert store.version == 4
    assert store.snapshot() == {}


def test_what_was_published_is_a_copy_both_ways() -> None:
    weights = {"weight": torch.zeros(3)}
    store = store_of(weights)
    store.publish(weights, 1)
    weights["weight"] += 1
    taken = store.snapshot()
    assert (taken["weight"] == 0).all()
    taken["weight"] += 2
    assert (store.snapshot()["weight"] == 0).all()


def test_tensors_that_need_gradients_and_views_may_be_published() -> None:
    weight = torch.arange(6.0).view(2, 3).t().requires_grad_()
    store = store_of({"weight": weight})
    store.publish({"weight": weight}, 0)
    assert torch.equal(store.snapshot()["weight"], weight.detach())


def test_another_dtype_is_converted() -> None:
    store = store_of({"weight": torch.zeros(2)})
    store.publish({"weight": torch.tensor([1, 2])}, 0)
    assert store.snapshot()["weight"].tolist() == [1.0, 2.0]


def test_what_was_never_published_is_left_to_the_worker() -> None:
    """Otherwise partial weights would set all others to zero."""
    store = store_of({"one": torch.zeros(2), "two": torch.zeros(2), "three": torch.zeros(2)}, "extra")
    store.publish({"one": torch.ones(2)}, 0)
    assert set(store.snapshot()) == {"one"}
    for version in range(1, 6):
        store.publish({"three": torch.full((2,), float(version))}, version)
        taken = {name: tensor.tolist() for name, tensor in store.snapshot().items()}
        assert taken == {"one": [1.0, 1.0], "three": [version, version]}
    store.publish({"extra": 5}, 6)
    assert set(store.snapshot()) == {"one", "three", "extra"}


def test_extra_state_goes_along_and_partial_weights_keep_it() -> None:
    store = store_of({"weight": torch.zeros(2)}, "extra", "other")
    store.publish({"weight": torch.zeros(2), "extra": {"count": 3}, "other": "x"}, 0)
    store.publish({"extra": {"count": 4}}, 1)
    store.publish({"weight": torch.ones(2)}, 2)
    taken = store.snapshot()
    assert taken["extra"] == {"count": 4}
    assert taken["other"] == "x"
    assert (taken["weight"] == 1).all()


def test_extra_state_that_outgrows_the_store() -> None:
    store = store_of({"weight": torch.zeros(2)}, "extra", room=256)
    store.publish({"weight": torch.ones(2), "extra": b"small"}, 3)
    with pytest.raises(DoesNotFitError) as caught:
        store.publish({"extra": b"x" * 10_000}, 4)
    assert store.version == 3, "what does not fit has changed nothing"
    assert store.snapshot()["extra"] == b"small"
    assert caught.value.needed > 10_000


def test_a_writer_that_ends_in_the_middle_leaves_the_former_version() -> None:
    class InterruptError(Exception):
        pass

    class Broken(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            if name == "two":
                raise InterruptError
            return super().__getitem__(name)

    store = store_of({"one": torch.zeros(2), "two": torch.zeros(2)})
    store.publish({"one": torch.ones(2), "two": torch.ones(2)}, 0)
    for _ in range(2 * COPIES):
        with pytest.raises(InterruptError):
            store.publish(Broken(one=torch.zeros(2), two=torch.zeros(2)), 1)
        assert store.version == 0
        assert (store.snapshot()["one"] == 1).all()


# -- readers and a writer at once -----------------------------------------------------------------------------------

SIZES = {"head": (), "wide": (256, 64), "tail": (5,)}


def numbered(version: int) -> dict[str, Any]:
    return {name: torch.full(shape, float(version)) for name, shape in SIZES.items()} | {"extra": [version] * 10}


def read(pipe: Any, store: Snapshots, last: int) -> None:
    """Adopt again and again; every snapshot must be of one version, the one it is said to be, never an older one."""
    target = {name: torch.zeros(shape) for name, shape in SIZES.items()}
    told, seen, before = "", 0, -1
    pipe.send("ready")
    deadline = time.monotonic() + WAIT_S
    while before < last and time.monotonic() < deadline and not told:
        extra: list[int] = []

        def load(weights: dict[str, Any], extra: list[int] = extra) -> None:
            extra[:] = weights["extra"]
            for name, tensor in target.items():
                tensor.copy_(weights[name])

        version = store.adopt(load)
        values = {float(value) for tensor in target.values() for value in (tensor.min(), tensor.max())} | {*extra}
        if values != {version}:
            told = f"version {version} holds {sorted(values)}"
        if version < before:
            told = f"version {version} came after {before}"
        seen += version != before
        before = version
    pipe.send((told, seen, before))


def test_readers_never_see_half_of_a_version() -> None:
    store = store_of({name: torch.zeros(shape) for name, shape in SIZES.items()}, "extra")
    store.publish(numbered(0), 0)
    last = 5000
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=read, args=(theirs, store, last))
    process.start()
    try:
        assert ours.poll(WAIT_S)
        assert ours.recv() == "ready"
        for version in range(1, last + 1):
            store.publish(numbered(version), version)
        assert ours.poll(WAIT_S), "the reader did not end"
        told, seen, newest = ours.recv()
    finally:
        process.kill()
        process.join(WAIT_S)
    assert not told
    assert newest == last
    assert seen > 10, "the reader has not read while the writer wrote"


# -- machines that do not keep the order of stores ---------------------------------------------------------------------


def is_locked(store: Snapshots) -> bool:
    """Whether somebody has the lock of the store's memory: asked as another process would."""
    lock = ProcessLock(store.__reduce__()[1][1])
    try:
        lock.acquire(0.02)
    except TimeoutError:
        return True
    lock.release()
    return False


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64", "riscv64", "ppc64le"])
def test_snapshots_are_written_and_read_under_a_lock_where_order_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    keeps = machine in ("x86_64", "AMD64")
    assert ordering.keeps_order() == keeps
    store, seen = store_of(TENSORS), []

    class Looking(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            if not seen:
                seen.append(is_locked(store))
            return super().__getitem__(name)

    store.publish(Looking(TENSORS), 3)
    taken: dict[str, Any] = {}

    def load(values: Any) -> None:
        taken.update({name: value.clone() for name, value in values.items()})
        seen.append(is_locked(store))

    assert store.adopt(load) == 3
    assert same(taken, TENSORS)
    assert seen == [not keeps, not keeps]
    assert not is_locked(store)
    private = store_of(TENSORS, private=True)  # threads of one process need none
    private.publish(TENSORS, 1)
    assert same(private.snapshot(), TENSORS)
