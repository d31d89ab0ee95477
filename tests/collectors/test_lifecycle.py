"""From the first batch to the last: iterating, shutting down, saving and going on."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.utils.data import DataLoader

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv
from swath.testing import CountingEnv, CountingGymEnv, FaultyError, FaultyGymEnv

IDS = ("collector", "traj_ids")
Make = Callable[..., Collector]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Collector] = []

    def build(env: Any = None, policy: Any = None, **options: Any) -> Collector:
        options.setdefault("frames_per_batch", 10)
        made.append(Collector(CountingEnv(lengths=1000) if env is None else env, policy, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


def actor() -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


def first_step(batch: TensorDictBase | None) -> int:
    assert batch is not None
    return int(batch["observation"][..., 0, 2].reshape(-1)[0])


# -- iterating ------------------------------------------------------------------------------------------------------


def test_all_ways_of_iterating_go_on_with_one_stream(make: Make) -> None:
    collector = make(total_frames=70)
    seen = [first_step(collector.next())]
    for batch in collector:
        seen.append(first_step(batch))
        break
    stream = iter(collector)
    seen.append(first_step(next(stream)))
    seen.append(first_step(collector.next()))
    seen.append(first_step(next(stream)))
    seen.append(first_step(next(collector.iterator())))
    seen.append(first_step(collector.rollout()))
    assert seen == [0, 10, 20, 30, 40, 50, 60]
    assert next(stream, None) is None
    assert collector.next() is None


def test_exhausted_means_nothing_more(make: Make) -> None:
    collector = make(total_frames=20)
    assert len(list(collector)) == 2
    assert list(collector) == []
    assert collector.next() is None
    assert collector.next() is None
    assert collector.closed
    assert collector.env.is_closed
    assert collector.stats()["completed"]
    with pytest.raises(RuntimeError, match="shut down"):
        collector.rollout()


def test_len_counts_batches(make: Make) -> None:
    assert len(make(total_frames=25)) == 3
    with pytest.raises(RuntimeError, match="endless"):
        len(make())
    with pytest.raises(TypeError, match="endless"):
        len(make())


def test_an_error_of_the_env_ends_the_collection_and_keeps_its_type(make: Make) -> None:
    collector = make(FaultyGymEnv(at=13))
    collector.next()
    with pytest.raises(FaultyError, match="lane 0 fails at step 13"):
        collector.next()
    assert collector.closed
    assert collector.next() is None
    assert list(collector) == []


def test_an_error_of_the_consumer_leaves_the_collector_usable(make: Make) -> None:
    collector = make()

    def train() -> None:
        for _ in collector:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert not collector.closed
    assert first_step(collector.next()) == 10


def test_a_data_loader_may_iterate_over_it(make: Make) -> None:
    loader = DataLoader(make(total_frames=30), batch_size=None, collate_fn=lambda batch: batch)
    assert [first_step(batch) for batch in loader] == [0, 10, 20]


def test_rollout_is_raw_but_counted(make: Make) -> None:
    collector = make(total_frames=40, postproc=lambda batch: batch.select("action"), split_trajs=True)
    assert collector.rollout().shape == (10,)
    assert collector.stats()["frames"] == 10
    assert len(list(collector)) == 3


def test_reset_begins_new_episodes_with_new_ids(make: Make) -> None:
    collector = make()
    collector.next()
    collector.reset()
    batch = collector.next()
    assert first_step(batch) == 0
    assert batch[IDS].unique().tolist() == [1]


@pytest.mark.parametrize("index", [[1], torch.tensor([1]), torch.tensor([False, True, False])])
def test_reset_of_some_lanes_leaves_the_others(make: Make, index: Any) -> None:
    collector = make(CountingEnv((3,), lengths=1000), frames_per_batch=15)
    collector.next()
    collector.reset(index)
    batch = collector.next()
    assert batch["observation"][:, 0, 2].tolist() == [5, 0, 5]
    assert batch[IDS][:, 0].tolist() == [0, 3, 2]


def test_reset_of_some_lanes_needs_lanes(make: Make) -> None:
    with pytest.raises(RuntimeError, match="no batch dimension"):
        make().reset([0])


# -- the end --------------------------------------------------------------------------------------------------------


def test_a_with_block_shuts_down() -> None:
    with Collector(CountingEnv(), frames_per_batch=10) as collector:
        collector.next()
    assert collector.closed
    assert collector.env.is_closed


@pytest.mark.parametrize("name", ["shutdown", "async_shutdown"])
def test_shutdown_may_leave_the_env_open(make: Make, name: str) -> None:
    env = CountingEnv(lengths=1000)
    collector = make(env)
    collector.next()
    getattr(collector, name)(timeout=1.0, close_env=False)
    assert collector.closed
    assert not env.is_closed
    assert first_step(make(env).next()) == 0  # another collector may use it


def test_shutdown_twice_and_in_the_middle_of_a_loop(make: Make) -> None:
    collector = make()
    seen = 0
    for _ in collector:
        seen += 1
        if seen == 2:
            collector.shutdown()
            collector.async_shutdown()
    assert seen == 2
    assert collector.next() is None


@pytest.mark.parametrize("raise_on_error", [True, False])
def test_an_env_that_cannot_be_closed(raise_on_error: bool) -> None:
    class Stuck(CountingEnv):
        def _close(self) -> None:
            raise OSError("stuck")

    collector = Collector(Stuck(), frames_per_batch=10)
    if raise_on_error:
        with pytest.raises(OSError, match="stuck"):
            collector.shutdown()
    else:
        collector.shutdown(raise_on_error=False)
    assert collector.closed
    collector.shutdown()


def test_a_forgotten_collector_is_freed_and_leaves_the_users_env_alone() -> None:
    env = CountingEnv()
    collector = Collector(env, frames_per_batch=10)
    collector.next()
    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None
    assert not env.is_closed


def test_batches_outlive_their_collector(make: Make) -> None:
    collector = make()
    batch = collector.next()
    kept = batch.clone()
    collector.shutdown()
    del collector
    gc.collect()
    assert (batch == kept).all()


def test_background_collection_needs_a_buffer(make: Make) -> None:
    collector = make()
    assert not collector.is_running()
    with pytest.raises(RuntimeError, match=r"start\(\).*replay buffer"):
        collector.start()
    with pytest.raises(NotImplementedError):
        collector.pause()
    assert first_step(collector.next()) == 0


def test_after_shutdown_state_and_stats_can_still_be_read(make: Make) -> None:
    collector = make(total_frames=20, policy=actor())
    list(collector)
    assert collector.stats()["frames"] == 20
    assert collector.state_dict()["frames"] == 20
    with pytest.raises(RuntimeError, match="shut down"):
        collector.load_state_dict(collector.state_dict())
    with pytest.raises(RuntimeError, match="shut down"):
        collector.reset()


# -- the layout -----------------------------------------------------------------------------------------------------


def layout(batch: TensorDictBase) -> dict[Any, Any]:
    entries = {key: (batch.get(key).shape, batch.get(key).dtype) for key in batch.keys(True, True)}
    return {"batch": batch.shape, "names": batch.names, "device": batch.device, **entries}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_frames_per_traj": 3, "track_policy_version": True},
        {"track_traj_ids": False, "compact_obs": True},
        {"storing_device": "cpu"},
    ],
)
def test_fake_tensordict_has_the_layout_of_a_batch(make: Make, options: dict[str, Any]) -> None:
    collector = make(policy=actor(), env=CountingEnv(), **options)
    fake = collector.fake_tensordict()
    assert layout(fake) == layout(collector.next())
    assert all(not fake.get(key).any() for key in fake.keys(True, True))


def test_fake_tensordict_of_several_lanes(make: Make) -> None:
    collector = make(SerialEnv(2, lambda: GymEnv("Pendulum-v1")))
    assert layout(collector.fake_tensordict()) == layout(collector.next())


def test_what_the_policy_keeps_to_itself_is_not_delivered(make: Make) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        td["action"] = td["observation"][..., :2]
        td["_secret"] = torch.ones(1)
        td["out", "_secret"] = torch.ones(1)
        td["_out", "secret"] = torch.ones(1)
        td["out", "open"] = torch.ones(1)
        return td

    batch = make(policy=policy).next()
    assert {key for key in batch.keys(True, True) if "out" in key or "_" in str(key)[:1]} == {("out", "open")}
    assert "_secret" not in set(batch.keys())
    assert ("_out", "secret") not in set(batch.keys(True, True))


# -- saving and going on --------------------------------------------------------------------------------------------


def saved(collector: Collector, path: Any) -> dict[str, Any]:
    """The state by way of a file that is read without running anything in it."""
    torch.save(collector.state_dict(), path / "collector.pt")
    return torch.load(path / "collector.pt", weights_only=True)


def test_a_saved_collector_goes_on_with_its_counters(make: Make, tmp_path: Any) -> None:
    first = make(policy=actor(), total_frames=60, track_policy_version=True)
    first.next()
    first.update_policy_weights_()
    first.next()
    second = make(policy=actor(), total_frames=60, track_policy_version=True)
    second.load_state_dict(saved(first, tmp_path))
    assert second.policy_version == 1
    assert (second.stats()["frames"], second.stats()["batches"]) == (20, 2)
    rest = list(second)
    assert sum(batch.numel() for batch in rest) == 40
    assert all((batch["policy_version"] == 1).all() for batch in rest)


def test_a_saved_collector_acts_with_the_same_weights(make: Make, tmp_path: Any) -> None:
    first = make(policy=actor())
    first.update_policy_weights_(actor())  # not those of the policy that it was given
    second = make(policy=actor())
    second.load_state_dict(saved(first, tmp_path))
    for name, weight in first.policy.state_dict().items():
        assert torch.equal(second.policy.state_dict()[name], weight)
    batch = second.next()
    assert torch.allclose(batch["logits"], first.policy[0].module(batch["observation"]), atol=1e-5)


def test_ids_do_not_collide_with_those_before(make: Make, tmp_path: Any) -> None:
    first = make(CountingEnv((2,), lengths=4), worker_idx=1)
    before = set(torch.cat([first.next()[IDS], first.next()[IDS]]).unique().tolist())
    second = make(CountingEnv((2,), lengths=4), worker_idx=1)
    second.load_state_dict(saved(first, tmp_path))
    later = second.next()
    assert first_step(later) == 0
    assert not before & set(later[IDS].unique().tolist())
    assert (later[IDS] >> 40 == 1).all()


def test_the_random_stream_goes_on(make: Make, tmp_path: Any) -> None:
    first = make(policy=actor(), frames_per_batch=200)
    first.set_seed(3)
    first.next()
    state = saved(first, tmp_path)
    batches = []
    for _ in range(2):
        torch.manual_seed(0)  # none of the collector's business any more
        torch.rand(7)
        other = make(policy=actor(), frames_per_batch=200)
        other.load_state_dict(state)
        batches.append(other.next())
    assert torch.equal(batches[0]["action"], batches[1]["action"])
    assert torch.equal(batches[0]["logits"], batches[1]["logits"])
    noise = make(policy=actor(), frames_per_batch=200)
    noise.set_seed(3)
    assert not torch.equal(noise.next()["action"], batches[0]["action"]), "the stream began anew"


def test_random_frames_are_not_begun_again(make: Make, tmp_path: Any) -> None:
    options = {"init_random_frames": 10, "total_frames": 40}
    first = make(policy=actor(), **options)
    assert (first.next()["logits"] == 0).all()
    second = make(policy=actor(), **options)
    second.load_state_dict(saved(first, tmp_path))
    assert (second.next()["logits"] != 0).any()


def test_whole_episodes_are_kept_and_unfinished_ones_counted_as_dropped(make: Make, tmp_path: Any) -> None:
    options = {"frames_per_batch": 23, "total_frames": 46, "trajs_per_batch": 2}
    first = make(CountingEnv(lengths=5), **options)
    delivered = first.next()  # of four whole episodes and three frames
    state = saved(first, tmp_path)
    second = make(CountingEnv(lengths=5), **options)
    second.load_state_dict(state)
    assert second.stats()["dropped_frames"] == 3
    rest = list(second)
    assert rest[0]["observation"][:, 0, 1].tolist() == [2, 3]  # were waiting in the saved state
    ids = torch.cat([batch[IDS][:, 0] for batch in [delivered, *rest]])
    assert len(ids.unique()) == len(ids) == 8
    assert second.stats()["frames"] == 46
    assert second.stats()["dropped_frames"] == 46 - 8 * 5


def test_a_state_without_weights_can_be_loaded_by_any_policy(make: Make) -> None:
    state = make(policy=lambda td: td.set("action", td["observation"][..., :2])).state_dict()
    assert "policy_state_dict" not in state
    collector = make(policy=actor())
    collector.load_state_dict(state)
    assert collector.next().shape == (10,)


def test_weights_for_a_policy_that_has_none_are_refused(make: Make) -> None:
    state = make(policy=actor()).state_dict()
    collector = make(policy=lambda td: td.set("action", td["observation"][..., :2]))
    with pytest.raises(ValueError, match=r"weights.*none"):
        collector.load_state_dict(state)


def test_weights_of_another_policy_are_refused_unless_not_strict(make: Make) -> None:
    state = make(policy=actor()).state_dict()
    other = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
    with pytest.raises(RuntimeError, match="Missing key"):
        make(policy=other).load_state_dict(state)
    make(policy=other).load_state_dict(state, strict=False)


def test_a_state_of_something_else_is_refused(make: Make) -> None:
    collector = make()
    with pytest.raises(KeyError, match="no state of a collector: it has no env_state_dict, iter, traj_pool"):
        collector.load_state_dict({"frames": 10})
    assert collector.stats()["frames"] == 0


def test_gymnasium_envs_go_on_in_new_episodes(make: Make, tmp_path: Any) -> None:
    first = make(GymEnv(CountingGymEnv()), total_frames=30)
    first.set_seed(1)
    first.next()
    second = make(GymEnv(CountingGymEnv()), total_frames=30)
    second.load_state_dict(saved(first, tmp_path))
    assert [first_step(batch) for batch in second] == [0, 0]
