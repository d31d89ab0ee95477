"""The progress bar: exact at the end, closed whatever happens."""

from collections.abc import Iterator
from typing import Any

import pytest
from inside import tqdm_replaced
from kinds import HERE, Make, over

from swath.collectors import Collector
from swath.testing import CountingEnv, CountingGymEnv, FaultyError, FaultyGymEnv


class Bars:
    """Stands in for tqdm, and keeps the bars that were made."""

    def __init__(self, tqdm: Any) -> None:
        self.made: list[Any] = []
        self._tqdm = tqdm

    def __call__(self, **options: Any) -> Any:
        self.made.append(self._tqdm(disable=False, file=_Nowhere(), **options))
        return self.made[-1]


class _Nowhere:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.fixture
def bars() -> Iterator[Bars]:
    with tqdm_replaced(Bars) as bars:
        yield bars
    assert all(bar.disable for bar in bars.made), "a bar was left open"


def shown(bar: Any) -> str:
    """The last state of the bar."""
    return bar.fp._wrapped.text.rsplit("\r", 1)[-1] if hasattr(bar.fp, "_wrapped") else bar.fp.text.rsplit("\r", 1)[-1]


@pytest.mark.parametrize(
    ("lanes", "total", "frames"), [((), 40, 40), ((), 35, 35), ((2,), 36, 36), ((4,), 33, 36), ((), 3, 3)]
)
def test_exact_at_the_end(bars: Bars, lanes: tuple[int, ...], total: int, frames: int) -> None:
    collector = Collector(CountingEnv(lanes), frames_per_batch=8, total_frames=total, progress=True)
    assert sum(batch.numel() for batch in collector) == frames
    (bar,) = bars.made
    assert bar.n == bar.total == frames
    assert "100%" in shown(bar)


@over(HERE)
def test_every_batch_moves_it(make: Make, bars: Bars) -> None:
    at = []
    for _ in make(frames_per_batch=8, total_frames=24, progress=True):
        at.append(bars.made[0].n)
    assert at == [8, 16, 24]


def test_it_shows_recent_episodes(bars: Bars) -> None:
    for _ in Collector(CountingEnv(lengths=4), frames_per_batch=8, total_frames=24, progress=True):
        pass
    assert "return 10.0, length 4" in shown(bars.made[0])


def test_exact_also_when_episodes_are_delivered(bars: Bars) -> None:
    for _ in Collector(CountingEnv(), frames_per_batch=8, total_frames=52, progress=True, trajs_per_batch=3):
        pass
    assert bars.made[0].n == bars.made[0].total == 52


def test_without_an_end_there_is_no_total(bars: Bars) -> None:
    collector = Collector(CountingEnv(), frames_per_batch=8, progress=True)
    for _, _batch in zip(range(3), collector, strict=False):
        pass
    assert bars.made[0].total is None
    collector.shutdown()


def test_leaving_the_loop_closes_it_and_coming_back_goes_on(bars: Bars) -> None:
    collector = Collector(CountingEnv(), frames_per_batch=8, total_frames=24, progress=True)
    for _ in collector:
        break
    assert bars.made[0].n == 8
    assert bars.made[0].disable
    for _ in collector:
        pass
    assert bars.made[1].initial == 8
    assert bars.made[1].n == bars.made[1].total == 24


def test_shutdown_closes_the_bar_of_next(bars: Bars) -> None:
    collector = Collector(CountingEnv(), frames_per_batch=8, total_frames=24, progress=True)
    collector.next()
    assert not bars.made[0].disable
    collector.shutdown()
    assert bars.made[0].disable


def test_an_error_leaves_it_where_it_was(bars: Bars) -> None:
    collector = Collector(FaultyGymEnv(at=12), frames_per_batch=8, total_frames=24, progress=True)
    with pytest.raises(FaultyError):
        list(collector)
    assert bars.made[0].n == 8


def test_a_restored_collector_begins_where_it_was(bars: Bars) -> None:
    first = Collector(CountingGymEnv(), frames_per_batch=8, total_frames=24)
    first.next()
    second = Collector(CountingGymEnv(), frames_per_batch=8, total_frames=24, progress=True)
    second.load_state_dict(first.state_dict())
    assert len(list(second)) == 2
    assert (bars.made[0].initial, bars.made[0].n) == (8, 24)
    first.shutdown()


def test_no_bar_unless_asked_for(bars: Bars) -> None:
    assert len(list(Collector(CountingEnv(), frames_per_batch=8, total_frames=24))) == 3
    assert bars.made == []
