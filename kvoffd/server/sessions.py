"""Who may connect, by the credentials that the kernel tells of a peer, and how many sessions and descriptors there may
be."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from kvoffd.cache.cache import BlockCache
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.jobs import JobRunner
from kvoffd.server.session import CompletionLog, Ending, Lifeline, Peer, Session
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import TOKEN_BYTES, Role

logger = logging.getLogger(__name__)

MAX_DEFAULT_CREDIT_BYTES = 2**30
PROCESS_PART = 4
"""One process may have one part in so many of the sessions; one user, but root and the daemon's own, three in four."""
MIN_SESSIONS = 16
"""Or so many, where that is more."""
RESERVED_SESSIONS = 8
"""Sessions beyond max_sessions, for administrators that are root or the daemon's own user or in admin_uids."""
MAX_DEPARTED = 1024
"""So many routes of clients that left are known: their last messages may come after the end of their lifelines."""
ALWAYS_ATTACHABLE = 64
"""Descriptors that a session may attach however many the others have, as long as there are any."""


def may_connect(peer: Peer, config: Config) -> bool:
    """Root and the daemon's own user may always; its group where none is named."""
    uids = 0, os.geteuid(), *config.allowed_uids
    return peer.uid in uids or peer.gid in (config.allowed_gids or (os.getegid(),))


def may_administer(peer: Peer, config: Config) -> bool:
    """Whether a peer that may connect may be an administrator: root and the daemon's own user in any case."""
    return not config.admin_uids or peer.uid in {0, os.geteuid(), *config.admin_uids}


class Sessions:
    """The open sessions: admits clients, and ends what they held when they go.

    Args:
        max_attached: descriptors that all sessions together may have: attached, or of memory of the host.
    """

    def __init__(
        self,
        config: Config,
        cache: BlockCache,
        runner: JobRunner,
        random_bytes: Callable[[int], bytes],
        max_attached: int,
    ) -> None:
        self._config = config
        self._cache = cache
        self._runner = runner
        self._random_bytes = random_bytes
        self._max_attached = max_attached
        self.by_route: dict[bytes, Session] = {}
        """By the routing id of their clients' requests."""
        self._departed: OrderedDict[bytes, None] = OrderedDict()
        self._taken = self._reserved = 0
        self._of_user: Counter[int] = Counter()
        self._of_process: Counter[int] = Counter()
        self._last_id = 0
        self.epoch = int.from_bytes(random_bytes(8), "big") >> 1
        """This life of the daemon."""
        self.credit_bytes = config.limits.credit_bytes or min(cache.slots.pool_bytes // 8, MAX_DEFAULT_CREDIT_BYTES)
        """Bytes of stores that all sessions together may have outstanding."""
        self.ended: Counter[str] = Counter()
        """Sessions that ended, by ``Ending``: engines', and those that the daemon ended before their Hello."""
        self.stopping = False

    def __iter__(self) -> Iterator[Session]:
        """The open sessions, oldest first."""
        return iter(self.by_route.values())

    def __len__(self) -> int:
        return len(self.by_route)

    def has_departed(self, route: bytes) -> bool:
        """Whether it is the route of a client that ended its session itself, not long ago."""
        return route in self._departed

    def check_not_stopping(self) -> None:
        """Raise KvoffdError when the daemon takes no new work."""
        if self.stopping:
            raise KvoffdError.of(ErrorCode.SHUTTING_DOWN)

    def open(self, lifeline: Lifeline, peer: Peer) -> Session:
        """Admit a client that has connected to the lifeline. Raises KvoffdError when it may not come in."""
        self.check_not_stopping()
        reserved = self._takes_reserve(peer)
        self._last_id += 1
        token, log = self._random_bytes(TOKEN_BYTES), CompletionLog(self.epoch, self._last_id, self._cache.memory)
        session = Session(self._last_id, token, peer, lifeline, self._runner.clock(), log)
        session.reserved = reserved
        self.by_route[session.route] = session
        self._count(session, 1)
        return session

    def _takes_reserve(self, peer: Peer) -> bool:
        """Whether the only place left for a newcomer is one of those for administrators. Raises KvoffdError."""
        limit = self._config.max_sessions
        of_process = max(MIN_SESSIONS, limit // PROCESS_PART)
        if peer.process and self._of_process[peer.process] >= of_process:
            raise KvoffdError(
                f"The process has {of_process} sessions, as many as one may; close some, or raise max_sessions.",
                ErrorCode.TOO_MANY,
            )
        privileged = peer.uid in {0, os.geteuid(), *self._config.admin_uids}
        of_user = limit if privileged else max(MIN_SESSIONS, limit * 3 // 4)
        if self._taken < limit and self._of_user[peer.uid] < of_user:
            return False
        if privileged and self._reserved < RESERVED_SESSIONS:
            return True
        raise KvoffdError(
            f"All {limit} sessions are taken, or the {of_user} that one user may have; raise max_sessions.",
            ErrorCode.TOO_MANY,
        )

    def _count(self, session: Session, change: int) -> None:
        if session.reserved:
            self._reserved += change
        else:
            self._taken += change
        for counts, key in ((self._of_user, session.peer.uid), (self._of_process, session.peer.process)):
            counts[key] += change
            if not counts[key]:
                del counts[key]

    def attach(self, session: Session, segment_id: int, fd: int) -> None:
        """Keep a descriptor for a Register to come. Owns ``fd`` on success only. Raises KvoffdError."""
        if session.ended:
            raise KvoffdError.of(ErrorCode.SESSION_ENDED)
        if segment_id in session.segments:
            raise KvoffdError(f"Segment {segment_id} is attached already; use a new id.", ErrorCode.MALFORMED)
        if len(session.segments) >= self._config.limits.max_segments:
            raise KvoffdError(f"The session holds {len(session.segments)} segments, its limit.", ErrorCode.TOO_MANY)
        free = self._max_attached - sum(other.descriptors for other in self)
        # Nobody may take more than what is left then, so that however many sessions hoard, the next one has room.
        if free <= 0 or len(session.segments) >= max(free, ALWAYS_ATTACHABLE):
            raise KvoffdError(
                f"Too few descriptors are left: the session has {len(session.segments)}, {free} are free for all. "
                "Register them, or raise the daemon's limit of open files.",
                ErrorCode.TOO_MANY,
            )
        session.segments[segment_id] = fd

    def credit_of(self, session: Session) -> int:
        """Bytes of stores ``session`` may have outstanding: its share of what all writers together may."""
        if session.role is Role.ADMIN:
            return 0
        writers = sum(1 for other in self if other.registrations)
        return self.credit_bytes // max(1, writers)

    def end(self, session: Session, on_drained: Callable[[], None], why: Ending = Ending.GONE) -> None:
        """The lifeline has ended: drop what the session held, stop its copies, unmap its memory.

        ``on_drained`` is called once the last of its copies has ended.
        """
        if session.ended:
            return
        del self.by_route[session.route]
        if why in (Ending.CLOSED, Ending.GONE):
            self._departed[session.route] = None
            if len(self._departed) > MAX_DEPARTED:
                self._departed.popitem(last=False)
        self._count(session, -1)
        self._cache.end_owner(session.id)
        session.end(on_drained)
        session.completions.end()
        self._runner.abandon(list(session.jobs.values()))
        charged_bytes = sum(one.charged_bytes for one in session.registrations.values())
        self._cache.memory.take(session.id, -charged_bytes)
        session.close_memory()
        if session.role is not None:
            level = logging.DEBUG if session.role is Role.ADMIN else logging.INFO
            logger.log(level, "Session %d (%s %s) ended: %s.", session.id, session.role, session.name, why)
        of_engine = session.role is not None and session.role is not Role.ADMIN
        if of_engine or (session.role is None and why not in (Ending.CLOSED, Ending.GONE, Ending.STOPPING)):
            self.ended[why.value] += 1
