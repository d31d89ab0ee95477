"""Slices: none crosses a boundary, and all that are possible come."""

from __future__ import annotations

import copy
import math
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from buffer_tools import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import DONE, IDS, TERMINATED, TRUNCATED, Ring, operations, play, rings

from swath.data.contents import EMPTY
from swath.data.runs import RunFinder, Signs
from swath.data.samplers import Draw
from swath.data.slices import SliceSampler, SliceSamplerWithoutReplacement
from swath.errors import NothingToSampleError

MASK = ("collector", "mask")
Slice = tuple[int, int, int]
"""Lane, position of the first frame, length."""


def episodes(*lengths: int, capacity: int = 100) -> Ring:
    """One lane with episodes of these lengths."""
    ring = Ring(1, capacity)
    for length in lengths:
        writer = ring.writers[0]
        writer.length = length
        ring.write(length)
    return ring


def slices(ring: Ring, drawn: Draw) -> Iterator[Slice]:
    """The slices of a batch, which their last frames tell, after a look at every frame."""
    assert ring.contents().holds(drawn.index).all()
    real = drawn.overrides.get(MASK, np.ones(len(drawn.index), bool))
    lasts = np.flatnonzero(drawn.overrides[TRUNCATED][:, 0])
    assert not len(lasts) or lasts[-1] <= np.flatnonzero(real)[-1]
    begin = 0
    for last in lasts:
        index = drawn.index[begin : last + 1]
        env, episode, step = ring.truth[index].T
        assert (env == env[0]).all()
        assert (episode == episode[0]).all()
        assert (np.diff(step) == 1).all()
        assert env[0] >= 0
        positions = ring.contents().positions(index)
        assert (np.diff(positions) == 1).all()
        assert len(set(index // ring.capacity)) == 1
        yield int(index[0] // ring.capacity), int(positions[0]), len(index)
        begin = last + 1
        while begin < len(real) and not real[begin]:
            assert drawn.index[begin] == drawn.index[last]
            begin += 1
    assert begin == len(drawn.index)


def possible(ring: Ring, length: int, strict: bool) -> set[Slice]:
    """All slices that there can be, without span."""
    found = set()
    for lane, begin, count in ring.runs():
        if count >= length:
            found |= {(lane, begin + start, length) for start in range(count - length + 1)}
        elif not strict:
            found.add((lane, begin, count))
    return found


@settings(max_examples=300, deadline=None)
@given(ring=rings(), happenings=operations(), hidden=st.sampled_from([None, IDS, DONE]))
def test_runs_are_those_found_by_looking_at_every_frame(
    ring: Ring, happenings: list[tuple[str, int, int]], hidden: Any
) -> None:
    """With seams, one of ids and flags is enough, but flags alone do not tell padding."""
    ring.hidden = hidden
    if hidden == IDS:
        happenings = [each for each in happenings if each[0] != "pad"]
    finder = RunFinder(Signs())
    for _ in play(ring, happenings):
        contents = ring.contents()
        if not contents.rows:
            continue
        runs = finder.find(contents)
        assert list(zip(runs.lane, runs.begin, runs.length, strict=True)) == ring.runs()
        assert finder.find(contents) is runs


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_runs_are_the_same_however_many_rows_are_looked_at_in_one_go(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swath.data.runs._CHUNK", rows)
    ring = Ring(2, 40)
    for _ in range(3):
        ring.write(19)
        ring.lose(2)
        ring.pad(3)
    runs = RunFinder(Signs()).find(ring.contents())
    assert list(zip(runs.lane, runs.begin, runs.length, strict=True)) == ring.runs()


@settings(max_examples=300, deadline=None)
@given(
    ring=rings(),
    happenings=operations(),
    length=st.integers(1, 6),
    strict=st.booleans(),
    pad=st.booleans(),
    span=st.sampled_from([False, True, 1, (2, False), (False, True)]),
    once=st.booleans(),
)
def test_no_slice_crosses_a_boundary(
    ring: Ring, happenings: list[tuple[str, int, int]], length: int, strict: bool, pad: bool, span: Any, once: bool
) -> None:
    pad = pad and not strict
    kind = SliceSamplerWithoutReplacement if once else SliceSampler
    sampler = kind(slice_len=length, strict_length=strict, pad_output=pad, span=span)
    for _ in play(ring, happenings):
        runs = ring.runs()
        if not any(count >= length or not strict for _, _, count in runs):
            with pytest.raises(NothingToSampleError):
                sampler.draw(ring.contents(), 3 * length, seeded())
            continue
        drawn = sampler.draw(ring.contents(), 3 * length, seeded())
        found = list(slices(ring, drawn))
        assert 1 <= len(found) <= 3
        assert once or len(found) == 3
        if not span:
            assert set(found) <= possible(ring, length, strict)
        for lane, begin, count in found:  # the slices are within a run, and strict ones within a long one
            assert any(
                lane == lane_of and first <= begin and begin + count <= first + many and (many >= length or not strict)
                for lane_of, first, many in runs
            )
        if pad:
            assert len(drawn.index) == len(found) * length
            assert drawn.overrides[MASK].sum() == sum(count for _, _, count in found)


@settings(max_examples=60, deadline=None)
@given(ring=rings(), happenings=operations(), length=st.integers(1, 4), strict=st.booleans())
def test_every_slice_that_is_possible_can_come(
    ring: Ring, happenings: list[tuple[str, int, int]], length: int, strict: bool
) -> None:
    for _ in play(ring, happenings):
        pass
    wanted = possible(ring, length, strict)
    if not wanted:
        return
    sampler = SliceSampler(slice_len=length, strict_length=strict)
    # The rarest has a chance of 1 in runs * places: to miss it has one of exp(-40).
    draws = 40 * len(ring.runs()) * max(count for _, _, count in ring.runs())
    assert set(slices(ring, sampler.draw(ring.contents(), length * draws, seeded()))) == wanted


def test_runs_are_uniform_and_then_places() -> None:
    ring = episodes(10, 4, 7, 3)
    drawn = SliceSampler(slice_len=4).draw(ring.contents(), 4 * 60_000, seeded())
    counts = Counter(slices(ring, drawn))
    runs = [(0, 10), (10, 4), (14, 7)]
    expected = {(0, begin + start, 4): 20_000 / (length - 3) for begin, length in runs for start in range(length - 3)}
    assert counts.keys() == expected.keys()
    chi_square = sum((counts[each] - expected[each]) ** 2 / expected[each] for each in expected)
    freedom = len(expected) - 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("span", "places"),
    [
        (False, {(0, 4), (1, 4)}),
        (True, {(0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (2, 3), (3, 2), (4, 1)}),
        (1, {(0, 3), (0, 4), (1, 4), (2, 3)}),
        ((2, False), {(0, 2), (0, 3), (0, 4), (1, 4)}),
        ((False, True), {(0, 4), (1, 4), (2, 3), (3, 2), (4, 1)}),
        ([False, True], {(0, 4), (1, 4), (2, 3), (3, 2), (4, 1)}),
        (99, {(0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (2, 3), (3, 2), (4, 1)}),
    ],
)
def test_slices_may_stick_out_by_the_span(span: Any, places: set[tuple[int, int]]) -> None:
    ring = episodes(5)
    drawn = SliceSampler(slice_len=4, span=span).draw(ring.contents(), 4 * 8000, seeded())
    counts = Counter((begin, length) for _, begin, length in slices(ring, drawn))
    assert counts.keys() == places
    assert all(abs(count - 8000 / len(places)) < 5 * math.sqrt(8000 / len(places)) for count in counts.values())


def test_a_run_goes_on_over_the_end_of_the_memory_but_not_from_the_newest_to_the_oldest() -> None:
    ring = Ring(1, 10)
    ring.writers[0].length = 100
    ring.write(14)  # the ring holds steps 4 to 13; the newest lies in row 3
    drawn = SliceSampler(slice_len=10).draw(ring.contents(), 10, seeded())
    assert drawn.index.tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]


def test_a_run_whose_head_is_overwritten_gets_shorter() -> None:
    ring = episodes(6, 4, capacity=10)
    sampler = SliceSampler(slice_len=3, strict_length=True)
    sampler.draw(ring.contents(), 3, seeded())
    ring.writers[0].length = 50
    ring.write(4)  # of the first episode, two frames are left
    found = set(slices(ring, sampler.draw(ring.contents(), 3 * 500, seeded())))
    assert found == {(0, 6, 3), (0, 7, 3), (0, 10, 3), (0, 11, 3)}


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
def test_frames_that_vanish_during_a_draw_are_not_in_it(kind: type[SliceSampler]) -> None:
    ring = episodes(6, 4, capacity=10)
    sampler = kind(slice_len=2)
    sampler.draw(ring.contents(), 2, seeded())
    ring.reserve(3, told=False)
    for seed in range(20):
        assert all(begin >= 3 for _, begin, _ in slices(ring, sampler.draw(ring.contents(), 4, seeded(seed))))
    ring.reserve(10, told=False)
    with pytest.raises(NothingToSampleError):
        sampler.draw(ring.contents(), 4, seeded())


def test_flags_are_written_where_slices_begin_and_end() -> None:
    ring = episodes(3, 5)  # the second episode terminates
    sampler = SliceSampler(slice_len=3)
    for seed in range(10):
        drawn = sampler.draw(ring.contents(), 6, seeded(seed))
        truncated, done, init = (drawn.overrides[key] for key in (TRUNCATED, DONE, "is_init"))
        assert truncated.shape == done.shape == init.shape == (6, 1)
        assert truncated.dtype == done.dtype == init.dtype == bool
        assert truncated.reshape(2, 3).tolist() == done.reshape(2, 3).tolist() == [[False, False, True]] * 2
        assert init.reshape(2, 3).tolist() == [[True, False, False]] * 2
        assert set(drawn.overrides) == {TRUNCATED, DONE, "is_init"}  # what is terminated stays so


@pytest.mark.parametrize("stored", [True, False])
def test_flags_are_told_beside_the_batch_as_well(stored: bool) -> None:
    ring = episodes(3, 5)
    if not stored:
        ring.columns = {"episode": ring.columns[IDS]}
    drawn = SliceSampler(slice_len=2).draw(ring.contents(), 60, seeded())
    assert set(drawn.info) == {TRUNCATED, DONE, TERMINATED, *(["is_init"] if stored else [])}
    for key, flags in drawn.overrides.items():
        assert np.array_equal(drawn.info[key], flags)
    assert drawn.overrides[TRUNCATED][:, 0].tolist() == drawn.overrides[DONE][:, 0].tolist() == [False, True] * 30
    ends = drawn.index == 7  # the second episode terminates
    assert drawn.info[TERMINATED][:, 0].tolist() == (ends & stored).tolist()
    assert ends.any()
    assert drawn.info[TERMINATED].shape == (60, 1)
    assert (TERMINATED in drawn.overrides) is not stored, "what the buffer has not is added"


def test_flags_have_the_shape_of_their_entry() -> None:
    ring = episodes(3, 5)
    ring.columns = {key: column[:, 0] if column.ndim == 2 else column for key, column in ring.columns.items()}
    drawn = SliceSampler(slice_len=3).draw(ring.contents(), 3, seeded())
    assert {key: flags.shape for key, flags in drawn.overrides.items()} == dict.fromkeys(
        (TRUNCATED, DONE, "is_init"), (3,)
    )


def test_flags_stay_as_they_are_if_nobody_wants_them() -> None:
    ring = episodes(3, 5)
    drawn = SliceSampler(slice_len=3, truncated_key=None, init_key=None).draw(ring.contents(), 3, seeded())
    assert not drawn.overrides
    assert not drawn.info


def test_short_slices_are_filled_up_with_their_last_frame() -> None:
    ring = episodes(2)
    drawn = SliceSampler(slice_len=4, strict_length=False, pad_output=True).draw(ring.contents(), 8, seeded())
    assert drawn.index.tolist() == [0, 1, 1, 1] * 2
    assert drawn.info[MASK].tolist() == [True, True, False, False] * 2
    assert drawn.overrides[MASK].tolist() == [True, True, False, False] * 2
    assert drawn.overrides[TRUNCATED][:, 0].tolist() == [False, True, False, False] * 2
    assert drawn.overrides["is_init"][:, 0].tolist() == [True, False, False, False] * 2


def test_the_number_of_slices_can_be_given_instead_of_their_length() -> None:
    ring = episodes(20)
    assert len(list(slices(ring, SliceSampler(num_slices=4).draw(ring.contents(), 12, seeded())))) == 4


def starts(ring: Ring, **options: Any) -> set[int]:
    """Where slices of three frames begin."""
    drawn = SliceSampler(slice_len=3, **options).draw(ring.contents(), 3 * 200, seeded())
    return set(drawn.index[::3].tolist())


@pytest.mark.parametrize("missing", [IDS, DONE])
def test_ids_and_flags_both_count(missing: Any) -> None:
    """Where only one of them tells, a run ends all the same."""
    ring = episodes(4, 4)
    ring.columns[missing][:] = 0
    assert starts(ring) == {0, 1, 4, 5}


def test_with_ids_asked_for_flags_do_not_count() -> None:
    """Seams do: what another env wrote is another trajectory."""
    ring = episodes(4, 4)
    ring.columns["id"] = np.zeros(100, np.int64)
    ring.columns["over"] = np.arange(100) == 5
    assert starts(ring, traj_key="id") == {0, 1, 2, 3, 4, 5}
    assert starts(ring, traj_key="id", end_key="over") == {0, 1, 2, 3}
    assert starts(ring, traj_key="id", end_keys=["over", DONE]) == {0, 1}
    ring.seams[4] = True
    assert starts(ring, traj_key="id") == {0, 1, 4, 5}


@pytest.mark.parametrize("options", [{}, {"end_key": "over"}])
def test_flags_tell_trajectories_apart_where_the_ids_asked_for_do_not_exist(options: dict[str, Any]) -> None:
    ring = episodes(4, 4)
    ring.columns["over"] = ring.columns[DONE] if options else np.zeros((100, 1), bool)
    ring.hidden = DONE if options else IDS
    assert starts(ring, traj_key="id", **options) == {0, 1, 4, 5}


def test_any_of_several_flags_ends_a_run() -> None:
    ring = episodes(4, 4, 4)
    columns = ring.columns
    ring.columns = {"a": columns[TRUNCATED], "b": columns[TERMINATED], TRUNCATED: columns[TRUNCATED]}
    assert starts(ring, end_keys=["a", "b", "c"]) == {0, 1, 4, 5, 8, 9}


@pytest.mark.parametrize("name", ["ends", "trajectories"])
@pytest.mark.parametrize("full", [True, False])
def test_boundaries_can_be_given_as_arrays(name: str, full: bool) -> None:
    ring = episodes(4, 4, capacity=8 if full else 20)
    array = {"ends": ring.columns[DONE][:8, 0], "trajectories": ring.columns[IDS][:8]}[name]
    ring.columns = {}
    assert starts(ring, cache_values=True, **{name: torch.as_tensor(array)}) == {0, 1, 4, 5}
    with pytest.raises(ValueError, match=f"`{name}` must have an element for each frame.*got 7"):
        starts(ring, cache_values=True, **{name: torch.as_tensor(array[:7])})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"traj_key": "id"}, r"no entry 'id' or \('next', 'done'\).*`traj_key` or `end_key`"),
        ({"traj_key": "id", "end_key": "over"}, "no entry 'over'.*`end_key`"),
        ({"end_key": ("next", "over")}, r"no entry \('next', 'over'\).*`end_key`"),
        ({"end_keys": ["a", "b"]}, "no entry 'a' or 'b'.*`end_key`"),
        ({}, "cannot be told apart"),
    ],
)
def test_something_must_tell_trajectories_apart(options: dict[str, Any], words: str) -> None:
    ring = episodes(5)
    ring.hidden = DONE
    if not options:
        ring.columns = {}
    with pytest.raises(KeyError, match=words):
        starts(ring, **options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, TypeError, "either `num_slices` or `slice_len`"),
        ({"num_slices": 2, "slice_len": 3}, TypeError, "num_slices=2 and slice_len=3"),
        ({"slice_len": 0}, ValueError, "at least 1, got 0"),
        ({"slice_len": 3, "pad_output": True}, ValueError, "needs `strict_length=False`"),
        ({"slice_len": 3, "span": (1, -1)}, ValueError, "`span` must not be negative"),
        ({"slice_len": 3, "end_key": "a", "end_keys": ["b"]}, RuntimeError, "`end_key` and `end_keys` exclude"),
        ({"slice_len": 3, "ends": [True]}, RuntimeError, "`ends` .* needs `cache_values=True`"),
        ({"slice_len": 3, "ends": [True], "trajectories": [1]}, RuntimeError, "exclude each other"),
        (
            {"slice_len": 3, "ends": [True], "traj_key": "a", "cache_values": True},
            RuntimeError,
            "`ends` and keys of entries",
        ),
        ({"slice_len": 3, "fragmented": True}, TypeError, "does not support `fragmented=True`"),
        ({"slice_len": 3, "step_key": "t"}, TypeError, "does not support `step_key='t'`"),
        ({"slice_len": 3, "span": (1, 2, 3)}, ValueError, r"`span` must be .* got \(1, 2, 3\)"),
        ({"slice_len": 3, "colour": 1}, TypeError, "got an unknown argument: colour=1"),
    ],
)
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
def test_arguments_that_make_no_sense_are_refused(
    kind: type[SliceSampler], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        kind(**options)


def test_arguments_that_make_no_difference_are_taken() -> None:
    SliceSampler(slice_len=3, compile=False, use_gpu=False, fragmented=False, replacement=True, step_key="step_count")
    SliceSampler(slice_len=3, compile={"mode": "reduce-overhead"}, use_gpu=torch.device("cuda"))
    SliceSamplerWithoutReplacement(slice_len=3, compile=True, use_gpu=True, replacement=False)


def test_replacement_is_a_choice() -> None:
    sampler = SliceSampler(slice_len=2, replacement=False, shuffle=False, drop_last=True)
    assert type(sampler) is SliceSamplerWithoutReplacement
    assert type(SliceSampler(slice_len=2)) is SliceSampler
    for same in (sampler, copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert same.draw(episodes(2, 2, 2).contents(), 4, seeded()).index.tolist() == [0, 1, 2, 3]
        assert same.ran_out

    class Own(SliceSampler):
        pass

    with pytest.raises(TypeError, match=r"Own .*`replacement=False`.*SliceSamplerWithoutReplacement"):
        Own(slice_len=2, replacement=False)
    with pytest.raises(TypeError, match=r"`replacement=True`.*`SliceSampler`"):
        SliceSamplerWithoutReplacement(slice_len=2, replacement=True)


def test_what_was_asked_for_can_be_read() -> None:
    sampler = SliceSampler(num_slices=2, traj_key=["a", "b"], end_keys=["c", ("d", "e")], span=[1, True])
    assert (sampler.num_slices, sampler.slice_len) == (2, None)
    assert (sampler.traj_key, sampler.end_key, sampler.end_keys) == (("a", "b"), None, ("c", ("d", "e")))
    assert (sampler.strict_length, sampler.pad_output, sampler.cache_values) == (True, False, False)
    assert sampler.span == (1, True)
    other = SliceSampler(slice_len=3, end_key="a", strict_length=False, pad_output=True, cache_values=True, span=True)
    assert (other.num_slices, other.slice_len) == (None, 3)
    assert (other.traj_key, other.end_key, other.end_keys) == (None, "a", None)
    assert (other.strict_length, other.pad_output, other.cache_values) == (False, True, True)
    assert other.span == (True, True)


@pytest.mark.parametrize(("options", "name"), [({"num_slices": 3}, "num_slices=3"), ({"slice_len": 3}, "slice_len=3")])
@pytest.mark.parametrize("batch_size", [0, 2, 10])
def test_the_batch_size_must_fit(options: dict[str, int], name: str, batch_size: int) -> None:
    with pytest.raises(RuntimeError, match=f"multiple of {name}, got {batch_size}"):
        SliceSampler(**options).draw(episodes(20).contents(), batch_size, seeded())


def padding() -> Ring:
    ring = Ring(2, 10)
    ring.pad(4)
    return ring


@pytest.mark.parametrize(
    ("ring", "strict", "words"),
    [
        (episodes(3, 5, 2), True, "slices are of 6 frames, the trajectories in the buffer of 2 to 5"),
        (Ring(1, 10), True, "empty"),
        (padding(), False, "no frame of any trajectory"),
    ],
    ids=["too short", "empty", "padding"],
)
def test_there_must_be_a_trajectory_that_is_long_enough(ring: Ring, strict: bool, words: str) -> None:
    with pytest.raises(NothingToSampleError, match=words):
        SliceSampler(slice_len=6, strict_length=strict).draw(ring.contents(), 6, seeded())


def test_emptying_forgets_all_boundaries() -> None:
    sampler = SliceSampler(slice_len=2)
    sampler.draw(episodes(2, 2, 2).contents(), 2, seeded())
    sampler.empty()
    ring = episodes(3, 3)
    assert set(slices(ring, sampler.draw(ring.contents(), 400, seeded()))) == possible(ring, 2, True)


@pytest.mark.parametrize("options", [{}, {"replacement": False, "shuffle": False}])
def test_frames_that_change_where_they_lie_are_looked_at_again(options: dict[str, Any]) -> None:
    """Also in the middle of an epoch, of which runs are left that are none any more."""
    found: set[Slice] = set()
    for seed in range(40):
        ring = episodes(6, 6)
        sampler = SliceSampler(slice_len=3, **options)
        sampler.draw(ring.contents(), 3, seeded(seed))
        ring.edit(2)
        drawn = [sampler.draw(ring.contents(), 3, seeded(seed)) for _ in range(2)]
        found |= {each for draw in drawn for each in slices(ring, draw)}
    assert found == {(0, begin, 3) for begin in (0, 1, 2, 3, 8, 9)}


def test_frames_that_were_hidden_while_they_changed_are_found_again() -> None:
    ring = episodes(6, 6)
    sampler, stamps = SliceSampler(slice_len=3), ring.stamps.copy()
    ring.stamps[:9] = EMPTY
    assert sampler.draw(ring.contents(), 3, seeded()).index.tolist() == [9, 10, 11]
    ring.stamps[:] = stamps
    ring.edits += 1
    found = {begin for _, begin, _ in slices(ring, sampler.draw(ring.contents(), 300, seeded()))}
    assert found == {0, 1, 2, 3, 6, 7, 8, 9}


def test_drawn_frames_alone_are_asked_for() -> None:
    ring = episodes(6, 6)
    sampler = SliceSampler(slice_len=3)
    sampler.draw(ring.contents(), 6, seeded())
    ring.asked.clear()
    drawn = sampler.draw(ring.contents(), 6, seeded())
    assert len(list(slices(ring, drawn))) == 2
    assert {key for key, _ in ring.asked} == {TRUNCATED, DONE, TERMINATED, "is_init"}
    assert all(count <= 6 for _, count in ring.asked)


def test_the_same_generator_gives_the_same_slices() -> None:
    ring = episodes(9, 9, 9)
    first, second = (SliceSampler(slice_len=3).draw(ring.contents(), 30, seeded(4)).index for _ in range(2))
    assert np.array_equal(first, second)


@settings(max_examples=100, deadline=None)
@given(
    ring=rings(),
    happenings=operations(),
    count=st.integers(1, 5),
    length=st.integers(1, 3),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_without_replacement_each_run_comes_once(
    ring: Ring, happenings: list[tuple[str, int, int]], count: int, length: int, drop_last: bool, shuffle: bool
) -> None:
    sampler = SliceSamplerWithoutReplacement(slice_len=length, drop_last=drop_last, shuffle=shuffle)
    assert not sampler.can_repeat
    for _ in play(ring, happenings):
        long = [each for each in ring.runs() if each[2] >= length]
        batches = len(long) // count if drop_last else -(-len(long) // count)
        if not batches:
            with pytest.raises(NothingToSampleError):
                sampler.draw(ring.contents(), count * length, seeded())
            continue
        for epoch in range(2):
            found: list[Slice] = []
            for batch in range(batches):
                found += slices(ring, sampler.draw(ring.contents(), count * length, seeded(epoch)))
                assert sampler.ran_out == (batch == batches - 1)
            order = [max(run for run in long if run[0] == lane and run[1] <= begin) for lane, begin, _ in found]
            assert len(set(order)) == len(order) == (batches * count if drop_last else len(long))
            if not shuffle:
                assert order == sorted(order, key=lambda run: (run[1], run[0]))


def test_shuffled_epochs_differ() -> None:
    ring = episodes(*[2] * 20)
    sampler, generator = SliceSamplerWithoutReplacement(slice_len=2), seeded()
    first, second = (sampler.draw(ring.contents(), 40, generator).index.tolist() for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(40))


def test_frames_that_come_begin_a_new_epoch() -> None:
    ring = episodes(2, 2, 2)
    sampler = SliceSamplerWithoutReplacement(slice_len=2, shuffle=False)
    sampler.draw(ring.contents(), 4, seeded())
    ring.writers[0].length = 2
    ring.write(2)
    assert sampler.draw(ring.contents(), 8, seeded()).index.tolist() == list(range(8))
    assert sampler.ran_out


@pytest.mark.parametrize("edits", [0, 5])
def test_a_loaded_sampler_goes_on_in_its_epoch(edits: int) -> None:
    """However often frames were changed in the buffer that it was saved with."""
    ring = episodes(*[3] * 10)
    ring.edits = edits
    sampler, other = (SliceSamplerWithoutReplacement(num_slices=2) for _ in range(2))
    seen = set(slices(ring, sampler.draw(ring.contents(), 6, seeded(1))))
    ring.edits = 0
    other.draw(ring.contents(), 6, seeded(9))
    state = sampler.state_dict()
    ring.edits = 1
    sampler.load_state_dict(state)
    other.load_state_dict(state)
    for _ in range(4):
        first, second = (each.draw(ring.contents(), 6, seeded(2)) for each in (sampler, other))
        assert first.index.tolist() == second.index.tolist()
        assert sampler.ran_out == other.ran_out
        seen |= set(slices(ring, second))
    assert len(seen) == 10
    assert other.ran_out
    other.empty()
    assert not other.ran_out
