"""Whole programs: however they end, they end soon, with one traceback at most, and nothing of theirs is left."""

import os
import signal
from pathlib import Path

import pytest
from fault_tools import Program, assert_ended_well, descendants, exit_of_idle_program_s, memory_names, until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def _known_idle_exit() -> None:
    exit_of_idle_program_s()


COLLECT = """
collectors = [build(kind) for kind in KINDS]
for collector in collectors:
    advance(collector)
print("ready", *(pid for collector in collectors for pid in collector.worker_pids))
"""
LONG_STEP = """
collectors = [build(kind, doing(sleep_long, at=3)) for kind in KINDS]
for collector in collectors[:2]:
    threading.Thread(target=advance_quietly, args=(collector,), daemon=True).start()
until(lambda: all(collector._workers.board.row(1)["steps"] >= 2 for collector in collectors))
print("ready")
"""
TRAIN = """
while True:
    for collector in collectors:
        advance(collector)
"""
SLEEP = "\ntime.sleep(3600)"


def interrupt(program: Program, whom: str = "group") -> None:
    if whom == "parent":
        os.kill(program.popen.pid, signal.SIGINT)
    else:
        os.killpg(program.popen.pid, signal.SIGINT)


def test_a_program_that_forgets_shutdown(tmp_path: Path) -> None:
    with Program(f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n" + COLLECT) as program:
        program.says()
        assert program.ends(3) == 0
        assert_ended_well(program)
    assert not list(tmp_path.iterdir())


def test_a_program_that_forgets_shutdown_in_a_long_step() -> None:
    with Program(LONG_STEP) as program:
        program.says()
        assert program.ends(3) == 0
        assert_ended_well(program)


def test_a_program_that_raises() -> None:
    with Program(COLLECT + "\nraise ZeroDivisionError('mine')") as program:
        program.says()
        assert program.ends(3) == 1
        assert_ended_well(program, tracebacks=1)
        assert program.errors.rstrip().endswith("ZeroDivisionError: mine")


@pytest.mark.parametrize("whom", ["parent", "group"])
def test_ctrl_c(whom: str) -> None:
    with Program(COLLECT + TRAIN) as program:
        program.says()
        interrupt(program, whom)
        assert program.ends(3) == -signal.SIGINT
        assert_ended_well(program, tracebacks=1)
        assert program.errors.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_in_a_long_step() -> None:
    with Program(LONG_STEP + SLEEP) as program:
        program.says()
        interrupt(program)
        assert program.ends(3) == -signal.SIGINT
        assert_ended_well(program, tracebacks=1)


def test_ctrl_c_while_workers_are_made() -> None:
    text = """
    build("async").shutdown()
    print("ready")
    build("sync", [lambda: time.sleep(3600)] * 2)
    """
    with Program(text) as program:
        program.says()
        until(lambda: len(descendants(program.popen.pid)) >= 3)
        interrupt(program)
        assert program.ends(5) == -signal.SIGINT
        assert_ended_well(program, tracebacks=1)


def test_a_caught_ctrl_c_leaves_a_program_that_can_go_on() -> None:
    text = """
    collector = build("sync")
    try:
        print("ready")
        while True:
            advance(collector)
    except KeyboardInterrupt:
        other = build("async")
        advance(other)
        other.shutdown()
        print("went on")
    """
    with Program(text) as program:
        program.says()
        interrupt(program)
        assert program.says() == "went on"
        assert program.ends(3) == 0
        assert_ended_well(program)


def test_a_program_that_is_terminated() -> None:
    with Program(COLLECT + SLEEP) as program:
        program.says()
        os.kill(program.popen.pid, signal.SIGTERM)
        assert program.ends(5) == -signal.SIGTERM


@pytest.mark.parametrize("whom", ["parent", "group"])
@pytest.mark.parametrize("script", [COLLECT, LONG_STEP], ids=["collecting", "long step"])
def test_a_program_that_is_killed_leaves_nothing(script: str, whom: str) -> None:
    before = memory_names()
    with Program(script + SLEEP) as program:
        pids = [int(pid) for pid in program.says().split()[1:]]
        if script == COLLECT:
            os.kill(pids[0], signal.SIGSTOP)
        kill = os.kill if whom == "parent" else os.killpg
        kill(program.popen.pid, signal.SIGKILL)
        assert program.ends(5) == -signal.SIGKILL
        assert len(program.seen) >= 8  # the program, the server, six workers
        new = memory_names() - before
        assert not [name for name in new if "swath" in name or any(str(pid) in name for pid in program.seen)]


def test_a_program_with_other_start_methods_is_killed() -> None:
    script = """
    collectors = [build("start", doing(sleep_long, at=3), mp_start_method=method) for method in ("fork", "spawn")]
    until(lambda: all(collector._workers.board.row(1)["steps"] >= 2 for collector in collectors))
    print("ready")
    time.sleep(3600)
    """
    with Program(script) as program:
        program.says(90)
        os.kill(program.popen.pid, signal.SIGKILL)
        assert program.ends(5) == -signal.SIGKILL


def test_a_program_that_leaves_by_os_exit() -> None:
    with Program(COLLECT + "\nos._exit(7)") as program:
        program.says()
        assert program.ends(5) == 7
