"""PPO on CartPole-v1 with one model for all workers: they step environments, a server acts for them.

The networks, the advantages and the loss are those of `ppo_cartpole.py`; only who acts is different. This is worth
its price where the model is large or lives on the only GPU; for networks as small as these, workers with copies of
their own are faster.

    python examples/shared_model_cartpole.py
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from ppo_cartpole import Args, advantages_of, make_actor, mlp, ppo_loss
from torch import nn
from tqdm import tqdm

from swath.collectors import MultiSyncCollector
from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.modules import InferenceServer

WORKERS = 2


def make_env(env_id: str, num_envs: int) -> EnvBase:
    return SerialEnv(num_envs, lambda: GymEnv(env_id, categorical_action_encoding=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--total-frames", type=int, default=131_072)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threshold", type=float, default=150.0, help="fail below this mean return; 0 to accept any")
    given = parser.parse_args()
    args = Args(total_frames=given.total_frames, seed=given.seed)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    actor, critic = make_actor(4, 2), mlp(4, 1, output_gain=1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-5)
    per_worker = args.num_envs // WORKERS

    mean_return, start = float("nan"), time.perf_counter()
    with InferenceServer(actor) as server:
        collector = MultiSyncCollector(
            [lambda: make_env(args.env_id, per_worker)] * WORKERS,
            server.client(),  # goes to the workers as a connection to the server
            frames_per_batch=args.num_envs * args.steps_per_batch,
            total_frames=args.total_frames,
            cat_results=0,
        )
        collector.set_seed(args.seed)
        progress = tqdm(total=args.total_frames, unit=" frames", dynamic_ncols=True)
        for batch in collector:
            optimiser.param_groups[0]["lr"] = args.learning_rate * (1 - progress.n / args.total_frames)
            data = batch.select("observation", "action", "action_log_prob")
            data["advantage"], data["target"] = advantages_of(batch, critic, args)
            data = data.reshape(-1)  # [N, T] -> [N * T]
            for _ in range(args.epochs):
                for rows in torch.randperm(data.numel()).chunk(args.minibatches):
                    loss = ppo_loss(data[rows], actor, critic, args)
                    optimiser.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                    optimiser.step()
            server.update_policy_weights_()  # everybody acts with the new weights from now on
            stats = collector.stats()
            mean_return = float(stats.get("mean_return", mean_return))
            progress.set_postfix_str(f"mean return {mean_return:.1f}", refresh=False)
            progress.update(batch.numel())
        progress.close()
        figures = server.stats()
        collector.shutdown()

    print(f"\nmean return of the last 100 episodes: {mean_return:.1f} in {time.perf_counter() - start:.0f} s")
    print(f"requests per forward: {figures['avg_batch_size']:.1f}, forward {figures['p50_forward_ms']:.2f} ms (median)")
    if given.threshold > 0 and not mean_return >= given.threshold:
        print(f"FAILED: the mean return is below the threshold {given.threshold:g}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
