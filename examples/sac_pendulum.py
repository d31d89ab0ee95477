"""SAC on Pendulum-v1 in one file, with swath collecting the experience in the background.

A thread plays and fills the replay buffer while the loop in `main` trains from it. The rate limiter of the buffer
keeps the two in step: whoever is ahead waits. Everything but the collecting and the buffer is written out here.

    python examples/sac_pendulum.py --plot learning_curve.png
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import inspect
import sys
import time

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import Tensor, nn

from swath.collectors import Collector
from swath.data import LazyTensorStorage, RateLimiter, ReplayBuffer
from swath.envs import GymEnv, SerialEnv
from swath.modules import ExplorationType, TanhNormal


@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "Pendulum-v1"
    """the gymnasium environment to learn; it needs bounded continuous actions and flat observations"""
    seed: int = 1
    """seed of the environments, the networks and the exploration; runs still differ, as two threads share the work"""
    updates: int = 12_000
    """how many optimiser steps to make in all"""
    frames_per_update: float = 1.0
    """how many environment steps to collect for each of them"""
    num_envs: int = 4
    """how many environments run side by side"""
    frames_per_batch: int = 16
    """how many environment steps the collector makes with the same weights before it writes them to the buffer"""
    init_random_frames: int = 1_000
    """how many environment steps are random at first; training begins after them"""
    buffer_size: int = 100_000
    """how many environment steps the buffer holds"""
    batch_size: int = 256
    """how many of them make one batch to train on"""
    learning_rate: float = 1e-3
    """step size of the optimisers"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """how far the target networks move towards the critics in each update"""
    log_every: int = 500
    """updates between two lines of progress"""
    eval_episodes: int = 20
    """how many episodes are played without noise at the end"""
    threads: int = 1
    """threads that torch may use; networks as small as these are fastest with one"""
    threshold: float = -200.0
    """fail if the mean return of those episodes is below this; 0 to accept anything"""
    plot: str = ""
    """write the learning curve to this PNG file"""


def parse_args() -> Args:
    """Make an option of each field of `Args`, with the string below the field as its help."""
    body = ast.parse(inspect.getsource(Args)).body[0].body
    pairs = zip(body[::2], body[1::2], strict=True)
    help_of = {field.target.id: text.value.value for field, text in pairs}
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(Args):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=type(field.default),
            default=field.default,
            help=help_of[field.name],
        )
    return Args(**vars(parser.parse_args()))


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, outputs),
    )


def make_actor(observations: int, low: Tensor, high: Tensor) -> ProbabilisticTensorDictSequential:
    """A normal distribution squashed into the range of the actions."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            nn.Sequential(mlp(observations, 2 * len(low)), NormalParamExtractor()),
            in_keys=["observation"],
            out_keys=["loc", "scale"],
        ),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=TanhNormal,
            distribution_kwargs={"low": low, "high": high},
        ),
    )


class Critics(nn.Module):
    """Two estimates of what an action is worth; the smaller one counts, so that errors do not feed themselves."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(observations + actions, 1) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Both values, [B] each."""
        both = torch.cat([observation, action], -1)
        first, second = (net(both).squeeze(-1) for net in self.nets)
        return first, second


def critic_loss(
    batch: TensorDict, actor: nn.Module, critics: Critics, target_critics: Critics, temperature: Tensor, args: Args
) -> Tensor:
    """Squared errors against the reward and what the next action is worth, its entropy included.

    An episode that was cut short (truncated) goes on being worth something; only one that ended (terminated) does not.
    """
    with torch.no_grad():
        dist = actor.get_dist(batch["next"])
        next_action = dist.rsample()
        next_value = torch.min(*target_critics(batch["next", "observation"], next_action))  # [B]
        next_value = next_value - temperature * dist.log_prob(next_action)
        alive = (~batch["next", "terminated"].squeeze(-1)).float()  # [B]
        target = batch["next", "reward"].squeeze(-1) + args.gamma * alive * next_value  # [B]
    first, second = critics(batch["observation"], batch["action"])
    return F.mse_loss(first, target) + F.mse_loss(second, target)


def actor_loss(batch: TensorDict, actor: nn.Module, critics: Critics, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the entropy of the actions that it was computed with."""
    dist = actor.get_dist(batch)
    action = dist.rsample()
    log_prob = dist.log_prob(action)  # [B]
    value = torch.min(*critics(batch["observation"], action))  # [B]
    return (temperature * log_prob - value).mean(), -log_prob.detach().mean()


def evaluate(actor: nn.Module, args: Args) -> float:
    """Mean return of whole episodes without noise, in an environment of their own."""
    with Collector(
        GymEnv(args.env_id),
        actor,
        frames_per_batch=200,
        trajs_per_batch=args.eval_episodes,
        exploration_type=ExplorationType.DETERMINISTIC,
    ) as collector:
        collector.set_seed(args.seed + 1_000)
        episodes = collector.next()  # [episodes, longest], zeros behind the shorter ones
    return episodes["next", "reward"].sum((1, 2)).mean().item()


def write_plot(path: str, frames: list[int], returns: list[float], args: Args) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(frames, returns)
    axes.set_xlabel("frames")
    axes.set_ylabel("mean return, last 100 episodes")
    axes.set_title(f"SAC on {args.env_id}, seed {args.seed}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    env = SerialEnv(args.num_envs, lambda: GymEnv(args.env_id))
    observations = env.reset()["observation"].shape[-1]
    low, high = torch.as_tensor(env.action_space.low), torch.as_tensor(env.action_space.high)
    actions = len(low)

    actor = make_actor(observations, low, high)
    critics = Critics(observations, actions)
    target_critics = copy.deepcopy(critics).requires_grad_(False)
    log_temperature = nn.Parameter(torch.zeros(()))
    wanted_entropy = -float(actions)
    actor_optimiser = torch.optim.Adam(actor.parameters(), lr=args.learning_rate, fused=True)
    critic_optimiser = torch.optim.Adam(critics.parameters(), lr=args.learning_rate, fused=True)
    temperature_optimiser = torch.optim.Adam([log_temperature], lr=args.learning_rate, fused=True)

    samples_per_insert = args.batch_size / args.frames_per_update
    replay_buffer = ReplayBuffer(
        storage=LazyTensorStorage(args.buffer_size),
        batch_size=args.batch_size,
        rate_limiter=RateLimiter(
            samples_per_insert=samples_per_insert,
            tolerance=4 * samples_per_insert * args.frames_per_batch,  # either side may be some batches ahead
            min_size_to_sample=args.init_random_frames,
        ),
    )
    collector = Collector(
        env,
        actor,
        frames_per_batch=args.frames_per_batch,
        init_random_frames=args.init_random_frames,
        replay_buffer=replay_buffer,
    )
    collector.set_seed(args.seed)

    frames: list[int] = []
    returns: list[float] = []
    waiting = 0.0
    start = time.perf_counter()
    collector.start()
    for update in range(1, args.updates + 1):
        sample_start = time.perf_counter()
        batch = replay_buffer.sample()  # [B]
        waiting += time.perf_counter() - sample_start
        temperature = log_temperature.detach().exp()

        loss = critic_loss(batch, actor, critics, target_critics, temperature, args)
        critic_optimiser.zero_grad()
        loss.backward()
        critic_optimiser.step()

        critics.requires_grad_(False)  # the actor's loss only passes through them
        loss, entropy = actor_loss(batch, actor, critics, temperature)
        actor_optimiser.zero_grad()
        loss.backward()
        actor_optimiser.step()
        critics.requires_grad_(True)

        loss = log_temperature * (entropy - wanted_entropy)  # the temperature rises where entropy is missing
        temperature_optimiser.zero_grad()
        loss.backward()
        temperature_optimiser.step()

        for target, parameter in zip(target_critics.parameters(), critics.parameters(), strict=True):
            target.lerp_(parameter.detach(), args.tau)
        collector.update_policy_weights_()

        if update % args.log_every == 0:
            stats = collector.stats()
            frames.append(stats["frames"])
            returns.append(stats.get("mean_return", float("nan")))
            print(
                f"{stats['frames']:>8,} frames {update:>7,} updates  temperature {temperature.item():.3f}"
                f"  entropy {entropy.item():6.2f}  mean return {returns[-1]:.1f}",
                flush=True,
            )
    stats = collector.stats()
    collector.async_shutdown()
    wall = time.perf_counter() - start

    mean_return = evaluate(actor, args)
    print(
        f"\nmean return of {args.eval_episodes} episodes without noise: {mean_return:.1f}"
        f" after {stats['frames']:,} frames and {args.updates:,} updates in {wall:.0f} s"
    )
    collecting = stats["time/env"] + stats["time/policy"] + stats["time/bookkeeping"]
    print(f"collecting took {collecting:.1f} s beside the training, which waited {waiting:.1f} s for its batches")
    if args.plot and returns:
        write_plot(args.plot, frames, returns, args)
        print(f"learning curve: {args.plot}")
    if args.threshold < 0 and not mean_return >= args.threshold:
        print(
            f"FAILED: the mean return {mean_return:.1f} is below the threshold {args.threshold:g}."
            " Try more --updates or another --seed; --threshold 0 accepts any result.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
