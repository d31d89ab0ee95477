"""What a batch costs beside its steps, and what a step costs over many lanes: `python -m benchmarks.cliffs.costs`.

Everything is measured in this process and in its processor time, so that a busy machine changes little; what workers
elsewhere spend is not in it. All collectors take turns, and the median over rounds counts. The tables go into
`docs/speed.md`, between two marks, and the picture beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine, policies
from benchmarks.cliffs.tensor_env import make_vector

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "speed.md", DOCS / "images" / "costs.svg"
BEGIN, END = "<!-- costs: begin -->", "<!-- costs: end -->"
SIZES = (1, 8, 64, 1024)
LONG = 4096
"""Frames of a batch of which nearly all is steps."""
LANES = (1, 16, 256, 1024)
STEPS = 64
"""Of a batch over many lanes."""
ROUNDS, SECONDS = 9, 0.2
KINDS = {
    "Collector": "`Collector`",
    "buffer": "`Collector` into a replay buffer",
    "MultiSyncCollector": "`MultiSyncCollector`, 1 worker",
    "AsyncCollector": "`AsyncCollector`",
}
Costs = dict[tuple[str, int], float]
"""Microseconds, by what is called and its size."""


def _collected(kind: str, frames: int, stack: ExitStack, lanes: int = 1) -> Callable[[], object]:
    """What collects a batch each time that it is called."""
    from swath import collectors
    from swath.data import LazyTensorStorage, ReplayBuffer
    from swath.envs import GymEnv

    torch.manual_seed(0)
    source = "CartPole-v1" if lanes == 1 else partial(make_vector, lanes)
    env = partial(_env, GymEnv, source)
    options: dict[str, Any] = {"frames_per_batch": frames, "total_frames": -1}
    if kind == "buffer":
        options["replay_buffer"] = ReplayBuffer(storage=LazyTensorStorage(100_000))
    policy = policies.actor(policies.mlp(4, 2), None, None)
    cls = getattr(collectors, "Collector" if kind == "buffer" else kind)
    collector = cls([env] if kind == "MultiSyncCollector" else env, policy, **options)
    stack.callback(collector.shutdown)
    return partial(next, iter(collector))


def _env(make: Callable[..., Any], source: Any) -> Any:
    return make(source if isinstance(source, str) else source(), categorical_action_encoding=True)


def _env_alone(lanes: int, stack: ExitStack) -> Callable[[], object]:
    """The same steps of the env with nothing around it."""
    env = stack.enter_context(closing(make_vector(lanes)))
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (STEPS, lanes))

    def steps() -> None:
        for action in actions:
            env.step(action)

    return steps


def _measure(runs: Mapping[tuple[str, int], Callable[[], object]]) -> Costs:
    """Microseconds of this process for each call, the median over rounds."""
    found: dict[tuple[str, int], list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + 1):  # the first is not counted
        for name, run in runs.items():
            calls, begun, start = 0, time.process_time(), time.perf_counter()
            while time.perf_counter() - start < SECONDS:
                run()
                calls += 1
            if round_:
                found[name].append((time.process_time() - begun) / calls * 1e6)
    return {name: statistics.median(values) for name, values in found.items()}


def measure() -> tuple[Costs, Costs]:
    """Of batches by kind and frames, and of steps by lanes; with what the env alone takes for these."""
    with ExitStack() as stack:
        sizes = [*((kind, n) for kind in KINDS for n in SIZES), ("Collector", LONG)]
        batches = _measure({(kind, n): _collected(kind, n, stack) for kind, n in sizes})
    with ExitStack() as stack:
        runs = {("swath", n): _collected("Collector", n * STEPS, stack, n) for n in LANES}
        runs |= {("env", n): _env_alone(n, stack) for n in LANES if n > 1}
        steps = {name: cost / STEPS for name, cost in _measure(runs).items()}
    return batches, steps


def _step(batches: Costs) -> float:
    """One step of one env, from batches in which there is hardly anything else."""
    return (batches["Collector", LONG] - batches["Collector", SIZES[-1]]) / (LONG - SIZES[-1])


def _beside(batches: Costs, kind: str, frames: int) -> float:
    """What a batch costs beside its steps; those of workers are made elsewhere."""
    is_here = kind in ("Collector", "buffer")
    return max(0.0, batches[kind, frames] - (frames * _step(batches) if is_here else 0.0))


def _tables(batches: Costs, steps: Costs) -> Iterator[str]:
    facts = machine.facts()
    yield f"Microseconds of a processor, on {facts['cpu']} with Python {facts['python']} and torch {facts['torch']}."
    yield f"A step of one CartPole with the policy costs {_step(batches):.1f} us.\n"
    yield "| beside its steps, a batch of | " + " | ".join(f"{n:,} frame{'s' * (n > 1)}" for n in SIZES) + " |"
    yield "|---|" + "---:|" * len(SIZES)
    for kind, name in KINDS.items():
        yield f"| {name} | " + " | ".join(f"{_beside(batches, kind, n):,.0f}" for n in SIZES) + " |"
    yield "\n| a step over | " + " | ".join(f"{n:,} lanes" if n > 1 else "1 lane" for n in LANES) + " |"
    yield "|---|" + "---:|" * len(LANES)
    yield "| with `Collector`, in all | " + " | ".join(f"{steps['swath', n]:,.1f}" for n in LANES) + " |"
    alone = [f"{steps['env', n]:,.1f}" if ("env", n) in steps else "" for n in LANES]
    yield "| of which the env alone | " + " | ".join(alone) + " |"
    yield "| per frame | " + " | ".join(f"{steps['swath', n] / n:,.2f}" for n in LANES) + " |"


def _draw(batches: Costs, steps: Costs) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "swath", "font.size": 9})
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
    for kind, name in KINDS.items():
        left.plot(SIZES, [_beside(batches, kind, n) for n in SIZES], "o-", label=name.replace("`", ""))
    left.set(xscale="log", ylim=(0, None), xlabel="frames in a batch", ylabel="us", title="a batch, beside its steps")
    left.legend(frameon=False, fontsize=8)
    right.plot(LANES, [steps["swath", n] / n for n in LANES], "o-", label="Collector, in all")
    several = [n for n in LANES if ("env", n) in steps]
    right.plot(several, [steps["env", n] / n for n in several], "o--", label="the env alone")
    right.set(xscale="log", yscale="log", xlabel="lanes", ylabel="us per frame", title="a step over many lanes")
    right.legend(frameon=False, fontsize=8)
    for axes, ticks in ((left, SIZES), (right, LANES)):
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    batches, steps = measure()
    tables = "\n".join(_tables(batches, steps))
    print(tables)
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}")
    _draw(batches, steps)


if __name__ == "__main__":
    main()
