"""What is saved can be loaded elsewhere, and goes on there as here."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffer_tools import WAIT_S, buffer_of, check, frames, lose, seeded
from children import child, hear
from tensordict import TensorDict

from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NothingToSampleError,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
)
from swath.data.prioritized import PrioritizedSampler
from swath.data.slices import SliceSampler

SIZE = 24
STORAGES: dict[str, Callable[[], Storage]] = {
    "memory": lambda: LazyTensorStorage(SIZE),
    "file": lambda: LazyMemmapStorage(SIZE),
    "list": lambda: ListStorage(SIZE),
    "lanes": lambda: LazyTensorStorage(SIZE, ndim=2),
}
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "once": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "priorities": lambda: PrioritizedSampler(SIZE, 0.8, 0.6),
    "slices": lambda: SliceSampler(slice_len=2, strict_length=False),
}
WRITTEN = {"not full": 15, "wrapped": 45, "emptied": -10}
"""The last frame is always the end of an episode: others would not be continued after loading."""
CASES = [
    case
    for case in itertools.product(STORAGES, SAMPLERS, WRITTEN, (False, True))
    if not (case[0] == "list" and case[1] == "slices")
]


def made(case: tuple[str, str, str, bool]) -> ReplayBuffer:
    storage, sampler, _, own = case
    generator = seeded(11) if own else None
    return ReplayBuffer(storage=STORAGES[storage](), sampler=SAMPLERS[sampler](), batch_size=6, generator=generator)


def write(buffer: ReplayBuffer, numbers: range) -> None:
    if buffer.storage.ndim == 2:
        start, stop = numbers.start, numbers.stop
        buffer.extend(torch.stack([frames(range(base + start, base + stop)) for base in (0, 10_000)]))
    else:
        buffer.extend(frames(numbers))


def fill(buffer: ReplayBuffer, written: int) -> None:
    """Write, sample and give priorities, as in training."""
    step = 8
    for start in range(0, abs(written), step):
        write(buffer, range(start, min(start + step, abs(written))))
        _, info = buffer.sample(return_info=True)
        index = info["index"]
        count = len(index[0] if isinstance(index, tuple) else index)
        buffer.update_priority(index, torch.linspace(0.1, 3.0, count))
    if written < 0:
        buffer.empty()
        write(buffer, range(10))


def go_on(buffer: ReplayBuffer) -> list[Any]:
    """Everything that can be seen of a buffer, and of what it does next."""
    seen: list[Any] = [len(buffer), buffer.write_count, buffer.stats(), check(buffer[:])]
    for start in (500, 503):
        for _ in range(3):
            batch, info = buffer.sample(return_info=True)
            index = info["index"]
            told = [part.tolist() for part in index] if isinstance(index, tuple) else index.tolist()
            seen.append([check(batch, flags=False), told, info["_weight"].tolist() if "_weight" in info else None])
        write(buffer, range(start, start + 3))
        seen.append(check(buffer[:]))
    return seen


def go_on_in_a_new_process(folder: str) -> None:
    """What the other process does."""
    seen = []
    for at, case in enumerate(CASES):
        buffer = made(case)
        torch.manual_seed(999)
        buffer.loads(Path(folder) / str(at))
        seen.append(go_on(buffer))
    (Path(folder) / "seen.json").write_text(json.dumps(seen))


def test_a_new_process_goes_on_as_this_one_does(tmp_path: Path) -> None:
    expected = []
    for at, case in enumerate(CASES):
        torch.manual_seed(at)
        buffer = made(case)
        fill(buffer, WRITTEN[case[2]])
        buffer.dumps(tmp_path / str(at))
        expected.append(go_on(buffer))
    code = "import sys; sys.path.append('..'); import test_checkpoints as t; t.go_on_in_a_new_process(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    for case, ours, theirs in zip(CASES, expected, seen, strict=True):
        assert json.loads(json.dumps(ours)) == theirs, case


@pytest.mark.parametrize("case", [case for case in CASES if case[3]], ids=lambda c: "-".join(map(str, c)))
def test_a_state_is_a_copy_and_can_be_loaded_over_other_contents(case: tuple[str, str, str, bool]) -> None:
    torch.manual_seed(3)
    buffer = made(case)
    fill(buffer, WRITTEN[case[2]])
    state = buffer.state_dict()
    expected = go_on(buffer)
    for other in (0, 3, 60):  # into one that is new, or holds other frames
        twin = made(case)
        write(twin, range(700, 700 + other))
        twin.load_state_dict(state)
        assert go_on(twin) == expected


@pytest.mark.parametrize("storage", ["memory", "file"])
def test_shared_buffers_save_and_load(storage: str, tmp_path: Path) -> None:
    case = (storage, "random", "wrapped", True)
    buffer = made(case).share()
    fill(buffer, 41)
    buffer.dumps(tmp_path / "saved")
    expected = go_on(buffer)
    for shares in (False, True):
        twin = made(case)
        if shares:
            twin.share()
        twin.loads(tmp_path / "saved")
        assert go_on(twin) == expected


def extend_and_pause(pipe: Any, buffer: ReplayBuffer) -> None:
    buffer.extend(frames(range(30)))
    pipe.send("written")
    pipe.recv()


def test_what_only_others_have_written_is_saved() -> None:
    """This process has never looked into the buffer before."""
    buffer = buffer_of(size=SIZE, shared=True)
    with child(extend_and_pause, buffer) as (_, pipe):
        assert hear(pipe) == "written"
        state = buffer.state_dict()
    twin = buffer_of(size=SIZE)
    twin.load_state_dict(state)
    assert sorted(check(twin[:])) == list(range(6, 30))


def test_holes_stay_holes() -> None:
    buffer, twin = buffer_of(size=8), buffer_of(size=8)
    buffer.extend(frames(range(10)))
    lose(buffer, 3)
    twin.load_state_dict(buffer.state_dict())
    assert twin.stats() == {"frames": 5, "written": 10, "sampled": 0, "lost": 3}
    assert set(check(twin.sample(100))) == {5, 6, 7, 8, 9}


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_an_empty_buffer_can_be_saved(kind: type[Storage], tmp_path: Path) -> None:
    buffer_of(kind, 8).dumps(tmp_path / "empty")
    twin = buffer_of(kind, 8)
    twin.extend(frames(range(3)))
    twin.loads(tmp_path / "empty")
    assert (len(twin), twin.write_count) == (0, 0)
    with pytest.raises(NothingToSampleError):
        twin.sample(1)
    assert twin.extend(frames([1, 2])).tolist() == [0, 1]


def test_dicts_tuples_and_tensors_are_saved_as_such(tmp_path: Path) -> None:
    data = {"a": torch.arange(4), "b": (torch.zeros(4, 2), [torch.ones(4).bool()])}
    for at, batch in enumerate((data, torch.arange(8.0).view(4, 2), (torch.arange(4), torch.arange(4.0)))):
        buffer = buffer_of(size=5)
        buffer.extend(batch)
        buffer.dumps(tmp_path / str(at))
        twin = buffer_of(size=5)
        twin.loads(tmp_path / str(at))
        assert repr(twin[:]) == repr(buffer[:])
        twin.extend(batch)
        assert len(twin) == 5


def test_items_of_a_list_that_can_be_saved(tmp_path: Path) -> None:
    items: list[Any] = [1, 2.5, "word", None, True, torch.ones(2), {"a": (1, [torch.zeros(1)])}, frames([3])[0]]
    buffer = buffer_of(ListStorage, 8, collate_fn=list)
    buffer.extend(items)
    buffer.dumps(tmp_path / "list")
    twin = buffer_of(ListStorage, 8, collate_fn=list)
    twin.loads(tmp_path / "list")
    for at, item in enumerate(items[:5]):
        assert twin[at] == item
        assert type(twin[at]) is type(item)
    assert torch.equal(twin[5], torch.ones(2))
    assert twin[6]["a"][0] == 1
    assert check(twin[7][None]) == [3]


def test_items_of_a_list_that_cannot_be_saved_are_named(tmp_path: Path) -> None:
    buffer = buffer_of(ListStorage, 8)
    buffer.add(frames([1])[0])
    buffer.dumps(tmp_path / "list")
    buffer.add(object())
    with pytest.raises(TypeError, match="object"):
        buffer.dumps(tmp_path / "list")
    twin = buffer_of(ListStorage, 8)
    twin.loads(tmp_path / "list")  # what was there is still there
    assert len(twin) == 1


def test_saving_leaves_nothing_beside_and_files_are_ours_alone(tmp_path: Path) -> None:
    buffer = made(CASES[0])
    fill(buffer, 13)
    mask = os.umask(0)
    try:
        for _ in range(3):
            buffer.save(str(tmp_path / "deep" / "saved"))  # the same as dump
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "deep" / "saved").stat().st_mode) == 0o700
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["saved"]
    twin = made(CASES[0])
    twin.load(str(tmp_path / "deep" / "saved"))
    assert check(twin[:]) == check(buffer[:])


def test_what_was_loaded_does_not_change_what_was_saved(tmp_path: Path) -> None:
    for kind in (LazyTensorStorage, ListStorage):
        buffer = buffer_of(kind, 8)
        buffer.extend(frames(range(8)))
        buffer.dumps(tmp_path / "saved")
        twin = buffer_of(kind, 8)
        twin.loads(tmp_path / "saved")
        if kind is ListStorage:
            twin[0]["n"].fill_(77)
        twin.extend(frames(range(50, 58)))
        again = buffer_of(kind, 8)
        again.loads(tmp_path / "saved")
        assert check(again[:]) == list(range(8))


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
def test_what_is_written_after_loading_continues_nothing(kind: type[Storage]) -> None:
    buffer = buffer_of(kind, 20)
    buffer.extend(frames(range(10)))
    state = buffer.state_dict()
    twin = buffer_of(kind, 20)
    twin.extend(frames(range(50, 60)))  # up to the same place
    twin.load_state_dict(state)
    twin.extend(frames(range(60, 63)))
    assert twin.storage.seams[10]


def test_a_loaded_generator_is_the_buffers_own() -> None:
    generator = seeded(1)
    buffer = buffer_of(size=8, generator=generator)
    buffer.extend(frames(range(8)))
    before = generator.get_state()
    buffer.load_state_dict(buffer.state_dict())
    buffer.sample(10)
    assert torch.equal(generator.get_state(), before)


# -- what does not fit -----------------------------------------------------------------------------------------------


def saved(tmp_path: Path, storage: Storage | None = None) -> Path:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8) if storage is None else storage)
    buffer.extend(frames(range(10)))
    buffer.dumps(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (lambda: buffer_of(size=9), LazyTensorStorage, r"max_size=8.*9"),
        (lambda: buffer_of(ListStorage, 8), LazyTensorStorage, "ListStorage"),
        (lambda: buffer_of(size=8), ListStorage, "LazyTensorStorage"),
        (lambda: ReplayBuffer(storage=LazyTensorStorage(8, ndim=2)), LazyTensorStorage, "ndim=2"),
        (lambda: buffer_of(size=8, sampler=SamplerWithoutReplacement()), LazyTensorStorage, "as its sampler"),
    ],
    ids=["size", "list", "columns", "dimensions", "sampler"],
)
def test_another_size_or_kind_is_refused(
    ours: Callable[[], ReplayBuffer], theirs: type[Storage], words: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, theirs(8))
    with pytest.raises(ValueError, match=words):
        ours().loads(path)


@pytest.mark.parametrize(
    "other",
    [
        TensorDict({"n": torch.zeros(3)}, [3]),
        frames(range(3)).set("more", torch.zeros(3)),
        frames(range(3)).set("n", torch.zeros(3, 2, dtype=torch.int64)),
        frames(range(3)).set("n", torch.zeros(3, dtype=torch.int32)),
    ],
)
def test_other_entries_are_refused_and_nothing_changes(other: TensorDict, tmp_path: Path) -> None:
    path = saved(tmp_path)
    buffer = buffer_of(size=8)
    buffer.extend(other)
    before = buffer[:]
    with pytest.raises(ValueError, match="entries"):
        buffer.loads(path)
    assert (buffer[:] == before).all()
    assert len(buffer) == 3


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    buffer = buffer_of(size=8)
    with pytest.raises(FileNotFoundError):
        buffer.loads(tmp_path / "nothing")
    (tmp_path / "replay_buffer.json").write_text(json.dumps({"format": 99, "state": None}))
    with pytest.raises(ValueError, match="format 99"):
        buffer.loads(tmp_path)


# -- what somebody else has prepared ---------------------------------------------------------------------------------


def tampered(path: Path, old: str, new: str) -> None:
    file = path / "replay_buffer.json"
    before = file.read_text()
    assert old in before
    file.write_text(before.replace(old, new))


NO_TYPES = ["load", "hub", "os", "__builtins__", "eval", "Tensor", "float31"]


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        *(('"bool"', f'"{name}"', ValueError, "type") for name in NO_TYPES),  # of a tensor
        *(('\\"bool\\"', f'\\"{name}\\"', ValueError, "type") for name in NO_TYPES),  # within the layout
        *(
            ("0000.bin", name, (OSError, ValueError), None)
            for name in ("../secret.bin", "/{}/secret.bin", "x/../../secret.bin", "..")
        ),
        *(('\\"rows\\": 8', f'\\"rows\\": {rows}', ValueError, "8") for rows in (-1, 7, 9, 10**15)),
    ],
)
def test_what_was_tampered_with_is_refused(old: str, new: str, error: Any, words: str | None, tmp_path: Path) -> None:
    """Names of types are that only, no file outside the directory is read, and a layout must be of our size."""
    path = saved(tmp_path)
    (tmp_path / "secret.bin").write_bytes(b"\x07" * 4096)
    tampered(path, old, new.replace("{}", str(tmp_path).strip("/")))
    with pytest.raises(error, match=words):
        buffer_of(size=8).loads(path)


def test_files_that_were_cut_off_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for file in sorted(path.glob("*/*.bin")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        with pytest.raises((OSError, ValueError)):
            buffer_of(size=8).loads(path)
        file.write_bytes(whole)
    buffer_of(size=8).loads(path)


def test_nothing_is_imported_or_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)

    def forbidden(*args: Any, **options: Any) -> None:
        raise AssertionError("something was executed")

    import pickle

    for module, name in ((pickle, "loads"), (pickle, "load"), (torch, "load"), (np, "load")):
        monkeypatch.setattr(module, name, forbidden)
    monkeypatch.setattr("builtins.eval", forbidden)
    monkeypatch.setattr("importlib.import_module", forbidden)
    buffer_of(size=8).loads(path)


@pytest.mark.parametrize(
    "form", ["__import__('os').system('x')", {"tree": {"__class__": None}}, {"other": 1}, ["tuple"], None]
)
def test_forms_that_nobody_wrote(form: Any, tmp_path: Path) -> None:
    path = saved(tmp_path)
    tampered(path, '\\"form\\": {\\"tensordict\\": []}', f'\\"form\\": {json.dumps(json.dumps(form))[1:-1]}')

    def load_and_look() -> None:
        buffer = buffer_of(size=8)
        buffer.loads(path)
        buffer[:]

    with pytest.raises((ValueError, KeyError, TypeError)):
        load_and_look()


# -- killed while saving ---------------------------------------------------------------------------------------------


def buffer_numbered(number: int) -> ReplayBuffer:
    """All frames and the cursor follow from `number`, so that a mixture is seen."""
    buffer = buffer_of(size=64)
    buffer.extend(frames([number] * (64 + number % 64)))
    return buffer


def loaded_number(path: Path) -> int:
    twin = buffer_of(size=64)
    twin.loads(path)
    (number,) = set(check(twin[:]))
    assert twin.write_count == 64 + number % 64
    assert len(twin) == 64
    return number


def die_at(pipe: Any, path: Path, number: int, step: int) -> None:
    """Save, and be killed at one step of moving and removing directories: before it, or in the middle of it."""
    steps = iter(range(1000))

    def mortal(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            if function is remove and Path(args[0]).exists():
                for file in sorted(Path(args[0]).iterdir()):
                    if next(steps) == step:
                        os.kill(os.getpid(), signal.SIGKILL)
                    file.unlink()
            function(*args, **options)

        return call

    remove = shutil.rmtree
    os.rename, shutil.rmtree = mortal(os.rename), mortal(remove)  # type: ignore[assignment]
    buffer_numbered(number).dumps(path)


def run(target: Callable[..., None], *args: Any) -> None:
    with child(target, *args) as (process, _):
        process.join(WAIT_S)


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 6])
def test_killed_at_any_step_of_saving_and_of_saving_again(first: int, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    for second in range(0, 14):
        buffer_numbered(1).dumps(path)
        assert loaded_number(path) == 1
        run(die_at, path, 2, first)
        kept = loaded_number(path)
        assert kept in (1, 2)
        run(die_at, path, 3, second)
        assert loaded_number(path) in (kept, 3)
        buffer_numbered(4).dumps(path)
        assert loaded_number(path) == 4
        assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def save_on(pipe: Any, path: Path) -> None:
    buffers = [buffer_numbered(number) for number in range(8)]
    pipe.send("ready")
    for number in itertools.count():
        buffers[number % 8].dumps(path)


def test_killed_at_any_time_while_saving(tmp_path: Path) -> None:
    path, chance = tmp_path / "saved", random.Random(0)
    buffer_numbered(0).dumps(path)
    seen, deadline = set(), time.monotonic() + 4.0
    for _ in range(40):
        with child(save_on, path) as (_, pipe):
            assert hear(pipe) == "ready"
            pipe.poll(chance.uniform(0.0, 0.02))  # let it work for a moment
        seen.add(loaded_number(path))
        if time.monotonic() > deadline:
            break
    assert len(seen) > 1
