"""Which namespaces there are: opened for sessions within bounds, and forgotten when nobody needs them."""

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
"""An engine is in one at a time."""
FORGET_AFTER_S = 60.0
"""How long an empty namespace that nobody has open is still shown to operators."""


@answers(m.OpenNamespace)
def open_namespace(service: Service, session: Session, message: m.OpenNamespace) -> m.NamespaceOpened:
    """Open or join a namespace.

    An empty namespace that nobody has open is replaced when a client opens it with another geometry.
    """
    cache, fingerprint = service.cache, message.namespace
    geometry = message.world_size, message.key_bytes, message.groups
    if fingerprint not in session.namespaces and (held := len(session.namespaces)) >= MAX_NAMESPACES_OF_SESSION:
        why = f"The session has {held} namespaces open, its limit; open another session."
        raise KvoffdError(why, ErrorCode.TOO_MANY)
    known = cache.namespaces.get(fingerprint)
    if known is not None and not known.is_same(*geometry) and _idle(known, opened_namespaces(service)):
        logger.info("The empty namespace %r is forgotten for one of another geometry.", known.label)
        _forget(service, known)
        known = None
    if known is None:
        _forget_unused(service)
    label, description = printable(message.label), printable(message.description)
    namespace, created = cache.open_namespace(Namespace(fingerprint, label, *geometry, description))
    session.namespaces[fingerprint] = namespace
    if created:
        namespace.generation = service.state.generation(fingerprint)
    return m.NamespaceOpened(message.request_id, created, namespace.totals.prefill_tokens_per_second)


def forget_idle(service: Service, after_s: float = 0.0) -> None:
    """Forget the empty namespaces that nobody has had open for so long, as far as that was seen; a bench's at once."""
    opened, now = opened_namespaces(service), service.clock()
    with service.cache.saving_once():
        for namespace in list(service.cache.namespaces.values()):
            if not _idle(namespace, opened):
                namespace.idle_since = None
                continue
            if namespace.idle_since is None:
                namespace.idle_since = now
            if namespace.of_bench or now - namespace.idle_since >= after_s:
                _forget(service, namespace)


def _forget_unused(service: Service) -> None:
    """Forget a namespace that nobody has open, if there must be room for one more. Raises KvoffdError where none may
    go."""
    cache, most = service.cache, service.config.limits.max_namespaces
    if len(cache.namespaces) < most:
        return
    opened = opened_namespaces(service)
    unused = [one for one in cache.namespaces.values() if one.fingerprint not in opened and not one.writing_blocks]
    if not unused:
        why = f"All {most} namespaces are in use, the limit. End engines that are not needed."
        raise KvoffdError(why, ErrorCode.TOO_MANY)
    # A block in each must not take all places for good.
    least = min(unused, key=lambda one: one.ready_bytes)
    logger.info("The namespace %r, which nobody has open, is forgotten for another one.", least.label)
    cache.reset(least, keep_tiers=True)
    _forget(service, least)


def opened_namespaces(service: Service) -> set[bytes]:
    """The fingerprints that sessions have open."""
    return {name for session in service.sessions for name in session.namespaces}


def _idle(namespace: Namespace, opened: set[bytes]) -> bool:
    empty = not namespace.ready_blocks and not namespace.writing_blocks
    return empty and namespace.fingerprint not in opened


def _forget(service: Service, namespace: Namespace) -> None:
    service.cache.forget_namespace(namespace)
    service.traffic.namespace_forgotten(namespace)
    service.curve.namespace_forgotten(namespace)
    if service.tiering is not None:
        service.tiering.namespace_forgotten(namespace)
