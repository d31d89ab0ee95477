"""Errors: their types, and how their texts are put together."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from swath import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.UnsupportedSpaceError, TypeError),
        (errors.UnsupportedEnvError, TypeError),
        (errors.ShapeError, ValueError),
        (errors.PolicyError, TypeError),
        (errors.ClosedError, RuntimeError),
        (errors.EndlessError, RuntimeError),
        (errors.EnvCheckError, ValueError),
    ],
)
def test_every_error_is_swaths_and_a_builtin_one(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, errors.SwathError)
    assert issubclass(error, builtin)


def test_an_endless_collector_can_be_given_to_list() -> None:
    """`list()` asks for the length as a hint, and takes a TypeError for none."""

    class Endless:
        def __len__(self) -> int:
            raise errors.EndlessError("endless")

        def __iter__(self) -> object:
            return iter("ab")

    assert list(Endless()) == ["a", "b"]  # type: ignore[call-overload]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")
def test_annotate_keeps_the_error() -> None:
    error = ValueError("bad")
    errors.annotate(error, "in lane 3")
    errors.annotate(error, "of env 1")
    assert error.__notes__ == ["in lane 3", "of env 1"]
    assert str(error) == "bad"


def test_annotate_adds_to_the_message_where_there_are_no_notes() -> None:
    class Old:
        args = ("bad", 3)

    old = Old()
    errors.annotate(old, "in lane 3")  # type: ignore[arg-type]
    assert old.args == ("bad\nin lane 3", 3)
    old.args = ()  # type: ignore[assignment]
    errors.annotate(old, "in lane 3")  # type: ignore[arg-type]
    assert old.args == ()


@pytest.mark.parametrize(
    ("name", "told"),
    [("observatin", " Did you mean 'observation'?"), ("rewards", " Did you mean 'reward'?"), ("zzz", ""), ("", "")],
)
def test_suggestion(name: str, told: str) -> None:
    assert errors.suggestion(name, ["observation", "reward"]) == told


def test_wrong_shape_names_everything() -> None:
    error = errors.wrong_shape(("a", "b"), (2, 3), [2, 4], "The env of lane 1")
    assert isinstance(error, errors.ShapeError)
    for part in ("The env of lane 1", "('a', 'b')", "(2, 4)", "(2, 3) was expected", "check_env"):
        assert part in str(error)


def test_a_check_error_lists_its_problems_and_can_be_sent() -> None:
    error = errors.EnvCheckError("MyEnv", ["This is wrong.", "That too."])
    assert str(error) == "check_env found 2 problems in MyEnv:\n1. This is wrong.\n2. That too."
    assert str(errors.EnvCheckError("MyEnv", ["This."])).startswith("check_env found 1 problem in")
    again = pickle.loads(pickle.dumps(error))
    assert (again.env, again.problems) == (error.env, error.problems)


def test_foreign_arguments_are_ignored_refused_or_unknown() -> None:
    options: dict[str, Any] = {
        "ignored": ["use_gpu"],
        "refused": {"device": "Priorities are kept on the CPU."},
        "harmless": {"device": (None, "cpu")},
        "known": ["alpha"],
    }
    errors.check_foreign_arguments("Sampler", {"use_gpu": True, "device": "cpu"}, **options)
    with pytest.raises(errors.UnsupportedArgumentError, match=r"not support `device='cuda'`. Priorities"):
        errors.check_foreign_arguments("Sampler", {"device": "cuda"}, **options)
    with pytest.raises(TypeError, match=r"Sampler got an unknown argument: alpa=1. Did you mean 'alpha'\?"):
        errors.check_foreign_arguments("Sampler", {"alpa": 1}, **options)
    assert issubclass(errors.UnsupportedArgumentError, TypeError)
    assert issubclass(errors.UnsupportedArgumentError, ValueError)
