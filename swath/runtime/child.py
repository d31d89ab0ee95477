"""What a worker process does first, before it runs what it was made for."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import socket
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import resource_tracker, util
from typing import Any

from swath.errors import ChannelClosedError
from swath.runtime import kin
from swath.runtime.carrier import Failed, Warned
from swath.runtime.channel import Channel
from swath.runtime.faults import Failure

PR_SET_PDEATHSIG = 1
END_S = 10.0
"""How long the end of a worker may take if nobody ends it before: what runs then is not ours."""
Target = Callable[[Channel], None]


@dataclass(frozen=True)
class Surroundings:
    """What a process should find as in the one that has started it, and what it should leave alone.

    The first message to a worker. The next is what it is made for, which can only be read in its surroundings.
    """

    environ: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    authkey: bytes = field(repr=False)
    """With which `multiprocessing` knows its own: without it, proxies of a Manager could not be used."""
    threads: int = 1
    """For torch."""
    warns_itself: bool = False
    """Whether it may show warnings; otherwise only what `Warned` brings to the parent is shown."""
    is_elsewhere: bool = False
    """Whether it is on another machine: then its environment stays as it is, and it finds more modules."""


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent`, which has started this one from its main thread, ends.

    Whatever this process does then: a signal of the system needs no thread of ours, and no interpreter.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def leave_behind(parent: int | None) -> None:
    """In a process that was forked to be a worker: begin a life of its own, which ends with that of `parent`.

    What was to be done at the end of the process that it was forked from is not done here, too.
    """
    os.setsid()  # see NOTE [Kin]
    if parent is not None:
        die_with_parent(parent)
    atexit._clear()
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    for finaliser in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finaliser.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    multiprocessing.current_process().daemon = False  # envs may have processes of their own


def run(end: socket.socket) -> None:
    """Be a worker at this end of a channel, to the end of the process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whatever the thread has blocked that has started us
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    atexit.register(_end_children)
    code = 1
    try:
        code = _run(Channel(end))
    except (ChannelClosedError, KeyboardInterrupt):
        code = 0  # nobody is there any more
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, END_S)
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a closed pipe
                stream.flush()
        # Trackers end with those who use them: with us at last.
        kin.end(lambda: [pid for pid in kin.descendants_of([os.getpid()]) if not kin.is_tracker(pid)])
        with contextlib.suppress(Exception):  # it may be that of the process that has forked us
            resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
        os._exit(code)


def _end_children() -> None:
    """Before `multiprocessing` waits for those that are no daemons: nothing outlives a worker."""
    for process in multiprocessing.active_children():
        process.terminate()


def _run(channel: Channel) -> int:
    _enter(channel.receive(), channel)
    try:
        target: Target = channel.receive()
    except BaseException as error:
        channel.send(Failed(Failure.of(error), "reading its task"))
        return 1
    target(channel)
    return 0


def _enter(surroundings: Surroundings, channel: Channel) -> None:
    if surroundings.is_elsewhere:
        sys.path.extend(place for place in surroundings.path if place not in sys.path)
    else:
        os.environ.clear()
        os.environ.update(surroundings.environ)
        sys.path[:] = surroundings.path
        multiprocessing.current_process().authkey = surroundings.authkey
        if os.path.isdir(surroundings.directory):
            os.chdir(surroundings.directory)
    sys.argv[:] = surroundings.argv

    def tell(warned: Warned) -> None:
        channel.send(warned, by_value=True, timeout_s=0.0)  # a class of the user's script comes back as what it was

    settle(tell, surroundings.threads, surroundings.warns_itself)


def settle(tell: Callable[[Warned], object], threads: int, warns_itself: bool) -> None:
    """Tell the parent of warnings, and have random numbers of one's own and so many threads of torch."""
    _forward_warnings(tell, warns_itself)
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    # All workers are copies of one process, or begin with torch's one seed: they would draw the same numbers.
    own = int.from_bytes(os.urandom(4), "little")
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)


def _forward_warnings(tell: Callable[[Warned], object], all_of_them: bool) -> None:
    """Show warnings in the parent: those of this library, or all."""

    def show(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        ours = category.__module__.partition(".")[0] == __name__.partition(".")[0]
        if ours or all_of_them:
            text = str(message) if ours else f"{message} ({filename}:{lineno})"
            for kind in category.__mro__:  # the first that can be sent: some classes are of this process alone
                try:
                    tell(Warned(kind, text if kind is category else f"{category.__name__}: {text}"))
                except OSError:  # nobody listens
                    return
                except Exception:
                    continue
                return

    warnings.showwarning = show  # type: ignore[assignment]
    if not all_of_them:
        warnings.filterwarnings("default")
