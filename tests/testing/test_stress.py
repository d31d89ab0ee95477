"""The stress: its ledger and its watchdog notice what they should, and a short run finds nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from children import importing_env
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

from swath.collectors import Collector, PolicyVersion
from swath.keys import POLICY_VERSION, TRAJ_IDS
from swath.testing import stress
from swath.testing.stress_checks import ACTED, FrameLedger
from swath.testing.stress_plan import Plan, StressEnv, Witness
from swath.testing.stress_round import Round

LONG = bool(os.environ.get("SWATH_LONG"))
LENGTHS = (3, 7)
Change = Callable[[TensorDictBase, TensorDictBase], Any]


def batches() -> list[TensorDictBase]:
    """Two batches `[2, 8]`."""
    policy = TensorDictModule(Witness(5), in_keys=["observation"], out_keys=["action", ACTED])
    env = StressEnv((2,), LENGTHS, 0.0)
    with Collector(env, policy, frames_per_batch=16, total_frames=32, track_policy_version=PolicyVersion()) as made:
        return [batch.clone() for batch in made]


def add(key: Any, at: Any, amount: float = 1.0) -> Change:
    return lambda first, second: second.get(key)[at].add_(amount)


def again(first: TensorDictBase, second: TensorDictBase) -> None:
    second.update_(first)


def missing(first: TensorDictBase, second: TensorDictBase) -> TensorDictBase:
    return second[:, 1:]


def older(first: TensorDictBase, second: TensorDictBase) -> None:
    first.get(POLICY_VERSION).fill_(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add("observation", (0, 3)), "Arrays are not equal"),
        (add(("next", "observation"), (0, 3)), "Arrays are not equal"),
        (add(("next", "reward"), (1, 2)), "Arrays are not equal"),
        (lambda _, second: second["next", "done"][0, 2].logical_not_(), "done elsewhere"),
        (add(ACTED, (0, 0, 1)), "a mixture"),
        (add(ACTED, (0, 0)), "version 0 has acted with the weights"),
        (add(TRAJ_IDS, (0, slice(None)), 1 << 20), "instead of"),
        (add(TRAJ_IDS, (0, 1), -(1 << 50)), "has no id"),
        (again, "instead of"),
        (missing, "instead of"),
        (older, "older weights"),
    ],
)
def test_the_ledger_notices(change: Change, words: str) -> None:
    first, second = batches()
    whole = FrameLedger(LENGTHS)
    for batch in (first, second):
        whole.take(batch, has_rows=True)
    assert whole.frames == 32
    changed = change(first, second)
    ledger = FrameLedger(LENGTHS)
    ledger.take(first, has_rows=True)
    with pytest.raises(AssertionError, match=words):
        ledger.take(changed if isinstance(changed, TensorDictBase) else second, has_rows=True)


def test_the_ledger_takes_lanes_apart() -> None:
    first, _ = batches()
    with pytest.raises(AssertionError, match="two lanes"):
        FrameLedger(LENGTHS).take(first.reshape(1, -1), has_rows=True)
    FrameLedger(LENGTHS).take(first.reshape(-1))


def test_a_fault_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An env that skips a step now and then, in a round without any disturbance."""
    honest = StressEnv._step

    def skip(env: Any, tensordict: TensorDictBase) -> TensorDictBase:
        env.made = getattr(env, "made", 0) + 1
        return honest(env, honest(env, tensordict) if env.made % 20 == 0 else tensordict)

    assert Round("Collector", 3, 30.0, ()).run() == 0
    monkeypatch.setattr(StressEnv, "_step", skip)
    assert Round("Collector", 3, 30.0, ()).run() == 1
    assert "AssertionError" in capsys.readouterr().out


def test_a_hang_is_a_finding() -> None:
    text = """
import time
from swath.testing.stress_checks import Watchdog
watch = Watchdog(0.3)
with watch.step("something else"):
    with watch.step("a handler"):
        pass
with watch.step("a long sleep"):
    time.sleep(60)
"""
    command = [sys.executable, "-c", text]
    ended = subprocess.run(command, capture_output=True, text=True, env=importing_env(), timeout=60, check=False)
    assert ended.returncode == 3
    assert "HANGS: a long sleep" in ended.stdout
    assert "line 9 in <module>" in ended.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "seed"), [("Collector", 10555), ("MultiAsyncCollector", 15546)])
def test_a_round_finds_nothing(kind: str, seed: int) -> None:
    """Whatever the threads, signals, kills and forks of this round do for two seconds; and what is left is counted."""
    assert set(Plan.draw(kind, random.Random(seed), stress.ACTS).acts) == set(stress.ACTS)
    assert stress.run_round(kind, seed) == []


@pytest.mark.skipif(not LONG, reason="takes minutes: SWATH_LONG=1")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", stress.HERE + stress.NODES)
def test_many_rounds_find_nothing(kind: str) -> None:
    if kind == "RayCollector":
        pytest.importorskip("ray")
    assert stress.run(7, 120.0, [kind]) == 0


def test_what_is_left_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A round's process that outlives it is found by its mark, and ended."""
    monkeypatch.setattr(stress, "LEAVE_S", 0.2)
    leaver = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    real = subprocess.Popen

    def begin(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", leaver], **options)

    monkeypatch.setattr(stress.subprocess, "Popen", begin)
    found = stress.run_round("Collector", 1)
    assert len(found) == 1
    assert "is left" in found[0]
    assert "FOUND" in capsys.readouterr().out
