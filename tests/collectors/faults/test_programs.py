"""Whole programs: however they end, they end soon, with one traceback at most, and nothing of theirs is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from common import until
from fault_tools import BEGIN, HERE, Program, assert_ended_well, descendants, exit_of_idle_program_s, memory_names

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def _known_idle_exit() -> None:
    exit_of_idle_program_s()


COLLECT = """
import subprocess

def with_simulators(lane):
    env = DeedEnv(lambda: None, lane=lane, lengths=7)
    env.started = [subprocess.Popen(["sleep", "3600"], start_new_session=is_apart) for is_apart in (False, True)]
    return env

collectors = [build(kind, [lambda lane=lane: with_simulators(lane) for lane in range(2)]) for kind in FALLIBLE]
beside = SINGLE.build(replay_buffer=buffer(batch_size=16))  # in a thread of this very process
beside.start()
for collector in (*collectors, beside):
    advance(collector)
print("ready", *(pid for collector in collectors for pid in collector.worker_pids))
"""
HANG = """
hanging = [build(kind, doing(sleep_long, at=3)) for kind in FALLIBLE]
for collector in hanging[:2]:
    threading.Thread(target=advance_quietly, args=(collector,), daemon=True).start()
until(lambda: all(steps_of(collector, 1) >= 2 for collector in hanging))
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
    """Of collectors that collect, and of others that are in a long step."""
    with Program(f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n" + HANG + COLLECT) as program:
        program.says()
        assert program.ends(3) == 0
        assert_ended_well(program)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "code", "last"),
    [("raise ZeroDivisionError('mine')", 1, "ZeroDivisionError: mine"), ("os._exit(7)", 7, "")],
    ids=["raise", "os._exit"],
)
def test_a_program_that_ends_otherwise(script: str, code: int, last: str) -> None:
    with Program(f"{COLLECT}\n{script}") as program:
        program.says()
        assert program.ends(3 if last else 5) == code
        assert_ended_well(program, tracebacks=int(bool(last)))
        assert program.errors.rstrip().endswith(last)


@pytest.mark.parametrize(
    ("whom", "script"),
    [
        ("parent", COLLECT + TRAIN),
        ("group", HANG + COLLECT + "with beside, collectors[0]:" + textwrap.indent(TRAIN, "    ")),
    ],
    ids=["parent", "group, in a with block, others in a long step"],
)
def test_ctrl_c(whom: str, script: str) -> None:
    with Program(script) as program:
        program.says()
        interrupt(program, whom)
        assert program.ends(3) == -signal.SIGINT
        assert_ended_well(program, tracebacks=1)
        assert program.errors.rstrip().endswith("KeyboardInterrupt")


def test_a_caught_ctrl_c_leaves_a_program_that_can_go_on() -> None:
    """The next one comes while workers are being made, and ends it."""
    text = """
    collector = build(SYNC)
    try:
        print("ready")
        while True:
            advance(collector)
    except KeyboardInterrupt:
        other = build(ASYNC)
        advance(other)
        other.shutdown()
    collector.shutdown()
    print("went on")
    build(SYNC, [lambda: time.sleep(3600)] * 2)
    """
    with Program(text) as program:
        program.says()
        interrupt(program)
        assert program.says() == "went on"
        until(lambda: len(descendants(program.popen.pid)) >= 3)
        interrupt(program)
        assert program.ends(5) == -signal.SIGINT
        assert_ended_well(program, tracebacks=1)


OTHER_METHODS = """
for method in ("fork", "spawn"):
    hanging.append(build(STARTED, doing(sleep_long, worker=0, workers=1, at=3), mp_start_method=method))
until(lambda: all(steps_of(collector, 0) >= 2 for collector in hanging[3:]))
"""


@pytest.mark.parametrize(
    ("whom", "how", "script"),
    [
        ("parent", signal.SIGKILL, HANG + OTHER_METHODS + COLLECT),
        ("group", signal.SIGKILL, HANG + COLLECT),
        ("parent", signal.SIGTERM, COLLECT),
    ],
    ids=["killed", "killed with its group", "terminated"],
)
def test_a_program_that_is_killed_leaves_nothing(whom: str, how: int, script: str) -> None:
    before = memory_names()
    with Program(script + SLEEP) as program:
        pids = [int(pid) for pid in program.says(90).split()[1:]]
        if how == signal.SIGKILL:
            os.kill(pids[0], signal.SIGSTOP)
        send = os.kill if whom == "parent" else os.killpg
        send(program.popen.pid, how)
        assert program.ends(5) == -how
        # The program, the server, six workers of each, and what envs have started.
        assert len(program.seen) >= 12 + (14 if HANG in script else 8)
        new = memory_names() - before
        assert not [name for name in new if "swath" in name or any(str(pid) in name for pid in program.seen)]


def test_a_long_step_in_a_thread_does_not_keep_a_program_from_its_end() -> None:
    """Nothing can end a thread: it is waited for, told of, and left."""
    text = """
    hanging = threading.Event()
    collector = SINGLE.build(DeedEnv(lambda: hanging.set() or sleep_long(), at=15), replay_buffer=buffer())
    collector.start()
    hanging.wait(20)
    print("ready")
    """
    with Program(text) as program:
        program.says()
        assert program.ends(3) == 0
        assert program.errors.count("did not end in time") == 1
        assert "Traceback" not in program.errors


# -- ways to run a program, and what it may do itself: workers know what it knows, and leave it alone ---------------

SELF_MADE = """
import gymnasium as gym

class MyError(Exception):
    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint

class MyEnv(CountingGymEnv):
    def step(self, action):
        assert (os.environ["MINE"], os.getcwd(), sys.argv[-1], sys.path[-1]) == ("yes", "/", "--mine", "/nowhere")
        if self.count == 3 and os.path.exists(FLAG):
            raise MyError(5, hint="mine")
        return super().step(action)

FLAG = os.environ["FLAG"]
os.environ["MINE"] = "yes"
os.chdir("/")
sys.argv.append("--mine")
sys.path.append("/nowhere")
gym.register("Mine-v0", MyEnv)

from swath.envs import GymEnv

collector = build(SYNC, [lambda: GymEnv("Mine-v0"), lambda: MyEnv()], frames_per_batch=10)
print("shape", *collector.next().shape)
open(FLAG, "w").close()
try:
    collector.next()
except MyError as error:
    print("caught", error.code, error.hint, type(error.__cause__).__name__)
"""


@pytest.mark.parametrize("how", ["-c", "file", "stdin"])
def test_a_program_without_a_main_guard(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes, its errors and the envs that it registers are known in the workers, and it is not run again."""
    monkeypatch.setenv("FLAG", str(tmp_path / "flag"))
    with Program("print('begin')\n" + SELF_MADE, how, tmp_path) as program:
        lines = [program.says() for _ in range(3)]
        assert lines == ["begin", "shape 2 5", "caught 5 mine RemoteTraceback"], program.errors
        assert program.ends(3) == 0
        assert_ended_well(program)


def test_threads_and_forks_of_a_program() -> None:
    """Many threads may make its first collectors at once; workers outlive the thread that has made them."""
    text = """
    first = []
    threads = [threading.Thread(target=lambda: first.append(build(SYNC, workers=1).next())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(first) == 4

    import warnings; warnings.simplefilter("ignore", DeprecationWarning)
    from swath.testing import assert_follows, assert_frames_belong

    def live(method):
        global collector
        collector = build(ASYNC, mp_start_method=method)
        for _ in range(5):
            assert_frames_belong(collector.next())

    for method in ("forkserver", "fork"):
        thread = threading.Thread(target=live, args=(method,))
        thread.start()
        thread.join()
        for _ in range(5):
            assert_frames_belong(collector.next())
        collector.shutdown()

    collector = build(SYNC)
    before = collector.next()
    pid = os.fork()
    if not pid:
        sys.exit(0)  # with all that a normal exit brings: atexit, finalisers
    assert os.waitpid(pid, 0)[1] == 0
    assert_follows(before, collector.next())
    print("unharmed", collector.stats()["workers_alive"])
    """
    with Program(text) as program:
        assert program.says() == "unharmed 2", program.errors
        assert program.ends(3) == 0
        assert_ended_well(program)


def test_a_program_without_stdout_and_stderr() -> None:
    text = """
    os.close(1); os.close(2)
    collector = build(SYNC, doing(lambda: print("x" * 100), at=3))
    for _ in range(3):
        collector.next()
    collector.shutdown()
    os._exit(11)
    """
    with Program(text) as program:
        assert program.ends(40) == 11


def test_a_program_whose_output_nobody_reads() -> None:
    """A worker that fills the pipe waits there, and hears nothing; it must end all the same."""
    text = """
    def shout():
        while True:
            print("x" * 1000)
    collector = build(STARTED, doing(shout, at=3))
    until(lambda: steps_of(collector, 1) >= 2)
    begun = time.monotonic()
    collector.shutdown()
    os._exit(0 if time.monotonic() - begun < 5 else 1)
    """
    code = BEGIN.format(here=HERE) + textwrap.dedent(text)
    reads, writes = os.pipe()
    program = subprocess.Popen([sys.executable, "-c", code], stdout=writes)
    os.close(writes)
    try:
        assert program.wait(40) == 0
    finally:
        program.kill()
        program.wait()
        os.close(reads)


STOPPED = """
import warnings
from kinds import AS_READY_PAIR
from node_kinds import GROUPS
warnings.simplefilter("always")
told, over = [], []
warnings.showwarning = lambda message, *_: told.append(str(message))
limits = {"stall_warning_s": 2.5, "stall_timeout_s": 3.0, "frames_per_batch": 4}
slow = [lambda: DeedEnv(lambda: None, pace_s=0.4)] * 2
collectors = [build(kind, slow, **limits) for kind in (*FALLIBLE, AS_READY_PAIR)]
if LONG:
    collectors.append(build(GROUPS["sync"], slow, node_timeout_s=3.0, **limits))

def go_on(collector):
    try:
        while not over:
            advance(collector)
    except Exception as error:
        told.append(repr(error))

threads = [threading.Thread(target=go_on, args=(collector,), daemon=True) for collector in collectors]
for thread in threads:
    thread.start()
until(lambda: all(collector.stats()["frames"] for collector in collectors))
before = time.monotonic()
print("ready")
while (now := time.monotonic()) < before + 2:
    before = now
    time.sleep(0.01)
frames = [collector.stats()["frames"] for collector in collectors]
until(lambda: told or all(c.stats()["frames"] > n + 4 for c, n in zip(collectors, frames)))
over.append(True)
print("told:", *told)
"""


def test_a_program_that_was_stopped_blames_nobody() -> None:
    """As by Ctrl-Z, or when the lid of a laptop is closed: workers, envs and nodes stop together with their trainer."""
    with Program(STOPPED) as program:
        assert program.says() == "ready"
        everybody = [program.popen.pid, *descendants(program.popen.pid)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in everybody:
                os.kill(pid, number)
            time.sleep(4.0 * (number == signal.SIGSTOP))
        assert program.says() == "told:"
