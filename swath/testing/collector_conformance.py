"""The conformance suite of collectors: subclass in a test file, say how one is made, and its contract is tested.

class TestMyCollector(CollectorConformance):
    cannot = {"test_len": "it never knows how much there will be"}

    def make_collector(self, lanes, lengths, **options):
        return MyCollector(lambda: CountingEnv((lanes,) if lanes else (), lengths=lengths), None, **options)
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import BaseCollector, PolicyVersion
from swath.errors import ClosedError
from swath.keys import MASK, NEXT, OBSERVATION, TRAJ_IDS
from swath.testing.checks import assert_follows, assert_frames_belong, assert_whole_episodes, assert_whole_in_a_row


class CollectorConformance:
    """What every collector must do, told by counting envs.

    `make_collector(lanes, lengths, **options)` makes a collector of `lanes` counting envs (0: one without a batch
    dimension) whose episodes have `lengths`. Its batches are `[lanes, T]`, or `[T]`, and each goes on where the last
    ended.
    """

    batches_ahead = 0
    """How many batches may be collected already while another is delivered."""
    cannot: ClassVar[Mapping[str, str]] = {}
    """Tests of this suite that the collector cannot pass, each with the reason. They must fail, so that no entry stays
    that is no longer true."""

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        """A new collector."""
        raise NotImplementedError

    @pytest.fixture
    def make(self) -> Any:
        """Makes collectors that are shut down after the test."""
        made: list[BaseCollector] = []

        def build(lanes: int = 2, lengths: Any = 5, **options: Any) -> BaseCollector:
            made.append(self.make_collector(lanes, lengths, **options))
            return made[-1]

        yield build
        for collector in made:
            collector.shutdown()

    @pytest.fixture(autouse=True)
    def _expect_what_cannot_be(self, request: pytest.FixtureRequest) -> None:
        reason = self.cannot.get(request.function.__name__)
        if reason is not None:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    Make = Callable[..., BaseCollector]

    def test_what_it_cannot_do_is_named_by_tests(self) -> None:
        """A name that is none of this suite would excuse nothing."""
        assert [name for name in self.cannot if not hasattr(CollectorConformance, name)] == []

    @pytest.mark.parametrize("lanes", [0, 1, 3])
    def test_every_frame_is_where_it_belongs(self, make: Make, lanes: int) -> None:
        """Over several batches, with episodes that span them."""
        before = None
        for batch in make(lanes, [3, 4, 1, 7], frames_per_batch=5 * max(1, lanes), total_frames=40 * max(1, lanes)):
            assert batch.names[-1] == "time"
            assert_frames_belong(batch)
            if before is not None:
                assert_follows(before, batch)
            before = batch

    def test_batches_that_are_kept_do_not_change(self, make: Make) -> None:
        """Also when only a slice is kept."""
        batches, copies = [], []
        for batch in make(2, 4, frames_per_batch=10, total_frames=100):
            batches.append(batch.get(OBSERVATION)[..., 1:, :])
            copies.append(batches[-1].clone())
        for kept, copy in zip(batches, copies, strict=True):
            assert torch.equal(kept, copy)

    @pytest.mark.parametrize(("total", "per_batch"), [(25, 10), (7, 10), (40, 10), (1, 1)])
    def test_total_frames_are_exact(self, make: Make, total: int, per_batch: int) -> None:
        """Rounded up only to whole steps of all lanes."""
        batches = list(make(0, 5, frames_per_batch=per_batch, total_frames=total))
        assert sum(batch.numel() for batch in batches) == total
        assert len(batches) == math.ceil(total / per_batch)

    def test_len(self, make: Make) -> None:
        """Number of batches; none without an end."""
        assert len(make(0, 5, frames_per_batch=10, total_frames=25)) == 3
        with pytest.raises(RuntimeError, match="endless"):
            len(make(0, 5, frames_per_batch=10))

    def test_next_ends_with_none_and_mixes_with_for(self, make: Make) -> None:
        """All ways of iterating continue one stream."""
        collector = make(0, 100, frames_per_batch=10, total_frames=30)
        first = collector.next()
        second = next(iter(collector))
        third = collector.next()
        begins = [int(batch.get(OBSERVATION)[0, 2]) for batch in (first, second, third) if batch is not None]
        assert begins == [0, 10, 20]
        assert collector.next() is None
        assert list(collector) == []

    @pytest.mark.parametrize("form", ["padded", "cat"])
    def test_whole_episodes(self, make: Make, form: str) -> None:
        """Complete and in the order in which they end, however they lie in the batches."""
        lengths = [3, 9, 1, 4]
        found = []
        check = assert_whole_episodes if form == "padded" else assert_whole_in_a_row
        collector = make(2, lengths, frames_per_batch=8, total_frames=400, trajs_per_batch=3, traj_format=form)
        for batch in collector:
            episodes = check(batch, lambda lane, episode: lengths[episode % 4])
            assert len(episodes) == 3
            found.extend(episodes)
        assert len(found) == len(set(found))
        for lane in (0, 1):
            mine = [episode for where, episode in found if where == lane]
            assert mine == list(range(len(mine)))
        stats = collector.stats()
        delivered = sum(lengths[episode % 4] for _, episode in found)
        assert delivered + stats["dropped_frames"] == stats["frames"] == 400

    def test_split_trajs(self, make: Make) -> None:
        """One row per trajectory, with a mask."""
        batch = next(iter(make(2, 4, frames_per_batch=20, total_frames=20, split_trajs=True)))
        assert batch.shape == (6, 4)
        assert int(batch.get(MASK).sum()) == 20
        assert (batch.get(TRAJ_IDS)[~batch.get(MASK)] == -1).all()

    def test_max_frames_per_traj_truncates(self, make: Make) -> None:
        """The k-th step is truncated, not terminated, and the next begins anew."""
        batch = next(iter(make(2, 100, frames_per_batch=20, total_frames=20, max_frames_per_traj=3)))
        assert_frames_belong(batch)
        truncated = batch.get((NEXT, "truncated"))[..., 0]
        assert truncated.nonzero()[:, 1].tolist() == [2, 5, 8] * 2
        assert not batch.get((NEXT, "terminated")).any()
        assert batch.get("step_count")[0, :, 0].tolist() == [0, 1, 2] * 3 + [0]
        assert batch.get((NEXT, "step_count"))[0, :, 0].tolist() == [1, 2, 3] * 3 + [1]

    def test_reset_at_each_iter(self, make: Make) -> None:
        """Each batch begins with new episodes, with new ids."""
        batches = list(make(2, 100, frames_per_batch=6, total_frames=18, reset_at_each_iter=True))
        for number, batch in enumerate(batches):
            assert_frames_belong(batch)
            assert (batch.get(OBSERVATION)[:, 0, 1] == number).all()
            assert (batch.get(OBSERVATION)[:, 0, 2] == 0).all()
        ids = torch.stack([batch.get(TRAJ_IDS)[:, 0] for batch in batches])
        assert len(ids.unique()) == ids.numel()

    def test_postproc_and_hooks(self, make: Make, tmp_path: Path) -> None:
        """Hooks are called with every rollout, wherever it is made; what post-processing returns is delivered."""
        calls = tmp_path / "calls"

        def note(call: str) -> None:
            with calls.open("a") as file:
                file.write(f"{call}\n")

        collector = make(
            0,
            5,
            frames_per_batch=5,
            total_frames=10,
            postproc=lambda batch: batch.set("seen", torch.ones(*batch.shape, 1, device="cpu")),
            pre_collect_hook=lambda: note("pre"),
            post_collect_hook=lambda batch: note(f"post {batch.shape[-1]}"),
        )
        assert all(batch.get("seen", None) is not None for batch in collector)
        assert calls.read_text().splitlines() == ["pre", "post 5"] * 2

    def test_set_truncated_marks_the_last_step(self, make: Make) -> None:
        """And nothing else; what goes on in the next batch is another trajectory."""
        first, second = make(2, 4, frames_per_batch=10, total_frames=20, set_truncated=True)
        assert first.get((NEXT, "done"))[0, :, 0].tolist() == [False, False, False, True, True]
        assert first.get((NEXT, "truncated"))[0, :, 0].tolist() == [False, False, False, False, True]
        assert second.get(OBSERVATION)[0, 0, 2] == 1
        assert not set(first.get(TRAJ_IDS).unique().tolist()) & set(second.get(TRAJ_IDS).unique().tolist())

    def test_seeded_twice_is_the_same(self, make: Make) -> None:
        """`set_seed` makes the next batches repeatable."""

        def actions(seed: int) -> torch.Tensor:
            collector = make(2, 5, frames_per_batch=20, total_frames=60)
            collector.set_seed(seed)
            return torch.cat([batch.get("action") for batch in collector])

        assert torch.equal(actions(1), actions(1))
        assert not torch.equal(actions(1), actions(2))

    def test_breaking_off_and_going_on(self, make: Make) -> None:
        """Leaving a loop loses nothing."""
        collector = make(2, 7, frames_per_batch=6, total_frames=60)
        parts: list[TensorDictBase] = []
        while len(parts) < 10:
            for batch in collector:
                parts.append(batch)
                if len(parts) % 3 == 0:
                    break
        assert_frames_belong(torch.cat(parts, 1))
        assert list(collector) == []

    def test_weights_change_when_they_are_published(self, make: Make) -> None:
        """Not before, and then in whole batches; the frames tell the version."""

        def policy() -> Any:
            layer = nn.Linear(3, 2)
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
            return TensorDictModule(layer, in_keys=[OBSERVATION], out_keys=["action"])

        collector = make(2, 5, frames_per_batch=8, policy_factory=policy, track_policy_version=PolicyVersion())
        for published, batch in zip(range(6), collector, strict=False):
            version = batch.get("policy_version")
            assert (version == version.reshape(-1)[0]).all()
            assert (batch.get("action") == version.reshape(*batch.shape, 1)).all()
            older = published - int(version.reshape(-1)[0])
            assert 0 <= older <= self.batches_ahead
            collector.update_policy_weights_({"module.bias": torch.full((2,), published + 1.0, device="cpu")})
        assert collector.stats()["policy_version"] == 6

    def test_state_can_be_saved(self, make: Make) -> None:
        """As plain tensors, numbers and dicts, at any moment."""
        collector = make(2, 5, frames_per_batch=8, total_frames=80, trajs_per_batch=1)
        for number, _ in enumerate(collector):
            file = io.BytesIO()
            torch.save(collector.state_dict(), file)
            file.seek(0)
            assert torch.load(file, weights_only=True)["frames"] == collector.stats()["frames"]
            if number == 2:
                break

    def test_reset_begins_new_episodes_with_new_ids(self, make: Make) -> None:
        """And everything else is where it belongs."""
        collector: Any = make(2, 100, frames_per_batch=8, total_frames=80)
        before = collector.next()
        collector.reset()
        later: Any = torch.cat(list(collector), 1)
        assert before is not None
        numbers = later.get(OBSERVATION)  # [2, T, 3]
        begins = (numbers[..., 2] == 0) & (numbers[..., 1] == 1)
        assert begins.sum(1).tolist() == [1, 1]
        at = int(begins[0].nonzero()[0, 0])
        assert at <= 4 * self.batches_ahead
        assert_frames_belong(later[:, at:])
        if at:
            assert_follows(before, later[:, :at])
        old, new = ({*part.get(TRAJ_IDS).unique().tolist()} for part in (before, later[:, at:]))
        assert not old & new

    def test_episodes_cut_off_by_a_reset_are_not_delivered(self, make: Make) -> None:
        """Only whole ones are, and what is left out is counted."""
        lengths = [7, 5, 9]
        collector: Any = make(2, lengths, frames_per_batch=6, total_frames=240, trajs_per_batch=1, traj_format="cat")
        found = []
        for number, batch in enumerate(collector):
            found.extend(assert_whole_in_a_row(batch, lambda lane, episode: lengths[episode % 3]))
            if number % 3 == 0:
                collector.reset()
        stats = collector.stats()
        assert len(found) == len(set(found))
        assert sum(lengths[episode % 3] for _, episode in found) + stats["dropped_frames"] == stats["frames"] == 240

    def test_shutdown_is_idempotent(self, make: Make) -> None:
        """Twice, before and after use, and in a with block."""
        unused = make(2, 5, frames_per_batch=10)
        unused.shutdown()
        unused.shutdown()
        with make(2, 5, frames_per_batch=10) as collector:
            next(iter(collector))
        collector.shutdown()
        with pytest.raises(ClosedError):  # its frames were not all collected
            list(collector)

    def test_state_dict_goes_on_without_colliding_ids(self, make: Make) -> None:
        """Counters continue, ids are new."""
        first = make(2, 5, frames_per_batch=10, total_frames=40)
        ids = set(next(iter(first)).get(TRAJ_IDS).unique().tolist())
        second = make(2, 5, frames_per_batch=10, total_frames=40)
        second.load_state_dict(first.state_dict())
        rest = list(second)
        assert sum(batch.numel() for batch in rest) == 30
        later = set(torch.cat([batch.get(TRAJ_IDS) for batch in rest]).unique().tolist())
        assert not ids & later
        assert second.stats()["frames"] == 40

    def test_stats(self, make: Make) -> None:
        """Frames, episodes, returns and lengths are what happened."""
        collector = make(2, 4, frames_per_batch=10, total_frames=40)
        for _ in collector:
            pass
        stats = collector.stats()
        assert stats["frames"] == stats["total_frames"] == 40
        assert stats["episodes"] == 10
        assert stats["mean_return"] == 1 + 2 + 3 + 4
        assert stats["mean_length"] == 4
        assert stats["completed"]
