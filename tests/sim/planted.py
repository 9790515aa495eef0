"""Planted faults: one line of the real code made wrong, to show that the tests would find such a bug.

A fault names a function and a piece of its text. Where the code has moved on, the piece is not found any more: plant
the same fault in the new code. Two programs use the list:

* ``python -m tests.sim.planted`` searches the seeds that find each fault and records them in ``planted_seeds.json``,
  which the ordinary tests try. Run it after a change of the simulator or of a planted line.
* ``python -m tests.sim.planted_at_the_door`` runs the tests of the door suite with each fault planted.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import re
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

RECORD = Path(__file__).with_name("planted_seeds.json")
SEARCHED = 2500
"""So many seeds are searched for those that find a fault."""
RECORDED, RECORDED_IN = 4, 150
"""So many of them are recorded, those with the shortest runs first; of a rare fault those that so many seeds bring."""


@dataclass(frozen=True)
class Planted:
    """One fault: in ``function`` of ``module``, ``right`` is replaced by ``wrong``."""

    name: str
    promise: int
    """The promise of RELIABILITY.md that the fault breaks."""
    module: str
    function: str
    right: str
    wrong: str
    door: str = ""
    """The test of the door suite that finds it; none where it does not show at a border."""
    simulated: bool = True
    """Whether the simulator finds it. It does not run the outermost code: processes, HTTP, real sockets."""

    @contextmanager
    def plant(self) -> Iterator[None]:
        """Make the code wrong for a while, wherever it is called from."""
        function = self._find()
        source = textwrap.dedent(inspect.getsource(function))
        source = source[re.search("^(async )?def ", source, re.MULTILINE).start() :]  # type: ignore[union-attr]
        assert source.count(self.right) == 1, (
            f"{self.name!r} finds its line {source.count(self.right)} times in {self.module}.{self.function}: "
            "plant it anew where it belongs now"
        )
        code = compile(
            source.replace(self.right, self.wrong),
            f"<planted: {self.name}>",
            "exec",
            flags=annotations.compiler_flag,
            dont_inherit=True,
        )
        scope: dict[str, object] = {}
        exec(code, function.__globals__, scope)  # noqa: S102 - that is what planting is
        wrong = scope[function.__name__]
        assert isinstance(wrong, FunctionType)
        right, function.__code__ = function.__code__, wrong.__code__
        try:
            yield
        finally:
            function.__code__ = right

    def _find(self) -> FunctionType:
        found: object = importlib.import_module(self.module)
        for part in self.function.split("."):
            found = inspect.getattr_static(found, part)
        found = found.fget if isinstance(found, property) else found
        assert isinstance(found, FunctionType)
        return found


PLANTED = (
    Planted(
        "skip a shard",
        1,
        "kvoffd.cache.cache",
        "Cache._fix_sizes",
        "ranks = range(namespace.world_size)",
        "ranks = range(max(1, namespace.world_size - 1))",
        door="tests/daemon/test_jobs.py::test_a_block_is_ready_when_every_rank_has_stored",
    ),
    Planted(
        "copy one piece too few",
        1,
        "kvoffd.transfer.plan",
        "plan_blocks",
        "Plan(engine, pool, size, nbytes)",
        "Plan(engine[:-1], pool[:-1], size[:-1], nbytes)",
        door="tests/daemon/test_jobs.py::test_stored_bytes_come_back_into_other_blocks",
    ),
    Planted(
        "serve before commit",
        1,
        "kvoffd.cache.cache",
        "Cache._admit",
        "self.blocks.shard[stored.slots] = WRITING_SHARD",
        "self.blocks.shard[stored.slots] = WRITING_SHARD\n"
        "        self._commit(group, rank, stored.blocks, stored.slots, stored.first_blocks, [1] * len(stored.copy))",
    ),
    Planted(
        "pin nothing for a load",
        2,
        "kvoffd.cache.cache",
        "Cache.begin_load",
        "self.pin(blocks)",
        "pass",
    ),
    Planted(
        "a lease does not pin",
        2,
        "kvoffd.cache.cache",
        "Cache._lease",
        "self.blocks.pin(fresh)",
        "(0, 0, 0)",
    ),
    Planted(
        "forget to unpin",
        7,
        "kvoffd.cache.cache",
        "Cache.unpin",
        "self.blocks.unpin(blocks)",
        "self.blocks.unpin(blocks[:1])",
    ),
    Planted(
        "reuse a slot in flight",
        2,
        "kvoffd.server.jobs",
        "Jobs.abandon",
        "for job in dict.fromkeys(jobs):",
        "for job in dict.fromkeys(jobs):\n"
        "        for part in job.ticket.parts if isinstance(job, StoreBatch) else ():\n"
        "            self._cache._let_go(part.group, part.blocks, part.slots)\n"
        "            part.blocks = part.slots = part.slots[:0]",
    ),
    Planted(
        "lose a completion",
        4,
        "kvoffd.server.sessions",
        "CompletionLog.add",
        "self._pending += results",
        "self._pending += [result for result in results if result.job_id % 7]",
        door="tests/daemon/test_jobs.py::test_groups_of_many_shapes_keep_every_byte",
    ),
    Planted(
        "complete twice",
        4,
        "kvoffd.server.sessions",
        "CompletionLog.add",
        "self._pending += results",
        "self._pending += [*results, *(result for result in results if result.job_id % 7 == 3)]",
        door="tests/daemon/test_jobs.py::test_each_result_is_published_once",
    ),
    Planted(
        "commit after EOF",
        1,
        "kvoffd.server.jobs",
        "Jobs.finished",
        "(session.ended or not session.lifeline.alive())",
        "False",
    ),
    Planted(
        "commit what failed half-way",
        1,
        "kvoffd.server.jobs",
        "StoreBatch.end",
        "if error is not None:",
        "if error is ErrorCode.CANCELLED:",
    ),
    Planted(
        "pass a quota",
        12,
        "kvoffd.cache.cache",
        "Cache._within_quota",
        "(quota - namespace.held_bytes) // each",
        "count",
    ),
    Planted(
        "the slots of a pinned block are freed",
        2,
        "kvoffd.cache.block_table",
        "BlockTable.release",
        "self._buffers(len(blocks) * ranks)",
        "self.pins[blocks] = 0\n    self._buffers(len(blocks) * ranks)",
    ),
    Planted(
        "wrong slot offset",
        1,
        "kvoffd.server.jobs",
        "StoreBatch.begin",
        "np.uint64(pool.address)",
        "np.uint64(pool.address + 8 * (keys > 2))",
        door="tests/daemon/test_jobs.py::test_groups_of_many_shapes_keep_every_byte",
    ),
    Planted(
        "stale lease accepted",
        2,
        "kvoffd.cache.cache",
        "Cache._end",
        "del self.leases[lease.lease_id]",
        "pass",
        door="tests/daemon/test_jobs.py::test_a_lease_that_is_released_is_unknown",
    ),
    Planted(
        "missed removed event",
        8,
        "kvoffd.cache.cache",
        "Cache._remove",
        "group.namespace.split(group.group, names))",
        "group.namespace.split(group.group, names)[1:])",
        door="tests/daemon/test_events.py::test_events_from_the_start_give_the_index",
    ),
    Planted(
        "unmapped too early",
        2,
        "kvoffd.server.sessions",
        "Registration.count_jobs",
        "if self._on_closed is not None and not self.jobs:",
        "if self._on_closed is not None:",
    ),
    Planted(
        "block id one beyond the tensor",
        3,
        "kvoffd.transfer.plan",
        "check_ids",
        ".max()) >= limit",
        ".max()) > limit",
        door="tests/daemon/test_bad_requests.py::test_block_ids_leases_and_registrations_that_do_not_fit",
    ),
    Planted(
        "any route will do",
        12,
        "kvoffd.server.service",
        "Service.handle",
        "self.sessions.by_route.get(route)",
        "self.sessions.by_route.get(route) or next(iter(self.sessions), None)",
        door="tests/daemon/test_bad_requests.py::test_requests_of_the_wrong_session",
    ),
    Planted(
        "a copy that hangs is not noticed",
        11,
        "kvoffd.server.memory",
        "MemoryMapper.tick",
        "self._engine.tick()",
        "pass",
        door="tests/daemon/test_hang.py::test_hang_of_a_load_ends_the_daemon_and_the_next_serves",
    ),
    Planted(
        "the stop flag is not set",
        11,
        "kvoffd.transfer.engine",
        "Transfer.must_end",
        "self.stop.value = 1",
        "pass",
    ),
    Planted(
        "release a foreign lease",
        12,
        "kvoffd.cache.cache",
        "Cache.release",
        "lease.session == session",
        "lease.session",
        door="tests/daemon/test_misbehaving_clients.py::test_what_belongs_to_another_session",
    ),
    Planted(
        "partial blocks stay",
        11,
        "kvoffd.cache.cache",
        "Cache.tick",
        "self._drop_partial(partial)",
        "pass",
        door="tests/daemon/test_jobs.py::test_a_block_that_lacks_a_shard_for_too_long_is_dropped",
    ),
    Planted(
        "lookups go on finding what is gone",
        7,
        "kvoffd.cache.block_table",
        "BlockTable.drop",
        "dropped = self._native.blocks_drop(self.address, packed(blocks), len(blocks))",
        "dropped = len(blocks)",
        door="tests/daemon/test_jobs.py::test_invalidated_blocks_are_not_found_again",
    ),
    Planted(
        "a successor serves half a block",
        9,
        "kvoffd.server.recovery",
        "restore",
        "one.lengths)",
        "one.lengths[:1])",
    ),
    Planted(
        "a successor brings back what was invalidated",
        9,
        "kvoffd.cache.block_table",
        "BlockTable.drop",
        "dropped = self._native.blocks_drop(self.address, packed(blocks), len(blocks))",
        'records = self.records["state"]\n'
        "    states = records[blocks]\n"
        "    dropped = self._native.blocks_drop(self.address, packed(blocks), len(blocks))\n"
        "    records[blocks] = states",
        door="tests/daemon/test_restart.py::test_restart_does_not_bring_back_what_was_cleared_under_a_lease",
    ),
    Planted(
        "a reset keeps the namespace's number",
        9,
        "kvoffd.cache.cache",
        "Cache.reset",
        "self._give_number(namespace, self._next_number)",
        "self._give_number(namespace, namespace.number)",
        door="tests/daemon/test_restart.py::test_restart_does_not_bring_back_what_was_cleared",
    ),
    Planted(
        "the client lets go of a load too early",
        6,
        "kvoffd_client.worker_client",
        "WorkerClient._role_disconnected",
        "loads_land = self._phase is Phase.DRAINING",
        "loads_land = False",
    ),
    Planted(
        "a stale jobs socket after a restart",
        6,
        "kvoffd_client.session",
        "Session.disconnect",
        "self._transport.disconnect(drain=drain)",
        "pass",
    ),
    Planted(
        "a load is free before the session has drained",
        6,
        "kvoffd_client.session",
        "Session.disconnect",
        "drain = not dead and self._must_drain()",
        "drain = False",
    ),
    Planted(
        "results beyond the high-water mark are never asked for",
        4,
        "kvoffd_client.worker_client",
        "WorkerClient._ask_for_results",
        "if self._asking or self._phase is not Phase.READY:",
        "if True:",
    ),
    Planted(
        "a fence waits for a store beyond its deadline",
        5,
        "kvoffd_client.worker_client",
        "WorkerClient._abandon_stores",
        'self.disconnect("Running stores were abandoned; the client connects again.", now)',
        "pass",
    ),
    Planted(
        "the client gives up jobs that it sent after it asked",
        4,
        "kvoffd_client.worker_client",
        "WorkerClient._on_results",
        " if sent.request_id < asked]",
        "]",
    ),
    Planted(
        "the client skips lost event messages",
        8,
        "kvoffd_client.event_stream",
        "EventStream.message",
        "self._lose(max(1, number - self.next_sequence))",
        "self.lost += 1",
    ),
    Planted(
        "what the disk could not read is served",
        1,
        "kvoffd.tiering.promoter",
        "Promoter._on_end",
        "block if result is Result.DONE else None",
        "block or Block(fill.space, fill.key, *([(0,) * len(fill.space.lengths), (1,) * len(fill.space.lengths)]))",
    ),
    Planted(
        "after a reset blocks still come from the shared store",
        9,
        "kvoffd.tiering.tiering",
        "Tiering.unshare",
        "self.unshared, fingerprint",
        "{}, fingerprint",
        door="tests/daemon/test_shared.py::test_a_reset_of_an_engine_holds_over_a_kill",
    ),
    Planted(
        "another block's object is served from the shared store",
        10,
        "kvoffd.tiers.block_format",
        "decode_header",
        "return block if block is not None and block.space == space and block.key == key else None",
        "return block",
    ),
    Planted(
        "bytes of a shared object are not compared with their checksum",
        10,
        "kvoffd.tiers.shared",
        "_verified",
        "return block if right else None",
        "return block",
    ),
    Planted(
        "the slots of a block that is gone from the shared store are never free again",
        7,
        "kvoffd.tiers.shared",
        "SharedTier._read_ended",
        "read.on_end(",
        "result is not Result.GONE and read.on_end(",
    ),
    Planted(
        "bytes from the disk are not compared with their checksum",
        10,
        "kvoffd.tiers.disk",
        "DiskTier._compared",
        "if all(digest(view[:length]) == checksum for length, view, checksum in lengths):",
        "if True:",
        door="tests/daemon/test_disk.py::test_corrupt_bytes_are_a_miss_and_counted",
    ),
    Planted(
        "a drop is answered before the disk has noted it",
        9,
        "kvoffd.tiers.disk",
        "DiskTier.removals_kept",
        "next(iter(self._unkept), last + 1) > last",
        "True",
        simulated=False,
        door="tests/tiers/test_disk.py::test_what_is_removed_stays_away_once_that_is_kept",
    ),
    Planted(
        "what is removed while it is written is on disk when it is",
        9,
        "kvoffd.tiers.disk",
        "DiskTier._remove",
        "del self._writing[job.space.tag, job.key]",
        "pass",
    ),
    Planted(
        "an evicted block that is invalidated comes back from the disk",
        9,
        "kvoffd.tiers.disk",
        "DiskTier._remove",
        "gone += [evicted.pop(name) for name in names & evicted.keys()]",
        "pass",
        simulated=False,
        door="tests/tiers/test_disk.py::test_what_was_evicted_before_it_was_removed_stays_away_too",
    ),
    Planted(
        "what is removed from the disk leaves its record there",
        9,
        "kvoffd.tiers.disk",
        "DiskTier._remove",
        "self._note_gone(gone, [removal], wiped=True)",
        "self._note_gone([], [removal], wiped=True)",
        simulated=False,
        door="tests/tiers/test_disk.py::test_what_is_removed_stays_away_once_that_is_kept",
    ),
    Planted(
        "what is removed from the disk leaves its header there",
        9,
        "kvoffd.tiers.disk",
        "DiskTier._remove",
        "self._note_gone(gone, [removal], wiped=True)",
        "self._note_gone(gone, [removal], wiped=False)",
        simulated=False,
        door="tests/tiers/test_disk.py::"
        "test_what_was_removed_and_is_written_again_is_never_the_old_bytes_after_a_power_cut",
    ),
    Planted(
        "a reset leaves the disk as it is",
        9,
        "kvoffd.tiering.tiering",
        "Tiering.forget_all",
        "return self.remove_all(namespace.fingerprint)",
        "return 0",
        simulated=False,
        door="tests/daemon/test_disk.py::test_dropped_blocks_stay_away",
    ),
    Planted(
        "a slot is freed while the disk still reads into it",
        2,
        "kvoffd.tiering.promoter",
        "Promoter.tick",
        "self._cache.drop_unfinished(fill.ticket, MissReason.TIER_LATE)",
        "self._end_fill(fill.ticket, None)",
    ),
    Planted(
        "what was dropped while it came up is served",
        9,
        "kvoffd.cache.cache",
        "Cache.end_fill",
        "self._let_go(group, ticket.blocks[~whole], slots[~whole])",
        "self.blocks.state[ticket.blocks] = WRITING\n    self._let_go(group, ticket.blocks[~whole], slots[~whole])",
    ),
    Planted(
        "what is being written to disk is not pinned",
        2,
        "kvoffd.tiering.writer",
        "Writer.pump",
        "self._cache.pin(np.concatenate(begun))",
        "pass",
    ),
    Planted(
        "events are not published",
        8,
        "kvoffd.server.service",
        "Service.outgoing",
        "publications += self.events.take()",
        "self.events.take()",
        door="tests/daemon/test_events.py::test_events_are_published_as_they_happen",
    ),
    Planted(
        "results are forgotten before they are acknowledged",
        4,
        "kvoffd.server.sessions",
        "CompletionLog.flush",
        "self._kept.append((batch, self._pending_key_bytes))",
        "batch.results and None",
        door="tests/daemon/test_jobs.py::test_results_are_numbered_and_there_until_acknowledged",
        simulated=False,
    ),
    Planted(
        "leases do not end with their session",
        7,
        "kvoffd.cache.cache",
        "Cache.end_session",
        "return self._end([lease for lease in self.leases.values() if lease.session == session])",
        "return 0",
        door="tests/daemon/test_jobs.py::test_leases_end_with_their_session",
        simulated=False,
    ),
    Planted(
        "the memory of an ended session stays mapped",
        12,
        "kvoffd.server.sessions",
        "Session.close_memory",
        "memory.close_when_idle(lambda: None)",
        "pass",
        door="tests/daemon/test_misbehaving_clients.py::test_a_client_that_is_killed",
    ),
    Planted(
        "a refused registration loses its descriptors",
        12,
        "kvoffd.server.requests",
        "_give_back",
        "if session.ended or segment_id in session.segments:",
        "if True:",
    ),
    Planted(
        "the slots of a store that fails are lost",
        7,
        "kvoffd.cache.cache",
        "Cache.abort_store",
        "self._let_go(part.group, part.blocks, part.slots)",
        "pass",
    ),
    Planted(
        "a session that has ended is served",
        12,
        "kvoffd.server.sessions",
        "Sessions.end",
        "del self.by_route[session.route]",
        "pass",
    ),
    Planted(
        "free bytes are counted wrong",
        7,
        "kvoffd.cache.cache",
        "Cache.usage",
        "PoolUsage(self.slots.free_bytes,",
        "PoolUsage(self.slots.free_bytes - 4096 * (ready > 0),",
        door="tests/daemon/test_stats.py::test_the_books_balance_whatever_is_done",
    ),
    Planted(
        "blocks are not recovered",
        9,
        "kvoffd.server.recovery",
        "restore",
        "if not pool.adopted:",
        "if True:",
        door="tests/daemon/test_restart.py::test_restart_brings_back_blocks_and_names",
    ),
    Planted(
        "a restart forgets a reset",
        9,
        "kvoffd.server.persistence",
        "State.restore",
        "self.known = msgspec.json.decode(body, type=Content)",
        "self.known = Content()",
        simulated=False,
        door="tests/daemon/test_disk.py::test_a_reset_holds_for_a_disk_that_was_absent",
    ),
    Planted(
        "a restart forgets the quotas of namespaces",
        9,
        "kvoffd.server.recovery",
        "restore",
        "cache.quotas.set(fingerprint, quota_bytes)",
        "pass",
        door="tests/daemon/test_stats.py::test_a_quota_holds_and_outlives_the_daemon",
        simulated=False,
    ),
    Planted(
        "bytes that changed in the pool are served",
        10,
        "kvoffd.cache.cache",
        "Cache.check",
        'if record["checksum"] != checksum:',
        "if False:",
        door="tests/daemon/test_integrity.py::test_integrity_load_of_a_flipped_byte_fails_before_a_byte_moves",
        simulated=False,
    ),
    Planted(
        "anybody may connect",
        12,
        "kvoffd.server.sessions",
        "may_connect",
        "return peer.uid in uids or",
        "return True or",
        simulated=False,
        door="tests/daemon/test_misbehaving_clients.py::test_users_who_are_not_allowed_are_refused",
    ),
    Planted(
        "a client of another version is let in",
        12,
        "kvoffd.server.requests",
        "hello",
        "if message.protocol_version != m.PROTOCOL_VERSION:",
        "if False:",
        simulated=False,
        door="tests/daemon/test_bad_requests.py::test_another_version_is_refused_with_both_numbers",
    ),
    Planted(
        "two daemons serve one directory",
        9,
        "kvoffd.system.files",
        "claim_file",
        "if not calls.lock(fd):",
        "if False:",
        simulated=False,
        door="tests/daemon/test_start_end.py::test_start_is_refused_beside_another_daemon",
    ),
    Planted(
        "a daemon that stops leaves its sockets",
        6,
        "kvoffd.system.directory",
        "DaemonDirectory.release",
        "if _inode(path) == inode:",
        "if False:",
        simulated=False,
        door="tests/daemon/test_start_end.py::test_sigterm_removes_the_sockets_and_ends_with_success",
    ),
    Planted(
        "health is good whatever is wrong",
        11,
        "kvoffd.server.health",
        "health_of",
        "return (a.HealthLevel.DEGRADED if causes else a.HealthLevel.OK), causes",
        "return a.HealthLevel.OK, []",
        door="tests/daemon/test_health.py::test_health_a_pool_that_one_lease_pins_is_degraded",
        simulated=False,
    ),
    Planted(
        "a quota is ignored",
        12,
        "kvoffd.cache.cache",
        "Cache._take",
        "count = self._within_quota(group, count, below)",
        "pass",
        door="tests/daemon/test_stats.py::test_a_quota_holds_and_outlives_the_daemon",
    ),
    Planted(
        "the health command ends with 0 whatever it says",
        11,
        "kvoffd_client.cli.health",
        "status_of",
        'return 0 if live or (ready and level != "down") else STATUS[level]',
        "return 0",
        door="tests/cli/test_health.py::test_a_degraded_daemon_is_alive_and_ready",
        simulated=False,
    ),
)


def fault(name: str) -> Planted:
    """The planted fault of this name."""
    return next(planted for planted in PLANTED if planted.name == name)


def recorded_seeds() -> dict[str, list[int]]:
    """By fault, the recorded seeds that find it."""
    found: dict[str, list[int]] = json.loads(RECORD.read_text())["seeds"]
    return found


def search(name: str, wanted: int = 1) -> list[tuple[int, int, str]]:
    """Seeds that find a fault, up to ``wanted``: the steps of the run, the seed, and what it says."""
    from tests.sim.scenario import Scenario
    from tests.sim.world import run

    found: list[tuple[int, int, str]] = []
    with fault(name).plant():
        for seed in range(SEARCHED):
            outcome = run(Scenario(seed))
            if outcome.problem is not None:
                found.append((outcome.steps, seed, outcome.problem))
            if len(found) >= (wanted if seed < RECORDED_IN else 1):
                break
    return found


def main() -> None:
    """Search for all faults, on all cores, and record what finds them. Names limit it to some."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="faults; all without one")
    names = parser.parse_args().names or [planted.name for planted in PLANTED if planted.simulated]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        searches = {pool.submit(search, name, RECORDED): name for name in names}
        for done in as_completed(searches):
            name, found = searches[done], sorted(done.result())
            seeds = (recorded_seeds() if RECORD.exists() else {}) | {name: [seed for _, seed, _ in found]}
            print(f"{name}: {seeds[name]} {found[0][2] if found else 'NOT FOUND'}", flush=True)
            there = {planted.name: seeds[planted.name] for planted in PLANTED if planted.name in seeds}
            lines = ",\n".join(f"    {json.dumps(name)}: {found}" for name, found in there.items())
            RECORD.write_text(f'{{\n  "made by": "python -m tests.sim.planted",\n  "seeds": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    main()
