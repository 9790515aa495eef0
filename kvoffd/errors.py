"""Errors of the daemon: one exception with a wire code and a sentence."""

from __future__ import annotations

import logging

from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)


class KvoffdError(Exception):
    """A refused request. The client receives ``code`` and the message, which says what to do."""

    code: ErrorCode = ErrorCode.INTERNAL

    def __init__(self, message: str, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code

    @classmethod
    def of(cls, code: ErrorCode) -> KvoffdError:
        """Return an error with the code's own sentence."""
        return KvoffdError(code.sentence, code)


def refusal_of(error: Exception) -> KvoffdError:
    """Return the error for a client. Internal failures are logged."""
    if isinstance(error, KvoffdError):
        return error
    logger.error("A request failed inside the daemon.", exc_info=error)
    return KvoffdError.of(ErrorCode.INTERNAL)


class BadGeometry(KvoffdError):
    """Tensors, groups or shards do not fit each other, the namespace or the pool."""

    code = ErrorCode.BAD_GEOMETRY


class OutOfBounds(KvoffdError):
    """A tensor exceeds its segment."""

    code = ErrorCode.OUT_OF_BOUNDS


class BadBlockIds(KvoffdError):
    """Block ids are outside the tensors, or too many or too few for the keys."""

    code = ErrorCode.BAD_BLOCK_IDS


class BadKeys(KvoffdError):
    """Keys have a wrong length, or are repeated."""

    code = ErrorCode.BAD_KEYS


class UnsafeSegment(KvoffdError):
    """The daemon must not map the memory, for example because it could shrink."""

    code = ErrorCode.UNSAFE_SEGMENT


class PoolTooLarge(KvoffdError):
    """The pool does not fit the machine or its cgroup."""

    code = ErrorCode.NO_SPACE


class UnknownLease(KvoffdError):
    """The lease is unknown, has ended or belongs to another session or namespace."""

    code = ErrorCode.UNKNOWN_LEASE


class NotReady(KvoffdError):
    """Keys of a load are not READY, or were stored without the engine blocks it begins with."""

    code = ErrorCode.NOT_READY

    def __init__(self, group: int, missing: list[int]) -> None:
        super().__init__(
            f"{len(missing)} keys of group {group} are not in the pool, or not from the engine block with which the "
            "load begins; recompute them."
        )
        self.group = group
        self.missing = missing
        """Indices of these keys in the request, ascending."""


class NoMoreThreads(KvoffdError):
    """The kernel refuses another thread."""

    def __init__(self) -> None:
        super().__init__(
            "The daemon cannot start a thread; other processes may use up the limit: see pids.max of its cgroups, "
            "podPidsLimit of Kubernetes, ulimit -u, and its memory limit."
        )
