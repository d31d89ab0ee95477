"""One round of the stress: a collector that is drawn from a seed, and what is done to it."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import io
import itertools
import math
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.data import ReplayBuffer
from swath.errors import ClosedError, WorkerDiedError
from swath.testing.stress_checks import FrameLedger, Watchdog, forgive_lost_interrupts, mapped_memory
from swath.testing.stress_plan import Plan

Act = Callable[[random.Random], object]
OVER: Any = object()
HANDLER = "a signal's handler"
MOST_KEPT = 24
MOST_KILLS = 10
FORK_S = 20.0
"""How long a forked child may take."""
CHILD = {1: "hangs", 7: "can use the collector", 8: "has raised", 9: "has seen its batch change"}
"""What the exit code of a forked child means."""


class Round:
    """A collector, threads that disturb it, and a consumer that checks all that it gets."""

    def __init__(self, kind: str, seed: int, deadline_s: float, acts: Sequence[str]) -> None:
        """Draw it."""
        self.random = random.Random(seed)
        self.plan = Plan.draw(kind, self.random, acts)
        self.watch, self.ledger = Watchdog(deadline_s), self._new_ledger()
        self.buffer = self.plan.buffer()
        self.kept: list[tuple[TensorDictBase, TensorDictBase]] = []
        self.lent: TensorDictBase | None = None
        """The last batch."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.findings: list[str] = []
        self.over = threading.Event()
        self.former = 0  # frames that a collector before the present one had collected and nobody has got
        self.pids, self.forks = set[int](), set[int]()
        self.values = itertools.count(1)
        self.agents: list[threading.Thread] = []
        self.mapped = mapped_memory()

    def _new_ledger(self) -> FrameLedger:
        return FrameLedger(self.plan.lengths, self.plan.options["max_frames_per_traj"])

    def run(self) -> int:
        """Do it, and tell what was done and found; 1 if there is something."""
        warnings.simplefilter("ignore")
        forgive_lost_interrupts(self.counts)
        print(self.plan, flush=True)
        try:
            self._begin()
            self._live()
            self._end()
        except BaseException:
            self._find("the main thread")
        print(f"    {dict(self.counts)}", *self.findings, sep="\n", flush=True)
        self.watch.is_over = True
        return int(bool(self.findings))

    def _find(self, where: str) -> None:
        self.findings.append(f"In {where}:\n{traceback.format_exc()}")
        self.over.set()

    def _is_promised(self, error: BaseException) -> bool:
        is_told = self.plan.options.get("on_worker_failure") == "raise" and self.counts["kill"] > 0
        is_closed = isinstance(error, ClosedError)
        return self.collector.closed if is_closed else is_told and isinstance(error, WorkerDiedError)

    # -- the consumer --------------------------------------------------------------------------------------------

    def _begin(self, state: dict[str, Any] | None = None) -> None:
        with self.watch.step("the constructor", 4.0):  # it may start a whole cluster
            self.collector = self.plan.collector(self.buffer)
        with self.watch.step("load_state_dict and start"):
            if state is not None:
                self.collector.load_state_dict(state)
            if self.plan.mode == "start":
                self.collector.start()
        self._see_pids(self.random)
        self.stream = iter(self.collector)
        self.over.clear()
        self._disturb()

    def _live(self) -> None:
        ending = self.plan.ending
        if ending == "spent":
            return self._finish()
        if self._consume(self.plan.seconds) or self.findings:
            return None
        if ending == "checkpoint":
            self._restore()
            self._finish()
        elif ending == "thread":
            threading.Timer(self.random.uniform(0.0, 0.05), self._shut_down).start()
            self._consume(math.inf)
        elif ending == "interrupt" and self.plan.mode != "start":
            self._break_off()
        return None

    def _finish(self) -> None:
        """Spend the budget; if that is kept from ending by new seeds and deaths, without them."""
        if not self._consume(4 * self.plan.seconds) and not self.findings:
            self._rest()
            self._consume(math.inf)

    def _consume(self, seconds: float) -> bool:
        """Check what comes, for so long; whether that was all."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end and not self.findings:
                if not self._advance():
                    return True
                self._act(self.random)
        except (ClosedError, WorkerDiedError) as error:
            if not self._is_promised(error):
                raise
            return True
        return False

    def _advance(self) -> bool:
        if self.plan.mode == "start":
            with self.watch.step("is_running"):
                if not self.collector.is_running():
                    return False
            time.sleep(self.random.uniform(0.0, 0.01))
        else:
            with self.watch.step("next"):
                batch = next(self.stream, OVER)
            if batch is OVER:
                return False
            self.counts["batch"] += 1
            if self.plan.mode == "iterate":
                self.ledger.take(batch, has_rows=self.plan.lanes > 0 and not self.plan.options["trajs_per_batch"])
                if "keeps" in self.plan.acts and self.random.random() < 0.3:
                    self._check_kept(MOST_KEPT)
                    self.kept.append((batch, batch.clone()))
                self.lent = batch
        if self.buffer is not None and len(self.buffer):
            with self.watch.step("sample"):
                sampled = self.buffer.sample()
            self.ledger.check_frames(sampled)
        return True

    def _check_kept(self, most: int) -> None:
        """None has changed; if there are too many, half of them are let go."""
        if len(self.kept) >= most:
            for batch, copy in self.kept:
                for key, value in copy.items(True, True):
                    assert torch.equal(batch.get(key), value), f"a batch that was kept has changed: {key}"
            del self.kept[: most // 2 + 1]

    def _act(self, own: random.Random) -> None:
        chance, acts = own.random(), self.plan.acts
        if "interrupts" in acts and chance < 0.3:
            self._interrupt(own)
        elif "forks" in acts and chance > 0.99:
            self._fork(own)
        elif "stops" in acts and 0.97 < chance < 0.975 and self.counts["stop of all"] < 3:
            self._stop_itself(own)
        self._wait_for_forks(os.WNOHANG)

    def _break_off(self) -> None:
        """An interrupt of the loop itself closes the collector, which says so to whoever goes on."""
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with self.watch.step("an interrupted loop"), contextlib.suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, self.random.uniform(0.001, 0.2))
            self.counts["break"] = 1
            try:
                collections.deque(self.stream, maxlen=0)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        if self.collector.closed and not self.collector.stats()["completed"]:
            with contextlib.suppress(ClosedError):
                next(iter(self.collector), None)
                raise AssertionError("a collector that Ctrl-C has closed raises no ClosedError")

    def _restore(self) -> None:
        """Save, and go on with a new collector that has loaded what was saved."""
        self._rest()
        buffer, file = self.plan.buffer(), io.BytesIO()
        with self.watch.step("a checkpoint"), tempfile.TemporaryDirectory() as folder:
            with self.collector.pause() if self.plan.mode == "start" else contextlib.nullcontext():
                torch.save(self.collector.state_dict(), file)
                if self.buffer is not None:
                    self.buffer.dumps(folder)
                stats = self.collector.stats()
                self.former = stats["dropped_frames"] + stats["lost_frames"]
            self._shut_down()
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            if buffer is not None:
                buffer.loads(folder)
        had = self.ledger.frames if buffer is None else len(buffer)
        if not self.plan.options["trajs_per_batch"]:
            assert had == state["frames"], f"{had} frames were there, and the state says {state['frames']}"
        self.buffer, self.ledger.next, self.counts["restore"] = buffer, dict.fromkeys(self.ledger.next), 1
        self._begin(state)

    # -- the others ----------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        acts = self.plan.acts
        if "calls" in acts:
            for _ in range(self.plan.threads):
                self._agent(0.001, 0.05, self._call)
            self._agent(0.05, 0.5, self._see_pids)
            if "forks" in acts:
                self._agent(0.2, 1.0, self._fork)
        if "signals" in acts:
            own, is_handling = random.Random(self.random.random()), threading.Lock()

            def handle(*_: object) -> None:
                if is_handling.acquire(blocking=False):  # handlers that come faster than they end would pile up
                    try:
                        self._guarded(self._call, own, HANDLER)
                    finally:
                        is_handling.release()

            signal.signal(signal.SIGUSR1, handle)
            main = threading.main_thread().ident or 0
            self._agent(0.002, 0.1, lambda _: signal.pthread_kill(main, signal.SIGUSR1))
        for act, most_s, do in (("kills", 0.7, self._kill), ("stops", 1.0, self._stop)):
            if act in acts and self.pids:
                self._agent(0.05, most_s, do)

    def _agent(self, least_s: float, most_s: float, act: Act) -> None:
        """A thread that does something again and again."""
        own = random.Random(self.random.random())

        def go_on() -> None:
            while not self.over.wait(own.uniform(least_s, most_s)) and self._guarded(act, own, "a thread"):
                pass

        self.agents.append(threading.Thread(target=go_on, daemon=True))
        self.agents[-1].start()

    def _guarded(self, act: Act, own: random.Random, where: str) -> bool:
        """Whether it has gone well."""
        try:
            with self.watch.step(f"{getattr(act, '__name__', 'a signal')} in {where}"):
                act(own)
            return True
        except KeyboardInterrupt:  # in a handler, for what it has interrupted
            raise
        except BaseException as error:
            if where == HANDLER and isinstance(error, RuntimeError) and "signal handler" in str(error):
                self.counts["refused"] += 1  # in words, which is promised too
                return True
            if not self._is_promised(error):
                self._find(where)
            return False

    def _call(self, own: random.Random) -> None:
        """Ask something of the collector."""
        collector, plan = self.collector, self.plan
        kinds = ["stats", "state_dict", *["publish"] * 3, "attribute", "set_seed", "reset", "increment"]
        kinds += {"start": ["pause", "dumps"], "buffer": ["dumps"]}.get(plan.mode, [])
        kinds += [] if plan.kind in ("Collector", "AsyncBatchedCollector") else ["large"]
        what = own.choice(kinds)
        self.counts[what] += 1
        match what:
            case "stats":
                collector.stats(own.choice(("aggregate", "per_worker", "both")))
            case "state_dict":
                torch.save(collector.state_dict(), io.BytesIO())
            case "publish":
                value = float(next(self.values))
                collector.update_policy_weights_({"module.value": torch.full((plan.size,), value, device="cpu")})
            case "attribute":
                collector.get_distant_attr("env.batch_size")
            case "set_seed":
                collector.set_seed(own.randrange(1000))
            case "reset":
                collector.reset()
            case "increment":
                collector.increment_version()
            case "large":
                size = own.choice((10, 500_000))
                answers = np.ravel(collector.cascade_execute("env.size_of", bytes(size)))  # of nodes, lists
                assert {*answers.tolist()} == {size}, f"{answers} instead of {size}"
            case "pause":
                with collector.pause():
                    count = len(self.buffer or ())
                    time.sleep(own.uniform(0.0, 0.02))
                    assert len(self.buffer or ()) == count, "frames were written while it was paused"
            case "dumps" if self.buffer:
                with tempfile.TemporaryDirectory() as folder:
                    self.buffer.dumps(folder)
                    loaded: Any = plan.buffer()
                    loaded.loads(folder)
                self._check_written(loaded)

    def _interrupt(self, own: random.Random) -> None:
        """Ctrl-C in the middle of a call, which is caught."""
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with self.watch.step("an interrupted call"):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, own.uniform(0.00002, 0.005))
                    self._call(own)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                self.counts["interrupt"] += 1

    def _see_pids(self, own: random.Random) -> int:
        """The process of any worker, if there are some."""
        pids = [pid for pid in self.collector.worker_pids if pid != os.getpid()]
        self.pids.update(pids)
        return own.choice(pids) if pids else 0

    def _kill(self, own: random.Random) -> None:
        is_dropped = self.plan.options["on_worker_failure"] == "drop"
        if (pid := self._see_pids(own)) and self.counts["kill"] < (self.plan.workers - 1 if is_dropped else MOST_KILLS):
            self.counts["kill"] += 1
            self._send(pid, signal.SIGKILL)

    def _stop(self, own: random.Random) -> None:
        if pid := self._see_pids(own):
            self.counts["stop"] += 1
            self._send(pid, signal.SIGSTOP)
            time.sleep(own.uniform(0.0, 0.5))
            self._send(pid, signal.SIGCONT)

    def _send(self, pid: int, what: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)

    def _stop_itself(self, own: random.Random) -> None:
        """As Ctrl-Z and fg do."""
        self.counts["stop of all"] += 1
        script = f"kill -STOP {os.getpid()}; sleep {own.uniform(0.05, 0.5):.2f}; kill -CONT {os.getpid()}"
        with self.watch.step("a stop of all"):
            subprocess.run(["/bin/sh", "-c", script], check=True)

    def _fork(self, own: random.Random) -> None:
        """A child that looks after the last batch, which we let go, and must not use the collector."""
        batch, seconds, self.lent = self.lent, own.uniform(0.0, 0.3), None
        held = [] if batch is None else [value.numpy() for value in batch.values(True, True)]
        copies = [value.copy() for value in held]
        self.counts["fork"] += 1
        if pid := os.fork():
            self.forks.add(pid)
            return
        code = 7
        try:
            faulthandler.dump_traceback_later(FORK_S, exit=True)
            time.sleep(seconds)
            self.collector.reset()
        except ClosedError:
            code = 0 if all((one == other).all() for one, other in zip(held, copies, strict=True)) else 9
        except BaseException:
            traceback.print_exc()
            code = 8
        finally:
            os._exit(code)

    def _wait_for_forks(self, how: int) -> None:
        for pid in list(self.forks):
            ended, status = os.waitpid(pid, how)
            if ended:
                self.forks.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                assert code == 0, f"a forked child {CHILD.get(code, f'has ended with {code}')}"

    # -- the end -------------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        self.over.set()
        with self.watch.step("the end of threads"):
            while self.agents:
                self.agents.pop().join()

    def _end(self) -> None:
        """Shut down, unless that is to be forgotten, and look at what is left."""
        self._rest()
        if self.findings or self.plan.ending == "forget":
            return
        with self.watch.step("shutdown"):
            others = [threading.Thread(target=self._shut_down) for _ in range(self.random.choice((0, 2)))]
            for other in others:
                other.start()
            self._shut_down()
            self._shut_down()
            for other in others:
                other.join()
        with self.watch.step("the end of forked children"):
            self._wait_for_forks(0)
        with self.watch.step("the end of workers"):
            while any(Path(f"/proc/{pid}/fd").exists() and os.listdir(f"/proc/{pid}/fd") for pid in self.pids):
                time.sleep(0.01)
        self._check_kept(0)
        self._check_counts()
        self.kept, self.buffer, self.lent = [], None, None
        del self.collector, self.stream
        gc.collect()
        assert mapped_memory() <= self.mapped, "shared memory is still mapped"

    def _shut_down(self) -> None:
        try:
            self.collector.shutdown()
        except BaseException as error:
            if not self._is_promised(error):
                self._find("shutdown")

    def _check_written(self, buffer: ReplayBuffer) -> int:
        """All that is in a buffer is right; how many frames."""
        ledger = self._new_ledger()
        if len(buffer):
            ledger.take(buffer[:])
        if self.plan.options["trajs_per_batch"]:
            assert not any(ledger.next.values()), "an episode in the buffer is not complete"
        return ledger.frames

    def _check_counts(self) -> None:
        """What was delivered is what the collector says."""
        stats, counts, total = self.collector.stats(), self.counts, self.plan.options["total_frames"]
        there = self.ledger.frames if self.buffer is None else self._check_written(self.buffer)
        frames, text = stats["frames"], f"{there} frames are there; {stats}"
        if self.plan.options["trajs_per_batch"]:
            told = there + stats["dropped_frames"] + stats["pending_frames"] + stats["lost_frames"] + self.former
            assert told >= frames or counts["break"], text  # whoever was interrupted has not looked at what came
            assert told <= frames or counts["set_seed"] or counts["kill"] or counts["restore"], text
        else:
            assert there == frames or (counts["break"] and there < frames), text
        if stats["completed"]:
            assert total <= frames < total + max(1, self.plan.lanes) * self.plan.workers, text
