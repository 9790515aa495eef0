"""The share of the loop's time that questions of operators may take."""

from __future__ import annotations

from collections.abc import Callable

from kvoffd.errors import KvoffdError
from kvoffd.server.handlers import OPERATOR_WAIT_S, Answer, Pending
from kvoffd.server.session import Session
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

LOOP_SHARE = 0.25
"""Share of the loop's time. With many namespaces, sessions or prompts one answer takes milliseconds, in which no lookup
is answered."""
LOOP_BURST_S = 0.5
"""Time that answers may take beyond that after operators have asked seldom."""


class LoopShare:
    """Answers at once until the share is used up. Then sessions take turns, one request each, in the order of asking:
    who asks all the time delays neither lookups nor another operator."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left_s, self._left_at = LOOP_BURST_S, clock()
        """Seconds that answers could take at the time ``_left_at``; below 0 the next one waits."""
        self._line: dict[Session, int] = {}
        """Sessions in the order of their turns, each with the number of its requests that wait: 0 if the last one was
        refused, until its turn comes."""

    def ask(self, session: Session, answer: Callable[[], Answer]) -> Pending:
        """Return the reply that ``answer`` makes when it is the session's turn. By its deadline it is refused with
        TOO_MANY."""
        self._line[session] = self._line.get(session, 0) + 1

        def poll(late: bool) -> m.AnyReply | None:
            is_its_turn = self._next() is session
            if not (is_its_turn or late):
                return None
            if not is_its_turn:
                self._line[session] -= 1  # it keeps its place: else those that had their turn would always be first
                why = "Operators ask too much for an answer to this by its deadline; ask again."
                raise KvoffdError(why, ErrorCode.TOO_MANY)
            if left := self._line.pop(session) - 1:
                self._line[session] = left  # behind the others
            reply = answer()
            assert not isinstance(reply, Pending), "a question is answered at once"
            return reply

        return Pending(poll, self._clock() + OPERATOR_WAIT_S, charge=self._charge)

    def _next(self) -> Session | None:
        """Return the session whose turn it is; None if the share is used up."""
        now = self._clock()
        self._left_s = min(LOOP_BURST_S, self._left_s + LOOP_SHARE * (now - self._left_at))
        self._left_at = now
        if self._left_s < 0:
            return None
        while (first := next(iter(self._line))).ended or not self._line[first]:  # it has nothing to ask any more
            del self._line[first]
        return first

    def _charge(self, seconds: float) -> None:
        # No lower, so that a stop of the process, which looks like a long answer, costs nobody its time.
        self._left_s = max(-LOOP_BURST_S, self._left_s - seconds)
