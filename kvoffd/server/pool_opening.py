"""Opens the pool, from a file, systemd's fd store or new memory, and recovers an earlier daemon's blocks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from shlex import quote

from kvoffd import __version__
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group, NamespaceSnapshot
from kvoffd.cache.recovery import RecoveredBlocks, recover
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.memory_estimate import memory_shortage, memory_summary
from kvoffd.pool.backing import POOL_NAME, TABLE_NAME, FileBacking, MemfdBacking, NewBacking, PoolBacking
from kvoffd.pool.pool import MemoryKind, Pool
from kvoffd.server.persistence import PolicyFile, State
from kvoffd.system.files import OnError
from kvoffd.system.limits import memory_limit
from kvoffd.system.numa import nodes_with_gpus
from kvoffd.system.systemd import FdStore, Notifier
from kvoffd_proto.build import with_commit
from kvoffd_proto.stats import SLOW_PAGES
from kvoffd_proto.units import format_duration, format_size, plural

logger = logging.getLogger(__name__)

SMALL_POOL_BYTES = 1 << 30
"""Up to this size a pool's pages are not measured: that would take as long as the rest of the start."""
POOL_NAMES = POOL_NAME, TABLE_NAME
"""Names in systemd's fd store."""
RELEASE_TIMEOUT_S = 5.0
"""Time for systemd to close the descriptors of an earlier pool."""
TOLD_S = 2.0
"""Interval of reports of the start's progress."""


class StartProgress:
    """Progress of the pool's memory, which may take minutes: for the log, systemd and clients, every two seconds."""

    def __init__(self, pool_bytes: int, notifier: Notifier, tell: Callable[[str], None] = lambda _: None) -> None:
        self.text = "starting"
        self._pool_bytes, self._notifier, self._tell = pool_bytes, notifier, tell
        self._began_at = self._told_at = time.monotonic()
        self._done_bytes = 0

    def __call__(self, done_bytes: int) -> None:
        """Report how many bytes are done. They begin at 0 again when a file that was allocated is touched."""
        now = time.monotonic()
        if done_bytes < self._done_bytes:
            self._began_at = now
        self._done_bytes = done_bytes
        left_s = round((now - self._began_at) * max(0, self._pool_bytes - done_bytes) / max(1, done_bytes))
        left = f"{left_s} s" if left_s < 60 else format_duration(left_s)
        share = min(100, 100 * done_bytes // self._pool_bytes)
        self.text = f"starting, {share} % of {format_size(self._pool_bytes)}, about {left}"
        if now - self._told_at >= TOLD_S:
            self._told_at = now
            self._tell(self.text)
            self._notifier.starting(self.text)
            logger.info("The pool's memory: %s.", self.text)


def open_pool(
    config: Config,
    notifier: Notifier,
    stored: Mapping[str, list[int]],
    should_stop: Callable[[], bool],
    progress: StartProgress,
    *,
    was_killed: bool = False,
) -> Pool:
    """Open an earlier daemon's pool, or create one if there is none that is usable, and touch every page.

    Args:
        stored: descriptors that systemd kept, by name. Takes ownership.
        should_stop: polled while pages are touched; once it returns True, this returns early.
        was_killed: an earlier daemon in this directory was.

    Raises:
        PoolTooLarge: there is not enough memory.
        KvoffdError: ``pool_file`` is unusable.
    """
    if config.pool_file:
        pool = _open_pool_file(config, notifier, stored, progress, should_stop)
    elif stored or notifier.fd_store is not FdStore.NO or config.peers or config.peer_listen:
        pool = _open_memfds(config, notifier, stored, progress, should_stop)
    else:  # nobody keeps it, and no helper process reads it
        pool = _make_pool(config, NewBacking(progress, should_stop, takes_reserved=config.reserved_pages == "auto"))
    if was_killed and not (config.pool_file or stored):
        logger.warning("The pool starts empty. The earlier daemon was killed, and its memory ended with it.")
    if pool.cold_reason:
        logger.warning("The pool starts empty. %s", pool.cold_reason)
    version, size = with_commit(__version__), format_size(config.pool_bytes)
    logger.info("kvoffd %s opens a pool of %s. %s", version, size, memory_summary(config))
    keep = "" if pool.kept else " To keep it, set pool_file to a file in /dev/shm, or run kvoffd as a systemd unit."
    logger.info("The pool's memory %s.%s", pool.at_the_end, keep)
    if not pool.resident:
        with OnError(pool.close):
            started = time.monotonic()
            pool.touch(config.limits.touch_threads, progress, should_stop)
            if not should_stop():
                logger.info("The pool is in memory after %.1f s.", time.monotonic() - started)
                log_pages(pool, config.pool_file)
    if shortage := memory_shortage(config, memory_limit()):
        logger.warning("%s", shortage)
    return pool


def log_pages(pool: Pool, pool_file: str) -> None:
    """Find out which pages a large pool has, whose pages are mapped, and log what small ones cost."""
    if pool.pool_bytes <= SMALL_POOL_BYTES:
        return
    pool.measure_pages()
    huge = f"{format_size(pool.pages.huge_bytes)} of {format_size(pool.pool_bytes)} are in huge pages"
    if pool.pages.slowdown < SLOW_PAGES:
        logger.info("The pool's memory: %s.", huge)
        return
    cure = "free memory is in pieces; a restart of the machine, or of the daemon when more is free, would help"
    if pool.kind is MemoryKind.SHARED:
        cure = (
            f"mount -o remount,huge=advise $(findmnt -no TARGET -T {quote(pool_file)})"
            if pool_file
            else "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        )
        cure = f"before the daemon starts: {cure}"
    logger.warning(
        "The pool's memory: %s. Reading it takes %.1f times as long as reading memory in huge pages. For more of them, "
        "%s.",
        huge,
        pool.pages.slowdown,
        cure,
    )


def restore(cache: Cache, pool: Pool, policy: PolicyFile, state: State, max_namespaces: int) -> None:
    """Restore an earlier daemon's quotas, policy state and blocks, which are ready then.

    Blocks of namespaces that were reset or cleared while another pool was in use are left out. So are those of the
    oldest ones beyond ``max_namespaces``: earlier releases had up to 1,024.
    """
    started = time.monotonic()
    cache.quotas.update(state.quotas)
    policy.restore()
    if not pool.recovered:
        return
    snapshot = pool.table.load_namespaces(NamespaceSnapshot) or NamespaceSnapshot(1, ())
    known: list[Group] = []
    # A generation above that of the state file, which has lost a reset, becomes the known one here.
    records = [one for one in snapshot.namespaces if state.generations.accept(one.fingerprint, one.generation)]
    records.sort(key=lambda one: one.number)  # in the order in which they were opened or last reset
    if beyond := max(0, len(records) - max_namespaces):
        logger.warning(
            "The oldest %d of the pool's %d namespaces are left out: the limit is %d.",
            beyond,
            len(records),
            max_namespaces,
        )
    for record in records[beyond:]:
        try:
            groups = cache.namespaces.restore(record)
        except KvoffdError as error:
            logger.warning("The pool's blocks of %s are lost. %s", record.label, error.message)
            continue
        # Groups without sizes have no blocks, because no rank had registered.
        known += [group for group in groups if group.sizes]
    _, table_fd = pool.memory_fds
    found = recover(table_fd, pool.table, pool.slots, cache.blocks, known, snapshot.next_number)
    cache.life.enter_recovered(found.blocks, found.quarantined)
    cache.namespaces.save()
    logger.info(
        "Recovered an earlier daemon's pool: %d blocks (%s) in %d namespace%s are ready after %.3f s.",
        len(found.blocks),
        format_size(cache.life.usage.ready),
        len(cache.namespaces),
        plural(len(cache.namespaces)),
        time.monotonic() - started,
    )
    _log_losses(found)


def _log_losses(found: RecoveredBlocks) -> None:
    """Log the slots that were not recovered."""
    if not len(found.blocks):
        lost = found.unwritten + found.damaged + found.incomplete
        level = logging.WARNING if lost else logging.INFO
        logger.log(level, "The pool starts empty. The earlier daemon's has no complete block.")
    for count, why, level in (
        (found.unwritten, "the latest record of their namespaces was damaged", logging.WARNING),
        (found.damaged, "damaged, or without a checksum", logging.WARNING),
        (found.incomplete, "their blocks lack shards of other ranks", logging.WARNING),
        (found.reset, "their namespaces were reset, left out, or too many for a pool of this size", logging.INFO),
    ):
        if count:
            logger.log(level, "Dropped %d pool slot%s at recovery: %s.", count, plural(count), why)
    if count := len(found.quarantined):
        logger.warning(
            "Not using %d slot%s with earlier checksum mismatches; check the machine's memory.", count, plural(count)
        )


def _open_pool_file(
    config: Config,
    notifier: Notifier,
    stored: Mapping[str, list[int]],
    progress: StartProgress,
    should_stop: Callable[[], bool],
) -> Pool:
    _discard_stored(notifier, stored)
    with closing(FileBacking(Path(config.pool_file), progress, should_stop)) as backing:
        pool = _make_pool(config, backing)
        with OnError(pool.close):
            backing.publish()
    pool.kept = f"in {config.pool_file}"
    return pool


def _open_memfds(
    config: Config,
    notifier: Notifier,
    stored: Mapping[str, list[int]],
    progress: StartProgress,
    should_stop: Callable[[], bool],
) -> Pool:
    pools, tables = stored.get(POOL_NAME, []), stored.get(TABLE_NAME, [])
    stored_pair = (pools[0], tables[0]) if len(pools) == len(tables) == 1 else None
    unusable = {name: fds for name, fds in stored.items() if stored_pair is None or name not in POOL_NAMES}
    if unusable:
        kept = ", ".join(f"{len(fds)} named {name}" for name, fds in sorted(unusable.items()))
        text = "systemd kept other descriptors than one pool and one table; they are closed: %s."
        logger.warning(text if stored_pair else f"The pool starts empty. {text}", kept)
        _discard_stored(notifier, unusable)
    discard = partial(_remove_from_systemd, notifier, POOL_NAMES)
    reserved = config.reserved_pages == "auto"
    with closing(MemfdBacking(stored_pair, discard, progress, should_stop, takes_reserved=reserved)) as backing:
        pool = _make_pool(config, backing)
    if not (pool.recovered or should_stop()):  # one that is to stop may not have allocated all of it
        for name, fd in zip(POOL_NAMES, pool.memory_fds, strict=True):
            notifier.store_fd(name, fd)
    if pool.recovered or notifier.fd_store is FdStore.YES:
        pool.kept = "by systemd over restarts"
    elif notifier.fd_store is FdStore.MAYBE:
        pool.kept = "by systemd over restarts, if the unit has FileDescriptorStoreMax="
    return pool


def _make_pool(config: Config, backing: PoolBacking) -> Pool:
    pool = Pool(config.pool_bytes, backing=backing, nodes=nodes_with_gpus() if config.numa == "auto" else ())
    for segment in pool.slots.segments:
        size = format_size(segment.end - segment.begin)
        logger.info("%s of the pool are on NUMA node %d, near a GPU.", size, segment.locality.node)
    return pool


def _discard_stored(notifier: Notifier, stored: Mapping[str, list[int]]) -> None:
    """Close stored descriptors, here and in systemd's fd store."""
    for fd in chain.from_iterable(stored.values()):
        os.close(fd)
    if stored:
        _remove_from_systemd(notifier, stored)


def _remove_from_systemd(notifier: Notifier, names: Iterable[str]) -> None:
    for name in names:
        notifier.remove_fds(name)
    # The memory is freed only when systemd has closed its descriptors too.
    if not notifier.wait_until_handled(RELEASE_TIMEOUT_S):
        logger.warning("systemd does not answer; the memory of the old pool may still be in use.")
