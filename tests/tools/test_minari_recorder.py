"""MinariRecorder: every episode that a collector completes is in the dataset, once and whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDictBase

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv
from swath.errors import ClosedError
from swath.testing import CountingEnv, CountingVectorEnv, counting_envs
from swath.tools import MinariRecorder

minari = pytest.importorskip("minari")

LENGTHS = [[3, 5], [4], [1, 9]]
"""Of three lanes."""

Place = tuple[int, int, int]
"""Lane, episode, step."""


class Witness:
    """Notes the action of every frame that a collector delivers, and hands the batch on."""

    def __init__(self, recorder: MinariRecorder) -> None:
        self.recorder = recorder
        self.actions: dict[Place, int] = {}

    def __call__(self, batch: TensorDictBase) -> None:
        frames = batch[batch["collector", "traj_ids"] >= 0]
        for place, action in zip(frames["observation"].tolist(), frames["action"].argmax(-1).tolist(), strict=True):
            lane, episode, step = map(int, place)
            self.actions[lane, episode, step] = action
        self.recorder(batch)
        batch.zero_()  # whatever the recorder still needs, it must have copied


def assert_recorded(dataset: Any, witness: Witness, finished: set[tuple[int, int]]) -> None:
    """The dataset holds exactly these episodes, each whole, with the actions that were delivered."""
    found = {}
    for episode in dataset:
        seen = episode.observations.astype(int)
        lane, number = seen[0, :2].tolist()
        length = LENGTHS[lane][number % len(LENGTHS[lane])]
        assert seen.tolist() == [[lane, number, step] for step in range(length + 1)]
        assert episode.actions.tolist() == [witness.actions[lane, number, step] for step in range(length)]
        assert episode.rewards.tolist() == list(range(1, length + 1))
        assert episode.terminations.tolist() == [False] * (length - 1) + [True]
        assert not episode.truncations.any()
        assert (lane, number) not in found
        found[lane, number] = length
    assert found.keys() == finished
    assert dataset.total_steps == sum(found.values())


def finished_in(steps: int) -> set[tuple[int, int]]:
    """The episodes that each lane completes in so many steps."""
    found = set()
    for lane, own in enumerate(LENGTHS):
        number, used = 0, own[0]
        while used <= steps:
            found.add((lane, number))
            number += 1
            used += own[number % len(own)]
    return found


MAKERS: dict[str, Callable[[], Any]] = {
    "custom": lambda: CountingEnv((3,), lengths=LENGTHS),
    "two dimensions": lambda: CountingEnv((3, 1), lengths=LENGTHS),
    "serial": lambda: SerialEnv(3, counting_envs(3, lengths=LENGTHS)),
}
FORMS: dict[str, dict[str, Any]] = {
    "frames": {},
    "short batches": {"frames_per_batch": 3},
    "split": {"split_trajs": True},
    "counted": {"max_frames_per_traj": 20},
    "same td": {"return_same_td": True},
    # The hook sees frames as they are collected, whatever is delivered.
    **{
        f"{count} whole, {form}": {"trajs_per_batch": count, "traj_format": form}
        for count in (1, 4)
        for form in ("padded", "cat")
    },
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_every_complete_episode_is_recorded(make: Callable[[], Any], form: dict[str, Any]) -> None:
    env = make()
    with MinariRecorder("counting/frames-v0", env, episodes_per_write=7) as recorder:
        witness = Witness(recorder)
        options = {"frames_per_batch": 21, "total_frames": 3 * 49, **form}
        for _ in Collector(env, post_collect_hook=witness, **options):
            pass
    assert_recorded(minari.load_dataset("counting/frames-v0"), witness, finished_in(49))
    running = sum(1 for lane in range(3) if not _ends_at(lane, 49))
    assert recorder.stats() == {
        "episodes": len(finished_in(49)),
        "frames": recorder.dataset.total_steps,
        "headless_episodes": 0,
        "unfinished_episodes": running,
    }


def _ends_at(lane: int, steps: int) -> bool:
    return sum(LENGTHS[lane][n % len(LENGTHS[lane])] for at, n in finished_in(steps) if at == lane) == steps


def test_lanes_that_rest_between_episodes() -> None:
    env = GymEnv(CountingVectorEnv(3, lengths=LENGTHS))
    with MinariRecorder("counting/idle-v0", env) as recorder:
        witness = Witness(recorder)
        for _ in Collector(env, frames_per_batch=15, total_frames=90, post_collect_hook=witness):
            pass
    ended = {
        (lane, number)
        for lane, number, step in witness.actions
        if step == LENGTHS[lane][number % len(LENGTHS[lane])] - 1
    }
    assert_recorded(recorder.dataset, witness, ended)


def test_cartpole_can_be_recovered_and_tracked() -> None:
    env = GymEnv("CartPole-v1", num_envs=2)
    with MinariRecorder("cartpole/random-v0", env, track=[("collector", "traj_ids")], author="me") as recorder:
        for _ in Collector(env, frames_per_batch=50, total_frames=400, post_collect_hook=recorder):
            pass
    dataset = minari.load_dataset("cartpole/random-v0")
    assert dataset.recover_environment().spec.id == "CartPole-v1"
    for episode in dataset:
        assert len(set(episode.infos["collector"]["traj_ids"].tolist())) == 1
        assert set(episode.actions.tolist()) <= {0, 1}


# -- what is cut off -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_episodes_that_a_reset_cuts_off_are_let_go(keep: bool) -> None:
    env = CountingEnv((2,), lengths=[3, 100])
    with MinariRecorder("counting/cut-v0", env, keep_unfinished=keep) as recorder:
        collector = Collector(
            env, frames_per_batch=20, total_frames=100, reset_at_each_iter=True, post_collect_hook=recorder
        )
        for _ in collector:
            assert recorder._episodes.pending_frames <= 20, "what was cut off is not waited for"
    lengths = sorted(len(episode) for episode in recorder.dataset)
    found = recorder.stats()
    if keep:
        assert sum(lengths) == 100
        assert found["unfinished_episodes"] == 0
        for episode in recorder.dataset:
            assert (episode.terminations | episode.truncations).tolist() == [False] * (len(episode) - 1) + [True]
            assert episode.truncations[-1] == (len(episode) != 3)
    else:
        assert set(lengths) == {3}
        assert found["unfinished_episodes"] > 0


def test_episodes_of_other_workers_are_waited_for() -> None:
    envs = [CountingEnv(lengths=6), CountingEnv(lengths=6)]
    with MinariRecorder("counting/workers-v0", envs[0]) as recorder:
        streams = [
            Collector(env, frames_per_batch=4, total_frames=12, worker_idx=worker, post_collect_hook=recorder)
            for worker, env in enumerate(envs)
        ]
        for _ in range(3):
            for stream in streams:
                stream.next()
    assert [len(episode) for episode in recorder.dataset] == [6] * 4
    assert recorder.stats()["unfinished_episodes"] == 0


def test_one_that_comes_late_sees_what_has_no_beginning() -> None:
    env = CountingEnv(lengths=6)
    recorder = MinariRecorder("counting/late-v0", env)
    with Collector(env, frames_per_batch=4, max_frames_per_traj=100) as collector:
        collector.next()
        collector.set_post_collect_hook(recorder)
        for _ in range(3):
            collector.next()
    dataset = recorder.close()
    assert [episode.observations[:, 2].tolist() for episode in dataset] == [list(range(7))]
    assert recorder.stats()["headless_episodes"] == 1
    assert recorder.stats()["unfinished_episodes"] == 1


def test_an_error_leaves_what_was_complete() -> None:
    env = CountingEnv(lengths=3)

    def recording() -> None:
        with MinariRecorder("counting/error-v0", env) as recorder:
            for _ in Collector(env, frames_per_batch=10, total_frames=100, post_collect_hook=recorder):
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        recording()
    assert minari.load_dataset("counting/error-v0").total_episodes == 3


def test_no_complete_episode_is_no_dataset(datasets: Path) -> None:
    env = CountingEnv(lengths=1000)
    recorder = MinariRecorder("counting/none-v0", env)
    Collector(env, frames_per_batch=10, post_collect_hook=recorder).next()
    with pytest.warns(UserWarning, match="No episode was complete"):
        assert recorder.close() is None
    assert recorder.close() is None, "and it is told once"
    assert not list(datasets.iterdir())


# -- mistakes ------------------------------------------------------------------------------------------------------


def test_batches_without_ids_are_refused() -> None:
    env = CountingEnv()
    recorder = MinariRecorder("counting/ids-v0", env)
    with pytest.raises(KeyError, match="track_traj_ids=True"):
        Collector(env, frames_per_batch=10, track_traj_ids=False, post_collect_hook=recorder).next()


def test_a_closed_recorder_takes_nothing_more() -> None:
    env = CountingEnv(lengths=2)
    with MinariRecorder("counting/closed-v0", env) as recorder:
        Collector(env, frames_per_batch=10, post_collect_hook=recorder).next()
    with pytest.raises(ClosedError, match="make a new one"):
        Collector(env, frames_per_batch=10, post_collect_hook=recorder).next()
