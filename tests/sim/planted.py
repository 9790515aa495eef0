"""Planted faults: one line of the real code made wrong, to show that the simulator would find such a bug.

A fault names a function and a piece of its text. Where the code has moved on, the piece is not found any more: plant
the same fault in the new code.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType


@dataclass(frozen=True)
class Planted:
    """One fault: in ``function`` of ``module``, ``right`` is replaced by ``wrong``."""

    name: str
    module: str
    function: str
    right: str
    wrong: str
    first: int = 0
    """The seed to begin with, where those before were seen not to find it: they come last."""

    @contextmanager
    def plant(self) -> Iterator[None]:
        """Make the code wrong for a while, wherever it is called from."""
        function = self._find()
        source = textwrap.dedent(inspect.getsource(function))
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
        assert isinstance(found, FunctionType)
        return found


PLANTED = (
    Planted(
        "skip a shard",
        "kvoffd.cache.namespace",
        "Block.__init__",
        "self.missing = namespace.world_size",
        "self.missing = max(1, namespace.world_size - 1)",
    ),
    Planted(
        "copy one piece too few",
        "kvoffd.transfer.plan",
        "plan_blocks",
        "nbytes = int(ids.size) * int(layout.page_bytes.sum())",
        "engine, pool, size = engine[:-1], pool[:-1], size[:-1]; nbytes = int(size.sum())",
    ),
    Planted(
        "serve before commit",
        "kvoffd.cache.blocks",
        "Blocks.start_shards",
        "    return blocks",
        "    self.finish_shards(blocks, rank, namespace.shard_bytes(rank)[group])\n    return blocks",
    ),
    Planted(
        "pin nothing for a load",
        "kvoffd.cache.cache",
        "BlockCache.begin_load",
        "self.blocks.pin(blocks)",
        "pass",
    ),
    Planted(
        "a cache method forgot to apply deferred pins",
        "kvoffd.cache.cache",
        "BlockCache.begin_stores",
        "blocks = self.blocks",
        "blocks = self._LeasedBlocks__blocks",
        first=1035,
    ),
    Planted(
        "forget to unpin",
        "kvoffd.cache.blocks",
        "Blocks.unpin",
        "block.pins -= 1",
        "block.pins -= block.pins == 1 or len(block.key) != 8",
    ),
    Planted(
        "reuse a slot in flight",
        "kvoffd.server.jobs",
        "JobRunner.abandon",
        "for job in dict.fromkeys(jobs):",
        "for job in dict.fromkeys(jobs):\n"
        "        while job.store_tickets: self._cache.abort_store(job.store_tickets.pop())",
    ),
    Planted(
        "lose a completion",
        "kvoffd.server.session",
        "CompletionLog.add",
        "self._pending += results",
        "self._pending += [result for result in results if result.job_id % 7]",
    ),
    Planted(
        "complete twice",
        "kvoffd.server.session",
        "CompletionLog.add",
        "self._pending += results",
        "self._pending += [*results, *(result for result in results if result.job_id % 7 == 3)]",
    ),
    Planted(
        "commit after EOF",
        "kvoffd.server.jobs",
        "JobRunner.transfer_done",
        "(job.session.ended or not job.session.lifeline.alive())",
        "False",
    ),
    Planted(
        "commit what failed half-way",
        "kvoffd.server.engine_jobs",
        "StoreJobs.end",
        "if outcome is not Outcome.DONE:",
        "if outcome is Outcome.CANCELLED:",
    ),
    Planted(
        "take what another namespace is promised",
        "kvoffd.cache.shares",
        "Claim.may_take_from",
        "held > self._kept(owner) and held - nbytes >= least",
        "held > nbytes",
    ),
    Planted(
        "pass a maximum",
        "kvoffd.cache.room",
        "Room._room_below_maximum",
        "int(claim.room // each)",
        "count",
    ),
    Planted(
        "evict a pinned block",
        "kvoffd.cache.eviction",
        "choose_victims",
        "if block.pins or block in protected:",
        "if block in protected:",
    ),
    Planted(
        "wrong slot offset",
        "kvoffd.server.engine_jobs",
        "StoreJobs._plan",
        "np.uint64(owner.pool_address)",
        "np.uint64(owner.pool_address + 8 * (len(part.keys) > 2))",
    ),
    Planted(
        "a checksum too early",
        "kvoffd.transfer.plan",
        "plan_blocks",
        'side="right"',
        'side="left"',
    ),
    Planted(
        "stale lease accepted",
        "kvoffd.cache.pins",
        "LeaseTable.remove",
        "del self._leases[lease.lease_id]",
        "pass",
    ),
    Planted(
        "missed removed event",
        "kvoffd.cache.blocks",
        "Blocks.evict",
        "self._listener.removed(namespace, group, keys)",
        "self._listener.removed(namespace, group, keys[1:])",
    ),
    Planted(
        "unmapped too early",
        "kvoffd.server.session",
        "ClientMemory._close_if_idle",
        "if self._on_closed is not None and not self.jobs:",
        "if self._on_closed is not None:",
    ),
    Planted(
        "block id one beyond the tensor",
        "kvoffd.transfer.plan",
        "blocks_outside",
        ">= min(layout.block_limit",
        "> min(layout.block_limit",
        first=774,
    ),
    Planted(
        "any token will do",
        "kvoffd.server.service",
        "Service._answer",
        "self.sessions.by_token.get(request.token)",
        "self.sessions.by_token.get(request.token) or next(iter(self.sessions), None)",
    ),
    Planted(
        "a copy that hangs is not noticed",
        "kvoffd.server.engine_memory",
        "MemoryMapper.expire",
        "self._host.expire()",
        "pass",
    ),
    Planted(
        "renew a foreign lease",
        "kvoffd.cache.pins",
        "LeaseTable.owned",
        "lease.owner == owner",
        "lease.owner",
    ),
    Planted(
        "half-stored blocks stay",
        "kvoffd.cache.cache",
        "BlockCache.expire",
        "self.blocks.drop_half_stored(overdue)",
        "pass",
    ),
    Planted(
        "lookups go on finding what is gone",
        "kvoffd.cache.blocks",
        "Blocks._move",
        "index.remove(keys)",
        "index.set(keys, READY)",
    ),
    Planted(
        "a successor serves half a block",
        "kvoffd.cache.inherited",
        "InheritedBlocks.__init__",
        "owner.rank, owner.world_size = kind.rank, kind.world_size",
        "owner.rank, owner.world_size = 0, 1",
    ),
    Planted(
        "a successor brings back what was invalidated",
        "kvoffd.pool.pool",
        "Pool.revoke_record",
        "self._table.free([offset])",
        "pass",
    ),
    Planted(
        "the client lets go of a load too early",
        "kvoffd_client.worker_session",
        "WorkerSession._role_disconnected",
        "if ended or not job.is_load",
        "if True or ended",
        first=48,
    ),
    Planted(
        "the client gives up jobs that it sent after it asked",
        "kvoffd_client.worker_session",
        "WorkerSession._fail_unknown",
        "request_id < asked and",
        "",
    ),
    Planted(
        "the client skips lost event messages",
        "kvoffd_client.scheduler_session",
        "EventStream.message",
        "self._ahead[number] = (topic, payload)",
        "self._ahead[number] = (topic, payload); self.next_sequence = number",
    ),
    Planted(
        "what the disk could not read is served",
        "kvoffd.tiering.transfers",
        "TierTransfers.end_promotion",
        "if ok and shard.checksum:",
        "if shard.checksum:",
    ),
    Planted(
        "after a reset blocks still come from the shared store",
        "kvoffd.tiering.shared",
        "SharedTiering.namespace_reset",
        "self.stop_sharing(fingerprint)",
        "pass",
    ),
    Planted(
        "another block's object is served from the shared store",
        "kvoffd.tiers.shared.object_format",
        "decode_header",
        "return block if sound and encode_header(block, generation, digest) == data else None",
        "return block if sound else None",
    ),
    Planted(
        "bytes of a shared object are not compared with their checksum",
        "kvoffd.tiers.shared.workers",
        "Workers._verified",
        "return block if right else None",
        "return block",
    ),
    Planted(
        "the slots of a block that is gone from the shared store are never free again",
        "kvoffd.tiers.shared.shared_tier",
        "SharedTier.read_ended",
        "on_done(result)",
        "result is not TierResult.GONE and on_done(result)",
    ),
    Planted(
        "bytes from the disk are not compared with their checksum",
        "kvoffd.tiers.disk.workers",
        "Executor._verify",
        "if self._digest(buffer[: shard.length]) != shard.checksum:",
        "if False:",
    ),
    Planted(
        "a drop is answered before the disk has noted it",
        "kvoffd.tiers.disk.disk_tier",
        "DiskTier.removals_kept",
        "self._updates.kept_removals >= removals",
        "True",
    ),
    Planted(
        "a reset namespace comes back from the disk after a crash",
        "kvoffd.tiers.disk.record_updates",
        "RecordUpdates.forget_namespace",
        "floors[fingerprint] = self._regions.generation",
        "floors[fingerprint] = 0",
    ),
    Planted(
        "what is removed from the disk leaves its record there",
        "kvoffd.tiers.disk.regions",
        "DiskRegions.mark_stale",
        "self.dirty.mark(region, slot)",
        "pass",
    ),
    Planted(
        "a reset leaves the disk as it is",
        "kvoffd.tiering.manager",
        "TieringManager.forget_all",
        "return self.tier.remove_namespace(namespace.fingerprint)",
        "return 0",
    ),
    Planted(
        "a slot is freed while the disk still reads into it",
        "kvoffd.tiering.promotion",
        "Promoter.tick",
        "self._transfers.give_up_promotion(request.promotion)",
        "self._transfers.end_promotion(request.promotion, ok=False)",
    ),
    Planted(
        "what is being written to disk is not pinned",
        "kvoffd.tiering.transfers",
        "TierTransfers.begin_demotion",
        "self._cache.blocks.pin([block])",
        "self._cache.blocks.pin([])",
    ),
    Planted(
        "routers are told of blocks whose prompt is not there from its start on",
        "kvoffd.server.router_index",
        "RouterIndex._publish_one",
        "wanted = known.media if reachable else 0",
        "wanted = known.media if known.tokens is not None else 0",
    ),
    Planted(
        "routers that come late are not told of what the pool no longer has",
        "kvoffd.server.router_index",
        "RouterIndex.snapshot",
        "for one in MEDIA if",
        "for one in (1,) if",
    ),
)
