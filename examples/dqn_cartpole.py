"""DQN on CartPole-v1 in one file, with swath collecting the experience in the background.

A thread plays and fills the replay buffer while the loop in `main` trains from it. The rate limiter of the buffer
keeps the two in step: whoever is ahead waits. Everything but the collecting and the buffer is written out here.

    python examples/dqn_cartpole.py --plot learning_curve.png
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
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from swath.collectors import Collector
from swath.data import LazyTensorStorage, RateLimiter, ReplayBuffer
from swath.envs import GymEnv, SerialEnv


@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "CartPole-v1"
    """the gymnasium environment to learn; it needs discrete actions and flat observations"""
    seed: int = 1
    """seed of the environments, the networks and the exploration; runs still differ, as two threads share the work"""
    updates: int = 25_000
    """how many optimiser steps to make in all"""
    frames_per_update: float = 4.0
    """how many environment steps to collect for each of them"""
    num_envs: int = 8
    """how many environments run side by side"""
    frames_per_batch: int = 64
    """how many environment steps the collector makes with the same weights before it writes them to the buffer"""
    init_random_frames: int = 2_000
    """how many environment steps are random at first; training begins after them"""
    buffer_size: int = 100_000
    """how many environment steps the buffer holds"""
    batch_size: int = 256
    """how many of them make one batch to train on"""
    learning_rate: float = 1e-3
    """step size of the optimiser at the start; it falls linearly to zero"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.02
    """how far the target network moves towards the trained one in each update"""
    epsilon_start: float = 1.0
    """share of random actions at the start"""
    epsilon_end: float = 0.05
    """share of random actions at the end"""
    epsilon_decay: float = 0.2
    """share of the updates over which it falls"""
    log_every: int = 1_000
    """updates between two lines of progress"""
    eval_episodes: int = 20
    """how many episodes are played without random actions at the end"""
    threads: int = 1
    """threads that torch may use; networks as small as these are fastest with one"""
    threshold: float = 475.0
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


class EpsilonGreedy(nn.Module):
    """Takes the best action, or now and then a random one.

    How often is a buffer of the module, so it travels to the collector with the weights.
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("epsilon", torch.tensor(epsilon))

    def forward(self, value: Tensor) -> Tensor:
        """Actions [N] for the values [N, A]."""
        best = value.argmax(-1)  # [N]
        anything = torch.randint_like(best, value.shape[-1])
        return torch.where(torch.rand(best.shape) < self.epsilon, anything, best)


def make_q_net(observations: int, actions: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(observations, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, actions),
    )


def dqn_loss(batch: TensorDict, q_net: nn.Module, target_net: nn.Module, args: Args) -> Tensor:
    """Double DQN: the trained network chooses the next action, the target network says what it is worth.

    An episode that was cut short (truncated) goes on being worth something; only one that ended (terminated) does not.
    Rewards are scaled so that a reward of 1 in every step, for ever, is worth 1: the network need not first learn to
    say large numbers.
    """
    with torch.no_grad():
        next_observation = batch["next", "observation"]
        best = q_net(next_observation).argmax(-1, keepdim=True)  # [B, 1]
        next_value = target_net(next_observation).gather(-1, best)  # [B, 1]
        alive = (~batch["next", "terminated"]).float()  # [B, 1]
        reward = (1 - args.gamma) * batch["next", "reward"]  # [B, 1]
        target = reward + args.gamma * alive * next_value  # [B, 1]
    value = q_net(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))  # [B, 1]
    return F.mse_loss(value, target)


def evaluate(q_net: nn.Module, args: Args) -> float:
    """Mean return of whole episodes without random actions, in an environment of their own."""
    env = GymEnv(args.env_id, categorical_action_encoding=True)
    with Collector(
        env,
        lambda observation: q_net(observation).argmax(-1),
        frames_per_batch=500,
        trajs_per_batch=args.eval_episodes,
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
    axes.set_title(f"DQN on {args.env_id}, seed {args.seed}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    env = SerialEnv(args.num_envs, lambda: GymEnv(args.env_id, categorical_action_encoding=True))
    observations = env.reset()["observation"].shape[-1]
    actions = int(env.action_space.n)

    q_net = make_q_net(observations, actions)
    target_net = copy.deepcopy(q_net).requires_grad_(False)
    explore = EpsilonGreedy(args.epsilon_start)
    policy = TensorDictSequential(
        TensorDictModule(q_net, in_keys=["observation"], out_keys=["action_value"]),
        TensorDictModule(explore, in_keys=["action_value"], out_keys=["action"]),
    )
    optimiser = torch.optim.Adam(q_net.parameters(), lr=args.learning_rate, fused=True)

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
        policy,
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

        loss = dqn_loss(batch, q_net, target_net, args)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        for target, parameter in zip(target_net.parameters(), q_net.parameters(), strict=True):
            target.lerp_(parameter.detach(), args.tau)

        done = update / args.updates
        optimiser.param_groups[0]["lr"] = args.learning_rate * (1 - done)
        decayed = min(1.0, done / args.epsilon_decay)
        explore.epsilon.fill_(args.epsilon_start + decayed * (args.epsilon_end - args.epsilon_start))
        collector.update_policy_weights_()

        if update % args.log_every == 0:
            stats = collector.stats()
            frames.append(stats["frames"])
            returns.append(stats.get("mean_return", float("nan")))
            print(
                f"{stats['frames']:>8,} frames {update:>7,} updates  epsilon {explore.epsilon.item():.2f}"
                f"  loss {loss.item():.5f}  mean return {returns[-1]:.1f}",
                flush=True,
            )
    stats = collector.stats()
    collector.async_shutdown()
    wall = time.perf_counter() - start

    mean_return = evaluate(q_net, args)
    print(
        f"\nmean return of {args.eval_episodes} episodes without random actions: {mean_return:.1f}"
        f" after {stats['frames']:,} frames and {args.updates:,} updates in {wall:.0f} s"
    )
    collecting = stats["time/env"] + stats["time/policy"] + stats["time/bookkeeping"]
    print(f"collecting took {collecting:.1f} s beside the training, which waited {waiting:.1f} s for its batches")
    if args.plot and returns:
        write_plot(args.plot, frames, returns, args)
        print(f"learning curve: {args.plot}")
    if args.threshold > 0 and not mean_return >= args.threshold:
        print(
            f"FAILED: the mean return {mean_return:.1f} is below the threshold {args.threshold:g}."
            " Try more --updates or another --seed; --threshold 0 accepts any result.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
