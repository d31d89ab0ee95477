"""Custom envs written with `_reset` and `_step`: what they may do, and what they are told when they do it wrong."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from custom_envs import Walk, changed
from gymnasium import spaces as gs
from tensordict import TensorDict, TensorDictBase

from swath.collectors import Collector
from swath.envs import EnvBase
from swath.errors import ShapeError
from swath.keys import NEXT, RESET


def ended(names: dict[str, Any], batch_size: tuple[int, ...] = (2,)) -> tuple[list[Any], list[Any], list[Any]]:
    env = changed("step", batch_size, **{"terminated": None, **names})
    td = env.rand_step(env.reset())
    return tuple(td[NEXT, name].flatten().tolist() for name in ("terminated", "truncated", "done"))  # type: ignore


YES_NO, NO_YES = torch.tensor([[True], [False]]), torch.tensor([[False], [True]])


@pytest.mark.parametrize(
    ("given", "terminated", "truncated"),
    [
        ({"done": YES_NO}, [True, False], [False, False]),
        ({"terminated": YES_NO}, [True, False], [False, False]),
        ({"truncated": YES_NO}, [False, False], [True, False]),
        ({"terminated": YES_NO, "truncated": NO_YES}, [True, False], [False, True]),
        ({"done": YES_NO | NO_YES, "truncated": NO_YES}, [True, False], [False, True]),
        ({"done": YES_NO | NO_YES, "terminated": NO_YES}, [False, True], [True, False]),
        ({"done": YES_NO, "terminated": YES_NO, "truncated": YES_NO}, [True, False], [True, False]),
        ({"done": YES_NO.squeeze(-1)}, [True, False], [False, False]),
        ({"done": YES_NO.int(), "truncated": NO_YES.int()}, [True, False], [False, True]),
    ],
)
def test_any_of_the_flags_will_do(given: Any, terminated: list[bool], truncated: list[bool]) -> None:
    done = [a or b for a, b in zip(terminated, truncated, strict=True)]
    assert ended(given) == (terminated, truncated, done)


def test_no_flag_at_all_is_refused() -> None:
    with pytest.raises(KeyError, match=r"Changed\._step returned none of .*terminated.*only \['observation', 'rew"):
        ended({})


@pytest.mark.parametrize("batch_size", [(), (2,), (2, 3)])
def test_rewards_and_flags_may_lack_their_last_dimension(batch_size: tuple[int, ...]) -> None:
    flag, reward = torch.zeros(batch_size, dtype=torch.bool), torch.full(batch_size, 2.0)
    env = changed("step", batch_size, terminated=flag, truncated=flag, reward=reward)
    td = env.rand_step(env.reset())
    assert td[NEXT, "reward"].shape == td[NEXT, "done"].shape == (*batch_size, 1)
    assert (td[NEXT, "reward"] == 2).all()


@pytest.mark.parametrize(
    ("where", "key", "told"),
    [
        ("reset", "observation", r"Changed\._reset returned no 'observation', only \[\]"),
        ("step", "observation", r"Changed\._step returned no 'observation', only \['reward'"),
        ("step", "reward", r"Changed\._step returned no 'reward'"),
    ],
)
def test_what_is_missing_is_named(where: str, key: str, told: str) -> None:
    env = changed(where, **{key: None})
    with pytest.raises(KeyError, match=told):
        env.rand_step(env.reset())


def test_the_nearest_name_is_suggested() -> None:
    env = changed("step", observation=None, observations=torch.zeros(2, 1))
    with pytest.raises(KeyError, match="Did you mean 'observations'"):
        env.rand_step(env.reset())


@pytest.mark.parametrize(
    ("where", "key", "expected", "given"),
    [
        ("reset", "observation", (2, 1), (2, 3)),
        ("step", "observation", (2, 1), (2, 1, 1)),
        ("step", "observation", (2, 1), (2, 2)),
        ("step", "reward", (2, 1), (2, 2)),
        ("step", "terminated", (2, 1), (2, 3)),
    ],
)
def test_a_wrong_shape_names_key_expected_and_given(where: str, key: str, expected: Any, given: Any) -> None:
    env = changed(where, **{key: torch.zeros(given)})
    with pytest.raises(ShapeError) as caught:
        env.rand_step(env.reset())
    for part in (f"Changed._{where}", repr(key), str(expected), str(given)):
        assert part in str(caught.value)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_another_dtype_is_converted(where: str) -> None:
    env = changed(where, observation=torch.ones(2, 1, dtype=torch.float64))
    td = env.rand_step(env.reset())
    td = td if where == "reset" else td.get(NEXT)
    assert td["observation"].dtype == torch.float32
    assert (td["observation"] == 1).all()


def test_an_env_without_methods_says_what_it_lacks() -> None:
    env = EnvBase(gs.Discrete(2), gs.Discrete(2))
    with pytest.raises(NotImplementedError, match="EnvBase has neither _reset nor reset_into"):
        env.reset()
    with pytest.raises(NotImplementedError, match="EnvBase has neither _step nor step_into"):
        env.rand_step()


def test_an_env_that_was_stepped_can_be_copied_and_pickled() -> None:
    env = Walk((3,))
    td = env.rand_step(env.reset())
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        again = TensorDict({"observation": td["observation"], "action": td["action"]}, [3])
        other.reset()
        assert other.step(again)[NEXT].keys() == td[NEXT].keys()


def test_one_seed_reaches_set_seed() -> None:
    class Seeded(Walk):
        def _set_seed(self, seed: int) -> None:
            self.seeded = seed

    env = Seeded((3,))
    env.set_seed(8)
    assert env.seeded == 8


def test_a_partial_reset_shows_the_mask_and_the_present() -> None:
    requests = []

    class Asked(Walk):
        def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
            requests.append(tensordict)
            return TensorDict({"observation": torch.zeros(2, 1)}, batch_size=(2,))

    env = Asked((2,))
    td = env.rand_step(env.reset()).get(NEXT)
    td = env.reset(td.set(RESET, torch.tensor([[False], [True]])))
    assert requests[0].is_empty()
    assert requests[1][RESET].tolist() == [[False], [True]]
    assert requests[1]["observation"].tolist() == [[0.5], [0.5]]
    assert td["observation"].tolist() == [[0.5], [0]]  # it began all lanes, but only one was asked for


class Reusing(EnvBase):
    """Counts in one tensor, which it returns every time; lane `i` ends after `i + 2` steps, and begins at -100."""

    def __init__(self, batch_size: tuple[int, ...], dtype: torch.dtype, is_nested: bool) -> None:
        space: gs.Space[Any] = gs.Box(-1000, 1000, (2,), np.float32)
        super().__init__(
            gs.Dict({"a": gs.Dict({"b": space})} if is_nested else {"a": space}), gs.Discrete(2), batch_size=batch_size
        )
        self.key = ("a", "b") if is_nested else "a"
        self.counts = torch.zeros(*batch_size, 2, dtype=dtype)
        self.ends = torch.arange(2, self.num_lanes + 2).view(*batch_size, 1)

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        chosen = tensordict.get(RESET, torch.ones(*self.batch_size, 1, dtype=torch.bool))
        self.counts.masked_fill_(chosen, -100)
        return TensorDict({}, self.batch_size).set(self.key, self.counts)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert torch.equal(tensordict.get(self.key), self.counts.float())
        self.counts += 1
        answer = TensorDict(
            {"reward": self.counts[..., 0], "done": self.counts[..., :1] + 100 >= self.ends}, self.batch_size
        )
        return answer.set(self.key, self.counts)


@pytest.mark.parametrize("batch_size", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_env_may_return_the_same_tensor_every_time(
    batch_size: tuple[int, ...], dtype: torch.dtype, is_nested: bool
) -> None:
    env = Reusing(batch_size, dtype, is_nested)
    lanes, steps = env.num_lanes, 12
    collector = Collector(env, None, frames_per_batch=lanes * steps, total_frames=-1)
    batch: Any = [collector.next().clone(), collector.next().clone()]
    batch = TensorDict.cat(batch, len(batch_size)).reshape(lanes, 2 * steps)
    period = torch.arange(2, lanes + 2).unsqueeze(-1)
    times = torch.arange(2 * steps).expand(lanes, -1)
    assert torch.equal(batch[env.key][..., 0], times % period - 100.0)
    assert torch.equal(batch[NEXT, env.key][..., 1], times % period - 99.0)
    assert torch.equal(batch[NEXT, "reward"][..., 0], times % period - 99.0)
    assert torch.equal(batch[NEXT, "terminated"][..., 0], (times + 1) % period == 0)
    for lane in range(lanes):
        ids = batch["collector", "traj_ids"][lane]
        assert len(ids.unique()) == -(-2 * steps // (lane + 2))
        assert torch.equal(ids[1:] != ids[:-1], batch[NEXT, "done"][lane, :-1, 0])
