"""PPO on CartPole-v1 in one file, with swath collecting the experience.

Everything but the collecting is written out here: the networks, the advantages, the loss, the loop.

    python examples/ppo_cartpole.py --plot learning_curve.png
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import time

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from tqdm import tqdm

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv


@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "CartPole-v1"
    """the gymnasium environment to learn; it needs discrete actions and flat observations"""
    seed: int = 1
    """seed of the environments, the networks and the sampled actions"""
    total_frames: int = 262_144
    """how many environment steps to collect in all"""
    num_envs: int = 8
    """how many environments run side by side"""
    steps_per_batch: int = 128
    """how many steps of every environment make one batch"""
    epochs: int = 6
    """how often each batch is gone through"""
    minibatches: int = 4
    """into how many parts a batch is cut in each epoch"""
    learning_rate: float = 2e-3
    """step size of the optimiser at the start; it falls linearly to zero"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """how far advantages trust the rewards rather than the critic"""
    clip: float = 0.2
    """how far one batch may move the probability ratio"""
    entropy_weight: float = 0.01
    """weight of the entropy bonus"""
    value_weight: float = 0.5
    """weight of the critic's loss"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this norm"""
    threads: int = 1
    """threads that torch may use; networks as small as these are fastest with one"""
    threshold: float = 400.0
    """fail if the mean return of the last 100 episodes ends below this; 0 to accept anything"""
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


def mlp(inputs: int, outputs: int, output_gain: float) -> nn.Sequential:
    layers = [
        nn.Linear(inputs, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, outputs),
    ]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, output_gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def make_actor(observations: int, actions: int) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            mlp(observations, actions, output_gain=0.01),
            in_keys=["observation"],
            out_keys=["logits"],
        ),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,  # written as "action_log_prob"
        ),
    )


@torch.no_grad()
def advantages_of(batch: TensorDict, critic: nn.Module, args: Args) -> tuple[Tensor, Tensor]:
    """Generalised advantages and the critic's targets, both [N, T].

    An episode that was cut short (truncated) is worth what its last observation is worth; one that
    ended (terminated) is worth nothing more. Neither may see into the episode that follows it.
    """
    value = critic(batch["observation"]).squeeze(-1)  # [N, T]
    next_value = critic(batch["next", "observation"]).squeeze(-1)  # [N, T]
    reward = batch["next", "reward"].squeeze(-1)  # [N, T]
    alive = (~batch["next", "terminated"].squeeze(-1)).float()  # [N, T]
    same_episode = (~batch["next", "done"].squeeze(-1)).float()  # [N, T]

    delta = reward + args.gamma * alive * next_value - value
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        running = delta[:, t] + args.gamma * args.gae_lambda * same_episode[:, t] * running
        advantage[:, t] = running
    return advantage, advantage + value


def ppo_loss(part: TensorDict, actor: nn.Module, critic: nn.Module, args: Args) -> Tensor:
    dist = actor.get_dist(part)
    ratio = (dist.log_prob(part["action"]) - part["action_log_prob"]).exp()
    advantage = part["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
    actor_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
    critic_loss = F.mse_loss(critic(part["observation"]).squeeze(-1), part["target"])
    return actor_loss + args.value_weight * critic_loss - args.entropy_weight * dist.entropy().mean()


def write_plot(path: str, frames: list[int], returns: list[float], args: Args) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(frames, returns)
    if args.threshold > 0:
        axes.axhline(args.threshold, color="grey", linestyle="--", linewidth=1)
    axes.set_xlabel("frames")
    axes.set_ylabel("mean return, last 100 episodes")
    axes.set_title(f"PPO on {args.env_id}, seed {args.seed}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def print_times(stats: dict[str, float], training: float, wall: float) -> None:
    times = {
        "environment steps": stats["time/env"],
        "policy": stats["time/policy"],
        "the rest of collecting": stats["time/bookkeeping"],
        "training": training,
    }
    times["everything else"] = max(0.0, wall - sum(times.values()))
    print("where the time went:")
    for name, seconds in times.items():
        print(f"  {name:<23}{seconds:7.1f} s {100 * seconds / wall:5.1f} %")
    collecting = stats["time/env"] + stats["time/policy"] + stats["time/bookkeeping"]
    if collecting > 0:
        print(f"  while collecting: {stats['frames'] / collecting:,.0f} frames/s")


def main() -> int:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    env = SerialEnv(args.num_envs, lambda: GymEnv(args.env_id, categorical_action_encoding=True))
    example = env.reset()
    observations = example["observation"].shape[-1]
    actions = int(env.action_space.n)

    actor = make_actor(observations, actions)
    critic = mlp(observations, 1, output_gain=1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-5)

    frames_per_batch = args.num_envs * args.steps_per_batch
    collector = Collector(env, actor, frames_per_batch=frames_per_batch, total_frames=args.total_frames)
    collector.set_seed(args.seed)

    frames: list[int] = []
    returns: list[float] = []
    training = 0.0
    start = time.perf_counter()
    progress = tqdm(total=args.total_frames, unit=" frames", dynamic_ncols=True)
    for batch in collector:
        train_start = time.perf_counter()
        collected = progress.n + batch.numel()
        optimiser.param_groups[0]["lr"] = args.learning_rate * (1 - progress.n / args.total_frames)

        advantage, target = advantages_of(batch, critic, args)
        data = batch.select("observation", "action", "action_log_prob")
        data["advantage"], data["target"] = advantage, target
        data = data.reshape(-1)  # [N, T] -> [N * T]
        for _ in range(args.epochs):
            for rows in torch.randperm(data.numel()).chunk(args.minibatches):
                loss = ppo_loss(data[rows], actor, critic, args)
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                optimiser.step()
        collector.update_policy_weights_()
        training += time.perf_counter() - train_start

        stats = collector.stats()
        if stats["episodes"] > 0:
            frames.append(collected)
            returns.append(float(stats["mean_return"]))
            progress.set_postfix_str(f"mean return {returns[-1]:.1f}", refresh=False)
        progress.update(batch.numel())
    progress.close()
    wall = time.perf_counter() - start
    stats = collector.stats()
    collector.shutdown()

    mean_return = returns[-1] if returns else float("nan")
    print(
        f"\nmean return of the last 100 episodes: {mean_return:.1f}"
        f" after {stats['frames']:,} frames and {stats['episodes']:,} episodes in {wall:.0f} s"
    )
    print_times(stats, training, wall)
    if args.plot and returns:
        write_plot(args.plot, frames, returns, args)
        print(f"learning curve: {args.plot}")
    if args.threshold > 0 and not mean_return >= args.threshold:
        print(
            f"FAILED: the mean return {mean_return:.1f} is below the threshold {args.threshold:g}."
            " Try more --total-frames or another --seed; --threshold 0 accepts any result.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
