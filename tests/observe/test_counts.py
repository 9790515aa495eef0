"""A load with known hits, misses by reason, loads and evictions: all that shows statistics agrees with it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvoffd_client import AdminClient, NamespaceSpec
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.messages import GroupKeys, GroupSpec, GroupTransfer, Outcome, PromptReport
from tests.kit.command import run_cli_here
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


class Counts(NamedTuple):
    """What statistics must show of an engine's namespace."""

    lookups: int
    found: int
    loaded: int
    not_needed: int
    misses: dict[str, int]

    @property
    def asked(self) -> int:
        return self.loaded + self.not_needed + sum(self.misses.values())

    def check(self, shown: dict[str, Any]) -> None:
        found = sum(shown["found_keys"].values())
        assert tuple(self) == (shown["lookups"], found, shown["loaded_keys"], shown["not_needed_keys"], shown["misses"])
        assert (shown["asked_keys"], shown["asked_tokens"]) == (self.asked, TOKENS * self.asked)
        assert (shown["loaded_tokens"], shown["loaded_bytes"]) == (TOKENS * self.loaded, BLOCK_BYTES * self.loaded)
        assert abs(shown["saved_seconds"] - TOKENS * self.loaded / 1000.0) < 1e-9


def look_up(engine: FakeEngine, wanted: list[bytes], found: int, *, reported: bool = False) -> int:
    """Look up keys of which the first ``found`` are ready; return the lease, which has ended."""
    ticket = engine.scheduler.lookup([GroupKeys(0, b"".join(wanted))], reported=reported)
    assert ticket.wait(10)
    assert ticket.leading_ready() == found
    engine.scheduler.release(ticket.lease_id)
    return ticket.lease_id


def report(
    engine: FakeEngine, wanted: list[bytes], found: int, covered: int, outcome: Outcome = Outcome.MISSED
) -> None:
    """Look up keys and report what an engine did that had the first ``covered`` in its own cache."""
    lease_id = look_up(engine, wanted, found, reported=True)
    counted = {"lease_id": lease_id, "own_keys": [covered], "covered_keys": [covered]}
    asked = len(wanted)
    engine.scheduler.report_prompt(PromptReport("r", time.time(), TOKENS * asked, asked, 0, 0, 0, outcome, **counted))


def scripted(engine: FakeEngine) -> Counts:
    """Misses for every reason that a client can bring about."""
    engine.scheduler.report(1000.0, 0, 0, 2)
    look_up(engine, keys(0, 8), 0)
    assert engine.store(keys(0, 8), range(8)).ok
    look_up(engine, keys(0, 8), 8)
    assert engine.lookup(keys(0, 8)) == 8
    assert engine.load(keys(0, 5), range(5)).ok
    engine.release()
    report(engine, keys(0, 4), 4, 0, Outcome.LATE)
    report(engine, keys(0, 4), 4, 1, Outcome.SKIPPED)
    report(engine, keys(0, 4), 4, 1, Outcome.NO_SPACE)
    report(engine, keys(50, 4), 0, 3)
    report(engine, keys(4, 8), 4, 5)
    report(engine, keys(60, 4), 0, 4, Outcome.DROPPED)
    engine.scheduler.invalidate([GroupKeys(0, b"".join(keys(6, 2)))])
    look_up(engine, keys(0, 8), 6)
    gap, first, second = *keys(6, 1), *keys(0, 2)
    report(engine, [gap, first, second], 0, 0)
    report(engine, [first, gap, second], 1, 1)  # the prompt before lacks `gap` too, and has not offered it
    report(engine, [first, gap, second], 1, 2)
    for start in range(100, 100 + POOL_BLOCKS, 8):
        assert engine.store(keys(start, 8), range(8)).ok
    look_up(engine, keys(0, 6), 0)
    misses = {"unknown": 8 + 1 + 3, "late": 4, "skipped": 3, "engine_full": 3, "invalidated": 2 + 1}
    misses |= {"computing": 1, "after_gap": 2 + 1, "not_loaded": 1, "evicted": 6}
    found = 8 + 8 + 3 * 4 + 4 + 6 + 3 * 2
    return Counts(14, found, 5, not_needed=8 + 3 + 0 + 1 + 1 + 3 + 5 + 4 + 6 + 0 + 1 + 2, misses=misses)


def from_disk(engine: FakeEngine, daemon: DaemonProcess) -> Counts:
    """What comes up when its request was given up."""
    engine.scheduler.report(1000.0, 0, 0)
    with AdminClient(daemon.directory) as admin:
        # What is stored before the disk serves is written only once it is used again.
        wait_until(lambda: admin.stats().disks[0].state == "serving")
        assert engine.store(keys(0, 8), range(8)).ok
        wait_until(lambda: admin.stats().disks[0].blocks >= 8)
        for number in (1, 2):
            for first in range(1000 * number, 1000 * number + POOL_BLOCKS, 8):
                assert engine.store(keys(first, 8), range(8)).ok
            report(engine, keys(0, 8), 0, 0, Outcome.LATE)
            wait_until(lambda: admin.stats().tiers.promoted_blocks == 8 * number)  # noqa: B023
    return Counts(2, 16, 0, 0, {"late": 16})


def partial(engine: FakeEngine) -> Counts:
    """Of two ranks one has stored."""
    engine.workers[0].store(10**6, [GroupTransfer.of(keys(0, 2), [0, 1])])
    wait_until(lambda: engine.workers[0].take_results())
    look_up(engine, keys(0, 3), 0)
    return Counts(1, 0, 0, 0, {"partial": 2, "unknown": 1})


def check_views(daemon: DaemonProcess, port: int, done: dict[str, Counts]) -> dict[str, Any]:
    """Hold all that shows statistics against what was done; returns what is shown of the namespaces, by model."""
    asked = sum(counts.asked for counts in done.values())
    with AdminClient(daemon.directory) as admin:  # reports are sent once a second
        wait_until(lambda: admin.stats().since_start.asked_keys >= asked, explain=lambda: admin.stats().since_start)
    printed = json.loads(run_cli_here("stats", "--json", "--directory", str(daemon.directory)).stdout)
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
        for label, counts in done.items():
            counts.check(spaces[label])
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
            check_views(daemon, port, {MODEL: from_disk(engine, daemon)})


def test_everything_that_shows_statistics_agrees_with_what_was_done() -> None:
    port = free_port()
    limits = {"totals_every_s": 0.5}
    with DaemonProcess("4MiB", limits=limits, http_address=f"127.0.0.1:{port}", eviction_policy="lru") as daemon:
        one = NamespaceSpec(b"\x01" * 32, MODEL, 1, 32, GROUPS)
        two = NamespaceSpec(b"\x02" * 32, "two ranks", 2, 32, GROUPS)
        with FakeEngine(daemon.directory, one) as first, FakeEngine(daemon.directory, two, world_size=2) as second:
            done = {one.label: scripted(first), two.label: partial(second)}
            spaces = check_views(daemon, port, done)
        assert spaces[MODEL]["late_lookups"] == 2
        evictions = spaces[MODEL]["evicted_blocks"] + spaces["two ranks"]["evicted_blocks"]
        stored = spaces[MODEL]["stored_blocks"]
        assert spaces[MODEL]["ready_blocks"] == stored - spaces[MODEL]["evicted_blocks"] - 2
        assert evictions >= 8
        # The totals outlive a daemon that is killed.
        state, loaded = daemon.directory / "kvoffd.state", TOKENS * done[MODEL].loaded
        wait_until(lambda: state.exists() and f'"loaded_tokens":{loaded}' in state.read_text())
        daemon.kill()
        daemon.start()
        with AdminClient(daemon.directory) as admin:
            again = admin.stats()
        assert again.lifetime.loaded_tokens == loaded
        assert again.since_start.loaded_tokens == 0
