"""The share of the loop's time that questions of operators may take."""

from __future__ import annotations

from collections import deque
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
    """Questions that wait for their turn, which comes at once until the share is used up. Then sessions take turns, one
    question each, in the order of asking: who asks all the time delays neither lookups nor another operator."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left_s, self._left_at = LOOP_BURST_S, clock()
        """Seconds that answers could take at the time ``_left_at``; below 0 the next one waits."""
        self.lines: dict[Session, deque[Pending]] = {}
        """Each session's questions, oldest first; sessions in the order of their turns. One without questions had its
        last one refused, and keeps its place: else those that had their turn would always be first."""

    def __len__(self) -> int:
        """Return the number of questions that wait."""
        return sum(map(len, self.lines.values()))

    def ask(self, session: Session, request_id: int, answer: Callable[[], Answer]) -> None:
        """Add a question; ``answer`` makes its reply."""

        def poll(late: bool) -> m.AnyReply | None:
            reply = answer()
            assert not isinstance(reply, Pending), "a question is answered at once"
            return reply

        question = Pending(poll, self._clock() + OPERATOR_WAIT_S, self._charge)
        question.request_id, question.session = request_id, session
        self.lines.setdefault(session, deque()).append(question)

    def take(self) -> Pending | None:
        """Remove and return a question to be answered now: the next in turn, or one that its deadline has refused.

        It does not look at the others, of which there may be thousands.
        """
        now = self._clock()
        self._left_s = min(LOOP_BURST_S, self._left_s + LOOP_SHARE * (now - self._left_at))
        self._left_at = now
        while self.lines:
            session, line = next(iter(self.lines.items()))
            if self._left_s < 0 and not session.ended:
                break
            del self.lines[session]
            if line and not session.ended:
                question = line.popleft()
                if line:
                    self.lines[session] = line  # behind the other sessions
                return question
        for line in self.lines.values():
            if line and line[0].until <= now:
                refused = line.popleft()
                why = "Operators ask too much for an answer to this by its deadline; ask again."
                refused.resolve(KvoffdError(why, ErrorCode.TOO_MANY))
                return refused
        return None

    def _charge(self, seconds: float) -> None:
        # No lower, so that a stop of the process, which looks like a long answer, costs nobody its time.
        self._left_s = max(-LOOP_BURST_S, self._left_s - seconds)
