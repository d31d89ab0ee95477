"""The conformance suite of carriers: subclass in a test file, say how one is made, and its contract is tested.

class TestMyCarrier(CarrierConformance):
    def make_carrier(self, workers, fields):
        return MyCarrier(workers, fields)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from swath.keys import Key
from swath.runtime import carrier as protocol
from swath.runtime.carrier import Answer, Carrier, Ended, Failed, Finished, News, Order, Started, Topic
from swath.runtime.columns import Leaf, Place
from swath.runtime.faults import Failure
from swath.runtime.snapshots import SnapshotContents
from swath.testing.trial_worker import Trial, TrialTask

FIELDS = ("orders", "last")
LEAVES: dict[Key, Leaf] = {"value": Leaf((), torch.float32), ("inner", "count"): Leaf((2,), torch.int64)}
WEIGHTS = SnapshotContents({name: Leaf((5000,), torch.float32) for name in ("first", "second")}, ("extra",))
TOPIC: Topic = ("model", None)
WAIT_S = 30.0
ENDLESS = 2**40


class CarrierConformance:
    """What every carrier must do; see NOTE [Carriers].

    `make_carrier(workers, fields)` makes one that has no workers yet. Where workers run in the thread that waits for
    them (`is_local`), their errors are raised there, and they cannot be killed.
    """

    carrier: Carrier
    _inbox: list[tuple[int, News]]

    def make_carrier(self, workers: int, fields: tuple[str, ...]) -> Carrier:
        """A new carrier."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _two_workers(self) -> Iterator[None]:
        self.carrier, self._inbox, self._numbers = self.make_carrier(2, FIELDS), [], itertools.count(1)
        for index in (0, 1):
            self.carrier.start(index, TrialTask(f"trial {index}"))
            assert self._hear(index, Started) == [Started(f"trial {index}")]
        assert self.carrier.workers == self.carrier.alive() == [0, 1]
        yield
        self.carrier.shutdown()

    def _order(self, index: int, trial: Trial, place: Place | None = None) -> int:
        """Send an order; its ticket."""
        ticket = next(self._numbers)
        self.carrier.send(index, Order(ticket, trial, place))
        return ticket

    def _hear(self, index: int, last: type[News], number: int = 0) -> list[News]:
        """The news of a worker up to one of type `last`, with that ticket or number if one is given."""
        deadline, heard = time.monotonic() + WAIT_S, list[News]()
        while not (heard and isinstance(heard[-1], last) and number in (0, *vars(heard[-1]).values())):
            own = [pair for pair in self._inbox if pair[0] == index]
            if own:
                self._inbox.remove(own[0])
                heard.append(own[0][1])
                continue
            assert time.monotonic() < deadline, f"{last} has not come, only {heard}"
            if self.carrier.wait(0.1):
                self._inbox += self.carrier.receive()
        return heard

    def _ask(self, index: int, request: object) -> Any:
        """What a worker answers, or raises."""
        number = next(self._numbers)
        self.carrier.send(index, protocol.Question(number, request))
        answer = self._hear(index, Answer, number)[-1]
        assert isinstance(answer, Answer)
        if answer.failure is not None:
            raise answer.failure.error("here") if isinstance(answer.failure, Failure) else answer.failure
        value = answer.value
        return cloudpickle.loads(value.data) if isinstance(value, protocol.Packed) else value

    def _report(self, index: int) -> tuple[float, ...]:
        report = self.carrier.report(index)
        return tuple(report[name] for name in FIELDS)

    def test_orders_are_done_in_order_and_each_is_finished_once(self) -> None:
        """By both workers; and nothing else comes."""
        tickets = {index: [self._order(index, Trial(3)) for _ in range(6)] for index in (0, 1)}
        for index in (0, 1):
            news = self._hear(index, Finished, tickets[index][-1])
            assert news == [Finished(ticket, (3, True)) for ticket in tickets[index]]
            with pytest.raises(KeyError, match="unknown"):  # which concerns only who asked
                self._ask(index, "unknown")
            assert self._ask(index, "done") == tickets[index]
        assert self._inbox == []

    @pytest.mark.parametrize("discards", [False, True])
    def test_a_question_comes_before_orders_that_wait(self, discards: bool) -> None:
        """And may discard them: then they are never answered, and those that are sent later are done."""
        first, waiting, number = self._order(0, Trial(ENDLESS)), [self._order(0, Trial()) for _ in range(3)], 1000
        self.carrier.send(0, protocol.Question(number, "done", discards))
        self.carrier.interrupt(0, first)
        before, last = self._hear(0, Answer, number), self._order(0, Trial())
        after = [news.ticket for news in self._hear(0, Finished, last) if isinstance(news, Finished)]
        assert len(before) <= 2  # at most the first order was done
        assert [ticket for ticket in after if ticket != first] == [*([] if discards else waiting), last]

    def test_interrupting_ends_orders_up_to_a_ticket(self) -> None:
        """Those that are being done, and those that come later if they are meant, until it is resumed."""
        self.carrier.interrupt(0, self._order(0, Trial(ENDLESS)))
        second = self._order(0, Trial(50))
        assert self._hear(0, Finished, second)[-1] == Finished(second, (50, True))
        self.carrier.interrupt(0)
        self._hear(0, Finished, self._order(0, Trial(ENDLESS)))
        self.carrier.resume(0)
        fourth = self._order(0, Trial(50))
        assert self._hear(0, Finished, fourth) == [Finished(fourth, (50, True))]

    def test_stopping_again_does_no_harm(self) -> None:
        """Nor does sending to a worker that is gone; others go on, and what was reported can still be seen."""
        ticket = self._order(1, Trial())
        for _ in range(2):
            self.carrier.stop(0)
            assert self.carrier.workers == self.carrier.alive() == [1]
            self._order(0, Trial())
            self._look_at(0)
        self._hear(1, Finished, ticket)
        for _ in range(2):
            self.carrier.shutdown(5.0)
            assert self.carrier.workers == self.carrier.alive() == []
            self._look_at(1)
        assert self._report(1) == (1, ticket)

    def _look_at(self, index: int) -> None:
        """As another thread may at a worker that was just stopped."""
        assert not self.carrier.is_stopped(index)
        assert self.carrier.pid(index) >= 0
        self.carrier.kill(index)

    def test_a_failure_ends_the_worker(self) -> None:
        """What it was is heard before its end."""
        ticket = self._order(1, Trial(2, fails=True))
        if self.carrier.is_local:
            with pytest.raises(ValueError, match=f"failed in order {ticket}"):
                self._hear(1, Finished, ticket)
            with pytest.raises(LookupError, match="cannot be made"):
                self.carrier.start(1, TrialTask(fails=True))
            return
        for kind in (ValueError, LookupError):
            failed, ended = self._hear(1, Ended)
            assert isinstance(failed, Failed)
            assert isinstance(ended, Ended)
            assert isinstance(failed.failure.error("here"), kind)
            self.carrier.start(1, TrialTask(fails=True))

    def test_a_worker_that_is_killed_can_be_replaced(self) -> None:
        """By one that knows nothing of it. All that it had sent before its end is heard, and nothing gets there."""
        if self.carrier.is_local:
            self.carrier.kill(1)
            assert self._ask(1, "done") == []
            return
        first, former = self._order(1, Trial(3)), self.carrier.pid(1)
        self._order(1, Trial(ENDLESS))
        self._hear(1, Finished, first)
        beats = self.carrier.heartbeat(1)
        while self.carrier.heartbeat(1) < beats + 10:
            assert self.carrier.alive() == [0, 1]
        self.carrier.kill(1)
        assert [type(news) for news in self._hear(1, Ended)] == [Ended]
        assert (self.carrier.workers, self.carrier.alive()) == ([0, 1], [0])
        assert self.carrier.unreported_steps(1) >= 10
        assert self._report(1) == (1, first)
        self._order(1, Trial())
        self.carrier.start(1, TrialTask("another"))
        assert self._hear(1, Started) == [Started("another")]
        assert self.carrier.alive() == [0, 1]
        assert self.carrier.pid(1) != former
        assert self._report(1) == (0, 0)
        assert self._ask(1, "done") == []

    def test_what_was_reported_is_seen_when_the_next_news_is_heard(self) -> None:
        """The last report, and the steps since."""
        ticket = self._order(0, Trial(7))
        self._hear(0, Finished, ticket)
        assert (self._report(0), self.carrier.unreported_steps(0)) == ((1, ticket), 0)
        beats = self.carrier.heartbeat(0)
        self._hear(0, Finished, self._order(0, Trial(5, reports=False)))
        assert (self._report(0), self.carrier.unreported_steps(0)) == ((1, ticket), 5)
        assert self.carrier.heartbeat(0) >= beats + 5
        assert self._report(1) == (0, 0)

    def test_data_lie_where_the_order_wanted_them_when_it_is_finished(self) -> None:
        """In the rows of the worker; others are not touched, and one batch after the other may use them."""
        memory, other = (self.carrier.lease(LEAVES, (6, 3), None) for _ in range(2))
        for tensor in (*memory.tensors.values(), *other.tensors.values()):
            tensor.fill_(-1)
        for value in (5, 8):
            tickets = [self._order(i, Trial(2, 10 * i + value), Place(memory, 1 + 2 * i, 2)) for i in (0, 1)]
            for index in (0, 1):
                self._hear(index, Finished, tickets[index])
            for tensor in memory.tensors.values():
                rows = [row.unique().tolist() for row in tensor]
                assert rows == [[-1], [value], [value], [10 + value], [10 + value], [-1]]
        assert all((tensor == -1).all() for tensor in other.tensors.values())

    def test_the_newest_weights_are_there_for_what_is_sent_after_them(self) -> None:
        """All that were ever published; for workers that are subscribed later too."""
        store = self.carrier.open_snapshots(WEIGHTS)
        self.carrier.subscribe(0, TOPIC, store)
        assert self._ask(0, "weights") == {}
        store.publish({"first": torch.ones(5000, device="cpu"), "extra": "one"}, 1)
        assert self._ask(0, "weights") == {"first": [1.0], "extra": "one"}
        store.publish({"second": torch.zeros(5000, device="cpu")}, 4)
        self.carrier.subscribe(1, TOPIC, store)
        for index in (0, 1):
            assert self._ask(index, "weights") == {"first": [1.0], "second": [0.0], "extra": "one"}
        assert store.version == 4

    def test_weights_are_adopted_whole_while_they_are_published(self) -> None:
        """However fast they come, and also when a worker is gone."""
        store = self.carrier.open_snapshots(WEIGHTS)
        for index in (0, 1):
            self.carrier.subscribe(index, TOPIC, store)
        ticket = self._order(0, Trial(ENDLESS))
        self.carrier.stop(1)
        for version in range(200):
            values = torch.full((5000,), float(version), device="cpu")
            store.publish(dict.fromkeys(("first", "second"), values), version)
        self.carrier.interrupt(0)
        finished = self._hear(0, Finished, ticket)[-1]
        assert isinstance(finished, Finished)
        assert finished.receipt[1]  # type: ignore[index]
        assert self._ask(0, "weights") == {"first": [199.0], "second": [199.0]}
