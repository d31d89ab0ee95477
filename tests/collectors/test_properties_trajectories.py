"""`trajs_per_batch` delivers whole episodes, in the order in which they end, and loses no frame without counting it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from counting_layouts import LAYOUTS
from counting_reference import CountingReference, Frame, assert_holds
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase

from swath.collectors import Collector
from swath.testing import assert_whole_episodes, assert_whole_in_a_row
from swath.testing.counting import KINDS

IDLING = "idling vector env"


class StopSometimes:
    """An interruptor that ends rollouts after the numbers of steps given, one after the other."""

    def __init__(self, stops: list[int]) -> None:
        self.stops, self.made, self.rollout = stops, 0, -1

    def begin(self) -> None:
        self.made, self.rollout = 0, self.rollout + 1

    def collection_stopped(self) -> bool:
        self.made += 1
        return self.made == stop_of(self.stops, self.rollout)


def stop_of(stops: list[int], rollout: int) -> int | None:
    return stops[rollout % len(stops)] if stops else None


@dataclass
class Scenario:
    layout: str
    lanes: int
    lengths: list[list[int]]
    kind: str
    steps: int
    count: int
    form: str
    options: dict[str, Any]
    stops: list[int]
    acts: list[tuple[str, Any]]


@st.composite
def scenarios(draw: Any) -> Scenario:
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    lanes = draw(st.integers(1, 3))
    steps = draw(st.integers(1, 8))
    lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
    idles = layout == IDLING
    act = st.sampled_from([("batch", None), ("batch", None), ("reset", None), ("seed", 3)])
    if not idles and not layout.startswith("one"):
        act = st.one_of(act, st.just(("reset", [0])))
    return Scenario(
        layout=layout,
        lanes=lanes,
        lengths=draw(st.lists(lengths, min_size=6, max_size=6)),
        kind=draw(st.sampled_from(KINDS)),
        steps=steps,
        count=draw(st.integers(1, 5)),
        form=draw(st.sampled_from(["padded", "cat"])),
        options={
            "total_frames": draw(st.integers(1, 100)),
            "max_frames_per_traj": None if idles else draw(st.none() | st.integers(1, 6)),
            "set_truncated": draw(st.booleans()),
            "reset_at_each_iter": draw(st.booleans()),
            "compact_obs": draw(st.booleans()),
        },
        stops=draw(st.lists(st.integers(1, steps), max_size=3)),
        acts=draw(st.lists(act, min_size=2, max_size=8)),
    )


class Run:
    """A collector of episodes beside the plain simulation of what it must do."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        options = scenario.options
        env = LAYOUTS[scenario.layout](scenario.lanes, lengths=scenario.lengths, kind=scenario.kind)
        self.stop = StopSometimes(scenario.stops)
        self.collector = Collector(
            env,
            frames_per_batch=scenario.steps * env.num_lanes,
            trajs_per_batch=scenario.count,
            traj_format=scenario.form,
            interruptor=self.stop,
            pre_collect_hook=self.stop.begin,
            **options,
        )
        self.model = CountingReference(
            env.num_lanes,
            scenario.lengths,
            limit=options["max_frames_per_traj"],
            set_truncated=options["set_truncated"],
            idles=scenario.layout == IDLING,
        )
        self.rows = env.batch_size
        self.is_fresh = True
        self.rollouts = 0
        self.delivered = 0
        self.given_up = 0

    def expected(self) -> list[list[Frame]] | None:
        """The next episodes; None at the end of the budget."""
        model, options = self.model, self.scenario.options
        while len(model.complete) < self.scenario.count:
            left = -(-(options["total_frames"] - model.frames) // model.lanes)
            if left <= 0:
                return None
            if options["reset_at_each_iter"] and not self.is_fresh:
                model.reset()
            steps = min(self.scenario.steps, left)
            model.collect(min(steps, stop_of(self.scenario.stops, self.rollouts) or steps))
            self.rollouts += 1
            self.is_fresh = False
        taken, model.complete = model.complete[: self.scenario.count], model.complete[self.scenario.count :]
        self.delivered += sum(map(len, taken))
        return taken

    def batch(self, _: None) -> bool:
        expected = self.expected()
        batch = self.collector.next()
        if expected is None:
            assert batch is None
            return False
        assert batch is not None
        assert_episodes(batch, expected, self.scenario)
        self.is_balanced()
        return True

    def is_balanced(self) -> None:
        """Every frame was delivered, given up, or is still held."""
        stats = self.collector.stats()
        held = sum(map(len, (*self.model.open.values(), *self.model.complete)))
        assert stats["frames"] == self.model.frames
        assert stats["pending_frames"] == held
        assert stats["dropped_frames"] == self.model.dropped + self.given_up
        assert self.delivered + stats["dropped_frames"] + stats["pending_frames"] == stats["frames"]

    def reset(self, rows: list[int] | None) -> None:
        self.collector.reset(rows)
        if rows is None:
            self.model.reset()
            self.is_fresh = True
        else:
            size = self.model.lanes // self.rows[0]
            self.model.reset([row * size + lane for row in rows for lane in range(size)])
        stats = self.collector.stats()  # what a reset has cut off is given up when the next batch shows it
        assert self.delivered + stats["dropped_frames"] + stats["pending_frames"] == stats["frames"]

    def seed(self, seed: int) -> None:
        self.collector.set_seed(seed)
        self.model.reset(new_ids=self.model.frames > 0)
        self.given_up += sum(map(len, self.model.complete))
        self.model.complete.clear()
        self.is_fresh = True
        self.is_balanced()


def assert_episodes(batch: TensorDictBase, expected: list[list[Frame]], scenario: Scenario) -> None:
    compact = scenario.options["compact_obs"]
    lengths = [len(episode) for episode in expected]
    if scenario.form == "padded":
        assert batch.shape == (len(expected), max(lengths))
        mask = batch.get(("collector", "mask"))
        assert mask.shape == batch.shape
        assert mask.sum(1).tolist() == lengths
        episodes = [row[:length] for row, length in zip(batch, lengths, strict=True)]
        for row, length in zip(batch, lengths, strict=True):
            assert (row[length:].get(("collector", "traj_ids")) == -1).all()
            assert not any(v.any() for v in row[length:].exclude(("collector", "traj_ids")).values(True, True))
    else:
        assert batch.shape == (sum(lengths),)
        episodes = list(batch.split(lengths))
    for found, wanted in zip(episodes, expected, strict=True):
        assert_holds(found.exclude(("collector", "mask")), [wanted], compact=compact)


@settings(max_examples=80, deadline=None)
@given(scenarios())
def test_episodes_are_those_of_a_plain_simulation(scenario: Scenario) -> None:
    run = Run(scenario)
    for name, argument in scenario.acts:
        if getattr(run, name)(argument) is False:
            break
    if not run.collector.closed:
        while run.batch(None):
            pass
    stats = run.collector.stats()
    assert stats["pending_frames"] == 0
    assert run.delivered + stats["dropped_frames"] == stats["frames"] == run.model.frames


@settings(max_examples=25, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    steps=st.integers(1, 9),
    count=st.integers(1, 6),
)
def test_both_formats_hold_the_same_episodes(layout: str, lengths: list[int], steps: int, count: int) -> None:
    def length(lane: int, episode: int) -> int:
        return lengths[episode % len(lengths)]

    found: dict[str, list[Any]] = {"padded": [], "cat": []}
    for form, check in (("padded", assert_whole_episodes), ("cat", assert_whole_in_a_row)):
        env = LAYOUTS[layout](2, lengths=lengths)
        for batch in Collector(
            env,
            frames_per_batch=steps * env.num_lanes,
            total_frames=60,
            trajs_per_batch=count,
            traj_format=form,
        ):
            found[form] += check(batch, length)
    assert found["padded"] == found["cat"]
    assert len(set(found["cat"])) == len(found["cat"])


def test_an_episode_over_many_batches_is_put_together_once() -> None:
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", counting_cat)
        batches = list(collector)
    assert [len(batch) for batch in batches] == [300, 300]
    assert copied <= 10 * 600  # each level of a TensorDict counts; a copy for every batch would make 90,000


def test_leaving_the_loop_early_leaves_finished_episodes_for_the_next() -> None:
    env = LAYOUTS["one gymnasium env"](1, lengths=2)
    collector = Collector(env, frames_per_batch=20, total_frames=20, trajs_per_batch=1, traj_format="cat")
    for _ in collector:
        break
    rest = list(collector)
    assert [int(batch.get("observation")[0, 1]) for batch in rest] == list(range(1, 10))
    assert collector.stats()["dropped_frames"] == 0


def test_set_seed_gives_up_what_depends_on_the_past() -> None:
    env = LAYOUTS["one gymnasium env"](1, lengths=2)
    collector = Collector(env, frames_per_batch=21, trajs_per_batch=3, traj_format="cat")
    collector.next()
    assert collector.stats()["pending_frames"] == 7 * 2 + 1
    collector.set_seed(0)
    assert collector.stats()["pending_frames"] == 0
    assert collector.stats()["dropped_frames"] == 7 * 2 + 1
    batch = collector.next()
    assert batch is not None
    assert batch.get("observation")[:, 1].tolist() == [11, 11, 12, 12, 13, 13]


def test_an_unfinished_episode_is_counted_as_dropped_at_the_end() -> None:
    env = LAYOUTS["one gymnasium env"](1, lengths=7)
    collector = Collector(env, frames_per_batch=5, total_frames=20, trajs_per_batch=1, traj_format="cat")
    assert [len(batch) for batch in collector] == [7, 7]
    assert collector.stats()["dropped_frames"] == 6
