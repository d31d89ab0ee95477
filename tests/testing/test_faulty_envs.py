"""Faulty envs fail as they are told, when they are told, and behave until then."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from swath.testing import CountingGymEnv, FaultyError, FaultyGymEnv
from swath.testing.faulty_envs import FAULTS


def steps(env: CountingGymEnv, count: int) -> list[Any]:
    env.reset()
    return [env.step(0) for _ in range(count)]


@pytest.mark.parametrize("fault", FAULTS)
def test_before_its_time_it_is_an_honest_counting_env(fault: str) -> None:
    for faulty, honest in zip(
        steps(FaultyGymEnv(fault=fault, at=4, lane=2), 3), steps(CountingGymEnv(lane=2), 3), strict=True
    ):
        np.testing.assert_array_equal(faulty[0], honest[0])
        assert faulty[1:] == honest[1:]


def test_it_raises_once_with_its_place() -> None:
    env = FaultyGymEnv(at=2, lane=7)
    env.reset()
    env.step(0)
    with pytest.raises(FaultyError, match="lane 7 fails at step 2") as caught:
        env.step(0)
    assert (caught.value.lane, caught.value.step) == (7, 2)
    env.step(0)


def test_it_raises_in_reset_or_while_it_is_made() -> None:
    env = FaultyGymEnv(at=2, where="reset")
    env.reset()
    with pytest.raises(FaultyError):
        env.reset()
    with pytest.raises(FaultyError):
        FaultyGymEnv(at=1, where="init")


@pytest.mark.parametrize("where", ["step", "reset"])
def test_it_spoils_values(where: str) -> None:
    def spoilt(fault: str) -> Any:
        env = FaultyGymEnv(fault=fault, at=1, where=where)
        observation, _ = env.reset()
        return observation if where == "reset" else env.step(0)[0]

    assert np.isnan(spoilt("nan")).all()
    assert spoilt("shape").shape == (4,)
    assert spoilt("dtype").dtype.kind == "U"


def test_it_spoils_rewards() -> None:
    rewards = [reward for _, reward, *_ in steps(FaultyGymEnv(fault="nan_reward", at=2), 3)]
    assert rewards[::2] == [1.0, 3.0]
    assert np.isnan(rewards[1])


def test_it_hangs_and_ends_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr("time.sleep", lambda seconds: done.append(seconds))
    monkeypatch.setattr(os, "_exit", lambda code: done.append(code))
    monkeypatch.setattr(os, "kill", lambda pid, sign: done.append((pid, sign)))
    for fault in ("hang", "exit", "kill"):
        steps(FaultyGymEnv(fault=fault, at=1, seconds=9.0), 2)
    assert done == [9.0, 3, (os.getpid(), signal.SIGKILL)]


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="fault must be one of"):
        FaultyGymEnv(fault="bad")
