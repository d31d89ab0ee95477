"""Random actions: whatever the policy would have been, in the encoding that it would have used."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from policy_zoo import AXES, CHOICES, CONTINUOUS, DISCRETE, MIXED, WaveEnv, collect, continuous, discrete, stages_of
from tensordict import TensorDict
from torch import distributions as D

from swath.collectors import Collector
from swath.envs import GymEnv, Rows
from swath.modules import RandomPolicy, as_policy
from swath.modules.stages import RandomStage

LONG = [20] * 40


def shares(actions: torch.Tensor) -> torch.Tensor:
    return actions.double().reshape(-1, CHOICES).mean(0)


@pytest.mark.parametrize("policy", [None, RandomPolicy(DISCRETE)], ids=["None", "RandomPolicy"])
def test_discrete_actions_are_uniform(policy: Any) -> None:
    collector = Collector(WaveEnv(lengths=LONG), policy, frames_per_batch=2400)
    actions = collector.next()["action"]
    assert stages_of(collector) == ("RandomStage",)
    assert torch.allclose(shares(actions), torch.full((CHOICES,), 1 / CHOICES).double(), atol=0.04)
    assert (actions.sum(-1) == 1).all()


def test_a_space_of_its_own_is_kept_to() -> None:
    """It may be smaller than the env's."""
    policy = RandomPolicy(gs.Box(0.5, 1.0, (AXES,), np.float32))
    actions = collect(policy, WaveEnv(CONTINUOUS), steps=30)["action"]
    assert (actions >= 0.5).all()
    assert (actions <= 1.0).all()


def test_the_seed_decides() -> None:
    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return collect(None)["action"]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_several_actions_by_a_collector_and_by_a_call() -> None:
    called = as_policy(None, WaveEnv(MIXED))(TensorDict({}, batch_size=[3, 6]))
    for actions in (collect(None, WaveEnv(MIXED)), called):
        assert actions["turn"].shape == (3, 6, CHOICES)
        assert actions["push"].shape == (3, 6, AXES)


def test_hooks_on_it_are_called() -> None:
    policy, calls = RandomPolicy(DISCRETE), []
    policy.register_forward_hook(lambda *_: calls.append(1))
    collect(policy)
    assert len(calls) == 7


def test_a_subclass_acts_as_it_says() -> None:
    class First(RandomPolicy):
        def forward(self, tensordict: Any) -> Any:
            drawn = super().forward(tensordict)
            return drawn.set("action", torch.nn.functional.one_hot(torch.zeros(3, dtype=torch.int64), CHOICES))

    assert (collect(First(DISCRETE))["action"].argmax(-1) == 0).all()


@pytest.mark.parametrize(
    ("policy", "space"),
    [
        (discrete(D.Categorical), DISCRETE),
        (discrete(D.OneHotCategorical), DISCRETE),
        (lambda observation: observation[..., :CHOICES], DISCRETE),
        (continuous(), CONTINUOUS),
    ],
    ids=["indices", "one-hot", "scores", "continuous"],
)
def test_random_frames_are_encoded_as_the_policys(policy: Any, space: gs.Space[Any]) -> None:
    collector = Collector(WaveEnv(space), policy, frames_per_batch=18, init_random_frames=18)
    random = collector.next()
    assert stages_of(collector)[0] == "RandomStage"
    acted = collector.next()
    assert stages_of(collector)[0] != "RandomStage"
    assert random["action"].shape == acted["action"].shape
    assert random["action"].dtype == acted["action"].dtype
    if space is DISCRETE:
        chosen = random["action"] if random["action"].ndim == 2 else random["action"].argmax(-1)
        assert len(chosen.unique()) == CHOICES
    assert set(random.keys(True, True)) == set(acted.keys(True, True))


def test_what_the_policy_would_have_written_is_zero_in_random_frames() -> None:
    batch = collect(discrete(), init_random_frames=18)
    assert not batch["logits"].any()
    assert not batch["action_log_prob"].any()


@pytest.mark.parametrize("mode", [True, False])
def test_slots_of_any_size_in_any_mode(mode: bool) -> None:
    """The first may have no steps; and what was begun in inference mode goes on outside."""
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    outputs = Rows(env.actions.leaves, (1,))
    stage = RandomStage(env.actions, outputs)
    for is_inference in (mode, not mode):
        with torch.inference_mode(is_inference):
            for steps in (0, 3, 1, 3):
                stage.begin(steps, None)
                for t in range(steps):
                    stage.run(t)
                    assert outputs.arrays["action"][0] in (0, 1)
