"""Each check of `swath.testing` notices each way in which a batch can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from counting_layouts import LAYOUTS
from counting_reference import CountingReference, assert_holds
from tensordict import TensorDictBase

from swath.collectors import Collector
from swath.testing import (
    CountingEnv,
    assert_follows,
    assert_frames_belong,
    assert_ids_fit,
    assert_whole_episodes,
    assert_whole_in_a_row,
)
from swath.testing.counting import KINDS

IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")
LENGTHS = [3, 4]


def collector(kind: str = "vector", **options: Any) -> Collector:
    return Collector(
        CountingEnv((3,), lengths=LENGTHS, kind=kind), frames_per_batch=30, max_frames_per_traj=99, **options
    )


def batch_and_frames(kind: str = "vector") -> tuple[TensorDictBase, Any]:
    batch = collector(kind).next()
    assert batch is not None
    return batch.clone(), CountingReference(3, LENGTHS).collect(10)


Mutation = Callable[[TensorDictBase], Any]


def add(key: Any, at: Any, amount: float = 1) -> Mutation:
    def mutate(batch: TensorDictBase) -> None:
        batch.get(key)[at] += amount

    return mutate


def flip(key: Any, at: Any) -> Mutation:
    def mutate(batch: TensorDictBase) -> None:
        batch.get(key)[at] ^= True

    return mutate


def swap(first: Any, second: Any, *keys: Any) -> Mutation:
    """Exchange places, in all entries or in some."""

    def mutate(batch: TensorDictBase) -> None:
        for key in keys or list(batch.keys(True, True)):
            value = batch.get(key)
            kept = value[first].clone()
            value[first] = value[second]
            value[second] = kept

    return mutate


def shift(*keys: Any) -> Mutation:
    """Off by one in time."""

    def mutate(batch: TensorDictBase) -> None:
        for key in keys:
            batch.set(key, batch.get(key).roll(1, 1))

    return mutate


def ids_for_all_the_same(batch: TensorDictBase) -> None:
    batch.get(IDS).fill_(5)


def ids_used_twice(batch: TensorDictBase) -> None:
    batch.set(IDS, batch.get(IDS)[:1].expand(3, -1).clone())


def an_id_that_never_changes(batch: TensorDictBase) -> None:
    batch.get(IDS)[1] = 77


def ids_that_change_a_frame_early(batch: TensorDictBase) -> None:
    batch.get(IDS)[0, 2] = batch.get(IDS)[0, 3]


def new_episode_observation_as_final(batch: TensorDictBase) -> None:
    """What vector envs do that reset in the same step."""
    batch.get(("next", "observation"))[:, 2] = batch.get("observation")[:, 3]


def final_observation_as_first(batch: TensorDictBase) -> None:
    batch.get("observation")[:, 3] = batch.get(("next", "observation"))[:, 2]


MUTATIONS: dict[str, Mutation] = {
    "another lane": add("observation", (0, 1, 0)),
    "another episode": add("observation", (0, 1, 1)),
    "another step": add("observation", (0, 1, 2)),
    "another next lane": add(("next", "observation"), (2, 9, 0)),
    "another next episode": add(("next", "observation"), (2, 9, 1)),
    "another next step": add(("next", "observation"), (2, 9, 2)),
    "another reward": add(("next", "reward"), (1, 4, 0)),
    "done too many": flip(("next", "done"), (0, 0)),
    "done missing": flip(("next", "done"), (0, 2)),
    "terminated too many": flip(("next", "terminated"), (0, 0)),
    "terminated missing": flip(("next", "terminated"), (0, 2)),
    "truncated too many": flip(("next", "truncated"), (1, 1)),
    "root done": flip("done", (0, 3)),
    "root terminated": flip("terminated", (0, 3)),
    "root truncated": flip("truncated", (0, 3)),
    "another step_count": add("step_count", (0, 1)),
    "another next step_count": add(("next", "step_count"), (0, 1)),
    "two frames exchanged": swap((0, 0), (0, 1)),
    "two ends exchanged": swap((0, 2), (0, 6)),
    "two lanes exchanged": swap(0, 1),
    "two observations exchanged": swap((0, 0), (0, 1), "observation"),
    "two lanes' rewards exchanged": swap((0, 1), (1, 2), ("next", "reward")),
    "observations shifted": shift("observation"),
    "next shifted": shift(("next", "observation"), ("next", "reward")),
    "flags shifted": shift(("next", "done"), ("next", "terminated"), ("next", "truncated")),
    "ids shifted": shift(IDS),
    "all ids the same": ids_for_all_the_same,
    "ids used twice": ids_used_twice,
    "an id that never changes": an_id_that_never_changes,
    "ids that change early": ids_that_change_a_frame_early,
    "a negative id": lambda batch: batch.get(IDS)[2].sub_(100),
    "the new episode's observation as the final one": new_episode_observation_as_final,
    "the final observation as the new episode's": final_observation_as_first,
}
FOR_THE_PLAIN_SIMULATION_ALONE = {
    "every episode a later one": lambda batch: [
        batch.get(key)[..., 1].add_(1) for key in ("observation", ("next", "observation"))
    ],
    "every lane another": lambda batch: [
        batch.get(key)[..., 0].add_(1) for key in ("observation", ("next", "observation"))
    ],
    "every id another": lambda batch: batch.get(IDS).add_(3),
    "truncated for terminated": lambda batch: batch.update(
        {"next": {"truncated": batch["next", "terminated"].clone(), "terminated": batch["next", "truncated"].clone()}}
    ),
    "a frame is missing": lambda batch: batch[:, 1:],
}


def test_the_checks_let_an_honest_batch_pass() -> None:
    batch, frames = batch_and_frames()
    assert_frames_belong(batch)
    assert_holds(batch, frames)


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_spoilt_batch_is_noticed(name: str) -> None:
    batch, frames = batch_and_frames()
    MUTATIONS[name](batch)
    with pytest.raises(AssertionError):
        assert_frames_belong(batch)
    with pytest.raises(AssertionError):
        assert_holds(batch, frames)


@pytest.mark.parametrize("name", sorted(FOR_THE_PLAIN_SIMULATION_ALONE))
def test_the_plain_simulation_notices_what_is_consistent_but_wrong(name: str) -> None:
    batch, frames = batch_and_frames()
    changed = FOR_THE_PLAIN_SIMULATION_ALONE[name](batch)
    spoilt = changed if isinstance(changed, TensorDictBase) else batch
    with pytest.raises(AssertionError):
        assert_holds(spoilt, frames)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_observation_is_read(kind: str) -> None:
    batch, frames = batch_and_frames(kind)
    assert_frames_belong(batch)
    keys: list[Any] = {"dict": ["count", ("inner", "step")]}.get(kind, ["observation"])
    for key in keys:
        for place in (key, ("next", *([key] if isinstance(key, str) else key))):
            spoilt = batch.clone()
            spoilt.get(place)[1, 3].view(-1)[-1] += 1
            with pytest.raises(AssertionError):
                assert_frames_belong(spoilt)
            with pytest.raises(AssertionError):
                assert_holds(spoilt, frames)


def test_a_batch_without_next_observations_is_no_whole_one() -> None:
    batch, frames = batch_and_frames()
    compact = batch.exclude(("next", "observation"))
    assert_frames_belong(compact, compact=True)
    assert_holds(compact, frames, compact=True)
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        assert_frames_belong(compact)
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        assert_holds(compact, frames)
    with pytest.raises(AssertionError):
        assert_holds(batch, frames, compact=True)


def test_is_init_must_be_at_first_frames() -> None:
    batch, _ = batch_and_frames()
    batch.set("is_init", batch.get("step_count") == 0)
    assert_frames_belong(batch)
    batch.get("is_init")[1, 1] = True
    with pytest.raises(AssertionError):
        assert_frames_belong(batch)


# -- idle places -------------------------------------------------------------------------------------------------


def idle_batch() -> tuple[TensorDictBase, Any]:
    lengths = [[1, 2], [9]]
    batch = Collector(LAYOUTS["idling vector env"](2, lengths=lengths), frames_per_batch=20).next()
    assert batch is not None
    assert not batch.get(MASK).all()
    return batch.clone(), CountingReference(2, lengths, idles=True).collect(10)


def test_idle_places_are_checked() -> None:
    batch, frames = idle_batch()
    assert_frames_belong(batch)
    assert_holds(batch, frames)
    row, step = (int(i) for i in (~batch.get(MASK)).nonzero()[0])
    mutations: dict[str, Mutation] = {
        "an id": lambda spoilt: spoilt.get(IDS)[row, step].fill_(3),
        "an idle place as a frame": flip(MASK, (row, step)),
        "a frame as an idle place": flip(MASK, (1, 4)),
        "no mask": lambda spoilt: spoilt.del_(MASK),
    }
    for mutate in mutations.values():
        spoilt = batch.clone()
        mutate(spoilt)
        with pytest.raises(AssertionError):
            assert_frames_belong(spoilt)
        with pytest.raises(AssertionError):
            assert_holds(spoilt, frames)


# -- consecutive batches -----------------------------------------------------------------------------------------


def test_a_gap_between_batches_is_noticed() -> None:
    source = collector()
    first, second, third = (source.next() for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert_follows(first, second)
    assert_follows(second, third)
    for before, behind in ((first, third), (second, first), (first, first), (first, second[:, 1:])):
        with pytest.raises(AssertionError):
            assert_follows(before, behind)
    renamed = third.clone()
    renamed.get(IDS).add_(50)
    with pytest.raises(AssertionError):  # the second batch ends inside an episode
        assert_follows(second, renamed)


# -- ids ---------------------------------------------------------------------------------------------------------


def test_ids_that_do_not_fit_are_noticed() -> None:
    done = np.array([[0, 1, 0], [0, 0, 1]], dtype=bool)
    assert_ids_fit(np.array([[0, 0, 2], [1, 1, 1]]), done)
    for ids in (
        [[0, 0, 0], [1, 1, 1]],
        [[0, 2, 2], [1, 1, 1]],
        [[0, 0, 1], [1, 1, 1]],
        [[0, 0, 2], [0, 0, 0]],
        [[0, 0, -1], [1, 1, 1]],
        [[0, 0, 2], [1, 3, 1]],
    ):
        with pytest.raises(AssertionError):
            assert_ids_fit(np.array(ids), done)


# -- whole episodes ----------------------------------------------------------------------------------------------


WHOLE = {"padded": assert_whole_episodes, "cat": assert_whole_in_a_row}


def length(lane: int, episode: int) -> int:
    return LENGTHS[episode % 2]


@pytest.fixture(scope="module")
def whole() -> dict[str, TensorDictBase]:
    made = {}
    for form in WHOLE:
        batch = collector(trajs_per_batch=4, traj_format=form).next()
        assert batch is not None
        made[form] = batch
    return made


def test_whole_episodes_pass(whole: dict[str, TensorDictBase]) -> None:
    for form, check in WHOLE.items():
        assert check(whole[form], length) == [(0, 0), (1, 0), (2, 0), (0, 1)]


PADDED: dict[str, Mutation] = {
    "the first frame is missing": lambda batch: batch[:, 1:],
    "the last frame is missing": lambda batch: batch.set(MASK, batch.get(MASK) & (torch.arange(4) < 2)),
    "a hole in the mask": flip(MASK, (3, 1)),
    "padding taken for a frame": flip(MASK, (0, 3)),
    "padding with an id": lambda batch: batch.get(IDS)[0, 3].fill_(0),
    "padding with a reward": lambda batch: batch.get(("next", "reward"))[0, 3].fill_(1),
    "padding with an action": lambda batch: batch.get("action")[0, 3].fill_(1),
    "padding that is done": lambda batch: batch.get(("next", "done"))[0, 3].fill_(True),
    "too much padding": lambda batch: torch.cat([batch, torch.zeros_like(batch).set(IDS, batch.get(IDS) * 0 - 1)], 1),
    "one id for two": lambda batch: batch.get(IDS)[1, :3].fill_(0),
    "two ids in one": lambda batch: batch.get(IDS)[1, 0].fill_(88),
    "frames exchanged": swap((3, 1), (3, 2)),
    "no end": lambda batch: [batch.get(("next", name))[3, 3].fill_(False) for name in ("done", "terminated")],
    "two ends": lambda batch: [batch.get(("next", name))[3, 1].fill_(True) for name in ("done", "terminated")],
    "frames of another lane": lambda batch: batch.get("observation")[1, 1:3, 0].fill_(2),
}
IN_A_ROW: dict[str, Mutation] = {
    "the first frame is missing": lambda batch: batch[1:],
    "the last frame is missing": lambda batch: batch[:-1],
    "a frame is missing": lambda batch: torch.cat([batch[:1], batch[2:]]),
    "a frame twice": lambda batch: torch.cat([batch[:1], batch]),
    "an episode twice": lambda batch: torch.cat([batch[:3], batch]),
    "episodes mixed": lambda batch: batch[torch.tensor([0, 3, 1, 4, 2, 5, *range(6, len(batch))])],
    "no end": lambda batch: [batch.get(("next", name))[-1].fill_(False) for name in ("done", "terminated")],
    "two ends": lambda batch: [batch.get(("next", name))[1].fill_(True) for name in ("done", "terminated")],
    "one id for two": lambda batch: batch.get(IDS)[3:6].fill_(0),
    "two ids in one": lambda batch: batch.get(IDS)[1].fill_(9),
}


@pytest.mark.parametrize(
    ("form", "name"), [("padded", name) for name in sorted(PADDED)] + [("cat", name) for name in sorted(IN_A_ROW)]
)
def test_spoilt_episodes_are_noticed(whole: dict[str, TensorDictBase], form: str, name: str) -> None:
    batch = whole[form].clone()
    changed = (PADDED if form == "padded" else IN_A_ROW)[name](batch)
    with pytest.raises(AssertionError):
        WHOLE[form](changed if isinstance(changed, TensorDictBase) else batch, length)


def test_an_episode_of_another_length_is_noticed(whole: dict[str, TensorDictBase]) -> None:
    for form, check in WHOLE.items():
        with pytest.raises(AssertionError, match="instead of 4"):
            check(whole[form], lambda lane, episode: 4)
