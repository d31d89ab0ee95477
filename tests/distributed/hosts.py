"""Several hosts on this machine: network namespaces whose cables all lead to one switch.

The switch is a namespace of its own, so that hosts reach each other and nothing else, and several tests may use the
same addresses at the same time. A host has its own name, too: programs there find each other as `host0`, `host1`, ...
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from children import ANSWER_S, importing_env, until
from warden import Warden

SUBNET = "10.77.0"
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
CALL = "import pickle, sys; function, args = pickle.load(open(sys.argv[1], 'rb')); function(*args)"
NAMED = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
_numbers = itertools.count()


class Program:
    """Something that runs on a host, by itself and in a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log

    def output(self) -> str:
        """All that it has printed so far."""
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = ANSWER_S) -> str:
        """Wait until it has printed a line with `text`, and return that line."""

        def line() -> str | None:
            return next((line for line in self.output().splitlines() if text in line), None)

        until(lambda: line() is not None or self._process.poll() is not None, timeout_s)
        found = line()
        assert found is not None, f"{text!r} is not in what it printed until it ended:\n{self.output()}"
        return found

    def wait(self, timeout_s: float = ANSWER_S) -> int:
        """Wait until it has ended, and return its exit code, negative where that is a signal."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end in {timeout_s} s, and printed:\n{self.output()}") from None

    def succeed(self, timeout_s: float = ANSWER_S) -> str:
        """Wait until it has ended well, and return what it printed."""
        assert self.wait(timeout_s) == 0, self.output()
        return self.output()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to this process, and not to those that it started."""
        self._process.send_signal(number)


class Host:
    """One of the hosts; `hosts` makes them."""

    def __init__(self, index: int, group: str, folder: Path) -> None:
        self.name = f"host{index}"
        self.address = f"{SUBNET}.{index + 1}"
        self.namespace = f"{group}-{self.name}"
        self.port = f"port{index}"
        self._switch = group
        self._folder = folder
        self._programs: list[Program] = []

    def command(self, *command: str | Path) -> list[str]:
        """What runs a command here, whoever calls it."""
        # A host has files of its own already, by way of `ip netns exec`, so that only its programs see what is mounted.
        named = ("unshare", "--uts", "sh", "-c", NAMED, self.name, self._folder / "hosts")
        return [*map(str, (IP, "netns", "exec", self.namespace, *named, *command))]

    def start(self, *command: str | Path, env: Mapping[str, str] | None = None) -> Program:
        """Start a command here; it imports what the test can import. `env` adds to its environment."""
        log = self._folder / f"{self.name}-{len(self._programs)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=importing_env(PYTHONUNBUFFERED="1", **(env or {})),
            )
        self._programs.append(Program(process, log))
        return self._programs[-1]

    def call(self, function: Callable[..., object], *args: Any, env: Mapping[str, str] | None = None) -> Program:
        """Call a function here, in a Python of its own."""
        task = self._folder / f"{self.name}-{len(self._programs)}.pickle"
        task.write_bytes(cloudpickle.dumps((function, args)))
        return self.start(sys.executable, "-c", CALL, task, env=env)

    def pids(self) -> set[int]:
        """All processes of this host, whoever started them."""
        return {int(pid) for pid in subprocess.check_output([str(IP), "netns", "pids", self.namespace]).split()}

    def cut(self) -> None:
        """Pull its cable: what is sent is lost, and nobody is told."""
        subprocess.run([IP, "-n", self._switch, "link", "set", self.port, "down"], check=True)

    def restore(self) -> None:
        """Plug the cable in again."""
        subprocess.run([IP, "-n", self._switch, "link", "set", self.port, "up"], check=True)

    def kill(self) -> None:
        """Pull its plug: all its processes are gone, and have told nobody. `restore` brings it back, with none."""
        self.cut()
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for program in self._programs:
            program.wait()


def why_no_hosts() -> str:
    """Why there cannot be hosts here, or nothing."""
    if IP is None:
        return "hosts need the command ip (package iproute2)"
    status = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
    if any(not int(status, 16) >> right & 1 for right in (CAP_NET_ADMIN, CAP_SYS_ADMIN)):
        return "hosts are network namespaces, which need the rights of root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    return ""


@contextlib.contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """So many hosts with a link to each other; nothing of them is left afterwards."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    group = f"swath-{os.getpid()}-{next(_numbers)}"
    folder = Path(tempfile.mkdtemp(prefix=f"{group}-"))
    made = tuple(Host(index, group, folder) for index in range(count))
    names = [("127.0.0.1", "localhost"), *((host.address, host.name) for host in made)]
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for address, name in names))
    build = [f"{IP} netns add {group}", f"{IP} -n {group} link add bridge up type bridge"]
    raze = []
    for host in made:
        inside = f"{IP} -n {host.namespace}"
        build += [
            f"{IP} netns add {host.namespace}",
            f"{IP} -n {group} link add {host.port} type veth peer name eth0 netns {host.namespace}",
            f"{IP} -n {group} link set {host.port} master bridge up",
            f"{inside} addr add {host.address}/24 dev eth0",
            f"{inside} link set eth0 up",
            f"{inside} link set lo up",
        ]
        raze += [
            f'while p=$({IP} netns pids {host.namespace}) && [ -n "$p" ]; do kill -KILL $p; sleep 0.01; done',
            f"{IP} netns del {host.namespace}",
        ]
    raze += [f"{IP} netns del {group}", f"rm -r {folder}"]
    warden = Warden(["sh", "-c", " && ".join(build)], folder / "build.log", tidy="\n".join(raze))
    with contextlib.closing(warden):
        warden.ready()
        try:
            yield made
        finally:
            for host in made:
                host.kill()
