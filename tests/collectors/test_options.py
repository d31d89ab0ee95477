"""Every argument of Collector does what it says. There is at least one test for each, named after it."""

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn

from swath.collectors import Collector, CollectorConfig, PolicyVersion
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.modules import ExplorationType, set_exploration_type
from swath.testing import CountingEnv, CountingGymEnv, assert_frames_belong, assert_whole_in_a_row

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes collectors that are shut down after the test; of one counting env, and 10 frames in a batch."""
    made: list[Collector] = []

    def build(env: Any = None, policy: Any = None, **options: Any) -> Collector:
        options.setdefault("frames_per_batch", 10)
        made.append(Collector(CountingEnv() if env is None else env, policy, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


def net() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])


def actor() -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.OneHotCategorical,
            return_log_prob=True,
        ),
    )


def keys(batch: TensorDictBase) -> set[Any]:
    return set(batch.keys(True, True))


def test_every_argument_has_a_test() -> None:
    tests = [name for name in globals() if name.startswith("test_")]
    without = [f for f in CollectorConfig.__dataclass_fields__ if not any(t.startswith(f"test_{f}") for t in tests)]
    assert without == []


# -- env and policy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda make: make, lambda make: make(), lambda make: [make], lambda make: [make()]])
def test_create_env_fn_is_an_env_a_factory_or_a_list_of_one(make: Any, wrap: Any) -> None:
    assert_frames_belong(make(wrap(CountingEnv)).next())


@pytest.mark.parametrize("wrap", [lambda make: make, lambda make: make()])
def test_create_env_fn_may_make_a_gymnasium_env(make: Any, wrap: Any) -> None:
    assert_frames_belong(make(wrap(CountingGymEnv)).next())


def test_create_env_kwargs_go_to_the_factory(make: Any) -> None:
    batch = make(CountingEnv, create_env_kwargs={"batch_size": (2,), "lengths": 3}).next()
    assert batch.shape == (2, 5)
    assert batch["next", "done"][0, :, 0].tolist() == [False, False, True, False, False]


def test_policy_none_is_random(make: Any) -> None:
    actions = make(frames_per_batch=200).next()["action"]
    assert actions.sum(-1).eq(1).all()
    assert 0.2 < actions[:, 0].float().mean() < 0.8


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
def test_policy_may_take_a_tensordict_or_tensors(make: Any, policy: Any) -> None:
    assert make(policy=policy).next()["action"].shape == (10, 2)


def test_policy_of_the_wrong_arity_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"takes 2 arguments \(a, b\)"):
        make(policy=lambda a, b: a)


def test_policy_factory_is_called_once(make: Any) -> None:
    calls: list[nn.Module] = []

    def factory() -> nn.Module:
        calls.append(net())
        return calls[-1]

    collector = make(policy_factory=factory, total_frames=40)
    assert len(list(collector)) == 4
    assert len(calls) == 1
    assert collector.policy is calls[0]


def test_trust_policy_calls_it_with_a_tensordict_whatever_its_argument_is_called(make: Any) -> None:
    seen: list[Any] = []

    def policy(observation: Any) -> Any:
        seen.append(observation)
        return observation.set("action", observation["observation"][..., :2])

    assert make(policy=policy, trust_policy=True).next()["action"].shape == (10, 2)
    assert all(isinstance(given, TensorDictBase) for given in seen)


@pytest.mark.parametrize("trust", [True, False])
def test_trust_policy_does_not_look_inside(make: Any, trust: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = make(policy=net(), trust_policy=trust)
    calls: list[Any] = []
    forward = TensorDictModule.forward
    monkeypatch.setattr(TensorDictModule, "forward", lambda self, td: calls.append(td) or forward(self, td))
    collector.next()
    assert len(calls) == (10 if trust else 0)


def test_compile_policy(make: Any) -> None:
    policy = net()
    batch = make(policy=policy, compile_policy={"backend": "eager"}).next()
    assert torch.allclose(batch["action"], policy.module(batch["observation"]), atol=1e-6)


def test_compile_policy_passes_its_arguments_on(make: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    collector = make(policy=net(), compile_policy={"backend": backend, "fullgraph": False})
    collector.next()
    collector.update_policy_weights_({"module.weight": torch.zeros(2, 3), "module.bias": torch.tensor([3.0, 4.0])})
    assert (collector.next()["action"] == torch.tensor([3.0, 4.0])).all()
    assert graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; without, see test_arguments.py")
def test_cudagraph_policy(make: Any) -> None:
    policy = net().to("cuda")
    batch = make(policy=policy, policy_device="cuda", cudagraph_policy=True).next()
    assert torch.allclose(batch["action"].cuda(), policy.module(batch["observation"].cuda()), atol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_fast_policy_spares_the_module_calls(make: Any, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = net()
    collector = make(policy=policy, fast_policy=fast)
    first = collector.next()
    calls: list[Any] = []
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(x) or forward(self, x))
    second = collector.next()
    assert len(calls) == (0 if fast else 10)
    monkeypatch.undo()
    for batch in (first, second):
        assert torch.allclose(batch["action"], policy.module(batch["observation"]), atol=1e-5)


# -- how much -------------------------------------------------------------------------------------------------------


def test_frames_per_batch_counts_all_lanes(make: Any) -> None:
    collector = make(CountingEnv((2, 3)), frames_per_batch=60)
    assert collector.next().shape == (2, 3, 10)
    assert collector.frames_per_batch == 10  # steps
    assert collector.requested_frames_per_batch == 60


def test_frames_per_batch_is_rounded_up_to_whole_steps_with_a_warning(make: Any) -> None:
    with pytest.warns(UserWarning, match=r"frames_per_batch=11 .* 12, whole steps of 2 lanes"):
        collector = make(CountingEnv((2,)), frames_per_batch=11)
    assert collector.next().numel() == collector.requested_frames_per_batch == 12


@pytest.mark.parametrize("total", [None, -1])
def test_total_frames_may_have_no_end(make: Any, total: int | None) -> None:
    collector = make(total_frames=total)
    assert sum(collector.next().numel() for _ in range(50)) == 500
    assert not collector.stats()["completed"]


def test_total_frames_is_rounded_up_to_whole_steps_only(make: Any) -> None:
    assert [b.shape[-1] for b in make(CountingEnv((2,)), frames_per_batch=10, total_frames=25)] == [5, 5, 3]


# -- where ----------------------------------------------------------------------------------------------------------


def test_device_is_where_the_batch_says_it_is(make: Any) -> None:
    assert make(device="cpu").next().device == torch.device("cpu")
    assert make().next().device is None


def test_storing_device_is_where_batches_lie(make: Any) -> None:
    collector = make(storing_device="meta", total_frames=20)
    for batch in collector:
        assert batch.device == torch.device("meta")
        assert batch["observation"].is_meta
    assert collector.stats()["frames"] == 20


def test_storing_device_goes_before_device(make: Any) -> None:
    assert make(device="cpu", storing_device="meta").next().device == torch.device("meta")


def test_policy_device_copies_a_policy_that_lies_elsewhere(make: Any) -> None:
    far = net().to("meta")
    # A policy without memory cannot act; that the copy was made where it was told shows in the attempt alone.
    with pytest.raises(NotImplementedError, match="meta"):
        make(policy=far, policy_device="cpu")
    near = net()
    collector = make(policy=near, policy_device="cpu")
    assert collector.policy is near
    assert collector.next().device is None


def test_env_device_and_policy_device_in_one_place_keep_the_batch_there(make: Any) -> None:
    assert make(env_device="cpu", policy_device="cpu").next().device == torch.device("cpu")
    assert make(env_device="cpu").next().device is None


@pytest.mark.parametrize("value", [True, False])
def test_no_cuda_sync_copies_without_waiting(make: Any, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    original = TensorDictBase.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        waits.append(not kwargs["non_blocking"])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TensorDictBase, "to", to)
    make(storing_device="meta", no_cuda_sync=value).next()
    assert waits == [not value]


# -- how ------------------------------------------------------------------------------------------------------------


def test_max_frames_per_traj_truncates(make: Any) -> None:
    batch = make(CountingEnv(lengths=100), max_frames_per_traj=4).next()
    assert batch["next", "truncated"][:, 0].nonzero()[:, 0].tolist() == [3, 7]
    assert torch.equal(batch["next", "done"], batch["next", "truncated"])
    assert not batch["next", "terminated"].any()
    assert batch["step_count"][:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert batch[IDS].tolist() == [0] * 4 + [1] * 4 + [2] * 2


@pytest.mark.parametrize("value", [None, 0, -1])
def test_max_frames_per_traj_may_be_off(make: Any, value: int | None) -> None:
    batch = make(CountingEnv(lengths=100), max_frames_per_traj=value).next()
    assert "step_count" not in keys(batch)
    assert not batch["next", "done"].any()


def test_init_random_frames_makes_whole_batches_random(make: Any) -> None:
    calls: list[int] = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        calls.append(1)
        td["action"] = torch.tensor([0.0, 7.0])
        td["extra"] = torch.tensor([5.0])
        return td

    collector = make(policy=policy, init_random_frames=15, total_frames=40)
    del calls[:]  # the call that found out what the policy writes
    batches = list(collector)
    assert len(calls) == 20
    for batch in batches[:2]:
        assert (batch["action"].sum(-1) == 1).all()  # one-hot, in the policy's own dtype
        assert (batch["extra"] == 0).all()
    for batch in batches[2:]:
        assert (batch["action"] == torch.tensor([0.0, 7.0])).all()
        assert (batch["extra"] == 5).all()


def test_init_random_frames_leaves_log_probs_at_zero(make: Any) -> None:
    collector = make(policy=actor(), init_random_frames=10, total_frames=20)
    random, acted = list(collector)
    assert (random["action_log_prob"] == 0).all()
    assert (random["logits"] == 0).all()
    assert (acted["action_log_prob"] < 0).all()


@pytest.mark.parametrize("value", [None, 0, -1])
def test_init_random_frames_may_be_off(make: Any, value: int | None) -> None:
    batch = make(policy=lambda td: td.set("action", torch.tensor([0.0, 7.0])), init_random_frames=value).next()
    assert (batch["action"] == torch.tensor([0.0, 7.0])).all()


def test_reset_at_each_iter_begins_new_episodes_with_new_ids(make: Any) -> None:
    batches = list(make(CountingEnv(lengths=100), reset_at_each_iter=True, total_frames=30))
    assert [batch["observation"][0].tolist() for batch in batches] == [[0, episode, 0] for episode in range(3)]
    assert [batch[IDS].unique().tolist() for batch in batches] == [[0], [1], [2]]


def test_exploration_type(make: Any) -> None:
    policy = actor()
    with torch.no_grad():
        policy.module[0].module.weight.zero_()
        policy.module[0].module.bias.copy_(torch.tensor([0.0, 0.1]))
    greedy = make(policy=policy, exploration_type=ExplorationType.MODE, frames_per_batch=100).next()
    assert (greedy["action"][:, 1] == 1).all()
    random = make(policy=policy, exploration_type=ExplorationType.RANDOM, frames_per_batch=100).next()
    assert 0 < random["action"][:, 1].sum() < 100


def test_exploration_type_none_leaves_it_to_the_context(make: Any) -> None:
    collector = make(policy=actor(), exploration_type=None, frames_per_batch=100)
    with set_exploration_type(ExplorationType.MODE):
        batch = collector.next()
    assert torch.equal(batch["action"].argmax(-1), batch["logits"].argmax(-1))


def test_reset_when_done_may_be_said(make: Any) -> None:
    assert_frames_belong(make(reset_when_done=True).next())


def test_set_truncated_marks_only_the_last_step(make: Any) -> None:
    batch = make(CountingEnv((2,), lengths=[[3], [5]]), set_truncated=True).next()
    assert batch["next", "truncated"][..., 0].tolist() == [[False] * 4 + [True], [False] * 5]
    assert batch["next", "terminated"][..., 0].tolist() == [[False, False, True, False, False], [False] * 4 + [True]]
    assert batch["next", "done"][:, -1].all()


def test_interruptor_ends_the_batch_after_the_current_step(make: Any) -> None:
    class AfterThree:
        asked = 0

        def collection_stopped(self) -> bool:
            self.asked += 1
            return self.asked % 3 == 0

    collector = make(CountingEnv((2,)), frames_per_batch=20, total_frames=20, interruptor=AfterThree())
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(2, 3), (2, 3), (2, 3), (2, 1)]
    assert_frames_belong(torch.cat(batches, 1))
    assert collector.stats()["frames"] == 20


# -- what is delivered ----------------------------------------------------------------------------------------------


def test_postproc_decides_what_is_delivered(make: Any) -> None:
    assert keys(make(postproc=lambda batch: batch.select("action")).next()) == {"action"}


def test_a_postproc_that_runs_out_of_something_does_not_end_the_collection_quietly(make: Any) -> None:
    few = iter([1.0])
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(make(postproc=lambda batch: batch.set("scale", torch.full(batch.shape, next(few))), total_frames=50))


def test_postproc_sees_trajectories_after_they_are_split(make: Any) -> None:
    shapes: list[Any] = []
    make(split_trajs=True, postproc=lambda batch: shapes.append(batch.shape) or batch).next()
    make(trajs_per_batch=2, postproc=lambda batch: shapes.append(batch.shape) or batch).next()
    assert shapes == [(2, 5), (2, 5)]


def test_postproc_must_return_the_batch(make: Any) -> None:
    with pytest.raises(TypeError, match=r"postproc.*None"):
        make(postproc=lambda batch: None).next()


def test_split_trajs_pads_and_masks(make: Any) -> None:
    batch = make(CountingEnv(lengths=[3, 4]), split_trajs=True).next()
    assert batch.shape == (3, 4)
    assert batch[MASK].sum(-1).tolist() == [3, 4, 3]
    assert (batch[IDS][~batch[MASK]] == -1).all()
    assert not batch["observation"][~batch[MASK]].any()


@pytest.mark.parametrize("value", [None, False])
def test_split_trajs_may_be_off(make: Any, value: bool | None) -> None:
    assert make(split_trajs=value).next().shape == (10,)


def test_track_traj_ids_may_be_off(make: Any) -> None:
    assert IDS in keys(make().next())
    assert IDS not in keys(make(track_traj_ids=False).next())


def test_return_same_td_overwrites_one_object(make: Any) -> None:
    collector = make(CountingEnv(lengths=1000), return_same_td=True, total_frames=30)
    firsts = []
    objects: set[int] = set()
    for batch in collector:
        objects.add(id(batch))
        firsts.append(int(batch["observation"][0, 2]))
    assert len(objects) == 1
    assert firsts == [0, 10, 20]


def test_return_same_td_gives_a_shorter_batch_as_it_is(make: Any) -> None:
    first, second, third = list(make(return_same_td=True, total_frames=25))
    assert first is second
    assert third.shape == (5,)


@pytest.mark.parametrize("value", [None, True, False])
def test_auto_register_policy_transforms_makes_no_difference(make: Any, value: bool | None) -> None:
    """For what it does elsewhere, see tests/interop: a recurrent policy has its state with any of these."""
    first, second = list(make(auto_register_policy_transforms=value, total_frames=20))
    assert_frames_belong(torch.cat([first, second]))


@pytest.mark.parametrize("value", [None, True, False])
def test_use_buffers_makes_no_difference(make: Any, value: bool | None) -> None:
    first, second = list(make(use_buffers=value, total_frames=20))
    assert_frames_belong(torch.cat([first, second]))


def test_track_policy_version_is_the_version_that_acted(make: Any) -> None:
    """The first frame behind an update has the new version, at the root too."""
    collector = make(policy=net(), track_policy_version=True)
    for version in range(3):
        batch = collector.next()
        assert batch["policy_version"].tolist() == [version] * 10
        assert batch["next", "policy_version"].tolist() == [version] * 10
        assert collector.policy_version == collector.get_policy_version() == version
        collector.update_policy_weights_()
    collector.increment_version()
    assert collector.next()["policy_version"].tolist() == [4] * 10


def test_track_policy_version_of_a_batched_env(make: Any) -> None:
    collector = make(CountingEnv((2,)), net(), track_policy_version=PolicyVersion())
    collector.update_policy_weights_()
    batch = collector.next()
    assert batch["policy_version"].tolist() == batch["next", "policy_version"].tolist() == [[1] * 5] * 2


def test_track_policy_version_may_be_off(make: Any) -> None:
    collector = make(policy=net())
    assert collector.policy_version is None
    assert "policy_version" not in keys(collector.next())
    assert collector.stats()["policy_version"] == 0  # counted all the same


def test_trajs_per_batch_delivers_whole_episodes(make: Any) -> None:
    collector = make(CountingEnv(lengths=[3, 8]), frames_per_batch=4, total_frames=44, trajs_per_batch=2)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(2, 8)] * 4
    assert all(batch[MASK].sum(-1).tolist() == [3, 8] for batch in batches)
    assert collector.stats()["dropped_frames"] == 0


def test_trajs_per_batch_goes_on_where_a_loop_was_left(make: Any) -> None:
    """One rollout holds 20 episodes; leaving the loop loses none of them."""
    collector = make(frames_per_batch=100, total_frames=100, trajs_per_batch=2)
    seen = []
    while True:
        count = len(seen)
        for batch in collector:
            seen.extend(batch["observation"][:, 0, 1].tolist())
            break
        if len(seen) == count:
            break
    assert seen == list(range(20))
    assert collector.stats()["dropped_frames"] == 0


def test_traj_format_cat_puts_episodes_behind_each_other(make: Any) -> None:
    batch = make(CountingEnv(lengths=[3, 8]), trajs_per_batch=2, traj_format="cat").next()
    assert batch.shape == (11,)
    assert MASK not in keys(batch)
    assert assert_whole_in_a_row(batch, lambda lane, episode: [3, 8][episode % 2]) == [(0, 0), (0, 1)]


def test_traj_format_padded_is_the_default(make: Any) -> None:
    said, unsaid = (
        make(CountingEnv(lengths=[3, 8]), trajs_per_batch=2, **form).next() for form in ({"traj_format": "padded"}, {})
    )
    assert said.shape == unsaid.shape == (2, 8)


def test_compact_obs_leaves_observations_out_of_next(make: Any) -> None:
    batch = make(compact_obs=True).next()
    assert "observation" in keys(batch)
    assert set(batch["next"].keys()) == {"reward", "done", "terminated", "truncated"}
    assert_frames_belong(batch, compact=True)


def test_pre_collect_hook_comes_before_every_rollout_and_its_reset(make: Any) -> None:
    class Env(CountingEnv):
        def _reset(self, td: TensorDictBase) -> TensorDictBase:
            calls.append("reset")
            return super()._reset(td)

    calls: list[str] = []
    collector = make(
        Env(lengths=1000), reset_at_each_iter=True, total_frames=20, pre_collect_hook=lambda: calls.append("pre")
    )
    assert len(list(collector)) == 2
    assert calls == ["reset", "pre", "pre", "reset"]


def test_post_collect_hook_gets_what_is_delivered(make: Any) -> None:
    seen: list[TensorDictBase] = []
    batches = list(make(total_frames=20, post_collect_hook=seen.append))
    assert all(given is delivered for given, delivered in zip(seen, batches, strict=True))


def test_post_collect_hook_that_fails_ends_the_collection(make: Any) -> None:
    def hook(batch: TensorDictBase) -> None:
        raise ZeroDivisionError("from the hook")

    collector = make(post_collect_hook=hook)
    with pytest.raises(ZeroDivisionError, match="from the hook"):
        collector.next()
    assert collector.closed


def test_worker_idx_is_part_of_the_ids(make: Any) -> None:
    collector = make(worker_idx=3)
    assert collector.next()[IDS].tolist() == [3 << 40] * 5 + [(3 << 40) + 1] * 5
    assert collector.worker_idx == 3


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(1000))


def test_replay_buffer_takes_what_would_be_delivered(make: Any) -> None:
    kept = buffer()
    assert list(make(replay_buffer=kept, total_frames=25)) == [None] * 3
    assert kept.write_count == len(kept) == 25
    assert_frames_belong(kept[:])


def test_replay_buffer_may_be_left_out(make: Any) -> None:
    assert make(replay_buffer=None).next().shape == (10,)


def test_extend_buffer_writes_once_per_batch(make: Any) -> None:
    kept, seen = buffer(), list[int]()
    policy = TensorDictModule(lambda obs: seen.append(kept.write_count) or obs[..., :2], ["observation"], ["action"])
    collector = make(policy=policy, replay_buffer=kept, total_frames=20)
    seen.clear()  # the policy is tried once before the first step
    list(collector)
    assert seen == [0] * 10 + [10] * 10


def test_extend_buffer_false_writes_after_every_step(make: Any) -> None:
    kept, seen = buffer(), list[int]()
    policy = TensorDictModule(lambda obs: seen.append(kept.write_count) or obs[..., :2], ["observation"], ["action"])
    collector = make(policy=policy, replay_buffer=kept, extend_buffer=False, total_frames=20)
    seen.clear()
    assert list(collector) == [None] * 2
    assert seen == list(range(20))
    assert_frames_belong(kept[:])


def test_trajs_per_write_groups_episodes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, sizes = buffer(), list[int]()
    original = kept.write

    def write(entries: Any, shape: Any, **options: Any) -> Any:
        sizes.append(shape[-1])
        return original(entries, shape, **options)

    monkeypatch.setattr(kept, "write", write)
    list(make(replay_buffer=kept, trajs_per_batch=1, trajs_per_write=3, total_frames=40))
    assert sizes == [15, 15, 10]  # what is left at the end is written too
    assert len(assert_whole_in_a_row(kept[:], lambda lane, episode: 5)) == 8


def test_progress_shows_a_bar(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from swath.collectors import progress

    out = io.StringIO()
    original = progress.tqdm
    monkeypatch.setattr(progress, "tqdm", lambda **options: original(file=out, **options))
    list(make(progress=True, total_frames=20))
    assert re.search(r"20\.0/20\.0", out.getvalue())


# -- several lanes --------------------------------------------------------------------------------------------------


def test_lanes_of_a_serial_env_keep_their_rows(make: Any) -> None:
    factories: list[Any] = [lambda lane=lane: GymEnv(CountingGymEnv(lane)) for lane in range(4)]
    batch = make(SerialEnv(4, factories), frames_per_batch=200).next()
    assert batch.shape == (4, 50)
    assert batch.names == [None, "time"]
    assert_frames_belong(batch)


def test_a_custom_policy_sees_the_lanes_as_its_batch(make: Any) -> None:
    shapes: set[Any] = set()

    def policy(observation: Tensor) -> Tensor:
        shapes.add(observation.shape)
        return observation[..., :2]

    make(CountingEnv((2, 3)), policy, frames_per_batch=60).next()
    assert shapes == {(2, 3, 3)}


def test_any_env_base_will_do(make: Any) -> None:
    assert isinstance(make().env, EnvBase)
