"""A load with known hits, misses by reason, loads and evictions: all that shows statistics agrees with it."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvoffd_client import AdminClient, NamespaceSpec
from kvoffd_client.scheduler_client import LookupFuture
from kvoffd_client.testing import FakeEngine
from kvoffd_client.worker_client import GroupTransfer
from kvoffd_proto.messages import PENDING, GroupKeys, GroupSpec, Outcome, PromptReport
from tests.kit.command import run_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_port, http_get
from tests.kit.waiting import wait_until

BLOCK_BYTES = 64 << 10
POOL_BLOCKS = 64
TOKENS = 16
GROUPS = (GroupSpec("full_attention", TOKENS),)
MODEL = 'a "model"'
OF_NAMESPACE = {"lookups", "asked_keys", "loaded_keys", "asked_tokens", "loaded_tokens", "saved_seconds"} | {
    *("loaded_bytes", "stored_bytes", "evicted_blocks", "no_space_keys", "late_lookups")
}


def keys(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in range(first, first + count)]


class Load:
    """An engine, and what it did."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.misses: Counter[str] = Counter()
        self.found = self.loaded = self.not_needed = self.lookups = self.asked = 0

    def look_up(self, wanted: list[bytes], found: int, reason: str = "") -> None:
        """Look up keys of which the first ``found`` are there and the others miss for that reason."""
        ticket = self.ask(wanted, found, reported=False)
        self.not_needed += found
        if len(wanted) > found:
            self.misses[reason] += len(wanted) - found
        self.engine.scheduler.release(ticket.lease_id)

    def ask(self, wanted: list[bytes], found: int, *, reported: bool) -> LookupFuture:
        ticket = self.engine.scheduler.lookup([GroupKeys(0, b"".join(wanted))], reported=reported)
        assert ticket.wait(10)
        assert ticket.leading_ready() == found
        self.lookups += 1
        self.asked += len(wanted)
        self.found += found
        return ticket

    def report(self, wanted: list[bytes], found: int, covered: int, outcome: Outcome, **misses: int) -> None:
        """Look up keys and report what an engine did that had the first ``covered`` in its own cache."""
        ticket = self.ask(wanted, found, reported=True)
        self.not_needed += covered
        self.misses.update(misses)
        self.send_report(ticket, len(wanted), covered, outcome)

    def report_gap(self, wanted: list[bytes], covered: int, **misses: int) -> None:
        """As ``report`` of three keys of which one is missing, not the last."""
        ticket = self.ask(wanted, wanted.index(keys(6, 1)[0]), reported=True)
        self.found += 2 - wanted.index(keys(6, 1)[0])
        self.not_needed += covered
        self.misses.update(misses)
        self.send_report(ticket, 3, covered, Outcome.MISSED)

    def send_report(self, ticket: LookupFuture, asked: int, covered: int, outcome: Outcome) -> None:
        self.engine.scheduler.release(ticket.lease_id)
        counted = {"lease_id": ticket.lease_id, "own_keys": [covered], "covered_keys": [covered]}
        report = PromptReport("r", time.time(), TOKENS * asked, asked, 0, 0, 0, outcome, **counted)
        self.engine.scheduler.report_prompt(report)

    def load(self, wanted: list[bytes], loaded: int) -> None:
        assert self.engine.lookup(wanted) == len(wanted)
        assert self.engine.load(wanted[:loaded], range(loaded)).ok
        self.engine.release()
        self.lookups += 1
        self.asked += len(wanted)
        self.found += len(wanted)
        self.loaded += loaded
        self.not_needed += len(wanted) - loaded

    def give_up(self, wanted: list[bytes]) -> None:
        """Look up keys that only a tier has, and release at once: they come up before or after that."""
        ticket = self.engine.scheduler.lookup([GroupKeys(0, b"".join(wanted))], reported=True)
        assert ticket.wait(10)
        assert set(ticket.states[0]) == {PENDING}
        self.send_report(ticket, len(wanted), 0, Outcome.LATE)
        self.lookups += 1
        self.asked += len(wanted)
        self.found += len(wanted)
        self.misses["late"] += len(wanted)

    def check(self, shown: dict[str, Any]) -> None:
        """Hold what is shown of the namespace against what was done."""
        misses, found = shown["misses"], sum(shown["found_keys"].values())
        assert misses == +self.misses
        assert (shown["lookups"], found, shown["loaded_keys"]) == (self.lookups, self.found, self.loaded)
        assert shown["not_needed_keys"] == self.not_needed
        assert shown["asked_keys"] == self.asked
        assert shown["asked_keys"] == shown["loaded_keys"] + shown["not_needed_keys"] + sum(misses.values())
        assert shown["asked_tokens"] == TOKENS * self.asked
        assert shown["loaded_tokens"] == TOKENS * self.loaded
        assert shown["loaded_bytes"] == BLOCK_BYTES * self.loaded
        assert abs(shown["saved_seconds"] - TOKENS * self.loaded / 1000.0) < 1e-9


def scripted(load: Load) -> None:
    """Misses for every reason that a client can bring about."""
    engine = load.engine
    engine.scheduler.report(1000.0, 0, 0, 2)
    load.look_up(keys(0, 8), 0, "unknown")
    assert engine.store(keys(0, 8), range(8)).ok
    load.look_up(keys(0, 8), 8)
    load.load(keys(0, 8), 5)
    load.report(keys(0, 4), 4, 0, Outcome.LATE, late=4)
    load.report(keys(0, 4), 4, 1, Outcome.SKIPPED, skipped=3)
    load.report(keys(0, 4), 4, 1, Outcome.NO_SPACE, engine_full=3)
    load.report(keys(50, 4), 0, 3, Outcome.MISSED, unknown=1)
    load.report(keys(4, 8), 4, 5, Outcome.MISSED, unknown=3)
    load.report(keys(60, 4), 0, 4, Outcome.DROPPED)
    engine.scheduler.invalidate([GroupKeys(0, b"".join(keys(6, 2)))])
    load.look_up(keys(0, 8), 6, "invalidated")
    gap, first, second = *keys(6, 1), *keys(0, 2)
    load.report_gap([gap, first, second], 0, invalidated=1, after_gap=2)
    load.report_gap([first, gap, second], 1, invalidated=1, after_gap=1)
    load.report_gap([first, gap, second], 2, not_loaded=1)
    for first in range(100, 100 + POOL_BLOCKS, 8):
        assert engine.store(keys(first, 8), range(8)).ok
    load.look_up(keys(0, 6), 0, "evicted")


def from_disk(load: Load, daemon: DaemonProcess) -> None:
    """What comes up when its request was given up."""
    engine = load.engine
    with AdminClient(daemon.directory) as admin:
        # What is stored before the disk serves is written only once it is used again.
        wait_until(lambda: admin.stats().disks[0].state == "serving")
        assert engine.store(keys(0, 8), range(8)).ok
        wait_until(lambda: admin.stats().disks[0].blocks >= 8)
        for number in (1, 2):
            for first in range(1000 * number, 1000 * number + POOL_BLOCKS, 8):
                assert engine.store(keys(first, 8), range(8)).ok
            load.give_up(keys(0, 8))
            wait_until(lambda: admin.stats().tiers.promoted_blocks == 8 * number)  # noqa: B023


def partial(load: Load) -> None:
    """Of two ranks one has stored."""
    load.engine.workers[0].store(10**6, [GroupTransfer.of(keys(0, 2), [0, 1])])
    wait_until(lambda: load.engine.workers[0].take_results())
    load.look_up(keys(0, 3), 0, "partial")
    load.misses.update({"partial": -1, "unknown": 1})  # of the three keys one was never stored


def check_views(daemon: DaemonProcess, port: int, loads: dict[str, Load]) -> dict[str, Any]:
    """Hold all that shows statistics against what was done; returns what is shown of the namespaces, by model."""
    asked = sum(load.asked for load in loads.values())
    with AdminClient(daemon.directory) as admin:  # reports are sent once a second
        wait_until(lambda: admin.stats().since_start.asked_keys >= asked, explain=lambda: admin.stats().since_start)
    printed = json.loads(run_cli("stats", "--json", "--directory", str(daemon.directory)).stdout)
    served, page = (http_get(port, path)[1] for path in ("/stats.json", "/metrics"))
    with AdminClient(daemon.directory) as admin:
        asked = json.loads(msgspec.json.encode(admin.stats()))
    samples = [
        (sample.name.removeprefix("kvoffd_namespace_"), sample.labels, sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("kvoffd_namespace_")
    ]
    for stats in (printed, json.loads(served), asked):
        spaces = {space["model"]: space for space in stats["namespaces"]}
        for label, load in loads.items():
            load.check(spaces[label])
        total = stats["since_start"]
        for name in OF_NAMESPACE:
            assert total[name] == sum(space[name] for space in spaces.values()), name
        assert total == {**stats["last_minute"], "seconds": total["seconds"]}
        assert stats["lifetime"]["loaded_tokens"] == total["loaded_tokens"]
        # Each number on /metrics is the one of its field.
        for name, labels, value in samples:
            assert labels["kv_namespace"] == spaces[labels["model"]]["id"]
            field = spaces[labels["model"]].get(name.removesuffix("_total"))
            key = labels.get("reason") or labels.get("source")
            assert value == (field.get(key, 0) if key else field), name
    return spaces


def test_what_comes_up_after_its_request_was_given_up_is_late(tmp_path: Path) -> None:
    port = free_port()
    tier = {"disk": f"{tmp_path}=64MiB", "disk_write": "always"}
    with DaemonProcess("4MiB", http_address=f"127.0.0.1:{port}", eviction_policy="lru", **tier) as daemon:
        space = NamespaceSpec(b"\x03" * 32, MODEL, 1, 32, GROUPS)
        with FakeEngine(daemon.directory, space) as engine:
            load = Load(engine)
            engine.scheduler.report(1000.0, 0, 0)
            from_disk(load, daemon)
            check_views(daemon, port, {MODEL: load})


def test_everything_that_shows_statistics_agrees_with_what_was_done() -> None:
    port = free_port()
    limits = {"totals_every_s": 0.5}
    with DaemonProcess("4MiB", limits=limits, http_address=f"127.0.0.1:{port}", eviction_policy="lru") as daemon:
        one = NamespaceSpec(b"\x01" * 32, MODEL, 1, 32, GROUPS)
        two = NamespaceSpec(b"\x02" * 32, "two ranks", 2, 32, GROUPS)
        with FakeEngine(daemon.directory, one) as first, FakeEngine(daemon.directory, two, world_size=2) as second:
            loads = {one.label: Load(first), two.label: Load(second)}
            scripted(loads[one.label])
            partial(loads[two.label])
            spaces = check_views(daemon, port, loads)
        assert spaces[MODEL]["late_lookups"] == 2
        evictions = spaces[MODEL]["evicted_blocks"] + spaces["two ranks"]["evicted_blocks"]
        stored = spaces[MODEL]["stored_blocks"]
        assert spaces[MODEL]["ready_blocks"] == stored - spaces[MODEL]["evicted_blocks"] - 2
        assert evictions >= 8
        # The totals outlive a daemon that is killed.
        state, loaded = daemon.directory / "kvoffd.state", TOKENS * loads[MODEL].loaded
        wait_until(lambda: state.exists() and f'"loaded_tokens":{loaded}' in state.read_text())
        daemon.kill()
        daemon.start()
        with AdminClient(daemon.directory) as admin:
            again = admin.stats()
        assert again.lifetime.loaded_tokens == loaded
        assert again.since_start.loaded_tokens == 0
