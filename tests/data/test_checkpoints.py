"""What is saved can be loaded elsewhere, and goes on there as here."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffer_tools import WAIT_S, buffer_of, check, frames, lose, seeded, together
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
    checkpoint_files,
)
from swath.data.prioritized import PrioritizedSampler
from swath.data.slices import SliceSampler
from swath.errors import CheckpointError

LONG = bool(os.environ.get("SWATH_LONG"))
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
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "deep" / "saved").iterdir()}
    assert modes == {0o600}
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
    with pytest.raises(CheckpointError, match=f"{path}/replay_buffer.json.*{words}"):
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
    with pytest.raises(ValueError, match=r"replay_buffer.json.*format 99"):
        buffer.loads(tmp_path)


# -- what somebody else has prepared ---------------------------------------------------------------------------------


def tampered(path: Path, old: str, new: str) -> None:
    """Change a checkpoint as somebody would who knows of checksums."""
    file = path / "replay_buffer.json"
    before = file.read_text()
    assert old in before
    sealed(file, before.replace(old, new))


def sealed(file: Path, words: str) -> None:
    """Write `words`, which may begin with a checksum, with the one that they should have."""
    body = re.sub(r'^\{"crc": "\w+", ', "{", words)
    file.write_text(f'{{"crc": "{zlib.crc32(body.encode()):08x}", {body[1:]}')


NO_TYPES = ["load", "hub", "os", "__builtins__", "eval", "Tensor", "float31"]


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        *(('"bool"', f'"{name}"', ValueError, "type") for name in NO_TYPES),  # of a tensor
        *(('\\"bool\\"', f'\\"{name}\\"', ValueError, "type") for name in NO_TYPES),  # within the layout
        *(
            ('"tensors": "replay_buffer_', f'"tensors": "{name}', ValueError, "no part of a checkpoint")
            for name in ("../replay_buffer_", "/{}/replay_buffer_", "x/../../replay_buffer_", "..", "frames_")
        ),
        *(
            ('"tensor": 0,', f'"tensor": {place},', ValueError, "bin|TypeError")
            for place in ("-1", "-64", "10000", str(2**70), '"0000.bin"', "null", "0.5")
        ),
        *(
            ('"shape": [8]', f'"shape": {shape}', ValueError, "json|bin")
            for shape in ("[-8]", "[8, 0]", f"[{2**62}]", '"8"')
        ),
        *(('"head", ', f'"head", {head}', ValueError, "counters") for head in ("-", "1e", "3.")),
        *(('\\"rows\\": 8', f'\\"rows\\": {rows}', ValueError, "8") for rows in (-1, 7, 9, 10**15)),
    ],
)
def test_what_was_tampered_with_is_refused(old: str, new: str, error: Any, words: str | None, tmp_path: Path) -> None:
    """Names of types are that only, no file outside the directory is read, and a layout must be of our size."""
    path = saved(tmp_path)
    (tmp_path / "secret.bin").write_bytes(b"\x07" * 4096)
    tampered(path, old, new.replace("{}", str(tmp_path).strip("/")))
    buffer = buffer_of(size=8)
    buffer.extend(frames([1, 2]))
    before = state_of(buffer)
    with pytest.raises(error, match=words) as found:
        buffer.loads(path)
    assert str(path) in str(found.value)
    assert state_of(buffer) == before


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda whole: whole[:-1],
    "cut in half": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "longer": lambda whole: whole + b"\0",
    "zeros at the end": lambda whole: whole[:-64] + bytes(64),
    "zeros": lambda whole: bytes(len(whole)),
    "noise": lambda whole: random.Random(0).randbytes(len(whole)),
}


def state_of(buffer: ReplayBuffer) -> str:
    """All that there is, in words."""
    with torch.random.fork_rng():
        state = buffer.state_dict()
    return repr((state, buffer.stats(), [t.tolist() for t in state["storage"].get("tensors", [])]))


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("holds", [0, 3])
def test_damaged_files_are_refused_by_name_and_nothing_changes(holds: int, kind: type[Storage], tmp_path: Path) -> None:
    path = saved(tmp_path, kind(8))
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) > 1
    buffer = buffer_of(kind, 8, generator=seeded(3))
    buffer.extend(frames(range(100, 100 + holds)))
    before, chance = state_of(buffer), random.Random(0)

    def flipped(whole: bytes) -> bytes:
        bit = chance.randrange(8 * len(whole))
        return whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :]

    for file in files:
        whole = file.read_bytes()
        for name, damage in [*DAMAGES.items(), *((f"bit {n}", flipped) for n in range(300 if LONG else 30))]:
            file.write_bytes(damage(whole))
            if file.read_bytes() == whole:
                continue
            with pytest.raises(CheckpointError) as found:
                buffer.loads(path)
            assert str(file) in str(found.value), name
            assert state_of(buffer) == before, name
        file.unlink()
        with pytest.raises(FileNotFoundError, match=file.name):
            buffer.loads(path)
        file.write_bytes(whole)
    buffer.loads(path)
    assert len(buffer) == 8


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_state_that_lacks_something_is_refused_and_nothing_changes(storage: str, sampler: str) -> None:
    if (storage, sampler) == ("list", "slices"):
        return
    case = (storage, sampler, "wrapped", True)
    buffer, other = made(case), made(case)
    fill(buffer, 45)
    fill(other, 15)
    state, before = buffer.state_dict(), state_of(other)

    def lacking(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name not in ("ahead", "sampler_kind", "max_size"):
                    yield {key: each for key, each in value.items() if key != name}
                yield from ({**value, name: less} for less in lacking(inner))
        elif isinstance(value, list):
            yield value[:-1]
            if isinstance(value[-1], torch.Tensor):  # no item of a list, which may be anything
                yield from ([*value[:-1], less] for less in lacking(value[-1]))
        elif isinstance(value, torch.Tensor):
            yield value[:-1]
            yield value[..., None].to(torch.complex64)

    checked, drawing = 0, {name: state[name] for name in ("sampler", "ahead")}
    for damaged in lacking({name: state[name] for name in ("storage", "random")}):
        with pytest.raises((ValueError, KeyError, RuntimeError, TypeError)):
            other.load_state_dict({**drawing, **damaged})
        assert state_of(other) == before
        checked += 1
    for name in state["sampler"]:
        with pytest.raises(KeyError):
            other.load_state_dict({**state, "sampler": {k: v for k, v in state["sampler"].items() if k != name}})
        assert state_of(other) == before
    assert checked > 8
    expected = go_on(buffer)
    other.load_state_dict(state)
    assert go_on(other) == expected


def test_an_interrupted_load_leaves_an_empty_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that is half of what it was, and half of what it was to be."""
    buffer, other = buffer_of(size=8), buffer_of(size=8)
    buffer.extend(frames(range(8)))
    other.extend(frames(range(100, 108)))
    copied = torch.Tensor.copy_

    def interrupted(*args: Any) -> Any:
        monkeypatch.undo()
        copied(*args)
        raise KeyboardInterrupt

    state = buffer.state_dict()
    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        other.load_state_dict(state)
    assert len(other) == 0
    with pytest.raises(NothingToSampleError):
        other.sample(3)
    other.extend(frames([1, 2]))
    assert check(other[:]) == [1, 2]


def as_format_1(path: Path) -> None:
    """Write a checkpoint anew as versions before checksums did."""
    file, folder = path / "replay_buffer.json", path / "replay_buffer_0123456789abcdef"
    words = json.loads(file.read_text())
    raw = (path / words["tensors"]).read_bytes()
    folder.mkdir()
    names = (f"{number:04d}.bin" for number in itertools.count())

    def former(value: Any) -> Any:
        if isinstance(value, list):
            return [former(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "tensor" not in value:
            return {name: former(each) for name, each in value.items()}
        name, begin = next(names), value["tensor"]
        size = int(np.prod(value["shape"])) * getattr(torch, value["dtype"]).itemsize
        (folder / name).write_bytes(raw[begin : begin + size])
        return {**value, "tensor": name}

    (path / words["tensors"]).unlink()
    file.write_text(json.dumps({"format": 1, "folder": folder.name, "state": former(words["state"])}))


@pytest.mark.parametrize("storage", STORAGES)
def test_checkpoints_of_former_versions_are_loaded_and_replaced(storage: str, tmp_path: Path) -> None:
    case = (storage, "priorities", "wrapped", True)
    buffer = made(case)
    fill(buffer, 45)
    buffer.dumps(tmp_path)
    as_format_1(tmp_path)
    expected, twin = go_on(buffer), made(case)
    twin.loads(tmp_path)
    assert go_on(twin) == expected
    before = state_of(twin)
    for file in sorted(tmp_path.rglob("*.bin"))[:: 40 if storage == "list" else 1]:
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=str(file)):
            twin.loads(tmp_path)
        file.unlink()
        with pytest.raises(FileNotFoundError, match=str(file)):
            twin.loads(tmp_path)
        file.write_bytes(whole)
        assert state_of(twin) == before
    twin.dumps(tmp_path)
    assert len(list(tmp_path.rglob("*"))) == 2


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


STEPS = ("mkdir", "open", "fsync", "replace", "unlink")
"""What saving asks of the system, apart from writing bytes."""


def at_step(step: int, end: Callable[[], None]) -> Callable[[str], Callable[..., Any]]:
    """Makes functions of `os` call `end` at one step: before what it asks for, or (odd numbers) after it."""
    steps = itertools.count()

    def mortal(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            if next(steps) == step:
                end()
            result = function(*args, **options)
            if next(steps) == step:
                end()
            return result

        return call

    return mortal


def die_at(pipe: Any, path: Path, number: int, step: int) -> None:
    """Save, and be killed at one step."""
    mortal = at_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    for name in STEPS:
        setattr(os, name, mortal(name))
    buffer_numbered(number).dumps(path)


def test_a_file_in_the_place_of_the_directory_is_named_and_stays(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("something else")
    for path in (tmp_path / "saved", tmp_path / "saved" / "deeper"):
        with pytest.raises(OSError, match=f"Not saved.*{tmp_path}/saved"):
            buffer_numbered(1).dumps(path)
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    assert (tmp_path / "saved").read_text() == "something else"


def error_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


@pytest.mark.parametrize("saved_before", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "Full"), OSError(errno.EIO, "Bad"), KeyboardInterrupt()])
def test_a_save_that_fails_at_any_step_leaves_no_debris(
    error: BaseException, saved_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, buffer = tmp_path / "deep" / "saved", buffer_numbered(2)

    def fail() -> None:
        raise error

    for step in itertools.count():
        shutil.rmtree(tmp_path / "deep", ignore_errors=True)
        if saved_before:
            buffer_numbered(1).dumps(path)
        mortal = at_step(step, fail)
        with monkeypatch.context() as patch:
            for name in STEPS:
                patch.setattr(os, name, mortal(name))
            raised = error_of(lambda: buffer.dumps(path))
        broken = raised is not None
        assert not isinstance(raised, OSError) or str(path.parent) in str(raised)
        left = sorted(file.name for file in tmp_path.rglob("*"))
        if (path / "replay_buffer.json").exists():
            assert loaded_number(path) in ((1, 2) if broken else (2,))
            # What the new one has replaced may be left, until the next save.
            assert len(left) <= 4 + (saved_before and loaded_number(path) == 2), (step, left)
            buffer.dumps(path)
            assert len(list(tmp_path.rglob("*"))) == 4
        else:
            assert not saved_before
            assert broken
            assert left == [], step
        if not broken and step > 12:
            break


def run(target: Callable[..., None], *args: Any) -> None:
    with child(target, *args) as (process, _):
        process.join(WAIT_S)


@pytest.mark.parametrize("first", [0, 3, 6, 9, 12, 15])
def test_killed_at_any_step_of_saving_and_of_saving_again(first: int, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    for second in range(0, 22, 1 if LONG else 3):
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
            pipe.poll(chance.uniform(0.0, 0.15))  # let it work for a moment
        seen.add(loaded_number(path))
        if time.monotonic() > deadline:
            break
    assert len(seen) > 1


def test_readers_never_meet_a_missing_file_while_others_save(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    buffer_numbered(0).dumps(path)
    seen = set()
    with child(save_on, path) as (_, pipe), child(save_on, path) as (_, other):  # who take turns
        assert (hear(pipe), hear(other)) == ("ready", "ready")
        for _ in range(5000 if LONG else 300):
            seen.add(loaded_number(path))
    assert len(seen) > 1


def test_a_saver_that_is_stopped_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "PATIENCE_S", 0.2)
    buffer = buffer_numbered(1)
    with checkpoint_files.replacing(tmp_path / "saved") as write:
        with pytest.raises(TimeoutError, match="saved"):
            buffer.dumps(tmp_path / "saved")
        write(buffer.state_dict())
    assert loaded_number(tmp_path / "saved") == 1


def test_writers_do_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for the bytes to be handed to the system."""
    buffer, twin = buffer_of(size=8), buffer_of(size=8)
    buffer.extend(frames(range(4)))
    synced: list[int] = []

    def sync(fd: int) -> None:
        synced.extend(together(lambda: buffer.extend(frames([4 + len(synced)])))[0].tolist())

    monkeypatch.setattr(os, "fsync", sync)
    buffer.dumps(tmp_path)
    assert len(synced) == 3  # two files and the directory
    twin.loads(tmp_path)
    assert check(twin[:]) == [0, 1, 2, 3]
