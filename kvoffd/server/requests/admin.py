"""Requests of operators."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvoffd.server.session import Session
from kvoffd_proto import messages as m

if TYPE_CHECKING:
    from kvoffd.server.service import Service

logger = logging.getLogger(__name__)


def stats(service: Service, session: Session, message: m.Stats) -> m.StatsReply:
    """All counters."""
    return service.reporter.stats(message.request_id)


def health(service: Service, session: Session, message: m.Health) -> m.HealthReply:
    """Whether the daemon works."""
    return service.reporter.health(message.request_id)


def sessions(service: Service, session: Session, message: m.Sessions) -> m.SessionsReply:
    """The open sessions."""
    return service.reporter.sessions(message.request_id)


def namespaces(service: Service, session: Session, message: m.Namespaces) -> m.NamespacesReply:
    """The open namespaces."""
    return service.reporter.namespaces(message.request_id)


def clear(service: Service, session: Session, message: m.Clear) -> m.Done:
    """Drop the blocks of one namespace, or of all."""
    cache = service.cache
    count = cache.clear() if message.namespace is None else cache.reset(cache.namespace(message.namespace))
    if message.namespace is None and service.tiering is not None:
        count += service.tiering.forget_unopened()
    if service.disks is not None:
        service.disks.cleared(message.namespace)
    logger.info("Session %d (%s) cleared %d blocks.", session.id, session.peer, count)
    return m.Done(message.request_id, service.epoch, count)


def scrub(service: Service, session: Session, message: m.Scrub) -> m.ScrubReply:
    """Begin to compare every readable block with its checksum, or tell how far that is."""
    if message.start:
        service.scrubber.start()
    return service.scrubber.report(message.request_id, service.epoch)
