"""Ways to run a program, and what a program may do itself: workers know what it knows, and leave it alone."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fault_tools import BEGIN, Program, assert_ended_well, exit_of_idle_program_s

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def _known_idle_exit() -> None:
    exit_of_idle_program_s()


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

collector = build("sync", [lambda: GymEnv("Mine-v0"), lambda: MyEnv()], frames_per_batch=10)
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
    text = """
    import warnings; warnings.simplefilter("ignore", DeprecationWarning)
    from swath.testing import assert_follows, assert_frames_belong

    def live(method):
        global collector
        collector = build("async", mp_start_method=method)
        for _ in range(5):
            assert_frames_belong(collector.next())

    for method in ("forkserver", "fork"):
        thread = threading.Thread(target=live, args=(method,))
        thread.start()
        thread.join()
        for _ in range(5):
            assert_frames_belong(collector.next())  # workers outlive the thread that has made them
        collector.shutdown()

    collector = build("sync")
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
    collector = build("sync", doing(lambda: print("x" * 100), at=3))
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
    collector = build("start", doing(shout, at=3))
    until(lambda: collector._workers.board.row(1)["steps"] >= 2)
    begun = time.monotonic()
    collector.shutdown()
    os._exit(0 if time.monotonic() - begun < 5 else 1)
    """
    code = BEGIN.format(here=str(Path(__file__).parent)) + textwrap.dedent(text)
    reads, writes = os.pipe()
    program = subprocess.Popen([sys.executable, "-c", code], stdout=writes)
    os.close(writes)
    try:
        assert program.wait(40) == 0
    finally:
        program.kill()
        program.wait()
        os.close(reads)
