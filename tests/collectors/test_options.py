"""Every argument of collectors does what it says, in every kind: there is a test for each, named after it."""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from common import StopAfter, actor, buffer, by_lane, first_steps, keys, layout, net, rows, sizes_written
from inside import worker_of
from kinds import ALL, ASYNC, ASYNC_HERE, HERE, MIXED, SINGLE, SYNC, SYNC_HERE, Kind, Make, over
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from swath.collectors import Collector, CollectorConfig, MultiConfig, PolicyVersion
from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.errors import EndlessError, LongEpisodeWarning
from swath.keys import MASK, TRAJ_IDS
from swath.modules import ExplorationType, set_exploration_type
from swath.testing import CountingEnv, CountingGymEnv, assert_frames_belong, assert_whole_in_a_row

WITHOUT_EFFECT = {"collector_class", "weight_updater", "weight_sync_schemes", "weight_recv_schemes"}
ELSEWHERE = {
    "test_conformance.py": ["reset_at_each_iter", "set_truncated", "traj_format", "debug"],
    "test_one_surface.py": ["init_fn"],
    "test_arguments.py": ["num_workers", "num_collectors", "start_timeout_s"],
    "test_buffer_writing.py": ["replay_buffer"],
    "test_delivery.py": ["cat_results", "preemptive_threshold", "slots_per_worker", "max_staleness"],
    "test_weights.py": ["update_at_each_batch"],
    "test_progress.py": ["progress"],
    "faults/test_restarts.py": ["on_worker_failure", "max_restarts"],
    "faults/test_worker_deaths.py": ["stall_warning_s", "stall_timeout_s"],
    "faults/test_shutdown_of_workers.py": ["mp_start_method"],
}
"""By the file in which they are tested."""


def test_every_argument_has_a_test() -> None:
    tests = [*OFF, *(name for name in globals() if name.startswith("test_"))]
    arguments = {field.name for kind in (CollectorConfig, MultiConfig) for field in fields(kind)} - {"create_env_fn"}
    without = {name for name in arguments if not any(name in test for test in tests)}
    assert without - WITHOUT_EFFECT == {name for names in ELSEWHERE.values() for name in names}
    assert all((Path(__file__).parent / file).exists() for file in ELSEWHERE)


# -- env and policy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda make: make, lambda make: make(), lambda make: [make], lambda make: [make()]])
@pytest.mark.parametrize("env", [CountingEnv, CountingGymEnv])
def test_create_env_fn_is_an_env_a_factory_or_a_list_of_one(make: Make, wrap: Any, env: Any) -> None:
    assert_frames_belong(make(wrap(env)).next())


@over(MIXED)
def test_create_env_kwargs_go_to_the_factory(make: Make) -> None:
    batch = make(CountingEnv, lanes=2, steps=5, create_env_kwargs={"batch_size": (2,), "lengths": 3}).next()
    assert rows(batch)["next", "done"][0, :, 0].tolist() == [False, False, True, False, False]


@over([SYNC_HERE])
def test_create_env_kwargs_for_each_worker(make: Make) -> None:
    collector = make(CountingEnv, create_env_kwargs=[{"lengths": 3}, {"lengths": 4}], steps=24)
    assert collector.get_distant_attr("env.lengths") == [3, 4]
    assert collector.next()["next", "done"].sum((1, 2)).tolist() == [8, 6]


@over(HERE)
def test_policy_none_is_random(make: Make) -> None:
    actions = make(steps=200).next()["action"]
    assert actions.sum(-1).eq(1).all()
    assert 0.2 < actions[..., 0].float().mean() < 0.8


@pytest.mark.parametrize(
    "policy",
    [
        net(),
        nn.Linear(3, 2),
        lambda observation: observation[..., :2],
        lambda obs: obs[..., :2],
        lambda td: td.set("action", td["observation"][..., :2]),
    ],
    ids=["TensorDictModule", "nn.Module", "named argument", "other name", "TensorDict function"],
)
@over(HERE)
def test_policy_may_take_a_tensordict_or_tensors(make: Make, policy: Any) -> None:
    assert make(None, policy).next()["action"].shape[-2:] == (10, 2)


@over(HERE)
def test_policy_of_the_wrong_arity_is_refused(make: Make) -> None:
    with pytest.raises(TypeError, match=r"takes 2 arguments \(a, b\)"):
        make(None, lambda a, b: a)


@over(HERE)
def test_policy_factory_is_called_once_for_each_worker(make: Make, kind: Kind) -> None:
    calls: list[nn.Module] = []

    def factory() -> nn.Module:
        calls.append(net())
        return calls[-1]

    collector = make(policy_factory=factory, batches=4)
    assert len(list(collector)) == 4
    assert len(calls) == max(1, kind.workers)
    assert kind.workers or collector.policy is calls[0]


@over(HERE)
def test_trust_policy_calls_it_with_a_tensordict_whatever_its_argument_is_called(make: Make) -> None:
    seen: list[Any] = []

    def policy(observation: Any) -> Any:
        seen.append(observation)
        return observation.set("action", observation["observation"][..., :2])

    assert make(None, policy, trust_policy=True).next()["action"].shape[-1] == 2
    assert seen
    assert all(isinstance(given, TensorDictBase) for given in seen)


@pytest.mark.parametrize("trust", [True, False])
def test_trust_policy_does_not_look_inside(make: Make, trust: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = make(None, net(), trust_policy=trust)
    calls: list[Any] = []
    forward = TensorDictModule.forward
    monkeypatch.setattr(TensorDictModule, "forward", lambda self, td: calls.append(td) or forward(self, td))
    collector.next()
    assert len(calls) == (10 if trust else 0)


@over(HERE, needs="newest_weights")
def test_compile_policy_passes_its_arguments_on(make: Make) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    known = make(None, actor(), compile_policy={"backend": backend})
    known.next()
    assert known.policy_stages == ["MLPStage", "CategoricalStage"]
    assert not graphs, "what is known is quicker than what a compiler makes of it"
    policy = actor()
    collector = make(None, policy, fast_policy=False, compile_policy={"backend": backend, "fullgraph": False})
    batch = collector.next()
    assert torch.allclose(batch["logits"], policy[0].module(batch["observation"]), atol=1e-6)
    collector.update_policy_weights_({"module.0.module.weight": torch.zeros(2, 3)})
    batch = collector.next()
    assert torch.allclose(batch["logits"], policy[0].module.bias.expand_as(batch["logits"]), atol=1e-6)
    assert graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; without, see test_arguments.py")
def test_cudagraph_policy(make: Make) -> None:
    policy = actor().to("cuda")
    batch = make(None, policy, policy_device="cuda", cudagraph_policy=True).next()
    assert torch.allclose(batch["logits"].cuda(), policy[0].module(batch["observation"].cuda()), atol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
@over(HERE, needs="newest_weights")
def test_fast_policy_spares_the_module_calls(
    make: Make, kind: Kind, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = nn.Linear(3, 2)
    collector = make(None, policy, fast_policy=fast)
    first = collector.next()
    calls: list[Any] = []
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(x) or forward(self, x))
    second = collector.next()
    assert len(calls) == (0 if fast else 10 * max(1, kind.workers))
    monkeypatch.undo()
    for batch in (first, second):
        assert torch.allclose(batch["action"], policy(batch["observation"]), atol=1e-5)


# -- how much -------------------------------------------------------------------------------------------------------


def test_frames_per_batch_counts_all_lanes(make: Make) -> None:
    collector = make(CountingEnv((2, 3)), frames_per_batch=60)
    assert collector.next().shape == (2, 3, 10)
    assert collector.frames_per_batch == 10  # steps
    assert collector.requested_frames_per_batch == 60


@over(HERE)
def test_frames_per_batch_is_rounded_up_to_whole_steps_with_a_warning(make: Make, kind: Kind) -> None:
    rounded = 12 if kind.workers and kind.joins else 10
    with pytest.warns(UserWarning, match=rf"frames_per_batch=9 .* {rounded}, whole steps of 2 lanes"):
        collector = make(lanes=2, frames_per_batch=9)
    assert collector.next().numel() == collector.requested_frames_per_batch == rounded


@pytest.mark.parametrize("total", [None, -1])
@over(HERE)
def test_total_frames_may_have_no_end(make: Make, total: int | None) -> None:
    collector = make(total_frames=total)
    per_batch = collector.requested_frames_per_batch
    assert sum(collector.next().numel() for _ in range(50)) == 50 * per_batch
    assert not collector.stats()["completed"]


@over(HERE)
def test_total_frames_is_rounded_up_to_whole_steps_only_and_that_is_said(make: Make, kind: Kind) -> None:
    unit = 4 if kind.workers and kind.joins else 2
    with pytest.warns(UserWarning, match=rf"total_frames=25 is rounded up .*steps of {unit} lanes"):
        collector = make(lanes=2, frames_per_batch=12, total_frames=25)
    sizes = [batch.numel() for batch in collector]
    assert sizes == [12, 12, unit]
    assert len(collector) == 3


@over(HERE)
def test_total_frames_say_how_many_batches_there_are(make: Make) -> None:
    collector = make(frames_per_batch=20, total_frames=90)
    assert len(collector) == 5
    assert make()  # it is something, though it has no length
    for error in (RuntimeError, TypeError, EndlessError):
        with pytest.raises(error, match="endless"):
            len(make())
    with pytest.raises(EndlessError, match="episodes"):
        len(make(batches=5, trajs_per_batch=2))


# -- where ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, None),
        ({"device": "cpu"}, "cpu"),
        ({"storing_device": "cpu"}, "cpu"),
        ({"device": "cpu", "storing_device": "meta"}, "meta"),
        ({"env_device": "cpu"}, None),
        ({"env_device": "cpu", "policy_device": "cpu"}, "cpu"),
    ],
    ids=str,
)
@over(HERE)
def test_device_storing_device_env_device_and_policy_device_say_where_batches_lie(
    make: Make, options: dict[str, Any], place: str | None
) -> None:
    """Where they are stored goes before all; env and policy in one place keep the batch there."""
    for batch in make(batches=2, **options):
        assert batch.device == (None if place is None else torch.device(place))
        assert batch["observation"].is_meta == (place == "meta")


def test_policy_device_copies_a_policy_that_lies_elsewhere(make: Make) -> None:
    far = net().to("meta")
    # A policy without memory cannot act; that the copy was made where it was told shows in the attempt alone.
    with pytest.raises(NotImplementedError, match="meta"):
        make(None, far, policy_device="cpu")
    near = net()
    collector = make(None, near, policy_device="cpu")
    assert collector.policy is near
    assert collector.next().device is None


@pytest.mark.parametrize("value", [True, False])
def test_no_cuda_sync_copies_without_waiting(make: Make, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    original = TensorDictBase.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        waits.append(not kwargs["non_blocking"])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TensorDictBase, "to", to)
    make(storing_device="meta", no_cuda_sync=value).next()
    assert waits == [not value]


# -- how ------------------------------------------------------------------------------------------------------------


OFF: dict[str, list[Any]] = {
    "max_frames_per_traj": [None, 0, -1],
    "reset_when_done": [True],
    "split_trajs": [None, False],
    "auto_register_policy_transforms": [None, True, False],
    "use_buffers": [None, True, False],
}
"""Values that make no difference. For what `auto_register_policy_transforms` does elsewhere, see tests/interop: a
recurrent policy has its state with any of these."""


@pytest.mark.parametrize("name", OFF)
@over(HERE)
def test_what_is_off_makes_no_difference(make: Make, name: str) -> None:
    wanted = layout(make(None, net(), lengths=100).next())
    for value in OFF[name]:
        batch = make(None, net(), lengths=100, **{name: value}).next()
        assert layout(batch) == wanted
        assert not batch["next", "done"].any()
        assert_frames_belong(batch)


@pytest.mark.parametrize("count", [None, 0, -1, 0.5, 1.5, 2, 2.05])
@over(HERE)
def test_init_random_frames_makes_whole_batches_random(make: Make, count: float | None) -> None:
    """All of a batch, until so many frames are collected; what the policy would have written is zero then."""

    def policy(td: TensorDictBase) -> TensorDictBase:
        fill = torch.ones(*td.batch_size, 1)
        return td.update({"action": fill * torch.tensor([0.0, 50.0]), "extra": fill * 5})

    frames = make().requested_frames_per_batch
    limit = None if count is None else int(count * frames)
    is_random = []
    for batch in make(None, policy, init_random_frames=limit, batches=5):
        is_random.append(bool((batch["extra"] == 0).all()))
        wanted = batch["action"].sum(-1) == 1 if is_random[-1] else batch["action"] == torch.tensor([0.0, 50.0])
        assert wanted.all()
    begun = 0 if limit is None or limit <= 0 else -(-limit // frames)
    assert is_random == [number < begun for number in range(5)]


def test_init_random_frames_do_not_ask_the_policy(make: Make) -> None:
    calls: list[int] = []
    policy = TensorDictModule(lambda obs: calls.append(1) or obs[..., :2], ["observation"], ["action"])
    collector = make(None, policy, init_random_frames=15, batches=4)
    del calls[:]  # the call that found out what the policy writes
    list(collector)
    assert len(calls) == 20


@over([SYNC, ASYNC])
def test_init_random_frames_of_processes(make: Make) -> None:
    is_random = []
    for batch in make(None, net(50.0), init_random_frames=30, batches=6):
        is_random.append(bool((batch["action"] != 50.0).any()))
        assert not is_random[-1] or (batch["action"].sum(-1) == 1).all()
    assert sum(is_random) in (2, 3)


@over(HERE)
def test_init_random_frames_leave_log_probs_at_zero(make: Make) -> None:
    random, acted = list(make(None, actor(), init_random_frames=10, batches=2))
    assert (random["action_log_prob"] == 0).all()
    assert (random["logits"] == 0).all()
    assert (acted["action_log_prob"] < 0).all()


@pytest.mark.parametrize("explores", [ExplorationType.MODE, ExplorationType.RANDOM, None])
@over(ALL, needs="newest_weights")
def test_exploration_type(make: Make, kind: Kind, explores: Any) -> None:
    """None leaves it to the policy, and to what holds around it where it runs."""
    policy = actor(default_interaction_type=ExplorationType.MODE)
    with torch.no_grad():
        policy[0].module.weight.zero_()
        policy[0].module.bias.copy_(torch.tensor([0.1, 0.2]))
    collector = make(None, policy, exploration_type=explores, steps=100)
    with set_exploration_type(ExplorationType.RANDOM):
        batch = collector.next()
    is_greedy = bool((batch["action"] == torch.tensor([0, 1])).all())
    assert is_greedy == (explores is ExplorationType.MODE or (explores is None and "share_objects" in kind.cannot))


@over(ALL)
def test_interruptor_ends_the_batch_after_the_current_step(make: Make) -> None:
    """Where batches are joined, what a worker has not made is left out by the mask."""
    collector = make(lengths=100, steps=10, batches=3, interruptor=StopAfter(3))
    parts = []
    for batch in collector:
        mask = batch.get(MASK, torch.ones(batch.shape, dtype=torch.bool))
        parts.extend(row[real] for row, real in zip(rows(batch), rows(mask), strict=True))
    assert max(map(len, parts)) == 3
    for own in by_lane(part.unsqueeze(0) for part in parts).values():
        assert_frames_belong(own)
    assert collector.stats()["frames"] == sum(map(len, parts)) == collector.config.total_frames


# -- what is delivered ----------------------------------------------------------------------------------------------


@over(HERE)
def test_postproc_decides_what_is_delivered(make: Make) -> None:
    assert keys(make(postproc=lambda batch: batch.select("action")).next()) == {"action"}


@over(HERE)
def test_postproc_that_runs_out_of_something_does_not_end_the_collection_quietly(make: Make) -> None:
    few = iter([1.0])
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(make(postproc=lambda batch: batch.set("scale", torch.full(batch.shape, next(few))), batches=5))


@over(HERE)
def test_postproc_sees_trajectories_after_they_are_split(make: Make) -> None:
    shapes: list[Any] = []
    make(split_trajs=True, postproc=lambda batch: shapes.append(batch.shape[-1]) or batch).next()
    make(trajs_per_batch=2, postproc=lambda batch: shapes.append(tuple(batch.shape)) or batch).next()
    assert shapes == [5, (2, 5)]


@pytest.mark.parametrize("kept", [None, buffer()], ids=["delivered", "written"])
@over(HERE)
def test_postproc_must_return_the_batch(make: Make, kept: Any) -> None:
    with pytest.raises(TypeError, match=r"postproc.*returned None"):
        make(postproc=lambda batch: None, replay_buffer=kept).next()


@over(HERE)
def test_track_traj_ids_may_be_off(make: Make) -> None:
    assert TRAJ_IDS in keys(make().next())
    batch = make(track_traj_ids=False).next()
    assert "collector" not in batch
    assert_frames_belong(batch)


@over(HERE, needs="newest_weights")
def test_return_same_td_overwrites_one_object(make: Make) -> None:
    collector = make(lengths=1000, return_same_td=True, frames_per_batch=20, total_frames=50)
    firsts, objects = [], []
    for batch in collector:
        objects.append(batch)
        firsts.append(int(rows(batch)[0, 0]["observation"][2]))
    steps = objects[0].shape[-1]
    assert firsts == [0, steps, 2 * steps]
    assert objects[0] is objects[1]
    assert objects[2].shape[-1] == steps // 2  # a shorter one is given as it is


@over([ASYNC_HERE])
def test_return_same_td_of_one_worker(make: Make) -> None:
    batches = list(make(workers=1, lengths=100, return_same_td=True, batches=3))
    assert batches[0] is batches[1] is batches[2]
    assert first_steps(batches[0]) == [20]


@over(HERE, needs="newest_weights")
def test_track_policy_version_is_the_version_that_acted(make: Make) -> None:
    """The first frame behind an update has the new version, at the root too."""
    collector = make(None, net(), track_policy_version=PolicyVersion(), lanes=2)
    for version in range(3):
        batch = collector.next()
        assert (batch["policy_version"] == version).all()
        assert torch.equal(batch["policy_version"], batch["next", "policy_version"])
        assert batch["policy_version"].shape == batch.shape
        assert collector.policy_version == collector.get_policy_version() == version
        collector.update_policy_weights_()
    collector.increment_version()
    assert (collector.next()["policy_version"] == 4).all()


@over(HERE)
def test_track_policy_version_is_on_where_a_batch_may_be_older_than_the_weights(make: Make, kind: Kind) -> None:
    for options, is_on in ({}, not kind.joins or kind.many_envs), ({"track_policy_version": False}, False):
        collector = make(None, net(), **options)
        assert ("policy_version" in keys(collector.next())) == is_on
        assert collector.stats()["policy_version"] == 0  # counted all the same


@over(HERE)
def test_trajs_per_batch_goes_on_where_a_loop_was_left(make: Make) -> None:
    """One rollout holds 20 episodes of each lane; leaving the loop loses none of them."""
    collector = make(steps=100, batches=2, trajs_per_batch=2)
    seen: list[tuple[float, float]] = []
    while True:
        count = len(seen)
        for batch in collector:
            seen.extend(tuple(row[0, :2].tolist()) for row in batch["observation"])
            break
        if len(seen) == count:
            break
    assert len(seen) == len(set(seen)) == collector.stats()["frames"] // 5
    assert collector.stats()["dropped_frames"] == 0


@over(HERE)
def test_trajs_per_batch_leaves_frames_to_iterator(make: Make) -> None:
    collector = make(trajs_per_batch=2, batches=5)
    assert next(iter(collector.iterator())).numel() == collector.requested_frames_per_batch
    for episodes in collector:
        assert episodes[MASK].sum(1).tolist() == [5, 5]
        assert (episodes["observation"][:, 0, 2] == 0).all()


def warned_of_long_episodes(collector: Any) -> list[str]:
    with pytest.warns(LongEpisodeWarning) as caught:
        list(collector)
    return [str(one.message) for one in caught if one.category is LongEpisodeWarning]


@pytest.mark.parametrize("kept", [None, buffer], ids=["delivered", "written"])
@over(HERE)
def test_trajs_per_batch_warns_once_of_episodes_that_do_not_end(
    make: Make, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would be delivered for ever, and memory would grow."""
    monkeypatch.setattr("swath.data.episodes.LONG", 30)
    collector = make(lengths=10**9, batches=8, trajs_per_batch=1, replay_buffer=kept and kept())
    told = warned_of_long_episodes(collector)
    assert len(told) == (collector.num_workers if kept else 1)  # each that has episodes to wait for
    assert re.search(r"An episode has 30 frames .*MB.*max_frames_per_traj=", told[0])


@over([SYNC])
def test_trajs_per_batch_warns_of_episodes_that_are_waited_for_elsewhere(make: Make) -> None:
    options = {"workers": 1, "trajs_per_batch": 1, "replay_buffer": buffer()}
    collector = make(lambda: CountingGymEnv(lengths=10**9), steps=26_000, batches=2, **options)
    assert "has 52,000 frames" in warned_of_long_episodes(collector)[0]


@over(HERE)
def test_compact_obs_leaves_observations_out_of_next(make: Make) -> None:
    batch = make(compact_obs=True).next()
    assert "observation" in keys(batch)
    assert set(batch["next"].keys()) - {"policy_version"} == {"reward", "done", "terminated", "truncated"}
    assert_frames_belong(batch, compact=True)


# -- hooks ----------------------------------------------------------------------------------------------------------


def test_pre_collect_hook_comes_before_every_rollout_and_its_reset(make: Make) -> None:
    class Env(CountingEnv):
        def _reset(self, td: TensorDictBase) -> TensorDictBase:
            calls.append("reset")
            return super()._reset(td)

    calls: list[str] = []
    collector = make(
        Env(lengths=1000), reset_at_each_iter=True, batches=2, pre_collect_hook=lambda: calls.append("pre")
    )
    assert len(list(collector)) == 2
    assert calls == ["reset", "pre", "pre", "reset"]


@over(MIXED)
def test_post_collect_hook_may_change_what_is_delivered(make: Make) -> None:
    def hook(batch: TensorDictBase) -> None:
        batch["next", "reward"].fill_(7.0)

    assert (make(post_collect_hook=hook).next()["next", "reward"] == 7).all()


@over(HERE)
def test_post_collect_hook_gets_what_each_rollout_gave(make: Make) -> None:
    seen: list[TensorDictBase] = []
    batches = list(make(batches=4, post_collect_hook=lambda batch: seen.append(batch.clone())))
    given, delivered = by_lane(seen), by_lane(batches)
    assert given.keys() == delivered.keys()
    assert all((given[lane] == delivered[lane]).all() for lane in given)


@over(HERE)
def test_post_collect_hook_that_fails_ends_the_collection(make: Make) -> None:
    def hook(batch: TensorDictBase) -> None:
        raise ZeroDivisionError("from the hook")

    collector = make(post_collect_hook=hook)
    with pytest.raises(ZeroDivisionError, match="from the hook"):
        collector.next()
    assert collector.closed


@over(ALL, needs="newest_weights")
def test_post_collect_hook_and_pre_collect_hook_may_be_replaced(make: Make, kind: Kind, tmp_path: Path) -> None:
    def note(what: str) -> Any:
        return lambda *_: (tmp_path / what).open("a").write("+")

    assert make().pre_collect_hook is make().post_collect_hook is None
    before, behind = note("before"), note("behind")
    collector = make(pre_collect_hook=before, post_collect_hook=behind)
    assert collector.pre_collect_hook is before
    assert collector.post_collect_hook is behind
    collector.next()
    other = note("other")
    collector.post_collect_hook = other  # which is the same as the method
    assert collector.post_collect_hook is other
    collector.next()
    collector.set_post_collect_hook(None)
    collector.pre_collect_hook = None
    assert collector.pre_collect_hook is collector.post_collect_hook is None
    collector.next()
    count = max(1, kind.workers)
    found = {path.name: len(path.read_text()) for path in tmp_path.iterdir()}
    assert found == {"before": 2 * count, "behind": count, "other": count}


@over(HERE)
def test_worker_idx_is_where_the_numbers_of_workers_begin(make: Make, kind: Kind) -> None:
    collector = make(worker_idx=3)
    assert collector.worker_idx == 3
    seen = {worker_of(row) for _ in range(6) for row in rows(collector.next())}
    assert seen == {3 + number for number in range(max(1, kind.workers))}


# -- buffers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extend", [True, False])
def test_extend_buffer_writes_once_per_batch_or_after_every_step(make: Make, extend: bool) -> None:
    kept, seen = buffer(), list[int]()
    policy = TensorDictModule(lambda obs: seen.append(kept.write_count) or obs[..., :2], ["observation"], ["action"])
    collector = make(None, policy, replay_buffer=kept, extend_buffer=extend, batches=2)
    seen.clear()  # the policy is tried once before the first step
    assert list(collector) == [None] * 2
    assert seen == ([0] * 10 + [10] * 10 if extend else list(range(20)))
    assert_frames_belong(kept[:])


def test_trajs_per_write_groups_episodes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = buffer()
    sizes = sizes_written(kept, monkeypatch)
    list(make(replay_buffer=kept, trajs_per_batch=1, trajs_per_write=3, batches=4))
    assert sizes == [15, 15, 10]  # what is left at the end is written too
    assert len(assert_whole_in_a_row(kept[:], lambda lane, episode: 5)) == 8


# -- workers --------------------------------------------------------------------------------------------------------


class ThreadCounter(nn.Module):
    """Acts by the number of torch's threads."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.full_like(observation[..., :2], float(torch.get_num_threads()))


@over([SYNC])
def test_num_threads_and_num_sub_threads(make: Make) -> None:
    before = torch.get_num_threads()
    collector = make(None, ThreadCounter(), num_sub_threads=1)
    assert (collector.next()["action"] == 1).all()
    assert torch.get_num_threads() == before, "the threads of this process are none of its business"
    collector.shutdown()
    more = make(None, ThreadCounter(), num_sub_threads=2, num_threads=before + 1)
    assert (more.next()["action"] == 2).all()
    assert torch.get_num_threads() == before + 1
    more.shutdown()
    more.shutdown()
    assert torch.get_num_threads() == before


def test_a_worker_watches_a_policy_without_torchs_compiler() -> None:
    """Which took a second to import, in each of them."""
    hook = lambda batch: batch.set("action", batch["action"].fill_("torch._dynamo" in sys.modules))  # noqa: E731
    with SYNC.build(None, ThreadCounter(), post_collect_hook=hook) as collector:
        assert not collector.next()["action"].any()


# -- batches --------------------------------------------------------------------------------------------------------


@over(MIXED)
def test_stats(make: Make, kind: Kind) -> None:
    """A collector without workers counts as one."""
    collector = make(lanes=2, lengths=4, steps=12, batches=4)
    workers = 2 if kind.many_envs else max(1, kind.workers)
    assert collector.stats()["workers_alive"] == workers
    for _ in collector:
        pass
    stats = collector.stats()
    assert stats["frames"] == stats["total_frames"] == 4 * stats["requested_frames_per_batch"]
    assert stats["completed"]
    assert stats["batches"] == 4
    assert stats["episodes"] == stats["frames"] // 4
    assert stats["mean_return"] == 10
    assert stats["mean_length"] == 4
    assert stats["dropped_frames"] == stats["worker_restarts"] == stats["lost_frames"] == 0
    assert (stats["workers"], stats["workers_alive"]) == (workers, 0)
    assert all(isinstance(value, int | float | bool) for value in stats.values())
    each = collector.stats(workers="per_worker")
    reporting = range(max(1, kind.workers))
    assert {name.partition("/")[0] for name in each} == {f"worker_{number}" for number in reporting}
    assert sum(each[f"worker_{number}/frames"] for number in reporting) == stats["frames"]
    assert collector.stats(workers="both") == {**stats, **each}
    json.dumps(collector.stats("both"))


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in ALL), (SINGLE, {"trajs_per_batch": 2})], ids=str
)
def test_batches_are_ordinary_tensors_also_in_inference_mode(make: Make, kind: Kind, options: dict[str, Any]) -> None:
    """Wherever the collector was made and asked, what it delivers can be trained on, and its weights change."""
    layer = nn.Linear(3, 1)
    with torch.inference_mode():
        collector = make(CountingGymEnv, net(1.0), **options)
        inside = collector.next()
    for batch in (inside, collector.next()):
        (layer(batch["observation"]) - batch["next", "reward"]).square().mean().backward()
        assert layer.weight.grad is not None
        for value in batch.values(True, True):
            assert type(value) is Tensor
            assert value.is_contiguous()
            assert not value.is_inference()
            assert not value.requires_grad
        assert batch.device is None
    if kind in (SYNC_HERE, ASYNC_HERE):  # the copies that act there were made in inference mode, and stay as they are
        return
    collector.update_policy_weights_(net(2.0))
    for _ in range(500):  # one worker may be much slower than the other, and still have an old batch to deliver
        batch = collector.next()
        if (batch["action"][batch.get(MASK, torch.ones(batch.shape, dtype=torch.bool))] == 2).all():
            break
    else:
        pytest.fail("The new weights have not arrived.")


@over(HERE)
def test_lanes_of_a_serial_env_keep_their_rows(make: Make) -> None:
    env = lambda: SerialEnv(4, [lambda lane=lane: GymEnv(CountingGymEnv(lane)) for lane in range(4)])  # noqa: E731
    batch = make(env, lanes=4, steps=50).next()
    assert batch.shape[-2:] == (4, 50)
    assert batch.names[-1] == "time"
    for part in batch.reshape(-1, 4, 50):
        assert_frames_belong(part)


@over(HERE, needs="one_env")
def test_a_custom_policy_sees_the_lanes_as_its_batch(make: Make) -> None:
    shapes: set[Any] = set()

    def policy(observation: Tensor) -> Tensor:
        shapes.add(observation.shape)
        return observation[..., :2]

    collector = make(lambda: CountingEnv((2, 3)), policy, lanes=6)
    collector.next()
    assert shapes == {(2, 3, 3)}
    assert isinstance(collector, Collector) <= isinstance(getattr(collector, "env", None), EnvBase)
