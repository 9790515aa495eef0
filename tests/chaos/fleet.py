"""A fleet on one machine: ``python -m tests.chaos.fleet``.

Sixteen daemons in network namespaces, each of which reads the pools of the next three, over a network that takes time
and loses packets; all but each fourth share a Redis too. Engines have no model. Nodes start in any order. Each minute a
third of the daemons is killed and replaced; two minutes begin with a clear of all nodes, and in one half of the nodes
are cut off. Prints the figures; status 1 when one is bad.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from tests.kit.daemon import DaemonProcess
from tests.kit.fleet_engine import FleetEngine, Served
from tests.kit.network import Network
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until
from tests.kit.wire import books

NODES, PEERS, PORT = 16, 3, 7400
WITHOUT_REDIS = 4
"""Each node of this number has peers alone."""
DELAY_S, LOSS = 0.001, 0.002
"""Time that the network takes for each packet, and part of them that it loses."""
PROMPTS, LONGEST = 400, 16
PATIENCE_S, PAUSE_S = 2.0, 0.2
"""Time for which an engine waits for blocks, and its pause between two prompts."""
MINUTES = 4
"""Fewest rounds of kills, in which all else happens: they are shorter than a minute where a run is."""
DEADLINE_S = 120.0
CLEARED_S = 60.0
"""Time in which a clear of all nodes succeeds: it is refused while a store or a peer is away."""
FOLLOW_S = 5.0
"""Time after a clear of all nodes in which each follows, as deploy/shared.md promises."""
BACK_S = 10.0
"""Time after a heal in which blocks of the others are found again."""
BUSY_FACTOR = 5
"""By which a busy machine may exceed promised times."""
ASKS_PER_KEY = 2
"""Times that a store or peer may be asked for a key of a lookup: again where it did not answer in time."""
QUIET_S = 10.0
IDLE_COMMANDS_PER_S, IDLE_PACKETS_PER_S = 1.0, 60.0
"""Most commands to Redis, and packets, of a node without traffic: the latter are mostly signs of life to its peers."""
PROBE = 1 << 20
"""Prompts from this number on are asked for after a heal."""


class Report(NamedTuple):
    """What a run found.

    Attributes:
        counts: what happened how often.
        stalest_s: most seconds after a clear of all nodes at which blocks of before were loaded.
        back_s: seconds after the heal at which the last node had loaded blocks of the other side.
        commands_per_s, packets_per_s: of one node without traffic, the mean and the most.
        asks_per_key: the most of any node for one store or peer.
        problems: sentences.
    """

    counts: Counter[str]
    stalest_s: float
    back_s: float
    commands_per_s: float
    packets_per_s: float
    asks_per_key: float
    problems: list[str]


class Member:
    """A node with a thread that serves prompts.

    Attributes:
        turn: held while a prompt is served.
        looked_up: keys that were looked up since the daemon's start.
    """

    def __init__(self, fleet: Fleet, number: int, peers: list[str], secret: Path, url: str) -> None:
        self._fleet, self.number, self.turn = fleet, number, threading.Lock()
        self.looked_up = 0
        self.daemon = DaemonProcess(
            before=fleet.network.inside(number),
            peer_secret_file=str(secret),
            peer_listen=f"{fleet.network.address(number)}:{PORT}",
            peers=",".join(peers),
            **{"shared": url} if url else {},
        )
        self.has_redis = bool(url)
        self.engine = FleetEngine(self.daemon.directory)
        self._random = random.Random(number)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start daemon, engine and traffic; returns at once."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self.daemon.start()
            self.engine.start()
            self._fleet.started.add(self.number)
            while not self._fleet.ended.wait(PAUSE_S):
                with self.turn:
                    self._serve()
        except Exception as error:
            self._fleet.problems.append(f"node {self.number}: {error!r}")

    def _serve(self) -> None:
        prompt, epoch, began = self._random.randrange(PROMPTS), self._fleet.epoch, time.monotonic()
        blocks = 1 + prompt % LONGEST
        self.looked_up += blocks
        served = self.engine.serve(prompt, blocks, epoch, PATIENCE_S)
        self._fleet.judge(self, epoch, began, served)

    def find(self, prompt: int) -> bool:
        """Return whether all of a probe is loaded."""
        with self.turn:
            self.looked_up += LONGEST
            began, epoch = time.monotonic(), self._fleet.epoch
            served = self.engine.find(prompt, LONGEST, PATIENCE_S)
            self._fleet.judge(self, epoch, began, served)
        return served.loaded == LONGEST

    def store(self, prompt: int) -> bool:
        """Return whether a probe was stored."""
        with self.turn:
            self.looked_up += LONGEST
            return self.engine.serve(prompt, LONGEST, self._fleet.epoch, PATIENCE_S).stored

    def replace(self) -> None:
        """Kill the daemon, and start one with an empty pool."""
        self.daemon.kill()
        with self.turn:
            self.looked_up = 0
            self.daemon.start(wait=False)

    def close(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        self.engine.close()
        self.daemon.close()


class Fleet:
    """The nodes, their network and their Redis.

    Attributes:
        epoch: of what engines store now. The next one begins with each clear of all nodes.
        started: nodes that serve for the first time.
        ended: set when traffic ends.
    """

    def __init__(self, seed: int) -> None:
        self.problems: list[str] = []
        self.counts = Counter[str]()
        self.epoch, self.started, self.ended = 1, set[int](), threading.Event()
        self.stalest_s, self._judging = 0.0, threading.Lock()
        self._cleared_at: dict[int, float] = {}
        """Times when the blocks of each epoch before this were cleared everywhere."""
        self._random, self._stack = random.Random(seed), ExitStack()
        try:
            self.network = self._stack.enter_context(Network(NODES + 1))
            self.network.delay_s, self.network.loss = DELAY_S, LOSS
            inside, address = self.network.inside(NODES), self.network.address(NODES)
            redis = RedisServer("--protected-mode", "no", before=inside, address=address)
            self.redis = self._stack.enter_context(redis)
            secret = Path(self._stack.enter_context(tempfile.TemporaryDirectory()), "secret")
            secret.write_text("the secret of a fleet\n")
            at = [f"{self.network.address(number)}:{PORT}" for number in range(NODES)]
            self.members = []
            for number in range(NODES):
                url = self.redis.url if (number + 1) % WITHOUT_REDIS else ""
                member = Member(self, number, (at + at)[number + 1 :][:PEERS], secret, url)
                self.members.append(self._stack.enter_context(closing(member)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.ended.set()
        self._stack.close()

    # --- what happens ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all nodes in any order."""
        for member in self._random.sample(self.members, NODES):
            member.start()
            time.sleep(self._random.uniform(0.0, 0.5))
        wait_until(lambda: self.problems or len(self.started) == NODES, DEADLINE_S, interval_s=0.1)

    def judge(self, member: Member, epoch: int, began: float, served: Served) -> None:
        """Count what became of a prompt that was looked up at a time in an epoch. Blocks of before it are stale, unless
        the node may not have followed yet."""
        with self._judging:
            self.counts["prompts"] += 1
            self.counts["blocks loaded"] += served.loaded
            self.counts["prompts not stored"] += not served.stored
            self.problems += [f"node {member.number}: {sentence}" for sentence in served.wrong]
            for age_s in (began - self._cleared_at[one] for one in served.epochs if one < epoch):
                self.counts["prompts of before a clear"] += age_s > 0
                self.stalest_s = max(self.stalest_s, age_s)
                if age_s > BUSY_FACTOR * FOLLOW_S:
                    self.problems.append(f"node {member.number} loads blocks {age_s:.1f} s after they were cleared")

    def replace_a_third(self) -> None:
        """Kill a third of the daemons and replace them, one after the other within a second each."""
        for member in self._random.sample(self.members, NODES // 3):
            member.replace()
            self.counts["kills"] += 1
            time.sleep(self._random.uniform(0.0, 1.0))

    def wait_serving(self) -> None:
        """Wait until every daemon serves, and each answer of stores and peers can be had."""
        for member in self.members:
            member.daemon.wait_ready()
        wait_until(lambda: self.problems or not self._down(), DEADLINE_S, explain=self._down, interval_s=0.5)

    def _down(self) -> list[str]:
        return [
            f"{member.number}: {one.url}"
            for member in self.members
            for one in books(member.daemon.directory).said.shared
            if not one.up
        ]

    def clear(self) -> None:
        """Clear all nodes from one of them. Engines pause while the epoch changes."""
        one = self._random.choice([member for member in self.members if member.has_redis])
        with ExitStack() as turns:
            for member in self.members:
                turns.enter_context(member.turn)
            self.epoch += 1
            self._cleared_at[self.epoch - 1] = float("inf")

        def cleared() -> bool:
            why = one.engine.clear()
            self.counts["refused clears"] += bool(why)
            return not why

        wait_until(cleared, CLEARED_S, interval_s=0.5)
        self._cleared_at[self.epoch - 1] = time.monotonic()
        self.counts["clears"] += 1

    def part(self, seconds: float) -> float:
        """Cut half of the nodes off for a time. Return the seconds from the heal until each node has loaded what a node
        of either half stored."""
        apart = frozenset(self._random.sample(range(NODES), NODES // 2))
        self.network.apart = apart
        time.sleep(seconds)
        self.network.apart = frozenset()
        healed = time.monotonic()
        for side in (False, True):
            writer = next(one for one in self.members if one.has_redis and (one.number in apart) is side)
            wait_until(lambda: writer.store(PROBE + side), DEADLINE_S)  # noqa: B023

        def found(reader: Member) -> None:
            for side in (False, True):
                wait_until(lambda: reader.find(PROBE + side), DEADLINE_S, explain=self._down)  # noqa: B023

        with ThreadPoolExecutor(NODES) as readers:  # at once: one after the other they took 32 turns of two cores
            list(readers.map(found, self.members))
        return time.monotonic() - healed

    def measure_idle(self) -> tuple[float, float]:
        """Return the commands to Redis a second of one node without traffic on average, and the most packets."""
        before, sent, began = self._commands(), self.network.sent.copy(), time.monotonic()
        time.sleep(QUIET_S)
        took_s = time.monotonic() - began
        packets = max((self.network.sent - sent)[number] for number in range(NODES))
        return (self._commands() - before) / NODES / took_s, packets / took_s

    def _commands(self) -> int:
        lines = self.redis.command("INFO", "commandstats").decode().splitlines()
        return sum(int(line.partition("calls=")[2].partition(",")[0]) for line in lines if "calls=" in line)

    def most_asks(self) -> float:
        """Return how often a key was asked of one store or peer, of the node and the tier that were the most."""
        return max(
            one.asked_keys / max(1, member.looked_up)
            for member in self.members
            for one in books(member.daemon.directory).said.shared
        )

    def ends(self) -> None:
        """Count what nodes read of each other; add problems of daemons that hold or logged what they should not."""
        for member in self.members:
            found = books(member.daemon.directory)
            for one in found.said.shared:
                self.counts["read of peers" if one.url.startswith("peer://") else "read of Redis"] += one.read_blocks
                self.counts["mismatches"] += one.mismatches
            wait_until(lambda: not books(member.daemon.directory).said.pinned_blocks, DEADLINE_S)  # noqa: B023
            if "Traceback" in member.daemon.log:
                self.problems.append(f"node {member.number} logged a traceback: {member.daemon.log[-4000:]}")


def run(seconds: float, seed: int) -> Report:
    """Run a fleet for about this time once it has started."""
    minutes = max(MINUTES, round(seconds / 60))
    minute_s, back_s = seconds / minutes, 0.0
    with closing(Fleet(seed)) as fleet:
        fleet.start()
        for minute in range(minutes):
            until = time.monotonic() + minute_s
            if minute in (minutes // 4, minutes * 3 // 4):
                fleet.wait_serving()
                fleet.clear()
            if minute == minutes // 2:
                fleet.wait_serving()
                back_s = fleet.part(minute_s / 4)
            fleet.replace_a_third()
            print(f"minute {minute + 1} of {minutes}: {dict(fleet.counts)}", flush=True)
            while time.monotonic() < until and not fleet.problems:
                time.sleep(0.1)
            if fleet.problems:
                break
        fleet.wait_serving()
        fleet.ended.set()
        asks = fleet.most_asks()
        fleet.ends()
        commands, packets = fleet.measure_idle()
        found = Report(fleet.counts, fleet.stalest_s, back_s, commands, packets, asks, fleet.problems)
    return found._replace(problems=found.problems + beyond(found))


def beyond(found: Report) -> list[str]:
    """Return sentences about figures that are beyond their bounds."""
    bounds = {
        "seconds until blocks were back after a heal": (found.back_s, BUSY_FACTOR * BACK_S),
        "commands to Redis of an idle node": (found.commands_per_s, IDLE_COMMANDS_PER_S),
        "packets of an idle node": (found.packets_per_s, IDLE_PACKETS_PER_S),
        "asks for a key": (found.asks_per_key, ASKS_PER_KEY),
        "blocks with wrong bytes": (found.counts["mismatches"], 0),
    }
    return [f"{name}: {value:.2f}, and not {most} at most" for name, (value, most) in bounds.items() if value > most]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of kills, clears and a partition")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    given = parser.parse_args()
    os.environ.setdefault("UCX_TLS", "tcp")
    print(f"seed {given.seed}, on {os.cpu_count()} cores with a load of {os.getloadavg()[0]:.1f}", flush=True)
    found = run(given.seconds, given.seed)
    print(found)
    return int(bool(found.problems))


if __name__ == "__main__":
    raise SystemExit(main())
