"""The daemon that is attacked, the honest engine beside it, and what both must be like during and after an attack."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from kvoffd.config import Config
from kvoffd.memory_needs import clients_bytes
from kvoffd_client.client_options import Closing
from kvoffd_proto.messages import StatsReply
from tests.kit.daemon import DaemonProcess
from tests.kit.steal import TooSlow
from tests.kit.struct_wire import stats
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
DESCRIPTORS = 1024
"""RLIMIT_NOFILE of the daemon, as most service managers set it."""
FLAGS = {
    "max_sessions": "24",
    "max_jobs_in_flight": "64",
    "max_leases": "256",
    "max_keys_per_request": "65536",
    "max_segments": "64",
    "max_registrations": "8",
    "sessions_size": "64MiB",
}
QUIET_S = 1.5
AFTER_S = 0.5
ATTACK_DEADLINE_S = 30.0
SETTLE_S = 20.0
STALL_S = 1.0
"""No operation of the honest engine may take longer, whatever the attack."""
P99_TIMES, P99_FLOOR_S = 20.0, 0.15
"""Its 99th percentile may be so many times the quiet one's, or so long where that is more: attacks need CPU too."""
BLOCKED_S = 0.1
"""For how long the loop may be blocked."""
CROWDED_SHARE, CROWDED_TIMES = 0.3, 2.5
"""These bounds are so many times as long on a machine so crowded that the daemon's threads waited for a CPU for that
share of the time: its loop and its sockets' thread wait for one another, and for the interpreter's lock in the hands
of a thread that has no CPU."""
GROWTH_BYTES = clients_bytes(Config(max_sessions=int(FLAGS["max_sessions"]), sessions_bytes=64 << 20))
"""How much the daemon's own memory may grow during an attack: what containers have for clients beside the pool."""
LEFT_BYTES = 96 << 20
"""And how much of that may be left when the attacker is gone: the allocator keeps some of it for the next one."""
SAMPLE_S = 0.02
LEFT_DESCRIPTORS, LEFT_MAPPINGS = 6, 48
"""Those of the session that asks for the statistics, and the allocator's arenas."""

_LIMITED = (
    f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS})); "
    "sys.argv[0] = 'kvoffd'; runpy.run_module('kvoffd', run_name='__main__')"
)

Attack: TypeAlias = Callable[[Path], None]


class LimitedDaemon(DaemonProcess):
    """A daemon that may have ``DESCRIPTORS`` descriptors and no more."""

    @property
    def program(self) -> list[str]:
        return [sys.executable, "-c", _LIMITED]


class HonestProcess(Closing):
    """The honest engine's process, and all that it has said."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "tests.hostile.honest", str(directory)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.rounds: list[list[float]] = []
        """End of each round, and the seconds of its operations."""
        self.missed = 0
        self.failures: list[str] = []
        self._said: set[str] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_said("ready")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, value = json.loads(line)
            if kind == "did":
                self.rounds.append(value)
            elif kind == "missed":
                self.missed += value
            elif kind == "failed":
                self.failures.append(value)
            self._said.add(kind)
        self._said.add("ended")

    def wait_said(self, kind: str) -> None:
        wait_until(lambda: self._said & {kind, "ended"}, 30.0)
        assert "ended" not in self._said, "the honest engine has ended"

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._said.discard("paused")
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It holds nothing in here."""
        self.tell("pause")
        self.wait_said("paused")
        yield
        self.tell("go")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(15.0)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            self._process.stdout.close()


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[-(-len(seconds) * 99 // 100) - 1]


class Target(Closing):
    """One daemon with an honest engine. ``under_attack`` is around each attack."""

    def __init__(self, pool_size: str, flags: dict[str, str]) -> None:
        self.daemon = LimitedDaemon(pool_size, **(FLAGS | flags)).start()
        self.directory, self.pid = self.daemon.directory, self.daemon.pid
        self.whole = True
        """False once something was wrong: the next test takes a new target."""
        try:
            self.honest = HonestProcess(self.directory)
            began = time.monotonic()
            time.sleep(QUIET_S)  # the stretch that is measured, not a wait for something
            self.quiet_p99 = p99(self._operations(began))
            with self.honest.paused():
                self._before = self._state()
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def under_attack(self) -> Iterator[None]:
        """Around an attack: watches the daemon and the engine, and asserts at its end that both are as they were."""
        began, self.most_bytes, ended = time.monotonic(), 0, threading.Event()
        failed, blocked, waited = len(self.honest.failures), self._blocked(), self._waited_for_cpu_s()
        self.whole = False

        def sample() -> None:
            while not ended.wait(SAMPLE_S) and self.daemon.running:
                with contextlib.suppress(OSError):
                    self.most_bytes = max(self.most_bytes, self.own_bytes())

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield
            self._asserts_alive()
            until = time.monotonic() + AFTER_S
            wait_until(lambda: self.honest.rounds[-1][0] > until or time.monotonic() > until + SETTLE_S)
        finally:
            ended.set()
            sampler.join()
        self._asserts_alive()
        assert self.honest.failures[failed:] == []
        waited = (self._waited_for_cpu_s() - waited) / (time.monotonic() - began)
        times = CROWDED_TIMES if waited > CROWDED_SHARE else 1.0
        machine = f"the daemon waited for a CPU for {waited:.0%} of the time"
        self._asserts_served(began, times, machine)
        grown = self.most_bytes - int(self._before["bytes"])
        assert grown <= GROWTH_BYTES, f"the daemon's memory grew by {grown >> 20} MiB"
        longer = {bound: count - blocked[bound] for bound, count in self._blocked().items()}
        if longer[BLOCKED_S * times]:
            log = self.daemon.log[-2000:]
            raise TooSlow(f"the loop was blocked, so often for longer than so many s: {longer}; {machine}\n{log}")
        assert "Traceback" not in self.daemon.log, self.daemon.log[-4000:]
        with self.honest.paused():
            wait_until(lambda: not self._left_behind(), SETTLE_S, explain=self._left_behind)
        self.whole = True

    def attack(self, attack: Attack, seconds: float = ATTACK_DEADLINE_S) -> None:
        """Run ``attack`` in a process of its own until it returns. Its failure is the test's."""
        with self.attacker(attack) as process:
            process.join(seconds)
            assert process.exitcode == 0, f"the attack ended with {process.exitcode} (None: not within {seconds} s)"

    @contextlib.contextmanager
    def attacker(self, attack: Attack) -> Iterator[multiprocessing.process.BaseProcess]:
        """``attack`` in a process of its own, which is killed at the end of the block."""
        process = multiprocessing.get_context("fork").Process(target=_run, args=(attack, self.directory))
        process.start()
        try:
            yield process
        finally:
            process.kill()
            process.join()

    def own_bytes(self) -> int:
        """The daemon's memory that is not shared, as the pool and engines' memory are."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0

    def stats(self) -> StatsReply:
        return stats(self.directory)

    def close(self) -> None:
        try:
            self.honest.close()
        finally:
            self.daemon.close()

    # --- what must hold ----------------------------------------------------------------------------

    def _asserts_alive(self) -> None:
        assert self.daemon.running, f"the daemon ended with {self.daemon.process.poll()}:\n{self.daemon.log[-4000:]}"

    def _asserts_served(self, began: float, times: float, machine: str) -> None:
        rounds = [one for one in list(self.honest.rounds) if one[0] >= began]
        operations = self._operations(began)
        longest, high = max(operations), p99(operations)
        gap = max(later[0] - earlier[0] for earlier, later in itertools.pairwise(rounds))
        bound = max(P99_TIMES * self.quiet_p99, P99_FLOOR_S)
        told = f"{len(operations)} operations, p99 {high:.4f} s, longest {longest:.3f} s; quiet {self.quiet_p99:.4f} s"
        told = f"{told}; {machine}"
        if high > times * bound:
            raise TooSlow(f"the honest engine was served slowly: {told}")
        if longest > times * STALL_S:
            raise TooSlow(f"the honest engine was stalled: {told}")
        if gap > 3 * times * STALL_S:
            raise TooSlow(f"nothing for {gap:.1f} s: {told}")

    def _operations(self, began: float) -> list[float]:
        return [seconds for ended, *took in list(self.honest.rounds) if ended >= began for seconds in took]

    def _blocked(self) -> dict[float, int]:
        """How often the daemon's loop was blocked for longer than each bound."""
        buckets = self.stats().loop_blocked.buckets
        return {bound: buckets["+Inf"] - buckets[str(bound)] for bound in (BLOCKED_S, BLOCKED_S * CROWDED_TIMES)}

    def _waited_for_cpu_s(self) -> float:
        """For how long the daemon's threads could run and had no CPU."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(one.read_text().split()[1]) for one in threads) / 1e9

    def _state(self) -> dict[str, int]:
        report = self.stats()
        pool = report.pool
        return {
            "sessions": report.sessions,
            "leases": report.leases,
            "pinned bytes": pool.pinned_bytes,
            "leaving bytes": pool.leaving_bytes,
            "bytes being written": pool.writing_bytes,
            "bytes in no state": pool.pool_bytes - pool.free_bytes - pool.ready_bytes - pool.quarantined_bytes,
            "jobs": report.store.queued_jobs + report.store.running_jobs + report.load.queued_jobs,
            "descriptors": len(os.listdir(f"/proc/{self.pid}/fd")),
            "mappings": len(Path(f"/proc/{self.pid}/maps").read_text().splitlines()),
            "bytes": self.own_bytes(),
        }

    def _left_behind(self) -> str:
        """What is there that was not before; empty when nothing is."""
        room = {"descriptors": LEFT_DESCRIPTORS, "mappings": LEFT_MAPPINGS, "bytes": LEFT_BYTES}
        return ", ".join(
            f"{now} {name} and not {self._before[name]}"
            for name, now in self._state().items()
            if now > self._before[name] + room.get(name, 0)
        )


def _run(attack: Attack, directory: Path) -> None:
    try:
        attack(directory)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
