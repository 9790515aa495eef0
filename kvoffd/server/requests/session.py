"""Requests about the session itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvoffd import __version__
from kvoffd.errors import KvoffdError
from kvoffd.server.admission import may_administer
from kvoffd.server.session import Session
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from kvoffd.server.service import Service

logger = logging.getLogger(__name__)


def hello(service: Service, session: Session, message: m.Hello) -> m.Welcome:
    """Open the session. Saying it twice with the same role is harmless."""
    if message.protocol_version != PROTOCOL_VERSION:
        raise KvoffdError(
            f"The client speaks protocol {message.protocol_version}, this daemon (kvoffd {__version__}) speaks "
            f"{PROTOCOL_VERSION}; install the same kvoffd release on both ends.",
            ErrorCode.BAD_VERSION,
        )
    if session.role is not None and session.role != message.role:
        raise KvoffdError(f"The session said Hello as {session.role}; a role cannot change.", ErrorCode.WRONG_ROLE)
    if message.role is m.Role.ADMIN and not session.internal and not may_administer(session.peer, service.config):
        raise KvoffdError(
            f"User {session.peer.uid} may not administer this kvoffd; add the uid to admin_uids.", ErrorCode.FORBIDDEN
        )
    if session.role is None and not session.internal:
        logger.info(
            "Session %d: %s %s (%s), pid %d.",
            session.id,
            message.role,
            message.name,
            message.software,
            session.peer.pid,
        )
    session.role, session.name, session.software = message.role, message.name, message.software
    config = service.config
    return m.Welcome(
        message.request_id,
        service.epoch,
        session.id,
        __version__,
        [*service.memory.kinds, "kv_events"],
        service.limits(),
        service.credit_of(session),
        round(config.lease_ttl_s * 1000),
        round(config.heartbeat_interval_s * 1000),
        round(config.job_deadline_s * 1000),
    )


def heartbeat(service: Service, session: Session, message: m.Heartbeat) -> m.HeartbeatReply:
    """Forget acknowledged completions, renew leases."""
    session.completions.acknowledge(message.acknowledged)
    ended = service.cache.renew(session.id, message.renew)
    return m.HeartbeatReply(
        message.request_id, service.epoch, session.completions.sequence, service.credit_of(session), ended
    )


def replay(service: Service, session: Session, message: m.Replay) -> m.ReplayReply:
    """Give out the completions that were not acknowledged, and the jobs that have none yet."""
    session.completions.acknowledge(message.after)
    # A job that ended but whose batch is still open must be in one of the two lists.
    service.flush_completions(session)
    return m.ReplayReply(message.request_id, service.epoch, session.completions.replay(), list(session.jobs))
