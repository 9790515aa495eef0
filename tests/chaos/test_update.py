"""Three nodes are updated from release 0.2 to this one and back, one at a time, under traffic.

They share a Redis; 0.2 knows no peers. What is shared and what is kept meanwhile is what deploy/README.md promises.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.kit.command import command
from tests.kit.daemon import DaemonProcess
from tests.kit.earlier_release import THIS, Release, release_02
from tests.kit.fleet_engine import FleetEngine, Served
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until

NODES = 3
PROMPTS, LONGEST = 300, 16
PATIENCE_S, PAUSE_S = 2.0, 0.1
FOLLOW_S = 5.0
"""Time after a clear of all nodes in which each follows, as deploy/shared.md promises."""
BUSY_FACTOR = 5
DEADLINE_S = 60.0
TRAFFIC_S = 3.0
"""Traffic between two updates."""
PROBE = 1 << 20
"""Prompts from this number on are not of the traffic."""


class UpdatedNode:
    """A node that keeps its directory and pool file while its release changes, with a thread that serves prompts.

    Attributes:
        turn: held while a prompt is served.
    """

    def __init__(self, fleet: Fleet, number: int, directory: Path, url: str) -> None:
        self._fleet, self.number, self._directory, self._url = fleet, number, directory, url
        self.turn, self._random = threading.Lock(), random.Random(number)
        self.daemon: DaemonProcess | None = None
        self.engine: FleetEngine | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start_daemon(self, release: Release) -> None:
        """Stop the daemon, and start the release's on the same files."""
        if self.daemon is not None:
            assert self.daemon.stop() == 0
        self.daemon = DaemonProcess(
            "64MiB",
            self._directory,
            program=release.program,
            environ=release.environ,
            pool_file=str(self._directory / "pool"),
            shared=self._url,
            shared_write="always",  # 0.2's default writes what was used again
        ).start()
        self.release = release

    def start_engine(self, release: Release) -> None:
        with self.turn:
            if self.engine is not None:
                self.engine.close()
            self.engine = FleetEngine(self._directory, release.environ).start()
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        try:
            while not self._fleet.ended.wait(PAUSE_S):
                self.serve(self._random.randrange(PROMPTS))
        except Exception as error:
            self._fleet.problems.append(f"node {self.number}: {error!r}")

    def serve(self, prompt: int) -> Served:
        """Serve a prompt, and judge what was loaded."""
        with self.turn:
            assert self.engine is not None
            epoch, began = self._fleet.epoch, time.monotonic()
            served = self.engine.serve(prompt, 1 + prompt % LONGEST, epoch, PATIENCE_S)
            self._fleet.judge(self, epoch, began, served)
        return served

    def finds(self, prompt: int) -> int:
        """Return how many blocks of a prompt are loaded."""
        with self.turn:
            assert self.engine is not None
            epoch, began = self._fleet.epoch, time.monotonic()
            served = self.engine.find(prompt, 1 + prompt % LONGEST, PATIENCE_S)
            self._fleet.judge(self, epoch, began, served)
        return served.loaded

    def clear(self) -> str:
        """Clear all nodes by the client of this node's release; return why that was refused, or an empty text."""
        assert self.engine is not None
        return self.engine.clear()

    def close(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        if self.engine is not None:
            self.engine.close()
        if self.daemon is not None:
            self.daemon.close()


class Fleet:
    """The nodes and their Redis.

    Attributes:
        epoch: of what engines store now. The next one begins with each clear of all nodes.
    """

    def __init__(self, place: Path) -> None:
        self.ended, self.epoch = threading.Event(), 1
        self.problems: list[str] = []
        self.counts = Counter[str]()
        self._cleared_at: dict[int, float] = {}
        self._probes, self._judging, self._stack = PROBE, threading.Lock(), ExitStack()
        self.redis = self._stack.enter_context(RedisServer())
        self.nodes = []
        for number in range(NODES):
            (directory := place / str(number)).mkdir()
            node = UpdatedNode(self, number, directory, self.redis.url)
            self.nodes.append(self._stack.enter_context(closing(node)))

    def close(self) -> None:
        self.ended.set()
        self._stack.close()

    def judge(self, node: UpdatedNode, epoch: int, began: float, served: Served) -> None:
        """Count what became of a prompt. Blocks of an earlier epoch are stale once the node must have followed."""
        with self._judging:
            self.counts["prompts"] += 1
            self.counts["blocks loaded"] += served.loaded
            self.problems += [f"node {node.number}: {sentence}" for sentence in served.wrong]
            for age_s in (began - self._cleared_at[one] for one in served.epochs if one < epoch):
                self.counts["prompts of before a clear"] += age_s > 0
                if age_s > BUSY_FACTOR * FOLLOW_S:
                    self.problems.append(f"node {node.number} loads blocks {age_s:.1f} s after they were cleared")

    def new_probe(self) -> int:
        """Return the number of a prompt of all blocks that nobody has."""
        self._probes += LONGEST
        return self._probes - 1

    def check_shared(self) -> None:
        """Each node loads what each other has stored."""
        for writer in self.nodes:
            probe = self.new_probe()
            wait_until(lambda: writer.serve(probe).stored, DEADLINE_S)  # noqa: B023
            for reader in self.nodes:
                wait_until(lambda: reader.finds(probe) == LONGEST, DEADLINE_S)  # noqa: B023
        assert not self.problems

    def update(self, node: UpdatedNode, release: Release) -> None:
        """Update the daemon, then its engine, which serves without the cache in between. The pool is kept, except that
        0.2 drops it when the store tells it of a clear: it cannot read of it in ``kvoffd.state``."""
        probe = self.new_probe()
        wait_until(lambda: node.serve(probe).stored, DEADLINE_S)
        node.start_daemon(release)
        assert node.serve(self.new_probe()) == (0, [], [], False), "releases of two protocols exchange nothing"
        node.start_engine(release)
        self.redis.signal(signal.SIGSTOP)
        try:
            kept = node.finds(probe)
        finally:
            self.redis.signal(signal.SIGCONT)
        assert kept == LONGEST or (self.counts["clears"] and release is not THIS)
        self.check_shared()
        time.sleep(TRAFFIC_S)
        assert not self.problems

    def clear(self, from_node: UpdatedNode, how: Callable[[], str]) -> None:
        """Clear all nodes from one. Engines pause while the epoch changes. Each node has followed at the end."""
        probe = self.new_probe()
        wait_until(lambda: from_node.serve(probe).stored, DEADLINE_S)
        for node in self.nodes:
            wait_until(lambda: node.finds(probe) == LONGEST, DEADLINE_S)  # noqa: B023
        with ExitStack() as turns:
            for node in self.nodes:
                turns.enter_context(node.turn)
            self._cleared_at[self.epoch] = float("inf")
            self.epoch += 1
            assert how() == ""
        self._cleared_at[self.epoch - 1] = time.monotonic()
        self.counts["clears"] += 1
        for node in self.nodes:
            wait_until(lambda: node.finds(probe) == 0, BUSY_FACTOR * FOLLOW_S)  # noqa: B023

    def clear_as_to_go_back(self) -> str:
        """Clear all, as the page says; return what went wrong."""
        assert self.nodes[0].daemon is not None
        status, said = command(self.nodes[0].daemon, "clear", "--all", "--all-nodes", "--yes")
        return said if status else ""


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with TemporaryDirectory(prefix="kvoffd-", dir="/dev/shm") as place, closing(Fleet(Path(place))) as made:
        yield made


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("clears", [False, True])
def test_nodes_are_updated_one_after_the_other_and_back(fleet: Fleet, tmp_path: Path, clears: bool) -> None:
    """With clears by nodes of either release, while the others have the other one."""
    old = release_02(tmp_path)
    first, *_, last = fleet.nodes
    for node in fleet.nodes:
        node.start_daemon(old)
        node.start_engine(old)
    fleet.check_shared()
    for release in (THIS, old):
        if clears and release is old:
            fleet.clear(first, fleet.clear_as_to_go_back)
        for node in fleet.nodes:
            fleet.update(node, release)
            if clears and node is first:
                fleet.clear(first, first.clear)
                fleet.clear(last, last.clear)
    print(dict(fleet.counts))
