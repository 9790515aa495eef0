"""Where the pool comes from: a file, systemd's store, or new memory; and what an earlier daemon left in it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from itertools import chain
from pathlib import Path

from kvoffd import __version__
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import NamespaceSnapshot
from kvoffd.cache.recovery import recover
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.memory_estimate import memory_shortage, memory_summary
from kvoffd.pool.backing import FileBacking, MemfdBacking, PoolBacking
from kvoffd.pool.pool import Pool
from kvoffd.server.persistence import PolicyFile, State
from kvoffd.system.files import OnError
from kvoffd.system.limits import memory_limit
from kvoffd.system.numa import nodes_with_gpus
from kvoffd.system.systemd import Notifier
from kvoffd_proto.units import format_size, plural

logger = logging.getLogger(__name__)

POOL_NAME = "kvoffd-pool"
TABLE_NAME = "kvoffd-slot-table"
"""What the two memfds are called in systemd's store."""

RELEASE_TIMEOUT_S = 5.0
TOUCH_LOGGED_S = 2.0


def take_pool(config: Config, notifier: Notifier, stored: Mapping[str, list[int]], stopped: Callable[[], bool]) -> Pool:
    """Take the pool over from an earlier daemon, or make a new one where that left none, or none that is to be trusted,
    and touch every page of it, which may take minutes.

    Args:
        stored: descriptors that systemd kept, by name; owned from here on.
        stopped: asked while it touches; it then returns early.

    Raises:
        PoolTooLarge: there is not the memory.
        PoolFileError: ``pool_file`` is not to be used.
    """
    pool = _open_pool_file(config, notifier, stored) if config.pool_file else _open_memfds(config, notifier, stored)
    if pool.cold_reason:
        logger.warning("The pool starts empty. %s", pool.cold_reason)
    logger.info("kvoffd %s takes a pool of %s. %s", __version__, format_size(config.pool_bytes), memory_summary(config))
    if not pool.resident:
        with OnError(pool.close):
            _touch(pool, config, notifier, stopped)
    if shortage := memory_shortage(config, memory_limit()):
        logger.warning("%s", shortage)
    return pool


def _touch(pool: Pool, config: Config, notifier: Notifier, stopped: Callable[[], bool]) -> None:
    """Touch all of the pool, and tell the log and systemd every few seconds how far it is."""
    started = told_at = time.monotonic()

    def tell(touched_bytes: int) -> None:
        nonlocal told_at
        if (now := time.monotonic()) - told_at >= TOUCH_LOGGED_S:
            told_at = now
            text = f"Touching the pool: {format_size(touched_bytes)} of {format_size(config.pool_bytes)}."
            logger.info("%s", text)
            notifier.starting(text)

    pool.touch(config.limits.touch_threads, tell, stopped)
    if not stopped():
        logger.info("The pool is in memory after %.1f s.", time.monotonic() - started)


def restore(cache: Cache, pool: Pool, policy: PolicyFile, state: State) -> None:
    """Take over an earlier daemon's quotas, what its policy knew, and its blocks, all of which are ready then.

    Blocks of namespaces that were reset or cleared while another pool was used are not among them.
    """
    started = time.monotonic()
    cache.quotas.update(state.quotas.quotas)
    policy.restore()
    if not pool.recovered:
        return
    snapshot = pool.table.load_namespaces(NamespaceSnapshot) or NamespaceSnapshot(1, ())
    known = {}
    for record in snapshot.namespaces:
        if not state.found(record.fingerprint, record.generation):
            continue
        try:
            groups = cache.restore_namespace(record)
        except KvoffdError as error:
            logger.warning("The pool's blocks of %s are lost. %s", record.label, error.message)
            continue
        # Where a rank had not registered there is no block.
        known[record.number] = [group for group in groups if group.sizes]
    fd = pool.memory_fds[1]
    found = recover(fd, pool.table, pool.slots, cache.blocks, known, snapshot.next_number)
    cache.enter_recovered(found.blocks, found.quarantined)
    logger.info(
        "An earlier daemon's pool is taken over: %d blocks (%s) in %d namespace%s are ready after %.3f s.",
        len(found.blocks),
        format_size(cache.usage.ready),
        len(known),
        plural(len(known)),
        time.monotonic() - started,
    )
    if not len(found.blocks):
        lost = found.unwritten + found.damaged + found.incomplete
        level = logging.WARNING if lost else logging.INFO
        logger.log(level, "The pool starts empty. No whole block was found in the earlier daemon's.")
    for count, why in (
        (found.unwritten, "their namespaces were not written down, as there were too many for a pool of this size"),
        (found.damaged, "damaged, or written without a checksum"),
        (found.incomplete, "of blocks that not all ranks had stored"),
    ):
        if count:
            logger.warning("%d slot%s of the pool not brought back: %s.", count, plural(count), why)
    if found.reset and snapshot.left_out:
        why = "were too many for a pool of this size to be recorded, or were reset"
        logger.warning("Dropped %d slots of the pool: their namespaces %s.", found.reset, why)
    elif found.reset:
        logger.info("Dropped %d slots of the pool: their namespaces were reset.", found.reset)
    if count := len(found.quarantined):
        logger.warning(
            "%d slot%s not used: wrong bytes were found there; check the machine's memory.", count, plural(count)
        )


def _open_pool_file(config: Config, notifier: Notifier, stored: Mapping[str, list[int]]) -> Pool:
    _discard_stored(notifier, stored)
    with closing(FileBacking(Path(config.pool_file))) as backing:
        pool = _make_pool(config, backing)
        with OnError(pool.close):
            backing.publish()
    return pool


def _open_memfds(config: Config, notifier: Notifier, stored: Mapping[str, list[int]]) -> Pool:
    pools, tables = stored.get(POOL_NAME, []), stored.get(TABLE_NAME, [])
    stored_pair = (pools[0], tables[0]) if len(pools) == len(tables) == 1 else None
    if stored_pair is None and stored:
        kept = ", ".join(f"{len(fds)} named {name}" for name, fds in sorted(stored.items()))
        logger.warning("The pool starts empty. systemd did not keep one pool and one table: %s.", kept)
        _discard_stored(notifier, stored)
    with closing(MemfdBacking(stored_pair, lambda: _remove_from_systemd(notifier, stored))) as backing:
        pool = _make_pool(config, backing)
    if not pool.recovered:
        for name, fd in zip((POOL_NAME, TABLE_NAME), pool.memory_fds, strict=True):
            notifier.store_fd(name, fd)
    return pool


def _make_pool(config: Config, backing: PoolBacking) -> Pool:
    pool = Pool(config.pool_bytes, backing=backing, nodes=nodes_with_gpus() if config.numa == "auto" else ())
    for segment in pool.slots.segments:
        size = format_size(segment.end - segment.begin)
        logger.info("%s of the pool lie on NUMA node %d, where a GPU is.", size, segment.locality.node)
    return pool


def _discard_stored(notifier: Notifier, stored: Mapping[str, list[int]]) -> None:
    """Let kept memory go, here and in systemd's store."""
    for fd in chain.from_iterable(stored.values()):
        os.close(fd)
    if stored:
        _remove_from_systemd(notifier, stored)


def _remove_from_systemd(notifier: Notifier, names: Iterable[str]) -> None:
    for name in names:
        notifier.remove_fds(name)
    # The memory is free only once systemd has closed its descriptors too.
    if not notifier.wait_heard(RELEASE_TIMEOUT_S):
        logger.warning("systemd does not answer; the memory of the old pool may still be taken.")
