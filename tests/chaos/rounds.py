"""The rounds of a chaos run: random signals to daemon and engines under traffic, then checks while all is quiet."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.chaos.engine import RANKS, serve
from tests.chaos.supervisor import Supervisor
from tests.kit.forked import Forked, fork_server
from tests.kit.wire import Books, books

START_S = 60.0
_SERVER = fork_server(serve.__module__)
ENGINES = 3
POOL = "6MiB"
"""Smaller than all prompts together, so that blocks are evicted all the time."""
FLAGS = {"shutdown_deadline": "0.3s", "verify_share": "0.2"}
LIMITS = {"lease_ttl_s": 2, "partial_timeout_s": 0.5, "job_deadline_s": 5}
QUIET_DEADLINE_S = 40.0
HIT_DEADLINE_S = 5.0
SHOWN_PROBLEMS = 5
AFTER_STOP_S = 0.1
"""For this long after a stopped process goes on, a late step still counts as caused by the stop."""


class ChaosEngineProcess:
    """One engine of ``tests.chaos.engine`` in a process of its own, and all that it reported."""

    def __init__(self, directory: Path, seed: int) -> None:
        address = f"\0kvoffd-chaos-{os.getpid()}-{seed}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(START_S)
            self.process = Forked(_SERVER, serve, directory, seed, address)
            self._connection: Connection[Any, Any] = Connection(listener.accept()[0].detach())
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.steps: list[tuple[float, float, float]] = []
        """For each longer step: when it began, how many seconds it took, and how many of them it waited for a CPU."""
        self.quiet = False
        self.stopped: list[tuple[float, float]] = []
        """From when to when a round had it stopped."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(EOFError, OSError):  # it has ended, perhaps within a message
            while True:
                kind, value = self._connection.recv()
                match kind:
                    case "did":
                        self.counts.update(value)
                    case "step":
                        self.steps.append(value)
                    case "quiet":
                        self.quiet = True
                    case "ready":
                        self._ready.set()
                    case _:
                        self.problems.append(f"{kind}: {value}")

    def wait_ready(self) -> None:
        assert self._ready.wait(START_S), f"an engine does not come up; its status is {self.process.poll()}"

    def send_command(self, word: str) -> None:
        """Send ``go`` or ``quiet``."""
        self.quiet = False
        with suppress(BrokenPipeError):  # it has just been killed
            self._connection.send(word)

    def end(self, number: int) -> None:
        """Send a signal that ends it, and wait until it has ended and all its output has been read."""
        self.process.send_signal(number)
        status = self.process.wait(30)
        self._thread.join(10)
        if number == signal.SIGTERM and status != 0:
            self.problems.append(f"failed: an engine that got SIGTERM ended with status {status}")
        self._connection.close()


@dataclass
class Report:
    """The figures of a run. ``longest_step_s`` leaves out waiting for a CPU, and steps while a process was stopped."""

    seed: int
    pool: str
    rounds: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    watchdog_kills: int = 0
    longest_step_s: float = 0.0

    def __str__(self) -> str:
        actions = ", ".join(f"{kind} {number}" for kind, number in sorted(self.actions.items()))
        counts = ", ".join(f"{kind} {number}" for kind, number in sorted(self.counts.items()))
        return (
            f"seed {self.seed}, pool {self.pool}: {self.rounds} rounds ({actions}), {len(self.problems)} problems; "
            f"{self.watchdog_kills} daemons ended by the watchdog\n  {counts}; longest step {self.longest_step_s:.3f} s"
        )


class Rounds:
    """A supervised daemon, its engines, and what happens to them."""

    def __init__(self, seed: int, pool_file: Path | None) -> None:
        self._rng = random.Random(seed)
        self.report = Report(seed, "kept by systemd's protocol" if pool_file is None else "in a file")
        self._supervisor = Supervisor(POOL, pool_file, LIMITS, **FLAGS).start()
        end, replace = self._supervisor.signal, self._replace
        self._actions: list[tuple[str, int, Callable[[], None]]] = [
            ("kill daemon", 4, lambda: end(signal.SIGKILL)),
            ("kill daemon twice", 1, self._kill_daemon_twice),
            ("terminate daemon", 2, lambda: end(signal.SIGTERM)),
            ("stop daemon until the watchdog", 1, self._stop_daemon_until_the_watchdog),
            ("stop daemon shortly", 2, lambda: self._stop_daemon(self._rng.uniform(0.05, 0.5))),
            ("kill engine", 3, lambda: replace(signal.SIGKILL)),
            ("terminate engine", 1, lambda: replace(signal.SIGTERM)),
            ("stop engine", 2, self._stop_engine),
            ("kill daemon and engine", 2, self._kill_daemon_and_engine),
        ]
        """What may happen in a round, and how likely it is."""
        self._daemon_stopped: list[tuple[float, float]] = []
        self._engines: list[ChaosEngineProcess] = []
        self._ended_engines: list[ChaosEngineProcess] = []
        try:
            self._supervisor.wait_serving(1)
            self._engines += [self._new_engine() for _ in range(ENGINES)]
            for engine in self._engines:
                engine.wait_ready()
        except BaseException:
            self.close()
            raise

    def _new_engine(self) -> ChaosEngineProcess:
        return ChaosEngineProcess(self._supervisor.directory, self._rng.getrandbits(32))

    def play(self) -> None:
        """One round. Raises AssertionError when the accounts do not balance or somebody is stuck."""
        action, _, act = self._rng.choices(self._actions, [weight for _, weight, _ in self._actions])[0]
        self.report.rounds += 1
        self.report.actions[action] += 1
        for engine in self._engines:
            engine.send_command("go")
        time.sleep(self._rng.uniform(0.05, 0.3))
        lives = self._supervisor.lives
        act()
        self._supervisor.wait_serving(lives + ("kill" in action or "terminate" in action) * ("daemon" in action))
        for engine in self._engines:
            engine.wait_ready()
            engine.send_command("go")  # a new one has not heard it
        if self._supervisor.lives > lives:
            self._wait_loaded()
        time.sleep(self._rng.uniform(0.05, 0.2))
        self._quiet(f"round {self.report.rounds}, {action}")

    def _wait_loaded(self) -> None:
        """Until something was loaded from the new daemon. Where the pool was lost that may take too long."""

        def compared() -> int:
            return sum(engine.counts["blocks compared"] for engine in self._engines)

        deadline, before = time.monotonic() + HIT_DEADLINE_S, compared()
        while time.monotonic() < deadline and compared() == before:
            time.sleep(0.005)

    # --- what may happen -------------------------------------------------------------------------

    def _kill_daemon_twice(self) -> None:
        lives = self._supervisor.lives
        self._supervisor.signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while self._supervisor.lives == lives and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(self._rng.uniform(0.0, 0.8))  # anywhere in its start, or just after it
        self._supervisor.signal(signal.SIGKILL)

    def _stop_daemon_until_the_watchdog(self) -> None:
        kills = len(self._supervisor.hung)
        self._stop_daemon(30.0)
        assert len(self._supervisor.hung) > kills, "the watchdog did not end a stopped daemon"

    def _stop_daemon(self, seconds: float) -> None:
        begun, lives = time.monotonic(), self._supervisor.lives
        self._supervisor.signal(signal.SIGSTOP)
        while time.monotonic() - begun < seconds and self._supervisor.lives == lives:
            time.sleep(0.005)
        if self._supervisor.lives == lives:
            self._supervisor.signal(signal.SIGCONT)
        self._daemon_stopped.append((begun, time.monotonic() + AFTER_STOP_S))

    def _stop_engine(self) -> None:
        engine = self._rng.choice(self._engines)
        begun = time.monotonic()
        engine.process.send_signal(signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.05, 0.8))
        engine.process.send_signal(signal.SIGCONT)
        engine.stopped.append((begun, time.monotonic() + AFTER_STOP_S))

    def _kill_daemon_and_engine(self) -> None:
        both = [self._supervisor.signal, self._replace]
        for kill in self._rng.sample(both, 2):
            kill(signal.SIGKILL)

    def _replace(self, number: int) -> None:
        place = self._rng.randrange(ENGINES)
        self._engines[place].end(number)
        self._ended_engines.append(self._engines[place])
        self._engines[place] = self._new_engine()

    # --- accounts --------------------------------------------------------------------------------

    def _quiet(self, where: str) -> None:
        """Everybody is connected to the daemon that lives now, has nothing in flight, and the books balance."""
        for engine in self._engines:
            engine.send_command("quiet")
        deadline = time.monotonic() + QUIET_DEADLINE_S
        reason = "nobody has looked yet"
        while reason:
            assert not self._problems(), f"{where}: {self._problems()[:SHOWN_PROBLEMS]}"
            assert time.monotonic() < deadline, f"{where}: {reason}\n{self._supervisor.daemon.log[-4000:]}"
            time.sleep(0.01)
            reason = self._why_not_quiet()

    def _why_not_quiet(self) -> str:
        """The reason why it is not quiet yet; empty when it is."""
        for number, engine in enumerate(self._engines):
            if engine.process.poll() is not None:
                engine.problems.append(f"failed: engine {number} ended with status {engine.process.returncode}")
        waiting = [number for number, engine in enumerate(self._engines) if not engine.quiet]
        if waiting:
            return f"engines {waiting} have requests in flight or are not connected"
        try:
            found = books(self._supervisor.directory)
        except (OSError, TimeoutError) as error:
            return str(error)
        return held_resources(found, ENGINES * (1 + RANKS))

    def _problems(self) -> list[str]:
        return [problem for engine in (*self._ended_engines, *self._engines) for problem in engine.problems]

    def finish(self) -> Report:
        """Collect the figures of the run. Asserts nothing."""
        report = self.report
        report.problems, report.watchdog_kills = self._problems(), len(self._supervisor.hung)
        _, found, traceback = self._supervisor.daemon.log.partition("Traceback")
        if found:
            report.problems.append(f"the daemon logged a traceback{traceback[:4000]}")
        # On a machine that is busy enough a daemon may be silent for too long without having been stopped.
        stops = self._daemon_stopped + [(begun, end + AFTER_STOP_S) for begun, end in self._supervisor.hung]
        for engine in (*self._ended_engines, *self._engines):
            report.counts += engine.counts
            for begun, took, waited in engine.steps:
                if not any(begun < end and begun + took > start for start, end in stops + engine.stopped):
                    report.longest_step_s = max(report.longest_step_s, took - waited)
        return report

    def close(self) -> None:
        """End all processes."""
        for engine in self._engines:
            engine.process.send_signal(signal.SIGCONT)
            engine.end(signal.SIGKILL)
        self._supervisor.close()


def held_resources(found: Books, sessions: int) -> str:
    """What is held while nothing happens and so many sessions are open; nothing when the books balance."""
    if not found.balanced:
        return f"free and used bytes are not all: {found}"
    held = {name: count for name, count in found.held.items() if name not in ("sessions", "registrations")}
    if held:
        return f"something is held: {held}"
    if found.sessions != sessions:
        return f"{found.sessions} sessions are open and not {sessions}"
    if found.integrity.mismatches or found.quarantined_bytes:
        return f"slots lost their bytes: {found.integrity.mismatches}"
    return ""


def run_rounds(
    rounds: int, seed: int, pool_file: Path | None, on_round: Callable[[int], object] = lambda _: None
) -> Report:
    """Play, and return the figures; ``on_round`` is called with the number of each round. Raises AssertionError."""
    played = Rounds(seed, pool_file)
    try:
        for number in range(rounds):
            played.play()
            on_round(number + 1)
        return played.finish()
    except BaseException:
        print(played.finish())
        raise
    finally:
        played.close()
