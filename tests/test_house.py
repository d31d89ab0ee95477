"""`.ci/house.py` finds what breaks the rules of the house, and nothing else."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[1] / ".ci" / "house.py"
SIZES, LONGEST = (runpy.run_path(str(HOUSE))[name] for name in ("SIZES", "LONGEST"))

FINE = """
import os
from tensordict import _private_of_others

_table = {}

class Own:
    _kind = 0
    def __init__(self):
        self._mine = 1
    def __eq__(self, other):
        return self._mine == other._mine and self._inherited and super()._inherited
    @classmethod
    def make(cls):
        return cls._made()

def use(own, module):
    _ = own.__dict__, own._mine, own._kind, module._table, getattr(own, "_mine"), getattr(module, "_orig_mod")
    os._exit(0)
"""


def told(root: Path, files: dict[str, str]) -> tuple[int, list[str]]:
    """Exit code and findings for a tree of `files`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run([sys.executable, HOUSE, root], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_what_is_in_order_passes(tmp_path: Path) -> None:
    files = {
        "swath/fine.py": FINE,
        **{f"swath/{package}/{name}": "" for package in ("envs", "collectors") for name in ("__init__.py", "utils.py")},
        "tests/test_fine.py": "import x\nx._private\n" * 300,
        "tests/inner/test_fine.py": "class Own: ...\n",
    }
    assert told(tmp_path, files) == (0, ["The house is in order."])


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("other._private", "other._private is private to another module"),
        ("self.pool._asked", "self.pool._asked is private to another module"),
        ("f()._private = 1", "f()._private is private to another module"),
        ("getattr(other, '_private', None)", "other._private is private to another module"),
        ("from swath.other import _private", "_private is private to swath.other"),
        ("from .other import _private", "_private is private to other"),
    ],
)
def test_privates_of_another_module(tmp_path: Path, line: str, finding: str) -> None:
    files = {"swath/one.py": f"x = 1\n{line}\n", "swath/two.py": "class Two:\n    _private = _asked = 1\n"}
    assert told(tmp_path, files) == (1, [f"swath/one.py:2: {finding}"])


def test_tensors_made_where_nobody_says(tmp_path: Path) -> None:
    lines = [
        "torch.zeros(3)",
        "x = torch.as_tensor(x)",
        "torch.rand(2, device=d)",
        "torch.ones_like(x)",
        "x.new_zeros(3)",
    ]
    told_of = "names no device: the user's default would decide"
    assert told(tmp_path, {"swath/one.py": "\n".join(lines), "tests/test_one.py": lines[0]}) == (
        1,
        [f"swath/one.py:1: torch.zeros {told_of}", f"swath/one.py:2: torch.as_tensor {told_of}"],
    )


def test_names_that_exist_twice(tmp_path: Path) -> None:
    files = {
        "swath/a/one.py": "class Same: ...\n",
        "swath/b/one.py": "\nclass _Same: ...\nclass Same: ...\n",
        "swath/b/two.py": "class _Same: ...\n",
    }
    assert told(tmp_path, files) == (
        1,
        [
            "swath/b/one.py:3: the class Same exists already in swath/a/one.py:1",
            "swath/b/two.py:1: the class _Same exists already in swath/b/one.py:2",
            "swath/b/one.py:1: the file one.py exists already in swath/a/one.py:1",
        ],
    )


def test_what_is_too_long(tmp_path: Path) -> None:
    most, most_tests = (SIZES[part] for part in ("swath", "tests"))
    files = {f"swath/part_{number}.py": "x = 1\n" * LONGEST for number in range(most // LONGEST)}
    files |= {"swath/long.py": "x = 1\n" * (LONGEST + 1), "tests/test_long.py": "x = 1\n" * (most_tests + 1)}
    lines = most // LONGEST * LONGEST + LONGEST + 1
    assert told(tmp_path, files) == (
        1,
        [
            f"swath:1: has {lines:,} lines, {lines - most:,} more than {most:,}",
            f"swath/long.py:{LONGEST + 1}: has {LONGEST + 1} lines, more than {LONGEST}",
            f"tests:1: has {most_tests + 1:,} lines, 1 more than {most_tests:,}",
        ],
    )
