"""Whatever is asked of a collector, every frame is where a plain simulation of the same envs says it belongs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from counting_layouts import LAYOUTS
from counting_reference import CountingReference, assert_holds
from hypothesis import event, given, settings
from hypothesis import strategies as st
from inside import recent_episodes

from swath.collectors import Collector
from swath.testing.counting import KINDS

IDLING = "idling vector env"


@dataclass
class StopAt:
    """An interruptor that stops a rollout after so many steps; None lets it end by itself."""

    steps: int | None = None
    made: int = 0

    def collection_stopped(self) -> bool:
        self.made += 1
        return self.made == self.steps


@dataclass
class Scenario:
    layout: str
    lanes: int
    lengths: list[list[int]]
    kind: str
    truncate: bool
    steps: int
    options: dict[str, Any]
    acts: list[tuple[str, Any]] = field(default_factory=list)


@st.composite
def scenarios(draw: Any) -> Scenario:
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    lanes = draw(st.integers(1, 3))
    total = {"custom grid": 2 * lanes, "SerialEnv of batches": 2 * lanes}.get(layout, lanes)
    total = 1 if layout.startswith("one") else total
    idles = layout == IDLING
    lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
    steps = draw(st.integers(1, 8))
    options: dict[str, Any] = {
        "max_frames_per_traj": None if idles else draw(st.none() | st.integers(1, 6)),
        "total_frames": draw(st.just(-1) | st.integers(1, 40)),
        "reset_at_each_iter": draw(st.booleans()),
        "set_truncated": draw(st.booleans()),
        "compact_obs": draw(st.booleans()),
        "worker_idx": draw(st.none() | st.integers(0, 3)),
    }
    some = st.lists(st.integers(0, total - 1), min_size=1, max_size=total)
    parts = st.nothing() if idles or layout.startswith("one") else some.map(lambda lanes: ("reset", lanes))
    act = st.one_of(
        st.tuples(st.just("batch"), st.none() | st.integers(1, steps)),
        st.tuples(st.just("batch"), st.none()),
        st.just(("reset", None)),
        st.tuples(st.just("seed"), st.integers(0, 9)),
        parts,
    )
    return Scenario(
        layout=layout,
        lanes=lanes,
        lengths=draw(st.lists(lengths, min_size=total, max_size=total)),
        kind=draw(st.sampled_from(KINDS)),
        truncate=draw(st.booleans()),
        steps=steps,
        options=options,
        acts=[("batch", None), *draw(st.lists(act, max_size=6)), ("batch", None)],
    )


class Run:
    """A collector beside the plain simulation of what it must do."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.stop = StopAt()
        env = LAYOUTS[scenario.layout](
            scenario.lanes, lengths=scenario.lengths, kind=scenario.kind, truncate=scenario.truncate
        )
        self.grid = env.batch_size
        self.collector = Collector(
            env, frames_per_batch=scenario.steps * env.num_lanes, interruptor=self.stop, **scenario.options
        )
        self.model = CountingReference(
            env.num_lanes,
            scenario.lengths,
            truncate=scenario.truncate,
            limit=scenario.options["max_frames_per_traj"],
            set_truncated=scenario.options["set_truncated"],
            idles=scenario.layout == IDLING,
            worker=scenario.options["worker_idx"] or 0,
        )
        self.is_fresh = True

    def batch(self, stop: int | None) -> bool:
        """Compare one batch; return whether there was any."""
        model, scenario = self.model, self.scenario
        steps, total = scenario.steps, scenario.options["total_frames"]
        if total > 0:
            steps = min(steps, -(-(total - model.frames) // model.lanes))
        self.stop.steps, self.stop.made = stop, 0
        batch = self.collector.next()
        if steps <= 0:
            assert batch is None
            return False
        if scenario.options["reset_at_each_iter"] and not self.is_fresh:
            model.reset()
        steps = min(steps, stop or steps)
        expected = model.collect(steps)
        self.is_fresh = False
        assert batch is not None
        assert batch.shape == (*self.grid, steps)
        assert batch.names[-1] == "time"
        assert_holds(batch, expected, compact=scenario.options["compact_obs"])
        for value in batch.values(True, True):
            assert value.is_contiguous()
        return True

    def reset(self, lanes: list[int] | None) -> None:
        if lanes is None:
            self.collector.reset()
            self.model.reset()
            self.is_fresh = True
        elif len(self.grid) == 1:
            self.collector.reset(lanes)
            self.model.reset(sorted(set(lanes)))
        else:
            rows = sorted({lane // self.grid[1] for lane in lanes})
            self.collector.reset(rows)
            self.model.reset([row * self.grid[1] + column for row in rows for column in range(self.grid[1])])

    def seed(self, seed: int) -> None:
        self.collector.set_seed(seed)
        self.model.reset(new_ids=self.model.frames > 0)
        self.is_fresh = True


@settings(max_examples=250, deadline=None)
@given(scenarios())
def test_every_frame_is_where_a_plain_simulation_says(scenario: Scenario) -> None:
    event(scenario.layout)
    run = Run(scenario)
    for name, argument in scenario.acts:
        if run.collector.closed:
            break
        if getattr(run, name)(argument) is False:
            break
    stats = run.collector.stats()
    assert stats["frames"] == run.model.frames
    assert (stats.get("idle_frames", 0) > 0) <= (scenario.layout == IDLING)
    ended = run.model.ended
    assert stats["episodes"] == len(ended)
    recent = ended[-100:]
    assert recent_episodes(run.collector) == (recent, [n * (n + 1) / 2 for n in recent])
    run.collector.shutdown()


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
