"""Requests of administrators about single blocks and the log."""

from __future__ import annotations

import logging

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason
from kvoffd.server.handlers import answers
from kvoffd.server.session import Session
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m

logger = logging.getLogger(__name__)


class Administration:
    """Shows what the cache has, and sets the log's level."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    @answers(a.SetLogLevel)
    def set_log_level(self, session: Session, message: a.SetLogLevel) -> m.Done:
        """Log records of this level and above, of all loggers."""
        root, level = logging.getLogger(), logging.getLevelNamesMapping()[message.level.upper()]
        root.setLevel(min(root.level, level, logging.INFO))  # an operator who reads the log sees the change, either way
        logger.info("Session %d (%s) set the log level: %s.", session.id, session.process, message.level)
        root.setLevel(level)
        return m.Done(message.request_id, 0)

    @answers(a.FindBlock)
    def find_block(self, session: Session, message: a.FindBlock) -> a.BlockFound:
        cache, group, key = self._cache, message.group, message.key
        namespace = cache.namespaces.required(message.namespace)
        state, first_block, checksums = cache.describe_block(namespace, group, key)
        reason: MissReason | None = None
        if state is m.KeyState.WRITING:
            reason = MissReason.PARTIAL
        elif state is m.KeyState.ABSENT:
            fits = len(key) == namespace.key_bytes
            reason = MissReason(cache.life.reasons_of(namespace.group(group), key)[0]) if fits else MissReason.UNKNOWN
        why = "" if reason is None else reason.name.lower()
        return a.BlockFound(message.request_id, state, why, first_block, checksums)

    @answers(a.ListBlocks)
    def list_blocks(self, session: Session, message: a.ListBlocks) -> a.BlocksListed:
        namespace = self._cache.namespaces.required(message.namespace)
        found = self._cache.list_blocks(namespace, message.group, message.position, message.limit)
        return a.BlocksListed(message.request_id, *found)
