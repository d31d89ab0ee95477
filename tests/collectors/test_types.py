"""Type checkers, editors and `help` see every argument of every collector."""

import inspect
import os
import pydoc
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.collectors.config import CollectorConfig
from swath.collectors.multi_config import MultiConfig

ROOT = Path(__file__).parents[2]
CLASSES = {
    Collector: CollectorConfig,
    MultiCollector: MultiConfig,
    MultiSyncCollector: MultiConfig,
    MultiAsyncCollector: MultiConfig,
    AsyncCollector: MultiConfig,
}
SETTINGS = """
[mypy]
follow_imports = silent

[mypy-torch.*,tensordict.*,gymnasium.*,numpy.*,cloudpickle.*,tqdm.*]
# Checking these would take minutes.
follow_imports = skip
ignore_missing_imports = true
"""
GOOD = """
from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.testing import CountingEnv

with Collector(CountingEnv(), None, frames_per_batch=10, total_frames=20, split_trajs=True) as collector:
    for batch in collector:
        print(batch["action"])
two = [CountingEnv, CountingEnv]
MultiSyncCollector(two, None, frames_per_batch=[10, 20], cat_results=-1, on_worker_failure="restart").shutdown()
MultiAsyncCollector(create_env_fn=two, frames_per_batch=10, max_staleness=2, device=["cpu", None]).next()
AsyncCollector(CountingEnv, frames_per_batch=10, slots_per_worker=3, policy_factory=lambda: None).start()
MultiCollector(two, sync=True, frames_per_batch=10, num_sub_threads=1, init_fn=lambda: None).stats()
"""
BAD = """
from swath.collectors import {name}
from swath.testing import CountingEnv

{name}(CountingEnv, frames_per_batch=10, totl_frames=20)
{name}(CountingEnv, frames_per_batch="x")
{name}(CountingEnv)
reveal_type({name})
"""
MISSPELT, WRONG, LACKING, REVEALED = range(5, 9)
"""The lines of a bad script."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of a user's scripts."""
    place = tmp_path_factory.mktemp("scripts")
    (place / "mypy.ini").write_text(SETTINGS)
    (place / "good.py").write_text(GOOD)
    for kind in CLASSES:
        (place / f"bad_{kind.__name__}.py").write_text(BAD.format(name=kind.__name__))
    scripts = sorted(script.name for script in place.glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", *scripts]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    return subprocess.run(command, cwd=place, env=env, stdout=subprocess.PIPE, text=True, timeout=100).stdout


def test_a_script_that_is_right_passes(said: str) -> None:
    assert (ROOT / "swath" / "py.typed").exists(), "an installed package would have no types"
    assert "good.py" not in said
    assert f"checked {len(CLASSES) + 1} source files" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (MISSPELT, r'error: Unexpected keyword argument "totl_frames" for "\w+"; did you mean "total_frames"'),
        (WRONG, r'error: Argument "frames_per_batch" to "\w+" has incompatible type "str"; expected "int'),
        (LACKING, r'error: Missing named argument "frames_per_batch" for "\w+"'),
    ],
)
@pytest.mark.parametrize("kind", CLASSES)
def test_a_wrong_argument_is_named_by_the_type_checker(said: str, kind: type, line: int, message: str) -> None:
    assert re.search(rf"^bad_{kind.__name__}\.py:{line}: {message}", said, re.MULTILINE)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_type_checker_sees_all_arguments_with_their_types(said: str, kind: type) -> None:
    found = re.search(rf"^bad_{kind.__name__}\.py:{REVEALED}: note: Revealed type is (.*)$", said, re.MULTILINE)
    assert found is not None
    for field in fields(CLASSES[kind]):
        needed = "" if field.default is MISSING else " ="
        known = re.search(rf"\b{field.name}: [^=]+{needed}(, |\) ->)", found[1])
        assert known, f"{field.name} is not shown"
    assert "max_frames_per_traj: int | None =," in found[1]
    assert "**" not in found[1], "something may be given that has no name"


@pytest.mark.parametrize("kind", CLASSES)
def test_all_arguments_are_shown_with_their_defaults(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    shown = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    assert list(parameters) == [field.name for field in fields(CLASSES[kind])]
    for field in fields(CLASSES[kind]):
        parameter = parameters[field.name]
        if field.default is MISSING:
            assert parameter.default is inspect.Parameter.empty
            assert f"{field.name}: " in shown
        else:
            assert parameter.default is field.default
            assert re.search(rf"\b{field.name}: .*? = {re.escape(repr(field.default))}", shown)


@pytest.mark.parametrize("config", [CollectorConfig, MultiConfig])
def test_every_argument_has_a_line_of_documentation(config: type) -> None:
    described: set[str] = set()
    for kind in config.__mro__:
        _, _, attributes = (kind.__doc__ or "").partition("Attributes:\n")
        described |= set(re.findall(r"^        (\w+): \S", attributes, re.MULTILINE))
    assert described == {field.name for field in fields(config)}
