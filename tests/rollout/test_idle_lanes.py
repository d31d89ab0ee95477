"""Vector envs that reset lanes only by themselves, in the next step: that step is no frame, and is marked as none."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counting_layouts import LAYOUTS
from counting_reference import CountingReference, assert_holds
from gymnasium.envs.classic_control import CartPoleEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import Collector
from swath.envs import GymEnv
from swath.errors import UnsupportedEnvError
from swath.testing import CountingVectorEnv, assert_frames_belong
from swath.testing.checks import counted

IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")


def cartpole(lanes: int, **options: Any) -> Collector:
    env = gymnasium.make_vec("CartPole-v1", num_envs=lanes, vectorization_mode="vector_entry_point")
    collector = Collector(env, None, **options)
    collector.set_seed(0)
    return collector


def assert_true_transitions(batch: TensorDictBase) -> None:
    """Every frame is what the single env does from the same state."""
    env = CartPoleEnv()
    env.reset()
    real = batch.get(MASK)
    for frame in batch[real]:
        env.state = frame.get("observation").double().numpy()
        env.steps_beyond_terminated = None
        observation, reward, terminated, _, _ = env.step(int(frame.get("action").argmax()))
        np.testing.assert_allclose(frame.get(("next", "observation")).numpy(), observation, atol=1e-4)
        assert float(frame.get(("next", "reward"))) == reward
        assert bool(frame.get(("next", "terminated"))) == terminated


@pytest.mark.parametrize("lanes", [1, 3])
def test_every_frame_of_cartpole_is_a_true_transition(lanes: int) -> None:
    collector = cartpole(lanes, frames_per_batch=100 * lanes)
    batches = [collector.next(), collector.next()]
    for batch in batches:
        assert_true_transitions(batch)
        done, real = batch.get(("next", "done"))[..., 0], batch.get(MASK)
        assert (batch.get(IDS)[~real] == -1).all()
        assert (batch.get(IDS)[real] >= 0).all()
        assert done[:, :-1][~real[:, 1:]].all(), "a lane is idle only behind the end of an episode"
        for lane in range(lanes):
            ids, ends = batch.get(IDS)[lane][real[lane]], done[lane][real[lane]]
            assert torch.equal(ids[1:] != ids[:-1], ends[:-1])
            seen = batch.get("observation")[lane][real[lane]]
            told = batch.get(("next", "observation"))[lane][real[lane]]
            assert torch.equal(seen[1:][~ends[:-1]], told[:-1][~ends[:-1]])
            assert (seen[1:][ends[:-1]].abs() <= 0.05).all(), "an episode begins near the middle"
    idle = sum(int((~batch.get(MASK)).sum()) for batch in batches)
    stats = collector.stats()
    assert (idle > 0) == (lanes > 1)
    assert stats.get("idle_frames", 0) == idle
    assert stats["frames"] == 200 * lanes - idle


def test_returns_and_lengths_do_not_count_idle_places() -> None:
    collector = cartpole(3, frames_per_batch=300, trajs_per_batch=5, traj_format="cat", total_frames=1_500)
    lengths = [len(ids) for batch in collector for ids in batch.get(IDS).split(_runs(batch))]
    stats = collector.stats()
    assert stats["mean_length"] == stats["mean_return"]
    assert stats["episodes"] >= len(lengths)
    delivered = sum(lengths)
    assert delivered + stats["dropped_frames"] == stats["frames"] >= 1_500


def _runs(batch: TensorDictBase) -> list[int]:
    return torch.unique_consecutive(batch.get(IDS), return_counts=True)[1].tolist()


@pytest.mark.parametrize("form", ["padded", "cat"])
def test_episodes_skip_idle_places(form: str) -> None:
    for batch in cartpole(3, frames_per_batch=90, trajs_per_batch=4, traj_format=form, total_frames=900):
        rows = [row[row.get(MASK)] for row in batch] if form == "padded" else list(batch.split(_runs(batch)))
        assert len(rows) == 4
        for row in rows:
            assert row.get(MASK).all()
            assert_true_transitions(row)
            done = row.get(("next", "done"))[:, 0].tolist()
            assert done == [False] * (len(done) - 1) + [True]
            assert torch.equal(row.get("observation")[1:], row.get(("next", "observation"))[:-1])


def test_split_trajs_leaves_idle_places_out() -> None:
    whole = cartpole(3, frames_per_batch=150).next()
    split = cartpole(3, frames_per_batch=150, split_trajs=True).next()
    assert int(split.get(MASK).sum()) == int(whole.get(MASK).sum()) < 150
    frames = whole[whole.get(MASK)]
    assert torch.equal(split[split.get(MASK)].get("observation"), frames.get("observation"))


def test_max_frames_per_traj_is_refused_before_anything_is_collected() -> None:
    with pytest.raises(UnsupportedEnvError, match=r"max_frames_per_traj=5 .* only by itself"):
        cartpole(3, frames_per_batch=30, max_frames_per_traj=5)


def test_a_partial_reset_is_refused_and_a_full_one_works() -> None:
    collector = cartpole(3, frames_per_batch=30)
    collector.next()
    with pytest.raises(UnsupportedEnvError, match=r"lanes \[1\] cannot be ended early"):
        collector.reset([1])
    collector.reset()
    batch = collector.next()
    assert batch.get(MASK)[:, 0].all()
    assert (batch.get("observation")[:, 0].abs() <= 0.05).all()


def test_lanes_that_end_together_need_no_idle_step() -> None:
    collector = Collector(GymEnv(CountingVectorEnv(3, lengths=4)), None, frames_per_batch=30)
    batch = collector.next()
    assert_frames_belong(batch)
    assert batch.get(MASK).all()
    assert "idle_frames" not in collector.stats()


def test_the_budget_counts_frames_not_places() -> None:
    lengths = [[1], [9]]
    collector = Collector(GymEnv(CountingVectorEnv(2, lengths=lengths)), None, frames_per_batch=20, total_frames=60)
    frames = sum(int(batch.get(MASK).sum()) for batch in collector)
    assert 60 <= frames <= 61
    assert collector.stats()["frames"] == frames


def test_set_truncated_at_an_idle_place_belongs_to_no_episode() -> None:
    lengths = [[2], [50]]
    collector = Collector(GymEnv(CountingVectorEnv(2, lengths=lengths)), None, frames_per_batch=6, set_truncated=True)
    model = CountingReference(2, lengths, idles=True, set_truncated=True)
    for _ in range(4):
        batch = collector.next()
        assert_holds(batch, model.collect(3))


class Age(nn.Module):
    """A recurrent policy whose state counts the steps since it began; it also asks whether an episode begins."""

    def forward(self, age: torch.Tensor, is_init: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return is_init.float().expand(*is_init.shape[:-1], 2), age + 1


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_recurrent_state_begins_anew_with_every_episode(layout: str) -> None:
    """Also where an idle step lies between two episodes, in which the policy is called but nothing happens."""
    env = LAYOUTS[layout](2, lengths=[[1, 4], [6, 2], [3], [5]])
    policy = TensorDictModule(Age(), in_keys=["age", "is_init"], out_keys=["action", ("next", "age")])
    collector = Collector(env, policy, frames_per_batch=7 * env.num_lanes)
    for _ in range(4):
        batch = collector.next()
        real = batch.get(MASK, torch.ones(batch.shape, dtype=torch.bool)).reshape(-1)
        steps = torch.from_numpy(counted(batch)[..., 2]).reshape(-1)
        assert torch.equal(batch.get("age").reshape(-1)[real].long(), steps[real])
        assert torch.equal(batch.get(("next", "age")).reshape(-1)[real].long(), steps[real] + 1)
        assert batch.get("is_init", None) is not None
        assert_frames_belong(batch)  # `is_init`, too
