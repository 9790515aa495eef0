"""Opens namespaces for sessions, within limits, and forgets unused ones."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvoffd.cache.namespace import Namespace
from kvoffd.errors import KvoffdError
from kvoffd.server.handlers import answers
from kvoffd.server.sessions import Session
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.units import printable

if TYPE_CHECKING:
    from kvoffd.server.service import Service

logger = logging.getLogger(__name__)

MAX_NAMESPACES_OF_SESSION = 16
"""Limit of open namespaces per session; an engine uses one at a time."""
FORGET_AFTER_S = 60.0
"""Time for which operators still see an empty namespace that no session has open."""


@answers(m.OpenNamespace)
def open_namespace(service: Service, session: Session, message: m.OpenNamespace) -> m.NamespaceOpened:
    """Open or join a namespace. An idle one (empty and not open) is replaced if the client's geometry differs."""
    cache, fingerprint = service.cache, message.namespace
    geometry = message.world_size, message.key_bytes, message.groups
    if fingerprint not in session.namespaces and (held := len(session.namespaces)) >= MAX_NAMESPACES_OF_SESSION:
        why = f"The session has {held} namespaces open, its limit; open another session."
        raise KvoffdError(why, ErrorCode.TOO_MANY)
    known = cache.namespaces.get(fingerprint)
    if known is not None and not known.is_same(*geometry) and _idle(known, opened_namespaces(service)):
        logger.info("Replaced the empty namespace %r by one of another geometry.", known.label)
        _forget(service, known)
        known = None
    if known is None:
        _evict_unused(service)
    label, description = printable(message.label), printable(message.description)
    namespace, created = cache.namespaces.open(Namespace(fingerprint, label, *geometry, description))
    session.namespaces[fingerprint] = namespace
    namespace.last_open_at = service.clock()
    if created:
        namespace.generation = service.state.generations.of(fingerprint)
        if namespace.of_bench:
            what = "" if namespace.evicts_others else "; it evicts nothing"
            logger.info("%s opens the namespace %r%s.", printable(session.name), label, what)
    return m.NamespaceOpened(message.request_id, created, namespace.counters.prefill_tokens_per_second)


def forget_idle(service: Service, after_s: float = 0.0) -> None:
    """Forget namespaces that have been idle for ``after_s``, as seen by these calls.

    Those of benches are forgotten with all their blocks once no session has them open.
    """
    opened, now = opened_namespaces(service), service.clock()
    for namespace in list(service.cache.namespaces.values()):
        if namespace.fingerprint in opened:
            namespace.last_open_at = now
        if namespace.of_bench and namespace.ready_blocks and namespace.fingerprint not in opened:
            dropped = service.cache.reset(namespace)
            logger.info("Dropped the %d blocks of %r, which has ended.", dropped, namespace.label)
        if not _idle(namespace, opened):
            namespace.idle_since = None
            continue
        if namespace.idle_since is None:
            namespace.idle_since = now
        if namespace.of_bench or now - namespace.idle_since >= after_s:
            _forget(service, namespace)


def _evict_unused(service: Service) -> None:
    """Evict what nobody has had open for longest if the limit is reached. Raises KvoffdError if all are open."""
    cache, most = service.cache, service.config.limits.max_namespaces
    if len(cache.namespaces) < most:
        return
    opened = opened_namespaces(service)
    unused = [one for one in cache.namespaces.values() if one.fingerprint not in opened and not one.writing_blocks]
    if not unused:
        why = f"All {most} namespaces are in use, the limit. End engines that are not needed."
        raise KvoffdError(why, ErrorCode.TOO_MANY)
    # Even one with blocks: else a block in each would block new namespaces forever.
    oldest = min(unused, key=lambda one: one.last_open_at)
    logger.info("Evicted the unused namespace %r to make room for a new one.", oldest.label)
    cache.reset(oldest)
    _forget(service, oldest)


def opened_namespaces(service: Service) -> set[bytes]:
    """Return the fingerprints of the namespaces that sessions have open."""
    return {name for session in service.sessions for name in session.namespaces}


def _idle(namespace: Namespace, opened: set[bytes]) -> bool:
    empty = not namespace.ready_blocks and not namespace.writing_blocks
    return empty and namespace.fingerprint not in opened


def _forget(service: Service, namespace: Namespace) -> None:
    service.cache.namespaces.forget(namespace)
    service.traffic.namespace_forgotten(namespace)
    service.curve.namespace_forgotten(namespace)
    service.branch_points.namespace_forgotten(namespace)
    if service.tiering is not None:
        service.tiering.namespace_forgotten(namespace)
