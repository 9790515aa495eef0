"""Records the keys of lookups and hints for an administrator: ``kvoffd-cli trace record`` writes them to a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.policy import Chain
from kvoffd.errors import KvoffdError
from kvoffd.server.handlers import answers
from kvoffd.server.session import Session
from kvoffd_proto import admin as a
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import Hint, HintAction

MAX_KEPT_BYTES = 8 << 20
"""Limit of unfetched chains; more are dropped and counted."""
FETCHED_BYTES = 1 << 20


class RecordedHint(NamedTuple):
    """The last fields of a ``TraceChain``."""

    action: HintAction | None
    priority: int
    ttl_s: float


NO_HINT = RecordedHint(None, 0, 0.0)
"""Values of a lookup, which is no hint."""


class Tracer:
    """Records a trace for one session, until the session ends. Costs nothing without one."""

    def __init__(self, cache: Cache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._session: Session | None = None
        self._began_at = 0.0
        self._kept: deque[a.TraceChain] = deque()
        self._kept_bytes = self._dropped = 0

    @answers(a.Trace)
    def trace(self, session: Session, message: a.Trace) -> a.TraceReply:
        return a.TraceReply(message.request_id, *self.fetch(session))

    def fetch(self, session: Session) -> tuple[list[a.TraceChain], int]:
        """Return the chains since the last call, and the number of those dropped after them.

        The first call starts the trace. Raises KvoffdError if another session records one.
        """
        if session is not self._session:
            if self._session is not None and not self._session.ended:
                why = f"Session {self._session.id} ({self._session.process}) records a trace; wait until it has ended."
                raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
            self._end()
            self._session, self._began_at = session, self._clock()
            self._cache.prompts.watchers.append(self._record)
        chains: list[a.TraceChain] = []
        nbytes = dropped = 0
        while self._kept and nbytes < FETCHED_BYTES:
            chain = self._kept.popleft()
            nbytes += a.CHAIN_BYTES + len(chain.keys)
            chains.append(chain)
        self._kept_bytes -= nbytes
        if not self._kept:
            dropped, self._dropped = self._dropped, 0
        return chains, dropped

    def _end(self) -> None:
        if self._session is not None:
            self._session = None
            self._kept.clear()
            self._kept_bytes = self._dropped = 0
            self._cache.prompts.watchers.remove(self._record)

    def record_hint(self, namespace: Namespace, hint: Hint) -> None:
        """Record a hint, after the lookups before it: ``Service.handle`` has reported those."""
        if self._session is not None:
            chains = [(namespace.group(part.group), part.keys) for part in hint.groups]
            self._keep(chains, RecordedHint(hint.action, hint.priority, hint.ttl_s))

    def _record(self, chains: Sequence[Chain]) -> None:
        self._keep([(group, keys) for group, keys, *_ in chains], NO_HINT)

    def _keep(self, chains: Sequence[tuple[Group, bytes]], hint: RecordedHint) -> None:
        if self._session is None or self._session.ended:
            self._end()
            return
        for group, keys in chains:
            namespace = group.namespace
            nbytes = a.CHAIN_BYTES + len(keys)
            # After the first dropped chain all are dropped, so that there is one gap.
            if not keys or self._dropped or self._kept_bytes + nbytes > MAX_KEPT_BYTES:
                self._dropped += bool(keys)
                continue
            self._kept_bytes += nbytes
            self._kept.append(
                a.TraceChain(
                    round((self._clock() - self._began_at) * 1000),
                    namespace.fingerprint,
                    group.index,
                    group.tokens,
                    group.block_bytes,
                    namespace.key_bytes,
                    keys,
                    *hint,
                )
            )
