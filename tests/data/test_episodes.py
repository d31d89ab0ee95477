"""Episodes from frames that lie in pieces: nothing false is given, and nothing is missing that is surely complete."""

from __future__ import annotations

import gc
import threading
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from swath.data import LazyTensorStorage, ListStorage, NothingToSampleError, ReplayBuffer
from swath.data.contents import Contents
from swath.data.episodes import NEW, Episodes
from swath.data.stored_episodes import episodes_in, episodes_of, flags_of
from swath.data.stretches import Chunk

Step = tuple[int, int]
"""The episode that a frame belongs to, and its step in it."""


def frames_of(steps: list[Step], lengths: dict[int, int], **extras: Any) -> TensorDict:
    """Frames with ids; an episode ends by itself if its number is even."""
    ids = torch.tensor([name for name, _ in steps])
    over = torch.tensor([step == lengths[name] - 1 for name, step in steps]).unsqueeze(-1)
    is_even = (ids % 2 == 0).unsqueeze(-1)
    return TensorDict(
        {
            "step": torch.tensor([step for _, step in steps]),
            "collector": {"traj_ids": ids},
            "next": {"done": over, "terminated": over & is_even, "truncated": over & ~is_even},
            **extras,
        },
        batch_size=[len(steps)],
    )


def told(episodes: Any) -> list[tuple[int, list[int]]]:
    """Id and steps of every episode."""
    return [(int(e["collector", "traj_ids"][0]), e["step"].tolist()) for e in episodes]


def whole(name: int, lengths: dict[int, int]) -> tuple[int, list[int]]:
    return name, list(range(lengths[name]))


def ring(lanes: list[list[int]], per_batch: int) -> tuple[list[Step], list[bool], dict[int, int]]:
    """What several lanes write one batch after the other, lane after lane, with the seams between them.

    Episodes are numbered in the order in which they begin, as collectors number them.
    """
    begun = sorted((sum(own[:nth]), lane, nth) for lane, own in enumerate(lanes) for nth in range(len(own)))
    names = {(lane, nth): name for name, (_, lane, nth) in enumerate(begun)}
    lengths = {name: lanes[lane][nth] for (lane, nth), name in names.items()}
    columns = [
        [(names[lane, nth], step) for nth, length in enumerate(own) for step in range(length)]
        for lane, own in enumerate(lanes)
    ]
    steps: list[Step] = []
    seams: list[bool] = []
    for begin in range(0, max(map(len, columns)), per_batch):
        for column in columns:
            part = column[begin : begin + per_batch]
            steps += part
            seams += [len(columns) > 1 and at == 0 for at in range(len(part))]
    return steps, seams, lengths


LANES = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=8), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(LANES, st.integers(1, 7))
def test_all_episodes_are_found_where_no_frame_is_missing(lanes: list[list[int]], per_batch: int) -> None:
    steps, seams, lengths = ring(lanes, per_batch)
    found = told(episodes_of(frames_of(steps, lengths), np.array(seams), whole=True))
    assert sorted(found) == [whole(name, lengths) for name in lengths]
    ends = [steps.index((name, length - 1)) for name, length in lengths.items()]
    assert [name for name, _ in found] == [name for _, name in sorted(zip(ends, lengths, strict=True))]


@settings(max_examples=200, deadline=None)
@given(LANES, st.integers(1, 7), st.integers(0, 30), st.integers(0, 30))
def test_what_is_overwritten_or_still_running_makes_no_episode(
    lanes: list[list[int]], per_batch: int, gone: int, missing: int
) -> None:
    steps, seams, lengths = ring(lanes, per_batch)
    steps, seams = steps[gone : len(steps) - missing], seams[gone : len(seams) - missing]
    if not steps:
        return
    found = told(episodes_of(frames_of(steps, lengths), np.array(seams)))
    assert all(episode == whole(episode[0], lengths) for episode in found)
    sure = {
        name
        for at, (name, step) in enumerate(steps)
        if at and step == 0 and not seams[at] and (name, lengths[name] - 1) in steps
    }
    assert {name for name, _ in found} >= sure


@settings(max_examples=300, deadline=None)
@given(LANES, st.integers(1, 7), st.integers(0, 30))
def test_lanes_put_in_a_row_without_telling_are_noticed(lanes: list[list[int]], per_batch: int, gone: int) -> None:
    steps, _, lengths = ring(lanes, per_batch)
    steps = steps[gone:]
    names = [name for name, _ in steps]
    assume(names and names != sorted(names))  # otherwise nothing tells them from one lane
    found = told(episodes_of(frames_of(steps, lengths)))
    assert all(episode == whole(episode[0], lengths) for episode in found)


def test_little_is_lost_of_a_ring_of_lanes_without_seams() -> None:
    steps, _, lengths = ring([[7, 5] * 20, [3, 9] * 20, [11] * 20], per_batch=10)
    gone = 100  # three batches of thirty frames, and a lane of the fourth
    found = told(episodes_of(frames_of(steps[gone:], lengths)))
    assert all(episode == whole(episode[0], lengths) for episode in found)
    there = {name for name, step in steps[gone:] if step == 0}
    assert len(there) - len(found) < 15
    assert max(there) in {name for name, _ in found}


def test_is_init_and_step_count_tell_beginnings_better() -> None:
    lengths = {0: 3, 1: 2}
    steps = [(0, 0), (0, 1), (0, 2), (1, 1)]
    counts = torch.tensor([step for _, step in steps]).unsqueeze(-1)
    for extra in ({"is_init": counts == 0}, {"step_count": counts}):
        frames = frames_of(steps, lengths, **extra)
        for seams in (None, np.array([True, False, False, True])):
            for is_whole in (False, True):
                assert told(episodes_of(frames, seams, whole=is_whole)) == [(0, [0, 1, 2])]


def test_headless_and_unfinished_ones_on_request() -> None:
    lengths = {3: 4, 4: 2, 5: 9}
    frames = frames_of([(3, 2), (3, 3), (4, 0), (4, 1), (5, 0), (5, 1)], lengths)
    assert told(episodes_of(frames)) == [(4, [0, 1])]
    assert told(episodes_of(frames, keep_headless=True)) == [(3, [2, 3]), (4, [0, 1])]
    *_, cut = episodes_of(frames, keep_unfinished=True)
    assert told([cut]) == [(5, [0, 1])]
    assert cut["next", "truncated"].tolist() == cut["next", "done"].tolist() == [[False], [True]]
    assert not cut["next", "terminated"].any()
    assert not frames["next", "done"][-1], "the frames themselves are as they were"


def test_without_ids_nothing_is_joined() -> None:
    steps = [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    frames = frames_of(steps, {0: 2, 1: 2, 2: 3, 3: 1})
    numbers = frames["collector", "traj_ids"]
    del frames["collector"]
    frames["number"] = numbers
    seams = np.array([False, False, False, False, False, True])
    assert [e["number"].tolist() for e in episodes_of(frames, seams)] == [[1, 1]]
    assert [e["number"].tolist() for e in episodes_of(frames, seams, whole=True)] == [[0], [1, 1], [3]]


def test_one_episode_is_fetched_at_a_time() -> None:
    lengths = {3: 4, 4: 2, 5: 9}
    frames = frames_of([(3, 2), (4, 0), (3, 3), (4, 1), (5, 0), (5, 1)], lengths)
    asked = []

    def fetch(places: np.ndarray) -> TensorDictBase:
        asked.append(places.tolist())
        return frames[torch.from_numpy(places)]

    options: dict[str, Any] = {"keep_headless": True, "keep_unfinished": True}
    found = list(episodes_of(frames.exclude("step"), fetch=fetch, **options))
    assert told(found) == [(3, [2, 3]), (4, [0, 1]), (5, [0, 1])]
    assert asked == [[0, 2], [1, 3], [4, 5]]
    assert found[-1]["next", "truncated"].tolist() == [[False], [True]]


def contents_of(frames: TensorDict, seams: list[bool], capacity: int, lost: set[int]) -> Contents:
    """One lane of a ring into which `frames` were written, from position 0 on; some of them were lost."""
    end = len(frames)
    first = max(0, end - capacity)
    rows = np.zeros(capacity, np.int64)
    stamps, here = np.zeros(capacity, np.int64), np.arange(first, end)
    rows[here % capacity] = here
    stamps[here % capacity] = [0 if position in lost else position + 1 for position in here]

    def entry(key: Any, index: np.ndarray) -> np.ndarray:
        return frames[key].numpy()[rows][index]

    return Contents(1, capacity, first, end, stamps, np.array(seams)[rows], entry)


@settings(max_examples=200, deadline=None)
@given(LANES, st.integers(1, 7), st.integers(1, 60), st.sets(st.integers(0, 40), max_size=2))
def test_episodes_in_a_ring_with_holes_are_whole(
    lanes: list[list[int]], per_batch: int, capacity: int, lost: set[int]
) -> None:
    steps, seams, lengths = ring(lanes, per_batch)
    frames = frames_of(steps, lengths)
    contents = contents_of(frames, seams, capacity, lost)

    def read(index: np.ndarray) -> TensorDictBase:
        assert contents.holds(index).all()
        return frames[torch.from_numpy(contents.positions(index))]

    found = told(episodes_in(contents, read))
    assert all(episode == whole(episode[0], lengths) for episode in found)
    assert len({name for name, _ in found}) == len(found)
    if capacity >= len(steps) and not lost & set(range(len(steps))):
        assert sorted(found) == [whole(name, lengths) for name in lengths]


def test_each_lane_of_a_buffer_is_a_run() -> None:
    frames = frames_of([(0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0), (4, 0)], {0: 2, 1: 3, 2: 2, 3: 1, 4: 1})
    # Two lanes of four rows, turned by one: positions 1 to 4 lie in rows 1, 2, 3, 0.
    turned = torch.tensor([3, 0, 1, 2, 7, 4, 5, 6])
    stamps = np.array([5, 2, 3, 4])
    ring = frames[turned]
    contents = Contents(2, 4, 1, 5, stamps, np.zeros(8, bool), lambda key, index: ring[key].numpy()[index])
    found = told(episodes_in(contents, lambda index: ring[torch.from_numpy(index)]))
    assert sorted(found) == [(1, [0, 1, 2]), (3, [0]), (4, [0])]
    found = told(episodes_in(contents, lambda index: ring[torch.from_numpy(index)], keep_headless=True))
    assert sorted(found) == [(0, [1]), (1, [0, 1, 2]), (2, [0, 1]), (3, [0]), (4, [0])]


def test_padding_is_no_frame() -> None:
    frames = frames_of([(0, 0), (0, 1), (-1, 0), (1, 0)], {0: 2, -1: 1, 1: 1})
    assert told(episodes_of(frames, whole=True)) == [(0, [0, 1]), (1, [0])]


def test_an_id_may_be_used_again_after_its_end() -> None:
    frames = frames_of([(0, 0), (0, 1), (0, 0), (0, 1)], {0: 2})
    assert told(episodes_of(frames, whole=True)) == [(0, [0, 1])] * 2


@pytest.mark.parametrize("left", [("done",), *combinations(("done", "terminated", "truncated"), 2)])
def test_flags_from_whichever_there_are(left: tuple[str, ...]) -> None:
    frames: TensorDictBase = frames_of([(0, 0), (0, 1), (1, 0)], {0: 2, 1: 1})
    only = frames.select(*[("next", key) for key in left])
    terminated, truncated = flags_of(only)
    assert (terminated | truncated).tolist() == [False, True, True]
    if left != ("done",):
        assert truncated.tolist() == [False, False, True]


def test_no_flags_are_an_error() -> None:
    with pytest.raises(KeyError, match="none of the flags"):
        list(episodes_of(TensorDict({"step": torch.arange(3)}, batch_size=[3])))


def test_a_buffer_gives_its_complete_episodes_while_nobody_writes() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    with pytest.raises(NothingToSampleError, match="no episode"), buffer.episodes():
        pass
    lengths = {0: 5, 1: 3, 2: 4}
    buffer.extend(frames_of([(name, step) for name in (0, 1) for step in range(lengths[name])], lengths))
    buffer.extend(frames_of([(2, 0), (2, 1)], lengths))  # over the first frames of the first one
    writer = threading.Thread(target=buffer.extend, args=(frames_of([(2, 2), (2, 3)], lengths),))
    with buffer.episodes() as episodes:
        writer.start()
        writer.join(0.2)
        assert writer.is_alive(), "it waits"
        assert told(episodes) == [whole(1, lengths)]
    writer.join(10)
    with buffer.episodes() as episodes:
        assert told(episodes) == [whole(1, lengths), whole(2, lengths)]
    with buffer.episodes(keep_headless=True) as episodes:
        assert told(episodes) == [(0, [4]), whole(1, lengths), whole(2, lengths)]
    with pytest.raises(TypeError, match="LazyTensorStorage"), ReplayBuffer(storage=ListStorage(3)).episodes():
        pass


def test_batches_are_not_kept_for_the_one_episode_that_goes_on() -> None:
    episodes, batches, lanes, steps = Episodes(), 60, 8, 10
    lengths = {0: steps * batches, **dict.fromkeys(range(1, 1000), steps)}
    for number in range(batches):
        own = [[(0, step) for step in range(number * steps, (number + 1) * steps)]]
        own += [[(number * lanes + lane, step) for step in range(steps)] for lane in range(1, lanes)]
        episodes.add(torch.stack([frames_of(row, lengths) for row in own]), begin=number * steps)
        while episodes.ready:
            name, taken = told([episodes.take(1, "cat")])[0]
            assert taken == whole(name, lengths)[1]
        if number % 20 == 19:
            held = sum(one.size for one in gc.get_objects() if type(one) is Chunk)
            assert held <= (number + 1) * steps + (NEW + 1) * lanes * steps
    assert episodes.pending_frames == 0


@pytest.mark.parametrize("side", [0, 2, 20])
def test_episodes_are_whole_and_padded_whichever_batches_they_lie_in(side: int) -> None:
    episodes, lanes, steps = Episodes(), [[3, 40, 2] * 8, [7] * 60, [1, 90] * 4], 10
    rows, _, lengths = ring([[*own, 1000] for own in lanes], steps)
    found = []
    for begin in range(0, 300, steps):
        frames = [frames_of(rows[3 * begin + at : 3 * begin + at + steps], lengths) for at in (0, steps, 2 * steps)]
        batch = torch.stack(frames)
        episodes.add(batch.set("picture", batch["step"][..., None, None].expand(3, steps, side, side)), begin=begin)
        while episodes.ready >= 4:
            taken = episodes.take(4, "padded")
            mask = taken["collector", "mask"]
            assert not taken["step"][~mask].any()
            assert (taken["collector", "traj_ids"][~mask] == -1).all()
            assert (taken["picture"] == taken["step"][..., None, None]).all()
            found += told(row[here] for row, here in zip(taken, mask, strict=True))
    assert found
    assert found == [whole(name, lengths) for name, _ in found]
