"""check_env on custom envs: written with TensorDicts or on rows."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from custom_envs import Walk, changed
from gymnasium import spaces as gs
from tensordict import TensorDict, TensorDictBase

from swath.envs import EnvBase, Rows, check_env
from swath.errors import EnvCheckError, EnvCheckWarning


def problems(env: Any) -> list[str]:
    with pytest.raises(EnvCheckError) as caught:
        check_env(env, steps=30)
    return caught.value.problems


@pytest.mark.parametrize("batch_size", [(), (1,), (2,), (2, 3)])
def test_nothing_is_wrong_with_a_sound_env(batch_size: tuple[int, ...], recwarn: pytest.WarningsRecorder) -> None:
    check_env(lambda: Walk(batch_size))
    assert [str(w.message) for w in recwarn if w.category is EnvCheckWarning] == []


class Plain(Walk):
    def _step(self, tensordict: TensorDictBase) -> Any:
        return {"observation": self.state}


class Half(EnvBase):
    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict({"observation": torch.tensor([1, 0])})


class Unseeded(Walk):
    def _set_seed(self, seed: int) -> None:
        pass


class OnRows(EnvBase):
    """Counts on rows."""

    def __init__(self, tells: bool = True, clears: bool = True) -> None:
        super().__init__(gs.Box(0, 10, (1,), np.float32), gs.Discrete(2), batch_size=(2,))
        self.tells, self.clears = tells, clears

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        out.arrays["observation"][list(lanes)] = 0
        if self.clears:
            out.arrays["terminated"][list(lanes)] = False

    def step_into(self, action: Rows, out: Rows) -> bool:
        out.arrays["observation"] += 1
        out.arrays["reward"][:] = 1
        ended = out.arrays["observation"] >= [[4], [6]]
        out.arrays["terminated"][:] = ended | (out.arrays["terminated"] & (not self.clears))
        return bool(out.arrays["terminated"].any()) if self.tells else None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (changed("reset", observation=None), "_reset returned no 'observation'"),
        (changed("step", observation=None), "_step returned no 'observation'"),
        (changed("step", reward=None), "_step returned no 'reward'"),
        (changed("step", terminated=None), "_step returned none of"),
        (changed("reset", observation=lambda o: o.repeat(1, 2)), r"\(2, 2\), but \(2, 1\) was expected"),
        (changed("step", observation=lambda o: o.repeat(1, 2)), r"\(2, 2\), but \(2, 1\) was expected"),
        (changed("step", reward=lambda r: r.repeat(1, 2)), "'reward' of shape"),
        (changed("reset", observation=lambda o: o.double()), "_reset returned 'observation' as torch.float64.*Convert"),
        (changed("step", observation=lambda o: o.double()), "_step returned 'observation' as torch.float64"),
        (changed("step", terminated=lambda t: t.float()), "'terminated' as torch.float32, not as torch.bool"),
        (changed("step", reward=lambda r: r * torch.nan), "reward that is not finite"),
        (changed("step", observation=lambda o: o * torch.nan), "NaN in 'observation'"),
        (changed("step", observation=lambda o: o + 200), r"outside of its space Box.* at \(0,\), above the limit 100"),
        (Plain(), "_step returned dict, not a TensorDict"),
        (Half(gs.Discrete(2), gs.Discrete(2)), "NotImplementedError.*Half has neither _step nor step_into"),
        (Unseeded(), "the seed is not heeded. Override _set_seed"),
        (OnRows(tells=False), r"step_into returned None although the flags say that the lanes \[0\] ended"),
    ],
)
def test_each_mistake_is_told(env: EnvBase, told: str) -> None:
    found = problems(env)
    assert len(found) == 1, found
    assert re.search(told, found[0]), found


def test_entries_that_no_space_has_are_doubtful() -> None:
    with pytest.warns(EnvCheckWarning, match="'extra', which is not in the observation space"):
        check_env(changed("step", extra=lambda _: torch.zeros(2, 1)))


def test_a_reset_of_one_lane_that_resets_all_is_doubtful() -> None:
    class All(Walk):
        def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
            return super()._reset(TensorDict({}, batch_size=self.batch_size))

    with pytest.warns(EnvCheckWarning, match="After a reset of lane 0 alone, the other lanes went on differently"):
        check_env(All())


def test_a_sound_env_on_rows_passes() -> None:
    check_env(OnRows())


def test_flags_that_are_never_taken_back() -> None:
    assert any("ended in its first step" in found for found in problems(OnRows(clears=False)))
