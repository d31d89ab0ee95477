"""Episodes: whole ones come out, in the order in which they end; other frames are held, or counted as dropped."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from swath.data.episodes import Episodes, find_pieces, padded
from swath.keys import MASK, PADDING_ID, TRAJ_IDS, WORKER_BITS


def batch_of(ids: list[list[int]], done: list[list[int]], first: int = 0) -> TensorDict:
    """Numbered frames."""
    shape = torch.tensor(ids).shape
    numbers = torch.arange(first, first + shape.numel()).view(shape)
    return TensorDict(
        {
            "number": numbers,
            "next": {"done": torch.tensor(done).bool().unsqueeze(-1)},
            "collector": {"traj_ids": torch.tensor(ids)},
        },
        batch_size=shape,
    )


@dataclass
class Episode:
    """The truth of one episode: its frames that were added, and whether they can make a whole one."""

    source: int
    frames: list[int] = field(default_factory=list)
    is_spoilt: bool = False
    is_over: bool = False
    is_taken: bool = False


class Stream:
    """Workers with lanes whose episodes are numbered as collectors number them, beside a plain account of them."""

    def __init__(self, sources: int, lanes: int, lengths: list[int], idles: bool, tells_begin: bool) -> None:
        self.lanes, self.lengths, self.idles, self.tells_begin = lanes, lengths, idles, tells_begin
        self.workers = iter(range(1000))
        self.number = 0
        self.steps, self.expected, self.count = [0] * sources, [0] * sources, [0] * sources
        self.worker = [next(self.workers) for _ in range(sources)]
        self.left = [[0] * lanes for _ in range(sources)]
        self.current = [[PADDING_ID] * lanes for _ in range(sources)]
        self.truth: dict[int, Episode] = {}
        self.ready: list[int] = []
        self.added = 0
        self.taken = 0
        self.episodes = Episodes()

    def begin_episode(self, source: int, lane: int) -> None:
        name = self.worker[source] << WORKER_BITS | self.count[source]
        self.left[source][lane] = self.lengths[(self.count[source] + lane) % len(self.lengths)]
        self.count[source] += 1
        self.current[source][lane] = name
        self.truth[name] = Episode(source)

    def collect(self, source: int, steps: int, is_added: bool) -> None:
        """Make a batch of so many steps, which is added or lost."""
        ids = [[PADDING_ID] * steps for _ in range(self.lanes)]
        done = [[0] * steps for _ in range(self.lanes)]
        first, begin, ending = self.number, self.steps[source], []
        self.number += self.lanes * steps
        for step in range(steps):
            for lane in range(self.lanes):
                name = self.current[source][lane]
                if name == PADDING_ID:
                    self.begin_episode(source, lane)
                    name = self.current[source][lane]
                    if self.idles and begin + step:
                        continue  # the step that resets
                ids[lane][step] = name
                self.left[source][lane] -= 1
                if not self.left[source][lane]:
                    done[lane][step] = 1
                    ending.append((step, name))
                    self.current[source][lane] = PADDING_ID
        self.steps[source] += steps
        if is_added:
            self.account(source, begin, ids, first)
            self.ready += [name for _, name in sorted(ending) if not self.truth[name].is_spoilt]
            batch = batch_of(ids, done, first)
            self.episodes.add(batch, source=source, begin=begin if self.tells_begin else None)
            batch.zero_()  # its memory is used again
        else:
            for name in {name for row in ids for name in row} - {PADDING_ID}:
                self.truth[name].is_spoilt = True
        for _, name in ending:
            self.truth[name].is_over = True

    def account(self, source: int, begin: int, ids: list[list[int]], first: int) -> None:
        """What must be known after this batch."""
        if self.tells_begin and begin != self.expected[source] and begin:
            for row in ids:
                if row[0] != PADDING_ID:
                    self.truth[row[0]].is_spoilt = True
        self.expected[source] = begin + len(ids[0])
        for lane, row in enumerate(ids):
            for step, name in enumerate(row):
                if name != PADDING_ID:
                    self.truth[name].frames.append(first + lane * len(row) + step)
                    self.added += 1
        present = {name for row in ids for name in row}
        if present != {PADDING_ID}:
            for name, episode in self.truth.items():
                is_waiting = bool(episode.frames) and not episode.is_over
                if episode.source == source and name not in present and is_waiting:
                    episode.is_spoilt = True

    def reset(self, source: int, lanes: set[int]) -> None:
        for lane in lanes & set(range(self.lanes)):
            self.current[source][lane] = PADDING_ID

    def restart(self, source: int, is_known: bool) -> None:
        """Another worker takes the place; what the former has begun is not gone on with."""
        self.reset(source, set(range(self.lanes)))
        self.worker[source], self.count[source], self.steps[source] = next(self.workers), 0, 0
        if is_known:
            self.episodes.forget(source)
            self.expected[source] = 0
            self.spoil(source)
        else:
            self.collect(source, 1, is_added=True)

    def spoil(self, source: int | None = None) -> None:
        for episode in self.truth.values():
            if episode.frames and not episode.is_over and source in (None, episode.source):
                episode.is_spoilt = True

    def drop(self) -> None:
        self.episodes.drop()
        self.spoil()

    def save(self) -> None:
        memory = io.BytesIO()
        torch.save(self.episodes.state_dict(), memory)
        memory.seek(0)
        self.episodes = Episodes()
        self.episodes.load_state_dict(torch.load(memory, weights_only=True))

    def take(self, count: int, form: str) -> None:
        count = min(count, self.episodes.ready)
        if not count:
            return
        names, self.ready = self.ready[:count], self.ready[count:]
        wanted = [self.truth[name].frames for name in names]
        assert self.episodes.lengths(count) == [len(frames) for frames in wanted]
        taken = self.episodes.take(count, form)
        if form == "padded":
            mask = taken.get(MASK)
            assert taken.shape == mask.shape == (count, max(map(len, wanted)))
            assert mask.sum(1).tolist() == [len(frames) for frames in wanted]
            assert (taken.get(TRAJ_IDS)[~mask] == PADDING_ID).all()
            taken = taken[mask]
        assert taken.get("number").tolist() == [number for frames in wanted for number in frames]
        assert taken.get(TRAJ_IDS).tolist() == [n for n, frames in zip(names, wanted, strict=True) for _ in frames]
        self.taken += len(taken)
        for name in names:
            self.truth[name].is_taken = True

    def check(self) -> None:
        held = sum(len(e.frames) for e in self.truth.values() if not e.is_spoilt and not e.is_taken)
        assert self.episodes.ready == len(self.ready)
        assert self.episodes.pending_frames == held
        assert self.episodes.dropped == self.added - held - self.taken


def acts(tells_begin: bool) -> Any:
    source, steps = st.integers(0, 1), st.integers(1, 6)
    batch = st.tuples(st.just("collect"), source, steps, st.just(True))
    others = [
        st.tuples(st.just("reset"), source, st.sets(st.integers(0, 2))),
        st.tuples(st.just("take"), st.integers(1, 4), st.sampled_from(["padded", "cat"])),
        st.tuples(st.just("save")),
        st.tuples(st.just("drop")),
        st.tuples(st.just("restart"), source, st.just(True)),
    ]
    if tells_begin:
        others += [
            st.tuples(st.just("collect"), source, steps, st.just(False)),
            st.tuples(st.just("restart"), source, st.just(False)),
        ]
    return st.lists(st.one_of(batch, batch, *others), min_size=1, max_size=25)


@pytest.mark.parametrize("tells_begin", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_episodes_are_those_of_a_plain_account(tells_begin: bool, data: Any) -> None:
    """Over several workers, with resets, lost batches, workers that are replaced, and steps that are padding."""
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    stream = Stream(2, data.draw(st.integers(1, 3)), lengths, data.draw(st.booleans()), tells_begin)
    for name, *arguments in data.draw(acts(tells_begin)):
        getattr(stream, name)(*arguments)
        # What a reset, a lost batch or the end of a worker has cut off is known with the worker's next batch.
        if name != "reset" and (name, arguments[2:]) != ("collect", [False]):
            for source in range(2):
                stream.collect(source, 1, is_added=True)
            stream.check()
    stream.take(len(stream.ready), "cat")
    stream.episodes.clear()
    assert (stream.episodes.pending_frames, stream.episodes.ready) == (0, 0)
    assert stream.episodes.dropped == stream.added - stream.taken


def test_what_was_lost_is_known_with_the_next_batch_and_not_before() -> None:
    episodes = Episodes()
    episodes.add(batch_of([[0, 0, 2], [1, 1, 1]], [[0, 1, 0], [0, 0, 0]]), begin=0)
    assert (episodes.ready, episodes.pending_frames, episodes.dropped) == (1, 6, 0)
    episodes.add(batch_of([[2, 2], [3, 3]], [[0, 1], [0, 0]], 20), begin=5)  # steps 3 and 4 went elsewhere
    assert (episodes.ready, episodes.pending_frames, episodes.dropped) == (1, 2, 8)
    episodes.add(batch_of([[4, 4], [3, 5]], [[0, 1], [1, 0]], 30), begin=7)
    assert (episodes.ready, episodes.pending_frames, episodes.dropped) == (2, 5, 9)
    assert [episodes.take(1, "cat").get("number").tolist() for _ in range(2)] == [[0, 1], [30, 31]]


def test_a_batch_without_frames_says_nothing_of_what_is_running() -> None:
    episodes = Episodes()
    episodes.add(batch_of([[0, 0]], [[0, 0]]), begin=0)
    episodes.add(batch_of([[-1, -1]], [[0, 0]], 10), begin=2)
    episodes.add(batch_of([[0]], [[1]], 20)[:, :0], begin=4)
    episodes.add(batch_of([[0]], [[1]], 20), begin=4)
    assert episodes.take(1, "cat").get("number").tolist() == [0, 1, 20]


def test_a_batch_without_ids_is_refused() -> None:
    with pytest.raises(KeyError, match="track_traj_ids=True"):
        Episodes().add(batch_of([[0]], [[0]]).exclude("collector"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_padding_is_zero_with_the_id_minus_one_outside_the_mask(lengths: list[int]) -> None:
    episodes = [
        batch_of([[name] * length], [[1] * length], 7)[0].set("picture", torch.ones(length, 2, 2, dtype=torch.uint8))
        for name, length in enumerate(lengths)
    ]
    rows = padded(episodes)
    mask = rows.get(MASK)
    assert rows.shape == mask.shape == (len(lengths), max(lengths))
    assert mask.sum(1).tolist() == lengths
    for row, episode, length in zip(rows, episodes, lengths, strict=True):
        assert (row[:length].exclude(MASK) == episode).all()
        assert (row[length:].get(TRAJ_IDS) == PADDING_ID).all()
        assert not row[length:].get("picture").any()
        assert not row[length:].get("number").any()
        assert row.get("picture").dtype == torch.uint8


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_are_those_that_a_walk_along_the_lanes_finds(data: Any) -> None:
    lanes, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 8))

    def frames(element: Any) -> np.ndarray:
        values = data.draw(st.lists(element, min_size=lanes * steps, max_size=lanes * steps))
        return np.array(values).reshape(lanes, steps)

    ids, done, seams, there = (
        data.draw(st.none()) if data.draw(st.booleans()) else frames(element).astype(kind)
        for element, kind in ((st.integers(-1, 2), np.int64), *((st.booleans(), bool),) * 3)
    )
    if all(each is None for each in (ids, done, seams, there)):
        return
    wanted: list[list[int]] = []
    for lane in range(lanes):
        is_open = False
        for step in range(steps):
            is_there = there[lane, step] if there is not None else ids is None or ids[lane, step] >= 0
            is_other = ids is not None and step > 0 and ids[lane, step] != ids[lane, step - 1]
            if is_open and not is_other and not (seams is not None and seams[lane, step]) and is_there:
                wanted[-1][2] += 1
            elif is_there:
                wanted.append([lane, step, step + 1])
            is_open = bool(is_there and not (done is not None and done[lane, step]))
    found = find_pieces(ids=ids, done=done, seams=seams, there=there)
    assert np.stack((found.lane, found.first, found.end), 1).tolist() == wanted
    assert found.name.tolist() == [n if ids is None else ids[lane, a] for n, (lane, a, _) in enumerate(wanted)]
    assert found.is_last.tolist() == [done is not None and bool(done[lane, b - 1]) for lane, _, b in wanted]
