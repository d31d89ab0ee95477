"""Tracing rollouts with torch's profiler."""

import json
from typing import Any

import pytest
from kinds import HERE, SPREAD, Make, over

from swath.collectors import ProfileConfig

QUICK = {"activities": ("cpu",), "record_shapes": False, "with_stack": False}
TEN = {"steps": 3, "batches": 10}


def test_the_trace_is_written_after_the_rollouts_asked_for(make: Make, tmp_path: Any) -> None:
    collector = make(**TEN, worker_idx=4)
    path = tmp_path / "trace_{worker_idx}.json"
    collector.enable_profile(workers=[4], num_rollouts=3, warmup_rollouts=1, save_path=str(path), **QUICK)
    written = []
    for _ in collector:
        written.append((tmp_path / "trace_4.json").exists())
    assert written == [False, False] + [True] * 8
    assert json.loads((tmp_path / "trace_4.json").read_text())["traceEvents"]


@pytest.mark.parametrize(("warmup", "recorded"), [(0, 2), (1, 1)])
def test_warm_up_is_not_recorded(make: Make, warmup: int, recorded: int) -> None:
    profiles: list[Any] = []
    collector = make(**TEN)
    collector.enable_profile(num_rollouts=2, warmup_rollouts=warmup, on_trace_ready=profiles.append, **QUICK)
    assert len(list(collector)) == 10
    (profile,) = profiles
    # A rollout draws its random actions with one call.
    calls = sum(event.count for event in profile.key_averages() if event.key == "aten::random_")
    assert calls == recorded


@pytest.mark.parametrize("times", [1, 2])
def test_the_previous_hook_is_still_called_and_comes_back(make: Make, times: int) -> None:
    """Enabled twice, there is one profiler."""
    seen: list[Any] = []
    collector = make(**TEN, post_collect_hook=seen.append)
    assert collector.profile_config is None
    options = {"num_rollouts": 2, "on_trace_ready": lambda profile: None, **QUICK}
    for _ in range(times):
        collector.enable_profile(**options)
    assert collector.profile_config == ProfileConfig(**options)
    collector.next()
    assert len(seen) == 1
    collector.disable_profile()
    assert collector.profile_config is None
    assert collector.post_collect_hook == seen.append
    collector.disable_profile()


def test_shutdown_writes_what_there_is(make: Make) -> None:
    profiles: list[Any] = []
    collector = make(**TEN)
    collector.enable_profile(num_rollouts=5, warmup_rollouts=0, on_trace_ready=profiles.append, **QUICK)
    collector.next()
    collector.shutdown()
    assert len(profiles) == 1


@over(SPREAD)
def test_chosen_workers_are_traced(make: Make, tmp_path: Any) -> None:
    collector = make(**TEN)
    path = str(tmp_path / "trace_{worker_idx}.json")
    collector.enable_profile(workers=[1], num_rollouts=2, warmup_rollouts=1, save_path=path, **QUICK)
    assert len(list(collector)) == 10
    assert [file.name for file in tmp_path.iterdir()] == ["trace_1.json"]
    assert json.loads((tmp_path / "trace_1.json").read_text())["traceEvents"]


def test_other_workers_are_not_traced(make: Make, tmp_path: Any) -> None:
    collector = make(**TEN, worker_idx=1)
    collector.enable_profile(workers=[0], save_path=str(tmp_path / "trace.json"), **QUICK)
    assert len(list(collector)) == 10
    assert list(tmp_path.iterdir()) == []


@over(HERE)
def test_it_can_be_disabled(make: Make, tmp_path: Any) -> None:
    collector = make(**TEN)
    collector.enable_profile(workers=[0, 1], save_path=str(tmp_path / "{worker_idx}.json"), **QUICK)
    collector.disable_profile()
    list(collector)
    assert list(tmp_path.iterdir()) == []


@over(HERE)
def test_it_must_be_enabled_before_the_first_batch(make: Make) -> None:
    collector = make(**TEN)
    collector.next()
    with pytest.raises(RuntimeError, match="before the first batch"):
        collector.enable_profile()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_rollouts": 2, "warmup_rollouts": 2}, ValueError, "num_rollouts=2 .* warmup_rollouts=2"),
        ({"num_rollouts": 0, "warmup_rollouts": 0}, ValueError, "num_rollouts=0"),
        ({"warmup_rollouts": -1}, ValueError, "warmup_rollouts .* -1"),
        ({"activities": ["cpu", "gpu"]}, ValueError, "'gpu'"),
        ({"activities": ["cuad"]}, ValueError, "Did you mean 'cuda'"),
        ({"num_rollouts": "3"}, TypeError, "num_rollouts must be a whole number, got '3'"),
        ({"with_stack": 1}, TypeError, "with_stack must be True or False"),
        ({"on_trace_ready": 5}, TypeError, "on_trace_ready must be callable"),
        ({"rollouts": 5}, TypeError, "rollouts"),
    ],
)
@over(HERE)
def test_wrong_options_are_refused(make: Make, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(**TEN).enable_profile(**options)
