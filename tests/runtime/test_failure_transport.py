"""Errors on their way to another process, ends of processes in words, and naming what cannot be pickled."""

import functools
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest

from swath.errors import RemoteTraceback, WorkerDiedError, WorkerError, in_words
from swath.runtime import Failure
from swath.runtime.channel import pack


def sent(error: BaseException) -> BaseException:
    """What the other side gets, given that the error was raised here."""
    try:
        raise error
    except BaseException as raised:
        return cloudpickle.loads(cloudpickle.dumps(Failure.of(raised))).error("Raised elsewhere.")


class PickyError(Exception):
    def __init__(self, *, number: int) -> None:
        super().__init__()
        self.number = number

    def __str__(self) -> str:
        return f"number {self.number}"


class SlottedError(Exception):
    __slots__ = ("said",)

    def __init__(self, said: str) -> None:
        self.said = said

    def __str__(self) -> str:
        return self.said


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        ValueError(),
        KeyError("key"),
        PickyError(number=3),
        SlottedError("in a slot"),
        FileNotFoundError(2, "No such file", "/x"),
        UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"),
        np.exceptions.AxisError(3, 2),
        WorkerDiedError("Worker", 1, 2, -9, "sleeping"),
        ModuleNotFoundError("No module named 'x'", name="x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_text_and_traceback_are_kept(error: Exception) -> None:
    other = sent(error)
    assert type(other) is type(error)
    assert str(other).startswith(str(error))
    assert isinstance(other.__cause__, RemoteTraceback)
    assert "raise error" in str(other.__cause__)
    assert getattr(other, "__notes__", ["Raised elsewhere."]) == ["Raised elsewhere."]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes there")
def test_attributes_and_notes_are_kept() -> None:
    error = ValueError("x")
    error.detail = [1, 2]  # type: ignore[attr-defined]
    error.add_note("a note")
    other: Any = sent(error)
    assert other.detail == [1, 2]
    assert other.__notes__ == ["a note", "Raised elsewhere."]


def test_attributes_that_cannot_be_pickled_stay_behind() -> None:
    error = ValueError("x")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    other = sent(error)
    assert type(other) is ValueError
    assert not hasattr(other, "lock")


def test_an_error_that_cannot_be_pickled_is_told_of() -> None:
    other = sent(ValueError("x", threading.Lock()))
    assert type(other) is WorkerError
    assert "ValueError: ('x', <unlocked" in str(other)


def test_an_error_that_cannot_be_printed_is_told_of() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert type(sent(MuteError())).__name__ == "MuteError"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_would_end_the_other_side_does_not(error: BaseException) -> None:
    other = sent(error)
    assert type(other) is WorkerError
    assert type(error).__name__ in str(other)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-signal.SIGKILL, "killed by SIGKILL (signal 9)"),
        (-signal.SIGSEGV, "killed by SIGSEGV (signal 11)"),
        (-250, "killed by signal (signal 250)"),
        (None, "how is not known"),
    ],
)
def test_ends_in_words(code: int | None, words: str) -> None:
    assert words in in_words(code)
    text = str(WorkerDiedError("Worker", 2, 77, code, "resting"))
    assert words in text
    assert text.startswith("Worker 2 (pid 77) ")
    assert "while resting" in text


# -- what cannot be pickled ----------------------------------------------------------------------------------------

LOCK = threading.Lock()


@dataclass
class Holder:
    inner: Any
    size: int = 3


def uses_a_global() -> Any:
    return LOCK


def closure() -> Any:
    held = Holder([1, threading.Lock()])
    return lambda: held


# Pickled by reference they would not be looked into; workers get what the script itself defines by value.
by_value = cloudpickle.register_pickle_by_value


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (Holder(threading.Lock()), "inner is lock"),
        (Holder({"a": [0, threading.Lock()]}), "inner['a'][1] is lock"),
        (closure(), "held.inner[1] is lock"),
        (functools.partial(max, threading.Lock()), "args[0] is lock"),
        (functools.partial(max, x=threading.Lock()), "keywords['x'] is lock"),
        ((lambda x=LOCK: x), "(default 0) is lock"),
        ([1, (n for n in range(3))], "[1] is generator"),
    ],
)
def test_the_part_that_cannot_be_pickled_is_named(message: Any, path: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        pack(message, by_value=True)
    assert path in str(caught.value)
    assert "inside the factory" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_global_that_cannot_be_pickled_is_named() -> None:
    module = sys.modules[__name__]
    by_value(module)
    try:
        with pytest.raises(RuntimeError, match="LOCK is lock"):
            pack(uses_a_global, by_value=True)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
