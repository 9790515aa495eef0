"""What can go wrong in the daemon: one exception with a code of the wire and a sentence."""

from __future__ import annotations

import logging

from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)


class KvoffdError(Exception):
    """A refusal. ``code`` travels to the client, the message says what to do."""

    code: ErrorCode = ErrorCode.INTERNAL

    def __init__(self, message: str, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code

    @classmethod
    def of(cls, code: ErrorCode) -> KvoffdError:
        """A refusal that the code's own sentence explains."""
        return KvoffdError(code.sentence, code)


def refusal_of(error: Exception) -> KvoffdError:
    """The text that a client gets for an error. A failure of the daemon's own goes to the log."""
    if isinstance(error, KvoffdError):
        return error
    logger.error("A request failed inside the daemon.", exc_info=error)
    return KvoffdError.of(ErrorCode.INTERNAL)


class BadGeometry(KvoffdError):
    """Tensors, groups or shards that do not fit each other, the namespace or the pool."""

    code = ErrorCode.BAD_GEOMETRY


class ShardTooLarge(BadGeometry):
    """A shard is larger than the pool can hold in one piece."""


class OutOfBounds(KvoffdError):
    """A tensor reaches outside its segment."""

    code = ErrorCode.OUT_OF_BOUNDS


class BadBlockIds(KvoffdError):
    """Block ids outside the tensors, or too many or too few for the keys."""

    code = ErrorCode.BAD_BLOCK_IDS


class BadKeys(KvoffdError):
    """Keys of a wrong length, or one key twice."""

    code = ErrorCode.BAD_KEYS


class UnsafeSegment(KvoffdError):
    """Memory the daemon must not map: it could shrink under it."""

    code = ErrorCode.UNSAFE_SEGMENT


class PoolTooLarge(KvoffdError):
    """More memory was asked for than the machine or the cgroup can give."""

    code = ErrorCode.NO_SPACE


class UnknownNamespace(KvoffdError):
    """No namespace with this fingerprint is open."""

    code = ErrorCode.UNKNOWN_NAMESPACE


class NamespaceMismatch(KvoffdError):
    """The namespace is open with another geometry."""

    code = ErrorCode.NAMESPACE_MISMATCH


class UnknownLease(KvoffdError):
    """The lease is unknown, has ended or belongs elsewhere."""

    code = ErrorCode.UNKNOWN_LEASE


class NotReady(KvoffdError):
    """Keys of a load are not under its lease, or are not written from where it begins."""

    code = ErrorCode.NOT_READY

    def __init__(self, group: int, missing: list[int]) -> None:
        super().__init__(
            f"{len(missing)} keys of group {group} can not be loaded under this lease, or not from their first engine "
            "block on; recompute them."
        )
        self.group = group
        self.missing = missing
        """Indices of those keys in the request, ascending."""


class NoMoreThreads(KvoffdError):
    """The kernel gives this process no more threads."""

    def __init__(self) -> None:
        super().__init__(
            "The daemon gets no more threads, of which processes beside it may have too many: see pids.max of its "
            "cgroups, pod_pids_limit of Kubernetes, ulimit -u and the memory that it may have."
        )
