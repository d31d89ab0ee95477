"""Recurrent state is carried from step to step, zeroed where an episode begins, and recorded."""

from typing import Any

import policy_zoo as zoo
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv
from swath.errors import PolicyError
from swath.modules import ExplorationType
from swath.rollout.loop import LoopSettings, RolloutLoop
from swath.testing import CountingEnv, counting_envs


def states_of(policy: Any) -> list[str]:
    return [key for key in ("hidden", "cell") if key in policy.in_keys]


def unroll(policy: Any, batch: TensorDictBase, states: dict[str, Tensor]) -> TensorDictBase:
    """What the policy gives when someone else carries its state, from `states` on, and zeroes it after each end."""
    steps = []
    with torch.no_grad():
        for t in range(batch.shape[1]):
            root = TensorDict({"observation": batch["observation"][:, t], **states}, batch.shape[:1])
            if "is_init" in policy.in_keys:
                root["is_init"] = batch["is_init"][:, t]
            out = policy(root.clone())
            steps.append(out.update({f"seen {key}": value for key, value in states.items()}))
            done = batch["next", "done"][:, t]
            for key in states:
                new = out["next", key] if ("next", key) in out.keys(True) else out[key]
                states[key] = torch.where(done.view(-1, *[1] * (new.ndim - 1)), torch.zeros_like(new), new)
    return TensorDict.stack(steps, 1)


@zoo.each_way
@pytest.mark.parametrize("convention", ["same", "next"])
@pytest.mark.parametrize("make", zoo.RECURRENT.values(), ids=zoo.RECURRENT.keys())
def test_the_state_is_what_the_module_gives_over_several_batches(
    make: Any, convention: str, way: dict[str, Any]
) -> None:
    policy = make(convention)
    states: dict[str, Tensor] = {}
    for batch in Collector(zoo.WaveEnv(), policy, frames_per_batch=15, total_frames=45, **way):
        for key in states_of(policy):
            shape = batch["next", key].shape if convention == "next" else batch[key].shape
            states.setdefault(key, torch.zeros(3, *shape[2:]))
        told = unroll(policy, batch, states)
        for key in states_of(policy):
            if convention == "next":  # what was read, and what was written
                zoo.assert_same(batch[key], told[f"seen {key}"], name=key)
                zoo.assert_same(batch["next", key], told["next", key], name=key)
            else:
                zoo.assert_same(batch[key], told[key], name=key)
        for key in ("logits", "features", "action"):
            made = set(told.keys())
            if key in made and not (key == "action" and "logits" in made):
                zoo.assert_same(batch[key], told[key], name=key)


LENGTHS = [[3], [1, 4], [7, 2, 2]]


class StepCounter(nn.Module):
    """Counts the steps of an episode in its state."""

    def forward(self, count: Tensor, is_init: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, is_init.float().expand(*is_init.shape[:-1], 2).contiguous()


def counting_policy(convention: str) -> Any:
    policy = TensorDictModule(
        StepCounter(), in_keys=["count", "is_init"], out_keys=[zoo.as_written("count", convention), "action"]
    )
    policy.state_shapes = {"count": (1,)}
    return policy


def envs(kind: str) -> Any:
    if kind == "custom":
        return CountingEnv((3,), lengths=LENGTHS)
    factories = [
        lambda lane=lane: GymEnv(counting_envs(3, lengths=LENGTHS[lane])[lane]()) for lane in range(len(LENGTHS))
    ]
    return SerialEnv(3, factories)


@zoo.each_way
@pytest.mark.parametrize("convention", ["same", "next"])
@pytest.mark.parametrize("kind", ["custom", "gymnasium"])
def test_exactly_the_lanes_that_reset_are_zeroed(kind: str, convention: str, way: dict[str, Any]) -> None:
    """The env counts the steps of each episode too, as the last number of its observation."""
    for batch in Collector(envs(kind), counting_policy(convention), frames_per_batch=21, total_frames=84, **way):
        steps = batch["observation"][..., 2:]
        written = batch["next", "count"] if convention == "next" else batch["count"]
        assert torch.equal(written, steps + 1)
        if convention == "next":
            assert torch.equal(batch["count"], steps)
        assert torch.equal(batch["is_init"], steps == 0)
        assert torch.equal(batch["action"], batch["is_init"].float().expand(-1, -1, 2))


def test_truncation_by_the_collector_resets_the_state() -> None:
    batch = zoo.collect(counting_policy("next"), CountingEnv((2,), lengths=100), steps=10, max_frames_per_traj=4)
    assert batch["count"][0, :, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert batch["is_init"][0, :, 0].nonzero().flatten().tolist() == [0, 4, 8]


def test_a_reset_by_the_user_resets_the_state() -> None:
    collector = Collector(CountingEnv((2,), lengths=100), counting_policy("next"), frames_per_batch=10)
    collector.next()
    collector.reset([0])
    batch = collector.next()
    assert batch["count"][:, 0, 0].tolist() == [0, 5]
    assert batch["is_init"][:, 0, 0].tolist() == [True, False]


def test_new_weights_do_not_touch_the_state() -> None:
    """Not even when they go into a copy that the collector makes for them."""
    policy = zoo.gru_policy("next")
    collector = Collector(zoo.WaveEnv(lengths=[100] * 3), policy, frames_per_batch=15)
    last = collector.next()["next", "hidden"][:, -1].clone()
    collector.update_policy_weights_(zoo.gru_policy("next").state_dict())
    assert torch.equal(collector.next()["hidden"][:, 0], last)


def test_random_frames_leave_the_state_at_zero() -> None:
    collector = Collector(
        zoo.WaveEnv(lengths=[100] * 3), zoo.gru_policy("next"), frames_per_batch=15, init_random_frames=15
    )
    assert not collector.next()["next", "hidden"].any()
    second = collector.next()
    assert not second["hidden"][:, 0].any()
    assert second["hidden"][:, 1:].any()


def test_is_init_is_delivered_only_when_it_is_read() -> None:
    assert "is_init" not in set(zoo.collect(zoo.gru_policy("same")).keys())
    assert "is_init" in set(zoo.collect(zoo.Resetting("same")).keys())


def test_a_single_lane_without_a_batch_dimension() -> None:
    batch = zoo.collect(zoo.gru_policy("next"), zoo.WaveEnv(lengths=[4], batch_size=()))
    assert batch["hidden"].shape == (6, zoo.HIDDEN)
    assert not batch["hidden"][[0, 4]].any()
    assert torch.equal(batch["hidden"][1:4], batch["next", "hidden"][:3])


def test_a_state_of_doubles() -> None:
    policy = zoo.gru_policy("next").double()
    batch = zoo.collect(policy, zoo.WaveEnv(observation_space=zoo.DOUBLE))
    assert batch["hidden"].dtype is batch["next", "hidden"].dtype is torch.float64


def test_a_state_of_integers() -> None:
    policy = TensorDictModule(
        lambda x, n: (x[..., : zoo.CHOICES], n.long() + 1), in_keys=["observation", "n"], out_keys=["action", "n"]
    )
    batch = zoo.collect(policy, zoo.WaveEnv(lengths=[4, 6, 9]))
    assert batch["n"].dtype is torch.int64
    assert batch["n"][0, :, 0].tolist() == [1, 2, 3, 4, 1, 2]


def test_exploration_does_not_matter_to_the_state() -> None:
    policy = zoo.sampling_policy("next")
    random, greedy = (
        zoo.collect(policy, exploration_type=kind) for kind in (ExplorationType.RANDOM, ExplorationType.MODE)
    )
    zoo.assert_same(random["next", "hidden"], greedy["next", "hidden"])


# -- shapes ---------------------------------------------------------------------------------------------------------


class Unguessable(nn.Module):
    """Its state has a shape that none of its layers tells."""

    def forward(self, observation: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        if memory.shape[-2:] != (2, 5):
            raise RuntimeError("not what I remember")
        return observation[..., : zoo.CHOICES], memory + 1


def unguessable() -> Any:
    return TensorDictModule(Unguessable(), in_keys=["observation", "memory"], out_keys=["action", ("next", "memory")])


def test_a_shape_that_cannot_be_found_out_is_asked_for() -> None:
    with pytest.raises(PolicyError, match=r"\['memory'\] could not be found out.*state_shapes = \{'memory'") as caught:
        zoo.collect(unguessable())
    assert "not what I remember" in str(caught.value.__cause__)


def test_state_shapes_tell_it() -> None:
    policy = unguessable()
    policy.state_shapes = {"memory": (2, 5)}
    batch = zoo.collect(policy, zoo.WaveEnv(lengths=[9] * 3))
    assert batch["memory"][0, :, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_state_shapes_that_leave_one_out() -> None:
    policy = zoo.lstm_policy("same")
    policy.state_shapes = {"hidden": (zoo.HIDDEN,)}
    with pytest.raises(PolicyError, match=r"not the recurrent state \['cell'\]"):
        zoo.collect(policy)


def test_states_of_different_shapes_are_found_out_by_what_is_written() -> None:
    policy = TensorDictModule(
        lambda x, a, b: (x[..., : zoo.CHOICES], a.mean(-1, keepdim=True) + x, b.mean(-1, keepdim=True) + x[..., :2]),
        in_keys=["observation", "a", "b"],
        out_keys=["action", "a", "b"],
    )
    batch = zoo.collect(policy)
    assert (batch["a"].shape[-1], batch["b"].shape[-1]) == (zoo.SIZE, 2)


def test_an_observation_that_is_written_too_is_no_state() -> None:
    """A part that normalises observations under their own key: the batch has them as the policy saw them."""
    policy = TensorDictSequential(
        TensorDictModule(lambda x: x * 10, in_keys=["observation"], out_keys=["observation"]),
        zoo.module(zoo.mlp(zoo.CHOICES)),
    )
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=15)
    batch = collector.next()
    assert RolloutLoop(zoo.WaveEnv(), policy, LoopSettings()).policy.state == []
    inside = ~batch["next", "done"][:, :-1, 0]
    zoo.assert_same(batch["observation"][:, 1:][inside], batch["next", "observation"][:, :-1][inside] * 10)
    zoo.assert_same(batch["action"], policy[1].module(batch["observation"]).detach())
