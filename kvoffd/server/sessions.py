"""The open sessions: access control, and what is freed when a client leaves."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from enum import StrEnum

from kvoffd import __version__
from kvoffd.cache.cache import Cache
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.events import CompletionLog, Frames
from kvoffd.server.handlers import answers, filled
from kvoffd.server.host import Host
from kvoffd.server.jobs import Jobs
from kvoffd.server.session import ClientProcess, Lifeline, Session
from kvoffd.system.rare_warnings import USUAL, RareWarnings
from kvoffd_proto import admin as a
from kvoffd_proto.build import with_commit
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import (
    END_OF_SESSION_IDS,
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Hello,
    Limits,
    Results,
    ResultsReply,
    Role,
    Welcome,
)
from kvoffd_proto.units import printable

logger = logging.getLogger(__name__)
_other_versions = RareWarnings(logger)
_come_and_gone = RareWarnings(logger, logging.INFO, USUAL)

MAX_DEFAULT_CREDIT_BYTES = 2**30
OPERATORS_SESSIONS = 8
"""Sessions beyond max_sessions, for operators when engines use all of those."""
MAX_DEPARTED = 1024
"""Limit of remembered routes of clients that left: their last messages may arrive after the end of their lifelines."""


class Ending(StrEnum):
    """Reason why a session ended."""

    CLOSED = "closed"
    """The client sent Leaving."""
    GONE = "gone"
    """The lifeline ended without Leaving: the process was killed, as vLLM by default kills its engine at SIGTERM."""
    NO_HELLO = "no_hello"
    MALFORMED = "malformed"
    """The client sent an invalid frame over the lifeline."""
    FAILED = "failed"
    """An internal error of the daemon ended it, or the client did not read its lifeline."""
    STOPPING = "stopping"
    """The daemon stopped."""


def may_connect(process: ClientProcess, config: Config) -> bool:
    """Return whether the process may connect: those of root, of the daemon's own user, of users in allowed_uids, and
    those whose gid is in allowed_gids, by default the daemon's own gid."""
    uids = 0, os.geteuid(), *config.allowed_uids
    return process.uid in uids or process.gid in (config.allowed_gids or (os.getegid(),))


def credit_of_all_bytes(config: Config, cache: Cache) -> int:
    """Return the bytes of stores that all sessions together may have outstanding."""
    return config.limits.credit_bytes or min(cache.slots.pool_bytes // 8, MAX_DEFAULT_CREDIT_BYTES)


class SessionTable:
    """The open sessions: admits clients, and frees their resources when they leave.

    Args:
        max_attached: limit of attached descriptors without a registration, of all sessions together.
    """

    def __init__(self, config: Config, cache: Cache, jobs: Jobs, host: Host, max_attached: int) -> None:
        self._config = config
        self._cache = cache
        self._jobs = jobs
        self._host = host
        self._max_attached = max_attached
        self.by_route: dict[bytes, Session] = {}
        """Open sessions by the routing id of their requests."""
        self.departed: OrderedDict[bytes, None] = OrderedDict()
        """Routes of clients that left recently, oldest first."""
        self._last_id = 0
        self.epoch = int.from_bytes(host.random(8), "big") >> 1  # 63 bits: the wire's ``Count`` is below 2**63
        """Random number of this daemon process, so that its clients do not take a successor's results for theirs."""
        self._sessions_with_memory = 0
        self.credit_bytes = self._credit_among(1)
        """Bytes of stores that each session with memory may have outstanding: an equal part of the credit of all."""
        self.endings: Counter[str] = Counter()
        """Ended sessions by ``Ending``: engines', and those of clients that misbehaved before their Hello."""
        self.stopping = False
        self.publications: list[Frames] = []
        """Closed batches of results, to be published."""

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the open sessions, oldest first."""
        return iter(self.by_route.values())

    def __len__(self) -> int:
        return len(self.by_route)

    def open(self, lifeline: Lifeline, process: ClientProcess) -> Session:
        """Open a session for a client of the lifeline. Raises KvoffdError if the client is not admitted."""
        if self.stopping:
            raise KvoffdError.of(ErrorCode.SHUTTING_DOWN)
        if len(self.by_route) >= self._config.max_sessions + OPERATORS_SESSIONS:
            raise self._full()
        token, number = self._host.random(TOKEN_BYTES), self._next_id()
        log = CompletionLog(self.epoch, number)
        session = Session(number, token, process, lifeline, self._host.now(), log)
        self.by_route[session.route] = session
        return session

    def _next_id(self) -> int:
        """Return the next id that no open session has: after the largest one they begin at 1 again."""
        used = {session.id for session in self}
        while True:
            self._last_id = (self._last_id + 1) % END_OF_SESSION_IDS
            if self._last_id and self._last_id not in used:
                return self._last_id

    @property
    def engine_sessions(self) -> int:
        """Number of sessions of schedulers and workers."""
        return sum(session.role in (Role.SCHEDULER, Role.WORKER) for session in self)

    @answers(Hello)
    def hello(self, session: Session, message: Hello) -> Welcome:
        """Set the session's role and name. Idempotent for the same role."""
        if message.protocol_version != PROTOCOL_VERSION:
            _other_versions.warn(
                "A client (%s) was refused: it speaks protocol %d, this daemon speaks %d. Install the same kvoffd "
                "release on both ends.",
                printable(message.name),
                message.protocol_version,
                PROTOCOL_VERSION,
            )
            ours = with_commit(__version__)
            raise KvoffdError(
                f"The client speaks protocol {message.protocol_version}, but this daemon (kvoffd {ours}) "
                f"speaks {PROTOCOL_VERSION}; install the same kvoffd release on both ends.",
                ErrorCode.BAD_VERSION,
            )
        self._set_role(session, message.role, printable(message.name), printable(message.software))
        limits = filled(Limits, self._config.limits)  # all fields, which ServerLimits has too
        credit = 0
        if message.role is not Role.ADMIN:
            # What it will have once it has registered its memory.
            others = self._sessions_with_memory - bool(session.registrations)
            credit = self._credit_among(others + 1)
        return Welcome(message.request_id, session.id, limits, credit)

    def _set_role(self, session: Session, role: Role, name: str, software: str) -> None:
        """Set a session's role and names. Raises KvoffdError if the client may not have the role."""
        if session.role is not None and session.role != role:
            raise KvoffdError(
                f"The session sent Hello as {session.role}, which cannot change; open another session.",
                ErrorCode.WRONG_ROLE,
            )
        admins = self._config.admin_uids  # if empty, all users; root and the daemon's own user always may
        if role is Role.ADMIN and admins and session.process.uid not in (0, os.geteuid(), *admins):
            raise KvoffdError(
                f"User {session.process.uid} may not administer this kvoffd; add the uid to admin_uids.",
                ErrorCode.FORBIDDEN,
            )
        if role is not Role.ADMIN and session.role is None and self.engine_sessions >= self._config.max_sessions:
            raise self._full()
        if session.role is None:
            where = f"pid {session.process.pid}" if session.process.pid else "in another pid namespace"
            who = f"{name} ({software})" if software else name
            _log(role, "Session %d: %s %s, %s.", session.id, role, who, where)
        session.role, session.name, session.software = role, name, software

    def _full(self) -> KvoffdError:
        return KvoffdError(
            f"All {self._config.max_sessions} sessions are taken; raise max_sessions.", ErrorCode.TOO_MANY
        )

    def attach(self, session: Session, segment_id: int, fd: int) -> None:
        """Keep a descriptor for a later Register. Takes ownership of ``fd`` unless it raises KvoffdError."""
        if session.ended:
            raise KvoffdError.of(ErrorCode.SESSION_ENDED)
        if segment_id in session.attached:
            raise KvoffdError(f"Segment {segment_id} is attached already; use a new id.", ErrorCode.MALFORMED)
        if len(session.attached) >= self._config.limits.max_segments:
            raise KvoffdError(
                f"The session holds {len(session.attached)} segments, its limit; register some.", ErrorCode.TOO_MANY
            )
        if sum([len(other.attached) for other in self]) >= self._max_attached:
            raise KvoffdError(
                f"All sessions together have {self._max_attached} descriptors attached, the limit. Register some, or "
                "raise the daemon's limit of open files.",
                ErrorCode.TOO_MANY,
            )
        session.attached[segment_id] = fd

    @answers(Results)
    def results(self, session: Session, message: Results) -> ResultsReply:
        """Return the unacknowledged results, and the ids of unfinished jobs."""
        session.completions.acknowledge(message.acknowledged)
        # Without this a job whose result is in the open batch would be in neither list.
        self._close_batch(session)
        return ResultsReply(message.request_id, session.completions.replay(), list(self._jobs.of(session)))

    def close_batches(self) -> None:
        """Add the new results of all sessions, which ``Jobs`` notes in ``with_results``, to ``publications``."""
        for session in self._jobs.with_results.values():
            self._close_batch(session)
        self._jobs.with_results.clear()

    def _close_batch(self, session: Session) -> None:
        """Add a session's new results to ``publications``. Each batch tells the client its credit."""
        if frames := session.completions.close_batch(self.credit_bytes):
            self.publications.append(frames)

    @answers(a.Sessions)
    def list_sessions(self, session: Session, message: a.Sessions) -> a.SessionsReply:
        return a.SessionsReply(message.request_id, self.infos())

    def infos(self) -> list[a.SessionInfo]:
        """Describe the open sessions, oldest first."""
        now = self._host.now()
        return [
            a.SessionInfo(
                session_id=one.id,
                role=one.role,
                name=one.name,
                software=one.software,
                pid=one.process.pid,
                uid=one.process.uid,
                age_seconds=now - one.opened_at,
                idle_seconds=now - one.last_request_at,
                leases=self._cache.leases.of(one.id).leases,
                jobs=len(self._jobs.of(one)),
                registrations=len(one.registrations),
                registered_bytes=sum(size for each in one.registrations.values() for _, size in each.memory.spans),
                unacknowledged=sum(len(batch.results) for batch in one.completions.replay()),
                namespaces=sorted(one.namespaces),
                pinned_bytes=self._cache.leases.of(one.id).nbytes,
                stored_bytes=one.stored_bytes,
                loaded_bytes=one.loaded_bytes,
                problem=one.problem,
            )
            for one in self
        ]

    def share_credit(self) -> None:
        """Divide the credit among the sessions with registered memory, after their number changed."""
        self._sessions_with_memory = sum(bool(session.registrations) for session in self)
        self.credit_bytes = self._credit_among(max(1, self._sessions_with_memory))

    def _credit_among(self, sharers: int) -> int:
        return credit_of_all_bytes(self._config, self._cache) // sharers

    def end(self, session: Session, on_released: Callable[[], None], why: Ending = Ending.GONE) -> None:
        """End a session after its lifeline: end its leases, stop its copies, unmap its memory.

        ``on_released`` is called after the last of its copies.
        """
        if session.ended:
            return
        del self.by_route[session.route]
        if why in (Ending.CLOSED, Ending.GONE):
            self.departed[session.route] = None
            if len(self.departed) > MAX_DEPARTED:
                self.departed.popitem(last=False)
        self._cache.end_session(session.id)
        session.ended, session.on_released = True, on_released  # first: the ends of its jobs ask whether it has ended
        self._jobs.abandon(self._jobs.of(session).values())
        session.close_memory()
        session.release_if_idle()
        self.share_credit()
        if session.role is not None:
            _log(session.role, "Session %d (%s %s) ended: %s.", session.id, session.role, session.name, why)
            is_counted = session.role is not Role.ADMIN
        else:  # one that only left may have been an operator's command that was interrupted
            is_counted = why not in (Ending.CLOSED, Ending.GONE, Ending.STOPPING)
        if is_counted:
            self.endings[why.value] += 1


def _log(role: Role, text: str, *values: object) -> None:
    """Log what became of a session. Each command of kvoffd-cli opens one as an administrator."""
    if role is Role.ADMIN:
        logger.debug(text, *values)
    else:
        _come_and_gone.warn(text, *values)
