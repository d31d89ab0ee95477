"""What a kind cannot do it really cannot do, and it can do all the rest: the table of `kinds.py` is true."""

from collections.abc import Callable

import pytest
from common import buffer, net, set_to, until
from kinds import ASYNC, EVERY, Kind

from swath.testing import CountingEnv

KINDS = (*EVERY, ASYNC)


def keep_env_open(kind: Kind) -> None:
    """`shutdown(close_env=False)` leaves the env to others."""
    env = CountingEnv()
    collector = kind.build(env if "env_object" not in kind.cannot else None)
    try:
        collector.shutdown(close_env=False)
        assert not env.is_closed
    finally:
        collector.shutdown()


def env_object(kind: Kind) -> None:
    """An env may be given as it is."""
    kind.build([CountingEnv()] * max(1, kind.workers) if kind.workers > 1 else CountingEnv()).shutdown()


def single_answer(kind: Kind) -> None:
    """What is asked for by name is given as it is, and not in a list with one for each worker."""
    with kind.build() as collector:
        assert collector.get_distant_attr("env.num_lanes") == 1


def one_env(kind: Kind) -> None:
    """What was given is the env, in each worker, and not one of those that it is made of."""
    with kind.build() as collector:
        assert collector.getattr_env("lengths") in (5, [5] * kind.workers)


def own_policy(kind: Kind) -> None:
    """The very object that was given acts: what is done to it counts at once."""
    policy = net()
    with kind.build(None, policy) as collector:
        set_to(policy.module, 1.0)
        assert (collector.next()["action"] == 1.0).all()


def any_buffer(kind: Kind) -> None:
    """Anything with `extend` and `sample` is a buffer."""

    class Mine(list):  # type: ignore[type-arg]
        def sample(self) -> None:
            pass

        def extend(self, batch: object) -> None:
            self.append(batch)

    mine = Mine()
    with kind.build(replay_buffer=mine) as collector:
        collector.next()
    assert mine


def share_objects(kind: Kind) -> None:
    """Hooks and factories share the objects of the program that gave them."""
    seen: list[int] = []
    with kind.build(post_collect_hook=lambda batch: seen.append(1)) as collector:
        collector.next()
    assert seen


def choose_workers(kind: Kind) -> None:
    """Workers can be addressed: what is told to one is not told to another."""
    with kind.build(None, net(1.0)) as collector:
        collector.update_policy_weights_(net(2.0), worker_ids=1)
        seen = {float(collector.next()["action"].reshape(-1)[-1]) for _ in range(20)}
        assert 2.0 in seen


def newest_weights(kind: Kind) -> None:
    """The next batch is collected with what was published before it was asked for."""
    policy = net(0.0)
    with kind.build(None, policy) as collector:
        for value in range(20):
            set_to(policy.module, value)
            collector.update_policy_weights_()
            assert (collector.next()["action"] == value).all()


def join(kind: Kind) -> None:
    """A batch has the frames of all workers, as many as were asked for altogether."""
    workers = max(2, kind.workers)
    with kind.build(workers=workers if kind.workers else None, frames_per_batch=10 * workers) as collector:
        assert collector.requested_frames_per_batch == collector.next().numel() == 10 * workers
        assert not kind.workers or collector.frames_per_batch_worker(0) == 10


def run_free(kind: Kind) -> None:
    """`start()` lets it collect into a buffer without anybody who iterates."""
    kept = buffer()
    with kind.build(replay_buffer=kept) as collector:
        collector.start()
        until(lambda: kept.write_count)


ABILITIES: dict[str, Callable[[Kind], None]] = {
    ability.__name__: ability
    for ability in (
        keep_env_open,
        env_object,
        single_answer,
        one_env,
        own_policy,
        any_buffer,
        share_objects,
        choose_workers,
        newest_weights,
        join,
        run_free,
    )
}


def several_times(show: Callable[[Kind], None], kind: Kind) -> None:
    """On a busy machine a trainer may be quicker than a worker is ahead of it, but not each time."""
    for _ in range(10):
        show(kind)


@pytest.mark.parametrize("ability", ABILITIES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_kind_can_what_it_is_not_denied_and_nothing_else(kind: Kind, ability: str) -> None:
    if ability not in kind.cannot:
        ABILITIES[ability](kind)
        return
    with pytest.raises((AssertionError, RuntimeError, TypeError, ValueError, AttributeError)):
        several_times(ABILITIES[ability], kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_abilities_are_known_and_each_lack_has_a_reason(kind: Kind) -> None:
    assert set(kind.cannot) <= set(ABILITIES)
    assert all(kind.cannot.values())
