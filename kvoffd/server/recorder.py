"""What engines ask for, kept for an administrator who fetches it: ``kvoffd-cli record`` writes it to a file."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.policies import Chain
from kvoffd.errors import KvoffdError
from kvoffd.server.sessions import Session
from kvoffd_proto import admin as a
from kvoffd_proto.errors import ErrorCode

MAX_KEPT_BYTES = 8 << 20
"""What waits to be fetched; what comes then is dropped and counted."""
CHAIN_BYTES = 400
"""What a chain takes beside its keys."""
FETCHED_BYTES = 1 << 20
MAX_NAMESPACES = 4096
UNFETCHED_TIMEOUT_S = 30.0
"""A recording that nobody has fetched for so long is over."""


class Recorder:
    """The recording, if there is one. Costs requests nothing while there is none."""

    def __init__(self, cache: BlockCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._numbers = itertools.count(1)
        self._number = 0
        """0 where nothing is recorded."""
        self._session: Session | None = None
        self._began_at = self._fetched_at = 0.0
        self._kept: deque[a.RecordedChain] = deque()
        self._kept_bytes = self._dropped = 0
        self._namespaces: dict[bytes, int] = {}

    def fetch(self, session: Session, number: int, end: bool = False) -> tuple[int, list[a.RecordedChain], int]:
        """The recording's number, what it has, and how many chains were dropped behind that. Begins one for 0.

        ``end``: it is over then, and what is left counts as dropped.
        Raises KvoffdError: BAD_ARGUMENT, another session records, or the recording is over.
        """
        self._end_if_left()
        if number == 0:
            self._begin(session)
        elif number != self._number or session is not self._session:
            raise KvoffdError(
                f"The recording is over: it was ended, or not fetched for {UNFETCHED_TIMEOUT_S:.0f} s; begin anew.",
                ErrorCode.BAD_ARGUMENT,
            )
        self._fetched_at = self._clock()
        chains: list[a.RecordedChain] = []
        nbytes = 0
        while self._kept and nbytes < FETCHED_BYTES:
            chain = self._kept.popleft()
            nbytes += CHAIN_BYTES + len(chain.keys)
            chains.append(chain)
        self._kept_bytes -= nbytes
        number, dropped = self._number, 0
        if end:
            dropped = len(self._kept) + self._dropped
            self.end()
        elif not self._kept:
            dropped, self._dropped = self._dropped, 0
        return number, chains, dropped

    def end(self) -> None:
        """Record no more, and forget what was not fetched. Repeatable."""
        if self._number:
            self._number, self._session = 0, None
            self._kept.clear()
            self._namespaces.clear()
            self._cache.watchers.remove(self._note)

    def _begin(self, session: Session) -> None:
        if self._session is not None:
            raise KvoffdError(
                f"Session {self._session.id} ({self._session.peer}) records already; wait until it has ended.",
                ErrorCode.BAD_ARGUMENT,
            )
        self._number, self._session = next(self._numbers), session
        self._began_at = self._clock()
        self._kept_bytes = self._dropped = 0
        self._cache.watchers.append(self._note)

    def _end_if_left(self) -> None:
        if self._session is not None and (
            self._session.ended or self._clock() - self._fetched_at >= UNFETCHED_TIMEOUT_S
        ):
            self.end()

    def _note(self, chains: Sequence[Chain]) -> None:
        self._end_if_left()
        if not self._number:
            return
        for namespace, group, keys, _ in chains:
            if not keys:
                continue
            nbytes = CHAIN_BYTES + len(keys)
            known = self._namespaces
            full = namespace.fingerprint not in known and len(known) >= MAX_NAMESPACES
            # Once some were dropped all are, so that the gap is in one place.
            if self._dropped or full or self._kept_bytes + nbytes > MAX_KEPT_BYTES:
                self._dropped += 1
                continue
            self._kept_bytes += nbytes
            self._kept.append(
                a.RecordedChain(
                    round((self._clock() - self._began_at) * 1000),
                    known.setdefault(namespace.fingerprint, len(known)),
                    group,
                    namespace.groups[group].tokens_per_block,
                    namespace.block_bytes(group),
                    namespace.key_bytes,
                    keys,
                )
            )
