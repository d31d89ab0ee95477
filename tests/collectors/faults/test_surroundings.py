"""Programs in which the server of workers is killed or slow, and signals and descriptors are not as usual."""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
from common import until
from fault_tools import LONG, Program, advance, assert_ended_well
from inside import server_of_workers
from kinds import ALL_FALLIBLE, ASYNC, Make, over

from swath.testing import assert_frames_belong

pytestmark = pytest.mark.timeout(120)


@over(ALL_FALLIBLE)
@pytest.mark.filterwarnings("ignore:Worker")
def test_another_server_takes_the_place_of_one_that_was_killed(make: Make) -> None:
    """All workers end with it. It may still seem to be there when the first of them is restarted."""
    collector = make(on_worker_failure="restart", max_restarts=50)
    for _ in range(12 if LONG else 1):
        advance(collector)
        former = server_of_workers().pid
        os.kill(former, signal.SIGKILL)
        until(lambda former=former: advance(collector) is not None and server_of_workers().pid != former)


SLOW = """
import sys, time
if any("runtime.server import main" in argument for argument in sys.orig_argv):
    time.sleep(3600)
"""


def test_a_server_that_imports_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`start_timeout_s` holds for it, too. Ctrl-C ends the program, and comes to nobody else."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    text = """
    try:
        build(SYNC, start_timeout_s=0.5)
    except TimeoutError as error:
        print(error)
    build(SYNC)
    """
    with Program(text) as program:
        assert "start_timeout_s=0.5" in program.says()
        time.sleep(0.5)  # Python loses an interrupt that comes while it finalises something, as what the error held
        os.killpg(program.popen.pid, signal.SIGINT)
        assert program.ends(3) == -signal.SIGINT
        assert_ended_well(program, tracebacks=1)


def test_a_program_that_saves_its_state_when_its_group_is_terminated() -> None:
    """As schedulers do it, and terminals that are closed: the program decides what becomes of its workers.

    What it blocks concerns them as little.
    """
    text = """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    stop = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.append(1))
    collectors = [build(kind) for kind in FALLIBLE]
    print("ready")
    while len(stop) < 2:
        for collector in collectors:
            advance(collector)
    for collector in collectors:
        advance(collector)
        print("saved", len(collector.state_dict()) > 0)
    begun = time.monotonic()
    collectors[0].shutdown()
    os.kill(collectors[1].worker_pids[0], signal.SIGKILL)
    print("SIGKILL" in str(advance_until_it_raises(collectors[1])), time.monotonic() - begun < 3)
    """
    with Program(text) as program:
        assert program.says() == "ready"
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.killpg(program.popen.pid, number)
        assert [program.says() for _ in range(4)] == ["saved True"] * 3 + ["True True"], program.errors
        assert program.ends(3) == 0
        assert_ended_well(program)


@over([ASYNC])
def test_many_kept_batches_and_few_descriptors(make: Make) -> None:
    """Of all workers together: they stay in memory, and descriptors are left for other things."""
    collector = make(workers=6)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    newest = os.dup(0)
    os.close(newest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(128, newest + 60), before[1]))
    try:
        kept = [collector.next() for _ in range(184)]
        for fd in [os.dup(0) for _ in range(10)]:
            os.close(fd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for batch in kept:
        assert_frames_belong(batch)
