"""Whatever is asked of a collector, every frame is where a plain simulation of the same envs says it belongs.

`trajs_per_batch` delivers whole episodes, in the order in which they end, and loses no frame without counting it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from counting_layouts import LAYOUTS
from counting_reference import CountingReference, Frame, assert_holds
from hypothesis import event, given, settings
from hypothesis import strategies as st
from inside import recent_episodes
from tensordict import TensorDictBase

from swath.collectors import Collector
from swath.keys import MASK, TRAJ_IDS
from swath.testing.counting import KINDS

IDLING = "idling vector env"


class Stops:
    """An interruptor that ends rollouts after the numbers of steps given, in turn; None lets one end by itself."""

    def __init__(self, steps: list[int | None]) -> None:
        self.steps, self.made, self.rollout = steps or [None], 0, -1

    def begin(self) -> None:
        self.made, self.rollout = 0, self.rollout + 1

    def of(self, rollout: int) -> int | None:
        return self.steps[rollout % len(self.steps)]

    def collection_stopped(self) -> bool:
        self.made += 1
        return self.made == self.of(self.rollout)


@dataclass
class Scenario:
    layout: str
    lanes: int
    lengths: list[list[int]]
    kind: str
    truncate: bool
    steps: int
    count: int | None
    """`trajs_per_batch`."""
    options: dict[str, Any]
    stops: list[int | None]
    acts: list[tuple[str, Any]]


@st.composite
def scenarios(draw: Any, counts: Any, totals: Any) -> Scenario:
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    lanes, steps, count = draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(counts)
    idles = layout == IDLING
    options: dict[str, Any] = {
        "max_frames_per_traj": None if idles else draw(st.none() | st.integers(1, 6)),
        "total_frames": draw(totals),
        "reset_at_each_iter": draw(st.booleans()),
        "set_truncated": draw(st.booleans()),
        "compact_obs": draw(st.booleans()),
        "worker_idx": draw(st.none() | st.integers(0, 3)),
    }
    if count is not None:
        options |= {"trajs_per_batch": count, "traj_format": draw(st.sampled_from(["padded", "cat"]))}
    some = st.lists(st.integers(0, lanes - 1), min_size=1, max_size=lanes)
    parts = st.nothing() if idles or layout.startswith("one") else some.map(lambda rows: ("reset", rows))
    act = st.one_of(
        st.just(("batch", None)),
        st.just(("batch", None)),
        st.just(("reset", None)),
        st.tuples(st.just("seed"), st.integers(0, 9)),
        parts,
    )
    return Scenario(
        layout=layout,
        lanes=lanes,
        lengths=draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=6, max_size=6)),
        kind=draw(st.sampled_from(KINDS)),
        truncate=draw(st.booleans()),
        steps=steps,
        count=count,
        options=options,
        stops=draw(st.lists(st.none() | st.integers(1, steps), max_size=4)),
        acts=[("batch", None), *draw(st.lists(act, max_size=7)), ("batch", None)],
    )


class Run:
    """A collector beside the plain simulation of what it must do."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.options = scenario, scenario.options
        env = LAYOUTS[scenario.layout](
            scenario.lanes, lengths=scenario.lengths, kind=scenario.kind, truncate=scenario.truncate
        )
        self.grid, self.stops = env.batch_size, Stops(scenario.stops)
        self.collector = Collector(
            env,
            frames_per_batch=scenario.steps * env.num_lanes,
            interruptor=self.stops,
            pre_collect_hook=self.stops.begin,
            **self.options,
        )
        self.model = CountingReference(
            env.num_lanes,
            scenario.lengths,
            truncate=scenario.truncate,
            limit=self.options["max_frames_per_traj"],
            set_truncated=self.options["set_truncated"],
            idles=scenario.layout == IDLING,
            worker=self.options["worker_idx"] or 0,
        )
        self.is_fresh = True
        self.has_cut_off = False
        """What a reset has cut off is given up when the next rollout shows it."""
        self.rollouts = self.delivered = self.given_up = 0

    def rollout(self) -> list[list[Frame]] | None:
        """The frames of the next one, `[lane][t]`; None at the end of the budget."""
        steps, total = self.scenario.steps, self.options["total_frames"]
        if total > 0:
            steps = min(steps, -(-(total - self.model.frames) // self.model.lanes))
        if steps <= 0:
            return None
        if self.options["reset_at_each_iter"] and not self.is_fresh:
            self.model.reset()
        steps = min(steps, self.stops.of(self.rollouts) or steps)
        self.is_fresh = self.has_cut_off = False
        self.rollouts += 1
        return self.model.collect(steps)

    def episodes(self, count: int) -> list[list[Frame]] | None:
        """The next episodes; None at the end of the budget."""
        model = self.model
        while len(model.complete) < count:
            if self.rollout() is None:
                return None
        taken, model.complete = model.complete[:count], model.complete[count:]
        self.delivered += sum(map(len, taken))
        return taken

    def batch(self, _: None = None) -> bool:
        """Compare one batch; return whether there was any."""
        count = self.scenario.count
        expected = self.rollout() if count is None else self.episodes(count)
        batch = self.collector.next()
        if expected is None:
            assert batch is None
            return False
        assert batch is not None
        if count is None:
            assert batch.names[-1] == "time"
            assert batch.shape == (*self.grid, len(expected[0]))
            assert_holds(batch, expected, compact=self.options["compact_obs"])
            assert all(value.is_contiguous() for value in batch.values(True, True))
        else:
            assert_episodes(batch, expected, self.options)
            self.is_balanced()
        return True

    def is_balanced(self) -> None:
        """Every frame was delivered, given up, or is still held."""
        stats = self.collector.stats()
        held = sum(map(len, (*self.model.open.values(), *self.model.complete)))
        assert stats["frames"] == self.model.frames
        if not self.has_cut_off:
            assert stats["pending_frames"] == held
            assert stats["dropped_frames"] == self.model.dropped + self.given_up
        assert self.delivered + stats["dropped_frames"] + stats["pending_frames"] == stats["frames"]

    def reset(self, rows: list[int] | None) -> None:
        self.collector.reset(rows)
        if rows is None:
            self.model.reset()
            self.is_fresh = True
        else:
            size = self.model.lanes // self.grid[0]
            self.model.reset([row * size + lane for row in sorted(set(rows)) for lane in range(size)])
        self.has_cut_off = True
        if self.scenario.count is not None:
            self.is_balanced()

    def seed(self, seed: int) -> None:
        self.collector.set_seed(seed)
        self.model.reset(new_ids=self.model.frames > 0)
        self.is_fresh, self.has_cut_off = True, False
        if self.scenario.count is not None:
            self.given_up += sum(map(len, self.model.complete))
            self.model.complete.clear()
            self.is_balanced()


def assert_episodes(batch: TensorDictBase, expected: list[list[Frame]], options: dict[str, Any]) -> None:
    lengths = [len(episode) for episode in expected]
    if options["traj_format"] == "padded":
        assert batch.shape == (len(expected), max(lengths))
        mask = batch.get(MASK)
        assert mask.shape == batch.shape
        assert mask.sum(1).tolist() == lengths
        episodes = [row[:length] for row, length in zip(batch, lengths, strict=True)]
        for row, length in zip(batch, lengths, strict=True):
            assert (row[length:].get(TRAJ_IDS) == -1).all()
            assert not any(v.any() for v in row[length:].exclude(TRAJ_IDS).values(True, True))
    else:
        assert batch.shape == (sum(lengths),)
        episodes = list(batch.split(lengths))
    for found, wanted in zip(episodes, expected, strict=True):
        assert_holds(found.exclude(MASK), [wanted], compact=options["compact_obs"])


def play(scenario: Scenario) -> Run:
    """Do all that a scenario says, and compare the numbers at its end."""
    event(scenario.layout)
    run = Run(scenario)
    for name, argument in scenario.acts:
        if run.collector.closed or getattr(run, name)(argument) is False:
            break
    stats, ended = run.collector.stats(), run.model.ended
    assert stats["frames"] == run.model.frames
    assert (stats.get("idle_frames", 0) > 0) <= (scenario.layout == IDLING)
    assert stats["episodes"] == len(ended)
    recent = ended[-100:]
    assert recent_episodes(run.collector) == (recent, [n * (n + 1) / 2 for n in recent])
    return run


@settings(max_examples=250, deadline=None)
@given(scenarios(st.none(), st.just(-1) | st.integers(1, 40)))
def test_every_frame_is_where_a_plain_simulation_says(scenario: Scenario) -> None:
    play(scenario).collector.shutdown()


@settings(max_examples=80, deadline=None)
@given(scenarios(st.integers(1, 5), st.integers(1, 100)))
def test_episodes_are_those_of_a_plain_simulation(scenario: Scenario) -> None:
    run = play(scenario)
    while not run.collector.closed and run.batch():
        pass
    stats = run.collector.stats()
    assert stats["pending_frames"] == 0
    assert run.delivered + stats["dropped_frames"] == stats["frames"] == run.model.frames


def test_an_episode_over_many_batches_is_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear: frames are put behind each other once and handed out once, however many batches an episode spans."""
    env = LAYOUTS["one gymnasium env"](1, lengths=300)
    collector = Collector(env, frames_per_batch=1, total_frames=600, trajs_per_batch=1, traj_format="cat")
    copied = 0
    plain_cat = torch.cat

    def counting_cat(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal copied
        if isinstance(tensors[0], TensorDictBase):
            copied += sum(tensor.numel() for tensor in tensors)
        return plain_cat(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "cat", counting_cat)
    assert [len(batch) for batch in collector] == [300, 300]
    assert copied <= 10 * 600  # each level of a TensorDict counts; a copy for every batch would make 90,000


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_what_a_consumer_writes_into_a_batch_does_not_come_back(layout: str) -> None:
    lengths = [[2, 5], [3], [4], [1]]
    env = LAYOUTS[layout](2, lengths=lengths)
    options = {} if layout == IDLING else {"max_frames_per_traj": 4}
    collector = Collector(env, frames_per_batch=5 * env.num_lanes, **options)
    model = CountingReference(env.num_lanes, lengths, limit=options.get("max_frames_per_traj"), idles=layout == IDLING)
    for _ in range(6):
        batch = collector.next()
        assert batch is not None
        assert_holds(batch, model.collect(5))
        for value in batch.values(True, True):
            value.fill_(1)
        del batch, value
    assert collector.stats()["slots_allocated"] == 1


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@settings(max_examples=8, deadline=None)
@given(total=st.integers(1, 60), per_batch=st.integers(1, 20), lengths=st.lists(st.integers(1, 7), min_size=1))
def test_total_frames_are_exact_in_whole_steps(layout: str, total: int, per_batch: int, lengths: list[int]) -> None:
    env = LAYOUTS[layout](2, lengths=lengths)
    lanes = env.num_lanes
    collector = Collector(env, frames_per_batch=lanes * per_batch, total_frames=total)
    batches = list(collector)
    frames = collector.stats()["frames"]
    assert total <= frames < total + lanes
    if layout != IDLING:
        assert frames == -(-total // lanes) * lanes == sum(batch.numel() for batch in batches)
        assert len(batches) == len(collector)
        assert all(batch.shape[-1] == per_batch for batch in batches[:-1])
    assert collector.stats()["completed"]
    assert env.is_closed
