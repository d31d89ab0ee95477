"""Keys: one name is a string, several are a tuple."""

from __future__ import annotations

from typing import Any

import pytest

from swath.keys import after, as_key, as_path, is_private, nest, under


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("a", "a"),
        (("a",), "a"),
        (["a"], "a"),
        (("a", "b"), ("a", "b")),
        (["a", "b"], ("a", "b")),
        (("a", ("b", "c")), ("a", "b", "c")),
        ((("a", "b"), ("c", ("d",))), ("a", "b", "c", "d")),
        ((("a",),), "a"),
    ],
)
def test_as_key(given: Any, plain: Any) -> None:
    assert as_key(given) == plain


def test_paths() -> None:
    assert as_path("a") == ("a",)
    assert as_path(("a", "b")) == ("a", "b")
    assert under("root", "a") == ("root", "a")
    assert under("root", ("a", "b")) == ("root", "a", "b")
    assert after("a") == ("next", "a")


@pytest.mark.parametrize(
    ("key", "private"), [("a", False), ("_a", True), (("a", "_b"), True), (("_a", "b"), True), ("a_", False)]
)
def test_private(key: Any, private: bool) -> None:
    assert is_private(key) is private


def test_nest() -> None:
    flat = {("a", "b"): 1, ("a", "c", "d"): 2, "e": 3}
    expected = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert nest(flat) == expected  # type: ignore[arg-type]
    assert nest(iter(flat.items())) == expected  # type: ignore[arg-type]
    assert nest({}) == {}
