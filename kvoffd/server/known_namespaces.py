"""Opens namespaces for sessions, within limits, forgets unused ones, and answers operators' requests about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.handlers import OPERATOR_WAIT_S, Pending, answers
from kvoffd.server.persistence import State
from kvoffd.server.session import Session
from kvoffd.server.sessions import SessionTable
from kvoffd.system.rare_warnings import USUAL, RareWarnings
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.stats import namespace_id
from kvoffd_proto.units import format_size, printable

logger = logging.getLogger(__name__)
_usual = RareWarnings(logger, logging.INFO, USUAL)

MAX_NAMESPACES_OF_SESSION = 16
"""Limit of open namespaces per session; an engine uses one at a time."""
MAX_NAMESPACES_OF_PROCESS = 32
"""Limit of those of all sessions of a process: the others are for other processes, however many sessions it opens."""
FORGET_AFTER_S = 60.0
"""Time for which operators still see an empty namespace that no session has open."""


class NamespaceUser(Protocol):
    """A part of the daemon that keeps something of each namespace."""

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Drop what is kept of the namespace, which has no blocks in the pool."""


class KnownNamespaces:
    """The namespaces that are open, have blocks in the pool, or were open in the last FORGET_AFTER_S.

    Args:
        users: parts that are told when a namespace is forgotten.
    """

    def __init__(
        self,
        config: Config,
        cache: Cache,
        sessions: SessionTable,
        state: State,
        clock: Callable[[], float],
        users: Sequence[NamespaceUser],
    ) -> None:
        self._limits, self._cache, self._sessions = config.limits, cache, sessions
        self._state, self._clock, self._users = state, clock, users

    @property
    def opened(self) -> set[bytes]:
        """The fingerprints of the namespaces that sessions have open."""
        return {name for session in self._sessions for name in session.namespaces}

    @answers(m.OpenNamespace)
    def open(self, session: Session, message: m.OpenNamespace) -> m.NamespaceOpened:
        """Open or join a namespace. An idle one (empty and not open) is replaced if the client's geometry differs."""
        cache, fingerprint = self._cache, message.namespace
        geometry = message.world_size, message.key_bytes, message.groups
        if fingerprint not in session.namespaces:
            self._check_limits(session, fingerprint)
        known = cache.namespaces.get(fingerprint)
        if known is not None and not known.is_same(*geometry) and _idle(known, self.opened):
            _usual.warn("Replaced the empty namespace %r by one of another geometry.", known.label)
            self._forget(known)
            known = None
        if known is None:
            self._evict_unused()
        label, description = printable(message.label), printable(message.description)
        namespace, created = cache.namespaces.open(Namespace(fingerprint, label, *geometry, description))
        session.namespaces[fingerprint] = namespace
        namespace.last_open_at = self._clock()
        if created:
            namespace.generation = self._state.generations.of(fingerprint)
            if namespace.of_bench:
                what = "" if namespace.evicts_others else "; it evicts nothing"
                _usual.warn("%s opens the namespace %r%s.", printable(session.name), label, what)
        return m.NamespaceOpened(message.request_id, created, namespace.counters.prefill_tokens_per_second)

    def _check_limits(self, session: Session, fingerprint: bytes) -> None:
        """Raise KvoffdError if the session, or its process, has too many namespaces open for another one."""
        if (held := len(session.namespaces)) >= MAX_NAMESPACES_OF_SESSION:
            why = f"The session has {held} namespaces open, its limit; open another session."
            raise KvoffdError(why, ErrorCode.TOO_MANY)
        if not session.process.pid:  # in another pid namespace, where no process is known
            return
        of_process = {name for one in self._sessions if one.process == session.process for name in one.namespaces}
        if fingerprint not in of_process and len(of_process) >= MAX_NAMESPACES_OF_PROCESS:
            why = f"The process has {len(of_process)} namespaces open, its limit; end sessions that are not needed."
            raise KvoffdError(why, ErrorCode.TOO_MANY)

    @answers(a.Namespaces)
    def list_namespaces(self, session: Session, message: a.Namespaces) -> a.NamespacesReply:
        unshared = self._state.generations.unshared_of(self._cache.namespaces)
        return a.NamespacesReply(message.request_id, self.infos(), unshared)

    def infos(self) -> list[a.NamespaceInfo]:
        """Describe all known namespaces."""
        return [
            a.NamespaceInfo(
                namespace=namespace.fingerprint,
                label=namespace.label,
                world_size=namespace.world_size,
                key_bytes=namespace.key_bytes,
                groups=list(namespace.specs),
                shard_bytes=[
                    [0 if sizes is None else sizes[group] for sizes in namespace.shard_bytes]
                    for group in range(len(namespace.specs))
                ],
                ready_blocks=namespace.ready_blocks,
                ready_bytes=namespace.ready_bytes,
                sessions=sum(namespace.fingerprint in one.namespaces for one in self._sessions),
                description=namespace.description,
                quota_bytes=self._cache.quotas.get(namespace.fingerprint),
            )
            for namespace in self._cache.namespaces.values()
        ]

    @answers(a.DescribeNamespace)
    def describe(self, session: Session, message: a.DescribeNamespace) -> a.NamespaceDescribed:
        namespace = self._cache.namespaces.required(message.namespace)
        shards = [
            None if one is None else [a.ShardSpec(count, list(pages)) for count, pages in one]
            for one in namespace.shards
        ]
        return a.NamespaceDescribed(
            request_id=message.request_id,
            label=namespace.label,
            world_size=namespace.world_size,
            key_bytes=namespace.key_bytes,
            groups=list(namespace.specs),
            description=namespace.description,
            shards=shards,
        )

    @answers(a.SetQuota)
    def set_quota(self, session: Session, message: a.SetQuota) -> Pending:
        """Set a namespace's quota. The reply waits until it is saved for the next daemon."""
        quotas = self._cache.quotas
        if message.quota_bytes is None:
            quotas.pop(message.namespace, None)
        else:
            if message.namespace not in quotas and len(quotas) >= (most := self._limits.max_quotas):
                why = f"{most} namespaces, open or not, have a quota, which is the limit; remove some."
                raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
            quotas[message.namespace] = message.quota_bytes
        self._state.save_quotas(quotas)
        logger.info(
            "Session %d (%s) set the quota of the namespace %s: %s.",
            session.id,
            session.process,
            namespace_id(message.namespace),
            "none" if message.quota_bytes is None else format_size(message.quota_bytes),
        )
        otherwise = "The quota applies until the daemon ends; the next one may not have it."
        return self._state.reply_once_saved(m.Done(message.request_id, 1), self._clock() + OPERATOR_WAIT_S, otherwise)

    def tick(self) -> None:
        self.forget_idle(FORGET_AFTER_S)

    def forget_idle(self, after_s: float = 0.0) -> None:
        """Forget namespaces that have been idle for ``after_s``, as seen by these calls.

        Those of benches are forgotten with all their blocks once no session has them open.
        """
        opened, now = self.opened, self._clock()
        for namespace in list(self._cache.namespaces.values()):
            if namespace.fingerprint in opened:
                namespace.last_open_at = now
            if namespace.of_bench and namespace.ready_blocks and namespace.fingerprint not in opened:
                dropped = self._cache.reset(namespace)
                _usual.warn("Dropped the %d blocks of %r, which has ended.", dropped, namespace.label)
            if not _idle(namespace, opened):
                namespace.idle_since = None
                continue
            if namespace.idle_since is None:
                namespace.idle_since = now
            if namespace.of_bench or now - namespace.idle_since >= after_s:
                self._forget(namespace)

    def _evict_unused(self) -> None:
        """If the limit is reached, evict what nobody has had open for longest, one without blocks if there is any.

        Raises KvoffdError if all are open.
        """
        cache, most = self._cache, self._limits.max_namespaces
        if len(cache.namespaces) < most:
            return
        opened = self.opened
        # One that is still being written is not evicted: stores, or reads from tiers, have not ended.
        unused = [one for one in cache.namespaces.values() if one.fingerprint not in opened and not one.writing_blocks]
        if not unused:
            why = f"All {most} namespaces are in use, the limit. End engines that are not needed."
            raise KvoffdError(why, ErrorCode.TOO_MANY)
        # Even one with blocks: else a block in each would block new namespaces forever.
        oldest = min(unused, key=lambda one: (one.indexed_blocks > 0, one.last_open_at))
        _usual.warn("Evicted the unused namespace %r to make space for a new one.", oldest.label)
        cache.reset(oldest)
        self._forget(oldest)

    def _forget(self, namespace: Namespace) -> None:
        self._cache.namespaces.forget(namespace)
        for user in self._users:
            user.namespace_forgotten(namespace)


def _idle(namespace: Namespace, opened: set[bytes]) -> bool:
    """Return whether no session has it open, and it has no blocks, neither READY ones nor those being written."""
    return not namespace.indexed_blocks and namespace.fingerprint not in opened
