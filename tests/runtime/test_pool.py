"""Pool: work, questions, and what becomes of workers that fail, die or stall."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from interrupting import Tick, at_instruction, handled, raise_tick
from jobs import Doing, sleep, until

from swath.errors import ClosedError, StallWarning, WorkerDiedError, WorkerRestartedWarning
from swath.runtime import MemoryBlock
from swath.runtime.board import Board
from swath.runtime.carrier import Answer, Carrier, Link, NotNowError, Order, Question
from swath.runtime.local import LocalCarrier, LocalLink
from swath.runtime.pool import Pool
from swath.runtime.processes import ProcessCarrier
from swath.runtime.recovery import Recovery
from swath.runtime.session import Session
from swath.runtime.supervision import LATE_S, Patience, Supervision, WorkerClocks
from swath.runtime.threads import ThreadCarrier
from swath.runtime.work import Work

pytestmark = pytest.mark.timeout(60)
Start = Callable[..., ProcessCarrier]
RESTART, DROP = Supervision(on_failure="restart"), Supervision(on_failure="drop")


@dataclass
class Tasks:
    """The owner of a pool: what its workers are started for, and what it has heard."""

    make: Callable[[int, bool], Any] = lambda index, replaces: Doing()
    heard: list[Any] = field(default_factory=list)
    at_restart: Callable[[int], Any] = lambda index: None

    def task(self, index: int, replaces: bool) -> Any:
        self.heard.append(("task", index, replaces))
        return self.make(index, replaces)

    def lost(self, index: int) -> None:
        self.heard.append(("lost", index))

    def restarted(self, index: int) -> None:
        self.heard.append(("restarted", index))
        self.at_restart(index)


def pool_of(
    carrier: Carrier,
    workers: int = 2,
    tasks: Tasks | None = None,
    supervision: Supervision | None = None,
    **options: Any,
) -> Pool[Work]:
    """A pool whose workers are ready; they may take as long as they like for that."""
    pool: Pool[Work] = Pool(carrier, workers, tasks or Tasks(), Supervision(), "the pool", **options)
    pool.start()
    pool.supervision = supervision or Supervision()
    return pool


@pytest.fixture(params=["processes", "local"])
def carrier(request: pytest.FixtureRequest, start_workers: Start) -> Carrier:
    return start_workers(workers=2) if request.param == "processes" else LocalCarrier(2)


def wait_for(pool: Pool[Work], *works: Work) -> None:
    """Looking for stalls often."""
    while not all(work.is_over for work in works):
        pool.attend(0.02)


def do(pool: Pool[Work], index: int, request: Any = "x") -> Any:
    """The receipt of a piece of work."""
    pool.issue(work := Work(index, request))
    wait_for(pool, work)
    return work.receipt


def die_of(ends: dict[Any, Callable[[], Any]]) -> Callable[[Link, Order], Any]:
    """What is done in work: `ends` names requests that a worker does not survive."""

    def work(link: Link, order: Order) -> Any:
        ends.get(order.request, lambda: None)()
        return os.getpid(), order.request

    return work


def once(block: MemoryBlock, end: Callable[[], Any]) -> Callable[[], Any]:
    """`end`, the first time that it is called in any process."""

    def first() -> None:
        count = block.array((1,), "int64")
        count[0] += 1
        if count[0] == 1:
            end()

    return first


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- work and questions ----------------------------------------------------------------------------------------------


def test_work_is_finished_in_order_and_counted(carrier: Carrier) -> None:
    tasks = Tasks(lambda index, replaces: Doing(begin=lambda link: f"worker {index}"))
    pool = pool_of(carrier, 2, tasks)
    assert pool.indices == [0, 1]
    assert pool.started == {0: "worker 0", 1: "worker 1"}
    assert tasks.heard == [("task", 0, False), ("task", 1, False)]
    works = [Work(0, "a"), Work(0, "b"), Work(1, "c")]
    for work in works:
        pool.issue(work)
    assert len({work.ticket for work in works}) == 3
    assert pool.last_ticket == {0: works[1].ticket, 1: works[2].ticket}
    assert (pool.outstanding(0), pool.outstanding(1)) == (2, 1)
    assert pool.under_way == works
    wait_for(pool, *works)
    assert [work.receipt[1] for work in works] == ["a", "b", "c"]  # type: ignore[index]
    assert [work for work in pool.finished if work.index == 0] == works[:2]
    assert pool.under_way == []
    assert not any(work.is_lost for work in works)


def test_a_receipt_may_be_none(carrier: Carrier) -> None:
    assert do(pool_of(carrier, 2, Tasks(lambda index, replaces: Doing(lambda link, order: None))), 1) is None


def test_a_question_of_another_whose_answer_is_interrupted_is_answered_later() -> None:
    link, me, asked = LocalLink(Board(1, (), private=True), 0), threading.get_ident(), []
    session = Session(Doing(), link)

    def interrupt(job: Doing) -> None:
        asked.append(job)
        if len(asked) == 1:
            raise KeyboardInterrupt

    # Of another; of the one who was interrupted and no longer waits; and what work was discarded for.
    for asker, discards, times in ((me + 1, False, 2), (me, False, 1), (me, True, 2)):
        asked.clear()
        link.to_pool.clear()
        link.to_worker.append(Question(7, interrupt, discards, asker))
        with pytest.raises(KeyboardInterrupt):
            session.answer_questions()
        session.answer_questions()
        assert len(asked) == times
        assert [news for news in link.to_pool if isinstance(news, Answer)] == [Answer(7)] * (times - 1)


def test_what_cannot_be_answered_within_work_is_answered_after_it_unless_the_asker_is_there() -> None:
    """A signal handler is there; a thread is not."""
    is_working, answers = False, list[Any]()

    def answer(job: Doing) -> bool:
        if is_working:
            raise NotNowError("it works")
        return is_working

    def ask() -> None:
        answers.append(pool.ask({0: answer}, "something"))

    def work(link: Link, order: Order) -> None:
        nonlocal is_working
        is_working = True
        asking.start()
        until(lambda: pool._asked)
        for discards in (False, True):
            with pytest.raises(NotNowError, match="signal handler"):
                pool.ask({0: answer}, "something", discards_work=discards)
        is_working = False

    asking = threading.Thread(target=ask)
    pool = pool_of(LocalCarrier(1), 1, Tasks(lambda index, replaces: Doing(work)))
    pool.issue(first := Work(0, "x"))
    wait_for(pool, first)
    assert not first.is_lost
    asking.join(10.0)
    assert answers == [{0: False}]


def test_answers_by_worker(carrier: Carrier) -> None:
    pool = pool_of(carrier)
    assert pool.ask({0: lambda job: "zero", 1: lambda job: "one"}, "numbers") == {0: "zero", 1: "one"}
    assert pool.ask({1: lambda job: None}, "nothing") == {1: None}
    assert pool.ask({}, "nobody") == {}


def test_what_a_question_raises_is_raised_and_the_worker_goes_on(carrier: Carrier) -> None:
    pool = pool_of(carrier)
    with pytest.raises(ZeroDivisionError) as caught:
        pool.ask({0: lambda job: 1, 1: lambda job: 1 / 0}, "a division")
    if not carrier.is_local:
        assert "Raised in worker 1 by a division." in getattr(caught.value, "__notes__", [str(caught.value)])[0]
    assert pool.failure is None
    assert pool.ask({1: lambda job: "alive"}, "x") == {1: "alive"}


def test_a_question_may_discard_work(carrier: Carrier) -> None:
    pool = pool_of(carrier)
    works = [Work(0, n) for n in range(50)]
    for work in works:
        pool.issue(work)
    assert pool.ask({0: lambda job: "x"}, "x", discards_work=True) == {0: "x"}
    assert pool.outstanding(0) == 0
    assert all(work.is_given_up for work in works if work not in pool.finished)
    assert do(pool, 0, "next")[1] == "next"
    receipts = (*(work.receipt for work in pool.finished), *(receipt for _, receipt in pool.unclaimed))
    done = [receipt[1] for receipt in receipts]  # type: ignore[index]
    log = pool.ask({0: lambda job: [each for each in job.log if each != "question"]}, "x")[0]
    assert log == [*range(len(done) - 1), "next"]
    assert set(done) == set(log), "what was done all the same is not lost"  # type: ignore[call-overload]


def test_an_answer_that_does_not_come_in_time(start_workers: Start) -> None:
    pool = pool_of(start_workers(workers=2))
    with pytest.raises(TimeoutError, match=r"Workers \[1\] of the pool have not answered in time: a nap"):
        pool.ask({0: lambda job: 1, 1: lambda job: time.sleep(1.5)}, "a nap", timeout_s=0.2)
    assert pool.ask({1: lambda job: "later"}, "x") == {1: "later"}, "the late answer is nobody's"


def test_several_threads_ask_at_once_while_work_is_done(start_workers: Start) -> None:
    """With questions that are larger than what waits on its way."""
    pool = pool_of(start_workers(workers=2))
    wrong: list[Any] = []

    def keep_asking(name: str) -> None:
        large = name * 400_000
        try:
            for number in range(15):
                wanted = (number, len(large))
                answers = pool.ask(
                    dict.fromkeys((0, 1), lambda job, text=large, number=number: (number, len(text))), name
                )
                if answers != {0: wanted, 1: wanted}:
                    wrong.append((name, answers))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=keep_asking, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for number in range(100):
        assert do(pool, number % 2, number)[1] == number
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()
    assert wrong == []


def test_a_thread_may_attend_while_it_attends(start_workers: Start) -> None:
    """As an owner does that asks a new worker something before its work."""
    pool: Pool[Work]
    tasks = Tasks(
        lambda index, replaces: Doing(die_of({} if replaces else {"end": kill_oneself})),
        at_restart=lambda index: tasks.heard.append(pool.ask({index: lambda job: time.sleep(1.0)}, "a nap")),
    )
    pool = pool_of(start_workers(workers=1), 1, tasks, RESTART)
    begun = time.process_time()
    with pytest.warns(WorkerRestartedWarning):
        assert do(pool, 0, "end")[1] == "end"
    assert tasks.heard[-1] == {0: None}
    assert time.process_time() - begun < 0.5, "it asks again and again instead of waiting"


def test_a_local_worker_may_be_asked_from_within_its_work() -> None:
    """As a hook does that uses its collector: the next work waits until this one is done."""

    def work(link: Link, order: Order) -> Any:
        return order.request, pool.ask({0: lambda job: list(job.log)}, "x")[0]

    pool = pool_of(LocalCarrier(1), 1, Tasks(lambda index, replaces: Doing(work)))
    works = [Work(0, "first"), Work(0, "second")]
    for each in works:
        pool.issue(each)
    wait_for(pool, *works)
    assert works[0].receipt == ("first", ["first", "question"])
    assert works[1].receipt == ("second", ["first", "question", "second", "question"])


def test_work_that_raises_in_a_local_worker_is_over() -> None:
    """As after Ctrl-C: whoever goes on is not made to wait for it."""

    def work(link: Link, order: Order) -> Any:
        if order.request == "end":
            raise KeyboardInterrupt
        return order.request

    pool = pool_of(LocalCarrier(1), 1, Tasks(lambda index, replaces: Doing(work)))
    pool.issue(lost := Work(0, "end"))
    with pytest.raises(KeyboardInterrupt):
        pool.attend(0.02)
    assert lost.is_lost
    assert pool.under_way == []
    assert do(pool, 0, "next") == "next"


# -- work that is done at once -----------------------------------------------------------------------------------------


def local_pool(work: Any) -> Pool[Work]:
    return pool_of(LocalCarrier(1), 1, Tasks(lambda index, replaces: Doing(work)))


def test_work_is_done_at_once_and_counted_as_any_other() -> None:
    pool = local_pool(lambda link, order: None if order.request == "nothing" else order.request)
    for request in ("first", "nothing", "last"):
        assert pool.do(work := Work(0, request))
        assert (work.is_over, work.is_lost) == (True, False)
        assert work.receipt == pool.last_receipt[0] == (None if request == "nothing" else request)
        assert work.ticket == pool.last_ticket[0]
    assert (pool.under_way, list(pool.finished), list(pool.unclaimed)) == ([], [], [])
    assert do(pool, 0, "as ever") == "as ever"


def test_nothing_is_done_at_once_where_something_else_comes_first(start_workers: Start) -> None:
    elsewhere = pool_of(start_workers(workers=1), 1, Tasks(lambda index, replaces: Doing()))
    assert not elsewhere.do(Work(0, "x"))
    pool = local_pool(lambda link, order: order.request)
    pool.issue(waiting := Work(0, "before"))
    assert not pool.do(late := Work(0, "behind"))
    assert (late.is_over, late.ticket, waiting.is_over) == (False, 0, False)
    wait_for(pool, waiting)
    assert pool.do(late)
    pool.shutdown(1.0)
    assert not pool.do(never := Work(0, "x"))
    assert not never.is_over


def test_what_is_done_at_once_may_ask_and_be_forgotten() -> None:
    """As by another thread that sets a seed: what was done of it is told to whoever counts."""

    def work(link: Link, order: Order) -> Any:
        if order.request == "forgotten":
            with pool.section:
                pool._forget_work(0, on_purpose=True)
        return order.request, pool.ask({0: lambda job: len(job.log)}, "x")[0], pool.do(Work(0, "within"))

    pool = local_pool(work)
    assert pool.do(asked := Work(0, "asked"))
    assert asked.receipt == ("asked", 2, False)
    assert not pool.do(forgotten := Work(0, "forgotten"))
    assert (forgotten.is_over, forgotten.is_given_up, forgotten.receipt) == (True, True, None)
    assert list(pool.unclaimed) == [(0, ("forgotten", 4, False))]
    assert pool.do(Work(0, "asked"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_is_done_at_once_and_raises_is_over(error: type[BaseException]) -> None:
    def work(link: Link, order: Order) -> Any:
        if order.request == "end":
            raise error
        return order.request

    pool = local_pool(work)
    with pytest.raises(error):
        pool.do(lost := Work(0, "end"))
    assert (lost.is_over, lost.is_lost, pool.under_way) == (True, True, [])
    assert pool.do(Work(0, "next"))


def test_others_wait_for_their_turn_while_something_is_done_at_once() -> None:
    begun, may_end, answers = threading.Event(), threading.Event(), list[Any]()

    def work(link: Link, order: Order) -> Any:
        begun.set()
        assert may_end.wait(20)
        return order.request

    pool = local_pool(work)
    asker = threading.Thread(target=lambda: answers.append(pool.ask({0: lambda job: "answer"}, "x")[0]))
    worker = threading.Thread(target=lambda: answers.append(pool.do(Work(0, "x"))))
    worker.start()
    assert begun.wait(20)
    asker.start()
    asker.join(0.2)
    assert asker.is_alive()
    assert answers == []
    may_end.set()
    for thread in (worker, asker):
        thread.join(20)
    assert sorted(map(str, answers)) == ["True", "answer"]


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_restart_is_done_again_and_counted_once(late: bool) -> None:
    """Wherever the interrupt comes; and where it did not have to wait, as the start has taken long."""

    def work_or(fail: bool) -> Callable[[Link, Order], Any]:
        return lambda link, order: link.beat(order.ticket) or 1 / (not fail)

    def interrupt(index: int) -> None:
        if late and pool.restarts == 1 and tasks.heard.count(("restarted", 0)) == 1:
            raise Tick

    for number in range(10**6 if late else 1, 10**7, 3):
        tasks = Tasks(lambda index, replaces: Doing(work_or(fail=not replaces)), at_restart=interrupt)
        pool = pool_of(carrier := ThreadCarrier(1), 1, tasks, RESTART)
        pool.issue(work := Work(0, "x"))
        until(partial(carrier.wait, 0.0))
        with handled(raise_tick), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            came = at_instruction(number, partial(pool.attend, 0.0))
            wait_for(pool, work)
        pool.shutdown(1.0)
        assert tasks.heard.count(("lost", 0)) == pool.restarts == 1
        if not came:
            break
    assert number > 300


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ("raise", ZeroDivisionError, r"in worker 1 \(pid \d+\) of the pool while collecting"),
        ("exit", WorkerDiedError, r"Worker 1 \(pid \d+\) has ended with exit code 3 while it was collecting"),
        ("kill", WorkerDiedError, r"Worker 1 \(pid \d+\) was killed by SIGKILL .* while it was collecting"),
    ],
)
def test_a_failure_is_raised_and_raised_again(start_workers: Start, request_: str, error: Any, words: str) -> None:
    ends: dict[Any, Any] = {"raise": lambda: 1 / 0, "exit": lambda: os._exit(3), "kill": kill_oneself}
    tasks = Tasks(lambda index, replaces: Doing(die_of(ends)))
    pool = pool_of(start_workers(workers=2), 2, tasks)
    pid = pool.carrier.pid(1)
    with pytest.raises(error) as caught:
        do(pool, 1, request_)
    text = "\n".join((str(caught.value), *getattr(caught.value, "__notes__", [])))
    assert re.search(words, text)
    assert str(pid) in text
    assert pool.failure is caught.value
    with pytest.raises(error) as again:
        pool.ask({0: lambda job: 1}, "x")
    assert again.value is caught.value
    assert ("lost", 1) not in tasks.heard


@pytest.mark.parametrize("doing", [None, lambda index: f"dreaming ({index})"])
def test_an_idle_worker_that_dies(start_workers: Start, doing: Any) -> None:
    """What it did may be told by the owner."""
    pool = pool_of(start_workers(workers=1), 1, doing=doing)
    pool.carrier.kill(0)
    with pytest.raises(WorkerDiedError, match=r"while dreaming \(0\)" if doing else "while it had nothing to do"):
        attend_for(pool, 20)


def fail_to_begin(link: Link) -> None:
    raise OSError("no env")


@pytest.mark.parametrize("supervision", [Supervision(), RESTART, DROP], ids=lambda one: one.on_failure)
@pytest.mark.parametrize("begin", [fail_to_begin, lambda link: os._exit(3)])
def test_a_worker_that_fails_before_it_is_ready_is_an_error(
    start_workers: Start, begin: Any, supervision: Supervision
) -> None:
    tasks = Tasks(lambda index, replaces: Doing(begin=begin) if index else Doing())
    pool: Pool[Work] = Pool(start_workers(workers=2), 2, tasks, supervision, "the pool")
    with pytest.raises((OSError, WorkerDiedError), match=r"no env|while it was being made"):
        pool.start()
    assert pool.restarts == 0


@pytest.mark.parametrize("description", ["ready", None])
@pytest.mark.parametrize("end", [kill_oneself, lambda: 1 / 0])
def test_a_new_worker_does_the_same_work_and_answers_the_same_questions(
    start_workers: Start, end: Any, description: Any
) -> None:
    end = once(MemoryBlock(8), end)
    tasks = Tasks(lambda index, replaces: Doing(die_of({"end": end}), lambda link: description))
    pool = pool_of(start_workers(workers=2), 2, tasks, RESTART)
    pids = [pool.carrier.pid(index) for index in (0, 1)]
    works = [Work(1, "before"), Work(1, "end"), Work(1, "after"), Work(0, "other")]
    for work in works:
        pool.issue(work)
    with pytest.warns(WorkerRestartedWarning, match=r"Worker 1 of the pool is restarted \(1 of 3\): "):
        wait_for(pool, *works)
    assert pool.ask({1: lambda job: job.log}, "x")[1] == ["end", "after", "question"]
    assert [work.receipt[1] for work in works] == ["before", "end", "after", "other"]  # type: ignore[index]
    assert works[0].receipt[0] == pids[1]  # type: ignore[index]
    assert works[1].receipt[0] == works[2].receipt[0] == pool.carrier.pid(1) != pids[1]  # type: ignore[index]
    assert pool.carrier.pid(0) == pids[0]
    assert pool.restarts == 1
    assert tasks.heard[2:] == [("lost", 1), ("task", 1, True), ("restarted", 1)]


def test_a_question_is_asked_again_of_a_new_worker(start_workers: Start) -> None:
    block = MemoryBlock(8)
    end = once(block, kill_oneself)
    pool = pool_of(start_workers(workers=1), 1, supervision=RESTART)
    with pytest.warns(WorkerRestartedWarning):
        assert pool.ask({0: lambda job: (end(), "answered")[1]}, "x") == {0: "answered"}
    assert block.array((1,), "int64") == 2


def test_each_worker_is_restarted_so_many_times(start_workers: Start) -> None:
    tasks = Tasks(lambda index, replaces: Doing(die_of({"end": kill_oneself})))
    pool = pool_of(start_workers(workers=1), 1, tasks, Supervision(on_failure="restart", max_restarts=2))
    with pytest.warns(WorkerRestartedWarning) as told, pytest.raises(WorkerDiedError) as caught:
        do(pool, 0, "end")
    assert [f"({number} of 2)" in str(one.message) for number, one in enumerate(told, 1)] == [True, True]
    if hasattr(caught.value, "__notes__"):
        assert caught.value.__notes__ == ["It was restarted 2 times before: max_restarts=2."]
    assert pool.restarts == 2


def test_a_new_worker_that_fails_while_it_is_made_is_restarted_too(start_workers: Start) -> None:
    fails = once(MemoryBlock(8), lambda: os._exit(3))
    tasks = Tasks(
        lambda index, replaces: Doing(begin=lambda link: fails()) if replaces else Doing(die_of({"end": kill_oneself}))
    )
    pool = pool_of(start_workers(workers=1), 1, tasks, RESTART)
    with pytest.warns(WorkerRestartedWarning) as told:
        assert do(pool, 0, "end")[1] == "end"
    assert [f"({number} of 3)" in str(one.message) for number, one in enumerate(told, 1)] == [True, True]
    assert "while it was being made" in str(told[1].message)


def test_a_worker_is_dropped_and_the_others_go_on(start_workers: Start) -> None:
    tasks = Tasks(lambda index, replaces: Doing(die_of({"end": kill_oneself})))
    pool = pool_of(start_workers(workers=2), 2, tasks, DROP)
    works = [Work(0, "end"), Work(0, "after"), Work(1, "other")]
    for work in works:
        pool.issue(work)
    with pytest.warns(WorkerRestartedWarning, match="Worker 0 of the pool is dropped, 1 are left: WorkerDiedError"):
        wait_for(pool, *works)
    assert [work.is_lost for work in works] == [True, True, False]
    assert pool.indices == [1]
    assert list(pool.started) == [1]
    assert tasks.heard[2:] == [("lost", 0)]
    with pytest.raises(WorkerDiedError) as caught:
        do(pool, 1, "end")
    assert getattr(caught.value, "__notes__", ["No worker is left."]) == ["No worker is left."]


def test_workers_are_added_and_those_that_cannot_be_concern_nobody(start_workers: Start) -> None:
    fails = [True]
    tasks = Tasks(lambda index, replaces: Doing(begin=lambda link, bad=index == 3 and fails[0]: 1 / (not bad)))
    pool = pool_of(start_workers(workers=4), 2, tasks)
    pool.issue(work := Work(0, "x"))
    with pytest.raises(ZeroDivisionError):
        pool.add(2)
    assert pool.indices == [0, 1]
    wait_for(pool, work)
    fails[0] = False
    with pytest.raises(KeyError):
        pool.add(1, {}.__getitem__)
    assert pool.indices == [0, 1]
    assert pool.add(2) == pool.indices[2:] == [2, 3]
    assert tasks.heard[-4:] == [("task", 2, False), ("restarted", 2), ("task", 3, False), ("restarted", 3)]
    assert [do(pool, index)[1] for index in range(4)] == ["x"] * 4
    pool.issue(lost := Work(2, "y"))
    pool.remove(2)
    assert pool.indices == [0, 1, 3]
    assert lost.is_lost


def test_a_question_to_a_worker_that_is_dropped_has_no_answer(start_workers: Start) -> None:
    pool = pool_of(start_workers(workers=2), 2, supervision=DROP)
    with pytest.warns(WorkerRestartedWarning):
        assert pool.ask({0: lambda job: os._exit(3), 1: lambda job: "left"}, "x") == {1: "left"}
    assert pool.ask({0: lambda job: "dead", 1: lambda job: "left"}, "x", timeout_s=5.0) == {1: "left"}


# -- stalls ----------------------------------------------------------------------------------------------------------


def nap(link: Link, order: Order) -> Any:
    """Sleep for so long; with a minus, beating meanwhile."""
    end = time.monotonic() + abs(order.request)  # type: ignore[arg-type]
    while time.monotonic() < end:
        time.sleep(0.02)
        if order.request < 0:  # type: ignore[operator]
            link.beat(order.ticket)
    return "awake"


def restless(**options: Any) -> Supervision:
    return Supervision(**{"stall_warning_s": 0.15, **options})


def attend_for(pool: Pool[Work], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pool.attend(0.02)


def attend_until(pool: Pool[Work], condition: Callable[[], bool]) -> None:
    until(lambda: condition() or pool.attend(0.02) or condition())


def test_a_stalled_worker_is_named_once(start_workers: Start) -> None:
    pool = pool_of(start_workers(workers=2), 2, Tasks(lambda index, replaces: Doing(nap)), restless())
    words = (
        r"Worker 1 \(pid \d+\) of the pool has made no step for \d\.\d s: a step .* long\. Waiting goes on; .*=0\.15"
    )
    for seconds in (1.0, 0.6):  # it has moved meanwhile
        with pytest.warns(StallWarning, match=words) as told:
            do(pool, 1, seconds)
        assert len(told) == 1


def test_a_worker_that_beats_or_has_nothing_to_do_is_not_stalled(start_workers: Start) -> None:
    pool = pool_of(
        start_workers(workers=2), 2, Tasks(lambda index, replaces: Doing(nap)), restless(stall_warning_s=0.6)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        do(pool, 0, -1.5)


def test_a_worker_is_stalled_that_should_move_or_answer(start_workers: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    moving = False
    pool = pool_of(start_workers(workers=1), 1, None, restless(), is_busy=lambda index: moving)
    attend_for(pool, 0.3)
    moving = True
    pool.expect_progress([0])
    with pytest.warns(StallWarning):
        attend_for(pool, 0.5)
    moving = False
    attend_for(pool, 0.05)
    monkeypatch.setattr("swath.runtime.pool.LOOK_S", 0.02)
    with pytest.warns(StallWarning):
        pool.ask({0: lambda job: time.sleep(0.6)}, "x")


def test_a_stalled_worker_is_killed_in_time(start_workers: Start) -> None:
    supervision = restless(stall_timeout_s=0.4)
    pool = pool_of(start_workers(workers=1), 1, Tasks(lambda index, replaces: Doing(nap)), supervision)
    pool.issue(Work(0, 3600))
    begun = time.monotonic()
    with (
        pytest.warns(StallWarning, match=r"It is killed after stall_timeout_s=0\.4"),
        pytest.raises(WorkerDiedError, match=r"It had made no step for stall_timeout_s=0\.4 seconds"),
    ):
        attend_for(pool, 20)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("has_last_words", [False, True])
def test_a_stalled_worker_is_replaced_as_often_as_it_stalls(
    start_workers: Start, has_last_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its error is told before it ends."""

    def fail(self: ProcessCarrier, index: int) -> None:
        os.kill(self.pid(index), signal.SIGALRM)

    def raise_at_the_end(link: Link) -> None:
        signal.signal(signal.SIGALRM, lambda *_: 1 / 0)

    if has_last_words:
        monkeypatch.setattr(ProcessCarrier, "kill", fail)
    block = MemoryBlock(8)

    def stall_twice(link: Link, order: Order) -> str:
        naps = block.array((1,), "int64")
        naps[0] += 1
        return "awake" if naps[0] > 2 else nap(link, order)

    supervision = restless(on_failure="restart", stall_warning_s=60.0, stall_timeout_s=0.5, max_restarts=20)
    pool = pool_of(
        start_workers(workers=1), 1, Tasks(lambda index, replaces: Doing(stall_twice, raise_at_the_end)), supervision
    )
    words = "ZeroDivisionError" if has_last_words else "stall_timeout_s"
    with pytest.warns(WorkerRestartedWarning, match=words) as told:
        assert do(pool, 0, 3600) == "awake"
    assert len(told) == pool.restarts >= 2  # more, where a new one was slow to start


def test_a_worker_has_so_long_to_start(start_workers: Start) -> None:
    tasks = Tasks(lambda index, replaces: Doing(begin=sleep))
    pool: Pool[Work] = Pool(start_workers(workers=1), 1, tasks, Supervision(start_timeout_s=0.3), "the pool")
    with pytest.raises(TimeoutError, match=r"Worker 0 of the pool has not made its env .* start_timeout_s=0"):
        pool.start()


def test_a_new_worker_in_the_place_of_another_has_so_long_too(start_workers: Start) -> None:
    tasks = Tasks(lambda index, replaces: Doing(begin=sleep) if replaces else Doing(die_of({"end": kill_oneself})))
    pool = pool_of(start_workers(workers=1), 1, tasks, RESTART)
    pool.supervision = Supervision(on_failure="restart", start_timeout_s=0.3, max_restarts=2)
    with pytest.warns(WorkerRestartedWarning) as told, pytest.raises(TimeoutError, match="Worker 0 of the pool"):
        do(pool, 0, "end")
    assert ["TimeoutError" in str(one.message) for one in told] == [False, True]


def test_a_worker_that_is_made_slowly_has_not_stalled(start_workers: Start) -> None:
    """How long that may take is said by `start_timeout_s`; its clock for stalls begins when it is ready."""
    tasks = Tasks(
        lambda index, replaces: (
            Doing(begin=lambda link: time.sleep(1.5)) if replaces else Doing(die_of({"end": kill_oneself}))
        )
    )
    supervision = restless(on_failure="restart", stall_warning_s=60.0, stall_timeout_s=1.0, max_restarts=1)
    pool = pool_of(start_workers(workers=1), 1, tasks, supervision)
    with pytest.warns(WorkerRestartedWarning):
        assert do(pool, 0, "end") is not None
    assert pool.restarts == 1


def test_one_that_gets_nowhere_is_replaced_after_a_pause_and_others_go_on(
    start_workers: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swath.runtime.recovery.PAUSE_S", 1000.0)
    monkeypatch.setattr("swath.runtime.recovery.LONGEST_PAUSE_S", 1000.0)

    def work(link: Link, order: Order) -> Any:
        if order.request == "step":
            link.beat(order.ticket)
        return die_of({"end": kill_oneself})(link, order)

    tasks = Tasks(lambda index, replaces: Doing(work))
    pool = pool_of(start_workers(workers=2), 2, tasks, RESTART)
    do(pool, 1, "step")
    pool.issue(lasting := Work(1, "end"))
    with pytest.warns(WorkerRestartedWarning):
        attend_until(pool, lambda: pool.restarts == 1)
    attend_until(pool, lambda: 1 in pool.recovery.planned)  # this one has not moved
    heard = list(tasks.heard)
    for number in range(5):
        assert do(pool, 0, number)[1] == number
    attend_for(pool, 0.2)
    assert (pool.restarts, tasks.heard, lasting.is_over) == (1, heard, False)
    begun = time.monotonic()
    pool.shutdown(1.0)
    assert time.monotonic() - begun < 20, "a pause is not waited for"


def test_pauses_get_longer_until_something_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("swath.runtime.recovery.time.monotonic", lambda: now[0])
    pauses, recovery = [], Recovery(Tasks())
    for has_moved in (True, *[False] * 8, True, False):
        recovery.plan(0, OSError(), has_moved)
        pauses.append(round(recovery.patience_s(100.0), 3))
        assert len(list(recovery.due())) == (not pauses[-1])
        now[0] += pauses[-1]
        assert len(list(recovery.due())) == bool(pauses[-1])
        assert 0 not in recovery.planned
    assert pauses == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 0, 0.1]


@pytest.mark.parametrize("waits", [True, False])
def test_time_in_which_nobody_ran_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    now, clocks = [100.0], WorkerClocks()
    monkeypatch.setattr("swath.runtime.supervision.time.monotonic", lambda: now[0])

    def pass_(seconds: float) -> bool:
        now[0] += seconds
        return False

    def look(seconds: float) -> tuple[float, float]:
        """After so many seconds, of which one was asked for if it `waits`."""
        clocks.wait(lambda timeout_s: pass_(seconds), 1.0) if waits else pass_(seconds)
        clocks.look()
        return clocks.still_s(0, 7, is_busy=True), clocks.starting_s(0)

    clocks.start(0)
    assert look(1.0)[0] == 0
    assert look(1.0) == (1, 2)
    assert look(60.0) == ((2, 3) if waits else (1, 2)), "we were stopped, as it may have been"
    assert look(1.5)[0] == (3.5 if waits else 2.5)
    # Who does not wait may have been busy elsewhere: what stands still for a second time does so by itself.
    assert look(60.0)[0] == (4.5 if waits else 62.5)
    now[0] += 60.0
    clocks.look()
    assert clocks.still_s(0, 8, is_busy=True) == 0
    assert clocks.has_moved(0, 8)


def test_patience_does_not_count_time_in_which_we_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a node that was silent, nor of a collector that does not come to rest."""
    now = [0.0]
    monkeypatch.setattr("swath.runtime.supervision.time.monotonic", lambda: now[0])
    patience = Patience()
    for seconds in (1.0, 60.0, 1.5):
        now[0] += seconds
        waited = patience.waited_s()
    assert waited == 1.0 + LATE_S + 1.5
    patience.renew()
    assert patience.waited_s() == 0


# -- the end ---------------------------------------------------------------------------------------------------------


def test_a_pool_that_is_shut_down_keeps_no_thread_waiting(start_workers: Start) -> None:
    pool = pool_of(start_workers(workers=2), 2, Tasks(lambda index, replaces: Doing(nap)))
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            pool.ask({0: lambda job: time.sleep(3600)}, "x")
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    begun = time.monotonic()
    pool.shutdown(1.0)
    pool.shutdown(1.0)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert time.monotonic() - begun < 8
    assert [type(error) for error in raised] == [ClosedError] * 3
    assert pool.indices == []


def test_shutting_down_interrupts_work(start_workers: Start) -> None:
    def step(link: Link, order: Order) -> Any:
        while not link.beat(order.ticket):
            time.sleep(0.01)

    pool = pool_of(start_workers(workers=1), 1, Tasks(lambda index, replaces: Doing(step)))
    pool.issue(Work(0, "x"))
    until(lambda: pool.carrier.heartbeat(0) > 3)
    begun = time.monotonic()
    pool.shutdown(30.0)
    assert time.monotonic() - begun < 10, "it was not waited for in vain"
